"""HDF5 shards of pre-training samples, read as token streams.

A shard holds NVIDIA's six data sets: `input_ids`, `input_mask`, `segment_ids` [n, S]; `masked_lm_positions`,
`masked_lm_ids` [n, P], zero-padded; `next_sentence_labels` [n]. Shards that are contiguous and uncompressed, as ours
are, are mapped: only the rows that a step needs are touched, and memory does not grow with the data. Compressed or
chunked ones, as NVIDIA's are, are held in memory in the smallest types that fit.

Legend: n samples, S sequence length, P predictions a sequence, T tokens in the stream, N sequences, M masked tokens.
"""

import mmap
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import h5py
import numpy as np

from utils.errors import UserError

KEYS = (
    "input_ids",
    "input_mask",
    "segment_ids",
    "masked_lm_positions",
    "masked_lm_ids",
    "next_sentence_labels",
)
SHARD_SUFFIXES = (".hdf5", ".h5")
HDF5_ERRORS = (OSError, RuntimeError, KeyError, ValueError)  # what h5py raises, depending on where the damage is


@dataclass(frozen=True)
class Layout:
    """Where one data set lies in its file: `offset` in bytes, or None where it cannot be mapped."""

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int | None


class Shard:
    """One file. Opening reads its layout and attributes only, and checks them; the data is opened when it is first
    wanted."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with h5py.File(path, "r") as file:
                missing = [key for key in KEYS if key not in file or not isinstance(file[key], h5py.Dataset)]
                if missing:
                    raise UserError(f"shard {path} lacks the key {', '.join(missing)}: it must hold {', '.join(KEYS)}")
                self.layouts = {key: layout_of(file[key]) for key in KEYS}
                self.attributes = {key: plain(value) for key, value in file.attrs.items()}
        except HDF5_ERRORS as error:
            raise UserError(
                f"shard {path} cannot be read as HDF5 ({error}): it may be cut off, make or fetch it again"
            ) from error
        self._check()

    def _check(self) -> None:
        n, length = self._shape("input_ids", 2)
        predictions = self._shape("masked_lm_positions", 2)[1]
        expected = {
            "input_ids": (n, length),
            "input_mask": (n, length),
            "segment_ids": (n, length),
            "masked_lm_positions": (n, predictions),
            "masked_lm_ids": (n, predictions),
            "next_sentence_labels": (n,),
        }
        for key, shape in expected.items():
            layout = self.layouts[key]
            if layout.shape != shape:
                raise UserError(
                    f"shard {self.path}: {key} is {list(layout.shape)} where {list(shape)} fits the other keys"
                )
            if layout.dtype.kind not in "iu":
                raise UserError(f"shard {self.path}: {key} holds {layout.dtype}, not whole numbers")
            if layout.offset is not None and layout.offset + layout.dtype.itemsize * int(np.prod(shape)) > (
                self.path.stat().st_size
            ):
                raise UserError(f"shard {self.path} is cut off inside {key}: make or fetch it again")

    def _shape(self, key: str, dimensions: int) -> tuple[int, ...]:
        shape = self.layouts[key].shape
        if len(shape) != dimensions:
            raise UserError(f"shard {self.path}: {key} has {len(shape)} dimensions, expected {dimensions}")
        return shape

    def __len__(self) -> int:
        return self.layouts["input_ids"].shape[0]

    @property
    def sequence_length(self) -> int:
        return self.layouts["input_ids"].shape[1]

    @property
    def predictions_per_sequence(self) -> int:
        return self.layouts["masked_lm_positions"].shape[1]

    @property
    def is_mapped(self) -> bool:
        return all(layout.offset is not None for layout in self.layouts.values())

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """The six data sets."""
        if self.is_mapped:
            with self.path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            return {
                key: np.frombuffer(mapped, layout.dtype, int(np.prod(layout.shape)), layout.offset).reshape(
                    layout.shape
                )
                for key, layout in self.layouts.items()
            }
        try:
            with h5py.File(self.path, "r") as file:
                return {key: smallest_integers(file[key][:]) for key in KEYS}
        except HDF5_ERRORS as error:
            raise UserError(f"shard {self.path} is damaged ({error}): make or fetch it again") from error


def layout_of(dataset: h5py.Dataset) -> Layout:
    is_plain = dataset.chunks is None and dataset.compression is None and dataset.dtype.isnative
    # An empty data set takes no room in the file and has no offset.
    offset = dataset.id.get_offset() if is_plain else None
    return Layout(dataset.shape or (), dataset.dtype, offset)


def plain(value):
    """An HDF5 attribute as a Python value."""
    if isinstance(value, bytes):
        return value.decode()
    return value.item() if isinstance(value, np.generic) else value


def smallest_integers(values: np.ndarray) -> np.ndarray:
    """`values` in the narrowest integer type that holds them all."""
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    for dtype in (np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return values.astype(dtype)
    return values


def find_shards(folder: str | Path) -> list[Path]:
    """The HDF5 files in `folder` (or the one file that it names), in the order of their names."""
    folder = Path(folder)
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise UserError(f"input folder {folder} does not exist: check --input-dir, or make it with data/prepare.py")
    paths = sorted(path for path in folder.iterdir() if path.suffix in SHARD_SUFFIXES)
    if not paths:
        raise UserError(f"input folder {folder} holds no {' or '.join('*' + s for s in SHARD_SUFFIXES)} file")
    return paths


class PretrainingDataset:
    """The samples of all shards in a folder, in the order of the shards' names; see token_stream.StreamDataset.

    `vocab_size` is the model's; an id outside it is an error that names the shard and the row.
    """

    # Attributes that must be the same in every shard of a folder.
    COMMON_ATTRIBUTES = ("schema_version", "vocab_sha256", "vocab_size", "do_lower_case", "next_sentence_prediction")

    def __init__(self, folder: str | Path, vocab_size: int):
        self.folder = Path(folder)
        self.vocab_size = vocab_size
        self.shards = [shard for shard in map(Shard, find_shards(folder)) if len(shard)]
        if not self.shards:
            raise UserError(f"the shards in {folder} hold no sample: make them from more text")
        first = self.shards[0]
        for shard in self.shards[1:]:
            for what, ours, theirs in [
                ("sequence length", first.sequence_length, shard.sequence_length),
                ("predictions per sequence", first.predictions_per_sequence, shard.predictions_per_sequence),
                *((key, first.attributes.get(key), shard.attributes.get(key)) for key in self.COMMON_ATTRIBUTES),
            ]:
                if ours != theirs:
                    raise UserError(
                        f"shards disagree: {what} is {ours} in {first.path} and {theirs} in {shard.path}: "
                        f"keep shards of different kinds in different folders"
                    )
        self.sequence_length = first.sequence_length
        self.predictions_per_sequence = first.predictions_per_sequence
        self.attributes = first.attributes
        self.ends = np.cumsum([len(shard) for shard in self.shards])

    def __len__(self) -> int:
        return int(self.ends[-1])

    @property
    def has_next_sentence(self) -> bool:
        return bool(self.attributes.get("next_sentence_prediction", True))

    @property
    def bytes_in_memory(self) -> int:
        """Roughly what the shards that cannot be mapped will take once all have been read."""
        per_sample = 4 * self.sequence_length + 3 * self.predictions_per_sequence
        return sum(len(shard) * per_sample for shard in self.shards if not shard.is_mapped)

    def rows(self, key: str, indices: np.ndarray) -> np.ndarray:
        """The rows `indices` of the data set `key`, gathered from all shards."""
        which = np.searchsorted(self.ends, indices, side="right")
        parts = {number: self.shards[number].arrays[key] for number in np.unique(which)}
        shape = (len(indices), *self.shards[0].layouts[key].shape[1:])
        out = np.empty(shape, dtype=np.result_type(*{part.dtype for part in parts.values()}))
        for number, part in parts.items():
            here = which == number
            out[here] = part[indices[here] - (self.ends[number] - len(part))]
        return out

    def sizes(self, indices: np.ndarray) -> np.ndarray:
        """Tokens and masked tokens of each sample, [n, 2]."""
        lengths = np.count_nonzero(self.rows("input_mask", indices), axis=1)
        # Position 0 is [CLS], which is never masked, so that a zero is padding.
        return np.column_stack([lengths, np.count_nonzero(self.rows("masked_lm_positions", indices), axis=1)])

    def stream(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The samples laid end to end without padding."""
        offsets_S = np.arange(self.sequence_length, dtype=np.int64)
        real_NS = self.rows("input_mask", indices) != 0
        lengths_N = np.count_nonzero(real_NS, axis=1)
        starts_N = np.cumsum(lengths_N) - lengths_N

        positions_NP = self.rows("masked_lm_positions", indices).astype(np.int64)
        masked_NP = positions_NP > 0
        stream = {
            "input_ids": self.rows("input_ids", indices)[real_NS].astype(np.int64),
            "token_type_ids": self.rows("segment_ids", indices)[real_NS].astype(np.int64),
            "position_ids": np.broadcast_to(offsets_S, real_NS.shape)[real_NS],
            "cu_seqlens": np.append(0, np.cumsum(lengths_N)).astype(np.int32),
            "mlm_positions": (positions_NP + starts_N[:, None])[masked_NP],
            "mlm_labels": self.rows("masked_lm_ids", indices)[masked_NP].astype(np.int64),
            "nsp_labels": self.rows("next_sentence_labels", indices).astype(np.int64),
        }
        self._check(indices, lengths_N, positions_NP, stream)
        return stream

    def _check(self, indices, lengths_N, positions_NP, stream) -> None:
        """Damaged data must stop a run and not train it."""
        empty = (lengths_N == 0).any()
        holes = empty or (stream["position_ids"][stream["cu_seqlens"][1:] - 1] != lengths_N - 1).any()
        out_of_range = max(stream["input_ids"].max(initial=0), stream["mlm_labels"].max(initial=0)) >= self.vocab_size
        negative = min(stream["input_ids"].min(initial=0), stream["mlm_labels"].min(initial=0)) < 0
        types = stream["token_type_ids"]
        bad_types = types.max(initial=0) > 1 or types.min(initial=0) < 0
        bad_positions = (positions_NP.max(axis=1, initial=0) >= lengths_N) | (positions_NP.min(axis=1, initial=0) < 0)
        labels_N = stream["nsp_labels"]
        bad_labels = (labels_N < -1) | (labels_N > 1)
        if not (holes or out_of_range or negative or bad_types or bad_positions.any() or bad_labels.any()):
            return
        for index in indices:
            self._check_sample(int(index))

    def _check_sample(self, index: int) -> None:
        number = int(np.searchsorted(self.ends, index, side="right"))
        shard = self.shards[number]
        row = index - int(self.ends[number] - len(shard))
        values = {key: np.asarray(shard.arrays[key][row]).astype(np.int64) for key in KEYS}
        where = f"shard {shard.path}, row {row}"
        length = np.count_nonzero(values["input_mask"])
        if length == 0 or not values["input_mask"][:length].all():
            raise UserError(
                f"{where}: input_mask is not ones and then zeros: the shard is damaged, make or fetch it again"
            )
        checks = [
            ("input_ids", values["input_ids"][:length], 0, self.vocab_size, "the vocabulary's size"),
            ("masked_lm_ids", values["masked_lm_ids"], 0, self.vocab_size, "the vocabulary's size"),
            ("segment_ids", values["segment_ids"][:length], 0, 2, "two segments"),
            ("masked_lm_positions", values["masked_lm_positions"], 0, length, "the sample's length"),
            ("next_sentence_labels", values["next_sentence_labels"], -1, 2, "two labels, or -1 for none"),
        ]
        for key, found, low, limit, name in checks:
            if found.size and (found.max() >= limit or found.min() < low):
                worst = found.max() if found.max() >= limit else found.min()
                raise UserError(
                    f"{where}: {key} holds {worst}, outside [{low}, {limit}), {name}: the shards do not fit this "
                    f"vocabulary and config, or are damaged"
                )
