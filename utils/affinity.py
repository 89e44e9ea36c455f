"""Binds a process to the CPU cores near its GPU, which are read from sysfs."""

import os
from pathlib import Path

import torch


def parse_cpu_list(text: str) -> set[int]:
    """The cores in a list such as `0-3,8,10-11`."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return cores


def cores_near_gpu(device: torch.device, sysfs: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """The cores of the NUMA node of the GPU `device`; empty if unknown."""
    gpu = torch.cuda.get_device_properties(device)
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    try:
        return parse_cpu_list((sysfs / address / "local_cpulist").read_text())
    except (OSError, ValueError):
        return set()


def share_of(cores: set[int], index: int, count: int) -> set[int]:
    """Part `index` of `count` equal parts of `cores`; all cores if there are fewer cores than parts."""
    ordered = sorted(cores)
    size = len(ordered) // count
    return set(ordered[index * size : (index + 1) * size]) or cores


def set_cpu_affinity(device: torch.device, local_rank: int, local_world_size: int) -> set[int]:
    """Binds this process to the available cores near the GPU `device`, and returns them. Processes whose GPUs share a
    NUMA node divide its cores evenly. Does nothing for a CPU device, where the system schedules all processes."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if device.type != "cuda" or not allowed:
        return set(allowed)
    near = cores_near_gpu(device) & allowed
    if not near:
        return set(allowed)
    neighbours = [
        index
        for index in range(min(local_world_size, torch.cuda.device_count()))
        if cores_near_gpu(torch.device("cuda", index)) & near
    ]
    if local_rank in neighbours:
        near = share_of(near, neighbours.index(local_rank), len(neighbours))
    os.sched_setaffinity(0, near)
    return near
