"""Checkpoint folders: contents and verification; errors name the damaged file."""

import errno
import json
import os
import shutil
from pathlib import Path

import h5py
import pytest
import torch
from conftest import assert_refused, read_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_runs import (
    CHECKPOINT_FILES,
    files_of,
    resuming,
    rewrite_manifest,
    run_here,
    steps_folder,
    steps_in,
    train,
)
from transformers import AutoModel, AutoModelForPreTraining, AutoTokenizer

import bert_recipe.checkpoint.folder
from bert_recipe.checkpoint.folder import (
    BadCheckpoint,
    is_valid,
    newest_checkpoint,
    verify_checkpoint,
)
from bert_recipe.checkpoint.pretrained import load_pretrained
from bert_recipe.model.encoders.bert import BertForPreTraining


@pytest.fixture(scope="module")
def finished(inputs, tmp_path_factory) -> Path:
    """The output of a run of 8 steps with checkpoints at 2, 4, 6 and 8."""
    output = tmp_path_factory.mktemp("finished")
    train(inputs.command(output, "--max-steps", 8, "--num-steps-per-checkpoint", 2))
    return output


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "output"))


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def test_folder_holds_the_documented_files_and_the_newest_three_are_kept(finished, tmp_path):
    assert steps_in(finished) == ["4", "6", "8"]
    (tmp_path / "new").touch()
    for step in ("4", "6", "8"):
        paths = list((steps_folder(finished) / step).iterdir())
        assert {path.name for path in paths} == {*CHECKPOINT_FILES, "README.md"}
        assert {path.stat().st_mode for path in paths} == {(tmp_path / "new").stat().st_mode}


def test_transformers_opens_a_folder_with_its_tokenizer_and_gives_the_same_logits(inputs, finished):
    folder = steps_folder(finished) / "8"
    theirs = AutoModelForPreTraining.from_pretrained(folder).eval()
    ours = load_pretrained(BertForPreTraining, folder)
    with h5py.File(inputs.held_out / "shard_000.hdf5") as file:
        ids, mask, types = (
            torch.from_numpy(file[key][:].astype("int64"))
            for key in ("input_ids", "input_mask", "segment_ids")
        )
    with torch.no_grad():
        expected = theirs(ids, mask, types)
        output = ours.eval()(ids, mask, types)
        encoded = AutoModel.from_pretrained(folder).eval()(ids, mask, types)
        assert torch.equal(
            encoded.last_hidden_state, theirs.bert(ids, mask, types).last_hidden_state
        )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens([101, 102, 103]) == ["[CLS]", "[SEP]", "[MASK]"]
    assert tokenizer("A").input_ids == tokenizer("a").input_ids, (
        "the vocabulary has no capital letters"
    )
    real = mask.bool()
    torch.testing.assert_close(
        output.prediction_logits[real], expected.prediction_logits[real], rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        output.seq_relationship_logits, expected.seq_relationship_logits, rtol=1e-5, atol=1e-5
    )


def damage_file(path: Path, damage: str) -> None:
    if damage == "missing":
        path.unlink()
    elif damage == "cut off":
        path.write_bytes(path.read_bytes()[:-3])
    else:
        flip_a_byte(path)


@pytest.mark.parametrize("damage", ["flipped byte", "missing", "cut off"])
@pytest.mark.parametrize("file", CHECKPOINT_FILES)
def test_a_damaged_file_is_named(copied, file, damage):
    folder = steps_folder(copied) / "8"
    damage_file(folder / file, damage)
    with pytest.raises(BadCheckpoint, match=f"{folder}.*{file}"):
        verify_checkpoint(folder)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("model.safetensors", "flipped byte"),
        ("model_progress.json", "cut off"),
        ("tokenizer_config.json", "missing"),
    ],
)
def test_damaged_checkpoint_is_an_error_and_auto_takes_the_one_before(inputs, copied, file, damage):
    folder = steps_folder(copied)
    damage_file(folder / "8" / file, damage)
    before = files_of(folder)
    flags = ["--from-checkpoint", "--from-pretrained-params"]
    if file == "model_progress.json":  # which only a run that resumes reads
        flags = flags[:1]
    for flag in flags:
        result = run_here(inputs.command(copied, "--max-steps", 9, flag, folder / "8"))
        assert_refused(result, str(folder / "8"), file)
    assert files_of(folder) == before

    result = train(inputs.command(copied, "--max-steps", 8, *resuming(copied)))
    assert "warning: " in result.stdout and file in result.stdout
    assert f"resumed from {folder / '6'}" in result.stdout
    verify_checkpoint(folder / "8")  # written again


