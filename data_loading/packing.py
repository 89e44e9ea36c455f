"""Packing of sequences into micro-batches, filler up to fixed sizes, token streams and their padded view.

A token stream is a micro-batch of concatenated sequences without padding, as a dict of arrays:

    input_ids, token_type_ids, position_ids  [T]    all tokens
    cu_seqlens                               [N+1]  cumulative sequence lengths, starting with 0
    and the labels that the data set declares, each with its axis (see `Label`)

Legend: T tokens in the stream, N sequences, M targets (masked tokens), S padded length, n samples to pack, K costs of a
sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from run_config import LoaderConfig

IGNORED_LABEL = -100  # torch's cross-entropy ignores it
CPU_SIZES, COMPILED_SIZES = 32, 4  # see `stream_sizes`
TOKEN_ARRAYS = ("input_ids", "token_type_ids", "position_ids")
STREAM_INPUTS = (*TOKEN_ARRAYS, "cu_seqlens")


class Label(NamedTuple):
    """An array of a data set's streams besides STREAM_INPUTS: its name, its axis (token [T], sequence [N] or
    target [M]), its value for filler, and the shape of one label."""

    name: str
    axis: Literal["token", "sequence", "target"]
    filler: int = IGNORED_LABEL
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class MicroBatchLimits:
    """Maximum sizes of a micro-batch. Streams are filled up to one of `num_sizes` evenly spaced sizes up to each limit.
    Up to COMPILED_SIZES sizes are shared: tokens, sequences and targets have the same share of their limits, so that
    there are few combinations. With None, streams are not filled."""

    tokens: int
    sequences: int
    targets: int
    max_seqlen: int
    num_sizes: int | None = None

    @classmethod
    def of(cls, config: LoaderConfig) -> "MicroBatchLimits":
        limits = cls.for_batch(
            config.batch_size, config.max_seq_length, config.max_predictions_per_seq, config.num_sizes
        )
        sequences = limits.sequences if config.sequences is None else config.sequences
        return replace(limits, sequences=max(sequences, config.batch_size * config.max_sequences_per_sample))

    @classmethod
    def for_batch(
        cls, batch_size: int, max_seqlen: int, targets_per_sequence: int, num_sizes: int | None = None
    ) -> "MicroBatchLimits":
        """Limits for any `batch_size` sequences, and up to four times as many short ones."""
        return cls(batch_size * max_seqlen, 4 * batch_size, batch_size * targets_per_sequence, max_seqlen, num_sizes)

    def padded_sizes(self, *sizes: int) -> list[int]:
        """The sizes to which a stream with these numbers of tokens, sequences and targets is filled up."""
        limits = (self.tokens, self.sequences, self.targets)
        if self.num_sizes > COMPILED_SIZES:
            steps = [max(limit // self.num_sizes, 1) for limit in limits]
            return [
                min(-(-max(size, 1) // step) * step, limit)
                for size, step, limit in zip(sizes, steps, limits, strict=True)
            ]
        shares = [-(-size * self.num_sizes // limit) for size, limit in zip(sizes, limits, strict=True) if limit]
        share = min(max(*shares, 1), self.num_sizes)
        return [-(-limit * share // self.num_sizes) for limit in limits]


@dataclass(frozen=True)
class PassSizes:
    """Sizes that determine, with the model, the memory of a micro-batch's forward and backward pass.

    tokens, sequences, targets: maximum T, N and M; 0 targets without masked tokens. product, residual, mask: bytes per
    element of matrix products, of the residual stream and LayerNorm, and of dropout masks. attention: a key of
    attention.IMPLEMENTATIONS."""

    tokens: int
    sequences: int
    targets: int
    max_seqlen: int
    product: int
    residual: int
    mask: int
    attention: str
    autocast: bool
    device_type: str

    def pairs(self, num_heads: int) -> int:
        """Number of token pairs over all heads and sequences."""
        return self.sequences * num_heads * self.max_seqlen**2


class AttentionMemory(NamedTuple):
    """Bytes that attention saves for the backward pass, and temporary bytes of the backward pass besides the input's
    gradient."""

    kept: int
    backward: int = 0


def stream_sizes(device: torch.device, dtype: torch.dtype, compiled: bool) -> int | None:
    """MicroBatchLimits.num_sizes for a run.

    Compiled graphs have fixed sizes, and each further one costs a compilation. On a CPU, oneDNN builds a kernel for
    each new shape of a 16-bit product, which takes longer than many products. Other products have no cost for new
    sizes.
    """
    if compiled:
        return COMPILED_SIZES
    return CPU_SIZES if device.type == "cpu" and dtype != torch.float32 else None


def pack(costs_nK: np.ndarray, limits: Sequence[int]) -> list[np.ndarray]:
    """Groups samples into micro-batches. Returns row indices of `costs_nK`; each row is in one group.

    costs_nK: K costs per sample, of which the first is its length. limits: maximum of each cost per group.

    Samples are sorted by length, longest first. A group is closed when the next sample does not fit. If any B samples
    fit the limits, there are at most ceil(n / B) groups. Raises ValueError if a single sample exceeds the limits.
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


