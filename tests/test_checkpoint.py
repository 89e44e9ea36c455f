"""Checkpoint folders: whole or absent, refused by name when damaged, and at home in transformers."""

import errno
import json
import random
import shutil
import threading
from pathlib import Path

import h5py
import pytest
import torch
from conftest import assert_refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_runs import Ground, resuming, run_here, steps_folder, steps_in, trained, weights
from transformers import AutoModel, AutoModelForPreTraining, AutoTokenizer
from transformers import BertConfig as HFConfig
from transformers import BertForPreTraining as HFForPreTraining

from modeling import BertForPreTraining
from utils import checkpoint as checkpoints
from utils.checkpoint import BadCheckpoint, Checkpoint, CheckpointWriter, latest_checkpoint, write_checkpoint
from utils.errors import UserError

FILES = (
    "model.safetensors",
    "model_optimizer.safetensors",
    "model_progress.json",
    "config.json",
    "vocab.txt",
    "tokenizer_config.json",
    "manifest.json",
)


@pytest.fixture(scope="module")
def ground(tmp_path_factory) -> Ground:
    return Ground.make(tmp_path_factory.mktemp("ground"))


@pytest.fixture(scope="module")
def finished(ground, tmp_path_factory) -> Path:
    """The output of a run of 8 steps with checkpoints at 2, 4, 6 and 8."""
    output = tmp_path_factory.mktemp("finished")
    trained(ground.command(output, "--max-steps", 8, "--num-steps-per-checkpoint", 2))
    return output


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "output"))


def small_checkpoint(step: int, value: float = 0.0) -> Checkpoint:
    tensors = {"weight": torch.full((4,), value)}
    return Checkpoint(step, tensors, {"hidden_size": 4}, {"weight.exp_avg": tensors["weight"]}, {"step": step})


