"""One file per task: its data set, its forward pass with loss sums, and its metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # data/prepare.py reads tasks.glue_files, and would wait two seconds for torch
    from torch import Tensor, nn

    from data_loading.loader import MicroBatch


class Task(Protocol):
    """What is learned. Sums are named scalars over micro-batches; counts are those of the whole global batch."""

    def sums(self, model: nn.Module, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """Forward pass: sums over the micro-batch, on the device."""

    def loss(self, sums: dict[str, Tensor], num_sequences: float, num_targets: float) -> Tensor:
        """The micro-batch's share of the loss of the global batch."""

    def metrics(self, sums: dict[str, float], num_sequences: float, num_targets: float) -> dict[str, float]:
        """The figures to log for the sums over a whole batch, `loss` first."""
