"""Pre-training on what cannot be right: one line that says what, where and what to do; exit code 2; nothing written,
and nothing lost that was there."""

import contextlib
import json
import shutil
import subprocess
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from conftest import assert_refused, run_program, sample_rows, write_shard, write_shards
from safetensors.torch import load_file, save_file
from small_runs import Ground, losses, resuming, run_here, steps_folder, steps_in, trained

from utils import checkpoint as checkpoints


@pytest.fixture
def refused(inputs, tmp_path):
    """Runs three steps with extra flags and expects a refusal that says `words` and writes nothing."""

    def check(flags: tuple, *words: str) -> None:
        output = tmp_path / "output"
        result = run_here(inputs.command(output, "--max-steps", 3, *flags))
        assert_refused(result, *map(str, words))
        assert not output.exists(), list(output.rglob("*"))

    return check


def edited(path: Path, target: Path, **values) -> Path:
    """A JSON file with some values replaced, or taken away where they are None."""
    content = {**json.loads(path.read_text()), **values}
    target.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return target


# --- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--phase1", "--phase2"), ["--phase1", "--phase2"]),
        (("--no-such-flag", "1"), ["--no-such-flag"]),
        (("--max-steps", "0"), ["--max-steps", "0"]),
        (("--learning-rate", "nan"), ["--learning-rate", "nan"]),
        (("--warmup-proportion", "1.5"), ["--warmup-proportion", "1.5"]),
        (("--batch-size", "-4"), ["--batch-size", "-4"]),
        (("--optimizer", "SGD"), ["--optimizer", "SGD", "Lamb"]),
        (("--beta2", "1"), ["--beta2"]),
        (("--last-step-of-checkpoint", "newest"), ["--last-step-of-checkpoint", "newest", "auto"]),
        (("--last-step-of-checkpoint", "auto"), ["--last-step-of-checkpoint", "--from-checkpoint"]),
        (("--config-file", "None"), ["--bert-model custom", "--config-file"]),
        (("--vocab-file", "None"), ["--bert-model custom", "--vocab-file"]),
        (("--from-checkpoint", "/nowhere/at/all"), ["/nowhere/at/all", "does not exist"]),
        (("--from-checkpoint", "/nowhere", "--last-step-of-checkpoint", "7"), ["/nowhere/7", "does not exist"]),
        (("--from-pretrained-params", "/nowhere/at/all"), ["/nowhere/at/all", "does not exist"]),
        (("--phase2", "--from-phase1-final-params", "/nowhere/at/all"), ["/nowhere/at/all", "does not exist"]),
        (("--from-phase1-final-params", "."), ["--from-phase1-final-params", "--phase2"]),
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
def test_flags_that_cannot_be_right(refused, flags, words):
    if flags == ("--device", "cuda") and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    refused(flags, *words)


def test_auto_wants_the_folder_of_steps_and_not_one_of_them(inputs, tmp_path):
    train(inputs.command(tmp_path, "--max-steps", 1))
    folder = steps_folder(tmp_path) / "1"
    flags = ("--max-steps", 2, "--from-checkpoint", folder, "--last-step-of-checkpoint", "auto")
    assert_refused(run_here(inputs.command(tmp_path, *flags)), str(folder), "folder of steps")


def test_an_error_of_the_program_itself_is_one_line_too(inputs, tmp_path):
    """As a process of its own, as users run it."""
    command = inputs.command(tmp_path / "output", "--max-steps", 3, "--input-dir", "/nowhere")
    assert_refused(run_program("run_pretraining.py", *command), "/nowhere")


# --- data -------------------------------------------------------------------------------------------------------------


def test_an_empty_folder(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(("--input-dir", tmp_path / "empty"), tmp_path / "empty")


def test_shards_without_samples(refused, tmp_path):
    write_shard(tmp_path / "shards" / "a.hdf5", sample_rows(0, 32, 5, 0))
    refused(("--input-dir", tmp_path / "shards"), tmp_path / "shards", "no sample")


@pytest.mark.parametrize("storage", [{}, {"compression": "gzip"}], ids=["plain", "gzip"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.98])
def test_a_truncated_shard(refused, tmp_path, storage, share):
    path = write_shard(tmp_path / "shards" / "a.hdf5", sample_rows(40, 32, 5, 0), **storage)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    refused(("--input-dir", path.parent), path)


def test_a_file_that_is_no_hdf5(refused, tmp_path):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "a.hdf5").write_text("words\n" * 1000)
    refused(("--input-dir", tmp_path / "shards"), tmp_path / "shards" / "a.hdf5")


