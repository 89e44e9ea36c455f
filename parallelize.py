"""Strategies applied from outside to a plain model, before the optimizer exists: activation checkpointing, compilation,
replication (DDP) and sharding (FSDP2).

The trainer and the optimizer see a `ParallelModel`: what to call, how gradients are reduced, and the float32 tensors
that the optimizer updates. To add a strategy, subclass it and choose it in `parallelize`.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from activation_checkpointing import checkpoint_activations
from attention import COMPILED_ON_CPU
from data_loader import MicroBatch, StepBatch
from modeling import BertPreTrainedModel
from optimizer import apply_step, gradients, total_norm
from precision import MasterWeights, Precision
from sharding import LocalShards, fill_shards, make_mesh, shard_model
from utils.distributed import DistributedContext

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class ParallelConfig:
    """compile: none, layers (each layer is a graph) or model (one graph). activation_checkpoint: none, selective or
    full (see activation_checkpointing.py). shard_degree: ranks that share one copy of the model; 1 for DDP.
    reshard_after_forward and cpu_offload: see sharding.shard_model. deepspeed: the configuration of DeepSpeed's
    engine, where that is used."""

    compile: str = "none"
    activation_checkpoint: str = "none"
    shard_degree: int = 1
    reshard_after_forward: str = "default"
    cpu_offload: bool = False
    deepspeed: dict[str, Any] | None = None


class ParallelModel:
    """A model in one process; the base class of the other strategies.

    model: the plain model, for its config and names. module: what the forward pass calls. shard_group: the process
    group over which the rows of parameters are sharded, or None.
    """

    shard_group: "dist.ProcessGroup | None" = None

    def __init__(self, model: BertPreTrainedModel, precision: Precision):
        self.model = self.module = model
        self.masters = MasterWeights(model) if precision.pure else None
        if precision.pure:
            model.to(precision.dtype)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """What the optimizer updates: float32, and only this rank's rows if parameters are sharded."""
        return dict(self.model.named_parameters()) if self.masters is None else self.masters.masters

    @property
    def optimizer_device(self) -> torch.device:
        return next(iter(self.named_parameters().values())).device

    def row_start(self, name: str) -> int:
        """The first row of parameter `name` that this rank has."""
        return 0

    def saves_rows(self, is_main: bool) -> bool:
        """Whether this rank's rows go into a checkpoint: every row is saved by one rank."""
        return is_main

    def begin_step(self, max_micro_batches: int) -> None:
        """`max_micro_batches`: the largest number of micro-batches of any rank in this step."""

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Called once, before training: from then on, `optimizer` updates `named_parameters`."""

    def optimizer_state(self, optimizer: torch.optim.Optimizer, name: str) -> dict[str, Tensor]:
        """What `optimizer` keeps for parameter `name`, for the rows that this rank has."""
        return optimizer.state[self.named_parameters()[name]]

    def needs_warm_up(self) -> bool:
        """Whether a forward and backward pass must come before the first step, for the same results after a resume."""
        return False

    def equalize(self, batch: StepBatch) -> list[MicroBatch]:
        """The micro-batches of a step, with filler where the strategy needs it."""
        return batch.micro_batches

    def equalize_inference(self, batches: Iterable[Batch], make_filler: Callable[[], Batch]) -> Iterator[Batch]:
        """The same for forward passes without a gradient, whose number is not known in advance."""
        return iter(batches)

    def prepare_for_inference(self, dtype: torch.dtype) -> None:
        """Makes forward passes faster; the model cannot be trained afterwards."""
        self.masters = None
        self.model.prepare_for_inference(dtype)

    def gradient_sync(self, is_last: bool) -> contextlib.AbstractContextManager:
        """The context of one micro-batch's forward and backward pass."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor, loss_scale: Tensor) -> None:
        """The backward pass of one micro-batch."""
        (loss * loss_scale).backward()
        self.collect_gradients()

    def collect_gradients(self) -> None:
        """Called after the backward pass of each micro-batch."""
        if self.masters is not None:
            self.masters.add_gradients()

    def reduce_gradients(self) -> None:
        """Called after the last micro-batch: from then on, `named_parameters` have the gradients of the global
        batch."""

    def step(self, optimizer: torch.optim.Optimizer, loss_scale: Tensor, max_grad_norm: float) -> tuple[Tensor, Tensor]:
        """Unscales and clips the gradients, and steps, unless they are not finite. Returns their norm before clipping,
        and whether they are not finite."""
        norm = total_norm(gradients(optimizer), self.shard_group) / loss_scale
        not_finite = ~torch.isfinite(norm)
        clip = (norm / max_grad_norm).clamp(min=1.0)
        apply_step(optimizer, loss_scale * clip, not_finite.float())
        self.write_back()
        optimizer.zero_grad()
        return norm, not_finite

    def write_back(self) -> None:
        """Called after `named_parameters` have changed: the model computes with the new values from then on."""
        if self.masters is not None:
            self.masters.push_weights()


