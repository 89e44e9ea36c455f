"""LAMB, on whole tensors and on shards."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from bert_recipe.config import OptimizerConfig
from bert_recipe.optimization.fused_adam import FusedAdam
from bert_recipe.optimization.norms import CHUNK, tensor_norms
from bert_recipe.optimization.protocol import OptimizerSpec, ParameterGroup


class Lamb(FusedAdam):
    """LAMB (You et al., 2020, "Large Batch Optimization for Deep Learning", algorithm 2), as in
    NVIDIA's recipe, on gradients g that are clipped already:

        m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2            both bias-corrected
        u = m / (sqrt(v) + eps) + weight_decay * w
        w = w - lr * r * u,  r = ||w|| / ||u||                 r = 1 where either norm is zero

    Groups with `weight_decay` 0 (biases and LayerNorms, see `parameter_groups`) use r = 1.

    Args:
        params: parameters or groups of them; float32 and contiguous.
        lr: learning rate, a number or a tensor of one element.
        betas, eps, weight_decay: as above.
        bias_correction: False for no bias correction of m and v.
        trust_bounds: (minimum, maximum) of r; DeepSpeed's variant of LAMB uses (0.01, 0.3).
        adapt_undecayed: True to also use a trust ratio for groups with weight decay 0, as DeepSpeed
            does.
        foreach: True to update all tensors together in few kernels, False to update one tensor
            after another in cache-sized chunks; None for True on GPUs and False on CPUs. The
            results differ only by rounding.
        shard_group: process group over which the rows of each parameter are sharded. `params` are
            then this rank's rows. Norms are computed over whole tensors, with one all-gather per
            step.
    """

    # reused for CPU chunks: allocating pages costs more than the arithmetic
    _update_buffer: Tensor | None = None

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
        trust_bounds: tuple[float, float] | None = None,
        adapt_undecayed: bool = False,
        foreach: bool | None = None,
        shard_group: "dist.ProcessGroup | None" = None,
    ):
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "trust_bounds": trust_bounds or (0.0, math.inf),
            "adapt_undecayed": adapt_undecayed,
        }
        super().__init__(params, defaults)
        self.foreach, self.shard_group = foreach, shard_group

    def update(self) -> None:
        adapted: list[tuple[ParameterGroup, list[Tensor]]] = []
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            self._init_moments(params)
            if params and (group["weight_decay"] or group["adapt_undecayed"]):
                adapted.append((group, params))
            elif params:
                self._adamw(params, params, group, group["lr"], 0.0)
        if not adapted:
            return
        _, first_params = adapted[0]
        is_multi_tensor = self.foreach
        if is_multi_tensor is None:
            is_multi_tensor = first_params[0].device.type != "cpu"
        if self.shard_group is not None or is_multi_tensor:
            self._multi_tensor_step(adapted)
        elif self.found_inf is None or not self.found_inf.item():
            for group, params in adapted:
                for p in params:
                    self._single_tensor_step(p, group)

    def _multi_tensor_step(self, adapted: list[tuple[ParameterGroup, list[Tensor]]]) -> None:
        """Updates all tensors in few kernels, without synchronization. The fused kernel turns
        -weight_decay * w into -u. Memory traffic is 15 numbers per parameter; AdamW's is 8 (with
        `grad_scale`).
        """
        all_updates: list[Tensor] = []
        for group, params in adapted:
            targets = list(torch._foreach_mul(params, -group["weight_decay"]))
            self._adamw(params, targets, group, 1.0, 0.0)
            all_updates += targets
        all_params = [p for _, params in adapted for p in params]
        norms = tensor_norms(all_params + all_updates, self.shard_group)
        all_weight_norms, all_update_norms = norms.chunk(2)
        start = 0
        for group, params in adapted:
            part = slice(start, start + len(params))
            start = part.stop
            weight_norms, update_norms = all_weight_norms[part], all_update_norms[part]
            ratios = (weight_norms / update_norms).clamp(*group["trust_bounds"])
            has_ratio = (weight_norms > 0) & (update_norms > 0)
            steps = torch.where(has_ratio, ratios, 1.0) * group["lr"]
            if self.found_inf is not None:
                steps = steps * (1 - self.found_inf)
            torch._foreach_addcmul_(params, all_updates[part], list(steps.unbind()))

    def _single_tensor_step(self, p: Tensor, group: ParameterGroup) -> None:
        """Updates one tensor in chunks, which stay in the cache after the first read."""
        state = self.state[p]
        options = self._kernel_options(group, 1.0, 0.0)
        step = self._bias_step(state, group)
        step += 1  # in place, so also in the state: the kernel does not count
        if (
            self._update_buffer is None
            or len(self._update_buffer) < p.numel()
            or self._update_buffer.dtype != p.dtype
        ):
            self._update_buffer = p.new_empty(p.numel())
        buffer = self._update_buffer[: p.numel()]
        tensors: list[Any] = [p, p.grad, state["exp_avg"], state["exp_avg_sq"], buffer]
        chunks = list(zip(*(tensor.view(-1).split(CHUNK) for tensor in tensors), strict=True))
        weight_square = update_square = 0.0
        for weights, grads, exp_avg, exp_avg_sq, updates in chunks:
            weight_square += torch.dot(weights, weights).item()
            torch.mul(weights, -group["weight_decay"], out=updates)
            torch._fused_adamw_([updates], [grads], [exp_avg], [exp_avg_sq], [], [step], **options)
            update_square += torch.dot(updates, updates).item()
        ratio = 1.0
        minimum, maximum = group["trust_bounds"]
        if weight_square > 0 and update_square > 0:
            ratio = min(max(math.sqrt(weight_square / update_square), minimum), maximum)
        for weights, *_, updates in reversed(chunks):  # the last chunks are still in the cache
            weights.add_(updates, alpha=float(group["lr"]) * ratio)


def make_lamb(
    config: OptimizerConfig,
    groups: list[ParameterGroup],
    lr: float | Tensor,
    shard_group: "dist.ProcessGroup | None",
    *_: object,
) -> Lamb:
    return Lamb(
        groups,
        lr,
        config.betas,
        config.eps,
        config.weight_decay,
        config.bias_correction,
        config.trust_bounds,
        adapt_undecayed=config.adapt_undecayed,
        shard_group=shard_group,
    )


SPECS = {"Lamb": OptimizerSpec(make_lamb)}
