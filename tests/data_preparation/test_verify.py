"""Verification of HDF5 shards: counts against plain ones, and each kind of damage."""

import shutil
import zlib
from pathlib import Path

import conftest
import h5py
import numpy as np
import pytest
from conftest import (
    assert_refused,
    pretraining_types,
    sample_rows,
    write_nvidia_shard,
    write_shard,
    write_shards,
)
from small_runs import run_here

from bert_recipe.data_loading.hdf5_shards import KEYS
from bert_recipe.data_preparation.options import SampleOptions
from bert_recipe.data_preparation.samples import verify
from bert_recipe.data_preparation.samples.create_shards import create_shard
from bert_recipe.data_preparation.samples.hdf5_writer import shard_attributes
from bert_recipe.data_preparation.samples.sample_statistics import SampleStatistics
from bert_recipe.data_preparation.samples.verify import sample_lines
from bert_recipe.tokenization.tokenizer import BertTokenizer
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.work_units.executors import InProcessExecutor, open_executor
from data import prepare

LENGTH, PREDICTIONS = 16, 3
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "##s"]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
CLS, SEP, MASK, FIRST_WORD = 2, 3, 4, 5


def make_samples(seed: int) -> dict[str, np.ndarray]:
    """40 samples in the small vocabulary; some masked tokens are kept, and some replaced by another
    word.
    """
    rows = sample_rows(40, LENGTH, PREDICTIONS, seed)
    own_ids = FIRST_WORD + np.arange(1200) % len(WORDS)
    own_ids[[0, conftest.CLS, conftest.SEP, conftest.MASK]] = 0, CLS, SEP, MASK
    for key in ("input_ids", "masked_lm_ids"):
        rows[key] = own_ids[rows[key]]
    kinds = np.random.default_rng(seed).choice(3, (40, PREDICTIONS), p=[0.8, 0.1, 0.1])
    for row, column in np.argwhere((rows["masked_lm_positions"] > 0) & (kinds > 0)):
        label, place = rows["masked_lm_ids"][row, column], rows["masked_lm_positions"][row, column]
        rows["input_ids"][row, place] = label if kinds[row, column] == 1 else FIRST_WORD
    return rows


def verify_folder(folder: Path, tokenizer: BertTokenizer) -> SampleStatistics:
    return verify.verify_folder(folder, tokenizer, InProcessExecutor())


@pytest.fixture
def tokenizer(tmp_path) -> BertTokenizer:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(VOCABULARY) + "\n")
    return BertTokenizer(path)


@pytest.fixture
def folder(tmp_path, tokenizer) -> Path:
    folder = tmp_path / "shards"
    for number in range(3):
        rows = pretraining_types(make_samples(number))
        write_shard(folder / f"shard-{number}.hdf5", rows, {"vocab_sha256": tokenizer.vocab_sha256})
    return folder


@pytest.mark.parametrize("workers", [1, 2])
def test_counts_are_those_of_a_plain_loop(folder, tokenizer, workers):
    with open_executor("local", workers) as executor:
        statistics = verify.verify_folder(folder, tokenizer, executor)
    lengths, masked, as_mask, as_itself, random_next = [], 0, 0, 0, 0
    for number in range(3):
        samples = make_samples(number)
        for row in range(40):
            lengths.append(int(samples["input_mask"][row].sum()))
            random_next += int(samples["next_sentence_labels"][row])
            for position, label in zip(
                samples["masked_lm_positions"][row], samples["masked_lm_ids"][row], strict=True
            ):
                if position:
                    masked += 1
                    as_mask += samples["input_ids"][row][position] == MASK
                    as_itself += samples["input_ids"][row][position] == label
    assert (statistics.shards, statistics.samples, statistics.tokens) == (3, 120, sum(lengths))
    assert (statistics.masked, statistics.masked_as_mask, statistics.masked_as_itself) == (
        masked,
        as_mask,
        as_itself,
    )
    assert statistics.masked_as_other == masked - as_mask - as_itself
    assert statistics.labels == [0, 120 - random_next, random_next]
    assert statistics.lengths == np.bincount(lengths, minlength=LENGTH + 1).tolist()


def test_nvidia_shards_read_the_same_without_attributes(folder, tmp_path, tokenizer):
    for number in range(3):
        write_nvidia_shard(tmp_path / "nvidia" / f"train_{number}.hdf5", make_samples(number))
    ours = verify_folder(folder, tokenizer)
    theirs = verify_folder(tmp_path / "nvidia", tokenizer)
    for name in ("samples", "tokens", "masked", "masked_as_mask", "masked_as_itself"):
        assert getattr(ours, name) == getattr(theirs, name)
    refused = run_here(["verify", tmp_path / "nvidia", "--num-workers", "1"], prepare.main)
    assert_refused(refused, "give --vocab-file")


