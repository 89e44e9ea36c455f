"""The FLOPs of a training step: matrix products only, a multiply-add counts as two (Narayanan et
al., 2021, appendix).
"""

from collections.abc import Iterable, Sequence

import numpy as np
from torch import nn

from bert_recipe.model.encoders.base import EncoderModel, PreTrainedModel
from bert_recipe.model.encoders.heads import MaskedLanguageModel, NextSentenceModel


def training_flops(
    model: PreTrainedModel, lengths_N: Sequence[int] | np.ndarray, num_masked: float
) -> float:
    """FLOPs of a forward and backward pass of `model`, which may be on the meta device.

    lengths_N: real lengths of the sequences.
    num_masked: number of masked tokens.
    """
    lengths_N = np.asarray(lengths_N, dtype=np.float64)
    num_tokens, num_sequences = float(lengths_N.sum()), len(lengths_N)
    forward = 0.0
    for encoder in model.encoders:
        embedding_layers = linear_layers(encoder.embedding_modules)
        forward += num_tokens * products(embedding_layers)
        forward += sum(encoder.costs.layer_flops(layer, lengths_N) for layer in encoder.layers)
    base = model.base_model
    if base.pooler is not None:
        forward += num_sequences * products(linear_layers([base.pooler]))
    forward += head_flops(model, num_tokens, num_sequences, num_masked)
    return 3 * forward


def head_flops(
    model: PreTrainedModel, num_tokens: float, num_sequences: int, num_masked: float
) -> float:
    """Forward FLOPs of the layers outside the encoders."""
    if isinstance(model, EncoderModel):
        return 0.0
    heads = [module for module in model.children() if not isinstance(module, EncoderModel)]
    layers = linear_layers(heads)
    if not isinstance(model, MaskedLanguageModel):
        has_pooling = model.base_model.pooling is not None
        return (num_sequences if has_pooling else num_tokens) * products(layers)
    flops = 0.0
    if isinstance(model, NextSentenceModel):
        layers -= {model.next_sentence_layer}
        flops = num_sequences * products([model.next_sentence_layer])
    output_size = 2 * model.word_embeddings.embedding_dim * model.config.padded_vocab_size
    return flops + num_masked * (products(layers) + output_size)


def linear_layers(modules: Iterable[nn.Module]) -> set[nn.Linear]:
    return {part for module in modules for part in module.modules() if isinstance(part, nn.Linear)}


def products(layers: Iterable[nn.Linear]) -> float:
    """FLOPs for each row of the input."""
    return float(sum(2 * layer.in_features * layer.out_features for layer in layers))
