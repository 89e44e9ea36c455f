"""Classification and regression: model, data set and loss against transformers, scores against
their formulas.
"""

import dataclasses
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TINY, VOCAB_FILE
from hugging_face import bert_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from sklearn.utils.class_weight import compute_class_weight
from transformers import BertConfig as HFConfig
from transformers import BertForSequenceClassification as HFForSequenceClassification
from transformers.trainer_pt_utils import LabelSmoother

from bert_recipe.checkpoint.model_folder import read_config
from bert_recipe.checkpoint.pretrained import load_pretrained
from bert_recipe.checkpoint.rows import open_safetensors
from bert_recipe.checkpoint.weights import select_weights
from bert_recipe.data_loading.loader import filler_micro_batch, make_step_batch
from bert_recipe.data_loading.packing import MicroBatchLimits
from bert_recipe.model.encoders.bert import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
)
from bert_recipe.model.token_stream import BatchCounts, TokenStream
from bert_recipe.tasks.classification.files import Examples
from bert_recipe.tasks.classification.labels import find_labels
from bert_recipe.tasks.classification.options import ClassificationOptions
from bert_recipe.tasks.classification.scores import score, write_submission
from bert_recipe.tasks.classification.specs import TASKS, custom_spec
from bert_recipe.tasks.classification.task import ClassificationTask
from bert_recipe.tasks.mistakes import Mistake, mistake_lines
from bert_recipe.tasks.ner.options import TokenClassificationOptions
from bert_recipe.tasks.ner.task import TokenClassificationTask
from bert_recipe.tasks.text_sequences import TextDataset, truncate_pair
from bert_recipe.tokenization.tokenizer import BertTokenizer
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.output_tables import encode_table
from bert_recipe.utils.text_files import TableFormat

TOKENIZER = BertTokenizer(VOCAB_FILE)
CONFIG = BertConfig(**TINY)
FORMAT = TableFormat()
OWN = custom_spec("text", None, "label")
OWN_FILE = ClassificationOptions(text_column="text", label_column=["label"], max_seq_length=16)
PAIRS = [
    (
        "The first text of a pair is rather long, and longer than the second one.",
        "The second one is short.",
    ),
    (
        "Short.",
        "This second text is the long one, with many words in it, more than fit into the limit of "
        "tokens.",
    ),
    ("Both texts fit.", "Into the limit."),
]


def examples_of(path, texts, pairs=None, labels=()) -> Examples:
    indices = [str(index) for index in range(len(texts))]
    label_sets = [(label,) if isinstance(label, str) else label for label in labels]
    return Examples(path, list(texts), pairs, label_sets, indices, list(range(2, len(texts) + 2)))


@pytest.fixture
def examples(tmp_path) -> Examples:
    texts, pairs = map(list, zip(*PAIRS, strict=True))
    return examples_of(tmp_path / "own.tsv", texts, pairs, ["a", "c", "b"])


def test_a_config_without_label_names_has_two_labels_and_bad_ones_are_refused(tmp_path):
    assert CONFIG.num_labels == 2
    assert "id2label" not in CONFIG.to_dict()
    (tmp_path / "config.json").write_text(
        json.dumps({**TINY, "problem_type": "regression", "model_type": "bert"})
    )
    with pytest.raises(UserError, match="'regression' of 2 numbers"):
        read_config(tmp_path / "config.json")
    for id2label in ({"0": "a", "2": "b"}, {"0": 1}, ["a"], {"0": "a", "1": "a"}):
        values = {"id2label": id2label}
        (tmp_path / "config.json").write_text(json.dumps({**TINY, "model_type": "bert", **values}))
        with pytest.raises(UserError, match=r"config.json: (id2label|the labels)"):
            read_config(tmp_path / "config.json")


