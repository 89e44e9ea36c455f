"""The HTML page of a training report: one file without scripts and without references to other files."""

import datetime
import math
import re
import statistics
from html import escape
from typing import Any

from report_charts import MAX_POINTS, NUM_COLORS, POINTS_PER_LINE, draw_chart, is_percentage, metrics_of
from report_records import STAGE_ORDER, Point, Run, Stage, differences

# Order and headings of the charts; other metrics follow under "Other".
CHART_GROUPS = {
    "Learning": ("loss", "mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy"),
    "Optimization": ("learning_rate", "grad_norm", "loss_scale"),
    "Speed": ("tokens_per_second", "sequences_per_second", "utilization", "model_tflops", "data_wait", "step_seconds"),
}
METRIC_TITLES = {
    "mlm_loss": "MLM loss",
    "mlm_accuracy": "MLM accuracy",
    "nsp_loss": "NSP loss",
    "nsp_accuracy": "NSP accuracy",
    "grad_norm": "Gradient norm",
    "tokens_per_second": "Tokens/s",
    "sequences_per_second": "Sequences/s",
    "model_tflops": "Model TFLOPS per device",
    "utilization": "Utilization of peak FLOPS",
    "step_seconds": "Seconds per step",
    "peak_memory_gib": "Peak memory (GiB)",
    "exact_match": "Exact match",
    "f1": "F1",
}
LAST_VALUES = ("loss", "mlm_accuracy", "nsp_accuracy")
MEDIANS = ("tokens_per_second", "sequences_per_second", "utilization", "data_wait")
SESSION_COLUMNS = ("Stage", "Started", "Pause before", "Time", "Logged steps", "Changed settings")
# Endings of final results that measure speed, or the loss that is shown anyway.
NOT_SCORES = ("_per_second", "_time", "_ms", "_tflops", "_gib", "_seconds", "utilization", "data_wait", "loss")
ALREADY_SHOWN = ("step", "checkpoint")  # of the record at the end of training

LIGHT = ("#2563c9", "#c2620a", "#1a7f37", "#8250df", "#c2255c", "#0b7285", "#7a4a1d", "#57606a")
DARK = ("#79b0ff", "#ffa657", "#6fd08c", "#c8a6ff", "#ff8fb3", "#5fd3e6", "#d8a878", "#b3bcc5")


def css_colors(runs: tuple[str, ...], text: str, grid: str, skipped: str, page: str, card: str, muted: str) -> str:
    numbered = {**{i + 1: color for i, color in enumerate(runs)}, 11: text, 12: grid, 13: skipped}
    variables = [f"--c{i:02d}:{color}" for i, color in numbered.items()]
    return ";".join([*variables, f"--page:{page}", f"--card:{card}", f"--muted:{muted}"])


