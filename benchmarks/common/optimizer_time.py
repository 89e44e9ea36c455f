"""The time of one update of all of BERT's parameters: the two forms of LAMB beside torch's fused
AdamW.

`Lamb` is the form of LAMB that training uses on the device, `Lamb, other form` the one for the
other kind of device. AdamW reads and writes at least 8 numbers per parameter. LAMB knows its step
size only after a whole tensor, so it has to write the update and read it and the weights again: 11.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from benchmarks.common.results import paired_ratio, quartiles
from benchmarks.common.training import LEARNING_RATE, load_bert_config
from benchmarks.common.worker import take_turns
from bert_recipe.config import OptimizerConfig
from bert_recipe.model.encoders.bert import BertForPreTraining
from bert_recipe.optimization.lamb import Lamb
from bert_recipe.optimization.protocol import apply_step, parameter_groups
from bert_recipe.utils.measure import synchronize

ROUNDS = 15  # updates of each optimizer


def random_model(name: str, device: torch.device) -> BertForPreTraining:
    """BERT with random weights and gradients."""
    with torch.device("meta"):
        model = BertForPreTraining(load_bert_config(name))
    torch.manual_seed(0)
    model.to_empty(device=device)
    for p in model.parameters():
        p.data.uniform_(-0.04, 0.04)
        p.grad = torch.empty_like(p).uniform_(-1e-3, 1e-3)
    return model


def make_updates(model: nn.Module, device: torch.device) -> dict[str, Callable[[], None]]:
    """Functions that make one update of `model`, with AdamW and with each form of LAMB. All share
    the memory of their moments, so that they fit where one fits.
    """
    config = OptimizerConfig()
    lr, one, zero = (torch.tensor(value, device=device) for value in (LEARNING_RATE, 1.0, 0.0))
    groups = parameter_groups(model, config.weight_decay)
    options = {"betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}
    optimizers = {
        "AdamW": torch.optim.AdamW(groups, lr, **options, fused=True),
        "Lamb": Lamb(groups, lr, **options),
        "Lamb, other form": Lamb(groups, lr, **options, foreach=device.type == "cpu"),
    }
    moments = {
        p: {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        for p in model.parameters()
    }
    for optimizer in optimizers.values():
        for p, state in moments.items():
            optimizer.state[p] = {"step": torch.zeros((), device=device), **state}
    # As in training: gradients are divided by a scale, and no update if they are not finite.
    return {
        name: partial(apply_step, optimizer, one, zero) for name, optimizer in optimizers.items()
    }


def time_lamb(model: str, device: torch.device) -> dict:
    """Medians and quartiles of the time of an update of `model`."""
    bert = random_model(model, device)

    def seconds_of(update: Callable[[], None], _round: int) -> float:
        synchronize(device)
        started = time.perf_counter()
        update()
        synchronize(device)
        return time.perf_counter() - started

    turns = {
        name: partial(seconds_of, update) for name, update in make_updates(bert, device).items()
    }
    seconds = take_turns(turns, ROUNDS, "updates")
    found: dict = {"ok": True}
    for name, values in seconds.items():
        found[f"{name} ms"] = quartiles([1e3 * value for value in values])
        found[f"{name} / AdamW"] = paired_ratio(values, seconds["AdamW"])
    return found
