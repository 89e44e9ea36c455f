"""FLOPs and memory of ModernBERT's layers (see model/costs/memory.py)."""

from typing import Any

import numpy as np

from bert_recipe.model.costs.attention import LayerAttention, PassSizes, attention_memory
from bert_recipe.model.costs.memory import LayerMemory


def layer_flops(layer: Any, lengths_N: np.ndarray) -> float:
    """FLOPs of the matrix products for sequences of these lengths; local layers count pairs in
    the window.
    """
    hidden, inner = layer.config.hidden_size, layer.config.intermediate_size
    pairs_N = np.square(lengths_N)
    if layer.window is not None:
        reach_N = np.minimum(layer.window, lengths_N - 1)
        pairs_N = lengths_N * (2 * reach_N + 1) - reach_N * (reach_N + 1)
    return float(
        lengths_N.sum() * (8 * hidden**2 + 6 * hidden * inner) + 4 * pairs_N.sum() * hidden
    )


def layer_memory(layer: Any, sizes: PassSizes, rows: int) -> LayerMemory:
    """rows: number of tokens that are computed after attention."""
    config, product, residual = layer.config, sizes.product, sizes.residual
    hidden, inner, tokens = config.hidden_size, config.intermediate_size, sizes.tokens
    has_dropout = config.attention_dropout > 0
    layer_attention = LayerAttention(
        config.num_attention_heads, hidden, has_dropout, rows, layer.window
    )
    attention = attention_memory(sizes, layer_attention)
    # The input of each norm and its copy for the product, the context, and five products of
    # GeGLU.
    masks = sizes.mask * (hidden * has_dropout + inner * (config.mlp_dropout > 0))
    after_attention = rows * (hidden * (residual + 2 * product) + 4 * inner * product + masks)
    feed_forward_backward = rows * (2 * hidden * residual + 4 * inner * product)
    # Rotary positions are applied to a copy of query, key and value.
    attention_backward = (
        tokens * hidden * (residual + 8 * product) + attention.backward - after_attention
    )
    cached = (4 * hidden**2 + 3 * hidden * inner) * product if sizes.autocast else 0
    return LayerMemory(
        kept=tokens * hidden * (residual + product) + attention.kept + after_attention,
        input=tokens * hidden * residual,
        linear_outputs=(3 * tokens * hidden + rows * (2 * hidden + 2 * inner)) * product,
        backward=max(feed_forward_backward, attention_backward),
        weight_copies=cached,
        cached_copies=cached,
        shared=attention.shared,
    )
