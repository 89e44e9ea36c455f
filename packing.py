"""Packing: which sequences share a micro-batch, filler up to fixed sizes, and the padded view of a token stream.

A token stream is a micro-batch of whole sequences laid end to end without padding, as a dict of arrays:

    input_ids, token_type_ids, position_ids  [T]    all tokens
    cu_seqlens                               [N+1]  where each sequence starts; the last entry is T
    mlm_positions, mlm_labels                [M]    pre-training: masked tokens, as places in the stream
    and one label per sequence               [N]    for example nsp_labels, or start_positions and end_positions

Legend: T tokens in the stream, N sequences, M masked tokens, S padded length, n samples to pack, K costs of a sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

IGNORED_LABEL = -100  # torch's cross-entropy ignores it
TOKEN_ARRAYS = ("input_ids", "token_type_ids", "position_ids")
TARGET_ARRAYS = ("mlm_positions", "mlm_labels")


@dataclass(frozen=True)
class MicroBatchLimits:
    """The most that a micro-batch may hold. With `fixed`, streams are filled up to exactly these sizes."""

    tokens: int
    sequences: int
    targets: int
    max_seqlen: int
    fixed: bool = False

    @classmethod
    def for_batch(
        cls, batch_size: int, max_seqlen: int, targets_per_sequence: int, fixed: bool = False
    ) -> "MicroBatchLimits":
        """Room for any `batch_size` sequences, and for up to four times as many short ones."""
        return cls(batch_size * max_seqlen, 4 * batch_size, batch_size * targets_per_sequence, max_seqlen, fixed)


def pack(costs_nK: np.ndarray, limits: Sequence[int]) -> list[np.ndarray]:
    """Groups samples into micro-batches. Each group holds rows of `costs_nK`, and each row is in one group.

    costs_nK: K costs per sample, the first of them its length; limits: the most of each cost per group.

    Samples are taken longest first, so neighbours have similar lengths. A group is closed when the next sample does not
    fit. So where any B samples fit the limits, n samples make at most ceil(n / B) groups. Raises ValueError if a
    sample exceeds the limits by itself.
    """
    order = np.argsort(-costs_nK[:, 0], kind="stable")
    totals = np.cumsum(costs_nK[order], axis=0)
    if (costs_nK > np.asarray(limits)).any():
        raise ValueError(f"a sample of size {costs_nK.max(axis=0)} does not fit a micro-batch of {tuple(limits)}")
    groups, start, before = [], 0, np.zeros(costs_nK.shape[1], dtype=totals.dtype)
    while start < len(order):
        fits = [np.searchsorted(totals[:, k], before[k] + limits[k], side="right") for k in range(costs_nK.shape[1])]
        end = int(min(fits))
        groups.append(order[start:end])
        start, before = end, totals[end - 1]
    return groups


def pad_stream(stream: dict[str, np.ndarray], limits: MicroBatchLimits) -> dict[str, np.ndarray]:
    """Fills `stream` up to fixed sizes, for graphs that are compiled or captured once: T = limits.tokens,
    N = limits.sequences + ceil(T / max_seqlen), M = limits.targets.

    Filler tokens form sequences of their own, of at most `max_seqlen` tokens. Filler labels are `IGNORED_LABEL`. Raises
    ValueError if the stream holds too many sequences.
    """
    filled = dict(stream)
    tokens, max_seqlen = limits.tokens, limits.max_seqlen
    real_tokens = len(stream["input_ids"])
    sequences = limits.sequences + -(-tokens // max_seqlen)
    for name in ("input_ids", "token_type_ids"):
        filled[name] = np.pad(stream[name], (0, tokens - real_tokens))
    filler_positions = np.arange(tokens - real_tokens) % max_seqlen
    filled["position_ids"] = np.concatenate([stream["position_ids"], filler_positions])
    starts = np.arange(real_tokens + max_seqlen, tokens + max_seqlen, max_seqlen).clip(max=tokens)
    ends = np.concatenate([stream["cu_seqlens"], starts])
    if len(ends) > sequences + 1:
        raise ValueError(f"{len(ends) - 1} sequences do not fit the {sequences} of a fixed-size stream")
    filled["cu_seqlens"] = np.pad(ends, (0, sequences + 1 - len(ends)), constant_values=tokens).astype(np.int32)
    for name in stream.keys() - {*TOKEN_ARRAYS, "cu_seqlens"}:
        size = limits.targets if name in TARGET_ARRAYS else sequences
        filler = 0 if name == "mlm_positions" else IGNORED_LABEL
        filled[name] = np.pad(stream[name], (0, size - len(stream[name])), constant_values=filler)
    return filled


def filler_stream(stream_names: Sequence[str]) -> dict[str, np.ndarray]:
    """A stream of one sequence of one token whose labels all are `IGNORED_LABEL`: a micro-batch without loss, for a
    rank that has none left while others still have. `stream_names` are the arrays of a real stream."""
    filler = {name: np.zeros(1, np.int64) for name in stream_names}
    for name in filler.keys() - {*TOKEN_ARRAYS, "mlm_positions"}:
        filler[name] = np.full(1, IGNORED_LABEL)
    return filler | {"cu_seqlens": np.array([0, 1], np.int32)}


# --- the padded view of a stream --------------------------------------------------------------------------------------


def padded_index(cu_seqlens: Tensor, max_seqlen: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """For each place of a padded view [N, S]: the token of the stream, and whether it is a real token; both [N, S]."""
    offsets_S = torch.arange(max_seqlen, device=cu_seqlens.device)
    starts_N1, lengths_N1 = cu_seqlens[:-1, None], cu_seqlens.diff()[:, None]
    return (starts_N1 + offsets_S).clamp(max=num_tokens - 1), offsets_S < lengths_N1


def stream_index(cu_seqlens: Tensor, max_seqlen: int, num_tokens: int) -> Tensor:
    """For each token of the stream: its place in a padded view that is flattened to [N * S]; [T]."""
    tokens_T = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence_T = torch.searchsorted(cu_seqlens[1:], tokens_T, right=True)
    return sequence_T * max_seqlen + tokens_T - cu_seqlens[sequence_T]


def to_padded(states: Tensor, flat_T: Tensor, batch: int, length: int) -> Tensor:
    """Puts the stream's `states` [T, ...] at the places `flat_T` of a padded tensor [batch, length, ...], zero
    elsewhere."""
    padded = states.new_zeros(batch * length, *states.shape[1:])
    return padded.index_copy(0, flat_T, states).unflatten(0, (batch, length))
