#!/usr/bin/env python3
"""The first minutes on a GPU, in calls of under five minutes: are the results right, and then how
fast is it?

    python3 benchmarks/gpu_first_hour.py prepare                  # before, on any machine
    python3 benchmarks/gpu_first_hour.py checks --output $OUT     # on the GPU, in turn
    python3 benchmarks/gpu_first_hour.py training --output $OUT

`prepare` writes shards to .gpu/, about 25 MB that are carried to the machine with the checkout. A
call is one process: it does one item after the other, and nothing
beside them. OUT/<call>.json says what was expected, what was found and whether that fits, and is
written as results come. An item that fails does not end the others, unless CUDA no longer works;
one for which too little time is left is skipped, and --continue does what has no result yet. After
--seconds the process ends and prints the stacks of its threads. The exit code is 1 if something
does not fit.
benchmarks/README.md says what follows. `--toy` runs a call with a small model on the CPU.
"""

import faulthandler
import os
import shutil
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import run_pretraining
from benchmarks import pretraining_step
from benchmarks.common.calls import Item, do_items, read_results
from benchmarks.common.device_checks import Sizes, all_checks, attention_checks
from benchmarks.common.results import ROOT, config_file, machine_info, read_records
from benchmarks.common.shards import (
    VOCAB_FILE,
    make_shards,
    max_masked,
    pretraining_flags,
    write_random_shards,
)
from benchmarks.common.transformers_training import silence_imports
from benchmarks.common.watched import watch
from bert_recipe.utils.command_line import (
    REQUIRED,
    ArgumentParser,
    Arguments,
    Computed,
    Flag,
    positive_int,
)
from bert_recipe.utils.device import select_device, set_num_threads
from bert_recipe.utils.errors import UserError, run_main
from bert_recipe.utils.progress import print_line

FOLDER = ROOT / ".gpu"  # of `prepare`
CALL_SECONDS, NO_LIMIT = 290, 24 * 3600
UPDATES, TOY_UPDATES, COMPARED_UPDATES = 100, 6, 20
MAX_SKIPPED_UPDATES = 8  # of float16
MAX_GRAPHS = 2  # of training with the whole model compiled
NONE = ("--compile", "none")


@dataclass(frozen=True)
class Call:
    """Where a call works: folder: that of `prepare`; scratch: for checkpoints. losses: of its runs
    so far.
    """

    folder: Path
    scratch: Path
    toy: bool
    device: str
    losses: dict[str, list[float]] = field(default_factory=dict)

    def shards(self, length: int, kind: str = "books") -> Path:
        return self.folder / f"{kind}-{length}" / "hdf5"

    def run_flags(self, name: str, *flags: object) -> list[str]:
        """run_pretraining.py's flags: BERT-mini with 64 sequences per update."""
        model, batch, updates = ("tiny", 4, TOY_UPDATES) if self.toy else ("mini", 64, UPDATES)
        more = {
            "report-file": self.scratch / f"{name}.json",
            "learning-rate": 1e-3,
            "seed": 7,
            "log-freq": 1,
            "num-steps-per-checkpoint": 1000,
            "device": self.device,
            "max-steps": updates,
        }
        words = [f"--{key}={value}" for key, value in more.items()]
        output = self.scratch / name
        return pretraining_flags(model, self.shards(128), output, 128, batch, *words, *flags)

    def losses_of(self, name: str) -> list[float]:
        """Of all batches, those of skipped updates too."""
        records = read_records(self.scratch / f"{name}.json")
        return [record["data"]["loss"] for record in records if "loss" in record["data"]]


def difference(losses: list[float], expected: list[float], first: int = 0) -> float:
    """The largest relative difference of the losses of the same batches, from `first` on."""
    if len(losses) < len(expected):
        return float("inf")
    pairs = [*zip(losses, expected, strict=False)]
    return max(abs(loss / other - 1) for loss, other in pairs[first:])


# --- prepare, checks ------------------------------------------------------------------------------

MODERN_BERT = ("--config-file", "bert_configs/modernbert-mini.json", "--optimizer", "Muon")
REFERENCES = {"CPU": (), "CPU, ModernBERT, Muon": MODERN_BERT}


def prepare(call: Call) -> Iterator[Item]:
    """Shards of the sample books."""
    for length in (128,) if call.toy else (128, 512, 8192):
        if not call.shards(length).is_dir():
            yield Item(f"shards of {length} tokens", 0, partial(prepare_shards, call, length))


def prepare_shards(call: Call, length: int) -> dict:
    folder = call.shards(length).parent
    made = folder.with_suffix(".made")
    shutil.rmtree(made, ignore_errors=True)  # of a call that was interrupted
    made.mkdir()
    make_shards(made, length)
    made.replace(folder)
    return {"ok": True}


