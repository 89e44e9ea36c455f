"""Classification and regression of texts and pairs of texts: loss, data set, scores and prediction
files.

A text has one class, any number of labels (multi-label), or a number (regression). Legend: n
samples, N sequences of a stream, C labels, A and B the tokens of a first and a second text.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoders.config import ModelConfig
from loss import summed_cross_entropy
from tasks import FineTuningTask, PredictionSet, SeparableTask
from tasks.glue_files import (
    LABEL_SEPARATOR,
    MAX_SEQ_LENGTH,
    Examples,
    TaskSpec,
    read_examples,
)
from tasks.labels import check_spelling, is_number, listed, other_separator, sort_labels
from tasks.reading import DEFAULT_READING, ReadingOptions
from tasks.text_sequences import SequenceDataset, encode
from token_stream import IGNORED_LABEL, MicroBatch, TokenStream
from utils.errors import UserError, one_line
from utils.files import write_atomically
from utils.progress import print_line
from utils.tables import Row, encode_table

REGRESSION_LABELS = ("score",)
MAX_SCORE = 1e18  # of regression; its square is finite in float32
MAX_TRIAL = 10  # texts of a file that may be a trial, where each has a label of its own


@dataclass(frozen=True)
class ClassificationTask(FineTuningTask, SeparableTask):
    """Classification or regression of texts and text pairs.

    spec: columns, labels in the task's order, and metrics. eval_files: files to score, by the name
    of the set. predict_files: files to predict. stored_labels: labels of a fine-tuned model in the
    order of its outputs. balanced: weight the loss of a class by n / (C * its samples), as
    scikit-learn does; `class_weights` [C]. reading: how the files are read.
    """

    spec: TaskSpec
    max_seq_length: int = MAX_SEQ_LENGTH
    name: str = ""
    train_file: Path | None = None
    eval_files: Mapping[str, Path] = field(default_factory=dict)
    predict_files: Mapping[str, Path] = field(default_factory=dict)
    stored_labels: tuple[str, ...] = ()
    balanced: bool = False
    class_weights: tuple[float, ...] = ()
    reading: ReadingOptions = DEFAULT_READING

    head = "sequence_classification"
    logits_axis = "sequence"

    @property
    def scored_files(self) -> tuple[Path, ...]:
        return tuple(self.eval_files.values())

    @property
    def multi_label(self) -> bool:
        return self.spec.multi_label

    @property
    def text_pairs(self) -> bool:
        return self.spec.pair is not None

    @property
    def labels(self) -> tuple[str, ...]:
        return REGRESSION_LABELS if self.spec.regression else self.stored_labels or self.spec.labels

    @property
    def metric(self) -> str:
        return set_prefix(self.spec.sets[0]) + self.spec.metrics[0]

    @property
    def initial_loss(self) -> float | None:
        if self.spec.regression:
            return None
        return math.log(2 if self.multi_label else len(self.spec.labels))

    @property
    def result_files(self) -> tuple[str, ...]:
        return tuple(submission_name(self.spec, set_name) for set_name in self.spec.sets)

    def sums(self, model: nn.Module, micro_batch: MicroBatch) -> dict[str, Tensor]:
        logits_NC = model(TokenStream.from_batch(micro_batch, self.max_seq_length)).logits
        labels_N = micro_batch["labels"]
        if self.spec.regression:
            error_N = (logits_NC.squeeze(1).float() - micro_batch["scores"]).where(
                labels_N != IGNORED_LABEL, 0.0
            )
            return {"loss": error_N.square().sum()}
        if self.multi_label:
            return multi_label_sums(logits_NC.float(), labels_N)
        loss, correct = summed_cross_entropy(logits_NC, labels_N)
        if self.class_weights:
            weight_C = torch.tensor(self.class_weights, pin_memory=logits_NC.is_cuda).to(
                loss.device, non_blocking=True
            )
            loss = F.cross_entropy(
                logits_NC.float(), labels_N, weight_C, ignore_index=IGNORED_LABEL, reduction="sum"
            )
        return {"loss": loss, "correct": correct}

    def metrics(
        self, sums: dict[str, float], num_sequences: float, num_labelled: float
    ) -> dict[str, float]:
        metrics = super().metrics(sums, num_sequences, num_labelled)
        return (
            metrics
            if self.spec.regression
            else metrics | {"accuracy": sums["correct"] / num_sequences}
        )

    def training_set(self, tokenizer) -> tuple["ClassificationTask", "TextDataset"]:
        examples = read_examples(self.train_file, self.spec, True, reading=self.reading)
        task = self
        if not self.spec.regression and not self.spec.labels:
            task = replace(self, spec=replace(self.spec, labels=find_labels(examples, self.spec)))
        values = label_values(examples, task.spec)
        check_learnable(examples, values, task.spec)
        if self.balanced:
            counts_C = np.bincount(values, minlength=len(task.labels))
            if not counts_C.all():
                label = task.labels[int(counts_C.argmin())]
                raise UserError(
                    f"{self.train_file} has no sample of class {label!r}: leave out --class-weights"
                )
            task = replace(
                task, class_weights=tuple((len(values) / (len(counts_C) * counts_C)).tolist())
            )
        return task, TextDataset(examples, tokenizer, self.max_seq_length, values)

    def for_model(self, config: ModelConfig, folder: Path) -> "ClassificationTask":
        check_pairs(config, folder, self.text_pairs)
        stored, labels = config.labels, self.spec.labels
        is_single = len(stored) == 1 and not config.multi_label
        if config.multi_label != self.multi_label or (stored and is_single != self.spec.regression):
            kind = (
                "several labels" if config.multi_label else "a number" if is_single else "one label"
            )
            raise UserError(
                f"{folder} is a model of {kind} per text: use another one, or another task"
            )
        if self.spec.regression:
            return self
        if not labels and not stored:
            raise UserError(
                f"{folder / 'config.json'} has no id2label: was this model fine-tuned on classes?"
            )
        has_names = any(label != f"LABEL_{index}" for index, label in enumerate(stored))
        if not has_names and labels:  # transformers' default names
            return self
        labels = labels or sort_labels(self.spec.label_columns or stored)
        if sorted(stored) != sorted(labels):
            what = f"{folder} predicts {listed(stored)}, and {self.spec.name} has {listed(labels)}"
            raise UserError(f"{what}: use a model that was fine-tuned on this task")
        return replace(self, spec=replace(self.spec, labels=labels), stored_labels=stored)

    def prediction_sets(self, tokenizer) -> list[PredictionSet]:
        if self.eval_files:
            load_metrics()  # fail on a missing package before training
        sets = []
        for files, labelled in ((self.eval_files, True), (self.predict_files, False)):
            for set_name, path in files.items():
                examples = read_examples(path, self.spec, labelled, not labelled, self.reading)
                values = label_values(examples, self.spec) if labelled else None
                finish = partial(self.finish, examples, values, set_name)
                undefined = None
                if labelled:
                    undefined = undefined_reason(values, self.spec, self.spec.metrics[0])
                dataset = TextDataset(examples, tokenizer, self.max_seq_length)
                sets.append(PredictionSet(dataset, finish, labelled, undefined))
        return sets

    def finish(
        self,
        examples: Examples,
        values: np.ndarray | None,
        set_name: str,
        logits_nC: np.ndarray,
        folder: Path | None,
    ) -> dict[str, Any]:
        """Returns the scores for the label `values`, or without them writes the predictions."""
        if self.stored_labels:  # a model from another library may have the labels in another order
            logits_nC = logits_nC[
                :, [self.stored_labels.index(label) for label in self.spec.labels]
            ]
        if values is not None:
            if folder is not None and not self.spec.regression:
                warn_of_missing(values, predictions_of(logits_nC, self.spec), self.spec)
            return score(logits_nC, values, self.spec, set_name)
        path = write_predictions(folder, examples, logits_nC, self.spec, set_name)
        print_line(f"predictions for {len(examples)} samples in {path}")
        return {}


def check_learnable(examples: Examples, values: np.ndarray, spec: TaskSpec) -> None:
    """Raises UserError if no model can learn anything from the file."""
    if spec.regression and not np.ptp(values):
        raise UserError(
            f"{examples.path}: all labels are {values[0]:g}, so there is nothing to learn: check "
            f"the column of labels"
        )
    if spec.regression and np.abs(values).max() > MAX_SCORE:
        raise UserError(
            f"{examples.path}: a label is {np.abs(values).max():g}, whose squared error is "
            f"infinite "
            f"in float32: scale the labels"
        )
    texts = set(zip(examples.texts, examples.pairs or examples.texts, strict=True))
    if len(examples) > 1 and len(texts) == 1:
        raise UserError(
            f"{examples.path}: all texts are equal, so there is nothing to learn: check the column "
            f"of texts"
        )


def check_pairs(config: ModelConfig, folder: Path, given: bool) -> None:
    """Raises UserError if the model in `folder` was fine-tuned on single texts and pairs are given,
    or vice versa.
    """
    if config.text_pairs not in (None, given):
        what = (
            "single texts: leave out the second ones"
            if given
            else "pairs of texts: give the second ones, too"
        )
        raise UserError(f"{folder} was fine-tuned on {what}, or use another model")


def multi_label_sums(logits_NC: Tensor, labels_NC: Tensor) -> dict[str, Tensor]:
    """Binary cross-entropy, and the number of samples with all labels right."""
    is_real_N = labels_NC[:, 0] != IGNORED_LABEL
    losses_NC = F.binary_cross_entropy_with_logits(
        logits_NC, labels_NC.clamp(min=0).float(), reduction="none"
    )
    correct_N = ((logits_NC > 0) == (labels_NC > 0)).all(dim=1) & is_real_N
    return {"loss": losses_NC.mean(dim=1).where(is_real_N, 0.0).sum(), "correct": correct_N.sum()}


def find_labels(examples: Examples, spec: TaskSpec) -> tuple[str, ...]:
    """The labels in a custom training file, sorted; by value if all are numbers."""
    if spec.label_columns:
        check_spelling(examples.path, spec.label_columns)
        return sort_labels(spec.label_columns)
    cells = examples.labels if spec.multi_label else [(label,) for label in examples.labels]
    labels = {label for cell in cells for label in cell}
    if not labels:
        raise UserError(f"{examples.path}: no text has a label: check the column of labels")
    if spec.multi_label:
        check_several(examples.path, cells, labels, spec)
    else:
        check_single(examples, labels)
    check_spelling(examples.path, labels)
    return sort_labels(labels)


def check_single(examples: Examples, labels: set[str]) -> None:
    if len(labels) < 2:
        raise UserError(
            f"{examples.path}: all labels are {min(labels)!r}: there must be at least two"
        )
    if all(map(is_number, labels)) and (
        fractions := [label for label in labels if float(label) % 1]
    ):
        raise UserError(
            f"{examples.path}: labels are numbers such as {min(fractions)}: add --regression"
        )
    if len(labels) == len(examples) > MAX_TRIAL:
        raise UserError(
            f"{examples.path}: each text has a label of its own: check the column of labels"
        )
    separator = other_separator(labels)
    parts = {part for label in labels for part in label.split(separator)}
    if separator is not None and len(parts) < len(labels):
        joined = min(label for label in labels if separator in label)
        print_line(
            f"warning: {examples.path}: {joined!r} is one class; if these are several labels, "
            f"use --task-name multi-label --label-separator {separator!r}"
        )


def check_several(
    path: Path, cells: Sequence[Sequence[str]], labels: set[str], spec: TaskSpec
) -> None:
    """Raises UserError if the labels of texts are vectors of 0 and 1, or if each combination of
    labels is one label.
    """
    lengths = {len(cell) for cell in cells if cell}
    if len(lengths) == 1 and labels <= {"0", "1", "0.0", "1.0", "true", "false"}:
        (length,) = lengths
        what = "each text has 0 or 1" if length == 1 else f"each text has {length} times 0 or 1"
        raise UserError(
            f"{path}: {spec.label!r}: {what}, without the names of labels: give a column of 0 and "
            f"1 for each label, as --label-column NAME NAME, or lists of names"
        )
    separator = None if spec.label_separator else other_separator(labels)
    if separator is not None:
        joined = min(label for label in labels if separator in label)
        raise UserError(
            f"{path}: {joined!r} would be one label: give --label-separator {separator!r} if it is "
            f"several, else --label-separator {LABEL_SEPARATOR!r}"
        )


def label_values(examples: Examples, spec: TaskSpec) -> np.ndarray:
    """Ids [n], multi-hot labels [n, C], or numbers [n] for regression."""
    if spec.regression:
        return np.array([float(label) for label in examples.labels])
    ids = {label: index for index, label in enumerate(spec.labels)}
    if spec.multi_label:
        return np.array([[label in cell for label in ids] for cell in examples.labels], np.int64)
    return np.array([ids[label] for label in examples.labels], np.int64)


class TextDataset(SequenceDataset):
    """The samples of a file as `[CLS] text [SEP]` or `[CLS] text [SEP] pair [SEP]`, truncated to
    `max_seq_length` tokens, longest text first. `values`: label ids [n] or [n, C], or scores [n],
    for training; None for prediction.
    """

    def __init__(
        self, examples: Examples, tokenizer, max_seq_length: int, values: np.ndarray | None = None
    ):
        first_ids, _ = encode(tokenizer, examples.texts, "texts")
        texts = [(a[: max_seq_length - 2],) for a in first_ids]
        if examples.pairs is not None:
            second_ids, _ = encode(tokenizer, examples.pairs, "second texts")
            room = max_seq_length - 2 - tokenizer.num_pair_separators
            texts = [truncate_pair(a, b, room) for a, b in zip(first_ids, second_ids, strict=True)]
        labels = {}
        if values is not None and values.dtype == np.int64:
            labels = {"labels": values}
        elif values is not None:  # labels distinguish real sequences from filler
            labels = {
                "labels": np.zeros(len(values), np.int64),
                "scores": values.astype(np.float32),
            }
        super().__init__(tokenizer, texts, labels)


def truncate_pair(a: Sequence, b: Sequence, total: int) -> tuple[Sequence, Sequence]:
    """Cuts token by token from the longer text (the second on ties) to `total` tokens, as in
    Google's BERT.
    """
    kept_b = min(len(b), max(total // 2, total - len(a)))
    return a[: total - kept_b], b[:kept_b]


def load_metrics() -> dict[str, Callable[[np.ndarray, np.ndarray], float]]:
    """Metrics by name, as functions of labels and predictions [n]."""
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    def correlation(function: Callable) -> Callable[[np.ndarray, np.ndarray], float]:
        """Returns NaN if all labels, or all predictions up to rounding, are equal."""

        def varies(values: np.ndarray) -> bool:
            return np.ptp(values) > 1e-6 * np.abs(values).max()

        return lambda labels, found: (
            function(labels, found)[0] if np.ptp(labels) and varies(found) else math.nan
        )

    return {
        "accuracy": accuracy_score,
        "exact_match": accuracy_score,  # all labels of a text
        "f1": f1_score,
        "f1_macro": partial(f1_score, average="macro", zero_division=0),
        "f1_micro": partial(f1_score, average="micro", zero_division=0),
        "matthews_correlation": matthews_corrcoef,
        "pearson": correlation(pearsonr),
        "spearman": correlation(spearmanr),
    }


def predictions_of(logits_nC: np.ndarray, spec: TaskSpec) -> np.ndarray:
    """Predicted label ids [n], multi-hot labels [n, C], or scores [n] for regression."""
    if spec.multi_label:
        return (logits_nC > 0).astype(np.int64)
    return logits_nC[:, 0].astype(np.float64) if spec.regression else logits_nC.argmax(axis=1)


def set_prefix(set_name: str) -> str:
    return f"{set_name}_" if set_name else ""


def score(
    logits_nC: np.ndarray, values: np.ndarray, spec: TaskSpec, set_name: str = ""
) -> dict[str, Any]:
    """The task's metrics as fractions. Except for regression, also a table per label, and for
    classes the confusion matrix, whose rows are the true classes. With several evaluation sets,
    keys are prefixed with the set's name.
    """
    metrics, found = load_metrics(), predictions_of(logits_nC, spec)
    undefined = {name for name in spec.metrics if undefined_reason(values, spec, name)}
    scores: dict[str, Any] = {
        name: math.nan if name in undefined else float(metrics[name](values, found))
        for name in spec.metrics
    }
    if not spec.regression:
        from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

        classes, names = range(len(spec.labels)), ("precision", "recall", "f1", "support")
        table_C4 = np.transpose(
            precision_recall_fscore_support(values, found, labels=classes, zero_division=0)
        )
        rows = (dict(zip(names, row, strict=True)) for row in table_C4.tolist())
        scores["per_class"] = dict(zip(spec.labels, rows, strict=True))
        if not spec.multi_label:
            scores["confusion_matrix"] = confusion_matrix(values, found, labels=classes).tolist()
    return {set_prefix(set_name) + name: value for name, value in scores.items()}


def undefined_reason(values: np.ndarray, spec: TaskSpec, metric: str) -> str | None:
    """Why `metric` says nothing about a model for the labels `values`, or None."""
    if spec.regression and not np.ptp(values):
        return f"all labels are {values[0]:g}"
    if spec.multi_label and metric != "exact_match" and not values.any():
        return "no text has a label"
    if metric == "f1" and not values.any():
        return f"no text is of class {spec.labels[1]!r}"
    if metric == "matthews_correlation" and not np.ptp(values):
        return f"all texts are of class {spec.labels[values[0]]!r}"
    return None


def warn_of_missing(values: np.ndarray, found: np.ndarray, spec: TaskSpec) -> None:
    """Warns of labels in the file that are predicted for no text."""
    one_hot = values if spec.multi_label else values[:, None] == np.arange(len(spec.labels))
    predicted = found if spec.multi_label else found[:, None] == np.arange(len(spec.labels))
    missing = one_hot.any(axis=0) & ~predicted.any(axis=0)
    if missing.any():
        names = listed([repr(label) for label in np.array(spec.labels)[missing].tolist()])
        advice = "train longer, or with more samples of it"
        print_line(
            f"warning: the model predicts {one_line(names)} for no text, though texts have it: "
            f"{advice}"
        )


SUBMISSION_SETS = {"": "", "matched": "-m", "mismatched": "-mm"}


def submission_name(spec: TaskSpec, set_name: str) -> str:
    return f"{spec.name}{SUBMISSION_SETS[set_name]}{spec.extension}"


def predicted_words(logits_nC: np.ndarray, spec: TaskSpec) -> list[str]:
    """The predictions as strings: classes, labels, or numbers clipped to the task's range."""
    found = predictions_of(logits_nC, spec)
    if spec.multi_label:
        labels = np.array(spec.labels)
        return [spec.separator.join(labels[row_C > 0]) for row_C in found]
    if not spec.regression:
        return [spec.labels[index] for index in found]
    found = found if spec.score_range is None else found.clip(*spec.score_range)
    return [f"{value:.3f}" if spec.score_range else repr(float(value)) for value in found]


