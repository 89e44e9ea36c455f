"""Muon, on whole tensors and on shards."""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from optimizers.fused_adam import FusedAdam
from optimizers.protocol import OptimizerSpec, Shapes, StateLayout, StateTensor, adam_state, parameter_groups
from run_config import OptimizerConfig


class Muon(FusedAdam):
    """Muon (Jordan et al., 2024) for the matrices of hidden layers, AdamW for all other parameters:

        m = b m + (1-b) g;  u = b m + (1-b) g                       b: `momentum` (Nesterov's form)
        w = (1 - lr * weight_decay) w - 0.2 sqrt(max(rows, columns)) * lr * orthogonalize(u)

    The factor gives updates the size of AdamW's (Liu et al., 2025), so that one learning rate serves both. This is
    the arithmetic of torch.optim.Muon with `match_rms_adamw`; torch's class has no shards, no `grad_scale` and no
    `found_inf`, and reads the learning rate on the host. Query, key and value are orthogonalized separately.

    Groups with `stacked` > 0 are updated by Muon; each parameter is a stack of so many matrices. On shards, the rows of
    a matrix are gathered, and every rank orthogonalizes all matrices.

    Args:
        params: groups of parameters, as `muon_groups` makes them; float32.
        lr, betas, eps: of both methods; betas and eps are AdamW's.
        momentum: decay of Muon's momentum.
        shard_group: see Lamb.
    """

    def __init__(
        self,
        params,
        lr: float | Tensor,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        momentum: float = 0.95,
        shard_group: "dist.ProcessGroup | None" = None,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "momentum": momentum})
        self.shard_group = shard_group

    @torch.no_grad()
    def step(self) -> None:
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group in self.param_groups:
            if group["stacked"]:
                for p, rows in zip(group["params"], group["rows"], strict=True):
                    if p.grad is not None:
                        self._update_matrix(p, rows, group, grad_scale, found_inf)
            elif params := [p for p in group["params"] if p.grad is not None]:
                self._init_moments(params)
                self._adamw(params, params, group, group["lr"], group["weight_decay"], grad_scale, found_inf)

    def _update_matrix(
        self, p: Tensor, rows: int, group: dict, grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Updates one parameter of `rows` rows over all ranks. Without synchronization: a skipped step has weight 0."""
        state, momentum, weight, gradient = self.state[p], group["momentum"], 1.0, p.grad
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        if grad_scale is not None:
            gradient = gradient / grad_scale
        if found_inf is not None:
            gradient, weight = torch.where(found_inf != 0, 0.0, gradient), 1.0 - found_inf
        state["momentum_buffer"].add_((gradient - state["momentum_buffer"]) * ((1 - momentum) * weight))
        update, start = self._gather(gradient.lerp(state["momentum_buffer"], momentum), rows)
        stack = update.unflatten(0, (group["stacked"], -1))
        update = orthogonalize(stack).flatten(0, 1)[start : start + len(p)]
        rate = group["lr"] * weight
        p.mul_(1 - rate * group["weight_decay"])
        p.sub_(update * (rate * 0.2 * math.sqrt(max(stack.shape[1:]))))

    def _gather(self, own: Tensor, rows: int) -> tuple[Tensor, int]:
        """The matrix of `rows` rows that the ranks divide as torch.chunk does, and the index of this rank's first."""
        if self.shard_group is None:
            return own, 0
        degree = dist.get_world_size(self.shard_group)
        each = -(-rows // degree)
        whole = own.new_empty(degree * each, own.shape[1])
        padded = F.pad(own, (0, 0, 0, each - len(own)))
        dist.all_gather(list(whole.split(each)), padded, group=self.shard_group)
        return whole[:rows], min(dist.get_rank(self.shard_group) * each, rows)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Approximately U V' of matrices [k, rows, columns] = U S V': five Newton-Schulz iterations with Muon's quintic
    coefficients, in bfloat16 on GPUs and float32 on CPUs. Singular values become about 0.7 to 1.2."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    if x.device.type != "cpu":
        x = x.bfloat16()
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x.mT if is_tall else x).float()


def hidden_matrices(model: nn.Module) -> dict[str, int]:
    """The weights of linear layers in `model.layers`, by name: how many matrices each stacks (see modules.Linear)."""
    inside = {module for layer in model.layers for module in layer.modules() if isinstance(module, nn.Linear)}
    return {f"{name}.weight": getattr(m, "stacked", 1) for name, m in model.named_modules() if m in inside}


def muon_groups(
    model: nn.Module, weight_decay: float, parameters: Mapping[str, nn.Parameter] | None = None
) -> list[dict]:
    """Groups for Muon: those of `parameter_groups` without the matrices of hidden layers, then one group for each
    number of stacked matrices. Arguments: see `parameter_groups`."""
    rows = {name: len(p) for name, p in model.named_parameters() if p.dim()}
    named = dict(model.named_parameters()) if parameters is None else parameters
    stacked = {name: count for name, count in hidden_matrices(model).items() if named[name].requires_grad}
    others = {name: p for name, p in named.items() if name not in stacked}
    groups = [{**group, "stacked": 0} for group in parameter_groups(model, weight_decay, others)]
    for count in sorted(set(stacked.values())):
        names = [name for name in named if stacked.get(name) == count]
        group = {"params": [named[name] for name in names], "rows": [rows[name] for name in names]}
        groups.append({**group, "weight_decay": weight_decay, "stacked": count})
    return groups


def muon_state(model: nn.Module, shapes: Shapes) -> StateLayout:
    matrices = hidden_matrices(model)
    momentum = {name: {"momentum_buffer": StateTensor(shape)} for name, shape in shapes.items() if name in matrices}
    return adam_state(model, shapes) | momentum


def make_muon(config: OptimizerConfig, groups, lr, shard_group) -> Muon:
    return Muon(groups, lr, config.betas, config.eps, shard_group=shard_group)


SPEC = OptimizerSpec(make_muon, muon_state, muon_groups)
