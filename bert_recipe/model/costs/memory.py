"""The memory of activations in a training step. An encoder names a module with its formulas as
`costs`, such as model/costs/bert.py:

    layer_flops(layer, lengths_N)      forward FLOPs of the matrix products of a layer for sequences
                                       of these real lengths
    layer_memory(layer, sizes, rows)   its LayerMemory; rows: tokens computed after attention
"""

from typing import NamedTuple

from bert_recipe.model.costs.attention import PassSizes
from bert_recipe.model.encoders.base import FIRST_TOKEN, PreTrainedModel


class LayerMemory(NamedTuple):
    """Bytes of one layer in a training step (see PassSizes): activations saved for
    backward (`kept`, including its input; `input` alone; `linear_outputs`), peak activation
    gradients (`backward`), and 16-bit or fused copies of weights, during the layer's own pass
    (`weight_copies`) or the whole forward pass (`cached_copies`). shared: kept by all layers with
    the same attention window together.
    """

    kept: int
    input: int
    linear_outputs: int
    backward: int
    weight_copies: int
    cached_copies: int
    shared: int = 0


class ActivationMemory(NamedTuple):
    """Bytes of the activations of a training step. embeddings: with what layers share; `head`
    excludes the logits of masked tokens.
    """

    embeddings: int
    embeddings_backward: int
    layers: list[LayerMemory]
    head: int


def activation_memory(model: PreTrainedModel, sizes: PassSizes) -> ActivationMemory:
    """The activations of `model`, which may be on the meta device, in a pass of these sizes."""
    config, costs = model.config, model.base_model.costs
    hidden, tokens, residual = config.hidden_size, sizes.tokens, sizes.residual
    # With masked tokens, the last layer computes only these and the pooled tokens after its
    # attention.
    pooled = sizes.sequences if model.base_model.pooling in FIRST_TOKEN else 0
    rows = sizes.num_masked + pooled if sizes.num_masked else tokens
    # On a CPU, a dropout mask has as many bytes per element as the states.
    mask = residual if sizes.mask > 1 else 1
    if not config.embedding_dropout:
        mask = 0
    *others, last = model.layers
    layers = [costs.layer_memory(layer, sizes, tokens) for layer in others]
    layers.append(costs.layer_memory(last, sizes, rows))
    shared_by_window = {}
    for layer, memory in zip(model.layers, layers, strict=True):
        shared_by_window[getattr(layer, "window", None)] = memory.shared
    return ActivationMemory(
        embeddings=tokens * hidden * (residual + mask) + sum(shared_by_window.values()),
        embeddings_backward=3 * tokens * hidden * residual,
        layers=layers,
        head=rows * hidden * (3 * sizes.product + 2 * residual),
    )
