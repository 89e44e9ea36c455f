"""Dropout (Srivastava et al., 2014), with a fast mask on the CPU.

torch's CPU dropout draws one random number per element, in one thread. Here, NumPy's SFC64
generator runs on all threads and uses 16 random bits per element, so the probability is a multiple
of 2^-16. A mask element has the size of a state, with all bits set if the state is kept, so a
bitwise `and` applies it at memory speed.

Masks depend only on torch's random state, not on the number of threads.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

MASK_DTYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}
MASK_CHUNK = 2**18  # states per task: half a megabyte of random bits, which fits a core's cache


@cache
def thread_pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="dropout")


def fill_mask(seed: int, dropped: int, part: int, mask_K: np.ndarray) -> None:
    """Fills `mask_K`, int16, with 0 (dropped) at a probability of `dropped` / 2^16, and with -1
    (kept) elsewhere.
    """
    random = np.random.Generator(np.random.SFC64([seed, part]))
    words = random.integers(0, 2**64 - 1, -(-len(mask_K) // 4), dtype=np.uint64, endpoint=True)
    np.greater_equal(words.view(np.uint16)[: len(mask_K)], dropped, out=mask_K)
    np.negative(mask_K, out=mask_K)


def dropout_mask(states: Tensor, prob: float) -> tuple[Tensor | None, float]:
    """A mask that keeps each element of `states` with probability 1 - `prob`, and the scale; (None,
    1.0) for 0.
    """
    dropped = min(round(prob * 2**16), 2**16 - 1)
    if dropped == 0:
        return None, 1.0
    mask = torch.empty(states.shape, dtype=torch.int16)
    parts = np.split(mask.view(-1).numpy(), range(MASK_CHUNK, mask.numel(), MASK_CHUNK))
    seed = int(torch.randint(2**63 - 1, ()))
    threads = min(torch.get_num_threads(), len(parts))
    map_ = thread_pool(threads).map if threads > 1 else map
    list(map_(partial(fill_mask, seed, dropped), range(len(parts)), parts))
    return mask.to(MASK_DTYPES[states.element_size()]), 2**16 / (2**16 - dropped)


def apply_mask(states: Tensor, mask: Tensor | None) -> Tensor:
    """`states` with zeros where `mask` drops them; not scaled."""
    if mask is None:
        return states
    return (states.contiguous().view(mask.dtype) & mask).view(states.dtype)


class CpuDropout(torch.autograd.Function):
    """Applies dropout to `states`, then adds `residual`, if given, in the residual's dtype."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, residual: Tensor | None, prob: float) -> Tensor:
        mask, ctx.keep_scale = dropout_mask(states, prob)
        ctx.save_for_backward(mask)
        ctx.dtype = states.dtype
        ctx.has_residual = residual is not None
        dropped = apply_mask(states, mask)
        if residual is None:
            return dropped * ctx.keep_scale
        return torch.add(residual, dropped.to(residual.dtype), alpha=ctx.keep_scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        return (
            apply_mask(grad.to(ctx.dtype), mask) * ctx.keep_scale,
            grad if ctx.has_residual else None,
            None,
        )


class Dropout(nn.Module):
    """Dropout with probability `prob`, followed by the addition of `residual`."""

    def __init__(self, prob: float):
        super().__init__()
        self.prob = prob

    def forward(self, states: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.training and self.prob > 0:
            if states.device.type == "cpu" and not torch.compiler.is_compiling():
                return CpuDropout.apply(states, residual, self.prob)
            states = F.dropout(states, self.prob)
        if residual is None:
            return states
        if states.device.type == "cpu":  # faster than torch's mixed-dtype addition
            states = states.to(residual.dtype)
        return residual + states
