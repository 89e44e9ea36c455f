"""The memory of each implementation of attention."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from bert_recipe.model.attention import (
    EfficientAttention,
    FlashAttention,
    LengthBucketedAttention,
    PaddedAttention,
    implementation_class,
)
from bert_recipe.model.kernels.length_bucketed import attention_tiles


@dataclass(frozen=True)
class PassSizes:
    """Sizes that determine, with the model, the memory of a micro-batch's forward and backward
    pass.

    tokens, sequences, num_masked: maximum T, N and M.
    product, residual, mask: bytes per element of matrix products, of the residual stream and
        LayerNorm, and of dropout masks.
    attention: a key of attention.IMPLEMENTATIONS.
    """

    tokens: int
    sequences: int
    num_masked: int
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


class LayerAttention(NamedTuple):
    """What determines, with the sizes of the pass, the memory of a layer's attention.

    has_dropout: of the probabilities.
    rows: number of tokens whose output is used.
    window: see StreamLayout.
    """

    num_heads: int
    hidden_size: int
    has_dropout: bool
    rows: int
    window: int | None = None


class AttentionMemory(NamedTuple):
    """Bytes that attention keeps for the backward pass, temporary ones of it besides the input's
    gradient, and kept ones that all layers with the same window share.
    """

    kept: int
    backward: int = 0
    shared: int = 0


def flash_memory(sizes: PassSizes, layer: LayerAttention) -> AttentionMemory:
    # Query, key and value; the output, unless it is the next linear layer's input; log-sum-exp
    # of the softmax.
    num_states = 4 if layer.rows < sizes.tokens else 3
    states = sizes.tokens * layer.hidden_size * num_states
    return AttentionMemory(states * sizes.product + sizes.tokens * layer.num_heads * 4)


def padded_memory(sizes: PassSizes, layer: LayerAttention) -> AttentionMemory:
    padded = sizes.sequences * sizes.max_seqlen
    state = padded * layer.hidden_size * sizes.product
    bias = padded * (1 if layer.window is None else sizes.max_seqlen) * sizes.product
    if sizes.device_type != "cpu":
        return AttentionMemory(4 * state + padded * layer.num_heads * 4, shared=bias)
    pairs = sizes.pairs(layer.num_heads)
    # Probabilities before and after dropout, and its mask.
    probabilities = pairs * (2 * sizes.product + layer.has_dropout)
    backward = 2 * pairs * sizes.product
    return AttentionMemory(5 * state + probabilities, backward, shared=bias)


def length_bucketed_memory(sizes: PassSizes, layer: LayerAttention) -> AttentionMemory:
    # Query, key and value; the probabilities and their dropout mask.
    tiles = attention_tiles(sizes.max_seqlen, layer.window)
    tile_pairs = [
        (q.stop - q.start) * (k.stop - k.start) * layer.num_heads * sizes.sequences
        for q, k, _ in tiles
    ]
    states = 3 * sizes.tokens * layer.hidden_size
    probabilities = sum(tile_pairs) * (1 + layer.has_dropout)
    kept = sizes.product * (states + probabilities)
    return AttentionMemory(kept, backward=2 * max(tile_pairs) * sizes.product)


MEMORY: dict[type, Callable[[PassSizes, LayerAttention], AttentionMemory]] = {
    FlashAttention: flash_memory,
    EfficientAttention: flash_memory,
    PaddedAttention: padded_memory,
    LengthBucketedAttention: length_bucketed_memory,
}


def attention_memory(sizes: PassSizes, layer: LayerAttention) -> AttentionMemory:
    """Bytes of one call of the attention `sizes.attention`; those of flash attention for one that
    is not in `MEMORY`.
    """
    attention = implementation_class(sizes.attention, layer.window, layer.has_dropout)
    return MEMORY.get(attention, flash_memory)(sizes, layer)
