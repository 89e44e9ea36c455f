"""Scores of the same rows by two models: the difference with its interval.

Legend: n rows, K numbers per row, G groups of rows, S runs (seeds) of a model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

LEVEL = 0.05  # of false verdicts; intervals have the rest, 95%
SMALLEST_P_VALUE = 1e-12
ROUNDING = 1e-12  # of scores
ROWS_AT_ONCE = 4096  # so that the sums without each row take bounded memory
# With fewer rows, all may differ in one direction by chance in more than LEVEL of the cases.
MIN_ROWS = 6
MAX_GROUPS = 500  # of rows that are left out together, where each score needs all rows


class RowScore(Protocol):
    """A score of rows."""

    def value(self) -> float:
        """The score of all rows."""

    def pseudo_values(self) -> np.ndarray:
        """The jackknife's pseudo-value of each row, or group of rows [G]: G times the score less
        G - 1 times the score without it (Tukey, 1958). Of a mean, these are the rows' numbers.
        """


@dataclass(frozen=True)
class SumScore(RowScore):
    """A function of the sums of numbers per row, such as F1 of counts. function: from [n, K] to
    [n]; K may be several dimensions.
    """

    rows_nK: np.ndarray
    function: Callable[[np.ndarray], np.ndarray]

    def value(self) -> float:
        return float(self.function(self.rows_nK.sum(axis=0, keepdims=True))[0])

    def pseudo_values(self) -> np.ndarray:
        sums_K = self.rows_nK.sum(axis=0)
        num_rows = len(self.rows_nK)
        if num_rows == 1:
            return np.array([self.value()])
        without = []
        for first in range(0, num_rows, ROWS_AT_ONCE):
            without.append(self.function(sums_K - self.rows_nK[first : first + ROWS_AT_ONCE]))
        return num_rows * self.value() - (num_rows - 1) * np.concatenate(without)


@dataclass(frozen=True)
class MeanScore(RowScore):
    """The mean of a number per row."""

    values_n: np.ndarray

    def value(self) -> float:
        return float(self.values_n.mean())

    def pseudo_values(self) -> np.ndarray:
        return self.values_n


@dataclass(frozen=True)
class PairScore(RowScore):
    """A score of classes, which are few, so that many rows are equal pairs of label and prediction.
    metric: of scikit-learn, of pairs and their `sample_weight`.
    """

    labels_n: np.ndarray
    predictions_n: np.ndarray
    metric: Callable[..., float]

    def value(self) -> float:
        return float(self.metric(self.labels_n, self.predictions_n))

    def pseudo_values(self) -> np.ndarray:
        num_rows = len(self.labels_n)
        if num_rows == 1:
            return np.array([self.value()])
        rows_n2 = np.stack([self.labels_n, self.predictions_n], axis=1)
        pairs, pair_n, counts = np.unique(rows_n2, axis=0, return_inverse=True, return_counts=True)
        without = []  # a row of each pair
        for place in range(len(pairs)):
            weights = counts - (np.arange(len(pairs)) == place)
            present = weights > 0  # a class without a row is none
            without.append(self.metric(*pairs[present].T, sample_weight=weights[present]))
        return num_rows * self.value() - (num_rows - 1) * np.array(without)[pair_n.ravel()]


@dataclass(frozen=True)
class OrderScore(RowScore):
    """A score of the order of all rows, such as a correlation. metric: of labels and predictions;
    NaN where it is not defined.
    """

    labels_n: np.ndarray
    predictions_n: np.ndarray
    metric: Callable[[np.ndarray, np.ndarray], float]

    def value(self) -> float:
        return float(self.metric(self.labels_n, self.predictions_n))

    def pseudo_values(self) -> np.ndarray:
        num_groups = min(len(self.labels_n), MAX_GROUPS)
        group_n = np.arange(len(self.labels_n)) % num_groups
        without = []
        for group in range(num_groups):
            is_left = group_n != group
            without.append(self.metric(self.labels_n[is_left], self.predictions_n[is_left]))
        without_G = np.nan_to_num(np.array(without, float))  # 0 where it is not defined
        return num_groups * self.value() - (num_groups - 1) * without_G


class ErrorPart(NamedTuple):
    """A part of the squared standard error of a difference, and its degrees of freedom."""

    variance: float
    degrees: float


class Difference(NamedTuple):
    """Of two models' scores of the same rows, as fractions.

    means: over the runs of each model.
    interval: 95%; with one run of a model that of the rows alone, for these two runs.
    p_value: of models that do not differ; None with one run of a model, which does not say what
        another seed would change.
    """

    means: tuple[float, float]
    interval: tuple[float, float]
    p_value: float | None

    @property
    def value(self) -> float:
        return self.means[1] - self.means[0]

    @property
    def leaves_out_zero(self) -> bool:
        return self.interval[0] > 0 or self.interval[1] < 0

    @property
    def is_shown(self) -> bool:
        """Whether one of the models is better: for other rows and other seeds, too."""
        return self.p_value is not None and self.p_value < LEVEL


def compare_scores(
    first: Sequence[RowScore], second: Sequence[RowScore], same_seeds: bool
) -> Difference:
    """The difference between the mean scores of two models, one score per run of each.

    same_seeds: whether the runs are pairs, which may share the order of the data and the head's
        first weights.

    What chance adds has two parts. That of the runs: the variance of the pairs' differences, or of
    each model's scores if the runs are no pairs (Welch, 1947). It holds what runs differ by on
    single rows, too; this alone if the scores of few rows are equal by chance. That of the rows:
    what all runs say of a row, which is the covariance of the rows' differences between runs. Each
    variance has its own quantile of Student's t, and the squares of the products are added. For
    equal models, at most 5% of the intervals do not contain 0, whichever part is the larger one
    (Banerjee, 1960, "Approximate confidence interval for linear functions of means of k
    populations when the population variances are not equal").
    """
    first_S, second_S = (np.array([score.value() for score in side]) for side in (first, second))
    means = (float(first_S.mean()), float(second_S.mean()))
    value = means[1] - means[0]
    first_SG, second_SG = (
        np.stack([score.pseudo_values() for score in side]) for side in (first, second)
    )
    num_groups = first_SG.shape[1]
    degrees = num_groups - 1  # of the rows
    # Rows that differ alike have no variance, and few of them show nothing: a test of signs has
    # this p-value at least.
    least_half = abs(value) if num_groups < MIN_ROWS else 0.0
    least_p_value = 0.5 ** (num_groups - 1)
    if min(len(first), len(second)) == 1:
        difference_G = second_SG.mean(axis=0) - first_SG.mean(axis=0)
        half = half_width([ErrorPart(covariance(difference_G, difference_G), degrees)], LEVEL)
        half = max(half, least_half)
        return Difference(means, (value - half, value + half), None)
    if same_seeds:
        of_runs = with_rows(paired_part(second_S - first_S), second_SG - first_SG)
        of_rows = covariance_between_runs(second_SG - first_SG)
    else:
        of_runs = with_rows(unpaired_part(first_S, second_S), first_SG, second_SG)
        of_rows = covariance_between_runs(first_SG) + covariance_between_runs(second_SG)
        of_rows -= 2 * covariance(first_SG.mean(axis=0), second_SG.mean(axis=0))
    parts = [of_runs, ErrorPart(max(0.0, of_rows), degrees)]
    half = max(half_width(parts, LEVEL), least_half)
    p_value = max(p_value_of(value, parts), least_p_value)
    return Difference(means, (value - half, value + half), p_value)


def paired_part(differences_S: np.ndarray) -> ErrorPart:
    num_runs = len(differences_S)
    return ErrorPart(float(differences_S.var(ddof=1)) / num_runs, num_runs - 1)


def unpaired_part(first_S: np.ndarray, second_S: np.ndarray) -> ErrorPart:
    """With the degrees of freedom of Welch and Satterthwaite."""
    first, second = map(paired_part, (first_S, second_S))
    total = first.variance + second.variance
    if not total:
        return ErrorPart(0.0, min(first.degrees, second.degrees))
    squares = first.variance**2 / first.degrees + second.variance**2 / second.degrees
    return ErrorPart(total, total**2 / squares)


def with_rows(of_runs: ErrorPart, *sides_SG: np.ndarray) -> ErrorPart:
    """`of_runs`, or if runs of equal scores differ on rows, what they differ by there."""
    if of_runs.variance > ROUNDING**2:
        return of_runs
    variances = [side_SG.var(axis=0, ddof=1).sum() / side_SG.size for side_SG in sides_SG]
    num_groups = sides_SG[0].shape[1]
    return ErrorPart(float(sum(variances)) / num_groups, of_runs.degrees)


def covariance(first_G: np.ndarray, second_G: np.ndarray) -> float:
    """Of the means of two numbers per row; 0 of a single row."""
    if len(first_G) == 1:
        return 0.0
    products = (first_G - first_G.mean()) * (second_G - second_G.mean())
    return float(products.sum()) / (len(first_G) - 1) / len(first_G)


def covariance_between_runs(values_SG: np.ndarray) -> float:
    """The mean over all pairs of different runs of the covariance of their means."""
    num_runs = len(values_SG)
    sum_G = values_SG.sum(axis=0)
    of_same_run = sum(covariance(values_G, values_G) for values_G in values_SG)
    return (covariance(sum_G, sum_G) - of_same_run) / (num_runs * (num_runs - 1))


def half_width(parts: Sequence[ErrorPart], level: float) -> float:
    """Of the interval which chance leaves with a probability of at most `level`."""
    from scipy.special import stdtrit  # the quantile of Student's t

    present = [part for part in parts if part.variance != 0]
    squares = [stdtrit(part.degrees, level / 2) ** 2 * part.variance for part in present]
    return float(sum(squares) ** 0.5)


def p_value_of(value: float, parts: Sequence[ErrorPart]) -> float:
    """The level whose interval ends at 0."""
    from scipy.optimize import brentq

    if abs(value) < ROUNDING:
        return 1.0
    if abs(value) >= half_width(parts, SMALLEST_P_VALUE):
        return SMALLEST_P_VALUE

    def beyond_zero(log_level: float) -> float:
        return half_width(parts, float(np.exp(log_level))) - abs(value)

    return float(np.exp(brentq(beyond_zero, np.log(SMALLEST_P_VALUE), 0.0)))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values of several comparisons, corrected for their number (Holm, 1979)."""
    order = np.argsort(p_values)
    factors = np.arange(len(p_values), 0, -1)
    corrected = np.empty(len(p_values))
    corrected[order] = np.minimum(1, np.maximum.accumulate(np.array(p_values)[order] * factors))
    return corrected.tolist()
