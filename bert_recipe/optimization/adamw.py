"""PyTorch's AdamW."""

import torch
from torch import Tensor

from bert_recipe.config import OptimizerConfig
from bert_recipe.optimization.protocol import OptimizerSpec, ParameterGroup


def make_adamw(
    config: OptimizerConfig,
    groups: list[ParameterGroup],
    lr: float | Tensor,
    *_process_groups: object,
) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr, config.betas, config.eps, config.weight_decay, fused=True)


SPECS = {"AdamW": OptimizerSpec(make_adamw)}
