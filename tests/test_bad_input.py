"""Bad input to run_pretraining.py: one line that says what, where and what to do, exit code 2, and nothing is written
or lost."""

import contextlib
import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from conftest import assert_refused, run_program, sample_rows, write_shard, write_shards
from safetensors.torch import load_file, save_file
from small_runs import AUTO, files_of, losses, resuming, run_here, steps_folder, steps_in, train

from checkpoint.folder import verify_checkpoint


@pytest.fixture
def assert_error(inputs, tmp_path):
    """Runs three steps with extra flags and expects an error with `words`, and no results."""

    def check(flags: tuple, *words: str) -> None:
        output = tmp_path / "output"
        result = run_here(inputs.command(output, "--max-steps", 3, *flags))
        assert_refused(result, *map(str, words))
        assert files_of(output) == {}

    return check


def edited(path: Path, target: Path, **values) -> Path:
    """A copy of a JSON file with some values replaced, or removed if they are None."""
    content = {**json.loads(path.read_text()), **values}
    target.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return target


# --- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--last-step-of-checkpoint", "auto"), ["--last-step-of-checkpoint", "--from-checkpoint"]),
        (("--config-file", "None"), ["--bert-model custom", "--config-file"]),
        (("--vocab-file", "None"), ["--vocab-file"]),
        (("--from-checkpoint", "/nowhere/at/all"), ["/nowhere/at/all", "does not exist"]),
        (("--from-checkpoint", "/nowhere", "--last-step-of-checkpoint", "7"), ["/nowhere/7", "does not exist"]),
        (("--from-pretrained-params", "/nowhere/at/all"), ["/nowhere/at/all", "does not exist"]),
        (("--phase2", "--from-phase1-final-params", "/nowhere/at/all"), ["/nowhere/at/all", "does not exist"]),
        (
            ("--phase2", "--from-phase1-final-params", ".", "--from-pretrained-params", "."),
            ["--from-phase1-final-params", "--from-pretrained-params"],
        ),
        (("--input-dir", "/nowhere/at/all"), ["/nowhere/at/all", "does not exist"]),
        (("--eval-dir", "/nowhere/at/all"), ["/nowhere/at/all", "does not exist"]),
        (("--config-file", "/nowhere/config.json"), ["/nowhere/config.json", "does not exist"]),
        (("--vocab-file", "/nowhere/vocab.txt"), ["/nowhere/vocab.txt"]),
        (("--vocab-file", "/"), ["vocabulary /"]),
        (("--device", "cuda"), ["--device cuda"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_flag(assert_error, flags, words):
    if flags == ("--device", "cuda") and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert_error(flags, *words)


def test_auto_accepts_a_checkpoint_folder_and_no_file(inputs, tmp_path):
    train(inputs.command(tmp_path, "--max-steps", 1))
    folder = steps_folder(tmp_path) / "1"
    (tmp_path / "file").write_text("")
    flags = ("--max-steps", 2, "--last-step-of-checkpoint", "auto", "--from-checkpoint")
    result = run_here(inputs.command(tmp_path, *flags, tmp_path / "file"))
    assert_refused(result, str(tmp_path / "file"), "is a file: give the folder")
    assert f"resumed from {folder}: step 1" in train(inputs.command(tmp_path, *flags, folder)).stdout


def test_folder_that_is_not_the_runs_own_must_hold_a_checkpoint(inputs, tmp_path):
    """A typing error must not start from random weights."""
    own = steps_folder(tmp_path / "output")
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "typo", tmp_path / "empty", own.parent):
        result = run_here(inputs.command(tmp_path / "output", "--max-steps", 1, "--from-checkpoint", folder, *AUTO))
        assert_refused(result, f"--from-checkpoint {folder} holds no checkpoint", str(own))
    assert (
        "starting at step 1"
        in train(inputs.command(tmp_path / "output", "--max-steps", 1, *resuming(own.parents[1]))).stdout
    )


@pytest.mark.parametrize("name", ["bert_paddle.pdparams", "ckpt_600.pt"])
def test_checkpoint_of_another_project_names_the_converter(inputs, tmp_path, name):
    given, step = tmp_path / "given", steps_folder(tmp_path / "nvidia") / "600"
    for folder in (given, step):
        folder.mkdir(parents=True)
        (folder / name).write_bytes(b"\x80\x04")
    for flags, file in (
        (("--from-checkpoint", given, *AUTO), given / name),
        (("--from-checkpoint", given, "--last-step-of-checkpoint", 600), given / name),
        (("--from-checkpoint", given), given / name),
        (("--from-checkpoint", given / name), given / name),
        (("--from-pretrained-params", given), given / name),
        (("--from-pretrained-params", given / name), given / name),
        # NVIDIA's folders of steps have the same names.
        ((*resuming(tmp_path / "nvidia"), "--output-dir", tmp_path / "nvidia"), step / name),
        (("--output-dir", tmp_path / "nvidia"), step / name),
    ):
        result = run_here(inputs.command(tmp_path / "output", "--max-steps", 700, *flags))
        assert_refused(result, f"{file} is a checkpoint of another project", "convert_checkpoint.py")
    assert (step / name).exists()


def test_error_of_the_program_in_its_own_process(inputs, tmp_path):
    command = inputs.command(tmp_path / "output", "--max-steps", 3, "--input-dir", "/nowhere")
    assert_refused(run_program("run_pretraining.py", *command), "/nowhere")


# --- data -------------------------------------------------------------------------------------------------------------


def test_empty_folder(assert_error, tmp_path):
    (tmp_path / "empty").mkdir()
    assert_error(("--input-dir", tmp_path / "empty"), tmp_path / "empty")


def test_shards_without_samples(assert_error, tmp_path):
    write_shard(tmp_path / "shards" / "a.hdf5", sample_rows(0, 32, 5, 0))
    assert_error(("--input-dir", tmp_path / "shards"), tmp_path / "shards", "no sample")


@pytest.mark.parametrize("storage", [{}, {"compression": "gzip"}], ids=["plain", "gzip"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.98])
def test_shard_that_is_cut_off(assert_error, tmp_path, storage, share):
    path = write_shard(tmp_path / "shards" / "a.hdf5", sample_rows(40, 32, 5, 0), **storage)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    assert_error(("--input-dir", path.parent), path)


def test_file_that_is_not_hdf5(assert_error, tmp_path):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "a.hdf5").write_text("words\n" * 1000)
    assert_error(("--input-dir", tmp_path / "shards"), tmp_path / "shards" / "a.hdf5")


