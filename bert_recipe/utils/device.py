"""The device of a process: its threads, memory and peak rates."""

import ctypes
import math
import os
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn

from bert_recipe.utils.errors import UserError
from bert_recipe.utils.rank_environment import read_environment


def select_device(choice: str) -> torch.device:
    """Selects the device of this process. choice: `cuda`, `cpu`, or `auto` for a GPU if available.
    Raises UserError if there is no GPU, or fewer GPUs than processes on this machine, or if this
    PyTorch has no kernels for it.
    """
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            "--device cuda: no GPU can be used here (torch.cuda.is_available() is false): use "
            "--device cpu"
        )
    place = read_environment()
    num_gpus = torch.cuda.device_count()
    if place.local_rank >= num_gpus:
        raise UserError(
            f"{place.local_world_size} processes were started on a machine with {num_gpus} GPUs: "
            "start one process per GPU"
        )
    device = torch.device("cuda", place.local_rank)
    if not has_kernels(torch.cuda.get_device_capability(device), torch.cuda.get_arch_list()):
        name = torch.cuda.get_device_name(device)
        major, minor = torch.cuda.get_device_capability(device)
        raise UserError(
            f"this PyTorch has no kernels for the {name} (compute capability {major}.{minor}): "
            "install a build that has, such as cu126 for Volta, or use --device cpu"
        )
    torch.cuda.set_device(device)
    return device


def allocate(model: nn.Module, device: torch.device) -> None:
    """Moves a model on the meta device to memory of `device` that is not initialized.

    As `model.to_empty`, which computes the strides of meta tensors with SymPy: its import takes a
    second.
    """
    model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))


def has_kernels(capability: tuple[int, int], builds: list[str]) -> bool:
    """Whether a GPU can run kernels built for `builds`, such as sm_80 or compute_90: machine code
    of its own major version, or PTX (compute), of at most its version.
    """
    for build in builds:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", build)
        if match is None:
            continue
        kind, major, minor = match.groups()
        is_older = (int(major), int(minor)) <= capability
        if is_older and (kind == "compute" or int(major) == capability[0]):
            return True
    return False


def use_deterministic_kernels() -> None:
    """Makes torch's kernels add in a fixed order. Called before the first product on a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def set_cpu_affinity(device: torch.device, sysfs: Path = Path("/sys/bus/pci/devices")) -> None:
    """Binds this process to those of its cores that are in the NUMA node of the GPU `device`, if
    sysfs tells them. Does nothing for a CPU device, where the system schedules all processes.
    """
    if device.type != "cuda":
        return
    gpu = torch.cuda.get_device_properties(device)
    path = (
        sysfs
        / f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        / "local_cpulist"
    )
    ranges = path.read_text().strip().split(",") if path.is_file() else []  # such as 0-3,8,10-11
    cores: set[int] = set()
    for first, _, last in (part.partition("-") for part in ranges if part):
        cores.update(range(int(first), int(last or first) + 1))
    if near := cores & os.sched_getaffinity(0):
        os.sched_setaffinity(0, near)
        # With more threads than cores, an optimizer on the CPU waits for them at each operation.
        torch.set_num_threads(min(torch.get_num_threads(), len(near)))


def cpu_maker(cpu_info: Path = Path("/proc/cpuinfo")) -> str:
    """The maker's name in the processor's identification, such as AuthenticAMD; "" if unknown."""
    if not cpu_info.is_file():
        return ""
    for line in cpu_info.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "vendor_id":
            return value.strip()
    return ""


def set_num_threads() -> None:
    """Sets the CPU threads to this process's share of the cores, unless the user set
    OMP_NUM_THREADS. torchrun sets it to 1 for several processes if the user did not; that does not
    count.
    """
    set_by_torchrun = (
        "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"
    )
    if set_by_torchrun or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(
            max(1, len(os.sched_getaffinity(0)) // read_environment().local_world_size)
        )


def keep_freed_memory() -> None:
    """Configures glibc to keep freed memory. Otherwise it returns memory to the kernel, which must
    zero it again; this takes a third of a small model's step. Does nothing if the environment
    configures it.
    """
    # Numbers of malloc.h.
    for parameter, name in ((-1, "MALLOC_TRIM_THRESHOLD_"), (-3, "MALLOC_MMAP_THRESHOLD_")):
        if name not in os.environ:
            ctypes.CDLL(None).mallopt(parameter, 2**31 - 1)


class FreedMemory:
    """Bounds what `keep_freed_memory` keeps: fragmented by streams of varying lengths, it would
    grow by half.
    """

    GROWTH = 1.25  # over the smallest reading since memory was returned

    def __init__(self) -> None:
        self.smallest = math.inf

    def bound(self) -> None:
        """Returns freed memory to the kernel if resident memory has grown too much."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.smallest = min(self.smallest, pages)
        if pages > self.GROWTH * self.smallest:
            ctypes.CDLL(None).malloc_trim(0)
            # The next reading is after updates, which need a part of it again.
            self.smallest = math.inf


def pin_memory(memory: torch.Tensor, gpu: torch.device, owner: object) -> None:
    """Pins `memory`, flat bytes, where it is, until `owner` is deleted. (`pin_memory=True` of
    torch.empty would round its size up to a power of two.) Does nothing if CUDA refuses: then
    copies are slower.
    """

    def register() -> bool:
        with torch.cuda.device(gpu):
            return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), len(memory), 0)) == 0

    # In a thread, because CUDA repeats an error at the next kernel of the same thread.
    with ThreadPoolExecutor(1) as other_thread:
        is_pinned = other_thread.submit(register).result()
    # Unpin before the memory is freed: else CUDA would take the next memory at its address for it.
    if is_pinned:
        weakref.finalize(owner, unpin_memory, memory.data_ptr(), gpu).atexit = False


def unpin_memory(address: int, gpu: torch.device) -> None:
    with torch.cuda.device(gpu):
        torch.cuda.cudart().cudaHostUnregister(address)


# Dense matrix throughput from the vendor's datasheets, in TFLOP/s: (16-bit, TF32, float32). The
# first key that matches the device's name is used.
PEAK_TFLOPS = {
    "H[12]00 NVL": (835.5, 417.5, 60.0),
    "H100 PCIe": (756.0, 378.0, 51.0),
    "H[12]00": (989.4, 494.7, 67.0),
    "A100": (312.0, 156.0, 19.5),
    "L40S": (362.0, 183.0, 91.6),
    "V100": (125.0, 15.7, 15.7),
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The peak FLOP/s of `device` for matrix products in `dtype`; None if unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for key, (half, tf32, full) in PEAK_TFLOPS.items():
        if re.search(key, name):
            single = tf32 if torch.backends.cuda.matmul.allow_tf32 else full
            return (single if dtype == torch.float32 else half) * 1e12
    return None
