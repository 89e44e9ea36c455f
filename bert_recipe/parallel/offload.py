"""One process whose optimizer, with its state and the float32 weights, is on the CPU."""

from collections.abc import Iterator

import torch
from torch import nn

from bert_recipe.config import ParallelConfig
from bert_recipe.model.encoders.base import PreTrainedModel
from bert_recipe.model.token_stream import MicroBatch, StepBatch
from bert_recipe.optimization.precision import MasterWeights, Precision
from bert_recipe.parallel.base import ParallelModel
from bert_recipe.utils.device import pin_memory


class OffloadedWeights(MasterWeights):
    """Float32 master weights on the CPU of a model on a GPU. Gradients are summed in float32 on the
    GPU and copied once per update. Weights and gradients are flat and pinned, so that copies are
    fast and do not make the host wait.
    """

    def __init__(self, model: PreTrainedModel):
        self.model_parameters = dict(model.named_parameters())
        self.sums: dict[str, torch.Tensor] = {}
        parameters = self.model_parameters.values()
        self.device = next(iter(parameters)).device
        sizes = [p.numel() for p in parameters]
        # Not pinned by torch, which would round the size up to a power of two.
        self.memory = torch.empty(2, sum(sizes))
        if self.device.type == "cuda":
            pin_memory(self.memory.view(-1).view(torch.uint8), self.device, self)
        weights, gradients = (row.split(sizes) for row in self.memory)
        self.masters, self.gradients = {}, {}
        for (name, p), weight, gradient in zip(
            self.model_parameters.items(), weights, gradients, strict=True
        ):
            self.masters[name] = nn.Parameter(weight.view_as(p).copy_(p.detach()))
            self.gradients[name] = gradient.view_as(p)

    @torch.no_grad()
    def add_gradients(self) -> None:
        for name, p in self.model_parameters.items():
            if p.grad is None or p.dtype == torch.float32:  # autograd sums the latter
                continue
            self.sums[name] = self.sums[name].add_(p.grad) if name in self.sums else p.grad.float()
            p.grad = None

    @torch.no_grad()
    def pull_gradients(self) -> None:
        """Copies the sums to the masters, and waits for them."""
        for name, p in self.model_parameters.items():
            gradient = self.sums.pop(name, p.grad)
            p.grad = None
            if gradient is not None:
                self.masters[name].grad = self.gradients[name].copy_(gradient, non_blocking=True)
        if self.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()
            copied.synchronize()

    @torch.no_grad()
    def push_weights(self) -> None:
        # The next pull waits for these copies, too, before the optimizer changes the masters.
        targets: list[torch.Tensor] = [*self.model_parameters.values()]
        sources: list[torch.Tensor] = [*self.masters.values()]
        torch._foreach_copy_(targets, sources, non_blocking=True)


class OffloadedModel(ParallelModel):
    """One process whose optimizer works on the CPU (--enable-cpu-offload)."""

    masters: OffloadedWeights
    moves_gradients = True

    def set_up(self, config: ParallelConfig, precision: Precision, device: torch.device) -> None:
        self.masters = OffloadedWeights(self.model)
        if precision.pure:
            self.model.to(precision.dtype)

    def micro_batches(self, batch: StepBatch, max_count: int) -> Iterator[MicroBatch]:
        yield from super().micro_batches(batch, max_count)
        self.masters.pull_gradients()