def reference_losses(call: Call, name: str) -> list[float]:
    """Of the first updates on the CPU."""
    updates = TOY_UPDATES if call.toy else COMPARED_UPDATES
    shared = ("--device", "cpu", "--steps-this-run", updates, "--dropout", 0)
    if code := run_pretraining.main(call.run_flags(name, *shared, *REFERENCES[name])):
        raise SystemExit(code)
    return call.losses_of(name)


def checks(call: Call) -> Iterator[Item]:
    """The checks of common/device_checks.py, of attention also with longer sequences."""
    silence_imports()
    device, sizes = select_device(call.device), Sizes("tiny", 24, 4) if call.toy else Sizes()
    check_of = all_checks(sizes, device)
    if not call.toy:
        longer = attention_checks(sizes._replace(seq_length=512), device)
        check_of |= {f"{title}, length 512": check for title, check in longer.items()}
    for title, check in check_of.items():
        if not (call.toy and "compiled" in title):
            yield Item(title, 60 if "compiled" in title else 10, check)


# --- training -------------------------------------------------------------------------------------


class Mode(NamedTuple):
    """A run of BERT-mini: its flags, and what its losses are compared with: an earlier run, and the
    largest relative difference, of the second half of the batches only with `second_half`.
    """

    flags: tuple[str, ...]
    reference: str | None = None
    limit: float = 0.0
    seconds: int = 15
    second_half: bool = False


# In the order of what is least settled.
MODES = {
    "amp": Mode(("--amp", *NONE)),
    "fp32, dropout": Mode(NONE, "amp", 2e-2),
    "amp, by default": Mode(("--amp",), "amp", 2e-2, seconds=60),
    "amp, compiled layers": Mode(("--amp", "--compile", "layers"), "amp", 2e-2, seconds=60),
    "CPU offload": Mode(("--amp", "--enable-cpu-offload", *NONE), "amp", 1e-3, seconds=40),
    "fp32, no dropout": Mode(("--dropout", "0", *NONE), "CPU", 1e-4, 25),
    "ModernBERT, Muon": Mode(
        ("--dropout", "0", *MODERN_BERT, *NONE), "CPU, ModernBERT, Muon", 1e-3, 25
    ),
    # It skips the first update, and is one behind from there on: far at first, while losses fall.
    "fp16": Mode(("--fp16", *NONE), "amp", 2e-2, second_half=True),
    "16-bit weights": Mode(("--use-pure-fp16", *NONE), "amp", 2e-2),
    "amp, again": Mode(("--amp", *NONE), "amp", 1e-3),
    "deterministic": Mode(("--amp", "--deterministic", *NONE), "amp", 1e-3),
    "deterministic, again": Mode(("--amp", "--deterministic", *NONE), "deterministic", 0.0),
    "triton": Mode(("--amp", "--attention", "triton", *NONE), "amp", 2e-2),
    "triton, again": Mode(("--amp", "--attention", "triton", *NONE), "triton", 0.0),
    "checkpointing": Mode(("--amp", "--activation-checkpoint", "full", *NONE), "amp", 1e-3),
}
ONLY_GPU = {"--fp16", "--enable-cpu-offload", "--attention"}


def training(call: Call) -> Iterator[Item]:
    """Runs in many modes, whose losses are compared. No update after the second may wait."""
    if not call.shards(128).is_dir():
        raise UserError(
            f"{call.shards(128)} is missing: run `gpu_first_hour.py prepare` first and carry "
            f"{call.folder}"
        )
    for name, mode in MODES.items():
        if call.device != "cpu" or not ONLY_GPU & {*mode.flags}:
            yield Item(name, mode.seconds, partial(train_in_mode, call, name, mode))


