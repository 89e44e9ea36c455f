#!/usr/bin/env python3
"""The first hour on a GPU, in calls of under ten minutes: are the results right, and then how fast is it?

    python3 benchmarks/gpu_first_hour.py prepare                    # before, on any machine: shards, losses on the CPU
    python3 benchmarks/gpu_first_hour.py kernels --output $OUT      # on the GPU, one call after another
    for call in kernels tests training compiled speed speed_compiled defaults costs; do ... done

`prepare` writes to .gpu/, which is carried to the machine with the checkout. Each command of a call has a log file and
a time limit; a command that fails does not end the others, and no command starts or goes on after CALL_SECONDS.
<call>.json in the output folder, written after each command, says what was expected, what was found, and whether that
fits; <call>.tar.gz has the logs and reports. The exit code is 1 if something does not fit. docs/gpu_first_hour.md
explains what to do then. `--toy` runs a call with a small model on the CPU.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from utils.command_line import ArgumentParser, Arguments
from utils.errors import UserError, run_main
from utils.files import write_json
from utils.progress import print_line

FOLDER = ROOT / ".gpu"  # of `prepare`
UPDATES, TOY_UPDATES, COMPARED_UPDATES = 100, 6, 20
CALL_SECONDS = 570
ARCHIVED = (".log", ".json")
# Predicted tokens/s of BERT-large at length 128 on an H100, written down before anything was measured.
PREDICTIONS = {
    "amp": (165_000, 190_000),
    "amp, compiled layers": (190_000, 235_000),
    "amp, compiled model": (215_000, 235_000),
    "pure": (165_000, 200_000),
    "pure, compiled model": (225_000, 245_000),
    "fp8, compiled model": (225_000, 265_000),
}
# Of `training`: flags after those of every run, and what the losses are compared with: another run of the list, or the
# run on the CPU; the largest relative difference; and over how many updates, None for all.
MODES: dict[str, tuple[tuple[str, ...], str | None, float, int | None]] = {
    "fp32, no dropout": (("--dropout", "0"), "CPU", 1e-4, COMPARED_UPDATES),
    "amp, no dropout": (("--dropout", "0", "--amp"), "fp32, no dropout", 1e-2, None),
    "amp": (("--amp",), None, 0, None),
    "amp, activation checkpointing": (("--amp", "--activation-checkpoint", "full"), "amp", 1e-3, None),
    "amp, compiled layers": (
        ("--amp", "--compile", "layers", "--activation-checkpoint", "full"), "amp", 2e-2, None),
    "amp, compiled model": (("--amp", "--compile", "model"), "amp", 2e-2, None),
    "pure, compiled model": (("--use-pure-fp16", "--compile", "model"), "amp", 2e-2, None),
    "fp16": (("--fp16",), "amp", 2e-2, None),
    "fp8, compiled model": (("--amp", "--fp8", "--compile", "model"), "amp", 2e-2, None),
}  # fmt: skip
MAX_SKIPPED_UPDATES = 8  # of float16


def file_name(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "_")


@dataclass
class Call:
    """The commands of one call and what they found. output: folder of logs, reports and checkpoints; file: that of the
    results."""

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

    def run(self, name: str, command: list[object], timeout: int, environment: dict[str, str] | None = None) -> bool:
        """Runs `command`; returns whether it ended with exit code 0 within `timeout` seconds."""
        left = self.started + CALL_SECONDS - time.monotonic()
        limit = timeout * 10 if self.toy else max(min(timeout, left), 0)  # a CPU may be busy
        log, started = self.output / f"{file_name(name)}.log", time.monotonic()
        words = [sys.executable, *map(str, command)]
        env = {**os.environ, **(environment or {})}
        with log.open("wb") as file:
            try:
                code = subprocess.run(words, cwd=ROOT, stdout=file, stderr=file, timeout=limit, env=env).returncode
            except subprocess.TimeoutExpired:
                code = 124
        seconds = round(time.monotonic() - started, 1)
        self.results.append({"name": name, "command": words[1:], "exit_code": code, "seconds": seconds, "ok": not code})
        self._write()
        print_line(f"{'ok  ' if not code else 'FAIL'} {name}: exit code {code}, {seconds} s, {log}")
        return not code

    def _write(self) -> None:
        write_json(self.file, {"toy": self.toy, "results": self.results})

    def judge(self, expected: str, found: object, ok: bool) -> None:
        """Adds to the last command's result what it was expected to show, and whether it did."""
        self.results[-1] |= {"expected": expected, "found": found, "ok": self.results[-1]["ok"] and ok}
        self._write()
        print_line(f"     {'as expected' if ok else 'NOT as expected'}: {expected}; found {found}")


def records(report: Path) -> list[dict]:
    return [json.loads(line.removeprefix("DLLL ")) for line in report.read_text(encoding="utf-8").splitlines()]


def losses(report: Path) -> list[float]:
    """The losses of all updates, in order; of a run in two parts from both."""
    steps = {tuple(r["step"]): r["data"]["loss"] for r in records(report) if r["step"] and "loss" in r["data"]}
    return [steps[step] for step in sorted(steps, key=lambda step: step[-1])]


