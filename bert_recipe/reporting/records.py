"""Reads training logs (DLLogger's JSON lines) into runs, phases and points.

A run's phases are phase 1, phase 2 and the fine-tuning tasks. A phase has one session per program
start.

Lines that are no records, such as the last one of a killed run, are counted and listed; metrics
that are not finite become NaN.
"""

import itertools
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from bert_recipe.checkpoint.folder import without_seed
from bert_recipe.metrics.dllogger_backends import PREFIX
from bert_recipe.tasks.baselines import BASELINES
from bert_recipe.tasks.mistakes import MISTAKES
from bert_recipe.utils.command_line import MAX_FLOAT32
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import files_below
from bert_recipe.utils.json_files import JsonObject, from_json, list_of, object_of

# First; others in the order of their start.
PHASE_TITLES = {"phase1": "Phase 1", "phase2": "Phase 2", "squad": "SQuAD"}
# Logged as settings.
PROGRESS_MARKS = (
    "train_start",
    "resumed_step",
    "predict_start",
    "eval_start",
    "sample_number",
    "time_per_1000",
)
MAX_STEP = 10**15
MAX_TIME = 253_402_300_799  # the end of the year 9999, in seconds since the epoch
# What results are drawn as tables, by the ending of their names.
TABLES = {
    "per_class": object_of(JsonObject),
    "confusion_matrix": list_of(list[int]),
    MISTAKES: list_of({"text": Any, "label": Any, "prediction": Any, "confidence": float}),
}
SCORE = re.compile(
    "accuracy|f1|precision|recall|ndcg|mrr|matthews|pearson|spearman|exact", re.IGNORECASE
)


@dataclass
class Point:
    """The metrics logged at one step.

    seconds: time in the phase's sessions up to this record, without the time between sessions.
    skipped: updates skipped since the record before.
    """

    step: int
    seconds: float
    metrics: dict[str, float]
    skipped: int = 0


@dataclass
class Session:
    """The records of one program run. Times are seconds since the epoch."""

    file: Path
    started: float
    ended: float
    settings: JsonObject = field(default_factory=dict)
    # Step, time, metrics.
    steps: list[tuple[int, float, dict[str, float]]] = field(default_factory=list)
    results: JsonObject = field(default_factory=dict)

    @property
    def phase_name(self) -> str:
        if "phase2" in self.settings:
            name = "phase2" if self.settings["phase2"] else "phase1"
        elif "doc_stride" in self.settings:
            name = "squad"
        else:
            name = str(
                self.settings.get("task") or self.settings.get("task_name") or self.file.stem
            )
        return f"{name} benchmark" if self.settings.get("benchmark") else name


@dataclass
class RunPhase:
    """One phase or task of a run. Scores are fractions.

    seed: given if the run has this phase with several seeds.
    fold: of --num-folds.
    runs: the seeds or folds whose means this is.
    """

    name: str
    seed: Any
    sessions: list[Session]
    settings: JsonObject  # of the last session
    points: list[Point] = field(default_factory=list)
    evaluations: list[Point] = field(default_factory=list)  # names without eval_
    resumes: list[int] = field(default_factory=list)  # the step before each resume
    results: JsonObject = field(default_factory=dict)
    fold: Any = None
    runs: list["RunPhase"] = field(default_factory=list)

    @property
    def run_folder(self) -> Path:
        return without_seed(self.sessions[-1].file.absolute().parent)

    @property
    def title(self) -> str:
        name, *rest = re.split("(, | )", self.name, maxsplit=1)  # "squad, seeds 1 to 3"
        name = PHASE_TITLES.get(name) or (name if self.settings else f"Log {name}")
        return "".join([name, *rest])


@dataclass
class Run:
    """`unusable`: file and line number of each invalid line."""

    name: str
    phases: list[RunPhase]
    unusable: list[tuple[Path, int]]

    @property
    def sessions(self) -> list[Session]:
        return [session for phase in self.phases for session in phase.sessions]

    @property
    def note(self) -> str:
        """A message with the number and places of invalid lines; empty if there are none."""
        count = len(self.unusable)
        if count == 0:
            return ""
        places = ", ".join(f"{file.name}:{line}" for file, line in self.unusable[:5])
        if count > 5:
            places += ", …"
        lines = "line" if count == 1 else "lines"
        return f"{self.name}: {count} unusable {lines} skipped ({places})"


def printable(text: str) -> str:
    """`text` without control characters, lone surrogates and other characters that are not
    printable.
    """
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text
    )


def find_log_files(path: Path) -> list[Path]:
    """`path` itself, or the log files in the folder `path` and below it."""
    if path.is_file():
        return [path]

    def is_log(file: Path) -> bool:
        with file.open("rb") as opened:
            return opened.read(len(PREFIX)) == PREFIX.encode()

    return [file for file in files_below(path, (".json",)) if file.is_file() and is_log(file)]