def train_in_mode(call: Call, name: str, mode: Mode) -> dict:
    if mode.reference in REFERENCES:
        call.losses[mode.reference] = reference_losses(call, mode.reference)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    report = watch("none", "run_pretraining", call.run_flags(name, *mode.flags))
    losses = call.losses[name] = call.losses_of(name)
    records = read_records(call.scratch / f"{name}.json")
    steps = [r["data"]["step_seconds"] for r in records if "loss" in r["data"]]
    result = {
        "graphs": report["graphs"][-1] - graphs,
        "checkpoints": report["checkpoints"],
        "peak_gib": report["peak"] / 2**30,
        "ms_per_update": 1e3 * statistics.median(steps),
        "skipped_updates": len(losses) - (TOY_UPDATES if call.toy else UPDATES),
        "losses": losses,
        "profile": report["profile"],
    }
    is_right = all(report["checkpoints"].values())
    is_right = is_right and result["skipped_updates"] <= MAX_SKIPPED_UPDATES
    if "--compile" not in mode.flags:
        is_right = is_right and result["graphs"] <= MAX_GRAPHS
    if mode.reference in call.losses:
        expected = call.losses[mode.reference]
        error = difference(losses, expected, mode.second_half * len(expected) // 2)
        result |= {"reference": mode.reference, "difference": error, "limit": mode.limit}
        is_right = is_right and error <= mode.limit
    elif mode.reference is not None:
        result["reference"] = f"not compared: {mode.reference} has not run"
    return result | {"ok": is_right}


# --- tasks ----------------------------------------------------------------------------------------


def tasks(call: Call) -> Iterator[Item]:
    """Faults in an update, resuming, and fine-tuning."""
    amp = () if call.device == "cpu" else ("--amp", *NONE)  # slow on many CPUs
    yield Item("memory runs out", 15, partial(run_out_of_memory, call, amp))
    yield Item("SIGTERM, and resumed", 30, partial(stop_and_resume, call, amp))
    for name, count in (("train", 40), ("dev", 20)):
        rows = "good ship,good\nbad ship,bad\n" * count
        (call.scratch / f"{name}.csv").write_text(f"text,label\n{rows}")
        (call.scratch / f"{name}.txt").write_text("Good B-ship\nships I-ship\nsail O\n\n" * count)
    columns = ("--text-column", "text", "--label-column", "label", "--eval-steps", 3)
    cases = {
        "SQuAD": ("run_squad", "data/sample/squad/{}-v1.1.json", ()),
        "classes": ("run_glue", f"{call.scratch}/{{}}.csv", columns),
        "NER": ("run_ner", f"{call.scratch}/{{}}.txt", ()),
    }
    for name, (program, files, flags) in cases.items():
        words = {
            "config-file": config_file("tiny" if call.toy else "mini"),
            "vocab-file": VOCAB_FILE,
            "output-dir": call.scratch / "tasks",
            "train-batch-size": 8,
            "max-steps": 6,
            "device": call.device,
            "train-file": files.format("train"),
            "eval-file": files.format("dev"),
        }
        argv = [*(f"--{key}={value}" for key, value in words.items()), "--do-train", "--do-eval"]
        yield Item(name, 30, partial(fine_tune, program, [*argv, *map(str, (*amp, *flags))]))


def fine_tune(program: str, argv: list[str]) -> dict:
    report = watch("none", program, argv)
    return {"checkpoints": report["checkpoints"], "ok": all(report["checkpoints"].values())}


def run_out_of_memory(call: Call, flags: tuple[str, ...]) -> dict:
    try:
        watch("memory", "run_pretraining", call.run_flags("memory", *flags))
    except UserError as error:
        return {"error": str(error), "ok": "out of memory" in str(error)}
    return {"ok": False}


def stop_and_resume(call: Call, flags: tuple[str, ...]) -> dict:
    watch("none", "run_pretraining", call.run_flags("whole", *flags))
    stopped = call.run_flags("resumed", "--resume-from-checkpoint", *flags)
    for fault in ("SIGTERM", "none"):
        watch(fault, "run_pretraining", stopped)
    resumed, whole = (call.losses_of(name) for name in ("resumed", "whole"))
    error = difference(resumed, whole)
    return {"difference": error, "limit": 1e-3, "ok": error < 1e-3 and len(resumed) == len(whole)}


# --- speed ----------------------------------------------------------------------------------------


class Speed(NamedTuple):
    """Sequences per micro-batch, all of full length or those of the books; the rate predicted for
    this project on an H100, 0 if unknown; seconds of the first of the kind, which compiles.
    """

    model: str
    length: int
    batch: int
    kind: str
    predicted: int = 0
    seconds: int = 30
    compile: str = "model"
    micro_batches: int = 4


# In the order of what is least settled.
SPEEDS = {
    "BERT-large, 128, real lengths": Speed("large", 128, 256, "books", 215_000, 90),
    "ModernBERT-base, 1,024, full": Speed("modernbert-base", 1024, 32, "full", 300_000, 90),
    "ModernBERT-base, 8,192, real lengths": Speed("modernbert-base", 8192, 4, "books"),
    "BERT-large, 128, full": Speed("large", 128, 256, "full", 215_000),
    "BERT-large, 512, real lengths": Speed("large", 512, 64, "books", 190_000),
    "ModernBERT-base, 8,192, full": Speed("modernbert-base", 8192, 4, "full"),
    "BERT-large, 128, full, eager": Speed("large", 128, 256, "full", 175_000, compile="none"),
}


def speed(call: Call) -> Iterator[Item]:
    """Updates with AdamW, this project's and transformers'."""
    for name, what in SPEEDS.items():
        rates: dict[str, float] = {}
        for side in (pretraining_step.ThisProject, pretraining_step.Transformers):
            measure = partial(measure_speed, call, what, side, rates)
            yield Item(f"{name}: {side.__name__}", what.seconds, measure)


def measure_speed(
    call: Call, what: Speed, side: type[pretraining_step.Implementation], rates: dict[str, float]
) -> dict:
    """rates: of the sides, to which this one is added. The second turn is measured."""
    if call.toy:
        what = what._replace(model="tiny", length=128, batch=4, compile="none", predicted=0)
    shards = call.shards(what.length, what.kind)
    if what.kind == "full":
        shards, count = call.scratch / f"full-{what.length}", 8 * what.batch
        write_random_shards(shards, count, what.length, max_masked(what.length))
    args = Namespace(
        model=what.model,
        device=call.device,
        seq_length=what.length,
        batch_size=what.batch,
        gradient_merge_steps=what.micro_batches,
        amp=not call.toy,
        peer_attention=None,
        compile=what.compile,
        rounds=1,
        steps=2 if call.toy or what.micro_batches > 1 else 20,
    )
    started = time.perf_counter()
    implementation = side(args, shards)
    implementation.turn(0)
    first = time.perf_counter() - started
    turn = implementation.turn(1)
    rate = rates[side.__name__] = turn["tokens"] / turn["seconds"]
    result = {
        "tokens_per_second": round(rate),
        "ms_per_update": 1e3 * turn["seconds"] / args.steps,
        "parts": turn["parts"],
        "settings": implementation.settings(),
        "seconds_before": first,
    }
    if torch.cuda.is_available():
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return result | verdict(side.__name__, rates, what.predicted, call.toy)


def verdict(name: str, rates: dict[str, float], predicted: int, toy: bool) -> dict:
    """Of the side `name`: this project has a prediction, its peer this project's rate."""
    this_project = pretraining_step.ThisProject.__name__
    if name == this_project:  # more than 15% below: profile before anything else
        return {"predicted": predicted, "ok": rates[name] > 0.85 * predicted}
    if this_project not in rates:
        return {"ratio": "not compared: this project's item has not run"}
    ratio = rates[this_project] / rates[name]
    return {"ratio": ratio, "ok": ratio > 1 or toy}


CALLS: dict[str, Callable[[Call], Iterator[Item]]] = {
    function.__name__: function for function in (prepare, checks, training, speed, tasks)
}

FLAGS = (
    Flag("call", tuple(CALLS), REQUIRED, "which part"),
    Flag("--output", Path, Path("gpu_results"), "folder for logs and results"),
    Flag("--folder", Path, FOLDER, "folder that `prepare` writes"),
    Flag(
        "--seconds",
        positive_int,
        Computed(f"{CALL_SECONDS}, with --toy no limit"),
        "after which the call ends",
    ),
    Flag(
        "--only",
        str,
        None,
        "only items with these words in their titles",
        options={"metavar": "WORDS"},
    ),
    Flag(
        "--continue",
        bool,
        False,
        "do the items that have no result in --output yet",
        options={"dest": "continues"},
    ),
    Flag("--toy", bool, False, "a small model on the CPU, to try the call"),
    Flag("--device", ("cuda", "cpu"), Computed("cuda, with --toy cpu"), "device"),
)


def parse_arguments(argv: list[str] | None) -> Arguments:
    parser = ArgumentParser(description=__doc__)
    parser.add_flags("flags", FLAGS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    device = args.device or ("cpu" if args.toy else "cuda")
    limit = args.seconds or (NO_LIMIT if args.toy else CALL_SECONDS)
    output, carried = args.output.resolve(), args.folder.resolve()
    if args.call == "prepare":
        device, output, limit = "cpu", carried, NO_LIMIT
    selected = select_device(device)
    for folder in (output, carried):
        folder.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    results = output / f"{args.call}.json"
    faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            set_num_threads()
            call = Call(carried, Path(scratch), args.toy, device)
            if args.continues:
                call.losses.update(losses_in(results))
            chosen = [*CALLS[args.call](call)]
            if args.only is not None:
                chosen = choose(chosen, args.only)
            print_line(str(machine_info(selected)))
            return int(not do_items(chosen, results, limit, args.continues))
    finally:
        faulthandler.cancel_dump_traceback_later()


def losses_in(path: Path) -> dict[str, list[float]]:
    """Of the runs whose results are in `path`."""
    results = read_results(path).items()
    return {title: result["losses"] for title, result in results if "losses" in result}


def choose(items: list[Item], words: str) -> list[Item]:
    chosen = [item for item in items if words in item.title]
    if not chosen:
        titles = "; ".join(item.title for item in items)
        raise UserError(f"--only {words!r}: no item has these words; there are {titles}")
    return chosen


if __name__ == "__main__":
    run_main(main)