@pytest.mark.parametrize("head", [BertForSequenceClassification, BertForQuestionAnswering])
def test_a_head_of_another_task_is_left_out_for_training_and_refused_for_prediction(tmp_path, head):
    torch.manual_seed(0)
    HFForSequenceClassification(HFConfig(**TINY, num_labels=3)).save_pretrained(tmp_path)
    model = head(dataclasses.replace(CONFIG, labels=("0", "1")))
    notes = []
    name = model.classifier_name
    tensors = open_safetensors(tmp_path / "model.safetensors")
    tensors = {key.replace("classifier.", f"{name}."): tensor for key, tensor in tensors.items()}
    weights = select_weights(model, tensors, tmp_path, notes.append)
    assert not [key for key in weights if key.startswith(f"{name}.")]
    assert "bert.encoder.layer.0.output.dense.weight" in weights
    assert (
        f"{name}.bias, {name}.weight of this shape: they start from their initial values"
        in notes[0]
    )
    with pytest.raises(UserError, match=rf"{name}.weight is \[3, 32\], the model's is \[2, 32\]"):
        select_weights(model, tensors, tmp_path, notes.append, needs_head=True)


def test_models_of_another_kind_of_labels_are_refused(tmp_path):
    values = {**TINY, "model_type": "bert"}
    path = tmp_path / "config.json"
    several = {"id2label": {"0": "0", "1": "1"}, "problem_type": "multi_label_classification"}
    kinds = {"several labels": several, "one label": {"id2label": {"0": "0", "1": "1"}}}
    kinds["a number"] = {"id2label": {"0": "LABEL_0"}, "problem_type": "regression"}
    for kind, labels in kinds.items():
        path.write_text(json.dumps(values | labels))
        config = read_config(path)
        assert config.to_dict().get("problem_type") == labels.get("problem_type")
        with pytest.raises(UserError, match=f"a model of {kind} per text"):
            options = ClassificationOptions(task_name="sts-b" if kind == "one label" else "sst-2")
            ClassificationTask.fine_tuned(options, 128, config, tmp_path)
    config = dataclasses.replace(config, labels=("a", "b"))
    with pytest.raises(UserError, match="predicts a, b, and SST-2 has 0, 1"):
        ClassificationTask.fine_tuned(
            ClassificationOptions(task_name="sst-2"), 128, config, tmp_path
        )


@given(length_a=st.integers(0, 60), length_b=st.integers(0, 60), total=st.integers(1, 60))
def test_the_longer_text_is_cut_first_as_in_googles_code(length_a, length_b, total):
    a, b = length_a, length_b
    while a + b > total:  # _truncate_seq_pair
        a, b = (a - 1, b) if a > b else (a, b - 1)
    assert truncate_pair(range(length_a), range(length_b), total) == (range(a), range(b))


