"""--optimizer FusedLAMB: the class of NVIDIA's apex, which its containers have. Its state in
checkpoints is Lamb's. Importing this module does not need apex.
"""

import inspect
import math

import torch
from torch import Tensor

from bert_recipe.config import OptimizerConfig, RunConfig
from bert_recipe.optimization.protocol import OptimizerSpec
from bert_recipe.utils.errors import UserError

LAMB = "use --optimizer Lamb, which makes the same updates"


def check_run(config: RunConfig, device: torch.device) -> None:
    """Raises UserError for a strategy that divides tensors or moves them to the CPU, and without
    apex or a GPU.
    """
    parallel = config.parallel
    refused = {
        "--data-parallel-shard-degree": parallel.shard_degree != 1,
        "--enable-cpu-offload": parallel.cpu_offload,
    }
    for flag, is_given in refused.items():
        if is_given:
            raise UserError(
                f"--optimizer FusedLAMB needs whole tensors on the GPU, and cannot be combined "
                f"with {flag}: leave that out, or {LAMB}"
            )
    if device.type != "cuda":
        raise UserError(f"--optimizer FusedLAMB runs on NVIDIA GPUs only: {LAMB}")
    apex_class()


def apex_class() -> type[torch.optim.Optimizer]:
    try:
        from apex.optimizers import FusedLAMB
    except ImportError as error:
        raise UserError(
            f"--optimizer FusedLAMB needs apex, which is not installed here: use NVIDIA's PyTorch "
            f"container, or {LAMB}"
        ) from error
    return FusedLAMB


def make_fused_lamb(config: OptimizerConfig, groups, lr, *_) -> torch.optim.Optimizer:
    base = apex_class()

    class FusedLAMB(base):
        """apex's optimizer with the protocol of optimization/protocol.py, and the state of Lamb:
        apex counts the updates of a group, and Lamb those of each parameter. A step waits for the
        GPU, since apex takes the learning rate as a number.
        """

        # apex's takes no arguments.
        zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
        grad_scale: Tensor | None = None
        found_inf: Tensor | None = None

        @torch.no_grad()
        def step(self) -> None:
            if self.found_inf is not None and bool(self.found_inf):
                return
            grads = {
                p: p.grad
                for group in self.param_groups
                for p in group["params"]
                if p.grad is not None
            }
            if not grads:
                return
            if self.grad_scale is not None:
                torch._foreach_div_(list(grads.values()), self.grad_scale)
            for p in grads:
                if not self.state[p]:
                    self.state[p]["step"] = torch.zeros((), device=p.device)
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
            steps = [self.state[p]["step"] for p in grads]
            counts = dict(zip(grads, torch.stack(steps).tolist(), strict=True))
            rates = [group["lr"] for group in self.param_groups]
            for group in self.param_groups:
                group["lr"] = float(group["lr"])
            # Those of an encoder that was frozen at first are fewer.
            for count in sorted(set(counts.values())):
                for p, grad in grads.items():
                    p.grad = grad if counts[p] == count else None
                for group in self.param_groups:
                    group["step"] = int(count)  # apex adds 1
                super().step()
            for p, grad in grads.items():
                p.grad = grad
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate
            torch._foreach_add_(steps, 1)

    return FusedLAMB(
        groups,
        lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        max_grad_norm=math.inf,  # `grad_scale` has the clipping
    )


SPECS = {"FusedLAMB": OptimizerSpec(make_fused_lamb, saved_as="Lamb", check_run=check_run)}
