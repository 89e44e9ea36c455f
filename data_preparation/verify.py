"""Checks every row of HDF5 shards, this project's and NVIDIA's, and counts what is in them.

Legend: n rows, S sequence length, P predictions per sequence, M masked tokens.
"""

from collections.abc import Iterator
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

import numpy as np

from data_loading.hdf5_shards import KEYS, Shard, find_shards, max_documents
from data_preparation.findings import Findings, count_samples
from tokenizer import Tokenizer
from utils.errors import UserError
from utils.progress import progress_bar

BLOCK_ROWS = 2048  # rows examined at a time, so that memory is bounded


def verify_folder(folder: Path, tokenizer: Tokenizer | None, executor: Executor) -> Findings:
    """Reads every shard in `folder`. Raises UserError that names the first invalid shard and row."""
    paths = find_shards(folder)
    first = Shard(paths[0])
    mask_id = tokenizer.mask_token_id if tokenizer else guess_mask_id(first)
    for path in paths:
        check_consistency(Shard(path), first, tokenizer)
    special_ids = (tokenizer.cls_token_id, tokenizer.sep_token_id) if tokenizer else None
    vocab_size = tokenizer.vocab_size if tokenizer else first.attributes.get("vocab_size", 2**31)
    examine = partial(examine_shard, mask_id=mask_id, special_ids=special_ids, vocab_size=vocab_size)
    total = empty_findings(first)
    with progress_bar(len(paths), "verify", "shard") as bar:
        for found in executor.map(examine, [path.absolute() for path in paths]):
            total += found
            bar.update()
    if total.samples == 0:
        raise UserError(f"the shards in {folder} contain no sample: make them from more text")
    return total


def empty_findings(shard: Shard) -> Findings:
    length = shard.sequence_length
    return Findings(labels=np.zeros(3, int), lengths=np.zeros(length + 1, int), positions=np.zeros(length, int))


def check_consistency(shard: Shard, first: Shard, tokenizer: Tokenizer | None) -> None:
    ours, theirs = (
        {"sequence length": s.sequence_length, "predictions per sequence": s.predictions_per_sequence}
        | {name: value for name, value in s.attributes.items() if name.startswith("vocab")}
        for s in (shard, first)
    )
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise UserError(
                f"shards disagree: {name} is {theirs.get(name)} in {first.path}, {ours.get(name)} in {shard.path}: "
                "keep shards of different kinds in different folders"
            )
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
    for rows in shard.blocks(BLOCK_ROWS):
        yield {key: shard.read(key, rows).astype(np.int64) for key in KEYS}


def examine_shard(path: Path, mask_id: int, special_ids: tuple[int, int] | None, vocab_size: int) -> Findings:
    shard = Shard(path)
    shard.verify_checksums()
    findings = empty_findings(shard)
    findings.shards, findings.checksummed = 1, int(shard.has_checksums)
    for number, block in enumerate(read_blocks(shard)):
        documents = max_documents(shard.sequence_length) if shard.attributes.get("pack_documents") else 1
        check_rows(path, number * BLOCK_ROWS, block, special_ids, vocab_size, documents)
        lengths = np.count_nonzero(block["input_mask"], axis=1)
        columns = [block[key] for key in ("masked_lm_positions", "masked_lm_ids", "next_sentence_labels")]
        findings += count_samples(block["input_ids"], lengths, *columns, mask_id)
    return findings


def check_rows(
    path: Path,
    first_row: int,
    block: dict[str, np.ndarray],
    special_ids: tuple[int, int] | None,
    vocab_size: int,
    documents: int,
) -> None:
    """Raises UserError for the first row that breaks a rule of the format. documents: maximum number in a row."""
    ids_nS, mask_nS, segments_nS = block["input_ids"], block["input_mask"], block["segment_ids"]
    positions_nP, labels_n = block["masked_lm_positions"], block["next_sentence_labels"]
    n, length = ids_nS.shape
    lengths_n = np.count_nonzero(mask_nS, axis=1)
    steps_nS = np.diff(mask_nS, axis=1, prepend=0)  # 1 where a document begins
    is_real_nS = np.arange(length) < lengths_n[:, None]
    masked_nP = positions_nP > 0
    sorted_nP = np.sort(positions_nP, axis=1)
    ids_fit_nP = (block["masked_lm_ids"] >= 0) & (block["masked_lm_ids"] < vocab_size)
    checks = {
        "input_ids contains an id outside the vocabulary": ((ids_nS < 0) | (ids_nS >= vocab_size)).any(axis=1),
        "input_mask is not ones and then zeros": (
            ((mask_nS > 0) != is_real_nS) | (mask_nS > documents) | (is_real_nS & ((steps_nS < 0) | (steps_nS > 1)))
        ).any(axis=1),
        "the sample is shorter than [CLS] x [SEP]": lengths_n < 3,
        "segment_ids contains something other than 0 and 1": ((segments_nS < 0) | (segments_nS > 1)).any(axis=1),
        "masked_lm_positions points outside the sample": (
            (positions_nP < 0) | (positions_nP >= lengths_n[:, None])
        ).any(axis=1),
        "masked_lm_positions has a position twice": ((np.diff(sorted_nP, axis=1) == 0) & (sorted_nP[:, 1:] > 0)).any(
            axis=1
        ),
        "nothing is masked": ~masked_nP.any(axis=1) & (masked_nP.shape[1] > 0),
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