def test_shard_without_one_of_the_keys(assert_error, tmp_path):
    rows = sample_rows(8, 32, 5, 0)
    del rows["segment_ids"]
    assert_error(("--input-dir", write_shard(tmp_path / "shards" / "a.hdf5", rows).parent), "a.hdf5", "segment_ids")


def test_shard_whose_keys_have_different_lengths(assert_error, tmp_path):
    rows = sample_rows(8, 32, 5, 0)
    rows["next_sentence_labels"] = rows["next_sentence_labels"][:5]
    path = write_shard(tmp_path / "shards" / "a.hdf5", rows)
    assert_error(("--input-dir", path.parent), path, "next_sentence_labels")


@pytest.mark.parametrize(
    "length, predictions, attributes, what",
    [(16, 5, {}, "sequence length"), (32, 4, {}, "predictions"), (32, 5, {"vocab_sha256": "another"}, "vocab_sha256")],
)
def test_shards_that_disagree(assert_error, tmp_path, length, predictions, attributes, what):
    folder = tmp_path / "shards"
    write_shard(folder / "a.hdf5", sample_rows(8, 32, 5, 0), {"vocab_sha256": "one"})
    write_shard(folder / "b.hdf5", sample_rows(8, length, predictions, 0), {"vocab_sha256": "one", **attributes})
    assert_error(("--input-dir", folder), "a.hdf5", "b.hdf5", what)


@pytest.mark.parametrize("flag, value", [("--max-seq-length", 64), ("--max-predictions-per-seq", 7)])
def test_flag_that_does_not_match_the_shards(assert_error, inputs, flag, value):
    assert_error((flag, value), inputs.shards, flag, value)


def test_sequences_longer_than_the_position_embeddings(assert_error, inputs, tmp_path):
    config = edited(inputs.config, tmp_path / "short.json", max_position_embeddings=16)
    assert_error(("--config-file", config), inputs.shards, "32", "16 positions")


def test_shards_of_another_vocabulary(assert_error, inputs, tmp_path):
    folder = tmp_path / "shards"
    write_shard(folder / "a.hdf5", sample_rows(8, 32, 5, 0), {"vocab_sha256": "0" * 64})
    assert_error(("--input-dir", folder), folder, inputs.vocab_file)


@pytest.mark.parametrize(
    "key, value",
    [
        ("input_ids", 1210),
        ("input_ids", -1),
        ("masked_lm_ids", 30000),
        ("masked_lm_positions", 32),
        ("masked_lm_positions", -3),
        ("segment_ids", 2),
        ("next_sentence_labels", 5),
    ],
)
def test_value_out_of_range_names_shard_and_row_and_saves_the_steps_before_it(inputs, tmp_path, key, value):
    """The row is read in the middle of the epoch."""
    rows = sample_rows(64, 32, 5, 0)
    rows[key][17, ...] = value
    path = write_shard(tmp_path / "shards" / "a.hdf5", {name: v.astype(np.int32) for name, v in rows.items()})
    output = tmp_path / "output"
    flags = ("--max-steps", 16, "--log-freq", 1, "--input-dir", path.parent)
    assert_refused(run_here(inputs.command(output, *flags)), str(path), "row 17", key, str(value))
    done = max(losses(output), default=0)
    assert steps_in(output) == ([str(done)] if done else [])


