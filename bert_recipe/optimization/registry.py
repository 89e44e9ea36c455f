"""The optimizers by name; what each declares: optimization/protocol.py."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bert_recipe.config import EXPERIMENTAL_OPTIMIZERS, OPTIMIZERS, OptimizerConfig
from bert_recipe.optimization.layers import layer_depths, layerwise_groups
from bert_recipe.optimization.protocol import OptimizerSpec

if TYPE_CHECKING:
    from bert_recipe.model.encoders.base import PreTrainedModel

SPECS: dict[str, OptimizerSpec] = {
    name: import_module(f"bert_recipe.optimization.{file}").SPECS[name]
    for name, file in OPTIMIZERS.items()
}


def spec_named(name: str) -> OptimizerSpec:
    """That of the optimizer `name`, also of an experimental one."""
    if name in EXPERIMENTAL_OPTIMIZERS:
        file = EXPERIMENTAL_OPTIMIZERS[name]
        return import_module(f"bert_recipe.experiments.{file}").SPECS[name]
    return SPECS[name]


def make_optimizer(
    config: OptimizerConfig,
    model: nn.Module,
    lr: float | Tensor,
    parameters: Mapping[str, nn.Parameter] | None = None,
    shard_group: "dist.ProcessGroup | None" = None,
    replica_group: "dist.ProcessGroup | None" = None,
    product_dtype: torch.dtype = torch.float32,
) -> torch.optim.Optimizer:
    """Makes the optimizer `config.name`.

    parameters: see `parameter_groups`.
    shard_group, replica_group, product_dtype: see Muon.
    """
    spec = spec_named(config.name)
    groups = spec.groups(model, config.weight_decay, parameters)
    if config.layerwise_lr_decay < 1:
        named = dict(model.named_parameters()) if parameters is None else parameters
        depths = layer_depths(cast("PreTrainedModel", model))
        groups = layerwise_groups(
            groups, cast(Tensor, lr), config.layerwise_lr_decay, depths, named
        )
    return spec.make(config, groups, lr, shard_group, replica_group, product_dtype)
