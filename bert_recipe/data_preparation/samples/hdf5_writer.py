"""Writes HDF5 shards: NVIDIA's six data sets, what decides their content as attributes, and a
checksum of each.
"""

import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import h5py
import numpy as np

from bert_recipe.data_loading.hdf5_shards import (
    CHECKSUM_ATTRIBUTE,
    SCHEMA_VERSION,
    checksum,
)
from bert_recipe.data_preparation.options import SampleOptions
from bert_recipe.tokenization.tokenizer import Tokenizer
from bert_recipe.utils.json_files import JsonObject

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

Datasets = dict[str, tuple[tuple[int, ...], np.dtype]]  # shape and type of each
Attributes = JsonObject


def shard_attributes(input_sha256: str, tokenizer: Tokenizer, options: SampleOptions) -> Attributes:
    """Everything that decides a shard's content, besides its file name."""
    return asdict(options) | {
        "schema_version": SCHEMA_VERSION,
        "vocab_sha256": tokenizer.vocab_sha256,
        "vocab_size": tokenizer.vocab_size,
        **tokenizer.casing_settings(),
        "input_sha256": input_sha256,
    }


def sample_layout(n: int, length: int, max_masked: int, id_dtype: np.dtype) -> Datasets:
    """The data sets of a shard of `n` samples in the smallest types, in the order in which they are
    written.
    """
    return {
        "input_ids": ((n, length), id_dtype),
        "input_mask": ((n, length), np.dtype(np.int8)),
        "segment_ids": ((n, length), np.dtype(np.int8)),
        "masked_lm_positions": ((n, max_masked), np.min_scalar_type(length - 1)),
        "masked_lm_ids": ((n, max_masked), id_dtype),
        "next_sentence_labels": ((n,), np.dtype(np.int8)),
    }


class ShardFile(io.FileIO):
    """The file that HDF5 writes to. After a failed write HDF5 tries again at each later close and
    prints pages of errors, so this keeps the first failure in `error` and pretends that the rest is
    written.
    """

    error: OSError | None = None

    def write(self, data: "ReadableBuffer", /) -> int:
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
    path: Path,
    layout: Datasets,
    attributes: Attributes,
    blocks: Iterable[Sequence[np.ndarray]],
) -> None:
    """Writes a shard. blocks: rows, an array per data set of `layout`."""
    with ShardFile(path, "w+") as disk:
        # One format version and no time stamps: the same samples give the same bytes. Aligned: a
        # reader may map arrays.
        with h5py.File(
            disk, "w", libver=("earliest", "v110"), alignment_threshold=64, alignment_interval=64
        ) as file:
            for name, value in attributes.items():
                file.attrs[name] = h5py.Empty(np.int8) if value is None else value
            datasets = {}
            checksums = dict.fromkeys(layout, 0)
            start = 0
            for name, (shape, dtype) in layout.items():
                datasets[name] = file.create_dataset(name, shape, dtype, track_times=False)
            for block in blocks:
                for (name, dataset), rows in zip(datasets.items(), block, strict=True):
                    values = np.ascontiguousarray(rows, layout[name][1])
                    checksums[name] = checksum(values, checksums[name])
                    if values.size:
                        dataset[start : start + len(values)] = values
                start += len(block[0])
                disk.raise_failure()
            for name, dataset in datasets.items():
                dataset.attrs.create(CHECKSUM_ATTRIBUTE, checksums[name], dtype=np.uint32)
        disk.raise_failure()
