"""Scores, predictions and prediction files of classification and regression.

Legend: n samples, C labels.
"""

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bert_recipe.tasks.classification.files import Examples
from bert_recipe.tasks.classification.specs import SUBMISSION_SETS, TaskSpec, set_prefix
from bert_recipe.tasks.mistakes import Mistake
from bert_recipe.tasks.predicted_rows import Prediction
from bert_recipe.utils.files import write_atomically
from bert_recipe.utils.output_tables import encode_table, write_like
from bert_recipe.utils.tables import Row
from bert_recipe.utils.text_files import TableFormat

NO_LABELS = "(none)"  # how a mistake shows that a text has none of several labels


def load_metrics() -> dict[str, Callable[[np.ndarray, np.ndarray], float]]:
    """Metrics by name, as functions of labels and predictions [n]."""
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import (
        accuracy_score,
        average_precision_score,
        f1_score,
        matthews_corrcoef,
    )

    def correlation(
        function: Callable[..., tuple[float, float]],
    ) -> Callable[[np.ndarray, np.ndarray], float]:
        """Returns NaN if all labels, or all predictions up to rounding, are equal."""

        def varies(values: np.ndarray) -> bool:
            return np.ptp(values) > 1e-6 * np.abs(values).max()

        return lambda labels, predictions: (
            function(labels, predictions)[0] if np.ptp(labels) and varies(predictions) else math.nan
        )

    return {
        "accuracy": accuracy_score,
        "average_precision": average_precision_score,
        "exact_match": accuracy_score,  # all labels of a text
        "f1": partial(f1_score, zero_division=0),
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
    if spec.regression:
        return logits_nC[:, 0].astype(np.float64)
    return logits_nC.argmax(axis=1)


def score(
    logits_nC: np.ndarray,
    values: np.ndarray,
    spec: TaskSpec,
    set_name: str = "",
) -> dict[str, Any]:
    """The task's metrics as fractions. Except for regression, also a table per label, and for
    classes the confusion matrix, whose rows are the true classes. In the table, None is a score
    that is not defined: of a label without samples, or that is never predicted. With several
    evaluation sets, keys are prefixed with the set's name.
    """
    metrics = load_metrics()
    predicted = predictions_of(logits_nC, spec)
    scores: dict[str, Any] = {}
    for name in spec.metrics:
        is_undefined = undefined_reason(values, spec, name) is not None
        scores[name] = math.nan if is_undefined else float(metrics[name](values, predicted))
    if not spec.regression:
        from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

        classes = range(len(spec.labels))
        names = ("precision", "recall", "f1", "support")
        columns = precision_recall_fscore_support(
            values, predicted, labels=classes, zero_division=np.nan
        )
        table_C4 = np.transpose(columns).tolist()
        scores["per_class"] = {}
        for label, row in zip(spec.labels, table_C4, strict=True):
            scores["per_class"][label] = dict(zip(names, map(defined, row), strict=True))
        if not spec.multi_label:
            scores["confusion_matrix"] = confusion_matrix(
                values, predicted, labels=classes
            ).tolist()
    return {set_prefix(set_name) + name: value for name, value in scores.items()}


def defined(value: float) -> float | None:
    return None if math.isnan(value) else value


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


def constant_prediction(logits_nC: np.ndarray, values: np.ndarray, spec: TaskSpec) -> str | None:
    """A warning if all rows have the same prediction and their labels `values` differ, else
    None.
    """
    predicted = predictions_of(logits_nC, spec)
    spread = np.ptp(predicted, axis=0) > 1e-6 * np.abs(predicted).max()
    if spread.any() or not np.ptp(values, axis=0).any():
        return None
    word = predicted_words(logits_nC[:1], spec)[0]
    return f"all {len(values)} rows have the same prediction, {word!r}"


def submission_name(spec: TaskSpec, set_name: str) -> str:
    return f"{spec.name}{SUBMISSION_SETS[set_name]}{spec.extension}"


def as_words(values: np.ndarray, spec: TaskSpec) -> list[str]:
    """Classes or labels as strings, see predictions_of."""
    if spec.multi_label:
        labels = np.array(spec.labels)
        return [spec.separator.join(labels[row_C > 0]) for row_C in values]
    return [spec.labels[index] for index in values]


def predicted_words(logits_nC: np.ndarray, spec: TaskSpec) -> list[str]:
    """The predictions as strings: classes, labels, or numbers clipped to the task's range."""
    predicted = predictions_of(logits_nC, spec)
    if not spec.regression:
        return as_words(predicted, spec)
    if spec.score_range is None:
        return list(map(repr, predicted.tolist()))
    return [f"{value:.3f}" for value in predicted.clip(*spec.score_range)]


def probabilities(logits_nC: np.ndarray, spec: TaskSpec) -> np.ndarray:
    """Of each label [n, C], in float64, which tells those near 1 apart."""
    logits = torch.from_numpy(logits_nC).double()
    return (logits.sigmoid() if spec.multi_label else logits.softmax(1)).numpy()


def sureness(logits_nC: np.ndarray, spec: TaskSpec) -> np.ndarray:
    """The probability of what is predicted: of the class [n]; of several labels of each, present or
    absent [n, C].
    """
    predicted, shares_nC = predictions_of(logits_nC, spec), probabilities(logits_nC, spec)
    if spec.multi_label:
        return np.where(predicted > 0, shares_nC, 1 - shares_nC)
    return np.take_along_axis(shares_nC, predicted[:, None], axis=1)[:, 0]


def confidences(logits_nC: np.ndarray, spec: TaskSpec) -> list[float]:
    """The probability of each prediction; of several labels, of the one that is least sure."""
    sure = sureness(logits_nC, spec)
    return (sure.min(axis=1) if spec.multi_label else sure).tolist()


def probability_columns(logits_nC: np.ndarray, spec: TaskSpec) -> list[Row]:
    """The probability of each label, for each row; none for regression."""
    if spec.regression:
        return [{} for _ in logits_nC]
    names = [f"probability {label}" for label in spec.labels]
    shares_nC = probabilities(logits_nC, spec).tolist()
    return [dict(zip(names, shares, strict=True)) for shares in shares_nC]


def write_submission(
    folder: Path, examples: Examples, logits_nC: np.ndarray, spec: TaskSpec, set_name: str
) -> Path:
    """Writes the predictions of a published task in the submission format of GLUE (TSV) or
    SuperGLUE (JSON lines), and returns the path.
    """
    words = predicted_words(logits_nC, spec)
    path = folder / submission_name(spec, set_name)
    if spec.extension == ".jsonl":
        lines = [
            json.dumps({"idx": int(index), "label": word}) + "\n"
            for index, word in zip(examples.indices, words, strict=True)
        ]
        write_atomically(path, "".join(lines))
        return path
    rows: list[Row] = [
        {"index": index, "prediction": word}
        for index, word in zip(examples.indices, words, strict=True)
    ]
    write_atomically(path, encode_table(path, rows))
    return path


def class_predictions(logits_nC: np.ndarray, spec: TaskSpec) -> list[Prediction]:
    """For each row its `label`, or `labels` if there are several, `confidence` and the probability
    of each label; or `score`, a number.
    """
    predicted = predictions_of(logits_nC, spec)
    if spec.regression:
        return [Prediction({"score": number}) for number in predicted.tolist()]
    parts = zip(
        predicted,
        confidences(logits_nC, spec),
        probability_columns(logits_nC, spec),
        strict=True,
    )
    predictions = []
    for chosen, confidence, columns in parts:
        row: Row = {}
        if spec.multi_label:
            row["labels"] = [spec.labels[index] for index in np.flatnonzero(chosen)]
        else:
            row["label"] = spec.labels[chosen]
        ranked = list(zip(columns.values(), spec.labels, strict=True))
        ranked.sort(key=lambda entry: entry[0], reverse=True)
        predictions.append(Prediction(row | {"confidence": confidence} | columns, [ranked]))
    return predictions


def prediction_rows(
    examples: Examples,
    logits_nC: np.ndarray,
    spec: TaskSpec,
    words: Sequence[Any],
    truths: Sequence[Any],
) -> list[Row]:
    """What people read comes first: texts, label, prediction and its confidence. The probabilities
    of all labels are the last columns. words: predictions; truths: labels.
    """
    columns: dict[str, Sequence[Any]] = {"text": examples.texts}
    if examples.pairs is not None:
        columns["pair"] = examples.pairs
    columns |= {"label": truths, "prediction": words}
    if not spec.regression:
        columns["confidence"] = confidences(logits_nC, spec)
    columns["index"] = examples.indices
    rows = zip(*columns.values(), strict=True)
    return [
        dict(zip(columns, row, strict=True)) | shares
        for row, shares in zip(rows, probability_columns(logits_nC, spec), strict=True)
    ]


def scored_name(set_name: str) -> str:
    """Without the extension."""
    return f"eval_predictions{SUBMISSION_SETS[set_name]}"


def write_scored(
    folder: Path,
    examples: Examples,
    logits_nC: np.ndarray,
    values: np.ndarray,
    spec: TaskSpec,
    set_name: str,
    table_format: TableFormat,
) -> tuple[Path, list[Mistake]]:
    """Writes every row of a file with labels beside its prediction, in the format of that file,
    which was read as `table_format`; returns the path and the mistakes.
    """
    cells: tuple[Sequence[Any], Sequence[Any]]
    if spec.regression:  # the numbers that are scored are not clipped
        cells = predictions_of(logits_nC, spec).tolist(), values.tolist()
        words, truths = list(map(repr, cells[0])), [f"{value:g}" for value in values]
    else:
        words, truths = predicted_words(logits_nC, spec), as_words(values, spec)
        cells = words, truths
    doubts = wrongness(logits_nC, values, spec)
    mistakes = []
    for number, (truth, word) in enumerate(zip(truths, words, strict=True)):
        pair = "" if examples.pairs is None else f" | {examples.pairs[number]}"
        text = examples.texts[number] + pair
        if doubts[number] > 0:
            shown = (truth or NO_LABELS, word or NO_LABELS)
            mistakes.append(Mistake(text, *shown, float(doubts[number])))
    rows = prediction_rows(examples, logits_nC, spec, *cells)
    path = write_like(folder / scored_name(set_name), rows, examples.path, table_format)
    return path, mistakes


def wrongness(logits_nC: np.ndarray, values: np.ndarray, spec: TaskSpec) -> np.ndarray:
    """How wrong each prediction is [n], 0 for right ones: the probability given to the wrong class,
    the largest one of several labels, or the absolute error of a number. A reranker is wrong where
    its logit has the wrong sign. values: see `label_values`.
    """
    predicted = predictions_of(logits_nC, spec)
    if spec.negatives:
        is_wrong_n = (predicted > 0) != (values > 0)
        return np.where(is_wrong_n, 1 / (1 + np.exp(-np.abs(predicted))), 0.0)
    if spec.regression:
        return np.abs(predicted - values)
    wrong = np.where(predicted != values, sureness(logits_nC, spec), 0.0)
    return wrong.max(axis=1) if spec.multi_label else wrong
