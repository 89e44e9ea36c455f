"""Writes HDF5 shards: NVIDIA's six data sets (see data_loading/hdf5_shards.py), with everything that decides
their content as attributes, and a checksum of each data set."""

import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import h5py
import numpy as np

from data_loading.hdf5_shards import CHECKSUM_ATTRIBUTE, SCHEMA_VERSION, checksum, read_layout
from data_preparation.options import SampleOptions
from tokenizer import Tokenizer

CHUNK_ROWS = 1024  # of compressed data sets

Datasets = dict[str, tuple[tuple[int, ...], np.dtype]]  # shape and type of each


def shard_attributes(input_sha256: str, tokenizer: Tokenizer, options: SampleOptions) -> dict:
    """Everything that decides a shard's content, besides its file name."""
    return asdict(options) | {
        "schema_version": SCHEMA_VERSION,
        "vocab_sha256": tokenizer.vocab_sha256,
        "vocab_size": tokenizer.vocab_size,
        "do_lower_case": tokenizer.do_lower_case,
        "input_sha256": input_sha256,
    }


def sample_layout(n: int, length: int, predictions: int, id_dtype: np.dtype) -> Datasets:
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

    def raise_failure(self) -> None:
        if self.error:
            raise OSError(self.error.errno, self.error.strerror)


def write_hdf5(
    path: Path, layout: Datasets, attributes: dict, compression: str, blocks: Iterable[Sequence[np.ndarray]]
) -> dict[str, dict]:
    """Writes a shard. blocks: rows, one array per data set in the order of the layout. Returns shape, type, offset and
    checksum of each data set."""
    with ShardFile(path, "w+") as disk:
        # One format version and no time stamps (h5py's default), so that the same samples give the same bytes. Aligned,
        # so that a reader may map the data sets as arrays.
        with h5py.File(disk, "w", libver=("earliest", "v110"), alignment_threshold=64, alignment_interval=64) as file:
            file.attrs.update(attributes)
            datasets = {}
            for name, (shape, dtype) in layout.items():
                storage = {}
                if compression == "gzip" and 0 not in shape:
                    chunks = (min(shape[0], CHUNK_ROWS), *shape[1:])
                    storage = {"compression": "gzip", "shuffle": True, "chunks": chunks}
                datasets[name] = file.create_dataset(name, shape, dtype, **storage)
            checksums, start = dict.fromkeys(layout, 0), 0
            for block in blocks:
                stop = start + len(block[0])
                for (name, dataset), rows in zip(datasets.items(), block, strict=True):
                    values = rows.astype(dataset.dtype, copy=False)
                    dataset[start:stop] = values
                    checksums[name] = checksum(values, checksums[name])
                start = stop
                disk.raise_failure()
            for name, value in checksums.items():
                datasets[name].attrs.create(CHECKSUM_ATTRIBUTE, value, dtype=np.uint32)
            described = {name: read_layout(dataset).to_json() for name, dataset in datasets.items()}
        disk.raise_failure()
    return described
