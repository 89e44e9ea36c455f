"""Optimizers: LAMB, PyTorch's AdamW, apex's FusedLAMB, and what all of them need around a step.

The optimizers here follow the protocol of PyTorch's own fused ones. Before `step()`, two attributes may be set to
tensors of one element: gradients are divided by `grad_scale` (loss scale times clipping), and where `found_inf` is not
zero the step leaves everything as it was. A group's `lr` may be a tensor, so that a schedule can live on the device.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from utils.errors import UserError

OPTIMIZERS = ("Lamb", "AdamW", "FusedLAMB")
CHUNK = 2**19  # elements that a CPU works on at a time: few enough to stay in its caches, enough to hide Python's time


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al., 2020, "Large Batch Optimization for Deep Learning", algorithm 2), as NVIDIA's recipe has it:

        g = g / max(1, ||g|| / max_grad_norm)                  the norm over all parameters
        m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2            both corrected for their bias
        u = m / (sqrt(v) + eps) + weight_decay * w
        w = w - lr * r * u,  r = ||w|| / ||u||                 r = 1 where either norm is zero

    Groups with `weight_decay` 0 (biases and LayerNorms, see `parameter_groups`) take r = 1.

    Args:
        params: parameters or groups of them.
        lr: learning rate, a number or a tensor of one element.
        betas, eps, weight_decay: as above.
        max_grad_norm: None leaves gradients as they are.
        bias_correction: False leaves m and v uncorrected.
        trust_bounds: (least, most) of r, for DeepSpeed's variant of LAMB, which uses (0.01, 0.3).
        adapt_undecayed: give groups with weight decay 0 a ratio r too, as DeepSpeed does.
        foreach: True for few kernels over all tensors at once, False for one tensor after another, chunk by chunk in
            the caches; None takes the former on GPUs and the latter on CPUs. Same results to rounding.

    Parameters and moments are float32 and contiguous; see `MasterWeights` for models in a narrower type.
    """

    _updates: Tensor | None = None  # memory that the CPU's form reuses: fresh pages cost more than the arithmetic

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

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        return loss

    def _update(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        if self.max_grad_norm is not None:
            grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            norm = total_norm(grads)
            if grad_scale is None:
                grad_scale = torch.ones_like(norm)
            grad_scale = grad_scale * (norm / grad_scale / self.max_grad_norm).clamp(min=1.0)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
            if not params:
                continue
            if not (group["weight_decay"] or group["adapt_undecayed"]):
                self._adam(params, params, group["lr"], group, grad_scale, found_inf)
            elif self.foreach or (self.foreach is None and params[0].device.type != "cpu"):
                self._adapt_together(params, group, grad_scale, found_inf)
            elif found_inf is None or not found_inf.item():
                for p in params:
                    self._adapt_in_cache(p, group, grad_scale)

    def _adam(
        self, params: list[Tensor], moved: list[Tensor], lr: float | Tensor, group: dict, grad_scale, found_inf
    ) -> None:
        """Updates the moments of `params` and moves `moved` by -lr * m / (sqrt(v) + eps), in one pass: torch's fused
        kernel for AdamW without its weight decay."""
        states = [self.state[p] for p in params]
        adamw(
            moved,
            [p.grad for p in params],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [self._bias_step(state, group) for state in states],
            fused=True,
            lr=lr,
            grad_scale=grad_scale,
            found_inf=found_inf,
            **self._kernel_options(group),
        )

    @staticmethod
    def _bias_step(state: dict[str, Tensor], group: dict) -> Tensor:
        """The update that the kernel corrects the moments' bias for; beta^inf is 0, so that both corrections are 1."""
        return state["step"] if group["bias_correction"] else torch.full_like(state["step"], torch.inf)

    @staticmethod
    def _kernel_options(group: dict) -> dict:
        beta1, beta2 = group["betas"]
        return {
            "beta1": beta1,
            "beta2": beta2,
            "eps": group["eps"],
            "weight_decay": 0.0,
            "amsgrad": False,
            "maximize": False,
        }

    def _adapt_together(
        self, params: list[Tensor], group: dict, grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """A step of length lr * r, in few kernels and without waiting for the device. The fused kernel makes -u of what
        starts as -weight_decay * w. 15 numbers a parameter are read and written, where AdamW takes 8 (with
        `grad_scale`)."""
        descents = torch._foreach_mul(params, -group["weight_decay"])
        self._adam(params, descents, 1.0, group, grad_scale, found_inf)
        ratios = self._trust_ratios(params, descents, group["trust_bounds"])
        lengths = ratios * group["lr"] if found_inf is None else ratios * group["lr"] * (1 - found_inf)
        torch._foreach_addcmul_(params, descents, list(lengths.unbind()))

    def _adapt_in_cache(self, p: Tensor, group: dict, grad_scale: Tensor | None) -> None:
        """The same for one tensor, chunk by chunk, so that all but the first touch of a chunk finds it in the cache."""
        state = self.state[p]
        step, options = self._bias_step(state, group), self._kernel_options(group)
        step += 1
        if self._updates is None or len(self._updates) < p.numel() or self._updates.dtype != p.dtype:
            self._updates = p.new_empty(p.numel())
        tensors = p, p.grad, state["exp_avg"], state["exp_avg_sq"], self._updates[: p.numel()]
        chunks = list(zip(*(tensor.view(-1).split(CHUNK) for tensor in tensors), strict=True))
        weight_square = update_square = 0.0
        for weights, grads, exp_avg, exp_avg_sq, descents in chunks:
            weight_square += torch.dot(weights, weights).item()
            torch.mul(weights, -group["weight_decay"], out=descents)
            torch._fused_adamw_(
                *([descents], [grads], [exp_avg], [exp_avg_sq], [], [step]),
                **options,
                lr=1.0,
                grad_scale=grad_scale,
            )
            update_square += torch.dot(descents, descents).item()
        ratio = 1.0
        if weight_square > 0 and update_square > 0:
            ratio = math.sqrt(weight_square / update_square)
            if group["trust_bounds"] is not None:
                least, most = group["trust_bounds"]
                ratio = min(max(ratio, least), most)
        for weights, *_, descents in reversed(chunks):  # the last ones first: they are still in the cache
            weights.add_(descents, alpha=float(group["lr"]) * ratio)

    @staticmethod
    def _trust_ratios(params: list[Tensor], updates: list[Tensor], bounds: tuple[float, float] | None) -> Tensor:
        weight_norms, update_norms = tensor_norms(params), tensor_norms(updates)
        ratios = weight_norms / update_norms
        if bounds is not None:
            ratios = ratios.clamp(*bounds)
        return torch.where((weight_norms > 0) & (update_norms > 0), ratios, 1.0)


def tensor_norms(tensors: list[Tensor]) -> Tensor:
    """||tensor|| of each, on their device. On a CPU torch's own norm adds up all squares of a tensor in float32, and is
    off by 0.1% for 24 million random numbers; chunks that are added up in float64 are off by 0.0001%, and faster."""
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors))
    squares = [sum(torch.dot(c, c).item() for c in tensor.reshape(-1).split(CHUNK)) for tensor in tensors]
    return torch.tensor([math.sqrt(square) for square in squares])


