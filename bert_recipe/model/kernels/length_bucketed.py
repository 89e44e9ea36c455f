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
SHORT_LENGTH = 16  # for inference, the multiple of streams without longer sequences
ROTATED_ELEMENTS = 2**16  # of queries and keys, rotated at a time: they fit a core's cache
# queries of a tile, with a window: fewer compute fewer pairs beyond it, in more calls
TILE_QUERIES = 128


class LengthBucket(NamedTuple):
    """Neighbouring sequences that attention computes as one batch, padded to the same length."""

    start: int  # the first token of the first sequence
    lengths: list[int]
    padded_length: int

    def tokens(self) -> tuple[Tensor, Tensor]:
        """The stream's token at each place of the bucket [N, L], and which places are beyond the
        end of a sequence: they have its last token.
        """
        lengths_N1 = torch.tensor(self.lengths)[:, None]
        places_L = torch.arange(self.padded_length)
        starts_N1 = self.start + lengths_N1.cumsum(0) - lengths_N1
        return starts_N1 + places_L.minimum(lengths_N1 - 1), places_L >= lengths_N1


def length_buckets(cu_seqlens: list[int], multiple: int) -> list[LengthBucket]:
    """Groups neighbouring sequences of a stream into buckets. Lengths are rounded up to a multiple
    of `multiple` before they are compared. Skips empty sequences.
    """

    def rounded(length: int) -> int:
        return -(-length // multiple) * multiple

    buckets: list[tuple[int, list[int]]] = []  # the first token and the lengths of each
    open_bucket: list[int] = []  # the lengths of the last bucket, if it may take more sequences
    start = cu_seqlens[0]
    lengths = [end - begin for begin, end in itertools.pairwise(cu_seqlens) if end > begin]
    for length, repeats in itertools.groupby(lengths, rounded):
        run = list(repeats)
        is_short = len(run) < MIN_EQUAL_LENGTHS
        merged = [length, *map(rounded, open_bucket)]
        if open_bucket and is_short and min(merged) >= MIN_LENGTH_RATIO * max(merged):
            open_bucket.extend(run)
        else:
            buckets.append((start, run))
            open_bucket = run if is_short else []
        start += sum(run)
    return [LengthBucket(start, lengths, rounded(max(lengths))) for start, lengths in buckets]


class Tile(NamedTuple):
    """A block of queries with all keys that they attend to. `hidden_QK`: see `hidden_pairs`; None
    if there are none.
    """

    queries: slice
    keys: slice
    hidden_QK: Tensor | None


def attention_tiles(length: int, window: int | None, first_only: bool = False) -> list[Tile]:
    """The tiles of sequences of `length` tokens: one without a window, otherwise one per block of
    queries. first_only: the first token is the only query.
    """
    if first_only:
        num_keys = length if window is None else min(length, window + 1)
        return [Tile(slice(0, 1), slice(0, num_keys), None)]
    offsets_L = torch.arange(length)
    if window is None or length <= window + 1:  # all tokens are in each other's window
        whole = slice(0, length)
        return [Tile(whole, whole, None)]
    tiles = []
    tile_queries = TILE_QUERIES if length >= 2 * TILE_QUERIES else length
    for start in range(0, length, tile_queries):
        queries = slice(start, min(start + tile_queries, length))
        keys = slice(max(start - window, 0), min(queries.stop + window, length))
        hidden_QK = hidden_pairs(offsets_L[queries], offsets_L[keys], window)
        tiles.append(Tile(queries, keys, hidden_QK))
    return tiles


class VectorIndex(NamedTuple):
    """Where a stream and its buckets have the same vector [D].

    in_stream_P: for each vector of the buckets its place in the stream, for padding that of the
        sequence's last token.
    in_buckets: for each vector of the stream its place in the buckets; any place for filler.
    padding: the places of padding in the buckets.
    """

    in_stream_P: Tensor
    in_buckets: Tensor
    padding: Tensor


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
        qkv_T3HD: Tensor,
        theta: float | None,
    ):
        num_tokens, _, self.heads, size = qkv_T3HD.shape
        self.num_real_tokens = cu_seqlens[-1]  # the others are filler
        longest = max(end - start for start, end in itertools.pairwise(cu_seqlens))
        multiple = LENGTH_MULTIPLE if qkv_T3HD.element_size() == 2 else 1
        if not torch.is_grad_enabled() and longest <= SHORT_LENGTH:
            multiple = min(multiple, SHORT_LENGTH)
        self.buckets = length_buckets(cu_seqlens, multiple)
        lengths = [bucket.padded_length for bucket in self.buckets]
        self.tiles = [attention_tiles(length, window) for length in lengths]
        self.first_tiles = [attention_tiles(length, window, first_only=True) for length in lengths]
        positions_L = torch.arange(max(lengths))
        self.rotary = None if theta is None else rotary_table(positions_L, size, theta)
        self.index = {channels: self._index(num_tokens, channels) for channels in (1, 3)}

    def _index(self, num_tokens: int, channels: int) -> VectorIndex:
        vectors = channels * self.heads  # of a token
        places_C1H1 = torch.arange(vectors).view(channels, 1, self.heads, 1)
        places, is_padding = [], []
        for bucket in self.buckets:
            tokens_NL, is_padding_NL = bucket.tokens()
            places_CNHL = tokens_NL[:, None] * vectors + places_C1H1
            places.append(places_CNHL.flatten())
            is_padding.append(is_padding_NL[:, None].expand_as(places_CNHL).flatten())
        in_stream_P, is_padding_P = torch.cat(places), torch.cat(is_padding)
        real = is_padding_P.logical_not().nonzero()[:, 0]
        in_buckets = in_stream_P.new_zeros(num_tokens * vectors)
        in_buckets[in_stream_P[real]] = real
        return VectorIndex(in_stream_P, in_buckets, is_padding_P.nonzero()[:, 0])

    def to_padded(self, states_TCHD: Tensor) -> Tensor:
        """The buckets' states [P, D], beyond the end of each sequence those of its last token."""
        index = self.index[states_TCHD.shape[1]]
        return states_TCHD.flatten(0, 2).index_select(0, index.in_stream_P)

    def to_stream(self, states_PD: Tensor, channels: int) -> Tensor:
        """The stream's states [T, C, H, D], zero after the last sequence; the inverse of
        `to_padded`.
        """
        states = states_PD.index_select(0, self.index[channels].in_buckets)
        states_TCHD = states.view(-1, channels, self.heads, states.shape[1])
        states_TCHD[self.num_real_tokens :] = 0
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


