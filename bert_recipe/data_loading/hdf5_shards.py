"""Reads HDF5 shards of pre-training samples.

A shard contains NVIDIA's six data sets: `input_ids`, `input_mask`, `segment_ids` [n, S];
`masked_lm_positions`, `masked_lm_ids` [n, P], zero-padded; `next_sentence_labels` [n]. Rows of
contiguous, uncompressed shards are read from the file when they are needed, so memory does not grow
with the data. Compressed or chunked shards, such as NVIDIA's, are loaded into memory in the
smallest integer types that fit.

`input_mask` is 1 for tokens and 0 for padding. With several documents in a row (attribute
`pack_documents`), it is the number of the token's document in the row, from 1. A shard with P = 0
has no masks: training draws them.

Shards made by this project store a checksum of each data set in the attribute `crc32`: zlib's
CRC-32 of its little-endian bytes.

Legend: n samples, S sequence length, P masked tokens of a sequence at most.
"""

import errno
import hashlib
import math
import os
import resource
import weakref
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from bert_recipe.utils.errors import UserError, machine_problem
from bert_recipe.utils.files import is_hidden, refuse_pointer
from bert_recipe.utils.text_files import check_one_split

KEYS = (
    "input_ids",
    "input_mask",
    "segment_ids",
    "masked_lm_positions",
    "masked_lm_ids",
    "next_sentence_labels",
)
# Of new shards: increases when the format changes, or the samples that the same options give.
# NVIDIA's shards have none.
SCHEMA_VERSION = 4
SHARD_SUFFIXES = (".hdf5", ".h5")
CHECKSUM_ATTRIBUTE = "crc32"
CHECKSUM_ROWS = 1 << 14  # rows per read
SAMPLED_ROWS = 16
HDF5_ERRORS = (OSError, RuntimeError, KeyError, ValueError)  # raised by h5py for damaged files


