"""Counts what is in samples: lengths, masks, labels, and how many samples are repeated.

Legend: n rows, S sequence length, P predictions per sequence.
"""

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

HASH_SEED = 20_181_011  # of the random weights: the hash of a row is a weighted sum modulo 2^64
MAX_UNKNOWN = 0.1  # share of [UNK] above which the vocabulary does not fit the text
KEPT_TEXTS = 1024  # of a shard: the texts with the lowest hashes, so that repetitions are counted in a fraction of them
MAX_KEPT_TEXTS = 1 << 16  # of all shards


@dataclass(kw_only=True)
class SampleStatistics:
    """Sums over samples of one sequence length; `+` adds two."""

    shards: int = 0
    checksummed: int = 0  # shards with a checksum of every data set
    samples: int = 0
    tokens: int = 0
    unknown: int = 0  # [UNK], before masking
    masked: int = 0
    masked_as_mask: int = 0  # replaced by [MASK]
    masked_as_itself: int = 0  # kept
    masked_as_other: int = 0  # replaced by a random token
    highest_id: int = 0
    labels: np.ndarray  # number of samples with label -1 (none), 0 (B follows A), 1 (B is random) [3]
    lengths: np.ndarray  # number of samples of each length [S + 1]
    positions: np.ndarray  # number of masked tokens at each position [S]
    # Hash of the text, hash of the sample with its masks, number of such samples [k, 3], by hash; complete for the
    # texts whose hash is at most `threshold`.
    kept: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), np.uint64), repr=False)
    threshold: int = 2**64 - 1

    def __add__(self, other: "SampleStatistics") -> "SampleStatistics":
        total = SampleStatistics(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)[:-2]})
        total.highest_id = max(self.highest_id, other.highest_id)
        total.threshold = min(self.threshold, other.threshold)
        total.kept = np.concatenate([self.kept, other.kept])
        if len(total.kept) > 2 * MAX_KEPT_TEXTS:
            total.keep_lowest(MAX_KEPT_TEXTS)
        return total

    def keep_lowest(self, count: int) -> None:
        """Keeps the `count` texts with the lowest hashes, and each of their samples once, with its number."""
        texts = np.unique(self.kept[:, 0])
        if len(texts) > count:
            self.threshold = min(self.threshold, int(texts[count - 1]))
        rows = self.complete_rows()
        _, first, which = np.unique(rows[:, 1], return_index=True, return_inverse=True)
        self.kept = rows[first]
        self.kept[:, 2] = np.bincount(which, rows[:, 2]).astype(np.uint64)

    def to_json(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "SampleStatistics":
        arrays = {name: np.array(values[name], int) for name in ("labels", "lengths", "positions")}
        return cls(**values | arrays | {"kept": np.array(values["kept"], np.uint64).reshape(-1, 3)})

    @property
    def sequence_length(self) -> int:
        return len(self.positions)

    @property
    def fill(self) -> float:
        return self.tokens / (self.samples * self.sequence_length)

    @property
    def unknown_share(self) -> float:
        return self.unknown / self.tokens

    @property
    def masked_share(self) -> float:
        return self.masked / self.tokens

    @property
    def random_next_share(self) -> float:
        return self.labels[2] / self.samples

    @property
    def is_estimate(self) -> bool:
        """Whether repetitions were counted in a fraction of the samples."""
        return self.threshold < 2**64 - 1

    @property
    def counted_samples(self) -> int:
        """The number of samples in which repetitions were counted."""
        return int(self.complete_rows()[:, 2].sum())

    @property
    def repeated_samples(self) -> int:
        return self.samples - self.distinct(1)

    @property
    def distinct_texts(self) -> int:
        return self.distinct(0)

    def distinct(self, column: int) -> int:
        """The number of different hashes in a column of `kept`, for all samples."""
        return round(self.samples * len(np.unique(self.complete_rows()[:, column])) / self.counted_samples)

    def complete_rows(self) -> np.ndarray:
        return self.kept[self.kept[:, 0] <= np.uint64(self.threshold)]


def count_samples(
    ids_nS: np.ndarray,
    lengths_n: np.ndarray,
    positions_nP: np.ndarray,
    originals_nP: np.ndarray,
    labels_n: np.ndarray,
    mask_id: int,
    unknown_id: int = -1,
) -> SampleStatistics:
    """SampleStatistics of samples, given as in the shards."""
    n, length = ids_nS.shape
    row, column = np.nonzero(positions_nP)
    position, original = positions_nP[row, column], originals_nP[row, column]
    seen = ids_nS[row, position]
    as_mask = int((seen == mask_id).sum())
    as_itself = int(((seen == original) & (seen != mask_id)).sum())
    unmasked_nS = ids_nS.copy()
    unmasked_nS[row, position] = original
    weights = np.random.default_rng(HASH_SEED).integers(1, 2**63, 2 * length + 1, dtype=np.uint64) | 1
    label_n = labels_n.astype(np.uint64) * weights[-1]
    text_n = unmasked_nS.astype(np.uint64) @ weights[:length] + label_n
    kept = text_n <= np.partition(text_n, min(KEPT_TEXTS, n) - 1)[min(KEPT_TEXTS, n) - 1]
    is_masked = np.zeros(ids_nS.shape, bool)
    is_masked[row, position] = True
    kept_ids = np.column_stack([ids_nS[kept], is_masked[kept]]).astype(np.uint64)
    samples = kept_ids @ weights[: 2 * length] + label_n[kept]
    statistics = SampleStatistics(
        samples=n,
        tokens=int(lengths_n.sum()),
        unknown=int(((unmasked_nS == unknown_id) & (np.arange(length) < lengths_n[:, None])).sum()),
        masked=len(seen),
        masked_as_mask=as_mask,
        masked_as_itself=as_itself,
        masked_as_other=len(seen) - as_mask - as_itself,
        highest_id=int(max(ids_nS.max(), originals_nP.max(initial=0))),
        labels=np.bincount(labels_n.astype(np.int64) + 1, minlength=3),
        lengths=np.bincount(lengths_n, minlength=length + 1),
        positions=np.bincount(position, minlength=length),
        kept=np.column_stack([text_n[kept], samples, np.ones_like(samples)]),
        threshold=int(text_n[kept].max()) if kept.sum() < n else 2**64 - 1,
    )
    statistics.keep_lowest(KEPT_TEXTS)
    return statistics
