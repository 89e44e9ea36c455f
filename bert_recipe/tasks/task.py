"""Tasks, one per file: data, model head, forward pass and loss, metrics and result files.

`training/workflow.py` runs all of them. To add a task, write its file here and its choice in a
program.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from bert_recipe.checkpoint.record import DevelopmentData
from bert_recipe.model.encoders.config import check_length
from bert_recipe.tokenization.files import trained_length
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import file_digest
from bert_recipe.utils.json_files import JsonObject, json_digest
from bert_recipe.utils.progress import print_line
from bert_recipe.utils.text_files import table_parts

if TYPE_CHECKING:
    from bert_recipe.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:  # what imports torch, which --help and errors of the command line do not wait for
    from pathlib import Path

    import numpy as np
    from torch import Tensor, nn

    from bert_recipe.checkpoint.model_choice import ModelChoice
    from bert_recipe.checkpoint.model_folder import ModelFolder
    from bert_recipe.config import LoaderConfig, RunConfig, StartConfig
    from bert_recipe.data_loading.loader import StreamDataset
    from bert_recipe.model.encoders.base import PreTrainedModel
    from bert_recipe.model.encoders.config import ModelConfig
    from bert_recipe.model.token_stream import BatchCounts, MicroBatch
    from bert_recipe.parallel.runtime import Runtime
    from bert_recipe.tasks.baselines import Baselines
    from bert_recipe.tasks.splits import Split
    from bert_recipe.tasks.text_sequences import SequenceDataset, TextSamples

Number = TypeVar("Number", float, "Tensor")  # of one process, or of a batch


class BatchForward(Protocol):
    """The forward passes of one global batch."""

    @abstractmethod
    def sums(self, model: nn.Module, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """Forward pass of a micro-batch on the device: named scalars, which are summed over
        micro-batches and ranks.
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
        """A key of checkpoint/pretrained.py's MODELS."""

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
        """Models besides the trained one that the objective calls, such as a teacher; `open` loads
        them.
        """
        return ()

    def identity(self) -> dict[str, Any]:
        """What defines a run besides data, starting weights, model and seed, by name, for JSON,
        such as the digest of a teacher. A run with another identity is another run.
        """
        return {}

    def resident_memory(self) -> dict[str, float]:
        """Bytes on the device of each process that the task needs besides the trained model, by a
        component of training/memory_estimate.py, such as the `weights` of a teacher. Known from the
        flags, before the data is open.
        """
        return {}

    def check_start(self, config: StartConfig, weights: ModelFolder) -> None:
        """Raises UserError for weights that the task does not start from; not called if a
        checkpoint is resumed.
        """
        return

    @abstractmethod
    def open(
        self, choice: ModelChoice, folder: ModelFolder | None, config: RunConfig, runtime: Runtime
    ) -> TaskData:
        """Opens and checks the data to train on and to evaluate; called on all ranks. folder: that
        of the model which the run starts from.
        """

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

    @abstractmethod
    def in_sequences(
        self, loader: LoaderConfig, dataset: StreamDataset | None = None
    ) -> LoaderConfig:
        """The config for memory estimates: with batches counted in sequences, and the most masked
        tokens of one. dataset: the training data, if it is open.
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
    """A file to predict. `finish(logits, folder)` takes the logits [rows, C] of all samples. It
    writes the predictions to `folder`, unless that is None, and returns the scores if the file
    `is_scored`: numbers and tables; a score that is not defined is NaN. undefined: why the task's
    `metric` is not defined for this file, whatever a model predicts, or None. baselines: computes
    the scores of simple methods, or None.
    """

    dataset: SequenceDataset
    finish: Callable[[np.ndarray, Path | None], JsonObject]
    is_scored: bool
    undefined: str | None = None
    baselines: Callable[[], Baselines | None] | None = None


@dataclass(frozen=True)
class TaskData:
    """What a task opens for a run.

    task: the task with what is in the data, such as labels.
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