STYLE = f"""
:root{{color-scheme:light dark;{css_colors(LIGHT, "#1f2328", "#d5dae0", "#cf222e", "#f6f8fa", "#ffffff", "#59636e")}}}
@media (prefers-color-scheme:dark){{
:root{{{css_colors(DARK, "#e6edf3", "#3a424c", "#ff7b72", "#0d1117", "#161b22", "#9aa5b1")}}}}}
*{{box-sizing:border-box}}
body{{margin:0 auto;padding:1.2rem clamp(.8rem,2.5vw,2.2rem) 3rem;max-width:1500px;background:var(--page);
color:var(--c11);font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif}}
h1{{font-size:1.6rem;margin:0;overflow-wrap:anywhere}}h2{{font-size:1.15rem;margin:2rem 0 .7rem}}
h3{{font-size:1rem;margin:0 0 .4rem}}
p{{margin:.3rem 0}}.muted{{color:var(--muted)}}.note{{color:var(--c13)}}
.cards,.charts{{display:grid;gap:.9rem}}
.cards{{grid-template-columns:repeat(auto-fill,minmax(min(100%,var(--card-width)),1fr));align-items:start}}
.charts{{grid-template-columns:repeat(auto-fill,minmax(min(100%,380px),1fr))}}
.card{{background:var(--card);border:1px solid var(--c12);border-radius:8px;padding:.8rem .9rem;min-width:0}}
.card h3{{font-size:.95rem}}.card svg{{display:block;width:100%;height:auto}}
.chart{{stroke-linejoin:round}}.chart text{{font-family:system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}}
.scroll{{overflow-x:auto}}
table{{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}}
th,td{{padding:.22rem .5rem .22rem 0;text-align:left;vertical-align:top;border-top:1px solid var(--c12)}}
thead th,table.plain tr:first-child>*{{border-top:0}}th{{font-weight:500}}thead th{{color:var(--muted)}}
tbody th{{color:var(--muted);font-weight:400}}td{{overflow-wrap:anywhere;min-width:4.5em}}
.facts table{{font-size:.94em}}@media (min-width:700px){{.facts td{{white-space:nowrap}}}}
.score>*{{font-weight:650;color:var(--c11)}}
.swatch{{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em}}
.legend{{display:flex;flex-wrap:wrap;gap:.3rem 1.3rem;margin:.6rem 0;color:var(--muted)}}
.legend svg{{width:1.9em;height:.9em;margin-right:.4em;vertical-align:-.08em}}
details{{margin:.6rem 0}}summary{{cursor:pointer;font-weight:600}}
.switch{{position:absolute;opacity:0}}
.switch+label{{display:inline-block;border:1px solid var(--c12);padding:.25rem .9rem;cursor:pointer;
background:var(--card)}}
.switch+label:first-of-type{{border-radius:6px 0 0 6px}}.switch+label:last-of-type{{border-radius:0 6px 6px 0}}
.switch:checked+label{{background:var(--c01);border-color:var(--c01);color:var(--card)}}
.switch:focus-visible+label{{outline:2px solid var(--c11);outline-offset:2px}}
#over-steps:checked~section .time,#over-time:checked~section .steps{{display:none}}
@media (max-width:700px){{.stacked thead{{display:none}}.stacked tr{{display:block;padding:.4rem 0}}
.stacked tr+tr{{border-top:1px solid var(--c12)}}.stacked th,.stacked td{{display:flex;border:0;padding:.05rem 0}}
.stacked td::before{{content:attr(data-label);flex:0 0 10em;color:var(--muted)}}}}
@media print{{.switch+label{{display:none}}.card{{break-inside:avoid}}}}
"""


def render(runs: list[Run], refresh_seconds: float | None = None) -> str:
    """The page. `refresh_seconds`: how often a browser is to load it again."""
    names = ", ".join(run.name for run in runs)
    stage_names = ordered_stages(runs)
    refresh = f'<meta http-equiv="refresh" content="{refresh_seconds:g}">\n' if refresh_seconds else ""
    last_record = max(session.ended for run in runs for stage in run.stages for session in stage.sessions)
    sections = [
        f"<header><h1>Training report: {escape(names)}</h1>",
        f'<p class="muted">Written {time_of(datetime.datetime.now().timestamp())}. '
        f"Last record in the logs: {time_of(last_record)}.</p>{notes(runs)}</header>",
        summary(runs, stage_names),
        difference_table(runs, stage_names),
        charts(runs, stage_names),
        session_table(runs),
        settings_tables(runs, stage_names),
    ]
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n{refresh}'
        f"<title>Training report: {escape(names)}</title>\n<style>{STYLE}</style>\n</head>\n"
    )
    return head + "<body>\n" + "\n".join(section for section in sections if section) + "\n</body>\n</html>\n"


def ordered_stages(runs: list[Run]) -> list[str]:
    names = list({stage.name: None for run in runs for stage in run.stages})
    return sorted(names, key=lambda name: STAGE_ORDER.index(name) if name in STAGE_ORDER else len(STAGE_ORDER))


