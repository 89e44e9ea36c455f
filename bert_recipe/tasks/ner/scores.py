"""Scores of entities, and F1 of counts. Training, the comparison of runs and the report have them
from here; they need no other package, so that a base install evaluates.

Legend: n rows, K types of entities. Counts [n, 3]: of correct, predicted and expected entities.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from bert_recipe.tasks.ner.tags import Entity


def share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """part / whole, 0 where `whole` is 0."""
    return np.divide(part, whole, out=np.zeros_like(part, float), where=whole > 0)


def precision(counts_n3: np.ndarray) -> np.ndarray:
    return share(counts_n3[:, 0], counts_n3[:, 1])


def recall(counts_n3: np.ndarray) -> np.ndarray:
    return share(counts_n3[:, 0], counts_n3[:, 2])


def f1(counts_n3: np.ndarray) -> np.ndarray:
    return share(2 * counts_n3[:, 0], counts_n3[:, 1] + counts_n3[:, 2])


ENTITY_SCORES = {"precision": precision, "recall": recall, "f1": f1}


def entity_counts(expected: set[Entity], predicted: set[Entity]) -> tuple[int, int, int]:
    """Of one sentence."""
    return len(expected & predicted), len(predicted), len(expected)


def entity_scores(
    expected: Sequence[set[Entity]], predicted: Sequence[set[Entity]]
) -> dict[str, Any]:
    """Precision, recall and F1 of the entities of sentences, overall and per type. Without entities
    in the file, recall and F1 are NaN, and precision is, too, if none is predicted; of a type they
    are None.
    """
    correct = [true & guessed for true, guessed in zip(expected, predicted, strict=True)]
    numbers = [
        Counter(kind for kind, _, _ in itertools.chain(*spans))
        for spans in (correct, predicted, expected)
    ]
    kinds = sorted(numbers[1].keys() | numbers[2].keys())
    counts_K3 = np.array([[number[kind] for number in numbers] for kind in kinds], float)
    total_3 = counts_K3.reshape(-1, 3).sum(axis=0)
    scores = scores_of(total_3, 0.0)
    if scores.pop("support") == 0:
        scores |= {"recall": math.nan, "f1": math.nan}
        scores["precision"] = 0.0 if kinds else math.nan
    per_class = {
        kind: scores_of(counts_3, None) for kind, counts_3 in zip(kinds, counts_K3, strict=True)
    }
    return scores | {"per_class": per_class}


def scores_of(counts_3: np.ndarray, undefined: float | None) -> dict[str, Any]:
    """The scores of counts. undefined: a precision or a recall of no entities."""
    _, num_predicted, num_expected = counts_3
    scores: dict[str, Any] = {}
    for name, function in ENTITY_SCORES.items():
        scores[name] = float(function(counts_3[None])[0])
    if not num_predicted:
        scores["precision"] = undefined
    if not num_expected:
        scores["recall"] = undefined
    return scores | {"support": int(num_expected)}


def accuracy(expected: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> float:
    """The share of equal tags."""
    pairs = list(zip(itertools.chain(*expected), itertools.chain(*predicted), strict=True))
    return sum(a == b for a, b in pairs) / max(len(pairs), 1)
