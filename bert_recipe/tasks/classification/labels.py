"""The labels of a classification task: those of the training file or of a fine-tuned model, their
checks, and their values.

Legend: n samples, C labels.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bert_recipe.model.encoders.config import ModelConfig
from bert_recipe.tasks.baselines import constant_loss
from bert_recipe.tasks.classification.files import Examples, read_examples
from bert_recipe.tasks.classification.options import ClassificationOptions
from bert_recipe.tasks.classification.specs import LABEL_SEPARATOR, TaskSpec
from bert_recipe.tasks.labels import (
    check_spelling,
    is_number,
    known_label,
    other_separator,
    sort_labels,
)
from bert_recipe.utils.errors import UserError, listed
from bert_recipe.utils.progress import print_once

DEFAULT_LABELS = ("LABEL_0", "LABEL_1")  # of a config without names
MAX_CLASS_WEIGHT = 10  # a class of one sample in a thousand would decide the updates it is in
# Of numbers to learn. A gradient's norm has the fourth power of the deviation: above, it overflows.
MAX_MEAN, MAX_DEVIATION = 1e38, 1e9
MAX_TRIAL = 10  # texts of a file that may be a trial, where each has a label of its own


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


def check_kind(config: ModelConfig, folder: Path, spec: TaskSpec) -> None:
    """Raises UserError unless the model in `folder` predicts what the task needs for each text: one
    label, several labels, or a number.
    """
    has_labels = bool(config.labels)
    is_other_number = has_labels and config.is_number != spec.regression
    if config.multi_label == spec.multi_label and not is_other_number:
        return
    kind = "several labels" if config.multi_label else "one label"
    if config.is_number:
        kind = "a number"
    advice = "use another one, or another task"
    if spec.negatives:
        advice = "a reranker has one number: train it again with --negative-columns"
    raise UserError(f"{folder} is a model of {kind} per text: {advice}")


def labels_of_model(
    config: ModelConfig, folder: Path, spec: TaskSpec, options: ClassificationOptions
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The labels in the order of the task, and in the order of the model's outputs; the latter are
    () if that order is the same. Raises UserError if the model has other labels than the task.
    """
    task_labels = spec.labels  # none, if the files decide
    # transformers names the outputs LABEL_0, LABEL_1, ..., and writes no names of two of them.
    model_labels = config.labels or DEFAULT_LABELS
    has_names = any(label != f"LABEL_{index}" for index, label in enumerate(model_labels))
    if not has_names:
        if not task_labels:
            return numbered(len(model_labels), spec, options), ()
        if len(task_labels) == len(model_labels):
            return task_labels, ()
    labels = task_labels or sort_labels(spec.label_columns or model_labels)
    stored_labels = tuple(known_label(label, labels) for label in model_labels)
    if sorted(stored_labels) != sorted(labels):
        names = f"{listed(model_labels)}, and {spec.name} has {listed(labels)}"
        raise UserError(f"{folder} predicts {names}: use a model that was fine-tuned on this task")
    return labels, stored_labels


def numbered(count: int, spec: TaskSpec, options: ClassificationOptions) -> tuple[str, ...]:
    """The names of `count` outputs that have none: their numbers if the files to score have those
    as labels, else LABEL_0 and so on.
    """
    numbers = tuple(str(index) for index in range(count))
    labels: set[str] = set()
    if not spec.multi_label:
        for path in options.eval_files.values():
            labels.update(read_examples(path, spec, True, reading=options).labels)
    if labels and all(known_label(label, numbers) in numbers for label in labels):
        return numbers
    return tuple(f"LABEL_{index}" for index in range(count))


def loss_of_guessing(
    values: np.ndarray, spec: TaskSpec, class_weights: Sequence[float], label_smoothing: float
) -> float:
    """The task's `guessing_loss` for the labels `values` (see `label_values`)."""
    weights = np.array(class_weights) if class_weights else None
    if spec.negatives:
        share = float(np.mean(values > 0))
        return constant_loss(np.array([1 - share, share]))
    if spec.regression:
        return float(np.var(values))
    if spec.multi_label:
        present_C = values.mean(axis=0)
        shares_C2 = np.stack([1 - present_C, present_C], axis=1)
        weights_C2 = [None] * len(shares_C2) if weights is None else weights.reshape(2, -1).T
        return float(np.mean(list(map(constant_loss, shares_C2, weights_C2))))
    share_C = np.bincount(values, minlength=len(spec.labels)) / len(values)
    return constant_loss(share_C, weights, label_smoothing)


