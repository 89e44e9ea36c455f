"""Runs that are stopped in every way there is, and go on as if they had not been."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from conftest import assert_refused
from small_runs import (
    Ground,
    ended,
    losses,
    progress,
    resuming,
    run_here,
    start,
    start_several,
    steps_folder,
    steps_in,
    torchrun,
    trained,
    weights,
)

from trainer import seed_of_step

KILLS = 8


@pytest.fixture(scope="module")
def ground(tmp_path_factory) -> Ground:
    return Ground.make(tmp_path_factory.mktemp("ground"))


def model_bytes(output: Path, step: int, phase: str = "phase1") -> bytes:
    return (steps_folder(output, phase) / str(step) / "model.safetensors").read_bytes()


def wait_for(condition, timeout: float = 60) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.01)


def every_loss_ever_logged(output: Path) -> set[tuple[int, float]]:
    """Also of steps that were made more than once, because the run was stopped after them and before a checkpoint."""
    report = output / "report.json"
    lines = report.read_text().splitlines() if report.exists() else []
    entries = [json.loads(line.removeprefix("DLLL ")) for line in lines]
    return {(entry["step"][0], entry["data"]["loss"]) for entry in entries if "loss" in entry["data"]}


def last_step(output: Path) -> int:
    return max((step for step, _ in every_loss_ever_logged(output)), default=0)


def test_a_run_killed_at_random_moments_gives_the_losses_and_weights_of_one_that_was_not(ground, tmp_path):
    flags = ("--max-steps", 60, "--log-freq", 1, "--num-steps-per-checkpoint", 3, "--gradient-merge-steps", 2)
    whole, killed, log = tmp_path / "whole", tmp_path / "killed", tmp_path / "killed.log"
    trained(ground.command(whole, *flags))

    random_ = random.Random(5)
    command = ground.command(killed, *flags, *resuming(killed))
    exit_codes = []
    for target in sorted(random_.sample(range(0, 52), KILLS)):
        process = start(command, log)
        wait_for(lambda process=process, target=target: last_step(killed) >= target or not process.is_alive())
        time.sleep(random_.uniform(0, 0.06))  # in the middle of a step, of a checkpoint, or of nothing
        process.kill()
        process.join()
        exit_codes.append(process.exitcode)
        assert all(name.isdigit() or name.endswith(".tmp") for name in steps_in(killed))
    assert exit_codes.count(-signal.SIGKILL) >= KILLS - 1, (exit_codes, log.read_text())
    assert ended([start(command, log)]) == [0], log.read_text()

    assert every_loss_ever_logged(killed) == every_loss_ever_logged(whole)
    assert model_bytes(killed, 60) == model_bytes(whole, 60)
    assert steps_in(killed) == steps_in(whole) == ["54", "57", "60"]


@pytest.mark.parametrize(
    "precision",
    [
        (),
        ("--optimizer", "AdamW"),
        ("--amp",),
        ("--use-pure-fp16", "--optimizer", "AdamW"),
        ("--use-pure-fp16", "--seed", "7", "--model-prefix", "bert"),
    ],
    ids=" ".join,
)
def test_a_run_in_parts_is_the_run_in_one(ground, tmp_path, precision):
    flags = ("--max-steps", 12, "--log-freq", 1, *precision)
    trained(ground.command(tmp_path / "whole", *flags))
    for part in (1, 5, 6):
        output = tmp_path / "parts"
        trained(ground.command(output, *flags, *resuming(output), "--steps-this-run", part))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == 12
    assert model_bytes(tmp_path / "parts", 12) == model_bytes(tmp_path / "whole", 12)


@pytest.mark.parametrize("signal_, code", [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_stop_signal_saves_and_the_same_command_goes_on(ground, tmp_path, signal_, code):
    flags = ("--max-steps", 40, "--log-freq", 1, "--num-steps-per-checkpoint", 1000)
    trained(ground.command(tmp_path / "whole", *flags))
    output, log = tmp_path / "stopped", tmp_path / "log"
    command = ground.command(output, *flags, *resuming(output))
    process = start(command, log)
    wait_for(lambda: last_step(output) >= 3)
    os.kill(process.pid, signal_)
    assert ended([process]) == [code], log.read_text()
    (step,) = steps_in(output)
    assert int(step) < 40
    assert f"stopped by {signal_.name}: the same command goes on from here" in log.read_text()
    trained(command)
    assert losses(output) == losses(tmp_path / "whole")


def test_sigterm_under_torchrun_saves_on_all_processes(ground, tmp_path):
    flags = ("--max-steps", 5000, "--log-freq", 1, "--num-steps-per-checkpoint", 10000)
    output, log = tmp_path / "output", tmp_path / "log"
    with torchrun(ground.command(output, *flags, *resuming(output)), log) as process:
        wait_for(lambda: last_step(output) >= 3)
        workers = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        os.kill(workers[-1], signal.SIGTERM)  # one is enough
        assert process.wait(60) == 0, log.read_text()
    assert len(steps_in(output)) == 1
    assert "Traceback" not in log.read_text()


def test_from_two_processes_to_one_and_back_no_sample_is_skipped_or_repeated(ground, tmp_path):
    """Without dropout, whose random numbers depend on the process, the losses say that the batches are the same."""
    flags = ("--max-steps", 18, "--log-freq", 1)
    whole, mixed = tmp_path / "whole", tmp_path / "mixed"
    trained(ground.command(whole, *flags, "--gradient-merge-steps", 4, dropout=False))

    def part(merge_steps: int) -> list[str]:
        merge = ("--gradient-merge-steps", merge_steps, "--steps-this-run", 6)
        return ground.command(mixed, *flags, *merge, *resuming(mixed), dropout=False)

    for processes in (2, 1, 2):
        runs = start_several(part(4 // processes), tmp_path / "log", processes) if processes > 1 else None
        if runs is None:
            trained(part(4))
        else:
            assert ended(runs) == [0, 0], (tmp_path / "log.0").read_text()
    assert [progress(mixed, step)["samples_consumed"] for step in (6, 12, 18)] == [96, 192, 288]
    assert losses(mixed) == pytest.approx(losses(whole), rel=1e-5)


def test_phase_2_starts_from_phase_1_and_then_from_its_own_checkpoints(ground, tmp_path):
    flags = ("--max-steps", 4, "--log-freq", 1)
    trained(ground.command(tmp_path, *flags, "--phase1"))
    phase_2 = (*flags, "--phase2", "--from-phase1-final-params", steps_folder(tmp_path) / "4")
    phase_2 = ground.command(tmp_path, *phase_2, *resuming(tmp_path, "phase2"), "--learning-rate", 0)
    trained([*phase_2, "--steps-this-run", "1"])
    given, taken = weights(tmp_path, 4), weights(tmp_path, 1, "phase2")
    assert all(torch.equal(given[name], taken[name]) for name in given)  # a learning rate of 0 moves nothing
    assert progress(tmp_path, 1, "phase2")["samples_consumed"] == 4, "phase 2 reads its data from the start"

    trained([*phase_2, "--steps-this-run", "1", "--learning-rate", "0.01"])
    result = trained([*phase_2, "--learning-rate", "0.01"])
    assert "resumed from" in result.stdout and "phase2/2" in result.stdout
    assert steps_in(tmp_path, "phase2") == ["1", "2", "4"]


def test_another_optimizer_is_refused(ground, tmp_path):
    trained(ground.command(tmp_path, "--max-steps", 2))
    result = run_here(ground.command(tmp_path, "--max-steps", 4, *resuming(tmp_path), "--optimizer", "AdamW"))
    assert_refused(result, "phase1/2", "Lamb", "AdamW", "--from-pretrained-params")
    assert steps_in(tmp_path) == ["2"]


def test_a_checkpoint_of_another_phase_is_refused(ground, tmp_path):
    trained(ground.command(tmp_path, "--max-steps", 2))
    folder = steps_folder(tmp_path) / "2"
    result = run_here(ground.command(tmp_path, "--max-steps", 4, "--phase2", "--from-checkpoint", folder))
    assert_refused(result, str(folder), "phase1", "--from-phase1-final-params")


def test_a_change_of_seed_or_data_is_said(ground, tmp_path):
    trained(ground.command(tmp_path, "--max-steps", 2))
    result = trained(
        ground.command(tmp_path, "--max-steps", 3, *resuming(tmp_path), "--seed", 1, "--input-dir", ground.held_out)
    )
    assert "warning: --seed was 42 and is 1 now" in result.stdout
    assert "warning: the number of samples was 64 and is 20 now" in result.stdout


def test_a_finished_run_started_again_does_nothing(ground, tmp_path):
    command = ground.command(tmp_path, "--max-steps", 3, *resuming(tmp_path))
    trained(command)
    before = {path: path.stat().st_mtime_ns for path in steps_folder(tmp_path).rglob("*")}
    assert "step 3 of 3" in trained(command).stdout
    assert {path: path.stat().st_mtime_ns for path in steps_folder(tmp_path).rglob("*")} == before


def test_a_process_that_ends_ends_the_others_and_loses_nothing(ground, tmp_path):
    flags = ("--max-steps", 5000, "--log-freq", 1, "--num-steps-per-checkpoint", 10000)
    processes = start_several(ground.command(tmp_path, *flags), tmp_path / "log")
    wait_for(lambda: last_step(tmp_path) >= 2)
    processes[1].kill()
    assert ended(processes) == [2, -signal.SIGKILL]
    said = (tmp_path / "log.0").read_text()
    assert "error: another process of this run has ended" in said
    assert "Traceback" not in said
    (saved,) = map(int, steps_in(tmp_path))
    assert last_step(tmp_path) <= saved <= last_step(tmp_path) + 1  # an update may be made and not yet logged


def test_a_checkpoint_that_cannot_be_written_ends_all_processes(ground, tmp_path):
    flags = ("--max-steps", 5000, "--log-freq", 1, "--num-steps-per-checkpoint", 4)
    steps_folder(tmp_path).mkdir(parents=True)
    (steps_folder(tmp_path) / "8").write_text("in the way")
    processes = start_several(ground.command(tmp_path, *flags), tmp_path / "log")
    assert ended(processes) == [2, 0]
    assert "error: cannot write the checkpoint" in (tmp_path / "log.0").read_text()
    assert 8 <= last_step(tmp_path) <= 12, "the run went on without checkpoints"
    assert steps_in(tmp_path) == ["4", "8"]


def test_every_step_and_every_process_has_random_numbers_of_its_own():
    seeds = {
        seed_of_step(seed, position, rank) for seed in range(4) for position in range(0, 400, 8) for rank in range(8)
    }
    assert len(seeds) == 4 * 50 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
