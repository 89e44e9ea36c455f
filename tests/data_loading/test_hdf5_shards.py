"""The reader of HDF5 shards: by row or in memory; errors name damaged files."""

import errno
import fcntl
import os
import resource
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import (
    VOCAB_FILE,
    pretraining_types,
    sample_rows,
    write_nvidia_shard,
    write_shard,
    write_shards,
)
from small_runs import assert_opening_fails

import create_pretraining_data
from bert_recipe.data_loading.hdf5_shards import KEYS, Shard, open_shards
from bert_recipe.data_loading.pretraining_dataset import PretrainingDataset
from bert_recipe.utils.errors import UserError

VOCAB_SIZE = 30522


@pytest.fixture
def rows():
    return sample_rows(20, 32, 5, seed=3)


def test_a_shard_that_another_program_has_locked_is_not_said_to_be_cut_off(tmp_path, rows):
    path = write_shard(tmp_path / "s.hdf5", pretraining_types(rows), {})
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="or set HDF5_USE_FILE_LOCKING=FALSE"):
            Shard(path)


@pytest.mark.parametrize("write", [write_shard, write_nvidia_shard])
def test_a_shard_tells_its_storage_sizes_and_attributes(tmp_path, rows, write):
    """What its arrays hold: test_pretraining_dataset.py."""
    shard = Shard(
        write(
            tmp_path / "s.hdf5", pretraining_types(rows), {"schema_version": 1, "casing": b"lower"}
        )
    )
    assert shard.is_contiguous == (write is write_shard)
    assert (len(shard), shard.sequence_length, shard.max_masked) == (20, 32, 5)
    assert shard.attributes == {"schema_version": 1, "casing": "lower"}
    assert type(shard.attributes["schema_version"]) is int


