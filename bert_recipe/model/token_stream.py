"""The model's input: a token stream, its padded view, and batches of streams.

A token stream is a micro-batch of concatenated sequences without padding:

    input_ids, token_type_ids, position_ids  [T]    all tokens
    cu_seqlens                               [N+1]  cumulative sequence lengths, starting with 0

and the labels that a data set declares (data_loading/packing.py).

Legend: T tokens in the stream, N sequences, M masked tokens, S padded length.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED_LABEL = -100  # torch's cross-entropy ignores it
TOKEN_ARRAYS = ("input_ids", "token_type_ids", "position_ids")
STREAM_INPUTS = (*TOKEN_ARRAYS, "cu_seqlens")
HOST_VALUES = ("num_sequences", "max_seqlen")
# The arrays of a token stream, and values on the host: the number of sequences before filler, 0 in
# a micro-batch without loss; and `max_seqlen`, unless it has filler.
MicroBatch = dict[str, Any]


class TokenStream(NamedTuple):
    """A token stream as model input: N whole sequences end to end, T tokens, without padding.
    Tokens after `cu_seqlens[-1]` are filler. Sequence n has the tokens from `cu_seqlens[n]` to
    `cu_seqlens[n + 1]`; its positions start at 0. Made by `from_sequences` or `from_padded`.
    """

    input_ids: Tensor  # [T]
    token_type_ids: Tensor  # [T]
    position_ids: Tensor  # [T]
    cu_seqlens: Tensor  # [N+1], int32
    max_seqlen: int  # upper bound of the sequence lengths
    has_filler: bool = True  # there may be filler

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @classmethod
    def from_batch(cls, micro_batch: Mapping[str, Any], max_seqlen: int) -> "TokenStream":
        """The stream of a micro-batch, without its labels. `max_seqlen` is the longest possible
        length, for streams with filler; others bring their own, which is read before they go to
        the device.
        """
        longest = micro_batch.get("max_seqlen")
        ids_T, types_T, positions_T, cu_seqlens = (micro_batch[name] for name in STREAM_INPUTS)
        return cls(
            ids_T,
            types_T,
            positions_T,
            cu_seqlens,
            longest or max_seqlen,
            longest is None,
        )

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
        token_type_ids: Sequence[Sequence[int]] | None = None,
    ) -> "TokenStream":
        """The stream of N sequences of token ids, each with its special tokens. Raises ValueError
        for an empty sequence, and for types of other lengths.

        token_type_ids: of the tokens, such as 0 for the first text of a pair and 1 for the second;
            by default 0.

            stream = TokenStream.from_sequences([[101, 7592, 102], [101, 2088, 999, 102]])
            logits = model(stream).logits  # [N, C]
        """
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        if not len(lengths) or not bool(lengths.min() > 0):
            raise ValueError("expected sequences of at least one token each")
        ids_T = torch.tensor([token for sequence in sequences for token in sequence])
        types_T = torch.zeros_like(ids_T)
        if token_type_ids is not None:
            if [len(types) for types in token_type_ids] != lengths.tolist():
                raise ValueError("expected a token type for each token of each sequence")
            types_T = torch.tensor([kind for types in token_type_ids for kind in types])
        positions_T = torch.cat([torch.arange(length) for length in lengths.tolist()])
        cu_seqlens = F.pad(lengths.cumsum(dim=0), (1, 0)).int()
        return cls(
            ids_T.to(device),
            types_T.to(device),
            positions_T.to(device),
            cu_seqlens.to(device),
            max_seqlen=int(lengths.max()),
            has_filler=False,
        )

    @classmethod
    def from_padded(
        cls,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> "tuple[TokenStream, Tensor]":
        """Converts padded input [B, S], whose mask is 1 on real tokens. Returns the stream and the
        indices [T] of its tokens in the flattened input. Raises ValueError for other dimensions or
        left padding.
        """
        if input_ids.dim() != 2:
            raise ValueError(
                f"expected input_ids [B, S] or a TokenStream; got {tuple(input_ids.shape)}"
            )
        real_BS = (
            torch.ones_like(input_ids, dtype=torch.bool)
            if attention_mask is None
            else attention_mask.bool()
        )
        if not bool(real_BS[:, 0].all()):  # the pooler reads the first token of each sequence
            raise ValueError(
                "attention_mask must be 1 on the first token of every row: pad on the right"
            )
        types_BS = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        positions_BS = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(
            input_ids
        )
        cu_seqlens = F.pad(real_BS.sum(dim=1).cumsum(dim=0), (1, 0)).int()
        stream = cls(
            input_ids[real_BS],
            types_BS[real_BS],
            positions_BS[real_BS],
            cu_seqlens,
            input_ids.shape[1],
            has_filler=False,
        )
        return stream, real_BS.flatten().nonzero()[:, 0]


class BatchCounts(NamedTuple):
    """What losses are divided by: the counts of a global batch or of a data set, over all ranks.

    sequences: samples of the data set.
    tokens: all of them, without filler.
    labelled_tokens: in pre-training the masked ones.
    """

    sequences: float
    tokens: float
    labelled_tokens: float


@dataclass(frozen=True)
class StepBatch:
    """One rank's part of a global batch. `lengths` and `num_labelled` [n]: tokens and labelled ones
    of each sample.
    """

    first_position: int
    micro_batches: list[MicroBatch]
    lengths: np.ndarray
    num_labelled: np.ndarray
    make_filler: Callable[[], MicroBatch]
    metrics: dict[str, float]

    @property
    def counts(self) -> BatchCounts:
        """Of this rank's part."""
        return BatchCounts(len(self.lengths), self.lengths.sum(), self.num_labelled.sum())

    @property
    def sequence_lengths(self) -> np.ndarray:
        """The length of each sequence in the micro-batches, without filler; a sample may be several
        sequences.
        """
        lengths = [np.diff(micro_batch["cu_seqlens"].numpy()) for micro_batch in self.micro_batches]
        return np.concatenate([np.zeros(0, np.int32), *(values[values > 0] for values in lengths)])

    def filled_to(self, count: int) -> list[MicroBatch]:
        """The micro-batches, padded to `count` with micro-batches without loss."""
        missing = count - len(self.micro_batches)
        if missing <= 0:
            return self.micro_batches
        return self.micro_batches + [self.make_filler()] * missing

    def first_without_labels(self) -> MicroBatch:
        """The first micro-batch with filler for its labels, so without loss."""
        filler = self.make_filler()
        first = self.micro_batches[0] if self.micro_batches else filler
        labels = {
            name: value
            for name, value in filler.items()
            if name not in (*STREAM_INPUTS, *HOST_VALUES)
        }
        labels = {
            name: torch.full_like(first[name], value.flatten()[0]) for name, value in labels.items()
        }
        return first | labels | {"num_sequences": 0}


def to_device(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in micro_batch.items()
    }


def padded_index(cu_seqlens: Tensor, max_seqlen: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """For each position of a padded view: the index of its token in the stream, and whether it is
    real; both [N, S].
    """
    offsets_S = torch.arange(max_seqlen, device=cu_seqlens.device)
    starts_N1 = cu_seqlens[:-1, None]
    lengths_N1 = cu_seqlens.diff()[:, None]
    is_real_NS = offsets_S < lengths_N1
    return (starts_N1 + offsets_S).clamp(max=num_tokens - 1), is_real_NS


def stream_index(cu_seqlens: Tensor, max_seqlen: int, num_tokens: int) -> Tensor:
    """For each token of the stream [T]: its index in the flattened padded view [N * S]; the last
    index for filler.
    """
    tokens_T = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence_T = torch.searchsorted(cu_seqlens[1:], tokens_T, right=True)
    place_T = sequence_T * max_seqlen + tokens_T - cu_seqlens[sequence_T]
    return place_T.clamp(max=(len(cu_seqlens) - 1) * max_seqlen - 1)
