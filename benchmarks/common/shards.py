"""Shards of the sample corpus, for benchmarks without --input-dir."""

import re
import subprocess
import sys
from pathlib import Path

from benchmarks.common.results import ROOT

PREDICTIONS = {128: 20, 512: 80}  # per sequence of each length
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
        *("--max-predictions-per-seq", PREDICTIONS[seq_length]),
    ]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    return shards
