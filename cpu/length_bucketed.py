"""Attention on batches of sequences of similar length, for CPUs.

Legend: T tokens in the stream, N sequences of a bucket, L its longest sequence, H heads, D head size, C channels
(query, key, value), B = N * H, Q queries and K keys of a tile.
"""

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from cpu.dropout import apply_mask, dropout_mask

# Minimum ratio of the shortest to the longest sequence of a bucket. Padding then increases the work of attention by at
# most a fifth, which costs less than a separate batched product.
MIN_LENGTH_RATIO = 0.9
MIN_EQUAL_LENGTHS = 4  # this many sequences of equal length form their own bucket, without padding
# 16-bit states are padded to a multiple of this, so that the shapes of the products recur (see packing.stream_sizes).
# torch's softmax takes two thirds as long for 160 columns as for 150, because it computes the last 22 one by one.
LENGTH_MULTIPLE = 32
TILE_QUERIES = 128  # queries of a tile, with a window: fewer compute fewer pairs beyond it, in more calls


class LengthBucket(NamedTuple):
    """Neighbouring sequences that attention computes as one batch, padded to the same length."""

    start: int  # the first token of the first sequence
    lengths: list[int]
    padded_length: int

    @property
    def is_padded(self) -> bool:
        return min(self.lengths) < self.padded_length

    def to_padded(self, states_TCHD: Tensor) -> Tensor:
        """A contiguous copy of the bucket's states, [C, N, H, L, D], zero beyond the end of each sequence."""
        count, length = len(self.lengths), self.padded_length
        _, *channels_and_heads, size = states_TCHD.shape
        if not self.is_padded:
            states_NLCHD = states_TCHD[self.start : self.start + count * length].unflatten(0, (count, length))
            return states_NLCHD.permute(2, 0, 3, 1, 4).clone(memory_format=torch.contiguous_format)
        channels, heads = channels_and_heads
        padded_CNHLD = states_TCHD.new_zeros(channels, count, heads, length, size)
        for row, states_LCHD in enumerate(self.split(states_TCHD)):
            padded_CNHLD[:, row, :, : len(states_LCHD)] = states_LCHD.permute(1, 2, 0, 3)
        return padded_CNHLD

    def to_stream(self, states_CNHLD: Tensor, out_TCHD: Tensor) -> None:
        """Writes the bucket's states to the stream; the inverse of `to_padded`."""
        count, length = len(self.lengths), self.padded_length
        if not self.is_padded:
            out_NLCHD = out_TCHD[self.start : self.start + count * length].unflatten(0, (count, length))
            out_NLCHD.copy_(states_CNHLD.permute(1, 3, 0, 2, 4))
            return
        for row, out_LCHD in enumerate(self.split(out_TCHD)):
            out_LCHD.copy_(states_CNHLD[:, row, :, : len(out_LCHD)].permute(2, 0, 1, 3))

    def split(self, states_T: Tensor) -> tuple[Tensor, ...]:
        """One view of the stream for each sequence of the bucket."""
        return states_T[self.start : self.start + sum(self.lengths)].split(self.lengths)


