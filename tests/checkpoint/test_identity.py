"""Identity by content: a run's data, settings, folder, record and best model."""

import json
import re
import shutil
from functools import partial

import pytest
import torch
from conftest import add_checksums, assert_refused, change_row, write_shards
from small_runs import files_of, resuming, rewrite_manifest, run_here, steps_folder, train

from bert_recipe.checkpoint import writer
from bert_recipe.checkpoint.folder import (
    find_model_folder,
)
from bert_recipe.checkpoint.record import read_record
from bert_recipe.checkpoint.rows import TensorRows
from bert_recipe.checkpoint.writer import Checkpoint
from bert_recipe.training import trainer as trainer_module
from bert_recipe.training.run import Run
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import lock_folder
from bert_recipe.utils.json_files import read_json

STEP_2 = ("--max-steps", 2)


@pytest.fixture(scope="module")
def finished(inputs, tmp_path_factory):
    """The folder of steps of a run of two updates."""
    output = tmp_path_factory.mktemp("finished")
    train(inputs.command(output, *STEP_2))
    return steps_folder(output)


@pytest.mark.parametrize("have_checksums", [True, False])
def test_a_changed_row_is_refused_and_a_copied_folder_is_not(inputs, tmp_path, have_checksums):
    """The digest reads few rows. Checksums are compared where sizes and times are not those of the
    checkpoint.
    """
    first = write_shards(tmp_path / "first")
    copy = tmp_path / "copy"
    if have_checksums:
        add_checksums(*first.iterdir())
    command = partial(inputs.command, tmp_path / "out", *resuming(tmp_path / "out"), "--max-steps")
    reason = "data copied or changed since the checkpoint"
    train(command(1, "--input-dir", first))
    assert reason not in train(command(2, "--input-dir", first)).stdout
    shutil.copytree(first, copy, copy_function=shutil.copy)  # with new times
    output = train(command(3, "--input-dir", copy)).stdout
    change_row(copy / "shard_000.hdf5")
    if have_checksums:
        assert f"{reason}: 2 of 2 shards match their checksums\n" in output
        assert_refused(
            run_here(command(4, "--input-dir", copy)),
            "shard_000.hdf5: segment_ids does not match its checksum",
        )
    else:
        warning = (
            f"warning: {reason}: 0 of 2 shards match their checksums; 2 have none, such as "
            f"{copy}/shard_000.hdf5"
        )
        assert warning in output and warning in train(command(4, "--input-dir", copy)).stdout


def test_a_fork_says_what_it_changes(inputs, finished, tmp_path):
    flags = (
        "--from-checkpoint",
        finished / "2",
        "--max-steps",
        3,
        "--learning-rate",
        0.5,
    )
    output = train(
        inputs.command(tmp_path, *flags, "--batch-size", 2, "--eval-dir", inputs.held_out)
    ).stdout
    for change in (
        "--learning-rate was 0.01 and is 0.5",
        "the global batch size was 4 and is 2",
    ):
        assert output.count(f"note: {change} now\n") == 1
    assert "--eval-dir was" not in output
    others = write_shards(tmp_path / "others", sizes=(20,), seed=5)
    flags = (*resuming(tmp_path), "--max-steps", 4, "--eval-dir", others)
    assert (
        "note: the digest of --eval-dir was rows:" in train(inputs.command(tmp_path, *flags)).stdout
    )


PROGRESS = "2/model_progress.json"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"identity": None}, "identity is None, expected an object"),
        ({"step": 1}, "step is 1, and the folder is 2"),
        ({"step": "2"}, "step is '2', expected a whole number"),
        ({"train_seconds": 10**400}, "train_seconds is int, expected a number"),
        ({"num_samples": ...}, "num_samples is missing"),
        ({"arguments": []}, "arguments is [], expected an object"),
    ],
    ids=str,
)
def test_values_that_no_run_has_written_are_refused(inputs, finished, tmp_path, values, words):
    folder = steps_folder(tmp_path)
    shutil.copytree(finished, folder)
    stored = read_json(folder / PROGRESS, "")
    values = {name: value for name, value in (stored | values).items() if value is not ...}
    (folder / PROGRESS).write_text(json.dumps(values))
    rewrite_manifest(folder / "2")
    assert_refused(run_here(inputs.command(tmp_path, *resuming(tmp_path), "--max-steps", 3)), words)


