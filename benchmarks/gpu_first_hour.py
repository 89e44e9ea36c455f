#!/usr/bin/env python3
"""The first minutes on a GPU, in calls of under five minutes: are the results right, and then how
fast is it?

    python3 benchmarks/gpu_first_hour.py prepare                  # before, on any machine
    python3 benchmarks/gpu_first_hour.py checks --output $OUT     # on the GPU, in turn
    python3 benchmarks/gpu_first_hour.py training --output $OUT

`prepare` writes shards and losses of the CPU to .gpu/, a few megabytes that are carried to the
machine with the checkout. A call is one process: it does one item after the other, and nothing
beside them. OUT/<call>.json says what was expected, what was found and whether that fits, and
OUT/<call>.log what was printed; both are written as results come. An item that fails does not end
the others; one for which too little time is left is skipped. After CALL_SECONDS the process ends
with the stacks of its threads in the log. The exit code is 1 if something does not fit.
docs/gpu_first_hour.md explains what to do then. `--toy` runs a call with a small model on the CPU.
"""

import contextlib
import faulthandler
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import run_pretraining
from benchmarks import device_checks, pretraining_step
from benchmarks.common.results import ROOT, config_file, machine_info, read_records
from benchmarks.common.shards import (
    MAX_MASKED_OF,
    VOCAB_FILE,
    make_shards,
    pretraining_flags,
    write_random_shards,
)
from benchmarks.common.watched import watch
from utils.command_line import ArgumentParser, Arguments
from utils.device import set_num_threads
from utils.errors import UserError, one_line, run_main
from utils.files import write_json
from utils.progress import print_line

FOLDER = ROOT / ".gpu"  # of `prepare`
CALL_SECONDS = 290
UPDATES, TOY_UPDATES, COMPARED_UPDATES = 100, 6, 20
MAX_SKIPPED_UPDATES = 8  # of float16
MAX_GRAPHS = 2  # of training with the whole model compiled
MODERN_BERT = ("--config-file", "bert_configs/modernbert-mini.json", "--optimizer", "Muon")
REFERENCES = {"CPU": (), "CPU, ModernBERT, Muon": MODERN_BERT}  # runs of `prepare`
NONE, LAYERS = ("--compile", "none"), ("--compile", "layers")


@dataclass(frozen=True)
class Mode:
    """A run of BERT-mini: its flags, and what its losses are compared with: an earlier run, the
    largest relative difference, and over how many updates, None for all. seconds: expected on an
    H100.
    """

    flags: tuple[str, ...]
    reference: str | None = None
    limit: float = 0.0
    count: int | None = None
    seconds: int = 15


# In the order of what is least settled.
MODES = {
    "amp": Mode(("--amp", *NONE)),
    "fp32, dropout": Mode(NONE, "amp", 2e-2),
    "amp, by default": Mode(("--amp",), "amp", 2e-2, seconds=60),
    "amp, compiled layers": Mode(("--amp", *LAYERS), "amp", 2e-2, seconds=60),
    "fp8": Mode(("--amp", "--fp8", *NONE), "amp", 2e-2),
    "CPU offload": Mode(("--amp", "--enable-cpu-offload", *NONE), "amp", 1e-3, seconds=40),
    "fp32, no dropout": Mode(("--dropout", "0", *NONE), "CPU", 1e-4, COMPARED_UPDATES),
    "ModernBERT, Muon": Mode(
        ("--dropout", "0", *MODERN_BERT, *NONE), "CPU, ModernBERT, Muon", 1e-3, COMPARED_UPDATES
    ),
    "fp16": Mode(("--fp16", *NONE), "amp", 2e-2),
    "16-bit weights": Mode(("--use-pure-fp16", *NONE), "amp", 2e-2),
    "amp, again": Mode(("--amp", *NONE), "amp", 1e-3),
    "deterministic": Mode(("--amp", "--deterministic", *NONE), "amp", 1e-3),
    "deterministic, again": Mode(("--amp", "--deterministic", *NONE), "deterministic", 0.0),
    "triton": Mode(("--amp", "--attention", "triton", *NONE), "amp", 2e-2),
    "triton, again": Mode(("--amp", "--attention", "triton", *NONE), "triton", 0.0),
    "activation checkpointing": Mode(
        ("--amp", "--activation-checkpoint", "full", *NONE), "amp", 1e-3
    ),
    "fp8, by default": Mode(("--amp", "--fp8"), "amp", 2e-2, seconds=120),
}
ONLY_GPU = {"--fp16", "--fp8", "--enable-cpu-offload", "--attention"}


