"""Base class of parallel strategies, which is also the strategy for one process.

It gives the trainer the module to call and the gradient reduction, and the optimizer the float32
tensors to update.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bert_recipe.config import ParallelConfig, RunConfig
from bert_recipe.model.encoders.base import PreTrainedModel
from bert_recipe.model.token_stream import MicroBatch, StepBatch, to_device
from bert_recipe.optimization.norms import total_norm
from bert_recipe.optimization.precision import LossScale, MasterWeights, Precision
from bert_recipe.optimization.protocol import apply_step, gradients
from bert_recipe.parallel.compilation import mark_sizes
from bert_recipe.parallel.runtime import Runtime

Batch = TypeVar("Batch")


class ObjectiveModule(nn.Module):
    """A model, and a task's loss where the task asks for it, as one module for the strategies.

    Only within the forward pass of a strategy's module are all weights gathered (FSDP2, ZeRO), and
    only what is in it is in the graph of a compiled model. `module(*inputs)` is the model's output.
    `module(*inputs, objective=function)` is `function(model, *inputs)`, such as the sums of a loss.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(
        self, *inputs: Any, objective: Callable[..., Any] | None = None, **options: Any
    ) -> Any:
        if objective is None:
            return self.model(*inputs, **options)
        return objective(self.model, *inputs, **options)