class FineTuningTask(Task, Protocol):
    """A task on texts with files to train on, to score and to predict. The loss is a mean over
    sequences by default.

    train_file: None without training.
    logits_axis: `token` or `sequence`.
    """

    train_file: Path | None
    eval_file: Path | None = None
    logits_axis: str
    defaults_kind: str | None = "texts"
    metric_for_best_model: str | None
    compiling_pays_from: int = 6000
    without_weights: str | None = "fine-tuning starts from random weights: give --init-checkpoint"

    @property
    def labels(self) -> tuple[str, ...]:
        """Class names of the model's outputs; empty if they have no names."""
        return ()

    @property
    def multi_label(self) -> bool:
        """See ModelConfig."""
        return False

    @property
    def text_pairs(self) -> bool | None:
        """See ModelConfig."""
        return None

    @property
    def min_batch(self) -> int:
        """Least sequences per update."""
        return 1

    @property
    @abstractmethod
    def score_names(self) -> tuple[str, ...]:
        """Of the scores that can select the best checkpoint, the default first."""

    @property
    def advice(self) -> str:
        return "more --epochs, a smaller --train-batch-size or another --learning-rate"

    @property
    def training_file(self) -> Path:
        """`train_file` of a run that trains."""
        if self.train_file is None:
            raise UserError("there is no file to train on: give --train-file")
        return self.train_file

    @property
    def metric(self) -> str:
        return self.metric_for_best_model or self.score_names[0]

    def loss(self, sums: Mapping[str, Number], counts: BatchCounts) -> Number:
        return sums["loss"] / counts.sequences

    def metrics(self, sums: dict[str, float], counts: BatchCounts) -> dict[str, float]:
        return {"loss": self.loss(sums, counts)}

    def logged_settings(self, data: TaskData, batch_size: int, max_steps: int) -> JsonObject:
        return {
            "task": self.name,
            "training_samples": data.num_examples,
            "training_features": len(data.dataset),
            "train_batch_size": batch_size,
            "steps": max_steps,
        }

    def in_sequences(
        self, loader: LoaderConfig, dataset: StreamDataset | None = None
    ) -> LoaderConfig:
        per_sample = self.max_sample_length // self.max_seq_length
        return replace(
            loader,
            batch_size=per_sample * loader.batch_size,
            global_batch_size=per_sample * loader.global_batch_size,
        )

    def open(
        self, choice: ModelChoice, folder: ModelFolder | None, config: RunConfig, runtime: Runtime
    ) -> TaskData:
        self.check_metric()
        gives_batch = "global_batch_size" not in config.chosen_by_rule
        if gives_batch:
            self.check_batch(config.loader.global_batch_size, runtime.distributed.world_size)
        self.check_length(choice.config)
        task = self if folder is None else self.for_start(folder.path)
        task, dataset = task.training_set(choice.tokenizer)
        choice = replace(choice, config=task.configure(choice.config))
        data = TaskData(
            task,
            choice,
            dataset,
            sets=task.prediction_sets(choice.tokenizer),
            max_length=task.max_seq_length,
            files=task.model_files(choice.config),
            num_examples=dataset.num_examples,
        )
        if config.trainer.eval_steps:
            data = replace(data, development=task.development_data(data.scored_sets))
        warn_of_undefined(data.sets, task.metric, bool(config.trainer.eval_steps), runtime)
        if runtime.distributed.is_main:
            warn_of_known_texts(dataset, data.scored_sets)
            if gives_batch:
                warn_of_repeats(len(dataset), config.loader.global_batch_size)
        return data

    def development_data(self, scored_sets: Sequence[PredictionSet]) -> DevelopmentData:
        reading = json_digest([scored_set.dataset.digest() for scored_set in scored_sets])[:16]
        chosen = self.metric_for_best_model
        metric = {} if chosen is None else {"--metric-for-best-model": chosen}
        return DevelopmentData(self.development_digest(), reading, self.post_processing | metric)

    def check_metric(self) -> None:
        if self.metric not in self.score_names:
            raise UserError(
                f"--metric-for-best-model {self.metric} is no score of this task: give one of "
                f"{', '.join(self.score_names)}"
            )

    def check_batch(self, global_batch: int, processes: int) -> None:
        if global_batch < processes:
            raise UserError(
                f"the global batch ({global_batch}) is smaller than the number of processes "
                f"({processes}): raise --global-batch-size, or start fewer processes"
            )
        if global_batch < self.min_batch:
            raise UserError(
                f"the global batch is {global_batch}, and the task {self.name} compares texts "
                f"of a batch: raise it"
            )

    def check_length(self, config: ModelConfig) -> None:
        check_length("--max-seq-length", self.max_seq_length, config)

    @property
    def scored_files(self) -> tuple[Path, ...]:
        """The files with labels that prediction_sets reads."""
        return () if self.eval_file is None else (self.eval_file,)

    @property
    def post_processing(self) -> JsonObject:
        """The flags that turn the model's output for these files into predictions."""
        return {}

    @property
    def development_files(self) -> tuple[Path, ...]:
        """The files that decide the scores."""
        return self.scored_files

    def development_digest(self) -> str:
        parts: list[Any] = [
            file_digest(part) for path in self.development_files for part in table_parts(path)
        ]
        if self.split is not None:
            parts.append(self.split.settings())
        return json_digest(parts)[:16]

    @classmethod
    def fine_tuned_length(cls, config: ModelConfig, folder: ModelFolder) -> int:
        """The most tokens of a sequence for the fine-tuned model in `folder` if the user gives
        none: as in fine-tuning, else the model's positions.
        """
        return trained_length(folder.tokenizer_settings, config.max_length)

    @abstractmethod
    def training_set(self, tokenizer: Tokenizer) -> tuple[Self, TextSamples]:
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

    def logits_of(self, outputs: np.ndarray) -> np.ndarray:
        """The logits of the outputs of the task's model, which may be vectors of a classifier that
        is fitted to them.
        """
        return outputs

    @abstractmethod
    def prediction_sets(self, tokenizer: Tokenizer) -> list[PredictionSet]:
        """The files to score and to predict."""


