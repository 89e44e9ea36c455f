"""Applies strategies to a plain model, before the optimizer exists: activation checkpointing,
compilation, replication (DDP), sharding (FSDP2) and DeepSpeed. To add a strategy, subclass
`ParallelModel` and choose it in `parallelize`.
"""

from collections.abc import Sequence

import torch

from bert_recipe.config import ParallelConfig, RunConfig
from bert_recipe.model.encoders.base import PreTrainedModel
from bert_recipe.optimization.registry import spec_named
from bert_recipe.parallel.activation_checkpointing import checkpoint_activations
from bert_recipe.parallel.attention_choice import check_attention_flag, choose_attention
from bert_recipe.parallel.base import ParallelModel
from bert_recipe.parallel.compilation import EagerFallback, compile_module, prepare_compilation
from bert_recipe.parallel.ddp import ReplicatedMasters, ReplicatedModel
from bert_recipe.parallel.deepspeed import engine_strategy
from bert_recipe.parallel.offload import OffloadedModel
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.utils.device import allocate
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.memory import total_memory


def parallelize(
    model: PreTrainedModel,
    config: ParallelConfig,
    runtime: Runtime,
    trains: bool = True,
    frozen_models: Sequence[PreTrainedModel] = (),
    falls_back: bool = False,
) -> ParallelModel:
    """Moves `model` to the device and precision, initialized if on the meta device, and applies the
    strategies. Raises UserError if it is larger than the device.

    config: the strategies.
    runtime: its device, precision, which if `pure` is also that of the weights, and processes.
    trains: whether the model gets an optimizer; else all of its weights are loaded, and those of a
        model on the meta device have no initial values.
    frozen_models: others that the task's objective calls (see Task). Each process has all of them;
    they are moved, and get the attention and the compilation of the run.
    falls_back: whether an error of the compiler, which nobody asked for, does not end the run.
    """
    precision, device = runtime.precision, runtime.device
    strategy = strategy_of(config, runtime.distributed.world_size, precision.pure)
    holds_state = trains and not strategy.shards_only_state
    check_memory(model, config, runtime, tensors_per_parameter=3 if holds_state else 1)
    if config.shard_degree == 1:
        materialize(model, device, initializes=trains)
    for frozen_model in frozen_models:
        frozen_model.requires_grad_(False).eval()
        frozen_model.to(device, precision.dtype if precision.pure else None)
    models = (model, *frozen_models)
    if device.type == "cuda":
        for called in models:
            for encoder in called.encoders:
                choose_attention(encoder, device, config.attention)
    if config.activation_checkpoint != "none":
        checkpoint_activations(model.all_layers, config.activation_checkpoint)
    fallback = None
    if config.compiles:
        fallback = EagerFallback(runtime.distributed.is_main) if falls_back else None
        prepare_compilation(models, config.compile, device, fallback)
    parallel = strategy(model, config, runtime)
    if config.compile == "model":
        compile_module(parallel.plain_module, fallback)
    return parallel


def strategy_of(config: ParallelConfig, world_size: int, is_pure: bool) -> type[ParallelModel]:
    """The strategy that the flags ask for.

    world_size: number of processes.
    is_pure: whether the model's weights have 16 bits.
    """
    if config.engine is not None:
        return engine_strategy(config.engine.values)
    if config.shard_degree > 1:
        # Imported here, so that other runs do not wait for torch's FSDP.
        from bert_recipe.parallel.fsdp import ShardedModel

        return ShardedModel
    if world_size > 1:
        return ReplicatedMasters if is_pure else ReplicatedModel
    return OffloadedModel if config.cpu_offload else ParallelModel


@torch.no_grad()
def materialize(model: PreTrainedModel, device: torch.device, initializes: bool) -> None:
    """Moves `model` to `device`. A model on the meta device is initialized, unless its weights will
    be loaded; the values do not depend on the device.
    """
    if not any(p.is_meta for p in model.parameters()):
        model.to(device)
        return
    allocate(model, device)
    if initializes:
        model.init_weights()


def check_memory(
    model: PreTrainedModel, config: ParallelConfig, runtime: Runtime, tensors_per_parameter: int
) -> None:
    """Raises UserError if the model alone needs more memory than the device has. Activations are
    not counted.

    model: may be on the meta device.
    config: the strategies.
    runtime: its device, precision and processes.
    tensors_per_parameter: that each process holds at once, 1 for weights, 3 with two moments;
        float32, except in prediction with --use-pure-fp16.
    """
    precision, device = runtime.precision, runtime.device
    itemsize = precision.dtype.itemsize if precision.pure and tensors_per_parameter == 1 else 4
    num_parameters = sum(p.numel() for p in model.parameters())
    needed = num_parameters * itemsize * tensors_per_parameter / config.shard_degree
    if config.cpu_offload:
        device = torch.device("cpu")
    if device.type == "cuda":
        total: float = torch.cuda.get_device_properties(device).total_memory
    else:  # shared by the processes of a machine
        needed *= runtime.distributed.local_world_size
        total = total_memory()
    if needed > total:
        state = " with their optimizer state" if tensors_per_parameter > 1 else ""
        raise UserError(
            f"{num_parameters / 1e6:,.0f} million parameters need {needed / 2**30:,.1f} "
            f"GiB{state}, and {device} has {total / 2**30:,.1f} GiB: use a smaller model, or more "
            "GPUs with --data-parallel-shard-degree"
        )


def check_parallel(config: RunConfig, device: torch.device) -> None:
    """Raises UserError for a strategy or attention that device, optimizer or run do not support."""
    check_attention_flag(config, device)
    check_optimizer = spec_named(config.optimizer.name).check_run
    if check_optimizer is not None:
        check_optimizer(config, device)
    strategy = strategy_of(config.parallel, config.world_size, config.precision.pure_fp16)
    if sentences := strategy.unsupported(config, device):
        raise UserError("; ".join(sentences))
