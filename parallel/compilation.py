"""torch.compile: whether a run compiles, what that needs, and where compiled kernels are kept.

One graph serves micro-batches of all sizes: the numbers of tokens, sequences and masked tokens are
dynamic. There is a graph for training and one for evaluation.
"""

import contextlib
import ctypes.util
import os
import shutil
import signal
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from attention import COMPILED_ON_CPU
from run_config import RunConfig
from token_stream import MicroBatch
from utils.errors import UserError, one_line

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
BEFORE_THE_WAIT = "compiling, about a minute; the next start on this machine takes seconds"


def choose_what_to_compile(
    config: RunConfig, device: torch.device, pays_from: int
) -> tuple[str, str]:
    """What the run compiles (none, layers or model), and a line to print about that, or "".
    pays_from: see Task.
    """
    parallel, updates = config.parallel, config.trainer.max_steps
    if parallel.compile != "auto":
        return parallel.compile, ""
    if device.type != "cuda" or parallel.deepspeed is not None:
        return "none", ""
    note = ""
    if pays_from > 1:
        note = f"{updates:,} updates: compiling pays for its time from about {pays_from:,} on"
        if updates < pays_from:
            return "none", f"{note}, so nothing is compiled (see --compile)"
    if missing := missing_for_compile(device):
        return "none", f"note: nothing is compiled: torch.compile needs {', and '.join(missing)}"
    is_whole = parallel.shard_degree == 1 and parallel.activation_checkpoint == "none"
    return "model" if is_whole and not config.precision.fp8 else "layers", note


def check_compile(what: str, device: torch.device) -> None:
    """Raises UserError if --compile was given and this machine lacks what it needs."""
    if what in ("layers", "model") and (missing := missing_for_compile(device)):
        raise UserError(f"--compile needs {', and '.join(missing)}")


def missing_for_compile(device: torch.device) -> list[str]:
    """What torch.compile needs and this machine lacks. On GPUs, Triton builds its launchers with a
    C compiler.
    """
    needed = [
        ("a C++ compiler: install g++, or set CXX", shutil.which(os.environ.get("CXX", "g++")))
    ]
    if device.type == "cuda":
        compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
        has_header = Path(sysconfig.get_path("include"), "Python.h").is_file()
        has_driver = "TRITON_LIBCUDA_PATH" in os.environ or ctypes.util.find_library("cuda")
        needed += [
            ("a C compiler: install gcc, or set CC", any(map(shutil.which, compilers))),
            ("Python.h: install python3-dev", has_header),
            ("libcuda: add its folder to ldconfig, or set TRITON_LIBCUDA_PATH", has_driver),
        ]
    return [what for what, found in needed if not found]


def keep_compiled_kernels() -> None:
    """Makes torch keep compiled kernels in the user's cache folder, unless the environment has
    another one: its default is in /tmp.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault(CACHE_VARIABLE, str(caches / "torchinductor"))


def start_workers() -> None:
    """Starts the processes in which torch compiles. They ignore the signals that stop a run, as
    schedulers send them to all processes: the run needs them until its evaluation has ended and
    its checkpoint is saved. They end with the run.
    """
    from torch._inductor.async_compile import AsyncCompile  # takes a second

    numbers = (signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        AsyncCompile.warm_pool()  # what is ignored when a process starts stays ignored in it
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def prepare_compilation(model: nn.Module, what: str, device: torch.device) -> None:
    """Settings for micro-batches whose sizes `mark_sizes` has marked. Compiles the layers in place,
    if these are to be compiled; a whole model is compiled with the task's objective.
    """
    if what not in ("layers", "model"):
        return
    torch._dynamo.config.optimize_ddp = False  # it splits graphs at DDP's buckets
    torch._dynamo.config.recompile_limit = 64  # training and evaluation, and kinds of layers
    # Otherwise floats, such as a layer's epsilon, are inputs, and graphs are traced again without.
    torch._dynamo.config.specialize_float = True
    if device.type == "cpu":
        model.base_model.attention_implementation = COMPILED_ON_CPU
    else:
        keep_compiled_kernels()
        start_workers()
    if what == "layers":
        model.compiles_loss = device.type == "cuda"
        for layer in model.layers:
            layer.compile(fullgraph=True, dynamic=True)
    model.is_compiled = True


@contextlib.contextmanager
def compilation_errors() -> Iterator[None]:
    """Raises UserError if torch.compile fails inside."""
    try:
        yield
    except torch._dynamo.exc.TorchDynamoException as error:
        reason = one_line(str(error))[:200]
        raise UserError(
            f"torch.compile failed ({reason}): give --compile none, or layers instead of model"
        ) from error


def mark_sizes(micro_batch: MicroBatch) -> None:
    """Tells torch.compile that the first dimension of each tensor may change."""
    for value in micro_batch.values():
        if isinstance(value, Tensor):
            torch._dynamo.maybe_mark_dynamic(value, 0)
