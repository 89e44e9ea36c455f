"""The trainer of the programs, for benchmarks, and random samples; the optimizer of the
implementations beside it.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.common.results import config_file
from bert_recipe.checkpoint.model_folder import read_config
from bert_recipe.config import OptimizerConfig, TrainerConfig
from bert_recipe.data_loading.loader import StreamDataset
from bert_recipe.data_loading.pretraining_dataset import PretrainingDataset
from bert_recipe.metrics.throughput import GlobalBatchStats
from bert_recipe.model.encoders.base import PreTrainedModel
from bert_recipe.model.encoders.bert import BertConfig
from bert_recipe.model.token_stream import StepBatch
from bert_recipe.optimization.protocol import parameter_groups
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.task import Task
from bert_recipe.training.library import make_settings, make_trainer
from bert_recipe.training.trainer import Trainer

MAX_STEPS = 10**4
LEARNING_RATE = 1e-4
MAX_GRAD_NORM = TrainerConfig.max_grad_norm


def load_bert_config(model: str) -> BertConfig:
    """The config of one of MODELS."""
    return read_config(config_file(model))


def measured_trainer(
    model: PreTrainedModel,
    task: Task,
    dataset: StreamDataset,
    runtime: Runtime,
    batch_size: int,
    **flags: Any,
) -> Trainer:
    """The trainer of a run that saves nothing, with a constant learning rate. flags: see
    library.make_settings.
    """
    values = {"max_steps": MAX_STEPS, "learning_rate": LEARNING_RATE, "lr_decay": "constant"}
    settings = make_settings(
        "unused", benchmark=True, seed=0, batch_size=batch_size, **values, **flags
    )
    return make_trainer(model, task, dataset, settings, runtime)


def train_step(trainer: Trainer, batch: StepBatch) -> None:
    """One whole step, timed by trainer.stopwatch."""
    trainer.training_step(batch, GlobalBatchStats.of(batch))
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
