"""The base class of optimizers with Adam's moments."""

import inspect
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from bert_recipe.optimization.protocol import ParameterGroup


class FusedAdam(torch.optim.Optimizer):
    """Base class: the moments of Adam, updated by torch's fused AdamW kernel. A group without the
    key `bias_correction` has the correction. grad_scale, found_inf: set by `apply_step`.
    """

    # torch's wrappers of these two keep torch.compile out of them, and import it for that, which
    # takes half a second.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters by their gradients. Returns what `closure` returns, which computes
        the loss and the gradients again, as in torch's optimizers.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update()
        return loss

    @abstractmethod
    def update(self) -> None:
        """Updates all parameters that have gradients."""

    def _init_moments(self, params: list[Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                self.state[p] |= {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    def _adamw(
        self,
        params: list[Tensor],
        targets: list[Tensor],
        group: ParameterGroup,
        lr: float | Tensor,
        weight_decay: float,
    ) -> None:
        """Updates moments of `params`, and `targets` by `lr` and `weight_decay`, in one pass."""
        states = [self.state[p] for p in params]
        steps = [self._bias_step(state, group) for state in states]
        options = self._kernel_options(group, lr, weight_decay)
        adamw(
            targets,
            [p.grad for p in params if p.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            fused=True,
            found_inf=self.found_inf,
            **options,
        )

    @staticmethod
    def _bias_step(state: dict[str, Tensor], group: ParameterGroup) -> Tensor:
        """The step count for the kernel's bias correction; beta^inf is 0, which turns the
        correction off.
        """
        if group.get("bias_correction", True):
            return state["step"]
        return torch.full_like(state["step"], torch.inf)

    def _kernel_options(
        self, group: ParameterGroup, lr: float | Tensor, weight_decay: float
    ) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {
            "lr": lr,
            "beta1": beta1,
            "beta2": beta2,
            "eps": group["eps"],
            "weight_decay": weight_decay,
            "grad_scale": self.grad_scale,
            "amsgrad": False,
            "maximize": False,
        }
