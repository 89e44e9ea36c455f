"""What a run is, as its checkpoints record it. Does not import torch."""

from dataclasses import dataclass, field
from typing import Any

from bert_recipe.utils.json_files import JsonObject


@dataclass(frozen=True)
class RunRecord:
    """What a run is, as JSON values: the same in all of its checkpoints.

    identity: see identity.identity_of; None: unknown.
    hyperparameters: flags that change results, by name.
    arguments: all values of flags, by argument.
    phase: name of the task, and of the seed or fold if there are several.
    seed: of weights, dropout and order.
    num_samples: of the training data.
    data: its digest; None for a benchmark.
    data_files: digest of the sizes and times of its files.
    """

    identity: JsonObject
    hyperparameters: JsonObject
    arguments: JsonObject = field(default_factory=dict)
    phase: str = ""
    seed: int = 0
    num_samples: int = 0
    data: str | None = None
    data_files: str | None = None


@dataclass(frozen=True)
class DevelopmentData:
    """What selects the best checkpoint of a run. digest: of its files or samples. reading: digest
    of the tokens that are read from files; post_processing: the flags that turn a model's output
    into predictions; both None where the loss selects.
    """

    digest: str | None = None
    reading: str | None = None
    post_processing: dict[str, Any] | None = None
