"""What the page says of a phase in a few lines: scores, model, data, losses, speed."""

import datetime
import math
import re
import statistics
from pathlib import Path
from typing import Any

from bert_recipe.checkpoint.folder import BEST_FOLDER, SEED_FOLDER
from bert_recipe.metrics.text import format_duration
from bert_recipe.reporting.calibration import calibration_error, scored_probabilities
from bert_recipe.reporting.comparison import is_scored
from bert_recipe.reporting.records import Point, RunPhase, is_score, numbers
from bert_recipe.reporting.scored_rows import read_scored_rows
from bert_recipe.utils.errors import UserError

WORDS = {word.lower(): word for word in ("MLM", "NSP", "F1", "TFLOPS", "NDCG@10", "MRR@10")}
WORDS |= {"grad": "gradient", "e2e": "end-to-end", "time": "time (s)", "ms": "(ms)", "gib": "(GiB)"}
WORDS |= {"p90": "90th percentile", "p99": "99th percentile", "exact": "exact match"}
# Final results that repeat metrics of the steps.
REPEATED_RESULTS = (
    "step",
    "final_loss",
    "e2e_train_time",
    "raw_train_time",
    "training_sequences_per_second",
)
MEDIANS = ("tokens_per_second", "utilization", "data_wait")
# Flags of the weights that a run starts from, the first one that is given.
STARTS = ("from_phase1_final_params", "from_checkpoint", "from_pretrained_params")
# Folders in that of a model: of pre-training, and of fine-tuning with a user's own files.
OF_RUNS = (
    *("phase1", "phase2", "classification", "multi-label", "regression", "reranker"),
    *("ner", "squad", "embedding"),
)
RECENT_POINTS = 10  # whose speed tells how long the rest takes


Facts = dict[str, str]


def final_facts(phase: RunPhase) -> Facts:
    """The final scores."""
    scores = {name: value for name, value in numbers(phase.results).items() if is_score(name)}
    return final_scores(scores)


def main_facts(phase: RunPhase) -> Facts:
    """What was trained, on what, and how it went."""
    facts = {"Model": model_of(phase)} | data_facts(phase)
    if (best_step := numbers(phase.results).get("best_step")) is not None:
        facts["Best checkpoint"] = f"step {best_step:,.0f}"
    facts |= first_and_last_values(phase.points, "training")
    facts |= first_and_last_values(phase.evaluations, "held-out")
    facts |= calibration_fact(phase)
    facts |= length_of_training(phase)
    facts |= interruptions(phase)
    return {label: text for label, text in facts.items() if text}


def further_facts(phase: RunPhase) -> Facts:
    """Times and speed."""
    facts = {"Started": show_time(phase.sessions[0].started)}
    facts |= medians(phase.points)
    for name, value in numbers(phase.results).items():
        if not is_score(name) and name not in (*REPEATED_RESULTS, "best_step"):
            facts[title_of(name)] = show(name, value)
    return facts


def first_run(phase: RunPhase) -> RunPhase:
    """Of means, the first seed or fold."""
    return phase.runs[0] if phase.runs else phase


def model_of(phase: RunPhase) -> str:
    """The model's name, which is that of the folder `<output-dir>/<model>/<task>` of the log."""
    settings = first_run(phase).settings
    folder = phase.run_folder
    starts = [settings[name] for name in STARTS if settings.get(name)]
    if folder.name == phase.name.partition(",")[0]:
        name = folder.parent.name
    else:
        name = start_name(starts[0]) if starts else str(settings.get("bert_model") or "")
    is_random = settings.get("starting_weights") == "random"
    return f"{name}, random weights" if name and is_random else name


def start_name(path: Any) -> str:
    """The name of the model folder, also of a run's: `<model>/<phase or task>[/seed-N][/<step>]`,
    or its `best`.
    """
    names = list(Path(str(path)).parts)
    is_checkpoint = len(names) > 2 and (names[-1].isdigit() or names[-1] == BEST_FOLDER)
    if is_checkpoint:
        names.pop()
    is_of_seed = len(names) > 2 and SEED_FOLDER.fullmatch(names[-1]) is not None
    if is_of_seed:
        names.pop()
    if len(names) > 1 and (is_checkpoint or is_of_seed or names[-1] in OF_RUNS):
        names.pop()
    return names[-1] if names else ""


def data_facts(phase: RunPhase) -> Facts:
    """The files and rows, or of pre-training the data, the batch and the tokens so far."""
    settings = first_run(phase).settings
    if "input_dir" in settings:
        return pretraining_facts(phase)
    facts = {}
    if settings.get("train_file") or settings.get("eval_file") or settings.get("predict_file"):
        files = [settings.get(name) for name in ("train_file", "eval_file", "predict_file")]
        facts["File"] = ", ".join(dict.fromkeys(filter(None, map(file_names, files))))
    elif settings.get("data_dir"):
        facts["File"] = f"{settings.get('task_name')} in {short_path(settings['data_dir'])}"
    counts = (("training_samples", "to train"), ("eval_samples", "scored"))
    texts = [
        f"{settings[name]:,} {what}" for name, what in counts if isinstance(settings.get(name), int)
    ]
    facts["Rows"] = ", ".join(texts)
    return facts


def file_names(value: Any) -> str:
    """Of a flag with one path or several."""
    paths = re.findall(r'"([^"]*)"', value) if str(value).startswith("[") else [value]
    return ", ".join(Path(str(path)).name for path in paths if path)


