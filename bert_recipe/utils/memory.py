"""Memory of this process and of the machine, within the limits of its cgroups."""

from collections.abc import Iterator
from pathlib import Path


def available_memory(root: Path = Path("/")) -> float:
    """Bytes of memory that this process can still allocate: what the machine and the limits of its
    cgroups leave. root: of the file system that holds /proc and /sys, for tests.
    """
    free = _memory_info(root, "MemAvailable:")
    # File pages that are not in use count as used in a cgroup, but the kernel drops them.
    return min([free, *(limit - used + cache for limit, used, cache in _cgroup_limits(root))])


def process_memory() -> tuple[int, int]:
    """Bytes of memory that this process holds, and that it held at its peak. (getrusage's peak is
    no use here: a process takes over that of the one which started it.)
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    kib = {name: int(values[name].split()[0]) for name in ("VmRSS", "VmHWM")}
    return kib["VmRSS"] * 1024, kib["VmHWM"] * 1024


def total_memory(root: Path = Path("/")) -> float:
    """Bytes of memory of this machine with its swap space, or of the smallest limit of this
    process's cgroups.
    """
    limits = [_memory_info(root, "MemTotal:", "SwapTotal:")]
    for limit, _used, _cache in _cgroup_limits(root):
        limits.append(limit)
    return min(limits)


def _memory_info(root: Path, *keys: str) -> float:
    lines = (root / "proc/meminfo").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024.0 for line in lines if line.startswith(keys))


def _cgroup_limits(root: Path) -> Iterator[tuple[float, float, float]]:
    """Limit, use and inactive file pages, in bytes, of each memory cgroup of this process that has
    a limit: its own and those above it, of version 2 or 1.
    https://docs.kernel.org/admin-guide/cgroup-v2.html#memory
    """
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            folder = root / "sys/fs/cgroup"
            limit_file, use_file, cache_key = "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):  # version 1
            folder = root / "sys/fs/cgroup/memory"
            limit_file, use_file = "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache_key = "total_inactive_file"
        else:
            continue
        # A container may not see the path that the kernel names, and has its own group at the
        # mount.
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts) + 1):
            group = folder.joinpath(*parts[:depth])
            try:
                limit = (group / limit_file).read_text().strip()
                used = (group / use_file).read_text().strip()
                statistics = (group / "memory.stat").read_text().splitlines()
            except OSError:
                continue
            if limit == "max":
                continue
            cache = 0
            for entry in statistics:  # such as "inactive_file 4096"
                key, _, value = entry.partition(" ")
                if key == cache_key:
                    cache += int(value)
            yield float(limit), float(used), float(cache)