def largest_difference(found: list[float], expected: list[float], count: int | None) -> float:
    """The largest relative difference of losses; infinite if the runs have different lengths."""
    if len(found) != len(expected) and count is None:
        return float("inf")
    return max(abs(a - b) / abs(b) for a, b in list(zip(found, expected, strict=False))[:count])


def model_files(model: str) -> tuple[object, ...]:
    return (
        "--vocab-file",
        "vocab/bert-base-uncased-vocab.txt",
        "--config-file",
        f"bert_configs/bert-{model}-uncased.json",
    )


def pretraining(toy: bool, device: str, shards: Path, output: Path, *flags: object) -> list[object]:
    """run_pretraining.py on the carried shards: BERT-mini with 64 sequences per update."""
    model, batch, merge = ("tiny", 4, 1) if toy else ("mini", 64, 1)
    return [
        *("run_pretraining.py", "--input-dir", shards, "--output-dir", output, "--report-file", f"{output}.json"),
        *model_files(model),
        *("--max-seq-length", 128, "--max-predictions-per-seq", 20, "--batch-size", batch),
        *("--gradient-merge-steps", merge, "--learning-rate", 1e-3, "--seed", 7, "--log-freq", 1, "--device", device),
        *("--show-config", "false", "--overwrite", *flags),
    ]  # fmt: skip


def shards_in(folder: Path, length: int) -> Path:
    return folder / str(length) / "hdf5"


def full_shards_in(folder: Path, length: int) -> Path:
    """Sequences of full length: micro-batches of one size, for which a compiled model needs one graph."""
    return folder / f"full-{length}"


