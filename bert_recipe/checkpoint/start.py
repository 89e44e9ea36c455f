"""Where a run starts: from random weights, from the weights of a model folder, or from a checkpoint
that it resumes.

`find_starts` opens the folders that the flags name, before the model is chosen. The model's name
gives the run's own folder; once that is locked, `decide_start` decides, for all of the run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
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
from bert_recipe.checkpoint.progress import Progress, read_progress
from bert_recipe.checkpoint.run_folder import RunFolder
from bert_recipe.config import RunConfig, StartConfig, is_step
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import is_same_path
from bert_recipe.utils.progress import print_line


def on_this_process(function: Callable[[], Any]) -> Any:
    return function()


@dataclass(frozen=True)
class NamedStart:
    """The verified folders that the flags name, or None.

    named: --from-checkpoint of this run, which for one of several seeds is in a folder of its own.
    checkpoint: to resume.
    weights: the starting weights.
    problem: why there are none, which is an error unless a checkpoint is resumed.
    """

    named: Path | None = None
    checkpoint: ModelFolder | None = None
    weights: ModelFolder | None = None
    problem: str | None = None

    @property
    def folder(self) -> ModelFolder | None:
        """The model folder whose weights are loaded, unless the run's own folder has newer ones."""
        return self.checkpoint or self.weights


class StartKind(Enum):
    """What a run takes over from the folder that it starts from."""

    RANDOM = "nothing: there is none"
    WEIGHTS = "weights, of any model folder or of phase 1"
    NEXT_PHASE = "weights, optimizer and number of updates, of phase 1 (--lr-rewarmup)"
    RESUMED = "all of a checkpoint of this run"


@dataclass(frozen=True)
class StartPoint:
    """Where a run starts: what it takes over, and from which folder.

    source: whose weights are loaded; None for random ones.
    weights: the starting weights of the run, which are not loaded again if it is resumed; None for
        random ones, or if they are lost, which only a run that is resumed may have: see `problem`.
    progress: of `source`, where its updates are taken over.
    """

    kind: StartKind = StartKind.RANDOM
    source: ModelFolder | None = None
    weights: ModelFolder | None = None
    progress: Progress | None = None
    problem: str | None = None

    @classmethod
    def of_weights(cls, weights: ModelFolder | None) -> "StartPoint":
        """Of a run that takes over weights alone, random ones without any."""
        return cls(StartKind.WEIGHTS if weights else StartKind.RANDOM, weights, weights)

    @property
    def is_random(self) -> bool:
        """Whether the run began, now or when it was started first, with random weights."""
        return self.weights is None and self.problem is None

    def weights_digest(self) -> str | None:
        """What identifies the starting weights: their digest, RANDOM without any, or None if they
        are not known.
        """
        if self.weights is not None:
            return self.weights.weights_digest
        return RANDOM if self.is_random else None


def named_folders(config: StartConfig, seed_name: str) -> tuple[Path | None, Path | None]:
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


def find_starts(
    config: StartConfig,
    names: Sequence[str] = ("",),
    on_main: Callable[[Callable[[], Any]], Any] = on_this_process,
    with_state: bool = True,
) -> dict[str, NamedStart]:
    """Resolves and verifies the folders that the flags name for each run of a command, by its
    subfolder. Folders that runs share are opened once. Raises UserError if a checkpoint to resume
    cannot be used.

    names: the subfolders of the runs; "" of a run that is alone.
    on_main: calls a function on the main process only, and returns its result on all.
    with_state: whether a checkpoint is resumed, not only its model used, of which
        `--last-step-of-checkpoint auto` is the run's best model, or its newest checkpoint if it
        keeps no best one.
    """
    folders = {name: named_folders(config, name) for name in names}
    open_folder = cache(ModelFolder)
    starts = {}
    for named, phase1 in dict.fromkeys(folders.values()):
        start = find_start(config, named, phase1, on_main, with_state, open_folder)
        starts[named, phase1] = start
    return {name: starts[folders[name]] for name in names}


def find_start(
    config: StartConfig,
    named: Path | None,
    phase1: Path | None,
    on_main: Callable[[Callable[[], Any]], Any],
    with_state: bool,
    open_folder: Callable[[Path], ModelFolder],
) -> NamedStart:
    """The folders that the flags name for a run, see `find_starts` and `named_folders`.
    open_folder: makes the model folder at a path, or gives one that another run has opened.
    """
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

    *paths, problem = on_main(find)
    checkpoint, weights = (path and open_folder(Path(path)) for path in paths)
    if problem is not None and checkpoint is None and not config.resume:
        raise UserError(problem)
    return NamedStart(named, checkpoint, weights, problem)


