"""Checkpoints during training: when they are due, when the run stops, and after errors."""

import contextlib
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bert_recipe.checkpoint.record import RunRecord
from bert_recipe.checkpoint.state import TrainState
from bert_recipe.checkpoint.writer import CheckpointWriter
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.training.callbacks import Callback, Update, is_due
from bert_recipe.training.run import Run
from bert_recipe.utils.errors import RankFailure, UserError


class Checkpoints(Callback):
    """Saves the state of a run in its folder, which it claims."""

    def __init__(self, run: Run, state: TrainState, runtime: Runtime):
        self.run, self.state, self.runtime = run, state, runtime
        self.config = config = run.settings.trainer
        sharded = state.parallel.shard_group is not None
        self.writer = CheckpointWriter(
            run.folder.path, runtime.distributed, sharded, config.keep_every
        )
        self.saved: tuple[int, int] | None = self._content()

    def claim(self) -> None:
        self.run.claim_folder(self.state.best_step)
        if self.state.step > 0:
            prune = partial(self.writer.prune, self.run.folder.path, self.state.step)
            self.runtime.distributed.on_main(prune)

    def wants_stop(self) -> bool:
        folder = self.run.folder
        has_moved = folder.current_path() != folder.path  # on the main process, which locks it
        return self.writer.error is not None or has_moved

    def is_due(self, update: Update) -> bool:
        every = self.config.steps_per_checkpoint
        return update.stops or is_due(update.step, every, self.state.last_step)

    def after_update(self, update: Update) -> None:
        if update.step == self.state.first_step + 1 and self.runtime.device.type == "cuda":
            self.writer.prepare(self.state.capture())
        if self.is_due(update) and not self.is_saved():
            self.check_replicas()
            self.save()

    def save(self) -> None:
        """Passes the state to the background writer, unless this step is already saved with its
        evaluation. Called on all ranks.
        """
        if self.is_saved():
            return
        self.saved = self._content()
        self.state.read_clock()
        if self.writer.is_writer:
            self.writer.finish()  # before the folder is looked for, which may go away meanwhile
            self.writer.move_to(self._path_to_write())
            self.writer.write(self.state.capture())

    def _path_to_write(self) -> Path:
        folder = self.run.folder
        if self.state.parallel.shard_group is None:
            # Only the main process writes, perhaps because another one has failed.
            return folder.path_to_write()
        return Path(self.runtime.distributed.on_main(lambda: str(folder.path_to_write())))

    def _content(self) -> tuple[int, int]:
        """What tells two checkpoints of this process apart: updates and evaluations."""
        return self.state.step, len(self.state.evaluations)

    def is_saved(self) -> bool:
        return self._content() == self.saved

    def check_replicas(self) -> None:
        """Warns if ranks that hold the same rows have different weights. Raises UserError on all
        ranks if these differ by more than rounding; then they are not saved.
        """
        distributed = self.runtime.distributed
        if distributed.world_size == 1:
            return
        checksum = torch.tensor([self.state.parallel.rows_checksum()], dtype=torch.float64)
        checksums, _ = distributed.gather_rows(checksum)  # of each rank: shard, bits, norm
        are_equal = are_close = True
        for shard in checksums[:, 0].unique():
            copies = checksums[checksums[:, 0] == shard]
            bits, norms = copies[:, 1], copies[:, 2]
            are_equal = are_equal and bool((bits == bits[0]).all())
            are_close = are_close and bool(norms.max() < 1.001 * norms.min())
        if are_equal:
            return
        what = f"step {self.state.step}: the copies of the weights on different processes"
        if are_close:
            text = f"warning: {what} differ by rounding, as on machines of different kinds"
            self.runtime.reporter.log((), {}, text)
            return
        self.saved = self._content()
        raise UserError(
            f"{what} are not equal, as after an error of a GPU: resume from the checkpoint before "
            f"it, without the machine that is faulty"
        )

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """On UserError (damaged data, a rank that failed), saves the last completed step and
        re-raises. Between two updates and inside one, the state is that of the last update.
        """
        try:
            yield
        except UserError as error:
            # The collectives of GPUs are aborted because a rank failed: nothing can be read.
            if isinstance(error, RankFailure) and self.runtime.device.type == "cuda":
                raise
            self._save_after(error)
            raise
        finally:
            self.writer.finish()

    def _save_after(self, error: UserError) -> None:
        state = self.state
        state.step = int(state.device_step)
        # A sharded state can be saved only if all ranks come here.
        if not error.on_all_ranks and state.parallel.shard_group is not None:
            return
        is_finite = state.parallel.has_finite_weights()
        if error.on_all_ranks:
            is_finite = not any(self.runtime.distributed.all_reduce_sum([not is_finite]))
        if is_finite:
            self.save()
            self.writer.wait()

    def finish(self, stopped_by: int | None, final_loss: float | None) -> None:
        self.writer.wait()
        state, folder = self.state, self.run.folder.path
        if self.writer.parent != folder:
            raise UserError(
                f"{folder} was renamed or removed while this run used it: step {state.step} is "
                f"saved in {self.writer.parent}; move that back and rerun the same command"
            )
        state.read_clock()
        summary: dict[str, Any] = {"step": state.step}
        where = "nothing was to be saved"
        if state.step > 0:
            summary["checkpoint"] = str(folder / str(state.step))
            where = f"checkpoint in {summary['checkpoint']}"
        if final_loss is not None:
            rate = state.samples_consumed / max(state.raw_train_seconds, 1e-9)
            summary |= {
                "e2e_train_time": state.train_seconds,
                "raw_train_time": state.raw_train_seconds,
                "training_sequences_per_second": rate,
                "final_loss": final_loss,
            }
        reached = f"{state.record.phase}: step {state.step} of {self.run.max_steps}"
        if stopped_by is not None and state.step < self.run.max_steps:
            reached += (
                f", stopped by {signal.Signals(stopped_by).name}: {how_to_resume(state.record)}"
            )
        self.runtime.reporter.log((), summary, f"{reached}; {where}")


def how_to_resume(record: RunRecord) -> str:
    flags = record.arguments
    advice = "rerun the same command with --resume-from-checkpoint"
    resumes = flags.get("resume_from_checkpoint") or flags.get("last_step_of_checkpoint") == "auto"
    if resumes or flags.get("frozen_encoder"):  # a fit is repeated
        advice = "rerun the same command to resume"
    if flags.get("overwrite"):
        advice += ", without --overwrite"
    return advice
