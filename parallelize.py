"""Applies strategies to a plain model, before the optimizer exists: activation checkpointing,
compilation, replication (DDP), sharding (FSDP2) and DeepSpeed. To add a strategy, subclass
`ParallelModel` and choose it in `parallelize`.
"""

from importlib.util import find_spec

import torch
from torch import nn

from attention import TRITON_HEAD_SIZES, TRITON_MAX_LENGTH, flash_supports
from encoders.config import ModelConfig
from optimizer import SPECS
from parallel.activation_checkpointing import checkpoint_activations
from parallel.base import ParallelModel
from parallel.compilation import prepare_compilation
from parallel.ddp import ReplicatedMasters, ReplicatedModel
from parallel.deepspeed import DeepSpeedModel, ZeroModel
from parallel.offload import OffloadedModel
from precision import Precision, use_float8
from run_config import ParallelConfig, RunConfig
from utils.device import allocate
from utils.distributed import DistributedContext
from utils.errors import UserError, one_line


def parallelize(
    model: nn.Module,
    config: ParallelConfig,
    precision: Precision,
    device: torch.device,
    distributed: DistributedContext,
) -> ParallelModel:
    """Moves `model` to `device` and precision, initialized if on the meta device, and applies the
    strategies.
    """
    if config.shard_degree == 1:
        materialize(model, device)
    choose_attention(model, device, config.attention)
    if precision.float8:
        use_float8(model.layers, device)
    checkpoint_activations(model.layers, config.activation_checkpoint)
    if config.deepspeed is not None:
        strategy = ZeroModel if config.deepspeed["zero_optimization"]["stage"] else DeepSpeedModel
        return strategy(model, config.deepspeed, precision, device, distributed)
    prepare_compilation(model, config.compile, device)
    parallel = with_strategy(model, config, precision, device, distributed)
    if config.compile == "model":
        parallel.plain_module.compile(fullgraph=True)
    return parallel


def with_strategy(
    model: nn.Module,
    config: ParallelConfig,
    precision: Precision,
    device: torch.device,
    distributed: DistributedContext,
) -> ParallelModel:
    """The strategies of torch, which have compiled parts."""
    if config.shard_degree > 1:
        # Imported here, so that other runs do not wait for torch's FSDP.
        from parallel.fsdp import ShardedModel

        return ShardedModel(model, config, precision, device, distributed)
    if distributed.world_size > 1 and precision.pure:
        return ReplicatedMasters(model, precision)
    if distributed.world_size > 1:
        return ReplicatedModel(model, precision, device)
    if config.cpu_offload:
        return OffloadedModel(model, precision)
    return ParallelModel(model, precision)


def choose_attention(model: nn.Module, device: torch.device, name: str = "auto") -> None:
    """The attention of --attention; with `auto`, another one on GPUs without flash attention for
    this model; otherwise the model chooses by device and type. Raises UserError if `name` does not
    support the model.
    """
    if name != "auto":
        check_attention(name, model.config, torch.cuda.get_device_capability(device))
    if name == "flash-attn-4":
        activate_flash_attention_4()
    if name == "triton":
        model.base_model.attention_implementation = name
        return
    head_size = model.config.hidden_size // model.config.num_attention_heads
    if device.type == "cuda" and not flash_supports(
        head_size, torch.cuda.get_device_capability(device)
    ):
        # The backward pass of the efficient one adds in no fixed order.
        is_padded = head_size % 8 or torch.are_deterministic_algorithms_enabled()
        model.base_model.attention_implementation = "padded" if is_padded else "efficient"


def check_attention(name: str, config: ModelConfig, capability: tuple[int, int]) -> None:
    """Raises UserError if the GPU or the model does not support the attention `name`."""
    head_size = config.hidden_size // config.num_attention_heads
    if name == "triton":
        gpus = "Ampere or newer"
        sizes = TRITON_HEAD_SIZES
        supported = capability >= (8, 0)
    else:
        gpus = "Hopper or Blackwell"
        sizes = (64, 128)
        supported = capability[0] in (9, 10)
        if config.attention_dropout > 0:
            raise UserError(
                f"--attention flash-attn-4 has no dropout, and this model has an attention dropout "
                f"of {config.attention_dropout:g}: give --dropout 0, or leave --attention out"
            )
    if not supported:
        raise UserError(
            f"--attention {name} needs a GPU of the generation {gpus}; this one has compute "
            f"capability {capability[0]}.{capability[1]}: leave the flag out"
        )
    if head_size not in sizes:
        raise UserError(
            f"--attention {name} supports heads of {', '.join(map(str, sizes))} elements; this "
            f"model's have {head_size}: leave the flag out"
        )


def activate_flash_attention_4() -> None:
    """Lets the package override torch's flash attention, which attention.FlashAttention calls."""
    from torch.nn import attention

    try:
        attention.activate_flash_attention_impl("FA4")
    except Exception as error:  # of a package that was built for other versions
        raise UserError(
            f"--attention flash-attn-4: the package does not work here ({one_line(str(error))}): "
            f"install it for this PyTorch and CUDA, or leave the flag out"
        ) from error


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device) -> None:
    """Moves `model` to `device`. A model on the meta device is initialized; the values do not
    depend on the device.
    """
    if any(p.is_meta for p in model.parameters()):
        allocate(model, device)
        model.init_weights()
    else:
        model.to(device)


def check_attention_flag(config: RunConfig, device: torch.device) -> None:
    """Raises UserError if the run cannot use --attention; see also `check_attention`."""
    name = config.parallel.attention
    if name == "auto":
        return
    if device.type != "cuda":
        raise UserError(f"--attention {name} is for GPUs; this run is on the CPU: leave it out")
    if name == "triton" and config.loader.max_seq_length > TRITON_MAX_LENGTH:
        raise UserError(
            f"--attention triton is for sequences of up to {TRITON_MAX_LENGTH} tokens; this run's "
            f"have up to {config.loader.max_seq_length}: leave it out"
        )
    if name == "triton" and find_spec("triton") is None:
        raise UserError("--attention triton needs Triton: run `pip install triton`")
    if name == "flash-attn-4":
        if not (config.precision.amp or config.precision.pure_fp16):
            raise UserError("--attention flash-attn-4 computes in 16 bits: add --amp")
        if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
            raise UserError(
                "--attention flash-attn-4 needs the package: run `pip install flash-attn-4`"
            )
        if torch.__version__ < "2.14":  # compares versions
            raise UserError(
                f"--attention flash-attn-4 needs PyTorch 2.14; this is {torch.__version__}: leave "
                f"it out"
            )


def check_parallel(config: RunConfig, device: torch.device) -> None:
    """Raises UserError for a strategy or attention that device, optimizer or run do not support."""
    check_attention_flag(config, device)
    parallel, optimizer = config.parallel, config.optimizer.name
    if parallel.deepspeed is not None and SPECS[optimizer].multiplies_matrices:
        raise UserError(
            f"--optimizer {optimizer} needs whole matrices, which --deepspeed divides: use AdamW, "
            "or FSDP2"
        )
    if not parallel.cpu_offload:
        return
    if device.type == "cpu":
        raise UserError("--enable-cpu-offload is for GPUs; this run is on the CPU: leave it out")
    has_replicas = 1 < parallel.shard_degree < config.world_size
    if has_replicas and torch.__version__ < "2.13":  # compares versions
        raise UserError(
            "--enable-cpu-offload with several replicas needs PyTorch 2.13: earlier ones may reuse "
            "the memory of a gradient before it is copied: give --data-parallel-shard-degree -1, "
            "or leave the flag out"
        )