def length_buckets(cu_seqlens: list[int], multiple: int = 1) -> list[LengthBucket]:
    """Groups neighbouring sequences of a stream into buckets. Lengths are rounded up to a multiple of `multiple` before
    they are compared. Skips empty sequences."""

    def rounded(length: int) -> int:
        return -(-length // multiple) * multiple

    buckets: list[tuple[int, list[int]]] = []
    open_bucket: list[int] | None = None  # the lengths of the last bucket, if it may take more sequences
    start = cu_seqlens[0]
    lengths = [end - begin for begin, end in itertools.pairwise(cu_seqlens) if end > begin]
    for length, repeats in itertools.groupby(lengths, rounded):
        run = list(repeats)
        merged = [length, *map(rounded, open_bucket or ())]
        if open_bucket and len(run) < MIN_EQUAL_LENGTHS and min(merged) >= MIN_LENGTH_RATIO * max(merged):
            open_bucket.extend(run)
        else:
            buckets.append((start, run))
            open_bucket = run if len(run) < MIN_EQUAL_LENGTHS else None
        start += sum(run)
    return [LengthBucket(start, lengths, rounded(max(lengths))) for start, lengths in buckets]


class Tile(NamedTuple):
    """A block of queries with all keys that they attend to. `outside_QK`: pairs beyond the window, if there are any."""

    queries: slice
    keys: slice
    outside_QK: Tensor | None


def attention_tiles(length: int, window: int | None) -> list[Tile]:
    """The tiles of sequences of `length` tokens: one without a window, otherwise one per block of queries."""
    if window is None or length <= window + 1:
        return [Tile(slice(0, length), slice(0, length), None)]
    tiles, offsets_L = [], torch.arange(length)
    tile_queries = TILE_QUERIES if length >= 2 * TILE_QUERIES else length
    for start in range(0, length, tile_queries):
        queries = slice(start, min(start + tile_queries, length))
        keys = slice(max(start - window, 0), min(queries.stop + window, length))
        tiles.append(Tile(queries, keys, (offsets_L[queries, None] - offsets_L[keys]).abs() > window))
    return tiles


TiledBucket = tuple[LengthBucket, list[Tile]]


def tiled_buckets(cu_seqlens: list[int], window: int | None, element_size: int) -> list[TiledBucket]:
    """The buckets of a stream with their tiles. element_size: bytes of a number in the states."""
    buckets = length_buckets(cu_seqlens, LENGTH_MULTIPLE if element_size == 2 else 1)
    return [(bucket, attention_tiles(bucket.padded_length, window)) for bucket in buckets]


class LengthBucketedFunction(torch.autograd.Function):
    """softmax(QK' / sqrt(D)) V per bucket and tile, [T, 3, H, D] to [T, H, D], with dropout on the probabilities. The
    output is zero after the first `num_tokens` tokens.

    On a CPU, scaled_dot_product_attention has a 4 times slower backward pass in bfloat16, is even slower with dropout,
    and needs a mask. This function saves the probabilities for the backward pass: 2 bytes per token pair and head in
    bfloat16, and the same for the dropout mask."""

    @staticmethod
    def forward(ctx, qkv_T3HD: Tensor, buckets: list[TiledBucket], num_tokens: int, dropout_prob: float) -> Tensor:
        out_THD = torch.empty_like(qkv_T3HD[:, 0], memory_format=torch.contiguous_format)
        out_THD[num_tokens:] = 0
        scale = 1 / math.sqrt(qkv_T3HD.shape[-1])
        # Finite, because a row of padding may attend to padding only.
        lowest = torch.finfo(qkv_T3HD.dtype).min
        keep_scale = 1.0
        saved: list[Tensor | None] = []
        for bucket, tiles in buckets:
            qkv_3NHLD = bucket.to_padded(qkv_T3HD)
            query_BLD, key_BLD, value_BLD = qkv_3NHLD.flatten(1, 2)
            query_BLD.mul_(scale)
            out_BLD = torch.empty_like(query_BLD)
            saved.append(qkv_3NHLD)
            for queries, keys, outside_QK in tiles:
                scores_BQK = torch.bmm(query_BLD[:, queries], key_BLD[:, keys].transpose(1, 2))
                if outside_QK is not None:
                    scores_BQK.masked_fill_(outside_QK, lowest)
                for row, length in enumerate(bucket.lengths):
                    if length < keys.stop:
                        scores_NHQK = scores_BQK.unflatten(0, (len(bucket.lengths), -1))
                        scores_NHQK[row, :, :, max(length - keys.start, 0) :] = lowest
                probs_BQK = scores_BQK.softmax(dim=-1)
                mask, keep_scale = dropout_mask(probs_BQK, dropout_prob)
                torch.bmm(apply_mask(probs_BQK, mask), value_BLD[:, keys], out=out_BLD[:, queries])
                saved += [probs_BQK, mask]
            bucket.to_stream(out_BLD.mul_(keep_scale).view_as(qkv_3NHLD[:1]), out_THD[:, None])
        ctx.save_for_backward(*saved)
        ctx.buckets, ctx.num_tokens, ctx.scale, ctx.keep_scale = buckets, num_tokens, scale, keep_scale
        return out_THD

    @staticmethod
    def backward(ctx, grad_THD: Tensor):
        grad_T3HD = grad_THD.new_empty(len(grad_THD), 3, *grad_THD.shape[1:])
        grad_T3HD[ctx.num_tokens :] = 0
        saved = iter(ctx.saved_tensors)
        for bucket, tiles in ctx.buckets:
            qkv_3NHLD = next(saved)
            query_BLD, key_BLD, value_BLD = qkv_3NHLD.flatten(1, 2)  # the query is already scaled
            grad_BLD = bucket.to_padded(grad_THD[:, None]).flatten(0, 2).mul_(ctx.keep_scale)
            is_single = len(tiles) == 1  # tiles add to the gradients of the keys that they share
            grad_3NHLD = torch.empty_like(qkv_3NHLD) if is_single else torch.zeros_like(qkv_3NHLD)
            grad_query_BLD, grad_key_BLD, grad_value_BLD = grad_3NHLD.flatten(1, 2)
            for (queries, keys, _), probs_BQK, mask in zip(tiles, saved, saved, strict=False):
                grad_BQD, query_BQD = grad_BLD[:, queries], query_BLD[:, queries]
                dropped_BKQ = apply_mask(probs_BQK, mask).transpose(1, 2)
                grad_probs_BQK = apply_mask(torch.bmm(grad_BQD, value_BLD[:, keys].transpose(1, 2)), mask)
                grad_scores_BQK = torch._softmax_backward_data(grad_probs_BQK, probs_BQK, -1, probs_BQK.dtype)
                torch.bmm(grad_scores_BQK, key_BLD[:, keys], out=grad_query_BLD[:, queries])
                if is_single:
                    torch.bmm(dropped_BKQ, grad_BQD, out=grad_value_BLD)
                    torch.bmm(grad_scores_BQK.transpose(1, 2), query_BQD, out=grad_key_BLD)
                else:
                    grad_value_BLD[:, keys].baddbmm_(dropped_BKQ, grad_BQD)
                    grad_key_BLD[:, keys].baddbmm_(grad_scores_BQK.transpose(1, 2), query_BQD)
            grad_query_BLD.mul_(ctx.scale)
            bucket.to_stream(grad_3NHLD, grad_T3HD)
        return grad_T3HD, None, None, None
