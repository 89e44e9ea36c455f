"""Run identity. A folder of steps belongs to one run, whose record is in each of its checkpoints.

The identity (initial weights, data, vocabulary, architecture, seed) is fixed for a folder.
Hyperparameters may change while a run is unfinished; TrainState.restore logs the changes. Settings
that do not affect results are not compared.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bert_recipe.checkpoint.folder import (
    BEST_FOLDER,
    SEED_FOLDER,
    checkpoint_steps,
)
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.older import OLD_FILES
from bert_recipe.checkpoint.record import PREDICTED_BY_FILE, DevelopmentData, read_record
from bert_recipe.model.encoders.config import ModelConfig
from bert_recipe.tokenization.tokenizer import Tokenizer
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import remove
from bert_recipe.utils.progress import print_line

WEIGHTS = "starting weights"
ANOTHER = "choose another --output-dir"
# The value of WEIGHTS without a model folder, also when a run resumes its own checkpoint.
RANDOM = "random"
READING = "reading of the development data"


def identity_of(
    weights: str | None,
    model_config: ModelConfig,
    tokenizer: Tokenizer,
    data: str,
    seed: int,
    development: DevelopmentData | None = None,
    task: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The identity of a run.

    weights: see `StartPoint.weights_digest`.
    model_config: the architecture.
    tokenizer: of the model.
    data: digest of the training data.
    seed: of weights, dropout and order.
    development: None if no best checkpoint is kept.
    task: what else defines the run, by name, for JSON (see Task.identity).
    """
    development = development or DevelopmentData()
    # Both follow from the task.
    config = replace(model_config, text_pairs=None, label_all_tokens=None)
    architecture = json.loads(json.dumps(config.to_dict()))
    if config.is_number:  # follows from the labels, and earlier runs do not have it
        del architecture["problem_type"]
    return {
        WEIGHTS: weights,
        "data": data,
        "development data": development.digest,
        READING: development.reading,
        "post-processing": development.post_processing,
        "vocabulary": tokenizer.vocab_sha256,
        "architecture": architecture,
        "pooling": config.embedding_pooling,  # which config.json does not have
        "seed": seed,
        "task": dict(task or {}),
    }


def refuse_other_runs(folder: Path, kind: str = "") -> None:
    """Raises UserError if `folder` has runs of another kind, whose results would be replaced. kind:
    `seed` or `fold`, whose runs may be there; "" for a single run.
    """
    if kind and checkpoint_steps(folder):
        raise UserError(
            f"{folder} has a run without --num-seeds or --num-folds: choose another --output-dir"
        )
    runs = []
    for path in folder.glob("*-*"):
        match = SEED_FOLDER.fullmatch(path.name)  # such as seed-42, whose kind is "seed"
        if match and match[1] != kind and checkpoint_steps(path):
            runs.append(path.name)
    if runs:
        raise UserError(
            f"{folder} has the runs of several seeds or folds, such as {min(runs)}: add "
            f"--num-seeds or --num-folds as before, or choose another --output-dir"
        )


def check_results_of(folder: Path, model: ModelFolder) -> str:
    """The digest of the model in `model`. Raises UserError if `folder` has results of a run or of
    another model.
    """
    digest = model.weights_digest
    stored_digest = read_record(folder).identity.get(WEIGHTS, digest)
    if checkpoint_steps(folder) or stored_digest != digest:
        raise UserError(f"{folder} has the results of another model: {ANOTHER}")
    return digest


def overwrite(folder: Path, weights: ModelFolder | None) -> None:
    """Removes the checkpoints of a run from a folder of steps. weights: the starting weights, which
    must not be in it.
    """
    if weights is not None and folder.resolve() in weights.path.resolve().parents:
        raise UserError(
            f"--overwrite would remove the starting weights {weights}: choose another --output-dir"
        )
    if steps := checkpoint_steps(folder):
        print_line(f"--overwrite: removed the run in {folder} with step {steps[-1]}")
    for name in (BEST_FOLDER, *map(str, checkpoint_steps(folder))):
        remove(folder / name)
    for name in (PREDICTED_BY_FILE, *OLD_FILES):
        (folder / name).unlink(missing_ok=True)
