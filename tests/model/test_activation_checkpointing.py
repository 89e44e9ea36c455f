"""Activation checkpointing changes what is kept for the backward pass, and nothing else."""

import functools
import math

import pytest
import torch
from one_step import training_step
from rank_runs import Command, pretrain_ranks
from small_runs import losses, weights
from torch import nn

from bert_recipe.config import ACTIVATION_CHECKPOINTS

CHECKPOINTING = [mode for mode in ACTIVATION_CHECKPOINTS if mode != "none"]


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
        this step: test_parallelize.py traces checkpointed layers for all sizes, which takes
        longer.
        """
        compile_module(module, **options | {"dynamic": False, "backend": "aot_eager"})

    monkeypatch.setattr(nn.Module, "compile", trace)
    step = functools.partial(training_step, dtype=dtype, encoder=encoder, num_layers=num_layers)
    expected, recomputed = (step(mode, compile=compile) for mode in ("none", mode))
    assert math.isfinite(expected.loss) and recomputed.loss == expected.loss
    assert expected.loss != step(mode, dropout=0.0).loss
    assert torch.equal(recomputed.random_state, expected.random_state) or compile == "layers"
    # By the plain model's names.
    torch.testing.assert_close(recomputed.gradients, expected.gradients, rtol=0, atol=0)


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
        trained = weights(tmp_path / mode, 3)
        assert trained.keys() == expected.keys()
        assert all(torch.equal(trained[name], weight) for name, weight in expected.items())
