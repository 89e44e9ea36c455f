"""The body of all training programs: trains a task, keeps its best model, scores and predicts, for
one seed or several, or for folds.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from bert_recipe.checkpoint.best import BestCheckpoint, verify_best
from bert_recipe.checkpoint.folder import (
    BEST_FOLDER,
    EVALUATIONS_FILE,
    add_model_file,
    checkpoint_steps,
)
from bert_recipe.checkpoint.identity import WEIGHTS, check_results_of, refuse_seeds, write_record
from bert_recipe.checkpoint.model_card import card_of, write_card
from bert_recipe.checkpoint.model_choice import (
    check_same_kind,
    choose_model,
    choose_model_of,
)
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.pretrained import MODELS
from bert_recipe.checkpoint.start import Start, find_start, no_log
from bert_recipe.checkpoint.weights import check_head, load_weights
from bert_recipe.config import RunConfig, RunRecord, StartConfig, is_step
from bert_recipe.metrics.sinks import DLLoggerJsonSink, make_reporter
from bert_recipe.parallel.base import ParallelModel
from bert_recipe.parallel.compilation import BEFORE_THE_WAIT
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.mistakes import without_mistakes
from bert_recipe.tasks.task import FineTuningTask, PredictionSet, Task, warn_of_undefined
from bert_recipe.tasks.text_sequences import SequenceDataset
from bert_recipe.training.evaluation import only_numbers, predict
from bert_recipe.training.evaluation_callback import Evaluations
from bert_recipe.training.memory_estimate import print_estimate
from bert_recipe.training.setup import (
    DIGITS,
    SCORES_FILE,
    TrainingPlan,
    load_fine_tuned,
    plan_run,
    start_runtime,
)
from bert_recipe.training.trainer import Trainer
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import read_json, remove, write_json
from bert_recipe.utils.progress import print_line
from bert_recipe.utils.typed_json import JsonObject, from_json


def run_task(config: RunConfig, task: Task, title: str) -> int:
    """Trains, scores and predicts, or estimates memory, as the flags request; returns the exit
    code.
    """
    if config.estimate_memory is not None:
        print_estimate(config, task, choose_model_of(config).config)
        return 0
    with start_runtime(config, title) as runtime:
        if config.fine_tuning.do_train:
            return train_and_predict(config, task, runtime)
        return predict_only(config, cast(FineTuningTask, task), runtime)


def plan_training(config: RunConfig, task: Task, runtime: Runtime) -> dict[str, TrainingPlan]:
    """The plan of each run, by its subfolder. The data that seeds share is opened once."""
    runs = runs_of(config, task)
    starts = find_starts(config.start, list(runs), task, runtime)
    folder = next(iter(starts.values())).folder
    choice = choose_model(config.model, folder)
    plans = {}
    opened = None
    for name, (own_config, own_task) in runs.items():
        if own_task is not opened:
            data = own_task.open(choice, folder, config, runtime)
            opened = own_task
        plans[name] = plan_run(own_config, starts[name], data, name, runtime)
    return plans


def runs_of(config: RunConfig, task: Task) -> dict[str, tuple[RunConfig, Task]]:
    """The configuration and the task of each seed or fold, by its subfolder; without --num-seeds
    and --num-folds the run itself, without a subfolder.
    """
    split = task.split
    if split is not None and split.num_folds is not None:
        folds = {}
        for fold in range(split.num_folds):
            own_task = cast(Task, replace(cast(Any, task), split=replace(split, fold=fold)))
            folds[f"fold-{fold + 1}"] = (config.with_argument("fold", fold + 1), own_task)
        return folds
    if config.num_seeds == 1:
        return {"": (config, task)}
    first = config.metadata.seed
    seeds = range(first, first + config.num_seeds)
    return {f"seed-{seed}": (config.with_seed(seed), task) for seed in seeds}


def find_starts(
    config: StartConfig, seed_names: list[str], task: Task, runtime: Runtime
) -> dict[str, Start]:
    """Where the run of each seed starts. Folders that seeds share are opened once."""
    starts: dict[StartConfig, Start] = {}
    folders: dict[Path, ModelFolder] = {}
    for name in seed_names:
        seed_config = config.of_seed(name)
        if seed_config not in starts:
            check_weights = partial(task.check_start, seed_config)
            start = find_start(seed_config, runtime.distributed.on_main, check_weights)
            starts[seed_config] = start.sharing(folders)
    return {name: starts[config.of_seed(name)] for name in seed_names}


def train_and_predict(config: RunConfig, task: Task, runtime: Runtime) -> int:
    plans = plan_training(config, task, runtime)
    data = next(iter(plans.values())).data
    folder = config.trainer.checkpoint_folder / data.choice.name / data.task.name
    open_report(config, folder, runtime)
    check_seeds(plans, runtime)
    if len(plans) > 1 and runtime.distributed.is_main:
        (folder / SCORES_FILE).unlink(missing_ok=True)  # of earlier runs
    scores: list[dict[str, float]] = []
    for name, plan in plans.items():
        with seed_logs(config, name, runtime) as seed_runtime:
            if name:
                open_report(config, folder / name, seed_runtime)
            results, exit_code = run_seed(plan, seed_runtime)
        if results is None:
            return exit_code
        scores.append(results)
    if len(plans) > 1 and any(scores) and runtime.distributed.is_main:
        title = f"{data.task.name}, {range_of(list(plans))}"
        runtime.reporter.log("PARAMETER", {"task": title})
        write_json(folder / SCORES_FILE, report_seeds(scores, title, runtime))
    return 0


def open_report(config: RunConfig, folder: Path, runtime: Runtime) -> None:
    """Logs to report.json in the run's folder, unless the flags give a report file."""
    if config.runtime.reports_in_folder and runtime.distributed.is_main:
        runtime.reporter.sinks.append(DLLoggerJsonSink(folder / "report.json", "--report-file"))


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
def seed_logs(config: RunConfig, name: str, runtime: Runtime) -> Iterator[Runtime]:
    """The runtime with the logs of one seed, which are named after its subfolder."""
    if not name:
        yield runtime
        return
    logs = config.runtime

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


