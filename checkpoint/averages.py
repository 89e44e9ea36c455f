"""The exponential moving average of the weights, on each rank for its rows."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from checkpoint.rows import LazyTensor
from checkpoint.weights import copy_rows

if TYPE_CHECKING:  # a layer above this one
    from parallel.base import ParallelModel


class WeightAverages:
    """average = decay * average + (1 - decay) * weights after each update, from the weights that it
    is made with. A step that is skipped is no update.
    """

    def __init__(self, parallel: "ParallelModel", decay: float):
        self.parallel, self.decay = parallel, decay
        self.tensors = {name: p.detach().clone() for name, p in parallel.named_parameters().items()}

    def update(self, is_skipped: Tensor) -> None:
        """is_skipped: a boolean scalar on the device, which is not read."""
        weights = [p.detach() for p in self.parallel.named_parameters().values()]
        share = torch.where(is_skipped, 0.0, 1 - self.decay).float()
        torch._foreach_lerp_(list(self.tensors.values()), weights, [share] * len(weights))

    def load(self, stored: dict[str, LazyTensor]) -> None:
        """Copies this rank's rows of the averages in a checkpoint."""
        for name, tensor in self.tensors.items():
            copy_rows(tensor, self.parallel.row_start(name), stored[name])

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchanges the averages and the weights of the model."""
        for name, p in self.parallel.named_parameters().items():
            weights = p.detach().clone()
            p.copy_(self.tensors[name])
            self.tensors[name].copy_(weights)
        self.parallel.write_back()
