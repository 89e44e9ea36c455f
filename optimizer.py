"""The registry of optimizers: LAMB, Muon, NorMuon, PyTorch's AdamW; see optimizers/protocol.py."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optimizers import lamb, muon
from optimizers.protocol import OptimizerSpec
from run_config import OptimizerConfig


def make_adamw(config: OptimizerConfig, groups, lr, *_process_groups) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr, config.betas, config.eps, config.weight_decay, fused=True)


SPECS = {
    "Lamb": lamb.SPEC,
    "AdamW": OptimizerSpec(make_adamw),
    "Muon": muon.SPEC,
    "NorMuon": muon.NORMUON_SPEC,
}


def spec_of(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    return SPECS[type(optimizer).__name__]


def make_optimizer(
    config: OptimizerConfig,
    model: nn.Module,
    lr: float | Tensor,
    parameters: Mapping[str, nn.Parameter] | None = None,
    shard_group: "dist.ProcessGroup | None" = None,
    replica_group: "dist.ProcessGroup | None" = None,
    cpu_dtype: torch.dtype = torch.float32,
) -> torch.optim.Optimizer:
    """Makes the optimizer `config.name`. parameters: see `parameter_groups`; process groups,
    cpu_dtype: see Muon.
    """
    spec = SPECS[config.name]
    groups = spec.groups(model, config.weight_decay, parameters)
    return spec.make(config, groups, lr, shard_group, replica_group, cpu_dtype)
