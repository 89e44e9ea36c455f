#!/usr/bin/env python3
"""Compares a run that is killed twice with the same run, not killed.

    python3 benchmarks/killed_run.py --input-dir quickstart/hdf5/seq_128_pred_20/training

Pre-trains BERT-tiny twice with the same command. One run is killed by SIGKILL as soon as it has
logged an update of KILLED_AFTER, and started again.
"""

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.results import CPU, ROOT, benchmark_parser, write_result
from bert_recipe.reporting.records import read_sessions
from bert_recipe.utils.command_line import REQUIRED, Flag
from bert_recipe.utils.errors import UserError, run_main
from bert_recipe.utils.progress import print_line

UPDATES, UPDATES_PER_CHECKPOINT, UPDATES_PER_RECORD = 120, 20, 1
KILLED_AFTER = (35, 75)
Losses = list[tuple[int, float]]  # update, loss


def command(shards: Path, output: Path) -> list[str]:
    flags = {
        "input-dir": shards,
        "output-dir": output,
        "config-file": ROOT / "bert_configs" / "bert-tiny-uncased.json",
        "report-file": output / "log.json",
        "max-steps": UPDATES,
        "num-steps-per-checkpoint": UPDATES_PER_CHECKPOINT,
        "log-freq": UPDATES_PER_RECORD,
        "max-seq-length": 128,
        "batch-size": 8,
        "learning-rate": 1e-2,
        "warmup-proportion": 0.1,
        "device": "cpu",
    }
    words = [f"--{name}={value}" for name, value in flags.items()]
    return [sys.executable, str(ROOT / "run_pretraining.py"), *words, "--resume-from-checkpoint"]


def read_losses(output: Path) -> list[Losses]:
    """The losses that each process of a run logged."""
    log = output / "log.json"
    sessions = read_sessions(log)[0] if log.is_file() else []
    losses = [
        [(step, data["loss"]) for step, _, data in session.steps if "loss" in data]
        for session in sessions
    ]
    return [process for process in losses if process]


def run(shards: Path, output: Path, killed_after: tuple[int, ...] = ()) -> list[Losses]:
    for update in (*killed_after, None):
        process = subprocess.Popen(
            command(shards, output), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        while update is not None and process.poll() is None:
            if any(step >= update for losses in read_losses(output) for step, _ in losses):
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.02)
        _, errors = process.communicate()
        expected = 0 if update is None else -signal.SIGKILL
        if process.returncode != expected:
            raise UserError(f"run_pretraining.py ended with {process.returncode}: {errors[-500:]}")
    return read_losses(output)


def number_of_different_tensors(output: Path, other: Path) -> tuple[int, int]:
    """Of the last checkpoints: how many tensors differ in any bit, and how many there are."""
    (file,) = output.glob(f"*/phase1/{UPDATES}/model.safetensors")
    tensors, others = load_file(file), load_file(other / file.relative_to(output))
    if tensors.keys() != others.keys():
        raise UserError("the checkpoints of the two runs have different tensors")
    different = sum(not torch.equal(tensor, others[name]) for name, tensor in tensors.items())
    return different, len(tensors)


def main(argv: list[str] | None = None) -> None:
    args = benchmark_parser(
        __doc__,
        Flag("--input-dir", Path, REQUIRED, "shards of 128 tokens"),
    ).parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        killed, uninterrupted = Path(folder, "killed"), Path(folder, "uninterrupted")
        (expected,) = run(args.input_dir, uninterrupted)
        processes = run(args.input_dir, killed, KILLED_AFTER)
        different, tensors = number_of_different_tensors(killed, uninterrupted)
    losses = dict(expected)
    difference = max(abs(loss - losses[step]) for process in processes for step, loss in process)
    text = (
        f"BERT-tiny, killed twice: {different} of {tensors} tensors differ at the end, "
        f"largest difference of a loss {difference:g}"
    )
    result = {
        "different tensors": different,
        "tensors": tensors,
        "largest difference of a loss": difference,
        "losses of the run that was not killed": expected,
        "losses of the killed run's processes": processes,
    }
    write_result(args.output, "killed_run", CPU, result)
    print_line(text)


if __name__ == "__main__":
    run_main(main)
