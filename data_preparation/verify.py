"""Checks every row of HDF5 shards, this project's and NVIDIA's, and counts what is in them.

Legend: n rows, S sequence length, P predictions per sequence, M masked tokens.
"""

from concurrent.futures import Executor
from functools import partial
from pathlib import Path

import numpy as np

from data_loading.hdf5_shards import Shard, find_shards
from data_loading.row_rules import check_agreement, check_rows, read_rows, refuse
from data_preparation.findings import Findings, count_samples
from tokenizer import Tokenizer
from utils.errors import UserError
from utils.progress import progress_bar

BLOCK_ROWS = 2048  # rows examined at a time, so that memory is bounded


def verify_folder(folder: Path, tokenizer: Tokenizer | None, executor: Executor) -> Findings:
    """Reads every shard in `folder`. Raises UserError that names the first invalid shard and row."""
    paths = find_shards(folder)
    shards = [Shard(path) for path in paths]
    check_agreement(shards)
    first, made_with = shards[0], shards[0].attributes.get("vocab_sha256")
    if tokenizer and made_with and made_with != tokenizer.vocab_sha256:
        raise UserError(
            f"shard {first.path} was made with another vocabulary (SHA-256 {made_with[:12]}...) than "
            f"{tokenizer.vocab_file} ({tokenizer.vocab_sha256[:12]}...): use the one it was made with"
        )
    mask_id = tokenizer.mask_token_id if tokenizer else guess_mask_id(first)
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


def guess_mask_id(shard: Shard) -> int:
    """The most frequent id at masked positions: without a vocabulary, the best guess of the id of [MASK]."""
    for rows in shard.blocks(BLOCK_ROWS):
        block = read_rows(shard, rows)
        masked_nP = block["masked_lm_positions"] > 0
        if masked_nP.any():
            found = np.take_along_axis(block["input_ids"], block["masked_lm_positions"].clip(0), axis=1)[masked_nP]
            return int(np.bincount(found.clip(0)).argmax())
    return -1


def examine_shard(path: Path, mask_id: int, special_ids: tuple[int, int] | None, vocab_size: int) -> Findings:
    shard = Shard(path)
    shard.verify_checksums()
    findings = empty_findings(shard)
    findings.shards, findings.checksummed = 1, int(shard.has_checksums)
    for rows in shard.blocks(BLOCK_ROWS):
        block = read_rows(shard, rows)
        check_rows(shard, rows, block, vocab_size)
        check_samples(shard, rows, block, special_ids)
        lengths = np.count_nonzero(block["input_mask"], axis=1)
        columns = [block[key] for key in ("masked_lm_positions", "masked_lm_ids", "next_sentence_labels")]
        findings += count_samples(block["input_ids"], lengths, *columns, mask_id)
    return findings


def check_samples(
    shard: Shard, rows: np.ndarray, values: dict[str, np.ndarray], special_ids: tuple[int, int] | None
) -> None:
    """Raises UserError for rows that training would read, but that are no samples."""
    ids_nS, positions_nP = values["input_ids"], values["masked_lm_positions"]
    lengths_n = np.count_nonzero(values["input_mask"], axis=1)
    masked_nP, sorted_nP = positions_nP > 0, np.sort(positions_nP, axis=1)
    is_twice_n = ((np.diff(sorted_nP, axis=1) == 0) & (sorted_nP[:, 1:] > 0)).any(axis=1)
    refuse(shard, rows, lengths_n < 3, "the sample is shorter than [CLS] x [SEP]")
    refuse(shard, rows, is_twice_n, "masked_lm_positions has a position twice")
    refuse(shard, rows, ~masked_nP.any(axis=1) & (masked_nP.shape[1] > 0), "nothing is masked")
    if special_ids:
        cls_id, sep_id = special_ids
        has_ends_n = (ids_nS[:, 0] == cls_id) & (ids_nS[np.arange(len(rows)), lengths_n - 1] == sep_id)
        refuse(shard, rows, ~has_ends_n, "the sample does not begin with [CLS] and end with [SEP]")
        is_special_n = (masked_nP & np.isin(values["masked_lm_ids"], special_ids)).any(axis=1)
        refuse(shard, rows, is_special_n, "[CLS] or [SEP] is masked")
