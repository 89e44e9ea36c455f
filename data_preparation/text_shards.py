"""Divides formatted text into text shards of equal size and splits its documents into training and test by a hash.

Formatted text has one sentence per line and an empty line between documents. It is read as a stream: memory holds a
block of the input and the write buffers of the shards, however long the corpus and its documents are.
"""

import hashlib
import heapq
import math
import resource
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from utils.errors import UserError

BLOCK = 4 << 20  # bytes read at a time
HASHED_BYTES = 1 << 16  # of a document, to decide its split; less than a block, so that block boundaries do not matter
WRITE_BUFFER = 1 << 18  # bytes, per shard
OTHER_OPEN_FILES = 64  # that the process needs besides the shards


class Piece(NamedTuple):
    """A document, or a piece of one that is longer than a block."""

    text: bytes
    starts: bool  # the document starts with this piece
    ends: bool


class SplitShards(NamedTuple):
    """The shards of one split."""

    documents: int
    bytes: int
    files: list[Path]


def read_pieces(paths: Iterable[Path], progress: Callable[[int], Any] | None = None) -> Iterator[Piece]:
    """The documents of formatted files in order, without the final newline."""
    for path in paths:
        with path.open("rb") as file:
            rest, starts = b"", True
            while block := file.read(BLOCK):
                if progress:
                    progress(len(block))
                *ended, rest = (rest + block).split(b"\n\n")
                for text in ended:
                    if not starts:
                        yield Piece(text, False, ends=True)
                    elif text := text.strip(b"\n"):
                        yield Piece(text, True, ends=True)
                    starts = True
                if len(rest) > BLOCK:
                    # Keep the last byte: together with the next block's first byte it may be an empty line.
                    yield Piece(rest[:-1], starts, ends=False)
                    rest, starts = rest[-1:], False
            if not starts or rest.strip(b"\n"):
                yield Piece(rest.strip(b"\n") if starts else rest.removesuffix(b"\n"), starts, ends=True)


def split_hash(text: bytes, seed: int) -> float:
    """A number in [0, 1) that depends only on the document and the seed, so that copies of a document get the same
    split."""
    digest = hashlib.blake2b(text[:HASHED_BYTES], digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "big") / 2**64


class ShardWriter:
    """Writes documents to at most `count` files in `folder`, each to the file that is the shortest so far.

    Every file gets at least two documents if there are two, because next-sentence prediction draws random sentences
    from the other documents of a shard: a new file gets two in a row, and a last single one is moved to another file.
    """

    def __init__(self, folder: Path, count: int, stack: ExitStack):
        self.folder, self.stack = folder, stack
        self.shortest = [(0, index) for index in range(count)]  # a heap of (size, index)
        self.size, self.index = 0, None  # the file that is not in the heap: it is being written, or has one document
        self.files: list[Any] = []
        self.documents: list[int] = []  # of each file

    def write(self, piece: Piece) -> None:
        if self.index is None:
            self.size, self.index = heapq.heappop(self.shortest)
        if self.index == len(self.files):  # the heap returns unused files in order
            path = self.folder / f"shard-{self.index:05d}.txt"
            self.files.append(self.stack.enter_context(path.open("wb", buffering=WRITE_BUFFER)))
            self.documents.append(0)
        text = b"\n" + piece.text if piece.starts and self.size else piece.text
        if piece.ends:
            text += b"\n"
        self.files[self.index].write(text)
        self.size += len(text)
        if piece.ends:
            self.documents[self.index] += 1
            if self.documents[self.index] > 1:
                heapq.heappush(self.shortest, (self.size, self.index))
                self.index = None

    def finish(self) -> SplitShards:
        paths = [Path(file.name) for file in self.files]
        if self.index is not None and len(paths) > 1:
            single = paths.pop()
            _, index = min(entry for entry in self.shortest if entry[1] < len(paths))
            self.files[-1].close()
            self.files[index].write(b"\n")
            with single.open("rb") as file:
                shutil.copyfileobj(file, self.files[index], BLOCK)
            single.unlink()
        for file in self.files:
            file.close()
        return SplitShards(sum(self.documents), sum(path.stat().st_size for path in paths), paths)


def write_shards(
    paths: Sequence[Path],
    folder: Path,
    shard_bytes: int,
    test_fraction: float,
    seed: int,
    progress: Callable[[int], Any] | None = None,
) -> dict[str, SplitShards]:
    """Writes the documents of `paths` to shards of about `shard_bytes` in the new folders `training` and `test`.

    A document is in the test split if its hash is below `test_fraction`. If that leaves a split with fewer than two
    documents, the two with the lowest hashes are the test split; fewer than four documents are all for training.
    """
    total = sum(path.stat().st_size for path in paths)
    counts = {
        "training": max(1, round(total * (1 - test_fraction) / shard_bytes)),
        "test": max(1, round(total * test_fraction / shard_bytes)),
    }
    allow_open_files(sum(counts.values()) + OTHER_OPEN_FILES)
    splits, lowest = distribute(paths, folder, counts, test_fraction, seed, progress)
    documents = sum(split.documents for split in splits.values())
    if documents == 0:
        raise UserError(f"{', '.join(map(str, paths[:3]))}: no document in these files: check the formatted text")
    thresholds = [math.nextafter(lowest[-1], 1.0), 0.0] if documents >= 4 else [0.0]
    while test_fraction > 0 and thresholds and min(split.documents for split in splits.values()) < 2:
        for split in splits.values():
            for path in split.files:
                path.unlink()
        splits, _ = distribute(paths, folder, counts, thresholds.pop(0), seed, progress)
    return splits


def distribute(
    paths: Sequence[Path],
    folder: Path,
    counts: dict[str, int],
    threshold: float,
    seed: int,
    progress: Callable[[int], Any] | None,
) -> tuple[dict[str, SplitShards], list[float]]:
    """One pass over the text. Returns the shards of each split and the two lowest hashes."""
    lowest: list[float] = []
    with ExitStack() as stack:
        writers = {}
        for split, count in counts.items():
            (folder / split).mkdir(parents=True, exist_ok=True)
            writers[split] = ShardWriter(folder / split, count, stack)
        for piece in read_pieces(paths, progress):
            if piece.starts:
                fraction = split_hash(piece.text, seed)
                lowest = sorted([*lowest, fraction])[:2]
                writer = writers["test" if fraction < threshold else "training"]
            writer.write(piece)
        return {split: writer.finish() for split, writer in writers.items()}, lowest


def allow_open_files(count: int) -> None:
    """Raises the limit of open files of this process to `count` if necessary."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and count > hard:
        raise UserError(
            f"so many shards need {count} open files, but this system allows {hard}: use larger shards (--shard-mb)"
        )
    if soft != resource.RLIM_INFINITY and count > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
