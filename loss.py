"""Losses as sums; implemented in bert_recipe/model/loss.py."""

from bert_recipe.model.loss import (
    LinearCrossEntropy,
    compiled_linear_cross_entropy,
    contrastive_losses,
    cosent_losses,
    known_pairs,
    linear_cross_entropy,
    margin_mse_losses,
    next_sentence_sums,
    span_sum,
    summed_cross_entropy,
)

__all__ = [
    "LinearCrossEntropy",
    "compiled_linear_cross_entropy",
    "contrastive_losses",
    "cosent_losses",
    "known_pairs",
    "linear_cross_entropy",
    "margin_mse_losses",
    "next_sentence_sums",
    "span_sum",
    "summed_cross_entropy",
]
