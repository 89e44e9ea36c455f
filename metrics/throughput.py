"""Throughput of training steps, and the benchmark of `--benchmark`."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from metrics.sinks import Reporter
from metrics.text import format_metrics
from utils.measure import Stopwatch, peak_memory_bytes, synchronize


@dataclass
class GlobalBatchStats:
    """Counts over all ranks for one or more global batches."""

    sequences: float = 0
    tokens: float = 0
    labelled_tokens: float = 0
    flops: float = 0

    def __iadd__(self, other: "GlobalBatchStats") -> "GlobalBatchStats":
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


class MeasuringWindow:
    """Throughput since the last `restart`: sequences, real tokens and model FLOPs per second, and
    the fraction of time spent waiting for data. Excludes time inside `paused` (evaluation,
    checkpoints).

    peak: the device's peak FLOP/s, for the utilization; None if unknown.
    """

    def __init__(self, device: torch.device, world_size: int, peak: float | None):
        self.device, self.world_size, self.peak = device, world_size, peak
        self.restart()

    def restart(self) -> None:
        self.started, self.waited, self.steps, self.stats = (
            time.perf_counter(),
            0.0,
            0,
            GlobalBatchStats(),
        )

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
        return self.metrics() | {"peak_memory_gib": peak_memory_bytes(self.device) / 2**30}


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

    def log(
        self, reporter: Reporter, seconds: float, raw_seconds: float, final_loss: float | None
    ) -> None:
        """`seconds`: duration of the whole run; `raw_seconds`: without evaluation and
        checkpoints.
        """
        steps = self.window.steps
        metrics = self.window.final_metrics() | self.stopwatch.medians_in_milliseconds(steps)
        nvidias = {
            "training_sequences_per_second": metrics["sequences_per_second"],
            "e2e_train_time": seconds,
        }
        nvidias |= {"raw_train_time": raw_seconds, "final_loss": final_loss}
        reporter.log(
            (), metrics | nvidias, f"benchmark of {steps} steps: {format_metrics(metrics)}"
        )
