"""Pre-training gives the same losses, gradients and weights however the model and the data are
divided.
"""

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from conftest import reported, write_shards
from rank_runs import Command, pretrain, pretrain_ranks, rank, run_ranks
from safetensors.torch import load_file
from small_runs import losses, progress, resuming, steps_folder, steps_in, weights

from bert_recipe.checkpoint.folder import newest_checkpoint
from bert_recipe.config import LoaderConfig
from bert_recipe.data_loading.loader import StepLoader
from bert_recipe.data_loading.pretraining_dataset import PretrainingDataset
from bert_recipe.data_loading.sample_order import sample_order
from bert_recipe.parallel.fsdp import LocalShards

STEPS = 6
GLOBAL_BATCH = 23  # not a multiple of 2, 3 or 4
SHARDED = ("--data-parallel-shard-degree", -1)
HYBRID = ("--data-parallel-shard-degree", 2, "--data-parallel-replicate-degree", 2)

# Name: processes and flags. Each of the ways to reshard is used once.
LAYOUTS = {
    "one process": (1, ()),
    "DDP 2": (2, ()),
    "FSDP2 2": (2, SHARDED),
    "FSDP2 3": (3, (*SHARDED, "--fsdp-reshard-after-forward", "always")),
    "hybrid 2x2": (4, (*HYBRID, "--fsdp-reshard-after-forward", "never")),
}
OTHERS = [name for name in LAYOUTS if name != "one process"]


def first_moments(output: Path, step: int) -> dict[str, torch.Tensor]:
    """By the parameter's name."""
    tensors = load_file(steps_folder(output) / str(step) / "model_optimizer.safetensors")
    suffix = ".exp_avg"
    return {
        name.removesuffix(suffix): value for name, value in tensors.items() if name.endswith(suffix)
    }


@pytest.fixture(scope="module")
def runs(inputs, tmp_path_factory) -> dict[str, Path]:
    """Runs of 6 steps, which were stopped after the first."""
    folder = tmp_path_factory.mktemp("runs")
    commands = []
    for name, (count, flags) in LAYOUTS.items():
        output = folder / name
        argv = inputs.command(
            output,
            *("--max-steps", STEPS, "--global-batch-size", GLOBAL_BATCH, "--log-freq", 1),
            *("--eval-dir", inputs.held_out, "--eval-steps", STEPS, *resuming(output), *flags),
            dropout=False,
        )
        commands += [Command(count, [*argv, "--steps-this-run", "1"]), Command(count, argv)]
    pretrain_ranks(folder / "logs", *commands).check()
    return {name: folder / name for name in LAYOUTS}


@pytest.mark.parametrize("name", OTHERS)
def test_losses_gradients_weights_and_evaluations_agree_with_one_process(runs, name):
    outputs = [runs["one process"], runs[name]]
    alone, other = (reported(output / "report.json") for output in outputs)
    assert (
        alone.keys() == other.keys() >= set(range(1, STEPS + 1)) and GLOBAL_BATCH % LAYOUTS[name][0]
    )
    for step, entry in alone.items():
        keys = [key for key in entry if key in ("loss", "grad_norm") or key.startswith("eval_")]
        for key in keys:
            assert other[step][key] == pytest.approx(entry[key], rel=1e-5), (step, key)
    assert "eval_loss" in alone[1] and "eval_loss" in alone[STEPS]
    assert any(entry["grad_norm"] > 1 for entry in alone.values()), "gradients were never clipped"
    assert other[1]["loss"] == pytest.approx(alone[1]["loss"], rel=1e-6)
    # 1 - beta1 times the clipped gradients.
    expected, sharded = (first_moments(output, 1) for output in outputs)
    torch.testing.assert_close(sharded, expected, rtol=0, atol=1e-7)
    for key, moment in expected.items():
        if "key.bias" not in key:
            assert float((sharded[key] - moment).abs().max()) < 1e-5 * float(moment.abs().max()), (
                key
            )
    torch.testing.assert_close(
        weights(outputs[1], STEPS), weights(outputs[0], STEPS), rtol=0, atol=1e-5
    )
    assert progress(outputs[1], STEPS)["samples_consumed"] == STEPS * GLOBAL_BATCH


