#!/usr/bin/env python3
"""Whether the fast paths compute the same as the plain ones on this device, and then how fast they are.

    python3 benchmarks/device_checks.py --device cuda --measure large:128 large:512 large:512:full --output-dir "$OUT"
    python3 benchmarks/device_checks.py --model tiny --device cpu

Each check compares the loss and all gradients of one batch of unequal lengths, dropout 0, by ||difference|| over
||reference||. The reference is the padded attention in float32. The forms of LAMB are held against each other in the
same way, and on a GPU whole steps must not make the host wait. Then benchmarks/optimizer_step.py runs for every model
of --measure-optimizer, benchmarks/attention.py for every length of --measure-attention, and
benchmarks/pretraining_step.py for every MODEL:LENGTH of --measure: bfloat16 by autocast, the same compiled, and 16-bit
weights compiled. Exit code 1 where a check fails; results are JSON files.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import attention, optimizer_step, pretraining_step
from benchmarks.contenders import RandomSamples, make_trainer, train_on
from benchmarks.peers import MODELS, surroundings, write_result
from modeling import BertConfig, BertForPreTraining
from run_pretraining import Pretraining
from run_setup import compile_model
from token_stream import Limits, make_step_batch
from trainer import Runtime, to_device
from utils import command_line
from utils.distributed import Precision, Processes, select_device, use_threads
from utils.errors import one_line, run_main
from utils.logger import Reporter
from utils.progress import print_line

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
FLOAT32, BFLOAT16, PURE_BFLOAT16 = Precision(), Precision(torch.bfloat16), Precision(torch.bfloat16, pure=True)


def measured_step(text: str) -> tuple[str, int, list[str]]:
    """Model, length, and `full` where it is said."""
    model, _, rest = text.partition(":")
    length, _, full = rest.partition(":")
    lengths = [str(known) for known in pretraining_step.PREDICTIONS]
    if model not in MODELS or length not in lengths or full not in ("", "full"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not one of {', '.join(sorted(MODELS))}, then :{' or :'.join(lengths)}, then :full or nothing"
        )
    return model, int(length), [full] if full else []


def parse_arguments(argv=None) -> command_line.Arguments:
    parser = command_line.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="base", help="of the checks")
    parser.add_argument("--seq-length", type=command_line.positive_int, default=128, help="of the checks")
    parser.add_argument("--batch-size", type=command_line.positive_int, default=16, help="of the checks")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where")
    parser.add_argument("--measure-optimizer", nargs="*", default=[], metavar="MODEL", help="updates to measure")
    parser.add_argument(
        "--measure-attention",
        nargs="*",
        type=int,
        choices=sorted(pretraining_step.PREDICTIONS),
        default=[],
        metavar="LENGTH",
        help="attention to measure, at this length",
    )
    parser.add_argument(
        "--measure",
        nargs="*",
        type=measured_step,
        default=[],
        metavar="MODEL:LENGTH[:full]",
        help="steps to measure; full: of sequences of this length only",
    )
    parser.add_argument(
        "--measure-tokens", type=command_line.positive_int, default=2**15, help="places for tokens in a micro-batch"
    )
    parser.add_argument("--measure-micro-batches", type=command_line.positive_int, default=8, help="of a measured step")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "benchmarks" / "results", help="for JSON files")
    return parser.parse_args(argv)


def loss_and_gradients(
    model: BertForPreTraining, batches: list[dict], totals: tuple[int, int], seq_length: int, precision: Precision
) -> dict[str, torch.Tensor]:
    """The loss of the whole batch and every parameter's gradient, in float64."""
    device = next(model.parameters()).device
    task = Pretraining(True, seq_length)
    model.zero_grad(set_to_none=True)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    for micro_batch in batches:
        with precision.context(device):
            sums = task.sums(model, to_device(micro_batch, device))
        loss = task.loss(sums, *totals)
        loss.backward()
        loss_sum += loss.detach()
    # The keys' biases have no gradient in exact arithmetic, only rounding.
    gradients = {n: p.grad.double() for n, p in model.named_parameters() if not n.endswith("key.bias")}
    return {"loss": loss_sum, **gradients}


