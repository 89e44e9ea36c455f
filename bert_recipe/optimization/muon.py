"""Muon, on whole tensors and on shards."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bert_recipe.config import OptimizerConfig
from bert_recipe.model.kernels.linear import linear, takes_onednn
from bert_recipe.optimization.fused_adam import FusedAdam
from bert_recipe.optimization.ownership import Owners, joined
from bert_recipe.optimization.protocol import (
    OptimizerSpec,
    ParameterGroup,
    Shapes,
    StateLayout,
    StateTensor,
    adam_state,
    parameter_groups,
    trained_parameters,
)

if TYPE_CHECKING:
    from bert_recipe.model.encoders.base import PreTrainedModel

ROW_MOMENT = "second_momentum_buffer"  # of NorMuon, in its state
# Of matrices that are updated together, unless one has more: on a CPU so few that they fit its
# caches, and on a GPU so many that launches do not count.
CPU_BATCH_ELEMENTS, GPU_BATCH_ELEMENTS = 2**20, 2**26


class Muon(FusedAdam):
    """Muon (Jordan et al., 2024) for the matrices of hidden layers and of the head's transform,
    AdamW for all others:

        m = b m + (1-b) g;  u = b m + (1-b) g                       b: `momentum` (Nesterov's form)
        w = (1 - lr * weight_decay) w - 0.2 sqrt(max(rows, columns)) * lr * orthogonalize(u)

    The factor gives updates the size of AdamW's (Liu et al., 2025), so that one learning rate
    serves both. Query, key and value are orthogonalized separately. torch.optim.Muon has no shards,
    no `grad_scale` and no `found_inf`, and reads the learning rate on the host.

    Groups with `stacked` > 0 are updated by Muon; each parameter is a stack of so many matrices.
    Matrices of one shape are updated together. Several ranks divide the matrices, see
    optimization/ownership.py.

    Args:
        params: groups of parameters, as `muon_groups` makes them; float32.
        lr, betas, eps: of both methods; betas and eps are AdamW's.
        momentum: decay of Muon's momentum.
        shard_group: see Lamb. Owners gather the rows of their matrices.
        replica_group: process group of ranks with the same parameters and gradients.
        product_dtype: type of orthogonalization's products. bfloat16 is faster on GPUs; its error
            is about 1%, for gradients of low rank 15% to 20%.
    """

    def __init__(
        self,
        params: list[ParameterGroup],
        lr: float | Tensor,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        momentum: float = 0.95,
        shard_group: "dist.ProcessGroup | None" = None,
        replica_group: "dist.ProcessGroup | None" = None,
        product_dtype: torch.dtype = torch.float32,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "momentum": momentum})
        if any("stacked" not in group for group in self.param_groups):
            name = type(self).__name__
            raise ValueError(
                f"{name} takes the groups of muon_groups(model, weight_decay), which say what the "
                f"matrices of hidden layers are, not model.parameters()"
            )
        self.product_dtype = product_dtype
        self.owners = Owners(shard_group, replica_group)

    def update(self) -> None:
        matrices: list[Matrix] = []
        for group in self.param_groups:
            if group["stacked"]:
                for p, rows in zip(group["params"], group["rows"], strict=True):
                    if p.grad is not None:
                        matrices.append(Matrix(p, rows, group))
            elif params := [p for p in group["params"] if p.grad is not None]:
                self._init_moments(params)
                self._adamw(params, params, group, group["lr"], group["weight_decay"])
        # Without synchronization: a skipped step has weight 0.
        weight = 1.0 if self.found_inf is None else 1.0 - self.found_inf.reshape(())
        self.owners.update(
            make_batches(matrices),
            partial(self._momentum_updates, weight=weight),
            self._orthogonalize,
            partial(self._apply, weight=weight),
        )

    def _momentum_updates(
        self, batch: Sequence["Matrix"], weight: float | Tensor
    ) -> Sequence[Tensor]:
        """Updates the momentum of this rank's rows. Returns what is to be orthogonalized."""
        momentum = batch[0].group["momentum"]
        momenta = []
        for matrix in batch:
            state = self.state[matrix.p]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(matrix.p)
            momenta.append(state["momentum_buffer"])
        gradient = joined([matrix.p.grad for matrix in batch if matrix.p.grad is not None])
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale
        if self.found_inf is not None:
            gradient = torch.where(self.found_inf != 0, 0.0, gradient)
        gradients = gradient.split([len(matrix.p) for matrix in batch])
        changes = torch._foreach_sub(gradients, momenta)
        torch._foreach_mul_(changes, (1 - momentum) * weight)
        torch._foreach_add_(momenta, changes)
        return torch._foreach_lerp(gradients, momenta, momentum)

    def _orthogonalize(self, batch: Sequence["Matrix"], updates: Sequence[Tensor]) -> Tensor:
        """The orthogonalized matrices, whose rows are `updates`, one below the other."""
        _, rows, _ = batch[0].shape
        matrices = joined(updates).unflatten(0, (-1, rows))
        return orthogonalize(matrices, self.product_dtype).flatten(0, 1)

    def _apply(self, batch: Sequence["Matrix"], update: Tensor, weight: float | Tensor) -> None:
        """Updates this rank's rows by the orthogonalized `update` of these rows."""
        group = batch[0].group
        parameters = [matrix.p for matrix in batch]
        rate = group["lr"] * weight
        torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        update = update * (rate * 0.2 * math.sqrt(max(batch[0].shape[1:])))
        torch._foreach_sub_(parameters, update.split([len(p) for p in parameters]))


class NorMuon(Muon):
    """NorMuon (Li et al., 2025): Muon with the rows of an update o divided by their root mean
    square over time:

        v = 0.95 v + 0.05 mean(o^2) of each row;  w = (1 - lr * weight_decay) w - 0.2 lr o / sqrt(v)

    v starts at 1 / max(rows, columns), as if o were orthogonal: the first updates are about Muon's.
    The paper also scales each update to the root mean square 0.2; v does that on average, without a
    sum over the ranks.
    """

    def _apply(self, batch: Sequence["Matrix"], update: Tensor, weight: float | Tensor) -> None:
        size = max(batch[0].shape[1:])
        moments = []
        for matrix in batch:
            state = self.state[matrix.p]
            if ROW_MOMENT not in state:
                state[ROW_MOMENT] = matrix.p.new_full((len(matrix.p), 1), 1 / size)
            moments.append(state[ROW_MOMENT])
        moment = joined(moments)
        mean = update.square().mean(dim=1, keepdim=True)
        moment = moment + (mean - moment) * (0.05 * weight)
        torch._foreach_copy_(moments, moment.split([len(part) for part in moments]))
        super()._apply(batch, update / ((moment * size).sqrt() + 1e-8), weight)


class Matrix(NamedTuple):
    """A parameter of hidden layers (this rank's rows), its number of rows on all ranks, and its
    group of parameters.
    """

    p: Tensor
    rows: int
    group: ParameterGroup

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of stacked matrices, rows and columns of each."""
        return self.group["stacked"], self.rows // self.group["stacked"], self.p.shape[1]

    @property
    def cost(self) -> int:
        """Multiplications of `orthogonalize`, up to a factor."""
        count, rows, columns = self.shape
        return count * min(rows, columns) ** 2 * max(rows, columns)


def make_batches(matrices: Sequence[Matrix]) -> list[list[Matrix]]:
    """Parameters whose matrices have one shape, and whose groups have the same settings, to be
    updated together: a GPU then needs few launches, and a CPU uses all threads for small matrices.
    """
    batches_of_kind: dict[tuple[object, ...], list[list[Matrix]]] = {}
    for matrix in matrices:
        group = matrix.group
        settings = (group["momentum"], group["weight_decay"], id(group["lr"]))
        kind = (*matrix.shape[1:], matrix.p.device, *settings)
        batches = batches_of_kind.setdefault(kind, [[]])
        last_batch = batches[-1]
        columns = matrix.shape[2]
        elements = columns * (matrix.rows + sum(other.rows for other in last_batch))
        if elements > batch_elements(matrix.p.is_cpu) and last_batch:
            last_batch = []
            batches.append(last_batch)
        last_batch.append(matrix)
    return [batch for batches in batches_of_kind.values() for batch in batches]


def batch_elements(is_cpu: bool) -> int:
    return CPU_BATCH_ELEMENTS if is_cpu else GPU_BATCH_ELEMENTS


# Quintic polynomials a s + b s^3 + c s^5, one per iteration: each the best for the interval that
# those before it leave of [0.003, 1]. All but the last for s / 1.01, since bfloat16 may round a
# singular value up.
POLAR_EXPRESS = (
    (8.1377, -22.7137, 16.3254),
    (3.9652, -2.8364, 0.5225),
    (3.4887, -2.5622, 0.5016),
    (2.5115, -1.8524, 0.4388),
)


def orthogonalize(matrices: Tensor, product_dtype: torch.dtype = torch.float32) -> Tensor:
    """Approximately U V' of matrices [k, rows, columns] = U S V', by Polar Express (Amsel et al.,
    2025), with products in `product_dtype`. Singular values of at least 0.003 times the Frobenius
    norm become 0.77 to 1.21, as with five iterations of Muon's first polynomial (0.68 to 1.21);
    smaller ones are multiplied by up to 283 / norm.

    In float32, wide matrices x become P x, with P the iterations' polynomial of x x', which is
    smaller than x. bfloat16 would lose the singular values below 0.06, which x x' squares, and TF32
    those below 0.02.
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    x = x.to(product_dtype)
    is_exact = product_dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    if is_exact and x.shape[2] > 2 * x.shape[1]:
        x = products(polar_polynomial(products(x, x.mT)), x)
    else:
        for a, b, c in POLAR_EXPRESS:
            gram = products(x, x.mT)
            # a x + (b gram + c gram^2) x
            x = add_products(x, add_products(gram, gram, gram, b, c), x, a)
    return (x.mT if is_tall else x).float()


def polar_polynomial(gram: Tensor) -> Tensor:
    """P [k, rows, rows] with P x = the result of POLAR_EXPRESS for x of `gram` = x x'."""
    product = factor = polynomial(gram, *POLAR_EXPRESS[0])
    for coefficients in POLAR_EXPRESS[1:]:
        gram = products(products(factor, gram), factor)  # that of factor @ x
        factor = polynomial(gram, *coefficients)
        product = products(factor, product)
    return product


def polynomial(gram: Tensor, a: float, b: float, c: float) -> Tensor:
    """a + b gram + c gram^2 [k, rows, rows]."""
    result = add_products(gram, gram, gram, b, c)
    result.diagonal(dim1=1, dim2=2).add_(a)
    return result


def products(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of each matrix [k, rows, columns]."""
    if not takes_onednn(a[0], b[0].mT):
        return a @ b
    return torch.stack([linear(left, right.mT) for left, right in zip(a, b, strict=True)])


def add_products(x: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float = 1.0) -> Tensor:
    """beta x + alpha a @ b of each matrix [k, rows, columns]."""
    if not takes_onednn(a[0], b[0].mT):
        return torch.baddbmm(x, a, b, beta=beta, alpha=alpha)
    return products(a, b).mul_(alpha).add_(x, alpha=beta)


def hidden_matrices(model: nn.Module) -> dict[str, int]:
    """The weights of linear layers in `model.hidden_modules`, by name: how many matrices each has
    (see modules.Linear).
    """
    hidden_linears = set()
    for part in cast("PreTrainedModel", model).hidden_modules:
        hidden_linears |= {module for module in part.modules() if isinstance(module, nn.Linear)}
    matrices = {}
    for name, module in model.named_modules():
        if module in hidden_linears:
            matrices[f"{name}.weight"] = getattr(module, "stacked", 1)
    return matrices


def muon_groups(
    model: nn.Module, weight_decay: float, parameters: Mapping[str, nn.Parameter] | None = None
) -> list[ParameterGroup]:
    """Those of `parameter_groups` without hidden layers' matrices, then one for each number of
    stacked matrices. Your own model lists its hidden layers in `hidden_modules`.

        optimizer = NorMuon(muon_groups(model, weight_decay=0.01), lr=1e-3)
    """
    rows = {name: len(p) for name, p in model.named_parameters() if p.dim()}
    named = trained_parameters(model, parameters)
    stacked = {name: count for name, count in hidden_matrices(model).items() if name in named}
    others = {name: p for name, p in named.items() if name not in stacked}
    groups = [{**group, "stacked": 0} for group in parameter_groups(model, weight_decay, others)]
    for count in sorted(set(stacked.values())):
        names = [name for name in named if stacked.get(name) == count]
        group = {"params": [named[name] for name in names], "rows": [rows[name] for name in names]}
        groups.append({**group, "weight_decay": weight_decay, "stacked": count})
    return groups


def muon_state(model: nn.Module, shapes: Shapes) -> StateLayout:
    momentum = {
        name: {"momentum_buffer": StateTensor(shapes[name])} for name in hidden_matrices(model)
    }
    return adam_state(model, shapes) | momentum


def normuon_state(model: nn.Module, shapes: Shapes) -> StateLayout:
    state = muon_state(model, shapes)
    for name in hidden_matrices(model):
        state[name][ROW_MOMENT] = StateTensor((shapes[name][0], 1))
    return state


def make_muon(
    kind: type[Muon],
    config: OptimizerConfig,
    groups: list[ParameterGroup],
    lr: float | Tensor,
    shard_group: "dist.ProcessGroup | None",
    replica_group: "dist.ProcessGroup | None",
    product_dtype: torch.dtype,
) -> Muon:
    return kind(
        groups,
        lr,
        config.betas,
        config.eps,
        shard_group=shard_group,
        replica_group=replica_group,
        product_dtype=product_dtype,
    )


MUON = OptimizerSpec(partial(make_muon, Muon), muon_state, muon_groups)
SPECS = {
    "Muon": MUON,
    "NorMuon": replace(MUON, make=partial(make_muon, NorMuon), state=normuon_state),
}
