"""Writing checkpoints: atomic, and in the background. test_sharded_checkpoints.py has those that
all ranks write.
"""

import errno
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import CHECKPOINT_FILES

import bert_recipe.checkpoint.folder
import bert_recipe.checkpoint.rows
import bert_recipe.checkpoint.writer
import bert_recipe.utils.files
from bert_recipe.checkpoint.folder import (
    checkpoint_steps,
    newest_checkpoint,
    remove_leftovers,
    verify_checkpoint,
)
from bert_recipe.checkpoint.model_card import ModelParts
from bert_recipe.checkpoint.record import RunRecord
from bert_recipe.checkpoint.rows import TensorRows
from bert_recipe.checkpoint.writer import Checkpoint, CheckpointWriter
from bert_recipe.model.encoders.bert import BertConfig
from bert_recipe.tokenization.tokenizer import BertTokenizer
from bert_recipe.utils.distributed import DistributedContext
from bert_recipe.utils.errors import UserError


def rows_of(tensors: dict[str, torch.Tensor]) -> list[TensorRows]:
    """All rows of each tensor."""
    return [TensorRows(name, tuple(tensor.shape), tensor) for name, tensor in tensors.items()]


def checkpoint_of(step: int, vocab_file: Path, model: dict, optimizer: dict) -> Checkpoint:
    if not vocab_file.exists():
        vocab_file.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    tensors = {
        "model.safetensors": rows_of(model),
        "model_optimizer.safetensors": rows_of(optimizer),
    }
    record = RunRecord({}, {}, phase="phase1", num_samples=1)
    parts = ModelParts(BertTokenizer(vocab_file))
    config = BertConfig(5, 4, 1, 1, 4)
    return Checkpoint(step, tensors, config, "BertModel", {"step": step}, record, parts)


@pytest.fixture
def small(tmp_path_factory):
    """Makes a small checkpoint of a given step."""
    vocab_file = tmp_path_factory.mktemp("vocab") / "words.txt"
    weight = {"weight": torch.arange(4.0)}
    return lambda step: checkpoint_of(
        step, vocab_file, weight, {"weight.exp_avg": weight["weight"]}
    )


def write(parent: Path, content: Checkpoint, several_machines: bool = False) -> Path:
    writer = CheckpointWriter(parent, DistributedContext())
    writer.writers += several_machines
    writer.write(content)
    writer.wait()
    return parent / str(content.step)


def test_writes_of_several_machines_are_synced_and_cannot_read_pages(small, tmp_path, monkeypatch):
    flags, opened = [], os.open
    monkeypatch.setattr(
        os, "open", lambda path, flag, *mode: flags.append(flag) or opened(path, flag, *mode)
    )
    for several_machines in (False, True):
        write(tmp_path, small(1 + several_machines), several_machines=several_machines)
    assert [flag for flag in flags if flag & os.O_WRONLY] == [os.O_WRONLY] * 2 + [
        os.O_WRONLY | os.O_DSYNC
    ] * 2
    assert load_file(tmp_path / "2" / "model.safetensors")["weight"].equal(torch.arange(4.0))


def test_rows_that_a_file_system_has_lost_are_noticed_before_the_checksums(
    small, tmp_path, monkeypatch
):
    def write_and_lose(path, layout, tensors, _several_machines):
        bert_recipe.checkpoint.rows.write_rows(path, layout, tensors)
        with path.open("r+b") as file:
            file.seek(layout.size - 4)
            file.write(bytes(4))

    monkeypatch.setattr(bert_recipe.checkpoint.writer, "write_rows", write_and_lose)
    with pytest.raises(
        UserError, match=r"model.safetensors does not hold what was written.*--output-dir"
    ):
        write(tmp_path, small(1), several_machines=True)
    assert list(tmp_path.iterdir()) == []


def test_old_checkpoints_are_removed_after_the_new_one_is_complete(tmp_path, small, monkeypatch):
    removed = []
    really_remove = bert_recipe.checkpoint.folder.remove

    def remove(folder: Path) -> None:
        verify_checkpoint(tmp_path / str(int(folder.name) + 3))
        removed.append(folder.name)
        really_remove(folder)

    monkeypatch.setattr(bert_recipe.checkpoint.folder, "remove", remove)
    for step in range(1, 6):
        write(tmp_path, small(step))
    assert removed == ["1", "2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4", "5"]


