"""What valid shards are: rules that training and `data/prepare.py verify` share.

Legend: n rows, S sequence length, P masked tokens of a sequence at most.
"""

from collections.abc import Sequence

import numpy as np

from bert_recipe.data_loading.hdf5_shards import KEYS, Shard, max_documents
from bert_recipe.utils.errors import UserError

# Attributes that must be the same in all shards of a folder.
COMMON_ATTRIBUTES = (
    "schema_version",
    "vocab_sha256",
    "vocab_size",
    "do_lower_case",
    "strip_accents",
    "next_sentence_prediction",
    "pack_documents",
    "masked_lm_prob",
    "whole_word_mask",
    "short_seq_prob",
    "dupe_factor",
    "random_seed",
)


def check_agreement(shards: Sequence[Shard]) -> None:
    """Raises UserError for two shards of different kinds."""

    def kind_of(shard: Shard) -> dict[str, object]:
        sizes = {
            "sequence length": shard.sequence_length,
            "masked tokens per sequence": shard.max_masked,
        }
        return sizes | {name: shard.attributes.get(name) for name in COMMON_ATTRIBUTES}

    first = kind_of(shards[0])
    for shard in shards[1:]:
        for name, value in kind_of(shard).items():
            if value != first[name]:
                raise UserError(
                    f"shards disagree: {name} is {first[name]} in {shards[0].path} and {value} in "
                    f"{shard.path}: keep shards of different kinds in different folders"
                )


def read_rows(shard: Shard, rows: np.ndarray) -> dict[str, np.ndarray]:
    """The rows of all data sets in int64."""
    return {key: shard.read(key, rows).astype(np.int64) for key in KEYS}


def check_rows(
    shard: Shard, rows: np.ndarray, values: dict[str, np.ndarray], vocab_size: int
) -> None:
    """Raises UserError for a value that no valid row has. values: `read_rows` of `rows` [n]."""
    mask_nS = values["input_mask"]
    lengths_n = np.count_nonzero(values["input_mask"], axis=1)
    documents = (
        max_documents(shard.sequence_length) if shard.attributes.get("pack_documents") else 1
    )
    is_real_nS = np.arange(shard.sequence_length) < lengths_n[:, None]
    steps_nS = np.diff(mask_nS, axis=1, prepend=0)  # 1 where a document begins
    is_hole_nS = (mask_nS > documents) | (is_real_nS != (mask_nS > 0))
    is_hole_nS |= is_real_nS & ((steps_nS < 0) | (steps_nS > 1))
    refuse(
        shard,
        rows,
        is_hole_nS.any(axis=1) | (lengths_n == 0),
        "input_mask is not ones and then zeros",
    )
    labels_nP = np.where(values["masked_lm_positions"] > 0, values["masked_lm_ids"], 0)
    for key, stored, low, limit, name in (
        ("input_ids", values["input_ids"], 0, vocab_size, "the vocabulary's size"),
        ("masked_lm_ids", labels_nP, 0, vocab_size, "the vocabulary's size"),
        ("segment_ids", values["segment_ids"], 0, 2, "two segments"),
        ("masked_lm_positions", values["masked_lm_positions"], 0, lengths_n, "the sample's length"),
        (
            "next_sentence_labels",
            values["next_sentence_labels"],
            -1,
            2,
            "two labels, or -1 for none",
        ),
    ):
        stored = stored.reshape(len(rows), -1)
        limit_n1 = np.broadcast_to(limit, len(rows))[:, None]
        wrong = np.argwhere((stored < low) | (stored >= limit_n1))
        if len(wrong):
            row, column = wrong[0]
            raise UserError(
                f"shard {shard.path}, row {rows[row]}: {key} holds {stored[row, column]}, outside "
                f"[{low}, {limit_n1[row, 0]}), {name}: the shards do not fit this vocabulary and "
                "config, or are damaged"
            )


def refuse(shard: Shard, rows: np.ndarray, is_wrong_n: np.ndarray | np.bool, what: str) -> None:
    """Raises UserError for the first of `rows` that is wrong."""
    if is_wrong_n.any():
        row = rows[is_wrong_n.argmax()]
        raise UserError(
            f"shard {shard.path}, row {row}: {what}: the shard is damaged, make or fetch it again"
        )
