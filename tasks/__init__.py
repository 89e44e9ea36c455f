"""Tasks, one per file: data set, forward pass and loss, metrics and result files."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:  # data/prepare.py imports tasks.glue_files; importing torch would take two seconds
    from pathlib import Path

    import numpy as np
    from torch import Tensor, nn

    from data_loading.loader import MicroBatch
    from encoders.config import ModelConfig
    from tasks.text_sequences import SequenceDataset


class Task(Protocol):
    """A training objective. Sums are named scalars over micro-batches; counts are over the whole global batch."""

    @abstractmethod
    def sums(self, model: nn.Module, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """Forward pass: sums over the micro-batch, on the device."""

    def loss(self, sums: dict[str, Tensor], num_sequences: float, num_labelled: float) -> Tensor:
        """The micro-batch's share of the loss of the global batch."""

    def metrics(self, sums: dict[str, float], num_sequences: float, num_labelled: float) -> dict[str, float]:
        """The metrics to log for the sums over a whole batch, `loss` first."""


@dataclass(frozen=True)
class PredictionSet:
    """A file to predict. `finish(logits, folder)` takes the logits [rows, C] of all samples. It writes the predictions
    to `folder`, unless that is None, and returns the scores if the file `is_scored`: numbers and tables."""

    dataset: SequenceDataset
    finish: Callable[[np.ndarray, Path | None], dict[str, Any]]
    is_scored: bool


class FineTuningTask(Task, Protocol):
    """A fine-tuning task with its files; used by fine_tuning.py. The loss is a mean over sequences by default.

    name: folder for results. head: a key of modeling.MODELS. labels: class names of the model's outputs; empty if they
    have no names. multi_label: labels are independent. logits_axis: `token` or `sequence`. metric: the score that
    selects the best checkpoint; higher is better. result_files: names of all files that it may write. initial_loss:
    expected loss of random weights, or None.
    """

    name: str
    head: str
    labels: tuple[str, ...] = ()
    multi_label: bool = False
    logits_axis: str
    metric: str
    result_files: tuple[str, ...]
    initial_loss: float | None = None
    max_seq_length: int

    def loss(self, sums: dict[str, Tensor], num_sequences: float, num_labelled: float) -> Tensor:
        return sums["loss"] / num_sequences

    def metrics(self, sums: dict[str, float], num_sequences: float, num_labelled: float) -> dict[str, float]:
        return {"loss": self.loss(sums, num_sequences, num_labelled)}

    @abstractmethod
    def training_set(self, tokenizer) -> tuple[Self, SequenceDataset]:
        """Reads the training file. Returns the task with the file's labels, and the samples."""

    def for_model(self, config: ModelConfig, folder: Path) -> Self:
        """The task for a fine-tuned model. Raises UserError if the model in `folder` has other labels."""
        return self

    @abstractmethod
    def prediction_sets(self, tokenizer) -> list[PredictionSet]:
        """The files to score and to predict."""
