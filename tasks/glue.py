"""Classification and regression of texts and pairs of texts: loss, data set, scores and submission files.

Legend: n samples, N sequences of a stream, C labels, A and B the tokens of a first and a second text.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert_config import ModelConfig
from data_loading.loader import MicroBatch
from data_loading.packing import IGNORED_LABEL, TokenStream
from loss import summed_cross_entropy
from tasks import PredictionSet
from tasks.glue_files import MAX_SEQ_LENGTH, Examples, TextTask, read_examples
from tasks.text_sequences import SequenceDataset, encode
from utils.errors import UserError
from utils.files import write_atomically
from utils.progress import print_line

REGRESSION_LABELS = ("score",)


@dataclass(frozen=True)
class ClassificationTask:
    """Classification or regression of texts and text pairs; implements tasks.FineTuningTask.

    spec: columns, labels in the task's order, and metrics. eval_files: files to score, by the name of the set.
    predict_files: files to predict. stored_labels: labels of a fine-tuned model in the order of its outputs.
    balanced: weight the loss of a class by n / (C * samples of the class), as scikit-learn does; `class_weights` [C].
    """

    spec: TextTask
    max_seq_length: int = MAX_SEQ_LENGTH
    name: str = ""
    train_file: Path | None = None
    eval_files: Mapping[str, Path] = field(default_factory=dict)
    predict_files: Mapping[str, Path] = field(default_factory=dict)
    stored_labels: tuple[str, ...] = ()
    balanced: bool = False
    class_weights: tuple[float, ...] = ()

    head = "sequence_classification"
    logits_axis = "sequence"
    multi_label = False

    @property
    def labels(self) -> tuple[str, ...]:
        return REGRESSION_LABELS if self.spec.regression else self.stored_labels or self.spec.labels

    @property
    def metric(self) -> str:
        return set_prefix(next(iter(self.spec.sets))) + self.spec.metrics[0]

    @property
    def initial_loss(self) -> float | None:
        return None if self.spec.regression else math.log(len(self.spec.labels))

    @property
    def result_files(self) -> tuple[str, ...]:
        return tuple(submission_name(self.spec, set_name) for set_name in self.spec.sets)

    def sums(self, model: nn.Module, micro_batch: MicroBatch) -> dict[str, Tensor]:
        logits_NC = model(TokenStream.from_batch(micro_batch, self.max_seq_length)).logits
        labels_N = micro_batch["labels"]
        if self.spec.regression:
            error_N = (logits_NC.squeeze(1).float() - micro_batch["scores"]).where(labels_N != IGNORED_LABEL, 0.0)
            return {"loss": error_N.square().sum()}
        loss, correct = summed_cross_entropy(logits_NC, labels_N)
        if self.class_weights:
            weight_C = torch.tensor(self.class_weights, device=logits_NC.device)
            logits_NC = logits_NC.float()
            loss = F.cross_entropy(logits_NC, labels_N, weight_C, ignore_index=IGNORED_LABEL, reduction="sum")
        return {"loss": loss, "correct": correct}

    def loss(self, sums: dict[str, Tensor], num_sequences: float, num_targets: float) -> Tensor:
        return sums["loss"] / num_sequences

    def metrics(self, sums: dict[str, float], num_sequences: float, num_targets: float) -> dict[str, float]:
        metrics = {"loss": sums["loss"] / num_sequences}
        if not self.spec.regression:
            metrics["accuracy"] = sums["correct"] / num_sequences
        return metrics

    def training_set(self, tokenizer) -> tuple["ClassificationTask", "TextDataset"]:
        examples = read_examples(self.train_file, self.spec, labelled=True)
        task = self
        if not self.spec.regression and not self.spec.labels:
            task = replace(self, spec=replace(self.spec, labels=self.find_labels(examples)))
        values = task.values(examples)
        if self.balanced:
            counts_C = np.bincount(values, minlength=len(task.labels))
            if not counts_C.all():
                label = task.labels[int(counts_C.argmin())]
                raise UserError(
                    f"{self.train_file} has no sample of class {label!r}: leave out --class-weights balanced"
                )
            task = replace(task, class_weights=tuple((len(values) / (len(counts_C) * counts_C)).tolist()))
        return task, TextDataset(examples, tokenizer, self.max_seq_length, values)

    def for_model(self, config: ModelConfig, folder: Path) -> "ClassificationTask":
        if config.multi_label != self.multi_label:
            kind = "a model of one label per text" if self.multi_label else "a model of several labels per text"
            raise UserError(f"{folder} is {kind}, which {self.spec.name} is not: use another model")
        stored, labels = config.labels, self.spec.labels
        if self.spec.regression:
            return self
        if not labels and not stored:
            raise UserError(f"{folder / 'config.json'} has no id2label: was this model fine-tuned on classes?")
        has_names = any(label != f"LABEL_{index}" for index, label in enumerate(stored))
        if not has_names and labels:  # transformers' default names
            return self
        labels = labels or sort_labels(stored)
        if sorted(stored) != sorted(labels):
            raise UserError(
                f"{folder} predicts {', '.join(stored)}, and {self.spec.name} has {', '.join(labels)}: use a model "
                f"that was fine-tuned on this task"
            )
        return replace(self, spec=replace(self.spec, labels=labels), stored_labels=stored)

    def prediction_sets(self, tokenizer) -> list[PredictionSet]:
        if self.eval_files:
            load_metrics()  # fail on a missing package before training
        sets = []
        for set_name, path in self.eval_files.items():
            examples = read_examples(path, self.spec, labelled=True)
            finish = partial(self.score, self.values(examples), set_name)
            sets.append(PredictionSet(TextDataset(examples, tokenizer, self.max_seq_length), finish, True))
        for set_name, path in self.predict_files.items():
            examples = read_examples(path, self.spec, labelled=False, is_test=True)
            finish = partial(self.write, examples, set_name)
            sets.append(PredictionSet(TextDataset(examples, tokenizer, self.max_seq_length), finish, False))
        return sets

    def find_labels(self, examples: Examples) -> tuple[str, ...]:
        return find_labels(examples)

    def values(self, examples: Examples) -> np.ndarray:
        return label_values(examples, self.spec)

    def words(self, logits_nC: np.ndarray) -> list[str]:
        """The predictions as strings for the output file."""
        return predicted_words(logits_nC, self.spec)

    def score(self, values: np.ndarray, set_name: str, logits_nC: np.ndarray, folder: Path | None) -> dict[str, Any]:
        return score(self.in_order(logits_nC), values, self.spec, set_name)

    def write(self, examples: Examples, set_name: str, logits_nC: np.ndarray, folder: Path) -> dict[str, float]:
        path = write_submission(folder, examples, self.words(self.in_order(logits_nC)), self.spec, set_name)
        print_line(f"predictions for {len(examples)} samples in {path}")
        return {}

    def in_order(self, logits_nC: np.ndarray) -> np.ndarray:
        """Reorders the logits to the task's label order. A model from another library may have another order."""
        stored = self.stored_labels
        return logits_nC[:, [stored.index(label) for label in self.spec.labels]] if stored else logits_nC


