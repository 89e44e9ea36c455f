#!/usr/bin/env python3
"""Checks on a device that the fast paths compute the same as the plain one. Run it first on a new GPU.

    python3 benchmarks/device_checks.py --device cuda
    python3 benchmarks/device_checks.py --model tiny --device cpu

The loss and all gradients of one step without dropout, on sequences of unequal lengths, are compared with those of
padded attention in float32, by ||difference|| / ||reference||: flash attention, fixed sizes, compiled, bfloat16, 16-bit
weights. The forms of LAMB are compared in the same way. On a GPU, whole steps with dropout must not make the host wait
for the device. The exit code is 1 if a check fails.
"""

import dataclasses
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from attention import default_implementation
from benchmarks.common.results import write_result
from benchmarks.common.training import MODELS, RandomDataset, batch_stats, load_bert_config, make_trainer, train_step
from benchmarks.optimizer_step import check_forms
from bert_config import BertConfig
from data_loading.loader import StepBatch, make_step_batch
from data_loading.packing import MicroBatchLimits
from device import Runtime, select_device, set_num_threads
from modeling import BertForPreTraining
from precision import Precision
from run_config import LoaderConfig
from tasks.pretraining import PretrainingTask
from trainer import Trainer
from utils.command_line import ArgumentParser, Arguments, positive_int
from utils.errors import one_line, run_main
from utils.progress import print_line

FLOAT32, BFLOAT16, PURE_BFLOAT16 = Precision(), Precision(torch.bfloat16), Precision(torch.bfloat16, pure=True)
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def parse_arguments(argv=None) -> Arguments:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=sorted(MODELS), default="base", help="architecture")
    add("--seq-length", type=positive_int, default=128, help="longest sequence")
    add("--batch-size", type=positive_int, default=16, help="sequences")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="device")
    add("--output", type=Path, help="result file; by default in benchmarks/results")
    return parser.parse_args(argv)


class Case(NamedTuple):
    """A way to compute a step; `attention` is a key of attention.IMPLEMENTATIONS or `auto`."""

    title: str
    precision: Precision
    attention: str = "auto"
    compile: str = "none"
    num_sizes: int | None = None


REFERENCE = Case("padded, fp32", FLOAT32, "padded")


def cases(device: torch.device) -> list[Case]:
    fast = default_implementation(device, torch.bfloat16)
    on_cpu = [Case(f"{fast}, fp32", FLOAT32, fast)] if device.type == "cpu" else []
    return [
        *on_cpu,
        Case("padded, fp32, fixed sizes", FLOAT32, "padded", num_sizes=1),
        Case("padded, bf16", BFLOAT16, "padded"),
        Case(f"{fast}, bf16", BFLOAT16, fast),
        Case(f"{fast}, bf16, fixed sizes", BFLOAT16, fast, num_sizes=1),
        Case("compiled layers, bf16", BFLOAT16, compile="layers", num_sizes=1),
        Case("compiled model, bf16", BFLOAT16, compile="model", num_sizes=1),
        Case("16-bit weights", PURE_BFLOAT16),
        Case("compiled, 16-bit weights", PURE_BFLOAT16, compile="model", num_sizes=1),
    ]


def prepare_step(
    args: Arguments, bert_config: BertConfig, case: Case, device: torch.device
) -> tuple[Trainer, StepBatch]:
    """A trainer with the weights of seed 0, and a batch."""
    targets = args.seq_length // 7 + 1
    loader = LoaderConfig(args.batch_size, args.batch_size, args.seq_length, targets, num_sizes=case.num_sizes)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = BertForPreTraining(bert_config)
    task = PretrainingTask(True, args.seq_length)
    trainer = make_trainer(model, task, loader, Runtime(device, case.precision), "Lamb", case.compile)
    if case.attention != "auto":
        model.bert.attention_implementation = case.attention
    dataset = RandomDataset(args.batch_size, args.seq_length, bert_config.vocab_size)
    pin = device.type == "cuda"
    return trainer, make_step_batch(dataset, np.arange(args.batch_size), MicroBatchLimits.of(loader), pin_memory=pin)


def loss_and_gradients(args: Arguments, case: Case, device: torch.device) -> dict[str, Tensor]:
    """The loss of the batch and the gradient of every parameter, in float64."""
    without_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    bert_config = dataclasses.replace(load_bert_config(args.model), **without_dropout)
    trainer, batch = prepare_step(args, bert_config, case, device)
    stats = batch_stats(batch)
    sums = trainer.training_step(batch, stats)
    # The gradient of the keys' biases is zero in exact arithmetic; computed, it is only rounding errors.
    parameters = {n: p for n, p in trainer.parallel.named_parameters().items() if not n.endswith("key.bias")}
    loss = trainer.task.loss(sums, stats.sequences, stats.targets).double()
    return {"loss": loss, **{name: p.grad.double() for name, p in parameters.items()}}


def relative_errors(found: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """The errors of the loss, and of all gradients as one vector."""
    names = [name for name in reference if name != "loss"]
    difference = torch.stack([(found[name] - reference[name]).norm() for name in names]).norm()
    whole = torch.stack([reference[name].norm() for name in names]).norm()
    loss = (found["loss"] - reference["loss"]).abs() / reference["loss"].abs()
    return {"loss": float(loss), "gradients": float(difference / whole)}


def check_gradients(args: Arguments, device: torch.device) -> list[dict]:
    reference = loss_and_gradients(args, REFERENCE, device)
    results = []
    for case in cases(device):
        errors = relative_errors(loss_and_gradients(args, case, device), reference)
        limit = TOLERANCES[case.precision.dtype]
        passed = all(error < limit for error in errors.values())
        results.append({"check": case.title, **errors, "limit": limit, "passed": passed})
        show(results[-1], f"loss {errors['loss']:.1e}  gradients {errors['gradients']:.1e}  (limit {limit:.0e})")
    return results


def check_waiting(args: Arguments, device: torch.device) -> list[dict]:
    """Whole steps under CUDA's own check for calls that make the host wait for the device."""
    results = []
    for compile in ("none", "layers", "model"):
        case = Case(f"no step waits, --compile {compile}", BFLOAT16, "auto", compile, compile != "none")
        trainer, batch = prepare_step(args, load_bert_config(args.model), case, device)
        waits = None
        for mode in ("default", "default", "error"):  # the first steps may wait: they compile and allocate memory
            torch.cuda.set_sync_debug_mode(mode)
            try:
                train_step(trainer, batch)
            except RuntimeError as error:
                waits = one_line(str(error))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        results.append({"check": case.title, "error": waits, "passed": waits is None})
        show(results[-1], waits or "")
    return results


def check_optimizer(args: Arguments, device: torch.device) -> list[dict]:
    results = check_forms(args.model, device, compiled=True)
    for result in results:
        show(result, f"update {result['update']:.1e}  (limit {result['limit']:.0e})")
    return results


def show(result: dict, text: str) -> None:
    print_line(f"{'ok  ' if result['passed'] else 'FAIL'} {result['check']:32} {text}")


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    device = select_device(args.device)
    set_num_threads()
    checks = check_gradients(args, device) + check_optimizer(args, device)
    if device.type == "cuda":
        checks += check_waiting(args, device)
    result = {"arguments": args.as_dict(), "checks": checks}
    path = write_result(args.output, f"device_checks-{device.type}-{args.model}", device, result)
    print_line(f"written to {path}")
    return 0 if all(check["passed"] for check in checks) else 1


if __name__ == "__main__":
    run_main(main)
