"""The learning rate, the batch and the length of a fine-tuning that no flag gives: those of the run
that is resumed, else those of the rule in config/fine_tuning_defaults.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from bert_recipe.checkpoint.progress import GLOBAL_BATCH
from bert_recipe.checkpoint.start import StartKind, StartPoint
from bert_recipe.config import LoaderConfig, RunConfig, ScheduleConfig
from bert_recipe.config.arguments import divided_batch
from bert_recipe.config.fine_tuning_defaults import BY_RULE, LARGEST_BATCH, fine_tuning_defaults
from bert_recipe.optimization.lr_scheduler import exact_product
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.fine_tuning import FineTuningTask
from bert_recipe.tasks.task import TaskData
from bert_recipe.training.run import TrainingValues
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import JsonObject
from bert_recipe.utils.progress import print_line

RATE, WARMUP, EPOCHS, STEPS = "--learning-rate", "--warmup-proportion", "--epochs", "--max-steps"
# Of runs whose record has no epochs, unless a flag gave them.
OLD_EPOCHS = 3.0


@dataclass(frozen=True)
class ChosenSettings:
    """What the runs of a command share.

    loader, schedule: see TrainingValues.
    max_steps: -1 for as many as the epochs need.
    epochs: for the record; `limits_epochs` is whether they end the run.
    """

    loader: LoaderConfig
    schedule: ScheduleConfig
    max_steps: int
    epochs: float | None
    limits_epochs: bool = True

    def values(self, num_samples: int) -> TrainingValues:
        """Those of a run on so many samples."""
        epochs = self.epochs if self.limits_epochs else None
        max_steps = count_steps(self.max_steps, epochs, self.loader.global_batch_size, num_samples)
        return TrainingValues(self.loader, self.schedule, max_steps, self.epochs)


def count_steps(steps: int, epochs: float | None, global_batch_size: int, num_samples: int) -> int:
    """Number of updates of a run: the smaller of `steps`, unless that is -1, and the length of
    `epochs`.
    """
    if epochs is not None:
        needed = math.ceil(exact_product(epochs, num_samples) / global_batch_size)
        steps = min(needed, steps) if steps > 0 else needed
    if steps >= 2**31:
        raise UserError(
            f"--epochs {epochs:g} takes {steps} updates: give fewer epochs, or --max-steps"
        )
    return steps


def loader_of(loader: LoaderConfig, global_batch_size: int, world_size: int) -> LoaderConfig:
    """The batches of a global batch that the rule or the record gives, divided among the
    processes.
    """
    batch_size = divided_batch(global_batch_size, loader.gradient_merge_steps, world_size)
    batch_size = min(batch_size, LARGEST_BATCH)
    return replace(loader, batch_size=batch_size, global_batch_size=global_batch_size)


def given_settings(settings: RunConfig, max_seq_length: int) -> ChosenSettings:
    """Those of the flags alone. max_seq_length: of the task."""
    trainer = settings.trainer
    loader = replace(settings.loader, max_seq_length=max_seq_length)
    return ChosenSettings(loader, settings.schedule, trainer.max_steps, trainer.epochs)


def choose_settings(
    settings: RunConfig, data: TaskData, starts: Sequence[StartPoint], runtime: Runtime
) -> ChosenSettings:
    """The settings of all runs of a command, and a line on those that no flag gives.

    data: of the first run.
    starts: of each run.
    """
    given = given_settings(settings, data.task.max_seq_length)
    if data.task.defaults_kind is None:
        return given
    chosen = settings.chosen_by_rule
    task = cast(FineTuningTask, data.task)
    recorded = recorded_settings(starts)
    config = data.choice.config
    width, num_labels = config.hidden_size, len(config.labels)
    optimizer = settings.optimizer.name
    is_random = all(start.is_random for start in starts)
    rule = fine_tuning_defaults(
        task.defaults_kind, width, optimizer, data.num_rows, is_random, num_labels
    )

    rate, warmup = given.schedule.learning_rate, given.schedule.warmup_proportion
    epochs, max_steps, loader = given.epochs, given.max_steps, given.loader
    if "learning_rate" in chosen:
        rate = recorded.get(RATE, rule.learning_rate)
    if "warmup_proportion" in chosen:
        warmup = recorded.get(WARMUP, rule.warmup_proportion)
    if "global_batch_size" in chosen:
        least = max(rule.batch_size, settings.world_size, task.options.min_batch)
        loader = loader_of(given.loader, recorded.get(GLOBAL_BATCH, least), settings.world_size)
        task.options.check_batch(loader.global_batch_size, settings.world_size)
    limits_epochs = True
    if "epochs" in chosen:
        epochs = rule.epochs
        if recorded:
            epochs = recorded.get(EPOCHS, OLD_EPOCHS)
        if recorded and "max_steps" in chosen:  # the same length, also with another batch
            steps, batch = recorded[STEPS], recorded[GLOBAL_BATCH]
            # Of folds, the same epochs are not the same number of updates.
            by_epochs = count_steps(-1, epochs, batch, len(data.dataset))
            limits_epochs = (by_epochs, loader.global_batch_size) == (steps, batch)
            if not limits_epochs:
                max_steps = math.ceil(steps * batch / loader.global_batch_size)
    if runtime.distributed.is_main:
        values = {
            "learning_rate": f"{RATE} {rate:g}",
            "global_batch_size": f"--global-batch-size {loader.global_batch_size}",
            "epochs": f"{EPOCHS} {epochs:g}" if limits_epochs else f"{STEPS} {max_steps}",
            "warmup_proportion": f"{WARMUP} {warmup:g}",
        }
        classes = f", {num_labels} classes" if num_labels > 1 else ""
        counted = f"{data.num_rows:,} {task.counted}"
        source = f"{BY_RULE} (width {width}, {optimizer}, {counted}{classes})"
        if recorded:
            source = "as recorded by the run that is resumed"
        if len(chosen & values.keys()) > ("warmup_proportion" in chosen):
            words = [text for name, text in values.items() if name in chosen]
            print_line(f"{source}: {' '.join(words)}")
    schedule = replace(given.schedule, learning_rate=rate, warmup_proportion=warmup)
    return ChosenSettings(loader, schedule, max_steps, epochs, limits_epochs)


def recorded_settings(starts: Sequence[StartPoint]) -> JsonObject:
    """The hyperparameters of the first run that is resumed, by name; {} if none is, or if it was no
    training.
    """
    for start in starts:
        if start.kind is StartKind.RESUMED and start.progress is not None:
            recorded = start.progress.hyperparameters
            if recorded.get(RATE) is not None and GLOBAL_BATCH in recorded:
                return recorded
    return {}