def probabilities(
    logits_nC: np.ndarray, labels: tuple[str, ...], multi_label: bool
) -> list[dict[str, float]]:
    """The probability of each label, for each sample."""
    logits_nC = torch.from_numpy(logits_nC)
    values_nC = logits_nC.sigmoid() if multi_label else logits_nC.softmax(1)
    return [dict(zip(labels, row, strict=True)) for row in values_nC.tolist()]


def write_predictions(
    folder: Path, examples: Examples, logits_nC: np.ndarray, spec: TaskSpec, set_name: str
) -> Path:
    """Writes the predictions and returns the path: in the submission format of GLUE (TSV) or
    SuperGLUE (JSON lines), or for a custom file with probabilities and texts.
    """
    words, path = predicted_words(logits_nC, spec), folder / submission_name(spec, set_name)
    rows: list[Row] = [
        {"index": i, "prediction": word} for i, word in zip(examples.indices, words, strict=True)
    ]
    if spec.extension == ".jsonl":
        lines = [
            json.dumps({"idx": int(row["index"]), "label": row["prediction"]}) + "\n"
            for row in rows
        ]
        write_atomically(path, "".join(lines))
        return path
    if spec.is_custom:
        if not spec.regression:
            for row, by_label in zip(
                rows, probabilities(logits_nC, spec.labels, spec.multi_label), strict=True
            ):
                row |= {f"probability {label}": value for label, value in by_label.items()}
        for name, texts in (("text", examples.texts), ("pair", examples.pairs)):
            rows = (
                [row | {name: text} for row, text in zip(rows, texts, strict=True)]
                if texts is not None
                else rows
            )
    write_atomically(path, encode_table(path, rows))
    return path
