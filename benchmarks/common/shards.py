"""Shards of the sample corpus and of random ids, for benchmarks without --input-dir."""

import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np

from benchmarks.common.results import ROOT

PREDICTIONS_OF = {128: 20, 512: 80}  # masked tokens per sequence of each length
PARAGRAPHS_PER_DOCUMENT = 40


def sentence_lines(book: str) -> str:
    """One sentence per line and an empty line between documents. Sentences end at full stops, which is good enough here
    and needs no nltk."""
    paragraphs = [" ".join(lines.split()) for lines in book.split("\n\n")]
    lines = [re.sub(r"(?<=[.!?]) ", "\n", paragraph) for paragraph in paragraphs if paragraph]
    starts = range(0, len(lines), PARAGRAPHS_PER_DOCUMENT)
    documents = ["\n".join(lines[start : start + PARAGRAPHS_PER_DOCUMENT]) for start in starts]
    return "\n\n".join(documents) + "\n"


def make_shards(folder: Path, seq_length: int) -> Path:
    """Shards of the sample books."""
    text, shards = folder / "text", folder / "hdf5"
    text.mkdir()
    for book in sorted((ROOT / "data" / "sample" / "books").glob("*.txt")):
        (text / book.name).write_text(sentence_lines(book.read_text(encoding="utf-8")), encoding="utf-8")
    vocab = ROOT / "vocab" / "bert-base-uncased-vocab.txt"
    command = [
        *(sys.executable, ROOT / "create_pretraining_data.py", "--input-dir", text, "--output-dir", shards),
        *("--vocab-file", vocab, "--max-seq-length", seq_length),
        *("--max-predictions-per-seq", PREDICTIONS_OF[seq_length]),
    ]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    return shards


def write_random_shards(
    folder: Path, samples: int, length: int, predictions: int, shards: int = 1, full_share: float = 1.0
) -> Path:
    """Shards of random ids in the format of create_pretraining_data.py: a share of the samples has full length and as
    many masked tokens as a sample may have, the others any length and masked tokens in proportion; 0: no masks."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(shards):
        random, n = np.random.default_rng(number), samples // shards
        lengths = np.where(random.random(n) < full_share, length, random.integers(16, length + 1, n))
        real = np.arange(length) < lengths[:, None]
        masked = np.arange(predictions) < np.maximum(lengths * predictions // length, 1)[:, None]
        rows = {
            "input_ids": np.where(real, random.integers(1000, 30000, (n, length)), 0).astype(np.uint16),
            "input_mask": real.astype(np.int8),
            "segment_ids": (np.cumsum(real, axis=1) * 2 > lengths[:, None]).astype(np.int8) * real,
            "masked_lm_positions": np.where(masked, 1 + np.arange(predictions), 0).astype(np.uint16),
            "masked_lm_ids": np.where(masked, random.integers(1000, 30000, masked.shape), 0).astype(np.uint16),
            "next_sentence_labels": random.integers(0, 2, n).astype(np.int8),
        }
        with h5py.File(folder / f"shard_{number:03}.hdf5", "w") as file:
            for key, values in rows.items():
                file[key] = values
    return folder
