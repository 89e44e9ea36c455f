"""The best checkpoint of a run: in the folder of steps, the evaluations so far (EVALUATIONS_FILE)
and the model with the best score (BEST_FOLDER).
"""

import math
import re
import shutil
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

from bert_recipe.checkpoint.folder import (
    BEST_FOLDER,
    EVALUATIONS_FILE,
    MANIFEST_FILE,
    check_best,
    has_weights,
    model_digest,
    read_manifest,
    verify_checkpoint,
    write_part_of_manifest,
)
from bert_recipe.checkpoint.model_card import copy_card
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import atomic_folder
from bert_recipe.utils.json_files import JsonObject, list_of, read_json, write_json

MODEL_FILES = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
    r"|(config|tokenizer(_config)?)\.json|vocab\.txt"
)


class BestCheckpoint:
    """The evaluations of a run and its best model, which `--early-stopping` also decides on.

    folder: of steps.
    metric: the score that decides.
    lower_is_better: as of a loss.
    patience: training stops after so many evaluations without a better score; None: it does not.
    development_data: digest of what is evaluated.
    step: of the checkpoint that the run resumes, or 0; evaluations of later steps are made again.
    evaluated_step: of the last evaluation that this checkpoint knows of, or None.
    on_main: see utils.distributed.
    """

    def __init__(
        self,
        folder: Path,
        metric: str,
        lower_is_better: bool,
        patience: int | None,
        development_data: str | None,
        step: int,
        evaluated_step: int | None,
        on_main: Callable[[Callable[[], Any]], Any],
    ):
        self.folder, self.metric, self.lower_is_better = folder, metric, lower_is_better
        self.patience, self.development_data = patience, development_data
        stored = []
        if step > 0:
            read = partial(read_evaluations, folder, metric, development_data, step, evaluated_step)
            stored = on_main(read)
        # A run that resumes an earlier checkpoint makes the later evaluations again. Until then
        # they stay in the file.
        self.history: list[JsonObject] = [entry for entry in stored if entry["step"] <= step]
        self.later = [entry for entry in stored if entry["step"] > step]

    @property
    def best(self) -> JsonObject | None:
        """The evaluation with the best score, the first one on ties; None without any."""
        choose = min if self.lower_is_better else max
        return choose(self.history, key=lambda entry: entry[self.metric], default=None)

    @property
    def is_exhausted(self) -> bool:
        """Whether early stopping ends the run."""
        if self.best is None or self.patience is None:
            return False
        return len(self.history) - 1 - self.history.index(self.best) >= self.patience

    @property
    def evaluated_step(self) -> int | None:
        """Of the last evaluation."""
        return self.history[-1]["step"] if self.history else None

    @property
    def newest_is_best(self) -> bool:
        return self.best is self.history[-1]

    def has(self, step: int) -> bool:
        """Whether the weights of `step` have been evaluated."""
        return any(entry["step"] == step for entry in self.history)

    def add(self, step: int, scores: dict[str, float]) -> bool:
        """Adds an evaluation; not one whose score is not finite, which returns False."""
        if not math.isfinite(scores[self.metric]):
            return False
        self.history.append({"step": step, "development_data": self.development_data, **scores})
        return True

    def write(self, further_files: Collection[str]) -> None:
        """Writes the evaluations, and copies the model of the newest step if it is the best. Called
        on the main process, once that step is saved. further_files: those of the model besides
        MODEL_FILES.
        """
        newest = self.history[-1]
        if self.newest_is_best:
            step = self.folder / str(newest["step"])
            names = [
                name
                for name in read_manifest(step)
                if MODEL_FILES.fullmatch(name) or name in further_files
            ]
            with atomic_folder(self.folder / BEST_FOLDER) as best:
                for name in names:
                    (best / name).parent.mkdir(exist_ok=True)
                    shutil.copy2(step / name, best / name)
                write_part_of_manifest(best, step, {name: name for name in names})
                newest["model"] = model_digest(best)
                copy_card(step, best, self.folder / BEST_FOLDER)
        later = [entry for entry in self.later if entry["step"] > newest["step"]]
        write_json(self.folder / EVALUATIONS_FILE, self.history + later)


def has_stopped_early(folder: Path, step: int, patience: int) -> bool:
    """Whether early stopping has ended the run at `step`: the last `patience` evaluations were not
    better than the best one before. folder: the run's folder of steps.
    """
    path = folder / EVALUATIONS_FILE
    entry = {"step": int, "model": str | None}
    if not path.is_file():
        return False
    evaluations = read_json(path, "the evaluations", list_of(entry))
    evaluations = [evaluation for evaluation in evaluations if evaluation["step"] <= step]
    # An evaluation names its model if it was the best one until then.
    best_ones = [number for number, evaluation in enumerate(evaluations) if evaluation["model"]]
    if not best_ones:
        return False
    num_not_better = len(evaluations) - 1 - best_ones[-1]
    return num_not_better >= patience


def read_evaluations(
    folder: Path,
    metric: str,
    data: str | None = None,
    step: int = 0,
    evaluated_step: int | None = None,
) -> list[JsonObject]:
    """The evaluations in a folder of steps.

    metric: the score that each must have.
    data: digest of the development data that they must be of.
    step: of the checkpoint that is resumed.
    evaluated_step: the last evaluation that this checkpoint knows of, which must be there.

    Raises UserError if that is not so, or if the best model is missing, damaged or that of another
    run.
    """
    path = folder / EVALUATIONS_FILE
    entry = {"step": int, metric: float, "development_data": str | None}
    evaluations = read_json(path, "the evaluations", list_of(entry)) if path.exists() else []
    best = folder / BEST_FOLDER
    if evaluations and not has_weights(best):
        raise UserError(f"{best}, the best model, is gone: restore it, or add --overwrite")
    steps = [evaluation["step"] for evaluation in evaluations]
    if evaluated_step is not None and evaluated_step not in steps:
        raise UserError(
            f"{path} lacks the evaluation of step {evaluated_step}, which was made before step "
            f"{step} was saved: with --from-checkpoint, copy it and {best.name}/ there from the "
            f"folder of that run; else restore it and {best}, or add --overwrite"
        )
    if any(evaluation["development_data"] not in (None, data) for evaluation in evaluations):
        raise UserError(
            f"{path} has the scores of other development data: restore that, or add --overwrite"
        )
    if evaluations:
        verify_best(folder)
    return evaluations


def verify_best(folder: Path) -> None:
    """Raises UserError unless the best model in a folder of steps is that of its evaluations, with
    the bytes that were written.
    """
    check_best(folder)
    if (folder / BEST_FOLDER / MANIFEST_FILE).is_file():  # older ones have none
        verify_checkpoint(folder / BEST_FOLDER, with_state=False)
