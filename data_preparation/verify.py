"""Checks every row of HDF5 shards, this project's and NVIDIA's, and counts what is in them.

Legend: n rows, S sequence length, P predictions per sequence, M masked tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import partial, reduce
from pathlib import Path

import numpy as np

from data_loading.hdf5_shards import KEYS, Shard, find_shards
from data_preparation.parallel import ordered_map
from tokenizer import BertTokenizer
from utils.errors import UserError
from utils.progress import progress_bar

BLOCK_ROWS = 2048  # rows examined at a time, so that memory is bounded
HASH_SEED = 20_181_011  # of the random weights: the hash of a row is a weighted sum modulo 2^64


@dataclass(kw_only=True)
class Findings:
    """Sums over shards of one sequence length; `+` adds two."""

    shards: int = 0
    checksummed: int = 0  # shards with a checksum of every data set
    samples: int = 0
    tokens: int = 0
    masked: int = 0
    masked_as_mask: int = 0  # replaced by [MASK]
    masked_as_itself: int = 0  # kept
    masked_as_other: int = 0  # replaced by a random token
    labels: np.ndarray  # number of samples with label -1 (none), 0 (B follows A), 1 (B is random) [3]
    lengths: np.ndarray  # number of samples of each length [S + 1]
    positions: np.ndarray  # number of masked tokens at each position [S]
    highest_id: int = 0
    sample_hashes: list[np.ndarray] = field(default_factory=list, repr=False)  # of the samples, one [n] per block
    text_hashes: list[np.ndarray] = field(default_factory=list, repr=False)  # of the samples without their masks

    def __add__(self, other: "Findings") -> "Findings":
        total = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Findings(**total | {"highest_id": max(self.highest_id, other.highest_id)})

    @property
    def sequence_length(self) -> int:
        return len(self.positions)

    @property
    def fill(self) -> float:
        return self.tokens / (self.samples * self.sequence_length)

    @property
    def masked_share(self) -> float:
        return self.masked / self.tokens

    @property
    def random_next_share(self) -> float:
        return self.labels[2] / self.samples

    @property
    def repeated_samples(self) -> int:
        return self.samples - len(np.unique(np.concatenate(self.sample_hashes)))

    @property
    def distinct_texts(self) -> int:
        return len(np.unique(np.concatenate(self.text_hashes)))


def verify_folder(
    folder: Path,
    tokenizer: BertTokenizer | None,
    workers: int = 1,
) -> Findings:
    """Reads every shard in `folder`. Raises UserError that names the first invalid shard and row."""
    paths = find_shards(folder)
    first = Shard(paths[0])
    mask_id = tokenizer.mask_token_id if tokenizer else guess_mask_id(first)
    for path in paths:
        check_consistency(Shard(path), first, tokenizer)
    special_ids = (tokenizer.cls_token_id, tokenizer.sep_token_id) if tokenizer else None
    vocab_size = tokenizer.vocab_size if tokenizer else first.attributes.get("vocab_size", 2**31)
    examine = partial(examine_shard, mask_id=mask_id, special_ids=special_ids, vocab_size=vocab_size)
    with progress_bar(len(paths), "verify", "shard") as bar:
        findings = []
        for found in ordered_map(examine, paths, min(workers, len(paths))):
            findings.append(found)
            bar.update()
    total = reduce(Findings.__add__, findings)
    if total.samples == 0:
        raise UserError(f"the shards in {folder} contain no sample: make them from more text")
    return total


def check_consistency(shard: Shard, first: Shard, tokenizer: BertTokenizer | None) -> None:
    if (shard.sequence_length, shard.predictions_per_sequence) != (
        first.sequence_length,
        first.predictions_per_sequence,
    ):
        raise UserError(
            f"shards disagree: {first.path} has length {first.sequence_length} and {first.predictions_per_sequence} "
            f"predictions, {shard.path} has {shard.sequence_length} and {shard.predictions_per_sequence}: "
            "keep shards of different kinds in different folders"
        )
    for key in sorted(first.attributes.keys() | shard.attributes.keys()):
        if key.startswith("vocab") and first.attributes.get(key) != shard.attributes.get(key):
            raise UserError(f"shards disagree: {key} differs between {first.path} and {shard.path}: make them again")
    made_with = shard.attributes.get("vocab_sha256")
    if tokenizer and made_with and made_with != tokenizer.vocab_sha256:
        raise UserError(
            f"shard {shard.path} was made with another vocabulary (SHA-256 {made_with[:12]}...) than "
            f"{tokenizer.vocab_file} ({tokenizer.vocab_sha256[:12]}...): use the one it was made with"
        )


def guess_mask_id(shard: Shard) -> int:
    """The most frequent id at masked positions: without a vocabulary, the best guess of the id of [MASK]."""
    for block in read_blocks(shard):
        masked_nP = block["masked_lm_positions"] > 0
        if masked_nP.any():
            found = np.take_along_axis(block["input_ids"], block["masked_lm_positions"].clip(0), axis=1)[masked_nP]
            return int(np.bincount(found.clip(0)).argmax())
    return -1


def read_blocks(shard: Shard) -> Iterator[dict[str, np.ndarray]]:
    """The six data sets, `BLOCK_ROWS` rows at a time, in int64."""
    for start in range(0, len(shard), BLOCK_ROWS):
        yield {key: shard.arrays[key][start : start + BLOCK_ROWS].astype(np.int64) for key in KEYS}


def examine_shard(path: Path, mask_id: int, special_ids: tuple[int, int] | None, vocab_size: int) -> Findings:
    shard = Shard(path)
    length, predictions = shard.sequence_length, shard.predictions_per_sequence
    weights = np.random.default_rng(HASH_SEED).integers(1, 2**63, 3 * length + predictions + 1, dtype=np.uint64) | 1
    shard.verify_checksums()
    findings = Findings(
        shards=1,
        checksummed=int(shard.has_checksums),
        labels=np.zeros(3, int),
        lengths=np.zeros(length + 1, int),
        positions=np.zeros(length, int),
    )
    for number, block in enumerate(read_blocks(shard)):
        check_rows(path, number * BLOCK_ROWS, block, special_ids, vocab_size)
        findings += examine_block(block, mask_id, weights)
    return findings


def check_rows(
    path: Path, first_row: int, block: dict[str, np.ndarray], special_ids: tuple[int, int] | None, vocab_size: int
) -> None:
    """Raises UserError for the first row that breaks a rule of the format."""
    ids_nS, mask_nS, segments_nS = block["input_ids"], block["input_mask"], block["segment_ids"]
    positions_nP, labels_n = block["masked_lm_positions"], block["next_sentence_labels"]
    n, length = ids_nS.shape
    lengths_n = mask_nS.sum(axis=1)
    masked_nP = positions_nP > 0
    sorted_nP = np.sort(positions_nP, axis=1)
    ids_fit_nP = (block["masked_lm_ids"] >= 0) & (block["masked_lm_ids"] < vocab_size)
    checks = {
        "input_ids contains an id outside the vocabulary": ((ids_nS < 0) | (ids_nS >= vocab_size)).any(axis=1),
        "input_mask is not ones and then zeros": (mask_nS != (np.arange(length) < lengths_n[:, None])).any(axis=1),
        "the sample is shorter than [CLS] x [SEP]": lengths_n < 3,
        "segment_ids contains something other than 0 and 1": ((segments_nS < 0) | (segments_nS > 1)).any(axis=1),
        "masked_lm_positions points outside the sample": (
            (positions_nP < 0) | (positions_nP >= lengths_n[:, None])
        ).any(axis=1),
        "masked_lm_positions has a position twice": ((np.diff(sorted_nP, axis=1) == 0) & (sorted_nP[:, 1:] > 0)).any(
            axis=1
        ),
        "nothing is masked": ~masked_nP.any(axis=1),
        "masked_lm_ids contains an id outside the vocabulary": (masked_nP & ~ids_fit_nP).any(axis=1),
        "next_sentence_labels is not 0 or 1": (labels_n < -1) | (labels_n > 1),
    }
    if special_ids:
        cls_id, sep_id = special_ids
        last_n = ids_nS[np.arange(n), lengths_n.clip(1, length) - 1]
        masked_special_nP = masked_nP & np.isin(block["masked_lm_ids"], special_ids)
        checks |= {
            "the sample does not begin with [CLS] and end with [SEP]": (ids_nS[:, 0] != cls_id) | (last_n != sep_id),
            "[CLS] or [SEP] is masked": masked_special_nP.any(axis=1),
        }
    for what, bad_n in checks.items():
        if bad_n.any():
            row = first_row + int(bad_n.argmax())
            raise UserError(f"shard {path}, row {row}: {what}: the shard is damaged, make or download it again")


def examine_block(block: dict[str, np.ndarray], mask_id: int, weights: np.ndarray) -> Findings:
    ids_nS, positions_nP, original_nP = block["input_ids"], block["masked_lm_positions"], block["masked_lm_ids"]
    n, length = ids_nS.shape
    lengths_n = block["input_mask"].sum(axis=1)
    masked_nP = positions_nP > 0
    seen_M = np.take_along_axis(ids_nS, positions_nP, axis=1)[masked_nP]
    original_M = original_nP[masked_nP]
    as_mask = int((seen_M == mask_id).sum())
    as_itself = int(((seen_M == original_M) & (seen_M != mask_id)).sum())
    unmasked_nS = ids_nS.copy()
    unmasked_nS[np.nonzero(masked_nP)[0], positions_nP[masked_nP]] = original_M
    rest = np.column_stack([block["segment_ids"], block["next_sentence_labels"]])
    sample_n = hash_rows(np.column_stack([ids_nS, unmasked_nS, rest, positions_nP]), weights)
    text_n = hash_rows(np.column_stack([unmasked_nS, rest]), weights)
    return Findings(
        samples=n,
        tokens=int(lengths_n.sum()),
        masked=len(seen_M),
        masked_as_mask=as_mask,
        masked_as_itself=as_itself,
        masked_as_other=len(seen_M) - as_mask - as_itself,
        labels=np.bincount(block["next_sentence_labels"] + 1, minlength=3),
        lengths=np.bincount(lengths_n, minlength=length + 1),
        positions=np.bincount(positions_nP[masked_nP], minlength=length),
        highest_id=int(max(ids_nS.max(), original_nP.max(initial=0))),
        sample_hashes=[sample_n],
        text_hashes=[text_n],
    )


def hash_rows(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return values.astype(np.uint64) @ weights[: values.shape[1]]
