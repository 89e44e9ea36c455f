"""A small model with a parameter of each kind, and the gradients of its steps."""

import numpy as np
import torch
from torch import nn

MODEL = nn.ModuleDict(
    {
        **{
            "dense": nn.Linear(16, 24),
            "output": nn.Linear(40, 300, bias=False),
            "LayerNorm": nn.LayerNorm(16),
        },
        "empty": nn.Linear(5, 5, bias=False),
    }
)
MODEL.hidden_modules = [MODEL["dense"]]  # whose matrix Muon takes
SHAPES = {name: p.shape for name, p in MODEL.named_parameters()}
STEPS = 20


def gradients_of_steps(steps: int = STEPS) -> list[dict[str, np.ndarray]]:
    """Norms from 0.03 to 30, so that about half of the steps are clipped; `empty.weight` never has
    any gradient.
    """
    random = np.random.default_rng(1)
    all_steps = []
    for _ in range(steps):
        size = 10 ** random.uniform(-1.5, 1.5) / 110
        grads = {
            name: random.normal(0.2 * size, size, shape).astype(np.float32)
            for name, shape in SHAPES.items()
        }
        grads["empty.weight"][:] = 0
        all_steps.append(grads)
    return all_steps


def set_gradients(parameters, grads, factor: float = 1.0) -> None:
    for name, p in parameters.items():
        p.grad = torch.tensor(grads[name]) * factor
