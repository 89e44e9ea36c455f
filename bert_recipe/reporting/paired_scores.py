"""Scores of the same rows by two models: the difference with its interval, and calibration.

Legend: n rows, K numbers per row, C classes, R resamples, S runs (seeds) of a model.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

RESAMPLES = 2000
RESAMPLES_AT_ONCE = 50  # so that the counts of rows take bounded memory
INTERVAL = (0.025, 0.975)  # 95%
CALIBRATION_BINS = 15  # as Guo et al. (2017)
LOG_TEMPERATURES = (-4.0, 4.0)  # bounds of the fit


class RowScore(Protocol):
    """A score of rows, each of which may count several times."""

    def resampled(self, counts_Rn: np.ndarray) -> np.ndarray:
        """The score of each resample [R], which has each row as often as `counts_Rn` says."""


@dataclass(frozen=True)
class SumScore(RowScore):
    """A function of the sums of numbers per row, such as the mean, or F1 of counts. function: from
    [R, K] to [R].
    """

    rows_nK: np.ndarray
    function: Callable[[np.ndarray], np.ndarray]

    def resampled(self, counts_Rn: np.ndarray) -> np.ndarray:
        return self.function(counts_Rn @ self.rows_nK)


@dataclass(frozen=True)
class MeanScore(RowScore):
    """The mean of a number per row."""

    values_n: np.ndarray

    def resampled(self, counts_Rn: np.ndarray) -> np.ndarray:
        return counts_Rn @ self.values_n / counts_Rn.sum(axis=1)


@dataclass(frozen=True)
class OrderScore(RowScore):
    """A score of the order of all rows, such as a correlation. metric: of labels and predictions;
    NaN where it is not defined.
    """

    labels_n: np.ndarray
    predictions_n: np.ndarray
    metric: Callable[[np.ndarray, np.ndarray], float]

    def resampled(self, counts_Rn: np.ndarray) -> np.ndarray:
        scores = []
        for counts_n in counts_Rn.astype(np.int64):
            pair = (np.repeat(values, counts_n) for values in (self.labels_n, self.predictions_n))
            scores.append(float(self.metric(*pair)))
        return np.array(scores)


class Difference(NamedTuple):
    """Of two models' scores of the same rows, as fractions. means: over the runs of each model."""

    means: tuple[float, float]
    interval: tuple[float, float]

    @property
    def value(self) -> float:
        return self.means[1] - self.means[0]

    @property
    def is_shown(self) -> bool:
        """Whether the interval leaves out 0."""
        return not self.interval[0] <= 0 <= self.interval[1]


def score_of(score: RowScore, num_rows: int) -> float:
    """The score of all rows."""
    return float(score.resampled(np.ones((1, num_rows)))[0])


def compare_scores(
    first: Sequence[RowScore], second: Sequence[RowScore], num_rows: int, same_seeds: bool
) -> Difference:
    """The difference between the mean scores of two models, one score per run of each, with the
    interval of the paired bootstrap over rows and runs: the multi-bootstrap (Sellam et al., 2022,
    "The MultiBERTs", section 3). same_seeds: whether the runs are pairs, which are drawn together.
    """
    random = np.random.default_rng(0)
    differences = []
    for counts_Rn in resampled_rows(num_rows, random):
        first_RS = np.stack([score.resampled(counts_Rn) for score in first], axis=1)
        second_RS = np.stack([score.resampled(counts_Rn) for score in second], axis=1)
        # The runs that each resample draws.
        first_runs_RS = random.integers(len(first), size=first_RS.shape)
        second_runs_RS = first_runs_RS
        if not same_seeds:
            second_runs_RS = random.integers(len(second), size=second_RS.shape)
        first_R = np.take_along_axis(first_RS, first_runs_RS, axis=1).mean(axis=1)
        second_R = np.take_along_axis(second_RS, second_runs_RS, axis=1).mean(axis=1)
        differences.append(second_R - first_R)
    low, high = np.nanquantile(np.concatenate(differences), INTERVAL).tolist()
    first_mean = float(np.mean([score_of(score, num_rows) for score in first]))
    second_mean = float(np.mean([score_of(score, num_rows) for score in second]))
    return Difference((first_mean, second_mean), (low, high))


def resampled_rows(num_rows: int, random: np.random.Generator) -> Iterator[np.ndarray]:
    """How often each row is in each resample [R, n], in parts of RESAMPLES."""
    for _ in range(RESAMPLES // RESAMPLES_AT_ONCE):
        drawn_Rn = random.integers(num_rows, size=(RESAMPLES_AT_ONCE, num_rows))
        yield np.stack([np.bincount(row, minlength=num_rows) for row in drawn_Rn]).astype(float)


class Calibration(NamedTuple):
    """error: expected calibration error. temperature: what logits are divided by for the smallest
    log loss.
    """

    error: float
    temperature: float


def calibration(probabilities_nC: np.ndarray, labels_n: np.ndarray) -> Calibration:
    """How well probabilities say how often predictions are right."""
    return Calibration(
        calibration_error(probabilities_nC, labels_n), fit_temperature(probabilities_nC, labels_n)
    )


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
    from scipy.special import log_softmax

    # Logits but for a constant per row; a float32 probability may be 0.
    logits_nC = np.log(np.maximum(probabilities_nC, np.finfo(np.float32).tiny))
    rows = np.arange(len(labels_n))

    def log_loss(log_temperature: float) -> float:
        scaled_nC = logits_nC / np.exp(log_temperature)
        return -float(log_softmax(scaled_nC, axis=1)[rows, labels_n].mean())

    best = minimize_scalar(log_loss, bounds=LOG_TEMPERATURES, method="bounded")
    return float(np.exp(best.x))