@dataclass
class Call:
    """The items of one call and what they found. folder: that of `prepare`; scratch: for
    checkpoints.
    """

    name: str
    output: Path
    folder: Path
    scratch: Path
    toy: bool
    results: list[dict] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    losses: dict[str, dict[int, float]] = field(default_factory=dict)  # of runs, by update

    @property
    def device(self) -> str:
        return "cpu" if self.toy else "cuda"

    def do(self, title: str, seconds: int, function: Callable[[], dict]) -> None:
        """Calls `function`, whose result has `ok`, unless too little time is left."""
        left = CALL_SECONDS - (time.monotonic() - self.started)
        if seconds > left and not self.toy:
            self.add({"item": title, "skipped": f"{left:.0f} s left, {seconds} s expected"})
            return
        print_line(f"-- {title}")
        started = time.monotonic()
        try:
            found = function()
        except (Exception, SystemExit) as error:
            found = {"error": one_line(f"{type(error).__name__}: {error}")[:500], "ok": False}
        self.add({"item": title, **found, "seconds": round(time.monotonic() - started, 1)})
        gc.collect()
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def add(self, result: dict) -> None:
        self.results.append(result)
        write_json(self.output / f"{self.name}.json", {"toy": self.toy, "results": self.results})
        shown = {key: value for key, value in result.items() if key not in ("item", "profile")}
        verdict = {True: "ok  ", False: "FAIL"}.get(result.get("ok"), "skip")
        print_line(f"{verdict} {result['item']}: {shown}")


class Tee:
    """Writes to a terminal and a log, at once."""

    def __init__(self, *files: Any):
        self.files = files

    def write(self, text: str) -> int:
        for file in self.files:
            file.write(text)
            file.flush()
        return len(text)

    def flush(self) -> None:
        for file in self.files:
            file.flush()

    def isatty(self) -> bool:
        return False


def shards_in(folder: Path, length: int, kind: str = "books") -> Path:
    return folder / f"{kind}-{length}" / "hdf5"


def run_flags(call: Call, name: str, *flags: object) -> list[str]:
    """run_pretraining.py's flags: BERT-mini with 64 sequences per update."""
    model, batch = ("tiny", 4) if call.toy else ("mini", 64)
    shards, updates = shards_in(call.folder, 128), TOY_UPDATES if call.toy else UPDATES
    more = {
        "report-file": call.scratch / f"{name}.json",
        "learning-rate": 1e-3,
        "seed": 7,
        "log-freq": 1,
        "num-steps-per-checkpoint": 1000,
        "device": call.device,
        "max-steps": updates,
    }
    words = [f"--{key}={value}" for key, value in more.items()]
    return pretraining_flags(model, shards, call.scratch / name, 128, batch, *words, *flags)


def losses_of(report: Path) -> dict[int, float]:
    """The losses by update. An update that float16 skipped has the number of the one before."""
    records = read_records(report)
    steps = [record for record in records if record["step"] and "loss" in record["data"]]
    return {record["step"][-1]: record["data"]["loss"] for record in steps}


def difference(found: dict[int, float], expected: dict[int, float], count: int | None) -> float:
    """The largest relative difference of the losses of the updates that both have."""
    steps = sorted(found.keys() & expected.keys() - {0})[:count]
    if len(steps) < min(count or len(expected), len(expected)) - MAX_SKIPPED_UPDATES:
        return float("inf")
    return max(abs(found[step] / expected[step] - 1) for step in steps)