def test_a_runs_folder_stands_for_its_own_best_model_else_for_the_newest_step(
    finished, tmp_path, capsys
):
    folder = tmp_path / "phase1"
    shutil.copytree(finished, folder)
    (tmp_path / "no run" / "1").mkdir(parents=True)
    assert find_model_folder(folder) == find_model_folder(folder / "2") == folder / "2"
    assert f"{folder}: using 2, the newest valid checkpoint" in capsys.readouterr().out
    with pytest.raises(UserError, match=re.escape(f"did you mean {folder}?")):
        find_model_folder(tmp_path)  # an --output-dir
    shutil.copytree(finished / "2", folder / "1")
    (folder / "best").symlink_to("1")
    assert find_model_folder(folder) == folder / "1"
    assert f"{folder}: using 1, the model with the best score" in capsys.readouterr().out


def test_a_folder_with_the_name_of_a_step_that_is_no_checkpoint_is_named(
    inputs, finished, tmp_path
):
    shutil.copytree(finished, steps_folder(tmp_path))
    (steps_folder(tmp_path) / "5").mkdir()
    output = train(inputs.command(tmp_path, *resuming(tmp_path), "--max-steps", 3)).stdout
    assert f"warning: checkpoint {steps_folder(tmp_path) / '5'} has no manifest.json" in output
    assert (steps_folder(tmp_path) / "5").is_dir()


@pytest.mark.parametrize("change", ["renamed", "removed", "removed while it is written"])
def test_a_run_whose_folder_goes_away_saves_and_stops(inputs, tmp_path, monkeypatch, change):
    """And writes no second folder in its place."""
    folder = steps_folder(tmp_path / "out")
    moved = tmp_path / "moved"
    module, name = trainer_module.Trainer, "_read_step"
    if change == "removed while it is written":
        module, name = writer, "_hash_blocks"
    original = getattr(module, name)

    def change_folder(*arguments):
        result = original(*arguments)
        if folder.is_dir() and (module is writer or arguments[0].state.step == 2):
            folder.rename(moved) if change == "renamed" else shutil.rmtree(folder)
        return result

    monkeypatch.setattr(module, name, change_folder)
    result = run_here(
        inputs.command(tmp_path / "out", "--max-steps", 50, "--num-steps-per-checkpoint", 2)
    )
    assert_refused(result, str(folder), "was renamed or removed", "is saved in")
    assert not folder.exists()
    saved = moved if change == "renamed" else next(folder.parent.glob("phase1-removed-*"))
    assert list(saved.glob("*/manifest.json"))
    assert read_record(saved).identity


@pytest.mark.parametrize("other", ["runs", "has ended"])
def test_a_run_that_finds_another_one_in_its_folder_leaves_all_files(
    inputs, finished, tmp_path, monkeypatch, other
):
    """Both were started at one moment: there was no folder when this one looked."""
    folder = steps_folder(tmp_path)
    locks = []

    def claim(run, *arguments):
        shutil.copytree(finished, folder)
        names = ("probe.tmp-1", "3.tmp-1/config.json", "best/config.json", "evaluations.json")
        for path in (folder / name for name in names):
            path.parent.mkdir(exist_ok=True)
            path.write_text("theirs")
        if other == "runs":
            locks.append(lock_folder(folder))
        before.update(files_of(folder))
        claim_folder(run, *arguments)

    before = {}
    claim_folder = Run.claim_folder
    monkeypatch.setattr(Run, "claim_folder", claim)
    result = run_here(inputs.command(tmp_path, *STEP_2))
    says = "is in use by process" if other == "runs" else "was started at the same moment: rerun"
    assert_refused(result, str(folder), says)
    assert before and files_of(folder) == before


def test_a_checkpoint_is_copied_only_beside_what_the_next_update_takes(monkeypatch):
    """In a memory group that is nearly full, training waits for the whole write instead of being
    killed.
    """
    made = writer.CheckpointWriter.__new__(writer.CheckpointWriter)
    made.local_writers = 1
    rows = TensorRows("", (), torch.empty(112 << 20, dtype=torch.uint8))
    state = Checkpoint(
        1, {"model.safetensors": [rows], "model_optimizer.safetensors": [rows, rows]}, *[None] * 5
    )
    for available, returned, is_copied in (
        (903, 600, False),
        (903, 0, True),
        (500, 0, False),
        (520, 0, True),
    ):
        monkeypatch.setattr(writer, "available_memory", lambda available=available: available << 20)
        monkeypatch.setattr(writer, "process_memory", lambda returned=returned: (0, returned << 20))
        assert made._allocate(state) == is_copied
