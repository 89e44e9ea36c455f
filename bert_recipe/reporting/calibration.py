"""How well a model's probabilities say how often it is right.

Legend: n rows, C classes.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from bert_recipe.reporting.scored_rows import ScoredRows

CALIBRATION_BINS = 15  # as Guo et al. (2017)
LOG_TEMPERATURES = (-4.0, 4.0)  # bounds of the fit
# Rows from which a temperature is fitted. Without any, the best one is the lowest.
LEAST_WRONG = 10


class Calibration(NamedTuple):
    """error: expected calibration error.
    temperature: what logits are divided by for the smallest log loss; infinite where equal
        probabilities of all classes have it.
    calibrated_error: with a temperature that was fitted on other rows, a half each.
    """

    error: float
    temperature: float
    calibrated_error: float


def calibration(probabilities_nC: np.ndarray, labels_n: np.ndarray) -> Calibration:
    """How well probabilities say how often predictions are right."""
    # Drawn: rows of two classes in turn would be one class in each half.
    order = np.random.default_rng(0).permutation(len(labels_n))
    halves = [order[::2], order[1::2]]
    scaled_nC = np.empty(probabilities_nC.shape)
    for rows, other_rows in (halves, halves[::-1]):
        if len(labels_n[other_rows]):
            temperature = fit_temperature(probabilities_nC[other_rows], labels_n[other_rows])
        else:
            temperature = 1.0
        scaled_nC[rows] = np.exp(log_probabilities(probabilities_nC[rows], temperature))
    return Calibration(
        calibration_error(probabilities_nC, labels_n),
        fit_temperature(probabilities_nC, labels_n),
        calibration_error(scaled_nC, labels_n),
    )


def log_probabilities(probabilities_nC: np.ndarray, temperature: float) -> np.ndarray:
    """Of logits that are divided by `temperature`."""
    from scipy.special import log_softmax

    # Logits but for a constant per row; a float32 probability may be 0.
    logits_nC = np.log(np.maximum(probabilities_nC, np.finfo(np.float32).tiny))
    return log_softmax(logits_nC / temperature, axis=1)


def calibration_error(probabilities_nC: np.ndarray, labels_n: np.ndarray) -> float:
    """Expected calibration error: the mean difference, over bins of equal width, between the
    probability of predictions and the share that is right (Guo et al., 2017, "On Calibration of
    Modern Neural Networks").
    """
    confidence_n = probabilities_nC.max(axis=1)
    is_right_n = probabilities_nC.argmax(axis=1) == labels_n
    bins_n = (confidence_n * CALIBRATION_BINS).astype(np.int64)
    bins_n = np.minimum(bins_n, CALIBRATION_BINS - 1)  # a confidence of 1 is in the last bin
    differences = np.bincount(bins_n, weights=confidence_n - is_right_n)  # of each bin the sum
    return float(np.abs(differences).sum() / len(labels_n))


def fit_temperature(probabilities_nC: np.ndarray, labels_n: np.ndarray) -> float:
    from scipy.optimize import minimize_scalar

    rows = np.arange(len(labels_n))

    def log_loss(log_temperature: float) -> float:
        scaled_nC = log_probabilities(probabilities_nC, float(np.exp(log_temperature)))
        return -float(scaled_nC[rows, labels_n].mean())

    best = minimize_scalar(log_loss, bounds=LOG_TEMPERATURES, method="bounded")
    if best.x > LOG_TEMPERATURES[1] - 1e-3:  # the bound, near which the search ends
        return math.inf
    return float(np.exp(best.x))


def scored_probabilities(sets: Iterable[ScoredRows]) -> tuple[np.ndarray, np.ndarray] | None:
    """The probabilities [n, C] and labels [n] in all evaluation sets of a run; None without
    probabilities of classes.
    """
    probabilities = []
    labels = []
    for rows in sets:
        if rows.probabilities_nC is not None and rows.labels_n is not None:
            probabilities.append(rows.probabilities_nC)
            labels.append(rows.labels_n)
    return (np.concatenate(probabilities), np.concatenate(labels)) if labels else None