class ReplicatedModel(ParallelModel):
    """One replica per rank (DDP). Gradients are summed, not averaged: losses are divided by global counts already."""

    def __init__(self, model: BertPreTrainedModel, precision: Precision, device: torch.device):
        super().__init__(model, precision)
        device_ids = [device.index] if device.type == "cuda" else None
        self.module = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
        self.module.register_comm_hook(None, sum_gradients)
        self.reduces_masters = False
        self.is_warm = False

    def needs_warm_up(self) -> bool:
        # DDP rebuilds its buckets after the first pass. The sums of three ranks or more depend on the order of
        # addition, and so on the buckets: without this, the first step of a resumed run differs by rounding.
        is_warm, self.is_warm = self.is_warm, True
        return not is_warm

    def begin_step(self, max_micro_batches: int) -> None:
        # DDP reduces the model's own gradients. Those of a 16-bit model are summed over micro-batches in its masters.
        self.reduces_masters = self.masters is not None and max_micro_batches > 1

    def equalize(self, batch: StepBatch) -> list[MicroBatch]:
        return batch.filled_to(1)  # DDP reduces gradients in the backward pass, so every rank needs one

    def gradient_sync(self, is_last: bool) -> contextlib.AbstractContextManager:
        return self.module.no_sync() if self.reduces_masters or not is_last else contextlib.nullcontext()

    def reduce_gradients(self) -> None:
        if self.reduces_masters:
            grads = [p.grad for p in self.named_parameters().values() if p.grad is not None]
            for work in [dist.all_reduce(grad, async_op=True) for grad in grads]:
                work.wait()


class ShardedModel(ParallelModel):
    """Parameters, gradients and optimizer state sharded over ranks (FSDP2), in one or several replicas.

    A 16-bit type without autocast (`--use-pure-fp16`) is the type of gathered parameters; the shards are float32.
    """

    def __init__(
        self,
        model: BertPreTrainedModel,
        config: ParallelConfig,
        precision: Precision,
        device: torch.device,
        distributed: DistributedContext,
    ):
        self.model = self.module = model
        self.masters = None
        self.distributed = distributed
        replicate_degree = distributed.world_size // config.shard_degree
        mesh = make_mesh(device.type, config.shard_degree, replicate_degree, distributed.new_group)
        shard_model(
            model,
            model.bert.encoder.layer,
            mesh,
            precision.dtype if precision.pure else None,
            config.reshard_after_forward,
            config.cpu_offload,
        )
        model.to_empty(device="cpu" if config.cpu_offload else device)
        self.shards = LocalShards(model, mesh)
        fill_shards(self.shards, model.initial_values())
        self.shard_group = self.shards.group

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return self.shards.shards

    def row_start(self, name: str) -> int:
        return self.shards.row_start(name)

    def saves_rows(self, is_main: bool) -> bool:
        return self.shards.replica == 0

    def equalize(self, batch: StepBatch) -> list[MicroBatch]:
        # Every forward and backward pass gathers parameters from all ranks, so all ranks need as many.
        return batch.filled_to(self.max_micro_batches)

    def equalize_inference(self, batches: Iterable[Batch], make_filler: Callable[[], Batch]) -> Iterator[Batch]:
        return equalize_over_ranks(batches, make_filler, self.distributed)

    def prepare_for_inference(self, dtype: torch.dtype) -> None:
        """Changes nothing: a gathered copy of each rank's own would undo the sharding."""

    def begin_step(self, max_micro_batches: int) -> None:
        self.max_micro_batches = max_micro_batches

    def gradient_sync(self, is_last: bool) -> contextlib.AbstractContextManager:
        # Replicas add their gradients once per step; only within a replica are they reduced after each micro-batch.
        self.model.set_requires_all_reduce(is_last)
        return contextlib.nullcontext()

    def reduce_gradients(self) -> None:
        self.shards.take_gradients()


def equalize_over_ranks(
    batches: Iterable[Batch], make_filler: Callable[[], Batch], distributed: DistributedContext
) -> Iterator[Batch]:
    """This rank's batches, and then filler until no rank has any left."""
    iterator = iter(batches)
    while True:
        batch = next(iterator, None)
        if not distributed.all_reduce_max([batch is not None])[0]:
            return
        yield make_filler() if batch is None else batch


def sum_gradients(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A DDP communication hook that sums; the default one averages."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda reduced: reduced.value()[0])


def parallelize(
    model: BertPreTrainedModel,
    config: ParallelConfig,
    precision: Precision,
    device: torch.device,
    distributed: DistributedContext,
) -> ParallelModel:
    """Brings `model` to `device` and precision, and applies the strategies of `config`. A model on the meta device gets
    its initial weights here, from torch's random state."""
    if config.shard_degree == 1:
        materialize(model, device)
    checkpoint_activations(model.bert.encoder.layer, config.activation_checkpoint)
    if config.deepspeed is not None:
        from deepspeed_engine import make_deepspeed_model  # which imports this module

        return make_deepspeed_model(model, config.deepspeed, precision, device, distributed)
    compile_model(model, config.compile, device)
    if config.shard_degree > 1:
        return ShardedModel(model, config, precision, device, distributed)
    if distributed.world_size > 1:
        return ReplicatedModel(model, precision, device)
    return ParallelModel(model, precision)


@torch.no_grad()
def materialize(model: BertPreTrainedModel, device: torch.device) -> None:
    """Moves `model` to `device`. A model on the meta device is initialized; the values do not depend on the device."""
    if not any(p.is_meta for p in model.parameters()):
        model.to(device)
        return
    model.to_empty(device=device)
    model.init_weights()


def compile_model(model: BertPreTrainedModel, what: str, device: torch.device) -> None:
    """Compiles `model` in place, for micro-batches of fixed sizes (see packing.stream_sizes)."""
    modules = {"none": [], "layers": model.bert.encoder.layer, "model": [model]}[what]
    if what != "none" and device.type == "cpu":
        model.bert.attention_implementation = COMPILED_ON_CPU
    for module in modules:
        module.compile(fullgraph=True, dynamic=False)