def warn_of_undefined(
    sets: Sequence[PredictionSet], metric: str, selects_best: bool, runtime: Runtime
) -> None:
    """Warns of files to score for which `metric` is not defined. Raises UserError if it selects the
    best checkpoint.
    """
    for prediction_set in sets:
        if prediction_set.undefined is None:
            continue
        problem = f"{metric} is not defined for the file to score, since {prediction_set.undefined}"
        if selects_best:
            raise UserError(
                f"{problem}, and --eval-steps selects the best checkpoint by it: give another "
                f"file, or leave out --eval-steps"
            )
        if runtime.distributed.is_main:
            print_line(f"warning: {problem}")


def warn_of_known_texts(dataset: TextSamples, scored_sets: Sequence[PredictionSet]) -> None:
    """Says how many of the texts to score are in the training file, `dataset`."""
    known = dataset.distinct_sequences()
    for scored_set in scored_sets:
        texts = scored_set.dataset.distinct_sequences()
        count = len(texts & known)
        if count:
            share = f"{count / len(texts):.1%}"
            print_line(
                f"warning: {count} of {len(texts)} texts to score ({share}) are in the training "
                f"file: the scores are too high by what the model remembers of them"
            )


def warn_of_repeats(num_samples: int, global_batch: int) -> None:
    """Warns of updates that see the same sample several times."""
    if global_batch > num_samples:
        times = math.ceil(global_batch / num_samples)
        print_line(
            f"warning: an update takes {global_batch} samples, and there are {num_samples}: each "
            f"is in it up to {times} times: lower --train-batch-size"
        )