def mean_and_deviation(numbers_n: np.ndarray, path: Path) -> tuple[float, float]:
    """The mean and standard deviation of the numbers to learn; of equal ones the deviation is 1.
    Raises UserError if their squared errors are too large for float32.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        mean, deviation = float(numbers_n.mean()), float(numbers_n.std())
    if numbers_n.min() == numbers_n.max():
        mean, deviation = float(numbers_n[0]), 1.0
    if abs(mean) > MAX_MEAN or not deviation <= MAX_DEVIATION:
        raise UserError(
            f"{path}: the numbers to learn, from {numbers_n.min():.4g} to {numbers_n.max():.4g}, "
            f"are too large for float32, whose largest square is 3e38: divide them"
        )
    return mean, deviation


def first_log_odds(values_nC: np.ndarray, class_weights: Sequence[float]) -> np.ndarray:
    """The log-odds [C] of each label, where outputs for several labels begin: from 0, training
    lowers all outputs first, and may end with none above it.

    values_nC: multi-hot labels.
    class_weights: of the loss, see ClassificationTask.
    """
    num_present_C = values_nC.sum(axis=0)
    odds_C = (num_present_C + 0.5) / (len(values_nC) - num_present_C + 0.5)
    if class_weights:
        absent_C, present_C = np.array(class_weights).reshape(2, -1)
        odds_C = odds_C * present_C / absent_C
    return np.log(odds_C)


def counts_of(values: np.ndarray, spec: TaskSpec) -> dict[str, int]:
    """The number of samples of each label. values: see `label_values`."""
    if spec.multi_label:
        counts_C = values.sum(axis=0)
    else:
        counts_C = np.bincount(values, minlength=len(spec.labels))
    return dict(zip(spec.labels, counts_C.tolist(), strict=True))


def balanced_weights(path: Path, values: np.ndarray, spec: TaskSpec) -> tuple[float, ...]:
    """`ClassificationTask.class_weights` by the number of samples of each class. Example: classes
    of 10, 10 and 80 samples have the weights 3.33, 3.33 and 0.42.

    path: the training file, for messages.
    values: see `label_values`.

    Raises UserError if a class has no sample.
    """
    counts = counts_of(values, spec)
    num_samples = len(values)
    labels = list(counts)
    with_label_C = np.array(list(counts.values()))
    if spec.multi_label:
        # Two classes for each label: the samples without it, and those with it.
        class_sizes = np.concatenate([num_samples - with_label_C, with_label_C])
        class_labels = labels + labels
        num_classes = 2
    else:
        class_sizes = with_label_C
        class_labels = labels
        num_classes = len(labels)
    smallest = int(class_sizes.argmin())
    label = class_labels[smallest]
    if class_sizes[smallest] == 0:
        what = "no sample" if counts[label] == 0 else "only samples"
        raise UserError(
            f"what is trained on in {path} has {what} of {label!r}: leave out --class-weights, or "
            f"that label"
        )
    weights = num_samples / (num_classes * class_sizes)
    if weights[smallest] > MAX_CLASS_WEIGHT:
        print_once(
            f"note: {path}: --class-weights balanced is limited to {MAX_CLASS_WEIGHT}; {label!r} "
            f"with {class_sizes[smallest]} samples would have {weights[smallest]:.0f}"
        )
    return tuple(weights.clip(max=MAX_CLASS_WEIGHT).tolist())


def find_labels(examples: Examples, spec: TaskSpec) -> tuple[str, ...]:
    """The labels in a custom training file, sorted; by value if all are numbers."""
    if spec.label_columns:
        check_spelling(examples.path, spec.label_columns)
        return sort_labels(spec.label_columns)
    labels = {label for label_set in examples.label_sets for label in label_set}
    if not labels:
        raise UserError(f"{examples.path}: no text has a label: check the column of labels")
    if spec.multi_label:
        check_several(examples.path, examples.label_sets, labels, spec)
    else:
        check_single(examples, labels)
    check_spelling(examples.path, labels)
    return sort_labels(labels)


def check_learnt(everything: Examples, training: Examples, group_column: str) -> None:
    """Warns of labels that only held-out groups have. Raises UserError if no two are learnt."""
    label_sets = {*training.label_sets}
    unlearnt = set().union(*everything.label_sets) - set().union(*label_sets)
    if not unlearnt:
        return
    where = f"--group-column {group_column}: only held-out groups have {listed(sorted(unlearnt))}"
    if len(label_sets) < 2:
        raise UserError(f"{where}, and one label is left to learn: give another column")
    print_once(f"warning: {where}, which the model does not learn")


def check_single(examples: Examples, labels: set[str]) -> None:
    """Raises UserError if `labels`, one per text, cannot be classes, and warns if each may be
    several labels.
    """
    if len(labels) < 2:
        raise UserError(
            f"{examples.path}: all labels are {min(labels)!r}: there must be at least two"
        )
    fractions = []
    if all(map(is_number, labels)):
        fractions = [label for label in labels if float(label) % 1]
    if len(labels) == len(examples) > MAX_TRIAL:
        advice = "add --regression" if fractions else "check the column of labels"
        raise UserError(f"{examples.path}: each text has a label of its own: {advice}")
    if fractions:
        print_once(
            f"note: {examples.path}: labels such as {min(fractions)} are {len(labels)} classes: "
            f"add --regression if they are numbers"
        )
    separator = other_separator(labels)
    parts = {part for label in labels for part in label.split(separator)}
    if separator is not None and len(parts) < len(labels):
        joined = min(label for label in labels if separator in label)
        print_once(
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
        return np.array(
            [[label in cell for label in ids] for cell in examples.label_sets], np.int64
        )
    return np.array([ids[label] for label in examples.labels], np.int64)
