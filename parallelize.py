"""Applies strategies to a plain model, before the optimizer exists: activation checkpointing,
compilation, replication (DDP), sharding (FSDP2) and DeepSpeed. To add a strategy, subclass
`ParallelModel` and choose it in `parallelize`.
"""

import torch
from torch import nn

from attention import COMPILED_ON_CPU, flash_supports
from optimizer import SPECS
from parallel.activation_checkpointing import checkpoint_activations
from parallel.base import ParallelModel
from parallel.ddp import ReplicatedMasters, ReplicatedModel
from parallel.deepspeed import DeepSpeedModel, ZeroModel
from parallel.offload import OffloadedModel
from precision import Precision, use_float8
from run_config import ParallelConfig, RunConfig
from utils.distributed import DistributedContext
from utils.errors import UserError


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
    choose_attention(model, device)
    if precision.float8:
        use_float8(model.layers, device)
    checkpoint_activations(model.layers, config.activation_checkpoint)
    if config.deepspeed is not None:
        strategy = ZeroModel if config.deepspeed["zero_optimization"]["stage"] else DeepSpeedModel
        return strategy(model, config.deepspeed, precision, device, distributed)
    compile_model(model, config.compile, device)
    if config.shard_degree > 1:
        from parallel.fsdp import (
            ShardedModel,
        )  # here, so that other runs do not wait for torch's FSDP

        return ShardedModel(model, config, precision, device, distributed)
    if distributed.world_size > 1:
        return (
            ReplicatedMasters(model, precision)
            if precision.pure
            else ReplicatedModel(model, precision, device)
        )
    return (
        OffloadedModel(model, precision) if config.cpu_offload else ParallelModel(model, precision)
    )


def choose_attention(model: nn.Module, device: torch.device) -> None:
    """Another attention on GPUs without flash attention for this model; otherwise it chooses by
    device and type.
    """
    head_size = model.config.hidden_size // model.config.num_attention_heads
    if device.type == "cuda" and not flash_supports(
        head_size, torch.cuda.get_device_capability(device)
    ):
        # The backward pass of the efficient one adds in no fixed order.
        is_padded = head_size % 8 or torch.are_deterministic_algorithms_enabled()
        model.base_model.attention_implementation = "padded" if is_padded else "efficient"


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device) -> None:
    """Moves `model` to `device`. A model on the meta device is initialized; the values do not
    depend on the device.
    """
    if any(p.is_meta for p in model.parameters()):
        model.to_empty(device=device)
        model.init_weights()
    else:
        model.to(device)


def compile_model(model: nn.Module, what: str, device: torch.device) -> None:
    """Compiles `model` in place, for micro-batches of fixed sizes (see packing.stream_sizes)."""
    if what == "none":
        return
    torch._dynamo.config.optimize_ddp = False  # it splits graphs at DDP's buckets
    torch._dynamo.config.recompile_limit = 64  # sizes, training and evaluation, and kinds of layers
    if device.type == "cpu":
        model.base_model.attention_implementation = COMPILED_ON_CPU
    for module in model.layers if what == "layers" else [model]:
        module.compile(fullgraph=True, dynamic=False)
    if what == "layers" and device.type == "cuda" and hasattr(model, "cross_entropy"):
        model.cross_entropy = torch.compile(model.cross_entropy, fullgraph=True, dynamic=False)
    model.is_compiled = True


def check_parallel(config: RunConfig, device: torch.device) -> None:
    """Raises UserError for a strategy that the device or the optimizer does not support."""
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
    if (
        1 < parallel.shard_degree < config.world_size and torch.__version__ < "2.13"
    ):  # compares versions
        raise UserError(
            "--enable-cpu-offload with several replicas needs PyTorch 2.13: earlier ones may reuse "
            "the memory of a "
            "gradient before it is copied: give --data-parallel-shard-degree -1, or leave the flag "
            "out"
        )
