"""Activation checkpointing changes what is kept for the backward pass, and nothing else."""

import functools
import math
from dataclasses import dataclass

import pytest
import torch
from conftest import TINY
from rank_runs import Command, pretrain_ranks
from small_runs import losses, weights
from torch import Tensor, nn

from encoders.bert import BertConfig, BertForPreTraining
from loss import pretraining_sums
from parallelize import parallelize
from precision import Precision
from run_config import ACTIVATION_CHECKPOINTS, ParallelConfig
from token_stream import TokenStream
from utils.distributed import DistributedContext

CPU = torch.device("cpu")
LENGTHS = [31, 7, 18, 18]
CHECKPOINTING = [mode for mode in ACTIVATION_CHECKPOINTS if mode != "none"]


@dataclass
class Pass:
    loss: float
    gradients: dict[str, Tensor]
    random_state: Tensor


def micro_batch(vocab_size: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)
    tokens = sum(LENGTHS)
    return {
        "input_ids": torch.randint(5, vocab_size, (tokens,), generator=random),
        "token_type_ids": torch.randint(0, 2, (tokens,), generator=random),
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS]),
        "cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0).int(),
        "mlm_positions": torch.tensor([2, 9, 33, 40, 60]),
    }


def forward_and_backward(mode: str, dtype: torch.dtype, compile: str = "none", dropout: float = 0.1) -> Pass:
    config = BertConfig(
        **TINY | {"vocab_size": 200, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        model = BertForPreTraining(config)
    precision = Precision(dtype)
    parallel = parallelize(model, ParallelConfig(compile, mode), precision, CPU, DistributedContext())
    model.train()
    torch.manual_seed(1)
    with precision.context(CPU):
        batch = micro_batch(200)
        stream = TokenStream.from_batch(batch, max(LENGTHS))
        output = parallel.module(stream, mlm_positions=batch["mlm_positions"])
        sums = pretraining_sums(*output, torch.tensor([7, 8, 9, 10, 11]), torch.tensor([0, 1, 1, 0]))
    loss = sums.mlm_loss + sums.nsp_loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return Pass(loss.item(), gradients, torch.get_rng_state())


@pytest.mark.parametrize(
    ("dtype", "compile"), [(torch.float32, "none"), (torch.bfloat16, "none"), (torch.float32, "layers")]
)
@pytest.mark.parametrize("mode", CHECKPOINTING)
def test_losses_gradients_and_random_state_are_identical_to_the_bit(mode, dtype, compile, monkeypatch):
    # The same graphs as with the default backend, without minutes of C++ compilation.
    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend="aot_eager"))
    expected, found = (forward_and_backward(m, dtype, compile) for m in ("none", mode))
    assert math.isfinite(expected.loss) and found.loss == expected.loss
    assert expected.loss != forward_and_backward(mode, dtype, dropout=0.0).loss
    assert torch.equal(found.random_state, expected.random_state) or compile == "layers"
    assert found.gradients.keys() == expected.gradients.keys()  # the names are those of the plain model
    for name, gradient in expected.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name


def test_sharded_over_two_processes_training_is_identical_to_the_bit(inputs, tmp_path):
    flags = ("--max-steps", 3, "--log-freq", 1, "--data-parallel-shard-degree", 2, "--activation-checkpoint")
    commands = [Command(2, inputs.command(tmp_path / mode, *flags, mode)) for mode in ACTIVATION_CHECKPOINTS]
    pretrain_ranks(tmp_path / "logs", *commands).check()
    expected = weights(tmp_path / "none", 3)
    for mode in CHECKPOINTING:
        assert losses(tmp_path / mode) == losses(tmp_path / "none") and len(losses(tmp_path / mode)) == 3
        found = weights(tmp_path / mode, 3)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())
