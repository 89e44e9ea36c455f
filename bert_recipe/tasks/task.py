"""Tasks: data, model head, forward pass and loss, metrics and result files.

A task lives twice: its TaskOptions are what the flags say; `open` makes the Task of them, once the
model and the data are known. `training/workflow.py` runs all tasks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from bert_recipe.checkpoint.record import DevelopmentData
from bert_recipe.utils.json_files import JsonObject

if TYPE_CHECKING:  # what imports torch, which --help and errors of the command line do not wait for
    from pathlib import Path

    import numpy as np
    from torch import Tensor, nn

    from bert_recipe.checkpoint.model_choice import ModelChoice
    from bert_recipe.checkpoint.model_folder import ModelFolder
    from bert_recipe.config import LoaderConfig, RunConfig
    from bert_recipe.data_loading.loader import StreamDataset
    from bert_recipe.model.encoders.base import PreTrainedModel
    from bert_recipe.model.encoders.heads import FirstOutputs
    from bert_recipe.model.token_stream import BatchCounts, MicroBatch
    from bert_recipe.parallel.runtime import Runtime
    from bert_recipe.tasks.baselines import Baselines
    from bert_recipe.tasks.splits import Split
    from bert_recipe.tasks.text_sequences import SequenceDataset

Number = TypeVar("Number", float, "Tensor")  # of one process, or of a batch


class BatchForward(Protocol):
    """The forward passes of one global batch."""

    @abstractmethod
    def sums(self, model: nn.Module, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """Forward pass of a micro-batch on the device: named scalars, which are summed over
        micro-batches and ranks.
        """


class TaskOptions(Protocol):
    """What the flags of a program say of its task.

    max_seq_length: most tokens of a sequence.
    num_folds: parts of the training file, each of which a run of its own holds out, or None.
    """

    max_seq_length: int
    num_folds: int | None = None

    @property
    @abstractmethod
    def head(self) -> str:
        """See Task."""

    def resident_memory(self) -> dict[str, float]:
        """Bytes on the device of each process that the task needs besides the trained model, by a
        component of training/memory_estimate.py, such as the `weights` of a teacher.
        """
        return {}

    @abstractmethod
    def in_sequences(
        self, loader: LoaderConfig, dataset: StreamDataset | None = None
    ) -> LoaderConfig:
        """The config for memory estimates: with batches counted in sequences, and the most masked
        tokens of one. dataset: the training data, if it is open.
        """

    @abstractmethod
    def open(
        self,
        choice: ModelChoice,
        folder: ModelFolder | None,
        config: RunConfig,
        runtime: Runtime,
        fold: int = 0,
    ) -> TaskData:
        """Opens and checks the data to train on and to evaluate, and makes the task; called on all
        ranks.

        folder: that of the model which the run starts from.
        fold: which part is held out.
        """


class Task(Protocol):
    """What a run trains: data, model head, loss and scores.

    logs_start: whether to log the loss of starting weights before the first update.
    scores_start: whether to score starting weights, which have no new head, with --eval-steps.
    learns_from_texts: whether its samples are texts without labels.
    max_seq_length: most tokens of a sequence.
    split: takes samples to score from the training file.
    compiling_pays_from: number of updates from which a run on a GPU is compiled by default.
    has_trained_head: whether starting weights have the head, so that the loss starts below
    `initial_loss`.
    defaults_kind: of the rule in config/fine_tuning_defaults.py; None: it is not for this task.
    """

    lower_is_better: bool = False
    logs_start: bool = False
    scores_start: bool = False
    learns_from_texts: bool = False
    max_seq_length: int
    split: Split | None = None
    compiling_pays_from: int = 1
    has_trained_head: bool = False
    defaults_kind: str | None = None

    # What a task may compute is a property here; a task may also have it as a field.

    @property
    @abstractmethod
    def name(self) -> str:
        """Folder for results, below the model's."""

    @property
    @abstractmethod
    def head(self) -> str:
        """A key of model/encoders/registry.py's MODELS."""

    @property
    @abstractmethod
    def metric(self) -> str:
        """What selects the best checkpoint, a key of the evaluation's results."""

    @property
    def initial_loss(self) -> float | None:
        """Expected loss of random weights, or None."""
        return None

    @property
    def guessing_loss(self) -> float | None:
        """The least loss of a model that gives all samples the same output, once the training data
        is open; None if the task does not say.
        """
        return None

    @property
    def numbers(self) -> tuple[float, float] | None:
        """Mean and standard deviation of the numbers to learn, once the training data is open; None
        for other tasks.
        """
        return None

    @property
    def first_outputs(self) -> FirstOutputs | None:
        """Where the outputs of a new layer begin, see ClassificationModel; None: at 0."""
        return None

    @property
    def advice(self) -> str:
        """What to try if the model has learnt nothing."""
        return "more updates, or another --learning-rate"

    @property
    def result_files(self) -> tuple[str, ...]:
        """Names of all files that it may write to the run's folder."""
        return ()

    @property
    def max_sample_length(self) -> int:
        """Most tokens of a sample, which may be several sequences."""
        return self.max_seq_length

    @property
    def without_weights(self) -> str | None:
        """The warning for a run from random weights, or None."""
        return None

    @property
    def frozen_models(self) -> Sequence[PreTrainedModel]:
        """Models besides the trained one that the objective calls, such as a teacher, which the
        task's options load when they are opened.
        """
        return ()

    def identity(self) -> dict[str, Any]:
        """What defines a run besides data, starting weights, model and seed, by name, for JSON,
        such as the digest of a teacher. A run with another identity is another run.
        """
        return {}

    def recheck(self, data: TaskData, runtime: Runtime) -> None:
        """Checks the data again when a run resumes and its files are not those that the checkpoint
        has seen; called on all ranks.
        """
        return

    @abstractmethod
    def logged_settings(self, data: TaskData, batch_size: int, max_steps: int) -> JsonObject:
        """What to log at the start besides the flags, under NVIDIA's keys.

        batch_size: sequences per micro-batch.
        max_steps: updates of the run.
        """

    def text_ids(self, stream: Mapping[str, np.ndarray]) -> np.ndarray:
        """The token ids [T] of the text that a stream was made of."""
        return stream["input_ids"]

    def random_next_share(self, stream: Mapping[str, np.ndarray]) -> float | None:
        """The share of pairs in a stream whose second text is random; None if the task does not
        predict that.
        """
        return None

    @abstractmethod
    def for_batch(
        self, micro_batches: Sequence[MicroBatch], model: nn.Module, runtime: Runtime, seed: int
    ) -> BatchForward:
        """The forward passes of the next global batch. Called on all ranks, with as many
        micro-batches on each.
        """

    @abstractmethod
    def loss(self, sums: Mapping[str, Number], counts: BatchCounts) -> Number:
        """The micro-batch's share of the loss of the global batch, or the loss of a whole batch's
        sums.
        """

    @abstractmethod
    def metrics(self, sums: dict[str, float], counts: BatchCounts) -> dict[str, float]:
        """The metrics to log for the sums over a whole batch, `loss` first."""


