"""The registry of optimizers: LAMB, Muon, NorMuon, PyTorch's AdamW, apex's FusedLAMB; see optimizers/protocol.py."""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optimizers import lamb, muon
from optimizers.protocol import OptimizerSpec, Shapes, StateLayout, StateTensor, gradients
from run_config import OptimizerConfig
from utils.errors import UserError


def make_adamw(config: OptimizerConfig, groups, lr, *_process_groups) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr, config.betas, config.eps, config.weight_decay, fused=True)


def make_fused_lamb(config: OptimizerConfig, groups, lr, *_process_groups) -> torch.optim.Optimizer:
    try:
        from apex.optimizers import FusedLAMB as ApexLAMB
    except ImportError as error:
        raise UserError(
            "--optimizer FusedLAMB needs apex, which is not installed here: use NVIDIA's PyTorch container, "
            "or --optimizer Lamb, which makes the same updates"
        ) from error

    class FusedLAMB(ApexLAMB):
        """Adapter: apex's optimizer needs a float learning rate and ignores `grad_scale` and `found_inf`."""

        def step(self) -> None:
            if not bool(self.found_inf):
                for group in self.param_groups:
                    group["lr"] = float(lr)
                torch._foreach_div_(gradients(self), self.grad_scale)
                super().step()

    return FusedLAMB(
        groups, float(lr), betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, max_grad_norm=math.inf
    )


def fused_lamb_state(_model: nn.Module, shapes: Shapes) -> StateLayout:
    return {name: dict.fromkeys(("exp_avg", "exp_avg_sq"), StateTensor(shape)) for name, shape in shapes.items()}


SPECS = {
    "Lamb": lamb.SPEC,
    "AdamW": OptimizerSpec(make_adamw),
    "Muon": muon.SPEC,
    "NorMuon": muon.NORMUON_SPEC,
    "FusedLAMB": OptimizerSpec(make_fused_lamb, fused_lamb_state, counts_in_groups=True, updates_shards=False),
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
) -> torch.optim.Optimizer:
    """Makes the optimizer `config.name`. parameters: see `parameter_groups`; process groups: see Muon."""
    spec = SPECS[config.name]
    return spec.make(config, spec.groups(model, config.weight_decay, parameters), lr, shard_group, replica_group)


def apply_step(optimizer: torch.optim.Optimizer, grad_scale: Tensor, found_inf: Tensor) -> None:
    """Steps with gradients divided by `grad_scale`, unless `found_inf` is not zero. Both are one-element float32
    tensors."""
    optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
    optimizer.step()
