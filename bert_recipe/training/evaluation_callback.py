"""Evaluations during training, which keep the best checkpoint and end training early."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import cast

from bert_recipe.checkpoint.best import BestCheckpoint
from bert_recipe.checkpoint.state import TrainState
from bert_recipe.metrics.text import format_metrics
from bert_recipe.parallel.base import ParallelModel
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.fine_tuning import FineTuningTask
from bert_recipe.tasks.task import SeparableTask
from bert_recipe.training.callbacks import Callback, Update, is_due
from bert_recipe.training.checkpoint_callback import Checkpoints
from bert_recipe.training.evaluation import evaluate, only_numbers, predict
from bert_recipe.training.run import Run
from bert_recipe.utils.stop_signal import StopAtOnce, StopSignal


class Evaluations(Callback):
    """Evaluates the weights at the steps of the run.

    best: of the run, or None if it keeps no best checkpoint.
    results: the metrics of the last evaluation.
    at_start: those of the starting weights, if they were evaluated.
    """

    def __init__(self, run: Run, state: TrainState, checkpoints: Checkpoints, runtime: Runtime):
        self.run, self.state, self.checkpoints, self.runtime = run, state, checkpoints, runtime
        self.best: BestCheckpoint | None = None
        if run.data.development is not None:
            task, patience = run.task, run.settings.trainer.early_stopping
            self.best = BestCheckpoint(
                task.metric, task.lower_is_better, patience, state.evaluations
            )
        self.results: dict[str, float] = {}
        self.at_start: dict[str, float] = {}
        self.stop = StopSignal()

    def start(self, stop: StopSignal) -> None:
        self.stop = stop
        run = self.run
        scores_start = run.logs_start or (run.task.scores_start and run.eval_steps > 0)
        if self._is_missing():
            self.evaluate()
        elif self.state.step == 0 and scores_start:
            self.evaluate()
            self.at_start = self.results

    def is_exhausted(self) -> bool:
        return self.best is not None and self.best.is_exhausted

    def is_due(self, update: Update) -> bool:
        every = self.run.eval_steps
        return every > 0 and is_due(update.step, every, self.state.last_step)

    def after_update(self, update: Update) -> None:
        if not self.is_due(update):
            return
        if update.step >= self.run.max_steps:  # no signal ends this evaluation, but a kill may
            self.checkpoints.check_replicas()
            self.checkpoints.save()
        try:
            self.evaluate()
        except StopAtOnce:
            self.checkpoints.check_replicas()
            self.checkpoints.save()
            raise

    def _is_missing(self) -> bool:
        """Whether this run resumes a checkpoint that is to be evaluated, which a stop may have
        prevented.
        """
        step, run = self.state.step, self.run
        if step == 0 or run.eval_steps == 0:
            return False
        if self.best is not None and self.best.has(step):
            return False
        return is_due(step, run.eval_steps, run.max_steps)

    def evaluate(self) -> None:
        """Evaluates the weights, and keeps the model if it is the best."""
        state = self.state
        scores = self._scores()
        text = f"{state.place(self.run.max_steps)}  evaluation: {format_metrics(scores)}"
        self.results = {f"eval_{name}": value for name, value in scores.items()}
        self.runtime.reporter.log(state.epoch_and_step, self.results, text)
        if self.best is not None and self._selects():
            self._keep_best(self.best, scores)

    def _scores(self) -> dict[str, float]:
        """The task's metrics on the held-out data, and the scores of predictions on the files with
        labels.
        """
        run, runtime, task = self.run, self.runtime, self.run.task
        parallel = cast(ParallelModel, self.state.parallel)
        is_last = self.state.step >= run.max_steps
        ends_on_signal = not (is_last or parallel.gathers_parameters)
        guard = self._until_a_signal if ends_on_signal else contextlib.nullcontext
        scores: dict[str, float] = {}
        if (held_out := run.data.held_out) is not None:
            limits, count = run.limits(runtime), run.data.max_held_out
            separable = cast(SeparableTask, task)
            scores |= evaluate(parallel, separable, held_out, limits, runtime, count, guard)
        batch_size = run.settings.prediction.batch_size
        for scored_set in run.data.scored_sets:
            axis = cast(FineTuningTask, task).logits_axis
            logits, _ = predict(parallel, scored_set.dataset, axis, batch_size, runtime, guard)
            finish = partial(scored_set.finish, logits, None)
            scores |= only_numbers(runtime.distributed.on_main(finish))
        return scores

    @contextlib.contextmanager
    def _until_a_signal(self) -> Iterator[None]:
        """Around the work of one rank in an evaluation. Raises StopAtOnce on all ranks if one got a
        signal, since an evaluation, the first of which may compile, can take longer than a
        scheduler waits; the run that resumes makes it. The last evaluation of a run is completed,
        and so is one whose forward passes have collectives.
        """
        stops = False
        try:
            with self.stop.raising():
                if self.stop.received is not None:
                    raise StopAtOnce
                yield
        except StopAtOnce:
            stops = True
        if any(self.runtime.distributed.all_reduce_sum([stops])):
            raise StopAtOnce

    def _selects(self) -> bool:
        """Whether an uninterrupted run evaluates here: not if all updates so far were skipped, nor
        at the end of --steps-this-run.
        """
        step, run = self.state.step, self.run
        return step > 0 and is_due(step, run.eval_steps, run.max_steps)

    def _keep_best(self, best: BestCheckpoint, scores: dict[str, float]) -> None:
        """Adds `scores` to `best`; saves a checkpoint if the model is the best one, or the run
        ends.
        """
        if not best.add(self.state.step, scores):
            return
        self.state.best_step = best.best_step
        is_last = self.state.step >= self.run.max_steps
        if best.is_exhausted or best.newest_is_best or is_last:
            self.checkpoints.check_replicas()
            self.checkpoints.save()
