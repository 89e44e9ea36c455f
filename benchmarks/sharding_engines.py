#!/usr/bin/env python3
"""Time and memory of pre-training steps on two CPU processes: DDP, FSDP2 and DeepSpeed's ZeRO stages.

    python3 benchmarks/sharding_engines.py
    python3 benchmarks/sharding_engines.py --engines DDP FSDP2 --rounds 1

Each run is run_pretraining.py with AdamW in float32, in processes of its own; the engines take turns. Memory is the
largest of the processes' most resident memory, above that of a process that has imported the libraries.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import run_pretraining
from benchmarks.common.results import format_quartiles, quartiles, write_result
from benchmarks.common.training import MODELS
from benchmarks.memory import LENGTH, RETURNS_MEMORY, Case, resident_peak, write_full_shards
from parallel.deepspeed import load_deepspeed
from utils.command_line import ArgumentParser, Arguments, positive_int
from utils.errors import run_main
from utils.progress import print_line, progress_bar

PROCESSES = 2
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
# Flags, or DeepSpeed's `zero_optimization`.
ENGINES = {
    "DDP": (),
    "FSDP2": ("--data-parallel-shard-degree", "-1"),
    "ZeRO 0": {"stage": 0},
    "ZeRO 1": {"stage": 1},
    "ZeRO 2": {"stage": 2},
    "ZeRO 3": {"stage": 3},
    "ZeRO 2, offload": {"stage": 2, **OFFLOAD},
    "ZeRO 3, offload": {"stage": 3, **OFFLOAD, "offload_param": {"device": "cpu"}},
}


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=tuple(MODELS), default="mini", help="architecture")
    parser.add_argument("--engines", nargs="+", choices=tuple(ENGINES), default=list(ENGINES), help="what to measure")
    parser.add_argument("--batch-size", type=positive_int, default=1, help="sequences of 512 tokens per process")
    parser.add_argument("--micro-batches", type=positive_int, default=2, help="micro-batches per update")
    parser.add_argument("--steps", type=positive_int, default=5, help="updates to measure, after two others")
    parser.add_argument("--rounds", type=positive_int, default=3, help="runs of each engine")
    parser.add_argument("--output", type=Path, help="result file; by default in benchmarks/results")
    return parser.parse_args(argv)


def engine_flags(engine: str, folder: Path) -> tuple[str, ...]:
    settings = ENGINES[engine]
    if isinstance(settings, tuple):
        return settings
    path = folder / "deepspeed.json"
    path.write_text(json.dumps({"zero_optimization": settings}))
    return ("--deepspeed", "--deepspeed-config", str(path))


def measure(engine: str, args: Arguments, shards: Path) -> dict[str, float]:
    """Seconds per update, and the largest peak of any process in MiB."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = ("--gradient-merge-steps", str(args.micro_batches), "--benchmark-steps", str(args.steps))
        flags = ("--optimizer", "AdamW", *size, *engine_flags(engine, folder))
        command = Case(args.model, args.batch_size, flags, PROCESSES).command(shards, folder)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **RETURNS_MEMORY}
        subprocess.run(
            [*launcher, __file__, "--measure", name, *command], env=environment, check=True, capture_output=True
        )
        lines = (folder / "report.json").read_text().splitlines()
        figures = [json.loads(line.removeprefix("DLLL "))["data"] for line in lines]
        seconds = next(entry["step_seconds"] for entry in reversed(figures) if "step_seconds" in entry)
        peak = max(int(path.read_text()) for path in folder.glob("*.bytes"))
        return {"seconds": seconds, "mebibytes": peak / 2**20}


def measure_here(folder: str, *arguments: str) -> None:
    """A process of `measure`: writes the number of bytes to `folder`."""
    if "--deepspeed" in arguments:
        load_deepspeed(torch.device("cpu"))
    peak = resident_peak(lambda: run_pretraining.main(list(arguments)))
    (Path(folder) / f"{os.environ['RANK']}.bytes").write_text(str(peak))


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    found: dict[str, list[dict[str, float]]] = {engine: [] for engine in args.engines}
    with tempfile.TemporaryDirectory() as folder:
        shards = write_full_shards(Path(folder) / "shards")
        with progress_bar(args.rounds * len(found), "engines", "run") as bar:
            for _ in range(args.rounds):
                for engine, runs in found.items():
                    runs.append(measure(engine, args, shards))
                    print_line(f"  {engine:16} {runs[-1]['seconds']:.2f} s, {runs[-1]['mebibytes']:.0f} MiB")
                    bar.update(1)
    engines = {
        engine: {name: quartiles([run[name] for run in runs]) for name in ("seconds", "mebibytes")}
        for engine, runs in found.items()
    }
    print_line(f"BERT-{args.model}, {PROCESSES} processes, {args.micro_batches} x {args.batch_size} x {LENGTH} tokens")
    for engine, figures in engines.items():
        seconds, mebibytes = format_quartiles(figures["seconds"]), format_quartiles(figures["mebibytes"], ".0f")
        print_line(f"  {engine:16} {seconds} s per update, {mebibytes} MiB per process")
    path = write_result(args.output, f"sharding-engines-cpu-{args.model}", torch.device("cpu"), {"engines": engines})
    print_line(f"wrote {path}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        run_main(lambda: measure_here(*sys.argv[2:]))
    run_main(main)