def notes(runs: list[Run]) -> str:
    """Malformed lines and missing records."""
    found = []
    for run in runs:
        if run.malformed_lines:
            lines = (
                "1 malformed line was" if run.malformed_lines == 1 else f"{run.malformed_lines} malformed lines were"
            )
            found.append(f"{run.name}: {lines} skipped.")
        for stage in run.stages:
            if stage.missing:
                ranges = [f"{low}–{high}" for low, high in stage.missing[:5]] + ["…"] * (len(stage.missing) > 5)
                found.append(f"{run.name}, {stage.title}: the log has no records of steps {', '.join(ranges)}.")
    return "".join(f'<p class="note">{escape(note)}</p>' for note in found)


# --- summary ----------------------------------------------------------------------------------------------------------


def summary(runs: list[Run], stage_names: list[str]) -> str:
    """A card for each stage: scores, progress, first and last values, speed."""
    cards = []
    for name in stage_names:
        stages = [run.stage(name) for run in runs]
        facts = [stage_facts(stage) if stage else {} for stage in stages]
        labels = list({label: None for fact in facts for label in fact})
        scores = {metric_title(key) for stage in stages if stage for key in stage.results if is_score(key)}
        rows = [
            (label, [fact.get(label, "–") for fact in facts], "score" if label in scores else "")
            for label in sorted(labels, key=lambda label: label not in scores)
        ]
        title = next(stage.title for stage in stages if stage)
        cards.append(f'<div class="card"><h3>{escape(title)}</h3>{table(header_of(runs), rows)}</div>')
    return f'<section class="cards facts" style="{card_width(runs)};margin-top:1.2rem">{"".join(cards)}</section>'


def stage_facts(stage: Stage) -> dict[str, str]:
    """What the summary says of a stage, by label."""
    facts = {metric_title(key): show(key, value) for key, value in stage.results.items() if is_score(key)}
    if stage.points:
        max_steps = stage.settings.get("max_steps")
        of = f" of {max_steps:,}" if isinstance(max_steps, int) and max_steps > 0 else ""
        facts["Steps"] = f"{stage.last_step:,}{of}"
    facts["Training time"] = show_duration(stage.seconds)
    for label, count in (("Resumes", len(stage.resumes)), ("Skipped updates", stage.skipped)):
        if count:
            facts[label] = str(count)
    for prefix, points in (("", stage.points), ("held-out ", stage.evaluations)):
        for metric in LAST_VALUES:
            values = finite(points, metric)
            if values:
                shown = [show(metric, value) for value in (values[:1] if len(values) > 1 else []) + values[-1:]]
                label = metric_title(metric)
                label = f"Held-out {label if label[1].isupper() else label.lower()}" if prefix else label
                facts[label] = " → ".join(shown)
    for metric in MEDIANS:
        if values := finite(stage.points, metric):
            facts[f"{metric_title(metric)}, median"] = show(metric, statistics.median(values))
    others = {key: value for key, value in stage.results.items() if key not in ALREADY_SHOWN and not is_score(key)}
    return facts | {metric_title(key): show(key, value) for key, value in others.items()}


def is_score(key: str) -> bool:
    """Whether a final result measures quality, not speed."""
    return key not in ALREADY_SHOWN and not key.endswith(NOT_SCORES) and not key.startswith("latency")


def finite(points: list[Point], metric: str) -> list[float]:
    return [value for point in points if math.isfinite(value := point.metrics.get(metric, math.nan))]


# --- tables -----------------------------------------------------------------------------------------------------------


def table(header: list[str], rows: list[tuple[str, list[str], str]]) -> str:
    """Rows are (label, values, CSS class). Header cells are HTML; labels and values are text."""
    head = f"<thead><tr><th></th>{''.join(f'<th>{cell}</th>' for cell in header)}</tr></thead>" if header else ""
    body = "".join(
        f"<tr{f' class={css!r}' if css else ''}><th>{breakable(label)}</th>"
        f"{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for label, values, css in rows
    )
    return f'<div class="scroll"><table{"" if header else " class=plain"}>{head}<tbody>{body}</tbody></table></div>'


