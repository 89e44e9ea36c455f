"""Writes HDF5 shards: NVIDIA's six data sets (see data_loading/hdf5_shards.py), with everything that decides
their content as attributes, and a checksum of each data set."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np

from data_loading.hdf5_shards import CHECKSUM_ATTRIBUTE, checksum, read_layout
from data_preparation.options import SampleOptions
from tokenizer import Tokenizer

SCHEMA_VERSION = 2  # increases when the format changes, or the samples that the same options give
CHUNK_ROWS = 1024  # of compressed data sets

Layout = dict[str, tuple[tuple[int, ...], np.dtype]]  # shape and type of each data set


def shard_attributes(input_sha256: str, tokenizer: Tokenizer, options: SampleOptions) -> dict:
    """Everything that decides a shard's content, besides its file name."""
    return options.as_dict() | {
        "schema_version": SCHEMA_VERSION,
        "vocab_sha256": tokenizer.vocab_sha256,
        "vocab_size": tokenizer.vocab_size,
        "do_lower_case": tokenizer.do_lower_case,
        "input_sha256": input_sha256,
    }


def sample_layout(n: int, length: int, predictions: int, id_dtype: np.dtype) -> Layout:
    """The data sets of a shard of `n` samples in the smallest types, in the order in which they are written."""
    return {
        "input_ids": ((n, length), id_dtype),
        "input_mask": ((n, length), np.dtype(np.int8)),
        "segment_ids": ((n, length), np.dtype(np.int8)),
        "masked_lm_positions": ((n, predictions), np.min_scalar_type(length - 1)),
        "masked_lm_ids": ((n, predictions), id_dtype),
        "next_sentence_labels": ((n,), np.dtype(np.int8)),
    }


class ShardFile(io.FileIO):
    """The file that HDF5 writes to. After a failed write HDF5 tries again at each later close and prints pages of
    errors, so this keeps the first failure in `error` and pretends that the rest is written."""

    error: OSError | None = None

    def write(self, data) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest and not self.error:
                rest = rest[super().write(rest) :]
        except OSError as error:
            self.error = error
        return size

    def truncate(self, size: int | None = None) -> int:
        return super().truncate(size) if not self.error else size or 0


class ShardWriter:
    """Writes the rows of an open shard in blocks. Made by `create_hdf5`."""

    def __init__(self, disk: ShardFile, datasets: list[h5py.Dataset]):
        self.disk, self.datasets = disk, datasets
        self.checksums = [0] * len(datasets)
        self.rows = 0
        self.described: dict[str, dict] = {}  # shape, type, offset and checksum of each data set, when they are written

    def append(self, *blocks: np.ndarray) -> None:
        """Adds the rows of one block per data set, in the order of the layout."""
        stop = self.rows + len(blocks[0])
        for number, (dataset, block) in enumerate(zip(self.datasets, blocks, strict=True)):
            values = block.astype(dataset.dtype, copy=False)
            dataset[self.rows : stop] = values
            self.checksums[number] = checksum(values, self.checksums[number])
        self.rows = stop
        self.raise_failure()

    def finish(self) -> None:
        """Writes the checksums."""
        for dataset, value in zip(self.datasets, self.checksums, strict=True):
            dataset.attrs.create(CHECKSUM_ATTRIBUTE, value, dtype=np.uint32)
            self.described[dataset.name.strip("/")] = read_layout(dataset).to_json()

    def raise_failure(self) -> None:
        if self.disk.error:
            raise OSError(self.disk.error.errno, self.disk.error.strerror)


@contextmanager
def create_hdf5(path: Path, layout: Layout, attributes: dict, compression: str) -> Iterator[ShardWriter]:
    """A writer of a new shard at `path`."""
    with ShardFile(path, "w+") as disk:
        # One format version and no time stamps (h5py's default), so that the same samples give the same bytes. Aligned,
        # so that a reader may map the data sets as arrays.
        with h5py.File(disk, "w", libver=("earliest", "v110"), alignment_threshold=64, alignment_interval=64) as file:
            file.attrs.update(attributes)
            datasets = []
            for name, (shape, dtype) in layout.items():
                storage = {}
                if compression == "gzip" and 0 not in shape:
                    storage = {
                        "compression": "gzip",
                        "shuffle": True,
                        "chunks": (min(shape[0], CHUNK_ROWS), *shape[1:]),
                    }
                datasets.append(file.create_dataset(name, shape, dtype, **storage))
            writer = ShardWriter(disk, datasets)
            yield writer
            writer.finish()
        writer.raise_failure()
