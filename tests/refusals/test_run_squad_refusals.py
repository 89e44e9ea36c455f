"""What run_squad.py refuses, before anything is written."""

import json
from pathlib import Path

import pytest
import torch
from refusal_tables import Refusal, fine_tuning_command, refusals
from safetensors.torch import load_file, save_file
from squad_documents import document, entry, flat_row, squad_document

import run_squad

TRAIN = "--do-train --train-file {v1}"
FINE_TUNED = "--init-checkpoint {model}"
PREDICT = f"--do-predict --predict-file {{v1}} {FINE_TUNED}"


@pytest.fixture(scope="module")
def places(inputs, tmp_path_factory) -> dict[str, Path]:
    """Files of both versions, a fine-tuned model, and models of it that cannot predict."""
    parent = tmp_path_factory.mktemp("squad")
    names = ("v1", "v2", "headless", "broken")
    places = {name: parent / name for name in names}
    for name in ("v1", "v2"):
        places[name].write_text(json.dumps(squad_document(with_impossible=name == "v2")))
    flags = ("--max-steps", 1, "--max-query-length", 4, *TRAIN.format(**places).split())
    assert run_squad.main(fine_tuning_command(inputs, parent / "run", *flags)) == 0
    places["model"] = parent / "run" / "custom" / "squad" / "1"
    weights = load_file(places["model"] / "model.safetensors")
    for name, tensors in {
        "headless": {name: weights[name] for name in weights if not name.startswith("qa_outputs")},
        "broken": {name: torch.full_like(tensor, torch.nan) for name, tensor in weights.items()},
    }.items():
        places[name].mkdir()
        (places[name] / "config.json").write_bytes((places["model"] / "config.json").read_bytes())
        save_file(tensors, places[name] / "model.safetensors")
    return places


def answered(text: str, answer_start: object) -> dict:
    return document(entry(answers=[{"text": text, "answer_start": answer_start}]))


COMMAND_LINES = [
    ("", "nothing to do"),
    ("--do-train", "--do-train needs --train-file"),
    (f"--do-eval {FINE_TUNED}", "need --predict-file"),
    ("--do-predict --predict-file {v1}", "give --init-checkpoint"),
    (f"{TRAIN} --predict-batch-size 8", "--predict-batch-size"),
    (f"{TRAIN} --n-best-size 5", "--n-best-size"),
    (f"{TRAIN} --predict-file d.json", "--predict-file"),
    (
        f"{PREDICT} --null-score-diff-threshold 1",
        "--null-score",
    ),
]
FILES = [
    ("--do-train --train-file {v2}", "--version-2-with-negative"),
    (
        f"{TRAIN} --do-eval --predict-file {{v1}} --version-2-with-negative",
        "leave out --version-2-with-negative",
    ),
    (
        f"--do-eval --predict-file {{v2}} {FINE_TUNED}",
        "without an answer: add --version-2-with-negative",
    ),
    (f"{TRAIN} --max-seq-length 65", "64 positions"),
    (f"{TRAIN} --max-query-length 13", "leaves no room"),
    (f"{TRAIN} --init-checkpoint nowhere", "nowhere does not exist"),
    ("--do-eval --predict-file {v1} --from-checkpoint nowhere", "nowhere does not exist"),
    (
        "--do-eval --predict-file {v1} --init-checkpoint {headless}",
        "not fine-tuned for this task",
    ),
    ("--do-eval --predict-file {v1} --init-checkpoint {broken}", "logits are not finite"),
    (
        f"{PREDICT} --output-dir {{v1}}",
        "v1/custom/squad",
    ),
    (
        f"--do-eval --predict-file {{folder}}/dev.json {FINE_TUNED}",
        "4 of the 5 questions have no answers to compare with: b, c, d and 1 more",
        {"dev.json": document(entry(id="a"), *(entry(id=name, answers=[]) for name in "bcde"))},
    ),
    (
        f"{TRAIN} --do-eval --predict-file {{folder}}/dev.json",
        "dev.json...not valid JSON",
        {"dev.json": json.dumps(document(entry()))[:-9]},
    ),
]
TRAINING_FILES = [
    ("--do-train --train-file {folder}/t.json", f"t.json...{says}", {"t.json": content})
    for says, content in (
        ("not valid JSON", json.dumps(document(entry()))[:-9]),
        ("not valid JSON", "[" * 200_000),
        ("not valid JSON", '{"data": ' + "9" * 5000 + "}"),
        ("is nan, expected an object", "NaN"),
        ("data[0]: it is [[]], expected an object", {"data": [[[]]]}),
        ("data is None, expected a list", {"version": "1.1"}),
        ("has no questions", {"data": []}),
        ("its answer 'Anna' has no answer_start: add that to train", {"data": [flat_row("Anna")]}),
        (
            "data[0]: answers is text of Python...give JSON lines",
            {"data": [flat_row("{'text': ['Anna']}")]},
        ),
        ("data[0]: answers is text of Python...give JSON lines", {"data": [flat_row("['Anna']")]}),
        ("no column 'question'; it has 'context'", {"data": [{"context": "Anna"}]}),
        (
            "question q1: its answer 'Anna' has no answer_start: add that to train",
            {"data": [flat_row({"text": ["Anna"], "answer_start": []})]},
        ),
        (
            "data[0]: paragraphs[0]: context is 5, expected a string",
            document(entry(), context=5),
        ),
        ("qas[0]: id is missing", document(entry(id=None))),
        ("answers is 'Anna', expected a list", document(entry(answers="Anna"))),
        ("expected a whole number", answered("Anna", "0")),
        ("question q1 is there twice", document(entry(), entry())),
        ("question q1: its answer 'Anne'", answered("Anne", 0)),
        ("not in its context at character", answered("Anna", 5)),
        ("at character -4", answered("Anna", -4)),
        ("question q1: its answer ' '", answered(" ", 4)),
        ("no question has an answer to learn: give `answers`", document(entry(answers=[]))),
    )
]


@refusals(*COMMAND_LINES, *FILES, *TRAINING_FILES)
def test_run_squad_refuses(refusal: Refusal, inputs, places, tmp_path):
    command = fine_tuning_command(inputs, tmp_path / "output", "--max-query-length", 4)
    refusal.check(run_squad.main, command, tmp_path, **places)
