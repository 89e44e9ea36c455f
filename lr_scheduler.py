"""Learning-rate schedules: pure functions of k, the number of updates already made, and N, the number of all
updates."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from run_config import ScheduleConfig


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


def exponential(k: float, total: int, lr: float, warmup: int) -> float:
    """BMTrain's exponential schedule: warmup, then 5% less per update."""
    warm = _warm(k, lr, warmup)
    return lr * 0.95 ** (k - warmup) if warm is None else warm


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


class ScheduleTable:
    """The learning rates of the next updates as a tensor on the device, where the number of updates is a tensor too:
    looking one up makes the host wait for nothing. Its size does not depend on the length of the run."""

    SIZE = 2**16

    def __init__(self, schedule: Callable[[int], float], step: int, last_step: int, device: torch.device):
        self.schedule, self.last_step = schedule, last_step
        self.first_step = torch.zeros((), dtype=torch.int64, device=device)
        self.rates = torch.zeros(min(self.SIZE, last_step + 1), dtype=torch.float32, device=device)
        self._fill(step)

    def _fill(self, step: int) -> None:
        """Makes `step` the first one."""
        self.first = step
        rates = [self.schedule(min(step + k, self.last_step)) for k in range(len(self.rates))]
        self.rates.copy_(torch.tensor(rates, dtype=torch.float32))
        self.first_step.fill_(step)

    def is_short(self, step: int) -> bool:
        """Whether `advance` must be called at `step`, with the device's own number of updates."""
        end = self.first + len(self.rates)
        return end <= self.last_step and step >= end - len(self.rates) // 2

    def advance(self, step: int) -> None:
        """Drops what is before `step`, which the device has reached."""
        if self.is_short(step):
            self._fill(step)

    def rate(self, step: Tensor) -> Tensor:
        """The rate at the device's `step`, from the last `advance` to at least SIZE / 2 steps after it."""
        # `take`, because rates[...] would read the index on the host.
        return self.rates.take((step - self.first_step).clamp(0, len(self.rates) - 1))


def make_schedule(config: ScheduleConfig) -> Callable[[int], float]:
    """The learning rate as a function of the number of updates already made."""
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
    shapes = {"linear": linear, "cosine": cosine, "exponential": exponential, "constant": constant, "noam": noam}
    shape = shapes[config.decay]
    return lambda k: shape(k, total, lr, warmup)
