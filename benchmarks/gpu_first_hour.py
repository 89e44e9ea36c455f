#!/usr/bin/env python3
"""The first hour on a GPU, in calls of under ten minutes: are the results right, and then how fast
is it?

    python3 benchmarks/gpu_first_hour.py prepare      # before, on any machine: CPU losses
    python3 benchmarks/gpu_first_hour.py correctness --output $OUT  # on the GPU, in turn
    python3 benchmarks/gpu_first_hour.py speed --output $OUT

`prepare` writes to .gpu/, which is carried to the machine with the checkout. Each command of a call
has a log file and a time limit; a command that fails does not end the others. The limits of a call
add up to at most CALL_SECONDS. <call>.json in the output folder, written after each command, says
what was expected, what was found, and whether that fits; <call>.tar.gz has the logs and reports.
The exit code is 1 if something does not fit. docs/gpu_first_hour.md explains what to do then.
`--toy` runs a call with a small model on the CPU.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.results import ROOT, config_file, read_records
from benchmarks.common.shards import (
    MAX_MASKED_OF,
    VOCAB_FILE,
    make_shards,
    pretraining_flags,
    write_random_shards,
)
from benchmarks.common.worker import THIS_PROJECT, TRANSFORMERS
from utils.command_line import ArgumentParser, Arguments
from utils.errors import UserError, run_main
from utils.files import write_json
from utils.progress import print_line

FOLDER = ROOT / ".gpu"  # of `prepare`
UPDATES, TOY_UPDATES, COMPARED_UPDATES = 100, 6, 20
CALL_SECONDS = 550
ARCHIVED = (".log", ".json")
# Predicted tokens/s of BERT-large at length 128 on an H100, written down before anything was
# measured.
PREDICTIONS = {
    "amp": (165_000, 190_000),
    "amp, compiled layers": (190_000, 235_000),
    "amp, compiled model": (215_000, 235_000),
    "pure": (165_000, 200_000),
    "pure, compiled model": (225_000, 245_000),
    "fp8, compiled model": (225_000, 265_000),
}
MODERN_BERT = ("--config-file", "bert_configs/modernbert-mini.json", "--optimizer", "Muon")
REFERENCES = {"CPU": (), "CPU, ModernBERT, Muon": MODERN_BERT}  # runs of `prepare`
# Of `training`: flags after those of every run, and what the losses are compared with: another run
# of the list, or the run on the CPU; the largest relative difference; and over how many updates,
# None for all.
MODES: dict[str, tuple[tuple[str, ...], str | None, float, int | None]] = {
    "fp32, no dropout": (("--dropout", "0"), "CPU", 1e-4, COMPARED_UPDATES),
    "amp, no dropout": (("--dropout", "0", "--amp"), "fp32, no dropout", 1e-2, None),
    "amp": (("--amp",), None, 0, None),
    "amp, activation checkpointing": (
        ("--amp", "--activation-checkpoint", "full"), "amp", 1e-3, None,
    ),
    "amp, compiled layers": (
        ("--amp", "--compile", "layers", "--activation-checkpoint", "full"), "amp", 2e-2, None),
    "amp, compiled model": (("--amp", "--compile", "model"), "amp", 2e-2, None),
    "pure, compiled model": (("--use-pure-fp16", "--compile", "model"), "amp", 2e-2, None),
    "fp16": (("--fp16",), "amp", 2e-2, None),
    "fp8": (("--amp", "--fp8"), "amp", 2e-2, None),
    "fp8, compiled model": (("--amp", "--fp8", "--compile", "model"), "amp", 2e-2, None),
    "CPU offload": (("--amp", "--enable-cpu-offload"), "amp", 1e-3, None),
    "ModernBERT, Muon": (
        ("--dropout", "0", *MODERN_BERT), "CPU, ModernBERT, Muon", 1e-3, COMPARED_UPDATES,
    ),
}  # fmt: skip
FIRST_MODES = ("fp32, no dropout", "amp, no dropout")  # of `correctness`
ONLY_GPU = {"--fp16", "--fp8", "--enable-cpu-offload"}  # few CPUs compute float16
MAX_SKIPPED_UPDATES = 8  # of float16
MAX_GRAPHS = 16
STRATEGIES = {"DDP": (), "FSDP2": ("--data-parallel-shard-degree", "-1")}
FAULTS = ("memory", "SIGKILL", "SIGSTOP")  # of one rank
RANK_SECONDS = 90  # for all to start, and to end after a fault of one


def file_name(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "_")


@dataclass
class Call:
    """The commands of one call and what they found. output: folder of logs, reports and
    checkpoints; file: that of the results.
    """

    output: Path
    toy: bool
    file: Path
    results: list[dict] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def device(self) -> str:
        return "cpu" if self.toy else "cuda"

    @property
    def updates(self) -> int:
        return TOY_UPDATES if self.toy else UPDATES

    def report(self, name: str) -> Path:
        return self.output / f"{file_name(name)}.json"

    def run(
        self,
        name: str,
        command: list[object],
        timeout: int,
        environment: dict[str, str] | None = None,
    ) -> bool:
        """Runs `command`; returns whether it ended with exit code 0 within `timeout` seconds."""
        left = self.started + CALL_SECONDS - time.monotonic()
        limit = timeout * 10 if self.toy else max(min(timeout, left), 0)  # a CPU may be busy
        log, started = self.output / f"{file_name(name)}.log", time.monotonic()
        words = [sys.executable, *map(str, command)]
        env = {**os.environ, **(environment or {})}
        with (
            log.open("wb") as file,
            subprocess.Popen(
                words, cwd=ROOT, stdout=file, stderr=file, env=env, start_new_session=True
            ) as process,
        ):
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = 124
                os.killpg(process.pid, signal.SIGKILL)
        seconds = round(time.monotonic() - started, 1)
        self.results.append(
            {
                "name": name,
                "command": words[1:],
                "exit_code": code,
                "seconds": seconds,
                "ok": not code,
            }
        )
        self._write()
        print_line(f"{'ok  ' if not code else 'FAIL'} {name}: exit code {code}, {seconds} s, {log}")
        return not code

    def _write(self) -> None:
        write_json(self.file, {"toy": self.toy, "results": self.results})

    def judge(self, expected: str, found: object, ok: bool) -> None:
        """Adds to the last command's result what it was expected to show, and whether it did."""
        result = self.results[-1]
        result.setdefault("judged", []).append({"expected": expected, "found": found, "ok": ok})
        result["ok"] = result["ok"] and ok
        self._write()
        print_line(f"     {'as expected' if ok else 'NOT as expected'}: {expected}; found {found}")


