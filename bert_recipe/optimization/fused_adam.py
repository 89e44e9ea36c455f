"""The base class of optimizers with Adam's moments."""

import inspect
from abc import abstractmethod
from collections.abc import Callable
from numbers import Real
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from bert_recipe.optimization.protocol import ParameterGroup


class FusedAdam(torch.optim.Optimizer):
    """Base class: the moments of Adam, updated by torch's fused AdamW kernel. A group without the
    key `bias_correction` has the correction. grad_scale, found_inf: set by `apply_step`.
    """

    # torch's wrappers of this and of `add_param_group` keep torch.compile out of them, and import
    # it for that, which takes half a second.
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def add_param_group(self, param_group: ParameterGroup) -> None:
        check_settings(self.defaults | param_group)
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles have: torch's would lose the attributes of subclasses."""
        attributes = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return super().__getstate__() | attributes

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters by their gradients. Returns what `closure` returns, which computes
        the loss and the gradients again, as in torch's optimizers.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.stride() != p.stride():
                    # The fused kernel reads memory in the order of the parameter's.
                    p.grad = torch.empty_like(p).copy_(p.grad)
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


def check_settings(group: ParameterGroup) -> None:
    """Raises ValueError for settings that are no numbers in their range, as torch's AdamW does."""
    lr = group["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr must be a number or a tensor of one element, not {lr}")
    elif not is_number(lr) or not lr >= 0:
        raise ValueError(f"lr must be a number >= 0, not {lr!r}")
    for name in ("eps", "weight_decay"):
        if name in group and not (is_number(group[name]) and group[name] >= 0):
            raise ValueError(f"{name} must be a number >= 0, not {group[name]!r}")
    betas = group["betas"]
    if len(betas) != 2 or not all(is_number(beta) and 0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers >= 0 and < 1, not {betas!r}")


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real)