def test_a_shard_without_one_of_the_keys(refused, tmp_path):
    rows = sample_rows(8, 32, 5, 0)
    del rows["segment_ids"]
    refused(("--input-dir", write_shard(tmp_path / "shards" / "a.hdf5", rows).parent), "a.hdf5", "segment_ids")


def test_a_shard_whose_keys_do_not_fit_each_other(refused, tmp_path):
    rows = sample_rows(8, 32, 5, 0)
    rows["next_sentence_labels"] = rows["next_sentence_labels"][:5]
    path = write_shard(tmp_path / "shards" / "a.hdf5", rows)
    refused(("--input-dir", path.parent), path, "next_sentence_labels")


@pytest.mark.parametrize(
    "length, predictions, attributes, what",
    [(16, 5, {}, "sequence length"), (32, 4, {}, "predictions"), (32, 5, {"vocab_sha256": "another"}, "vocab_sha256")],
)
def test_shards_that_disagree(refused, tmp_path, length, predictions, attributes, what):
    folder = tmp_path / "shards"
    write_shard(folder / "a.hdf5", sample_rows(8, 32, 5, 0), {"vocab_sha256": "one"})
    write_shard(folder / "b.hdf5", sample_rows(8, length, predictions, 0), {"vocab_sha256": "one", **attributes})
    refused(("--input-dir", folder), "a.hdf5", "b.hdf5", what)


@pytest.mark.parametrize("flag, value", [("--max-seq-length", 64), ("--max-predictions-per-seq", 7)])
def test_flags_that_do_not_fit_the_shards(refused, inputs, flag, value):
    refused((flag, value), inputs.shards, flag, value)


def test_sequences_longer_than_the_positions(refused, inputs, tmp_path):
    config = edited(inputs.config, tmp_path / "short.json", max_position_embeddings=16)
    refused(("--config-file", config), inputs.shards, "32", "max_position_embeddings 16")


def test_shards_of_another_vocabulary(refused, inputs, tmp_path):
    folder = tmp_path / "shards"
    write_shard(folder / "a.hdf5", sample_rows(8, 32, 5, 0), {"vocab_sha256": "0" * 64})
    refused(("--input-dir", folder), folder, inputs.vocab_file)


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
def test_values_out_of_range_name_the_shard_and_the_row_and_lose_nothing(inputs, tmp_path, key, value):
    """The row comes up in the middle of the epoch: what was learned before is saved."""
    rows = sample_rows(64, 32, 5, 0)
    rows[key][17, ...] = value
    path = write_shard(tmp_path / "shards" / "a.hdf5", {name: v.astype(np.int32) for name, v in rows.items()})
    output = tmp_path / "output"
    flags = ("--max-steps", 16, "--log-freq", 1, "--input-dir", path.parent)
    assert_refused(run_here(inputs.command(output, *flags)), str(path), "row 17", key, str(value))
    done = max(losses(output), default=0)
    assert steps_in(output) == ([str(done)] if done else [])


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
def test_a_config_that_cannot_be_right(refused, inputs, tmp_path, values, words):
    refused(("--config-file", edited(inputs.config, tmp_path / "bad.json", **values)), *words)


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "\x00\x01", "null", '{"vocab_size": 1'])
def test_a_config_that_is_no_json_object(refused, tmp_path, content):
    (tmp_path / "bad.json").write_text(content)
    refused(("--config-file", tmp_path / "bad.json"), tmp_path / "bad.json")


def test_a_vocabulary_that_is_not_text(refused, tmp_path):
    (tmp_path / "vocab.txt").write_bytes(bytes(range(256)))
    refused(("--vocab-file", tmp_path / "vocab.txt"), tmp_path / "vocab.txt")


@pytest.mark.parametrize("flag", ["--from-pretrained-params", "--from-checkpoint"])
def test_weights_of_another_shape(refused, inputs, tmp_path, flag):
    wide = edited(inputs.config, tmp_path / "wide.json", hidden_size=48)
    train(inputs.command(tmp_path / "wide", "--max-steps", 1, "--config-file", wide))
    refused((flag, steps_folder(tmp_path / "wide") / "1"), steps_folder(tmp_path / "wide") / "1", "48", "32")


