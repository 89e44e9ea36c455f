"""Writes HDF5 shards: NVIDIA's six data sets, what decides their content as attributes, and a checksum of each."""

import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5a, h5d, h5g, h5p, h5s, h5t

from data_loading.hdf5_shards import CHECKSUM_ATTRIBUTE, SCHEMA_VERSION, Layout, checksum
from data_preparation.options import SampleOptions
from tokenizer import Tokenizer

CHUNK_ROWS = 1024  # of compressed data sets
GZIP_LEVEL = 4  # of zlib

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
    """Writes a shard. blocks: rows, an array per data set of `layout`. Returns the Layout of each as JSON."""
    with ShardFile(path, "w+") as disk:
        # One format version and no time stamps: the same samples give the same bytes. Aligned: a reader may map arrays.
        with h5py.File(disk, "w", libver=("earliest", "v110"), alignment_threshold=64, alignment_interval=64) as file:
            for name, value in attributes.items():
                if isinstance(value, list | None):  # of a shard that another program made
                    file.attrs[name] = h5py.Empty(np.int8) if value is None else value
                else:
                    write_attribute(file.id, name, value, h5py.string_dtype() if isinstance(value, str) else None)
            datasets = [create_dataset(file.id, name, *of, compression) for name, of in layout.items()]
            checksums, start = [0] * len(datasets), 0
            for block in blocks:
                for index, (rows, (_, dtype)) in enumerate(zip(block, layout.values(), strict=True)):
                    values = np.ascontiguousarray(rows, dtype)
                    checksums[index] = checksum(values, checksums[index])
                    if values.size:
                        place = datasets[index].get_space()
                        place.select_hyperslab((start, *[0] * (values.ndim - 1)), values.shape)
                        datasets[index].write(h5s.create_simple(values.shape), place, values)
                start += len(block[0])
                disk.raise_failure()
            described = {}
            for (name, (shape, dtype)), dataset, found in zip(layout.items(), datasets, checksums, strict=True):
                write_attribute(dataset, CHECKSUM_ATTRIBUTE, found, np.uint32)
                offset = None if is_chunked(shape, compression) else dataset.get_offset() or 0
                described[name] = Layout(shape, dtype, offset, found).to_json()
        disk.raise_failure()
    return described


# h5py's own functions for attributes and data sets take most of the time of a small shard.
SCALAR, hdf5_type = h5s.create_simple(()), cache(h5t.py_create)


def write_attribute(parent: h5g.GroupID | h5d.DatasetID, name: str, value: Any, dtype: Any = None) -> None:
    values = np.array(value, dtype)
    attribute = h5a.create(parent, name.encode(), hdf5_type(values.dtype, logical=True), SCALAR)
    attribute.write(values, hdf5_type(values.dtype))


def is_chunked(shape: tuple[int, ...], compression: str) -> bool:
    return compression == "gzip" and 0 not in shape


def create_dataset(
    parent: h5g.GroupID, name: str, shape: tuple[int, ...], dtype: np.dtype, compression: str
) -> h5d.DatasetID:
    storage = h5p.create(h5p.DATASET_CREATE)
    storage.set_obj_track_times(False)
    if is_chunked(shape, compression):
        storage.set_chunk((min(shape[0], CHUNK_ROWS), *shape[1:]))
        storage.set_shuffle()
        storage.set_deflate(GZIP_LEVEL)
    return h5d.create(parent, name.encode(), hdf5_type(dtype, logical=True), h5s.create_simple(shape), storage)