def test_samples_are_shown_with_their_masks(tmp_path, tokenizer):
    row = {
        "input_ids": [CLS, 5, MASK, 11, SEP, 8, 7, SEP],
        "input_mask": [1] * 8,
        "segment_ids": [0, 0, 0, 0, 0, 1, 1, 1],
        "masked_lm_positions": [2, 5, 6],
        "masked_lm_ids": [6, 9, 7],
    }
    samples = {key: np.array([values]) for key, values in row.items()} | {
        "next_sentence_labels": np.array([1])
    }
    write_shard(tmp_path / "one" / "shard.hdf5", pretraining_types(samples))
    text = "\n".join(sample_lines(tmp_path / "one", tokenizer))
    assert "[CLS] alpha {beta -> [MASK]}s [SEP] {epsilon -> delta} {gamma} [SEP]" in text
    assert "8 tokens, B is random" in text


def set_value(key: str, index: tuple, value: int):
    def damage(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            file[key][index] = value

    return damage


def other_vocabulary(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file.attrs["vocab_sha256"] = "0" * 64


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (set_value("input_ids", (7, 1), 900), "row 7: input_ids holds 900"),
        (set_value("masked_lm_positions", (7, 0), 15), "row 7: masked_lm_positions holds 15"),
        (set_value("masked_lm_positions", (7, 0), 99), "row 7: masked_lm_positions holds 99"),
        (
            set_value("masked_lm_positions", (7, slice(0, 2)), 1),
            "row 7: masked_lm_positions has a position twice",
        ),
        (set_value("masked_lm_positions", (7,), 0), "row 7: nothing is masked"),
        (set_value("masked_lm_ids", (7, 0), SEP), "row 7: [CLS] or [SEP] is masked"),
        (set_value("input_ids", (7, 0), 6), "row 7: the sample does not begin with [CLS]"),
        (other_vocabulary, "vocab"),
    ],
)
def test_a_bad_shard_is_named(folder, tokenizer, damage, reason):
    damage(folder / "shard-1.hdf5")
    with pytest.raises(UserError) as error:
        verify_folder(folder, tokenizer)
    assert str(folder / "shard-1.hdf5") in str(error.value)
    assert reason in str(error.value)


def test_a_value_that_changed_is_found_by_its_checksum_and_old_shards_have_none(
    tmp_path, tokenizer
):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join("alpha beta gamma\ndelta epsilon zeta" for _ in range(40)))
    folder = tmp_path / "own"
    folder.mkdir()
    options = SampleOptions(LENGTH, PREDICTIONS)
    attributes = shard_attributes("0" * 64, tokenizer, options)
    for name in ("a", "b"):
        create_shard(folder / f"{name}.hdf5", text, name, tokenizer.vocab_file, options, attributes)
    write_shard(folder / "c.hdf5", pretraining_types(make_samples(3)), attributes)
    statistics = verify_folder(folder, tokenizer)
    assert (statistics.shards, statistics.checksummed) == (3, 2)
    with h5py.File(folder / "a.hdf5") as file:
        for key in KEYS:
            assert file[key].attrs["crc32"] == zlib.crc32(file[key][:].tobytes())
    # A row that is valid, but not the one that was written.
    with h5py.File(folder / "b.hdf5", "r+") as file:
        row = int(np.argmax(file["next_sentence_labels"][:] == 1))
        file["next_sentence_labels"][row] = 0
    with pytest.raises(
        UserError, match=r"b\.hdf5: next_sentence_labels does not match its checksum"
    ):
        verify_folder(folder, tokenizer)


def test_a_short_sample_may_have_no_whole_word_that_can_be_masked(tmp_path, tokenizer):
    """Here one token may be masked, and each word has two."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(["betas"] * 9))
    (tmp_path / "own").mkdir()
    options = SampleOptions(LENGTH, PREDICTIONS, whole_word_mask=True)
    attributes = shard_attributes("0" * 64, tokenizer, options)
    vocabulary = tokenizer.vocab_file
    create_shard(tmp_path / "own" / "a.hdf5", text, "a", vocabulary, options, attributes)
    assert verify_folder(tmp_path / "own", tokenizer).masked == 0


def test_the_command_reports_and_exits_with_2_on_a_bad_shard(folder, tmp_path):
    shutil.copyfile(tmp_path / "vocab.txt", folder / "vocab.txt")
    for name in ("1a2b3c4d.partial", "tmp-5e6f"):  # of interrupted runs
        write_shards(folder.with_suffix(f".{name}"))
    command = ["verify", tmp_path, "--num-workers", "1"]
    good = run_here(command, prepare.main)
    assert (good.returncode, good.stderr) == (0, "")
    assert "120 of length 16 in 3 shards" in good.stdout
    assert "[MASK]}" in good.stdout
    set_value("input_ids", (3, 2), 999)(folder / "shard-2.hdf5")
    assert_refused(run_here(command, prepare.main), str(folder / "shard-2.hdf5"))
