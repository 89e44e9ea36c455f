"""Learning-rate schedules; implemented in bert_recipe/optimization/lr_scheduler.py."""

from bert_recipe.optimization.lr_scheduler import (
    constant,
    cosine,
    exact_product,
    exponential,
    linear,
    make_schedule,
    noam,
    poly,
    rate_table,
    warmup_exp_decay_exp,
    warmup_stable_decay,
)

__all__ = [
    "constant",
    "cosine",
    "exact_product",
    "exponential",
    "linear",
    "make_schedule",
    "noam",
    "poly",
    "rate_table",
    "warmup_exp_decay_exp",
    "warmup_stable_decay",
]
