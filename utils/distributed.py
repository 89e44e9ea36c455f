"""Processes, devices and precision: where this process runs, with whom, and in what arithmetic.

Several processes are started by torchrun (or Slurm with torchrun), which sets RANK, WORLD_SIZE and LOCAL_RANK.
"""

import contextlib
import ctypes
import datetime
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from utils.errors import UserError


@dataclass
class Processes:
    """This process among its equals. `control` is a group on the CPU, for counts and flags that must not make the
    host wait for the device; None in a run of one process, and after leaving."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    control: "dist.ProcessGroup | None" = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def all_sum(self, values: Sequence[float]) -> list[float]:
        """The sums of `values` over all processes, on all of them; exact for whole numbers up to 2^53."""
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        with others_may_end():
            dist.all_reduce(tensor, group=self.control)
        return tensor.tolist()

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier(group=self.control)

    def leave(self) -> None:
        """Leaves the other processes. Gloo's threads end with the last reference to their group: one that still lets
        go of a tensor while the interpreter shuts down aborts the program. torch's DDP never lets go of the default
        group, so `control`, the last that is used, is a group of its own on the CPU too."""
        self.control = None
        dist.destroy_process_group()

    def gather_json(self, value: Any) -> list[Any] | None:
        """Every process's JSON-like `value`, in rank order, on the main process; None elsewhere. (torch's own
        gather_object would unpickle.)"""
        if self.world_size == 1:
            return [value]
        encoded = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(encoded)]), group=self.control)
        longest = max(int(size) for size in sizes)
        padded = torch.nn.functional.pad(encoded, (0, longest - len(encoded)))
        received = [torch.empty_like(padded) for _ in range(self.world_size)] if self.is_main else None
        dist.gather(padded, received, dst=0, group=self.control)
        if received is None:
            return None
        return [json.loads(bytes(r[: int(n)].tolist())) for r, n in zip(received, sizes, strict=True)]


@contextlib.contextmanager
def others_may_end():
    """Says in one line what torch says in many when another process of the run has gone."""
    try:
        yield
    except RuntimeError as error:
        if not any(sign in str(error) for sign in ("gloo", "NCCL", "Connection closed", "Connection reset")):
            raise
        raise UserError("another process of this run has ended, and so this one ends: see that one's error") from error


@contextlib.contextmanager
def processes_from_environment(device: torch.device):
    """Joins the process group that torchrun's environment describes, and leaves it at the end."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield Processes()
        return
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise UserError(f"WORLD_SIZE is {world_size} and {', '.join(missing)} is not set: start the run with torchrun")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(minutes=30))
    processes = Processes(
        rank=int(os.environ["RANK"]),
        world_size=world_size,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        control=dist.new_group(backend="gloo"),
    )
    try:
        with others_may_end():
            yield processes
    finally:
        processes.leave()


def select_device(choice: str) -> torch.device:
    """The device of this process: `cuda`, `cpu`, or `auto`, which is a GPU where there is one."""
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("--device cuda: no GPU can be used here (torch.cuda.is_available() is false): use --device cpu")
    local_rank, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= found:
        raise UserError(
            f"{os.environ.get('LOCAL_WORLD_SIZE', local_rank + 1)} processes were started on a machine with {found} "
            f"GPUs: start one process a GPU"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def default_num_threads() -> int:
    """An equal share of this machine's cores for each process on it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@dataclass(frozen=True)
class Precision:
    """`dtype` is what matrix products compute in. `autocast`: weights are float32 and are cast where it matters;
    `pure`: the model is held in `dtype`, with float32 master weights beside the optimizer."""

    dtype: torch.dtype = torch.float32
    pure: bool = False

    @property
    def autocast(self) -> bool:
        return self.dtype != torch.float32 and not self.pure

    @property
    def needs_loss_scale(self) -> bool:
        return self.dtype == torch.float16

    def context(self, device: torch.device):
        """What the forward pass runs in."""
        return torch.autocast(device.type, self.dtype) if self.autocast else contextlib.nullcontext()


def has_float16(device: torch.device) -> bool:
    if device.type == "cuda":
        return True
    return bool(torch.cpu._is_avx512_fp16_supported()) if hasattr(torch.cpu, "_is_avx512_fp16_supported") else False


def select_precision(amp: bool, amp_dtype: str, pure: bool, tf32: bool, device: torch.device) -> Precision:
    """Decides the arithmetic of a run. `tf32` applies to float32 matrix products on GPUs that have it."""
    if tf32 and device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    elif device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    if not (amp or pure):
        return Precision()
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}[amp_dtype]
    if dtype == torch.float16 and not has_float16(device):
        raise UserError("--amp-dtype float16: this CPU computes no float16: use --amp-dtype bfloat16, or a GPU")
    if (
        dtype == torch.bfloat16
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise UserError("--amp-dtype bfloat16: this GPU computes no bfloat16: use --amp-dtype float16")
    return Precision(dtype, pure)


def keep_freed_memory() -> None:
    """Tells glibc to keep freed memory for the next step, in place of handing it back to the kernel and having it
    zeroed again, which takes a third of a small model's step. Does nothing elsewhere or where the environment says."""
    trim_threshold, mmap_threshold = -1, -3  # the numbers of malloc.h
    for parameter, name in ((trim_threshold, "MALLOC_TRIM_THRESHOLD_"), (mmap_threshold, "MALLOC_MMAP_THRESHOLD_")):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None and name not in os.environ:
            mallopt(parameter, 2**31 - 1)


def use_threads() -> None:
    """Sets the CPU threads of this process to its share of the cores, unless OMP_NUM_THREADS was set on purpose.
    torchrun sets it to 1 for each of several processes where nobody did, which is not on purpose."""
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"
    if by_torchrun or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(default_num_threads())


# Dense matrix throughput by the vendor's datasheets, in TFLOP/s: (16-bit, TF32, float32). The first key whose words
# are all in the device's name counts.
PEAK_TFLOPS = {
    "H200 NVL": (835.5, 417.5, 60.0),
    "H200": (989.4, 494.7, 67.0),
    "H100 NVL": (835.5, 417.5, 60.0),
    "H100 PCIe": (756.0, 378.0, 51.0),
    "H100": (989.4, 494.7, 67.0),
    "A100": (312.0, 156.0, 19.5),
    "L40S": (362.0, 183.0, 91.6),
    "V100": (125.0, 15.7, 15.7),
}


def peak_flops(device: torch.device, precision: Precision) -> float | None:
    """The device's peak in FLOP/s for the run's arithmetic, where it is known; utilization is measured against it."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for key, (half, tf32, full) in PEAK_TFLOPS.items():
        if all(word in name for word in key.split()):
            if precision.dtype != torch.float32:
                return half * 1e12
            return (tf32 if torch.backends.cuda.matmul.allow_tf32 else full) * 1e12
    return None
