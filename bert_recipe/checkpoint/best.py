"""The best checkpoint of a run: a step that is kept, and the link BEST_FOLDER to it. The scores
that choose it are in the progress of each checkpoint.
"""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path

from bert_recipe.checkpoint.calibration import CALIBRATION_FILE
from bert_recipe.checkpoint.folder import (
    BEST_FOLDER,
    MANIFEST_FILE,
    has_weights,
    link_model,
    model_digest,
    verify_checkpoint,
)
from bert_recipe.checkpoint.model_card import copy_card
from bert_recipe.checkpoint.older import old_best
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import atomic_folder, is_same_path, remove, sync, temporary_path
from bert_recipe.utils.json_files import JsonObject


class BestCheckpoint:
    """The evaluations of a run and the best one, which `--early-stopping` also decides on.

    metric: the score that decides.
    lower_is_better: as of a loss.
    patience: training stops after so many evaluations without a better score; None: it does not.
    history: the evaluations so far, oldest first, each with its step; new ones are added to it.
    """

    def __init__(
        self, metric: str, lower_is_better: bool, patience: int | None, history: list[JsonObject]
    ):
        self.metric, self.lower_is_better = metric, lower_is_better
        self.patience, self.history = patience, history

    @property
    def best(self) -> JsonObject | None:
        """The evaluation with the best score, the first one on ties; None without any."""
        choose = min if self.lower_is_better else max
        return choose(self.history, key=lambda entry: entry[self.metric], default=None)

    @property
    def best_step(self) -> int | None:
        return None if self.best is None else self.best["step"]

    @property
    def is_exhausted(self) -> bool:
        """Whether early stopping ends the run."""
        if self.best is None or self.patience is None:
            return False
        return len(self.history) - 1 - self.history.index(self.best) >= self.patience

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
        self.history.append({"step": step, **scores})
        return True


def find_best(places: Sequence[Path], step: int) -> Path:
    """The best model of a run, step `step`, in the first of `places`, folders of steps, that has
    it. Raises UserError if none has it, or if it is damaged.
    """
    for place in places:
        folder = place / str(step)
        if not has_weights(folder):
            folder = old_best(place, step) or folder
        if has_weights(folder):
            verify_checkpoint(folder, with_state=False)
            return folder
    raise UserError(
        f"{places[-1] / str(step)}, the best model of the evaluations so far, is gone: restore it, "
        f"or start again with --overwrite"
    )


def take_best(source: Path, step: Path) -> None:
    """Makes the folder `step` with the model of `source`, which is that step under another path, or
    an older copy of it.
    """
    if is_same_path(source, step):
        return
    with atomic_folder(step) as temporary:
        link_model(temporary, source)
        copy_card(source, temporary, step)
        if (source / CALIBRATION_FILE).is_file():
            shutil.copy2(source / CALIBRATION_FILE, temporary)


def link_best(parent: Path, step: int | None) -> None:
    """Makes `best` in the folder of steps `parent` a link to the step, atomically; on a file system
    without links a copy of its model. None: removes the link.
    """
    best = parent / BEST_FOLDER
    if step is None:
        if best.is_symlink():
            best.unlink()
        return
    if best.is_symlink() and str(best.readlink()) == str(step):
        return
    temporary = temporary_path(best)
    try:
        temporary.symlink_to(str(step))
    except OSError:
        if not is_copy(best, parent / str(step)):
            take_best(parent / str(step), best)
        return
    if not best.is_symlink():  # a folder, as in a copy that follows links
        remove(best)
    temporary.replace(best)
    sync(parent)


def is_copy(folder: Path, step: Path) -> bool:
    """Whether a complete model folder has the model of a checkpoint."""
    has_manifest = (folder / MANIFEST_FILE).is_file()
    return has_manifest and model_digest(folder) == model_digest(step)
