"""Ids above 65,535, as mmBERT's and XLM-RoBERTa's, from text to token streams."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

import create_pretraining_data
from bert_recipe.data_loading.masking import Masking
from bert_recipe.data_loading.pretraining_dataset import PretrainingDataset
from bert_recipe.data_preparation.samples.repack import repack_shard
from bert_recipe.tokenization.tokenizer import HuggingFaceTokenizer

VOCAB_SIZE = 70_000
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
MASK = "<mask>"  # the last one, as XLM-RoBERTa's


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> HuggingFaceTokenizer:
    """A word `w<id>` for each id."""
    tokens = [*SPECIAL, *(f"w{number}" for number in range(4, VOCAB_SIZE - 1)), MASK]
    words = {"type": "WordLevel", "vocab": {word: place for place, word in enumerate(tokens)}}
    parts = [{"Sequence": {"id": "A", "type_id": 0}}]
    around = [{"SpecialToken": {"id": token, "type_id": 0}} for token in ("<bos>", "<eos>")]
    post_processor = {
        "type": "TemplateProcessing",
        "single": [around[0], *parts, around[1]],
        "pair": [around[0], *parts, around[1], {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]}
            for token in ("<bos>", "<eos>")
        },
    }
    content = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": post_processor,
        "decoder": None,
        "model": {**words, "unk_token": "<unk>"},
    }
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.json"
    path.write_text(json.dumps(content))
    return HuggingFaceTokenizer(path)


def make_shard(folder: Path, tokenizer: HuggingFaceTokenizer, ids: np.ndarray) -> Path:
    """A shard without masks of one text with the given ids."""
    lines = [" ".join(f"w{number}" for number in row) for row in ids]
    (folder / "text.txt").write_text("\n".join(lines))
    flags = ["--input-file", folder / "text.txt", "--output-dir", folder / "shards"]
    flags += ["--vocab-file", tokenizer.vocab_file, "--num-workers", 1, "--max-seq-length", 64]
    flags += ["--dynamic-masking", "--no-nsp", "--pack-documents"]
    create_pretraining_data.main([*map(str, flags)])
    (shard,) = (folder / "shards").glob("*.hdf5")
    return shard


def test_ids_above_65535_come_back_from_shards_and_the_special_ones_are_of_the_template(
    tokenizer, tmp_path
):
    ids = np.arange(VOCAB_SIZE - 601, VOCAB_SIZE - 1).reshape(20, 30)
    shard = make_shard(tmp_path, tokenizer, ids)
    with h5py.File(shard) as file:
        assert file["input_ids"].dtype == np.uint32
    dataset = PretrainingDataset(shard.parent, VOCAB_SIZE)
    rows = dataset.rows(np.arange(len(dataset)))
    stored = rows["input_ids"][rows["input_mask"] > 0]
    assert set(stored.tolist()) == {*ids.ravel(), 1, 2}
    assert set(stored[:1]) == {2} and (tokenizer.cls_token_id, tokenizer.sep_token_id) == (2, 1)


def test_masks_of_a_shard_whose_ids_fit_16_bits_are_of_the_whole_vocabulary(tokenizer, tmp_path):
    shard = make_shard(tmp_path, tokenizer, np.arange(4, 9004).reshape(300, 30))
    (tmp_path / "small").mkdir()
    repack_shard((shard, tmp_path / "small" / shard.name))
    dataset = PretrainingDataset(tmp_path / "small", VOCAB_SIZE)
    assert dataset.rows(np.arange(1))["input_ids"].dtype == np.uint16
    dataset.draw_masks(Masking(tokenizer, 0.5, 32, whole_word=False))
    order = np.arange(len(dataset))
    stream = dataset.read(order).stream(order)
    now = stream["input_ids"][stream["mlm_positions"]]
    drawn = now[(now != stream["mlm_labels"]) & (now != VOCAB_SIZE - 1)]
    assert (now == VOCAB_SIZE - 1).mean() == pytest.approx(0.8, abs=0.05)
    assert drawn.max() > 65_535 and drawn.mean() == pytest.approx(VOCAB_SIZE / 2, rel=0.1)
