#!/usr/bin/env python3
"""Compares attention implementations for sequences of unequal lengths: correctness first, then speed.

    python3 benchmarks/attention.py --device cuda --seq-length 512
    python3 benchmarks/attention.py --device cpu --seq-length 128 --tokens 2048 --heads 4

The implementations are those of attention.py and others of torch (common/attention_implementations.py), with dropout
and without. Output, gradient and dropout mask of each are compared with a float64 loop over the sequences
(common/attention_check.py). One that cannot run or is wrong is listed with the reason and not timed. Each has its own
process, so that an error on the device stops no other. The exit code is 1 if one is wrong.

FLOPs are those of the matrix products: 4 * s^2 * H * D for a sequence of s tokens forward, 2.5 times as many backward,
where the scores are computed again. The effective bandwidth counts what must be read and written once: queries, keys,
values and output forward; these and four gradients backward. `host` is the time of the calls on the host: if it equals
the time of forward and backward, the device waits for the host.
"""

import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common.attention_check import Attend, check
from benchmarks.common.attention_implementations import IMPLEMENTATIONS, MEASURED
from benchmarks.common.results import format_quartiles, precision_name, quartiles, write_result
from benchmarks.common.shards import PREDICTIONS, make_shards
from benchmarks.common.worker import Worker, take_turns
from data_loading.pretraining_dataset import PretrainingDataset
from utils.command_line import ArgumentParser, Arguments, BooleanFlag, fraction_below_one, positive_int
from utils.device import select_device, set_num_threads
from utils.errors import UserError, one_line, run_main
from utils.measure import Stopwatch
from utils.progress import print_line

STREAMS = 3  # to measure; as many warmup rounds, since each has its own shapes
CALLS = 8  # per turn, one after the other, so that the host can run ahead
VOCAB_SIZE = 30522  # of the sample corpus


def parse_arguments(argv=None) -> Arguments:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--lengths", choices=("real", "full"), default="real", help="lengths of the shards' samples, or all full")
    add("--seq-length", type=int, choices=sorted(PREDICTIONS), default=512, help="longest sequence")
    add("--input-dir", type=Path, help="folder of shards; by default made from the sample corpus")
    add("--tokens", type=positive_int, default=32768, help="most tokens of a stream")
    add("--heads", type=positive_int, default=16, help="attention heads")
    add("--head-size", type=positive_int, default=64, help="size of a head")
    add("--dropout", type=fraction_below_one, default=0.1, help="dropout probability; 0 is measured too")
    add("--amp", action=BooleanFlag, default=True, help="bfloat16; float32 with --no-amp")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="device")
    add("--rounds", type=positive_int, default=15, help="turns of each implementation")
    add("--output", type=Path, help="result file; by default in benchmarks/results")
    args = parser.parse_args(argv)
    if args.tokens < args.seq_length:
        raise UserError(f"--tokens {args.tokens} is less than a sequence of --seq-length {args.seq_length}: raise it")
    return args


class Implementation:
    """An attention implementation in its process, with the streams that all get."""

    def __init__(self, name: str, args: Arguments, checked: list[int], measured: list[list[int]]):
        self.args, self.device = args, select_device(args.device)
        self.stopwatch = Stopwatch(self.device)
        self.prepare = IMPLEMENTATIONS[name]
        self.checked, self.measured = checked, measured
        self.inputs: list[tuple[Attend, Tensor, Tensor]] = []

    def make_input(self, lengths: list[int]) -> tuple[Attend, Tensor, Tensor]:
        """The prepared attention, random queries, keys and values [T, 3, H, D], and a gradient of the output."""
        cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=self.device)
        options = {"dtype": torch.bfloat16 if self.args.amp else torch.float32, "device": self.device}
        shape = self.args.heads, self.args.head_size
        qkv_T3HD = torch.randn(sum(lengths), 3, *shape, **options).requires_grad_()
        attend = self.prepare(cu_seqlens, self.args.seq_length, sum(lengths))
        return attend, qkv_T3HD, torch.randn(sum(lengths), *shape, **options)

    def check(self, dropout_prob: float) -> dict:
        """The figures of attention_check.check, or why there are none."""
        torch.manual_seed(0)
        try:
            return check(*self.make_input(self.checked), self.checked, dropout_prob)
        except Exception as error:  # anything that this release of torch does not support here
            reason = (str(error).splitlines() or [""])[0]
            return {"cannot_run": one_line(f"{type(error).__name__}: {reason}")}

    def turn(self, dropout_prob: float, number: int) -> dict[str, float]:
        """Milliseconds per call."""
        if not self.inputs:
            self.inputs = [self.make_input(lengths) for lengths in self.measured]
        attend, qkv_T3HD, grad_THD = self.inputs[number % STREAMS]
        with self.stopwatch.lap("forward"):
            for _ in range(CALLS):
                attend(qkv_T3HD, dropout_prob)
        started = time.perf_counter()
        with self.stopwatch.lap("both"):
            for _ in range(CALLS):
                torch.autograd.grad(attend(qkv_T3HD, dropout_prob), qkv_T3HD, grad_THD)
        seconds = {"host": time.perf_counter() - started}
        seconds |= {kind: lap for kind, (lap,) in self.stopwatch.seconds().items()}
        return {kind: 1e3 * lap / CALLS for kind, lap in seconds.items()}


