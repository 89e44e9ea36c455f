"""The learning rate, the batch and the length of a fine-tuning that no flag gives: those of the run
that is resumed, else those of the rule in config/fine_tuning_defaults.py.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from bert_recipe.checkpoint.identity import read_record
from bert_recipe.checkpoint.progress import GLOBAL_BATCH, read_progress
from bert_recipe.checkpoint.start import Start
from bert_recipe.config import RunConfig
from bert_recipe.config.arguments import divided_batch
from bert_recipe.config.fine_tuning_defaults import BY_RULE, LARGEST_BATCH, fine_tuning_defaults
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.task import FineTuningTask, TaskData
from bert_recipe.utils.json_files import JsonObject
from bert_recipe.utils.progress import print_line

RATE, WARMUP, EPOCHS, STEPS = "--learning-rate", "--warmup-proportion", "--epochs", "--max-steps"
# Of runs whose record has no epochs, unless a flag gave them.
OLD_EPOCHS = 3.0


@dataclass(frozen=True)
class ChosenSettings:
    """What the runs of a command share. global_batch_size: None if a flag gives the batch.
    max_steps: -1 for as many as the epochs need. epochs: for the record; `limits_epochs` is whether
    they end the run.
    """

    learning_rate: float
    warmup_proportion: float
    epochs: float | None
    max_steps: int
    limits_epochs: bool = True
    global_batch_size: int | None = None

    def applied_to(self, config: RunConfig) -> RunConfig:
        """`config` with these values, also in its record and in what it logs."""
        if self.global_batch_size is not None:
            config = with_batch(config, self.global_batch_size)
        recorded = {RATE: self.learning_rate, WARMUP: self.warmup_proportion, EPOCHS: self.epochs}
        logged = {
            "learning_rate": self.learning_rate,
            "warmup_proportion": self.warmup_proportion,
            "epochs": self.epochs,
            "batch_size": config.loader.batch_size,
        }
        return config.with_values(
            schedule={
                "learning_rate": self.learning_rate,
                "warmup_proportion": self.warmup_proportion,
            },
            trainer={
                "epochs": self.epochs if self.limits_epochs else None,
                "max_steps": self.max_steps,
            },
            metadata={"arguments": config.metadata.arguments | logged},
        ).with_record(recorded)


def with_batch(config: RunConfig, global_batch_size: int) -> RunConfig:
    """`config` with a global batch that the rule or the record gives, divided among its
    processes.
    """
    loader, parallel = config.loader, config.parallel
    batch_size = divided_batch(global_batch_size, loader.gradient_merge_steps, config.world_size)
    batch_size = min(batch_size, LARGEST_BATCH)
    engine = parallel.engine
    if engine is not None:
        merged = divided_batch(global_batch_size, batch_size, config.world_size)
        engine = engine | {
            "train_micro_batch_size_per_gpu": batch_size,
            "gradient_accumulation_steps": merged,
        }
    return config.with_values(
        loader={"batch_size": batch_size, "global_batch_size": global_batch_size},
        parallel={"engine": engine},
    )


def choose_settings(
    config: RunConfig, data: TaskData, starts: Mapping[str, Start], runtime: Runtime
) -> ChosenSettings:
    """The settings of all runs of a fine-tuning command, and a line on those that no flag gives.

    data: of the first run.
    starts: of each run, by its subfolder.
    """
    chosen = config.fine_tuning.chosen_by_rule
    task = cast(FineTuningTask, data.task)
    recorded = runtime.distributed.on_main(lambda: recorded_settings(config, data, starts))
    width = data.choice.config.hidden_size
    optimizer = config.optimizer.name
    is_random = all(start.folder is None for start in starts.values())
    rule = fine_tuning_defaults(task.defaults_kind, width, optimizer, data.num_rows, is_random)

    rate, warmup = config.schedule.learning_rate, config.schedule.warmup_proportion
    epochs, max_steps = config.trainer.epochs, config.trainer.max_steps
    if "learning_rate" in chosen:
        rate = recorded.get(RATE, rule.learning_rate)
    if "warmup_proportion" in chosen:
        warmup = recorded.get(WARMUP, rule.warmup_proportion)
    global_batch = config.loader.global_batch_size
    gives_batch = "global_batch_size" not in chosen
    if not gives_batch:
        least = max(rule.batch_size, runtime.distributed.world_size, task.min_batch)
        global_batch = recorded.get(GLOBAL_BATCH, least)
        task.check_batch(global_batch, runtime.distributed.world_size)
    limits_epochs = True
    if "epochs" in chosen:
        epochs = rule.epochs
        if recorded:
            epochs = recorded.get(EPOCHS, OLD_EPOCHS)
        if recorded and "max_steps" in chosen:  # the same length, also with another batch
            sequences = recorded[STEPS] * recorded[GLOBAL_BATCH]
            max_steps = math.ceil(sequences / global_batch)
            limits_epochs = False
    settings = ChosenSettings(
        rate,
        warmup,
        epochs,
        max_steps,
        limits_epochs,
        None if gives_batch else global_batch,
    )
    if runtime.distributed.is_main:
        values = {
            "learning_rate": f"{RATE} {rate:g}",
            "global_batch_size": f"--global-batch-size {global_batch}",
            "epochs": f"{EPOCHS} {epochs:g}" if limits_epochs else f"{STEPS} {max_steps}",
            "warmup_proportion": f"{WARMUP} {warmup:g}",
        }
        source = f"{BY_RULE} (width {width}, {optimizer}, {data.num_rows:,} rows)"
        if recorded:
            source = "as recorded by the run that is resumed"
        if len(chosen & values.keys()) > ("warmup_proportion" in chosen):
            words = [text for name, text in values.items() if name in chosen]
            print_line(f"{source}: {' '.join(words)}")
    return settings


def recorded_settings(config: RunConfig, data: TaskData, starts: Mapping[str, Start]) -> JsonObject:
    """The hyperparameters of the first run that will be resumed, by name; {} if none is."""
    if config.start.overwrite:
        return {}
    folder = config.trainer.checkpoint_folder / data.choice.name / data.task.name
    for name, start in starts.items():
        recorded: JsonObject = {}
        if start.checkpoint is not None:
            prefix = config.metadata.prefix
            recorded = read_progress(start.checkpoint.path, prefix).hyperparameters
        elif config.start.resume:
            recorded = read_record(folder / name).hyperparameters
        if RATE in recorded and GLOBAL_BATCH in recorded:
            return recorded
    return {}
