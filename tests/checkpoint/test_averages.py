"""Kept checkpoints, step 0, the moving average of the weights, and the evaluation before the first
update.
"""

import pytest
import torch
from conftest import reported
from processes import exit_codes, start_several
from safetensors.torch import load_file
from small_runs import losses, progress, resuming, steps_folder, steps_in, train, weights

import precision
from checkpoint.folder import verify_checkpoint

DECAY = 0.75
FLAGS = ("--max-steps", 6, "--num-steps-per-checkpoint", 1, "--save-initial", "--ema", DECAY)


def averages(output) -> dict[str, torch.Tensor]:
    return load_file(steps_folder(output) / "ema" / "model.safetensors")


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole")
    train(
        inputs.command(
            output, *FLAGS, "--keep-every", 1, "--eval-dir", inputs.held_out, dropout=False
        )
    )
    return output


def check_averages(output, last_step: int) -> None:
    """That `ema` has the average of the weights in all checkpoints."""
    steps = [weights(output, step) for step in range(last_step + 1)]
    found = averages(output)
    assert found.keys() == steps[0].keys()
    for name, tensor in found.items():
        expected = steps[0][name].double()
        for later in steps[1:]:
            expected = DECAY * expected + (1 - DECAY) * later[name].double()
        torch.testing.assert_close(tensor.double(), expected, atol=1e-6, rtol=1e-5)


def test_the_average_is_that_of_the_weights_after_each_update(whole):
    check_averages(whole, 6)
    verify_checkpoint(steps_folder(whole) / "6")


def test_a_skipped_step_does_not_change_the_average(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(precision, "has_float16", lambda device: True)
    monkeypatch.setattr(precision.LossScale, "GROWTH_INTERVAL", 1)  # until it overflows
    flags = ("--max-steps", 6, "--num-steps-per-checkpoint", 1, "--save-initial", "--keep-every", 1)
    flags += ("--amp", "--amp-dtype", "float16", "--use-dynamic-loss-scaling")
    train(inputs.command(tmp_path, *flags, "--scale-loss", 2.0**14, "--ema", DECAY))
    samples = progress(tmp_path, 6)["samples_consumed"] - progress(tmp_path, 1)["samples_consumed"]
    assert samples > 5 * 4, "no step was skipped after the first update"
    check_averages(tmp_path, 6)


def test_a_run_in_parts_has_the_same_averages(inputs, whole, tmp_path):
    command = inputs.command(tmp_path, *FLAGS, *resuming(tmp_path), dropout=False)
    for _ in range(2):
        train([*command, "--steps-this-run", "3"])
    found = averages(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in averages(whole).items())
    assert steps_in(tmp_path) == ["0", "4", "5", "6", "ema"]
    train(
        inputs.command(tmp_path, *FLAGS[:-2], "--max-steps", 7, *resuming(tmp_path), dropout=False)
    )
    assert steps_in(tmp_path) == ["0", "5", "6", "7"], (
        "the averages of step 6 are not those of step 7"
    )


def test_shards_have_the_same_averages(inputs, whole, tmp_path):
    flags = (*FLAGS, "--batch-size", 2, "--data-parallel-shard-degree", -1)
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
