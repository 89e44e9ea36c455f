"""Learning-rate schedules: pure functions of k, the number of completed updates.

Legend: N updates in total, W of the warmup, lr the peak.
"""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from bert_recipe.config import ScheduleConfig
from bert_recipe.utils.errors import UserError

MAX_UPDATES = 10_000_000  # per run; the table takes 40 MB and seconds to compute


def exact_product(decimal: float, count: int) -> Fraction:
    """`count` times the decimal number that was typed for the float `decimal`. The product of
    floats may lie just beside a whole number: 0.29 * 100 is 28.999999999999996.
    """
    return Fraction(repr(decimal)) * count


def poly(config: ScheduleConfig, k: float, total: int, warmup: int) -> float:
    """NVIDIA's schedule: linear from `warmup_start_lr` to lr over W updates, then lr *
    ((N-k)/(N-W))^power. A power of 0.5 is the variant of their PyTorch recipe.
    """
    lr, start_lr = config.learning_rate, config.warmup_start_lr
    if k < warmup:
        return start_lr + (lr - start_lr) * k / warmup
    return lr * (max(total - k, 0) / max(total - warmup, 1)) ** config.power


def noam(config: ScheduleConfig, k: float, total: int, warmup: int) -> float:
    """BMTrain's form of the Transformer's (Vaswani et al., 2017, section 5.3): lr * k / W^1.5, then
    lr / sqrt(k).
    """
    lr = config.learning_rate
    return lr * k / warmup**1.5 if k < warmup else lr / math.sqrt(max(k, 1))


def warmup_exp_decay_exp(config: ScheduleConfig, k: float, total: int, _warmup: int) -> float:
    """DeepSpeed's bing_bert schedule: lr * f + offset with f = (k/(wN))^2 while k < wN, then
    rate^((k-wN)/d).
    """
    warmup = float(exact_product(config.warmup_proportion, total))
    f = (k / warmup) ** 2 if k < warmup else config.rate ** ((k - warmup) / config.decay_steps)
    return config.learning_rate * f + config.offset


def linear(config: ScheduleConfig, k: float, total: int, warmup: int) -> float:
    """BMTrain's: down to 0 at update N."""
    return config.learning_rate * max(total - k, 0) / max(total - warmup, 1)


def cosine(config: ScheduleConfig, k: float, total: int, warmup: int) -> float:
    """BMTrain's: half a cosine down to 0 at update N."""
    progress = min((k - warmup) / max(total - warmup, 1), 1.0)
    return config.learning_rate / 2 * (1 + math.cos(math.pi * progress))


def exponential(config: ScheduleConfig, k: float, total: int, warmup: int) -> float:
    """BMTrain's: times `rate` per update."""
    return config.learning_rate * config.rate ** (k - warmup)


def constant(config: ScheduleConfig, k: float, total: int, warmup: int) -> float:
    return config.learning_rate


def warmup_stable_decay(config: ScheduleConfig, k: float, total: int, warmup: int) -> float:
    """The trapezoidal schedule: lr, then lr * (1 - sqrt(p)) over the last updates, with p from 0 to
    1 (Haegele et al., 2024, "Scaling Laws and Compute-Optimal Training Beyond Fixed Training
    Durations").
    """
    decay = float(exact_product(config.decay_proportion, total))
    if k <= total - decay:
        return config.learning_rate
    return config.learning_rate * (1 - math.sqrt(min((k - total + decay) / decay, 1.0)))


OWN_WARMUP = (poly, noam, warmup_exp_decay_exp)
AFTER_WARMUP = (linear, cosine, exponential, constant, warmup_stable_decay)  # which is lr * k / W
SHAPES = {shape.__name__: shape for shape in OWN_WARMUP + AFTER_WARMUP}


def make_schedule(
    config: ScheduleConfig, total_steps: int, first_step: int = 0
) -> Callable[[int], float]:
    """The learning rate as a function of the number of completed updates.

    total_steps: the update at which the schedule ends.
    first_step: that after which it begins.
    """
    total = total_steps - first_step
    shape = SHAPES[config.decay]
    warmup = math.floor(exact_product(config.warmup_proportion, total))

    def rate(updates: int) -> float:
        k = max(updates - first_step, 0)
        if k < warmup and shape in AFTER_WARMUP:
            return config.learning_rate * k / warmup
        return shape(config, k, total, warmup)

    return rate


class LearningRate:
    """The learning rate that the optimizer reads, a float32 scalar `value`. The counter of updates
    is on the same device, so that a look-up needs no synchronization.
    """

    def __init__(self, peak: float, device: torch.device):
        self.value = torch.tensor(peak, dtype=torch.float32, device=device)

    def follow(self, schedule: Callable[[int], float], first: int, last: int) -> None:
        """Takes the rates of the updates `first` to `last`. Raises UserError if there are more than
        MAX_UPDATES.
        """
        if last - first > MAX_UPDATES:
            raise UserError(
                f"{last - first} updates are left, and a run makes at most {MAX_UPDATES}: use "
                "--steps-this-run"
            )
        rates = np.fromiter(map(schedule, range(first, last + 1)), np.float32, last - first + 1)
        self.first, self.rates = first, torch.from_numpy(rates).to(self.value.device)

    def advance(self, updates: Tensor) -> None:
        """Sets the rate of the next update. updates: the number of those before it, a scalar."""
        place = (updates - self.first).clamp(max=len(self.rates) - 1)
        self.value.copy_(self.rates.take(place))  # rates[place] would synchronize
