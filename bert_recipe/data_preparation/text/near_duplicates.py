"""Finds near duplicates among documents: MinHash signatures (datasketch) and locality-sensitive
hashing.

A document is dropped if it has a band of its signature in common with an earlier document. With 16
bands of 8 values, documents that share 70% of their runs of five words are found half of the time,
85% nearly always. Words stand between spaces, but in scripts without spaces (utils/words.py).
Broder, "On the resemblance and containment of documents", 1997; Leskovec et al., "Mining of Massive
Datasets", chapter 3.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_recipe.utils.words import is_unspaced, spaced_spans

BANDS, ROWS = 16, 8
WORDS = 5  # of a run
SEED = 1
SIGNATURE = np.dtype((np.uint64, BANDS))


def sign_documents(output: Path, bucket: Path) -> dict[str, Any]:
    """Writes the hashes of the bands of each document in `bucket` [documents, BANDS] uint64."""
    from datasketch import MinHash

    empty = MinHash(BANDS * ROWS, SEED)
    with output.open("wb") as file:
        for document in bucket.read_bytes().split(b"\n\n")[:-1]:
            words = document.lower().split()
            if is_unspaced(text := document.decode()):
                words = [text[start:stop].lower().encode() for start, stop in spaced_spans(text)]
            runs = {
                b" ".join(words[at : at + WORDS]) for at in range(max(1, len(words) - WORDS + 1))
            }
            signature = empty.copy()
            signature.update_batch(sorted(runs))
            for band in signature.hashvalues.astype("<u8").reshape(BANDS, ROWS):
                file.write(hashlib.blake2b(band.tobytes(), digest_size=8).digest())
    return {}


def find_repeated(output: Path, signatures: Sequence[Path]) -> None:
    """Writes for each document of all `signatures` one byte: 1 if an earlier document has a band in
    common with it. Memory: some 20 bytes per document.
    """
    total = sum(path.stat().st_size for path in signatures) // SIGNATURE.itemsize
    repeated = np.zeros(total, np.uint8)
    for band in range(BANDS):
        hashes = np.concatenate([np.fromfile(path, SIGNATURE)[:, band] for path in signatures])
        is_first = np.zeros(total, bool)
        is_first[np.unique(hashes, return_index=True)[1]] = True
        repeated |= ~is_first
    repeated.tofile(output)
