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
        forward += num_tokens * products(encoder.embedding_modules)
        forward += sum(encoder.costs.layer_flops(layer, lengths_N) for layer in encoder.layers)
    base = model.base_model
    if base.pooler is not None:
        forward += num_sequences * products([base.pooler])
    forward += head_flops(model, num_tokens, num_sequences, num_masked)
    return 3 * forward


def head_flops(
    model: PreTrainedModel, num_tokens: float, num_sequences: int, num_masked: float
) -> float:
    """Forward FLOPs of the layers outside the encoders."""
    if isinstance(model, EncoderModel):
        return 0.0
    heads = [module for module in model.children() if not isinstance(module, EncoderModel)]
    if not isinstance(model, MaskedLanguageModel):
        has_pooling = model.base_model.pooling is not None
        return (num_sequences if has_pooling else num_tokens) * products(heads)
    of_sequences = 0.0
    if isinstance(model, NextSentenceModel):
        of_sequences = products([model.next_sentence_layer])
    output_size = 2 * model.word_embeddings.embedding_dim * model.config.padded_vocab_size
    of_masked = products(heads) - of_sequences + output_size
    return num_sequences * of_sequences + num_masked * of_masked


def products(modules: Iterable[nn.Module]) -> float:
    """FLOPs of the linear layers in `modules` for each row of the input."""
    parts = {part for module in modules for part in module.modules()}
    layers = [part for part in parts if isinstance(part, nn.Linear)]
    return float(sum(2 * layer.in_features * layer.out_features for layer in layers))
