"""Tiny runs give the losses and the final weights that were recorded in tests/golden/runs.json.

After a change that changes them on purpose, record them again, and say in the commit why they
changed:

    RECORD_GOLDEN_RUNS=1 python3 -m pytest tests/programs/test_golden.py

The file has the results of several environments: kinds of processor with a version of torch. The
losses must agree to rounding everywhere. The weights must agree in every bit in a recorded
environment; elsewhere the test compares the losses and is then reported as skipped.
"""

import json
import os
import platform
from pathlib import Path

import pytest
import torch
from conftest import ROOT, read_json, reported, write_shards
from rank_runs import Command, pretrain_ranks
from small_runs import resuming, steps_folder, train

from bert_recipe.utils.files import file_digest

RECORD = ROOT / "tests" / "golden" / "runs.json"
RECORDS = "RECORD_GOLDEN_RUNS" in os.environ
STEPS = 6
FLAGS = ("--max-steps", STEPS, "--log-freq", 1, "--gradient-merge-steps", 2)

# Name: number of processes, flags, relative tolerance of the losses.
RUNS = {
    "LAMB": (1, ("--optimizer", "Lamb"), 1e-5),
    "AdamW": (1, ("--optimizer", "AdamW", "--learning-rate", 1e-3), 1e-5),
    "LAMB in bfloat16": (1, ("--optimizer", "Lamb", "--amp"), 2e-3),
    "AdamW in bfloat16": (1, ("--optimizer", "AdamW", "--learning-rate", 1e-3, "--amp"), 2e-3),
    "LAMB with 16-bit weights": (1, ("--optimizer", "Lamb", "--use-pure-fp16"), 2e-3),
    "LAMB in 2 processes": (2, ("--optimizer", "Lamb"), 1e-5),
}


def environment() -> dict[str, str]:
    """What bit-identical results depend on."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    kind = {
        name.strip(): value.strip()
        for name, _, value in (line.partition(":") for line in reversed(lines))
    }
    names = ("model name", "cpu family", "model", "stepping", "microcode")
    return {
        "processor": " ".join(kind.get(name, "") for name in names)
        if lines
        else platform.processor(),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": os.environ["OMP_NUM_THREADS"],
        "torch": torch.__version__,
    }


def results(output: Path, phase: str) -> dict:
    """Losses and gradient norms of all steps, and the SHA-256 of the final weights."""
    report = reported(output / f"{phase}.json")
    report.pop(0, None)  # the loss before the first update, of a run that starts from weights
    assert list(report) == list(range(1, STEPS + 1))
    model = steps_folder(output, phase) / str(STEPS) / "model.safetensors"
    return {
        **{
            key: [report[step][key] for step in report]
            for key in ("loss", "grad_norm", "learning_rate")
        },
        "sha256": file_digest(model),
    }


@pytest.fixture(scope="module")
def recorded():
    """The recorded environments with their results, that of this machine first if it is among
    them. New results replace those of this machine at the end, if they are to be recorded.
    """
    records = read_json(RECORD) if RECORD.exists() else []
    here = environment()
    if not RECORDS:
        yield sorted(records, key=lambda record: record["environment"] != here)
        return
    record = {"environment": here, "runs": {}}
    yield [record]
    others = [other for other in records if other["environment"] != here]
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps([*others, record], indent=2) + "\n")


def compare(expected: dict, logged: dict, tolerance: float) -> None:
    """Compares the logged values to rounding."""
    assert logged["learning_rate"] == pytest.approx(expected["learning_rate"], rel=1e-6)
    assert logged["loss"] == pytest.approx(expected["loss"], rel=tolerance)
    assert logged["grad_norm"] == pytest.approx(expected["grad_norm"], rel=10 * tolerance)


@pytest.mark.parametrize("name", RUNS)
def test_both_phases_give_the_recorded_results_in_one_part_and_in_two(
    inputs, recorded, tmp_path, name
):
    """Phase 2 has samples of up to 64 tokens."""
    count, flags, tolerance = RUNS[name]
    long_shards = write_shards(tmp_path / "shards", sizes=(30,), length=64, predictions=10, seed=3)
    one, parts = tmp_path / "one", tmp_path / "parts"
    phase_2 = (
        "--from-phase1-final-params",
        steps_folder(one) / str(STEPS),
        "--input-dir",
        long_shards,
    )
    phase_flags = {
        "phase1": (),
        "phase2": (*phase_2, "--max-seq-length", 64, "--max-predictions-per-seq", 10),
    }
    commands = []
    for phase in phase_flags:

        def command(output: Path, *extra, phase=phase) -> list[str]:
            report = ("--report-file", output / f"{phase}.json")
            return inputs.command(
                output, *FLAGS, *flags, f"--{phase}", *phase_flags[phase], *report, *extra
            )

        part = command(parts, *resuming(parts, phase), "--steps-this-run", STEPS // 2)
        commands += [command(one), part, part]
    if count == 1:
        for argv in commands:
            train(argv)
    else:
        pretrain_ranks(tmp_path / "logs", *(Command(count, argv) for argv in commands)).check()
    measured = {f"{name}, {phase}": results(one, phase) for phase in phase_flags}
    in_parts = {f"{name}, {phase}": results(parts, phase) for phase in phase_flags}
    assert in_parts == measured, "a run in parts differs from the run in one"
    if RECORDS:
        recorded[0]["runs"] |= measured
        return
    for record in recorded:
        for run, values in measured.items():
            compare(record["runs"][run], values, tolerance)
    if recorded[0]["environment"] != environment():
        pytest.skip("the losses agree; no bits are recorded for this processor and torch")
    assert measured == {run: recorded[0]["runs"][run] for run in measured}
