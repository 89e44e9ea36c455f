"""Throughput of training steps."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bert_recipe.model.token_stream import BatchCounts, StepBatch
from bert_recipe.utils.measure import peak_memory_bytes, synchronize


@dataclass
class GlobalBatchStats:
    """Counts over all ranks for one or more global batches."""

    sequences: float = 0
    tokens: float = 0
    labelled_tokens: float = 0
    flops: float = 0

    @classmethod
    def of(cls, batch: StepBatch) -> "GlobalBatchStats":
        """Those of a batch of one process, without the FLOPs."""
        return cls(*map(int, batch.counts))

    @property
    def counts(self) -> BatchCounts:
        return BatchCounts(self.sequences, self.tokens, self.labelled_tokens)

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
        self.started = time.perf_counter()
        self.waited = 0.0
        self.steps = 0
        self.stats = GlobalBatchStats()

    def count(self, stats: GlobalBatchStats, waited: float) -> None:
        """Adds a step. waited: seconds that it waited for data."""
        self.stats += stats
        self.waited += waited
        self.steps += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Around work whose time does not count."""
        before = time.perf_counter()
        yield
        self.started += time.perf_counter() - before

    def metrics(self) -> dict[str, float]:
        seconds = time.perf_counter() - self.started
        stats = self.stats
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
