"""Activation checkpointing changes what is kept for the backward pass, and nothing else."""

import functools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from conftest import TINY
from rank_runs import Command, pretrain_ranks
from small_runs import InMemoryDataset, losses, weights
from test_encoders import MODERNBERT
from torch import Tensor, nn
from trainers import batch_stats, make_trainer

from bert_recipe.checkpoint.pretrained import config_from_dict
from bert_recipe.config import ACTIVATION_CHECKPOINTS, LoaderConfig, ParallelConfig
from bert_recipe.data_loading.loader import make_step_batch
from bert_recipe.data_loading.packing import MicroBatchLimits
from bert_recipe.model.encoders.bert import BertConfig, BertForPreTraining
from bert_recipe.model.encoders.modernbert import ModernBertForMaskedLM
from bert_recipe.optimization.precision import Precision
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.pretraining import PretrainingTask

CHECKPOINTING = [mode for mode in ACTIVATION_CHECKPOINTS if mode != "none"]


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
    is_causal=False,
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
    loader = LoaderConfig(4, 4, 32, 5)
    runtime = Runtime(torch.device("cpu"), Precision(dtype))
    trainer = make_trainer(model, task, loader, runtime, "Lamb", ParallelConfig(compile, mode))
    limits = MicroBatchLimits.of(loader, is_compiled=compile != "none")
    batch = make_step_batch(InMemoryDataset((32, 32, 19, 8), 200), np.arange(4), limits)
    batch.micro_batches[0]["is_causal"] = is_causal
    stats = batch_stats(batch)
    loss = task.loss(trainer.training_step(batch, stats), stats.sequences, stats.labelled_tokens)
    gradients = {name: p.grad for name, p in trainer.parallel.named_parameters().items()}
    return Pass(loss.item(), gradients, torch.get_rng_state())


UNCOMPILED = [
    (torch.float32, "none", "bert", 2),
    (torch.bfloat16, "none", "bert", 2),
    (torch.float32, "none", "modernbert", 4),
]
# A layer is traced for seconds, and in both modes it is the same operator in the graph.
COMPILED = (torch.float32, "layers", "bert", 1)


@pytest.mark.parametrize(
    ("mode", "dtype", "compile", "encoder", "num_layers"),
    [
        *((mode, *case) for mode in CHECKPOINTING for case in UNCOMPILED),
        ("selective", *COMPILED),
    ],
)
def test_losses_gradients_and_random_state_are_identical_to_the_bit(
    mode, dtype, compile, encoder, num_layers, monkeypatch
):
    compile_module = nn.Module.compile

    def trace(module: nn.Module, **options) -> None:
        """The same operators as by default, without minutes of C++ compilation. For the sizes of
        this step: test_float8.py traces checkpointed layers for all sizes, which takes longer.
        """
        compile_module(module, **options | {"dynamic": False, "backend": "aot_eager"})

    monkeypatch.setattr(nn.Module, "compile", trace)
    step = functools.partial(training_step, dtype=dtype, encoder=encoder, num_layers=num_layers)
    expected, found = (step(mode, compile=compile) for mode in ("none", mode))
    assert math.isfinite(expected.loss) and found.loss == expected.loss
    assert expected.loss != step(mode, dropout=0.0).loss
    assert torch.equal(found.random_state, expected.random_state) or compile == "layers"
    # By the plain model's names.
    torch.testing.assert_close(found.gradients, expected.gradients, rtol=0, atol=0)


def test_sharded_over_two_processes_training_is_identical_to_the_bit(inputs, tmp_path):
    flags = (
        "--max-steps",
        3,
        "--log-freq",
        1,
        "--data-parallel-shard-degree",
        2,
        "--activation-checkpoint",
    )
    commands = [
        Command(2, inputs.command(tmp_path / mode, *flags, mode)) for mode in ACTIVATION_CHECKPOINTS
    ]
    pretrain_ranks(tmp_path / "logs", *commands).check()
    expected = weights(tmp_path / "none", 3)
    for mode in CHECKPOINTING:
        assert (
            losses(tmp_path / mode) == losses(tmp_path / "none")
            and len(losses(tmp_path / mode)) == 3
        )
        found = weights(tmp_path / mode, 3)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())