def relative_errors(found: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> dict[str, float]:
    """Of the loss, and of all gradients as one vector."""
    names = [name for name in reference if name != "loss"]
    difference = torch.stack([(found[name] - reference[name]).norm() for name in names]).norm()
    whole = torch.stack([reference[name].norm() for name in names]).norm()
    loss = (found["loss"] - reference["loss"]).abs() / reference["loss"].abs()
    return {"loss": float(loss), "gradients": float(difference / whole)}


def run_checks(args: command_line.Arguments, device: torch.device) -> list[dict]:
    name = MODELS[args.model]
    values = BertConfig.from_json_file(ROOT / "bert_configs" / f"{name}.json").to_dict()
    bert_config = BertConfig(**{**values, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
    torch.manual_seed(0)
    model = BertForPreTraining(bert_config).to(device)
    samples = RandomSamples(args.batch_size, args.seq_length, bert_config.vocab_size)
    indices = np.arange(args.batch_size)
    micro_batches = {
        fixed: make_step_batch(
            samples, indices, Limits.for_batch(args.batch_size, args.seq_length, args.seq_length // 7 + 1, fixed)
        ).micro_batches
        for fixed in (False, True)
    }
    totals = args.batch_size, int(samples.sizes(indices)[:, 1].sum())

    def compute(precision: Precision, implementation: str, fixed: bool = False) -> dict[str, torch.Tensor]:
        model.bert.attention_implementation = implementation
        return loss_and_gradients(model, micro_batches[fixed], totals, args.seq_length, precision)

    def of_a_copy(precision: Precision, what: str) -> dict[str, torch.Tensor]:
        # A fresh model, since compiling and narrower weights are for good; the same weights.
        copy = BertForPreTraining(bert_config).to(device)
        copy.load_state_dict(model.state_dict())
        if precision.pure:
            copy.to(precision.dtype)
        compile_model(copy, what)
        return loss_and_gradients(copy, micro_batches[what != "none"], totals, args.seq_length, precision)

    reference = compute(FLOAT32, "padded")
    auto = "flash" if device.type == "cuda" else "by_length"
    checks: dict[str, tuple[Precision, Callable[[], dict]]] = {
        "padded, bf16": (BFLOAT16, lambda: compute(BFLOAT16, "padded")),
        f"{auto}, bf16": (BFLOAT16, lambda: compute(BFLOAT16, auto)),
        f"{auto}, bf16, fixed sizes": (BFLOAT16, lambda: compute(BFLOAT16, auto, fixed=True)),
        "padded, fp32, fixed sizes": (FLOAT32, lambda: compute(FLOAT32, "padded", fixed=True)),
        "compiled layers, bf16": (BFLOAT16, lambda: of_a_copy(BFLOAT16, "layers")),
        "compiled model, bf16": (BFLOAT16, lambda: of_a_copy(BFLOAT16, "model")),
        "16-bit weights": (PURE_BFLOAT16, lambda: of_a_copy(PURE_BFLOAT16, "none")),
        "compiled, 16-bit weights": (PURE_BFLOAT16, lambda: of_a_copy(PURE_BFLOAT16, "model")),
    }
    if device.type == "cpu":
        checks["by_length, fp32"] = (FLOAT32, lambda: compute(FLOAT32, "by_length"))
    results = []
    for title, (precision, found) in checks.items():
        errors = relative_errors(found(), reference)
        limit = TOLERANCES[precision.dtype]
        passed = all(error < limit for error in errors.values())
        print_line(
            f"{'ok  ' if passed else 'FAIL'} {title:28} loss {errors['loss']:.1e}  gradients {errors['gradients']:.1e}"
            f"  (limit {limit:.0e})"
        )
        results.append({"check": title, **errors, "limit": limit, "passed": passed})
    return results


def run_waiting_checks(args: command_line.Arguments, device: torch.device) -> list[dict]:
    """Whole steps with dropout, LAMB and what `--compile` does, under CUDA's own check for calls that make the host
    wait for the device."""
    results = []
    for what in ("none", "layers", "model"):
        bert_config = BertConfig.from_json_file(ROOT / "bert_configs" / f"{MODELS[args.model]}.json")
        model = BertForPreTraining(bert_config).to(device)
        runtime = Runtime(device, BFLOAT16, Processes(), Reporter(None))
        trainer = make_trainer(model, Pretraining(True, args.seq_length), "Lamb", runtime)
        compile_model(model, what)
        limits = Limits.for_batch(args.batch_size, args.seq_length, args.seq_length // 7 + 1, what != "none")
        samples = RandomSamples(args.batch_size, args.seq_length, bert_config.vocab_size)
        batch = make_step_batch(samples, np.arange(args.batch_size), limits, pin_memory=True)
        waits = None
        for mode in ("default", "default", "error"):  # first steps may wait: they compile and take memory
            torch.cuda.set_sync_debug_mode(mode)
            try:
                train_on(trainer, batch)
            except RuntimeError as error:
                waits = one_line(str(error))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        print_line(f"{'ok  ' if waits is None else 'FAIL'} no step waits, --compile {what:12} {waits or ''}")
        results.append({"check": f"no step waits, --compile {what}", "error": waits, "passed": waits is None})
    return results


def run_optimizer_checks(args: command_line.Arguments, device: torch.device) -> list[dict]:
    results = optimizer_step.check_forms(args.model, device, compiled=True)
    for check in results:
        verdict = "ok  " if check["passed"] else "FAIL"
        print_line(f"{verdict} {check['check']:28} update {check['update']:.1e}  (limit {check['limit']:.0e})")
    return results


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    device = select_device(args.device)
    use_threads()
    result = {"surroundings": surroundings(device), "arguments": args.as_dict()}
    result["checks"] = run_checks(args, device) + run_optimizer_checks(args, device)
    if device.type == "cuda":
        result["checks"] += run_waiting_checks(args, device)
    path = write_result(args.output_dir / f"device_checks-{device.type}-{args.model}.json", "device_checks", result)
    print_line(f"written to {path}")
    for model in args.measure_optimizer:
        output = args.output_dir / f"optimizer_step-{device.type}-{model}.json"
        optimizer_step.main(["--model", model, "--device", args.device, "--output", str(output)])
    for length in args.measure_attention:
        output = args.output_dir / f"attention-{device.type}-{length}.json"
        attention.main(["--seq-length", str(length), "--device", args.device, "--output", str(output)])
    for model, length, full in args.measure:
        for flags in (["--amp"], ["--amp", "--compile"], ["--use-pure-fp16", "--compile"]):
            name = "-".join(["pretraining_step", device.type, model, str(length), *full, *(f[2:] for f in flags)])
            options = {
                "--model": model,
                "--seq-length": length,
                "--batch-size": max(1, args.measure_tokens // length),
                "--gradient-merge-steps": args.measure_micro_batches,
                "--steps": 1,
                "--device": args.device,
                "--output": args.output_dir / f"{name}.json",
            }
            words = [str(word) for option in options.items() for word in option]
            pretraining_step.main([*words, *flags, *(f"--{word}" for word in full)])
    return 0 if all(check["passed"] for check in result["checks"]) else 1


if __name__ == "__main__":
    run_main(main)
