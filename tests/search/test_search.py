"""Search, hard negatives, reranking and scores of benchmarks, against loops over the vectors and
logits of transformers.
"""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import NO_DROPOUT, TINY, VOCAB_FILE, fine_tuning_words
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizerFast

import inference
import run_glue
from search import vectors
from search.corpus import Corpus
from search.engine import SearchEngine
from search.vectors import TextEmbedder
from tasks.retrieval import NearestRows
from utils.errors import UserError

TEXTS = [
    "the sea was calm and the ship went on",
    "a whale came near the ship",
    "the bank lent money to the clerk",
    "money is in the bank",
    "roses grow in the garden",
    "rain and wind in the garden",
    "the captain looked at the star",
    "a whale came near the ship",  # twice
]
QUERIES = ["where was the whale", "who has the money", "what grows in the garden"]
ANSWERS = [1, 2, 4]


def save_model(model_class, folder: Path, **config) -> Path:
    torch.manual_seed(0)
    values = {**TINY, **NO_DROPOUT, "initializer_range": 0.3, **config}
    model_class(BertConfig(**values)).save_pretrained(folder)
    (folder / "vocab.txt").write_bytes(VOCAB_FILE.read_bytes())
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(BertModel, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cosines(model) -> np.ndarray:
    """Of queries and texts, from transformers' hidden states."""

    def embedded(texts: list[str]) -> np.ndarray:
        tokenizer = BertTokenizerFast(str(VOCAB_FILE))
        encoder = BertModel.from_pretrained(model)
        means = []
        for text in texts:
            with torch.inference_mode():
                states = encoder(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            means.append(states.mean(dim=0).numpy())
        return np.array([mean / np.linalg.norm(mean) for mean in means])

    return embedded(QUERIES) @ embedded(TEXTS).T


@pytest.fixture
def files(tmp_path) -> Path:
    write_rows(tmp_path / "corpus.csv", ["passage"], [[text] for text in TEXTS])
    pairs = [[query, TEXTS[row]] for query, row in zip(QUERIES, ANSWERS, strict=True)]
    write_rows(tmp_path / "pairs.csv", ["question", "answer"], pairs)
    return tmp_path


def write_rows(path: Path, names: list[str], rows: list[list]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *rows])


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(model: Path, *flags) -> None:
    words = ["--init-checkpoint", model, "--device", "cpu", *flags]
    assert inference.main([str(word) for word in words]) == 0


def search_flags(files: Path) -> list:
    return ["--search", files / "corpus.csv", "--text-column", "passage"]


def query_flags(files: Path, output: str = "found.jsonl") -> list:
    queries = ["--queries", files / "pairs.csv", "--query-column", "question"]
    return [*search_flags(files), *queries, "--output", files / output]


def test_queries_of_a_file_find_the_nearest_texts_in_order(model, files, cosines, monkeypatch):
    """In parts of three texts; of equal texts, the first one comes first."""
    monkeypatch.setattr(vectors, "ROWS_PER_PART", 3)
    run(model, *query_flags(files), "--n-best-size", "4")
    found = read_rows(files / "found.jsonl")
    expected = np.argsort(-cosines.round(6), axis=1, kind="stable")[:, :4]
    assert [row["row"] for row in found] == expected.ravel().tolist()
    assert [row["rank"] for row in found] == [1, 2, 3, 4] * len(QUERIES)
    assert [row["text"] for row in found] == [TEXTS[row] for row in expected.ravel()]
    assert [row["question"] for row in found[::4]] == QUERIES
    scores = np.take_along_axis(cosines, expected, 1).ravel()
    np.testing.assert_allclose([row["score"] for row in found], scores, atol=1e-5)


def test_what_is_found_has_the_other_columns_of_its_row(model, files):
    rows = [[number, text, "faq"] for number, text in enumerate(TEXTS)]
    write_rows(files / "corpus.csv", ["_id", "passage", "question"], rows)
    run(model, *query_flags(files, "new/folder/found.jsonl"))
    for row in read_rows(files / "new" / "folder" / "found.jsonl"):
        assert (row["_id"], row["corpus question"]) == (str(row["row"]), "faq")
        assert row["question"] in QUERIES


def test_tables_of_other_programs_are_searched(model, files):
    run(model, *query_flags(files))
    expected = [(row["question"], row["text"]) for row in read_rows(files / "found.jsonl")]
    for name in ("corpus.csv", "pairs.csv"):
        text = (files / name).read_text().replace(",", ";").replace("where", "wh\xe9re")
        (files / name).write_bytes(text.encode("cp1252"))
    run(model, *query_flags(files, "again.jsonl"), "--delimiter", ";", "--encoding", "cp1252")
    found = [(row["question"], row["text"]) for row in read_rows(files / "again.jsonl")]
    assert found[5:] == expected[5:] and found[0][0] == "wh\xe9re was the whale"
    run(model, *query_flags(files, "again.csv"), "--delimiter", ";", "--encoding", "cp1252")
    assert (files / "again.csv").read_text().startswith("\ufeffquestion;answer;rank;")


def test_negatives_keep_the_delimiter_of_the_pairs_and_the_command_names_it(model, files, capsys):
    for name in ("corpus.csv", "pairs.csv"):
        text = (files / name).read_text().replace(",", "|")
        (files / name).write_text(text)
    mine = ["--mine-negatives", files / "pairs.csv", "--query-column", "question"]
    mine += ["--pair-column", "answer", "--num-negatives", "2", "--output", files / "mined.csv"]
    run(model, *search_flags(files), *mine, "--negative-margin", 0, "--delimiter", "|")
    header = "question|answer|negative_1|negative_2\n"
    assert (files / "mined.csv").read_text().startswith(header)
    assert "--delimiter '|'" in capsys.readouterr().out


def test_vectors_are_kept_and_belong_to_a_model_and_its_texts(model, files, monkeypatch, capsys):
    run(model, *query_flags(files))
    before = (files / "found.jsonl").read_bytes()
    (folder,) = files.glob("corpus.csv.vectors-*")
    embedded = []
    write = vectors.write_vectors
    monkeypatch.setattr(vectors, "write_vectors", lambda *a: embedded.append(a) or write(*a))
    run(model, *query_flags(files))
    assert not embedded and (files / "found.jsonl").read_bytes() == before
    assert str(folder) in capsys.readouterr().out

    (damaged,) = folder.glob("*.npy")
    damaged.write_bytes(damaged.read_bytes()[:-4])
    run(model, *query_flags(files))
    assert len(embedded) == 1 and (files / "found.jsonl").read_bytes() == before

    write_rows(files / "corpus.csv", ["passage"], [[text] for text in TEXTS[1:]])
    run(model, *query_flags(files))
    assert len(embedded) == 2 and len([*files.glob("corpus.csv.vectors-*")]) == 2


def test_negatives_are_near_but_no_known_answer(model, files, cosines, capsys):
    mine = ["--mine-negatives", files / "pairs.csv", "--query-column", "question"]
    mine += ["--pair-column", "answer", "--num-negatives", "2", "--output", files / "mined.jsonl"]
    margin = 0.01
    run(model, *search_flags(files), *mine, "--negative-margin", margin)
    mined = {row["question"]: row for row in read_rows(files / "mined.jsonl")}
    for number, query in enumerate(QUERIES):
        limit = cosines[number, ANSWERS[number]] * (1 - margin)
        expected = []
        for row in np.argsort(-cosines[number], kind="stable"):
            is_new = TEXTS[row] not in [TEXTS[ANSWERS[number]], *expected]
            if is_new and cosines[number, row] <= limit and len(expected) < 2:
                expected.append(TEXTS[row])
        if len(expected) < 2:
            assert query not in mined
        else:
            assert [mined[query]["negative_1"], mined[query]["negative_2"]] == expected
            assert mined[query]["answer"] == TEXTS[ANSWERS[number]]
    assert mined  # the loop above compared something

    capsys.readouterr()
    ids = [[query, f"d{row}"] for query, row in zip(QUERIES, ANSWERS, strict=True)]
    write_rows(files / "pairs.csv", ["question", "answer"], ids)
    run(model, *search_flags(files), *mine, "--negative-margin", 0)
    assert "note: none of the answers in" in capsys.readouterr().out
    with pytest.raises(UserError, match="no pair has 9 negatives"):
        run(model, *search_flags(files), *mine[:6], "--num-negatives", "9", *mine[-2:])


@pytest.mark.parametrize(
    ("labels", "chosen"),
    [(["score"], None), (["0", "1"], None), (["answer", "other", "contradiction"], "answer")],
    ids=["regression", "classes", "named class"],
)
def test_a_cross_encoder_orders_what_the_search_found(model, files, tmp_path, labels, chosen):
    names = dict(enumerate(labels))
    reranker = save_model(
        BertForSequenceClassification, tmp_path / "reranker", id2label=names, num_labels=len(labels)
    )
    flags = ["--rerank", reranker, "--rerank-top", len(TEXTS), "--n-best-size", len(TEXTS)]
    flags += [] if chosen is None else ["--rerank-label", chosen]
    run(model, *query_flags(files), *flags)
    found = read_rows(files / "found.jsonl")
    tokenizer = BertTokenizerFast(str(VOCAB_FILE))
    classifier = BertForSequenceClassification.from_pretrained(reranker).eval()
    for number, query in enumerate(QUERIES):
        rows = found[number * len(TEXTS) : (number + 1) * len(TEXTS)]
        scores = [row["score"] for row in rows]
        assert scores == sorted(scores, reverse=True)
        for row in rows:
            with torch.inference_mode():
                logits = classifier(**tokenizer(query, row["text"], return_tensors="pt")).logits[0]
            expected = logits[0] if len(labels) == 1 else logits[1] - logits[0]
            if chosen is not None:
                expected = logits[0] - logits[1:].logsumexp(0)
            assert row["score"] == pytest.approx(float(expected), abs=1e-4)


def test_only_the_nearest_texts_are_reranked(model, files, tmp_path, cosines):
    reranker = save_model(BertForSequenceClassification, tmp_path / "reranker", num_labels=1)
    rerank = ["--rerank", reranker, "--rerank-top", 3, "--n-best-size"]
    with pytest.raises(UserError, match="--n-best-size 4 is above --rerank-top 3"):
        run(model, *query_flags(files), *rerank, 4)
    args = inference.parse_arguments(
        list(map(str, ["--init-checkpoint", model, *query_flags(files), *rerank, 3]))
    )
    predictor = inference.open_model(args)
    corpus = Corpus.read(files / "corpus.csv", "passage")
    engine = SearchEngine(TextEmbedder(predictor), corpus, inference.open_reranker(args), 3)
    rows, scores = engine.find(QUERIES, QUERIES, 6)
    order = np.argsort(-cosines.round(6), axis=1, kind="stable")[:, :6]
    assert (np.sort(rows[:, :3]) == np.sort(order[:, :3])).all() and (
        np.diff(scores[:, :3]) <= 0
    ).all()
    assert (rows[:, 3:] == order[:, 3:]).all()


@pytest.mark.parametrize("kind", ["regression", "classes", "negatives"])
def test_a_trained_reranker_is_a_cross_encoder_of_sentence_transformers(
    model, files, tmp_path, kind
):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    judged = [[query, text, int(text == query)] for query in QUERIES for text in (TEXTS[0], query)]
    names = ["question", "passage", "relevant"]
    labels = ["--label-column", "relevant", *(["--regression"] if kind == "regression" else [])]
    if kind == "negatives":
        judged = [[query, query, TEXTS[0]] for query in QUERIES]
        names[2] = "negative"
        labels = ["--negative-columns", "negative"]
    write_rows(files / "judged.csv", names, judged)
    (files / "config.json").write_text(json.dumps({**TINY, **NO_DROPOUT}))
    flags = ["--text-column", "question", "--pair-column", "passage", *labels]
    flags += ["--do-train", "--train-file", files / "judged.csv", "--max-steps", 2]
    flags += ["--max-seq-length", 32]
    words = fine_tuning_words(files / "config.json", tmp_path, *flags, "--learning-rate", 0.01)
    assert run_glue.main(words) == 0
    (folder,) = tmp_path.glob("custom/*/[0-9]*")
    run(model, *query_flags(files), "--rerank", folder, "--n-best-size", len(TEXTS))
    found = read_rows(files / "found.jsonl")
    peer = sentence_transformers.CrossEncoder(str(folder), device="cpu")
    pairs = [(row["question"], row["text"]) for row in found]
    logits = peer.predict(pairs, activation_fn=torch.nn.Identity())
    expected = logits if kind == "regression" else logits[:, 1] - logits[:, 0]
    np.testing.assert_allclose([row["score"] for row in found], expected, atol=1e-5)
    assert len(set(np.round(expected, 5))) > len(QUERIES)  # the model tells texts apart


def test_the_scores_of_a_cross_encoder_are_beside_the_negatives(model, files, tmp_path, capsys):
    """As margin MSE reads them; a column that the pairs have already gets another name."""
    reranker = save_model(BertForSequenceClassification, tmp_path / "reranker", num_labels=1)
    pairs = [[query, TEXTS[row], 5] for query, row in zip(QUERIES, ANSWERS, strict=True)]
    write_rows(files / "pairs.csv", ["question", "answer", "score"], pairs)
    mine = ["--mine-negatives", files / "pairs.csv", "--query-column", "question"]
    mine += ["--pair-column", "answer", "--num-negatives", "2", "--output", files / "mined.jsonl"]
    run(model, *search_flags(files), *mine, "--negative-margin", 0, "--rerank", reranker)
    tokenizer = BertTokenizerFast(str(VOCAB_FILE))
    classifier = BertForSequenceClassification.from_pretrained(reranker).eval()
    texts = ["answer", "negative_1", "negative_2"]
    scores = ["predicted score", "score_1", "score_2"]
    rows = read_rows(files / "mined.jsonl")
    assert rows
    for row in rows:
        for text, score in zip(texts, scores, strict=True):
            with torch.inference_mode():
                words = tokenizer(row["question"], row[text], return_tensors="pt")
                expected = classifier(**words).logits[0, 0]
            assert row[score] == pytest.approx(float(expected), abs=1e-4)
    says = "--embedding-loss margin-mse --label-column 'predicted score' score_1 score_2"
    assert says in capsys.readouterr().out


def test_the_class_of_a_reranker_that_nothing_names_is_asked_for(model, files, tmp_path):
    other = save_model(
        BertForSequenceClassification, tmp_path / "other", id2label={0: "sea", 1: "land"}
    )
    rerank = ["--rerank", other]
    for flags, says in (
        (rerank, "--rerank-label is needed for .*, which predicts sea, land"),
        ([*rerank, "--rerank-label", "lake"], "--rerank-label is no label of .* sea, land"),
    ):
        with pytest.raises(UserError, match=says):
            run(model, *query_flags(files), *flags)
    with pytest.raises(UserError, match="is no cross-encoder"):
        run(model, *query_flags(files), "--rerank", model)
    assert not (files / "found.jsonl").exists() and not [*files.glob("*.vectors-*")]


RELEVANT = [{1: 2.0, 7: 1.0}, {2: 1.0, 3: 3.0}, {4: 1.0}]


def write_beir(folder: Path) -> None:
    (folder / "qrels").mkdir()
    texts = [{"_id": f"t{row}", "title": "", "text": text} for row, text in enumerate(TEXTS)]
    queries = [{"_id": f"q{row}", "text": text} for row, text in enumerate([*QUERIES, "unjudged"])]
    for name, rows in (("corpus", texts), ("queries", queries)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
    judged = [
        f"q{query}\tt{text}\t{grade:g}\n"
        for query, grades in enumerate(RELEVANT)
        for text, grade in {**grades, 5: 0.0}.items()
    ]
    header = "query-id\tcorpus-id\tscore\n"
    (folder / "qrels" / "test.tsv").write_text(header + "".join(judged))


def write_parquet(folder: Path) -> None:
    """As MTEB and NanoBEIR publish: a folder for each table."""
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    write_beir(folder)
    columns = {"qrels": "qrels/test.tsv", "corpus": "corpus.jsonl", "queries": "queries.jsonl"}
    for name, source in columns.items():
        path = folder / source
        if path.suffix == ".tsv":
            with path.open() as file:
                rows = list(csv.DictReader(file, delimiter="\t"))
            rows = [row | {"score": int(row["score"])} for row in rows]
        else:
            rows = read_rows(path)
        path.unlink()
        (folder / name).mkdir(exist_ok=True)
        table = pyarrow.Table.from_pylist(rows)
        for part in range(2):
            rows = table.slice(part * 3, 3 if part == 0 else None)
            parquet.write_table(rows, folder / name / f"test-{part:05}-of-00002.parquet")


@pytest.mark.parametrize("write", [write_beir, write_parquet])
def test_benchmarks_are_scored_as_by_a_loop(model, tmp_path, cosines, capsys, write):
    write(tmp_path)
    run(model, "--search-benchmark", tmp_path)
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines()[-4:])
    totals = dict.fromkeys(("ndcg@10", "mrr@10", "recall@10", "recall@100"), 0.0)
    for number, grades in enumerate(RELEVANT):
        order = np.argsort(-cosines[number].round(6), kind="stable").tolist()
        ranks = {row: rank for rank, row in enumerate(order, 1)}
        ideal = sorted(grades.values(), reverse=True)
        best = sum(grade / np.log2(rank + 1) for rank, grade in enumerate(ideal, 1))
        gain = sum(grade / np.log2(ranks[row] + 1) for row, grade in grades.items())
        totals["ndcg@10"] += gain / best / 3
        totals["mrr@10"] += 1 / min(ranks[row] for row in grades) / 3
        totals["recall@10"] += 1 / 3  # eight texts
        totals["recall@100"] += 1 / 3
    assert {name: float(value) for name, value in printed.items()} == pytest.approx(
        totals, abs=1e-4
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / "corpus.jsonl").unlink(), "has no corpus: expected corpus.jsonl"),
        (
            lambda f: append(f / "qrels/test.tsv", "q0\tt99\t1\n"),
            "test.tsv:10: the text 't99' is not in",
        ),
        (lambda f: append(f / "qrels/test.tsv", "q9\tt1\t1\n"), "the query 'q9' is not in"),
        (lambda f: append(f / "qrels/test.tsv", "q0\tt1\tmuch\n"), "the score is 'much'"),
        (lambda f: append(f / "corpus.jsonl", '{"_id": "t0", "text": "x"}\n'), "has an id twice"),
    ],
)
def test_damaged_benchmarks_are_refused(model, tmp_path, change, words):
    write_beir(tmp_path)
    change(tmp_path)
    with pytest.raises(UserError, match=words):
        run(model, "--search-benchmark", tmp_path)


def append(path: Path, line: str) -> None:
    path.write_text(path.read_text() + line)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--queries", "x.csv"], "--queries has no effect without"),
        (["--rerank", "x"], "--rerank has no effect without --search or --search-benchmark"),
        (["--num-negatives", "2"], "--num-negatives has no effect without --mine-negatives"),
        (["--search-benchmark", "x", "--text", "y"], "cannot be combined"),
    ],
)
def test_flags_without_effect_are_refused(model, capsys, flags, words):
    with pytest.raises(SystemExit) as error:
        run(model, *flags)
    assert error.value.code == 2 and words in capsys.readouterr().err


@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=40),
    st.integers(1, 7),
    st.integers(1, 9),
)
def test_the_best_rows_do_not_depend_on_the_parts(scores, count, part):
    scores_nm = np.array([scores, scores[::-1]], np.float32)
    best = NearestRows(2, count)
    for first in range(0, len(scores), part):
        best.add(scores_nm[:, first : first + part])
    expected = np.argsort(-scores_nm, axis=1, kind="stable")[:, :count]
    assert (best.rows == expected).all()
    assert (best.scores == np.take_along_axis(scores_nm, expected, 1)).all()
