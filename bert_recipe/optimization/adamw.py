"""PyTorch's AdamW."""

import torch

from bert_recipe.config import OptimizerConfig
from bert_recipe.optimization.protocol import OptimizerSpec


def make_adamw(config: OptimizerConfig, groups, lr, *_process_groups) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr, config.betas, config.eps, config.weight_decay, fused=True)


SPECS = {"AdamW": OptimizerSpec(make_adamw)}