def run_seed(plan: TrainingPlan, runtime: Runtime) -> tuple[dict[str, float] | None, int]:
    """Trains, and predicts if the task has files for that. Returns the results, None if training is
    incomplete, and the exit code.
    """
    config, data = plan.config, plan.data
    trainer, exit_code = train(plan, runtime)
    if exit_code or not (trainer.is_finished or config.trainer.benchmark):
        return None, exit_code
    folder = config.trainer.checkpoint_folder
    if data.sets:
        use_best(trainer)
        parallel = trainer.parallel
        model_folders = folders_of_model(trainer)
        del trainer  # frees the optimizer's memory, and the folder's lock
        scores = predict_all(
            config, cast(FineTuningTask, data.task), parallel, list(data.sets), folder, runtime
        )
        if scores and not config.trainer.benchmark:
            complete_folders(model_folders, plan, parallel.model.architecture, scores)
        return scores, 0
    results = last_results(trainer)
    if "loss" in results and runtime.distributed.is_main and not config.trainer.benchmark:
        add_losses_to_cards(trainer, plan)
    if config.num_seeds == 1:
        return {}, 0
    keep = partial(keep_results, folder / SCORES_FILE, plan, results)
    return runtime.distributed.on_main(keep), 0


def train(plan: TrainingPlan, runtime: Runtime) -> tuple[Trainer, int]:
    """Trains; returns the trainer and the exit code."""
    trainer = plan.build_trainer(runtime)
    if not trainer.config.benchmark:
        runtime.reporter.start(trainer.config.checkpoint_folder, trainer.state.step)
    task = plan.data.task
    if trainer.state.data_may_differ:
        task.recheck(plan.data, runtime)
    is_random = trainer.state.step == 0 and plan.start.weights is None
    if is_random and task.without_weights and runtime.distributed.is_main:
        print_line(f"warning: {task.without_weights}")
    evaluations = trainer.callback(Evaluations)
    if evaluations is not None and evaluations.is_missing():
        evaluations.evaluate()
    trainer.claim()
    if runtime.distributed.is_main and not trainer.is_finished:
        notes = [plan.note, BEFORE_THE_WAIT if trainer.parallel.model.is_compiled else ""]
        for note in filter(None, notes):
            print_line(note)
        if not trainer.config.benchmark:
            remove_results(plan, trainer)
    exit_code = trainer.train(plan.make_loader(trainer))
    selection = best_checkpoint(trainer)
    if trainer.is_finished and selection is not None and selection.best:
        best, metric = selection.best, selection.metric
        text = f"best: {metric} {best[metric]:.6g} at step {best['step']:.0f}"
        runtime.reporter.log((), {"best_step": best["step"]}, text)
    return trainer, exit_code


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
    for name in {*plan.start.config.result_files} - {EVALUATIONS_FILE}:
        remove(trainer.config.checkpoint_folder / name)


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


