"""The body of all training programs: trains a task, keeps its best model, scores and predicts, for
one seed or several, or for folds.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import numpy as np

from bert_recipe.checkpoint.folder import verify_checkpoint
from bert_recipe.checkpoint.model_card import card_of, write_card
from bert_recipe.checkpoint.model_choice import find_model
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.record import SCORES_FILE
from bert_recipe.checkpoint.start import StartKind, no_log
from bert_recipe.checkpoint.weights import load_weights
from bert_recipe.config import RunConfig, is_step
from bert_recipe.config.arguments import startup_messages
from bert_recipe.metrics.sinks import make_reporter
from bert_recipe.parallel.compilation import BEFORE_THE_WAIT
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.baselines import BASELINES, WARNING, comparison_line, means_of, percent
from bert_recipe.tasks.fine_tuning import FineTuningOptions, FineTuningTask
from bert_recipe.tasks.task import TaskOptions
from bert_recipe.tasks.text_sequences import TextSamples, warn_of_vocabulary
from bert_recipe.training.checkpoint_callback import how_to_resume
from bert_recipe.training.evaluation import describe, only_numbers, with_nulls
from bert_recipe.training.memory_estimate import print_estimate
from bert_recipe.training.plan import open_runs
from bert_recipe.training.prediction import predict_all, predict_only
from bert_recipe.training.run import Run
from bert_recipe.training.setup import (
    build_trainer,
    make_loader,
    open_report,
    start_runtime,
)
from bert_recipe.training.trainer import Trainer
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import JsonObject, read_json, write_json
from bert_recipe.utils.progress import print_line
from bert_recipe.utils.stop_signal import StopAtOnce, StopSignal


class SeedRun(Protocol):
    """What is done for one seed or fold. Returns the results, None if training is incomplete, and
    the exit code.
    """

    def __call__(self, run: Run, runtime: Runtime) -> tuple[dict[str, float] | None, int]: ...


MOST_PASSES = 10  # over the texts that a model is continued on, before a warning


def run_task(
    config: RunConfig, options: TaskOptions, title: str, train_run: SeedRun | None = None
) -> int:
    """Trains, scores and predicts, or estimates memory, as the flags request; returns the exit
    code. train_run: what training is, by default updates of all weights.
    """
    if config.estimate_memory is not None:
        print_estimate(config, options, find_model(config, loads=False).choice.config)
        return 0
    with start_runtime(config, title, startup_messages(config)) as runtime:
        if config.fine_tuning.do_train:
            return train_and_predict(config, options, runtime, train_run or run_seed)
        return predict_only(config, cast(FineTuningOptions, options), runtime)


def train_and_predict(
    config: RunConfig, options: TaskOptions, runtime: Runtime, train_run: SeedRun
) -> int:
    """Trains, scores and predicts in one run, or in one for each seed or fold, whose scores are
    then reported together; returns the exit code.
    """
    runs = open_runs(config, options, runtime)
    for run in runs.values():  # before the first begins
        run.check_start()
    has_several = len(runs) > 1
    first = next(iter(runs.values()))
    folder = first.folder.path.parent if has_several else first.folder.path
    open_report(config, folder, runtime)
    has_updates = getattr(first.task, "frozen", None) is None
    if runtime.distributed.is_main and has_updates and lacks_checkpoint(runs.values()):
        phase1 = first.start.progress  # whose updates --lr-rewarmup counts
        step = 1 if phase1 is None else phase1.step + 1
        print_line(f"no checkpoint in {folder} yet: starting at step {step}")
    if runtime.distributed.is_main and first.data.num_examples is not None:  # of a file of texts
        warn_of_vocabulary(cast(TextSamples, first.data.dataset), first.data.choice.tokenizer)
    scores: list[dict[str, float]] = []
    stop = StopSignal()  # between and after the trainings, which finish an update first
    try:
        with stop, stop.raising():
            for name, run in runs.items():
                # In the last update of the run before; a rank may have received it alone.
                if any(runtime.distributed.all_reduce_sum([stop.received is not None])):
                    raise StopAtOnce
                with logs_of(run, name, runtime) as seed_runtime:
                    results, exit_code = train_run(run, seed_runtime)
                if results is None:  # stopped before its end
                    return exit_code
                scores.append(results)
    except StopAtOnce:
        if runtime.distributed.is_main and first.saves:
            print_line(f"stopped by a signal: {how_to_resume(first.record)}")
        if runtime.distributed.world_size > 1:  # the others may wait in a collective: no barrier
            raise SystemExit(stop.exit_code) from None
        return stop.exit_code
    if has_several and any(scores) and runtime.distributed.is_main:
        title = f"{first.task.name}, {range_of(list(runs))}"
        runtime.reporter.log("PARAMETER", {"task": title})
        results = report_seeds(scores, title, runtime)
        task = cast(FineTuningTask, first.task)
        results |= report_baselines_of_seeds(scores, task, results, runtime)
        write_json(folder / SCORES_FILE, results)
    return 0


def lacks_checkpoint(runs: Collection[Run]) -> bool:
    """Whether the flags ask to resume, and none of the runs has a checkpoint."""
    flags = next(iter(runs)).settings.start
    asks = (flags.resume or flags.from_checkpoint is not None) and not flags.overwrite
    return asks and all(run.saves and run.start.kind is not StartKind.RESUMED for run in runs)


@contextmanager
def logs_of(run: Run, name: str, runtime: Runtime) -> Iterator[Runtime]:
    """The runtime with the logs of one of several runs, which are named after its subfolder."""
    if not name:
        yield runtime
        return

    logs, is_main = run.settings.runtime, runtime.distributed.is_main
    with closing(make_reporter(logs, is_main, name)) as reporter:
        seed_runtime = replace(runtime, reporter=reporter)
        open_report(run.settings, run.folder.path, seed_runtime)
        yield seed_runtime


def range_of(names: Sequence[str]) -> str:
    """The subfolders seed-1 to seed-3 as `seeds 1 to 3`, and those of folds likewise."""
    kind, _, first = names[0].partition("-")
    last = names[-1].removeprefix(f"{kind}-")
    return f"{kind}s {first} to {last}"


def report_seeds(runs: Sequence[JsonObject], title: str, runtime: Runtime) -> JsonObject:
    """Logs and returns mean and sample standard deviation (n - 1) of each metric over `runs`, one
    per seed. They are None if the metric is not defined for one of them.
    """
    result: dict[str, float] = {}
    for name in runs[0]:
        if not all(isinstance(run.get(name), int | float) for run in runs):
            continue
        values = np.array([run[name] for run in runs])
        result |= {f"{name}_mean": float(values.mean()), f"{name}_std": float(values.std(ddof=1))}
    runtime.reporter.log((), result, f"{title}: {describe(result, '.6g')}")
    return with_nulls(result)


def report_baselines_of_seeds(
    runs: Sequence[JsonObject], task: FineTuningTask, results: JsonObject, runtime: Runtime
) -> JsonObject:
    """Logs and returns the means of the baselines over `runs`, whose `results` are those of
    `report_seeds`; seeds share them, and folds have their own. {} without baselines.
    """
    first = runs[0].get(BASELINES)
    if not first or not all(run.get(BASELINES, {}).keys() == first.keys() for run in runs):
        return {}
    means = means_of([run[BASELINES] for run in runs])
    metric, whole = task.metric, task.perfect_score
    mean, deviation = (results.get(f"{metric}_{name}") for name in ("mean", "std"))
    text = None
    if mean is not None and deviation is not None:
        shown = f"{percent(mean / whole)} ± {percent(deviation / whole)}"
        text = comparison_line(metric, shown, means, whole)
    runtime.reporter.log((), {BASELINES: means}, text)
    return {BASELINES: means}


def run_seed(run: Run, runtime: Runtime) -> tuple[dict[str, float] | None, int]:
    """Trains, and predicts if the task has files for that. Returns the results, None if training is
    incomplete, and the exit code.
    """
    trainer = build_trainer(run, runtime)
    exit_code = train(trainer)
    if exit_code or not (trainer.is_finished or not run.saves):
        return None, exit_code
    if not run.data.sets:
        return report_losses(trainer), 0
    parallel, folder = trainer.parallel, run.folder.path
    model_folder = folder / str(trainer.best_step)
    if trainer.best_step != trainer.state.step:
        runtime.distributed.on_main(partial(verify_checkpoint, model_folder, with_state=False))
        load_weights(parallel, ModelFolder(model_folder), no_log)
    del trainer  # frees the optimizer's memory
    if runtime.distributed.is_main and run.saves:
        run.folder.remove_summary()
    task, sets = cast(FineTuningTask, run.task), list(run.data.sets)
    model = model_folder if model_folder.is_dir() else None
    scores = predict_all(run.settings, task, parallel, sets, folder, runtime, model)
    if scores and run.saves and model is not None:
        architecture = parallel.model.architecture
        warning = str(scores.get(WARNING, ""))
        complete_card(model, run, architecture, only_numbers(scores), warning=warning)
    return scores, 0


def train(trainer: Trainer) -> int:
    """Trains; returns the exit code."""
    run, runtime = trainer.run, trainer.runtime
    if run.saves:
        runtime.reporter.start(run.folder.path, trainer.state.step)
    if trainer.state.data_may_differ:
        run.task.recheck(run.data, runtime)
    if runtime.distributed.is_main and not trainer.is_finished:
        for note in notes_before_training(trainer):
            print_line(note)
    exit_code = trainer.train(make_loader(trainer))
    if trainer.is_finished:
        report_best(trainer)
    return exit_code


def report_best(trainer: Trainer) -> None:
    """Logs the best step, if there is one, beside the starting weights if these were evaluated."""
    evaluations, selection = trainer.evaluations, trainer.best
    if evaluations is None or selection is None or not selection.best:
        return
    best, metric = selection.best, selection.metric
    text = f"best: {metric} {best[metric]:.6g} at step {best['step']:.0f}"
    if evaluations.at_start:
        text += f"; before training {evaluations.at_start[f'eval_{metric}']:.6g}"
    trainer.reporter.log((), {"best_step": best["step"]}, text)


def report_losses(trainer: Trainer) -> dict[str, float]:
    """Keeps the last losses of training without a file to score: on the model cards, and those of a
    seed in its folder. Returns the results of the seed; {} for a single run.
    """
    run, distributed = trainer.run, trainer.distributed
    results = last_results(trainer)
    if "loss" in results and distributed.is_main and run.saves:
        add_losses_to_cards(trainer)
    if run.settings.num_seeds == 1:
        return {}
    return distributed.on_main(partial(keep_results, run, results))


def notes_before_training(trainer: Trainer) -> Iterator[str]:
    run = trainer.run
    if run.note:
        yield run.note
    is_random = trainer.state.step == 0 and run.start.weights is None
    if is_random and run.task.without_weights:
        yield f"warning: {run.task.without_weights}"
    if run.start.weights is not None and run.task.learns_from_texts:
        yield repetition_note(run)
    if trainer.parallel.model.is_compiled:
        yield BEFORE_THE_WAIT


def repetition_note(run: Run) -> str:
    """How often a run that continues a model reads its texts."""
    updates, batch = run.max_steps, run.values.loader.global_batch_size
    count = len(run.data.dataset)
    passes = updates * batch / count
    text = (
        f"{updates:,} updates of {batch:,} read the {count:,} training samples {passes:,.1f} times"
    )
    if passes <= MOST_PASSES:
        return f"note: {text}"
    return f"warning: {text}: above {MOST_PASSES} times, give fewer updates or more texts"


def last_results(trainer: Trainer) -> dict[str, float]:
    """The last loss and evaluation of this process."""
    results = {} if trainer.last_loss is None else {"loss": trainer.last_loss}
    evaluations = trainer.evaluations
    return results if evaluations is None else results | evaluations.results


def complete_card(
    folder: Path,
    run: Run,
    architecture: str,
    scores: dict[str, float],
    training_loss: float | None = None,
    warning: str = "",
) -> None:
    step = int(folder.name) if is_step(folder.name) else None
    config = run.data.choice.config
    card = card_of(architecture, config, run.record, run.parts, step, scores, training_loss)
    write_card(folder, replace(card, warning=warning))


def add_losses_to_cards(trainer: Trainer) -> None:
    """Adds the last losses to the card of the last step, and those of the best step to its card,
    for training without a file to score.
    """
    folder, step = trainer.run.folder.path, trainer.state.step
    write = partial(
        complete_card, run=trainer.run, architecture=trainer.parallel.model.architecture
    )
    results = last_results(trainer)
    loss = results.pop("loss")
    held_out = {name.removeprefix("eval_"): value for name, value in results.items()}
    if (folder / str(step)).is_dir():
        write(folder / str(step), scores=held_out, training_loss=loss)
    if trainer.best is not None and trainer.best.best and trainer.best_step != step:
        best = {name: value for name, value in trainer.best.best.items() if name != "step"}
        write(folder / str(trainer.best_step), scores=only_numbers(best))


def keep_results(run: Run, results: dict[str, float]) -> dict[str, float]:
    """Writes a seed's last losses to its folder, or returns the results in it if this start had
    nothing left to train.
    """
    path = run.folder.path / SCORES_FILE
    held_out = run.data.held_out and run.data.held_out.digest()
    if "loss" in results or not path.exists():  # killed before it was written
        write_json(path, {"held_out_data": held_out, **results})
        return results
    stored = read_json(path, "the results of a seed")
    if stored.pop("held_out_data", held_out) != held_out:
        raise UserError(
            f"{path} has the results of other held-out data: give --eval-dir that, or add "
            f"--overwrite"
        )
    # A score that is not defined is null.
    return {name: math.nan if value is None else value for name, value in stored.items()}