def card_width(runs: list[Run]) -> str:
    """The CSS of cards with a column per run."""
    return f"--card-width:{max(340, 170 + 110 * len(runs))}px"


def difference_table(runs: list[Run], stage_names: list[str]) -> str:
    """The settings and versions in which runs differ, stage by stage."""
    if len(runs) < 2:
        return ""
    cards = []
    for name in stage_names:
        stages = [run.stage(name) for run in runs]
        if sum(stage is not None for stage in stages) < 2:
            continue
        found = differences(stages).items()
        rows = [(setting, [show_setting(value) for value in values], "") for setting, values in found]
        title = next(stage.title for stage in stages if stage)
        content = table(header_of(runs), rows) if rows else "<p>The same settings and versions.</p>"
        cards.append(f'<div class="card"><h3>{escape(title)}</h3>{content}</div>')
    if not cards:
        return ""
    return (
        '<section id="differences"><h2>Differences in settings</h2>'
        f'<div class="cards" style="{card_width(runs)}">{"".join(cards)}</div></section>'
    )


def session_table(runs: list[Run]) -> str:
    """Each start of a program: time, pause before it, logged steps, changed settings."""
    rows = []
    for i, run in enumerate(runs):
        for stage in run.stages:
            previous = None
            for session in stage.sessions:
                steps = session.training_steps
                pause = show_duration(max(0.0, session.started - previous.ended)) if previous else "–"
                changed = changed_settings(previous.settings, session.settings) if previous else ""
                cells = [stage.title, time_of(session.started), pause, show_duration(session.seconds)]
                cells += [f"{steps[0]:,} – {steps[-1]:,}" if steps else "–", changed or "–"]
                labelled = zip(SESSION_COLUMNS, cells, strict=True)
                cells = "".join(f'<td data-label="{label}">{escape(cell)}</td>' for label, cell in labelled)
                rows.append(f"<tr><th>{run_label(runs, i)}</th>{cells}</tr>")
                previous = session
    head = "".join(f"<th>{label}</th>" for label in ("Run", *SESSION_COLUMNS))
    return (
        '<section id="starts"><h2>Starts and resumes</h2><div class="card scroll">'
        f'<table class="stacked"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div></section>'
    )


def changed_settings(before: dict[str, Any], after: dict[str, Any]) -> str:
    names = sorted(name for name in before | after if before.get(name) != after.get(name))
    return ", ".join(f"{name} {show_setting(before.get(name))} → {show_setting(after.get(name))}" for name in names)


def settings_tables(runs: list[Run], stage_names: list[str]) -> str:
    """All versions and settings, folded."""
    folded = []
    for name in stage_names:
        stages = [run.stage(name) for run in runs]
        values = [stage_settings(stage) if stage else {} for stage in stages]
        names = list({setting: None for value in values for setting in value})
        rows = [(setting, [show_setting(value.get(setting)) for value in values], "") for setting in names]
        title = next(stage.title for stage in stages if stage)
        content = table(header_of(runs), rows)
        folded.append(f'<details class="card"><summary>{escape(title)}</summary>{content}</details>')
    return f'<section id="settings"><h2>Settings and versions</h2>{"".join(folded)}</section>'


def stage_settings(stage: Stage) -> dict[str, Any]:
    last_checkpoint = {"checkpoint": stage.results["checkpoint"]} if "checkpoint" in stage.results else {}
    return stage.versions | last_checkpoint | dict(sorted(stage.settings.items()))


# --- charts -----------------------------------------------------------------------------------------------------------


