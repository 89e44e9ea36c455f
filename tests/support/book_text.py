"""Text files of the words of a real book."""

import random
from pathlib import Path

from conftest import ROOT

WORDS = (
    (ROOT / "data/sample/books/frankenstein.txt").read_text(encoding="utf-8").split()[2000:40_000]
)


def write_text(path: Path, documents: int = 60, seed: int = 0, longest_sentence: int = 40) -> Path:
    """Documents of 1 to 30 sentences of 1 to 40 words of a real book."""
    rng = random.Random(seed)
    position, parts = 0, []
    for _ in range(documents):
        lines = []
        for _ in range(rng.choice([1, 2, 3, 8, 15, 30])):
            length = rng.randint(1, longest_sentence)
            lines.append(
                " ".join(WORDS[(position + offset) % len(WORDS)] for offset in range(length))
            )
            position += length
        parts.append("\n".join(lines))
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path