def prepare(call: Call) -> None:
    """Shards of the sample books, and the losses of the first updates on the CPU."""
    for length in (128,) if call.toy else (128, 512):
        books = shards_in(call.folder, length)
        if not books.is_dir():
            books.parent.mkdir(exist_ok=True)
            make_shards(books.parent, length)
    updates = TOY_UPDATES if call.toy else COMPARED_UPDATES
    flags = ("--device", "cpu", "--steps-this-run", updates, "--dropout", 0)
    for name, more in REFERENCES.items():

        def run(name: str = name, more: tuple[str, ...] = more) -> dict:
            code = run_pretraining.main(run_flags(call, name, *flags, *more))
            losses = losses_of(call.scratch / f"{name}.json")
            write_json(call.folder / f"{name}.json", losses)
            return {"ok": not code and len(losses) == updates}

        call.do(name, 0, run)


def checks(call: Call) -> None:
    """The checks of device_checks.py: of steps, attention, optimizers and waiting."""
    lengths = (24,) if call.toy else (128, 512)
    first = ("attention", "Lamb", "AdamW", "Muon", "NorMuon", "no step waits", "compiled", "fp16")
    for length in lengths:
        words = ["--device", call.device, "--seq-length", str(length)]
        args = device_checks.parse_arguments(
            [*words, "--model", "tiny", "--batch-size", "4"] if call.toy else words
        )
        found = device_checks.all_checks(args, torch.device(call.device))
        titles = sorted(found, key=lambda title: not title.startswith(first))
        if length == lengths[0]:
            chosen = titles
        else:
            chosen = [title for title in titles if title.startswith("attention")]
        for title in chosen:
            if call.toy and "compile" in title:
                continue

            def check(title: str = title, found: dict = found) -> dict:
                result = device_checks.run_check(title, found[title])
                return {**result, "ok": result["passed"]}

            seconds = 60 if "compile" in title else 10
            call.do(f"{title}, length {length}", seconds, check)


def training(call: Call) -> None:
    """Runs in many modes, whose losses are compared."""
    for name in REFERENCES:
        path = call.folder / f"{name}.json"
        if not path.is_file():
            raise UserError(
                f"{path} is missing: run `gpu_first_hour.py prepare` first and carry {call.folder}"
            )
        call.losses[name] = {int(step): loss for step, loss in json.loads(path.read_text()).items()}
    for name, mode in MODES.items():
        if not (call.toy and ONLY_GPU & {*mode.flags}):
            call.do(name, mode.seconds, partial(train_in_mode, call, name, mode))


def train_in_mode(call: Call, name: str, mode: Mode) -> dict:
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found = watch("none", "run_pretraining", run_flags(call, name, *mode.flags))
    report = call.scratch / f"{name}.json"
    losses = call.losses[name] = losses_of(report)
    steps = [r["data"]["step_seconds"] for r in read_records(report) if "loss" in r["data"]]
    result = {
        "graphs": found["graphs"][-1] - graphs,
        "checkpoints": found["checkpoints"],
        "peak_gib": found["peak"] / 2**30,
        "ms_per_update": 1e3 * statistics.median(steps),
        "last_loss": losses[max(losses)],
        "profile": found["profile"],
    }
    is_right = all(found["checkpoints"].values())
    if "--compile" not in mode.flags and "--fp8" not in mode.flags:
        is_right = is_right and result["graphs"] <= MAX_GRAPHS
    if mode.reference in call.losses:
        error = difference(losses, call.losses[mode.reference], mode.count)
        result |= {"reference": mode.reference, "difference": error, "limit": mode.limit}
        is_right = is_right and error <= mode.limit
    return result | {"ok": is_right}


