"""Metrics of a run: throughput measurement and log sinks.

A record is a `step` (DLLogger's term) and a dict of metrics. The step is () for the whole run, (epoch, number) for an
optimizer step, or "PARAMETER" for settings.
"""

import contextlib
import datetime
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from run_config import RuntimeConfig
from utils.errors import UserError
from utils.measure import Stopwatch, peak_memory_bytes, synchronize
from utils.progress import print_line


@dataclass
class GlobalBatchStats:
    """Counts over all ranks for one or more global batches."""

    sequences: float = 0
    tokens: float = 0
    targets: float = 0
    flops: float = 0

    def __iadd__(self, other: "GlobalBatchStats") -> "GlobalBatchStats":
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


class MeasuringWindow:
    """Throughput since the last `restart`: sequences, real tokens and model FLOPs per second, and the fraction of time
    spent waiting for data. Excludes time inside `paused` (evaluation, checkpoints).

    peak: the device's peak FLOP/s, for the utilization; None if unknown.
    """

    def __init__(self, device: torch.device, world_size: int, peak: float | None):
        self.device, self.world_size, self.peak = device, world_size, peak
        self.restart()

    def restart(self) -> None:
        self.started, self.waited, self.steps, self.stats = time.perf_counter(), 0.0, 0, GlobalBatchStats()

    def count(self, stats: GlobalBatchStats, waited: float) -> None:
        """Adds a step. waited: seconds that it waited for data."""
        self.stats += stats
        self.waited += waited
        self.steps += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self.started += time.perf_counter() - before

    def metrics(self) -> dict[str, float]:
        seconds, stats = time.perf_counter() - self.started, self.stats
        metrics = {
            "step_seconds": seconds / max(self.steps, 1),
            "sequences_per_second": stats.sequences / seconds,
            "tokens_per_second": stats.tokens / seconds,
            "model_tflops": stats.flops / seconds / 1e12 / self.world_size,
        }
        if self.peak is not None:
            metrics["utilization"] = stats.flops / seconds / self.world_size / self.peak
        if self.device.type == "cuda":
            metrics["peak_memory_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        metrics["data_wait"] = self.waited / max(seconds, 1e-9)
        return metrics

    def final_metrics(self) -> dict[str, float]:
        """The metrics after device synchronization, with the process's peak memory."""
        synchronize(self.device)
        metrics = self.metrics()
        if (peak_memory := peak_memory_bytes(self.device)) is not None:
            metrics["peak_memory_gib"] = peak_memory / 2**30
        return metrics


class Benchmark:
    """`--benchmark`: metrics of all steps after `warmup_steps`, with the time per phase."""

    def __init__(self, window: MeasuringWindow, stopwatch: Stopwatch, warmup_steps: int):
        self.window, self.stopwatch = window, stopwatch
        self.warmup_left = warmup_steps

    def count(self, stats: GlobalBatchStats, waited: float) -> None:
        self.window.count(stats, waited)
        self.warmup_left -= 1
        if self.warmup_left == 0:
            self.stopwatch.seconds()  # discards the warmup
            synchronize(self.window.device)
            self.window.restart()

    def log(self, reporter: "Reporter", seconds: float, raw_seconds: float, final_loss: float | None) -> None:
        """`seconds`: duration of the whole run; `raw_seconds`: without evaluation and checkpoints."""
        steps = self.window.steps
        metrics = self.window.final_metrics() | self.stopwatch.medians_in_milliseconds(steps)
        nvidias = {
            "training_sequences_per_second": metrics["sequences_per_second"],
            "e2e_train_time": seconds,
            "raw_train_time": raw_seconds,
            "final_loss": final_loss,
        }
        reporter.log((), metrics | nvidias, f"benchmark of {steps} steps: {format_metrics(metrics)}")


Step = tuple[int, ...] | str


class Sink(ABC):
    @abstractmethod
    def write(self, step: Step, metrics: dict[str, Any], text: str | None) -> None:
        """Records `metrics`. text: a human-readable line, or None for records that are not shown."""

    def close(self) -> None:  # noqa: B027
        pass


class TerminalSink(Sink):
    def write(self, step: Step, metrics: dict[str, Any], text: str | None) -> None:
        if text:
            print_line(text)


class DLLoggerSink(Sink):
    """Appends lines in the format of NVIDIA's DLLogger to a file, which is opened at the first record."""

    def __init__(self, path: Path, flag: str):
        self.path, self.flag = path, flag
        self.started = time.monotonic()
        self.file: TextIO | None = None

    def write(self, step: Step, metrics: dict[str, Any], text: str | None) -> None:
        try:
            if self.file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                if self.path.is_fifo() or self.path.is_socket():  # opening it would block
                    raise UserError(f"{self.path} is not a regular file: choose another {self.flag}")
                end_last_line(self.path)
                self.file = self.path.open("a", encoding="utf-8")
            self.file.write(f"{self.line(datetime.datetime.now(), step, metrics)}\n")
            self.file.flush()
        except OSError as error:
            raise UserError(
                f"cannot write {self.path} ({error.strerror}): free some space, or choose another {self.flag}"
            ) from error

    @abstractmethod
    def line(self, now: datetime.datetime, step: Step, metrics: dict[str, Any]) -> str: ...

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class DLLoggerJsonSink(DLLoggerSink):
    """DLLogger's JSON lines, `DLLL {...}`."""

    def line(self, now: datetime.datetime, step: Step, metrics: dict[str, Any]) -> str:
        entry = {
            "timestamp": str(now.timestamp()),
            "datetime": str(now),
            "elapsedtime": str(round(time.monotonic() - self.started, 6)),
            "type": "LOG",
            "step": step if isinstance(step, str) else list(step),
            # JSON has no NaN, such as the loss of a skipped step.
            "data": {n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in metrics.items()},
        }
        return f"DLLL {json.dumps(entry, default=str, allow_nan=False)}"


class DLLoggerTextSink(DLLoggerSink):
    """DLLogger's text format with NVIDIA's step names: `DLL <date> - Epoch: 0 Step: 1  loss : 9.5  ...`,
    `DLL <date> - Summary:  ...`."""

    def line(self, now: datetime.datetime, step: Step, metrics: dict[str, Any]) -> str:
        if isinstance(step, tuple):
            names = ("Epoch", "Step", "Validation Iteration")
            step = "".join(f"{name}: {number} " for name, number in zip(names, step, strict=False)) or "Summary: "
        return f"DLL {now} - {step} {'  '.join(f'{name} : {value}' for name, value in metrics.items())}"


def end_last_line(path: Path) -> None:
    """Appends a newline to the file `path` if a killed run left an incomplete last line."""
    if not path.is_file() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


class RecordingSink(Sink):
    """Keeps the metrics of each step in memory."""

    def __init__(self) -> None:
        self.records: dict[Step, dict[str, Any]] = {}

    def write(self, step: Step, metrics: dict[str, Any], text: str | None) -> None:
        self.records.setdefault(step, {}).update(metrics)


class TensorBoardSink(Sink):
    """Writes TensorBoard scalars; those of the whole run are under `final/`."""

    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        try:
            self.writer, self.last_step = SummaryWriter(str(folder)), 0
        except OSError as error:
            raise UserError(f"cannot write to --tensorboard-dir {folder} ({error.strerror})") from error

    def write(self, step: Step, metrics: dict[str, Any], text: str | None) -> None:
        if isinstance(step, str):
            return
        if step:
            self.last_step = step[-1]
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(name if step else f"final/{name}", value, self.last_step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Reporter:
    """Sends records to all sinks. Only the main process has sinks."""

    def __init__(self, sinks: Sequence[Sink] = ()):
        self.sinks = list(sinks)

    def log(self, step: Step, metrics: dict[str, Any], text: str | None = None) -> None:
        for sink in self.sinks:
            sink.write(step, metrics, text)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


def make_reporter(config: RuntimeConfig, is_main: bool) -> Reporter:
    """Creates the sinks that the flags enable. Add new sinks here."""
    if not is_main:
        return Reporter()
    sinks: list[Sink] = [TerminalSink()]
    if config.report_file is not None:
        sinks.append(DLLoggerJsonSink(config.report_file, "--report-file"))
    if config.log_file is not None:
        sinks.append(DLLoggerTextSink(config.log_file, "--log-file"))
    if config.tensorboard_dir is not None:
        sinks.append(TensorBoardSink(config.tensorboard_dir))
    return Reporter(sinks)


def dllogger_metrics(metrics: Mapping[str, float], step_samples: float) -> dict[str, float]:
    """A step's metrics under the names of NVIDIA's recipe."""
    return {
        "step_cost": metrics["step_seconds"],
        "step_samples": step_samples,
        "seqs_per_sec": metrics["sequences_per_second"],
    }


# Terminal format of each metric; {n} is the value formatted by `format_number`.
FORMATS = {
    "loss": "loss {:.4f}",
    "mlm_loss": "mlm {:.4f}",
    "mlm_accuracy": "({:.1%})",
    "nsp_loss": "nsp {:.4f}",
    "nsp_accuracy": "({:.1%})",
    "learning_rate": "lr {:.3g}",
    "grad_norm": "grad norm {:.3g}",
    "loss_scale": "loss scale {:g}",
    "step_seconds": "{n} s/step",
    "sequences_per_second": "{n} seq/s",
    "tokens_per_second": "{n} tokens/s",
    "model_tflops": "{:.3g} TFLOPS",
    "utilization": "({:.1%} of peak)",
    "data_wait": "data wait {:.0%}",
    "forward_ms": "forward {n} ms",
    "backward_ms": "backward {n} ms",
    "optimizer_ms": "optimizer {n} ms",
    "peak_memory_gib": "{:.1f} GiB",
}


def format_metrics(metrics: Mapping[str, float]) -> str:
    """`metrics` on one line."""
    shown = [FORMATS.get(name, name + " {n}").format(value, n=format_number(value)) for name, value in metrics.items()]
    return "  ".join(shown).replace("  (", " (")


def format_number(value: float) -> str:
    """No decimals from 100 on, three significant digits below."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """Hours, minutes and seconds: 1:02:03."""
    return str(datetime.timedelta(seconds=round(seconds)))
