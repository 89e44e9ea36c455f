"""Reading shards: ours and NVIDIA's alike, as token streams, and damaged ones not at all."""

import resource
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import sample_rows, write_shard, write_shards

from pretraining_dataset import PretrainingDataset, Shard
from utils.errors import UserError

VOCAB_SIZE = 30522
WIDE = ("input_ids", "masked_lm_positions", "masked_lm_ids")
KEYS = ("input_ids", "input_mask", "segment_ids", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels")


def typed(rows, wide=np.uint16, narrow=np.uint8):
    return {key: values.astype(wide if key in WIDE else narrow) for key, values in rows.items()}


def write_nvidia_shard(path, rows):
    """As NVIDIA's recipe writes them: int32 and int8, gzip, in chunks that HDF5 chose."""
    return write_shard(path, typed(rows, np.int32, np.int8), compression="gzip", chunks=True)


def stream_written_out(rows, indices) -> dict[str, list]:
    """The stream of the samples `indices`, one sample and one token after another."""
    names = ("input_ids", "token_type_ids", "position_ids", "mlm_positions", "mlm_labels", "nsp_labels")
    stream = {"cu_seqlens": [0], **{name: [] for name in names}}
    for i in indices:
        start = len(stream["input_ids"])
        length = int(rows["input_mask"][i].sum())
        for place in range(length):
            stream["input_ids"].append(int(rows["input_ids"][i, place]))
            stream["token_type_ids"].append(int(rows["segment_ids"][i, place]))
            stream["position_ids"].append(place)
        for place, word in zip(rows["masked_lm_positions"][i], rows["masked_lm_ids"][i], strict=True):
            if place > 0:
                stream["mlm_positions"].append(start + int(place))
                stream["mlm_labels"].append(int(word))
        stream["nsp_labels"].append(int(rows["next_sentence_labels"][i]))
        stream["cu_seqlens"].append(len(stream["input_ids"]))
    return stream


def as_lists(stream):
    return {name: values.tolist() for name, values in stream.items()}


def joined(*parts):
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


@pytest.fixture
def rows():
    return sample_rows(20, 32, 5, seed=3)


# --- what is read -----------------------------------------------------------------------------------------------------


def test_a_stream_is_its_samples_end_to_end_whatever_shards_they_lie_in(tmp_path):
    parts = [sample_rows(n, 32, 5, seed=n) for n in (7, 1, 12)]
    for number, part in enumerate(parts):
        # Types differ between shards, as they may: each is as small as its values allow.
        write_shard(tmp_path / f"{number}.hdf5", typed(part, (np.uint16, np.int64, np.int32)[number]))
    dataset, rows = PretrainingDataset(tmp_path, VOCAB_SIZE), joined(*parts)
    assert len(dataset) == 20
    for indices in ([0], [7], [19, 3, 7, 8, 0], [5, 2, 2], list(range(20))):
        indices = np.array(indices)
        assert as_lists(dataset.stream(indices)) == stream_written_out(rows, indices)
        sizes = [[rows["input_mask"][i].sum(), (rows["masked_lm_positions"][i] > 0).sum()] for i in indices]
        assert dataset.sizes(indices).tolist() == sizes


def test_nvidias_shards_read_as_ours_do(tmp_path, rows):
    write_shard(tmp_path / "ours" / "shard.hdf5", typed(rows))
    write_nvidia_shard(tmp_path / "theirs" / "shard.hdf5", rows)
    ours, theirs = (PretrainingDataset(tmp_path / name, VOCAB_SIZE) for name in ("ours", "theirs"))
    assert ours.shards[0].is_mapped and not theirs.shards[0].is_mapped
    assert ours.bytes_in_memory == 0 < theirs.bytes_in_memory
    assert (ours.sequence_length, ours.predictions_per_sequence) == (32, 5)
    indices = np.array([4, 0, 19, 11])
    found = theirs.stream(indices)
    assert as_lists(found) == as_lists(ours.stream(indices)) == stream_written_out(rows, indices)
    assert {values.dtype for values in found.values()} == {np.dtype(np.int64), np.dtype(np.int32)}
    assert found["cu_seqlens"].dtype == np.int32


def test_foreign_byte_orders_and_mixed_folders_read_alike(tmp_path, rows):
    write_shard(tmp_path / "1.h5", typed(rows, ">i4", "i1"))
    write_nvidia_shard(tmp_path / "2.hdf5", rows)
    write_shard(tmp_path / "3.hdf5", typed(rows))
    (tmp_path / "notes.txt").write_text("not a shard")
    indices = np.array([0, 20, 40, 59, 13])
    found = PretrainingDataset(tmp_path, VOCAB_SIZE).stream(indices)
    assert as_lists(found) == stream_written_out(joined(rows, rows, rows), indices)


def test_data_without_sentence_pairs_has_labels_of_minus_one(tmp_path, rows):
    rows["next_sentence_labels"][:] = -1
    write_shard(tmp_path / "s.hdf5", typed(rows, narrow=np.int8), {"next_sentence_prediction": False})
    dataset = PretrainingDataset(tmp_path, VOCAB_SIZE)
    assert not dataset.has_next_sentence
    assert dataset.stream(np.arange(3))["nsp_labels"].tolist() == [-1] * 3


def test_a_single_file_may_stand_for_its_folder(tmp_path, rows):
    assert len(PretrainingDataset(write_shard(tmp_path / "s.hdf5", typed(rows)), VOCAB_SIZE)) == 20


@pytest.mark.parametrize("write", [write_shard, write_nvidia_shard])
def test_an_empty_shard_is_passed_over(tmp_path, rows, write):
    empty = {key: values[:0] for key, values in rows.items()}
    write(tmp_path / "0.hdf5", typed(empty))
    write_shard(tmp_path / "1.hdf5", typed(rows))
    dataset = PretrainingDataset(tmp_path, VOCAB_SIZE)
    assert len(dataset) == 20
    assert as_lists(dataset.stream(np.array([0, 19]))) == stream_written_out(rows, [0, 19])


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_a_mapped_shard_is_not_read_whole(tmp_path):
    """A shard of 400 MB, most of which is a hole in the file."""
    n, path = 2_000_000, tmp_path / "large.hdf5"
    shapes = {"next_sentence_labels": (n,), "masked_lm_positions": (n, 2), "masked_lm_ids": (n, 2)}
    with h5py.File(path, "w") as file:
        for key in KEYS:
            file.create_dataset(key, shapes.get(key, (n, 64)), np.uint8)[n - 3 :] = 1
    before = resident_bytes()
    dataset = PretrainingDataset(tmp_path, VOCAB_SIZE)
    assert dataset.shards[0].is_mapped
    stream = dataset.stream(np.array([n - 1, n - 3]))
    assert stream["input_ids"].tolist() == [1] * 128
    assert resident_bytes() - before < 50e6 < path.stat().st_size / 4


# --- what is refused --------------------------------------------------------------------------------------------------


def assert_refused_when_opened(folder, *words):
    with pytest.raises(UserError) as caught:
        PretrainingDataset(folder, VOCAB_SIZE)
    for word in words:
        assert str(word) in str(caught.value)


def test_a_missing_folder_is_refused_by_name(tmp_path):
    assert_refused_when_opened(tmp_path / "nowhere", tmp_path / "nowhere", "does not exist")


def test_a_folder_without_shards_is_refused_by_name(tmp_path):
    (tmp_path / "text.txt").write_text("no shard")
    assert_refused_when_opened(tmp_path, tmp_path, "holds no *.hdf5 or *.h5")


def test_a_folder_of_empty_shards_is_refused(tmp_path, rows):
    write_shard(tmp_path / "0.hdf5", typed({key: values[:0] for key, values in rows.items()}))
    assert_refused_when_opened(tmp_path, tmp_path, "hold no sample")


@pytest.mark.parametrize("content", [b"", b"not HDF5 at all", b"\x89HDF\r\n\x1a\n" + bytes(600)])
def test_a_file_that_is_no_hdf5_is_refused_by_name(tmp_path, content):
    (tmp_path / "bad.hdf5").write_bytes(content)
    assert_refused_when_opened(tmp_path, "bad.hdf5", "cannot be read as HDF5")


@pytest.mark.parametrize("write", [write_shard, write_nvidia_shard])
def test_a_shard_cut_off_anywhere_is_refused_by_name(tmp_path, rows, write):
    path = write(tmp_path / "cut.hdf5", typed(rows))
    whole = path.read_bytes()
    for size in range(0, len(whole), max(1, len(whole) // 60)):
        path.write_bytes(whole[:size])
        assert_refused_when_opened(tmp_path, "cut.hdf5", "make or fetch it again")


@pytest.mark.parametrize("write", [write_shard, write_nvidia_shard])
def test_flipped_bytes_give_data_or_one_clear_error_but_nothing_else(tmp_path, rows, write):
    path = write(tmp_path / "flipped.hdf5", typed(rows))
    whole, random = path.read_bytes(), np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(whole)
        for place in random.integers(0, min(len(whole), 4000), 4):
            damaged[place] = random.integers(256)
        path.write_bytes(damaged)
        try:
            dataset = PretrainingDataset(tmp_path, VOCAB_SIZE)
            dataset.stream(np.arange(len(dataset)))
        except UserError as error:
            refused += 1
            assert "flipped.hdf5" in str(error) or str(tmp_path) in str(error)
    assert refused > 20


@pytest.mark.parametrize("key", KEYS)
def test_a_shard_without_one_of_the_keys_is_refused_by_both_names(tmp_path, rows, key):
    path = write_shard(tmp_path / "s.hdf5", typed({name: values for name, values in rows.items() if name != key}))
    assert_refused_when_opened(tmp_path, "s.hdf5", f"lacks the key {key}:")
    with h5py.File(path, "a") as file:
        file.create_group(key)
    assert_refused_when_opened(tmp_path, "s.hdf5", f"lacks the key {key}:")


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("input_mask", (20, 31)),
        ("segment_ids", (19, 32)),
        ("masked_lm_ids", (20, 4)),
        ("next_sentence_labels", (20, 1)),
        ("input_ids", (20,)),
        ("masked_lm_positions", ()),
    ],
)
def test_a_key_of_another_shape_is_refused_by_name(tmp_path, rows, key, shape):
    write_shard(tmp_path / "s.hdf5", {**typed(rows), key: np.zeros(shape, np.uint8)})
    assert_refused_when_opened(tmp_path, "s.hdf5", key)


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_fractions_is_refused_by_name(tmp_path, rows, key):
    write_shard(tmp_path / "s.hdf5", {**typed(rows), key: rows[key].astype(np.float32)})
    assert_refused_when_opened(tmp_path, "s.hdf5", key, "float32")


@pytest.mark.parametrize(
    ("attributes", "shape", "words"),
    [
        ({}, (20, 64, 5), "sequence length is 32"),
        ({}, (20, 32, 6), "predictions per sequence is 5"),
        ({"vocab_sha256": "b" * 64}, (20, 32, 5), "vocab_sha256"),
        ({"vocab_sha256": "a" * 64, "do_lower_case": False}, (20, 32, 5), "do_lower_case"),
    ],
)
def test_shards_that_disagree_are_refused_and_two_of_them_named(tmp_path, rows, attributes, shape, words):
    common = {"vocab_sha256": "a" * 64, "do_lower_case": True}
    write_shard(tmp_path / "0.hdf5", typed(rows), common)
    write_shard(tmp_path / "1.hdf5", typed(rows), common)
    write_shard(tmp_path / "2.hdf5", typed(sample_rows(*shape, seed=0)), attributes or common)
    assert_refused_when_opened(tmp_path, "shards disagree", words, "0.hdf5", "2.hdf5")


@pytest.mark.parametrize(
    ("key", "place", "value", "words"),
    [
        ("input_ids", (3,), VOCAB_SIZE, f"input_ids holds {VOCAB_SIZE}"),
        ("input_ids", (0,), -7, "input_ids holds -7"),
        ("input_ids", (0,), 2**32 + 5, f"input_ids holds {2**32 + 5}"),
        ("masked_lm_ids", (0,), 40_000, "masked_lm_ids holds 40000"),
        ("masked_lm_ids", (0,), -1, "masked_lm_ids holds -1"),
        ("segment_ids", (2,), 2, "segment_ids holds 2"),
        ("masked_lm_positions", (0,), 32, "masked_lm_positions holds 32"),
        ("masked_lm_positions", (0,), -2, "masked_lm_positions holds -2"),
        ("next_sentence_labels", (), 2, "next_sentence_labels holds 2"),
        ("next_sentence_labels", (), -100, "next_sentence_labels holds -100"),
        ("input_mask", (1,), 0, "input_mask is not ones and then zeros"),
        ("input_mask", (slice(None),), 0, "input_mask is not ones and then zeros"),
    ],
)
@pytest.mark.parametrize("together", [True, False])
def test_a_value_out_of_range_is_refused_with_its_shard_and_row(tmp_path, rows, key, place, value, words, together):
    good = typed(rows)
    write_shard(tmp_path / "0.hdf5", good)
    rows[key][13, *place] = value
    write_shard(tmp_path / "1.hdf5", {name: v.astype(np.int64) for name, v in rows.items()})
    dataset = PretrainingDataset(tmp_path, VOCAB_SIZE)
    dataset.stream(np.arange(33))  # all that is before the damage
    with pytest.raises(UserError) as caught:
        dataset.stream(np.array([4, 33, 8] if together else [33]))
    assert "1.hdf5, row 13:" in str(caught.value) and words in str(caught.value)


def test_opening_a_shard_reads_none_of_its_data(tmp_path, rows, monkeypatch):
    write_nvidia_shard(tmp_path / "s.hdf5", rows)
    monkeypatch.setattr(h5py.Dataset, "__getitem__", lambda *_: pytest.fail("data was read"))
    assert len(Shard(tmp_path / "s.hdf5")) == 20
    assert len(PretrainingDataset(tmp_path, VOCAB_SIZE)) == 20


def test_the_shards_that_other_tests_use_are_read_in_the_order_of_their_names(tmp_path):
    write_shards(tmp_path, sizes=(3, 2))
    dataset = PretrainingDataset(tmp_path, VOCAB_SIZE)
    rows = joined(sample_rows(3, 32, 5, 0), sample_rows(2, 32, 5, 1))
    assert as_lists(dataset.stream(np.arange(5))) == stream_written_out(rows, range(5))
