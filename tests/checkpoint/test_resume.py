"""Runs that are stopped in any way, and continue with the losses and weights of a run that was not
stopped.
"""

import errno
import fcntl
import os
import random
import re
import resource
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import assert_refused, reported
from processes import PATIENCE, environments, exit_codes, start, start_several, wait_until
from rank_runs import Command, pretrain, rank, run_ranks
from small_runs import (
    all_logged_losses,
    files_of,
    last_step,
    losses,
    progress,
    resuming,
    run_here,
    steps_folder,
    steps_in,
    train,
    weights,
)

import run_pretraining
from bert_recipe.optimization import precision
from bert_recipe.training import evaluation
from bert_recipe.training.trainer import seed_of_step

KILLS = 5


def model_bytes(output: Path, step: int) -> bytes:
    return (steps_folder(output) / str(step) / "model.safetensors").read_bytes()


def train_until_killed(argv):
    """run_pretraining.py, killed `delay` seconds after step `target` was logged: by itself, because
    on a busy machine another process might be late.
    """
    output, target, delay, *argv = argv

    def kill():
        wait_until(lambda: last_step(output) >= target)
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    return run_pretraining.main(argv)


def test_run_killed_at_random_moments_gives_the_losses_and_weights_of_an_uninterrupted_run(
    inputs, tmp_path
):
    flags = (
        "--max-steps",
        36,
        "--log-freq",
        1,
        "--num-steps-per-checkpoint",
        3,
        "--gradient-merge-steps",
        2,
    )
    uninterrupted = tmp_path / "uninterrupted"
    killed = tmp_path / "killed"
    log = tmp_path / "killed.log"
    train(inputs.command(uninterrupted, *flags))

    random_ = random.Random(5)
    command = inputs.command(killed, *flags, *resuming(killed))
    codes = []
    for target in sorted(random_.sample(range(0, 30), KILLS)):
        delay = random_.uniform(0, 0.06)  # during a step, a checkpoint or neither
        process = start([killed, target, delay, *command], log, function=train_until_killed)
        codes += exit_codes([process])
        assert all(re.fullmatch(r"\d+(\.tmp-\w+)?", name) for name in steps_in(killed))
    assert codes.count(-signal.SIGKILL) >= KILLS - 1, (codes, log.read_text())
    assert exit_codes([start(command, log)]) == [0], log.read_text()

    assert all_logged_losses(killed) == all_logged_losses(uninterrupted)
    assert model_bytes(killed, 36) == model_bytes(uninterrupted, 36)
    assert steps_in(killed) == steps_in(uninterrupted) == ["30", "33", "36"]


@pytest.mark.parametrize(
    "flags",
    [
        ("--use-pure-fp16", "--optimizer", "AdamW"),
        ("--use-pure-fp16", "--seed", "7", "--model-prefix", "bert"),
        ("--fp16", "--use-dynamic-loss-scaling", "--scale-loss", "1e7"),  # overflows, and halves
        (
            "--global-batch-size",
            "9",
            "--initial-global-batch-size",
            "2",
            "--batch-size-warmup-sequences",
            "50",
        ),
    ],
    ids=" ".join,
)
def test_run_in_parts_is_bit_identical_to_a_run_in_one(inputs, tmp_path, monkeypatch, flags):
    monkeypatch.setattr(precision, "has_float16", lambda device: True)  # slow on CPUs, but correct
    flags = ("--max-steps", 12, "--log-freq", 1, *flags)
    train(inputs.command(tmp_path / "uninterrupted", *flags))
    for part in (1, 5, 6):
        output = tmp_path / "parts"
        train(inputs.command(output, *flags, *resuming(output), "--steps-this-run", part))
    assert losses(tmp_path / "parts") == losses(tmp_path / "uninterrupted")
    assert losses(tmp_path / "uninterrupted").keys() >= set(range(1, 13))
    assert model_bytes(tmp_path / "parts", 12) == model_bytes(tmp_path / "uninterrupted", 12)


@pytest.mark.parametrize(
    "signal_, code, resumes",  # a closed terminal sends SIGHUP
    [(signal.SIGTERM, 0, True), (signal.SIGHUP, 0, True), (signal.SIGINT, 130, False)],
)
def test_stop_signal_saves_and_says_how_to_continue(inputs, tmp_path, signal_, code, resumes):
    flags = ("--max-steps", 100_000, "--warmup-proportion", 0)  # it does not end before the signal
    flags = (*flags, "--log-freq", 1, "--num-steps-per-checkpoint", 100_000)
    output, log = tmp_path / "stopped", tmp_path / "log"
    command = inputs.command(output, *flags, *(resuming(output) if resumes else ()))
    process = start([*command, "--overwrite"] if resumes else command, log)
    wait_until(lambda: last_step(output) >= 3)
    os.kill(process.pid, signal_)
    assert exit_codes([process]) == [code], log.read_text()
    (step,) = steps_in(output)
    advice = "rerun the same command"
    advice += " to resume, without --overwrite" if resumes else " with --resume-from-checkpoint"
    assert f"stopped by {signal_.name}: {advice};" in log.read_text()
    train([*command, *(() if resumes else ["--resume-from-checkpoint"]), "--steps-this-run", "5"])
    train(inputs.command(tmp_path / "uninterrupted", *flags, "--steps-this-run", int(step) + 5))
    assert losses(output) == losses(tmp_path / "uninterrupted")


