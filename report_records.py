"""Reads training logs (DLLogger's JSON lines) into runs, stages and series; report_page.py draws them.

A run is what was trained from the first phase to the last fine-tuning. Its stages are phase 1, phase 2 and the
fine-tuning tasks; each stage may have been started several times, and each start is a session.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from utils.errors import UserError

PREFIX = "DLLL "
STAGE_ORDER = ("phase1", "phase2")  # the others follow in the order of their first start
STAGE_TITLES = {"phase1": "Phase 1", "phase2": "Phase 2", "squad": "SQuAD"}


@dataclass
class Point:
    """The training metrics logged at one step. `seconds`: time in the stage's sessions up to this record, without the
    time between sessions. `skipped`: updates skipped since the record before."""

    step: int
    seconds: float
    metrics: dict[str, float]
    skipped: int = 0


@dataclass
class Session:
    """What a program logged from its start to its end. Times are seconds since the epoch."""

    file: Path
    settings: dict[str, Any]
    started: float
    ended: float
    steps: list[tuple[int, float, dict[str, Any]]] = field(default_factory=list)  # step, time, data
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.ended - self.started

    @property
    def stage_name(self) -> str:
        if "phase2" in self.settings:
            name = "phase2" if self.settings["phase2"] else "phase1"
        elif "doc_stride" in self.settings:
            name = "squad"
        else:
            name = str(self.settings.get("task_name") or self.file.stem)
        return f"{name} benchmark" if self.settings.get("benchmark") else name

    @property
    def training_steps(self) -> list[int]:
        return [step for step, _, data in self.steps if not is_evaluation(data)]


@dataclass
class Stage:
    """One phase or task of a run. `missing`: ranges of steps (first, last) that should be in the log and are not."""

    name: str
    sessions: list[Session]
    points: list[Point] = field(default_factory=list)
    evaluations: list[Point] = field(default_factory=list)  # names without eval_
    resumes: list[tuple[int, float]] = field(default_factory=list)  # step before the resume, seconds
    missing: list[tuple[int, int]] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        name, _, benchmark = self.name.partition(" ")
        return STAGE_TITLES.get(name, name) + (f" {benchmark}" if benchmark else "")

    @property
    def settings(self) -> dict[str, Any]:
        """Those of the last session."""
        return self.sessions[-1].settings

    @property
    def seconds(self) -> float:
        return sum(session.seconds for session in self.sessions)

    @property
    def skipped(self) -> int:
        return sum(point.skipped for point in self.points)

    @property
    def last_step(self) -> int:
        return max((point.step for point in self.points), default=0)


@dataclass
class Run:
    name: str
    stages: list[Stage]
    malformed_lines: int = 0

    def stage(self, name: str) -> Stage | None:
        return next((stage for stage in self.stages if stage.name == name), None)


def is_evaluation(data: dict[str, Any]) -> bool:
    return bool(data) and all(name.startswith("eval_") for name in data)


# --- from files to sessions -------------------------------------------------------------------------------------------


def find_log_files(path: Path) -> list[Path]:
    """`path` itself, or the log files in the folder `path` and below it."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"{path} does not exist: give a folder that a run wrote to, or its log file")
    return [file for file in sorted(path.rglob("*.json")) if file.is_file() and starts_with_prefix(file)]


def starts_with_prefix(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(PREFIX)) == PREFIX.encode()


def parse_line(line: str) -> dict[str, Any] | None:
    """The record in a log line, or None if the line is malformed."""
    try:
        record = json.loads(line.removeprefix(PREFIX)) if line.startswith(PREFIX) else None
        if isinstance(record, dict) and record.get("type") == "LOG" and isinstance(record["data"], dict):
            step = record["step"]
            step = step if isinstance(step, list) else [step]
            is_valid = step in ([], ["PARAMETER"]) or isinstance(step[-1], int)
            times = {name: float(record[name]) for name in ("timestamp", "elapsedtime")}
            return {"step": step, "data": record["data"], **times} if is_valid else None
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    return None