def losses(report: Path) -> list[float]:
    """The losses of all updates, in order; of a run in two parts from both."""
    steps = {
        tuple(r["step"]): r["data"]["loss"]
        for r in read_records(report)
        if r["step"] and "loss" in r["data"]
    }
    return [steps[step] for step in sorted(steps, key=lambda step: step[-1])]


def largest_difference(found: list[float], expected: list[float], count: int | None) -> float:
    """The largest relative difference of losses; infinite if the runs have different lengths."""
    if len(found) != len(expected) and count is None:
        return float("inf")
    return max(abs(a - b) / abs(b) for a, b in list(zip(found, expected, strict=False))[:count])


def pretraining(
    call: Call, shards: Path, name: str, *flags: object, device: str | None = None
) -> list[object]:
    """run_pretraining.py on the carried shards: BERT-mini with 64 sequences per update."""
    model, batch = ("tiny", 4) if call.toy else ("mini", 64)
    more = (
        "--report-file",
        call.report(name),
        "--learning-rate",
        1e-3,
        "--seed",
        7,
        "--log-freq",
        1,
    )
    more += ("--device", device or call.device, "--overwrite", *flags)
    return [
        "run_pretraining.py",
        *pretraining_flags(model, shards, call.output / file_name(name), 128, batch, *more),
    ]