def test_with_dropout_fsdp2_and_ddp_gradients_are_equal_to_the_bit_when_reduced_once(
    inputs, tmp_path
):
    """Three steps of AdamW without clipping. The gradients of the first step are equal to the bit.
    Its update is equal to rounding: the kernel's vector instructions round other than its scalar
    ones, which take the last elements of each shard.
    """
    flags = ("--max-steps", 3, "--global-batch-size", 8, "--batch-size", 8, "--log-freq", 1)
    flags = (
        *flags,
        "--optimizer",
        "AdamW",
        "--max-grad-norm",
        1e9,
        "--num-steps-per-checkpoint",
        1,
    )
    layouts = {"DDP": (), "default": (), "always": (), "never": ()}
    commands = []
    for name in layouts:
        sharded = () if name == "DDP" else (*SHARDED, "--fsdp-reshard-after-forward", name)
        commands.append(Command(2, inputs.command(tmp_path / name, *flags, *sharded)))
    pretrain_ranks(tmp_path / "logs", *commands).check()
    dataset = PretrainingDataset(inputs.shards, 1210)
    config = LoaderConfig(8, 8, 32, 5)
    for own_rank in range(2):
        loader = StepLoader(dataset, config, 42, rank=own_rank, world_size=2)
        assert all(len(loader.load(step).micro_batches) == 1 for step in range(3))
    expected, last = (first_moments(tmp_path / "DDP", step) for step in (1, 3))
    for name in ("default", "always", "never"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "DDP"), rel=1e-6), name
        moments = first_moments(tmp_path / name, 1)
        assert [key for key in expected if not torch.equal(expected[key], moments[key])] == [], name
        torch.testing.assert_close(first_moments(tmp_path / name, 3), last, rtol=0, atol=1e-6)


def pretrain_with_nan(command: Command, nan_rank: int, nan_step: int) -> int:
    """A run in which one number of one rank's shard of the gradients is NaN in one step."""
    steps = iter(range(1, 100))
    take_gradients = LocalShards.take_gradients

    def spoil(shards: LocalShards) -> None:
        take_gradients(shards)
        if next(steps) == nan_step and rank() == nan_rank:
            shards.shards["bert.pooler.dense.weight"].grad[0, 0] = torch.nan

    LocalShards.take_gradients = spoil
    return pretrain(command)


@pytest.mark.parametrize("optimizer", ["Lamb", "AdamW"])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(
    inputs, tmp_path, optimizer
):
    """The skipped step takes its samples and changes nothing else: a run that starts at the next
    sample agrees.
    """
    flags = (
        "--max-steps",
        3,
        "--global-batch-size",
        8,
        "--log-freq",
        1,
        "--optimizer",
        optimizer,
        *SHARDED,
    )
    command = Command(2, inputs.command(tmp_path / "run", *flags))
    run_ranks(2, tmp_path / "logs", pretrain_with_nan, command, 1, 2).check()
    state = progress(tmp_path / "run", 3)
    assert (state["step"], state["samples_consumed"]) == (3, 4 * 8)
    steps = load_file(steps_folder(tmp_path / "run") / "3" / "model_optimizer.safetensors")
    assert {float(value) for name, value in steps.items() if name.endswith(".step")} == {3.0}
    assert all(bool(torch.isfinite(value).all()) for value in weights(tmp_path / "run", 3).values())