def flip_a_byte(path: Path, place: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 0x10
    path.write_bytes(content)


# --- what a folder holds ----------------------------------------------------------------------------------------------


def test_a_folder_holds_what_the_documentation_says_and_the_newest_three_are_kept(finished):
    assert steps_in(finished) == ["4", "6", "8"]
    for step in ("4", "6", "8"):
        assert {path.name for path in (steps_folder(finished) / step).iterdir()} == set(FILES)


def test_all_files_have_the_permissions_that_new_files_have(finished, tmp_path):
    (tmp_path / "new").write_text("")
    modes = {path.stat().st_mode for path in (steps_folder(finished) / "8").iterdir()}
    assert modes == {(tmp_path / "new").stat().st_mode}


def test_nothing_in_a_folder_is_pickled(finished):
    for path in (steps_folder(finished) / "8").iterdir():
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".safetensors":
            header_size = int.from_bytes(path.read_bytes()[:8], "little")
            json.loads(path.read_bytes()[8 : 8 + header_size])
        else:
            assert path.name == "vocab.txt"


def test_a_folder_opens_in_transformers_with_the_same_logits(ground, finished):
    folder = steps_folder(finished) / "8"
    theirs, ours = AutoModelForPreTraining.from_pretrained(folder).eval(), BertForPreTraining.from_pretrained(folder)
    with h5py.File(ground.held_out / "shard_000.hdf5") as file:
        ids, mask, types = (
            torch.from_numpy(file[key][:].astype("int64")) for key in ("input_ids", "input_mask", "segment_ids")
        )
    with torch.no_grad():
        expected, found = theirs(ids, mask, types), ours.eval()(ids, mask, types)
        encoded = AutoModel.from_pretrained(folder).eval()(ids, mask, types)
        assert torch.equal(encoded.last_hidden_state, theirs.bert(ids, mask, types).last_hidden_state)
    real = mask.bool()
    torch.testing.assert_close(found.prediction_logits[real], expected.prediction_logits[real], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.seq_relationship_logits, expected.seq_relationship_logits, rtol=1e-5, atol=1e-5)


def test_a_folder_opens_as_a_tokenizer_in_transformers(finished):
    tokenizer = AutoTokenizer.from_pretrained(steps_folder(finished) / "8")
    assert tokenizer.convert_ids_to_tokens([101, 102, 103]) == ["[CLS]", "[SEP]", "[MASK]"]
    assert tokenizer("A").input_ids == tokenizer("a").input_ids, "the shards say nothing, and the vocabulary is uncased"


@pytest.mark.parametrize("with_manifest", [True, False])
def test_a_transformers_folder_trains_here_from_its_own_weights(ground, tmp_path, with_manifest):
    model = HFForPreTraining(HFConfig(**json.loads(ground.config.read_text())))
    model.save_pretrained(tmp_path / "theirs")
    trained(
        ground.command(
            tmp_path, "--max-steps", 1, "--learning-rate", 0, "--from-pretrained-params", tmp_path / "theirs"
        )
    )
    taken, given_ = weights(tmp_path, 1), model.state_dict()
    assert all(torch.equal(tensor, given_[name]) for name, tensor in taken.items())
    assert not [name for name in given_.keys() - taken.keys() if "decoder" not in name and "position_ids" not in name]


# --- writing ----------------------------------------------------------------------------------------------------------


def test_nothing_is_removed_before_its_successor_is_whole(tmp_path, monkeypatch):
    removed = []
    really_remove = checkpoints.remove_checkpoint

    def remove(folder: Path) -> None:
        checkpoints.verify_checkpoint(tmp_path / str(int(folder.name) + 3))
        removed.append(folder.name)
        really_remove(folder)

    monkeypatch.setattr(checkpoints, "remove_checkpoint", remove)
    for step in range(1, 6):
        write_checkpoint(tmp_path, small_checkpoint(step))
    assert removed == ["1", "2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4", "5"]


@pytest.mark.parametrize("file", FILES)
def test_a_write_that_ends_at_any_file_leaves_no_checkpoint(tmp_path, monkeypatch, file):
    """As a kill would: no clean-up runs. Then as a full disk would, with one."""
    write_checkpoint(tmp_path, small_checkpoint(1))

    def interrupt(error):
        def sync(path: Path) -> None:
            if path.name == file:
                raise error

        return sync

    checkpoint = small_checkpoint(2)
    checkpoint.vocab_file = tmp_path / "words.txt"
    checkpoint.vocab_file.write_text("[PAD]\n")
    monkeypatch.setattr(checkpoints, "_sync", interrupt(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, checkpoint)
    assert checkpoints.checkpoint_steps(tmp_path) == [1]
    assert latest_checkpoint(tmp_path, print) == tmp_path / "1"

    monkeypatch.setattr(checkpoints, "_sync", interrupt(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(UserError, match=r"No space left on device.*untouched"):
        write_checkpoint(tmp_path, checkpoint)
    assert not (tmp_path / "2.tmp").exists()
    monkeypatch.undo()
    assert write_checkpoint(tmp_path, checkpoint) == tmp_path / "2"
    checkpoints.verify_checkpoint(tmp_path / "2")


def test_a_half_written_folder_is_never_taken_and_is_cleared_away(ground, copied):
    """`steps`/10.tmp with every file in it, but not yet renamed."""
    folder = steps_folder(copied)
    shutil.copytree(folder / "8", folder / "10.tmp")
    result = trained(ground.command(copied, "--max-steps", 9, *resuming(copied)))
    assert f"resumed from {folder / '8'}" in result.stdout
    assert steps_in(copied) == ["6", "8", "9"]


@pytest.mark.parametrize("reserved", [None, 0, 10**6], ids=["nothing reserved", "too little", "enough"])
def test_a_checkpoint_holds_what_the_tensors_held_when_it_was_handed_over(tmp_path, monkeypatch, reserved):
    """Training goes on at once, and the memory of one checkpoint's copies serves the next."""
    changed = threading.Event()
    really_write = checkpoints.write_checkpoint

    def write_later(*args):
        assert changed.wait(timeout=60)
        return really_write(*args)

    monkeypatch.setattr(checkpoints, "write_checkpoint", write_later)
    writer = CheckpointWriter(tmp_path)
    if reserved is not None:
        writer.reserve(reserved)
    model = {"weight": torch.randn(500, 300).t(), "narrow": torch.randn(3).bfloat16(), "none": torch.zeros(0, 4)}
    optimizer = {"weight.step": torch.tensor(1.0), "weight.exp_avg": torch.randn(7)}
    expected = {}
    for step in (1, 2):
        changed.clear()
        expected[step] = [{name: t.clone() for name, t in tensors.items()} for tensors in (model, optimizer)]
        writer.write(Checkpoint(step, model, {}, optimizer, {"step": step}))
        for tensor in (*model.values(), *optimizer.values()):
            tensor += 1
        changed.set()
        writer.wait()
    for step, tensors in expected.items():
        for name, wanted in zip(("model.safetensors", "model_optimizer.safetensors"), tensors, strict=True):
            found = checkpoints.read_tensors(tmp_path / str(step) / name)
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[key], wanted[key]) and found[key].dtype == wanted[key].dtype for key in found)


def test_the_background_writer_raises_what_went_wrong_at_the_next_call(tmp_path):
    (tmp_path / "file").write_text("")
    writer = CheckpointWriter(tmp_path / "file")
    writer.write(small_checkpoint(1))
    with pytest.raises(UserError, match="cannot write the checkpoint"):
        writer.wait()
    writer.wait()  # said once


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["a flipped byte", "missing", "cut off"])
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_checkpoint_is_refused_by_name_and_auto_takes_the_one_before(ground, copied, file, damage):
    folder = steps_folder(copied)
    path = folder / "8" / file
    if damage == "missing":
        path.unlink()
    elif damage == "cut off":
        path.write_bytes(path.read_bytes()[:-3])
    else:
        flip_a_byte(path)
    before = {name: name.read_bytes() for name in folder.rglob("*") if name.is_file()}
    for flags in (
        ("--from-checkpoint", folder / "8"),
        ("--from-checkpoint", folder, "--last-step-of-checkpoint", 8),
        ("--from-pretrained-params", folder / "8", "--output-dir", copied / "other"),
    ):
        if file == "manifest.json" and damage == "missing" and flags[0] == "--from-pretrained-params":
            continue  # without a manifest, a folder is any model folder
        if file == "model.safetensors" and damage == "missing" and flags[0] == "--from-pretrained-params":
            assert_refused(run_here(ground.command(copied, "--max-steps", 9, *flags)), str(folder / "8"))
            continue
        assert_refused(run_here(ground.command(copied, "--max-steps", 9, *flags)), str(folder / "8"), file)
    assert {name: name.read_bytes() for name in folder.rglob("*") if name.is_file()} == before

    result = trained(ground.command(copied, "--max-steps", 8, *resuming(copied)))
    assert "warning: " in result.stdout and file in result.stdout
    assert f"resumed from {folder / '6'}" in result.stdout
    checkpoints.verify_checkpoint(folder / "8")  # made again


def test_where_every_checkpoint_is_damaged_the_run_does_not_start_from_nothing(ground, copied):
    for step in ("4", "6", "8"):
        flip_a_byte(steps_folder(copied) / step / "model.safetensors")
    result = run_here(ground.command(copied, "--max-steps", 9, *resuming(copied)))
    assert_refused(result, str(steps_folder(copied)), "none of the checkpoints")
    assert steps_in(copied) == ["4", "6", "8"]


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_flipped_bit_in_what_the_manifest_names_is_found(finished, tmp_path_factory, data):
    folder = steps_folder(finished) / "8"
    path = folder / data.draw(st.sampled_from(FILES[:-1]))
    content = path.read_bytes()
    place, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
    damaged = bytearray(content)
    damaged[place] ^= 1 << bit
    try:
        path.write_bytes(damaged)
        with pytest.raises(BadCheckpoint, match=path.name):
            checkpoints.verify_checkpoint(folder)
    finally:
        path.write_bytes(content)


def test_a_damaged_manifest_never_ends_in_a_traceback(copied):
    path = steps_folder(copied) / "8" / "manifest.json"
    content = path.read_bytes()
    random_ = random.Random(3)
    refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        damaged[random_.randrange(len(damaged))] = random_.randrange(256)
        path.write_bytes(damaged)
        refused += not checkpoints.is_whole(path.parent)
    assert refused > 250  # the rest hit white space


def test_weights_of_another_number_of_heads_are_refused(ground, finished, tmp_path):
    """Their shapes are the same, and so nothing else would tell."""
    other = tmp_path / "four_heads.json"
    other.write_text(json.dumps({**json.loads(ground.config.read_text()), "num_attention_heads": 4}))
    flags = ("--max-steps", 1, "--config-file", other, "--from-pretrained-params", steps_folder(finished) / "8")
    assert_refused(
        run_here(ground.command(tmp_path / "output", *flags)), "config.json", "num_attention_heads is 2", "4"
    )


def test_weights_of_another_vocabulary_of_the_same_size_are_refused(ground, finished, tmp_path):
    words = ground.vocab_file.read_text().split("\n")
    words[900], words[901] = words[901], words[900]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    flags = ("--vocab-file", tmp_path / "vocab.txt", "--from-pretrained-params", steps_folder(finished) / "8")
    result = run_here(ground.command(tmp_path / "output", "--max-steps", 1, *flags))
    assert_refused(result, str(steps_folder(finished) / "8" / "vocab.txt"), "other words")
