"""inference.py on tiny models with each of the three heads, against transformers."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from conftest import VOCAB_FILE
from hugging_face import LARGE, bert_tokenizer, logits_of_transformers, save
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
)

import inference

PASSAGE = "In the year 1900 Anna lived in Paris, and worked there as a baker. Paris was cold."
QUESTION = "Where did Anna live?"
SEVERAL = "multi_label_classification"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    torch.manual_seed(0)
    labels = {
        "id2label": {0: "bad", 1: "good", 2: "so so"},
        "label2id": {"bad": 0, "good": 1, "so so": 2},
    }
    made = {
        "span": BertForQuestionAnswering(BertConfig(**LARGE)),
        "classes": BertForSequenceClassification(BertConfig(**LARGE, **labels)),
        "several": BertForSequenceClassification(
            BertConfig(**LARGE, num_labels=3, problem_type=SEVERAL)
        ),
        "one of several": BertForSequenceClassification(
            BertConfig(**LARGE, num_labels=1, problem_type=SEVERAL)
        ),
        "score": BertForSequenceClassification(BertConfig(**LARGE, num_labels=1)),
    }
    parent = tmp_path_factory.mktemp("models")
    return {name: save(model, parent / name) for name, model in made.items()}


@pytest.fixture
def ask(models, capsys):
    """Runs inference.py and returns its output."""

    def run(model: str, *flags) -> str:
        words = ["--init-checkpoint", models[model], "--device", "cpu", *flags]
        assert inference.main([str(word) for word in words]) == 0
        return capsys.readouterr().out

    return run


def n_best(output: str) -> list[tuple[float, str]]:
    """The lines `  0.123  text`."""
    lines = [
        line.split(maxsplit=1) for line in output.splitlines() if line.startswith(("  0.", "  1."))
    ]
    return [(float(probability), text) for probability, text in lines]


def test_the_answer_is_that_of_the_whole_space_of_spans(ask, models):
    output = ask("span", "--question", QUESTION, "--context", PASSAGE, "--n-best-size", 20)
    encoding = bert_tokenizer()(QUESTION, PASSAGE, return_offsets_mapping=True, return_tensors="pt")
    offsets = encoding.pop("offset_mapping")[0].tolist()
    tokens = [index for index, part in enumerate(encoding.sequence_ids(0)) if part == 1]
    with torch.no_grad():
        logits = BertForQuestionAnswering.from_pretrained(models["span"]).eval()(**encoding)
    start, end = logits.start_logits[0], logits.end_logits[0]
    spans = [
        (float(start[a] + end[b]), offsets[a][0], offsets[b][1])
        for a in tokens
        for b in tokens
        if 0 <= b - a < 30
    ]
    spans.sort(reverse=True)
    _, first, stop = spans[0]
    best = PASSAGE[first:stop]
    assert output.splitlines()[0] == f"answer       {best}"
    # The probability is the softmax over the 20 best, of different texts.
    best_scores = {}
    for score, a, b in spans:
        best_scores.setdefault(PASSAGE[a:b], score)
    kept = list(best_scores.values())[:20]
    probability = 1 / sum(math.exp(score - kept[0]) for score in kept)
    assert f"probability  {probability:.3f}" in output
    answers = n_best(output)
    assert answers[0] == (pytest.approx(probability, abs=6e-4), best)
    assert len(answers) == 20


def test_flags_may_have_nvidias_names(ask, models):
    config, vocab = models["span"] / "config.json", models["span"] / "vocab.txt"
    nvidias = (
        "--vocab_file",
        vocab,
        "--config_file",
        config,
        "--max_seq_length",
        64,
        "--n_best_size",
        3,
    )
    expected = ask("span", "--question", QUESTION, "--context", PASSAGE, "--n-best-size", 3)
    assert ask("span", "--question", QUESTION, "--context", PASSAGE, *nvidias) == expected
    assert len(n_best(expected)) == 3


def test_a_question_may_have_no_answer(ask):
    flags = ("--question", QUESTION, "--context", PASSAGE, "--n-best-size", 500)
    none = "(the passage has no answer)"
    assert none in [text for _, text in n_best(ask("span", *flags, "--version_2_with_negative"))]
    assert none not in ask("span", *flags)


def test_a_long_passage_is_read_in_windows(ask):
    long = "word " * 400 + PASSAGE + " word" * 400
    lines = ask("span", "--question", QUESTION, "--context", long, "--doc-stride", 16).splitlines()
    assert lines[0].startswith("answer ")


@pytest.mark.parametrize("pair", [None, "another text"])
def test_a_text_gets_the_labels_of_transformers(ask, models, pair):
    flags = ("--text", "a gripping film") + (("--text-pair", pair) if pair else ())
    output = ask("classes", *flags)
    logits = logits_of_transformers(
        BertForSequenceClassification, models["classes"], "a gripping film", pair
    )
    probabilities = logits.softmax(0)
    expected = sorted(
        zip(probabilities.tolist(), ["bad", "good", "so so"], strict=True), reverse=True
    )
    assert output.splitlines()[:2] == [
        f"label        {expected[0][1]}",
        f"probability  {expected[0][0]:.3f}",
    ]
    assert [text for _, text in n_best(output)] == [label for _, label in expected]
    assert [probability for probability, _ in n_best(output)] == pytest.approx(
        [p for p, _ in expected], abs=6e-4
    )


def test_a_regression_model_gives_its_score(ask, models):
    expected = logits_of_transformers(
        BertForSequenceClassification, models["score"], "a film"
    ).item()
    word, score = ask("score", "--text", "a film").split()
    assert (word, float(score)) == ("score", pytest.approx(expected, abs=1e-4))
    _, rounded = ask("score", "--text", "a film", "--amp").split()
    assert float(rounded) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("model", ["several", "one of several"])
def test_a_model_of_several_labels_per_text_gives_each_its_own_probability(ask, models, model):
    logits = logits_of_transformers(BertForSequenceClassification, models[model], "a film")
    expected = logits.sigmoid().sort(descending=True)
    shares = n_best(ask(model, "--text", "a film"))
    assert [probability for probability, _ in shares] == pytest.approx(
        expected.values.tolist(), abs=6e-4
    )
    assert [label for _, label in shares] == [
        f"LABEL_{index}" for index in expected.indices.tolist()
    ]


def test_the_casing_is_that_of_the_folder(ask, models, tmp_path):
    words = VOCAB_FILE.read_text(encoding="utf-8").replace("\nparis\n", "\nParis\n")
    folder = Path(shutil.copytree(models["classes"], tmp_path / "cased"))
    (folder / "vocab.txt").write_text(words, encoding="utf-8")
    models["cased"] = folder
    outputs = {}
    for do_lower_case in (False, True):
        (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": do_lower_case}))
        outputs[do_lower_case] = ask("cased", "--text", "Paris")
        assert (
            ask("cased", "--text", "Paris", "--vocab-file", folder / "vocab.txt")
            == outputs[do_lower_case]
        )
    assert outputs[False] != outputs[True]
    assert outputs[True] == ask("cased", "--text", "Paris", "--do-lower-case")


def test_control_characters_of_a_passage_do_not_reach_the_terminal(ask):
    output = ask("span", "--question", QUESTION, "--context", f"\x1b[31m{PASSAGE}\x1b]0;title\x07")
    assert "\x1b" not in output and "\x07" not in output
