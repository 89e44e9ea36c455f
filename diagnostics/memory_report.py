"""--estimate-memory: from a program's flags to a table of the memory that each process needs."""

import torch

from arguments import amp_dtype, parallel_config
from bert_config import BertConfig
from data_loading.packing import MicroBatchLimits
from diagnostics.memory import COMPONENTS, MemorySettings, estimate_memory, num_parameters
from modeling import BertPreTrainedModel
from precision import DTYPES, Precision
from utils.command_line import Arguments
from utils.distributed import read_environment
from utils.errors import reports_errors
from utils.progress import print_line


def settings_of(args: Arguments, batch_size: int, targets_per_sequence: int) -> MemorySettings:
    """The settings that a program's flags ask for. --estimate-memory gives the number of processes, and --device cuda
    needs no GPU."""
    world_size = args.estimate_memory or read_environment().world_size
    on_gpu = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    parallel = parallel_config(args, world_size, on_gpu)
    micro_batches = args.gradient_merge_steps
    if args.global_batch_size:
        micro_batches = -(-args.global_batch_size // (world_size * batch_size))
    num_sizes = 1 if parallel.compile != "none" else None
    sixteen_bits = args.amp or args.fp16 or args.use_pure_fp16
    return MemorySettings(
        MicroBatchLimits.for_batch(batch_size, args.max_seq_length, targets_per_sequence, num_sizes),
        batch_size,
        micro_batches,
        args.optimizer,
        Precision(DTYPES[amp_dtype(args)], args.use_pure_fp16) if sixteen_bits else Precision(),
        parallel,
        world_size,
        torch.device("cuda" if on_gpu else "cpu"),
        saves=not args.benchmark,
    )


def format_estimate(model: BertPreTrainedModel, settings: MemorySettings) -> str:
    """A table for the terminal."""
    estimate, precision = estimate_memory(model, settings), settings.precision
    dtype = str(precision.dtype).removeprefix("torch.") + (" with float32 weights" if precision.autocast else "")
    lines = [
        f"Estimated memory of each of {settings.world_size} x {settings.device.type}, in GiB: "
        f"{num_parameters(model) / 1e6:,.0f} million parameters, {settings.batch_size} x {settings.limits.max_seqlen} "
        f"tokens, {dtype}, {settings.optimizer}",
        f"  {'':<24}{'at the peak':>12}{'largest':>10}",
        *(
            f"  {part:<24}{estimate.peak[part] / 2**30:>12.2f}{estimate.largest[part] / 2**30:>10.2f}"
            for part in COMPONENTS
            if estimate.largest[part]
        ),
        f"  {'total':<24}{estimate.total / 2**30:>12.2f}  (in the {estimate.moment})",
        *(f"  {f'on the host: {part}':<36}{size / 2**30:>10.2f}" for part, size in estimate.host.items()),
        "The libraries themselves are not included: 0.3 GiB per process on a CPU, 0.5 to 1 GiB on a GPU.",
    ]
    return "\n".join(lines)


def print_estimate(
    model_class: type[BertPreTrainedModel],
    config: BertConfig,
    args: Arguments,
    batch_size: int,
    targets_per_sequence: int = 0,
) -> None:
    """Carries out --estimate-memory: prints the table on the first process, and allocates nothing."""
    with torch.device("meta"):
        model = model_class(config)
    text = format_estimate(model, settings_of(args, batch_size, targets_per_sequence))
    if reports_errors():
        print_line(text)