def sample_lengths(args: Arguments) -> np.ndarray:
    """The lengths of all samples that streams are drawn from."""
    if args.lengths == "full":
        return np.array([args.seq_length])
    with tempfile.TemporaryDirectory() as scratch:
        dataset = PretrainingDataset(args.input_dir or make_shards(Path(scratch), args.seq_length), VOCAB_SIZE)
        if dataset.sequence_length != args.seq_length:
            raise UserError(
                f"{args.input_dir}: its samples have length {dataset.sequence_length}, not {args.seq_length}: "
                f"give the same --seq-length"
            )
        return dataset.read(np.arange(len(dataset))).lengths


def draw_stream(lengths: np.ndarray, tokens: int, seed: int) -> list[int]:
    """The lengths of a stream's sequences, the longest first, as packing.pack has them."""
    drawn = np.random.default_rng(seed).choice(lengths, tokens // int(lengths.min()))
    return sorted(drawn[np.cumsum(drawn) <= tokens].tolist(), reverse=True)


def check_worker(worker: Worker, dropout_prob: float) -> dict:
    try:
        return worker.call("check", dropout_prob)
    except UserError as error:  # its process has ended
        return {"cannot_run": str(error)}


def measure(args: Arguments, workers: dict[str, Worker], streams: list[list[int]], dropout_prob: float) -> dict:
    """Checks all implementations, and times those that pass."""
    results = {name: check_worker(worker, dropout_prob) for name, worker in workers.items()}
    passed = [name for name, found in results.items() if not (found.get("cannot_run") or found.get("wrong"))]
    turns = take_turns(
        {name: partial(workers[name].call, "turn", dropout_prob) for name in passed},
        args.rounds,
        f"dropout {dropout_prob:g}",
        warmup_rounds=STREAMS,
    )
    works = [work(args, streams[number % STREAMS]) for number in range(args.rounds)]
    for name, found in turns.items():
        results[name]["milliseconds"] = {
            kind: quartiles([turn[kind] for turn in found]) for kind in ("forward", "both", "host")
        }
        for rate in ("tflops", "effective_gigabytes_per_second"):
            results[name][rate] = {
                kind: quartiles([1e3 * w[rate][kind] / t[kind] for w, t in zip(works, found, strict=True)])
                for kind in ("forward", "both")
            }
    return results


def work(args: Arguments, lengths: list[int]) -> dict[str, dict[str, float]]:
    """TFLOPs and gigabytes of a call; see the top of this file."""
    hidden = args.heads * args.head_size
    tflops = 4 * hidden * sum(length**2 for length in lengths) / 1e12
    gigabytes = hidden * sum(lengths) * (2 if args.amp else 4) / 1e9
    return {
        "tflops": {"forward": tflops, "both": 3.5 * tflops},
        "effective_gigabytes_per_second": {"forward": 4 * gigabytes, "both": 12 * gigabytes},
    }


def show_results(dropout_prob: float, results: dict[str, dict]) -> None:
    print_line(f"dropout {dropout_prob:g}")
    for name, found in results.items():
        if reason := found.get("cannot_run"):
            print_line(f"  --   {name:16} cannot run: {reason}")
            continue
        errors = f"output {found['output']:.1e}, gradient {found['gradient']:.1e} (limit {found['limit']:.0e})"
        dropped = f", {found['dropped']:.4f} dropped" if "dropped" in found else ""
        print_line(f"  {'FAIL' if found['wrong'] else 'ok  '} {name:16} {errors}{dropped}")
    timed = {name: found for name, found in results.items() if "milliseconds" in found}
    if timed:
        print_line(
            f"  {'milliseconds':16}{'forward (quartiles)':>28}{'with backward':>28}{'host':>9}"
            f"{'TFLOP/s':>18}{'effective GB/s':>18}"
        )
    for name, found in sorted(timed.items(), key=lambda item: item[1]["milliseconds"]["both"]["median"]):
        milliseconds = found["milliseconds"]
        forward, both = (format_quartiles(milliseconds[kind], ".3f") for kind in ("forward", "both"))
        flops, bandwidth = (
            " ".join(f"{found[rate][kind]['median']:{spec}}" for kind in ("forward", "both"))
            for rate, spec in (("tflops", "7.3g"), ("effective_gigabytes_per_second", "7.0f"))
        )
        host = milliseconds["host"]["median"]
        print_line(f"  {name:16}{forward:>28}{both:>28}{host:9.3f}{flops:>18}{bandwidth:>18}")


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    device = select_device(args.device)
    set_num_threads()
    lengths = sample_lengths(args)
    checked = draw_stream(lengths, min(args.tokens, 8 * args.seq_length), seed=0)
    streams = [draw_stream(lengths, args.tokens, seed) for seed in range(1, 1 + STREAMS)]
    for stream in streams:
        print_line(f"{args.lengths} lengths: {len(stream)} sequences, {sum(stream):,} tokens")
    workers = {
        name: Worker(Implementation, (name, args, checked, streams), same_settings=True)
        for name in MEASURED[device.type]
    }
    results = {}
    for dropout_prob in sorted({0.0, args.dropout}):
        results[f"{dropout_prob:g}"] = measure(args, workers, streams, dropout_prob)
        show_results(dropout_prob, results[f"{dropout_prob:g}"])
    for worker in workers.values():
        worker.close()
    result = {
        "arguments": args.as_dict(),
        "streams": [{"sequences": len(stream), "tokens": sum(stream)} for stream in streams],
        "dropout": results,
    }
    name = f"attention-{device.type}-{args.lengths}-{args.seq_length}-{precision_name(args.amp)}"
    print_line(f"written to {write_result(args.output, name, device, result)}")
    return 1 if any(found.get("wrong") for part in results.values() for found in part.values()) else 0


if __name__ == "__main__":
    run_main(main)
