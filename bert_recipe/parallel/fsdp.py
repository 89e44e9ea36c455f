"""Fully sharded data parallelism (torch's FSDP2) for any torch model, with plain-tensor shards for
the optimizer.

    mesh = make_mesh("cpu", shard_degree=4)
    shard_model(model, model.layers, mesh)
    shards = fill_shards(model, mesh, "cpu", values.items())
    optimizer = Lamb(parameter_groups(model, 0.01, shards.shards), shard_group=shards.group)

docs/memory.md has a complete example. Parameters are sharded by rows (dimension 0). Gradients are
summed over ranks, not averaged: divide the loss by the counts of the global batch.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from bert_recipe.config import RESHARD_MODES, ParallelConfig, RunConfig
from bert_recipe.model.token_stream import MicroBatch, StepBatch
from bert_recipe.optimization.precision import Precision
from bert_recipe.parallel.base import ParallelModel
from bert_recipe.utils.errors import UserError

RESHARD_AFTER_FORWARD = dict(zip(RESHARD_MODES, (None, True, False), strict=True))
# Called on the group's ranks only.
new_local_group = partial(dist.new_group, use_local_synchronization=True)


def make_mesh(
    device_type: str,
    shard_degree: int,
    replicate_degree: int = 1,
    new_group: Callable[[list[int]], dist.ProcessGroup] = new_local_group,
) -> DeviceMesh:
    """A mesh of `replicate_degree` groups of `shard_degree` ranks each. Ranks of a group have
    different rows; ranks at the same position in their groups have the same rows. `new_group` makes
    a process group; see `new_local_group`.
    """
    mesh = torch.arange(replicate_degree * shard_degree).view(replicate_degree, shard_degree)
    replica, shard = divmod(dist.get_rank(), shard_degree)
    groups: list[Any] = []
    # The ranks with the same rows as this one, then those of its replica.
    for ranks in (mesh[:, shard].tolist(), mesh[replica].tolist()):
        has_all = len(ranks) == mesh.numel()
        groups.append(dist.group.WORLD if has_all else new_group(ranks))
    return DeviceMesh.from_group(groups, device_type, mesh, mesh_dim_names=("replicate", "shard"))


def shard_model(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    param_dtype: torch.dtype | None = None,
    reshard_after_forward: str = "default",
    cpu_offload: bool = False,
) -> None:
    """Shards `model` in place. Each of `blocks` is gathered separately, when it is needed; the rest
    of the model is gathered as one unit.

    param_dtype: dtype of gathered parameters; gradients are reduced in float32.
    reshard_after_forward: `always` frees gathered parameters after the forward pass, `never` keeps
        them for the backward pass, and `default` frees those of `blocks`.
    cpu_offload: keep parameters, gradients and optimizer state on the CPU; for GPUs.

    Raises UserError for a parameter that is shared by units, and ValueError for a scalar parameter.
    """
    blocks = list(blocks)
    check_tied_parameters(model, blocks)
    offload_policy = OffloadPolicy()
    if cpu_offload:
        offload_policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    options: dict[str, Any] = {
        "mesh": mesh if mesh["replicate"].size() > 1 else mesh["shard"],
        "reshard_after_forward": RESHARD_AFTER_FORWARD[reshard_after_forward],
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32),
        "offload_policy": offload_policy,
    }
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Without this, the factor requires a reduction that gloo does not support.
            module.set_force_sum_reduction_for_comms(True)


def check_tied_parameters(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raises UserError if a parameter is shared by two of `blocks`, or by one of them and the rest
    of `model`: FSDP gathers each of these by itself.
    """
    block_of_module: dict[nn.Module, nn.Module] = {}
    for block in blocks:
        for module in block.modules():
            block_of_module.setdefault(module, block)
    block_of_parameter: dict[nn.Parameter, nn.Module | None] = {}
    for prefix, module in model.named_modules():
        containing_block = block_of_module.get(module)  # None: the rest of the model
        for name, p in module.named_parameters(prefix, recurse=False):
            first_block = block_of_parameter.setdefault(p, containing_block)
            if first_block is not containing_block:
                raise UserError(
                    f"parameter {name} is shared by modules that are gathered separately: leave "
                    "out the blocks with it"
                )


