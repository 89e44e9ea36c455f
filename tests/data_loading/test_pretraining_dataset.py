"""The pre-training data set: token streams of its samples, damaged values as errors."""

import numpy as np
import pytest
from conftest import pretraining_types, sample_rows, write_nvidia_shard, write_shard, write_shards
from small_runs import assert_opening_fails

from bert_recipe.data_loading.pretraining_dataset import PretrainingDataset
from bert_recipe.utils.errors import UserError

pytestmark = pytest.mark.fast

VOCAB_SIZE = 30522


def stream_in_python(rows, indices) -> dict[str, list]:
    """The stream of the samples `indices`, token by token."""
    names = (
        "input_ids",
        "token_type_ids",
        "position_ids",
        "mlm_positions",
        "mlm_labels",
        "nsp_labels",
    )
    stream = {"cu_seqlens": [0], **{name: [] for name in names}}
    for i in indices:
        start = len(stream["input_ids"])
        length = int(rows["input_mask"][i].sum())
        for place in range(length):
            stream["input_ids"].append(int(rows["input_ids"][i, place]))
            stream["token_type_ids"].append(int(rows["segment_ids"][i, place]))
            stream["position_ids"].append(place)
        for place, word in zip(
            rows["masked_lm_positions"][i], rows["masked_lm_ids"][i], strict=True
        ):
            if place > 0:
                stream["mlm_positions"].append(start + int(place))
                stream["mlm_labels"].append(int(word))
        stream["nsp_labels"].append(int(rows["next_sentence_labels"][i]))
        stream["cu_seqlens"].append(len(stream["input_ids"]))
    return stream


@pytest.fixture
def rows():
    return sample_rows(20, 32, 5, seed=3)


def stream_of(dataset, indices) -> dict[str, np.ndarray]:
    """One stream of the samples `indices`."""
    samples = dataset.read(np.asarray(indices))
    return samples.stream(np.arange(len(indices)))


WRITERS = {
    "ours": lambda path, rows: write_shard(path, pretraining_types(rows)),
    "of wide types": lambda path, rows: write_shard(path, pretraining_types(rows, np.int64)),
    "of another byte order": lambda path, rows: write_shard(
        path, pretraining_types(rows, ">i4", "i1")
    ),
    "NVIDIA's": write_nvidia_shard,
}


@pytest.mark.parametrize(
    "kinds", [["ours"], ["NVIDIA's"], [*WRITERS, "ours, empty", "NVIDIA's, empty", "ours"]]
)
def test_stream_holds_the_samples_of_shards_of_any_storage_in_the_given_order(tmp_path, kinds):
    parts = [
        sample_rows(0 if "empty" in kind else 7 + number, 32, 5, seed=number)
        for number, kind in enumerate(kinds)
    ]
    for number, (kind, part) in enumerate(zip(kinds, parts, strict=True)):
        WRITERS[kind.split(",")[0]](tmp_path / f"{number}.{'h5' if number % 2 else 'hdf5'}", part)
    (tmp_path / "notes.txt").write_text("not a shard")
    dataset = PretrainingDataset(tmp_path, VOCAB_SIZE)
    rows = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    n = sum(len(part["input_ids"]) for part in parts)
    assert (len(dataset), dataset.sequence_length, dataset.max_labelled_per_sample) == (n, 32, 5)
    # Others are read from their files.
    assert (dataset.bytes_in_memory > 0) == ("NVIDIA's" in kinds)
    for indices in ([0], [n - 1], [n - 1, 3, 6, 0], [5, 2, 2], list(range(n))):
        indices = np.array(indices)
        stream = stream_of(dataset, indices)
        assert {name: values.tolist() for name, values in stream.items()} == stream_in_python(
            rows, indices
        )
        assert {name: values.dtype for name, values in stream.items()} == {
            name: np.int32 if name == "cu_seqlens" else np.int64 for name in stream
        }
        sizes = [
            [rows["input_mask"][i].sum(), (rows["masked_lm_positions"][i] > 0).sum()]
            for i in indices
        ]
        samples = dataset.read(indices)
        assert np.column_stack([samples.lengths, samples.num_labelled]).tolist() == sizes


