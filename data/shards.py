"""Formatted text into shards of one size, documents whole, each on the training or the test side by its own hash.

Formatted text has a sentence on each line and an empty line between documents. It is read as a stream: memory holds a
block of the input and the shards' write buffers, whatever the corpus and its longest document.
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
HASHED = 1 << 16  # bytes of a document that decide its side: the same few wherever the blocks end
BUFFER = 1 << 18  # bytes a shard gathers before it writes
FILES_IN_RESERVE = 64  # open files that the process needs besides the shards


class Piece(NamedTuple):
    """A document, or a piece of one that is longer than a block."""

    text: bytes
    starts: bool  # the document starts with this piece
    ends: bool


class Split(NamedTuple):
    documents: int
    bytes: int
    files: list[Path]


def read_pieces(paths: Iterable[Path], progress: Callable[[int], Any] | None = None) -> Iterator[Piece]:
    """The documents of formatted files, in order, without the newline at their end."""
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
                    # The last byte waits: with the next block's first it may be the empty line.
                    yield Piece(rest[:-1], starts, ends=False)
                    rest, starts = rest[-1:], False
            if not starts or rest.strip(b"\n"):
                yield Piece(rest.strip(b"\n") if starts else rest.removesuffix(b"\n"), starts, ends=True)


def side_hash(text: bytes, seed: int) -> float:
    """A number in [0, 1) from the document alone: its place, its file and its neighbours do not matter, and copies of
    a document fall on the same side."""
    digest = hashlib.blake2b(text[:HASHED], digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "big") / 2**64


class ShardWriter:
    """Documents to at most `count` files in `folder`, each whole to the file that is the shortest so far.

    A file gets its second document at once, and a last one that stays alone joins another file: next-sentence
    prediction draws its random sentences from the other documents of a shard.
    """

    def __init__(self, folder: Path, count: int, stack: ExitStack):
        self.folder, self.stack = folder, stack
        self.shortest = [(0, index) for index in range(count)]  # a heap of sizes
        self.size, self.index = 0, None  # of the file that is not in the heap: it is written to, or has one document
        self.files: list[Any] = []
        self.documents: list[int] = []  # of each file

    def write(self, piece: Piece) -> None:
        if self.index is None:
            self.size, self.index = heapq.heappop(self.shortest)
        if self.index == len(self.files):  # the heap hands out unused files in order
            path = self.folder / f"shard-{self.index:05d}.txt"
            self.files.append(self.stack.enter_context(path.open("wb", buffering=BUFFER)))
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

    def finish(self) -> Split:
        paths = [Path(file.name) for file in self.files]
        if self.index is not None and len(paths) > 1:
            lone = paths.pop()
            _, index = min(entry for entry in self.shortest if entry[1] < len(paths))
            self.files[-1].close()
            self.files[index].write(b"\n")
            with lone.open("rb") as file:
                shutil.copyfileobj(file, self.files[index], BLOCK)
            lone.unlink()
        for file in self.files:
            file.close()
        return Split(sum(self.documents), sum(path.stat().st_size for path in paths), paths)


def write_shards(
    paths: Sequence[Path],
    folder: Path,
    shard_bytes: int,
    test_fraction: float,
    seed: int,
    progress: Callable[[int], Any] | None = None,
) -> dict[str, Split]:
    """The documents of `paths` as shards of about `shard_bytes` in the new folders `training` and `test` of `folder`.

    A document is on the test side where its hash is below `test_fraction`. Where that leaves a side without two
    documents, the test side has the two with the lowest hashes; fewer than four are all for training.
    """
    total = sum(path.stat().st_size for path in paths)
    counts = {
        "training": max(1, round(total * (1 - test_fraction) / shard_bytes)),
        "test": max(1, round(total * test_fraction / shard_bytes)),
    }
    allow_open_files(sum(counts.values()) + FILES_IN_RESERVE)
    splits, lowest = distribute(paths, folder, counts, test_fraction, seed, progress)
    documents = sum(split.documents for split in splits.values())
    if documents == 0:
        raise UserError(f"{', '.join(map(str, paths[:3]))}: no document in them: check the formatted text")
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
) -> tuple[dict[str, Split], list[float]]:
    """One pass: documents whose hash is below `threshold` to the test side. Returns the two lowest hashes besides."""
    lowest: list[float] = []
    with ExitStack() as stack:
        writers = {}
        for side, count in counts.items():
            (folder / side).mkdir(parents=True, exist_ok=True)
            writers[side] = ShardWriter(folder / side, count, stack)
        for piece in read_pieces(paths, progress):
            if piece.starts:
                fraction = side_hash(piece.text, seed)
                lowest = sorted([*lowest, fraction])[:2]
                writer = writers["test" if fraction < threshold else "training"]
            writer.write(piece)
        return {side: writer.finish() for side, writer in writers.items()}, lowest


def allow_open_files(count: int) -> None:
    """Raises this process's limit of open files to `count` where it is lower and the system allows that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and count > hard:
        raise UserError(
            f"{count} open files are needed for that many shards, but this system allows {hard}: "
            "choose larger shards (--shard-mb)"
        )
    if soft != resource.RLIM_INFINITY and count > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
