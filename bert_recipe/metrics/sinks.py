"""Log sinks. A new one is a subclass of Sink, an entry in `make_reporter`, and its flag in
run_config.RuntimeConfig.

A record is a `step` (DLLogger's term) and a dict of metrics. The step is () for the whole run,
(epoch, number) for an optimizer step, or "PARAMETER" for settings.
"""

import contextlib
import datetime
import fcntl
import io
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from bert_recipe.config import RuntimeConfig
from bert_recipe.metrics.dllogger_backends import (
    PREFIX,
    Log,
    installed_package,
    json_log,
    log_to_registered,
    text_log,
)
from bert_recipe.utils.errors import UserError, machine_problem, one_line, print_error
from bert_recipe.utils.json_files import JsonObject, read_json, write_json
from bert_recipe.utils.progress import print_line

Step = tuple[int, ...] | str
# In a PARAMETER record: the update after which a run that was stopped goes on. Records of later
# updates before it are repeated.
RESUMED_STEP = "resumed_step"
WANDB_FILE = "wandb_run.json"  # in a folder of checkpoints
WANDB_CHOICES = ("WANDB_RUN_ID", "WANDB_RESUME")  # variables that choose the run


class Sink(ABC):
    """Where records go. An error of the first `write` is the user's to mend, and ends the run.
    After any later error, the run goes on without the sink (see Reporter).
    """

    name = "the log"  # in warnings

    def start(self, folder: Path, step: int) -> None:  # noqa: B027
        """Before a run trains, after update `step`, 0 for a new run. folder: of its checkpoints."""

    @abstractmethod
    def write(self, step: Step, metrics: JsonObject, text: str | None) -> None:
        """Records `metrics`. text: a human-readable line, or None for records that are not
        shown.
        """

    def close(self) -> None:  # noqa: B027
        pass

    def abandon(self) -> None:  # noqa: B027
        """At the end of a run that has left the sink out. May fail."""


class TerminalSink(Sink):
    def write(self, step: Step, metrics: JsonObject, text: str | None) -> None:
        if text:
            print_line(text)


class DLLoggerSink(Sink):
    """Appends lines in the format of NVIDIA's DLLogger to a file, which is opened at the first
    record.
    """

    prefix: bytes  # of a line

    def __init__(self, path: Path, flag: str):
        # /dev/stdout may be a file with other lines.
        if path.is_file() and path.parts[:2] != ("/", "dev"):
            with path.open("rb") as file:
                start = file.read(len(self.prefix))
            if not self.prefix.startswith(start):
                raise UserError(
                    f"{path} is not a log of this kind, which would be appended: choose another "
                    f"{flag}"
                )
        self.path, self.flag, self.name = path, flag, f"{flag} {path}"
        self.started = time.monotonic()
        self.file: TextIO | None = None

    def write(self, step: Step, metrics: JsonObject, text: str | None) -> None:
        if self.file is not None:
            self.append(self.file, step, metrics)
            return
        try:
            self.file = self.open()
            self.log = self.make_log(self.file)
            self.append(self.file, step, metrics)
        except OSError as error:
            problem = machine_problem(error)
            raise UserError(f"cannot write {self.path} ({self.flag}): {problem}") from error

    def open(self) -> TextIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        is_file = self.path.is_file()
        file = self.path.open("ab+" if is_file else "ab")
        self.lock(file)
        if is_file and file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # an incomplete line of a killed run
                file.write(b"\n")
                file.flush()
        return io.TextIOWrapper(file, "utf-8", errors="backslashreplace", newline="\n")

    def append(self, file: TextIO, step: Step, metrics: JsonObject) -> None:
        elapsed = round(time.monotonic() - self.started, 6)
        place = step if isinstance(step, str) else list(step)
        self.log(datetime.datetime.now(), elapsed, place, self.data_of(metrics))
        file.flush()

    def data_of(self, metrics: JsonObject) -> JsonObject:
        return metrics

    def lock(self, file: BinaryIO) -> None:
        """Locks the file until `close`. Raises UserError if another run writes to it; their records
        would be mixed.
        """
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another run is writing to {self.path}: choose another {self.flag}"
            ) from error
        except OSError:  # a file system without locks, or a terminal
            pass

    @abstractmethod
    def make_log(self, file: TextIO) -> Log:
        """What writes the lines."""

    def close(self) -> None:
        if self.file is not None:
            self.file.close()

    abandon = close


class DLLoggerJsonSink(DLLoggerSink):
    """DLLogger's JSON lines, `DLLL {...}`."""

    prefix = PREFIX.encode()

    def make_log(self, file: TextIO) -> Log:
        return json_log(file)

    def data_of(self, metrics: JsonObject) -> JsonObject:
        return json_data(metrics)


class DLLoggerTextSink(DLLoggerSink):
    """DLLogger's text format with NVIDIA's step names: `DLL <date> - Epoch: 0 Step: 1  loss : 9.5
    ...`, `DLL <date> - Summary:  ...`.
    """

    prefix = b"DLL "

    def make_log(self, file: TextIO) -> Log:
        return text_log(file)


class RegisteredBackends(Sink):
    """The backends that other code has registered with `dllogger.init`."""

    name = "a backend of dllogger"

    def write(self, step: Step, metrics: JsonObject, text: str | None) -> None:
        log_to_registered(step if isinstance(step, str) else list(step), json_data(metrics))


def json_data(metrics: JsonObject) -> JsonObject:
    """`metrics` for JSON, which has no NaN, such as the loss of a skipped step; other values, such
    as paths, are strings.
    """
    values = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in metrics.items()
    }
    return json.loads(json.dumps(values, default=str, allow_nan=False))


