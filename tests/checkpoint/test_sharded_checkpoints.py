"""Checkpoints of sharded runs: written by all ranks without gathering, and loadable at any number
of ranks.
"""

import hashlib
import json
import os
import pickle
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import read_json
from rank_runs import Command, pretrain, pretrain_ranks, rank, run_ranks
from safetensors.torch import load_file
from small_runs import progress, resuming, steps_folder
from torch.distributed.tensor import DTensor

import bert_recipe.checkpoint.folder
import bert_recipe.checkpoint.writer
import run_pretraining
from bert_recipe.checkpoint.folder import checkpoint_steps, verify_checkpoint
from bert_recipe.checkpoint.writer import CheckpointWriter
from bert_recipe.optimization import adamw
from bert_recipe.optimization.protocol import OptimizerSpec, StateLayout, StateTensor, adam_state
from bert_recipe.optimization.registry import SPECS
from bert_recipe.training.trainer import Trainer

STEP = 2
SHARDED = ("--data-parallel-shard-degree", -1)
HYBRID = ("--data-parallel-shard-degree", 2, "--data-parallel-replicate-degree", 2)
TENSOR_FILES = ("model.safetensors", "model_optimizer.safetensors")
LARGE = 4096  # bytes: more than any norm or flag, less than most tensors


def refuse(what: str):
    def raise_error(*_args, **_kwargs):
        raise AssertionError(f"{what} was called")

    return raise_error


def forbid_pickle() -> None:
    import jinja2.bccache  # noqa: F401 (pickles the version of Python, for caches that nobody uses)

    for name in ("load", "loads", "Unpickler", "dump", "dumps", "Pickler"):
        setattr(pickle, name, refuse(f"pickle.{name}"))
    torch.load, torch.save = refuse("torch.load"), refuse("torch.save")


def forbid_gathering() -> None:
    """From here on no collective hands large tensors on, but the trainer's forward and backward
    passes.
    """
    DTensor.full_tensor = refuse("full_tensor")
    allowed: list[bool] = []
    training_step = Trainer.training_step

    def step(*args, **kwargs):
        allowed.append(True)
        try:
            return training_step(*args, **kwargs)
        finally:
            allowed.pop()

    def guard(name: str):
        collective = getattr(dist, name)

        def guarded(*args, **kwargs):
            tensors = [
                value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)
            ]
            assert allowed or all(tensor.nbytes < LARGE for tensor in tensors), (
                f"{name} of a large tensor"
            )
            return collective(*args, **kwargs)

        setattr(dist, name, guarded)

    Trainer.training_step = step
    for name in (
        "all_reduce",
        "broadcast",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_single",
    ):
        if hasattr(dist, name):  # the last one is new in torch 2.13
            guard(name)
    for name in (
        "gather",
        "all_gather_object",
        "gather_object",
        "broadcast_object_list",
        "scatter",
    ):
        setattr(dist, name, refuse(f"dist.{name}"))


def pretrain_without_pickle_or_gathering(*commands: Command) -> int:
    forbid_pickle()
    forbid_gathering()
    return pretrain(*commands)


@pytest.fixture(scope="module")
def saved(inputs, tmp_path_factory) -> Path:
    """The output folder of two steps at 2 sharded ranks, with a resume between them."""
    folder = tmp_path_factory.mktemp("saved")
    output = folder / "output"
    argv = inputs.command(
        output, "--max-steps", 4, "--steps-this-run", 1, *SHARDED, *resuming(output)
    )
    commands = (Command(2, argv), Command(2, argv))
    run_ranks(2, folder / "logs", pretrain_without_pickle_or_gathering, *commands).check()
    return output


def temporary_folders(output: Path) -> list[Path]:
    return list(steps_folder(output).glob("*.tmp*"))


def test_save_and_resume_neither_pickle_nor_gather(saved):
    assert checkpoint_steps(steps_folder(saved)) == [1, 2] and progress(saved, STEP)["step"] == STEP


def load_and_save_again(command: Command, target: Path) -> int:
    """Saves the state right after it was restored."""

    def save_here(trainer: Trainer, _loader) -> int:
        trainer.state.step += 1  # a folder of its own
        writer = CheckpointWriter(
            target, trainer.distributed, sharded=trainer.parallel.shard_group is not None
        )
        writer.write(trainer.state.capture())
        writer.wait()
        return 0

    Trainer.train = save_here
    return pretrain(command)