def shards_in(folder: Path, length: int, kind: str = "books") -> Path:
    """kind `full`: sequences of full length, so that a compiled model needs one graph."""
    return folder / f"{kind}-{length}" / "hdf5"


def prepare(call: Call, folder: Path) -> None:
    """Shards of the sample books at lengths 128 and 512, others without padding, and the losses of
    the first updates on the CPU.
    """
    for length in (128,) if call.toy else (128, 512):
        books, full = (shards_in(folder, length, kind) for kind in ("books", "full"))
        if not full.is_dir():
            write_random_shards(full, 4096 * 128 // length, length, MAX_MASKED_OF[length])
        if not books.is_dir():
            books.parent.mkdir(exist_ok=True)
            make_shards(books.parent, length)
    updates = TOY_UPDATES if call.toy else COMPARED_UPDATES
    flags = ("--max-steps", call.updates, "--steps-this-run", updates, "--dropout", 0)
    for name, more in REFERENCES.items():
        call.run(
            name, pretraining(call, shards_in(folder, 128), name, *flags, *more, device="cpu"), 1200
        )
    pairs = [(f"{word} ship", word) for word in ("good", "bad")] * 40
    for name, rows in (("classes.csv", pairs), ("held-out-classes.csv", pairs[: len(pairs) // 2])):
        (folder / name).write_text(
            "".join(f"{text},{label}\n" for text, label in [("text", "label"), *rows])
        )
    for name, count in (("words.txt", 80), ("held-out-words.txt", 40)):
        (folder / name).write_text("Good B-ship\nships I-ship\nsail O\n\n" * count)


def correctness(call: Call, folder: Path) -> None:
    """Attention and whole steps against float64 and the CPU, and the losses of a run against the
    CPU's.
    """
    listed = ("--co",) if call.toy else ()
    call.run(
        "tests",
        ["-m", "pytest", "-q", "tests/model/test_attention.py", "-k", "on_a_gpu", *listed],
        60,
    )
    device_checks(call, "eager", 180)
    training(call, folder, "correctness")


def device_checks(call: Call, part: str, timeout: int) -> None:
    for length in (24,) if call.toy else (128, 512):
        toy = ("--model", "tiny", "--batch-size", 4) if call.toy else ()
        command = [
            "benchmarks/device_checks.py",
            "--device",
            call.device,
            "--part",
            part,
            "--seq-length",
            length,
            *toy,
        ]
        output = call.output / f"device_checks-{part}-{length}.json"
        call.run(f"device checks, {part} {length}", [*command, "--output", output], timeout)


def watch(
    call: Call,
    name: str,
    command: list[object],
    timeout: int,
    fault: str = "none",
    launcher: tuple = (),
) -> dict:
    """Runs the program in common/watched.py; returns what its updates did, or None if it failed."""
    result, (program, *flags) = call.output / f"{file_name(name)}-watched.json", command
    words = ["benchmarks/common/watched.py", result, fault, Path(program).stem, *flags]
    return json.loads(result.read_text()) if call.run(name, [*launcher, *words], timeout) else {}


def training(call: Call, folder: Path, part: str) -> None:
    for name in REFERENCES:
        if not (folder / f"{file_name(name)}.json").is_file():
            raise UserError(
                f"{folder} lacks losses: run `gpu_first_hour.py prepare` first and carry {folder}"
            )
    found = {name: losses(folder / f"{file_name(name)}.json") for name in REFERENCES}
    for name, (flags, reference, limit, count) in MODES.items():
        of_mode = (
            "correctness"
            if name in FIRST_MODES
            else "compiled"
            if "--compile" in flags
            else "training"
        )
        is_base = name == "amp" and part == "compiled"
        if (of_mode != part and not is_base) or (call.toy and ONLY_GPU & set(flags)):
            continue
        command = pretraining(
            call, shards_in(folder, 128), name, "--max-steps", call.updates, *flags
        )
        watched = watch(call, name, command, 120 if "--compile" in flags else 60)
        if not watched:
            continue
        found[name] = losses(call.report(name))
        if reference in found:
            judge_losses(call, name, found[reference], reference, limit, count)
        call.judge(
            f"at most {MAX_GRAPHS} graphs", watched["graphs"], watched["graphs"][-1] <= MAX_GRAPHS
        )
        call.judge(
            "checkpoints as on the device",
            watched["checkpoints"],
            all(watched["checkpoints"].values()),
        )
        if name == "fp16":
            skipped = call.updates - len(found[name])
            call.judge(
                f"at most {MAX_SKIPPED_UPDATES} skipped updates",
                skipped,
                skipped <= MAX_SKIPPED_UPDATES,
            )


def tasks(call: Call, folder: Path) -> None:
    """Fine-tuning, evaluation and prediction; no update waits for the GPU."""
    config = config_file("tiny" if call.toy else "mini")
    shared = (
        "--vocab-file",
        VOCAB_FILE,
        "--config-file",
        config,
        "--output-dir",
        call.output / "tasks",
        "--do-train",
    )
    shared += ("--do-eval", "--train-batch-size", 8, "--max-steps", 6, "--device", call.device)
    shared += () if call.toy else ("--amp",)
    classes, words, squad = (
        folder / "classes.csv",
        folder / "words.txt",
        "data/sample/squad/{}-v1.1.json",
    )
    held_out = folder / "held-out-words.txt"
    columns = ("--text-column", "text", "--label-column", "label", "--eval-steps", 3)
    cases = {
        "SQuAD": ("run_squad.py", squad.format("train"), squad.format("dev"), ()),
        "classes": ("run_glue.py", classes, folder / "held-out-classes.csv", columns),
        "NER": ("run_glue.py", words, held_out, ("--task-name", "ner")),
    }
    for name, (program, train, dev, flags) in cases.items():
        if name == "NER" or not call.toy:
            watch(
                call,
                name,
                [program, *shared, "--train-file", train, "--eval-file", dev, *flags],
                60,
            )


def faults(call: Call, folder: Path) -> None:
    """Memory that runs out in an update; a signal in one, after which the run is resumed; the same
    updates twice.
    """
    amp = () if call.toy else ("--amp",)  # slow on many CPUs
    flags, shards = (*amp, "--max-steps", call.updates), shards_in(folder, 128)
    expect_error(
        call, "fault", pretraining(call, shards, "fault", *flags), "memory", "out of memory"
    )
    command = pretraining(call, shards, "resumed", "--resume-from-checkpoint", *flags)
    command.remove("--overwrite")
    whole = call.run("whole", pretraining(call, shards, "whole", *flags), 60)
    parts = [
        watch(call, name, command, 60, fault)
        for name, fault in (("stopped", "SIGTERM"), ("resumed", "none"))
    ]
    if whole and all(parts):
        judge_losses(call, "resumed", losses(call.report("whole")), "whole", 1e-3)
    long = (
        "--amp",
        "--max-seq-length",
        512,
        "--max-predictions-per-seq",
        80,
        "--batch-size",
        16,
        "--max-steps",
        50,
    )
    for more, limit in (((), 1e-3), (("--deterministic",), 1e-9)) if not call.toy else ():
        names = [f"length 512{''.join(more)}", f"again{''.join(more)}"]
        ran = [
            call.run(name, pretraining(call, shards_in(folder, 512), name, *long, *more), 60)
            for name in names
        ]
        if all(ran):
            judge_losses(call, names[1], losses(call.report(names[0])), names[0], limit)


def judge_losses(
    call: Call, name: str, expected: list[float], reference: str, limit: float, count=None
) -> None:
    difference = largest_difference(losses(call.report(name)), expected, count)
    call.judge(f"losses within {limit:g} of {reference}", difference, difference < limit)


def expect_error(
    call: Call, name: str, command: list[object], fault: str, words: str, launcher: tuple = ()
) -> None:
    """Runs the command with a fault, which has to end it in time with an error saying `words`."""
    watch(call, name, command, RANK_SECONDS, fault, launcher)
    code, log = (
        call.results[-1]["exit_code"],
        (call.output / f"{file_name(name)}.log").read_text(errors="replace"),
    )
    call.results[-1]["ok"] = True
    call.judge(f"ends in time with `{words}`", code, code not in (0, 124) and words in log)


def ranks(call: Call, folder: Path) -> None:
    """On all GPUs of the machine: a rank has no memory left, is killed, or stops."""
    import torch

    count = 2 if call.toy else torch.cuda.device_count()
    launcher = ("scripts/torchrun.py", "--standalone", f"--nproc-per-node={count}")
    more = ("--max-steps", 8, "--collective-timeout-minutes", 0.5)
    for strategy, flags in STRATEGIES.items():
        command = pretraining(call, shards_in(folder, 128), strategy, *more, *flags)
        for fault in FAULTS:
            words = "out of memory" if fault == "memory" else "error: "
            expect_error(call, f"{strategy}, {fault}", command, fault, words, launcher)


def compare_speeds(call: Call, folder: Path, *flags: str) -> None:
    """Updates of BERT-large, 32,768 tokens per micro-batch, in turns with transformers."""
    compiled = "--compile" in flags
    for length in (128,) if call.toy else (128, 512):
        mode = f"amp{', compiled model' * compiled}"
        model, batch, merge, rounds = (
            ("tiny", 4, 1, 1) if call.toy else ("large", 32768 // length, 8, 3)
        )
        name, output = f"{mode}, length {length}", call.output / f"{file_name(mode)}-{length}.json"
        command = [
            *(
                "benchmarks/pretraining_step.py",
                "--device",
                call.device,
                "--model",
                model,
                "--seq-length",
                length,
            ),
            *(
                "--batch-size",
                batch,
                "--gradient-merge-steps",
                merge,
                "--rounds",
                rounds,
                "--steps",
                1,
                "--amp",
            ),
            *("--input-dir", shards_in(folder, length, "full"), "--output", output, *flags),
        ]
        if call.run(name, command, 270 if compiled else 160):
            result = json.loads(output.read_text())
            rates = {
                name: each["tokens_per_second"]["median"]
                for name, each in result["implementations"].items()
            }
            judge_speed(call, mode if length == 128 else name, rates, rates[THIS_PROJECT])
            ratio = result["speedup"][TRANSFORMERS]["ratio_of_medians"]
            call.judge("faster than transformers", ratio, ratio > 1 or call.toy)


def judge_speed(call: Call, name: str, found: object, rate: float) -> None:
    low, high = PREDICTIONS.get(name, (0, 0))
    # More than 15% below the prediction: profile before anything else.
    call.judge(f"{low:,} to {high:,} tokens/s", found, rate > 0.85 * low * (not call.toy))


# Of run_pretraining.py with BERT-large: the call, full sequences or those of the books, their
# length, sequences per micro-batch, and flags.
AMP, PURE = ("--amp",), ("--use-pure-fp16",)
LAYERS, MODEL = ("--compile", "layers"), ("--compile", "model")
SPEEDS: dict[str, tuple[str, str, int, int, tuple[str, ...]]] = {
    "amp": ("speed", "full", 128, 256, AMP),
    "pure": ("speed", "full", 128, 256, PURE),
    "amp, batch 512": ("runs", "full", 128, 512, AMP),
    "amp, real lengths": ("runs", "books", 128, 256, AMP),
    "amp, expandable segments": ("runs", "full", 128, 256, AMP),
    "amp, compiled layers": ("compiled_runs", "full", 128, 256, (*AMP, *LAYERS)),
    "pure, compiled model": ("compiled_runs", "full", 128, 256, (*PURE, *MODEL)),
    "pure, compiled model, length 512": ("defaults", "full", 512, 64, (*PURE, *MODEL)),
    "fp8, compiled model": ("defaults", "full", 128, 256, (*AMP, "--fp8", *MODEL)),
}


def measure_runs(call: Call, folder: Path, part: str) -> None:
    """run_pretraining.py --benchmark: tokens/s against the prediction, and the peak of memory
    against the estimate.
    """
    for name, (of_call, kind, length, batch, flags) in SPEEDS.items():
        if of_call != part:
            continue
        model, batch, merge = ("tiny", 4, 2) if call.toy else ("large", batch, 32)
        report = call.report(name)
        more = (
            "--report-file",
            report,
            "--gradient-merge-steps",
            merge,
            "--max-steps",
            1000,
            "--benchmark",
        )
        more += (
            "--benchmark-warmup-steps",
            1,
            "--benchmark-steps",
            2,
            "--log-freq",
            99,
            "--device",
            call.device,
        )
        unused = call.output / "unused"
        command = pretraining_flags(
            model, shards_in(folder, length, kind), unused, length, batch, *more, *flags
        )
        command = ["run_pretraining.py", *command]
        estimated = call.run(f"{name}, estimate", [*command, "--estimate-memory", 1], 20)
        report.unlink(missing_ok=True)
        segments = (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
            if name == "amp, expandable segments"
            else None
        )
        if not call.run(name, command, 250 if "--compile" in flags else 90, segments):
            continue
        summary = read_records(report)[-1]["data"]
        judge_speed(call, name, summary, summary["tokens_per_second"])
        if estimated and not call.toy:
            log = (call.output / f"{file_name(name)}-estimate.log").read_text()
            expected, found = (
                float(re.search(r"total +([\d.]+)", log)[1]),
                summary["peak_memory_gib"],
            )
            call.judge(f"{expected} GiB within 10%", found, abs(found / expected - 1) < 0.1)


def speed(call: Call, folder: Path) -> None:
    compare_speeds(call, folder)
    measure_runs(call, folder, "speed")


def costs(call: Call, folder: Path) -> None:
    """Of the optimizer, of the start, and of checkpoints."""
    model = ("--device", call.device, "--model", "tiny" if call.toy else "large")
    shards, short = ("--input-dir", shards_in(folder, 128)), ("--launches", 1, "--checkpoints", 1)
    parts = {
        "device_checks": ("--only", "time of LAMB"),
        "startup_and_checkpoints": (*shards, *short) if call.toy else shards,
    }
    for name, flags in parts.items():
        call.run(
            name, [f"benchmarks/{name}.py", *model, *flags, "--output", call.report(name)], 180
        )


# In the order of what matters most: the first three take at most half an hour together.
CALLS: dict[str, Callable[[Call, Path], None]] = {
    "prepare": prepare,
    "correctness": correctness,
    "speed": speed,
    "compiled_speed": lambda call, folder: compare_speeds(call, folder, *MODEL),
    "compiled_checks": lambda call, _folder: device_checks(call, "compiled", 270),
    "training": partial(training, part="training"),
    "compiled": partial(training, part="compiled"),
    **{function.__name__: function for function in (tasks, faults, costs, ranks)},
    **{part: partial(measure_runs, part=part) for part in ("runs", "compiled_runs", "defaults")},
}


def parse_arguments(argv: list[str] | None) -> Arguments:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("call", choices=tuple(CALLS), help="which part")
    parser.add_argument(
        "--output", type=Path, default=Path("gpu_results"), help="folder for logs and results"
    )
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help="folder of the shards that `prepare` makes"
    )
    parser.add_argument(
        "--toy", action="store_true", help="a small model on the CPU, to try the call"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    is_kept = args.call == "prepare" or args.toy
    output = args.folder if args.call == "prepare" else args.output
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:  # of checkpoints, which are large
        call = Call(
            (output if is_kept else Path(temporary)).resolve(),
            args.toy,
            output / f"{args.call}.json",
        )
        try:
            CALLS[args.call](call, args.folder.resolve())
        finally:
            if not is_kept:
                archive(call.output, output / f"{args.call}.tar.gz")
    return 0 if all(result["ok"] for result in call.results) else 1


def archive(folder: Path, path: Path) -> None:
    """Packs the logs and reports in `folder`."""
    with tarfile.open(path, "w:gz") as file:
        for found in sorted(folder.iterdir()):
            if found.is_file() and found.suffix in ARCHIVED:
                file.add(found, found.name)


if __name__ == "__main__":
    run_main(main)