def numbers(data: JsonObject) -> dict[str, float]:
    """The numbers in `data`; null and values that are not finite in float32, in which models
    compute, become NaN, other types are skipped.
    """
    values = {}
    for name, value in data.items():
        if value is None:
            values[name] = math.nan
        elif isinstance(value, int | float) and not isinstance(value, bool):
            values[name] = float(value) if abs(value) <= MAX_FLOAT32 else math.nan
    return values


class Record(NamedTuple):
    """A line of a log. step: None for values of the whole run, which are settings or results. time:
    seconds since the epoch; elapsed: seconds since the program's start.
    """

    step: int | None
    data: JsonObject
    are_settings: bool
    time: float
    elapsed: float


def parse_line(line: str) -> Record | None:
    """The record in a line; None if it is unusable."""
    if not line.startswith(PREFIX):
        return None
    try:
        record = json.loads(line.removeprefix(PREFIX))
        step, data = record["step"], from_json(JsonObject, record["data"], "data")
        times = float(record["timestamp"]), float(record["elapsedtime"])
        if not (0 <= times[0] <= MAX_TIME and math.isfinite(times[1])):
            return None
        if step in ("PARAMETER", ["PARAMETER"], []):
            are_settings = bool(step)
            return Record(None, run_values(data, are_settings), are_settings, *times)
        step = step[-1] if isinstance(step, list) else step
        metrics = numbers(data)
        is_step = type(step) is int and 0 <= step <= MAX_STEP
        return Record(step, metrics, False, *times) if is_step and metrics else None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, UserError):
        return None


def run_values(data: JsonObject, are_settings: bool) -> JsonObject:
    """The settings or results in a record; lists and dictionaries of settings become JSON. Raises
    UserError for results that are not the table that they should be.
    """
    values = {}
    for name, value in data.items():
        # Some metrics are logged under NVIDIA's name in capitals, too.
        is_repeated = name != name.lower() and name.lower() in data
        if is_repeated or name in PROGRESS_MARKS:
            continue
        if are_settings and isinstance(value, list | dict):
            value = json.dumps(value)
        for ending, kind in () if are_settings else TABLES.items():
            if name.endswith(ending):
                value = from_json(kind, value, name)
        values[name] = value
    return values


def read_sessions(file: Path) -> tuple[list[Session], list[int]]:
    """The sessions in a log file, and the numbers of its unusable lines.

    A session starts where the time since the program's start goes back, or with settings where some
    are already.
    """
    sessions: list[Session] = []
    unusable = []
    elapsed = math.inf  # of the last record; the first one starts a session
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            record = parse_line(line)
            if record is None:
                if line.strip() and '"type": "METADATA"' not in line:  # METADATA: units of metrics
                    unusable.append(number)
                continue
            has_settings = bool(sessions) and "output_dir" in sessions[-1].settings
            restarts = record.are_settings and "output_dir" in record.data and has_settings
            if record.elapsed < elapsed or restarts:
                sessions.append(Session(file, record.time, record.time))
            elapsed = record.elapsed
            session = sessions[-1]
            session.ended = max(session.ended, record.time)
            if record.step is not None:
                session.steps.append((record.step, record.time, record.data))
            elif record.are_settings:
                session.settings.update(record.data)
            else:
                session.results.update(record.data)
    for before, session in itertools.pairwise(sessions):
        if "output_dir" not in session.settings:  # a prediction that was made later
            session.settings = before.settings | session.settings
    return sessions, unusable


class LogFile(NamedTuple):
    """unusable: the numbers of invalid lines."""

    path: Path
    sessions: list[Session]
    unusable: list[int]

    @property
    def run_folder(self) -> Path:
        return without_seed(self.path.absolute().parent)


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """The runs in folders and log files. A folder is one run, unless log files in different
    subfolders are of the same phase; then each of those subfolders is a run. Seeds and folds of a
    run are in it.
    """
    logs_of_runs: list[tuple[Path, list[LogFile]]] = []
    for path in paths:
        logs = [LogFile(file, *read_sessions(file)) for file in find_log_files(path)]
        logs = [log for log in logs if log.sessions]
        if not logs:
            raise UserError(f"{path} holds no training log (lines with {PREFIX}): check the path")
        if is_one_run(logs):
            logs_of_runs.append((path, logs))
            continue
        for folder in sorted({log.run_folder for log in logs}):
            logs_of_runs.append((folder, [log for log in logs if log.run_folder == folder]))
    names = short_names([path for path, _ in logs_of_runs])
    runs = []
    for name, (_, logs) in zip(names, logs_of_runs, strict=True):
        sessions = [session for log in logs for session in log.sessions]
        unusable = [(log.path, line) for log in logs for line in log.unusable]
        runs.append(Run(name, make_phases(sessions), unusable))
    return runs


def is_one_run(logs: Sequence[LogFile]) -> bool:
    """Whether no phase is in two folders."""
    folder_of_phase: dict[str, Path] = {}
    for log in logs:
        for session in log.sessions:
            folder = folder_of_phase.setdefault(session.phase_name, log.run_folder)
            if folder != log.run_folder:
                return False
    return True