def complete_folders(
    folders: list[Path], plan: TrainingPlan, architecture: str, scores: JsonObject
) -> None:
    """Adds what the scores of the final model tell to its folders: their cards, and a task's
    files.
    """
    own_files = cast(FineTuningTask, plan.data.task).scored_model_files(scores)
    for folder in folders:
        for name, content in own_files.items():
            add_model_file(folder, name, content)
        complete_card(folder, plan, architecture, only_numbers(scores))


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
    """Writes a seed's last losses to `path`, or returns those in it if this start had nothing left
    to train.
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
    return from_json(dict[str, float], stored, f"the results of a seed {path}")


def predict_only(config: RunConfig, task: FineTuningTask, runtime: Runtime) -> int:
    start = find_start(config.start.for_prediction(), runtime.distributed.on_main)
    folder = cast(ModelFolder, start.folder)  # the flags name one
    choice = choose_model(config.model, folder)
    check_same_kind(folder, choice)
    check_head(folder, MODELS[type(choice.config)][task.head].__name__)
    if not config.fine_tuning.gives_length:  # as in training
        task = replace(
            cast(Any, task), max_seq_length=task.fine_tuned_length(choice.config, folder)
        )
    task.check_length(choice.config)
    results = config.trainer.checkpoint_folder / choice.name / task.name
    task = task.for_model(folder.config, folder.path)
    sets = task.prediction_sets(choice.tokenizer)
    warn_of_undefined(sets, task.metric, False, runtime)
    digest = None
    if not config.trainer.benchmark:
        runtime.distributed.on_main(partial(refuse_seeds, results))
    if results.resolve() not in folder.path.resolve().parents and not config.trainer.benchmark:
        digest = runtime.distributed.on_main(partial(check_results_of, results, folder))
    open_report(config, results, runtime)
    changed = {
        "SEED": config.metadata.seed,
        "task": task.name,
        "max_seq_length": task.max_seq_length,
    }
    if digest is not None:
        changed["starting_weights"] = digest[:DIGITS]
    runtime.reporter.log("PARAMETER", config.metadata.arguments | changed)
    parallel = load_fine_tuned(task.head, task.configure(choice.config), folder, runtime)
    predict_all(config, task, parallel, sets, results, runtime)
    if digest is not None and runtime.distributed.is_main:
        write_record(results, RunRecord({WEIGHTS: digest}, {}))
    return 0


def predict_all(
    config: RunConfig,
    task: FineTuningTask,
    parallel: ParallelModel,
    sets: list[PredictionSet],
    folder: Path,
    runtime: Runtime,
) -> dict[str, float]:
    """Predicts all sets. The main process writes predictions and scores to `folder`; it alone
    returns scores.
    """
    writes = runtime.distributed.is_main and not config.trainer.benchmark
    if writes:  # fail on a bad path before the work
        folder.mkdir(parents=True, exist_ok=True)
    parallel.prepare_for_inference(runtime.precision.dtype)
    has_scored = any(prediction_set.is_scored for prediction_set in sets)
    scores: dict[str, Any] = {}
    for prediction_set in sets:
        # The last figures in the log are those of the scored set.
        is_logged = prediction_set.is_scored or not has_scored
        logits = predict_set(config, task, parallel, prediction_set.dataset, is_logged, runtime)
        if writes:
            scores |= prediction_set.finish(logits, folder)
    if scores:
        report_scores(scores, task, folder, runtime)
    return scores


def predict_set(
    config: RunConfig,
    task: FineTuningTask,
    parallel: ParallelModel,
    dataset: SequenceDataset,
    is_logged: bool,
    runtime: Runtime,
) -> np.ndarray:
    """The logits of a data set (see evaluation.predict). is_logged: its counts and its speed go to
    all logs, not to the terminal only.
    """
    size = config.prediction.batch_size
    if is_logged:
        settings = {
            "eval_samples": dataset.num_examples,
            "eval_features": len(dataset),
            "predict_start": True,
            "predict_batch_size": size,
            "eval_start": True,
        }
        runtime.reporter.log("PARAMETER", settings)
    started = time.perf_counter()
    logits, speed = predict(parallel, dataset, task.logits_axis, config.prediction, runtime)
    speed["e2e_inference_time"] = time.perf_counter() - started
    text = f"prediction of {size} sequences at a time: {describe(speed, '.4g')}"
    runtime.reporter.log((), speed if is_logged else {}, text)
    return logits


def report_scores(scores: JsonObject, task: FineTuningTask, folder: Path, runtime: Runtime) -> None:
    """Logs the scores and writes SCORES_FILE, where those that are not defined are null."""
    values = only_numbers(scores)
    nvidias = {"F1": scores["f1"]} if "f1" in scores else {}  # the key in NVIDIA's logs
    text = f"{task.name} dev: {describe(values, '.6g')}"
    runtime.reporter.log((), scores | nvidias, text)
    write_json(folder / SCORES_FILE, without_mistakes(scores) | with_nulls(values))


def with_nulls(metrics: dict[str, float]) -> dict[str, float | None]:
    """`metrics` for JSON, which has no NaN: those that are not defined are None."""
    return {name: None if math.isnan(value) else value for name, value in metrics.items()}


def describe(metrics: dict[str, float], form: str) -> str:
    return "  ".join(
        f"{name} not defined" if math.isnan(value) else f"{name} {value:{form}}"
        for name, value in metrics.items()
    )
