"""Counts what is in samples: lengths, masks and labels.

Legend: n rows, S sequence length, P predictions per sequence.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

MAX_UNKNOWN = 0.1  # share of [UNK] above which the vocabulary does not fit the text


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

    def __add__(self, other: "SampleStatistics") -> "SampleStatistics":
        total = SampleStatistics(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})
        total.highest_id = max(self.highest_id, other.highest_id)
        return total

    def to_json(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "SampleStatistics":
        known = {f.name: values[f.name] for f in fields(cls)}
        return cls(**known | {name: np.array(known[name], int) for name in ("labels", "lengths")})

    @property
    def sequence_length(self) -> int:
        return len(self.lengths) - 1

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


def count_samples(
    ids_nS: np.ndarray,
    lengths_n: np.ndarray,
    positions_nP: np.ndarray,
    originals_nP: np.ndarray,
    labels_n: np.ndarray,
    mask_id: int,
    unknown_id: int = -1,
) -> SampleStatistics:
    """The statistics of samples, given as in the shards."""
    n, length = ids_nS.shape
    row, column = np.nonzero(positions_nP)
    position, original = positions_nP[row, column], originals_nP[row, column]
    seen = ids_nS[row, position]
    as_mask = int((seen == mask_id).sum())
    as_itself = int(((seen == original) & (seen != mask_id)).sum())
    unmasked_nS = ids_nS.copy()
    unmasked_nS[row, position] = original
    return SampleStatistics(
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
    )
