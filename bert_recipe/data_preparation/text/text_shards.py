"""Divides formatted text into text shards and into training and test documents, by a hash of each
document.

The hash and the seed put a document into a cell. `bucket_spans` writes the documents of some input
by cell; `plan_shards` makes shards of neighbouring cells; `join_shard` collects the documents of
one shard from all buckets. So every shard is a sample of the whole text, and copies of a document
are in the same shard.
"""

import hashlib
import math
import shutil
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert_recipe.data_preparation.engine.versions import run_units
from bert_recipe.data_preparation.options import TextShardOptions
from bert_recipe.data_preparation.sources.spans import (
    Span,
    read_text_span,
    split_documents,
    total_size,
)
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import JsonObject
from bert_recipe.utils.progress import progress_bar
from bert_recipe.utils.work_units.units import Record, WorkUnit

BUCKETS = ".buckets"  # folder of the documents of each unit, in the order of their shards
MIN_CELLS = 4096  # of a split: so few documents in each that shards have about one size
# In a shard: next-sentence prediction draws random sentences from its other documents
MIN_DOCUMENTS = 2
BUCKET_BYTES = 64 << 20
MAX_BUCKETS = 2000  # more input makes larger buckets


class TextShard(NamedTuple):
    split: str
    number: int  # in the split
    first: int  # cell
    last: int  # the cell after it
    documents: int
    bytes: int


def cell_edges(total_bytes: int, options: TextShardOptions) -> np.ndarray:
    """Divides the hashes of documents, numbers in [0, 1), into intervals: the cells. Returns where
    each cell begins, in ascending order: first cells of the test split, up to `test_fraction`, then
    cells of the training split.

    total_bytes: of the text.
    """
    num_shards = round(total_bytes / options.shard_bytes(total_bytes))
    num_edges = max(MIN_CELLS, 2 * num_shards)  # of a split, with the end of its last cell
    training = np.linspace(options.test_fraction, 1, num_edges)[:-1]
    if not options.test_fraction:
        return training
    test = np.linspace(0, options.test_fraction, num_edges)[:-1]
    return np.concatenate([test, training])


def document_hash(text: bytes, seed: int) -> float:
    """A number in [0, 1) that depends only on the document and the seed."""
    digest = hashlib.blake2b(text, digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "big") / 2**64


def copies_of(document: bytes, weight: float, options: TextShardOptions) -> int:
    """The number of copies of a training document: `weight` on average."""
    place = document_hash(document, options.random_seed + 1)  # independent of the cell
    return int(weight + place)  # place is in [0, 1)


