"""Trains a classifier on a part of few rows first: the rest shows how reliable its outputs are."""

import contextlib
import io
import math
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np

from bert_recipe.checkpoint.start import StartKind
from bert_recipe.metrics.sinks import Reporter
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.classification.task import ClassificationTask
from bert_recipe.tasks.splits import Split
from bert_recipe.tasks.text_sequences import TextDataset
from bert_recipe.training.evaluation import predict
from bert_recipe.training.run import Run
from bert_recipe.training.setup import build_trainer, make_loader
from bert_recipe.training.shrunk_outputs import SHRINKAGE, fitted_shrinkage, log_shares
from bert_recipe.training.workflow import run_seed
from bert_recipe.utils.errors import restart_code
from bert_recipe.utils.progress import print_line

LEAST_ROWS, MANY_ROWS = 100, 2000
FREQUENT = 0.6  # share of the most frequent class
HELD_OUT = 0.2


def run_classifier(run: Run, runtime: Runtime) -> tuple[dict[str, float] | None, int]:
    """`run_seed`, after a trial where the run wants one."""
    if not wants_trial(run):
        return run_seed(run, runtime)
    shrunk, exit_code = with_shrinkage(run, runtime)
    return (None, exit_code) if shrunk is None else run_seed(shrunk, runtime)


def wants_trial(run: Run) -> bool:
    """Whether a new run is one whose outputs are shrunk: classes of few rows, one of which has
    most, so that learning by heart is worse than answering it; where accuracy is the score.
    """
    is_new = run.saves and run.start.kind is not StartKind.RESUMED
    task = run.task
    if not is_new or not isinstance(task, ClassificationTask) or run.data.development is not None:
        return False
    options, spec = task.options, task.spec
    is_shrunk = options.shrink_outputs and not task.class_weights and not options.group_column
    if not is_shrunk or task.frozen is not None or task.metric != "accuracy" or spec.multi_label:
        return False
    dataset = cast(TextDataset, run.data.dataset)
    labels = dataset.labels["labels"]
    has_frequent = np.bincount(labels).max() >= FREQUENT * len(labels)
    has_few = len(dataset.distinct_sequences()) >= LEAST_ROWS and len(labels) < MANY_ROWS
    return has_few and bool(has_frequent)


def with_shrinkage(run: Run, runtime: Runtime) -> tuple[Run | None, int]:
    """The run with the factor that a trial finds, None if a signal stopped that, and the exit code.
    A trial leaves nothing behind: a run that is stopped in it makes it again.
    """
    dataset = cast(TextDataset, run.data.dataset)
    labels_n = dataset.labels["labels"]
    split = Split(HELD_OUT, None, run.record.seed)
    is_held_out_n = split.held_out(dataset.sequences(), [(int(label),) for label in labels_n])
    trial = trial_of(run, dataset.part(np.flatnonzero(~is_held_out_n)))
    if runtime.distributed.is_main:
        print_line(
            f"a trial of {trial.max_steps} updates on four fifths of the rows: the rest shows "
            "how reliable the outputs are (--no-shrink-outputs leaves it out)"
        )
    quiet = replace(runtime, reporter=Reporter())
    with contextlib.redirect_stdout(io.StringIO()):  # the run says the same of its weights
        trainer = build_trainer(trial, quiet)
    exit_code = trainer.train(make_loader(trainer))
    # A signal in the last update stops the run, too, on all ranks if one has received it.
    has_stopped = trainer.stop.received is not None or not trainer.is_finished
    if any(runtime.distributed.all_reduce_sum([has_stopped])):
        if runtime.distributed.is_main:
            print_line("stopped in the trial: rerun the same command")
        return None, exit_code or restart_code(0)
    held_out = dataset.part(np.flatnonzero(is_held_out_n))
    batch_size = run.settings.prediction.batch_size
    logits_nC, _ = predict(trainer.parallel, held_out, "sequence", batch_size, quiet)
    shares = log_shares(labels_n, logits_nC.shape[1])
    # One rank decides, since ranks may differ by rounding.
    fit = partial(fitted_shrinkage, logits_nC, held_out.labels["labels"], shares)
    factor = runtime.distributed.on_main(fit)
    if runtime.distributed.is_main:
        accuracy = np.mean(logits_nC.argmax(axis=1) == held_out.labels["labels"])
        print_line(
            f"the trial has {100 * accuracy:.1f}% of {len(held_out)} held-out rows right: at the "
            f"end the outputs will be {factor:g} of themselves, and {1 - factor:g} class shares"
        )
    hyperparameters = run.record.hyperparameters | {SHRINKAGE: factor}
    record = replace(run.record, hyperparameters=hyperparameters)
    return replace(run, values=replace(run.values, shrinkage=factor), record=record), 0


def trial_of(run: Run, dataset: TextDataset) -> Run:
    """A run of the same epochs on a part of the rows, which writes and logs nothing."""
    max_steps = math.ceil(run.max_steps * len(dataset) / len(run.data.dataset))
    trainer = replace(run.settings.trainer, steps_this_run=None, profile_update=None)
    return replace(
        run,
        settings=replace(run.settings, trainer=trainer),
        data=replace(run.data, dataset=dataset, sets=(), held_out=None),
        values=replace(run.values, max_steps=max_steps),
        record=replace(run.record, phase="trial", num_samples=len(dataset)),
        is_trial=True,
    )
