"""Trains a classifier on parts of few rows first: the rest shows how reliable its outputs are."""

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
from bert_recipe.training.frozen_encoder import beside_frozen
from bert_recipe.training.run import Run
from bert_recipe.training.setup import build_trainer, make_loader
from bert_recipe.training.shrunk_outputs import SHRINKAGE, fitted_shrinkage, log_shares
from bert_recipe.training.workflow import run_seed
from bert_recipe.utils.errors import UserError, restart_code
from bert_recipe.utils.progress import print_line

LEAST_ROWS, MANY_ROWS = 100, 2000  # of the training file
FREQUENT = 0.6  # share of the most frequent class
FOLDS = 5  # parts, of which a trial holds out one
HELD_OUT_ROWS = 150  # that all trials hold out; fewer may be right by chance


def run_classifier(run: Run, runtime: Runtime) -> tuple[dict[str, float] | None, int]:
    """`run_seed`, after trials where the run wants some; of few rows beside a frozen encoder."""
    run = beside_frozen(run, runtime)
    count = num_trials(run)
    if count == 0:
        return run_seed(run, runtime)
    shrunk, exit_code = with_shrinkage(run, count, runtime)
    return (None, exit_code) if shrunk is None else run_seed(shrunk, runtime)


def num_trials(run: Run) -> int:
    """How many trials come before the run. Raises UserError if its outputs are not shrunk, although
    --shrink-outputs was typed; of folds only for the first, before anything is trained.
    """
    task = run.task
    if not isinstance(task, ClassificationTask) or not task.options.shrink_outputs:
        return 0
    if not run.saves or run.values.shrinkage is not None:  # of a run that is resumed
        return 0
    if obstacle := obstacle_of(run, task):
        is_first = task.split is None or task.split.fold == 0
        if is_first and run.settings.arguments.given("shrink_outputs"):
            raise UserError(f"--shrink-outputs has no effect, since {obstacle}: leave it out")
        return 0
    return min(FOLDS, math.ceil(HELD_OUT_ROWS * FOLDS / len(run.data.dataset)))


def obstacle_of(run: Run, task: ClassificationTask) -> str | None:
    """Why the outputs are not shrunk, or None: that is for classes of few rows, one of which has
    most, so that learning by heart is worse than answering it; where accuracy is the score.
    """
    if run.start.kind is StartKind.RESUMED:
        return "the run that is resumed goes on without it"
    options = task.options
    is_chosen = run.data.development is not None or task.frozen is not None
    if is_chosen or task.class_weights or options.group_column:
        return "other flags exclude it"
    if task.spec.multi_label:
        return "the texts have several labels"
    if task.metric != "accuracy":
        return f"the score of {task.name} is {task.metric}"
    if not LEAST_ROWS <= (num_rows := run.data.num_rows) < MANY_ROWS:
        return f"it is for {LEAST_ROWS} to {MANY_ROWS - 1:,} rows, and there are {num_rows:,}"
    dataset = cast(TextDataset, run.data.dataset)
    if 2 * len(dataset.distinct_sequences()) < len(dataset):
        return "most rows have equal texts"
    share = task.frequent_share
    if share is None or share < FREQUENT:
        return f"the most frequent class has {share or 0:.1%} of the rows, less than {FREQUENT:.0%}"
    return None


def with_shrinkage(run: Run, count: int, runtime: Runtime) -> tuple[Run | None, int]:
    """The run with the factor that `count` trials find, None if a signal stopped one, and the exit
    code. Trials leave nothing behind: a run that is stopped in them makes them again.
    """
    dataset = cast(TextDataset, run.data.dataset)
    labels_n = dataset.labels["labels"]
    is_main = runtime.distributed.is_main
    trials = "a trial" if count == 1 else f"{count} trials"
    rows = "four fifths of the rows" if count == 1 else "four fifths of the rows each"
    if is_main:
        print_line(
            f"{trials} on {rows}: the rest shows how reliable the outputs are "
            "(--no-shrink-outputs leaves that out)"
        )
    logits, held_out = [], []
    for fold in range(count):
        split = Split(None, FOLDS, run.record.seed, fold)
        is_held_out_n = split.held_out(dataset.sequences(), [(int(label),) for label in labels_n])
        parts = [dataset.part(np.flatnonzero(part_n)) for part_n in (~is_held_out_n, is_held_out_n)]
        fold_logits, exit_code = held_out_logits(trial_of(run, parts[0]), parts[1], runtime)
        if fold_logits is None:
            if is_main:
                print_line("stopped in a trial: rerun the same command")
            return None, exit_code
        logits.append(fold_logits)
        held_out.append(labels_n[is_held_out_n])
    logits_nC, expected_n = np.concatenate(logits), np.concatenate(held_out)
    shares = log_shares(labels_n, logits_nC.shape[1])
    # One rank decides, since ranks may differ by rounding.
    fit = partial(fitted_shrinkage, logits_nC, expected_n, shares)
    factor = runtime.distributed.on_main(fit)
    if is_main:
        accuracy = np.mean(logits_nC.argmax(axis=1) == expected_n)
        end = "the outputs will stay as they are"
        if factor < 1:
            end = f"the outputs will be {factor:g} of themselves, and {1 - factor:g} class shares"
        print_line(
            f"{trials}: {100 * accuracy:.1f}% of {len(expected_n)} held-out rows are right; at the "
            f"end {end}"
        )
    hyperparameters = run.record.hyperparameters | {SHRINKAGE: factor}
    record = replace(run.record, hyperparameters=hyperparameters)
    return replace(run, values=replace(run.values, shrinkage=factor), record=record), 0


def held_out_logits(
    trial: Run, held_out: TextDataset, runtime: Runtime
) -> tuple[np.ndarray | None, int]:
    """Those of a trained trial, [rows, C], None if a signal stopped it, and the exit code."""
    quiet = replace(runtime, reporter=Reporter())
    trainer = build_trainer(trial, quiet)
    exit_code = trainer.train(make_loader(trainer))
    # A signal in the last update stops the run, too, on all ranks if one has received it.
    has_stopped = trainer.stop.received is not None or not trainer.is_finished
    if any(runtime.distributed.all_reduce_sum([has_stopped])):
        return None, exit_code or restart_code(0)
    batch_size = trial.settings.prediction.batch_size
    logits, _ = predict(trainer.parallel, held_out, "sequence", batch_size, quiet)
    return logits, 0


def trial_of(run: Run, dataset: TextDataset) -> Run:
    """A run of the same epochs on a part of the rows, which writes and logs nothing."""
    max_steps = math.ceil(run.max_steps * len(dataset) / len(run.data.dataset))
    return replace(
        run,
        data=replace(run.data, dataset=dataset, sets=(), held_out=None),
        values=replace(run.values, max_steps=max_steps),
        record=replace(run.record, phase="trial", num_samples=len(dataset)),
        is_trial=True,
    )