class SeparableTask(Task, BatchForward, Protocol):
    """A task whose `sums` of a micro-batch need no other micro-batch."""

    def for_batch(
        self, micro_batches: Sequence[MicroBatch], model: nn.Module, runtime: Runtime, seed: int
    ) -> Self:
        return self


@dataclass(frozen=True)
class PredictionSet:
    """A file to predict.

    finish: takes the logits [rows, C] of all samples and a folder. It writes the predictions there,
        unless the folder is None, and returns the scores if the file `is_scored`: numbers and
        tables; a score that is not defined is NaN. `baselines.WARNING` of these is a sentence.
    undefined: why the task's `metric` is not defined for this file, whatever a model predicts, or
        None.
    baselines: computes the scores of simple methods, or None.
    """

    dataset: SequenceDataset
    finish: Callable[[np.ndarray, Path | None], JsonObject]
    is_scored: bool
    undefined: str | None = None
    baselines: Callable[[], Baselines | None] | None = None


@dataclass(frozen=True)
class TaskData:
    """What a task opens for a run.

    task: the opened task.
    choice: the model with the task's config.
    dataset: to train on.
    held_out: to evaluate by the task's loss, or None.
    max_held_out: number of its samples to evaluate on, or None for all.
    sets: to score and to predict by the model's logits.
    development: what selects the best checkpoint; None if none is kept.
    data_files: digest of the sizes and times of the files to train on, or None.
    max_length: of texts in tokens, for the model folder; None: that of the model.
    files: further ones of the model folder, by name.
    num_examples: of the file to train on, each of which makes one or several samples.
    text_passes: how often the samples repeat the text, from which all of the model is learned; None
    if only labels are.
    """

    task: Task
    choice: ModelChoice
    dataset: StreamDataset
    held_out: StreamDataset | None = None
    max_held_out: int | None = None
    sets: Sequence[PredictionSet] = ()
    development: DevelopmentData | None = None
    data_files: str | None = None
    max_length: int | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    num_examples: int | None = None
    text_passes: int | None = None

    @property
    def scored_sets(self) -> list[PredictionSet]:
        return [prediction_set for prediction_set in self.sets if prediction_set.is_scored]

    @property
    def num_rows(self) -> int:
        """Number of examples of the whole training file, also those that are held out."""
        held_out = 0
        if self.task.split is not None:
            held_out = sum(scored.dataset.num_examples for scored in self.scored_sets)
        return (self.num_examples or len(self.dataset)) + held_out