def total_norm(tensors: list[Tensor]) -> Tensor:
    """||all tensors as one vector||, in float32 on their device."""
    if not tensors or tensors[0].device.type != "cpu":
        return torch.nn.utils.get_total_norm(tensors).float()
    return tensor_norms(tensors).norm()


class MasterWeights:
    """Float32 copies of a model's parameters, for a model that is held in 16 bits. The optimizer works on the copies:
    `add_gradients` moves the model's gradients to theirs after each micro-batch, `push_weights` hands the new weights
    back.

    Gradients are added up in float32, since a sum in bfloat16 stops growing at 256 times what is added to it."""

    def __init__(self, model: nn.Module):
        self.model_parameters = dict(model.named_parameters())
        self.masters = {name: nn.Parameter(p.detach().float().clone()) for name, p in self.model_parameters.items()}

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self.masters.items()

    @torch.no_grad()
    def add_gradients(self) -> None:
        for name, p in self.model_parameters.items():
            if p.grad is None:
                continue
            master = self.masters[name]
            master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)
            p.grad = None

    @torch.no_grad()
    def push_weights(self) -> None:
        torch._foreach_copy_(list(self.model_parameters.values()), list(self.masters.values()))


def is_decayed(name: str) -> bool:
    """Biases and LayerNorm parameters take no weight decay, and in LAMB no trust ratio."""
    return not (name.endswith("bias") or "LayerNorm" in name)


