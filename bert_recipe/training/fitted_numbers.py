"""The output layer of a model that was fitted to other numbers than those to learn."""

from functools import partial
from typing import cast

import numpy as np
import torch

from bert_recipe.checkpoint.state import TrainState
from bert_recipe.model.encoders.heads import ClassificationModel
from bert_recipe.parallel.base import ParallelModel
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.text_sequences import TextDataset
from bert_recipe.training.callbacks import Callback
from bert_recipe.training.evaluation import predict_batch
from bert_recipe.training.run import Run
from bert_recipe.utils.stop_signal import StopSignal

NUM_ROWS = 64  # to compare outputs and numbers
LARGEST_RATIO = 5.0  # of their standard deviations


class FitToNumbers(Callback):
    """Refits the output layer of starting weights whose outputs lie elsewhere than the numbers to
    learn, which few updates would not reach: the outputs are scaled and shifted by least squares.
    """

    def __init__(self, run: Run, state: TrainState, runtime: Runtime):
        self.run, self.state, self.runtime = run, state, runtime

    # Inference mode would leave FSDP2 what it gathers as tensors not to be trained.
    @torch.no_grad()
    def start(self, stop: StopSignal) -> None:
        run, runtime = self.run, self.runtime
        weights, numbers = run.start.weights, run.task.numbers
        if weights is None or numbers is None or run.start.progress is not None:
            return
        parallel = cast(ParallelModel, self.state.parallel)
        name = cast(ClassificationModel, parallel.model).output_layer_name
        if f"{name}.weight" not in self.state.loaded:  # it begins at the numbers
            return
        mean, deviation = numbers
        dataset = cast(TextDataset, run.data.dataset)
        rows = np.random.default_rng(0).permutation(len(dataset))[:NUM_ROWS]
        limits = run.limits(runtime, len(rows))
        parallel.model.eval()
        with parallel.eager():
            logits = predict_batch(parallel, dataset, rows, limits, runtime)
        outputs = logits[: len(rows), 0].double().cpu().numpy()
        targets = dataset.labels["scores"][rows]
        # One rank decides, since ranks may differ by rounding.
        fit = partial(fitted_scale, outputs, targets, numbers)
        centre, spread, scale = runtime.distributed.on_main(fit)
        if scale is None:
            return
        parameters = parallel.named_parameters()  # of this rank
        if (weight := parameters.get(f"{name}.weight")) is not None:
            weight.mul_(scale)
        if (bias := parameters.get(f"{name}.bias")) is not None:
            bias.sub_(centre).mul_(scale).add_(mean)
        parallel.write_back()
        text = (
            f"note: {weights} was fitted to other numbers: its outputs are {centre:.4g} ± "
            f"{spread:.4g}, and those to learn {mean:.4g} ± {deviation:.4g}: its output layer is "
            "scaled"
        )
        runtime.reporter.log((), {}, text)


def fitted_scale(
    outputs: np.ndarray, targets: np.ndarray, numbers: tuple[float, float]
) -> tuple[float, float, float | None]:
    """The mean and standard deviation of the outputs [n], and what to multiply them with to reach
    the targets [n]; None if they lie near the numbers.

    numbers: the mean and standard deviation of all targets.
    """
    mean, deviation = numbers
    centre, spread = float(outputs.mean()), float(outputs.std())
    is_near = abs(centre - mean) <= deviation
    if is_near and deviation <= LARGEST_RATIO * spread <= LARGEST_RATIO**2 * deviation:
        return centre, spread, None
    products = (outputs - centre) * (targets - targets.mean())
    return centre, spread, float(products.mean() / max(spread**2, 1e-6 * centre**2, 1e-12))
