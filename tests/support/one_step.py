"""One forward and backward pass of a small model, with what activation checkpointing may change."""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from conftest import TINY
from encoder_cases import MODERNBERT
from small_runs import InMemoryDataset
from torch import Tensor

from bert_recipe.config import LoaderConfig
from bert_recipe.data_loading.loader import make_step_batch
from bert_recipe.data_loading.packing import MicroBatchLimits
from bert_recipe.metrics.throughput import GlobalBatchStats
from bert_recipe.model.encoders.bert import BertConfig, BertForPreTraining
from bert_recipe.model.encoders.modernbert import ModernBertForMaskedLM
from bert_recipe.model.encoders.registry import config_from_dict
from bert_recipe.optimization.precision import Precision
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.pretraining import PretrainingTask
from bert_recipe.training.library import make_settings, make_trainer


@dataclass
class Pass:
    loss: float
    gradients: dict[str, Tensor]
    random_state: Tensor


@functools.cache
def training_step(
    mode: str,
    dtype: torch.dtype,
    compile: str = "none",
    encoder: str = "bert",
    dropout: float = 0.1,
    num_layers: int = 2,
) -> Pass:
    bert = TINY | {
        "vocab_size": 200,
        "num_hidden_layers": num_layers,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }
    modernbert = MODERNBERT | {
        "vocab_size": 200,
        "num_hidden_layers": num_layers,
        "attention_dropout": dropout,
    }
    torch.manual_seed(0)
    with torch.device("meta"):
        if encoder == "bert":
            model = BertForPreTraining(BertConfig(**bert))
        else:
            model = ModernBertForMaskedLM(config_from_dict(modernbert))
    task = PretrainingTask(encoder == "bert", 32)
    dataset = InMemoryDataset((32, 32, 19, 8), 200)
    strategies = {"compile": compile, "activation_checkpoint": mode}
    settings = make_settings(
        "unused", seed=0, benchmark=True, max_steps=1, learning_rate=1e-4, **strategies
    )
    runtime = Runtime(torch.device("cpu"), Precision(dtype))
    trainer = make_trainer(model, task, dataset, settings, runtime)
    limits = MicroBatchLimits.of(LoaderConfig(4, 4, 32, 5), is_compiled=compile != "none")
    batch = make_step_batch(dataset, np.arange(4), limits)
    stats = GlobalBatchStats.of(batch)
    loss = task.loss(trainer.training_step(batch, stats), stats.counts)
    gradients = {name: p.grad for name, p in trainer.parallel.named_parameters().items()}
    return Pass(loss.item(), gradients, torch.get_rng_state())
