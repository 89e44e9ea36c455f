"""Counts what is in samples: lengths, masks and labels.

Legend: n rows, S sequence length, P masked tokens of a sequence at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

# Share of random next sentences above which their labels teach nothing; it should be a half.
MAX_RANDOM_NEXT = 0.95
NOTED_UNKNOWN = 0.01
NOTED_LOSS = 0.2  # share of the text that is in no sample


@dataclass(kw_only=True)
class SampleStatistics:
    """Sums over samples of one sequence length."""

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
    # Number of samples with label -1 (none), 0 (B follows A), 1 (B is random) [3].
    labels: list[int]
    lengths: list[int]  # number of samples of each length [S + 1]

    @classmethod
    def total(cls, parts: Sequence["SampleStatistics"]) -> "SampleStatistics":
        """The statistics of all `parts` together: sums, and the highest id."""
        totals = {}
        for field in fields(cls):
            values = [getattr(part, field.name) for part in parts]
            totals[field.name] = np.sum(values, axis=0).tolist()
        totals["highest_id"] = max(part.highest_id for part in parts)
        return cls(**totals)

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


def doubts(sequence_length: int, lost: float, unknown: float, random_next: float) -> list[str]:
    """What a user has to know of samples whose text is lost, or teaches nothing.

    lost: share of the text's tokens that are in no sample.
    unknown: share of [UNK].
    random_next: share of the samples.
    """
    problems = []
    if lost >= NOTED_LOSS:
        problems.append(
            f"{lost:.1%} of the text's tokens are lost, since lines are long for samples of "
            f"{sequence_length} tokens, which take a part of each"
        )
    if random_next > MAX_RANDOM_NEXT:
        problems.append("nearly all next sentences are random, from which nothing is learned")
    lines = []
    if problems:
        lines.append(
            f"{', and '.join(problems)}: have one sentence per line, with an empty line between "
            "documents only, or use --no-nsp, with which nothing is lost"
        )
    if unknown >= NOTED_UNKNOWN:
        lines.append(
            f"{unknown:.1%} of the tokens are [UNK], words that the vocabulary lacks: train one "
            "with data/prepare.py vocabulary --tokenizer bpe, which knows all words"
        )
    return lines


def count_samples(
    ids_nS: np.ndarray,
    lengths_n: np.ndarray,
    positions_nP: np.ndarray,
    originals_nP: np.ndarray,
    labels_n: np.ndarray,
    mask_id: int,
    unknown_id: int,
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
        labels=np.bincount(labels_n.astype(np.int64) + 1, minlength=3).tolist(),
        lengths=np.bincount(lengths_n, minlength=length + 1).tolist(),
    )