class RecordingSink(Sink):
    """Keeps the metrics of each step in memory."""

    def __init__(self) -> None:
        self.records: dict[Step, JsonObject] = {}

    def write(self, step: Step, metrics: JsonObject, text: str | None) -> None:
        self.records.setdefault(step, {}).update(metrics)


class TensorBoardSink(Sink):
    """Writes TensorBoard scalars; those of the whole run are under `final/`."""

    name = "--tensorboard-dir"

    def __init__(self, folder: Path):
        self.folder, self.last_step = folder, 0
        self.writer = self.open()

    def open(self, purge_step: int | None = None) -> Any:
        """Begins a file of events. TensorBoard leaves out earlier ones from `purge_step` on."""
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self.folder), purge_step=purge_step)

    def write(self, step: Step, metrics: JsonObject, text: str | None) -> None:
        if isinstance(step, str):
            if RESUMED_STEP in metrics:
                self.writer.close()
                self.last_step = metrics[RESUMED_STEP]
                self.writer = self.open(self.last_step + 1)
            return
        if step:
            self.last_step = step[-1]
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(name if step else f"final/{name}", value, self.last_step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandbSink(Sink):
    """A run of Weights & Biases, begun at the first record: settings are its config, metrics of the
    whole run its summary. Where it is kept, its name and whether it is sent are up to wandb's
    variables, such as WANDB_MODE. A run that is resumed goes on with its run of wandb, which is
    named in its folder, unless the variables name a run; wandb leaves out steps that it has.
    """

    name = "--wandb-project"

    def __init__(self, project: str):
        import wandb

        self.wandb, self.project = wandb, project
        self.run: Any = None
        self.file: Path | None = None
        self.step = 0

    def start(self, folder: Path, step: int) -> None:
        self.file, self.step = folder / WANDB_FILE, step

    def write(self, step: Step, metrics: JsonObject, text: str | None) -> None:
        if self.run is None:
            self.run = self.begin()
        if isinstance(step, str):
            self.run.config.update(metrics, allow_val_change=True)
            return
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        if step:
            self.run.log(numbers, step=step[-1])
        else:
            self.run.summary.update({f"final/{name}": value for name, value in numbers.items()})

    def begin(self) -> Any:
        try:
            settings = self.wandb.Settings(console="off")
            run = self.wandb.init(
                project=self.project, reinit="create_new", settings=settings, **self.earlier_run()
            )
        except Exception as error:  # such as pydantic's, for variables with an unknown value
            advice = "Or set WANDB_MODE=offline and use wandb sync later"
            reason = str(error).removesuffix(".")
            raise UserError(f"--wandb-project {self.project}: {reason}. {advice}") from error
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.file, {"project": self.project, "id": run.id})
        return run

    def earlier_run(self) -> dict[str, Any]:
        """What makes wandb go on with the run in this folder, if there is one."""
        if self.step == 0 or self.file is None or not self.file.is_file():
            return {}
        earlier = read_json(self.file, "the run of wandb", {"project": str, "id": str})
        user_decides = any(variable in os.environ for variable in WANDB_CHOICES)
        if user_decides or earlier["project"] != self.project:
            return {}
        return {"id": earlier["id"], "resume": "allow"}

    def close(self) -> None:
        if self.run is not None:
            self.run.finish()

    def abandon(self) -> None:
        self.wandb.teardown()  # which it would else call at exit, with a traceback


class Reporter:
    """Sends records to all sinks. Only the main process has sinks.

    A sink that fails later than at its first record, because a disk is full or a service was
    killed, must not end hours of training: it is left out from then on, with a warning.
    """

    def __init__(self, sinks: Sequence[Sink] = ()):
        self.sinks = list(sinks)
        self.failed: list[Sink] = []

    def start(self, folder: Path, step: int) -> None:
        for sink in self.sinks:
            sink.start(folder, step)

    def log(self, step: Step, metrics: JsonObject, text: str | None = None) -> None:
        for sink in list(self.sinks):
            with self._without_failed(sink):
                sink.write(step, metrics, text)

    def close(self) -> None:
        for sink in list(self.sinks):
            with self._without_failed(sink):
                sink.close()
        while self.failed:
            with contextlib.suppress(Exception):
                self.failed.pop().abandon()

    @contextlib.contextmanager
    def _without_failed(self, sink: Sink) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # whatever another package raises
            self.sinks.remove(sink)
            self.failed.append(sink)
            reason = one_line(f"{type(error).__name__}: {error}").removesuffix(":")
            print_error(f"warning: {sink.name} failed ({reason}): continuing without it")


def make_reporter(config: RuntimeConfig, is_main: bool, name: str = "") -> Reporter:
    """Creates the sinks that the flags enable. name: of one of several runs, whose files and folder
    have it in their names.
    """
    if not is_main:
        return Reporter()
    sinks: list[Sink] = [TerminalSink()]
    if installed_package() is not None:
        sinks.append(RegisteredBackends())
    for path, kind, flag in (
        (config.report_file, DLLoggerJsonSink, "--report-file"),
        (config.log_file, DLLoggerTextSink, "--log-file"),
    ):
        if path is not None:
            sinks.append(kind(path.with_stem(f"{path.stem}-{name}") if name else path, flag))
    if config.tensorboard_dir is not None:
        sinks.append(TensorBoardSink(config.tensorboard_dir / name))
    if config.wandb_project is not None:
        sinks.append(WandbSink(config.wandb_project))
    return Reporter(sinks)
