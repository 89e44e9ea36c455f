"""Where a run starts: from random weights, from the weights of a model folder, or from a checkpoint
that it resumes.

`find_start` resolves the flags, before the model is chosen; `start_in` completes that in the run's
own folder.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from bert_recipe.checkpoint.folder import (
    find_checkpoint,
    find_model_folder,
    newest_checkpoint,
    refuse_damaged,
)
from bert_recipe.checkpoint.identity import RANDOM
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.config import StartConfig
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.progress import print_line


@dataclass(frozen=True)
class Progress:
    """The progress file of a checkpoint. data: the data's digest. data_files: that of its files'
    sizes and times. evaluated_step: of the last evaluation before it that chose the best model, or
    None. encoder_start, head_losses: see TrainState. hyperparameters: flags that change results, by
    name. Checkpoints of older versions lack these.
    """

    step: int
    samples_consumed: int
    schedule_start: int
    phase: str
    seed: int
    num_samples: int
    optimizer: str
    loss_scale: dict[str, float]
    train_seconds: float
    raw_train_seconds: float
    world_size: int | None = None
    data: str | None = None
    data_files: str | None = None
    evaluated_step: int | None = None
    encoder_start: int | None = 0
    head_losses: list[float] = field(default_factory=list)
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)


def on_this_process(function: Callable[[], Any]) -> Any:
    return function()


def no_check(_weights: ModelFolder) -> None:
    """Accepts all starting weights."""


@dataclass(frozen=True)
class Start:
    """Verified folders, or None. checkpoint: to resume. weights: the starting weights. problem: why
    there are none, which is an error unless a checkpoint is resumed. check_weights: raises
    UserError for weights that the program does not start from; not called if a checkpoint is
    resumed.
    """

    config: StartConfig = field(default_factory=StartConfig)
    checkpoint: ModelFolder | None = None
    weights: ModelFolder | None = None
    problem: str | None = None
    check_weights: Callable[[ModelFolder], None] = no_check

    @property
    def folder(self) -> ModelFolder | None:
        """The model folder whose weights are loaded."""
        return self.checkpoint or self.weights

    def weights_digest(self) -> str | None:
        """What identifies the starting weights: their digest, RANDOM without any, or None if they
        are not known, because a resumed run has lost their folder.
        """
        if self.weights is not None:
            return self.weights.weights_digest
        return RANDOM if self.problem is None else None

    def sharing(self, folders: dict[Path, ModelFolder]) -> "Start":
        """The same start with the folders that other starts have opened, by path; adds its own."""
        checkpoint, weights = (
            folder and folders.setdefault(folder.path, folder)
            for folder in (self.checkpoint, self.weights)
        )
        return replace(self, checkpoint=checkpoint, weights=weights)

    def open(self, path: Path) -> ModelFolder:
        """The model folder at `path`, which is not opened again if it is one of these."""
        for folder in (self.checkpoint, self.weights):
            if folder is not None and folder.path == path:
                return folder
        return ModelFolder(path)


class Request(Enum):
    """What the flags ask for, in the run's own folder of steps."""

    BEGIN = "begin a run, with the starting weights if there are any"
    RESUME_GIVEN = "resume the checkpoint that --from-checkpoint names"
    RESUME_NEWEST = "resume the newest checkpoint of the run's own folder, or begin without one"


def find_start(
    config: StartConfig,
    on_main: Callable[[Callable], Any] = on_this_process,
    check_weights: Callable[[ModelFolder], None] = no_check,
) -> Start:
    """Resolves and verifies the folders that the flags name. Raises UserError if a checkpoint to
    resume cannot be used.

    on_main: calls a function on the main process only, and returns its result on all.
    check_weights: see Start.
    """

    def find() -> list[str | None]:
        checkpoint = weights = problem = None
        if config.from_checkpoint is not None:
            checkpoint = find_checkpoint(config.from_checkpoint, config.last_step_of_checkpoint)
        if (path := config.from_phase1_final_params or config.from_pretrained_params) is not None:
            log = print_line if checkpoint is None else no_log
            try:
                takes_best = config.from_phase1_final_params is None
                weights = find_model_folder(path, log, takes_best)
            except UserError as error:  # phase 1's checkpoints may be removed once phase 2 has one
                problem = str(error)
        return [value and str(value) for value in (checkpoint, weights, problem)]

    checkpoint, weights, problem = on_main(find)
    if problem is not None and checkpoint is None and not config.resume:
        raise UserError(problem)
    folders = [path and ModelFolder(path) for path in (checkpoint, weights)]
    return Start(config, *folders, problem, check_weights)


def is_same_path(path: Path, other: Path) -> bool:
    # Path.resolve fails on links that form a loop.
    return os.path.realpath(path) == os.path.realpath(other)


def no_log(_text: str) -> None:
    pass


def start_in(start: Start, folder: Path, saves: bool = True) -> Start:
    """`start` for a run whose folder of steps is `folder`: with the newest checkpoint in it if the
    flags ask for that.

    saves: whether the run will save to `folder`, which then must be locked and have no newer
    checkpoint.
    """
    start, above = in_own_folder(start, folder)
    from_checkpoint = start.config.from_checkpoint
    is_own = from_checkpoint is not None and is_same_path(from_checkpoint, folder)
    request = request_of(start, is_own)
    if request is Request.RESUME_NEWEST:
        log = no_log if is_own else print_line  # `find_start` has warned of damaged ones
        if (newest := newest_checkpoint(folder, log, above)) is not None:
            return replace(start, checkpoint=start.open(newest))
        if start.checkpoint is None:
            refuse_damaged(folder)
            print_line(f"no checkpoint in {folder} yet: starting at step 1")
    elif saves:
        refuse_newer(folder, above)
    if start.checkpoint is not None:
        return start
    if request is Request.BEGIN and from_checkpoint is not None and not is_own:
        raise UserError(
            f"--from-checkpoint {from_checkpoint} holds no checkpoint: check the path (only the "
            f"run's own folder, {folder}, may be empty)"
        )
    if start.problem is not None:
        raise UserError(start.problem)
    if start.weights is not None:
        start.check_weights(start.weights)
    return start


def in_own_folder(start: Start, folder: Path) -> tuple[Start, int]:
    """`start` without a checkpoint that --overwrite has removed from `folder`; and the step of its
    checkpoint if that is in `folder`, else -1.
    """
    checkpoint = start.checkpoint
    if checkpoint is None or not is_same_path(checkpoint.path.parent, folder):
        return start, -1
    if not checkpoint.path.is_dir():
        return replace(start, checkpoint=None), -1
    return start, int(checkpoint.path.name)


def request_of(start: Start, is_own: bool) -> Request:
    """is_own: whether --from-checkpoint is the run's own folder of steps."""
    config = start.config
    if config.resume or (is_own and config.last_step_of_checkpoint == "auto"):
        return Request.RESUME_NEWEST
    return Request.BEGIN if start.checkpoint is None else Request.RESUME_GIVEN


def refuse_newer(folder: Path, above: int) -> None:
    """Raises UserError if `folder` has a valid checkpoint after step `above`."""
    if (newest := newest_checkpoint(folder, no_log, above)) is not None:
        raise UserError(
            f"{folder} already holds step {newest.name}: add --resume-from-checkpoint to resume "
            f"from it (instead of --from-checkpoint), or --overwrite to start again, or choose "
            f"another --output-dir"
        )
