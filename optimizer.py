"""Optimizers: LAMB, Muon, PyTorch's AdamW, apex's FusedLAMB.

All optimizers follow the protocol of PyTorch's fused optimizers. `apply_step` sets two one-element tensors before
`step()`: gradients are divided by `grad_scale` (loss scale times clipping), and the step is skipped if `found_inf` is
not zero. The `lr` of a group may be a tensor, so that the schedule can be on the device.
"""

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.adamw import adamw

from run_config import OptimizerConfig
from utils.errors import UserError

CHUNK = 2**19  # elements per kernel call on a CPU: few enough for its caches, enough to hide the cost of a call


class FusedAdam(torch.optim.Optimizer):
    """Base class: the moments of Adam, updated by torch's fused AdamW kernel. A group without the key `bias_correction`
    has the correction."""

    # torch's wrappers of these two keep torch.compile out of them, and import it for that, which takes half a second.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)

    def _init_moments(self, params: list[Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                self.state[p] |= {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    def _adamw(
        self,
        params: list[Tensor],
        targets: list[Tensor],
        group: dict,
        lr: float | Tensor,
        weight_decay: float,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Updates the moments of `params`, and `targets` with `lr` and `weight_decay`, in one pass."""
        states = [self.state[p] for p in params]
        adamw(
            targets,
            [p.grad for p in params],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [self._bias_step(state, group) for state in states],
            fused=True,
            lr=lr,
            weight_decay=weight_decay,
            grad_scale=grad_scale,
            found_inf=found_inf,
            **self._kernel_options(group),
        )

    @staticmethod
    def _bias_step(state: dict[str, Tensor], group: dict) -> Tensor:
        """The step count for the kernel's bias correction; beta^inf is 0, which turns the correction off."""
        return state["step"] if group.get("bias_correction", True) else torch.full_like(state["step"], torch.inf)

    @staticmethod
    def _kernel_options(group: dict) -> dict:
        beta1, beta2 = group["betas"]
        return {"beta1": beta1, "beta2": beta2, "eps": group["eps"], "amsgrad": False, "maximize": False}


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
            rows. Norms are computed over whole tensors, with one all-reduce per step in addition to the one for
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


# Parameters that stack several matrices along their rows, by the end of their names: query, key and value; both halves
# of GeGLU.
STACKED_MATRICES = {"Wqkv.weight": 3, "Wi.weight": 2}


def is_hidden_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is a matrix of one of the encoder's layers, which Muon orthogonalizes."""
    return len(shape) == 2 and re.search(r"\blayers?\.\d+\.", name) is not None


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


def gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The gradients of all parameters of `optimizer`, in group order."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def squared_norms(tensors: list[Tensor]) -> Tensor:
    """||tensor||^2 of each tensor, [len(tensors)] float64 on their device.

    On a CPU, torch's norm accumulates in float32: its error is 0.1% for 24 million random numbers. Chunks accumulated
    in float64 have an error of 0.0001% and are faster.
    """
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors)).double().square()
    squares = [sum(torch.dot(c, c).item() for c in tensor.reshape(-1).split(CHUNK)) for tensor in tensors]
    return torch.tensor(squares, dtype=torch.float64)


def tensor_norms(tensors: list[Tensor], shard_group: "dist.ProcessGroup | None" = None) -> Tensor:
    """||tensor|| of each tensor, [len(tensors)] float32 on their device. With `shard_group`, `tensors` are this rank's
    rows and the norms of the whole tensors are computed with one all-reduce."""
    squares = squared_norms(tensors)
    if shard_group is not None:
        dist.all_reduce(squares, group=shard_group)
    return squares.sqrt().float()


def total_norm(tensors: list[Tensor], shard_group: "dist.ProcessGroup | None" = None) -> Tensor:
    """Norm of all tensors concatenated, a float32 scalar on their device; over the whole tensors if they are shards."""
    if shard_group is not None:
        square = squared_norms(tensors).sum()
        dist.all_reduce(square, group=shard_group)
        return square.sqrt().float()
    if not tensors or tensors[0].device.type != "cpu":
        return torch.nn.utils.get_total_norm(tensors).float()
    return tensor_norms(tensors).norm()


NORMALIZATIONS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


def undecayed_parameters(model: nn.Module) -> set[str]:
    """Names of parameters without weight decay (and without trust ratio in LAMB): biases, parameters of normalization
    modules, and all parameters with fewer than two dimensions."""
    return {
        name
        for prefix, module in model.named_modules()
        for name, p in module.named_parameters(prefix, recurse=False)
        if p.ndim < 2 or name.endswith("bias") or isinstance(module, NORMALIZATIONS)
    }


def parameter_groups(
    model: nn.Module, weight_decay: float, parameters: Mapping[str, nn.Parameter] | None = None
) -> list[dict]:
    """One group with `weight_decay`, and one without for biases and normalization (see `undecayed_parameters`).

    parameters: tensors to update instead of the model's own, by name, such as shards or float32 copies.
    """
    undecayed = undecayed_parameters(model)
    named = dict(model.named_parameters()) if parameters is None else parameters
    trained = {name: p for name, p in named.items() if p.requires_grad}
    return [
        {"params": [p for name, p in trained.items() if name not in undecayed], "weight_decay": weight_decay},
        {"params": [p for name, p in trained.items() if name in undecayed], "weight_decay": 0.0},
    ]


def muon_groups(
    model: nn.Module, weight_decay: float, parameters: Mapping[str, nn.Parameter] | None = None
) -> list[dict]:
    """Groups for Muon: those of `parameter_groups` without the matrices of hidden layers, then one group for each
    number of stacked matrices. Arguments: see `parameter_groups`."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    named = dict(model.named_parameters()) if parameters is None else parameters
    matrices = {name: p for name, p in named.items() if p.requires_grad and is_hidden_matrix(name, shapes[name])}
    others = {name: p for name, p in named.items() if name not in matrices}
    groups = [{**group, "stacked": 0} for group in parameter_groups(model, weight_decay, others)]
    stacked = {name: next((n for end, n in STACKED_MATRICES.items() if name.endswith(end)), 1) for name in matrices}
    for count in sorted(set(stacked.values())):
        names = [name for name in matrices if stacked[name] == count]
        rows = [shapes[name][0] for name in names]
        params = [matrices[name] for name in names]
        groups.append({"params": params, "rows": rows, "weight_decay": weight_decay, "stacked": count})
    return groups


# --- the optimizers of --optimizer ------------------------------------------------------------------------------------


COUNT = "step"  # number of a parameter's updates, a scalar; other state tensors have the shape of the parameter
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class OptimizerSpec:
    """Properties of an optimizer. To add an optimizer, write a factory function, an entry in SPECS under its class
    name, and its name in run_config.py.

    make: factory that takes a config, groups of parameters, a learning rate and a `shard_group` (see Lamb). The
        optimizer's `step` reads `grad_scale` and `found_inf` (see the top of this file).
    groups: makes the groups, with the arguments of `parameter_groups`.
    state: keys of the state tensors of a parameter with this name and shape; all are float32.
    counts_in_groups: whether the update count is in the parameter groups, as `step`.
    updates_shards: whether it can update shards.
    update_elements: temporary float32 elements of a step, given the number of elements of each parameter;
        `multi_tensor`: on GPUs and on shards.
    """

    make: Callable[..., torch.optim.Optimizer]
    state: Callable[[str, tuple[int, ...]], Sequence[str]] = lambda _name, _shape: (COUNT, *MOMENTS)
    groups: Callable[..., list[dict]] = parameter_groups
    counts_in_groups: bool = False
    updates_shards: bool = True
    update_elements: Callable[[list[int], bool], int] = lambda _sizes, _multi_tensor: 0

    def state_shapes(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The shapes of the state tensors, by key; saved in and checked against checkpoints."""
        return {key: () if key == COUNT else shape for key in self.state(name, shape)}

    def state_elements(self, model: nn.Module) -> int:
        """Number of float32 elements of the optimizer state for `model`, without counts."""
        shapes = ((name, tuple(p.shape)) for name, p in model.named_parameters())
        return sum(math.prod(shape) * len({*self.state(name, shape)} - {COUNT}) for name, shape in shapes)


def make_lamb(config: OptimizerConfig, groups, lr, shard_group) -> Lamb:
    return Lamb(
        groups,
        *(lr, config.betas, config.eps, config.weight_decay),
        max_grad_norm=None,
        bias_correction=config.bias_correction,
        trust_bounds=config.trust_bounds,
        adapt_undecayed=config.adapt_undecayed,
        shard_group=shard_group,
    )


def make_adamw(config: OptimizerConfig, groups, lr, _shard_group) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr, config.betas, config.eps, config.weight_decay, fused=True)


def make_muon(config: OptimizerConfig, groups, lr, shard_group) -> Muon:
    return Muon(groups, lr, config.betas, config.eps, shard_group=shard_group)


def make_fused_lamb(config: OptimizerConfig, groups, lr, _shard_group) -> torch.optim.Optimizer:
    try:
        from apex.optimizers import FusedLAMB as ApexLAMB
    except ImportError as error:
        raise UserError(
            "--optimizer FusedLAMB needs apex, which is not installed here: use NVIDIA's PyTorch container, "
            "or --optimizer Lamb, which makes the same updates"
        ) from error

    class FusedLAMB(ApexLAMB):
        """Adapter: apex's optimizer needs a float learning rate and ignores `grad_scale` and `found_inf`."""

        def step(self) -> None:
            if not bool(self.found_inf):
                for group in self.param_groups:
                    group["lr"] = float(lr)
                torch._foreach_div_(gradients(self), self.grad_scale)
                super().step()

    return FusedLAMB(
        groups, float(lr), betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, max_grad_norm=math.inf
    )


SPECS = {
    "Lamb": OptimizerSpec(
        make_lamb, update_elements=lambda sizes, multi_tensor: sum(sizes) if multi_tensor else max(sizes)
    ),
    "AdamW": OptimizerSpec(make_adamw),
    "Muon": OptimizerSpec(
        make_muon,
        lambda name, shape: ("momentum_buffer",) if is_hidden_matrix(name, shape) else (COUNT, *MOMENTS),
        muon_groups,
    ),
    "FusedLAMB": OptimizerSpec(
        make_fused_lamb, lambda _name, _shape: MOMENTS, counts_in_groups=True, updates_shards=False
    ),
}


def spec_of(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    return SPECS[type(optimizer).__name__]


def make_optimizer(
    config: OptimizerConfig,
    model: nn.Module,
    lr: float | Tensor,
    parameters: Mapping[str, nn.Parameter] | None = None,
    shard_group: "dist.ProcessGroup | None" = None,
) -> torch.optim.Optimizer:
    """Makes the optimizer `config.name`. parameters: see `parameter_groups`; shard_group: see Lamb."""
    spec = SPECS[config.name]
    return spec.make(config, spec.groups(model, config.weight_decay, parameters), lr, shard_group)


def apply_step(optimizer: torch.optim.Optimizer, grad_scale: Tensor, found_inf: Tensor) -> None:
    """Steps with gradients divided by `grad_scale`, unless `found_inf` is not zero. Both are one-element float32
    tensors."""
    optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
    optimizer.step()
