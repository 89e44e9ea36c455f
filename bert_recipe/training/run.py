"""A run: all that is decided once, from the settings as they were typed, the model and the data."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch

from bert_recipe.checkpoint.model_card import ModelParts
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.progress import Progress, check_same_run, read_progress
from bert_recipe.checkpoint.record import SCORES_FILE, RunRecord
from bert_recipe.checkpoint.start import (
    Start,
    StartKind,
    StartPoint,
    resolve_start,
)
from bert_recipe.config import LoaderConfig, ParallelConfig, RunConfig, ScheduleConfig
from bert_recipe.data_loading.packing import MicroBatchLimits
from bert_recipe.model.encoders.base import PreTrainedModel
from bert_recipe.model.encoders.heads import SequenceClassification
from bert_recipe.model.encoders.registry import make_model
from bert_recipe.tasks.task import Task, TaskData
from bert_recipe.utils.files import is_same_path


@dataclass(frozen=True)
class TrainingValues:
    """The batch, the schedule and the length of a run: given, recorded by the run that is resumed,
    or chosen from the model and the rows.

    loader: with the batch.
    schedule: with the peak rate and the warmup.
    max_steps: updates of the run.
    epochs: for the record; None if none are given.
    """

    loader: LoaderConfig
    schedule: ScheduleConfig
    max_steps: int
    epochs: float | None = None


@dataclass(frozen=True)
class Run:
    """What a run is; nothing is allocated yet, and nothing later decides it again.

    settings: as typed.
    folder: of its steps and results.
    start: the model folders that the flags name.
    data: the opened task with its model and its data.
    values: see TrainingValues.
    parallel: the strategies, with what --compile auto means.
    record: what is the same in all of its checkpoints.
    num_sizes: see packing.stream_sizes.
    note: what to print before training, or "".
    """

    settings: RunConfig
    folder: Path
    start: Start
    data: TaskData
    values: TrainingValues
    parallel: ParallelConfig
    record: RunRecord
    num_sizes: int | None = None
    note: str = ""

    @property
    def task(self) -> Task:
        return self.data.task

    @property
    def max_steps(self) -> int:
        return self.values.max_steps

    @property
    def saves(self) -> bool:
        """Whether it writes to its folder."""
        return not self.settings.trainer.benchmark

    @property
    def eval_steps(self) -> int:
        """Updates between evaluations; 0: none."""
        at_end = 0 if self.data.held_out is None else self.max_steps
        return self.settings.trainer.eval_steps or at_end

    @property
    def logs_start(self) -> bool:
        """Whether the loss before the first update is logged."""
        return self.saves and self.task.logs_start and self.start.weights is not None

    @property
    def result_files(self) -> tuple[str, ...]:
        """Names of what it may write to its folder besides checkpoints."""
        return (*self.task.result_files, SCORES_FILE)

    @property
    def parts(self) -> ModelParts:
        """Of its model folders."""
        choice, data = self.data.choice, self.data
        command = self.settings.arguments.command()
        return ModelParts(choice.tokenizer, choice.name, data.max_length, data.files, command)

    def check_folder(self) -> StartPoint:
        """Where the run will start; for the main process. Raises UserError if it may not write to
        its folder.
        """
        point = resolve_start(self.start, self.folder, self.saves)
        if self.saves and point.kind is StartKind.RESUMED and point.folder is not None:
            folder = self.start.open(point.folder)
            self.check_resumed(folder, read_progress(folder.path, self.settings.prefix))
        return point

    def check_resumed(self, folder: ModelFolder, progress: Progress) -> None:
        """Raises UserError unless the run may go on from the checkpoint `folder`."""
        tokenizer = self.data.choice.tokenizer
        is_own = is_same_path(folder.path.parent, self.folder)
        check_same_run(folder, progress, self.record, tokenizer, is_own)

    def last_step(self, first: int) -> int:
        """The last update of a process that starts after update `first`. Those of a benchmark do
        not count for `max_steps`.
        """
        trainer = self.settings.trainer
        if trainer.measured_batches is not None:
            return first + sum(trainer.measured_batches)
        if trainer.steps_this_run is None:
            return self.max_steps
        return min(first + trainer.steps_this_run, self.max_steps)

    def make_model(self) -> PreTrainedModel:
        """Builds the model on the meta device."""
        with torch.device("meta"):
            model = make_model(self.task.head, self.data.choice.config)
        if self.task.numbers is not None:
            cast(SequenceClassification, model).numbers = self.task.numbers
        return model

    def limits(self, batch_size: int | None = None) -> MicroBatchLimits:
        """The limits of micro-batches of the run's batch size, or of another one."""
        datasets = [self.data.dataset]
        if self.data.held_out is not None:
            datasets.append(self.data.held_out)
        loader = replace(
            self.values.loader,
            batch_size=batch_size or self.values.loader.batch_size,
            max_seq_length=self.task.max_sample_length,
        )
        limits = MicroBatchLimits.of(
            loader,
            self.num_sizes,
            max(dataset.max_labelled_per_sample for dataset in datasets),
            max(dataset.max_sequences_per_sample for dataset in datasets),
            self.parallel.compiles,
        )
        precision = self.settings.precision
        return replace(limits, fills_sequences=precision.amp or precision.pure_fp16)
