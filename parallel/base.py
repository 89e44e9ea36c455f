"""The interface between the trainer and a parallel strategy, and the strategy of one process.

The trainer and the optimizer see a `ParallelModel`: what to call, how gradients are reduced, and the float32 tensors
that the optimizer updates.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_loading.loader import MicroBatch, StepBatch
from modeling import BertPreTrainedModel
from optimizer import apply_step, gradients, total_norm
from precision import MasterWeights, Precision
from utils.distributed import DistributedContext

Batch = TypeVar("Batch")


class ParallelModel:
    """A model in one process; the base class of the other strategies.

    model: the plain model, for its config and names. module: what the forward pass calls. shard_group: the process
    group over which the rows of parameters are sharded, or None. saves_rows: whether this rank's rows go into a
    checkpoint; one rank saves each row.
    """

    shard_group: "dist.ProcessGroup | None" = None
    saves_rows = True

    def __init__(self, model: BertPreTrainedModel, precision: Precision):
        self.model = self.module = model
        self.masters = MasterWeights(model) if precision.pure else None
        if precision.pure:
            model.to(precision.dtype)

    # --- what the optimizer and the checkpoints see ---

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """What the optimizer updates: float32, and only this rank's rows if parameters are sharded."""
        return dict(self.model.named_parameters()) if self.masters is None else self.masters.masters

    @property
    def optimizer_device(self) -> torch.device:
        return next(iter(self.named_parameters().values())).device

    def row_start(self, name: str) -> int:
        """The first row of parameter `name` that this rank has."""
        return 0

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Called once, before training: from then on, `optimizer` updates `named_parameters`."""

    def optimizer_state(self, optimizer: torch.optim.Optimizer, name: str) -> dict[str, Tensor]:
        """What `optimizer` keeps for parameter `name`, for the rows that this rank has."""
        return optimizer.state[self.named_parameters()[name]]

    def write_back(self) -> None:
        """Called after `named_parameters` have changed: the model computes with the new values from then on."""
        if self.masters is not None:
            self.masters.push_weights()

    # --- a step ---

    def micro_batches(self, batch: StepBatch, max_count: int) -> Iterator[MicroBatch]:
        """The micro-batches of a step, with filler where the strategy needs it. The caller makes the forward pass and
        `backward` of each before it takes the next. When none are left, `named_parameters` have the gradients of the
        global batch.

        max_count: the largest number of micro-batches of any rank.
        """
        yield from batch.micro_batches

    def backward(self, loss: Tensor, loss_scale: Tensor) -> None:
        """The backward pass of one micro-batch."""
        (loss * loss_scale).backward()
        if self.masters is not None:
            self.masters.add_gradients()

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

    # --- without gradients ---

    def equalize_inference(self, batches: Iterable[Batch], make_filler: Callable[[], Batch]) -> Iterator[Batch]:
        """`batches`, with filler where the strategy needs as many forward passes on every rank."""
        return iter(batches)

    def prepare_for_inference(self, dtype: torch.dtype) -> None:
        """Makes forward passes faster; the model cannot be trained afterwards."""
        self.masters = None
        self.model.prepare_for_inference(dtype)


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
