"""The outputs of a classifier are drawn towards the class shares, as far as held-out rows say.

A classifier that learns few rows by heart is sure of answers that are often wrong, and where one
class is frequent, it is then worse than answering that. Its outputs z become s z + (1 - s) log p,
with the shares p of the classes. That is temperature scaling (Guo et al., 2017, "On Calibration of
Modern Neural Networks") towards the shares instead of equal probabilities. With s = 1 nothing
changes, and with s near 0 the most frequent class is always answered. Legend: n rows, C classes.
"""

from typing import cast

import numpy as np
import torch
import torch.nn.functional as F

from bert_recipe.checkpoint.start import StartKind, StartPoint
from bert_recipe.checkpoint.state import TrainState
from bert_recipe.config import RunConfig
from bert_recipe.tasks.text_sequences import TextDataset
from bert_recipe.training.callbacks import Callback, Update
from bert_recipe.training.chosen_settings import STEPS
from bert_recipe.training.run import Run
from bert_recipe.utils.errors import UserError

SHRINKAGE = "the factor of the outputs"  # s, its name among the hyperparameters
FACTORS = np.geomspace(0.01, 1, 101)  # that are tried
# What s is expected to be, and the standard deviation of its logarithm: of 20 rows nothing follows.
EXPECTED, DEVIATION = 0.2, 1.0


def log_shares(labels_n: np.ndarray, num_classes: int) -> np.ndarray:
    """The logarithms [C] of the shares of the classes; one without rows counts as half a row."""
    counts_C = np.bincount(labels_n, minlength=num_classes)
    return np.log(np.maximum(counts_C, 0.5) / len(labels_n))


def fitted_shrinkage(
    logits_nC: np.ndarray, labels_n: np.ndarray, log_shares_C: np.ndarray
) -> float:
    """The factor s that makes held-out labels most likely, with two digits."""
    losses = []
    for factor in FACTORS:
        shrunk_nC = torch.from_numpy(factor * logits_nC + (1 - factor) * log_shares_C)
        loss = F.cross_entropy(shrunk_nC, torch.from_numpy(labels_n), reduction="sum")
        distance = np.log(factor / EXPECTED) / DEVIATION
        losses.append(float(loss) + distance**2 / 2)
    return float(f"{FACTORS[np.argmin(losses)]:.2g}")


def recorded_shrinkage(settings: RunConfig, start: StartPoint, max_steps: int) -> float | None:
    """That of the run that is resumed, unless the flags leave it out. Raises UserError if that run
    has shrunk its outputs and is to go on to `max_steps`, since they would be shrunk twice.
    """
    progress = start.progress
    if start.kind is not StartKind.RESUMED or progress is None:
        return None
    factor = progress.hyperparameters.get(SHRINKAGE)
    if factor is not None and progress.hyperparameters[STEPS] <= progress.step < max_steps:
        raise UserError(
            f"{start.source}: after its last update the outputs were drawn towards the class "
            "shares, so it cannot train longer: add --overwrite to train that long from the start"
        )
    if factor is not None and max_steps <= progress.step < progress.hyperparameters[STEPS]:
        return None  # no update is left after which they would be shrunk
    return factor if settings.arguments.as_dict().get("shrink_outputs") else None


class ShrunkOutputs(Callback):
    """Shrinks the outputs after the last update of a run. factor: s."""

    def __init__(self, run: Run, state: TrainState, factor: float):
        self.state, self.max_steps, self.factor = state, run.max_steps, factor
        labels = cast(TextDataset, run.data.dataset).labels["labels"]
        self.log_shares_C = log_shares(labels, len(run.data.choice.config.labels))

    def is_due(self, update: Update) -> bool:
        return update.step >= self.max_steps

    @torch.no_grad()
    def after_update(self, update: Update) -> None:
        if self.state.step < self.max_steps:  # also where the last update was skipped
            return
        parallel, factor = self.state.parallel, self.factor
        name = self.state.model.output_layer_name
        parameters = parallel.named_parameters()  # of this rank
        if (weight := parameters.get(f"{name}.weight")) is not None:
            weight.mul_(factor)
        if (bias := parameters.get(f"{name}.bias")) is not None:
            first = parallel.row_start(f"{name}.bias")
            shares = torch.from_numpy(self.log_shares_C[first : first + len(bias)]).to(bias)
            bias.mul_(factor).add_((1 - factor) * shares)
        parallel.write_back()
