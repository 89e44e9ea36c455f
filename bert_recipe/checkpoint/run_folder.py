"""The folder of a run's steps: its lock, and where it is."""

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bert_recipe.checkpoint.best import find_best, link_best, take_best
from bert_recipe.checkpoint.folder import (
    PROBE,
    SEED_FOLDER,
    checkpoint_steps,
    remove_leftovers,
    restore_replaced,
)
from bert_recipe.checkpoint.identity import overwrite
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.record import SCORES_FILE
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import (
    FolderLock,
    lock_folder,
    remove,
    temporary_path,
    write_atomically,
)

if TYPE_CHECKING:  # it imports torch, which scripts that ask for a model's name do without
    from bert_recipe.utils.distributed import DistributedContext


class RunFolder:
    """`<output-dir>/<model>/<phase or task>[/seed-N or /fold-N]`, which the main process of a run
    locks until the end of the command.

    phase: its place in the folder of the model.
    path: may not exist yet.
    distributed: the processes of the run.
    locks: unlocks it at the end.
    """

    def __init__(
        self, of_model: Path, phase: str, distributed: "DistributedContext", locks: ExitStack
    ):
        self.phase, self.path = phase, of_model / phase
        self.distributed, self.locks = distributed, locks
        self.lock_held: FolderLock | None = None

    def __str__(self) -> str:
        return str(self.path)

    def lock(self) -> None:
        """For the main process, before the run looks for checkpoints in it. Makes the folder if
        necessary.
        """
        self.lock_held = self.locks.enter_context(closing(lock_folder(self.path)))
        restore_replaced(self.path)

    def current_path(self) -> Path | None:
        """Where it is now, for somebody may have renamed it; None if it was removed."""
        return self.path if self.lock_held is None else self.lock_held.current_path()

    def path_to_write(self) -> Path:
        """Where it is now, or if it was removed, a new folder beside it."""
        path = self.current_path()
        if path is None:
            path = self.path.with_name(f"{self.path.name}-removed-{os.getpid()}")
            path.mkdir(parents=True, exist_ok=True)
        return path

    def check_shared(self, path: Path) -> None:
        """Raises UserError on the main process unless all ranks see `path`."""
        (unseen_by,) = self.distributed.all_reduce_sum([not path.exists()])

        def refuse() -> None:
            processes = f"{int(unseen_by)} of the {self.distributed.world_size} processes"
            raise UserError(
                f"{path} cannot be read by {processes}: checkpoints must be on storage that all "
                f"machines share"
            )

        if unseen_by:
            self.distributed.on_main(refuse)

    def claim(
        self,
        best_step: int | None,
        resumed: ModelFolder | None,
        overwrites: bool,
        weights: ModelFolder | None,
    ) -> None:
        """Before the first step: makes and locks the folder, removes its steps with --overwrite,
        and links `best`. Raises UserError, without a change of the folder, if another run has it,
        if ranks do not see it, or if the best model of the resumed run is gone or damaged.

        best_step: of the run so far; None without one.
        resumed: the checkpoint that the run goes on from.
        overwrites: whether the steps in it are removed.
        weights: the starting weights, which must not be in it.
        """
        probe = self.distributed.on_main(self._lock_and_probe)  # a file that all ranks must see
        try:
            self.check_shared(Path(probe))
        finally:
            self.distributed.on_main(partial(remove_leftovers, self.path))

        def claim() -> None:
            source = None
            if best_step is not None and resumed is not None:
                places = [resumed.path.parent]
                if not overwrites:
                    places.insert(0, self.path)
                source = find_best(places, best_step)
            if overwrites:
                overwrite(self.path, weights)
            if source is not None:
                take_best(source, self.path / str(best_step))
            link_best(self.path, best_step)

        self.distributed.on_main(claim)

    def remove_results(self, names: Sequence[str]) -> None:
        """Removes the result files `names` of earlier weights, such as those of a shorter run that
        is continued.
        """
        for name in names:
            remove(self.path / name)
        self.remove_summary()

    def remove_summary(self) -> None:
        """Removes the means over all seeds or folds, before the results of this one change. A
        single run has none.
        """
        if SEED_FOLDER.fullmatch(self.path.name):
            remove(self.path.parent / SCORES_FILE)

    def _lock_and_probe(self) -> str:
        if self.lock_held is None:  # there was no folder when the run chose its start
            self.lock()
            if checkpoint_steps(self.path):
                raise UserError(
                    f"{self.path} has checkpoints of another run, which was started at the same "
                    f"moment: rerun the same command"
                )
        probe = temporary_path(self.path / PROBE)
        write_atomically(probe, b"\0")  # so that a disk that is full is found now
        return str(probe)