@pytest.mark.parametrize("layers, word", [(1, "lacks"), (3, "has")])
def test_weights_of_more_or_fewer_layers(refused, inputs, tmp_path, layers, word):
    other = edited(inputs.config, tmp_path / "other.json", num_hidden_layers=layers)
    train(inputs.command(tmp_path / "other", "--max-steps", 1, "--config-file", other))
    refused(("--from-pretrained-params", steps_folder(tmp_path / "other") / "1"), word, "encoder.layer.")


def test_a_model_file_that_is_cut_off(refused, inputs, tmp_path):
    train(inputs.command(tmp_path / "whole", "--max-steps", 1))
    content = (steps_folder(tmp_path / "whole") / "1" / "model.safetensors").read_bytes()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "model.safetensors").write_bytes(content[: len(content) // 2])
    refused(("--from-pretrained-params", tmp_path / "cut"), tmp_path / "cut" / "model.safetensors")


# --- what happens on the way ------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_what_was_learned(inputs, tmp_path):
    """From good weights, a learning rate that throws them out of all bounds: those are not saved."""
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


def test_a_folder_that_holds_another_runs_steps(inputs, tmp_path):
    train(inputs.command(tmp_path, "--max-steps", 4, "--num-steps-per-checkpoint", 2))
    before = {path: path.stat().st_mtime_ns for path in steps_folder(tmp_path).rglob("*")}
    folder = steps_folder(tmp_path)
    for flags in ((), ("--from-checkpoint", folder / "2")):
        result = run_here(inputs.command(tmp_path, "--max-steps", 9, *flags))
        assert_refused(result, str(folder), "step 4", f"--from-checkpoint {folder}", "--output-dir")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize("place", ["output", "output/custom", "output/custom/phase1"])
def test_a_file_where_the_output_folder_should_be_is_found_before_training(inputs, tmp_path, place):
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("mine")
    flags = ("--max-steps", 3, "--report-file", tmp_path / "report.json")
    result = run_here(inputs.command(tmp_path / "output", *flags))
    assert_refused(result, str(tmp_path / "output"), "--output-dir")
    assert (tmp_path / place).read_text() == "mine"
    assert "step 3" not in result.stdout


def test_a_report_that_cannot_be_written_is_found_before_training(inputs, tmp_path):
    result = run_here(inputs.command(tmp_path / "output", "--max-steps", 3, "--report-file", tmp_path))
    assert_refused(result, str(tmp_path), "--report-file")
    assert steps_in(tmp_path / "output") == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB, where one may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_leaves_the_checkpoints_before_it_and_the_same_command_goes_on_after_it(
    inputs, tmp_path, small_disk
):
    flags = ("--max-steps", 12, "--log-freq", 1, "--num-steps-per-checkpoint", 3)
    whole = tmp_path / "whole"
    train(inputs.command(whole, *flags))
    command = inputs.command(small_disk, *flags, *resuming(small_disk), "--report-file", tmp_path / "report.json")
    train([*command, "--steps-this-run", "3"])

    hog = small_disk / "hog"
    with hog.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    result = run_here(command)
    assert_refused(result, "cannot write the checkpoint", "No space left on device", "untouched")
    assert steps_in(small_disk) == ["3"]
    checkpoints.verify_checkpoint(steps_folder(small_disk) / "3")

    hog.unlink()
    train(command)
    ours, theirs = (steps_folder(output) / "12" / "model.safetensors" for output in (small_disk, whole))
    assert ours.read_bytes() == theirs.read_bytes()


def test_gzip_shards_as_nvidia_makes_them_train_to_the_same_losses_as_plain_ones(inputs, tmp_path):
    """What is merely different is not bad."""
    plain, gzip = write_shards(tmp_path / "plain", sizes=(24,)), tmp_path / "gzip"
    with h5py.File(plain / "shard_000.hdf5") as file:
        rows = {key: file[key][:].astype(np.int8 if file[key].dtype == np.int8 else np.int32) for key in file}
    write_shard(gzip / "any_name.hdf5", rows, compression="gzip", chunks=True)
    for folder in (plain, gzip):
        flags = ("--max-steps", 8, "--log-freq", 1, "--input-dir", folder)
        train(inputs.command(tmp_path / "output" / folder.name, *flags))
    assert losses(tmp_path / "output" / "plain") == losses(tmp_path / "output" / "gzip")
