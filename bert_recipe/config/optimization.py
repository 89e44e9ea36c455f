"""The optimizer and its schedule."""

import math
from dataclasses import dataclass

from bert_recipe.config.flag_values import TRAIN
from bert_recipe.utils.command_line import (
    REQUIRED,
    bounded_float,
    fraction,
    fraction_below_one,
    non_negative_float,
    option,
    positive_float,
    positive_int,
)

# The names of the classes, and the file of each in optimization/, which imports torch.
OPTIMIZERS = {"Lamb": "lamb", "AdamW": "adamw", "Muon": "muon", "NorMuon": "muon"}
# In experiments/, which is imported only if it is chosen.
EXPERIMENTAL_OPTIMIZERS = {"FusedLAMB": "fused_lamb"}
DECAYS = (
    "poly",
    "linear",
    "cosine",
    "exponential",
    "constant",
    "noam",
    "warmup_exp_decay_exp",
    "warmup_stable_decay",
)

LAMB = (*TRAIN, "--optimizer Lamb")
POLY = (*TRAIN, "--lr-decay poly")
EXPONENTIAL_RATE = 0.95  # of the schedule of this name, unless a flag gives its rate
EXPONENTIAL = (*TRAIN, "--lr-decay warmup_exp_decay_exp")
TRAPEZOID = (*TRAIN, "--lr-decay warmup_stable_decay")


@dataclass(frozen=True)
class OptimizerConfig:
    """Clipping is part of `grad_scale` (see optimization.protocol.apply_step)."""

    name: str = option(
        "--optimizer",
        (*OPTIMIZERS, *EXPERIMENTAL_OPTIMIZERS),
        "Lamb",
        "Muon and NorMuon update the matrices of hidden layers, and AdamW the rest; FusedLAMB is "
        "apex's LAMB",
        result=True,
    )
    eps: float = option(
        "--epsilon --adam-epsilon",
        positive_float,
        1e-6,
        "epsilon of the optimizer",
        needs=TRAIN,
        result=True,
    )
    weight_decay: float = option(
        "--weight-decay",
        non_negative_float,
        0.01,
        "weight decay; none on biases and LayerNorms",
        needs=TRAIN,
        result=True,
    )
    bias_correction: bool = option(
        "--lamb-bias-correction", bool, True, "bias-correct Lamb's moments", needs=LAMB, result=True
    )
    adapt_undecayed: bool = option(
        "--lamb-adapt-undecayed",
        bool,
        False,
        "use trust ratios for biases and LayerNorms too, as DeepSpeed's LAMB",
        needs=LAMB,
        result=True,
    )
    beta1: float = option(
        "--beta1 --adam-beta1",
        fraction_below_one,
        0.9,
        "decay of the first moment",
        needs=TRAIN,
        result=True,
    )
    beta2: float = option(
        "--beta2 --adam-beta2",
        fraction_below_one,
        0.999,
        "decay of the second moment",
        needs=TRAIN,
        result=True,
    )
    min_trust: float = option(
        "--lamb-min-coeff",
        non_negative_float,
        0.0,
        "lower bound of Lamb's trust ratios",
        needs=LAMB,
        result=True,
    )
    layerwise_lr_decay: float = option(
        "--layerwise-lr-decay",
        bounded_float(0, 1, exclusive=True),
        1.0,
        "factor of the learning rate from each layer to the one below it; the head has the full "
        "rate, the embeddings the lowest",
        needs=TRAIN,
        result=True,
    )
    max_trust: float | None = option(
        "--lamb-max-coeff",
        positive_float,
        None,
        "upper bound of Lamb's trust ratio; by default none",
        needs=LAMB,
        result=True,
    )

    @property
    def betas(self) -> tuple[float, float]:
        return self.beta1, self.beta2

    @property
    def trust_bounds(self) -> tuple[float, float] | None:
        """Minimum and maximum of Lamb's trust ratios, or None without any."""
        maximum = math.inf if self.max_trust is None else self.max_trust
        if self.min_trust <= 0 and maximum == math.inf:
            return None
        return self.min_trust, maximum


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over a run."""

    learning_rate: float = option(
        "--learning-rate --lr",
        non_negative_float,
        REQUIRED,
        "peak learning rate",
        needs=TRAIN,
        result=True,
    )
    decay: str = option(
        "--lr-decay --lr-scheduler-type",
        DECAYS,
        "poly",
        "schedule after the warmup",
        needs=TRAIN,
        result=True,
    )
    warmup_proportion: float = option(
        "--warmup-proportion --warmup-ratio",
        fraction,
        0.0,
        "share of the updates for the warmup",
        needs=TRAIN,
        result=True,
    )
    warmup_start_lr: float = option(
        "--warmup-start-lr",
        non_negative_float,
        0.0,
        "learning rate at the start of the warmup; for poly",
        needs=POLY,
        result=True,
    )
    power: float = option(
        "--lr-decay-power",
        positive_float,
        1.0,
        "power of poly; NVIDIA's PyTorch recipe has 0.5",
        needs=POLY,
        result=True,
    )
    rate: float = option(
        "--lr-decay-rate",
        positive_float,
        0.9,
        "decay rate of warmup_exp_decay_exp; of exponential, where it is 0.95 by default",
        needs=(*TRAIN, "--lr-decay warmup_exp_decay_exp or --lr-decay exponential"),
        result=True,
    )
    decay_steps: float = option(
        "--lr-decay-steps",
        positive_int,
        250,
        "updates per decay of warmup_exp_decay_exp",
        needs=EXPONENTIAL,
        result=True,
    )
    offset: float = option(
        "--lr-offset",
        non_negative_float,
        0.0,
        "added to the learning rate by warmup_exp_decay_exp",
        needs=EXPONENTIAL,
        result=True,
    )
    decay_proportion: float = option(
        "--lr-decay-proportion",
        fraction,
        0.1,
        "share of the updates for the decay at the end; for warmup_stable_decay",
        needs=TRAPEZOID,
        result=True,
    )
