"""Where a run starts: from random weights, from the weights of a model folder, or from a checkpoint
that it resumes.

`find_start` resolves the flags, before the model is chosen; `start_in` completes that in the run's
own folder.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from checkpoint.folder import (
    PROGRESS_SUFFIX,
    find_checkpoint,
    find_model_folder,
    newest_checkpoint,
    refuse_damaged,
    verify_checkpoint,
)
from checkpoint.model_choice import ModelChoice, choose_model
from checkpoint.weights import check_same_kind
from run_config import ModelSelection, RunConfig, StartConfig
from utils.errors import UserError
from utils.files import read_json
from utils.progress import print_line


@dataclass(frozen=True)
class Progress:
    """The progress file of a checkpoint. data: the data's digest. data_files: that of its files'
    sizes and times. hyperparameters: flags that change results, by name. Checkpoints of older
    versions lack these.
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
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """Verified folders, or None. checkpoint: to resume. weights: the starting weights. problem: why
    there are none, which is an error unless a checkpoint is resumed.
    """

    config: StartConfig = field(default_factory=StartConfig)
    checkpoint: Path | None = None
    weights: Path | None = None
    problem: str | None = None

    @property
    def folder(self) -> Path | None:
        """The model folder whose weights are loaded."""
        return self.checkpoint or self.weights


def find_start(
    config: StartConfig, on_main: Callable[[Callable], Any] = lambda function: function()
) -> Start:
    """Resolves and verifies the folders that the flags name. Raises UserError if a checkpoint to
    resume cannot be used.

    on_main: calls a function on the main process only, and returns its result on all.
    """

    def find() -> list[str | None]:
        checkpoint = weights = problem = None
        if config.from_checkpoint is not None:
            checkpoint = find_checkpoint(config.from_checkpoint, config.last_step_of_checkpoint)
        if (path := config.from_phase1_final_params or config.from_pretrained_params) is not None:
            try:
                weights = find_model_folder(
                    path, print_line if checkpoint is None else lambda _: None
                )
            except UserError as error:  # phase 1's checkpoints may be removed once phase 2 has one
                problem = str(error)
        return [value and str(value) for value in (checkpoint, weights, problem)]

    checkpoint, weights, problem = on_main(find)
    if problem is not None and checkpoint is None and not config.resume:
        raise UserError(problem)
    return Start(config, checkpoint and Path(checkpoint), weights and Path(weights), problem)


def find_fine_tuned(
    config: StartConfig,
    model: ModelSelection,
    on_main: Callable[[Callable], Any] = lambda function: function(),
) -> tuple[Path, ModelChoice]:
    """The folder that the flags name for prediction, and its model. Raises UserError unless they
    are of one kind.
    """
    if config.last_step_of_checkpoint == "auto":  # the best model, if there is one
        config = replace(
            config, from_checkpoint=None, from_pretrained_params=config.from_checkpoint
        )
    folder = find_start(config, on_main).folder
    choice = choose_model(model, folder)
    check_same_kind(folder, choice.config, choice.tokenizer)
    return folder, choice


def choose_model_of(config: RunConfig) -> ModelChoice:
    """The model of a run that loads no weights, such as an estimate: folders are searched only if
    no flag names it.
    """
    return choose_model(
        config.model, None if config.model.given_name else find_start(config.start).folder
    )


def is_same_path(path: Path, other: Path) -> bool:
    return os.path.realpath(path) == os.path.realpath(
        other
    )  # Path.resolve fails on links that form a loop


def start_in(start: Start, folder: Path, saves: bool = True) -> Start:
    """`start` for a run whose folder of steps is `folder`: with the newest checkpoint in it if the
    flags ask for that.

    saves: whether the run will save to `folder`, which then must be locked and have no newer
    checkpoint.
    """
    config = start.config
    is_own = config.from_checkpoint is not None and is_same_path(config.from_checkpoint, folder)
    resumes_newest = config.resume or (is_own and config.last_step_of_checkpoint == "auto")
    resumes_here = start.checkpoint is not None and is_same_path(start.checkpoint.parent, folder)
    if resumes_here and not start.checkpoint.is_dir():  # overwritten
        start, resumes_here = replace(start, checkpoint=None), False
    if saves or resumes_newest:
        found = int(start.checkpoint.name) if resumes_here else -1
        newest = newest_checkpoint(
            folder, print_line if resumes_newest and not is_own else lambda _: None, found
        )
        if newest is not None and resumes_newest:
            start = replace(start, checkpoint=newest)
        elif newest is not None:
            raise UserError(
                f"{folder} already holds step {newest.name}: add --resume-from-checkpoint to "
                f"resume from it "
                f"(instead of --from-checkpoint), or --overwrite to start again, or choose another "
                f"--output-dir"
            )
    if start.checkpoint is not None:
        return start
    if config.from_checkpoint is not None and not is_own:
        advice = f"check the path (only the run's own folder, {folder}, may be empty)"
        raise UserError(f"--from-checkpoint {config.from_checkpoint} holds no checkpoint: {advice}")
    if resumes_newest:
        refuse_damaged(folder)
        print_line(f"no checkpoint in {folder} yet: starting at step 1")
    if start.problem is not None:
        raise UserError(start.problem)
    # Folders of other programs have no progress.
    for path in (
        start.weights.glob(f"*{PROGRESS_SUFFIX}")
        if config.from_phase1_final_params is not None
        else ()
    ):
        progress = read_json(path, "the progress of a run", Progress)
        last = progress.arguments.get("max_steps")
        if isinstance(last, int) and progress.step < last:
            raise UserError(
                f"phase 1 is unfinished: {start.weights} is step {progress.step} of {last}: rerun "
                f"phase 1 to its end, "
                f"or start from it as it is with --from-pretrained-params"
            )
    if config.lr_rewarmup:
        verify_checkpoint(start.weights)
    return start