class ParallelModel:
    """A model in one process, and the base class of the other strategies.

    model: the plain PreTrainedModel, for its config and names.
    module: the module to call in training.
    plain_module: the one to call otherwise; both are called as an ObjectiveModule.
    shard_group: the process group over which the rows of parameters are sharded, or None.
    replica_group: that of ranks with the same parameters and gradients, or None.
    saves_rows: whether this rank's rows are saved in checkpoints; each row is saved by one rank.
    keeps_gradients: whether gradients keep their memory.
    moves_gradients: whether gradients go to other ranks or devices, and are dense.
    gathers_parameters: whether forward passes gather parameters from all ranks, which then need the
        same number of passes.
    cannot_freeze: the flag of a strategy whose `step` changes all parameters, or "".
    shards_only_state: whether each rank first holds all weights, but only a part of the optimizer's
        state.
    """

    shard_group: "dist.ProcessGroup | None" = None
    replica_group: "dist.ProcessGroup | None" = None
    saves_rows = True
    keeps_gradients = False  # between steps, as zeros
    moves_gradients = False
    gathers_parameters = False
    cannot_freeze = ""
    shards_only_state = False

    def __init__(self, model: PreTrainedModel, config: ParallelConfig, runtime: Runtime):
        precision = runtime.precision
        self.model, self.distributed = model, runtime.distributed
        self.plain_module = ObjectiveModule(model)
        self.module: Any = self.plain_module  # or a wrapper, which has settings of its own
        self.masters: MasterWeights | None = None  # the float32 weights, if there are others
        self.set_up(config, precision, runtime.device)
        self.loss_scale = LossScale(
            precision.loss_scale, precision.dynamic_loss_scale, self.optimizer_device
        )

    def set_up(self, config: ParallelConfig, precision: Precision, device: torch.device) -> None:
        """Applies the strategy to the model, which is on its `device`. Pure 16-bit weights get
        float32 masters.
        """
        if precision.pure:
            self.masters = MasterWeights(self.model)
            self.model.to(precision.dtype)

    @classmethod
    def unsupported(cls, config: RunConfig, device: torch.device) -> list[str]:
        """A sentence for each thing in `config` that this strategy does not support on `device`."""
        if config.parallel.cpu_offload and device.type == "cpu":
            return ["--enable-cpu-offload is for GPUs; this run is on the CPU: leave it out"]
        return []

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The float32 tensors that the optimizer updates: only this rank's rows if parameters are
        sharded.
        """
        return dict(self.model.named_parameters()) if self.masters is None else self.masters.masters

    @property
    def optimizer_device(self) -> torch.device:
        return next(iter(self.named_parameters().values())).device

    def row_start(self, name: str) -> int:
        """Index of this rank's first row of parameter `name`."""
        return 0

    def rows_checksum(self) -> tuple[int, int, float]:
        """This rank's number in the shard group; the sum of its rows' bits modulo 2^52, for a
        double; their norm.
        """
        place = 0 if self.shard_group is None else dist.get_rank(self.shard_group)
        rows = [p.detach() for p in self.named_parameters().values()]
        bits = sum(tensor.view(torch.int32).sum(dtype=torch.int64) for tensor in rows)
        return place, int(bits) % 2**52, float(total_norm(rows))

    def has_finite_weights(self) -> bool:
        """Whether this rank's weights are finite."""
        return all(bool(torch.isfinite(p).all()) for p in self.named_parameters().values())

    def has_word_embeddings(self) -> bool:
        """Whether the rows of the word embeddings that this rank has are not all zero. False if it
        has none.
        """
        modules = self.model.named_modules()
        name = next(name for name, module in modules if module is self.model.word_embeddings)
        rows = self.named_parameters().get(f"{name}.weight")
        if rows is None:
            return False
        return not bool((rows == 0).all())

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Called once before training, with the optimizer that updates `named_parameters`."""

    def optimizer_state(self, optimizer: torch.optim.Optimizer, name: str) -> dict[str, Tensor]:
        """The state of `optimizer` for this rank's rows of parameter `name`."""
        return optimizer.state[self.named_parameters()[name]]

    def write_back(self) -> None:
        """Called after `named_parameters` have changed, to update the model."""
        if self.masters is not None:
            self.masters.push_weights()

    def micro_batches(self, batch: StepBatch, max_count: int) -> Iterator[MicroBatch]:
        """Yields the micro-batches of a step, and filler if the strategy needs it. The caller runs
        the forward pass and `backward` of each before it takes the next. At the end,
        `named_parameters` have the gradients of the global batch.

        max_count: maximum number of micro-batches over ranks.
        """
        yield from batch.micro_batches

    def inputs(self, micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
        """`micro_batch` on `device`, for the model."""
        micro_batch = to_device(micro_batch, device)
        if self.model.is_compiled:
            mark_sizes(micro_batch)
        return micro_batch

    def backward(self, loss: Tensor) -> None:
        """The backward pass of one micro-batch."""
        (loss * self.loss_scale.value).backward()
        if self.masters is not None:
            self.masters.add_gradients()

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float,
        waiting: Collection[str] = (),
    ) -> tuple[Tensor, Tensor]:
        """Unscales and clips finite gradients and steps. Returns the norm before clipping, and
        `found_inf`. waiting: parameters that the update does not change; their optimizer state
        begins with their first update.
        """
        loss_scale, parameters = self.loss_scale.value, self.named_parameters()
        unused_gradients = {name: parameters[name].grad for name in waiting}
        for name in waiting:
            parameters[name].grad = None
        norm = total_norm(gradients(optimizer), self.shard_group) / loss_scale
        not_finite = ~torch.isfinite(norm)
        clip = (norm / max_grad_norm).clamp(min=1.0)
        apply_step(optimizer, loss_scale * clip, not_finite.float())
        self.write_back()
        for name, gradient in unused_gradients.items():
            parameters[name].grad = gradient  # whose memory may be kept
        optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        return norm, not_finite

    def equalize_inference(
        self, batches: Iterable[Batch], make_filler: Callable[[], Batch]
    ) -> Iterator[Batch]:
        """Yields `batches`, and where parameters are gathered, filler until all ranks have
        finished.
        """
        iterator = iter(batches)
        while self.gathers_parameters:
            batch = next(iterator, None)
            if not any(self.distributed.all_reduce_sum([batch is not None])):
                return
            yield make_filler() if batch is None else batch
        yield from iterator

    def eager(self) -> contextlib.AbstractContextManager[None]:
        """Runs a model that is compiled without its graphs."""
        return (
            torch.compiler.set_stance("force_eager")
            if self.model.is_compiled
            else contextlib.nullcontext()
        )

    def prepare_for_inference(self, dtype: torch.dtype) -> None:
        """Optimizes the model for inference only. Not if sharded: fused or cast copies would undo
        that.
        """
        if not self.gathers_parameters:
            self.masters = None
            self.model.prepare_for_inference(dtype)