# Options of the task, of transformers' config, and the labels of three samples. MSELoss of -100 as
# well: a label that marks filler elsewhere is a number like others here.
KINDS = {
    "classes": ({}, {"num_labels": 3}, np.array([0, 2, 1])),
    "regression": ({"regression": True}, {"num_labels": 1}, np.array([0.5, -100.0, 2.25])),
    "multi-label": (
        {"multi_label": True},
        {"num_labels": 2, "problem_type": "multi_label_classification"},
        np.array([[1, 1], [0, 1], [0, 0]]),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_sizes", [None, 1, 4], ids=["any_size", "fixed_size", "four_sizes"])
def test_loss_and_gradient_are_those_of_transformers_and_filler_adds_nothing(
    tmp_path, examples, kind, num_sizes
):
    torch.manual_seed(0)
    options, config, values = KINDS[kind]
    peer = HFForSequenceClassification(HFConfig(**TINY, **config)).eval()
    peer.save_pretrained(tmp_path)
    model = load_pretrained(BertForSequenceClassification, tmp_path).eval()
    dataset = TextDataset(TOKENIZER, 64, examples.texts, examples.pairs, values)
    limits = MicroBatchLimits.for_batch(4, 64, 0, num_sizes)
    task = ClassificationTask(OWN_FILE, custom_spec("text", None, "label", **options), 64)
    (micro_batch,) = make_step_batch(dataset, np.arange(3), limits).micro_batches
    sums = task.sums(model, micro_batch)
    counts = BatchCounts(sequences=3, tokens=0, labelled_tokens=0)
    total = task.loss(sums, counts)
    filler = task.sums(model, filler_micro_batch(dataset.stream_labels, limits))
    (total + task.loss(filler, counts)).backward()
    labels = torch.from_numpy(values if kind == "classes" else values.astype(np.float32))
    padded = bert_tokenizer()(examples.texts, examples.pairs, padding=True, return_tensors="pt")
    expected = peer(**padded, labels=labels)
    expected.loss.backward()
    assert not any(value.item() for value in filler.values())
    assert total.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    if kind == "multi-label":
        assert (
            sums["correct"].item()
            == ((expected.logits.detach().numpy() > 0) == values).all(axis=1).sum()
        )
    # Those of key biases are rounding errors.
    largest = max(p.grad.abs().max().item() for p in peer.parameters())
    for (name, p), (_, other) in zip(
        model.named_parameters(), peer.named_parameters(), strict=True
    ):
        torch.testing.assert_close(
            p.grad[: len(other)], other.grad, rtol=1e-3, atol=3e-6 * largest, msg=name
        )


def test_balanced_class_weights_are_those_of_scikit_learn_and_torch(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text(
        "text,label\n" + "".join(f"text {row},{label}\n" for row, label in enumerate("aaabbc"))
    )
    options = replace(OWN_FILE, train_file=path, class_weights="balanced")
    task, dataset = ClassificationTask.learning(options, TOKENIZER)
    expected = compute_class_weight(
        "balanced", classes=np.arange(3), y=np.array([0, 0, 0, 1, 1, 2])
    )
    assert task.class_weights == pytest.approx(expected)
    torch.manual_seed(0)
    model = BertForSequenceClassification(dataclasses.replace(CONFIG, labels=task.labels)).eval()
    (micro_batch,) = make_step_batch(
        dataset, np.arange(6), MicroBatchLimits.for_batch(8, 16, 0, 1)
    ).micro_batches
    logits = model(TokenStream.from_batch(micro_batch, 16)).logits
    loss = torch.nn.CrossEntropyLoss(torch.tensor(expected, dtype=torch.float32))(
        logits, micro_batch["labels"]
    )
    # torch divides by the sum of the weights, which is the number of samples over the whole file.
    assert task.loss(task.sums(model, micro_batch), BatchCounts(6, 0, 0)).item() == pytest.approx(
        loss.item(), rel=1e-5
    )


def test_a_class_of_one_sample_does_not_outweigh_the_others(tmp_path):
    path = tmp_path / "train.csv"
    labels = ["a"] * 40 + ["b"] * 40 + ["c"]
    path.write_text("text,label\n" + "".join(f"{row},{each}\n" for row, each in enumerate(labels)))
    options = replace(OWN_FILE, train_file=path, class_weights="balanced")
    task, _ = ClassificationTask.learning(options, TOKENIZER)
    assert task.class_weights == pytest.approx((81 / 120, 81 / 120, 10))


def test_what_is_cut_is_said_as_a_share(tmp_path, capsys):
    path = tmp_path / "train.csv"
    path.write_text("text,label\na b c d,x\na b c d e f g h i j,y\na b,x\na,y\n")
    options = replace(OWN_FILE, train_file=path)
    ClassificationTask.learning(replace(options, max_seq_length=8), TOKENIZER)
    says = "25.0% of the texts are longer than 8 tokens, and 23.5% of all tokens are cut off"
    assert says in capsys.readouterr().out
    ClassificationTask.learning(replace(options, max_seq_length=12), TOKENIZER)
    assert "cut off" not in capsys.readouterr().out


def test_balanced_weights_of_labels_are_those_of_scikit_learn_for_each_label(tmp_path):
    path = tmp_path / "train.csv"
    cells = ["a", "a", "a|b", "b", "", "a|b"]
    rows = [f"text {row},{cell}\n" for row, cell in enumerate(cells)]
    path.write_text("text,label\n" + "".join(rows))
    files = {"train_file": path, "class_weights": "balanced"}
    options = replace(OWN_FILE, task_name="multi-label", **files)
    task, dataset = ClassificationTask.learning(options, TOKENIZER)
    values = dataset.labels["labels"]
    logits = np.random.default_rng(0).normal(size=values.shape)
    total = 0.0
    for column in range(2):
        present, logit = values[:, column], logits[:, column]
        weights = compute_class_weight("balanced", classes=np.arange(2), y=present)
        losses = np.logaddexp(0, np.where(present, -logit, logit))
        total += (weights[present] * losses).sum() / 2
    sums = task.sums(*fixed_output(logits, values))
    assert sums["loss"].item() == pytest.approx(total, rel=1e-5)
    path.write_text("text,a,b\nx,1,1\ny,0,1\n")
    options = replace(options, label_column=["a", "b"])
    with pytest.raises(UserError, match="has only samples of 'b': leave out --class-weights"):
        ClassificationTask.learning(options, TOKENIZER)


@pytest.mark.parametrize("number", [0.1, 1e-30, 5, -1e9])
def test_equal_numbers_have_the_deviation_1(tmp_path, number):
    path = tmp_path / "train.csv"
    path.write_text("text,label\n" + "".join(f"text {row},{number}\n" for row in range(7)))
    task, _ = ClassificationTask.learning(
        replace(OWN_FILE, train_file=path, regression=True), TOKENIZER
    )
    assert task.numbers == (number, 1.0)


@pytest.mark.parametrize("weights", ["none", "balanced"])
def test_outputs_for_several_labels_begin_where_constant_ones_are_best(tmp_path, weights):
    path = tmp_path / "train.csv"
    cells = ["a", "a", "a|b", "", "", "a|c"] * 100
    path.write_text("text,label\n" + "".join(f"text {n},{cell}\n" for n, cell in enumerate(cells)))
    options = replace(OWN_FILE, task_name="multi-label", train_file=path, class_weights=weights)
    task, dataset = ClassificationTask.learning(options, TOKENIZER)
    bias, factor = task.first_outputs
    assert factor == 1
    values = dataset.labels["labels"]
    sums = task.sums(*fixed_output(np.tile(bias, (len(values), 1)), values))
    loss = sums["loss"].item() / len(values)
    assert loss == pytest.approx(task.guessing_loss, rel=1e-4)
    assert loss == pytest.approx(task.initial_loss, rel=1e-4)
    if weights == "none":
        assert 1 / (1 + np.exp(-np.array(bias))) == pytest.approx([4 / 6, 1 / 6, 1 / 6], rel=1e-2)


def fixed_output(logits: np.ndarray, labels: np.ndarray) -> tuple:
    """A model that gives `logits` for a micro-batch of as many sequences of one token."""
    count = len(logits)
    batch = {name: torch.zeros(count, dtype=torch.int64) for name in ("input_ids", "position_ids")}
    batch |= {"labels": torch.from_numpy(labels), "tags": torch.from_numpy(labels)}
    batch |= {"cu_seqlens": torch.arange(count + 1, dtype=torch.int32)}
    output = SimpleNamespace(logits=torch.from_numpy(logits).float())
    return lambda _stream: output, batch | {"token_type_ids": batch["input_ids"]}


SMOOTHED = (
    ClassificationTask(ClassificationOptions(label_smoothing=0.2), OWN),
    TokenClassificationTask(TokenClassificationOptions(label_smoothing=0.2)),
)


@pytest.mark.parametrize("task", SMOOTHED)
def test_smoothed_losses_are_those_of_trainer(task):
    labels = np.array([2, 0, 1, 2, 1])
    logits = np.random.default_rng(0).normal(size=(5, 3))
    sums = task.sums(*fixed_output(logits, labels))
    expected = LabelSmoother(0.2)({"logits": torch.from_numpy(logits)}, torch.from_numpy(labels))
    assert task.loss(sums, BatchCounts(5, 5, 5)).item() == pytest.approx(expected.item(), rel=1e-5)


def test_labels_of_ones_own_file_are_sorted_and_whole_numbers_by_value(tmp_path, capsys):
    path = tmp_path / "own.csv"
    assert find_labels(examples_of(path, "abcd", labels=["10", "9", "1", "9"]), OWN) == (
        "1",
        "9",
        "10",
    )
    assert find_labels(examples_of(path, "abc", labels=["good", "bad", "ok"]), OWN) == (
        "bad",
        "good",
        "ok",
    )
    assert find_labels(examples_of(path, "ab", labels=["Ok", "ok"]), OWN) == ("Ok", "ok")
    assert (
        "labels 'Ok' and 'ok' differ in case only: each is a label of its own"
        in capsys.readouterr().out
    )
    find_labels(examples_of(path, "abcdef", labels=["Ok", "ok", "NO", "no", "x", "X"]), OWN)
    assert "labels 'NO' and 'no', 'Ok' and 'ok', 'X' and 'x' differ" in capsys.readouterr().out
    assert find_labels(examples_of(path, "ab", labels=["1", "nan"]), OWN) == ("1", "nan")
    assert "the label 'nan' is most likely a missing value" in capsys.readouterr().out


def numbers(scores: dict) -> dict[str, float]:
    return {name: value for name, value in scores.items() if isinstance(value, float)}


def logits_for(predictions: np.ndarray, num_labels: int = 2) -> np.ndarray:
    return np.eye(num_labels, dtype=np.float32)[predictions]


def test_scores_are_their_formulas():
    random = np.random.default_rng(0)
    labels, predicted = random.integers(0, 2, 50), random.integers(0, 2, 50)
    tp = np.sum(labels & predicted)
    tn = np.sum((1 - labels) & (1 - predicted))
    fp = np.sum((1 - labels) & predicted)
    fn = np.sum(labels & (1 - predicted))
    accuracy = (tp + tn) / 50
    f1 = 2 * tp / (2 * tp + fp + fn)
    f1_of_0 = 2 * tn / (2 * tn + fp + fn)
    matthews = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    own = dataclasses.replace(
        custom_spec("text", None, "label", regression=False), labels=("a", "b")
    )
    for task, expected in (
        (TASKS["mrpc"], {"accuracy": accuracy, "f1": f1}),
        (TASKS["cola"], {"matthews_correlation": matthews}),
        (own, {"accuracy": accuracy, "f1_macro": (f1 + f1_of_0) / 2}),
    ):
        assert numbers(score(logits_for(predicted), labels, task)) == pytest.approx(expected)
    mnli = score(logits_for(predicted, 3), labels, TASKS["mnli"], "matched")
    assert numbers(mnli) == {"matched_accuracy": accuracy}
    assert mnli["matched_confusion_matrix"] == [[tn, fp, 0], [fn, tp, 0], [0, 0, 0]]
    neutral = {"precision": tp / (tp + fp), "recall": tp / (tp + fn), "f1": f1, "support": tp + fn}
    assert mnli["matched_per_class"]["neutral"] == pytest.approx(neutral)
    undefined = dict.fromkeys(("precision", "recall", "f1"))  # nothing to find, nothing predicted
    assert mnli["matched_per_class"]["contradiction"] == {**undefined, "support": 0}
    missed = score(logits_for(np.zeros_like(predicted)), labels, TASKS["mrpc"])["per_class"]["1"]
    assert missed == {"precision": None, "recall": 0, "f1": 0, "support": tp + fn}


def test_correlations_are_their_formulas():
    random = np.random.default_rng(1)
    values = random.permutation(40) / 8  # no ties
    outputs = values + random.normal(size=40)
    scores = score(outputs[:, None].astype(np.float32), values, TASKS["sts-b"])
    ranks = [np.argsort(np.argsort(array)) for array in (values, outputs)]
    pearson, spearman = np.corrcoef(values, outputs)[0, 1], np.corrcoef(*ranks)[0, 1]
    assert scores == pytest.approx({"pearson": pearson, "spearman": spearman}, rel=1e-5)
    rounding = 1 + 1e-7 * np.random.default_rng(0).normal(size=(40, 1))
    for predicted in (np.zeros((40, 1), np.float32), rounding.astype(np.float32)):
        constant = score(predicted, values, TASKS["sts-b"])
        assert math.isnan(constant["pearson"]) and math.isnan(constant["spearman"])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_scores_and_predictions_are_of_the_same_class_in_any_order_of_the_models_labels(
    tmp_path, order
):
    rows = [("1", "a", "b"), ("1", "c", "d"), ("0", "e", "f"), ("0", "g", "h")]
    lines = ["Quality\t#1 String\t#2 String", *("\t".join(row) for row in rows)]
    (tmp_path / "glue").mkdir()
    (tmp_path / "glue" / "dev.tsv").write_text("\n".join(lines))
    (tmp_path / "glue" / "test.tsv").write_text("\n".join(lines))
    options = ClassificationOptions(
        task_name="mrpc", data_dir=tmp_path / "glue", do_eval=True, do_predict=True
    )
    config = dataclasses.replace(CONFIG, labels=tuple("01"[index] for index in order))
    task = ClassificationTask.fine_tuned(options, 128, config, tmp_path)
    assert task.labels == config.labels
    evaluation, prediction = task.prediction_sets(TOKENIZER)
    logits = logits_for(np.array([1, 1, 1, 0]))[:, order]  # as words: 1 1 1 0
    assert numbers(evaluation.finish(logits, tmp_path)) == pytest.approx(
        {"accuracy": 0.75, "f1": 0.8}
    )
    prediction.finish(logits, tmp_path)
    assert [line[-1] for line in (tmp_path / "MRPC.tsv").read_text().splitlines()[1:]] == list(
        "1110"
    )


MNLI_ORDER = ("contradiction", "neutral", "entailment")  # of roberta-large-mnli


@pytest.mark.parametrize(
    ("task_name", "stored", "labels", "order"),
    [
        ("mnli", tuple(map(str.upper, MNLI_ORDER)), MNLI_ORDER, (2, 1, 0)),
        ("custom", (), "01", (0, 1)),  # transformers writes no names of two classes
        ("custom", ("LABEL_0", "LABEL_1", "LABEL_2"), "012", (0, 1, 2)),
        ("custom", ("LABEL_0", "LABEL_1"), ("LABEL_0", "LABEL_1"), (0, 1)),
    ],
)
def test_models_of_other_libraries_are_scored_by_the_names_that_they_have(
    tmp_path, task_name, stored, labels, order
):
    """order: the outputs of the model for the labels of the task."""
    options = replace(OWN_FILE, do_eval=True, eval_file=tmp_path / "dev.tsv")
    if task_name != "custom":
        options = ClassificationOptions(task_name=task_name, data_dir=tmp_path, do_eval=True)
    spec = options.spec
    names = (*spec.text_columns, spec.label)
    rows = [dict(zip(names, (*"ab"[: len(names) - 1], label), strict=True)) for label in labels]
    for path in options.eval_files.values():
        path.write_bytes(encode_table(path, rows))
    config = dataclasses.replace(CONFIG, labels=stored)
    task = ClassificationTask.fine_tuned(options, 128, config, tmp_path)
    evaluation = task.prediction_sets(TOKENIZER)[0]
    logits = np.eye(len(labels))  # row i is of label i, which is output i
    assert next(iter(numbers(evaluation.finish(logits, tmp_path)).values())) == 1
    names = [task.spec.labels[place] for place in order]
    assert names == [str(label) for label in labels]


def test_submission_files_have_the_names_and_columns_of_glue_and_superglue(tmp_path):
    examples = examples_of(tmp_path / "test.tsv", "abc")
    rte = write_submission(tmp_path, examples, logits_for(np.array([0, 1, 1])), TASKS["rte"], "")
    assert rte.name == "RTE.tsv"
    assert (
        rte.read_text()
        == "index\tprediction\n0\tentailment\n1\tnot_entailment\n2\tnot_entailment\n"
    )
    mnli = [
        write_submission(
            tmp_path, examples, logits_for(np.array([0, 1, 2]), 3), TASKS["mnli"], name
        )
        for name in ("matched", "mismatched")
    ]
    assert [path.name for path in mnli] == ["MNLI-m.tsv", "MNLI-mm.tsv"]
    scores = np.array([[5.4], [2.71828], [-0.1]], np.float32)
    sts_b = write_submission(tmp_path, examples, scores, TASKS["sts-b"], "")
    assert sts_b.read_text() == "index\tprediction\n0\t5.000\n1\t2.718\n2\t0.000\n"
    boolq = dataclasses.replace(examples_of(tmp_path / "test.jsonl", "ab"), indices=["7", "9"])
    path = write_submission(tmp_path, boolq, logits_for(np.array([1, 0])), TASKS["boolq"], "")
    assert path.name == "BoolQ.jsonl"
    assert path.read_text() == '{"idx": 7, "label": "true"}\n{"idx": 9, "label": "false"}\n'


def test_the_terminal_shows_the_most_confident_mistakes(tmp_path, capsys):
    path = tmp_path / "dev.csv"
    path.write_text("text,label\n" + "".join(f"text {row},{row % 2}\n" for row in range(6)))
    options = replace(OWN_FILE, eval_file=path, do_eval=True)
    task = ClassificationTask(options, replace(OWN, labels=("0", "1")))
    (evaluation,) = task.prediction_sets(TOKENIZER)
    logits = np.array([[9, 0], [1, 0], [0, 2], [3, 0], [4, 0], [4.5, 0]])  # rows 1, 2, 3, 5 wrong
    evaluation.finish(logits, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0]
        == f"4 of 6 predictions are wrong; all rows are in {tmp_path / 'eval_predictions.csv'}"
    )
    assert lines[2:] == [
        "  0.99  1, predicted 0: text 5",
        "  0.95  1, predicted 0: text 3",
        "  0.88  0, predicted 1: text 2",
    ]
    many = "|".join(f"label {number}" for number in range(99))
    mistake = Mistake("text " * 99, "label 1", many, 0.9)
    *_, line = mistake_lines([mistake], 1, path)
    assert line.startswith("  0.90  label 1, predicted label 0|label 1|") and len(line) < 200


def test_a_mistake_without_any_of_several_labels_says_so(tmp_path, capsys):
    path = tmp_path / "dev.csv"
    path.write_text("text,label\nfirst,x|y\nsecond,\nthird,x\n")
    options = replace(OWN_FILE, task_name="multi-label", eval_file=path, do_eval=True)
    spec = replace(OWN, multi_label=True, labels=("x", "y"))
    (evaluation,) = ClassificationTask(options, spec).prediction_sets(TOKENIZER)
    evaluation.finish(np.array([[-9.0, -9], [9, -9], [9, -9]]), tmp_path)
    lines = capsys.readouterr().out.splitlines()
    shown = {line.split("  ")[-1] for line in lines[2:]}
    assert shown == {"x|y, predicted (none): first", "(none), predicted x: second"}