def tasks(call: Call) -> None:
    """Faults in an update, resuming, and fine-tuning."""
    amp = () if call.toy else ("--amp", *NONE)  # slow on many CPUs
    call.do(
        "memory runs out", 15, partial(run_out_of_memory, call, run_flags(call, "memory", *amp))
    )
    call.do("SIGTERM, and resumed", 30, partial(stop_and_resume, call, amp))
    model = (
        "--config-file",
        config_file("tiny" if call.toy else "mini"),
        "--vocab-file",
        VOCAB_FILE,
    )
    shared = (*model, "--output-dir", call.scratch / "tasks", "--do-train", "--do-eval", *amp)
    shared += ("--train-batch-size", 8, "--max-steps", 6, "--device", call.device)
    for name, count in (("train", 40), ("dev", 20)):
        rows = "good ship,good\nbad ship,bad\n" * count
        (call.scratch / f"{name}.csv").write_text(f"text,label\n{rows}")
        (call.scratch / f"{name}.txt").write_text("Good B-ship\nships I-ship\nsail O\n\n" * count)
    tables, texts = (
        [call.scratch / f"{name}.{kind}" for name in ("train", "dev")] for kind in ("csv", "txt")
    )
    squad = "data/sample/squad/{}-v1.1.json"
    columns = ("--text-column", "text", "--label-column", "label", "--eval-steps", 3)
    cases = {
        "SQuAD": ("run_squad", squad.format("train"), squad.format("dev"), ()),
        "classes": ("run_glue", *tables, columns),
        "NER": ("run_glue", *texts, ("--task-name", "ner")),
    }
    for name, (program, train, dev, flags) in cases.items():
        words = [*shared, "--train-file", train, "--eval-file", dev, *flags]

        def run(program: str = program, words: list = words) -> dict:
            found = watch("none", program, [*map(str, words)])
            return {"checkpoints": found["checkpoints"], "ok": all(found["checkpoints"].values())}

        call.do(name, 30, run)


def run_out_of_memory(call: Call, flags: list[str]) -> dict:
    try:
        watch("memory", "run_pretraining", flags)
    except UserError as error:
        return {"error": str(error), "ok": "out of memory" in str(error)}
    return {"ok": False}


def stop_and_resume(call: Call, flags: tuple[str, ...]) -> dict:
    watch("none", "run_pretraining", run_flags(call, "whole", *flags))
    stopped = run_flags(call, "resumed", "--resume-from-checkpoint", *flags)
    for fault in ("SIGTERM", "none"):
        watch(fault, "run_pretraining", stopped)
    found, expected = (losses_of(call.scratch / f"{name}.json") for name in ("resumed", "whole"))
    error = difference(found, expected, None)
    return {"difference": error, "limit": 1e-3, "ok": error < 1e-3 and len(found) == len(expected)}


# Of pretraining_step.py: model, length, sequences per micro-batch, full sequences or those of the
# books, what is compiled, and the predicted tokens/s of this project on an H100.
SPEEDS = {
    "BERT-large, 128, full": ("large", 128, 256, "full", "model", 215_000),
    "BERT-large, 128, real lengths": ("large", 128, 256, "books", "model", 215_000),
    "ModernBERT-base, 1,024, full": ("modernbert-base", 1024, 32, "full", "model", 300_000),
    "BERT-large, 512, real lengths": ("large", 512, 64, "books", "model", 190_000),
    "ModernBERT-base, 8,192, full": ("modernbert-base", 8192, 4, "full", "model", 0),  # unknown
    "BERT-large, 128, full, eager": ("large", 128, 256, "full", "none", 175_000),
}


