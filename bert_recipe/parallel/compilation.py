"""torch.compile: whether a run compiles, what that needs, and where compiled kernels are kept.

One graph serves micro-batches of all sizes: the numbers of tokens, sequences and masked tokens are
dynamic. There is a graph for training and one for evaluation.
"""

import contextlib
import ctypes.util
import os
import shlex
import shutil
import signal
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from bert_recipe.config import RunConfig
from bert_recipe.model.attention import COMPILED_ON_CPU
from bert_recipe.model.encoders.base import PreTrainedModel
from bert_recipe.model.loss import compiled_linear_cross_entropy, linear_cross_entropy
from bert_recipe.model.token_stream import MicroBatch
from bert_recipe.utils.errors import UserError, is_out_of_memory, one_line
from bert_recipe.utils.progress import print_line

MIN_CAPABILITY = (7, 0)  # of GPUs for which torch's compiler has Triton
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
BEFORE_THE_WAIT = "compiling, about a minute; the next start on this machine takes seconds"


def choose_what_to_compile(
    config: RunConfig, updates: int, device: torch.device, pays_from: int
) -> tuple[str, str]:
    """What a run of so many updates compiles (none, layers or model), and a line to print about
    that, or "". pays_from: see Task.
    """
    parallel = config.parallel
    if parallel.compile != "auto":
        return parallel.compile, ""
    if device.type != "cuda" or parallel.engine is not None:
        return "none", ""
    note = ""
    if pays_from > 1:
        note = f"{updates:,} updates: compiling pays from {pays_from:,} on, a bound by estimate"
        if updates < pays_from:
            return "none", f"{note}, so nothing is compiled (see --compile)"
    if missing := missing_for_compile(device):
        return "none", f"note: nothing is compiled: torch.compile needs {', and '.join(missing)}"
    is_whole = parallel.shard_degree == 1 and parallel.activation_checkpoint == "none"
    return "model" if is_whole else "layers", note


def check_compile(what: str, device: torch.device) -> None:
    """Raises UserError if --compile was given and this machine lacks what it needs."""
    if what in ("layers", "model") and (missing := missing_for_compile(device)):
        raise UserError(f"--compile needs {', and '.join(missing)}")


def missing_for_compile(device: torch.device) -> list[str]:
    """What torch.compile needs and this machine lacks. On GPUs, Triton builds its launchers with a
    C compiler.
    """
    has_part: dict[str, object] = {
        "a C++ compiler: install g++, or set CXX": compiler_program("CXX", "g++")
    }
    if device.type == "cuda":
        capability = MIN_CAPABILITY  # of a GPU in another machine, of which nothing is known
        if torch.cuda.is_available():
            capability = torch.cuda.get_device_capability(device)
        header = Path(sysconfig.get_path("include"), "Python.h")
        driver = os.environ.get("TRITON_LIBCUDA_PATH") or ctypes.util.find_library("cuda")
        has_part |= {
            "a GPU of compute capability 7.0 or newer": capability >= MIN_CAPABILITY,
            "a C compiler: install gcc, or set CC": compiler_program("CC", "gcc", "clang"),
            "Python.h: install python3-dev": header.is_file(),
            "libcuda: add its folder to ldconfig, or set TRITON_LIBCUDA_PATH": driver,
        }
    return [part for part, is_here in has_part.items() if not is_here]


def compiler_program(variable: str, *defaults: str) -> str | None:
    """The compiler in an environment variable, which may have flags and a launcher (`ccache gcc`);
    without the variable, the first of `defaults`. None if it is not installed.
    """
    words = shlex.split(os.environ.get(variable, ""))
    installed = [word for word in words or reversed(defaults) if shutil.which(word)]
    return installed[-1] if installed else None


def use_one_program_as_compiler() -> None:
    """Triton, and torch before 2.14, take CC and CXX for the name of one program."""
    for variable in ("CC", "CXX"):
        if variable in os.environ and (program := compiler_program(variable)):
            os.environ[variable] = program


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


class EagerFallback:
    """For --compile auto: from the first error of the compiler on, all that it is `around` runs
    eagerly. The error is printed by the process with `prints`.
    """

    def __init__(self, prints: bool):
        self.prints, self.has_failed = prints, False

    def around(self, compiled: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.has_failed:
                try:
                    return compiled(*args, **kwargs)
                except Exception as error:  # whatever it is: if not the compiler's, it comes again
                    if is_out_of_memory(error):
                        raise
                    self._give_up(error)
            return eager(*args, **kwargs)

        return call

    def _give_up(self, error: Exception) -> None:
        self.has_failed = True
        if self.prints:
            reason = one_line(str(error))[:200]
            print_line(
                f"note: nothing is compiled, which costs speed: torch.compile failed ({reason})"
            )


def compile_module(module: nn.Module, fallback: EagerFallback | None, **options: Any) -> None:
    """Compiles `module` in place, as one graph. Without a fallback, errors of the compiler are
    raised by the first call.
    """
    module.compile(fullgraph=True, **options)
    if fallback is not None:
        compiled = module._compiled_call_impl  # what nn.Module.compile has set
        module._compiled_call_impl = fallback.around(
            cast(Callable[..., Any], compiled), module._call_impl
        )


def prepare_compilation(
    models: Sequence[PreTrainedModel],
    what: str,
    device: torch.device,
    fallback: EagerFallback | None = None,
) -> None:
    """Settings for micro-batches whose sizes `mark_sizes` has marked. Compiles the layers of all
    `models` in place, if `what` is `layers`; with `model`, they are compiled with the task's
    objective.
    """
    torch._dynamo.config.optimize_ddp = False  # it splits graphs at DDP's buckets
    torch._dynamo.config.recompile_limit = 64  # training and evaluation, and kinds of layers
    # Otherwise floats, such as a layer's epsilon, are inputs, and graphs are traced again without.
    torch._dynamo.config.specialize_float = True
    # Otherwise an error in the backward pass's graph comes with the backward pass.
    torch._functorch.config.force_non_lazy_backward_lowering = True
    if torch.__version__ < "2.13":  # compares versions
        unmark_inputs()
    use_one_program_as_compiler()
    if device.type != "cpu":
        keep_compiled_kernels()
        start_workers()
    for model in models:
        if device.type == "cpu":
            for encoder in model.encoders:
                encoder.attention_implementation = COMPILED_ON_CPU
        if what == "layers":
            compile_layers(model, device, fallback)
        model.is_compiled = True


def unmark_inputs() -> None:
    """Where a checkpointed layer has dropout, torch before 2.13 marks the number of tokens, an
    input of the layer's graph, as recomputed, and then fails to compile (pytorch issue 178374).
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass  # takes seconds

    class UnmarkInputs(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for node in graph.find_nodes(op="placeholder"):
                node.meta.pop("recompute", None)
                node.meta.pop("ac_graph_id", None)

        def uuid(self) -> str:  # in the keys of the kept kernels
            return "unmark inputs"

    torch._inductor.config.joint_custom_post_pass = UnmarkInputs()


def compile_layers(
    model: PreTrainedModel, device: torch.device, fallback: EagerFallback | None
) -> None:
    """Compiles the layers, and on GPUs the cross-entropy of the vocabulary, as graphs of their
    own.
    """
    if device.type == "cuda":
        model.cross_entropy = compiled_linear_cross_entropy()
        if fallback is not None:
            model.cross_entropy = fallback.around(model.cross_entropy, linear_cross_entropy)
    for layer in model.all_layers:
        compile_module(layer, fallback, dynamic=True)


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