@pytest.mark.parametrize("file", CHECKPOINT_FILES)
def test_write_that_fails_at_any_file_leaves_no_checkpoint(tmp_path, small, monkeypatch, file):
    """First as a kill does, without cleaning up. Then as a full disk does."""
    write(tmp_path, small(1))

    def interrupt(error):
        def sync(path: Path) -> None:
            if path.name == file:
                raise error

        return sync

    monkeypatch.setattr(bert_recipe.utils.files, "sync", interrupt(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, small(2))
    (left,) = tmp_path.glob("2.tmp-*")
    assert checkpoint_steps(tmp_path) == [1]
    assert newest_checkpoint(tmp_path) == tmp_path / "1"

    monkeypatch.setattr(
        bert_recipe.utils.files, "sync", interrupt(OSError(errno.ENOSPC, "No space left on device"))
    )
    with pytest.raises(
        UserError, match=r"the disk is full: .*the checkpoints before it are unchanged"
    ):
        write(tmp_path, small(2))
    assert list(tmp_path.glob("2.tmp-*")) == [left]
    monkeypatch.undo()
    assert write(tmp_path, small(2)) == tmp_path / "2"
    verify_checkpoint(tmp_path / "2")
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_valid_folder_of_the_same_step_is_kept_and_a_damaged_one_is_replaced(tmp_path, small):
    folder = write(tmp_path, small(3))
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert write(tmp_path, small(3)) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    (folder / "model.safetensors").write_bytes(b"damaged")
    write(tmp_path, small(3))
    verify_checkpoint(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


def test_checkpoint_holds_the_tensors_of_the_time_of_the_call(tmp_path, monkeypatch):
    """Training goes on during the write, and the next checkpoint reuses the memory."""
    changed = threading.Event()
    really_write = CheckpointWriter._write

    def write_later(*args):
        assert changed.wait(timeout=60)
        return really_write(*args)

    monkeypatch.setattr(CheckpointWriter, "_write", write_later)
    parent = tmp_path / "steps"
    writer = CheckpointWriter(parent, DistributedContext())
    model = {
        "weight": torch.randn(500, 300).t(),
        "narrow": torch.randn(3).bfloat16(),
        "none": torch.zeros(0, 4),
    }
    optimizer = {"weight.step": torch.tensor(1.0), "weight.exp_avg": torch.randn(7)}
    expected = {}
    for step in (1, 2):
        changed.clear()
        expected[step] = [
            {name: t.clone() for name, t in tensors.items()} for tensors in (model, optimizer)
        ]
        writer.write(checkpoint_of(step, tmp_path / "words.txt", model, optimizer))
        for tensor in (*model.values(), *optimizer.values()):
            tensor += 1
        changed.set()
        writer.wait()
    for step, tensors in expected.items():
        for name, wanted in zip(
            ("model.safetensors", "model_optimizer.safetensors"), tensors, strict=True
        ):
            written = load_file(parent / str(step) / name)
            assert written.keys() == wanted.keys()
            assert all(
                torch.equal(written[key], wanted[key]) and written[key].dtype == wanted[key].dtype
                for key in written
            )


def test_without_memory_for_a_copy_the_call_waits_for_the_write(tmp_path, small, monkeypatch):
    monkeypatch.setattr(bert_recipe.checkpoint.writer, "available_memory", lambda: 0)
    writer = CheckpointWriter(tmp_path, DistributedContext())
    writer.write(small(1))
    verify_checkpoint(tmp_path / "1")
    assert len(writer.memory) == 0


@pytest.mark.parametrize("advice", ["is not a folder", "ulimit -u"])
def test_error_of_the_background_write_is_raised_once_by_the_next_call(
    tmp_path, small, monkeypatch, advice
):
    def start_thread(*_):
        raise RuntimeError("can't start new thread")

    if advice == "is not a folder":
        (tmp_path / "file").write_text("")
    else:
        monkeypatch.setattr(bert_recipe.checkpoint.writer, "_hash_blocks", start_thread)
    writer = CheckpointWriter(tmp_path / "file", DistributedContext())
    writer.write(small(1))
    with pytest.raises(UserError, match=f"cannot write the checkpoint .*{advice}"):
        writer.wait()
    writer.wait()