def short_path(value: Any) -> str:
    """The last folders."""
    parts = Path(str(value)).parts
    return str(value) if len(parts) <= 3 else "/".join(("…", *parts[-3:]))


def pretraining_facts(phase: RunPhase) -> Facts:
    settings = first_run(phase).settings
    facts = {}
    samples = finite_values(phase.points, "step_samples")
    if samples:
        length = settings.get("max_seq_length")
        facts["Global batch"] = f"{samples[-1]:,.0f} sequences of up to {length} tokens"
    tokens = 0.0
    before = 0
    for point in phase.points:
        values = [point.metrics.get(name, 0.0) for name in ("tokens_per_second", "step_seconds")]
        in_step = values[0] * values[1]
        tokens += (point.step - before) * in_step if math.isfinite(in_step) else 0
        before = point.step
    facts["Tokens seen"] = show("tokens", tokens) if tokens else ""
    facts["Data"] = short_path(settings["input_dir"])
    facts["Time left"] = time_left(phase)
    return facts


def time_left(phase: RunPhase) -> str:
    """By the last steps; empty if all are done."""
    limit = step_limit(phase)
    seconds = finite_values(phase.points[-RECENT_POINTS:], "step_seconds")
    steps = limit - phase.points[-1].step if phase.points and limit else 0
    if steps <= 0 or not seconds:
        return ""
    return f"{format_duration(steps * statistics.median(seconds))} for {steps:,} steps"


def calibration_fact(phase: RunPhase) -> Facts:
    """Of the classes in the rows that the run has scored, the mean of its seeds."""
    errors = []
    for run in phase.runs or [phase]:
        folder = run.sessions[-1].file.parent
        if not run.results or not is_scored(folder):
            continue
        try:
            pair = scored_probabilities(read_scored_rows([folder]).values())
        except UserError:  # compare.py says what is wrong with them
            continue
        if pair is not None:
            errors.append(calibration_error(*pair))
    if not errors:
        return {}
    return {"Expected calibration error": show("accuracy", statistics.mean(errors))}


def final_scores(scores: dict[str, float]) -> dict[str, str]:
    """Scores by their titles, such as "88.1%"; the mean over seeds has its standard deviation
    beside it, "88.1% ± 0.2%".
    """
    texts = {}
    for name, value in scores.items():
        texts[name] = "not defined" if math.isnan(value) else show(name, value)
    for name, value in scores.items():
        mean_name = name.removesuffix("std") + "mean"
        if name.endswith("_std") and mean_name in texts:
            deviation = texts.pop(name)
            if not math.isnan(value):
                texts[mean_name] += f" ± {deviation}"
    return {title_of(name): text for name, text in texts.items()}


def finite_values(points: list[Point], metric: str) -> list[float]:
    values = [point.metrics.get(metric, math.nan) for point in points]
    return [value for value in values if math.isfinite(value)]


def first_and_last_values(points: list[Point], place: str) -> dict[str, str]:
    """How the loss and the scores changed. place: where they were measured, for the label."""
    facts = {}
    for metric in dict.fromkeys(name for point in points for name in point.metrics):
        values = finite_values(points, metric)
        if values and (metric == "loss" or is_score(metric)):
            ends = [values[0], values[-1]] if len(values) > 1 else values
            texts = [show(metric, value) for value in ends]
            facts[f"{title_of(metric)}, {place}"] = " → ".join(texts)
    return facts


def length_of_training(phase: RunPhase) -> dict[str, str]:
    if not phase.points:
        return {}
    limit = step_limit(phase)
    last = phase.points[-1]
    return {
        "Steps": f"{last.step:,}" + (f" of {limit:,}" if limit else ""),
        "Training time": format_duration(last.seconds),
    }


def step_limit(phase: RunPhase) -> int | None:
    # max_steps is -1 if epochs are given.
    limits = [phase.settings.get(name) for name in ("max_steps", "steps")]
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)


def interruptions(phase: RunPhase) -> dict[str, str]:
    counts = {
        "Resumes": len(phase.resumes),
        "Skipped updates": sum(point.skipped for point in phase.points),
    }
    return {label: f"{count:,}" for label, count in counts.items() if count}


def medians(points: list[Point]) -> dict[str, str]:
    """Typical speed."""
    facts = {}
    for metric in MEDIANS:
        if values := finite_values(points, metric):
            facts[f"{title_of(metric)}, median"] = show(metric, statistics.median(values))
    return facts


def title_of(metric: str) -> str:
    title = " ".join(
        WORDS.get(word, word) for word in metric.replace("exact_match", "exact").split("_")
    )
    return title[:1].upper() + title[1:]


def show(name: str, value: float) -> str:
    """The value of a metric as text."""
    if is_score(name) or name in ("utilization", "data_wait"):
        return f"{round(100 * value, 2):.6g}%"
    size = abs(value)
    if 1e3 <= size < 1e6:
        return f"{value:,.0f}"
    if 1e6 <= size < 1e9:
        return f"{value / 1e6:.4g}M"
    if 1e9 <= size < 1e12:
        return f"{value / 1e9:.4g}G"
    return f"{value:.4g}".replace("e-0", "e-")


def show_setting(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:g}" if isinstance(value, float) else str(value)


def show_time(timestamp: float) -> str:
    return datetime.datetime.fromtimestamp(timestamp).strftime("%Y-%m-%d %H:%M:%S")