def pretrain_with_a_faulty_copy(commands: list[Command]) -> int:
    """One weight of the last rank has another bit in the first run, and another size in the second
    one.
    """
    take_gradients = LocalShards.take_gradients
    faults = iter(
        (
            lambda weight: weight.view(torch.int32)[:1].bitwise_xor_(16),
            lambda weight: weight[:1].fill_(1e3),
        )
    )
    for command in commands:
        spoil = next(faults)

        def take_and_spoil(shards: LocalShards, spoil=spoil) -> None:
            take_gradients(shards)
            if rank() == 3:
                spoil(shards.shards["bert.pooler.dense.weight"].data)

        LocalShards.take_gradients = take_and_spoil
        if code := pretrain(command):
            return code
    return 0


def test_copies_of_a_hybrid_mesh_are_compared_at_each_checkpoint(inputs, tmp_path):
    argvs = [
        inputs.command(tmp_path / name, "--max-steps", 1, *LAYOUTS["hybrid 2x2"][1])
        for name in ("bit", "size")
    ]
    commands = [Command(4, argv) for argv in argvs]
    result = run_ranks(4, tmp_path / "logs", pretrain_with_a_faulty_copy, commands)
    assert result.exit_codes == [2] * 4, result.errors
    (line,) = result.error_lines()
    assert "step 1: the copies of the weights" in line and steps_in(tmp_path / "size") == []
    assert "warning: step 1: the copies" in (tmp_path / "logs" / "0.out").read_text()
    assert steps_in(tmp_path / "bit") == ["1"]


SHARD = "--data-parallel-shard-degree"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (f"{SHARD} -1 --enable-cpu-offload", ["--enable-cpu-offload", "CPU"]),
        ("--input-dir /nowhere", ["/nowhere"]),
        (f"{SHARD} -1 --max-seq-length 64", ["this run has 64"]),
        (
            "--phase2 --from-checkpoint CHECKPOINT",
            ["the phase or task was phase1; this run uses phase2"],
        ),
        (
            f"{SHARD} -1 --optimizer AdamW --dropout 0 --from-checkpoint CHECKPOINT",
            ["saved with Lamb, not AdamW"],
        ),
    ],
)
def test_an_error_is_one_line_over_all_ranks_and_nothing_is_saved(
    runs, inputs, tmp_path, flags, words
):
    checkpoint = str(steps_folder(runs["FSDP2 2"]) / "1")
    flags = [checkpoint if flag == "CHECKPOINT" else flag for flag in flags.split()]
    command = Command(2, inputs.command(tmp_path / "output", "--max-steps", 3, *flags))
    result = pretrain_ranks(tmp_path / "logs", command)
    assert result.exit_codes == [2] * 2, result.errors
    (line,) = result.error_lines()
    assert "Traceback" not in "".join(result.errors)
    for word in words:
        assert word in line
    assert checkpoint in flags or not (tmp_path / "output").exists()
    assert steps_in(tmp_path / "output") == []


@pytest.mark.parametrize(
    "count, flags", [(1, ()), (2, ()), (2, SHARDED)], ids=["one process", "DDP", "FSDP2"]
)
def test_a_damaged_row_of_one_rank_stops_all_at_the_same_update_with_their_state_saved(
    inputs, tmp_path, count, flags
):
    """It is read by the last process, for the fourth update."""
    samples, batch = 64, 8
    row = int(sample_order(np.array([4 * batch - 1]), samples, seed=42)[0])
    path = write_shards(tmp_path / "shards", sizes=(samples,)) / "shard_000.hdf5"
    with h5py.File(path, "r+") as file:
        file["segment_ids"][row, 0] = 7
    flags = ("--input-dir", path.parent, "--global-batch-size", batch, "--max-steps", 6, *flags)
    result = pretrain_ranks(
        tmp_path / "log", Command(count, inputs.command(tmp_path / "output", *flags))
    )
    assert result.exit_codes == [2] * count
    assert [
        f"shard_000.hdf5, row {row}: segment_ids holds 7" in line for line in result.error_lines()
    ] == [True]
    assert steps_in(tmp_path / "output") == ["3"]
    assert progress(tmp_path / "output", 3)["samples_consumed"] == 3 * batch
    assert newest_checkpoint(steps_folder(tmp_path / "output")).name == "3"  # with a valid manifest