def test_data_without_sentence_pairs_has_labels_of_minus_one(tmp_path, rows):
    rows["next_sentence_labels"][:] = -1
    path = tmp_path / "a.hdf5"  # a single file
    write_shard(path, pretraining_types(rows, narrow=np.int8), {"next_sentence_prediction": False})
    dataset = PretrainingDataset(path, VOCAB_SIZE)
    assert not dataset.has_next_sentence
    assert stream_of(dataset, np.arange(3))["nsp_labels"].tolist() == [-1] * 3


def test_folder_of_empty_shards_is_an_error(tmp_path, rows):
    write_shard(
        tmp_path / "0.hdf5", pretraining_types({key: values[:0] for key, values in rows.items()})
    )
    assert_opening_fails(tmp_path, tmp_path, "hold no sample")


@pytest.mark.parametrize(
    ("attributes", "shape", "words"),
    [
        ({}, (20, 64, 5), "sequence length is 32"),
        ({}, (20, 32, 6), "masked tokens per sequence is 5"),
        ({"vocab_sha256": "b" * 64}, (20, 32, 5), "vocab_sha256"),
        (
            {"vocab_sha256": np.array([1, 2]), "note": np.array([b"\xff", b"x"])},
            (20, 32, 5),
            "vocab_sha256",
        ),
        ({"vocab_sha256": "a" * 64, "do_lower_case": False}, (20, 32, 5), "do_lower_case"),
        (
            {"vocab_sha256": "a" * 64, "do_lower_case": True, "strip_accents": False},
            (20, 32, 5),
            "strip_accents",
        ),
        (
            {"vocab_sha256": "a" * 64, "do_lower_case": True, "random_seed": 1},
            (20, 32, 5),
            "random_seed",
        ),
    ],
)
def test_shards_that_disagree_are_an_error_that_names_two_of_them(
    tmp_path, rows, attributes, shape, words
):
    common = {"vocab_sha256": "a" * 64, "do_lower_case": True}
    write_shard(tmp_path / "0.hdf5", pretraining_types(rows), common)
    write_shard(tmp_path / "1.hdf5", pretraining_types(rows), common)
    write_shard(
        tmp_path / "2.hdf5", pretraining_types(sample_rows(*shape, seed=0)), attributes or common
    )
    assert_opening_fails(tmp_path, "shards disagree", words, "0.hdf5", "2.hdf5")


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
def test_value_out_of_range_is_an_error_with_shard_and_row(
    tmp_path, rows, key, place, value, words, together
):
    good = pretraining_types(rows)
    write_shard(tmp_path / "0.hdf5", good)
    rows[key][13, *place] = value
    write_shard(tmp_path / "1.hdf5", {name: v.astype(np.int64) for name, v in rows.items()})
    dataset = PretrainingDataset(tmp_path, VOCAB_SIZE)
    stream_of(dataset, np.arange(33))  # everything before the damaged row
    with pytest.raises(UserError) as caught:
        stream_of(dataset, np.array([4, 33, 8] if together else [33]))
    assert "1.hdf5, row 13:" in str(caught.value) and words in str(caught.value)


def test_shards_with_the_same_samples_or_without_masks_are_refused(tmp_path):
    rows = sample_rows(20, 32, 5, seed=3)
    for name, storage in (("a", {}), ("b", {"compression": "gzip"})):
        write_shard(tmp_path / "twice" / f"{name}.hdf5", pretraining_types(rows), **storage)
    unmasked = rows | {"masked_lm_positions": np.zeros((20, 5), np.int64)}
    write_shard(tmp_path / "unmasked" / "shard.hdf5", pretraining_types(unmasked))
    training, held_out, copy, twice, unmasked = (
        PretrainingDataset(folder, VOCAB_SIZE)
        for folder in (
            *(write_shards(tmp_path / "training"), write_shards(tmp_path / "held_out", seed=7)),
            *(
                write_shards(tmp_path / "copy", sizes=(40,)),
                tmp_path / "twice",
                tmp_path / "unmasked",
            ),
        )
    )
    training.check_shards(held_out)
    for dataset, other, words in (
        (twice, None, r"shard .*b\.hdf5 holds the same samples as .*a\.hdf5"),
        (training, copy, r"held-out shard .* holds the same samples"),
        (unmasked, None, r"shard\.hdf5 has samples without a masked token"),
    ):
        with pytest.raises(UserError, match=words):
            dataset.check_shards(other)
