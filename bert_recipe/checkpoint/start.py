"""Where a run starts: from random weights, from the weights of a model folder, or from a checkpoint
that it resumes.

`find_start` opens the folders that the flags name, before the model is chosen. The model's name
gives the run's own folder, in which `resolve_start` decides, once that is locked.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from bert_recipe.checkpoint.folder import (
    PROGRESS_SUFFIX,
    find_checkpoint,
    find_model_folder,
    newest_checkpoint,
    refuse_damaged,
    verify_checkpoint,
)
from bert_recipe.checkpoint.identity import RANDOM
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.progress import read_progress
from bert_recipe.config import StartConfig, is_step
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import is_same_path
from bert_recipe.utils.progress import print_line


def on_this_process(function: Callable[[], Any]) -> Any:
    return function()


@dataclass(frozen=True)
class Start:
    """Verified folders, or None.

    named: --from-checkpoint of this run, which for one of several seeds is in a folder of its own.
    resumes: whether it takes over more than weights; a benchmark does not.
    checkpoint: to resume.
    weights: the starting weights.
    problem: why there are none, which is an error unless a checkpoint is resumed.
    """

    config: StartConfig = field(default_factory=StartConfig)
    named: Path | None = None
    resumes: bool = True
    checkpoint: ModelFolder | None = None
    weights: ModelFolder | None = None
    problem: str | None = None

    @property
    def folders(self) -> list[ModelFolder]:
        """The model folders that the flags name, first the one to start from."""
        return [folder for folder in (self.checkpoint, self.weights) if folder is not None]

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
        """The same start with the model folders that other starts have opened, so that each is read
        once. folders: those, by path; the ones of this start are added.
        """

        def shared(folder: ModelFolder | None) -> ModelFolder | None:
            return None if folder is None else folders.setdefault(folder.path, folder)

        return replace(self, checkpoint=shared(self.checkpoint), weights=shared(self.weights))

    def for_benchmark(self) -> "Start":
        """The same weights for a run that resumes nothing: no step, optimizer or data position."""
        return replace(
            self,
            named=None,
            resumes=False,
            checkpoint=None,
            weights=self.folder,
            problem=None if self.checkpoint else self.problem,
        )

    def open(self, path: Path) -> ModelFolder:
        """The model folder at `path`, which is not opened again if it is one of these."""
        for folder in self.folders:
            if folder.path == path:
                return folder
        return ModelFolder(path)


class StartKind(Enum):
    """What a run takes over from the folder that it starts from."""

    RANDOM = "nothing: there is none"
    WEIGHTS = "weights, of any model folder or of phase 1"
    NEXT_PHASE = "weights, optimizer and number of updates, of phase 1 (--lr-rewarmup)"
    RESUMED = "all of a checkpoint of this run"


@dataclass(frozen=True)
class StartPoint:
    """Where a run starts: what it takes over, and from which folder, None for random weights."""

    kind: StartKind
    folder: Path | None = None


def named_folders(config: StartConfig, seed_name: str = "") -> tuple[Path | None, Path | None]:
    """--from-checkpoint and --from-phase1-final-params of a run; of one of several seeds, whose
    subfolder is `seed_name`, its own checkpoints, and phase 1's if that had seeds.
    """
    checkpoint, phase1 = config.from_checkpoint, config.from_phase1_final_params
    if seed_name and checkpoint is not None:
        checkpoint = checkpoint / seed_name
    if seed_name and phase1 is not None:
        phase1_of_seed = phase1 / seed_name
        if is_step(phase1.name):
            phase1_of_seed = phase1.parent / seed_name / phase1.name
        if phase1_of_seed.is_dir():
            phase1 = phase1_of_seed
    return checkpoint, phase1


def find_start(
    config: StartConfig,
    on_main: Callable[[Callable[[], Any]], Any] = on_this_process,
    with_state: bool = True,
    seed_name: str = "",
) -> Start:
    """Resolves and verifies the folders that the flags name. Raises UserError if a checkpoint to
    resume cannot be used.

    on_main: calls a function on the main process only, and returns its result on all.
    with_state: whether a checkpoint is resumed, not only its model used, of which
        `--last-step-of-checkpoint auto` is the run's best model, or its newest checkpoint if it
        keeps no best one.
    seed_name: see `named_folders`.
    """
    named, phase1 = named_folders(config, seed_name)
    source = phase1 or config.from_pretrained_params
    if not with_state and config.last_step_of_checkpoint == "auto":
        named, source = None, named

    def find() -> list[str | None]:
        checkpoint = weights = problem = None
        if named is not None:
            last_step = config.last_step_of_checkpoint
            checkpoint = find_checkpoint(named, last_step, with_state)
        if source is not None:
            log = print_line if checkpoint is None else no_log
            try:
                weights = find_model_folder(source, log, takes_best=phase1 is None)
            except UserError as error:  # phase 1's checkpoints may be removed once phase 2 has one
                problem = str(error)
        paths = [None if path is None else str(path) for path in (checkpoint, weights)]
        return [*paths, problem]

    checkpoint, weights, problem = on_main(find)
    if problem is not None and checkpoint is None and not config.resume:
        raise UserError(problem)
    return Start(
        config,
        named,
        checkpoint=None if checkpoint is None else ModelFolder(checkpoint),
        weights=None if weights is None else ModelFolder(weights),
        problem=problem,
    )


def no_log(_text: str) -> None:
    pass


def resolve_start(start: Start, folder: Path, saves: bool = True) -> StartPoint:
    """Where a run starts that keeps its checkpoints in `folder`.

    --resume-from-checkpoint, or --from-checkpoint with the run's own folder and step `auto`: the
    newest valid checkpoint in `folder`, else the checkpoint that the flags name.

    Otherwise: the checkpoint that the flags name. Newer ones in `folder`, which the run would
    replace, are an error if it saves.

    Without any checkpoint: the weights that the flags name, or random ones. With --overwrite none
    of the checkpoints in `folder` counts: the run removes them once it has started.

    start: what the flags name.
    folder: locked if the run saves.
    saves: whether the run will save to `folder`.
    """
    is_own_folder = start.named is not None and is_same_path(start.named, folder)
    takes_newest = is_own_folder and start.config.last_step_of_checkpoint == "auto"
    overwrites = start.config.overwrite
    named = None if start.checkpoint is None else start.checkpoint.path
    if overwrites and named is not None and is_same_path(named.parent, folder):
        if not takes_newest:
            raise UserError(
                f"--overwrite would remove {named}, which is to be resumed: choose another "
                f"--output-dir"
            )
        named = None
    named_step = step_in(folder, named)  # newer checkpoints are those after it
    if (start.resumes and start.config.resume) or takes_newest:
        log = no_log if is_own_folder else print_line  # `find_start` has warned of damaged ones
        newest = None if overwrites else newest_checkpoint(folder, log, named_step)
        checkpoint = newest or named
        if checkpoint is None and not overwrites:
            refuse_damaged(folder)
            print_line(f"no checkpoint in {folder} yet: starting at step 1")
    else:
        checkpoint = named
        if saves and not overwrites:
            refuse_newer(folder, named_step)
    if checkpoint is not None:
        return StartPoint(StartKind.RESUMED, checkpoint)
    if start.named is not None and not is_own_folder:
        raise UserError(
            f"--from-checkpoint {start.named} holds no checkpoint: check the path "
            f"(only the run's own folder, {folder}, may be empty)"
        )
    if start.problem is not None:
        raise UserError(start.problem)
    if start.weights is None:
        return StartPoint(StartKind.RANDOM)
    if start.config.from_phase1_final_params is not None:
        check_phase1(start.weights, start.config.lr_rewarmup)
    has_state = start.resumes and start.config.lr_rewarmup
    kind = StartKind.NEXT_PHASE if has_state else StartKind.WEIGHTS
    return StartPoint(kind, start.weights.path)


def check_phase1(weights: ModelFolder, lr_rewarmup: bool) -> None:
    """Raises UserError if phase 2 would start from `weights` of an unfinished phase 1, or with
    `lr_rewarmup` from damaged optimizer state.
    """
    # Model folders of other programs have no progress.
    for path in weights.path.glob(f"[!.]*{PROGRESS_SUFFIX}"):
        progress = read_progress(weights.path, path.name.removesuffix(PROGRESS_SUFFIX))
        if not progress.is_finished:
            last_step = progress.arguments["max_steps"]
            raise UserError(
                f"phase 1 is unfinished: {weights} is step {progress.step} of {last_step}: rerun "
                f"phase 1 to its end, or start from it as it is with --from-pretrained-params"
            )
    if lr_rewarmup:
        verify_checkpoint(weights.path)


def step_in(folder: Path, checkpoint: Path | None) -> int:
    """The step of `checkpoint` in the folder of steps `folder`, -1 if it is none of these."""
    if checkpoint is None or not is_same_path(checkpoint.parent, folder):
        return -1
    return int(checkpoint.name) if is_step(checkpoint.name) else -1


def refuse_newer(folder: Path, above: int) -> None:
    """Raises UserError if `folder` has a valid checkpoint after step `above`."""
    if (newest := newest_checkpoint(folder, no_log, above)) is not None:
        raise UserError(
            f"{folder} already holds step {newest.name}: add --resume-from-checkpoint to resume "
            f"from it (instead of --from-checkpoint), or --overwrite to start again, or choose "
            f"another --output-dir"
        )
