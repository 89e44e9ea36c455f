"""The geometry of charts: turns the points of a metric into SVG paths, ticks and hover texts for
page.html.jinja.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from bert_recipe.reporting.records import Point, RunPhase, numbers
from bert_recipe.utils.json_files import JsonObject

LEFT, RIGHT, TOP, BOTTOM = 58, 384, 12, 186  # pixels of the plot, in a drawing of 400 x 222
MAX_POINTS = 160  # of a line
MAX_HOVERS = 60  # of a chart
MAX_MARKS = 60  # of a line: evaluations, resumes and skips
MAX_TICKS = 6
MIN_SMOOTHED = 20  # points; shorter lines are drawn as logged
# Of logarithmic axes, if values range this widely.
LOG_BASES = {"grad_norm": 10, "loss_scale": 2}
LOG_RATIO = 50
SHOWS_SKIPS = ("loss", "grad_norm", "loss_scale")
# Endings of metrics whose axis starts at zero.
FROM_ZERO = ("per_second", "utilization", "data_wait", "grad_norm")


class Series(NamedTuple):
    """A phase of one run with one seed.

    style: number of its colour and dashes.
    run: the run's name.
    """

    label: str
    style: int
    phase: RunPhase
    run: str


class Axis:
    """Maps values to pixels from `first` to `last`. `base`: of a logarithmic axis; `whole`: ticks
    at whole numbers.
    """

    def __init__(
        self, values: np.ndarray, first: float, last: float, base: int = 0, whole: bool = False
    ):
        self.base, self.first, self.last = base, first, last
        scaled = self._scale(values)
        low = float(scaled.min())
        high = float(scaled.max())
        is_one_value = high - low <= 1e-9 * max(abs(low), abs(high), 1e-200)
        if is_one_value:
            low -= abs(low) / 10 or 1
            high += abs(high) / 10 or 1
        # The smallest of 1, 2, 5 and 10 times a power of ten with at most MAX_TICKS steps.
        power = 10.0 ** math.floor(math.log10((high - low) / MAX_TICKS))
        step = next(k * power for k in (1, 2, 5, 10) if k * power * MAX_TICKS >= high - low)
        if whole or base:
            step = max(step, 1.0)
        ticks = [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
        self.low = low
        self.high = high
        self.ticks = [float(base) ** tick for tick in ticks] if base else ticks

    def _scale(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        return np.log(values) / math.log(self.base) if self.base else np.asarray(values, float)

    def pixels(self, values: Sequence[float] | np.ndarray) -> list[float]:
        share = (self._scale(values) - self.low) / (self.high - self.low)
        return (self.first + share * (self.last - self.first)).tolist()

    def labelled(self, show: Callable[[float], str]) -> list[tuple[float, str]]:
        return list(zip(self.pixels(self.ticks), map(show, self.ticks), strict=True))


class MetricValues(NamedTuple):
    """A metric of one series, as arrays of steps and values: [2, number of points].

    training, evaluations: as logged.
    averaged: what is drawn of `training`, see `average`.
    """

    series: Series
    training: np.ndarray
    evaluations: np.ndarray
    averaged: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, series: Series, metric: str) -> "MetricValues":
        training = steps_and_values(series.phase.points, metric)
        evaluations = steps_and_values(series.phase.evaluations, metric)
        return cls(series, training, evaluations, average(*training))


def steps_and_values(points: list[Point], metric: str) -> np.ndarray:
    pairs = [(point.step, point.metrics[metric]) for point in points if metric in point.metrics]
    return np.array(pairs, float).reshape(-1, 2).T


def make_chart(
    metric: str, title: str, series: list[Series], show: Callable[[float], str]
) -> JsonObject | None:
    """`metric` of all series over steps: SVG paths and pixels; None without finite values. show:
    formats a value.
    """
    data = [MetricValues.of(entry, metric) for entry in series]
    points = [array for values in data for array in (values.training, values.evaluations)]
    x, y = with_finite_values(*np.concatenate(points, axis=1))
    if not len(y):
        return None
    x_axis = Axis(x, LEFT + 3, RIGHT - 4, whole=True)
    y_axis = make_y_axis(metric, y)
    starts_above_zero = not y_axis.base and 0 < y_axis.low <= y.min() < y.max()
    readings = []
    for values in data:
        label, (steps, means, *_) = values.series.label, values.averaged
        readings.append((label, *with_finite_values(steps, means)))
        held_out = f"{label} held-out".strip()
        readings.append((held_out, *with_finite_values(*values.evaluations)))
    ends = [f"{label} {show(y[0])} to {show(y[-1])}" for label, _, y in readings if len(y)]
    return {
        "title": title,
        "range": f"{show(y.min())} to {show(y.max())}" if starts_above_zero else "",
        "description": f"{title} by step: {'; '.join(ends)}",
        "x_ticks": x_axis.labelled("{:,.0f}".format),
        "y_ticks": y_axis.labelled(show),
        "curves": [make_curve(metric, values, x_axis, y_axis) for values in data],
        "hovers": make_hovers(readings, x_axis, show),
    }


def with_finite_values(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return x[np.isfinite(y)], y[np.isfinite(y)]


def make_y_axis(metric: str, y: np.ndarray) -> Axis:
    ranges_widely = 0 < LOG_RATIO * y.min() < y.max()
    base = LOG_BASES.get(metric, 0) if ranges_widely else 0
    starts_at_zero = metric.endswith(FROM_ZERO) and not base
    return Axis(np.append(y, 0) if starts_at_zero else y, BOTTOM, TOP, base)


def make_curve(metric: str, values: MetricValues, x_axis: Axis, y_axis: Axis) -> JsonObject:
    """The line of one series, and the marks of its evaluations and events."""

    def pixels(points: np.ndarray) -> list[tuple[float, float]]:
        return list(zip(x_axis.pixels(points[0]), y_axis.pixels(points[1]), strict=True))

    def event_pixels(steps: list[int]) -> list[float]:
        return x_axis.pixels([steps[i] for i in spread(len(steps))])

    phase, evaluations = values.series.phase, values.evaluations
    x, y, low, high = values.averaged
    line = smooth(y) if is_noisy(y) else y
    is_simplified = line is not y or len(x) < values.training.shape[1]
    between = np.stack([low, high], axis=1).ravel() if is_simplified else np.empty(0)
    shown_evaluations = evaluations[:, spread(evaluations.shape[1])]
    best_step = numbers(phase.results).get("best_step", math.nan)
    dots = pixels(shown_evaluations)
    if np.isfinite(y).sum() < 3:  # too few for a line to be seen
        dots += pixels(np.stack([x, y]))
    skips = [point.step for point in phase.points if point.skipped]
    x_pixels = x_axis.pixels(x)
    return {
        "style": values.series.style,
        "line": path(x_pixels, y_axis.pixels(line)),
        # From the lowest to the highest value of each group, behind the line.
        "logged": path(np.repeat(x_pixels, 2)[: len(between)].tolist(), y_axis.pixels(between)),
        "evaluations": path(
            x_axis.pixels(shown_evaluations[0]), y_axis.pixels(shown_evaluations[1])
        ),
        "dots": with_finite_height(dots),
        "best": with_finite_height(pixels(evaluations[:, evaluations[0] == best_step])),
        "resumes": event_pixels(phase.resumes),
        "skips": event_pixels(skips) if metric.endswith(SHOWS_SKIPS) else [],
    }


def with_finite_height(dots: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return [dot for dot in dots if math.isfinite(dot[1])]


def make_hovers(
    readings: list[tuple[str, np.ndarray, np.ndarray]], axis: Axis, show: Callable[[float], str]
) -> list[tuple[float, float, list[str]]]:
    """Strips of the plot: left and width in pixels, and the values in it. `readings`: labels, x and
    y.
    """
    places = np.unique(np.concatenate([x for _, x, _ in readings]))
    places = places[spread(len(places), MAX_HOVERS)]
    edges = [-math.inf, *((places[1:] + places[:-1]) / 2).tolist(), math.inf]
    hovers = []
    for place, left, right in zip(places, edges, edges[1:], strict=False):
        inside = [(label, y[(left <= x) & (x < right)]) for label, x, y in readings]
        texts = [f"step {place:,.0f}"]
        texts += [
            f"{label} {show(values.mean())}".strip() for label, values in inside if len(values)
        ]
        first, last = np.clip(axis.pixels([left, right]), LEFT, RIGHT)
        hovers.append((first, last - first, texts))
    return hovers


def average(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, ...]:
    """x, and y's mean, minimum and maximum, of at most MAX_POINTS groups of neighbours; NaN only
    where all are NaN.
    """
    if len(x) <= MAX_POINTS:
        return x, y, y, y
    rows = []
    for group in np.array_split(np.arange(len(x)), MAX_POINTS):
        finite_y = y[group][np.isfinite(y[group])]
        if len(finite_y):
            rows.append([x[group].mean(), finite_y.mean(), finite_y.min(), finite_y.max()])
        else:
            rows.append([x[group].mean(), math.nan, math.nan, math.nan])
    return tuple(np.array(rows).T)


def is_noisy(y: np.ndarray) -> bool:
    """Whether a line is long and often changes its direction."""
    signs = np.sign(np.diff(y[np.isfinite(y)]))
    has_turned = signs[1:] * signs[:-1] < 0
    return len(signs) >= MIN_SMOOTHED and float(has_turned.mean()) > 0.3


def smooth(y: np.ndarray) -> np.ndarray:
    """The centred moving average over a 25th of the line, at least 3 points; gaps stay."""
    width = max(3, len(y) // 25)
    width += 1 - width % 2  # odd, so that a window has a centre
    window = np.ones(width)
    is_finite = np.isfinite(y)
    totals = np.convolve(np.where(is_finite, y, 0), window, "same")
    counts = np.convolve(is_finite, window, "same")
    return np.where(is_finite, totals / np.maximum(counts, 1), np.nan)


def spread(count: int, limit: int = MAX_MARKS) -> list[int]:
    """At most `limit` of the indices below `count`, evenly spread, the last included."""
    if count <= limit:
        return list(range(count))
    return sorted({count - 1 - i * count // limit for i in range(limit)})


def path(x: Sequence[float], y: Sequence[float]) -> str:
    """An SVG path through the points, with gaps where y is NaN."""
    commands = []
    command = "M"  # move to the first point, and to the first one after a gap
    for a, b in zip(x, y, strict=True):
        if math.isfinite(b):
            commands.append(f"{command}{a:.4g} {b:.4g}")
            command = "L"  # a line to the next one
        else:
            command = "M"
    return "".join(commands)
