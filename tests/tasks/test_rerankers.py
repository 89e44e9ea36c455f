"""Rerankers, and the examples of docs/embeddings.md with sentence-transformers."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    NO_DROPOUT,
    ROOT,
    TINY,
    VOCAB_FILE,
    assert_refused,
    read_json,
    read_json_lines,
    write_json_lines,
)
from sklearn.metrics import ndcg_score
from small_runs import run_here

import inference
import run_embeddings
import run_glue
from bert_recipe.tasks.embeddings.retrieval import ranking_scores

PROGRAMS = {"run_glue.py": run_glue.main, "run_embeddings.py": run_embeddings.main}
NAMES = ("sea", "ship", "whale", "captain", "river", "bank", "money", "clerk", "garden", "rose")
PASSAGES = [f"the {first} and the {last}" for first in NAMES for last in NAMES if first != last]


def write_csv(path: Path, names: str, rows: list[str]) -> None:
    path.write_text("\n".join([names, *rows]) + "\n")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working folder, with the models and tables of the page."""
    # Not above: the seconds of these imports are for this file only.
    import datasets
    from transformers import BertConfig, BertForPreTraining

    torch.manual_seed(0)
    config = BertConfig(
        **TINY | NO_DROPOUT | {"initializer_range": 0.3, "max_position_embeddings": 128}
    )
    for name in ("all-MiniLM-L6-v2", "bert-base-uncased"):
        BertForPreTraining(config).save_pretrained(tmp_path / name)
        (tmp_path / name / "vocab.txt").write_bytes(VOCAB_FILE.read_bytes())
    pairs = [f"{number} {text.split()[1]},{text}" for number, text in enumerate(PASSAGES)]
    write_csv(tmp_path / "pairs.csv", "question,answer", pairs[:40])
    write_csv(tmp_path / "dev.csv", "question,answer", pairs[40:60])
    write_csv(tmp_path / "passages.csv", "passage", PASSAGES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def examples_of_the_page() -> list[tuple[str, str]]:
    """Language and text of the examples, but for the first one, which takes a minute."""
    text = (ROOT / "docs" / "embeddings.md").read_text(encoding="utf-8")
    return re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[1:]


def run_example(language: str, code: str) -> None:
    if language == "python":
        exec(compile(code, "page.py", "exec"), {})  # noqa: S102 # the page's
        return
    python, program, *words = shlex.split(code.replace("\\\n", " "))
    assert python == "python3"
    assert PROGRAMS[program](words) == 0


def test_the_examples_of_the_page_run_as_they_stand(folder, capsys):
    from sentence_transformers import CrossEncoder

    examples = examples_of_the_page()
    assert [language for language, _ in examples].count("python") == 4
    for language, code in examples:
        run_example(language, code)
    answers = {row["question"]: row["answer"] for row in read_json_lines(folder / "mined.jsonl")}
    assert answers
    for row in read_json_lines(folder / "mined.jsonl"):
        texts = [row["answer"], *(row[f"negative_{number}"] for number in (1, 2, 3, 4))]
        assert len(set(texts)) == 5 and set(texts) <= set(PASSAGES)
    # The scores are those of the reranker.
    reranker = CrossEncoder("results/bert-base-uncased/reranker/best", device="cpu")
    rows = read_json_lines(folder / "scored.jsonl")
    assert rows
    for text, score in (("answer", "score"), ("negative_1", "score_1"), ("negative_2", "score_2")):
        expected = reranker.predict([(row["question"], row[text]) for row in rows])
        np.testing.assert_allclose([row[score] for row in rows], expected, atol=1e-5)
    assert all(row["score"] >= row["score_1"] for row in rows)


def write_triplets(folder: Path) -> list[dict[str, str]]:
    rows = [
        {
            "q": f"{word} {number}",
            "p": f"a {word}",
            "n": PASSAGES[-number],
            "m": PASSAGES[-7 * number],
        }
        for number, word in enumerate(NAMES, 1)
    ]
    write_json_lines(folder / "triplets.jsonl", rows)
    return rows


FLAGS = "--text-column q --pair-column p --negative-columns n m --device cpu"
TRAIN = f"--do-train --train-file triplets.jsonl --init-checkpoint bert-base-uncased {FLAGS}"


def run_glue_in(folder: Path, words: str) -> Path:
    assert run_glue.main([*words.split(), "--output-dir", str(folder / "results")]) == 0
    return folder / "results" / "bert-base-uncased" / "reranker"


def test_a_reranker_is_a_cross_encoder_with_one_output(folder):
    """Scores of both, the average precision of a run that holds out questions, and a file."""
    from sentence_transformers import CrossEncoder
    from sklearn.metrics import average_precision_score

    rows = write_triplets(folder)
    results = run_glue_in(
        folder,
        f"{TRAIN} --epochs 9 --max-steps 4 --learning-rate 0.01 --do-eval --eval-fraction 0.3",
    )
    config = read_json(results / "4" / "config.json")
    # text-embeddings-inference takes a model of one label as a reranker.
    assert (config["id2label"], config["label2id"]) == ({"0": "score"}, {"score": 0})
    peer = CrossEncoder(str(results / "4"), device="cpu")
    texts = [row[name] for row in rows for name in "pnm"]
    ranked = peer.rank(rows[0]["q"], texts)
    assert [result["score"] for result in ranked] == sorted(
        (result["score"] for result in ranked), reverse=True
    )

    queries = [row["q"] for row in rows for _ in "pnm"]
    expected = peer.predict(list(zip(queries, texts, strict=True)))
    table = [{"q": query, "p": text} for query, text in zip(queries, texts, strict=True)]
    write_json_lines(folder / "in.jsonl", table)
    words = f"--init-checkpoint {results / '4'} --input in.jsonl --output out.jsonl --device cpu"
    assert inference.main([*words.split(), "--text-column", "q", "--pair-column", "p"]) == 0
    scores = [row["score"] for row in read_json_lines(folder / "out.jsonl")]
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert np.ptp(scores) > 0.01 and min(scores) < 0  # logits

    held_out = read_json_lines(results / "eval_predictions.jsonl")
    asked = [row["text"] for row in held_out]
    assert all(asked.count(query) == 3 for query in asked) and 2 <= len({*asked}) <= 5
    precision = average_precision_score(
        [int(row["label"]) for row in held_out], [float(row["prediction"]) for row in held_out]
    )
    stored = read_json(results / "scores.json")
    assert stored["average_precision"] == pytest.approx(precision)


def test_the_loss_of_a_reranker_is_binary_cross_entropy(folder):
    """The first one that a run logs, against transformers' logits."""
    from transformers import BertForSequenceClassification, BertTokenizerFast

    rows = write_triplets(folder)
    words = f"{TRAIN} --epochs 1 --train-batch-size 30 --learning-rate 1e-9 --log-freq 1"
    results = run_glue_in(folder, words)
    model = BertForSequenceClassification.from_pretrained(results / "1").eval()
    tokenizer = BertTokenizerFast(str(VOCAB_FILE))
    queries = [row["q"] for row in rows for _ in "pnm"]
    texts = [row[name] for row in rows for name in "pnm"]
    batch = tokenizer(queries, texts, return_tensors="pt", padding=True)
    with torch.inference_mode():
        logits_N = model(**batch).logits[:, 0]
    expected = F.binary_cross_entropy_with_logits(logits_N, torch.tensor([1.0, 0, 0] * len(rows)))
    card = (results / "1" / "README.md").read_text()
    loss = float(re.search(r"training loss \| ([0-9.]+)", card)[1])
    assert loss == pytest.approx(float(expected), rel=1e-3)


def test_a_reranker_of_two_classes_is_to_be_trained_again(folder):
    """Rerankers had two classes: run_glue.py says what to do, and inference.py reads them."""
    from transformers import BertConfig, BertForSequenceClassification

    write_triplets(folder)
    config = BertConfig(**TINY | {"max_position_embeddings": 128, "id2label": {0: "0", 1: "1"}})
    BertForSequenceClassification(config).save_pretrained(folder / "old")
    (folder / "old" / "vocab.txt").write_bytes(VOCAB_FILE.read_bytes())
    words = f"--do-eval --eval-file triplets.jsonl --init-checkpoint old {FLAGS}".split()
    done = run_here([*words, "--output-dir", "results"], run_glue.main)
    assert_refused(done, "a reranker has one number: train it again with --negative-columns")
    words = ["--init-checkpoint", "old", "--text", "a", "--text-pair", "b", "--device", "cpu"]
    assert inference.main(words) == 0


def test_scores_of_a_ranking_are_those_of_their_formulas():
    rng = np.random.default_rng(0)
    for num_relevant in [1, 3, 12] * 20:  # the first text is relevant in some
        ranked = rng.permutation(30).tolist()
        relevant = set(rng.choice(30, num_relevant, replace=False).tolist())
        hits = [int(text in relevant) for text in ranked]
        scores = ranking_scores(ranked, relevant)
        places = [place for place, hit in enumerate(hits[:10], 1) if hit]
        assert scores["mrr@10"] == (1 / places[0] if places else 0)
        assert scores["recall@1"] == hits[0] / num_relevant
        assert scores["recall@10"] == len(places) / num_relevant
        gain = ndcg_score([hits], [[-place for place in range(30)]], k=10)
        assert scores["ndcg@10"] == pytest.approx(gain, abs=1e-12)
