"""Gradients of word embeddings that have the rows of a batch's tokens only."""

import contextlib
from collections.abc import Iterator
from typing import cast

from bert_recipe.checkpoint.state import TrainState
from bert_recipe.model.encoders.base import PreTrainedModel
from bert_recipe.model.encoders.heads import MaskedLanguageModel
from bert_recipe.optimization.adamw import AdamW
from bert_recipe.optimization.protocol import row_sums
from bert_recipe.parallel.base import ParallelModel
from bert_recipe.training.callbacks import Callback


def takes_row_gradients(state: TrainState) -> bool:
    """Whether an update with such gradients has the bits of one with dense ones, in less time."""
    parallel, model = cast(ParallelModel, state.parallel), state.model
    return (
        not parallel.moves_gradients
        and isinstance(state.optimizer, AdamW)
        and parallel.masters is None
        and parallel.optimizer_device.type == "cpu"
        and model.word_embeddings.weight.requires_grad
        and not model.is_compiled
        and not isinstance(model, MaskedLanguageModel)  # whose output layer has a dense one
    )


class RowGradients(Callback):
    """Gives the word embeddings sparse gradients during training: afterwards, others may train the
    model. Each micro-batch's rows are summed at once, as in a dense gradient.
    """

    def __init__(self, model: PreTrainedModel):
        self.table = model.word_embeddings

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        self.table.sparse = True
        hook = self.table.weight.register_hook(row_sums)
        try:
            yield
        finally:
            self.table.sparse = False
            hook.remove()
