"""A trainer as the programs build it, without their files."""

from pathlib import Path

from encoders.base import PreTrainedModel
from metrics.throughput import GlobalBatchStats
from parallel.runtime import Runtime
from run_config import (
    CheckpointMetadata,
    LoaderConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    StartConfig,
    TrainerConfig,
)
from run_setup import build_trainer
from tasks import Task
from token_stream import StepBatch
from trainer import Trainer

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
    return GlobalBatchStats(
        len(batch.lengths), int(batch.lengths.sum()), int(batch.num_labelled.sum())
    )
