"""The HTML page of a training report, by the template page.html.jinja: one file without scripts or
requests.
"""

import datetime
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jinja2
from markupsafe import Markup, escape

from bert_recipe.reporting.charts import Series, make_chart
from bert_recipe.reporting.comparison import DIFFERENCE_HEADER
from bert_recipe.reporting.comparison_cards import ComparisonCard
from bert_recipe.reporting.facts import (
    final_facts,
    further_facts,
    main_facts,
    show,
    show_setting,
    show_time,
    title_of,
)
from bert_recipe.reporting.records import (
    PHASE_TITLES,
    Run,
    RunPhase,
    differences,
    numbers,
    printable,
)
from bert_recipe.tasks.baselines import BASELINES, ROWS
from bert_recipe.tasks.mistakes import MISTAKES
from bert_recipe.utils.json_files import JsonObject

# The order of the charts; other metrics follow.
ORDER = (
    "loss",
    "accuracy",
    "mlm_accuracy",
    "nsp_accuracy",
    "mlm_loss",
    "nsp_loss",
    "mask_rate",
    "learning_rate",
    "grad_norm",
)
Key = TypeVar("Key")
Value = TypeVar("Value")

# Omitted if tokens_per_second is logged, because they are equivalent.
OTHER_SPEEDS = (
    "sequences_per_second",
    "step_seconds",
    "model_tflops",
    "seqs_per_sec",
    "step_cost",
    "step_samples",
)
FOLDED = ("tokens_per_second", "utilization", "data_wait", *OTHER_SPEEDS)  # charts
MAX_HEADER = 100  # characters side by side


def group_series(runs: list[Run]) -> list[list[Series]]:
    """The phases of all runs and seeds, grouped by name."""
    groups: dict[str, list[Series]] = {name: [] for name in PHASE_TITLES}
    styles: dict[Any, int] = {}
    for number, run in enumerate(runs):
        for phase in run.phases:
            label = [run.name] if len(runs) > 1 else []
            for name, value in (("seed", phase.seed), ("fold", phase.fold)):
                # A run that is the folder of a seed or fold has its name.
                is_named = bool(label) and run.name.endswith(f"{name}-{value}")
                label += [] if value is None or is_named else [f"{name} {value}"]
            style = styles.setdefault((number, phase.seed, phase.fold), len(styles))
            groups.setdefault(phase.name, []).append(
                Series(", ".join(label), style, phase, run.name)
            )
    # The means of seeds come before the seeds.
    order = [name for name in groups if any(entry.phase.runs for entry in groups[name])]
    order += [name for name in groups if name not in order]
    return [groups[name] for name in order if groups[name]]


def make_section(series: list[Series]) -> JsonObject:
    """Template data of a phase. Tables are lists of rows: a name, and a value per series."""
    phases = [entry.phase for entry in series]
    charts = {
        name: make_chart(name, title_of(name), series, partial(show, name))
        for name in charted_metrics(phases)
    }
    drawn = {name: chart for name, chart in charts.items() if chart is not None}
    of_runs: dict[str, list[RunPhase]] = {}
    for entry in series:
        of_runs.setdefault(entry.run, []).extend(entry.phase.runs or [entry.phase])
    return {
        "title": phases[0].title,
        "series": series,
        "scores": rows([final_facts(phase) for phase in phases]),
        "facts": rows([main_facts(phase) for phase in phases]),
        "further_facts": rows([further_facts(phase) for phase in phases]),
        "runs": list(of_runs),
        "differences": differences(list(of_runs.values())).items() if len(of_runs) > 1 else None,
        "charts": [chart for name, chart in drawn.items() if name not in FOLDED],
        "folded_charts": [chart for name, chart in drawn.items() if name in FOLDED],
        "score_tables": [
            (entry, *table, is_wide(table[1]))
            for entry in series
            for table in score_tables(entry.phase)
        ],
        "mistakes": [(entry, *table) for entry in series for table in mistake_tables(entry.phase)],
        "settings": rows([dict(sorted(phase.settings.items())) for phase in phases]),
    }


def charted_metrics(phases: list[RunPhase]) -> list[str]:
    """The logged metrics in the order of their charts."""
    points = [point for phase in phases for point in (*phase.points, *phase.evaluations)]
    logged = dict.fromkeys(name for point in points for name in point.metrics)
    order = [name for name in dict.fromkeys((*ORDER, *logged)) if name in logged]
    if "tokens_per_second" in logged:
        order = [name for name in order if name not in OTHER_SPEEDS]
    return order


def rows(tables: Sequence[Mapping[Key, Value]]) -> list[tuple[Key, list[Value | None]]]:
    names = dict.fromkeys(itertools.chain(*tables))  # in their order
    return [(name, [table.get(name) for table in tables]) for name in names]


class Cell(NamedTuple):
    """A value in a table. share: of a row of the confusion matrix, from 0 to 1, for its colour."""

    text: str
    share: float = 0.0


ScoreTable = tuple[str, list[str], list[tuple[str, list[Cell]]]]


