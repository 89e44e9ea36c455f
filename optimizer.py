"""LAMB, AdamW, Muon and NorMuon; implemented in bert_recipe/optimization/."""

from bert_recipe.optimization import registry
from bert_recipe.optimization.registry import *  # noqa: F403

__all__ = registry.__all__
