"""Shards of the sample corpus and of random ids, and the flags of run_pretraining.py on them."""

import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np

from benchmarks.common.results import ROOT, config_file

VOCAB_FILE = ROOT / "vocab" / "bert-base-uncased-vocab.txt"
MAX_MASKED_OF = {128: 20, 512: 80}  # BERT's masked tokens per sequence of each length
LONG_RATE = 0.3  # share of the tokens that are masked in longer ones, as for ModernBERT
PARAGRAPHS_PER_DOCUMENT = 40


def sentence_lines(book: str) -> str:
    """One sentence per line and an empty line between documents. Sentences end at full stops, which
    is good enough here and needs no nltk.
    """
    paragraphs = [" ".join(lines.split()) for lines in book.split("\n\n")]
    lines = [re.sub(r"(?<=[.!?]) ", "\n", paragraph) for paragraph in paragraphs if paragraph]
    starts = range(0, len(lines), PARAGRAPHS_PER_DOCUMENT)
    documents = ["\n".join(lines[start : start + PARAGRAPHS_PER_DOCUMENT]) for start in starts]
    return "\n\n".join(documents) + "\n"


def max_masked(length: int) -> int:
    """Most masked tokens of a sequence."""
    return MAX_MASKED_OF.get(length, int(length * LONG_RATE))


def make_shards(folder: Path, seq_length: int) -> Path:
    """Shards of the sample books: pairs of segments for BERT, or for longer sequences documents
    that attention keeps apart, for ModernBERT.
    """
    text, shards = folder / "text", folder / "hdf5"
    text.mkdir()
    for book in sorted((ROOT / "data" / "sample" / "books").glob("*.txt")):
        (text / book.name).write_text(
            sentence_lines(book.read_text(encoding="utf-8")), encoding="utf-8"
        )
    command = [
        *(
            sys.executable,
            ROOT / "create_pretraining_data.py",
            "--input-dir",
            text,
            "--output-dir",
            shards,
        ),
        *("--vocab-file", VOCAB_FILE, "--max-seq-length", seq_length),
        *("--max-predictions-per-seq", max_masked(seq_length)),
    ]
    if seq_length not in MAX_MASKED_OF:
        command += ["--no-nsp", "--pack-documents", "--masked-lm-prob", LONG_RATE]
        command += ["--dupe-factor", 1]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    return shards


def pretraining_flags(
    model: str, shards: Path, output: Path, length: int, batch_size: int, *more: object
) -> list[str]:
    """The flags of run_pretraining.py for a BERT of bert_configs/; a flag in `more` replaces an
    earlier one.
    """
    flags = {
        "input-dir": shards,
        "output-dir": output,
        "config-file": config_file(model),
        "vocab-file": VOCAB_FILE,
        "max-seq-length": length,
        "max-predictions-per-seq": MAX_MASKED_OF[length],
        "batch-size": batch_size,
        "show-config": "false",
    }
    return [*(f"--{name}={value}" for name, value in flags.items()), *map(str, more)]


def write_random_shards(
    folder: Path,
    samples: int,
    length: int,
    num_masked: int,
    vocab_size: int = 30_000,
    lengths: np.ndarray | None = None,
) -> Path:
    """A shard of random ids in the format of create_pretraining_data.py. lengths: of the samples;
    by default the full one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    lengths_n1 = np.reshape([length] * samples if lengths is None else lengths, (-1, 1))
    column_S, masked_P = np.arange(length), np.arange(num_masked)
    is_masked_nP = masked_P < np.maximum(num_masked * lengths_n1 // length, 1)
    rows = {
        "input_ids": random.integers(0, vocab_size, (samples, length)).astype(np.uint16),
        "input_mask": (column_S < lengths_n1).astype(np.int8),
        "segment_ids": (column_S >= lengths_n1 // 2).astype(np.int8),
        "masked_lm_positions": (is_masked_nP * (1 + masked_P)).astype(np.uint16),
        "masked_lm_ids": random.integers(0, vocab_size, (samples, num_masked)).astype(np.uint16),
        "next_sentence_labels": random.integers(0, 2, samples).astype(np.int8),
    }
    with h5py.File(folder / "shard_000.hdf5", "w") as file:
        for key, values in rows.items():
            file[key] = values
    return folder
