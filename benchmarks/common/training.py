"""The trainer of the programs, for benchmarks; the optimizer of the implementations beside it."""

from typing import Any

import torch
from torch import nn

from benchmarks.common.results import config_file
from bert_recipe.checkpoint.model_folder import read_config
from bert_recipe.config import OptimizerConfig, TrainerConfig
from bert_recipe.data_loading.loader import StreamDataset
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
