#!/usr/bin/env python3
"""One update of all of BERT's parameters: LAMB compared with torch's fused AdamW.

    python3 benchmarks/optimizer_step.py --model base
    python3 benchmarks/optimizer_step.py --model large --device cuda

`AdamW` is torch.optim.AdamW(fused=True). `Lamb` is the form of LAMB that training uses on the device, `Lamb, other
form` the one for the other kind of device; they are compared first. AdamW reads and writes at least 8 numbers per
parameter. LAMB knows its step size only after a whole tensor, so it has to write the update and read it and the weights
again: 11.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common.results import compare, format_quartiles, quartiles, write_result
from benchmarks.common.training import LEARNING_RATE, MODELS, load_bert_config
from benchmarks.common.worker import take_turns
from encoders.bert import BertForPreTraining
from optimizers.lamb import Lamb
from optimizers.protocol import apply_step, parameter_groups
from run_config import OptimizerConfig
from utils.command_line import ArgumentParser, positive_int
from utils.device import select_device, set_num_threads
from utils.errors import UserError, run_main
from utils.measure import synchronize
from utils.progress import print_line

TOLERANCE = 1e-4  # of the forms' updates, ||difference|| / ||update||


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
    """Functions that make one update of `model`, with AdamW and with each form of LAMB. All share the memory of
    their moments, so that they fit where one fits."""
    config = OptimizerConfig()
    lr, one, zero = (torch.tensor(value, device=device) for value in (LEARNING_RATE, 1.0, 0.0))
    groups = parameter_groups(model, config.weight_decay)
    options = {"betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}
    optimizers = {
        "AdamW": torch.optim.AdamW(groups, lr, **options, fused=True),
        "Lamb": Lamb(groups, lr, **options),
        "Lamb, other form": Lamb(groups, lr, **options, foreach=device.type == "cpu"),
    }
    moments = {p: {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)} for p in model.parameters()}
    for optimizer in optimizers.values():
        for p, state in moments.items():
            optimizer.state[p] = {"step": torch.zeros((), device=device), **state}
    # As in training: gradients are divided by a scale, and no update if they are not finite.
    return {name: partial(apply_step, optimizer, one, zero) for name, optimizer in optimizers.items()}


def check_forms(model: str, device: torch.device) -> dict:
    """||difference|| / ||update|| between the two forms, after two updates from the same weights and gradients."""
    found = []
    for name in ("Lamb", "Lamb, other form"):
        bert = random_model(model, device)
        before = torch.cat([p.detach().flatten() for p in bert.parameters()])
        gradients, update = [p.grad for p in bert.parameters()], make_updates(bert, device)[name]
        for factor in (1.0, -3.0):
            for p, gradient in zip(bert.parameters(), gradients, strict=True):
                p.grad = gradient * factor
            update()
        found.append(torch.cat([p.detach().flatten() for p in bert.parameters()]) - before)
    error = float((found[0] - found[1]).norm() / found[0].norm())
    return {"update": error, "limit": TOLERANCE, "passed": error < TOLERANCE}


def measure(model: nn.Module, rounds: int, device: torch.device) -> dict[str, dict]:
    def seconds_of(update: Callable[[], None], _round: int) -> float:
        synchronize(device)
        started = time.perf_counter()
        update()
        synchronize(device)
        return time.perf_counter() - started

    turns = {name: partial(seconds_of, update) for name, update in make_updates(model, device).items()}
    seconds = take_turns(turns, rounds, "updates")
    return {
        name: {
            "milliseconds": quartiles([1e3 * value for value in values]),
            "ratio_to_adamw": compare(values, seconds["AdamW"]),
        }
        for name, values in seconds.items()
    }


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="base", help="model whose parameters to update")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="device")
    parser.add_argument("--rounds", type=positive_int, default=15, help="updates of each optimizer")
    parser.add_argument("--output", type=Path, help="result file; by default in benchmarks/results")
    args = parser.parse_args(argv)
    device = select_device(args.device)
    set_num_threads()
    if not (check := check_forms("tiny", device))["passed"]:
        raise UserError(f"the two forms of LAMB differ, so nothing is measured: {check}")
    model = random_model(args.model, device)
    count, found = sum(p.numel() for p in model.parameters()), measure(model, args.rounds, device)
    print_line(f"{f'{count / 1e6:.0f} M parameters':18}{'milliseconds (quartiles)':>24}{'times AdamW (quartiles)':>24}")
    for name, figures in found.items():
        milliseconds = format_quartiles(figures["milliseconds"], ".1f")
        ratio = format_quartiles(figures["ratio_to_adamw"], first="ratio_of_medians")
        print_line(f"{name:18}{milliseconds:>24}{ratio:>24}")
    result = {"arguments": args.as_dict(), "check": check, "parameters": count, "implementations": found}
    write_result(args.output, f"optimizer_step-{device.type}-{args.model}", device, result)


if __name__ == "__main__":
    run_main(main)
