"""scripts/run_squad_seeds.sh and run_pretraining_seeds.sh, with programs whose reports depend on the seed."""

import json
import re
import statistics
import subprocess
import sys

import pytest
from conftest import ROOT
from launch_scripts import Checkout, assert_refused, pretraining_runs, program_arguments

import run_squad

# Appended to the recording python3: a report whose values depend on the seed.
REPORTING = """
if "--report-file" in flags:
    with open(flags["--report-file"], "a") as report:
        seed = int(flags["--seed"])
        values = [{"loss": 9.5}, {"loss": None}, {"loss": seed + 1.25}]
        values.append({"exact_match": seed + 80.5, "F1": seed * 2 + 85})
        for number, data in enumerate(values):
            step = [number + 1] if "loss" in data else []
            record = {"type": "LOG", "step": step, "data": data, "timestamp": number, "elapsedtime": number}
            report.write("DLLL " + json.dumps(record) + chr(10))
"""


@pytest.fixture
def checkout(tmp_path):
    checkout = Checkout(tmp_path)
    fake = tmp_path / "bin" / "python3"
    summary = (
        'if arguments[0].endswith("seed_summary.py"):\n    os.execv(sys.executable, [sys.executable, *arguments])\n'
    )
    recording = fake.read_text().replace("with open(os.environ", summary + "with open(os.environ", 1)
    fake.write_text(recording + REPORTING)
    return checkout


def table(output: str, metric: str) -> list[str]:
    """The cells of the row of `metric`."""
    (row,) = re.findall(rf"^\| {metric} \| (.*) \|$", output, re.MULTILINE)
    return row.split(" | ")


def test_squad_is_repeated_with_each_seed_and_summed_up(checkout):
    result = checkout.run("bash scripts/run_squad_seeds.sh 3,1,10 init 2 4 '' '' fp16 2")
    assert result.returncode == 0, result.stderr
    runs = [run_squad.parse_arguments(program_arguments(call, "run_squad.py")) for call in checkout.calls()]
    assert [(run.seed, run.output_dir.name, run.batch_size) for run in runs] == [
        (3, "seed_3", 4),
        (1, "seed_1", 4),
        (10, "seed_10", 4),
    ]
    exact_match, f1 = [83.5, 81.5, 90.5], [91, 87, 105]
    for metric, values in (("exact_match", exact_match), ("F1", f1)):
        expected = [*values, statistics.fmean(values), statistics.stdev(values)]
        assert [float(cell) for cell in table(result.stdout, metric)] == pytest.approx(expected, rel=1e-4)
    assert "| metric | seed 3 | seed 1 | seed 10 | mean | standard deviation |" in result.stdout


def test_pretraining_is_repeated_with_each_seed_and_its_last_losses_are_summed_up(checkout):
    result = checkout.run("bash scripts/run_pretraining_seeds.sh 0,2 32 6e-3 fp32 0 .1 5", RESULTS_DIR="out")
    assert result.returncode == 0, result.stderr
    assert [(run.seed, str(run.output_dir), run.phase2) for run in pretraining_runs(checkout)] == [
        (seed, f"out/seed_{seed}", phase2) for seed in (0, 2) for phase2 in (False, True)
    ]
    rows = re.findall(r"^\| loss \| (.*) \|$", result.stdout, re.MULTILINE)
    assert rows == ["1.25 | 3.25 | 2.25 | 1.414"] * 2


@pytest.mark.parametrize("seeds", ["", "one", "1,", "1,2,1"])
def test_bad_seeds_are_refused(checkout, seeds):
    for script in ("run_squad_seeds.sh", "run_pretraining_seeds.sh"):
        assert_refused(checkout.run(f"bash scripts/{script} '{seeds}' init"), checkout, "SEEDS")


def test_a_run_without_the_metric_is_an_error_and_not_a_hole_in_the_table(tmp_path):
    report = tmp_path / "report.json"
    record = {"type": "LOG", "step": [1], "data": {"loss": 1.0}, "timestamp": 0, "elapsedtime": 0}
    report.write_text(f"DLLL {json.dumps(record)}\n")
    command = [sys.executable, ROOT / "scripts" / "seed_summary.py", "F1", f"0={report}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == f"error: {report} holds no F1: run this seed to its end first\n"
