"""Applies strategies to a plain model, before the optimizer exists: activation checkpointing,
compilation, replication (DDP), sharding (FSDP2) and DeepSpeed. To add a strategy, subclass
`ParallelModel` and choose it in `parallelize`.
"""

import torch
from torch import nn

from bert_recipe.config import ParallelConfig, RunConfig
from bert_recipe.model.attention import flash_supports
from bert_recipe.optimization.precision import Precision, use_float8
from bert_recipe.optimization.registry import SPECS
from bert_recipe.parallel.activation_checkpointing import checkpoint_activations
from bert_recipe.parallel.attention_choice import (
    check_attention,
    check_attention_flag,
    load_attention,
)
from bert_recipe.parallel.base import ParallelModel
from bert_recipe.parallel.compilation import EagerFallback, compile_module, prepare_compilation
from bert_recipe.parallel.ddp import ReplicatedMasters, ReplicatedModel
from bert_recipe.parallel.deepspeed import DeepSpeedModel, ZeroModel
from bert_recipe.parallel.offload import OffloadedModel
from bert_recipe.utils.device import allocate
from bert_recipe.utils.distributed import DistributedContext
from bert_recipe.utils.errors import UserError


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
    fallback = EagerFallback(distributed.is_main) if config.compiles_by_default else None
    prepare_compilation(model, config.compile, device, fallback)
    parallel = with_strategy(model, config, precision, device, distributed)
    if config.compile == "model":
        compile_module(parallel.plain_module, fallback)
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
        from bert_recipe.parallel.fsdp import ShardedModel

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
        load_attention(name).activate()
        model.base_model.attention_implementation = name
        return
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
        allocate(model, device)
        model.init_weights()
    else:
        model.to(device)


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
