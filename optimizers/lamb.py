"""LAMB, on whole tensors and on shards."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optimizers.fused_adam import FusedAdam
from optimizers.norms import CHUNK, tensor_norms, total_norm
from optimizers.protocol import OptimizerSpec, gradients
from run_config import OptimizerConfig


class Lamb(FusedAdam):
    """LAMB (You et al., 2020, "Large Batch Optimization for Deep Learning", algorithm 2), as in NVIDIA's recipe:

        g = g / max(1, ||g|| / max_grad_norm)                  the norm over all parameters
        m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2            both bias-corrected
        u = m / (sqrt(v) + eps) + weight_decay * w
        w = w - lr * r * u,  r = ||w|| / ||u||                 r = 1 where either norm is zero

    Groups with `weight_decay` 0 (biases and LayerNorms, see `parameter_groups`) use r = 1.

    Args:
        params: parameters or groups of them; float32 and contiguous.
        lr: learning rate, a number or a tensor of one element.
        betas, eps, weight_decay: as above.
        max_grad_norm: None for no clipping.
        bias_correction: False for no bias correction of m and v.
        trust_bounds: (minimum, maximum) of r; DeepSpeed's variant of LAMB uses (0.01, 0.3).
        adapt_undecayed: True to also use a trust ratio for groups with weight decay 0, as DeepSpeed does.
        foreach: True to update all tensors together in few kernels, False to update one tensor after another in
            cache-sized chunks; None for True on GPUs and False on CPUs. The results differ only by rounding.
        shard_group: process group over which the rows of each parameter are sharded. `params` are then this rank's
            rows. Norms are computed over whole tensors, with one all-gather per step in addition to the one for
            `max_grad_norm`.
    """

    _update_buffer: Tensor | None = None  # reused for CPU chunks: allocating pages costs more than the arithmetic

    def __init__(
        self,
        params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        max_grad_norm: float | None = 1.0,
        bias_correction: bool = True,
        trust_bounds: tuple[float, float] | None = None,
        adapt_undecayed: bool = False,
        foreach: bool | None = None,
        shard_group: "dist.ProcessGroup | None" = None,
    ):
        if not 0 <= betas[0] < 1 or not 0 <= betas[1] < 1:
            raise ValueError(f"betas must be in [0, 1), not {betas}")
        if eps < 0 or weight_decay < 0 or float(lr) < 0:
            raise ValueError(f"lr, eps and weight_decay must not be negative: {lr}, {eps}, {weight_decay}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "trust_bounds": trust_bounds,
            "adapt_undecayed": adapt_undecayed,
        }
        super().__init__(params, defaults)
        self.max_grad_norm = max_grad_norm
        self.foreach = foreach
        self.shard_group = shard_group

    @torch.no_grad()
    def step(self) -> None:
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if self.max_grad_norm is not None:
            norm = total_norm(gradients(self), self.shard_group)
            if grad_scale is None:
                grad_scale = torch.ones_like(norm)
            grad_scale = grad_scale * (norm / grad_scale / self.max_grad_norm).clamp(min=1.0)
        adapted: list[tuple[dict, list[Tensor]]] = []
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            self._init_moments(params)
            if params and (group["weight_decay"] or group["adapt_undecayed"]):
                adapted.append((group, params))
            elif params:
                self._adamw(params, params, group, group["lr"], 0.0, grad_scale, found_inf)
        if not adapted:
            return
        on_cpu = adapted[0][1][0].device.type == "cpu"
        if self.shard_group is not None or self.foreach or (self.foreach is None and not on_cpu):
            self._multi_tensor_step(adapted, grad_scale, found_inf)
        elif found_inf is None or not found_inf.item():
            for group, params in adapted:
                for p in params:
                    self._single_tensor_step(p, group, grad_scale)

    def _multi_tensor_step(
        self, adapted: list[tuple[dict, list[Tensor]]], grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Updates all tensors in few kernels, without synchronization. The fused kernel turns -weight_decay * w into
        -u. Memory traffic is 15 numbers per parameter; AdamW's is 8 (with `grad_scale`)."""
        all_params, all_updates = [], []
        for group, params in adapted:
            updates = torch._foreach_mul(params, -group["weight_decay"])
            self._adamw(params, updates, group, 1.0, 0.0, grad_scale, found_inf)
            all_params += params
            all_updates += updates
        weight_norms, update_norms = tensor_norms(all_params + all_updates, self.shard_group).chunk(2)
        start = 0
        for group, params in adapted:
            part = slice(start, start + len(params))
            start += len(params)
            steps = self._trust_ratios(weight_norms[part], update_norms[part], group["trust_bounds"]) * group["lr"]
            if found_inf is not None:
                steps = steps * (1 - found_inf)
            torch._foreach_addcmul_(params, all_updates[part], list(steps.unbind()))

    def _single_tensor_step(self, p: Tensor, group: dict, grad_scale: Tensor | None) -> None:
        """Updates one tensor in chunks, which stay in the cache after the first read."""
        state = self.state[p]
        step, options = self._bias_step(state, group), self._kernel_options(group)
        step += 1
        if self._update_buffer is None or len(self._update_buffer) < p.numel() or self._update_buffer.dtype != p.dtype:
            self._update_buffer = p.new_empty(p.numel())
        tensors = p, p.grad, state["exp_avg"], state["exp_avg_sq"], self._update_buffer[: p.numel()]
        chunks = list(zip(*(tensor.view(-1).split(CHUNK) for tensor in tensors), strict=True))
        weight_square = update_square = 0.0
        for weights, grads, exp_avg, exp_avg_sq, updates in chunks:
            weight_square += torch.dot(weights, weights).item()
            torch.mul(weights, -group["weight_decay"], out=updates)
            torch._fused_adamw_(
                *([updates], [grads], [exp_avg], [exp_avg_sq], [], [step]),
                **options,
                lr=1.0,
                weight_decay=0.0,
                grad_scale=grad_scale,
            )
            update_square += torch.dot(updates, updates).item()
        ratio = 1.0
        if weight_square > 0 and update_square > 0:
            ratio = math.sqrt(weight_square / update_square)
            if group["trust_bounds"] is not None:
                minimum, maximum = group["trust_bounds"]
                ratio = min(max(ratio, minimum), maximum)
        for weights, *_, updates in reversed(chunks):  # the last chunks are still in the cache
            weights.add_(updates, alpha=float(group["lr"]) * ratio)

    @staticmethod
    def _trust_ratios(weight_norms: Tensor, update_norms: Tensor, bounds: tuple[float, float] | None) -> Tensor:
        ratios = weight_norms / update_norms
        if bounds is not None:
            ratios = ratios.clamp(*bounds)
        return torch.where((weight_norms > 0) & (update_norms > 0), ratios, 1.0)


def make_lamb(config: OptimizerConfig, groups, lr, shard_group, _replica_group) -> Lamb:
    return Lamb(
        groups,
        *(lr, config.betas, config.eps, config.weight_decay),
        max_grad_norm=None,
        bias_correction=config.bias_correction,
        trust_bounds=config.trust_bounds,
        adapt_undecayed=config.adapt_undecayed,
        shard_group=shard_group,
    )


def temporary_elements(model: nn.Module, multi_tensor: bool, shard_degree: int, _world_size: int) -> float:
    sizes = [p.numel() for p in model.parameters()]
    return sum(sizes) / shard_degree if multi_tensor else max(sizes)


SPEC = OptimizerSpec(make_lamb, update_elements=temporary_elements)