class LocalShards:
    """This rank's rows of the parameters of a sharded model, as plain tensors that share the
    model's memory.

    Optimizers update these. Only optimizers that use norms need to know about sharding (see
    optimization/lamb.py).
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh):
        self.model_parameters = dict(model.named_parameters())
        self.group: dist.ProcessGroup = mesh["shard"].get_group()
        self.shard_degree, self.shard_rank = mesh["shard"].size(), mesh["shard"].get_local_rank()
        self.replica = mesh["replicate"].get_local_rank()
        self.shards = {
            name: nn.Parameter(p.detach().to_local()) for name, p in self.model_parameters.items()
        }

    def row_start(self, name: str) -> int:
        """Index of this rank's first row of `name`; rows are divided as by torch.chunk."""
        rows = self.model_parameters[name].shape[0]
        return min(self.shard_rank * -(-rows // self.shard_degree), rows)

    def take_gradients(self) -> None:
        """Moves the model's reduced gradients to `named_parameters`; called before the optimizer's
        step.
        """
        for name, p in self.model_parameters.items():
            self.shards[name].grad = None if p.grad is None else p.grad.to_local()
            p.grad = None


@torch.no_grad()
def fill_shards(
    model: nn.Module,
    mesh: DeviceMesh,
    device: torch.device | str,
    values: Iterable[tuple[str, Tensor]],
    root: nn.Module | None = None,
) -> LocalShards:
    """Allocates a sharded model on `device` and copies this rank's rows, and the buffers, from the
    full tensors in `values`. The model may be on the meta device. Buffers that are not keep their
    value if `values` has none. root: the module that was sharded, if that has the model.

    Raises UserError for a parameter or buffer without a value, and for a value without parameter or
    buffer.
    """
    # Of each parameter's name the first name of the same tensor, which tied parameters share.
    name_of_parameter: dict[nn.Parameter, str] = {}
    first_names: dict[str, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        first_names[name] = name_of_parameter.setdefault(p, name)
    filled_buffers = [
        (name, buffer)
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if not buffer.is_meta
    ]
    (root or model).to_empty(device=device)  # FSDP2 sees only what is called on its module
    for name, first_name in first_names.items():  # `to_empty` makes tied parameters two
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, model.get_parameter(first_name))
    shards = LocalShards(model, mesh)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    missing = {*shards.shards, *buffers}
    for name, value in itertools.chain(filled_buffers, values):
        if name in buffers:
            buffers[name].copy_(value)
            missing.discard(name)
        elif name in first_names:
            first_name = first_names[name]
            rows = shards.shards[first_name]
            start = shards.row_start(first_name)
            rows.copy_(value[start : start + len(rows)])
            missing.discard(first_name)
        else:
            raise UserError(f"the model has no parameter or buffer {name}: leave its value out")
    if missing:
        raise UserError(
            f"no values for {', '.join(sorted(missing))}: give those of a model that is not on the "
            "meta device; for buffers that its state dict lacks, add its named_buffers()"
        )
    return shards


class ShardedModel(ParallelModel):
    """Parameters, gradients and optimizer state sharded over ranks (FSDP2), in one or several
    replicas.

    A 16-bit type without autocast (`--use-pure-fp16`) is the type of gathered parameters; the
    shards are float32.
    """

    moves_gradients = True
    gathers_parameters = True

    def set_up(self, config: ParallelConfig, precision: Precision, device: torch.device) -> None:
        self.reshards = config.reshard_after_forward != "never"
        replicate_degree = self.distributed.world_size // config.shard_degree
        new_group = self.distributed.new_group
        mesh = make_mesh(device.type, config.shard_degree, replicate_degree, new_group)
        shard_model(
            self.module,
            self.model.all_layers,
            mesh,
            precision.dtype if precision.pure else None,
            config.reshard_after_forward,
            config.cpu_offload,
        )
        self.shards = fill_shards(
            self.model,
            mesh,
            "cpu" if config.cpu_offload else device,
            self.model.initial_values(),
            root=self.module,
        )
        self.shard_group = self.shards.group
        self.saves_rows = self.shards.replica == 0

    @classmethod
    def unsupported(cls, config: RunConfig, device: torch.device) -> list[str]:
        sentences = super().unsupported(config, device)
        parallel = config.parallel
        if parallel.compile == "model":
            sentences.append(
                "--compile model cannot be combined with sharding: use --compile layers"
            )
        has_replicas = parallel.shard_degree < config.world_size
        if parallel.cpu_offload and has_replicas and torch.__version__ < "2.13":  # as versions
            sentences.append(
                "--enable-cpu-offload with several replicas needs PyTorch 2.13: earlier ones may "
                "reuse the memory of a gradient before it is copied: give "
                "--data-parallel-shard-degree -1, or leave the flag out"
            )
        return sentences

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return self.shards.shards

    def write_back(self) -> None:
        """Frees gathered parameters, which may be stale after a forward pass without a backward
        pass.
        """
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def row_start(self, name: str) -> int:
        return self.shards.row_start(name)

    def micro_batches(self, batch: StepBatch, max_count: int) -> Iterator[MicroBatch]:
        # Forward and backward passes gather parameters from all ranks, so all ranks need the same
        # number of them.
        for number, micro_batch in enumerate(batch.filled_to(max_count), 1):
            # Gradients are reduced within a replica per micro-batch, but over replicas only once
            # per step.
            self.module.set_requires_all_reduce(number == max_count)
            # With `never`, parameters are gathered once per update.
            self.module.set_reshard_after_backward(number == max_count or self.reshards)
            yield micro_batch
        self.shards.take_gradients()