def test_a_shard_that_is_truncated_while_a_run_reads_it_is_named_and_the_finished_steps_are_saved(inputs, tmp_path):
    path = write_shards(tmp_path / "shards", sizes=(64,)) / "shard_000.hdf5"
    truncate_in_step_5 = f"""
import os, run_pretraining, sys
from trainer import Trainer
from utils.errors import run_main

training_step = Trainer.training_step

def truncating_step(self, *arguments):
    if self.state.step == 4:
        os.truncate({str(path)!r}, 0)
    return training_step(self, *arguments)

Trainer.training_step = truncating_step
run_main(lambda: run_pretraining.main(sys.argv[1:]))
"""
    output = tmp_path / "output"
    flags = ("--max-steps", 500, "--log-freq", 1, "--input-dir", path.parent)
    result = run_program(sys.executable, "-c", truncate_in_step_5, *inputs.command(output, *flags))
    assert_refused(result, f"{path} was cut off while it was read")
    done = max(losses(output))
    assert done >= 5 and steps_in(output) == [str(done)]


# --- config, vocabulary, weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values, words",
    [
        ({"hidden_sise": 32}, ["hidden_sise"]),
        ({"hidden_size": None}, ["missing", "hidden_size"]),
        ({"hidden_size": 33}, ["hidden_size 33"]),
        ({"num_attention_heads": "two"}, ["num_attention_heads", "two"]),
        ({"hidden_act": "relu"}, ["hidden_act", "relu"]),
        ({"hidden_dropout_prob": 1.5}, ["dropout"]),
        ({"vocab_size": 1000}, ["1210", "1000"]),
        ({"vocab_size": 30522}, ["1210", "30522"]),
    ],
    ids=str,
)
def test_wrong_config(assert_error, inputs, tmp_path, values, words):
    assert_error(("--config-file", edited(inputs.config, tmp_path / "bad.json", **values)), *words)


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "\x00\x01", "null", '{"vocab_size": 1'])
def test_config_that_is_not_a_json_object(assert_error, tmp_path, content):
    (tmp_path / "bad.json").write_text(content)
    assert_error(("--config-file", tmp_path / "bad.json"), tmp_path / "bad.json")


def test_vocabulary_that_is_not_text(assert_error, tmp_path):
    (tmp_path / "vocab.txt").write_bytes(bytes(range(256)))
    assert_error(("--vocab-file", tmp_path / "vocab.txt"), tmp_path / "vocab.txt")


@pytest.mark.parametrize("flag", ["--from-pretrained-params", "--from-checkpoint"])
def test_weights_of_another_shape(assert_error, inputs, tmp_path, flag):
    wide = edited(inputs.config, tmp_path / "wide.json", hidden_size=48)
    train(inputs.command(tmp_path / "wide", "--max-steps", 1, "--config-file", wide))
    assert_error((flag, steps_folder(tmp_path / "wide") / "1"), steps_folder(tmp_path / "wide") / "1", "48", "32")


@pytest.mark.parametrize("layers, word", [(1, "lacks"), (3, "has")])
def test_weights_with_another_number_of_layers(assert_error, inputs, tmp_path, layers, word):
    other = edited(inputs.config, tmp_path / "other.json", num_hidden_layers=layers)
    train(inputs.command(tmp_path / "other", "--max-steps", 1, "--config-file", other))
    assert_error(("--from-pretrained-params", steps_folder(tmp_path / "other") / "1"), word, "encoder.layer.")


