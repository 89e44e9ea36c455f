"""Every program and task in every precision: training with scores, prediction from the folder, and
inference.py on a text and on a file.
"""

import csv
import json
from pathlib import Path

import pytest
import torch
from conftest import NO_DROPOUT, ROOT, TINY, VOCAB_FILE, fine_tuning_words, read_json
from small_runs import run_here
from transformers import BertConfig as HFBertConfig
from transformers import BertForMaskedLM, ModernBertForMaskedLM, RobertaForMaskedLM
from transformers import ModernBertConfig as HFModernBertConfig
from transformers import RobertaConfig as HFRobertaConfig

import inference
import run_embeddings
import run_glue
import run_ner
import run_squad
from bert_recipe.optimization import precision

PRECISIONS = {  # other tests train in float32
    "amp": ("--amp",),
    "pure": ("--use-pure-fp16",),
    "float16": ("--fp16", "--scale-loss", 1024),
}
WORDS = ["sea", "ship", "whale", "river", "bank", "money", "garden", "rose", "wind", "rain"]
OWN = ("--text-column", "text", "--label-column", "label")

# Task: program, its flags, and the flags of inference.py.
TASKS = {
    "classes": (run_glue, OWN, ("--text", "the sea")),
    "pairs": (run_glue, (*OWN, "--pair-column", "pair"), ("--text", "a", "--text-pair", "b")),
    "regression": (
        run_glue,
        ("--text-column", "text", "--label-column", "score", "--regression"),
        ("--text", "the sea"),
    ),
    "multi-label": (run_glue, (*OWN, "--task-name", "multi-label"), ("--text", "the sea")),
    "embedding": (
        run_embeddings,
        ("--text-column", "text", "--pair-column", "pair"),
        ("--input", "{folder}/train.csv", "--output", "{output}/v.npy", "--embed", *OWN[:2]),
    ),
    "similarity": (
        run_embeddings,
        (
            *("--text-column", "text", "--pair-column", "pair"),
            *("--label-column", "score"),
        ),
        ("--input", "{folder}/train.csv", "--output", "{output}/v.npy", "--embed", *OWN[:2]),
    ),
    "classes of a mean": (
        run_glue,
        (*OWN, "--bert-model", "custom", "--config-file", "{folder}/modernbert.json"),
        ("--text", "the sea"),
    ),
    "ner": (run_ner, (), ("--text", "Anna lived in Paris")),
    "squad": (
        run_squad,
        ("--max-seq-length", 64, "--max-query-length", 16),
        ("--question", "Where?", "--context", "Anna lived in Paris."),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("precisions")
    (folder / "config.json").write_text(json.dumps({**TINY, **NO_DROPOUT}))
    modernbert = read_json(ROOT / "bert_configs/modernbert-tiny.json")
    assert modernbert["classifier_pooling"] == "mean"
    modernbert |= {"vocab_size": TINY["vocab_size"], "num_hidden_layers": 1}
    (folder / "modernbert.json").write_text(json.dumps(modernbert))
    rows = [("text", "pair", "label", "score")]
    for number, word in enumerate(WORDS):
        rows.append((f"the {word}", f"{word} indeed", f"l{number % 2}", str(number / 10)))
    for name, part in (("train", rows), ("dev", [rows[0], *rows[3:9]])):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(part)
    tagged = "Anna B-PER\nlived O\nin O\nParis B-LOC\n\nRain O\nin O\nCairo B-LOC\n"
    context = "Anna lived in Paris, and Boris in Cairo."
    for name, answer in (("train", "Paris"), ("dev", "Cairo")):
        answers = [{"text": answer, "answer_start": context.index(answer)}]
        questions = [{"id": "1", "question": "Where?", "answers": answers}]
        article = {"title": "a", "paragraphs": [{"context": context, "qas": questions}]}
        squad = {"version": "1.1", "data": [article]}
        (folder / f"{name}.json").write_text(json.dumps(squad))
    (folder / "train.conll").write_text(tagged)
    (folder / "dev.conll").write_text(tagged + "\nSea O\n")
    return folder


COMBINATIONS = [(task, name) for task in TASKS for name in ("amp", "pure")]


@pytest.mark.parametrize(("task", "name"), [*COMBINATIONS, ("classes", "float16")])
def test_a_task_is_trained_scored_and_used(folder, tmp_path, monkeypatch, task, name):
    monkeypatch.setattr(precision, "has_float16", lambda device: True)  # slow on CPUs, but correct
    program, flags, use = TASKS[task]
    train, dev = (
        folder / f"{part}.{'conll' if task == 'ner' else 'csv'}" for part in ("train", "dev")
    )
    files = ("--train-file", train, "--eval-file", dev)
    if task == "squad":
        files = ("--train-file", folder / "train.json", "--predict-file", folder / "dev.json")
    flags = [str(word).format(folder=folder) for word in flags]
    training = ("--do-train", "--do-eval", "--max-steps", 1, "--train-batch-size", 4)
    words = fine_tuning_words(
        *(folder / "config.json", tmp_path, *training, "--learning-rate", 1e-3),
        *("--max-seq-length", 16, *flags, *files, *PRECISIONS[name]),
    )
    result = run_here(words, program.main)
    assert result.returncode == 0, result.stderr
    (scores,) = tmp_path.glob("custom/*/scores.json")
    assert read_json(scores)
    model = ("--init-checkpoint", scores.parent, "--device", "cpu", "--amp")
    use = [str(word).format(folder=folder, output=tmp_path) for word in (*model, *use)]
    result = run_here(use, inference.main)
    assert result.returncode == 0, result.stderr


MASKED = {
    "bert": (BertForMaskedLM, HFBertConfig, {}),
    "roberta": (RobertaForMaskedLM, HFRobertaConfig, {"pad_token_id": 0}),
    "modernbert": (ModernBertForMaskedLM, HFModernBertConfig, {"pad_token_id": 0}),
}


@pytest.mark.parametrize("encoder", MASKED)
def test_masks_are_filled_in_16_bits_as_in_float32(tmp_path, encoder):
    model_class, config_class, options = MASKED[encoder]
    torch.manual_seed(0)
    sizes = {name: value for name, value in TINY.items() if "dropout" not in name}
    config = config_class(**{**sizes, "initializer_range": 0.3, **options})
    model_class(config).save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_bytes(VOCAB_FILE.read_bytes())
    (tmp_path / "in.csv").write_text("text\nThe [MASK] of France\n")
    model = ("--init-checkpoint", tmp_path, "--device", "cpu")
    answers = {}
    for amp in ("false", "true"):
        output = tmp_path / f"{amp}.jsonl"
        for use in (
            ("--fill-mask", "The [MASK] of France"),
            ("--input", tmp_path / "in.csv", "--output", output, "--text-column", "text"),
        ):
            result = run_here((*model, *use, "--amp", amp), inference.main)
            assert result.returncode == 0, result.stderr
        answers[amp] = read_json(output)["words"][0]
    shared = answers["false"].keys() & answers["true"].keys()
    assert shared and all(
        abs(answers["false"][word] - answers["true"][word]) < 0.02 for word in shared
    )