def score_tables(phase: RunPhase) -> Iterator[ScoreTable]:
    """Title, header and rows of the scores beside those of baselines, of the scores per class and
    of the confusion matrix, if the log has them.
    """
    if BASELINES in phase.results:
        yield baseline_table(phase)
    for name in [name for name in phase.results if name.endswith("per_class")]:
        prefix = name.removesuffix("per_class")
        matrix = phase.results.get(f"{prefix}confusion_matrix")
        scores_of_class = {label: numbers(row) for label, row in phase.results[name].items()}
        columns = list(dict.fromkeys(itertools.chain(*scores_of_class.values())))
        classes = list(scores_of_class)  # in the order of the confusion matrix
        order = sorted(range(len(classes)), key=lambda index: natural_key(classes[index]))
        labels = [classes[index] for index in order]
        table = []
        for label in labels:
            cells = []
            for column in columns:
                value = scores_of_class[label].get(column, math.nan)
                cells.append(Cell(show(column, value) if math.isfinite(value) else "–"))
            table.append((label, cells))
        yield title_of(prefix + "per_class"), ["", *map(title_of, columns)], table
        if matrix is not None and {len(matrix), *map(len, matrix)} == {len(classes)}:
            counts = [[matrix[row][column] for column in order] for row in order]
            header = ["true \\ predicted", *labels]
            rows_of_counts = [matrix_cells(row) for row in counts]
            title = title_of(prefix + "confusion_matrix")
            yield title, header, list(zip(labels, rows_of_counts, strict=True))


def baseline_table(phase: RunPhase) -> ScoreTable:
    """The scores of the model and of simple methods on the same rows. Those of several seeds or
    folds are means.
    """
    methods: Mapping[str, JsonObject] = phase.results[BASELINES]
    results = numbers(phase.results)
    means = {name.removesuffix("_mean"): value for name, value in results.items()}
    names = dict.fromkeys(name for scores in methods.values() for name in scores if name in means)
    rows_of_table = []
    for method, scores in {"this model": means, **methods}.items():
        values = [numbers(scores).get(name, math.nan) for name in names]
        cells = [
            Cell("–" if math.isnan(value) else show(name, value))
            for name, value in zip(names, values, strict=True)
        ]
        label = method
        if ROWS in scores:
            label += f", {scores[ROWS]:,.0f} rows"
        rows_of_table.append((label, cells))
    return "Beside simple methods", ["", *map(title_of, names)], rows_of_table


def is_wide(header: Sequence[str]) -> bool:
    """Whether the words of a table's header stand upright, so that a page of 1,200 pixels has room
    for it.
    """
    return len(header) > 12 or sum(map(len, header)) > MAX_HEADER


def mistake_tables(phase: RunPhase) -> Iterator[tuple[str, list[list[str]]]]:
    """Title and rows of the most confident mistakes, if the log has them."""
    for name, mistakes in phase.results.items():
        if not name.endswith(MISTAKES):
            continue
        rows = []
        for mistake in mistakes:
            texts = [str(mistake[key]) for key in ("text", "label", "prediction")]
            rows.append([*texts, f"{float(mistake['confidence']):.3g}"])
        yield title_of(name), rows


def natural_key(label: str) -> list[tuple[int, int, str]]:
    """Sorts `size 2` before `size 10`."""
    parts = re.split("([0-9]{1,18})", label)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts if part]


def matrix_cells(row: list[int]) -> list[Cell]:
    """A row of the confusion matrix; nothing for 0, so that the other counts stand out."""
    total = max(sum(row), 1)
    return [Cell(f"{count:,d}" if count else "", count / total) for count in row]


def breakable(text: str) -> Markup:
    """`text` as HTML with line-break opportunities after slashes and underscores."""
    return escape(printable(text)).replace("/", Markup("/<wbr>")).replace("_", Markup("_<wbr>"))


ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
    finalize=lambda value: printable(value) if type(value) is str else value,  # not Markup
)
ENVIRONMENT.filters |= {
    "breakable": breakable,
    "setting": show_setting,
    "time": show_time,
    "px": "{:.4g}".format,
}


def render(runs: list[Run], comparisons: Sequence[ComparisonCard] = ()) -> str:
    """Renders the page. comparisons: of runs that scored the same rows."""
    sections = [make_section(series) for series in group_series(runs)]
    for section in sections:  # of which a section has the means
        summaries = [
            other for other in sections if other["title"].startswith(f"{section['title']}, ")
        ]
        section["is_folded"] = bool(summaries)
        task = section["series"][0].phase.name.partition(", ")[0]
        if any(card.task == task for card in comparisons) and len(section["runs"]) == 2:
            section["differences"] = None  # the comparison shows them
    has_curves = [section for section in sections if section["charts"] or section["folded_charts"]]
    series = itertools.chain(*(section["series"] for section in has_curves))
    charts = itertools.chain(
        *(section["charts"] + section["folded_charts"] for section in has_curves)
    )
    return ENVIRONMENT.get_template("page.html.jinja").render(
        runs=runs,
        now=datetime.datetime.now().timestamp(),
        last_record=max(session.ended for run in runs for session in run.sessions),
        sections=sections,
        comparisons=comparisons,
        difference_header=DIFFERENCE_HEADER,
        curves=[curve for chart in charts for curve in chart["curves"]],
        keys={entry.label: entry for entry in series if entry.label}.values(),
    )