def speed(call: Call) -> None:
    """Updates of four micro-batches with AdamW, this project's and transformers'."""
    for name, (model, length, batch, kind, compiles, predicted) in SPEEDS.items():
        if call.toy:
            model, length, batch, compiles, predicted = "tiny", 128, 4, "none", 0
        shards = shards_in(call.folder, length, kind)
        if kind == "full" and not shards.is_dir():
            shards = call.scratch / f"full-{length}"
            write_random_shards(
                shards, 2 * 4 * batch, length, MAX_MASKED_OF.get(length, length * 3 // 10)
            )
        args = Namespace(
            model=model,
            device=call.device,
            seq_length=length,
            batch_size=batch,
            gradient_merge_steps=4,
            amp=not call.toy,
            compile=compiles,
            rounds=1,
            steps=2,
        )
        rates: dict[str, float] = {}
        for side in (pretraining_step.ThisProject, pretraining_step.Transformers):
            title = f"{name}: {side.__name__}"
            measure = partial(measure_speed, side, args, shards, rates, predicted)
            call.do(title, 90 if compiles != "none" else 40, measure)


def measure_speed(
    kind: type[pretraining_step.Implementation],
    args: Namespace,
    shards: Path,
    rates: dict[str, float],
    predicted: float,
) -> dict:
    started = time.perf_counter()
    implementation = kind(args, shards)
    implementation.turn(0)
    first = time.perf_counter() - started
    turn = implementation.turn(1)
    rate = rates[kind.__name__] = turn["tokens"] / turn["seconds"]
    result: dict[str, Any] = {
        "tokens_per_second": round(rate),
        "parts": turn["parts"],
        "settings": implementation.settings(),
        "seconds_to_the_second_turn": first,
    }
    if torch.cuda.is_available():
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if len(rates) == 1:  # more than 15% below: profile before anything else
        return result | {"predicted": predicted, "ok": rate > 0.85 * predicted}
    ratio = rates["ThisProject"] / rate
    return result | {"ratio": ratio, "ok": ratio > 1 or args.device == "cpu"}


def ranks(call: Call) -> None:
    """On all GPUs of the machine: a rank has no memory left, is killed, or stops."""
    count = 2 if call.toy else torch.cuda.device_count()
    launcher = ["scripts/torchrun.py", "--standalone", f"--nproc-per-node={count}"]
    for strategy in ((), ("--data-parallel-shard-degree", "-1")):
        for fault in ("memory", "SIGKILL", "SIGSTOP"):
            name = f"{fault} {' '.join(strategy)}"
            more = ("--max-steps", 8, "--collective-timeout-minutes", 0.5, *NONE, *strategy)
            flags = run_flags(call, name, *more)
            watched = ["benchmarks/common/watched.py", call.scratch / "result", fault]
            command = [sys.executable, *launcher, *watched, "run_pretraining", *flags]

            def run(command: list = command, fault: str = fault) -> dict:
                done = subprocess.run(
                    [*map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=90
                )
                words = "out of memory" if fault == "memory" else "error: "
                printed = done.stdout + done.stderr
                return {"log": printed[-2000:], "ok": bool(done.returncode) and words in printed}

            call.do(name, 45, run)


CALLS: dict[str, Callable[[Call], None]] = {
    function.__name__: function for function in (prepare, checks, training, speed, tasks, ranks)
}


def parse_arguments(argv: list[str] | None) -> Arguments:
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("call", choices=tuple(CALLS), help="which part")
    parser.add_argument(
        "--output", type=Path, default=Path("gpu_results"), help="folder for logs and results"
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder that `prepare` writes")
    parser.add_argument(
        "--toy", action="store_true", help="a small model on the CPU, to try the call"
    )
    return parser.parse_args(argv)


@contextlib.contextmanager
def logged(path: Path, seconds: float | None) -> Iterator[None]:
    """Copies what is printed to `path`; after `seconds` ends the process, with its stacks there."""
    with path.open("w", buffering=1) as log:
        if seconds is not None:
            faulthandler.dump_traceback_later(seconds, exit=True, file=log)
        try:
            with (
                contextlib.redirect_stdout(Tee(sys.stdout, log)),
                contextlib.redirect_stderr(Tee(sys.stderr, log)),
            ):
                yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    is_before = args.call == "prepare"
    output = (args.folder if is_before else args.output).resolve()
    for folder in (output, args.folder):
        folder.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    limit = None if args.toy or is_before else CALL_SECONDS
    with tempfile.TemporaryDirectory() as scratch, logged(output / f"{args.call}.log", limit):
        set_num_threads()
        call = Call(args.call, output, args.folder.resolve(), Path(scratch), args.toy)
        print_line(str(machine_info(torch.device("cpu" if is_before else call.device))))
        CALLS[args.call](call)
    return 0 if all(result.get("ok", True) for result in call.results) else 1


if __name__ == "__main__":
    run_main(main)
