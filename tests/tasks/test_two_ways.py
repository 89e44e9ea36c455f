"""A file is predicted by --do-predict of the training programs as by inference.py: the same table,
byte by byte.
"""

import json
from pathlib import Path

import pytest
import torch
from conftest import read_json_lines, write_json_lines
from hugging_face import LARGE, logits_of_transformers, save
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
)

import inference
import run_glue
import run_ner
import run_squad

SEVERAL = "multi_label_classification"
TEXTS = ["a gripping film", "dull", "naïve, and so so", "the sea"]
LONG = "a long film " * 200  # than any model here takes
CLASSES = ("good", "bad", "so so")  # not in order
TAGS = ("O", "B-PER", "I-PER", "B-LOC")
ROWS = list(enumerate([*TEXTS, LONG]))
CSV = "id,t,p\n" + "".join(f'{n},"{text}",second {n}\n' for n, text in ROWS)
LINES = [{"n": n, "t": text, "p": "x"} for n, text in ROWS]
QUESTIONS = [
    {"id": f"q{n}", "question": f"Where is {text}?", "context": f"It is {text} in Paris.", "n": n}
    for n, text in ROWS
]


def named(labels) -> dict:
    return {"id2label": dict(enumerate(labels)), "label2id": {b: a for a, b in enumerate(labels)}}


TEXT, PAIR = ("--text-column", "t"), ("--text-column", "t", "--pair-column", "p")
# The program, the model with its config, the file, the flags of both, and those of the program.
CASES = {
    "classes": (run_glue, BertForSequenceClassification, named(CLASSES), "a.csv", TEXT, ()),
    "pairs": (run_glue, BertForSequenceClassification, named(CLASSES), "a.csv", PAIR, ()),
    "lines": (run_glue, BertForSequenceClassification, named(CLASSES), "a.jsonl", TEXT, ()),
    "several labels": (
        run_glue,
        BertForSequenceClassification,
        named(CLASSES) | {"problem_type": SEVERAL},
        "a.jsonl",
        TEXT,
        ("--task-name", "multi-label"),
    ),
    "numbers": (
        run_glue,
        BertForSequenceClassification,
        {"num_labels": 1},
        "a.csv",
        (*TEXT, "--decimal", ","),
        ("--regression",),
    ),
    "rerankers": (
        run_glue,
        BertForSequenceClassification,
        {"num_labels": 1},
        "a.jsonl",
        PAIR,
        ("--regression",),
    ),
    "entities": (run_ner, BertForTokenClassification, named(TAGS), "a.jsonl", TEXT, ()),
    "questions": (
        run_squad,
        BertForQuestionAnswering,
        {},
        "q.jsonl",
        ("--max-seq-length", "48"),
        (),
    ),
}


def write_files(folder: Path) -> None:
    (folder / "a.csv").write_text(CSV, encoding="utf-8")
    write_json_lines(folder / "a.jsonl", LINES)
    write_json_lines(folder / "q.jsonl", QUESTIONS)


def predict(folder: Path, case: str, model: Path) -> list[Path]:
    """The tables of both ways."""
    program, _, _, name, flags, of_program = CASES[case]
    source = folder / name
    common = ["--init-checkpoint", model, "--device", "cpu", *flags]
    words = ["--do-predict", "--predict-file", source, "--output-dir", folder / "out", *of_program]
    assert program.main([str(word) for word in [*common, *words]]) == 0
    (first,) = (folder / "out").rglob(f"predictions{source.suffix}")
    second = folder / f"by_inference{source.suffix}"
    words = ["--input", source, "--output", second]
    if program is run_squad:
        words += ["--question-column", "question", "--context-column", "context"]
    assert inference.main([str(word) for word in [*common, *words]]) == 0
    return [first, second]


@pytest.fixture
def model(tmp_path):
    def make(case: str) -> Path:
        torch.manual_seed(0)
        _, kind, config, *_ = CASES[case]
        return save(kind(BertConfig(**LARGE, **config)), tmp_path / "model")

    return make


@pytest.mark.parametrize("case", CASES)
def test_both_write_the_same_table_and_cut_long_texts(model, tmp_path, case, capsys):
    write_files(tmp_path)
    first, second = predict(tmp_path, case, model(case))
    assert first.read_bytes() == second.read_bytes()
    assert len(first.read_text("utf-8").splitlines()) >= len(ROWS)
    if case != "entities":  # whose texts are divided
        says = "note: 1 of 5 inputs are longer than the model takes, and cut"
        assert says in capsys.readouterr().err


def test_both_apply_the_temperature_of_the_folder(model, tmp_path):
    write_files(tmp_path)
    folder = model("lines")
    (folder / "calibration.json").write_text(json.dumps({"temperature": 4.0, "rows": 9}))
    tables = [read_json_lines(path) for path in predict(tmp_path, "lines", folder)]
    assert tables[0] == tables[1]
    for row, text in zip(tables[0][: len(TEXTS)], TEXTS, strict=True):
        logits = logits_of_transformers(BertForSequenceClassification, folder, text)
        expected = dict(zip(CLASSES, (logits / 4).softmax(0).tolist(), strict=True))
        probabilities = {label: row[f"probability {label}"] for label in CLASSES}
        assert probabilities == pytest.approx(expected, abs=1e-5)
        assert row["confidence"] == max(probabilities.values())
