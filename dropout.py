"""Dropout (Srivastava et al., 2014), and masks for it that cost little on a CPU.

torch's own dropout draws one number a state in one thread. Here one draw of 64 random bits decides four states, so that
the probability is a multiple of 2^-16; the bits come from numpy's SFC64, on all threads; and a mask is as wide as the
states, all ones where a state is kept, so that `and` applies it at the speed of memory.

The masks are a function of torch's own random state alone, whatever the number of threads.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

MASK_DTYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}
DECISIONS_AT_A_TIME = 2**18  # half a megabyte of random bits, which stays in a core's cache


@cache
def thread_pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="dropout")


def decide(seed: int, dropped: int, part: int, kept_K: np.ndarray) -> None:
    """Fills `kept_K`, int16, with 0 for a probability of `dropped` in 2^16, else with -1."""
    random = np.random.Generator(np.random.SFC64([seed, part]))
    words = random.integers(0, 2**64 - 1, -(-len(kept_K) // 4), dtype=np.uint64, endpoint=True)
    np.greater_equal(words.view(np.uint16)[: len(kept_K)], dropped, out=kept_K)
    np.negative(kept_K, out=kept_K)


def draw_kept(states: Tensor, prob: float) -> tuple[Tensor | None, float]:
    """A mask for `states` that keeps each with probability 1 - `prob`, and the factor that keeps the mean; (None, 1.0)
    without dropout."""
    dropped = round(prob * 2**16)
    if dropped == 0:
        return None, 1.0
    kept = torch.empty(states.shape, dtype=torch.int16)
    parts = np.split(kept.view(-1).numpy(), range(DECISIONS_AT_A_TIME, kept.numel(), DECISIONS_AT_A_TIME))
    seed = int(torch.randint(2**63 - 1, ()))
    threads = min(torch.get_num_threads(), len(parts))
    each = thread_pool(threads).map if threads > 1 else map
    list(each(partial(decide, seed, dropped), range(len(parts)), parts))
    return kept.to(MASK_DTYPES[states.element_size()]), 2**16 / (2**16 - dropped)


def only_kept(states: Tensor, kept: Tensor | None) -> Tensor:
    """`states` with zeros where `kept` has them; not scaled."""
    if kept is None:
        return states
    return (states.contiguous().view(kept.dtype) & kept).view(states.dtype)


class CpuDropout(torch.autograd.Function):
    """Dropout of `states`, added to `residual` in the residual's type where there is one."""

    @staticmethod
    def forward(ctx, states: Tensor, residual: Tensor | None, prob: float) -> Tensor:
        kept, ctx.keep_scale = draw_kept(states, prob)
        ctx.save_for_backward(kept)
        ctx.dtype, ctx.has_residual = states.dtype, residual is not None
        dropped = only_kept(states, kept)
        if residual is None:
            return dropped * ctx.keep_scale
        return torch.add(residual, dropped.to(residual.dtype), alpha=ctx.keep_scale)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (kept,) = ctx.saved_tensors
        return only_kept(grad.to(ctx.dtype), kept) * ctx.keep_scale, grad if ctx.has_residual else None, None


class Dropout(nn.Module):
    """Zeroes states with probability `prob` in training and scales the rest to keep the mean; then adds `residual`."""

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
        if states.device.type == "cpu":  # torch's addition of two types takes twice the time of a cast and an addition
            states = states.to(residual.dtype)
        return residual + states
