"""The doctor's checks of the machine: packages, device, memory and disk."""

import contextlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from checkpoint.folder import checkpoint_steps
from checkpoint.writer import KEPT_CHECKPOINTS
from diagnostics.estimates import LIBRARY_BYTES, MemorySettings, estimate_memory, num_parameters
from modeling import PreTrainedModel
from parallel.runtime import Runtime
from precision import slow_bfloat16
from utils import requirements
from utils.errors import UserError, one_line
from utils.measure import available_memory
from utils.progress import print_line

ROOT = Path(__file__).resolve().parent.parent
PROBE_BYTES = 2**26  # written to measure the disk's speed
CHECKPOINT_BYTES = 12  # per parameter: weights and two moments in float32


class Findings:
    """Prints each finding as one line and counts those that are wrong."""

    def __init__(self) -> None:
        self.num_wrong = 0

    def report(self, level: str, text: str) -> None:
        """level: ok, warning or wrong."""
        print_line(f"{level:<8} {one_line(text)}")
        self.num_wrong += level == "wrong"

    @contextlib.contextmanager
    def check(self) -> Iterator[None]:
        """Reports a UserError as a finding."""
        try:
            yield
        except UserError as error:
            self.report("wrong", str(error))


def check_packages(findings: Findings) -> None:
    problems = requirements.problems([ROOT / "requirements.txt"])
    for problem in problems:
        findings.report("wrong", f"{problem}: run bash scripts/setup_environment.sh")
    if not problems:
        versions = f"Python {platform.python_version()}, PyTorch {torch.__version__}"
        findings.report("ok", f"{versions}, packages of requirements.txt")


def check_compiler() -> None:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise UserError(f"--compile needs a C++ compiler, and {compiler} is not found: install one, or set CXX")


def check_tensorboard() -> None:
    if requirements.installed_version("tensorboard") is None:
        raise UserError("--tensorboard-dir needs a package that is not installed: pip install tensorboard")


def check_device(findings: Findings, runtime: Runtime, processes: int) -> None:
    """Reports the device. Its availability and precision were checked when `runtime` was made."""
    dtype, name = runtime.precision.dtype, str(runtime.precision.dtype).removeprefix("torch.")
    if runtime.device.type == "cpu":
        findings.report("ok", f"computes on the CPU in {name} with {torch.get_num_threads()} threads")
        if shutil.which("nvidia-smi") is not None and not torch.cuda.is_available():
            version = f"PyTorch {torch.__version__} finds no GPU: install a build of PyTorch for CUDA"
            findings.report("warning", f"an NVIDIA driver is installed, but {version}")
        if slow := slow_bfloat16(runtime.precision, runtime.device):
            findings.report("warning", slow)
        return
    findings.report("ok", f"computes in {name} on {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
    if dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32:
        findings.report("warning", "GPUs with tensor cores are several times faster with --amp")
    if processes > 1 and not torch.distributed.is_nccl_available():
        raise UserError("this PyTorch has no NCCL, which several GPUs need: install a build for CUDA on Linux")
    if processes == 1 < torch.cuda.device_count():
        found = torch.cuda.device_count()
        findings.report("warning", f"this machine has {found} GPUs, and the run uses one: start it with torchrun")


def check_memory(findings: Findings, model: PreTrainedModel, settings: MemorySettings) -> None:
    needed, free = needed_and_free_memory(model, settings)
    place = "GPU" if settings.device.type == "cuda" else "machine"
    text = f"memory: {needed / 2**30:.1f} GiB are needed (estimated), {free / 2**30:.1f} GiB are free on this {place}"
    if needed > free:
        raise UserError(
            f"{text}: lower the batch size and raise --gradient-merge-steps as much, or see docs/memory.md for flags "
            f"that save memory"
        )
    findings.report("ok", text)


def needed_and_free_memory(model: PreTrainedModel, settings: MemorySettings) -> tuple[float, float]:
    """Estimated and free bytes: for one process on a GPU, for all processes on the CPU."""
    needed = estimate_memory(model, settings).total + LIBRARY_BYTES
    if settings.device.type == "cuda":
        torch.cuda.empty_cache()  # from earlier checks
        return needed, torch.cuda.mem_get_info()[0]
    return needed * settings.world_size, available_memory()


def check_disk(findings: Findings, folder: Path, model: PreTrainedModel) -> float:
    """Checks that `folder` is writable and has space for checkpoints. Returns the seconds to write one."""
    size = CHECKPOINT_BYTES * num_parameters(model)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        speed = write_speed(existing)
    except OSError as error:
        raise UserError(
            f"--output-dir: cannot write to {existing} ({error.strerror or error}): choose another folder, or change "
            f"its permissions"
        ) from error
    # Older checkpoints are removed only after a new one is written.
    missing = KEPT_CHECKPOINTS + 1 - min(len(checkpoint_steps(folder)), KEPT_CHECKPOINTS)
    free = shutil.disk_usage(existing).free
    text = (
        f"disk: {free / 1e9:,.1f} GB are free for {folder}, which takes {missing} more checkpoints of "
        f"{size / 1e9:.3g} GB; {speed / 1e6:,.0f} MB/s"
    )
    if missing * size > free:
        raise UserError(f"{text}: free {(missing * size - free) / 1e9:,.1f} GB, or choose another --output-dir")
    findings.report("ok", text)
    return size / speed


def write_speed(folder: Path) -> float:
    """Bytes per second, synced to the disk."""
    block = os.urandom(2**20)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        started = time.perf_counter()
        for _ in range(PROBE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return PROBE_BYTES / (time.perf_counter() - started)
