"""What a run is, as its checkpoints record it. Does not import torch."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bert_recipe.checkpoint.folder import PROGRESS_SUFFIX, checkpoint_steps
from bert_recipe.checkpoint.older import OLD_RECORD
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import JsonObject, read_json

SCORES_FILE = "scores.json"  # in a run's folder
# In a folder with the predictions of a model that is elsewhere.
PREDICTED_BY_FILE = "predicted_by.json"


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

    identity: JsonObject = field(default_factory=dict)
    hyperparameters: JsonObject = field(default_factory=dict)
    arguments: JsonObject = field(default_factory=dict)
    phase: str = ""
    seed: int = 0
    num_samples: int = 0
    data: str | None = None
    data_files: str | None = None


@dataclass(frozen=True)
class DevelopmentData:
    """What selects the best checkpoint of a run.

    digest: of its files or samples.
    reading: digest of the tokens that are read from files; None where the loss selects.
    post_processing: the flags that turn a model's output into predictions; None as above.
    """

    digest: str | None = None
    reading: str | None = None
    post_processing: dict[str, Any] | None = None


def read_record(folder: Path) -> RunRecord:
    """The record of the run that has the checkpoint `folder`, or whose steps are in it, that of the
    newest one that can be read; else that of the predictions there. Without any, an empty one.
    """
    for path in record_files(folder):
        with contextlib.suppress(UserError):  # of a step that is damaged
            return read_json(path, "the record of a run", RunRecord)
    return RunRecord()


def record_files(folder: Path) -> Iterator[Path]:
    """The files that `read_record` tries, in this order."""
    steps = [folder / str(step) for step in reversed(checkpoint_steps(folder))]
    for checkpoint in (folder, *steps):
        yield from sorted(checkpoint.glob(f"[!.]*{PROGRESS_SUFFIX}"))
    for name in (PREDICTED_BY_FILE, OLD_RECORD):
        if (folder / name).is_file():
            yield folder / name