def pad_stream(
    stream: dict[str, np.ndarray], labels: Sequence[Label], limits: MicroBatchLimits
) -> dict[str, np.ndarray]:
    """Adds filler to `stream`, which has `labels`, up to fixed sizes T, N and M (see MicroBatchLimits).

    Filler tokens are at the end and belong to no sequence. Filler sequences are empty. Raises ValueError if the stream
    has too many sequences.
    """
    cu_seqlens = stream["cu_seqlens"]
    num_targets = max((len(stream[label.name]) for label in labels if label.axis == "target"), default=0)
    tokens, sequences, targets = limits.padded_sizes(len(stream["input_ids"]), len(cu_seqlens) - 1, num_targets)
    if len(cu_seqlens) - 1 > sequences:
        raise ValueError(f"{len(cu_seqlens) - 1} sequences do not fit the {sequences} of the limits")
    filled = {"cu_seqlens": np.pad(cu_seqlens, (0, sequences + 1 - len(cu_seqlens)), mode="edge")}
    for name, axis, filler, _ in (*(Label(name, "token", 0) for name in TOKEN_ARRAYS), *labels):
        values = stream[name]
        size = {"token": tokens, "sequence": sequences, "target": targets}[axis]
        widths = [(0, size - len(values)), *[(0, 0)] * (values.ndim - 1)]
        filled[name] = np.pad(values, widths, constant_values=filler)
    return filled


def filler_stream(labels: Sequence[Label]) -> dict[str, np.ndarray]:
    """A micro-batch without loss: one sequence of one token with filler labels. Used by ranks that have fewer
    micro-batches than others. `labels`: those of a real stream."""
    filler = {name: np.zeros(1, np.int64) for name in TOKEN_ARRAYS} | {"cu_seqlens": np.array([0, 1], np.int32)}
    return filler | {label.name: np.full((1, *label.shape), label.filler) for label in labels}


# --- the model's input ------------------------------------------------------------------------------------------------


class TokenStream(NamedTuple):
    """A token stream as model input. Tokens after `cu_seqlens[-1]` are filler."""

    input_ids: Tensor  # [T]
    token_type_ids: Tensor  # [T]
    position_ids: Tensor  # [T]
    cu_seqlens: Tensor  # [N+1], int32
    max_seqlen: int  # upper bound of the sequence lengths

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @classmethod
    def from_batch(cls, micro_batch: Mapping[str, Tensor], max_seqlen: int) -> "TokenStream":
        """The stream of a micro-batch, without its labels. `max_seqlen` is the longest possible length: reading the
        actual one from the device would synchronize."""
        return cls(*(micro_batch[name] for name in STREAM_INPUTS), max_seqlen)

    @classmethod
    def from_padded(
        cls, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> "tuple[TokenStream, Tensor]":
        """Converts padded input [B, S], whose mask is 1 on real tokens. Returns the stream and the indices [T] of its
        tokens in the flattened input. Raises ValueError for other dimensions or left padding."""
        if input_ids.dim() != 2:
            raise ValueError(f"expected input_ids [B, S] or a TokenStream; got {tuple(input_ids.shape)}")
        real_BS = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        # The pooler reads the first token of each sequence.
        if not bool(real_BS[:, 0].all()):
            raise ValueError("attention_mask must be 1 on the first token of every row: pad on the right")
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        position_BS = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        flat_T = real_BS.flatten().nonzero().squeeze(1)
        tokens = (values.flatten()[flat_T] for values in (input_ids, token_type_ids, position_BS))
        cu_seqlens = F.pad(real_BS.sum(dim=1).cumsum(dim=0), (1, 0)).int()
        return cls(*tokens, cu_seqlens, input_ids.shape[1]), flat_T


# --- the padded view of a stream --------------------------------------------------------------------------------------


def padded_index(cu_seqlens: Tensor, max_seqlen: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """For each position of a padded view: the index of its token in the stream, and whether it is real; both [N, S]."""
    offsets_S = torch.arange(max_seqlen, device=cu_seqlens.device)
    starts_N1, lengths_N1 = cu_seqlens[:-1, None], cu_seqlens.diff()[:, None]
    return (starts_N1 + offsets_S).clamp(max=num_tokens - 1), offsets_S < lengths_N1


def stream_index(cu_seqlens: Tensor, max_seqlen: int, num_tokens: int) -> Tensor:
    """For each token of the stream [T]: its index in the flattened padded view [N * S]; the last index for filler."""
    tokens_T = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence_T = torch.searchsorted(cu_seqlens[1:], tokens_T, right=True)
    place_T = sequence_T * max_seqlen + tokens_T - cu_seqlens[sequence_T]
    return place_T.clamp(max=(len(cu_seqlens) - 1) * max_seqlen - 1)


def to_padded(states: Tensor, flat_T: Tensor, batch: int, length: int) -> Tensor:
    """Scatters the stream's `states` [T, ...] to the indices `flat_T` of a padded tensor [batch, length, ...], zero
    elsewhere."""
    padded = states.new_zeros(batch * length, *states.shape[1:])
    return padded.index_copy(0, flat_T, states).unflatten(0, (batch, length))
