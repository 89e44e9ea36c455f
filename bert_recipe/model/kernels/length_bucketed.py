"""Attention on batches of sequences of similar length, for CPUs.

Legend: T tokens in the stream, N sequences of a bucket, L its longest sequence, H heads, D head
size, C channels (query, key, value), B = N * H, Q queries and K keys of a tile, P vectors [D] of
all buckets, with padding.
"""

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bert_recipe.model.kernels.dropout import apply_mask, dropout_mask
from bert_recipe.model.kernels.positions import hidden_pairs, rotary_table, rotated

# Minimum ratio of the shortest to the longest sequence of a bucket. Padding then increases the work
# of attention by at most a fifth, which costs less than a separate batched product.
MIN_LENGTH_RATIO = 0.9
MIN_EQUAL_LENGTHS = 4  # this many sequences of equal length form their own bucket, without padding
# 16-bit states are padded to a multiple of this, so that the shapes of the products recur (see
# packing.stream_sizes). torch's softmax takes two thirds as long for 160 columns as for 150,
# because it computes the last 22 one by one.
LENGTH_MULTIPLE = 32
ROTATED_ELEMENTS = 2**16  # of queries and keys, rotated at a time: they fit a core's cache
# queries of a tile, with a window: fewer compute fewer pairs beyond it, in more calls
TILE_QUERIES = 128


class LengthBucket(NamedTuple):
    """Neighbouring sequences that attention computes as one batch, padded to the same length."""

    start: int  # the first token of the first sequence
    lengths: list[int]
    padded_length: int

    def tokens(self, padding: int) -> Tensor:
        """The stream's token at each place of the bucket [N, L]; `padding` beyond the end of a
        sequence.
        """
        lengths_N1 = torch.tensor(self.lengths)[:, None]
        places_L = torch.arange(self.padded_length)
        tokens_NL = self.start + lengths_N1.cumsum(0) - lengths_N1 + places_L
        return tokens_NL.masked_fill_(places_L >= lengths_N1, padding)


