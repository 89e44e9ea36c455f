"""Draws the metrics of training runs as SVG for report_page.py. Colours are CSS variables, so that one drawing suits
light and dark pages."""

import io
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape

import numpy as np

from report_records import Point, Run, Stage
from utils.errors import UserError

WIDTH, HEIGHT, FONT_SIZE = 400, 236, 12  # CSS pixels: as wide as a phone, three beside each other on a laptop
TICK_WIDTH = 42  # for a label and the space around it
NUM_COLORS = 8
TEXT, GRID, SKIPPED = "#000011", "#000012", "#000013"  # placeholders that become the CSS variables --c11 to --c13
MAX_POINTS = 30_000  # in the lines of all charts together: about 20 bytes each, three times where there is a band
POINTS_PER_LINE = (40, 240)
MAX_MARKS = 60  # evaluations, skipped updates and resumes, per panel and run
TIME_UNITS = (("seconds", 1.0, 180.0), ("minutes", 60.0, 180.0), ("hours", 3600.0, 96.0), ("days", 86400.0, math.inf))
LOG_RATIO = 50  # a metric with a wider range of values gets a logarithmic axis, if it is one of LOG_METRICS
LOG_METRICS = ("grad_norm", "loss_scale")
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
PERCENT_METRICS = ("utilization", "data_wait")


@dataclass(frozen=True)
class Line:
    """A metric of one stage of a run."""

    run_number: int
    stage: Stage
    marks_skips: bool
    x: np.ndarray
    y: np.ndarray
    eval_x: np.ndarray
    eval_y: np.ndarray


def check_matplotlib() -> None:
    """Raises UserError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError("report.py needs matplotlib, which is not installed: pip install matplotlib") from error


def is_percentage(metric: str) -> bool:
    return metric.endswith("accuracy") or metric in PERCENT_METRICS


def run_color(number: int) -> str:
    return f"#{number % NUM_COLORS + 1:06d}"


def metrics_of(runs: Iterable[Run]) -> list[str]:
    """All metrics, in the order of their first occurrence, those that are never finite left out."""
    points = (point for run in runs for stage in run.stages for point in [*stage.points, *stage.evaluations])
    return list({name: None for point in points for name, value in point.metrics.items() if math.isfinite(value)})


def time_unit(runs: Iterable[Run]) -> tuple[str, float]:
    """The unit for the longest stage and its length in seconds."""
    longest = max((stage.seconds for run in runs for stage in run.stages), default=0.0)
    return next((name, seconds) for name, seconds, limit in TIME_UNITS if longest / seconds < limit)


def draw_chart(
    runs: list[Run], stage_names: list[str], metric: str, label: str, over_time: bool, max_points: int
) -> str:
    """`metric` of all runs as an SVG element: one panel per stage that has it, over steps or time.

    max_points: points per line; longer lines are averaged.
    """
    import matplotlib
    from matplotlib.figure import Figure

    unit, unit_seconds = time_unit(runs)

    def x_of(points: list[Point]) -> np.ndarray:
        return np.array([point.seconds / unit_seconds if over_time else point.step for point in points])

    panels = [panel for name in stage_names if (panel := find_lines(runs, name, metric, x_of))]
    style = {"svg.fonttype": "none", "svg.hashsalt": f"{metric}-{over_time}", "font.size": FONT_SIZE,
             "path.simplify": False, "axes.linewidth": 0.8, "font.sans-serif": ["DejaVu Sans"]}  # fmt: skip
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.02, h_pad=0.02, wspace=0.05)
        lengths = [math.sqrt(max(line.x.max(initial=0) for line in panel) or 1) for panel in panels]
        widths = [max(length / sum(lengths), 0.8 / len(panels)) for length in lengths]
        share_y = have_like_ranges(panels)
        all_axes = figure.subplots(1, len(panels), sharey=share_y, squeeze=False, width_ratios=widths)[0]
        scale = logarithmic_base(metric, panels)
        room = WIDTH - TICK_WIDTH * (1 if share_y else len(panels))  # without the labels of the y axes
        for i, (axes, panel) in enumerate(zip(all_axes, panels, strict=True)):
            draw_panel(axes, panel, x_of, unit_seconds if over_time else None, max_points, len(runs) > 1)
            style_axes(axes, metric, scale, max(1, int(widths[i] / sum(widths) * room / TICK_WIDTH)))
            title = next(line.stage.title for line in panel)
            axes.set_title(title, fontsize=FONT_SIZE, color=TEXT, loc="left", pad=7)
            axes.set_xlabel(unit if over_time else "step", fontsize=FONT_SIZE, color=TEXT)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return to_inline_svg(file.getvalue(), label)


def find_lines(runs: list[Run], stage_name: str, metric: str, x_of: Callable[[list[Point]], np.ndarray]) -> list[Line]:
    lines = []
    for number, run in enumerate(runs):
        stage = run.stage(stage_name)
        if stage is None:
            continue
        points = [point for point in stage.points if metric in point.metrics]
        evaluations = [point for point in stage.evaluations if metric in point.metrics]
        if points or evaluations:
            y, eval_y = (np.array([point.metrics[metric] for point in group]) for group in (points, evaluations))
            marks_skips = metric.endswith("loss") or metric in LOG_METRICS
            lines.append(Line(number, stage, marks_skips, x_of(points), y, x_of(evaluations), eval_y))
    return lines


def finite_values(panel: list[Line]) -> np.ndarray:
    values = np.concatenate([array for line in panel for array in (line.y, line.eval_y)])
    return values[np.isfinite(values)]


def have_like_ranges(panels: list[list[Line]]) -> bool:
    """Whether the panels can share a y axis: their largest values are within a factor of ten."""
    largest = [np.abs(values).max() for panel in panels if (values := finite_values(panel)).size]
    return not largest or max(largest) <= 10 * min(largest)


def logarithmic_base(metric: str, panels: list[list[Line]]) -> int | None:
    values = np.concatenate([finite_values(panel) for panel in panels])
    if metric not in LOG_METRICS or not values.size or values.min() <= 0 or values.max() < LOG_RATIO * values.min():
        return None
    return 2 if metric == "loss_scale" else 10


def draw_panel(
    axes, panel: list[Line], x_of, seconds_per_unit: float | None, max_points: int, several_runs: bool
) -> None:
    """Each run's line with its range, evaluations, resumes and skipped updates."""
    for line in panel:
        color = run_color(line.run_number)
        x, mean, low, high = downsample(line.x, line.y, max_points)
        if len(x) < len(line.x):
            axes.fill_between(x, low, high, color=color, alpha=0.1 if several_runs else 0.2, linewidth=0)
        # One or two points make no visible line.
        marker = "." if np.isfinite(mean).sum() < 3 else None
        dashes = "-" if line.run_number < NUM_COLORS else "--"
        axes.plot(x, mean, color=color, linewidth=1.4, marker=marker, linestyle=dashes)
        chosen = spread(len(line.eval_x), MAX_MARKS)
        axes.plot(line.eval_x[chosen], line.eval_y[chosen], color=color, marker="o", ms=3.6, lw=0.7, ls=":")
        for index in spread(len(line.stage.resumes), MAX_MARKS):
            step, seconds = line.stage.resumes[index]
            place = step if seconds_per_unit is None else seconds / seconds_per_unit
            axes.axvline(place, color=color, linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.75)
        if line.marks_skips:
            skipped = x_of([point for point in line.stage.points if point.skipped])
            skipped = skipped[spread(len(skipped), MAX_MARKS)]
            mark_color = color if several_runs else SKIPPED
            above = {"transform": axes.get_xaxis_transform(), "clip_on": False, "in_layout": False}
            axes.plot(skipped, np.ones(len(skipped)), color=mark_color, marker="v", ms=4.5, ls="none", **above)
    axes.margins(x=0.03)


