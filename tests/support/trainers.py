"""A trainer as the programs build it, without their files."""

from pathlib import Path

from bert_recipe.config import (
    CheckpointMetadata,
    LoaderConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    StartConfig,
    TrainerConfig,
)
from bert_recipe.metrics.throughput import GlobalBatchStats
from bert_recipe.model.encoders.base import PreTrainedModel
from bert_recipe.model.token_stream import StepBatch
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.task import Task
from bert_recipe.training.setup import build_trainer
from bert_recipe.training.trainer import Trainer

MAX_STEPS = 10


def make_trainer(
    model: PreTrainedModel,
    task: Task,
    loader: LoaderConfig,
    runtime: Runtime,
    optimizer: str,
    parallel: ParallelConfig,
) -> Trainer:
    """A trainer that saves nothing."""
    config = RunConfig(
        TrainerConfig(MAX_STEPS, checkpoint_folder=Path("unused"), benchmark=True),
        loader,
        OptimizerConfig(optimizer),
        ScheduleConfig(MAX_STEPS, 1e-4, "constant"),
        parallel,
        StartConfig(),
        CheckpointMetadata({}, 0, phase="test"),
    )
    return build_trainer(model, task, config, runtime)


def batch_stats(batch: StepBatch) -> GlobalBatchStats:
    return GlobalBatchStats(*map(int, batch.counts))