# --- labels -----------------------------------------------------------------------------------------------------------


def find_labels(examples: Examples) -> tuple[str, ...]:
    """The classes in a custom training file, sorted; by value if all are integers."""
    labels = set(examples.labels)
    if len(labels) < 2:
        raise UserError(f"{examples.path}: all labels are {labels.pop()!r}: there must be at least two")
    if all(map(is_number, labels)):
        fractions = [label for label in labels if float(label) != int(float(label))]
        if fractions:
            raise UserError(f"{examples.path}: labels are numbers such as {min(fractions)}: add --regression")
        names: dict[float, str] = {}
        for line, label in zip(examples.lines, examples.labels, strict=True):
            if names.setdefault(float(label), label) != label:
                raise UserError(
                    f"{examples.path}, line {line}: labels {names[float(label)]!r} and {label!r} are the same number: "
                    "write it in one way"
                )
    return sort_labels(labels)


def sort_labels(labels: Iterable[str]) -> tuple[str, ...]:
    """Sorts by value if all are numbers, else by name."""
    if all(map(is_number, labels)):
        return tuple(sorted(labels, key=lambda label: (float(label), label)))
    return tuple(sorted(labels))


def is_number(text: str) -> bool:
    """Whether `text` is a finite decimal number. Stricter than float(), which accepts `1_000` and ` 1`."""
    is_decimal = re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", text)
    return is_decimal is not None and math.isfinite(float(text))


def label_values(examples: Examples, task: TextTask) -> np.ndarray:
    """The labels as ids, or as numbers for regression; [n]. Raises UserError naming the line of an unknown label."""
    label_ids = {label: index for index, label in enumerate(task.labels)}
    is_known: Callable[[str], bool] = is_number if task.regression else label_ids.__contains__
    for line, label in zip(examples.lines, examples.labels, strict=True):
        if not is_known(label):
            expected = "a number" if task.regression else f"one of {', '.join(task.labels)}"
            raise UserError(f"{examples.path}, line {line}: label {label!r}, expected {expected}: correct the line")
    if task.regression:
        return np.array([float(label) for label in examples.labels])
    return np.array([label_ids[label] for label in examples.labels], np.int64)


# --- data set ---------------------------------------------------------------------------------------------------------


class TextDataset(SequenceDataset):
    """The samples of a file as `[CLS] text [SEP]` or `[CLS] text [SEP] pair [SEP]`, truncated to `max_seq_length`
    tokens, longest text first. `values`: label ids [n] or [n, C], or scores [n], for training; None for prediction."""

    def __init__(self, examples: Examples, tokenizer, max_seq_length: int, values: np.ndarray | None = None):
        cls, sep = np.array([tokenizer.cls_token_id]), np.array([tokenizer.sep_token_id])
        first_ids, _ = encode(tokenizer, examples.texts, "texts")
        if examples.pairs is None:
            rows = [(cls, a[: max_seq_length - 2], sep) for a in first_ids]
        else:
            second_ids, _ = encode(tokenizer, examples.pairs, "second texts")
            rows = []
            for a, b in zip(first_ids, second_ids, strict=True):
                kept_a, kept_b = truncated_lengths(len(a), len(b), max_seq_length - 3)
                rows.append((cls, a[:kept_a], sep, b[:kept_b], sep))
        labels = {}
        if values is not None and values.dtype == np.int64:
            labels = {"labels": values}
        elif values is not None:  # labels distinguish real sequences from filler
            labels = {"labels": np.zeros(len(values), np.int64), "scores": values.astype(np.float32)}
        super().__init__(
            np.concatenate([piece for row in rows for piece in row]).astype(np.int32),
            np.array([sum(map(len, row)) for row in rows]),
            np.array([sum(map(len, row[:3])) for row in rows]),
            labels,
        )


