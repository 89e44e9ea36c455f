"""The trainer of the programs, for benchmarks, and random samples; the optimizer of the
implementations beside it.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from benchmarks.common.results import config_file
from bert_recipe.checkpoint.model_folder import read_config
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
from bert_recipe.data_loading.pretraining_dataset import PretrainingDataset
from bert_recipe.metrics.throughput import GlobalBatchStats
from bert_recipe.model.encoders.base import PreTrainedModel
from bert_recipe.model.encoders.bert import BertConfig
from bert_recipe.model.token_stream import StepBatch
from bert_recipe.optimization.protocol import parameter_groups
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.task import Task
from bert_recipe.training.setup import build_trainer
from bert_recipe.training.trainer import Trainer

MAX_STEPS = 10**4
LEARNING_RATE = 1e-4
MAX_GRAD_NORM = TrainerConfig.max_grad_norm


def load_bert_config(model: str) -> BertConfig:
    """The config of one of MODELS."""
    return read_config(config_file(model))


def make_trainer(
    model: PreTrainedModel,
    task: Task,
    loader: LoaderConfig,
    runtime: Runtime,
    optimizer: str,
    parallel: ParallelConfig,
) -> Trainer:
    """A trainer as training.setup.build_trainer builds it, which saves nothing."""
    config = RunConfig(
        TrainerConfig(MAX_STEPS, checkpoint_folder=Path("unused"), benchmark=True),
        loader,
        OptimizerConfig(optimizer),
        ScheduleConfig(MAX_STEPS, LEARNING_RATE, "constant"),
        parallel,
        StartConfig(),
        CheckpointMetadata({}, 0, phase="benchmark"),
    )
    return build_trainer(model, task, config, runtime)


def batch_stats(batch: StepBatch) -> GlobalBatchStats:
    return GlobalBatchStats(*map(int, batch.counts))


def train_step(trainer: Trainer, batch: StepBatch) -> None:
    """One whole step, timed by trainer.stopwatch."""
    trainer.training_step(batch, batch_stats(batch))
    trainer.optimizer_step()


def fused_adamw(model: nn.Module) -> torch.optim.AdamW:
    """The optimizer of other implementations, with this project's groups and values."""
    config = OptimizerConfig()
    groups = parameter_groups(model, config.weight_decay)
    return torch.optim.AdamW(groups, LEARNING_RATE, config.betas, config.eps, fused=True)


class RandomDataset:
    """Samples of random ids, the second half of them with unequal lengths (see
    data_loader.StreamDataset).
    """

    stream_labels = PretrainingDataset.stream_labels

    def __init__(self, count: int, seq_length: int, vocab_size: int):
        random = np.random.default_rng(0)
        self.lengths = random.integers(seq_length // 8, seq_length + 1, count)
        self.lengths[: count // 2] = seq_length
        self.num_labelled = np.maximum(self.lengths // 7, 1)
        self.ids = random.integers(0, vocab_size, (count, seq_length))
        self.labels = random.integers(0, 2, count)

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, indices: np.ndarray, seeds=None, progress: float = 0.0) -> SimpleNamespace:
        """As data_loader.Samples."""
        return SimpleNamespace(
            lengths=self.lengths[indices],
            num_labelled=self.num_labelled[indices],
            num_sequences=np.ones_like(indices),
            metrics={},
            stream=lambda rows: self.stream(indices[rows]),
        )

    def stream(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        lengths, masked = self.lengths[indices], self.num_labelled[indices]
        starts = np.cumsum(lengths) - lengths
        return {
            "input_ids": np.concatenate(
                [self.ids[i, :n] for i, n in zip(indices, lengths, strict=True)]
            ),
            "token_type_ids": np.concatenate([np.arange(n) * 2 // n for n in lengths]),
            "position_ids": np.concatenate([np.arange(n) for n in lengths]),
            "cu_seqlens": np.append(0, np.cumsum(lengths)).astype(np.int32),
            "mlm_positions": np.concatenate(
                [s + 1 + np.arange(m) for s, m in zip(starts, masked, strict=True)]
            ),
            "mlm_labels": np.concatenate(
                [self.ids[i, 1 : m + 1] for i, m in zip(indices, masked, strict=True)]
            ),
            "nsp_labels": self.labels[indices],
        }