def test_model_file_that_is_cut_off(assert_error, inputs, tmp_path):
    train(inputs.command(tmp_path / "complete", "--max-steps", 1))
    content = (steps_folder(tmp_path / "complete") / "1" / "model.safetensors").read_bytes()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "model.safetensors").write_bytes(content[: len(content) // 2])
    assert_error(("--from-pretrained-params", tmp_path / "cut"), tmp_path / "cut" / "model.safetensors")


# --- during the run ---------------------------------------------------------------------------------------------------


def test_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoints(inputs, tmp_path):
    """A learning rate that makes the weights infinite: they are not saved."""
    flags = ("--log-freq", 1, "--max-skipped-steps", 4, "--num-steps-per-checkpoint", 100, "--warmup-proportion", 0)
    train(inputs.command(tmp_path, "--max-steps", 5, *flags))
    flags = (*flags, *resuming(tmp_path), "--learning-rate", 3e38)
    result = run_here(inputs.command(tmp_path, "--max-steps", 500, *flags))
    assert_refused(result, "not finite", "4 steps in a row", "sample positions", "--learning-rate")
    assert steps_in(tmp_path)[0] == "5"
    for step in steps_in(tmp_path):
        tensors = load_file(steps_folder(tmp_path) / step / "model.safetensors")
        assert all(torch.isfinite(tensor).all() for tensor in tensors.values()), step


def test_weights_that_are_not_finite(inputs, tmp_path):
    train(inputs.command(tmp_path / "good", "--max-steps", 1))
    bad = Path(shutil.copytree(steps_folder(tmp_path / "good") / "1", tmp_path / "bad"))
    (bad / "manifest.json").unlink()
    tensors = load_file(bad / "model.safetensors")
    tensors["bert.pooler.dense.bias"][3] = float("nan")
    save_file(tensors, bad / "model.safetensors")
    result = run_here(inputs.command(tmp_path / "output", "--max-steps", 50, "--from-pretrained-params", bad))
    assert_refused(result, "not finite")
    assert steps_in(tmp_path / "output") == []


def test_folder_with_newer_checkpoints_of_another_run(inputs, tmp_path):
    train(inputs.command(tmp_path, "--max-steps", 4, "--num-steps-per-checkpoint", 2))
    folder = steps_folder(tmp_path)
    before = files_of(folder)
    for flags in ((), ("--from-checkpoint", folder / "2")):
        result = run_here(inputs.command(tmp_path, "--max-steps", 9, *flags))
        assert_refused(result, str(folder), "step 4", "--resume-from-checkpoint", "--output-dir")
    assert files_of(folder) == before


@pytest.mark.parametrize("place", ["output", "output/custom", "output/custom/phase1"])
def test_file_in_place_of_the_output_folder_is_found_before_training(inputs, tmp_path, place):
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("mine")
    flags = ("--max-steps", 3, "--report-file", tmp_path / "report.json")
    result = run_here(inputs.command(tmp_path / "output", *flags))
    assert_refused(result, str(tmp_path / "output"), "--output-dir")
    assert (tmp_path / place).read_text() == "mine"
    assert "step 3" not in result.stdout


def test_output_folder_that_is_a_link_to_itself(inputs, tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    command = inputs.command(loop, "--max-steps", 3, *resuming(loop), "--report-file", tmp_path / "report.json")
    assert_refused(run_here(command), str(loop))


def test_report_that_cannot_be_written_is_found_before_training(inputs, tmp_path):
    result = run_here(inputs.command(tmp_path / "output", "--max-steps", 3, "--report-file", tmp_path))
    assert_refused(result, str(tmp_path), "--report-file")
    assert steps_in(tmp_path / "output") == []


def test_report_that_is_a_fifo_is_refused(inputs, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    result = run_here(inputs.command(tmp_path / "output", "--max-steps", 1, "--report-file", tmp_path / "fifo"))
    assert_refused(result, f"{tmp_path / 'fifo'} is not a regular file", "--report-file")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB, if this process may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_full_disk_keeps_the_checkpoints_before_it_and_the_same_command_continues_later(inputs, tmp_path, small_disk):
    flags = ("--max-steps", 12, "--log-freq", 1, "--num-steps-per-checkpoint", 3)
    uninterrupted = tmp_path / "uninterrupted"
    train(inputs.command(uninterrupted, *flags))
    command = inputs.command(small_disk, *flags, *resuming(small_disk), "--report-file", tmp_path / "report.json")
    train([*command, "--steps-this-run", "3"])

    hog = small_disk / "hog"
    with hog.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(hog, hog.stat().st_size - 2**16)  # enough for the run's small files, not for a checkpoint
    result = run_here(command)
    assert_refused(result, "cannot write the checkpoint", "No space left on device", "unchanged")
    assert steps_in(small_disk) == ["3"]
    verify_checkpoint(steps_folder(small_disk) / "3")

    hog.unlink()
    gc.collect()  # the failed run was in this process and holds the folder's lock until it is freed
    train(command)
    ours, theirs = (steps_folder(output) / "12" / "model.safetensors" for output in (small_disk, uninterrupted))
    assert ours.read_bytes() == theirs.read_bytes()


def test_compressed_shards_give_the_same_losses(inputs, tmp_path):
    plain, gzip = write_shards(tmp_path / "plain", sizes=(24,)), tmp_path / "gzip"
    with h5py.File(plain / "shard_000.hdf5") as file:
        rows = {key: file[key][:].astype(np.int8 if file[key].dtype == np.int8 else np.int32) for key in file}
    write_shard(gzip / "any_name.hdf5", rows, compression="gzip", chunks=True)
    for folder in (plain, gzip):
        flags = ("--max-steps", 8, "--log-freq", 1, "--input-dir", folder)
        train(inputs.command(tmp_path / "output" / folder.name, *flags))
    assert losses(tmp_path / "output" / "plain") == losses(tmp_path / "output" / "gzip")
