"""LAMB, AdamW, Muon and NorMuon; implemented in bert_recipe/optimization/."""

from bert_recipe.optimization.registry import (
    SPECS,
    AdamW,
    Lamb,
    Muon,
    NorMuon,
    apply_step,
    make_optimizer,
    muon_groups,
    parameter_groups,
    spec_of,
)

__all__ = [
    "SPECS",
    "AdamW",
    "Lamb",
    "Muon",
    "NorMuon",
    "apply_step",
    "make_optimizer",
    "muon_groups",
    "parameter_groups",
    "spec_of",
]
