"""The calls of the first hour on a GPU, on a CPU at toy size."""

import json
import tarfile

import pytest

from benchmarks import gpu_first_hour
from benchmarks.gpu_first_hour import MODES, Call, largest_difference
from utils.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, name = tmp_path_factory.mktemp("gpu"), "CPU, ModernBERT, Muon"
    gpu_first_hour.REFERENCES = {name: gpu_first_hour.REFERENCES[name]}
    assert gpu_first_hour.main(["prepare", "--toy", "--folder", str(folder)]) == 0
    return folder


def run_call(name, folder, output) -> dict[str, dict]:
    code = gpu_first_hour.main([name, "--toy", "--folder", str(folder), "--output", str(output)])
    results = json.loads((output / f"{name}.json").read_text())["results"]
    assert code == 0, results
    return {
        result["name"]: [judged["found"] for judged in result.get("judged", [])]
        for result in results
    }


def test_training_in_all_modes_agrees_with_the_cpu(folder, tmp_path, monkeypatch):
    # Each mode is a program's start. The others differ in flags that other tests use.
    monkeypatch.setattr(
        gpu_first_hour, "MODES", {name: MODES[name] for name in ("ModernBERT, Muon",)}
    )
    results = run_call("training", folder, tmp_path)
    assert results["ModernBERT, Muon"][0] < 1e-4
    profile = json.loads((tmp_path / "ModernBERT-Muon-watched.json").read_text())["profile"]
    assert "Self CPU time total" in profile


def test_faults_end_with_an_error_or_are_resumed(folder, tmp_path):
    results = run_call("faults", folder, tmp_path)
    assert results["fault"] == [2] and results["resumed"] == [0.0] and "stopped" in results


def test_speed_measures_a_rate(folder, tmp_path, monkeypatch):
    # Amp is slow.
    monkeypatch.setattr(gpu_first_hour, "SPEEDS", {"amp": (*gpu_first_hour.SPEEDS["amp"][:-1], ())})
    monkeypatch.setattr(gpu_first_hour, "compare_speeds", lambda *_: None)
    assert run_call("speed", folder, tmp_path)["amp"][0]["tokens_per_second"] > 0


def test_the_other_calls_start_the_benchmarks_which_have_tests_of_their_own(
    folder, tmp_path, monkeypatch
):
    started = []

    monkeypatch.setattr(
        Call, "run", lambda call, _name, command, *_: started.append(command[0]) or call._write()
    )
    for name in ("correctness", "compiled_checks", "costs", "compiled_speed", "tasks"):
        run_call(name, folder, tmp_path)
    names = ("device_checks", "common/watched", "common/watched", "device_checks", "device_checks")
    names += ("startup_and_checkpoints", "pretraining_step", "common/watched")
    assert started == ["-m", *(f"benchmarks/{name}.py" for name in names)]
    with pytest.raises(UserError, match=r"run `gpu_first_hour\.py prepare` first"):
        gpu_first_hour.main(
            ["training", "--toy", "--folder", str(tmp_path), "--output", str(tmp_path)]
        )


def test_the_commands_of_a_call_have_the_time_of_their_limits(folder, tmp_path, monkeypatch):
    limits = []

    def run(call, name, _command, timeout, _environment=None):
        limits.append(timeout)
        call.results.append({"exit_code": 1, "ok": False})
        (call.output / f"{gpu_first_hour.file_name(name)}.log").touch()

    monkeypatch.setattr(Call, "run", run)
    for name in sorted(gpu_first_hour.CALLS.keys() - {"prepare"}):
        limits.clear()
        gpu_first_hour.main([name, "--folder", str(folder), "--output", str(tmp_path)])
        assert 0 < sum(limits) <= gpu_first_hour.CALL_SECONDS, name


def test_a_command_that_fails_or_hangs_does_not_end_the_others(tmp_path, monkeypatch):
    call = Call(tmp_path, False, tmp_path / "call.json")
    script = tmp_path / "program.py"
    script.write_text(
        "import sys, time; time.sleep(float(sys.argv[1])); sys.exit(int(sys.argv[2]))"
    )
    assert not call.run("fails", [script, 0, 3], 60)
    assert not call.run("hangs", [script, 600, 0], 1)
    assert call.run("works", [script, 0, 0], 60)
    difference = largest_difference([2.0, 1.0], [2.0, 1.1], None)
    call.judge("losses within 0.01", difference, difference < 0.01)
    assert difference == pytest.approx(0.1 / 1.1) and not call.results[-1]["ok"]
    assert largest_difference([2.0], [2.0, 1.1], None) == float("inf")
    monkeypatch.setattr(gpu_first_hour, "CALL_SECONDS", 1)
    assert not call.run("late", [script, 600, 0], 60)
    assert [result["exit_code"] for result in call.results] == [3, 124, 0, 124]
    assert json.loads((tmp_path / "call.json").read_text())["results"] == call.results
    (tmp_path / "checkpoint").mkdir()
    gpu_first_hour.archive(tmp_path, tmp_path / "call.tar.gz")
    with tarfile.open(tmp_path / "call.tar.gz") as file:
        assert file.getnames() == ["call.json", "fails.log", "hangs.log", "late.log", "works.log"]