def read_sessions(file: Path) -> tuple[list[Session], int]:
    """The sessions in a log file and the number of malformed lines.

    A session starts with the record of a program's settings, or where the time since the start goes back.
    """
    sessions: list[Session] = []
    malformed, elapsed = 0, math.inf
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            record = parse_line(line)
            if record is None:
                malformed += bool(line.strip()) and '"type": "METADATA"' not in line  # METADATA: units of metrics
                continue
            step, data, time = record["step"], record["data"], record["timestamp"]
            holds_settings = step == ["PARAMETER"] and "output_dir" in data
            if holds_settings or record["elapsedtime"] < elapsed:
                inherited = sessions[-1].settings if sessions else {}
                sessions.append(Session(file, {} if holds_settings else dict(inherited), time, time))
            elapsed = record["elapsedtime"]
            session = sessions[-1]
            session.ended = max(session.ended, time)
            if step == ["PARAMETER"]:
                session.settings.update(data)
            elif step:
                session.steps.append((step[-1], time, data))
            else:
                session.results.update(data)
    return sessions, malformed


def has_records(path: Path) -> bool:
    """Whether the folder or log file `path` is there and has a session."""
    return path.exists() and any(read_sessions(file)[0] for file in find_log_files(path))


# --- from sessions to runs --------------------------------------------------------------------------------------------


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """The runs in folders and log files. A folder is one run, unless log files in different subfolders are of the
    same stage; then each of those subfolders is a run."""
    found: list[tuple[Path, list[Session], int]] = []
    for path in paths:
        files = find_log_files(path)
        read = {file: read_sessions(file) for file in files}
        if not any(sessions for sessions, _ in read.values()):
            raise UserError(f"{path} holds no training log (lines that start with DLLL): check the path")
        folders_of_stage: dict[str, set[Path]] = {}
        for file, (sessions, _) in read.items():
            for session in sessions:
                folders_of_stage.setdefault(session.stage_name, set()).add(file.parent)
        one_run = all(len(folders) == 1 for folders in folders_of_stage.values())
        for folder in [path] if one_run else sorted({file.parent for file in files}):
            inside = [read[file] for file in files if one_run or file.parent == folder]
            sessions = [session for sessions, _ in inside for session in sessions]
            if sessions:
                found.append((folder, sessions, sum(malformed for _, malformed in inside)))
    names = short_names([path for path, _, _ in found])
    return [
        Run(name, make_stages(sessions), malformed) for name, (_, sessions, malformed) in zip(names, found, strict=True)
    ]


def short_names(paths: list[Path]) -> list[str]:
    """The last parts of each path, as many as tell the paths apart."""
    parts = [path.resolve().parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(path) for path in paths]


def make_stages(sessions: list[Session]) -> list[Stage]:
    """The stages of a run in the order of training. Sessions with different seeds are stages of their own."""
    by_name: dict[str, dict[Any, list[Session]]] = {}
    for session in sorted(sessions, key=lambda session: session.started):
        by_name.setdefault(session.stage_name, {}).setdefault(session.settings.get("seed"), []).append(session)
    names = sorted(by_name, key=lambda name: STAGE_ORDER.index(name) if name in STAGE_ORDER else len(STAGE_ORDER))
    return [
        make_stage(f"{name} seed {seed}" if len(by_name[name]) > 1 else name, own)
        for name in names
        for seed, own in by_name[name].items()
    ]


def make_stage(name: str, sessions: list[Session]) -> Stage:
    """Joins sessions: from the first step that a session logs, its records replace those of the sessions before."""
    stage = Stage(name, sessions)
    before = 0.0  # seconds in earlier sessions
    for session in sessions:
        if session.steps:
            stage.results = {}  # of weights that are not the last ones
            first = min(step for step, _, _ in session.steps)
            stage.points = [point for point in stage.points if point.step < first]
            stage.evaluations = [point for point in stage.evaluations if point.step < first]
            stage.resumes = [resume for resume in stage.resumes if resume[0] < first]
            stage.missing = [(low, min(high, first - 1)) for low, high in stage.missing if low < first]
            if stage.points:
                stage.resumes.append((stage.last_step, before))
            add_points(stage, session, before)
        stage.results.update(session.results)
        before += session.seconds
    stage.versions = find_versions(stage)
    return stage