def truncated_lengths(length_a: int, length_b: int, total: int) -> tuple[int, int]:
    """Lengths after truncating two texts to `total` tokens in sum: the longer one (the second on ties) loses its last
    token repeatedly, as in Google's BERT."""
    kept_b = min(length_b, max(total // 2, total - length_a))
    return min(length_a, total - kept_b), kept_b


# --- scores -----------------------------------------------------------------------------------------------------------


def load_metrics() -> dict[str, Callable[[np.ndarray, np.ndarray], float]]:
    """Metrics by name, as functions of labels and predictions [n]."""
    try:
        from scipy.stats import pearsonr, spearmanr
        from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
    except ImportError as error:
        raise UserError(
            f"the scores need {error.name}, which is not installed: pip install scikit-learn scipy"
        ) from error

    def correlation(function: Callable) -> Callable[[np.ndarray, np.ndarray], float]:
        """Returns 0 if all labels or all predictions are equal, where the correlation is undefined."""
        return lambda labels, found: function(labels, found)[0] if np.ptp(labels) and np.ptp(found) else 0.0

    return {
        "accuracy": accuracy_score,
        "f1": f1_score,
        "f1_macro": lambda labels, found: f1_score(labels, found, average="macro"),
        "matthews_correlation": matthews_corrcoef,
        "pearson": correlation(pearsonr),
        "spearman": correlation(spearmanr),
    }


def predictions_of(logits_nC: np.ndarray, task: TextTask) -> np.ndarray:
    """Predicted label ids, or scores for regression; [n]."""
    return logits_nC[:, 0].astype(np.float64) if task.regression else logits_nC.argmax(axis=1)


def set_prefix(set_name: str) -> str:
    return f"{set_name}_" if set_name else ""


def score(logits_nC: np.ndarray, values: np.ndarray, task: TextTask, set_name: str = "") -> dict[str, Any]:
    """The task's metrics as fractions. For classification, also a table per class and the confusion matrix, whose rows
    are the true classes. With several evaluation sets, keys are prefixed with the set's name."""
    metrics, found = load_metrics(), predictions_of(logits_nC, task)
    scores: dict[str, Any] = {name: float(metrics[name](values, found)) for name in task.metrics}
    if not task.regression:
        from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

        classes = range(len(task.labels))
        columns = precision_recall_fscore_support(values, found, labels=classes, zero_division=0)
        scores["per_class"] = class_table(task.labels, [column.tolist() for column in columns])
        scores["confusion_matrix"] = confusion_matrix(values, found, labels=classes).tolist()
    return {set_prefix(set_name) + name: value for name, value in scores.items()}


def class_table(labels: Sequence[str], columns: Sequence[list]) -> dict[str, dict[str, float]]:
    """Precision, recall, F1 and number of samples per class."""
    names = ("precision", "recall", "f1", "support")
    return {
        label: dict(zip(names, row, strict=True)) for label, row in zip(labels, zip(*columns, strict=True), strict=True)
    }


# --- submission files -------------------------------------------------------------------------------------------------

SUBMISSION_SETS = {"": "", "matched": "-m", "mismatched": "-mm"}


def submission_name(task: TextTask, set_name: str) -> str:
    return f"{task.name}{SUBMISSION_SETS[set_name]}{task.extension}"


def predicted_words(logits_nC: np.ndarray, task: TextTask) -> list[str]:
    """The predictions as strings: classes, or numbers clipped to the task's range."""
    found = predictions_of(logits_nC, task)
    if not task.regression:
        return [task.labels[index] for index in found]
    found = found if task.score_range is None else found.clip(*task.score_range)
    return [f"{value:.3f}" if task.score_range else repr(float(value)) for value in found]


def write_submission(folder: Path, examples: Examples, words: Iterable[str], task: TextTask, set_name: str) -> Path:
    """Writes the predictions in the submission format of GLUE (TSV) or SuperGLUE (JSON lines); returns the path."""
    pairs = zip(examples.indices, words, strict=True)
    path = folder / submission_name(task, set_name)
    if task.extension == ".jsonl":
        lines = [json.dumps({"idx": int(index), "label": word}) for index, word in pairs]
    else:
        lines = ["index\tprediction", *(f"{index}\t{word}" for index, word in pairs)]
    write_atomically(path, "\n".join(lines) + "\n")
    return path
