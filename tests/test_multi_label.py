"""Texts with several labels: loss against transformers, scores against scikit-learn, and the program on a rule."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY, VOCAB_FILE, fine_tuning_words
from transformers import BertConfig as HFConfig
from transformers import BertForSequenceClassification as HFForSequenceClassification
from transformers import BertTokenizerFast, pipeline

import run_glue
from checkpoint.weights import load_pretrained
from data_loading.loader import filler_micro_batch, make_step_batch
from data_loading.packing import MicroBatchLimits
from encoders.bert import BertForSequenceClassification
from tasks.glue import ClassificationTask
from tasks.glue_files import custom_task
from tokenizer import BertTokenizer
from utils.errors import UserError

SPEC = custom_task("text", None, "label", multi_label=True)
TOKENIZER = BertTokenizer(VOCAB_FILE)
TEXTS = {"a red house": "red|house", "a blue house": "house", "red sky": "red", "a grey river": "", "red stone": "red"}


def write(path: Path, rows: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows.items()])
    return path


@pytest.mark.parametrize("num_sizes", [None, 1])
def test_loss_and_gradient_are_those_of_transformers(tmp_path, num_sizes):
    task, dataset = ClassificationTask(SPEC, 16, train_file=write(tmp_path / "a.csv", TEXTS)).training_set(TOKENIZER)
    assert task.labels == ("house", "red")
    labels_NC = np.array([[1, 1], [1, 0], [0, 1], [0, 0], [0, 1]])
    torch.manual_seed(0)
    config = HFConfig(**TINY, num_labels=2, problem_type="multi_label_classification")
    peer = HFForSequenceClassification(config).eval()
    peer.save_pretrained(tmp_path)
    encoded = BertTokenizerFast(vocab=str(VOCAB_FILE))(list(TEXTS), padding=True, return_tensors="pt")
    expected = peer(**encoded, labels=torch.from_numpy(labels_NC).float())
    expected.loss.backward()
    model = load_pretrained(BertForSequenceClassification, tmp_path).eval()
    limits = MicroBatchLimits.for_batch(8, 16, 0, num_sizes)
    (micro_batch,) = make_step_batch(dataset, np.arange(5), limits).micro_batches
    sums = task.sums(model, micro_batch)
    filler = task.sums(model, filler_micro_batch(dataset.stream_labels, limits))
    (task.loss(sums, 5, 0) + task.loss(filler, 5, 0)).backward()
    assert filler["loss"].item() == filler["correct"].item() == 0
    assert task.loss(sums, 5, 0).item() == pytest.approx(expected.loss.item(), rel=1e-5)
    right = ((expected.logits.detach().numpy() > 0) == labels_NC).all(axis=1).sum()
    assert sums["correct"].item() == right
    for (name, p), (_, other) in zip(model.named_parameters(), peer.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad[: len(other)], other.grad, rtol=1e-3, atol=1e-6, msg=name)


def test_a_rule_is_learnt_and_transformers_gives_the_same_labels(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "hidden_dropout_prob": 0.0}))
    path = write(tmp_path / "a.csv", TEXTS)
    train = write(tmp_path / "b.csv", dict(reversed(TEXTS.items())))
    flags = ("--task-name", "multi-label", "--max-seq-length", 16, "--text-column", "text", "--label-column", "label")
    flags += ("--do-train", "--train-file", train, "--train-batch-size", 5, "--learning-rate", 0.01, "--epochs", 60)
    flags += ("--do-eval", "--eval-file", path, "--do-predict", "--predict-file", path)
    assert run_glue.main(fine_tuning_words(tmp_path / "config.json", tmp_path, *flags)) == 0
    folder = tmp_path / "custom" / "multi-label"
    scores = json.loads((folder / "scores.json").read_text())
    assert {name: scores[name] for name in SPEC.metrics} == dict.fromkeys(SPEC.metrics, 1.0)
    lines = (folder / "predictions.tsv").read_text().splitlines()
    rows = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    predicted = [row["prediction"] for row in rows]
    assert [row["text"] for row in rows] == list(TEXTS)
    assert [set(labels.split("|")) for labels in predicted] == [set(labels.split("|")) for labels in TEXTS.values()]
    classify = pipeline("text-classification", model=str(folder / "60"), device="cpu", top_k=None)
    for row, labels, result in zip(rows, predicted, classify(list(TEXTS)), strict=True):
        assert {entry["label"] for entry in result if entry["score"] > 0.5} == set(filter(None, labels.split("|")))
        for entry in result:
            assert float(row[f"probability {entry['label']}"]) == pytest.approx(entry["score"], abs=1e-5)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", "text,label\na,\n", "no text has a label"),
        ("a.csv", "text,label\na,x||y\n", ":2: 'label' is '', expected a label"),
        ("a.jsonl", '{"text": "a", "label": 3}', ":1: 'label' is 3, expected labels"),
        ("a.jsonl", '{"text": "a", "label": 0}', ":1: 'label' is 0, expected labels"),
        ("a.jsonl", '{"text": "a", "label": {}}', ":1: 'label' is {}, expected labels"),
        ("a.jsonl", '{"text": "a", "label": ["C|C++"]}', ":1: 'label' has the label 'C|C++', and '|' separates"),
        ("a.jsonl", '{"text": "a", "label": ["x", null]}', ":1: 'label' is None, expected a label"),
    ],
)
def test_a_bad_line_is_named(tmp_path, name, content, says):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=re.escape(says)):
        ClassificationTask(SPEC, train_file=tmp_path / name).training_set(TOKENIZER)


def test_an_unknown_label_is_named_with_its_line(tmp_path):
    path = write(tmp_path / "a.csv", {"a": "x|y", "b": "x|z"})
    (tmp_path / "b.jsonl").write_text('{"text": "a", "label": ["x", "y"]}\n{"text": "a", "label": []}\n')
    task, _ = ClassificationTask(SPEC, train_file=tmp_path / "b.jsonl", eval_files={"": path}).training_set(TOKENIZER)
    assert task.labels == ("x", "y")
    with pytest.raises(UserError, match=":3: label 'z', expected one of x, y"):
        task.prediction_sets(TOKENIZER)
