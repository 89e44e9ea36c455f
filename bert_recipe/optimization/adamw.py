"""PyTorch's AdamW."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from bert_recipe.config import OptimizerConfig
from bert_recipe.optimization.protocol import OptimizerSpec, ParameterGroup, row_sums

# Share of the rows that have moments, from which on copies of them cost more than all rows.
MAX_SHARE = 1 / 8


class AdamW(torch.optim.AdamW):
    """torch's AdamW, which with `fused=True` also takes the sparse gradient [V, E] of a table on a
    CPU, such as word embeddings. A row that never had a gradient has moments of zero and only
    decays, so the moments of the other rows are all that is read and written; the values are the
    same to the bit. With `amsgrad` or `maximize`, torch refuses such a gradient.
    """

    # Without torch's wrappers, which import torch.compile (see FusedAdam); that of `step` also sets
    # whether gradients are recorded.
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        # By table, the rows that have moments [V], the second moments and their version: others may
        # write them, such as a checkpoint that is restored.
        self.rows: dict[Tensor, tuple[Tensor, Tensor, int]] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:  # of a copy, or loaded
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.rows = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        tables = {}
        for group in self.param_groups:
            takes_rows = group["fused"] and not (group["amsgrad"] or group["maximize"])
            for p in group["params"]:
                if takes_rows and p.is_cpu and p.grad is not None and p.grad.is_sparse:
                    tables[p] = self._update_rows(p, p.grad, group)
                elif p.grad is not None:
                    self.rows.pop(p, None)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            inspect.unwrap(torch.optim.AdamW.step)(self)
        for p, has_moments_V in tables.items():
            second = self.state[p]["exp_avg_sq"]
            self.rows[p] = (has_moments_V, second, second._version)
        return loss

    def _update_rows(self, p: Tensor, gradient: Tensor, group: ParameterGroup) -> Tensor:
        """Updates a table whose gradient is sparse, or makes the gradient dense if many rows have
        moments. Returns which rows have some.
        """
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        has_moments_V = self._rows_with_moments(p)
        gradient = row_sums(gradient)
        touched, values = gradient.indices()[0], gradient.values()
        has_moments_V[touched] = True
        rows = has_moments_V.nonzero()[:, 0]
        if len(rows) > MAX_SHARE * len(p):
            p.grad = torch.zeros_like(p).index_copy_(0, touched, values)
            return has_moments_V
        p.grad = None  # torch's step does not see it
        tables = [p, state["exp_avg"], state["exp_avg_sq"]]
        parts = [table.index_select(0, rows) for table in tables]
        grad = torch.zeros_like(parts[0])
        grad[torch.searchsorted(rows, touched)] = values
        found_inf = getattr(self, "found_inf", None)
        beta1, beta2 = group["betas"]
        adamw(
            parts[:1],
            [grad],
            parts[1:2],
            parts[2:],
            [],
            [state["step"]],
            fused=True,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=found_inf,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        if group["weight_decay"] and not found_inf:
            p.mul_(1 - float(group["lr"]) * group["weight_decay"])
        for table, part in zip(tables, parts, strict=True):
            # Half of the time of torch's index_copy_.
            table.detach().numpy()[rows.numpy()] = part.numpy()
        return has_moments_V

    def _rows_with_moments(self, p: Tensor) -> Tensor:
        """Which rows of a table have moments [V]."""
        first, second = self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]
        if p in self.rows:
            has_moments_V, known, version = self.rows[p]
            if known is second and second._version == version:
                return has_moments_V
        return (first != 0).any(1) | (second != 0).any(1)


def make_adamw(
    config: OptimizerConfig,
    groups: list[ParameterGroup],
    lr: float | Tensor,
    *_process_groups: object,
) -> torch.optim.AdamW:
    return AdamW(groups, lr, config.betas, config.eps, config.weight_decay, fused=True)


SPECS = {"AdamW": OptimizerSpec(make_adamw)}
