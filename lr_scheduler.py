"""Learning-rate schedules: pure functions of k, the number of completed updates, and N, the total number of updates."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from run_config import ScheduleConfig
from utils.errors import UserError

MAX_UPDATES = 10_000_000  # per run; the table takes 40 MB and seconds to compute


def poly(k: float, total: int, lr: float, warmup: int, start_lr: float = 0.0, power: float = 1.0) -> float:
    """NVIDIA's schedule: linear from `start_lr` to `lr` over `warmup` updates, then lr * ((N-k)/(N-W))^power. A power
    of 0.5 is the variant of their PyTorch recipe."""
    if k < warmup:
        return start_lr + (lr - start_lr) * k / warmup
    return lr * (max(total - k, 0) / max(total - warmup, 1)) ** power


def _warm(k: float, lr: float, warmup: int) -> float | None:
    """BMTrain's warmup, lr * k / warmup; None after it."""
    return lr * k / warmup if k < warmup else None


def linear(k: float, total: int, lr: float, warmup: int) -> float:
    """BMTrain's linear schedule: warmup, then down to 0 at update N."""
    warm = _warm(k, lr, warmup)
    return lr * max(total - k, 0) / max(total - warmup, 1) if warm is None else warm


def cosine(k: float, total: int, lr: float, warmup: int) -> float:
    """BMTrain's cosine schedule: warmup, then half a cosine down to 0 at update N."""
    warm = _warm(k, lr, warmup)
    progress = min((k - warmup) / max(total - warmup, 1), 1.0)
    return lr / 2 * (1 + math.cos(math.pi * progress)) if warm is None else warm


def exponential(k: float, total: int, lr: float, warmup: int, gamma: float = 0.95) -> float:
    """BMTrain's exponential schedule: warmup, then times `gamma` per update."""
    warm = _warm(k, lr, warmup)
    return lr * gamma ** (k - warmup) if warm is None else warm


def constant(k: float, total: int, lr: float, warmup: int) -> float:
    """Warmup, then `lr`."""
    warm = _warm(k, lr, warmup)
    return lr if warm is None else warm


def noam(k: float, total: int, lr: float, warmup: int) -> float:
    """BMTrain's form of the Transformer's schedule (Vaswani et al., 2017, section 5.3): lr * k / warmup^1.5, then
    lr / sqrt(k)."""
    return lr * k / warmup**1.5 if k < warmup else lr / math.sqrt(max(k, 1))


def warmup_exp_decay_exp(
    k: float, total: int, lr: float, warmup_proportion: float, rate: float, decay_steps: float, offset: float = 0.0
) -> float:
    """DeepSpeed's bing_bert schedule: lr * f + offset with f = (k/(wN))^2 while k < wN, then rate^((k-wN)/d)."""
    warmup = warmup_proportion * total
    f = (k / warmup) ** 2 if k < warmup else rate ** ((k - warmup) / decay_steps)
    return lr * f + offset


def warmup_stable_decay(k: float, total: int, lr: float, warmup: int, decay_proportion: float) -> float:
    """The trapezoidal schedule: warmup, then `lr`, then lr * (1 - sqrt(p)) over the last updates, with p from 0 to 1
    (Haegele et al., 2024, "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations")."""
    warm, decay = _warm(k, lr, warmup), decay_proportion * total
    if warm is not None or k <= total - decay:
        return lr if warm is None else warm
    return lr * (1 - math.sqrt(min((k - total + decay) / decay, 1.0)))


def rate_table(schedule: Callable[[int], float], first: int, last: int, device: torch.device) -> Tensor:
    """Learning rates of the updates `first` to `last`, float32 on `device`. The update counter is on the device too, so
    a look-up needs no synchronization. Raises UserError if there are more than MAX_UPDATES."""
    if last - first > MAX_UPDATES:
        raise UserError(f"{last - first} updates are left, and a run makes at most {MAX_UPDATES}: use --steps-this-run")
    rates = np.fromiter(map(schedule, range(first, last + 1)), np.float32, last - first + 1)
    return torch.from_numpy(rates).to(device)


def make_schedule(config: ScheduleConfig) -> Callable[[int], float]:
    """The learning rate as a function of the number of completed updates."""
    schedule = _schedule_from_zero(config, config.total_steps - config.first_step)
    return lambda k: schedule(k - config.first_step)


def _schedule_from_zero(config: ScheduleConfig, total: int) -> Callable[[int], float]:
    lr = config.learning_rate
    warmup = math.floor(config.warmup_proportion * total)
    if config.decay == "poly":
        return lambda k: poly(k, total, lr, warmup, config.warmup_start_lr, config.power)
    if config.decay == "warmup_exp_decay_exp":
        return lambda k: warmup_exp_decay_exp(
            k, total, lr, config.warmup_proportion, config.rate, config.decay_steps, config.offset
        )
    if config.decay == "warmup_stable_decay":
        return lambda k: warmup_stable_decay(k, total, lr, warmup, config.decay_proportion)
    if config.decay == "exponential":
        return lambda k: exponential(k, total, lr, warmup, config.gamma)
    shapes = {"linear": linear, "cosine": cosine, "constant": constant, "noam": noam}
    shape = shapes[config.decay]
    return lambda k: shape(k, total, lr, warmup)
