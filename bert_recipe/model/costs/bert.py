"""FLOPs and memory of BERT's layers (see model/costs/memory.py)."""

from typing import Any

import numpy as np

from bert_recipe.model.costs.attention import LayerAttention, PassSizes, attention_memory
from bert_recipe.model.costs.memory import LayerMemory


def layer_flops(layer: Any, lengths_N: np.ndarray) -> float:
    """FLOPs of the matrix products for sequences of these real lengths."""
    hidden, inner = layer.config.hidden_size, layer.config.intermediate_size
    return float(
        lengths_N.sum() * (8 * hidden**2 + 4 * hidden * inner)
        + 4 * np.square(lengths_N).sum() * hidden
    )


def layer_memory(layer: Any, sizes: PassSizes, rows: int) -> LayerMemory:
    """rows: number of tokens that are computed after attention."""
    config, product, residual = layer.config, sizes.product, sizes.residual
    hidden, inner, tokens = config.hidden_size, config.intermediate_size, sizes.tokens
    has_dropout = config.attention_dropout > 0
    layer_attention = LayerAttention(config.num_attention_heads, hidden, has_dropout, rows)
    attention = attention_memory(sizes, layer_attention)
    # Inputs of LayerNorm with the dropout masks, and the inputs of linear layers and of the
    # activation function.
    mask = sizes.mask if config.hidden_dropout_prob else 0
    after_attention = rows * (2 * hidden * (residual + mask) + (2 * hidden + 2 * inner) * product)
    # When the backward pass reaches attention, the activations of the rest of the layer are freed.
    feed_forward_backward = rows * (2 * hidden * residual + 2 * inner * product)
    attention_backward = (
        tokens * hidden * (residual + 8 * product) + attention.backward - after_attention
    )
    # Query, key and value are fused.
    cached = (hidden**2 + 2 * hidden * inner) * product if sizes.autocast else 0
    return LayerMemory(
        kept=tokens * hidden * product + attention.kept + after_attention,
        input=tokens * hidden * residual,
        linear_outputs=(3 * tokens * hidden + rows * (2 * hidden + inner)) * product,
        backward=max(feed_forward_backward, attention_backward),
        weight_copies=3 * hidden**2 * product + cached,
        cached_copies=cached,
        shared=attention.shared,
    )
