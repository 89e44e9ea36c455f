"""apex.optimizers.FusedLAMB for tests: its interface and groups, its algorithm in float64."""

import sys
from types import ModuleType

import pytest
import torch


class FusedLAMB(torch.optim.Optimizer):
    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-6,
        weight_decay=0.01,
        max_grad_norm=1.0,
    ):
        names = ("lr", "bias_correction", "betas", "eps", "weight_decay", "max_grad_norm")
        values = (lr, bias_correction, betas, eps, weight_decay, max_grad_norm)
        super().__init__(params, dict(zip(names, values, strict=True)))

    def zero_grad(self):
        raise AssertionError("it takes no set_to_none")

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            assert type(group["lr"]) is float and group["max_grad_norm"] == float("inf")
            group["step"] = group.get("step", 0) + 1
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                self.update(p, state, group)

    def update(self, p, state, group):
        beta1, beta2 = group["betas"]
        gradient, weights = p.grad.double(), p.double()
        m = beta1 * state["exp_avg"].double() + (1 - beta1) * gradient
        v = beta2 * state["exp_avg_sq"].double() + (1 - beta2) * gradient**2
        state["exp_avg"].copy_(m)
        state["exp_avg_sq"].copy_(v)
        m_hat, v_hat = m / (1 - beta1 ** group["step"]), v / (1 - beta2 ** group["step"])
        update = m_hat / (v_hat.sqrt() + group["eps"]) + group["weight_decay"] * weights
        ratio = 1.0
        if group["weight_decay"] and weights.norm() > 0 and update.norm() > 0:
            ratio = float(weights.norm() / update.norm())
        p.sub_((group["lr"] * ratio * update).float())


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    apex, optimizers = ModuleType("apex"), ModuleType("apex.optimizers")
    apex.optimizers, optimizers.FusedLAMB = optimizers, FusedLAMB
    monkeypatch.setitem(sys.modules, "apex", apex)
    monkeypatch.setitem(sys.modules, "apex.optimizers", optimizers)
