"""Tasks, one per file: data set, forward pass and loss, metrics and result files."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

from utils.errors import UserError
from utils.files import file_digest

if (
    TYPE_CHECKING
):  # data/prepare.py imports tasks.glue_files; importing torch would take two seconds
    from pathlib import Path

    import numpy as np
    from torch import Tensor, nn

    from encoders.config import ModelConfig
    from parallel.runtime import Runtime
    from tasks.text_sequences import SequenceDataset
    from token_stream import MicroBatch


class BatchForward(Protocol):
    """The forward passes of one global batch."""

    @abstractmethod
    def sums(self, model: nn.Module, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """Forward pass of a micro-batch on the device: named scalars, which are summed over
        micro-batches and ranks.
        """


class Task(Protocol):
    """A training objective. Counts are over the whole global batch."""

    max_sample_length: int

    @abstractmethod
    def for_batch(
        self, micro_batches: Sequence[MicroBatch], model: nn.Module, runtime: Runtime, seed: int
    ) -> BatchForward:
        """The forward passes of the next global batch. Called on all ranks, with as many
        micro-batches on each.
        """

    @abstractmethod
    def loss(self, sums: dict[str, Tensor], num_sequences: float, num_labelled: float) -> Tensor:
        """The micro-batch's share of the loss of the global batch."""

    @abstractmethod
    def metrics(
        self, sums: dict[str, float], num_sequences: float, num_labelled: float
    ) -> dict[str, float]:
        """The metrics to log for the sums over a whole batch, `loss` first."""


class SeparableTask(Task, BatchForward, Protocol):
    """A task whose `sums` of a micro-batch need no other micro-batch."""

    def for_batch(
        self, micro_batches: Sequence[MicroBatch], model: nn.Module, runtime: Runtime, seed: int
    ) -> Self:
        return self


@dataclass(frozen=True)
class PredictionSet:
    """A file to predict. `finish(logits, folder)` takes the logits [rows, C] of all samples. It
    writes the predictions to `folder`, unless that is None, and returns the scores if the file
    `is_scored`: numbers and tables; a score that is not defined is NaN. undefined: why the task's
    `metric` is not defined for this file, whatever a model predicts, or None.
    """

    dataset: SequenceDataset
    finish: Callable[[np.ndarray, Path | None], dict[str, Any]]
    is_scored: bool
    undefined: str | None = None


class FineTuningTask(Task, Protocol):
    """A fine-tuning task with its files; used by fine_tuning.py. The loss is a mean over sequences
    by default.

    name: folder for results. head: a key of modeling.MODELS. train_file: None without training.
    labels: class names of the model's outputs; empty if they have no names. multi_label,
    text_pairs: see ModelConfig. logits_axis: `token` or `sequence`. metric: the score that selects
    the best checkpoint; higher is better. result_files: names of all files that it may write.
    initial_loss: expected loss of random weights, or None. min_batch: least sequences per update.
    """

    name: str
    head: str
    train_file: Path | None
    eval_file: Path | None = None
    labels: tuple[str, ...] = ()
    multi_label: bool = False
    logits_axis: str
    metric: str
    result_files: tuple[str, ...]
    initial_loss: float | None = None
    min_batch: int = 1
    max_seq_length: int
    text_pairs: bool | None = None

    @property
    def max_sample_length(self) -> int:
        """Tokens of a sample, which may be several sequences."""
        return self.max_seq_length

    def loss(self, sums: dict[str, Tensor], num_sequences: float, num_labelled: float) -> Tensor:
        return sums["loss"] / num_sequences

    def metrics(
        self, sums: dict[str, float], num_sequences: float, num_labelled: float
    ) -> dict[str, float]:
        return {"loss": self.loss(sums, num_sequences, num_labelled)}

    @property
    def scored_files(self) -> tuple[Path, ...]:
        """The files with labels that prediction_sets reads."""
        return () if self.eval_file is None else (self.eval_file,)

    @property
    def development_files(self) -> tuple[Path, ...]:
        """The files that decide the scores."""
        return self.scored_files

    def check_held_out(self) -> None:
        """Raises UserError if a file to score has the same content as the training file."""
        for path in self.scored_files:
            if (
                path.is_file()
                and self.train_file.is_file()
                and file_digest(path) == file_digest(self.train_file)
            ):
                advice = "give a held-out file, or score the training file after training, without --do-train"
                raise UserError(
                    f"{path} has the same content as the training file {self.train_file}: {advice}"
                )

    @abstractmethod
    def training_set(self, tokenizer) -> tuple[Self, SequenceDataset]:
        """Reads the training file. Returns the task with the file's labels, and the samples."""

    def for_start(self, folder: Path) -> Self:
        """The task for training that starts from the model in `folder`."""
        return self

    def configure(self, config: ModelConfig) -> ModelConfig:
        """The config of the task's model."""
        return replace(
            config, labels=self.labels, multi_label=self.multi_label, text_pairs=self.text_pairs
        )

    def model_files(self, config: ModelConfig) -> dict[str, bytes]:
        """Further files of a model folder, by name."""
        return {}

    def for_model(self, config: ModelConfig, folder: Path) -> Self:
        """The task for a fine-tuned model. Raises UserError if the model in `folder` has other
        labels.
        """
        return self

    @abstractmethod
    def prediction_sets(self, tokenizer) -> list[PredictionSet]:
        """The files to score and to predict."""
