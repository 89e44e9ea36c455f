"""Measures time per phase, and the most memory that was held."""

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from bert_recipe.utils.memory import process_memory


class Stopwatch:
    """Seconds per phase. On a GPU, uses CUDA events, so that measuring does not synchronize. In
    profiles, the phases are named.
    """

    def __init__(self, device: torch.device, enabled: bool = True):
        self.device, self.enabled = device, enabled
        self.laps: list[tuple[str, Any, Any]] = []  # marks: seconds, or events of a GPU

    @contextlib.contextmanager
    def lap(self, kind: str) -> Iterator[None]:
        with torch.profiler.record_function(kind):
            if not self.enabled:
                yield
                return
            start = self._mark()
            yield
            self.laps.append((kind, start, self._mark()))

    def seconds(self) -> dict[str, list[float]]:
        """The seconds of each lap since the last call, by kind."""
        synchronize(self.device)
        seconds_of_kind: dict[str, list[float]] = {}
        for kind, start, end in self.laps:
            lap = start.elapsed_time(end) / 1e3 if self.device.type == "cuda" else end - start
            seconds_of_kind.setdefault(kind, []).append(lap)
        self.laps = []
        return seconds_of_kind

    def medians_in_milliseconds(self, steps: int) -> dict[str, float]:
        """The median lap of each kind; where a step has several laps of a kind, their sum stands
        for it.
        """
        return {
            f"{kind}_ms": 1e3 * statistics.median(laps) * len(laps) / max(steps, 1)
            for kind, laps in self.seconds().items()
        }

    def _mark(self) -> "float | torch.cuda.Event":
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def synchronize(device: torch.device) -> None:
    """Waits for all work on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this process has held: on the GPU, or in all."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else process_memory()[1]