def no_log(_text: str) -> None:
    pass


def decide_start(named: NamedStart, folder: RunFolder, settings: RunConfig) -> StartPoint:
    """Where a run starts that keeps its checkpoints in `folder`, on all ranks. Locks the folder if
    it exists, unless the run is a benchmark, which takes over the weights alone: no step, optimizer
    or data position.

    --resume-from-checkpoint, or --from-checkpoint with the run's own folder and step `auto`: the
    newest valid checkpoint in `folder`, else the checkpoint that the flags name.

    Otherwise: the checkpoint that the flags name. Newer ones in `folder`, which the run would
    replace, are an error.

    Without any checkpoint: the weights that the flags name, or random ones. With --overwrite none
    of the checkpoints in `folder` counts: the run removes them once it has started.

    named: what the flags name.
    """
    config, resumes = settings.start, not settings.trainer.benchmark

    def find() -> str | None:
        checkpoint = None if named.checkpoint is None else named.checkpoint.path
        if resumes:
            if folder.path.is_dir():
                folder.lock()
            checkpoint = choose_checkpoint(named, config, folder.path)
        if checkpoint is None:
            check_starting_weights(named, config)
        return None if checkpoint is None else str(checkpoint)

    path = folder.distributed.on_main(find)
    source = named.weights
    if path is not None:
        source = named.checkpoint
        if source is None or source.path != Path(path):
            source = ModelFolder(path)
    if source is None:
        return StartPoint()
    folder.check_shared(source.path)
    if not resumes:
        return StartPoint.of_weights(source)
    kind = StartKind.RESUMED
    if path is None:
        kind = StartKind.NEXT_PHASE if config.lr_rewarmup else StartKind.WEIGHTS
    progress = None
    if kind is not StartKind.WEIGHTS:
        progress = read_progress(source.path, settings.prefix)
    return StartPoint(kind, source, named.weights, progress, named.problem)


def choose_checkpoint(named: NamedStart, config: StartConfig, folder: Path) -> Path | None:
    """The checkpoint that is resumed, see `decide_start`; None without one."""
    given = None if named.checkpoint is None else named.checkpoint.path
    is_own_folder = named.named is not None and is_same_path(named.named, folder)
    takes_newest = is_own_folder and config.last_step_of_checkpoint == "auto"
    if config.overwrite:
        if given is not None and is_same_path(given.parent, folder):
            if not takes_newest:
                raise UserError(
                    f"--overwrite would remove {given}, which is to be resumed: choose another "
                    f"--output-dir"
                )
            given = None
    elif config.resume or takes_newest:
        log = no_log if is_own_folder else print_line  # `find_starts` has warned of damaged ones
        given = newest_checkpoint(folder, log, step_in(folder, given)) or given
        if given is None:
            refuse_damaged(folder)
    elif (newest := newest_checkpoint(folder, no_log, step_in(folder, given))) is not None:
        raise UserError(
            f"{folder} already holds step {newest.name}: add --resume-from-checkpoint to resume "
            f"from it (instead of --from-checkpoint), or --overwrite to start again, or choose "
            f"another --output-dir"
        )
    if given is None and named.named is not None and not is_own_folder:
        raise UserError(
            f"--from-checkpoint {named.named} holds no checkpoint: check the path "
            f"(only the run's own folder, {folder}, may be empty)"
        )
    return given


def check_starting_weights(named: NamedStart, config: StartConfig) -> None:
    """Raises UserError if the weights that the flags name cannot be started from: if they are gone,
    of an unfinished phase 1, or with --lr-rewarmup of a damaged one.
    """
    if named.problem is not None:
        raise UserError(named.problem)
    weights = named.weights
    if weights is None or config.from_phase1_final_params is None:
        return
    # Model folders of other programs have no progress.
    for path in weights.path.glob(f"[!.]*{PROGRESS_SUFFIX}"):
        progress = read_progress(weights.path, path.name.removesuffix(PROGRESS_SUFFIX))
        if not progress.is_finished:
            last_step = progress.arguments["max_steps"]
            raise UserError(
                f"phase 1 is unfinished: {weights} is step {progress.step} of {last_step}: rerun "
                f"phase 1 to its end, or start from it as it is with --from-pretrained-params"
            )
    if config.lr_rewarmup:
        verify_checkpoint(weights.path)


def step_in(folder: Path, checkpoint: Path | None) -> int:
    """The step of `checkpoint` in the folder of steps `folder`, -1 if it is none of these."""
    if checkpoint is None or not is_same_path(checkpoint.parent, folder):
        return -1
    return int(checkpoint.name) if is_step(checkpoint.name) else -1
