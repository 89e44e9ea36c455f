"""Samples of several documents: filled rows, streams that keep them apart, and runs."""

import itertools
import json
from collections import Counter
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from conftest import CLS, SEP, TINY, VOCAB_FILE, assert_refused, read_json
from small_runs import losses, resuming, run_here, train, weights

import create_pretraining_data
from bert_recipe.config import LoaderConfig
from bert_recipe.data_loading.hdf5_shards import max_documents
from bert_recipe.data_loading.loader import StepLoader
from bert_recipe.data_loading.masking import Masking
from bert_recipe.data_loading.packing import MicroBatchLimits
from bert_recipe.data_loading.pretraining_dataset import PretrainingDataset
from bert_recipe.model.encoders.bert import BertConfig, BertForPreTraining
from bert_recipe.model.token_stream import TokenStream
from bert_recipe.tokenization.tokenizer import BertTokenizer
from bert_recipe.utils.errors import UserError
from data import prepare

VOCAB_SIZE = TINY["vocab_size"]
LENGTH = 64
LENGTHS_OF_DOCUMENTS = [1, 3, 20, 61, 62, 63, 64, 7, 150, 5, 5, 5, 5, 5, 40, 31, 12, 200, 2, 90] * 3


def document(number: int) -> list[str]:
    """Words that are single tokens; the first one tells which document it is."""
    words = [
        chr(ord("a") + (number * 7 + place) % 26) for place in range(LENGTHS_OF_DOCUMENTS[number])
    ]
    return [str(number), *words[1:]]


def make(folder: Path, *flags) -> Path:
    folder.mkdir(parents=True)
    documents = [document(number) for number in range(len(LENGTHS_OF_DOCUMENTS))]
    lines = [
        [" ".join(words[start : start + 9]) for start in range(0, len(words), 9)]
        for words in documents
    ]
    (folder / "text.txt").write_text("\n\n".join("\n".join(sentences) for sentences in lines))
    command = (
        "--input-file",
        folder / "text.txt",
        "--output-dir",
        folder / "shards",
        "--vocab-file",
        VOCAB_FILE,
    )
    command = (
        *command,
        "--max-seq-length",
        LENGTH,
        "--num-workers",
        1,
        "--no-nsp",
        "--pack-documents",
        *flags,
    )
    create_pretraining_data.main([str(word) for word in command])
    return folder / "shards"


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("packed") / "dynamic", "--dynamic-masking")


def open_shards(folder: Path) -> PretrainingDataset:
    dataset = PretrainingDataset(folder, VOCAB_SIZE)
    if not dataset.max_labelled_per_sample:
        dataset.draw_masks(Masking(BertTokenizer(VOCAB_FILE), 0.15, 10, whole_word=False))
    return dataset


def stored(dataset: PretrainingDataset) -> dict[str, np.ndarray]:
    return {
        key: values.astype(int) for key, values in dataset.rows(np.arange(len(dataset))).items()
    }


def documents_of(ids: np.ndarray, mask: np.ndarray) -> list[list[int]]:
    return [ids[mask == number].tolist() for number in range(1, mask.max() + 1)]


def test_every_token_of_every_document_is_there_once_and_the_rows_are_full(shards):
    rows = stored(open_shards(shards))
    tokenizer = BertTokenizer(VOCAB_FILE)
    pieces = []
    for ids, mask in zip(rows["input_ids"], rows["input_mask"], strict=True):
        assert not ids[mask == 0].any() and (np.diff(mask[mask > 0]) >= 0).all()
        packed = documents_of(ids, mask)
        assert len(packed) <= max_documents(LENGTH)
        for piece in packed:
            assert piece[0] == CLS and piece[-1] == SEP and len(piece) >= 3
            assert not np.isin(piece[1:-1], [CLS, SEP]).any()
            pieces.append(piece[1:-1])
    texts = [
        [tokenizer.vocab[token] for token in document(number)]
        for number in range(len(LENGTHS_OF_DOCUMENTS))
    ]
    assert Counter(itertools.chain(*pieces)) == Counter(itertools.chain(*texts))
    # Each document is one piece, or a beginning, whole rows, and an end.
    starts = {text[0]: text for text in texts}
    assert sum(
        piece[0] in starts and piece == starts[piece[0]][: len(piece)] for piece in pieces
    ) == len(texts)
    is_closed = (rows["input_mask"] > 0).sum(axis=1) > LENGTH - 18
    has_all = rows["input_mask"].max(axis=1) == max_documents(LENGTH)
    assert (~(is_closed | has_all)).sum() <= 1  # the last row of the pass
    assert (rows["next_sentence_labels"] == -1).all() and not rows["segment_ids"].any()