@pytest.mark.parametrize("version", [None, 1, 2, 3])
def test_shards_of_all_versions_are_read(tmp_path, rows, version):
    attributes = {} if version is None else {"schema_version": version}
    write = write_nvidia_shard if version is None else write_shard
    write(tmp_path / "s.hdf5", pretraining_types(rows), attributes)
    stored = PretrainingDataset(tmp_path, VOCAB_SIZE).rows(np.arange(20))
    assert all(np.array_equal(stored[key], rows[key]) for key in ("input_ids", "masked_lm_ids"))


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_only_the_needed_rows_of_a_contiguous_shard_are_in_memory(tmp_path):
    """A sparse file of 400 MB."""
    n = 2_000_000
    path = tmp_path / "large.hdf5"
    shapes = {"next_sentence_labels": (n,), "masked_lm_positions": (n, 2), "masked_lm_ids": (n, 2)}
    with h5py.File(path, "w") as file:
        for key in KEYS:
            file.create_dataset(key, shapes.get(key, (n, 64)), np.uint8)[n - 3 :] = 1
    before = resident_bytes()
    dataset = PretrainingDataset(tmp_path, VOCAB_SIZE)
    stream = dataset.read(np.array([n - 1, n - 3])).stream(np.arange(2))
    assert stream["input_ids"].tolist() == [1] * 128
    assert resident_bytes() - before < 50e6 < path.stat().st_size / 4


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("text.txt", b"no shard", "holds no *.hdf5 or *.h5"),
        ("bad.hdf5", b"", "bad.hdf5 cannot be read as HDF5"),
        ("bad.hdf5", b"not HDF5 at all", "bad.hdf5 cannot be read as HDF5"),
        ("bad.hdf5", b"\x89HDF\r\n\x1a\n" + bytes(600), "bad.hdf5 cannot be read as HDF5"),
    ],
)
def test_folders_without_a_shard_are_named(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    assert_opening_fails(tmp_path, tmp_path, words)


def test_a_folder_of_training_and_test_shards_is_refused(tmp_path, rows):
    """NVIDIA's have both, and its program reads those of training."""
    for name in ("books_training_0", "books_training_1"):
        write_shard(tmp_path / f"{name}.hdf5", pretraining_types(rows), {})
    assert len(open_shards(tmp_path)) == 2
    write_shard(tmp_path / "books_test_0.hdf5", pretraining_types(rows), {})
    with pytest.raises(UserError, match=r"books_test_0.hdf5 \(of test\) and books_training_0"):
        open_shards(tmp_path)


@pytest.mark.parametrize("write", [write_shard, write_nvidia_shard])
def test_shard_that_is_cut_off_is_named(tmp_path, rows, write):
    path = write(tmp_path / "cut.hdf5", pretraining_types(rows))
    content = path.read_bytes()
    for size in range(0, len(content), max(1, len(content) // 60)):
        path.write_bytes(content[:size])
        assert_opening_fails(tmp_path, "cut.hdf5", "make or fetch it again")


@pytest.mark.parametrize("write", [write_shard, write_nvidia_shard])
def test_flipped_bytes_give_data_or_an_error_that_names_the_shard(tmp_path, rows, write):
    path = write(tmp_path / "flipped.hdf5", pretraining_types(rows))
    content = path.read_bytes()
    random = np.random.default_rng(0)
    errors = 0
    for _ in range(150):
        damaged = bytearray(content)
        for place in random.integers(0, min(len(content), 4000), 4):
            damaged[place] = random.integers(256)
        path.write_bytes(damaged)
        try:
            dataset = PretrainingDataset(tmp_path, VOCAB_SIZE)
            dataset.read(np.arange(len(dataset))).stream(np.arange(len(dataset)))
        except UserError as error:
            errors += 1
            assert "flipped.hdf5" in str(error) or str(tmp_path) in str(error)
    assert errors > 20


@pytest.mark.parametrize("key", KEYS)
def test_shard_without_one_of_the_keys_is_an_error_with_both_names(tmp_path, rows, key):
    path = write_shard(
        tmp_path / "s.hdf5",
        pretraining_types({name: values for name, values in rows.items() if name != key}),
    )
    assert_opening_fails(tmp_path, "s.hdf5", f"lacks the key {key}:")
    with h5py.File(path, "a") as file:
        file.create_group(key)
    assert_opening_fails(tmp_path, "s.hdf5", f"lacks the key {key}:")


@pytest.mark.parametrize(
    ("data", "attributes", "words"),
    [
        (
            {"input_mask": np.zeros((20, 31), np.uint8)},
            {},
            "input_mask is [20, 31] where [20, 32] fits",
        ),
        (
            {"segment_ids": np.zeros((19, 32), np.uint8)},
            {},
            "segment_ids is [19, 32] where [20, 32] fits",
        ),
        (
            {"masked_lm_ids": np.zeros((20, 4), np.uint8)},
            {},
            "masked_lm_ids is [20, 4] where [20, 5] fits",
        ),
        (
            {"next_sentence_labels": np.zeros((20, 1), np.uint8)},
            {},
            "next_sentence_labels is [20, 1] where [20] fits",
        ),
        ({"input_ids": np.zeros(20, np.uint8)}, {}, "input_ids is [20] where [20, 0] fits"),
        ({"masked_lm_positions": np.uint8(0)}, {}, "masked_lm_positions is [] where [20, 0] fits"),
        (
            {"segment_ids": h5py.Empty(np.int8)},
            {},
            "segment_ids is [] where [20, 32] fits",
        ),  # a null dataspace
        (
            {"input_mask": np.zeros((20, 32), np.float32)},
            {},
            "input_mask holds float32, not whole numbers",
        ),
        ({}, {"schema_version": 99}, "s.hdf5 has schema_version 99, and this program reads 1 to 4"),
        ({}, {"schema_version": h5py.Empty(np.int8)}, "s.hdf5 has schema_version None"),
    ],
)
def test_data_and_attributes_that_contradict_the_format_or_each_other_are_named(
    tmp_path, rows, data, attributes, words
):
    write_shard(tmp_path / "s.hdf5", pretraining_types(rows) | data, attributes)
    assert_opening_fails(tmp_path, "s.hdf5", words)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("cut off", "was cut off"),
        ("emptied", "was cut off"),
        ("disk error", "cannot be read: the disk reported an input/output error"),
    ],
)
def test_a_shard_that_becomes_unreadable_is_named(tmp_path, monkeypatch, damage, words):
    dataset = PretrainingDataset(write_shards(tmp_path, sizes=(20, 20)), VOCAB_SIZE)
    path = dataset.shards[1].path
    if damage == "disk error":
        pread = os.pread

        def failing_pread(descriptor: int, *where: int) -> bytes:
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return pread(descriptor, *where)

        monkeypatch.setattr(os, "pread", failing_pread)
    else:
        os.truncate(path, 0 if damage == "emptied" else path.stat().st_size - 1)
    dataset.read(np.arange(20)).stream(np.arange(20))
    with pytest.raises(UserError, match=f"shard {path} {words}"):
        dataset.read(np.array([3, 39]))


def test_a_shard_that_is_removed_or_replaced_is_read_as_it_was(tmp_path):
    dataset = PretrainingDataset(write_shards(tmp_path, sizes=(20,)), VOCAB_SIZE)
    before = dataset.rows(np.arange(20))
    (tmp_path / "other").write_bytes(b"short")
    (tmp_path / "other").rename(dataset.shards[0].path)
    for key, values in dataset.rows(np.arange(20)).items():
        assert np.array_equal(values, before[key])


def test_data_in_other_files_is_read(tmp_path, rows):
    source = write_shard(tmp_path / "source.hdf5", pretraining_types(rows))
    path = tmp_path / "s.hdf5"
    with h5py.File(source) as theirs, h5py.File(path, "w") as file:
        for key in KEYS:
            file[key] = h5py.ExternalLink(str(source), key)
        del file["input_ids"]
        layout = h5py.VirtualLayout(theirs["input_ids"].shape, np.uint16)
        layout[:] = h5py.VirtualSource(theirs["input_ids"])
        file.create_virtual_dataset("input_ids", layout)
    for key, values in pretraining_types(rows).items():
        assert np.array_equal(Shard(path).read(key, np.arange(20)), values)


def test_the_digest_changes_with_the_rows_and_not_with_their_storage_or_name(tmp_path, rows):
    contiguous = write_shard(tmp_path / "a" / "s.hdf5", pretraining_types(rows))
    write_nvidia_shard(tmp_path / "b" / "t.hdf5", rows)
    before = PretrainingDataset(tmp_path / "a", VOCAB_SIZE).digest()
    assert PretrainingDataset(tmp_path / "b", VOCAB_SIZE).digest() == before
    for key in ("input_ids", "masked_lm_ids"):
        with h5py.File(contiguous, "r+") as file:
            file[key][:] = np.roll(file[key][:], 1, axis=0)
        after = PretrainingDataset(tmp_path / "a", VOCAB_SIZE).digest()
        assert after != before
        before = after


def made_shards(tmp_path: Path, count: int) -> Path:
    """A folder of `count` shards of four samples each."""
    folder, texts = tmp_path / "shards", tmp_path / "texts"
    texts.mkdir()
    for number in range(count):
        text = f"the number {number} is here\nand so is this\n\nanother one of {number}\nand this\n"
        (texts / f"part-{number:03d}.txt").write_text(text)
    flags = (
        "--input-dir",
        texts,
        "--output-dir",
        folder,
        "--vocab-file",
        VOCAB_FILE,
        "--num-workers",
        1,
    )
    create_pretraining_data.main(
        [*map(str, flags), "--max-seq-length", "16", "--max-predictions-per-seq", "3"]
    )
    return folder


def test_more_shards_than_the_limit_of_open_files_are_read(tmp_path):
    folder = made_shards(tmp_path, 40)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
    try:
        dataset = PretrainingDataset(folder, VOCAB_SIZE)
        assert len(dataset.shards) == 40
        dataset.read(np.arange(len(dataset))).stream(np.arange(len(dataset)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