def add_points(stage: Stage, session: Session, before: float) -> None:
    log_freq = int(session.settings.get("log_freq") or 0)
    training_steps = session.training_steps
    previous, last_step = None, stage.last_step
    for step, time, data in session.steps:
        seconds = before + time - session.started
        if is_evaluation(data):
            metrics = {name.removeprefix("eval_"): value for name, value in numbers(data).items()}
            stage.evaluations.append(Point(step, seconds, metrics))
            continue
        point = Point(step, seconds, numbers(data))
        if log_freq:
            if last_step and step > last_step + log_freq:
                stage.missing.append((last_step + 1, step - 1))
            # A record is due at each multiple of log_freq and at the last step. Skipped updates do not count as steps.
            due = (max(previous.step if previous else 0, step - 1) // log_freq + 1) * log_freq
            is_last = step == training_steps[-1] and (previous is None or step > previous.step)
            point.skipped = 0 if is_last else due - step
        if previous is not None:
            point.skipped = max(point.skipped, loss_scale_cuts(previous.metrics, point.metrics))
        if any(not math.isfinite(point.metrics.get(name, 0.0)) for name in ("loss", "grad_norm")):
            point.skipped = max(point.skipped, 1)
        stage.points.append(point)
        previous, last_step = point, step


def loss_scale_cuts(before: dict[str, float], after: dict[str, float]) -> int:
    """How often a dynamic loss scale was halved, once per skipped update."""
    old, new = before.get("loss_scale", math.nan), after.get("loss_scale", math.nan)
    return round(math.log2(old / new)) if 0 < new < old < math.inf else 0


def numbers(data: dict[str, Any]) -> dict[str, float]:
    """The metrics in `data`; null becomes NaN."""
    return {
        name: math.nan if value is None else float(value)
        for name, value in data.items()
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }


def find_versions(stage: Stage) -> dict[str, Any]:
    """What the stage's newest checkpoint near the log says of the software and the number of processes."""
    folder, phase = stage.sessions[-1].file.parent, stage.sessions[-1].stage_name
    found = [*folder.glob(f"{phase}/*/*_progress.json"), *folder.glob(f"*/{phase}/*/*_progress.json")]
    for file in sorted(found, key=lambda file: int(file.parent.name) if file.parent.name.isdigit() else -1)[::-1]:
        try:
            progress = json.loads(file.read_text(encoding="utf-8"))
            return {**progress["versions"], "processes": progress["world_size"]}
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a checkpoint that is just being removed
    return {}


# --- comparison -------------------------------------------------------------------------------------------------------


def comparable(stage: Stage) -> dict[str, Any]:
    """Settings and versions without what names the run's own folder."""
    output_dir = str(stage.settings.get("output_dir", ""))
    settings = {name: value for name, value in stage.settings.items() if name not in ("output_dir", "report_file")}
    for name, value in settings.items():
        if output_dir and isinstance(value, str) and value.startswith(output_dir + "/"):
            settings[name] = "<output-dir>" + value.removeprefix(output_dir)
    return settings | stage.versions


def differences(stages: list[Stage | None]) -> dict[str, list[Any]]:
    """By setting or version that differs: its value in each of the stages, None where a run lacks the stage."""
    values = [comparable(stage) if stage else None for stage in stages]
    names = {name: None for value in values if value for name in value}
    rows = {name: [value.get(name) if value else None for value in values] for name in names}
    present = [i for i, stage in enumerate(stages) if stage]
    return {name: row for name, row in sorted(rows.items()) if any(row[i] != row[present[0]] for i in present)}
