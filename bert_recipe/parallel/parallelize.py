"""Applies strategies to a plain model, before the optimizer exists: activation checkpointing,
compilation, replication (DDP), sharding (FSDP2) and DeepSpeed. To add a strategy, subclass
`ParallelModel` and choose it in `parallelize`.
"""

import torch
from torch import nn

from bert_recipe.config import ParallelConfig, RunConfig
from bert_recipe.model.attention import flash_supports
from bert_recipe.optimization.precision import Precision, use_float8
from bert_recipe.optimization.registry import spec_named
from bert_recipe.parallel.activation_checkpointing import checkpoint_activations
from bert_recipe.parallel.attention_choice import (
    check_attention,
    check_attention_flag,
    load_attention,
)
from bert_recipe.parallel.base import ParallelModel
from bert_recipe.parallel.compilation import EagerFallback, compile_module, prepare_compilation
from bert_recipe.parallel.ddp import ReplicatedMasters, ReplicatedModel
from bert_recipe.parallel.deepspeed import engine_strategy
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
    strategy = strategy_of(config, distributed.world_size, precision.pure)
    fallback = EagerFallback(distributed.is_main) if config.compiles_by_default else None
    prepare_compilation(model, config.compile, device, fallback)
    parallel = strategy(model, config, precision, device, distributed)
    if config.compile == "model":
        compile_module(parallel.plain_module, fallback)
    return parallel


def strategy_of(config: ParallelConfig, world_size: int, is_pure: bool) -> type[ParallelModel]:
    """The strategy that the flags ask for.

    world_size: number of processes.
    is_pure: whether the model's weights have 16 bits.
    """
    if config.engine is not None:
        return engine_strategy(config.engine)
    if config.shard_degree > 1:
        # Imported here, so that other runs do not wait for torch's FSDP.
        from bert_recipe.parallel.fsdp import ShardedModel

        return ShardedModel
    if world_size > 1:
        return ReplicatedMasters if is_pure else ReplicatedModel
    return OffloadedModel if config.cpu_offload else ParallelModel


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
    check_optimizer = spec_named(config.optimizer.name).check_run
    if check_optimizer is not None:
        check_optimizer(config, device)
    strategy = strategy_of(config.parallel, config.world_size, config.precision.pure_fp16)
    if sentences := strategy.unsupported(config, device):
        raise UserError("; ".join(sentences))
