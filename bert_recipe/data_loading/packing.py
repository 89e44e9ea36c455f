"""Packing of sequences into micro-batches, and filler up to rounded sizes.

A micro-batch is a token stream (model/token_stream.py) as a dict of arrays: the arrays of
STREAM_INPUTS, and the labels that the data set declares, each with its axis (see `Label`).

Legend: T tokens in the stream, N sequences, M masked tokens, n samples to pack, K costs of a
sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch

from bert_recipe.config import LoaderConfig
from bert_recipe.model.kernels.linear import uses_onednn
from bert_recipe.model.token_stream import IGNORED_LABEL, TOKEN_ARRAYS

CPU_SIZES = 32  # see `stream_sizes`
MIN_SIZE_STEP = 16  # between two sizes
# In a compiled graph, a size that was 0 or 1 when it was traced is a constant.
MIN_DYNAMIC_SIZE = 2


class Label(NamedTuple):
    """An array of a data set's streams besides STREAM_INPUTS: its name, its axis (token [T],
    sequence [N] or masked [M]), its value for filler, and the shape of one label.
    """

    name: str
    axis: Literal["token", "sequence", "masked"]
    filler: int = IGNORED_LABEL
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class MicroBatchLimits:
    """Maximum sizes of a micro-batch. Streams are filled up to one of `num_sizes` evenly spaced
    sizes between a power of two and the next, so that filler is a small part of any stream. With
    None, streams are not filled.

    is_compiled: for a compiled model, whose graphs serve all sizes from MIN_DYNAMIC_SIZE on, and
        have `max_seqlen` as a constant.
    fills_sequences: whether the number of sequences is rounded, too. In the last layer, first
        tokens come before the masked ones, so that filler among them moves the dropout masks of the
        others.
    """

    tokens: int
    sequences: int
    labelled_tokens: int
    max_seqlen: int
    num_sizes: int | None = None
    is_compiled: bool = False
    fills_sequences: bool = True

    @classmethod
    def of(
        cls,
        config: LoaderConfig,
        num_sizes: int | None = None,
        sequences_per_sample: int = 1,
        is_compiled: bool = False,
    ) -> "MicroBatchLimits":
        """Limits of the flags alone."""
        batch_size, max_seqlen = config.batch_size, config.max_seq_length
        limits = cls.for_batch(
            batch_size, max_seqlen, config.max_masked, num_sizes, sequences_per_sample
        )
        return replace(limits, is_compiled=is_compiled)

    @classmethod
    def for_batch(
        cls,
        batch_size: int,
        max_seqlen: int,
        labelled_per_sample: int,
        num_sizes: int | None = None,
        sequences_per_sample: int = 1,
    ) -> "MicroBatchLimits":
        """Limits for any `batch_size` samples, and up to four times as many short ones.
        labelled_per_sample, sequences_per_sample: the most of one.
        """
        return cls(
            batch_size * max_seqlen,
            batch_size * max(4, sequences_per_sample),
            batch_size * labelled_per_sample,
            max_seqlen,
            num_sizes,
        )

    def padded_sizes(self, *sizes: int) -> list[int]:
        """The sizes to which a stream with these numbers of tokens, sequences and labelled tokens
        is filled up.
        """
        padded = list(sizes)
        if self.num_sizes is not None:
            limits = (self.tokens, self.sequences, self.labelled_tokens)
            padded = []
            for size, limit in zip(sizes, limits, strict=True):
                # Up to a multiple of a step, so that there are `num_sizes` sizes per power of two.
                step = 2 ** size.bit_length() // (2 * self.num_sizes)
                step = max(step, MIN_SIZE_STEP)
                num_steps = -(-max(size, 1) // step)
                padded.append(min(num_steps * step, limit))
            if not self.fills_sequences:
                padded[1] = sizes[1]
        if self.is_compiled:
            padded = [max(size, MIN_DYNAMIC_SIZE) for size in padded]
        return padded


def stream_sizes(device: torch.device, dtype: torch.dtype) -> int | None:
    """MicroBatchLimits.num_sizes for a run: on a CPU, oneDNN builds a kernel for each new shape of
    a product, which takes longer than many products, and half a megabyte.
    """
    is_onednn = dtype != torch.float32 or uses_onednn()
    return CPU_SIZES if device.type == "cpu" and is_onednn else None


def pack(costs_nK: np.ndarray, limits: Sequence[int]) -> list[np.ndarray]:
    """Groups samples into micro-batches. Returns row indices of `costs_nK`; each row is in one
    group.

    costs_nK: K costs per sample, of which the first is its length.
    limits: maximum of each cost per group.

    Samples are sorted by length, longest first. A group is closed when the next sample does not
    fit. If any B samples fit the limits, there are at most ceil(n / B) groups. Raises ValueError if
    a single sample exceeds the limits.
    """
    order = np.argsort(-costs_nK[:, 0], kind="stable")
    totals = np.cumsum(costs_nK[order], axis=0)
    if (costs_nK > np.asarray(limits)).any():
        raise ValueError(
            f"a sample of size {costs_nK.max(axis=0)} does not fit a micro-batch of {tuple(limits)}"
        )
    groups = []
    start = 0
    total_before = np.zeros(costs_nK.shape[1], dtype=totals.dtype)  # of the groups before
    while start < len(order):
        end_by_cost = [
            np.searchsorted(totals[:, k], total_before[k] + limits[k], side="right")
            for k in range(costs_nK.shape[1])
        ]
        end = int(min(end_by_cost))
        groups.append(order[start:end])
        start = end
        total_before = totals[end - 1]
    return groups


def pad_stream(
    stream: dict[str, np.ndarray], labels: Sequence[Label], limits: MicroBatchLimits
) -> dict[str, np.ndarray]:
    """Adds filler to `stream`, which has `labels`, up to the sizes T, N and M of `limits` (see
    MicroBatchLimits). Filler tokens are at the end and belong to no sequence. Filler sequences are
    empty.
    """
    cu_seqlens = stream["cu_seqlens"]
    num_masked = max(
        (len(stream[label.name]) for label in labels if label.axis == "masked"), default=0
    )
    tokens, sequences, masked = limits.padded_sizes(
        len(stream["input_ids"]), len(cu_seqlens) - 1, num_masked
    )
    size_of_axis = {"token": tokens, "sequence": sequences, "masked": masked}
    filled = {"cu_seqlens": np.pad(cu_seqlens, (0, sequences + 1 - len(cu_seqlens)), mode="edge")}
    token_arrays = [Label(name, "token", 0) for name in TOKEN_ARRAYS]
    for array in (*token_arrays, *labels):
        values = stream[array.name]
        widths = [(0, 0)] * values.ndim
        widths[0] = (0, size_of_axis[array.axis] - len(values))
        filled[array.name] = np.pad(values, widths, constant_values=array.filler)
    return filled


def filler_stream(labels: Sequence[Label]) -> dict[str, np.ndarray]:
    """A micro-batch without loss, for ranks with fewer: a sequence of MIN_DYNAMIC_SIZE tokens.
    `labels`: those of a real stream.
    """
    tokens = MIN_DYNAMIC_SIZE
    filler = {name: np.zeros(tokens, np.int64) for name in TOKEN_ARRAYS}
    filler["cu_seqlens"] = np.array([0, tokens], np.int32)
    for label in labels:
        count = tokens if label.axis == "token" else 1
        filler[label.name] = np.full((count, *label.shape), label.filler)
    return filler