def parameter_groups(named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict]:
    """One group with `weight_decay` and one without, for biases and LayerNorms."""
    named = [(name, p) for name, p in named_parameters if p.requires_grad]
    return [
        {"params": [p for name, p in named if is_decayed(name)], "weight_decay": weight_decay},
        {"params": [p for name, p in named if not is_decayed(name)], "weight_decay": 0.0},
    ]


def make_optimizer(
    name: str,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.optim.Optimizer:
    """One of `OPTIMIZERS`. Clipping is left to `apply_step`'s `grad_scale`, so none of them clips by itself."""
    groups = parameter_groups(named_parameters, weight_decay)
    if name == "Lamb":
        return Lamb(groups, lr, betas, eps, weight_decay, max_grad_norm=None)
    if name == "AdamW":
        return torch.optim.AdamW(groups, lr, betas, eps, weight_decay, fused=True)
    if name == "FusedLAMB":
        try:
            from apex.optimizers import FusedLAMB
        except ImportError as error:
            raise UserError(
                "--optimizer FusedLAMB needs apex, which is not installed here: use NVIDIA's PyTorch container, "
                "or --optimizer Lamb, which makes the same updates"
            ) from error
        optimizer = FusedLAMB(
            groups, float(lr), betas=betas, eps=eps, weight_decay=weight_decay, max_grad_norm=float("inf")
        )
        optimizer.learning_rate = lr  # apex takes learning rates as numbers only, so `apply_step` hands it over
        return optimizer
    raise ValueError(f"unknown optimizer {name!r}: expected one of {OPTIMIZERS}")


@torch.no_grad()
def apply_step(optimizer: torch.optim.Optimizer, grad_scale: Tensor, found_inf: Tensor) -> None:
    """One step with gradients divided by `grad_scale`; none where `found_inf` is not zero. Both are float32 tensors
    of one element."""
    if isinstance(optimizer, Lamb) or optimizer.defaults.get("fused"):
        optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
        optimizer.step()
        return
    if not bool(found_inf):  # apex's, which knows nothing of the protocol
        for group in optimizer.param_groups:
            group["lr"] = float(optimizer.learning_rate)
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_div_(grads, grad_scale)
        optimizer.step()


class LossScale:
    """The factor that keeps float16 gradients above the smallest number they can hold. `dynamic`: doubled after 2,000
    clean steps, halved on an overflow, never below 1 (Micikevicius et al., 2018, section 3.2). It lives on the device,
    so that no step waits for it."""

    GROWTH_INTERVAL = 2000

    def __init__(self, initial: float, dynamic: bool, device: torch.device | str = "cpu"):
        self.dynamic = dynamic
        self.value = torch.tensor(float(initial), device=device)
        self.clean_steps = torch.zeros((), device=device)

    def update(self, found_inf: Tensor) -> None:
        if not self.dynamic:
            return
        overflow = found_inf > 0
        clean_steps = torch.where(overflow, 0.0, self.clean_steps + 1)
        grows = clean_steps >= self.GROWTH_INTERVAL
        grown = torch.where(grows, self.value * 2, self.value)
        self.value.copy_(torch.where(overflow, (self.value / 2).clamp(min=1.0), grown))
        self.clean_steps.copy_(torch.where(grows, 0.0, clean_steps))

    def state_dict(self) -> dict[str, float]:
        return {"value": float(self.value), "clean_steps": float(self.clean_steps)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value.fill_(state["value"])
        self.clean_steps.fill_(state["clean_steps"])
