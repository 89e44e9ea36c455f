"""Measures time per phase, and memory."""

import contextlib
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch


class Stopwatch:
    """Seconds per phase. On a GPU, uses CUDA events, so that measuring does not synchronize."""

    def __init__(self, device: torch.device, enabled: bool = True):
        self.device, self.enabled = device, enabled
        self.laps: list[tuple[str, float | torch.cuda.Event, float | torch.cuda.Event]] = []

    @contextlib.contextmanager
    def lap(self, kind: str):
        if not self.enabled:
            yield
            return
        start = self._mark()
        yield
        self.laps.append((kind, start, self._mark()))

    def seconds(self) -> dict[str, list[float]]:
        """The seconds of each lap since the last call, by kind."""
        synchronize(self.device)
        found: dict[str, list[float]] = {}
        for kind, start, end in self.laps:
            lap = start.elapsed_time(end) / 1e3 if self.device.type == "cuda" else end - start
            found.setdefault(kind, []).append(lap)
        self.laps = []
        return found

    def medians_in_milliseconds(self, steps: int) -> dict[str, float]:
        """The median lap of each kind; where a step has several laps of a kind, their sum stands for it."""
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


def available_memory(root: Path = Path("/")) -> float:
    """Bytes of memory that this process can still allocate: what the machine and the limits of its cgroups leave.
    Infinite where the system does not tell. root: of the file system that holds /proc and /sys, for tests."""
    free = _memory_info(root, "MemAvailable:")
    # File pages that are not in use count as used in a cgroup, but the kernel drops them.
    return min([free, *(limit - used + cache for limit, used, cache in _cgroup_limits(root))])


def total_memory(root: Path = Path("/")) -> float:
    """Bytes of memory of this machine with its swap space, or of the smallest limit of this process's cgroups.
    Infinite where the system does not tell."""
    return min([_memory_info(root, "MemTotal:", "SwapTotal:"), *(limit for limit, *_ in _cgroup_limits(root))])


def _memory_info(root: Path, *keys: str) -> float:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    return sum(int(line.split()[1]) * 1024.0 for line in lines if line.startswith(keys))


def _cgroup_limits(root: Path) -> Iterator[tuple[float, float, float]]:
    """Limit, use and inactive file pages, in bytes, of each memory cgroup of this process that has a limit: its own and
    those above it, of version 2 or 1. https://docs.kernel.org/admin-guide/cgroup-v2.html#memory"""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folder, *names = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file "
        elif "memory" in controllers.split(","):
            folder = root / "sys/fs/cgroup/memory"
            names = ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "]
        else:
            continue
        # A container may not see the path that the kernel names, and has its own group at the mount.
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts) + 1):
            group = folder.joinpath(*parts[:depth])
            try:
                limit, used = ((group / name).read_text().strip() for name in names[:2])
                counters = (group / "memory.stat").read_text().splitlines()
            except OSError:
                continue
            if limit != "max":
                cache = sum(int(entry.split()[1]) for entry in counters if entry.startswith(names[2]))
                yield float(limit), float(used), float(cache)


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most memory that this process has held: on the GPU, or in all; None where the system does not tell.
    (getrusage's figure is no use here: a process takes over that of the one which started it.)"""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    (kilobytes,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(kilobytes) * 1024