def charts(runs: list[Run], stage_names: list[str]) -> str:
    metrics = metrics_of(runs)
    if not metrics:
        return '<p class="muted">No step has been logged yet.</p>'
    num_lines = 2 * len(metrics) * sum(len(run.stages) for run in runs)
    max_points = min(max(MAX_POINTS // num_lines, POINTS_PER_LINE[0]), POINTS_PER_LINE[1])
    named = {metric for group in CHART_GROUPS.values() for metric in group}
    groups = CHART_GROUPS | {"Other": tuple(metric for metric in metrics if metric not in named)}
    parts = []
    for heading, group in groups.items():
        cards = []
        for metric in group:
            if metric in metrics:
                title = metric_title(metric)
                over_steps, over_time = (
                    draw_chart(runs, stage_names, metric, title, is_time, max_points) for is_time in (False, True)
                )
                cards.append(
                    f'<div class="card"><h3>{escape(title)}</h3><div class="steps">{over_steps}</div>'
                    f'<div class="time">{over_time}</div></div>'
                )
        if cards:
            parts.append(f'<section><h2>{heading}</h2><div class="charts">{"".join(cards)}</div></section>')
    return (
        '<div><h2>Charts</h2><input class="switch" type="radio" name="x" id="over-steps" checked>'
        '<label for="over-steps">over steps</label><input class="switch" type="radio" name="x" id="over-time">'
        f'<label for="over-time">over time</label>{legend(runs, max_points)}{"".join(parts)}</div>'
    )


# What the charts' symbols mean, drawn in 30 x 14 pixels.
SYMBOLS = {
    "average and range of neighbouring steps": '<path d="M0 1H30V13H0Z" fill="{0}" opacity=".2"/>'
    '<path d="M0 7H30" stroke="{0}"/>',
    "held-out evaluation": '<path d="M2 7H28" stroke="{0}" stroke-dasharray="2 3"/>'
    '<circle cx="15" cy="7" r="4" fill="{0}"/>',
    "resume": '<path d="M15 0V14" stroke="{0}" stroke-width="2" stroke-dasharray="4 3"/>',
    "skipped update": '<path d="M9 2H21L15 13Z" fill="{1}"/>',
}


def legend(runs: list[Run], max_points: int) -> str:
    """The runs' colours, and the symbols that occur."""
    stages = [stage for run in runs for stage in run.stages]
    occurs = (
        any(len(stage.points) > max_points for stage in stages),
        any(stage.evaluations for stage in stages),
        any(stage.resumes for stage in stages),
        any(stage.skipped for stage in stages),
    )
    colors = ("currentColor", "currentColor") if len(runs) > 1 else ("var(--c01)", "var(--c13)")
    entries = header_of(runs) + [
        f'<svg viewBox="0 0 30 14">{drawing.format(*colors)}</svg>{text}'
        for (text, drawing), is_there in zip(SYMBOLS.items(), occurs, strict=True)
        if is_there
    ]
    return f'<div class="legend">{"".join(f"<span>{entry}</span>" for entry in entries)}</div>'


# --- text -------------------------------------------------------------------------------------------------------------


def run_label(runs: list[Run], i: int) -> str:
    """The name of a run as HTML, with its colour if there are several."""
    swatch = f'<span class="swatch" style="background:var(--c{i % NUM_COLORS + 1:02d})"></span>'
    return (swatch if len(runs) > 1 else "") + breakable(runs[i].name)


def breakable(text: str) -> str:
    """`text` as HTML that may be broken after slashes and underscores."""
    return re.sub(r"([/_])", r"\1<wbr>", escape(text))


def header_of(runs: list[Run]) -> list[str]:
    """The runs' names as HTML, for a table's columns; none for a single run."""
    return [run_label(runs, i) for i in range(len(runs))] if len(runs) > 1 else []


def metric_title(metric: str) -> str:
    return METRIC_TITLES.get(metric) or metric.replace("_", " ").capitalize()


def show(name: str, value: Any) -> str:
    """The value of a metric as text."""
    if isinstance(value, float):
        if is_percentage(name):
            return f"{value:.1%}"
        if name.endswith("loss"):
            return f"{value:.3f}"
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
    return "–" if value is None else str(value)


def show_setting(value: Any) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def show_duration(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


def time_of(timestamp: float) -> str:
    return datetime.datetime.fromtimestamp(timestamp).strftime("%Y-%m-%d %H:%M:%S")