def downsample(x: np.ndarray, y: np.ndarray, max_points: int) -> tuple[np.ndarray, ...]:
    """Averages neighbouring points so that at most `max_points` are left: x, and y's mean, minimum and maximum.

    Values that are not finite are left out; NaN where a group has no finite value.
    """
    if len(x) <= max_points:
        y = np.where(np.isfinite(y), y, np.nan)
        return x, y, y, y
    starts = np.linspace(0, len(x), max_points, endpoint=False).astype(int)
    finite = np.isfinite(y)
    counts = np.add.reduceat(finite.astype(float), starts)
    counts[counts == 0] = np.nan
    mean = np.add.reduceat(np.where(finite, y, 0.0), starts) / counts
    low = np.minimum.reduceat(np.where(finite, y, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, y, -np.inf), starts)
    low[np.isnan(counts)] = high[np.isnan(counts)] = np.nan
    return np.add.reduceat(x.astype(float), starts) / np.diff([*starts, len(x)]), mean, low, high


def spread(count: int, limit: int) -> list[int]:
    """At most `limit` of the indices below `count`, evenly spread, the last included."""
    return sorted({count - 1 - i * count // limit for i in range(limit)}) if count > limit else list(range(count))


def style_axes(axes, metric: str, log_base: int | None, ticks: int) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    axes.spines[["top", "right"]].set_visible(False)
    for spine in axes.spines.values():
        spine.set_color(GRID)
    axes.tick_params(colors=TEXT, labelsize=FONT_SIZE - 1, length=0)
    axes.grid(color=GRID, linewidth=0.6)
    axes.xaxis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    if log_base is not None:
        axes.set_yscale("log", base=log_base)
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: y_label(value, metric, log_base)))


def y_label(value: float, metric: str, log_base: int | None) -> str:
    if log_base == 2:
        return "2" + f"{math.log2(value):g}".translate(SUPERSCRIPTS)
    return f"{100 * value:.3g}%" if is_percentage(metric) else short_number(value)


def short_number(value: float) -> str:
    """As 1.5k, 20M, 0.003 or 2e-5."""
    for limit, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / unit:.4g}{letter}"
    return "0" if abs(value) < 1e-12 else f"{value:.4g}".replace("e-0", "e-")


def to_inline_svg(svg: str, label: str) -> str:
    """matplotlib's SVG file as an element of an HTML page: without header, metadata and unused ids; sizes, fonts and
    colours left to CSS, coordinates rounded to a tenth of a pixel."""

    def rounded(attribute: re.Match) -> str:
        return re.sub(r"-?\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), attribute[0])

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(
        r"<svg [^>]*>",
        f'<svg class="chart" role="img" aria-label="{escape(label)}" viewBox="0 0 {WIDTH} {HEIGHT}">',
        svg,
    )
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r' id="[A-Za-z0-9.]+_\d+"| transform="rotate\(-0 [^"]*"| font-family: [^;"]*;', "", svg)
    svg = re.sub(r"#0000(\d\d)\b", r"var(--c\1)", svg)
    svg = re.sub(r' (d|x|y)="[^"]*"', rounded, svg)
    return re.sub(r"\s*\n\s*", "\n", svg).strip()