def test_change_of_the_number_of_processes_skips_and_repeats_no_sample(inputs, tmp_path):
    """Without dropout, whose random numbers depend on the rank, equal losses show that the batches
    are the same; and that --dropout 0 is a config without dropout.
    """
    flags = ("--max-steps", 18, "--log-freq", 1)
    uninterrupted, mixed = tmp_path / "uninterrupted", tmp_path / "mixed"
    train(inputs.command(uninterrupted, *flags, "--gradient-merge-steps", 4, "--dropout", 0))

    def part(merge_steps: int) -> list[str]:
        merge = ("--gradient-merge-steps", merge_steps, "--steps-this-run", 6)
        return inputs.command(mixed, *flags, *merge, *resuming(mixed), dropout=False)

    for processes in (2, 1, 2):
        runs = (
            start_several(part(4 // processes), tmp_path / "log", processes)
            if processes > 1
            else None
        )
        if runs is None:
            train(part(4))
        else:
            assert exit_codes(runs) == [0, 0], (tmp_path / "log.0").read_text()
    # The same command with another number of processes would have another global batch.
    words = "was 16, of 2 processes; with 1 it would be 8: to keep it, give --global-batch-size 16"
    assert_refused(run_here([*part(2), "--max-steps", "20"]), words)
    assert [progress(mixed, step)["samples_consumed"] for step in (6, 12, 18)] == [96, 192, 288]
    assert losses(mixed) == pytest.approx(losses(uninterrupted), rel=1e-5)


def test_a_run_of_three_processes_in_parts_is_the_run_in_one(inputs, tmp_path):
    """From three addends on, the order of a sum matters: DDP must reduce the first step as the
    later ones.
    """
    flags = (
        "--max-steps",
        6,
        "--log-freq",
        1,
        "--optimizer",
        "AdamW",
        "--num-steps-per-checkpoint",
        100,
    )
    for output, parts in ((tmp_path / "whole", (6,)), (tmp_path / "parts", (2, 4))):
        for part in parts:
            command = inputs.command(output, *flags, *resuming(output), "--steps-this-run", part)
            assert exit_codes(start_several(command, tmp_path / "log", 3)) == [0, 0, 0]
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert model_bytes(tmp_path / "parts", 6) == model_bytes(tmp_path / "whole", 6)


def test_phase_2_starts_from_phase_1_and_then_from_its_own_checkpoints(inputs, tmp_path):
    flags = ("--max-steps", 4, "--log-freq", 1)
    train(inputs.command(tmp_path, *flags, "--phase1"))
    phase_2 = (*flags, "--phase2", "--from-phase1-final-params", steps_folder(tmp_path) / "4")
    phase_2 = inputs.command(
        tmp_path, *phase_2, *resuming(tmp_path, "phase2"), "--learning-rate", 0
    )
    train([*phase_2, "--steps-this-run", "1"])
    given = weights(tmp_path, 4)
    taken = weights(tmp_path, 1, "phase2")
    assert all(torch.equal(given[name], taken[name]) for name in given)  # the learning rate is 0
    assert progress(tmp_path, 1, "phase2")["samples_consumed"] == 4, (
        "phase 2 reads its data from the start"
    )

    train([*phase_2, "--steps-this-run", "1", "--learning-rate", "0.01"])
    result = train([*phase_2, "--learning-rate", "0.01"])
    assert "resumed from" in result.stdout and "phase2/2" in result.stdout
    assert steps_in(tmp_path, "phase2") == ["1", "2", "4"]


def test_finished_run_that_is_started_again_changes_nothing(inputs, tmp_path):
    command = inputs.command(tmp_path, "--max-steps", 3, *resuming(tmp_path))
    train(command)
    before = files_of(steps_folder(tmp_path))
    assert "step 3 of 3" in train(command).stdout
    assert files_of(steps_folder(tmp_path)) == before


def test_a_disk_that_is_full_at_the_start_is_named_with_the_path(inputs, tmp_path):
    """A limit of the size of files acts as a full disk does: the file is made and cannot grow."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        result = run_here(inputs.command(tmp_path, "--max-steps", 1, "--report-file", os.devnull))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_refused(result, f"error: {steps_folder(tmp_path)}/", "larger than the limit")


def test_a_file_system_without_locks_is_named(inputs, tmp_path, monkeypatch):
    def fail(_file, _operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    result = train(inputs.command(tmp_path, "--max-steps", 1))
    assert (
        f"warning: {steps_folder(tmp_path)} cannot be locked (No locks available)" in result.stderr
    )
    assert steps_in(tmp_path) == ["1"]


@pytest.mark.parametrize(
    ("number", "restarts", "codes"),
    [
        (signal.SIGTERM, "0", [0, 0]),
        (signal.SIGKILL, "0", [2, -signal.SIGKILL]),
        # torchrun starts them again, but not after 0 and 2
        (signal.SIGTERM, "100", [os.EX_TEMPFAIL] * 2),
        (signal.SIGKILL, "100", [os.EX_TEMPFAIL, -signal.SIGKILL]),
    ],
)
def test_a_signal_to_one_process_ends_all_and_no_step_is_lost(
    inputs, tmp_path, number, restarts, codes
):
    flags = ("--max-steps", 5000, "--log-freq", 1, "--num-steps-per-checkpoint", 10000)
    command, log = inputs.command(tmp_path, *flags), tmp_path / "log"
    processes = [
        start(
            command,
            log.with_suffix(f".{rank}"),
            place | {"TORCHELASTIC_MAX_RESTARTS": restarts},
        )
        for rank, place in enumerate(environments(2))
    ]
    wait_until(lambda: last_step(tmp_path) >= 3)
    os.kill(processes[1].pid, number)
    assert exit_codes(processes) == codes, (tmp_path / "log.0").read_text()
    log = (tmp_path / "log.0").read_text()
    assert ("error: another rank failed" in log) == (
        number == signal.SIGKILL
    ) and "Traceback" not in log
    (saved,) = map(int, steps_in(tmp_path))
    # The last update may not be logged yet.
    assert last_step(tmp_path) <= saved <= last_step(tmp_path) + 1


def stop_in_an_evaluation(stopped: Command, resumed: Command) -> int:
    """Process 1 gets SIGTERM in the first evaluation, which would take long."""
    read = evaluation.batches_in_order

    def interrupted(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2 * PATIENCE)

    if rank() == 1:
        evaluation.batches_in_order = interrupted
    if code := pretrain(stopped):
        return code
    evaluation.batches_in_order = read
    return pretrain(resumed)


def test_a_signal_to_one_process_ends_an_evaluation_of_all(inputs, tmp_path):
    """The run that resumes makes it."""
    held_out = ("--eval-dir", inputs.held_out, "--eval-steps", 2, "--max-steps", 3)
    flags = (*held_out, "--global-batch-size", 8, "--dropout", 0)
    run, whole = tmp_path / "run", tmp_path / "whole"
    stopped = inputs.command(run, *flags)
    commands = [Command(2, argv) for argv in (stopped, [*stopped, *map(str, resuming(run))])]
    run_ranks(2, tmp_path / "logs", stop_in_an_evaluation, *commands).check()
    assert "step 2 of 3; checkpoint in" in (tmp_path / "logs" / "0.out").read_text()
    train(inputs.command(whole, *flags))
    resumed, expected = (reported(output / "report.json") for output in (run, whole))
    for step in (2, 3):
        assert resumed[step]["eval_loss"] == pytest.approx(expected[step]["eval_loss"], rel=1e-5)


def test_checkpoint_that_cannot_be_written_ends_all_processes(inputs, tmp_path):
    flags = ("--max-steps", 5000, "--log-freq", 1, "--num-steps-per-checkpoint", 4)
    steps_folder(tmp_path).mkdir(parents=True)
    (steps_folder(tmp_path) / "8").write_text("in the way")
    processes = start_several(inputs.command(tmp_path, *flags), tmp_path / "log")
    codes = exit_codes(processes)
    assert codes[0] == 2
    assert codes[1] in (0, 2)  # rank 1 stops on request (0), or because rank 0 has exited (2)
    assert "error: cannot write the checkpoint" in (tmp_path / "log.0").read_text()
    assert 8 <= last_step(tmp_path) <= 12, "the run went on without checkpoints"
    assert steps_in(tmp_path) == ["4", "8"]


def test_every_step_and_rank_has_its_own_random_seed():
    seeds = {
        seed_of_step(seed, position, rank)
        for seed in range(4)
        for position in range(0, 400, 8)
        for rank in range(8)
    }
    assert len(seeds) == 4 * 50 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
