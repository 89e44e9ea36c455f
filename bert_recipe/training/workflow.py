"""The body of all training programs: trains a task, keeps its best model, scores and predicts, for
one seed or several, or for folds.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import numpy as np

from bert_recipe.checkpoint.best import BestCheckpoint, verify_best
from bert_recipe.checkpoint.folder import (
    BEST_FOLDER,
    EVALUATIONS_FILE,
    SEED_FOLDER,
    checkpoint_steps,
)
from bert_recipe.checkpoint.identity import refuse_seeds
from bert_recipe.checkpoint.model_card import card_of, write_card
from bert_recipe.checkpoint.model_choice import choose_model_of
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.start import no_log
from bert_recipe.checkpoint.weights import load_weights
from bert_recipe.config import RunConfig, RuntimeConfig, is_step
from bert_recipe.metrics.sinks import make_reporter
from bert_recipe.parallel.compilation import BEFORE_THE_WAIT
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.baselines import BASELINES, comparison_line, percent
from bert_recipe.tasks.task import FineTuningTask, Task
from bert_recipe.training.evaluation import describe, only_numbers, with_nulls
from bert_recipe.training.evaluation_callback import Evaluations
from bert_recipe.training.memory_estimate import print_estimate
from bert_recipe.training.plan import TrainingPlan, plan_training
from bert_recipe.training.prediction import predict_all, predict_only
from bert_recipe.training.setup import SCORES_FILE, open_report, start_runtime
from bert_recipe.training.trainer import Trainer
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import remove
from bert_recipe.utils.json_files import JsonObject, read_json, write_json
from bert_recipe.utils.progress import print_line


class SeedRun(Protocol):
    """What is done for one seed or fold. Returns the results, None if training is incomplete, and
    the exit code.
    """

    def __call__(
        self, plan: TrainingPlan, runtime: Runtime
    ) -> tuple[dict[str, float] | None, int]: ...


MOST_PASSES = 10  # over the texts that a model is continued on, before a warning


def run_task(config: RunConfig, task: Task, title: str, run: SeedRun | None = None) -> int:
    """Trains, scores and predicts, or estimates memory, as the flags request; returns the exit
    code. run: what training is, by default updates of all weights.
    """
    if config.estimate_memory is not None:
        print_estimate(config, task, choose_model_of(config).config)
        return 0
    with start_runtime(config, title) as runtime:
        if config.fine_tuning.do_train:
            return train_and_predict(config, task, runtime, run or run_seed)
        return predict_only(config, cast(FineTuningTask, task), runtime)


def train_and_predict(config: RunConfig, task: Task, runtime: Runtime, run: SeedRun) -> int:
    """Trains, scores and predicts in one run, or in one for each seed or fold, whose scores are
    then reported together; returns the exit code.
    """
    plans = plan_training(config, task, runtime)  # by the subfolder of the seed; "" if it is alone
    data = next(iter(plans.values())).data
    folder = config.trainer.checkpoint_folder / data.choice.name / data.task.name
    open_report(config.runtime, folder, runtime)
    check_seeds(plans, runtime)
    has_several = len(plans) > 1
    scores: list[dict[str, float]] = []
    for name, plan in plans.items():
        with seed_logs(config.runtime, name, runtime) as seed_runtime:
            if has_several:
                open_report(config.runtime, folder / name, seed_runtime)
            results, exit_code = run(plan, seed_runtime)
        if results is None:  # stopped before its end
            return exit_code
        scores.append(results)
    if has_several and any(scores) and runtime.distributed.is_main:
        title = f"{data.task.name}, {range_of(list(plans))}"
        runtime.reporter.log("PARAMETER", {"task": title})
        results = report_seeds(scores, title, runtime)
        metric = cast(FineTuningTask, data.task).metric
        results |= report_baselines_of_seeds(scores, metric, results, runtime)
        write_json(folder / SCORES_FILE, results)
    return 0


def check_seeds(plans: dict[str, TrainingPlan], runtime: Runtime) -> None:
    """Refuses before the first run what later seeds' runs would refuse, and a folder with runs of
    another kind: a single one, seeds or folds.
    """
    folders = {name: plan.config.trainer.checkpoint_folder for name, plan in plans.items()}

    def check() -> None:
        if "" in folders:
            refuse_seeds(folders[""])
            return
        parent = next(iter(folders.values())).parent
        if checkpoint_steps(parent):
            raise UserError(
                f"{parent} has a run without --num-seeds or --num-folds: choose another "
                f"--output-dir"
            )
        refuse_seeds(parent, next(iter(folders)).partition("-")[0])
        for name, plan in plans.items():
            if folders[name].is_dir():
                plan.check_folder()

    if not next(iter(plans.values())).config.trainer.benchmark:
        runtime.distributed.on_main(check)


@contextmanager
def seed_logs(logs: RuntimeConfig, name: str, runtime: Runtime) -> Iterator[Runtime]:
    """The runtime with the logs of one seed, which are named after its subfolder."""
    if not name:
        yield runtime
        return

    def of_seed(path: Path | None) -> Path | None:
        return path and path.with_stem(f"{path.stem}-{name}")

    logs = replace(
        logs,
        report_file=of_seed(logs.report_file),
        log_file=of_seed(logs.log_file),
        tensorboard_dir=logs.tensorboard_dir and logs.tensorboard_dir / name,
    )
    with closing(make_reporter(logs, runtime.distributed.is_main)) as reporter:
        yield replace(runtime, reporter=reporter)


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
    runs: Sequence[JsonObject], metric: str, results: JsonObject, runtime: Runtime
) -> JsonObject:
    """Logs and returns the means of the baselines over `runs`, whose `results` are those of
    `report_seeds`; seeds share them, and folds have their own. {} without baselines.
    """
    first = runs[0].get(BASELINES)
    if not first or not all(run.get(BASELINES, {}).keys() == first.keys() for run in runs):
        return {}
    means = {}
    for method, scores in first.items():
        values = {name: [run[BASELINES][method].get(name) for run in runs] for name in scores}
        means[method] = {
            name: float(np.mean(numbers)) for name, numbers in values.items() if None not in numbers
        }
    mean, deviation = (results.get(f"{metric}_{name}") for name in ("mean", "std"))
    text = None
    if mean is not None:
        text = comparison_line(metric, f"{percent(mean)} ± {percent(deviation)}", means)
    runtime.reporter.log((), {BASELINES: means}, text)
    return {BASELINES: means}


def run_seed(plan: TrainingPlan, runtime: Runtime) -> tuple[dict[str, float] | None, int]:
    """Trains, and predicts if the task has files for that. Returns the results, None if training is
    incomplete, and the exit code.
    """
    config, data = plan.config, plan.data
    trainer = plan.build_trainer(runtime)
    with closing(trainer.state):
        exit_code = train(trainer, plan, runtime)
        if exit_code or not (trainer.is_finished or config.trainer.benchmark):
            return None, exit_code
        if not data.sets:
            return report_losses(trainer, plan, runtime), 0
        use_best(trainer)
        parallel = trainer.parallel
        model_folders = folders_of_model(trainer)
        lock = trainer.state.keep_lock()
    del trainer  # frees the optimizer's memory
    with lock:  # until the scores are written, too
        if runtime.distributed.is_main and not config.trainer.benchmark:
            remove_summary(config.trainer.checkpoint_folder)
        scores = predict_all(
            config,
            cast(FineTuningTask, data.task),
            parallel,
            list(data.sets),
            config.trainer.checkpoint_folder,
            runtime,
        )
        if scores and not config.trainer.benchmark:
            for model_folder in model_folders:
                architecture = parallel.model.architecture
                complete_card(model_folder, plan, architecture, only_numbers(scores))
    return scores, 0


def train(trainer: Trainer, plan: TrainingPlan, runtime: Runtime) -> int:
    """Trains; returns the exit code."""
    if not trainer.config.benchmark:
        runtime.reporter.start(trainer.config.checkpoint_folder, trainer.state.step)
    if trainer.state.data_may_differ:
        plan.data.task.recheck(plan.data, runtime)
    evaluations = trainer.callback(Evaluations)
    if evaluations is not None and evaluations.is_missing():
        evaluations.evaluate()
    trainer.claim()
    if runtime.distributed.is_main and not trainer.is_finished:
        for note in notes_before_training(plan, trainer):
            print_line(note)
        if not trainer.config.benchmark:
            remove_results(plan, trainer)
    before = scores_before(trainer, evaluations)
    exit_code = trainer.train(plan.make_loader(trainer))
    selection = best_checkpoint(trainer)
    if trainer.is_finished and selection is not None and selection.best:
        best, metric = selection.best, selection.metric
        text = f"best: {metric} {best[metric]:.6g} at step {best['step']:.0f}"
        if evaluations is not None and evaluations.at_start:
            before = without_prefix(evaluations.at_start)
        if before:
            text += f"; before training {before[metric]:.6g}"
        runtime.reporter.log((), {"best_step": best["step"]}, text)
    return exit_code


def scores_before(trainer: Trainer, evaluations: Evaluations | None) -> dict[str, float]:
    """The scores of the starting weights, on all ranks, where the task asks for them and training
    evaluates; {} otherwise, and if the run is resumed.
    """
    config = trainer.config
    is_start = trainer.state.step == 0 and config.eval_steps > 0 and not config.benchmark
    if evaluations is None or not (is_start and trainer.task.scores_start):
        return {}
    evaluations.evaluate()
    return without_prefix(evaluations.results)


def without_prefix(results: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix("eval_"): value for name, value in results.items()}


def report_losses(trainer: Trainer, plan: TrainingPlan, runtime: Runtime) -> dict[str, float]:
    """Keeps the last losses of training without a file to score: on the model cards, and those of a
    seed in its folder. Returns the results of the seed; {} for a single run.
    """
    config = plan.config
    results = last_results(trainer)
    if "loss" in results and runtime.distributed.is_main and not config.trainer.benchmark:
        add_losses_to_cards(trainer, plan)
    if config.num_seeds == 1:
        return {}
    path = config.trainer.checkpoint_folder / SCORES_FILE
    return runtime.distributed.on_main(partial(keep_results, path, plan, results))


def notes_before_training(plan: TrainingPlan, trainer: Trainer) -> list[str]:
    notes = [plan.note] if plan.note else []
    is_random = trainer.state.step == 0 and plan.start.weights is None
    if is_random and plan.data.task.without_weights:
        notes.append(f"warning: {plan.data.task.without_weights}")
    if plan.start.weights is not None and plan.data.task.learns_from_texts:
        notes.append(repetition_note(plan))
    if trainer.parallel.model.is_compiled:
        notes.append(BEFORE_THE_WAIT)
    return notes


def repetition_note(plan: TrainingPlan) -> str:
    """How often a run that continues a model reads its texts."""
    updates, batch = plan.config.trainer.max_steps, plan.config.loader.global_batch_size
    count = len(plan.data.dataset)
    passes = updates * batch / count
    text = (
        f"{updates:,} updates of {batch:,} read the {count:,} training samples {passes:,.1f} times"
    )
    if passes <= MOST_PASSES:
        return f"note: {text}"
    return f"warning: {text}: above {MOST_PASSES} times, give fewer updates or more texts"


def best_checkpoint(trainer: Trainer) -> BestCheckpoint | None:
    evaluations = trainer.callback(Evaluations)
    return None if evaluations is None else evaluations.best


def last_results(trainer: Trainer) -> dict[str, float]:
    """The last loss and evaluation of this process."""
    results = {} if trainer.last_loss is None else {"loss": trainer.last_loss}
    evaluations = trainer.callback(Evaluations)
    return results if evaluations is None else results | evaluations.results


def remove_results(plan: TrainingPlan, trainer: Trainer) -> None:
    """Removes the results of earlier weights, such as those of a shorter run that is continued."""
    folder = trainer.config.checkpoint_folder
    for name in {*plan.start.result_files} - {EVALUATIONS_FILE}:
        remove(folder / name)
    remove_summary(folder)


def remove_summary(folder: Path) -> None:
    """Removes the means over all seeds or folds, before the results of the one in `folder` change.
    A single run has none.
    """
    if SEED_FOLDER.fullmatch(folder.name):
        remove(folder.parent / SCORES_FILE)


def use_best(trainer: Trainer) -> None:
    """Loads the best weights of the run, if it keeps them."""
    selection = best_checkpoint(trainer)
    if selection is None or not selection.best:
        return
    if selection.best["step"] == trainer.state.step:
        return
    folder = selection.folder
    trainer.distributed.on_main(partial(verify_best, folder))
    load_weights(trainer.parallel, ModelFolder(folder / BEST_FOLDER), no_log)


def complete_card(
    folder: Path,
    plan: TrainingPlan,
    architecture: str,
    scores: dict[str, float],
    training_loss: float | None = None,
) -> None:
    step = int(folder.name) if is_step(folder.name) else None
    config, metadata = plan.data.choice.config, plan.config.metadata
    write_card(folder, card_of(architecture, config, metadata, step, scores, training_loss))


def add_losses_to_cards(trainer: Trainer, plan: TrainingPlan) -> None:
    """Adds the last losses to the card of the last step, and those of the best step to its card,
    for training without a file to score.
    """
    folder = trainer.config.checkpoint_folder
    selection = best_checkpoint(trainer)
    write = partial(complete_card, plan=plan, architecture=trainer.parallel.model.architecture)
    results = last_results(trainer)
    loss = results.pop("loss")
    held_out = {name.removeprefix("eval_"): value for name, value in results.items()}
    if (folder / str(trainer.state.step)).is_dir():
        write(folder / str(trainer.state.step), scores=held_out, training_loss=loss)
    if selection is not None and selection.best:
        best = {name: value for name, value in selection.best.items() if name != "step"}
        write(folder / BEST_FOLDER, scores=only_numbers(best))


def folders_of_model(trainer: Trainer) -> list[Path]:
    """The folders with the weights that `use_best` leaves."""
    folder = trainer.config.checkpoint_folder
    selection = best_checkpoint(trainer)
    folders = [folder / str(trainer.state.step)]
    if selection is not None and selection.best:
        folders = [folder / str(selection.best["step"]), folder / BEST_FOLDER]
    return [path for path in folders if path.is_dir()]


def keep_results(path: Path, plan: TrainingPlan, results: dict[str, float]) -> dict[str, float]:
    """Writes a seed's last losses to `path`, or returns the results in it if this start had nothing
    left to train.
    """
    held_out = plan.data.held_out and plan.data.held_out.digest()
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
