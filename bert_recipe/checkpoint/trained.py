"""What checkpoints need of the parts of a run, which are made in layers above this one."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bert_recipe.checkpoint.model_card import ModelParts
from bert_recipe.checkpoint.record import RunRecord
from bert_recipe.checkpoint.start import StartPoint
from bert_recipe.config import RunConfig
from bert_recipe.model.encoders.base import PreTrainedModel
from bert_recipe.utils.distributed import DistributedContext


class SavedLossScale(Protocol):
    """See precision.LossScale."""

    value: Tensor

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float], /) -> None: ...


class StateSpec(Protocol):
    """The optimizer state of a model: shape and owner of each tensor, by parameter and key; see
    optimization.protocol.OptimizerSpec.

    saved_as: the optimizer whose state it is; None for the optimizer itself.
    """

    @property
    def saved_as(self) -> str | None: ...

    def state(
        self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]], /
    ) -> dict[str, dict[str, Any]]: ...


class TrainedModel(Protocol):
    """A model with a parallel strategy; see parallel.base.ParallelModel."""

    model: PreTrainedModel
    distributed: DistributedContext
    shard_group: Any  # a process group, or None
    saves_rows: bool
    cannot_freeze: str

    @property
    def loss_scale(self) -> SavedLossScale: ...

    def named_parameters(self) -> dict[str, nn.Parameter]: ...

    def row_start(self, name: str) -> int: ...

    def rows_checksum(self) -> tuple[int, int, float]: ...

    def write_back(self) -> None: ...

    def has_finite_weights(self) -> bool: ...

    def has_word_embeddings(self) -> bool: ...

    def optimizer_state(self, optimizer: torch.optim.Optimizer, name: str) -> dict[str, Tensor]: ...


class SavedRun(Protocol):
    """A run; see training.run.Run.

    parts: of its model folders.
    """

    @property
    def settings(self) -> RunConfig: ...

    @property
    def start(self) -> StartPoint: ...

    @property
    def record(self) -> RunRecord: ...

    @property
    def parts(self) -> ModelParts: ...

    @property
    def optimizer_spec(self) -> StateSpec: ...

    def last_step(self, first: int) -> int: ...