def short_names(paths: Sequence[Path]) -> list[str]:
    """What tells the paths apart: without the folders that all begin with, and those that all end
    with.
    """
    parts = [path.resolve().parts for path in paths]
    longest = min(map(len, parts)) - 1  # of what may go
    first = common_length(parts, longest)
    last = common_length([names[::-1] for names in parts], longest - first)
    return ["/".join(names[first : len(names) - last]) for names in parts]


def common_length(parts: Sequence[Sequence[str]], longest: int) -> int:
    """How many names all begin with, at most `longest`."""
    for place in range(longest):
        if len({names[place] for names in parts}) > 1:
            return place
    return longest


def make_phases(sessions: list[Session]) -> list[RunPhase]:
    """The phases of a run in the order of training. Sessions with different seeds or folds are
    phases of their own.
    """
    sessions_of: dict[str, dict[tuple[Any, Any], list[Session]]] = {}  # a phase, by seed and fold
    for name in PHASE_TITLES:
        sessions_of[name] = {}
    for session in sorted(sessions, key=lambda session: session.started):
        seed_and_fold = (session.settings.get("seed"), session.settings.get("fold"))
        of_phase = sessions_of.setdefault(session.phase_name, {})
        of_phase.setdefault(seed_and_fold, []).append(session)
    phases = []
    for name, of_phase in sessions_of.items():
        has_several_seeds = len({seed for seed, _ in of_phase}) > 1
        for (seed, fold), joined in of_phase.items():
            shown_seed = seed if has_several_seeds else None
            phase = RunPhase(name, shown_seed, joined, joined[-1].settings, fold=fold)
            join_sessions(phase)
            phases.append(phase)
    for phase in phases:
        phase.runs = [run for run in phases if phase.name.startswith(f"{run.name}, ")]
    return phases


def join_sessions(phase: RunPhase) -> None:
    """Fills in points and results: from the first step that a session logs, its records replace
    those before.
    """
    before = 0.0  # seconds in earlier sessions
    for session in phase.sessions:
        if session.steps:
            phase.results = {}  # those of earlier weights
            first = min(step for step, _, _ in session.steps)
            phase.points = [point for point in phase.points if point.step < first]
            phase.evaluations = [point for point in phase.evaluations if point.step < first]
            phase.resumes = [step for step in phase.resumes if step < first]
            if phase.points:
                phase.resumes.append(phase.points[-1].step)
            add_points(phase, session, before)
        phase.results |= as_fractions(phase.name, session.results)
        before += session.ended - session.started


def as_fractions(phase_name: str, metrics: JsonObject) -> JsonObject:
    """Divides SQuAD's official scores, which are percentages, by 100; others are fractions."""
    has_squads_names = "f1" in metrics and any(name.startswith("exact") for name in metrics)
    if not phase_name.startswith("squad") and not has_squads_names:
        return metrics
    fractions = metrics | {
        name: value / 100 for name, value in numbers(metrics).items() if is_score(name)
    }
    if BASELINES in metrics:
        fractions[BASELINES] = {
            method: as_fractions("squad", scores) for method, scores in metrics[BASELINES].items()
        }
    return fractions


def is_score(name: str) -> bool:
    return SCORE.search(name) is not None and not name.endswith("_thresh")


def add_points(phase: RunPhase, session: Session, before: float) -> None:
    """Adds the updates and evaluations of a session. before: seconds in earlier sessions."""
    scale = math.nan
    for step, time, metrics in session.steps:
        point = Point(step, before + time - session.started, metrics)
        if all(name.startswith("eval_") for name in metrics):
            metrics = {name.removeprefix("eval_"): value for name, value in metrics.items()}
            phase.evaluations.append(replace(point, metrics=as_fractions(phase.name, metrics)))
            continue
        # An update is skipped if its gradient is not finite, which halves a dynamic loss scale.
        previous = scale
        scale = metrics.get("loss_scale", math.nan)
        if 0 < scale < previous:
            point.skipped = round(math.log2(previous) - math.log2(scale))
        if any(math.isnan(metrics.get(name, 0.0)) for name in ("loss", "grad_norm")):
            point.skipped = max(point.skipped, 1)
        phase.points.append(point)


def differences(runs: Sequence[Sequence[RunPhase]]) -> dict[str, list[Any]]:
    """Settings that differ between runs, with each one's value, or several of its seeds; a run's
    own folder is `<output-dir>`.

    runs: the seeds or folds of each.
    """
    names: set[str] = set()
    for phase in itertools.chain(*runs):
        names |= phase.settings.keys()
    values_of_settings = {}
    for name in sorted(names - {"output_dir", "report_file"}):
        values = [list(dict.fromkeys(setting_of(phase, name) for phase in run)) for run in runs]
        if any(of_run != values[0] for of_run in values):
            values_of_settings[name] = [
                of_run[0] if len(of_run) == 1 else ", ".join(map(str, of_run)) for of_run in values
            ]
    return values_of_settings


def setting_of(phase: RunPhase, name: str) -> Any:
    value = phase.settings.get(name)
    folder = str(phase.settings.get("output_dir", ""))
    if folder and isinstance(value, str) and value.startswith(f"{folder}/"):
        return "<output-dir>" + value.removeprefix(folder)
    return value
