"""Learning-rate schedules as pure functions of k, the number of updates already made, out of N in all."""

import math
from collections.abc import Callable

DECAYS = ("poly", "linear", "cosine", "exponential", "constant", "noam", "warmup_exp_decay_exp")


def poly(k: float, total: int, lr: float, warmup: int, start_lr: float = 0.0, power: float = 1.0) -> float:
    """NVIDIA's schedule: linear from `start_lr` to `lr` over `warmup` updates, then lr * ((N-k)/(N-W))^power. A power
    of 0.5 is the variant of their PyTorch recipe."""
    if k < warmup:
        return start_lr + (lr - start_lr) * k / warmup
    return lr * (max(total - k, 0) / max(total - warmup, 1)) ** power


def _warm(k: float, lr: float, warmup: int) -> float | None:
    """BMTrain's warm-up, lr * k / warmup, while it lasts."""
    return lr * k / warmup if k < warmup else None


def linear(k: float, total: int, lr: float, warmup: int) -> float:
    """BMTrain's linear schedule: warm-up, then down to nothing at update N."""
    warm = _warm(k, lr, warmup)
    return lr * max(total - k, 0) / max(total - warmup, 1) if warm is None else warm


def cosine(k: float, total: int, lr: float, warmup: int) -> float:
    """BMTrain's cosine schedule: warm-up, then half a cosine down to nothing at update N."""
    warm = _warm(k, lr, warmup)
    progress = min((k - warmup) / max(total - warmup, 1), 1.0)
    return lr / 2 * (1 + math.cos(math.pi * progress)) if warm is None else warm


def exponential(k: float, total: int, lr: float, warmup: int) -> float:
    """BMTrain's exponential schedule: warm-up, then 5% less at every update."""
    warm = _warm(k, lr, warmup)
    return lr * 0.95 ** (k - warmup) if warm is None else warm


def constant(k: float, total: int, lr: float, warmup: int) -> float:
    """Warm-up, then `lr`."""
    warm = _warm(k, lr, warmup)
    return lr if warm is None else warm


def noam(k: float, total: int, lr: float, warmup: int) -> float:
    """BMTrain's form of the Transformer's schedule (Vaswani et al., 2017, section 5.3): lr * k / warmup^1.5, then
    lr / sqrt(k)."""
    return lr * k / warmup**1.5 if k < warmup else lr / math.sqrt(max(k, 1))


def warmup_exp_decay_exp(
    k: float, total: int, lr: float, warmup_proportion: float, rate: float, decay_steps: float, offset: float = 0.0
) -> float:
    """DeepSpeed's bing_bert schedule: lr * f + offset with f = (k/(wN))^2 while k < wN, then rate^((k-wN)/d). To
    re-warm in the middle of a run, count k and N from there."""
    warmup = warmup_proportion * total
    f = (k / warmup) ** 2 if k < warmup else rate ** ((k - warmup) / decay_steps)
    return lr * f + offset


def make_schedule(
    decay: str,
    lr: float,
    total: int,
    warmup_proportion: float,
    warmup_start_lr: float = 0.0,
    power: float = 1.0,
    rate: float = 0.9,
    decay_steps: float = 250,
    offset: float = 0.0,
) -> Callable[[int], float]:
    """The schedule named `decay`, one of `DECAYS`, with its settings filled in."""
    warmup = math.floor(warmup_proportion * total)
    if decay == "poly":
        return lambda k: poly(k, total, lr, warmup, warmup_start_lr, power)
    if decay == "warmup_exp_decay_exp":
        return lambda k: warmup_exp_decay_exp(k, total, lr, warmup_proportion, rate, decay_steps, offset)
    shapes = {"linear": linear, "cosine": cosine, "exponential": exponential, "constant": constant, "noam": noam}
    shape = shapes[decay]
    return lambda k: shape(k, total, lr, warmup)