def test_checkpoint_that_cannot_be_read_is_named_and_auto_takes_the_one_before(
    inputs, copied, monkeypatch
):
    folder = steps_folder(copied)
    reason = os.strerror(errno.EIO)
    really = bert_recipe.checkpoint.folder.block_digest

    def fail(path: Path, block: int) -> str:
        if path == folder / "8" / "model.safetensors":
            raise OSError(errno.EIO, reason, str(path))
        return really(path, block)

    monkeypatch.setattr(bert_recipe.checkpoint.folder, "block_digest", fail)
    command = inputs.command(copied, "--max-steps", 8, "--from-checkpoint", folder / "8")
    assert_refused(run_here(command), str(folder / "8" / "model.safetensors"), reason)
    result = train(
        inputs.command(copied, "--max-steps", 8, "--steps-this-run", 1, *resuming(copied))
    )
    assert (
        f"warning: {folder / '8' / 'model.safetensors'}" in result.stdout
        and reason in result.stdout
    )
    assert f"resumed from {folder / '6'}" in result.stdout


def test_auto_does_not_start_from_step_1_if_every_checkpoint_is_damaged(inputs, copied):
    for step in ("4", "6", "8"):
        flip_a_byte(steps_folder(copied) / step / "model.safetensors")
    result = run_here(inputs.command(copied, "--max-steps", 9, *resuming(copied)))
    assert_refused(result, str(steps_folder(copied)), "none of the checkpoints")
    assert steps_in(copied) == ["4", "6", "8"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda values: (
        st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3)
    ),
    max_leaves=6,
)


@given(data=st.data(), value=JSON)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_manifest_of_any_content_gives_an_error_or_is_valid(copied, data, value):
    """One value at any depth of the manifest is replaced."""
    path = steps_folder(copied) / "8" / "manifest.json"
    content = path.read_bytes()
    manifest = node = {"manifest": json.loads(content)}
    while True:
        key = data.draw(
            st.sampled_from(list(node)) if isinstance(node, dict) else st.integers(0, len(node) - 1)
        )
        if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    unchanged = node[key] == value
    node[key] = value
    try:
        path.write_text(json.dumps(manifest["manifest"]))
        assert not is_valid(path.parent) or unchanged or value is True
    finally:
        path.write_bytes(content)


def test_each_block_of_a_file_has_its_own_checksum(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(bert_recipe.checkpoint.folder, "HASH_BLOCK", 1000)
    folder = Path(shutil.copytree(steps_folder(finished) / "8", tmp_path / "8"))
    with pytest.raises(
        BadCheckpoint, match=r"has format and block_size \(3, 16777216\), not \(3, 1000\)"
    ):
        verify_checkpoint(folder)
    rewrite_manifest(folder)
    verify_checkpoint(folder)
    manifest = read_json(folder / "manifest.json")
    digests = manifest["files"]["model.safetensors"]["sha256"]
    for wrong in (digests[:-1], [*digests, digests[0]], [digests[1], digests[0], *digests[2:]], []):
        manifest["files"]["model.safetensors"]["sha256"] = wrong
        (folder / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(BadCheckpoint, match=r"model\.safetensors is damaged"):
            verify_checkpoint(folder)


def test_only_numbers_in_their_usual_form_are_steps(copied):
    folder = steps_folder(copied)
    for name in ("08", "8.tmp-1a2b3c4d", "9x", "-9", "²", "notes"):
        shutil.copytree(folder / "8", folder / name)
    (folder / "99").write_text("a file")
    assert bert_recipe.checkpoint.folder.checkpoint_steps(folder) == [4, 6, 8]
    assert newest_checkpoint(folder) == folder / "8"
    assert newest_checkpoint(folder / "notes") is newest_checkpoint(folder / "nowhere") is None
