"""The doctor's checks of the machine: packages, device, memory and disk."""

import contextlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from checkpoint.folder import checkpoint_steps
from checkpoint.writer import KEPT_CHECKPOINTS, available_memory
from device import Runtime
from diagnostics.memory import MemorySettings, estimate_memory, num_parameters
from diagnostics.run_time import LIBRARY_BYTES, memory_line
from modeling import BertPreTrainedModel
from optimizer import import_fused_lamb
from tasks.glue import load_metrics
from utils import requirements
from utils.command_line import Arguments
from utils.errors import UserError, one_line
from utils.progress import print_line

ROOT = Path(__file__).resolve().parent.parent
PROBE_BYTES = 2**26  # written to measure the disk's speed
CHECKPOINT_BYTES = 12  # per parameter: weights and two moments in float32


class Findings:
    """Prints each finding as one line and counts those that are wrong."""

    def __init__(self) -> None:
        self.num_wrong = 0

    def ok(self, text: str) -> None:
        print_line(f"ok       {one_line(text)}")

    def warning(self, text: str) -> None:
        print_line(f"warning  {one_line(text)}")

    def wrong(self, text: str) -> None:
        print_line(f"wrong    {one_line(text)}")
        self.num_wrong += 1

    @contextlib.contextmanager
    def check(self) -> Iterator[None]:
        """Reports a UserError as a finding."""
        try:
            yield
        except UserError as error:
            self.wrong(str(error))


# --- software ---------------------------------------------------------------------------------------------------------


def check_packages(findings: Findings, args: Arguments) -> None:
    problems = requirements.problems([ROOT / "requirements.txt"])
    for problem in problems:
        findings.wrong(f"{problem}: run bash scripts/setup_environment.sh")
    if not problems:
        findings.ok(f"Python {platform.python_version()}, PyTorch {torch.__version__}, packages of requirements.txt")
    if args.tensorboard_dir is not None and requirements.installed_version("tensorboard") is None:
        findings.wrong("--tensorboard-dir needs a package that is not installed: pip install tensorboard")
    if "num_seeds" in args.as_dict() and args.do_eval:
        with findings.check():
            load_metrics()
    if args.optimizer == "FusedLAMB":
        with findings.check():
            import_fused_lamb()
            findings.ok("apex, for FusedLAMB")
    if args.compile != "none":
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            findings.wrong(f"--compile needs a C++ compiler, and {compiler} is not found: install one, or set CXX")
        else:
            findings.ok(f"C++ compiler {shutil.which(compiler)}, for --compile")


# --- device -----------------------------------------------------------------------------------------------------------


def check_device(findings: Findings, args: Arguments, runtime: Runtime, processes: int) -> None:
    """The device itself was found, and computes in the run's precision, when `runtime` was made."""
    device, dtype = runtime.device, str(runtime.precision.dtype).removeprefix("torch.")
    if device.type == "cpu":
        findings.ok(f"computes on the CPU in {dtype} with {torch.get_num_threads()} threads")
        if shutil.which("nvidia-smi") is not None and args.device != "cpu":
            findings.warning(
                f"an NVIDIA driver is installed, but PyTorch {torch.__version__} finds no GPU: install a build of "
                f"PyTorch for CUDA"
            )
        if runtime.precision.dtype == torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported():
            findings.warning("this CPU has no instructions for bfloat16, so it is slow: leave out --amp")
        return
    name, driver = torch.cuda.get_device_name(device), driver_version()
    findings.ok(f"computes in {dtype} on {name}, driver {driver}, CUDA {torch.version.cuda}")
    if runtime.precision.dtype == torch.float32 and not args.tf32 and torch.cuda.get_device_capability() >= (7, 0):
        findings.warning("this GPU is several times faster with --amp")
    found = torch.cuda.device_count()
    if processes > 1:
        if torch.distributed.is_nccl_available():
            findings.ok(f"{processes} processes; NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
        else:
            findings.wrong("this PyTorch has no NCCL, which several GPUs need: install a build for CUDA on Linux")
    elif found > 1:
        findings.warning(f"this machine has {found} GPUs, and the run uses one: start it with torchrun")


def driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        return output.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def check_memory(findings: Findings, model: BertPreTrainedModel, settings: MemorySettings) -> None:
    needed, free = needed_and_free_memory(model, settings)
    on_gpu = settings.device.type == "cuda"
    text = (
        f"memory: {needed / 2**30:.1f} GiB are needed (estimated), {free / 2**30:.1f} GiB are free on "
        f"{'this GPU' if on_gpu else 'this machine'}"
    )
    if needed > free:
        findings.wrong(
            f"{text}: lower the batch size and raise --gradient-merge-steps as much, or see docs/memory.md for flags "
            f"that save memory"
        )
    else:
        findings.ok(text)
    if not on_gpu:
        findings.ok(memory_line(model, settings))


def needed_and_free_memory(model: BertPreTrainedModel, settings: MemorySettings) -> tuple[float, float]:
    """Estimated bytes, and those that are free: of one process on a GPU, or of all processes on the CPU."""
    needed = estimate_memory(model, settings).total + LIBRARY_BYTES
    if settings.device.type == "cuda":
        torch.cuda.empty_cache()  # of the checks before
        return needed, torch.cuda.mem_get_info()[0]
    return needed * settings.world_size, available_memory()


# --- disk -------------------------------------------------------------------------------------------------------------


def check_disk(findings: Findings, folder: Path, model: BertPreTrainedModel) -> float | None:
    """Checks that checkpoints can be written to `folder` and fit there. Returns the seconds that one takes."""
    size = CHECKPOINT_BYTES * num_parameters(model)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        speed = write_speed(existing)
    except OSError as error:
        findings.wrong(
            f"--output-dir: cannot write to {existing} ({error.strerror or error}): choose another folder, or change "
            f"its permissions"
        )
        return None
    # While a checkpoint is written, the older ones are still there.
    missing = KEPT_CHECKPOINTS + 1 - min(len(checkpoint_steps(folder)), KEPT_CHECKPOINTS)
    free = shutil.disk_usage(existing).free
    text = (
        f"disk: {free / 1e9:,.1f} GB are free for {folder}, which takes {missing} more checkpoints of "
        f"{size / 1e9:.3g} GB; {speed / 1e6:,.0f} MB/s"
    )
    if missing * size > free:
        findings.wrong(f"{text}: free {(missing * size - free) / 1e9:,.1f} GB, or choose another --output-dir")
    else:
        findings.ok(text)
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
