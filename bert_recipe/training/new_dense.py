"""A new dense layer before the output layer gets outputs of mean 0 and variance 1 on the texts to
learn, such as the pooler that folders of sentence-transformers lack (Mishkin and Matas, 2016, "All
you need is a good init").

The first tokens of all texts have much the same state: random weights tell them apart by a few
hundredths, and an update moves all outputs by as much. Legend: n texts, E hidden size.
"""

from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from bert_recipe.checkpoint.rows import LazyTensor
from bert_recipe.checkpoint.state import TrainState
from bert_recipe.checkpoint.weights import copy_rows
from bert_recipe.model.encoders.heads import ClassificationModel
from bert_recipe.model.encoders.modules import Linear
from bert_recipe.parallel.base import ParallelModel
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.text_sequences import TextDataset
from bert_recipe.training.callbacks import Callback
from bert_recipe.training.evaluation import predict
from bert_recipe.training.run import Run
from bert_recipe.utils.stop_signal import StopSignal

NUM_TEXTS = 256  # for mean and variance
LEAST_DEVIATION = 1e-4  # if all texts are alike, weights must not become huge


def new_dense_layers(run: Run, state: TrainState) -> list[str]:
    """The names of the dense layers, with a bias, that a classifier of texts on trained weights
    has before its output layer, and that these weights lack; in a run from its first update.
    """
    is_new = run.start.weights is not None and run.start.progress is None
    if run.task.head != "sequence_classification" or not is_new:
        return []
    output = cast(ClassificationModel, state.model).output_layer_name
    return [
        name
        for name, module in state.model.named_modules()
        if isinstance(module, Linear) and module.bias is not None and name != output
        if f"{name}.weight" not in state.loaded
    ]


class StandardizeDense(Callback):
    """Scales and shifts each output of the dense layers `names`, before the first update."""

    def __init__(self, names: list[str], run: Run, state: TrainState, runtime: Runtime):
        self.names, self.run, self.state, self.runtime = names, run, state, runtime

    # Inference mode would leave FSDP2 what it gathers as tensors not to be trained.
    @torch.no_grad()
    def start(self, stop: StopSignal) -> None:
        parallel = self.state.parallel
        parameters = parallel.named_parameters()  # of this rank
        for name in self.names:
            # Those of one rank, since ranks may differ by rounding.
            moments = self.runtime.distributed.on_main(partial(moments_of, self.outputs(name)))
            means_E, deviations_E = map(torch.tensor, moments)
            weight, bias = (parameters.get(f"{name}.{part}") for part in ("weight", "bias"))
            if weight is not None:
                weight.mul_(self.own_rows(f"{name}.weight", weight, 1 / deviations_E[:, None]))
            if bias is not None:
                bias.copy_(self.own_rows(f"{name}.bias", bias, -means_E / deviations_E))
            parallel.write_back()

    def outputs(self, name: str) -> np.ndarray:
        """The outputs [n, E] of the dense layer `name`."""
        dataset = cast(TextDataset, self.run.data.dataset)
        rows = np.random.default_rng(0).permutation(len(dataset))[:NUM_TEXTS]
        model = self.state.model
        dense = model.get_submodule(name)
        output_layer = model.get_submodule(cast(ClassificationModel, model).output_layer_name)
        computed: list[Tensor] = []

        def keep(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            computed.append(output)

        def replace_logits(layer: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> Tensor:
            return computed.pop()

        hooks = [dense.register_forward_hook(keep)]
        hooks.append(output_layer.register_forward_hook(replace_logits))
        parallel = cast(ParallelModel, self.state.parallel)
        size, width = self.run.settings.prediction.batch_size, model.config.hidden_size
        texts = dataset.part(rows)
        try:
            return predict(parallel, texts, "sequence", size, self.runtime, width=width)[0]
        finally:
            for hook in hooks:
                hook.remove()

    def own_rows(self, name: str, parameter: Tensor, value: Tensor) -> Tensor:
        """This rank's rows of a value for the whole parameter, to which it is expanded."""
        rows = torch.empty_like(parameter)
        whole = value.expand(self.state.shapes[name])
        copy_rows(rows, self.state.parallel.row_start(name), LazyTensor.of(whole))
        return rows


def moments_of(outputs_nE: np.ndarray) -> list[list[float]]:
    """The means and standard deviations, [E] each."""
    deviations_E = np.maximum(outputs_nE.std(axis=0), LEAST_DEVIATION)
    return [outputs_nE.mean(axis=0).tolist(), deviations_E.tolist()]
