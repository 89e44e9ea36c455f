"""Kept checkpoints, the moving average of the weights, and the evaluation before the first
update.
"""

import errno
import json
import shutil

import pytest
import torch
from conftest import assert_refused, read_json, reported
from processes import exit_codes, start_several
from safetensors.torch import load_file
from small_runs import losses, progress, resuming, run_here, steps_folder, steps_in, train, weights

import bert_recipe.checkpoint.averages
from bert_recipe.checkpoint.folder import verify_checkpoint
from bert_recipe.optimization import precision

DECAY = 0.75
FLAGS = ("--max-steps", 6, "--num-steps-per-checkpoint", 1, "--ema", DECAY)


def averages(output) -> dict[str, torch.Tensor]:
    return load_file(steps_folder(output) / "ema" / "model.safetensors")


@pytest.fixture(scope="module")
def start(inputs, tmp_path_factory):
    """The flags of the weights that the runs start from."""
    output = tmp_path_factory.mktemp("start")
    train(inputs.command(output, "--max-steps", 1, "--seed", 7))
    return "--init-checkpoint", steps_folder(output) / "1"


@pytest.fixture(scope="module")
def whole(inputs, start, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole")
    flags = (*FLAGS, *start, "--keep-every", 1, "--eval-dir", inputs.held_out)
    train(inputs.command(output, *flags, dropout=False))
    return output


def check_averages(start, output, last_step: int) -> None:
    """That `ema` has the average of the starting weights and of those in all checkpoints."""
    steps = [load_file(start[1] / "model.safetensors")]
    steps += [weights(output, step) for step in range(1, last_step + 1)]
    found = averages(output)
    assert found.keys() == steps[0].keys()
    for name, tensor in found.items():
        expected = steps[0][name].double()
        for later in steps[1:]:
            expected = DECAY * expected + (1 - DECAY) * later[name].double()
        torch.testing.assert_close(tensor.double(), expected, atol=1e-6, rtol=1e-5)


def test_the_average_is_that_of_the_weights_after_each_update(start, whole):
    check_averages(start, whole, 6)
    verify_checkpoint(steps_folder(whole) / "6")


def test_a_skipped_step_does_not_change_the_average(inputs, start, tmp_path, monkeypatch):
    monkeypatch.setattr(precision, "has_float16", lambda device: True)
    monkeypatch.setattr(precision.LossScale, "GROWTH_INTERVAL", 1)  # until it overflows
    flags = (*FLAGS, *start, "--keep-every", 1)
    flags += ("--amp", "--amp-dtype", "float16", "--use-dynamic-loss-scaling")
    train(inputs.command(tmp_path, *flags, "--scale-loss", 2.0**14))
    samples = progress(tmp_path, 6)["samples_consumed"] - progress(tmp_path, 1)["samples_consumed"]
    assert samples > 5 * 4, "no step was skipped after the first update"
    check_averages(start, tmp_path, 6)


def test_a_run_in_parts_has_the_same_averages(inputs, start, whole, tmp_path):
    command = inputs.command(tmp_path, *FLAGS, *start, *resuming(tmp_path), dropout=False)
    for _ in range(2):
        train([*command, "--steps-this-run", "3"])
    found = averages(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in averages(whole).items())
    assert steps_in(tmp_path) == ["4", "5", "6", "ema"]
    train(
        inputs.command(
            tmp_path, *FLAGS[:-2], *start, "--max-steps", 7, *resuming(tmp_path), dropout=False
        )
    )
    assert steps_in(tmp_path) == ["5", "6", "7"], "the averages of step 6 are not those of step 7"


def disturb(folder, disturbance: str) -> None:
    """What a kill between a checkpoint and its averages, or a hand, leaves."""
    ema = folder / "ema"
    if disturbance == "older":
        older = folder / "5" / "model_ema.safetensors"
        (ema / "model.safetensors").unlink()
        shutil.copy2(older, ema / "model.safetensors")
        manifest = read_json(ema / "manifest.json")
        files = read_json(folder / "5" / "manifest.json")["files"]
        manifest["files"]["model.safetensors"] = files["model_ema.safetensors"]
        (ema / "manifest.json").write_text(json.dumps(manifest))
    elif disturbance == "removed":
        shutil.rmtree(ema)
    elif disturbance == "file removed":
        (ema / "config.json").unlink()
    else:
        with (ema / "vocab.txt").open("r+b") as file:
            file.write(b"x")


@pytest.mark.parametrize("is_finished", [True, False])
@pytest.mark.parametrize("disturbance", ["older", "removed", "file removed", "damaged"])
def test_the_same_command_repairs_the_averages(
    inputs, start, whole, tmp_path, disturbance, is_finished
):
    folder = steps_folder(tmp_path)
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    disturb(folder, disturbance)
    command = inputs.command(
        *(tmp_path, *FLAGS, *start, "--keep-every", 1, "--eval-dir", inputs.held_out),
        *(*resuming(tmp_path), "--max-steps", 6 if is_finished else 7),
        dropout=False,
    )
    train(command)
    verify_checkpoint(folder / "ema")
    last = folder / ("6" if is_finished else "7") / "model_ema.safetensors"
    assert (folder / "ema" / "model.safetensors").read_bytes() == last.read_bytes()


def test_a_disk_that_is_full_before_the_averages_loses_nothing(inputs, tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    command = inputs.command(tmp_path, *FLAGS, *resuming(tmp_path), dropout=False)
    train([*command, "--steps-this-run", "3"])
    with monkeypatch.context() as patch:
        patch.setattr(bert_recipe.checkpoint.averages, "atomic_folder", full)
        assert_refused(run_here(command), "cannot write the checkpoint", "No space left")
    train(command)
    last = steps_folder(tmp_path) / "6" / "model_ema.safetensors"
    assert (steps_folder(tmp_path) / "ema" / "model.safetensors").read_bytes() == last.read_bytes()


def test_shards_have_the_same_averages(inputs, start, whole, tmp_path):
    flags = (*FLAGS, *start, "--batch-size", 2, "--data-parallel-shard-degree", -1)
    assert exit_codes(
        start_several(inputs.command(tmp_path, *flags, dropout=False), tmp_path / "log")
    ) == [0, 0]
    torch.testing.assert_close(averages(tmp_path), averages(whole), atol=1e-5, rtol=1e-4)


def test_the_averages_are_evaluated_as_the_model_that_they_are(inputs, whole, tmp_path):
    """A run that starts from their folder evaluates it before its first update, which changes
    nothing.
    """
    flags = (
        "--init-checkpoint",
        steps_folder(whole) / "ema",
        "--max-steps",
        1,
        "--eval-dir",
        inputs.held_out,
    )
    train(inputs.command(tmp_path, *flags, dropout=False))
    verify_checkpoint(steps_folder(whole) / "ema")
    expected, found = reported(whole / "report.json")[6], reported(tmp_path / "report.json")[0]
    assert found["eval_loss"] == pytest.approx(expected["eval_ema_loss"], rel=1e-5)
    assert expected["eval_ema_loss"] != expected["eval_loss"]
    other = tmp_path / "without"
    train(inputs.command(other, *flags[:4], dropout=False))
    assert losses(other) == losses(tmp_path)


def test_multiples_of_keep_every_are_kept_beside_the_newest_three(inputs, tmp_path):
    train(
        inputs.command(
            tmp_path, "--max-steps", 9, "--num-steps-per-checkpoint", 1, "--keep-every", 4
        )
    )
    assert steps_in(tmp_path) == ["4", "7", "8", "9"]
