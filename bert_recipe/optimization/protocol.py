"""What an optimizer declares: its groups of parameters, and the shape and owner of its state.

All optimizers follow the protocol of PyTorch's fused optimizers. `apply_step` sets two one-element
tensors before `step()`: gradients are divided by `grad_scale` (loss scale times clipping), and the
step is skipped if `found_inf` is not zero. The `lr` of a group may be a tensor, so that the
schedule can be on the device.

To add an optimizer, write a file here with its class and `SPECS`, its OptimizerSpec by the name of
the class; name it and its file in OPTIMIZERS of config/optimization.py; import the class in
optimizer.py.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from bert_recipe.config import RunConfig

NORMALIZATIONS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)

Shapes = Mapping[str, tuple[int, ...]]  # of parameters, by name
ParameterGroup = dict[str, Any]  # as torch's optimizers take it: "params" and their settings


class StateTensor(NamedTuple):
    """A float32 tensor of a parameter's optimizer state: its shape on whole parameters, and its
    owner. `rows`: each rank has the rows that it has of the parameter; the shape is the
    parameter's, or has as many rows. `all`: every rank has the whole tensor, of any shape, and the
    main process saves it.
    """

    shape: tuple[int, ...]
    owner: Literal["rows", "all"] = "rows"


StateLayout = dict[str, dict[str, StateTensor]]  # by name of the parameter and key


def adam_state(_model: nn.Module, shapes: Shapes) -> StateLayout:
    """The state of Adam and LAMB: the number of a parameter's updates, and two moments."""
    count = StateTensor((), "all")
    return {
        name: {"step": count, "exp_avg": StateTensor(shape), "exp_avg_sq": StateTensor(shape)}
        for name, shape in shapes.items()
    }


def undecayed_parameters(model: nn.Module) -> set[str]:
    """Names of parameters without weight decay (and without trust ratio in LAMB): biases,
    parameters of normalization modules, and all parameters with fewer than two dimensions.
    """
    return {
        name
        for prefix, module in model.named_modules()
        for name, p in module.named_parameters(prefix, recurse=False)
        if p.ndim < 2 or name.endswith("bias") or isinstance(module, NORMALIZATIONS)
    }


def trained_parameters(
    model: nn.Module, parameters: Mapping[str, nn.Parameter] | None = None
) -> dict[str, nn.Parameter]:
    """The tensors that an optimizer updates, by name. parameters: see `parameter_groups`."""
    of_model = dict(model.named_parameters())
    named = of_model if parameters is None else parameters
    return {name: p for name, p in named.items() if of_model[name].requires_grad}


def parameter_groups(
    model: nn.Module, weight_decay: float, parameters: Mapping[str, nn.Parameter] | None = None
) -> list[ParameterGroup]:
    """One group with `weight_decay`, and one without for biases and normalization (see
    `undecayed_parameters`).

        optimizer = Lamb(parameter_groups(model, weight_decay=0.01), lr=1e-3)

    parameters: tensors to update instead of the model's own, by name, such as shards or float32
    copies. Those without `requires_grad` in the model never train.
    """
    undecayed = undecayed_parameters(model)
    trained = trained_parameters(model, parameters)
    return [
        {
            "params": [p for name, p in trained.items() if name not in undecayed],
            "weight_decay": weight_decay,
        },
        {"params": [p for name, p in trained.items() if name in undecayed], "weight_decay": 0.0},
    ]


@dataclass(frozen=True)
class OptimizerSpec:
    """Properties of an optimizer.

    make: factory that takes an OptimizerConfig, groups of parameters, a learning rate, the process
        groups `shard_group` and `replica_group`, and `product_dtype` (see Muon); the optimizer may
        ignore the last two.
    groups: makes the groups, with the arguments of `parameter_groups`.
    state: the state for a model whose parameters have these shapes in checkpoints.
    saved_as: the optimizer whose state it has in checkpoints; None for itself.
    check_run: raises UserError for a run that it does not support on a device, or None.
    """

    make: Callable[..., torch.optim.Optimizer]
    state: Callable[[nn.Module, Shapes], StateLayout] = adam_state
    groups: Callable[..., list[ParameterGroup]] = parameter_groups
    saved_as: str | None = None
    check_run: Callable[[RunConfig, torch.device], None] | None = None

    def state_elements(self, model: nn.Module, shard_degree: int = 1) -> float:
        """Number of float32 elements of the optimizer state for `model` on each of `shard_degree`
        ranks.
        """
        layout = self.state(model, {name: tuple(p.shape) for name, p in model.named_parameters()})
        tensors = [tensor for state in layout.values() for tensor in state.values() if tensor.shape]
        return sum(
            math.prod(shape) / (shard_degree if owner == "rows" else 1) for shape, owner in tensors
        )


def gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The gradients of all parameters of `optimizer`, in group order; of sparse ones the rows."""
    params = (p for group in optimizer.param_groups for p in group["params"])
    grads = [p.grad for p in params if p.grad is not None]
    return [row_sums(grad).values() if grad.is_sparse else grad for grad in grads]


def row_sums(gradient: Tensor) -> Tensor:
    """A sparse gradient with each row once; a dense one is not changed. Of one micro-batch, the
    sums are those of a dense gradient to the bit; those of `coalesce` have another order.
    """
    if not gradient.is_sparse or gradient.is_coalesced():
        return gradient
    rows, places = gradient._indices()[0].unique(return_inverse=True)
    sums = torch.ops.aten.embedding_dense_backward(gradient._values(), places, len(rows), -1, False)
    # torch.sparse_coo_tensor warns in torch 2.11, whatever `check_invariants` is.
    return torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        1,
        gradient.ndim - 1,
        gradient.shape,
        rows[None],
        sums,
        dtype=sums.dtype,
        layout=gradient.layout,
        device=sums.device,
        is_coalesced=True,
    )


def apply_step(optimizer: torch.optim.Optimizer, grad_scale: Tensor, found_inf: Tensor) -> None:
    """Steps with gradients divided by `grad_scale`, unless `found_inf` is not 0; both float32 of
    one element. Computes the rates of layers, see optimization/layers.py.
    """
    for group in optimizer.param_groups:
        if "base_lr" in group:
            torch.mul(group["base_lr"], group["lr_factor"], out=group["lr"])
    vars(optimizer).update(grad_scale=grad_scale, found_inf=found_inf)
    optimizer.step()
