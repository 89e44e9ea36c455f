"""A run: all that is decided once, from the settings as they were typed, the model and the data."""

from dataclasses import dataclass, fields, replace
from typing import cast

import torch

from bert_recipe.checkpoint.identity import WEIGHTS
from bert_recipe.checkpoint.model_card import ModelParts
from bert_recipe.checkpoint.progress import check_same_run
from bert_recipe.checkpoint.record import SCORES_FILE, RunRecord
from bert_recipe.checkpoint.run_folder import RunFolder
from bert_recipe.checkpoint.start import StartKind, StartPoint
from bert_recipe.config import LoaderConfig, ParallelConfig, RunConfig, ScheduleConfig
from bert_recipe.data_loading.packing import MicroBatchLimits, stream_sizes
from bert_recipe.model.encoders.base import PreTrainedModel
from bert_recipe.model.encoders.heads import ClassificationModel
from bert_recipe.model.encoders.registry import make_model
from bert_recipe.optimization.protocol import OptimizerSpec
from bert_recipe.optimization.registry import spec_named
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.task import Task, TaskData
from bert_recipe.utils.command_line import argument_of
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import is_same_path
from bert_recipe.utils.json_files import JsonObject

# Arguments of tasks that decide what is scored, predicted and written, and nothing of training.
OF_RESULTS = ("do_eval", "do_predict", "eval_file", "predict_file", "output_dir")


@dataclass(frozen=True)
class TrainingValues:
    """The batch, the schedule and the length of a run: given, recorded by the run that is resumed,
    or chosen from the model and the rows.

    loader: with the batch.
    schedule: with the peak rate and the warmup.
    max_steps: updates of the run.
    epochs: for the record; None if none are given.
    shrinkage: see shrunk_outputs; None if the outputs stay as they are.
    """

    loader: LoaderConfig
    schedule: ScheduleConfig
    max_steps: int
    epochs: float | None = None
    shrinkage: float | None = None


@dataclass(frozen=True)
class Run:
    """What a run is; nothing is allocated yet, and nothing later decides it again.

    settings: as typed.
    folder: of its steps and results.
    start: see StartPoint.
    data: the opened task with its model and its data.
    values: see TrainingValues.
    parallel: the strategies, with what --compile auto means.
    record: what is the same in all of its checkpoints.
    note: what to print before training, or "".
    is_trial: whether only its weights after training matter.
    """

    settings: RunConfig
    folder: RunFolder
    start: StartPoint
    data: TaskData
    values: TrainingValues
    parallel: ParallelConfig
    record: RunRecord
    note: str = ""
    is_trial: bool = False

    @property
    def task(self) -> Task:
        return self.data.task

    @property
    def max_steps(self) -> int:
        return self.values.max_steps

    @property
    def saves(self) -> bool:
        """Whether it writes to its folder."""
        return not (self.settings.trainer.benchmark or self.is_trial)

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
    def optimizer_spec(self) -> OptimizerSpec:
        return spec_named(self.settings.optimizer.name)

    @property
    def parts(self) -> ModelParts:
        """Of its model folders."""
        choice, data = self.data.choice, self.data
        command = self.settings.arguments.command()
        return ModelParts(choice.tokenizer, choice.name, data.max_length, data.files, command)

    def check_start(self) -> None:
        """Raises UserError unless the run may go on from the checkpoint that it takes over."""
        source, progress = self.start.source, self.start.progress
        if source is None or progress is None:
            return
        if self.start.kind is StartKind.RESUMED:
            tokenizer, world_size = self.data.choice.tokenizer, self.settings.world_size
            is_own = is_same_path(source.path.parent, self.folder.path)
            options = getattr(self.task, "options", None)  # which the task of a library lacks
            read = () if options is None else map(argument_of, fields(options))
            task_flags = [name for name in read if name not in (None, *OF_RESULTS)]
            check_same_run(source, progress, self.record, tokenizer, is_own, world_size, task_flags)
        elif progress.step >= self.max_steps:
            raise UserError(
                f"phase 1 ended at update {progress.step}, and --max-steps is {self.max_steps}: "
                "with --lr-rewarmup it counts the updates of both phases, so give more"
            )

    def logged_settings(self, identity: JsonObject) -> JsonObject:
        """What to log at the start. identity: of the record, with what only a checkpoint knows."""
        settings = self.record.arguments | {"SEED": self.record.seed}
        if self.saves:
            # Paths do not tell models apart: their content may change.
            settings["starting_weights"] = identity[WEIGHTS]
        if self.values.shrinkage is not None:
            settings["shrinkage"] = self.values.shrinkage
        batch_size = self.values.loader.batch_size
        return settings | self.task.logged_settings(self.data, batch_size, self.max_steps)

    def claim_folder(self, best_step: int | None = None) -> None:
        """Takes the folder before the first update, see `RunFolder.claim`. best_step: of the run so
        far.
        """
        resumed = self.start.source if self.start.kind is StartKind.RESUMED else None
        overwrites = self.settings.start.overwrite
        self.folder.claim(best_step, resumed, overwrites, self.start.weights)

    def last_step(self, first: int) -> int:
        """The last update of a process that starts after update `first`. Those of a benchmark do
        not count for `max_steps`.
        """
        trainer = self.settings.trainer
        if trainer.measured_batches is not None:
            return first + sum(trainer.measured_batches)
        if trainer.steps_this_run is None or self.is_trial:
            return self.max_steps
        return min(first + trainer.steps_this_run, self.max_steps)

    def make_model(self) -> PreTrainedModel:
        """Builds the model on the meta device."""
        with torch.device("meta"):
            model = make_model(self.task.head, self.data.choice.config)
        if self.task.first_outputs is not None:
            cast(ClassificationModel, model).first_outputs = self.task.first_outputs
        return model

    def limits(self, runtime: Runtime, batch_size: int | None = None) -> MicroBatchLimits:
        """The limits of micro-batches of the run's batch size, or of another one."""
        opened = (self.data.dataset, self.data.held_out)
        datasets = [dataset for dataset in opened if dataset is not None]
        limits = MicroBatchLimits.for_batch(
            batch_size or self.values.loader.batch_size,
            self.task.max_sample_length,
            max(dataset.max_labelled_per_sample for dataset in datasets),
            stream_sizes(runtime.device, runtime.precision.dtype),
            max(dataset.max_sequences_per_sample for dataset in datasets),
        )
        fills_sequences = runtime.precision.dtype != torch.float32
        return replace(limits, is_compiled=self.parallel.compiles, fills_sequences=fills_sequences)
