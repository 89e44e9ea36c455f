"""How long a run takes and which GPUs it fits, from the measured time of an update and the estimate of memory."""

from dataclasses import dataclass, replace

import torch

from diagnostics.memory import MemorySettings, estimate_memory
from modeling import BertPreTrainedModel

GPU_SIZES = (80, 40, 24, 16)  # GB
LIBRARY_BYTES = 2**30  # CUDA and NCCL
# Model TFLOP/s of BERT-large on an A100 80GB in mixed precision at length 512: 103 sequences/s, NVIDIA's published
# figure (docs/results.md), times the 1.02 TFLOP of a sequence.
A100_TFLOPS = 105
DEVICE_COUNTS = (1, 8, 64)


@dataclass(frozen=True)
class RunSize:
    """update_seconds and update_flops: of one update over all processes, on `device_type`."""

    max_steps: int
    global_batch_size: int
    update_seconds: float
    update_flops: float
    device_type: str
    world_size: int

    @property
    def seconds(self) -> float:
        return self.max_steps * self.update_seconds


def time_line(size: RunSize) -> str:
    return (
        f"{size.max_steps:,} updates of {size.global_batch_size:,} sequences, each {format_time(size.update_seconds)}, "
        f"take {format_time(size.seconds)} on {size.world_size} x {size.device_type}, without evaluation and saving"
    )


def devices_line(size: RunSize) -> str:
    """The time on more GPUs: in proportion if GPUs were measured, else at a published speed."""
    if size.device_type == "cuda":
        times = [(count, size.seconds * size.world_size / count) for count in DEVICE_COUNTS if count != size.world_size]
        source = "if speed is proportional to the number of GPUs"
    else:
        one = size.max_steps * size.update_flops / (A100_TFLOPS * 1e12)
        times = [(count, one / count) for count in DEVICE_COUNTS]
        source = f"if GPUs reach the {A100_TFLOPS} TFLOPS that NVIDIA published for BERT-large on an A100"
    return f"{source}: {', '.join(f'{count} GPUs {format_time(time)}' for count, time in times)}".replace(
        " 1 GPUs", " 1 GPU"
    )


def memory_line(model: BertPreTrainedModel, settings: MemorySettings) -> str:
    """Which GPUs the run fits, on whatever device it was measured."""
    needed = estimate_memory(model, replace(settings, device=torch.device("cuda"))).total + LIBRARY_BYTES
    fits = [size for size in GPU_SIZES if needed <= size * 1e9]
    too_small = [size for size in GPU_SIZES if size not in fits]
    verdict = [f"fits {name_sizes(fits)}"] if fits else []
    verdict += [f"does not fit {name_sizes(too_small)}"] if too_small else []
    return f"memory on a GPU: {needed / 1e9:.1f} GB per process, {', '.join(verdict)}"


def name_sizes(sizes: list[int]) -> str:
    return f"{', '.join(map(str, sizes))} GB"


def format_time(seconds: float) -> str:
    """In the unit that a person would choose."""
    for unit, length, limit in (("s", 1, 120), ("minutes", 60, 7200), ("hours", 3600, 48 * 3600)):
        if seconds < limit:
            return f"{seconds / length:.2g} {unit}" if seconds < 10 else f"{seconds / length:.3g} {unit}"
    return f"{seconds / 86400:,.1f} days"