def length_buckets(cu_seqlens: list[int], multiple: int = 1) -> list[LengthBucket]:
    """Groups neighbouring sequences of a stream into buckets. Lengths are rounded up to a multiple
    of `multiple` before they are compared. Skips empty sequences.
    """

    def rounded(length: int) -> int:
        return -(-length // multiple) * multiple

    buckets: list[tuple[int, list[int]]] = []
    # the lengths of the last bucket, if it may take more sequences
    open_bucket: list[int] | None = None
    start = cu_seqlens[0]
    lengths = [end - begin for begin, end in itertools.pairwise(cu_seqlens) if end > begin]
    for length, repeats in itertools.groupby(lengths, rounded):
        run = list(repeats)
        merged = [length, *map(rounded, open_bucket or ())]
        if (
            open_bucket
            and len(run) < MIN_EQUAL_LENGTHS
            and min(merged) >= MIN_LENGTH_RATIO * max(merged)
        ):
            open_bucket.extend(run)
        else:
            buckets.append((start, run))
            open_bucket = run if len(run) < MIN_EQUAL_LENGTHS else None
        start += sum(run)
    return [LengthBucket(start, lengths, rounded(max(lengths))) for start, lengths in buckets]


class Tile(NamedTuple):
    """A block of queries with all keys that they attend to. `hidden_QK`: see `hidden_pairs`; None
    if there are none.
    """

    queries: slice
    keys: slice
    hidden_QK: Tensor | None


def attention_tiles(length: int, window: int | None, is_causal: bool = False) -> list[Tile]:
    """The tiles of sequences of `length` tokens: one without a window, otherwise one per block of
    queries.
    """
    offsets_L = torch.arange(length)
    if window is None or length <= window + 1:  # all tokens are in each other's window
        whole = slice(0, length)
        hidden_LL = hidden_pairs(offsets_L, offsets_L, None, True) if is_causal else None
        return [Tile(whole, whole, hidden_LL)]
    tiles = []
    tile_queries = TILE_QUERIES if length >= 2 * TILE_QUERIES else length
    for start in range(0, length, tile_queries):
        queries = slice(start, min(start + tile_queries, length))
        keys = slice(max(start - window, 0), min(queries.stop + window, length))
        hidden_QK = hidden_pairs(offsets_L[queries], offsets_L[keys], window, is_causal)
        tiles.append(Tile(queries, keys, hidden_QK))
    return tiles


class BucketedStream:
    """The buckets of a stream with their tiles, and the copies of states to the buckets and back.

    States [T, C, H, D] of the stream are [C, N, H, L, D] in a bucket, and the buckets' are one
    after the other in one tensor [P, D]. A copy looks up one index per vector, which is faster than
    permuted copies. theta: of rotary positions, which count from 0 in each sequence, or None.
    """

    def __init__(
        self,
        cu_seqlens: list[int],
        window: int | None,
        is_causal: bool,
        qkv_T3HD: Tensor,
        theta: float | None,
    ):
        num_tokens, _, self.heads, size = qkv_T3HD.shape
        self.buckets = length_buckets(
            cu_seqlens, LENGTH_MULTIPLE if qkv_T3HD.element_size() == 2 else 1
        )
        self.tiles = [
            attention_tiles(bucket.padded_length, window, is_causal) for bucket in self.buckets
        ]
        longest = torch.arange(max(bucket.padded_length for bucket in self.buckets))
        self.rotary = None if theta is None else rotary_table(longest, size, theta)
        self.num_tokens = cu_seqlens[-1]
        self.index = {channels: self._index(num_tokens, channels) for channels in (1, 3)}

    def _index(self, num_tokens: int, channels: int) -> tuple[Tensor, Tensor, Tensor]:
        """For each vector of the buckets its place in the stream, for each of the stream its place
        in the buckets, and the places of the padding.
        """
        vectors = channels * self.heads  # of a token
        places_C1H1 = torch.arange(vectors).view(channels, 1, self.heads, 1)
        end = num_tokens * vectors
        index = [
            bucket.tokens(num_tokens)[:, None] * vectors + places_C1H1 for bucket in self.buckets
        ]
        index_P = torch.cat([index_CNHL.flatten() for index_CNHL in index])
        inverse = index_P.new_zeros(end + vectors)
        inverse[index_P] = torch.arange(len(index_P))
        return index_P.clamp(max=end - 1), inverse[:end], (index_P >= end).nonzero()[:, 0]

    def to_padded(self, states_TCHD: Tensor) -> Tensor:
        """The buckets' states [P, D], zero beyond the end of each sequence."""
        index_P, _, padding = self.index[states_TCHD.shape[1]]
        return states_TCHD.flatten(0, 2).index_select(0, index_P).index_fill_(0, padding, 0)

    def to_stream(self, states_PD: Tensor, channels: int) -> Tensor:
        """The stream's states [T, C, H, D], zero after the last sequence; the inverse of
        `to_padded`.
        """
        inverse = self.index[channels][1]
        states_TCHD = states_PD.index_select(0, inverse).view(
            -1, channels, self.heads, states_PD.shape[1]
        )
        states_TCHD[self.num_tokens :] = 0
        return states_TCHD

    def split(self, states_PD: Tensor, channels: int) -> list[Tensor]:
        """A view [C, N, H, L, D] for each bucket."""
        shapes = [
            (channels, len(bucket.lengths), self.heads, bucket.padded_length)
            for bucket in self.buckets
        ]
        parts = states_PD.split([math.prod(shape) for shape in shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]


def rotate_(states: Tensor, cos_LD: Tensor, sin_LD: Tensor) -> None:
    """Rotates `states` [..., L, D] in place, by `rotary_table`."""
    length, size = states.shape[-2:]
    for states_BLD in states.view(-1, length, size).split(ROTATED_ELEMENTS // (length * size) + 1):
        states_BLD.copy_(rotated(states_BLD, cos_LD[:length], sin_LD[:length]))


def scaled_bmm(
    a: Tensor, b: Tensor, scale: float, out: Tensor | None = None, add: bool = False
) -> Tensor:
    """scale * a @ b of each batch, in `out` if given; `add`: added to it."""
    out = a.new_empty(*a.shape[:2], b.shape[2]) if out is None else out
    return torch.baddbmm(out, a, b, beta=int(add), alpha=scale, out=out)


class LengthBucketedFunction(torch.autograd.Function):
    """softmax(QK' / sqrt(D)) V per bucket and tile, [T, 3, H, D] to [T, H, D], with dropout on the
    probabilities. The output is zero after the first `num_tokens` tokens.

    On a CPU, scaled_dot_product_attention has a 4 times slower backward pass in bfloat16, is even
    slower with dropout, and needs a mask. This function saves the probabilities for the backward
    pass: 2 bytes per token pair and head in bfloat16, and the same for the dropout mask.
    """

    @staticmethod
    def forward(ctx: Any, qkv_T3HD: Tensor, stream: BucketedStream, dropout_prob: float) -> Tensor:
        scale = 1 / math.sqrt(qkv_T3HD.shape[-1])
        # Finite, because a row of padding may attend to padding only.
        lowest = torch.finfo(qkv_T3HD.dtype).min
        keep_scale = 1.0
        qkv_PD = stream.to_padded(qkv_T3HD)
        out_PD = qkv_PD.new_empty(len(qkv_PD) // 3, qkv_PD.shape[1])
        saved: list[Tensor | None] = [qkv_PD]
        for bucket, tiles, qkv_3NHLD, out_1NHLD in zip(
            stream.buckets,
            stream.tiles,
            stream.split(qkv_PD, 3),
            stream.split(out_PD, 1),
            strict=True,
        ):
            if stream.rotary is not None:
                rotate_(qkv_3NHLD[:2], *stream.rotary)
            query_BLD, key_BLD, value_BLD = qkv_3NHLD.flatten(1, 2)
            out_BLD = out_1NHLD.flatten(0, 2)
            for queries, keys, hidden_QK in tiles:
                scores_BQK = scaled_bmm(
                    query_BLD[:, queries], key_BLD[:, keys].transpose(1, 2), scale
                )
                if hidden_QK is not None:
                    scores_BQK.masked_fill_(hidden_QK, lowest)
                for row, length in enumerate(bucket.lengths):
                    if length < keys.stop:
                        scores_NHQK = scores_BQK.unflatten(0, (len(bucket.lengths), -1))
                        scores_NHQK[row, :, :, max(length - keys.start, 0) :] = lowest
                probs_BQK = torch.softmax(scores_BQK, dim=-1, out=scores_BQK)
                mask, keep_scale = dropout_mask(probs_BQK, dropout_prob)
                scaled_bmm(
                    apply_mask(probs_BQK, mask), value_BLD[:, keys], keep_scale, out_BLD[:, queries]
                )
                saved += [probs_BQK, mask]
        ctx.save_for_backward(*saved)
        ctx.stream, ctx.scale, ctx.keep_scale = stream, scale, keep_scale
        return stream.to_stream(out_PD, 1)[:, 0]

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        qkv_PD, *rest = ctx.saved_tensors
        saved = iter(rest)
        stream = ctx.stream
        out_grad_PD = stream.to_padded(grad_THD[:, None])
        grad_PD = torch.empty_like(qkv_PD)
        for tiles, qkv_3NHLD, out_grad_1NHLD, grad_3NHLD in zip(
            stream.tiles,
            stream.split(qkv_PD, 3),
            stream.split(out_grad_PD, 1),
            stream.split(grad_PD, 3),
            strict=True,
        ):
            query_BLD, key_BLD, value_BLD = qkv_3NHLD.flatten(1, 2)
            grad_query_BLD, grad_key_BLD, grad_value_BLD = grad_3NHLD.flatten(1, 2)
            out_grad_BLD = out_grad_1NHLD.flatten(0, 2)
            shares_keys = len(tiles) > 1
            if shares_keys:  # tiles add to the gradients of the keys
                grad_3NHLD[1:] = 0
            for (queries, keys, _), probs_BQK, mask in zip(tiles, saved, saved, strict=False):
                grad_BQD = out_grad_BLD[:, queries]
                dropped_BKQ = apply_mask(probs_BQK, mask).transpose(1, 2)
                scaled_bmm(
                    dropped_BKQ, grad_BQD, ctx.keep_scale, grad_value_BLD[:, keys], add=shares_keys
                )
                grad_BQK = scaled_bmm(grad_BQD, value_BLD[:, keys].transpose(1, 2), ctx.keep_scale)
                grad_BQK = apply_mask(grad_BQK, mask)
                torch._softmax_backward_data(
                    grad_BQK, probs_BQK, -1, grad_BQK.dtype, grad_input=grad_BQK
                )
                scaled_bmm(grad_BQK, key_BLD[:, keys], ctx.scale, grad_query_BLD[:, queries])
                grad_BKQ = grad_BQK.transpose(1, 2)
                scaled_bmm(
                    grad_BKQ,
                    query_BLD[:, queries],
                    ctx.scale,
                    grad_key_BLD[:, keys],
                    add=shares_keys,
                )
            if stream.rotary is not None:
                rotate_(grad_3NHLD[:2], stream.rotary[0], -stream.rotary[1])
        return stream.to_stream(grad_PD, 3), None, None