@pytest.mark.parametrize("flags", [("--dynamic-masking",), ("--max-predictions-per-seq", 10)])
def test_a_stream_has_a_sequence_per_document(tmp_path, flags):
    dataset = open_shards(make(tmp_path / "made", *flags))
    rows = stored(dataset)
    order = np.arange(len(dataset))[::-1]
    samples = dataset.read(order)
    stream = samples.stream(np.arange(len(order)))
    lengths = [
        len(piece)
        for row in order
        for piece in documents_of(rows["input_ids"][row], rows["input_mask"][row])
    ]
    assert np.diff(stream["cu_seqlens"]).tolist() == lengths
    assert stream["position_ids"].tolist() == [
        place for length in lengths for place in range(length)
    ]
    assert (stream["input_ids"][stream["cu_seqlens"][:-1]] == CLS).all()
    assert samples.num_sequences.tolist() == rows["input_mask"][order].max(axis=1).tolist()
    assert stream["nsp_labels"].tolist() == [-1] * len(lengths)
    assert not np.isin(stream["mlm_labels"], [CLS, SEP]).any()
    assert len(stream["mlm_labels"]) == samples.num_labelled.sum() > 0.1 * len(stream["input_ids"])


def test_a_document_does_not_see_the_others_of_its_row(shards):
    """The model's output for a document is that for the document alone."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
    )
    model = BertForPreTraining(config).eval()
    dataset = open_shards(shards)
    rows = stored(dataset)
    row = int((rows["input_mask"].max(axis=1) >= 3).argmax())
    stream = {
        name: torch.from_numpy(v)
        for name, v in dataset.read(np.array([row])).stream(np.arange(1)).items()
    }
    positions = torch.arange(len(stream["input_ids"]))
    with torch.no_grad():
        together = model(TokenStream.from_batch(stream, LENGTH), mlm_positions=positions)[0]
        for start, stop in itertools.pairwise(stream["cu_seqlens"].tolist()):
            ids = stream["input_ids"][None, start:stop]
            alone, _ = TokenStream.from_padded(ids)
            expected = model(alone, mlm_positions=torch.arange(stop - start))[0]
            torch.testing.assert_close(together[start:stop], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("num_sizes", [None, 1])
def test_global_batches_count_rows_and_are_the_same_at_any_number_of_ranks(shards, num_sizes):
    def batches(world_size: int) -> list[Counter]:
        dataset = open_shards(shards)
        config = LoaderConfig(1, 6, LENGTH, 10, num_workers=0)
        limits = MicroBatchLimits.of(
            config, num_sizes, sequences_per_sample=dataset.max_sequences_per_sample
        )
        loaders = [
            StepLoader(dataset, config, 3, 0, rank, world_size, limits=limits)
            for rank in range(world_size)
        ]
        read = []
        for step in range(2 * len(dataset) // 6):
            parts = [loader.load(step) for loader in loaders]
            assert sum(len(part.lengths) for part in parts) == 6
            assert sum(part.sequence_lengths.sum() for part in parts) == sum(
                part.lengths.sum() for part in parts
            )
            micro_batches = [micro_batch for part in parts for micro_batch in part.micro_batches]
            ids = [
                micro["input_ids"][: micro["cu_seqlens"][-1]].tolist() for micro in micro_batches
            ]
            read.append(Counter(itertools.chain(*ids)))
        return read

    assert batches(1) == batches(2) == batches(4)


def test_a_run_on_packed_shards_resumes_exactly(inputs, shards, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(read_json(inputs.config) | {"vocab_size": VOCAB_SIZE}))
    flags = (
        "--input-dir",
        shards,
        "--config-file",
        config,
        "--vocab-file",
        VOCAB_FILE,
        "--max-steps",
        4,
    )
    flags += ("--max-seq-length", LENGTH, "--max-predictions-per-seq", 10, "--log-freq", 1)
    for output, parts in (
        ("whole", [()]),
        ("parts", [("--steps-this-run", 2), resuming(tmp_path / "parts")]),
    ):
        for extra in parts:
            train(inputs.command(tmp_path / output, *flags, *extra))
    assert losses(tmp_path / "parts")[4] == losses(tmp_path / "whole")[4]
    whole, parts = (weights(tmp_path / name, 4) for name in ("whole", "parts"))
    assert all((whole[name] == parts[name]).all() for name in whole)


@pytest.mark.parametrize("numbers", [[1, 1, 3], [1, 2, 1], [2, 2, 2], [1, 0, 1], [1, 2, 9]])
def test_wrong_numbers_of_documents_name_the_shard_and_the_row(tmp_path, numbers):
    shards = make(tmp_path / "made", "--dynamic-masking")
    with h5py.File(shards / "text.hdf5", "r+") as file:
        file["input_mask"][5, :3] = numbers
    dataset = open_shards(shards)
    with pytest.raises(UserError, match=r"text\.hdf5, row 5: input_mask"):
        dataset.read(np.arange(10)).stream(np.arange(10))
    verified = run_here(["verify", shards, "--vocab-file", VOCAB_FILE], prepare.main)
    assert_refused(verified, "text.hdf5")