def tensor_bytes(path: Path) -> dict[str, bytes]:
    """The bytes of each tensor. The header of the optimizer's file also has a digest of the run's
    progress, which differs with the flags and processes of a run.
    """
    tensors = load_file(path)
    return {
        name: tensor.flatten().view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(
    ("flag", "count", "flags"),
    [
        *(
            ("--from-checkpoint", *run)
            for run in ((1, ()), (2, ()), (2, SHARDED), (3, SHARDED), (4, HYBRID))
        ),
        ("--from-pretrained-params", 3, SHARDED),
    ],
    ids=["one process", "DDP 2", "FSDP2 2", "FSDP2 3", "hybrid 2x2", "weights alone"],
)
def test_a_checkpoint_of_2_sharded_ranks_is_loaded_exactly(
    saved, inputs, tmp_path, flag, count, flags
):
    """And so has no row of the vocabulary's padding, which one process does not save either
    (test_new_encoder.py).
    """
    flags = ("--max-steps", 4, flag, steps_folder(saved) / str(STEP), *flags)
    flags = (*flags, "--global-batch-size", 24)  # for all these numbers of processes
    command = Command(count, inputs.command(tmp_path / "output", *flags))
    run_ranks(count, tmp_path / "logs", load_and_save_again, command, tmp_path / "again").check()
    (again,) = (tmp_path / "again").iterdir()
    for name in TENSOR_FILES if flag == "--from-checkpoint" else TENSOR_FILES[:1]:
        before = steps_folder(saved) / str(STEP) / name
        assert tensor_bytes(again / name) == tensor_bytes(before), name
    verify_checkpoint(again)


def pretrain_with_small_blocks(folder: Path, command: Command) -> int:
    """Blocks of 8 KiB, so that there are many; writes which of them this rank hashed."""
    bert_recipe.checkpoint.folder.HASH_BLOCK = 8 << 10
    hashed = []
    block_digests = bert_recipe.checkpoint.writer.block_digests

    def record(blocks):
        hashed.extend((path.name, block) for path, block in blocks)
        return block_digests(blocks)

    bert_recipe.checkpoint.writer.block_digests = record
    code = pretrain(command)
    (folder / f"{rank()}.json").write_text(json.dumps(hashed))
    return code


def test_every_rank_hashes_its_share_of_the_blocks(inputs, tmp_path):
    output = tmp_path / "output"
    command = Command(2, inputs.command(output, "--max-steps", 1, *SHARDED))
    run_ranks(2, tmp_path / "logs", pretrain_with_small_blocks, tmp_path, command).check()
    first, second = ({tuple(b) for b in read_json(tmp_path / f"{r}.json")} for r in range(2))
    folder = steps_folder(output) / "1"
    manifest = read_json(folder / "manifest.json")
    listed = {
        (name, block)
        for name, file in manifest["files"].items()
        for block in range(len(file["sha256"]))
    }
    assert not first & second and first | second == listed
    assert len(listed) > 50 and abs(len(first) - len(second)) <= 1
    for name, file in manifest["files"].items():
        content = (folder / name).read_bytes()
        blocks = [content[start : start + (8 << 10)] for start in range(0, len(content), 8 << 10)]
        assert file["sha256"] == [hashlib.sha256(block).hexdigest() for block in blocks]


def pretrain_and_fail_to_write(command: Command, stage: str, how: str) -> int:
    """Rank 1 fails in one of the stages of the second checkpoint."""
    function = getattr(bert_recipe.checkpoint.writer, stage)
    calls = []

    def fail(*args):
        calls.append(stage)
        if rank() == 1 and len(calls) == 2:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(28, "No space left on device")
        return function(*args)

    setattr(bert_recipe.checkpoint.writer, stage, fail)
    return pretrain(command)


STAGES = pytest.mark.parametrize("stage", ["_write_parts", "_hash_blocks"])


@STAGES
def test_a_write_error_on_one_rank_ends_all_with_one_error_line(inputs, tmp_path, stage):
    output = tmp_path / "output"
    argv = inputs.command(output, "--max-steps", 9, "--num-steps-per-checkpoint", 1, *SHARDED)
    result = run_ranks(
        2, tmp_path / "logs", pretrain_and_fail_to_write, Command(2, argv), stage, "error"
    )
    assert result.exit_codes == [2, 2], result.errors
    (line,) = result.error_lines()
    assert "the disk is full" in line and str(steps_folder(output) / "2") in line
    assert checkpoint_steps(steps_folder(output)) == [1] and not temporary_folders(output)
    verify_checkpoint(steps_folder(output) / "1")


@STAGES
def test_a_rank_killed_while_writing_leaves_a_temporary_folder_that_the_next_run_removes(
    inputs, tmp_path, stage
):
    output = tmp_path / "output"
    flags = ("--max-steps", 3, "--num-steps-per-checkpoint", 1, *SHARDED, *resuming(output))
    command = Command(2, inputs.command(output, *flags, dropout=False))
    result = run_ranks(2, tmp_path / "logs", pretrain_and_fail_to_write, command, stage, "killed")
    assert result.exit_codes == [2, -signal.SIGKILL], result.errors
    assert len(result.error_lines()) == 1
    assert checkpoint_steps(steps_folder(output)) == [1]
    (temporary,) = temporary_folders(output)
    assert temporary.name.startswith("2.tmp-")
    (temporary / "model.safetensors").write_bytes(b"of another attempt")

    straight = tmp_path / "straight"
    flags = ("--max-steps", 3, "--num-steps-per-checkpoint", 1, *SHARDED)
    whole = Command(2, inputs.command(straight, *flags, dropout=False))
    pretrain_ranks(tmp_path / "logs", Command(2, command.argv), whole).check()
    assert checkpoint_steps(steps_folder(output)) == [1, 2, 3] and not temporary_folders(output)
    for name in TENSOR_FILES:
        resumed, expected = (steps_folder(folder) / "3" / name for folder in (output, straight))
        assert tensor_bytes(resumed) == tensor_bytes(expected), name


def pretrain_in_own_folder(folders: list[Path], argv: list[str]) -> int:
    os.environ.update(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")
    os.chdir(folders[rank()])
    return run_pretraining.main(argv)


@pytest.mark.parametrize(
    ("strategy", "resume"),
    [(SHARDED, False), (SHARDED, True), ((), False), ((), True)],
    ids=["sharded", "sharded, resumed", "DDP", "DDP, resumed"],
)
def test_storage_that_not_all_nodes_see_is_one_error_line(
    saved, inputs, tmp_path, strategy, resume
):
    """Relative paths in two working directories stand for the disks of two machines."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    flags = ("--report-file", "None")
    if resume:
        shutil.copytree(saved, folders[0] / "output")
        flags = (*flags, *resuming(Path("output")))
    argv = inputs.command(Path("output"), "--max-steps", 3, *strategy, *flags)
    result = run_ranks(2, tmp_path / "logs", pretrain_in_own_folder, folders, argv)
    assert result.exit_codes == [2, 2], result.errors
    (line,) = result.error_lines()
    assert "must be on storage that all machines share" in line and "output/custom/phase1" in line
    assert not (folders[1] / "output").exists()
    assert not list(folders[0].rglob(".probe-*"))


class AdamW(adamw.AdamW):
    """With a vector per parameter that every rank has, such as a factor of a preconditioner."""

    def step(self) -> None:
        super().step()
        for state in self.state.values():
            state["factor"] = state.get("factor", torch.zeros(3)) + torch.arange(1.0, 4.0)


def state_with_factors(model, shapes) -> StateLayout:
    factor = {"factor": StateTensor((3,), "all")}
    return {name: tensors | factor for name, tensors in adam_state(model, shapes).items()}


def pretrain_with_factors(*commands: Command) -> int:
    make = SPECS["AdamW"].make
    adamw.AdamW = AdamW
    SPECS["AdamW"] = OptimizerSpec(make, state_with_factors)
    return pretrain(*commands)


def test_state_that_every_rank_has_is_saved_once_and_restored_at_any_number_of_ranks(
    inputs, tmp_path
):
    flags = ("--max-steps", 4, "--optimizer", "AdamW", "--global-batch-size", 8)
    argv = inputs.command(tmp_path, *flags, *resuming(tmp_path))
    commands = [
        Command(
            count, [*argv, "--steps-this-run", str(steps), *map(str, SHARDED if count > 1 else ())]
        )
        for count, steps in ((2, 2), (1, 1), (2, 1))
    ]
    run_ranks(2, tmp_path / "logs", pretrain_with_factors, *commands).check()
    tensors = load_file(steps_folder(tmp_path) / "4" / "model_optimizer.safetensors")
    factors = [tensor.tolist() for name, tensor in tensors.items() if name.endswith(".factor")]
    assert len(factors) == len(tensors) / 4 and all(factor == [4, 8, 12] for factor in factors)
