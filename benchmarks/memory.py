#!/usr/bin/env python3
"""Peak memory of real pre-training steps on the CPU, beside the estimate of
bert_recipe/training/memory_estimate.py.

    python3 benchmarks/memory.py

Each case runs run_pretraining.py for three updates on sequences of full length, twice, in processes
of its own:

    allocated   the most bytes of tensors at any time, from torch's profiler
    resident    the most resident memory, above that of the process before the model is built. The C
                library returns freed memory to the system here, which it does not in a run: see
                device.keep_freed_memory
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import run_pretraining
from benchmarks.common.results import CPU, benchmark_parser, write_result
from benchmarks.common.shards import MAX_MASKED_OF, pretraining_flags, write_random_shards
from bert_recipe.checkpoint.model_choice import choose_model
from bert_recipe.config.arguments import make_run_config
from bert_recipe.model.encoders.bert import BertForPreTraining
from bert_recipe.training.memory_estimate import MemoryEstimate, MemorySettings, estimate_memory
from bert_recipe.utils.errors import run_main
from bert_recipe.utils.measure import peak_memory_bytes
from bert_recipe.utils.progress import print_line, progress_bar

LENGTH = 512
MAX_MASKED = MAX_MASKED_OF[LENGTH]
PRECISIONS = {"fp32": (), "amp": ("--amp",), "pure": ("--use-pure-fp16",)}
RETURNS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}


class Case(NamedTuple):
    model: str
    batch_size: int
    flags: tuple[str, ...]
    processes: int = 1

    def command(self, shards: Path, output: Path) -> list[str]:
        """The arguments of run_pretraining.py."""
        flags = (
            "--report-file",
            output / "report.json",
            "--device",
            "cpu",
            "--max-steps",
            3,
            "--benchmark",
        )
        flags += ("--benchmark-warmup-steps", 2, "--benchmark-steps", 1, *self.flags)
        return pretraining_flags(self.model, shards, output, LENGTH, self.batch_size, *flags)


def cases() -> list[Case]:
    """Each mode of activation checkpointing: in all precisions and with other flags for BERT-mini,
    with autocast for BERT-base.
    """
    first, size = "mini", 8
    modes = [("--activation-checkpoint", mode) for mode in ("none", "selective", "full")]
    return [
        *(Case(first, size, (*flags, *mode)) for flags in PRECISIONS.values() for mode in modes),
        Case(first, size, ("--optimizer", "AdamW")),
        Case(first, size, ("--gradient-merge-steps", "2", *modes[2])),
        Case(first, size, ("--gradient-merge-steps", "2", "--use-pure-fp16", *modes[2])),
        Case(first, size, ("--amp",), processes=2),
        *(
            Case(first, size, ("--amp", "--data-parallel-shard-degree", "2", *mode), processes=2)
            for mode in modes
        ),
        *(Case("base", 2, ("--amp", *mode)) for mode in modes),
    ]


# --- measured -------------------------------------------------------------------------------------


def allocated_peak(run: Callable[[], object]) -> int:
    """The most bytes of CPU tensors that are alive at any time of `run`, of those that it
    allocates.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted(
        (event["ts"], event["args"]) for event in events if event["name"] == "[memory]"
    )
    before = changes[0][1]["Total Allocated"] - changes[0][1]["Bytes"]
    return max(change["Total Allocated"] for _, change in changes) - before


def resident_peak(run: Callable[[], object]) -> int:
    """The most resident memory of `run`, above that of the process before."""
    weight = torch.ones(64, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):  # loads the libraries of matrix products
        (weight @ weight).sum().backward()
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to what is resident now
    before = peak_memory_bytes(CPU)
    run()
    return peak_memory_bytes(CPU) - before


MEASURES = {"allocated": allocated_peak, "resident": resident_peak}


def measure(case: Case, shards: Path, kind: str) -> int:
    """The largest peak of any process of `case`, in bytes."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.processes}")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            *(launcher if case.processes > 1 else ()),
            __file__,
            "--measure",
            kind,
            folder,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **RETURNS_MEMORY}
        words = [*command, *case.command(shards, Path(folder))]
        subprocess.run(words, env=environment, check=True, capture_output=True, text=True)
        return max(int(path.read_text()) for path in Path(folder).glob("*.bytes"))


def measure_here(kind: str, folder: str, *arguments: str) -> None:
    """A process of `measure`: writes the number of bytes to `folder`."""
    peak = MEASURES[kind](lambda: run_pretraining.main(list(arguments)))
    (Path(folder) / f"{os.environ.get('RANK', '0')}.bytes").write_text(str(peak))


# --- estimated ------------------------------------------------------------------------------------


def estimate(command: list[str], processes: int = 1) -> MemoryEstimate:
    config = make_run_config(
        run_pretraining.parse_arguments([*command, "--estimate-memory", str(processes)])
    )
    with torch.device("meta"):
        model = BertForPreTraining(choose_model(config.model).config)
    return estimate_memory(model, MemorySettings(config))


def main(argv: list[str] | None = None) -> None:
    args = benchmark_parser(__doc__).parse_args(argv)
    rows = []
    print_line("MiB: estimated, allocated, resident")
    todo = cases()
    with tempfile.TemporaryDirectory() as folder, progress_bar(len(todo), "memory", "case") as bar:
        shards = write_random_shards(Path(folder) / "shards", 64, LENGTH, MAX_MASKED)
        for case in todo:
            result = estimate(case.command(shards, Path(folder)), case.processes)
            sizes = {"estimated": result.total} | {
                kind: measure(case, shards, kind) for kind in MEASURES
            }
            figures = {name: round(size / 2**20, 1) for name, size in sizes.items()}
            ratio = round(figures["estimated"] / figures["allocated"], 3)
            rows.append(
                case._asdict()
                | figures
                | {"estimated_to_allocated": ratio, "moment": result.moment}
            )
            print_line("  ".join(map(str, rows[-1].values())))
            bar.update(1)
    write_result(args.output, "memory-cpu", CPU, {"mebibytes": rows})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        run_main(lambda: measure_here(*sys.argv[2:]))
    run_main(main)