def hide_(scores_BQK: Tensor, tile: Tile, lengths: list[int]) -> None:
    """Sets the scores of the pairs that attention hides, and of padding, to the lowest number. It
    is finite, because a row of padding may attend to padding only.
    """
    lowest = torch.finfo(scores_BQK.dtype).min
    if tile.hidden_QK is not None:
        scores_BQK.masked_fill_(tile.hidden_QK, lowest)
    scores_NHQK = scores_BQK.unflatten(0, (len(lengths), -1))
    start = 0
    for length, run in itertools.groupby(lengths):
        stop = start + len(list(run))
        if length < tile.keys.stop:
            first_padding = max(length - tile.keys.start, 0)
            scores_NHQK[start:stop, :, :, first_padding:] = lowest
        start = stop


class LengthBucketedFunction(torch.autograd.Function):
    """softmax(QK' / sqrt(D)) V per bucket and tile, [T, 3, H, D] to [T, H, D], with dropout on the
    probabilities. The output is zero for filler; with `first_only`, for all tokens but the first
    one of each sequence.

    On a CPU, scaled_dot_product_attention has a 4 times slower backward pass in bfloat16, is even
    slower with dropout, and needs a mask. This function saves the probabilities for the backward
    pass: 2 bytes per token pair and head in bfloat16, and the same for the dropout mask.
    """

    @staticmethod
    def forward(
        ctx: Any, qkv_T3HD: Tensor, stream: BucketedStream, dropout_prob: float, first_only: bool
    ) -> Tensor:
        scale = 1 / math.sqrt(qkv_T3HD.shape[-1])
        keep_scale = 1.0
        qkv_PD = stream.to_padded(qkv_T3HD)
        out_PD = qkv_PD.new_empty(len(qkv_PD) // 3, qkv_PD.shape[1])
        tiles_of_buckets = stream.tiles
        if first_only:
            out_PD.zero_()
            tiles_of_buckets = stream.first_tiles
        saved: list[Tensor | None] = []  # probabilities and dropout mask of each tile
        for bucket, tiles, qkv_3NHLD, out_1NHLD in zip(
            stream.buckets,
            tiles_of_buckets,
            stream.split(qkv_PD, 3),
            stream.split(out_PD, 1),
            strict=True,
        ):
            if stream.rotary is not None:
                rotate_(qkv_3NHLD[:2], *stream.rotary)
            query_BLD, key_BLD, value_BLD = qkv_3NHLD.flatten(1, 2)
            out_BLD = out_1NHLD.flatten(0, 2)
            for tile in tiles:
                query_BQD = query_BLD[:, tile.queries]
                key_BKD, value_BKD = key_BLD[:, tile.keys], value_BLD[:, tile.keys]
                scores_BQK = scaled_bmm(query_BQD, key_BKD.transpose(1, 2), scale)
                hide_(scores_BQK, tile, bucket.lengths)
                probs_BQK = torch.softmax(scores_BQK, dim=-1, out=scores_BQK)
                mask, keep_scale = dropout_mask(probs_BQK, dropout_prob)
                out_BQD = out_BLD[:, tile.queries]
                scaled_bmm(apply_mask(probs_BQK, mask), value_BKD, keep_scale, out_BQD)
                saved += [probs_BQK, mask]
        ctx.save_for_backward(qkv_PD, *saved)
        ctx.stream, ctx.scale, ctx.keep_scale = stream, scale, keep_scale
        ctx.first_only = first_only
        return stream.to_stream(out_PD, 1)[:, 0]

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        qkv_PD, *saved = ctx.saved_tensors
        probs_and_mask = zip(saved[::2], saved[1::2], strict=True)  # of the tiles in order
        stream = ctx.stream
        out_grad_PD = stream.to_padded(grad_THD[:, None])
        out_grad_PD.index_fill_(0, stream.index[1].padding, 0)  # padding has no gradient
        grad_PD = torch.empty_like(qkv_PD)
        tiles_of_buckets = stream.tiles
        if ctx.first_only:
            grad_PD.zero_()
            tiles_of_buckets = stream.first_tiles
        for tiles, qkv_3NHLD, out_grad_1NHLD, grad_3NHLD in zip(
            tiles_of_buckets,
            stream.split(qkv_PD, 3),
            stream.split(out_grad_PD, 1),
            stream.split(grad_PD, 3),
            strict=True,
        ):
            query_BLD, key_BLD, value_BLD = qkv_3NHLD.flatten(1, 2)
            query_grad_BLD, key_grad_BLD, value_grad_BLD = grad_3NHLD.flatten(1, 2)
            out_grad_BLD = out_grad_1NHLD.flatten(0, 2)
            is_tiled = len(tiles) > 1
            if is_tiled:  # tiles add to the gradients of keys and values
                grad_3NHLD[1:] = 0
            for queries, keys, _ in tiles:
                probs_BQK, mask = next(probs_and_mask)
                out_grad_BQD, value_grad_BKD = out_grad_BLD[:, queries], value_grad_BLD[:, keys]
                dropped_BKQ = apply_mask(probs_BQK, mask).transpose(1, 2)
                scaled_bmm(dropped_BKQ, out_grad_BQD, ctx.keep_scale, value_grad_BKD, add=is_tiled)
                value_BDK = value_BLD[:, keys].transpose(1, 2)
                probs_grad_BQK = scaled_bmm(out_grad_BQD, value_BDK, ctx.keep_scale)
                probs_grad_BQK = apply_mask(probs_grad_BQK, mask)
                scores_grad_BQK = torch._softmax_backward_data(
                    probs_grad_BQK, probs_BQK, -1, probs_BQK.dtype, grad_input=probs_grad_BQK
                )
                scaled_bmm(scores_grad_BQK, key_BLD[:, keys], ctx.scale, query_grad_BLD[:, queries])
                query_BQD, key_grad_BKD = query_BLD[:, queries], key_grad_BLD[:, keys]
                scores_grad_BKQ = scores_grad_BQK.transpose(1, 2)
                scaled_bmm(scores_grad_BKQ, query_BQD, ctx.scale, key_grad_BKD, add=is_tiled)
            if stream.rotary is not None:
                cos_LD, sin_LD = stream.rotary
                rotate_(grad_3NHLD[:2], cos_LD, -sin_LD)
        return stream.to_stream(grad_PD, 3), None, None, None
