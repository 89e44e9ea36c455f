"""The four calls of the first hour on a GPU, on a CPU at toy size."""

import json
import subprocess
import sys

import pytest

from benchmarks import gpu_first_hour
from benchmarks.gpu_first_hour import MODES, Call, largest_difference

# Compiling takes most of a toy call's time on a CPU. tests/test_benchmarks.py has compiled cases of device_checks.py.
QUICK_MODES = {name: mode for name, mode in MODES.items() if "--compile" not in mode[0]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    assert gpu_first_hour.main(["prepare", "--toy", "--folder", str(folder)]) == 0
    return folder


def run_call(name, folder, output) -> dict[str, dict]:
    code = gpu_first_hour.main([name, "--toy", "--folder", str(folder), "--output", str(output)])
    results = json.loads((output / f"{name}.json").read_text())["results"]
    assert code == 0, results
    return {result["name"]: result for result in results}


def test_training_in_all_modes_agrees_with_the_cpu(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_first_hour, "MODES", QUICK_MODES)
    results = run_call("training", folder, tmp_path)
    assert results["fp32, no dropout"]["found"] < 1e-4
    assert results["resumed"]["found"] < 1e-3
    assert "losses within" in results["amp, activation checkpointing"]["expected"]


def test_speed_and_defaults_measure_a_rate(folder, tmp_path):
    results = run_call("speed", folder, tmp_path) | run_call("defaults", folder, tmp_path)
    assert results["amp"]["found"]["tokens_per_second"] > 0
    assert {"amp, expandable segments", "optimizer", "start and checkpoints"} <= results.keys()


def test_kernels_start_both_programs(folder, tmp_path, monkeypatch):
    started = []

    def run(words, **_):
        started.append(words[1])
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(gpu_first_hour.subprocess, "run", run)
    run_call("kernels", folder, tmp_path)
    assert started == ["benchmarks/attention.py", "benchmarks/device_checks.py"]


def test_a_command_that_fails_or_hangs_does_not_end_the_others(tmp_path):
    call = Call(tmp_path, toy=True)
    script = tmp_path / "program.py"
    script.write_text("import sys, time; time.sleep(float(sys.argv[1])); sys.exit(int(sys.argv[2]))")
    assert not call.run("fails", [script, 0, 3], 60)
    assert not call.run("hangs", [script, 600, 0], 1)
    assert call.run("works", [script, 0, 0], 60)
    assert [result["exit_code"] for result in call.results] == [3, 124, 0]


def test_other_losses_are_not_as_expected(tmp_path):
    call = Call(tmp_path, toy=True)
    call.run("works", ["-c", "pass"], 60)
    difference = largest_difference([2.0, 1.0], [2.0, 1.1], None)
    call.judge("losses within 0.01", difference, difference < 0.01)
    assert difference == pytest.approx(0.1 / 1.1) and not call.results[0]["ok"]
    assert largest_difference([2.0], [2.0, 1.1], None) == float("inf")


def test_training_without_prepared_shards_is_one_error_line(tmp_path):
    command = [sys.executable, "benchmarks/gpu_first_hour.py", "training", "--toy", "--folder", str(tmp_path)]
    result = subprocess.run(
        [*command, "--output", str(tmp_path)], cwd=gpu_first_hour.ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and "prepare" in result.stderr
