"""Activation checkpointing (Chen et al., 2016): activations are recomputed in the backward pass
instead of stored.

Losses, gradients and the random state are bit-identical to training without it.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

# `selective` saves the outputs of linear layers, which are the most expensive to recompute.
SAVED_OPERATIONS = {getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "linear")}
if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
    SAVED_OPERATIONS.add(torch.ops.mkldnn._linear_pointwise.default)


def save_linear_outputs(
    _context: Any, operation: Any, *_args: Any, **_kwargs: Any
) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE
        if operation in SAVED_OPERATIONS
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


def checkpoint_activations(layers: Iterable[nn.Module], mode: str) -> None:
    """Changes `layers` in place: `full` saves the inputs of each layer, `selective` also its linear
    layers' outputs.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if mode == "selective":
        options["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, save_linear_outputs
        )
    for layer in layers:
        layer.forward = _checkpointed(layer.forward, options)


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def checkpointed_forward(*args: Any) -> Any:
        return checkpoint(forward, *args, **options) if torch.is_grad_enabled() else forward(*args)

    return checkpointed_forward