def prepare(call: Call, folder: Path) -> None:
    """Shards of the sample books at lengths 128 and 512, others without padding, and the losses of the first updates on
    the CPU."""
    from benchmarks.common.shards import make_shards
    from benchmarks.memory import write_full_shards

    for length, predictions in ((128, 20),) if call.toy else ((128, 20), (512, 80)):
        if not full_shards_in(folder, length).is_dir():
            write_full_shards(full_shards_in(folder, length), length, predictions, 4096 * 128 // length)
    for length in (128,) if call.toy else (128, 512):
        if not shards_in(folder, length).is_dir():
            (folder / str(length)).mkdir(exist_ok=True)
            make_shards(folder / str(length), length)
    updates = TOY_UPDATES if call.toy else COMPARED_UPDATES
    flags = ("--max-steps", call.updates, "--steps-this-run", updates, "--dropout", 0)
    call.run("CPU", pretraining(call.toy, "cpu", shards_in(folder, 128), folder / "cpu", *flags), 1200)


def kernels(call: Call, folder: Path) -> None:
    for length in (24,) if call.toy else (128, 512):
        toy = ("--model", "tiny", "--batch-size", 4) if call.toy else ()
        command = ["benchmarks/device_checks.py", "--device", call.device, "--seq-length", length, *toy]
        call.run(f"device checks {length}", [*command, "--output", call.output / f"device_checks-{length}.json"], 280)


def tests(call: Call, folder: Path) -> None:
    """The tests that need a GPU."""
    call.run("tests", ["-m", "pytest", "-q", "-k", "on_a_gpu", *(("--co",) if call.toy else ())], 400)


def training(call: Call, folder: Path, compiled: bool = False) -> None:
    if not (folder / "cpu.json").is_file():
        raise UserError(f"{folder} lacks cpu.json: run `gpu_first_hour.py prepare` first and carry {folder}")
    found = {"CPU": losses(folder / "cpu.json")}
    for name, (flags, reference, limit, count) in MODES.items():
        if compiled != ("--compile" in flags) and name != "amp":
            continue
        if call.toy and {"--fp16", "--fp8"} & set(flags):
            continue  # few CPUs compute float16, and none float8
        output = call.output / file_name(name)
        command = pretraining(
            call.toy, call.device, shards_in(folder, 128), output, "--max-steps", call.updates, *flags
        )
        if not call.run(name, command, 120 if "--compile" in flags else 60):
            continue
        found[name] = losses(Path(f"{output}.json"))
        if reference in found:
            difference = largest_difference(found[name], found[reference], count)
            call.judge(f"losses within {limit:g} of {reference}", difference, difference < limit)
        if name == "fp16":
            skipped = call.updates - len(found[name])
            call.judge(f"at most {MAX_SKIPPED_UPDATES} skipped updates", skipped, skipped <= MAX_SKIPPED_UPDATES)
    if compiled:
        return
    output, half = call.output / "resumed", call.updates // 2
    flags = ("--max-steps", call.updates, "--amp", "--resume-from-checkpoint")
    command = pretraining(call.toy, call.device, shards_in(folder, 128), output, *flags)
    command.remove("--overwrite")
    if call.run("first half", [*command, "--steps-this-run", half], 60) and call.run("resumed", command, 60):
        difference = largest_difference(losses(Path(f"{output}.json")), found.get("amp", []), None)
        call.judge("losses within 0.001 of amp", difference, difference < 1e-3)


def compiled(call: Call, folder: Path) -> None:
    training(call, folder, compiled=True)


def benchmark(call: Call, name: str, shards: Path, length: int, batch: int, flags: tuple, environment=None) -> None:
    """run_pretraining.py --benchmark of BERT-large: tokens/s, judged by the prediction at length 128."""
    model, merge = ("tiny", 2) if call.toy else ("large", 32)
    predictions, report = (20 if length == 128 else 80), call.output / f"{file_name(name)}.json"
    report.unlink(missing_ok=True)
    command = [
        *("run_pretraining.py", "--input-dir", shards, "--output-dir", call.output / "unused", "--report-file", report),
        *model_files(model),
        *("--max-seq-length", length, "--max-predictions-per-seq", predictions, "--batch-size", batch),
        *("--gradient-merge-steps", merge, "--max-steps", 1000, "--benchmark", "--benchmark-warmup-steps", 1),
        *("--benchmark-steps", 2, "--log-freq", 99, "--device", call.device, "--show-config", "false", *flags),
    ]  # fmt: skip
    if not call.run(name, command, 240 if "--compile" in flags else 90, environment):
        return
    summary = records(report)[-1]["data"]
    rate, predicted = summary["tokens_per_second"], PREDICTIONS.get(name)
    if predicted is None or call.toy:
        call.judge("a rate", summary, rate > 0)
    else:  # more than 15% below the prediction: profile before anything else
        low, high = predicted
        call.judge(f"{low:,} to {high:,} tokens/s", summary, rate > 0.85 * low)


SPEED_FLAGS = {
    "amp": ("--amp",),
    "amp, compiled layers": ("--amp", "--compile", "layers"),
    "amp, compiled model": ("--amp", "--compile", "model"),
    "pure": ("--use-pure-fp16",),
    "pure, compiled model": ("--use-pure-fp16", "--compile", "model"),
}


def speed(call: Call, folder: Path) -> None:
    for name, flags in SPEED_FLAGS.items():
        if "--compile" not in flags:
            benchmark(call, name, full_shards_in(folder, 128), 128, 4 if call.toy else 256, flags)
    batch = 8 if call.toy else 512
    benchmark(call, f"amp, batch {batch}", full_shards_in(folder, 128), 128, batch, SPEED_FLAGS["amp"])
    if not call.toy:
        benchmark(call, "amp, real lengths", shards_in(folder, 128), 128, 256, SPEED_FLAGS["amp"])
        segments = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        name = "amp, expandable segments"
        benchmark(call, name, full_shards_in(folder, 128), 128, 256, SPEED_FLAGS["amp"], segments)


def speed_compiled(call: Call, folder: Path) -> None:
    for name, flags in SPEED_FLAGS.items():
        if "--compile" in flags and not call.toy:  # minutes on a CPU, and `compiled` compiles
            benchmark(call, name, full_shards_in(folder, 128), 128, 256, flags)


def defaults(call: Call, folder: Path) -> None:
    for name in () if call.toy else ("amp, compiled model", "pure, compiled model"):
        benchmark(call, f"{name}, length 512", full_shards_in(folder, 512), 512, 64, SPEED_FLAGS[name])
    if not call.toy:
        name = "fp8, compiled model"
        benchmark(call, name, full_shards_in(folder, 128), 128, 256, MODES[name][0])


def costs(call: Call, folder: Path) -> None:
    """Of the optimizer, of the start, and of checkpoints."""
    toy, model = call.toy, "tiny" if call.toy else "large"
    short = ("--rounds", 1) if toy else ()
    command = ["benchmarks/optimizer_step.py", "--device", call.device, "--model", model, *short]
    call.run("optimizer", [*command, "--output", call.output / "optimizer_step.json"], 180)
    short = ("--launches", 1, "--checkpoints", 1) if toy else ()
    command = ["benchmarks/startup_and_checkpoints.py", "--device", call.device, "--model", model, *short]
    output = call.output / "startup.json"
    call.run("start and checkpoints", [*command, "--input-dir", shards_in(folder, 128), "--output", output], 180)


CALLS: dict[str, Callable[[Call, Path], None]] = {
    function.__name__: function
    for function in (prepare, kernels, tests, training, compiled, speed, speed_compiled, defaults, costs)
}


def parse_arguments(argv: list[str] | None) -> Arguments:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("call", choices=tuple(CALLS), help="which part")
    parser.add_argument("--output", type=Path, default=Path("gpu_results"), help="folder for logs and results")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of the shards that `prepare` makes")
    parser.add_argument("--toy", action="store_true", help="a small model on the CPU, to try the call")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    is_kept = args.call == "prepare" or args.toy
    output = args.folder if args.call == "prepare" else args.output
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:  # of checkpoints, which are large
        call = Call((output if is_kept else Path(temporary)).resolve(), args.toy, output / f"{args.call}.json")
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