def divide_document(document: bytes, max_kb: float | None) -> list[bytes]:
    """Parts of about equal size of a document above `max_kb`, which end where lines do."""
    if max_kb is None or len(document) <= max_kb * 1000:
        return [document]
    count = math.ceil(len(document) / (max_kb * 1000))
    parts: list[bytes] = []
    start = 0
    for number in range(1, count):
        line_end = document.find(b"\n", max(start, number * len(document) // count))
        if line_end < 0:
            break
        parts.append(document[start:line_end])
        start = line_end + 1
    return [*parts, document[start:]]


def plan_buckets(spans: Sequence[Span]) -> list[list[Span]]:
    """Runs of spans of about `BUCKET_BYTES`."""
    limit = max(BUCKET_BYTES, total_size(spans) // MAX_BUCKETS)
    buckets: list[list[Span]] = []
    size = limit
    for span in spans:
        if size >= limit:
            buckets.append([])
            size = 0
        buckets[-1].append(span)
        size += span.size
    return buckets


def bucket_spans(
    output: Path, spans: Sequence[Span], total_bytes: int, weight: float, options: TextShardOptions
) -> JsonObject:
    """Writes the documents of `spans`, each followed by an empty line, in the order of their cells.
    Returns the number of bytes in each cell, and of documents that training gets: at least one copy
    (see `copies_of`), and of equal ones the first, if the others are dropped.
    """
    documents: list[bytes] = []
    for span in spans:
        for document in split_documents(read_text_span(span)):
            documents += divide_document(document, options.max_document_kb)
    hashes = [document_hash(document, options.random_seed) for document in documents]
    edges = cell_edges(total_bytes, options)
    cells = np.searchsorted(edges, hashes, side="right") - 1  # of each document
    sizes = np.array([len(document) + 2 for document in documents], np.int64)
    with output.open("wb") as file:
        for index in np.argsort(cells, kind="stable"):
            file.write(documents[index] + b"\n\n")
    is_kept = np.ones(len(documents), bool)
    if weight < 1:
        is_kept[:] = [copies_of(document, weight, options) > 0 for document in documents]
    if options.drop_duplicates != "none":
        _, firsts = np.unique(hashes, return_index=True)
        is_kept &= np.isin(np.arange(len(documents)), firsts)
    documents_of_cells = np.bincount(cells[is_kept], minlength=len(edges))
    bytes_of_cells = np.bincount(cells, sizes, minlength=len(edges)).astype(np.int64)
    return {"documents": documents_of_cells.tolist(), "bytes": bytes_of_cells.tolist()}


def plan_shards(
    documents: np.ndarray, sizes: np.ndarray, total_bytes: int, options: TextShardOptions
) -> list[TextShard]:
    """Shards of the size that the options give. documents, sizes: of each cell.

    If a split would have fewer than two documents, the first cells with two are the test split; if
    that leaves fewer than two for training, all are for training.
    """
    edges = cell_edges(total_bytes, options)
    border = int(np.searchsorted(edges, options.test_fraction))  # the first cell for training
    smaller = min(documents[:border].sum(), documents[border:].sum())
    if options.test_fraction and smaller < MIN_DOCUMENTS:
        border = int(np.searchsorted(np.cumsum(documents), MIN_DOCUMENTS)) + 1
        if documents[border:].sum() < MIN_DOCUMENTS:
            border = 0
    shard_bytes = options.shard_bytes(total_bytes)
    shards: list[TextShard] = []
    for split, first, stop in (("training", border, len(edges)), ("test", 0, border)):
        shards += shards_of_cells(split, range(first, stop), documents, sizes, shard_bytes)
    return shards


def shards_of_cells(
    split: str, cells: range, documents: np.ndarray, sizes: np.ndarray, shard_bytes: float
) -> list[TextShard]:
    """Divides the `cells` of a split into shards of about equal size, at least MIN_DOCUMENTS
    documents each.

    documents, sizes: of each cell.
    shard_bytes: the size of a shard that is asked for.
    """
    total = int(sizes[cells.start : cells.stop].sum())
    target = total / max(1, round(total / shard_bytes))
    shards: list[TextShard] = []
    # Of the shard that is not full yet: its first cell, documents and bytes.
    first, count, size = cells.start, 0, 0
    bytes_before = 0  # in full shards
    for cell in cells:
        count += int(documents[cell])
        size += int(sizes[cell])
        is_full = bytes_before + size >= target * (len(shards) + 1)
        if is_full and count >= MIN_DOCUMENTS:
            shards.append(TextShard(split, len(shards), first, cell + 1, count, size))
            bytes_before += size
            first, count, size = cell + 1, 0, 0
    if shards and (count < MIN_DOCUMENTS or size < target / 2):  # the rest joins the last one
        last_full = shards.pop()
        first = last_full.first
        count += last_full.documents
        size += last_full.bytes
    if count:
        shards.append(TextShard(split, len(shards), first, cells.stop, count, size))
    return shards


class Part(NamedTuple):
    """What a shard gets of a bucket."""

    bucket: Path
    start: int
    stop: int
    weight: float  # copies of its documents; a fraction is decided by the hash of the document


def join_shard(output: Path, parts: Sequence[Part], options: TextShardOptions) -> JsonObject:
    """Writes the documents in `parts`, with an empty line between them."""
    drops_duplicates = options.drop_duplicates != "none"
    seen: set[float] = set()
    documents = dropped = 0
    with output.open("wb") as file:
        for part in parts:
            with part.bucket.open("rb") as bucket:
                bucket.seek(part.start)
                text = bucket.read(part.stop - part.start)
            if part.weight == 1 and not drops_duplicates:
                file.write(text)
                documents += text.count(b"\n\n")
                continue
            for document in text.split(b"\n\n")[:-1]:
                digest = document_hash(document, options.random_seed)
                if drops_duplicates and digest in seen:
                    dropped += 1
                    continue
                seen.add(digest)
                copies = copies_of(document, part.weight, options)
                file.write((document + b"\n\n") * copies)
                documents += copies
        file.truncate(max(file.tell() - 1, 0))
    return {"documents": documents, "dropped": dropped}


def make_shards(
    folder: Path,
    sources: Sequence[tuple[str, Sequence[Span]]],
    options: TextShardOptions,
    executor: Executor,
) -> dict[str, int]:
    """Fills `folder` with the shards of `sources`, each the name and the spans of a text. Returns
    counts.
    """
    weights = checked_weights(options, [name for name, _ in sources])
    total = sum(total_size(spans) for _, spans in sources)
    bucket_units: list[WorkUnit] = []
    bucket_weights = []
    for name, spans_of_source in sources:
        for spans in plan_buckets(spans_of_source):
            output = f"{BUCKETS}/{len(bucket_units):05d}"
            arguments = (spans, total, weights[name], options)
            bucket_units.append(WorkUnit(output, bucket_spans, arguments, total_size(spans)))
            bucket_weights.append(weights[name])
    with progress_bar(2 * total, "shard") as bar:
        records = run_units(folder, bucket_units, executor, bar.update)
        buckets = Buckets(
            [(folder / unit.output).absolute() for unit in bucket_units],
            np.array(bucket_weights),
            np.array([record.counts["documents"] for record in records]),
            np.array([record.counts["bytes"] for record in records]),
        )
        sizes = (buckets.weights @ buckets.bytes).astype(np.int64)
        # Equal documents may be in several buckets.
        sum_documents = np.sum if options.drop_duplicates == "none" else np.max
        documents = sum_documents(buckets.documents, axis=0)
        shards = plan_shards(documents, sizes, total, options)
        shard_units: list[WorkUnit] = []
        for shard in shards:
            output = f"{shard.split}/shard-{shard.number:05d}.txt"
            arguments_of_join = (buckets.parts_of(shard), options)
            shard_units.append(WorkUnit(output, join_shard, arguments_of_join, shard.bytes))
        made = run_units(folder, shard_units, executor, bar.update)
    shutil.rmtree(folder / BUCKETS)
    return shard_counts(shards, made, options)


def checked_weights(options: TextShardOptions, names: Sequence[str]) -> dict[str, float]:
    """The weight of each text in `names`. Raises UserError for a weight without such a text."""
    given = dict(options.weights)
    if unknown := given.keys() - set(names):
        raise UserError(f"--weights {min(unknown)}: there is no such text: use {', '.join(names)}")
    return dict.fromkeys(names, 1.0) | given


class Buckets:
    """Files of documents in the order of their cells. weights: [bucket]. documents, bytes:
    [bucket, cell].
    """

    def __init__(
        self, paths: list[Path], weights: np.ndarray, documents: np.ndarray, sizes: np.ndarray
    ):
        self.paths, self.weights, self.documents, self.bytes = paths, weights, documents, sizes
        self.stops = np.cumsum(sizes, axis=1)
        self.starts = self.stops - sizes

    def parts_of(self, shard: TextShard) -> list[Part]:
        """The part of each bucket with documents in the cells of `shard`."""
        parts = []
        for number, path in enumerate(self.paths):
            start = int(self.starts[number, shard.first])
            stop = int(self.stops[number, shard.last - 1])
            weight = float(self.weights[number]) if shard.split == "training" else 1.0
            if start < stop:
                parts.append(Part(path, start, stop, weight))
        return parts


def shard_counts(
    shards: Sequence[TextShard], made: Sequence[Record], options: TextShardOptions
) -> dict[str, int]:
    """The numbers of documents and shards of each split, and of documents that were dropped."""
    counts = {}
    for split in ("training", "test"):
        of_split = [
            record.counts["documents"]
            for shard, record in zip(shards, made, strict=True)
            if shard.split == split
        ]
        counts[f"{split}_documents"] = sum(of_split)
        counts[f"{split}_shards"] = len(of_split)
    if options.drop_duplicates != "none":
        counts["duplicates_dropped"] = sum(record.counts["dropped"] for record in made)
    return counts