@dataclass(frozen=True)
class Layout:
    """Where a data set is in its file: `offset` in bytes, None if compressed or chunked; its
    checksum or None.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int | None
    checksum: int | None


def max_documents(sequence_length: int) -> int:
    """Maximum number of documents in a row of a shard with the attribute `pack_documents`."""
    return max(1, min(sequence_length // 16, 127))


class Shard:
    """One file. The constructor reads and checks layout and attributes; the data is opened on first
    use.
    """

    def __init__(self, path: Path):
        self.path = path
        self._open()
        self._check()

    def _open(self) -> None:
        path = self.path
        try:
            with h5py.File(path, "r") as file:
                missing = [
                    key
                    for key in KEYS
                    if key not in file or not isinstance(file[key], h5py.Dataset)
                ]
                if missing:
                    raise UserError(
                        f"shard {path} lacks the key {', '.join(missing)}: it must hold "
                        f"{', '.join(KEYS)}"
                    )
                self.layouts = {key: read_layout(file[key]) for key in KEYS}
                self.attributes = {key: to_python(value) for key, value in file.attrs.items()}
        except HDF5_ERRORS as error:
            if path.is_file():
                refuse_pointer(path)
            advice = "it may be cut off, make or fetch it again"
            # Also on file systems without locks, such as some NFS.
            if "unable to lock file" in str(error):
                advice = "close the program that writes it, or set HDF5_USE_FILE_LOCKING=FALSE"
            raise UserError(f"shard {path} cannot be read as HDF5 ({error}): {advice}") from error

    def _check(self) -> None:
        """Raises UserError unless the data sets fit to each other and to the file's size."""
        # With zeros for dimensions that are missing, so that the shapes below differ.
        num_rows, length, *_ = (*self.layouts["input_ids"].shape, 0, 0)
        _, max_masked, *_ = (*self.layouts["masked_lm_positions"].shape, 0, 0)
        version = self.attributes.get("schema_version", 1)
        if version not in range(1, SCHEMA_VERSION + 1):
            raise UserError(
                f"shard {self.path} has schema_version {version}, and this program reads 1 to "
                f"{SCHEMA_VERSION}: use the program that made it, or make it again"
            )
        size = self.path.stat().st_size
        shapes = [(num_rows, length)] * 3 + [(num_rows, max_masked)] * 2 + [(num_rows,)]
        for key, shape in zip(KEYS, shapes, strict=True):
            layout = self.layouts[key]
            if layout.shape != shape:
                raise UserError(
                    f"shard {self.path}: {key} is {list(layout.shape)} where {list(shape)} fits "
                    "the other keys"
                )
            if layout.dtype.kind not in "iu":
                raise UserError(f"shard {self.path}: {key} holds {layout.dtype}, not whole numbers")
            if layout.offset is None:  # compressed or chunked
                continue
            end = layout.offset + layout.dtype.itemsize * math.prod(shape)
            if end > size:
                raise UserError(
                    f"shard {self.path} is cut off inside {key}: make or fetch it again"
                )

    def __len__(self) -> int:
        return self.layouts["input_ids"].shape[0]

    @property
    def sequence_length(self) -> int:
        return self.layouts["input_ids"].shape[1]

    @property
    def max_masked(self) -> int:
        return self.layouts["masked_lm_positions"].shape[1]

    @cached_property
    def is_contiguous(self) -> bool:
        return all(layout.offset is not None for layout in self.layouts.values())

    @cached_property
    def descriptor(self) -> int:
        """The file, open as long as the shard exists: one that is removed or replaced is read as it
        was.
        """
        descriptor = open_file(self.path)
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """The data sets of a compressed or chunked shard."""
        return {key: smallest_integers(values) for key, values in self._stored(slice(None))}

    def _stored(self, rows: slice | np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the rows of each data set as HDF5 reads them."""
        try:
            with h5py.File(self.path, "r") as file:
                yield from ((key, file[key][rows]) for key in KEYS)
        except HDF5_ERRORS as error:
            raise UserError(
                f"shard {self.path} is damaged ({error}): make or fetch it again"
            ) from error

    def read(self, key: str, rows: np.ndarray) -> np.ndarray:
        """A copy of the rows `rows` of a data set."""
        if not self.is_contiguous:
            return self.arrays[key][rows]
        return ContiguousShards([self]).read(np.zeros_like(rows), rows, [key])[key]

    def blocks(self, size: int) -> Iterator[np.ndarray]:
        """The numbers of all rows, `size` at a time, for `read`."""
        for start in range(0, len(self), size):
            yield np.arange(start, min(start + size, len(self)))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the number of rows and of evenly spaced ones. Raises UserError if these have
        no masked token.
        """
        rows = np.unique(np.linspace(0, len(self) - 1, SAMPLED_ROWS).astype(np.int64))
        if self.is_contiguous:
            sample = ContiguousShards([self]).read(np.zeros_like(rows), rows)
        else:  # only the chunks that contain them are read
            sample = dict(self._stored(rows))
        digest = hashlib.sha256(str(len(self)).encode())
        if self.max_masked and not sample["masked_lm_positions"].any():
            raise UserError(f"shard {self.path} has samples without a masked token: make it again")
        for key in KEYS:
            digest.update(sample[key].astype("<i8").tobytes())
        return digest.hexdigest()

    @property
    def has_checksums(self) -> bool:
        return all(layout.checksum is not None for layout in self.layouts.values())

    def verify_checksums(self) -> None:
        """Raises UserError if a data set does not match its checksum. Skips data sets without a
        checksum.
        """
        for key, layout in self.layouts.items():
            if layout.checksum is None:
                continue
            computed = 0
            for rows in self.blocks(CHECKSUM_ROWS):
                values = self.read(key, rows).astype(layout.dtype, copy=False)
                computed = checksum(values, computed)
            if computed != layout.checksum:
                raise UserError(
                    f"shard {self.path}: {key} does not match its checksum: make or fetch the "
                    "shard again"
                )


class ContiguousShards:
    """Contiguous shards with equal types, whose rows are read with one system call each."""

    def __init__(self, shards: Sequence[Shard]):
        self.shards, self.layouts = shards, shards[0].layouts
        self.descriptors = np.array([shard.descriptor for shard in shards])
        self.starts = {
            key: np.array([shard.layouts[key].offset for shard in shards]) for key in KEYS
        }

    def read(
        self, numbers: np.ndarray, rows: np.ndarray, keys: Sequence[str] = KEYS
    ) -> dict[str, np.ndarray]:
        """The rows `rows` [n] of the shards `numbers` [n], neighbours at once. Raises UserError for
        unreadable ones.
        """
        # A run of neighbouring rows of a shard is one read.
        is_next = (np.diff(rows) == 1) & (np.diff(numbers) == 0)
        begins_run = np.append(True, ~is_next)[: len(rows)]
        run_starts = begins_run.nonzero()[0]
        counts = np.diff(run_starts, append=len(rows))  # of the rows of each run
        shards = numbers[run_starts]
        first_rows = rows[run_starts]
        descriptors = self.descriptors[shards].tolist()
        values = {}
        for key in keys:
            layout = self.layouts[key]
            row_bytes = layout.dtype.itemsize * math.prod(layout.shape[1:])
            sizes = (counts * row_bytes).tolist()
            offsets = (self.starts[key][shards] + first_rows * row_bytes).tolist()
            try:
                content = bytearray().join(map(os.pread, descriptors, sizes, offsets))
            except OSError:
                content = bytearray()
            if len(content) != len(rows) * row_bytes:
                parts = map(self._read_again, shards, descriptors, sizes, offsets)
                content = bytearray().join(parts)
            values[key] = np.ndarray((len(rows), *layout.shape[1:]), layout.dtype, content)
        return values

    def _read_again(self, number: int, descriptor: int, size: int, offset: int) -> bytes:
        """`size` bytes at `offset` of shard `number`: when one of several reads failed, each is
        repeated. Raises UserError if it was this one.
        """
        reason = "was cut off while it was read: make or fetch it again"
        try:
            content = os.pread(descriptor, size, offset)
        except OSError as error:
            content, reason = b"", f"cannot be read: {machine_problem(error)}"
        if len(content) < size:
            raise UserError(f"shard {self.shards[number].path} {reason}")
        return content


def open_file(path: Path) -> int:
    """Opens a file for reading; there may be more files than the soft limit of open files."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if error.errno != errno.EMFILE or soft == hard:
            raise
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(2 * soft, hard), hard))
        return open_file(path)


def checksum(values: np.ndarray, previous: int) -> int:
    """CRC-32 of the little-endian bytes of `values`, continued from `previous`."""
    return zlib.crc32(np.ascontiguousarray(values, values.dtype.newbyteorder("<")).data, previous)


def read_layout(dataset: h5py.Dataset) -> Layout:
    """How a data set is stored in its file."""
    is_contiguous = (
        dataset.chunks is None and dataset.compression is None and dataset.dtype.isnative
    )
    offset = dataset.id.get_offset() if is_contiguous else None
    shape: tuple[int, ...] = dataset.shape or ()  # of a null dataspace: None
    if is_contiguous and len(shape) == 2 and shape[0] and not shape[1]:
        offset = 0  # without masks: nothing is stored, and rows are read as empty
    stored = to_python(dataset.attrs.get(CHECKSUM_ATTRIBUTE))
    return Layout(shape, dataset.dtype, offset, stored if isinstance(stored, int) else None)


def to_python(value: Any) -> Any:
    """Converts an HDF5 attribute to a Python value."""
    if isinstance(value, h5py.Empty):
        return None
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, np.ndarray):
        return [to_python(item) for item in value.tolist()]
    return to_python(value.item()) if isinstance(value, np.generic) else value


def smallest_integers(values: np.ndarray) -> np.ndarray:
    """Converts `values` to the smallest integer type that fits."""
    low = int(values.min(initial=0))
    high = int(values.max(initial=0))
    if low < 0:  # signed types go from -2^k to 2^k - 1
        return values.astype(np.min_scalar_type(min(low, -high - 1)))
    return values.astype(np.min_scalar_type(high))


def find_shards(folder: str | Path) -> list[Path]:
    """The HDF5 files in `folder`, sorted by name; `folder` may also be one file."""
    folder = Path(folder)
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise UserError(
            f"input folder {folder} does not exist: check the path, or make it with data/prepare.py"
        )
    paths = sorted(
        path for path in folder.iterdir() if path.suffix in SHARD_SUFFIXES and not is_hidden(path)
    )
    if not paths:
        raise UserError(
            f"input folder {folder} holds no {' or '.join('*' + s for s in SHARD_SUFFIXES)} file"
        )
    return paths


def open_shards(folder: str | Path) -> list[Shard]:
    """The shards in `folder`, sorted by name."""
    paths = find_shards(folder)
    # NVIDIA's folders have both, and its program reads those of training.
    check_one_split(Path(folder), [path.name for path in paths], "name a single shard")
    return [Shard(path) for path in paths]
