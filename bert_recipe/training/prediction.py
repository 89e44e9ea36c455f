"""Prediction with a trained model: predictions and scores of a task's files."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from bert_recipe.checkpoint.calibration import calibrated
from bert_recipe.checkpoint.identity import WEIGHTS, check_results_of, refuse_other_runs
from bert_recipe.checkpoint.model_choice import find_model
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.progress import FLOAT32_LINEAR
from bert_recipe.checkpoint.record import PREDICTED_BY_FILE, SCORES_FILE
from bert_recipe.checkpoint.start import no_log
from bert_recipe.checkpoint.weights import check_head, load_weights
from bert_recipe.config import ParallelConfig, RunConfig
from bert_recipe.model.encoders.config import ModelConfig, check_length
from bert_recipe.model.encoders.registry import MODELS, make_model
from bert_recipe.model.kernels.linear import float32_library
from bert_recipe.parallel.base import ParallelModel
from bert_recipe.parallel.parallelize import parallelize
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.baselines import (
    BASELINES,
    FROZEN,
    WARNING,
    Baselines,
    chance_line,
    comparison_line,
    for_json,
    frozen_line,
    joined,
    percent,
)
from bert_recipe.tasks.fine_tuning import FineTuningOptions, FineTuningTask, warn_of_undefined
from bert_recipe.tasks.mistakes import without_mistakes
from bert_recipe.tasks.task import PredictionSet
from bert_recipe.tasks.text_sequences import SequenceDataset
from bert_recipe.training.evaluation import describe, only_numbers, predict, with_nulls
from bert_recipe.training.setup import open_report
from bert_recipe.utils.files import lock_folder
from bert_recipe.utils.json_files import JsonObject, write_json
from bert_recipe.utils.progress import print_line


def predict_only(config: RunConfig, options: FineTuningOptions, runtime: Runtime) -> int:
    """Predicts with the fine-tuned model that the flags name."""
    on_main = runtime.distributed.on_main
    model = find_model(config, on_main=on_main)
    folder, choice = cast(ModelFolder, model.folder), model.choice  # the flags name one
    check_head(folder, MODELS[type(choice.config)][options.head].__name__)
    length = options.max_seq_length
    if not config.arguments.given("max_seq_length"):  # as in training
        length = options.fine_tuned_length(choice.config, folder)
    check_length("--max-seq-length", length, choice.config)
    task = options.task_class.fine_tuned(options, length, folder.config, folder.path)
    sets = task.prediction_sets(choice.tokenizer)
    warn_of_undefined(sets, task.metric, False, runtime)
    results = config.trainer.checkpoint_folder / choice.name / task.name
    digest = None
    if not config.trainer.benchmark:
        digest = on_main(partial(claim_results, results, folder, runtime.locks))
    open_report(config, results, runtime)
    settings = config.arguments.as_dict() | {
        "SEED": config.seed,
        "task": task.name,
        "max_seq_length": task.max_seq_length,
        FLOAT32_LINEAR: float32_library(),
    }
    if digest is not None:
        settings["starting_weights"] = digest
    runtime.reporter.log("PARAMETER", settings)
    model_config = task.configure(choice.config)
    parallel = load_fine_tuned(task.head, model_config, folder, runtime, config.parallel)
    predict_all(config, task, parallel, sets, results, runtime, folder.path)
    if digest is not None and runtime.distributed.is_main:
        flags = config.arguments.tagged("result")
        record = {"identity": {WEIGHTS: digest}, "hyperparameters": flags}
        write_json(results / PREDICTED_BY_FILE, record)
    return 0


def claim_results(results: Path, model: ModelFolder, locks: ExitStack) -> str | None:
    """Locks the folder `results`, until `locks` is closed. Returns the digest to record in it, None
    if the model is of a run in it. Raises UserError if the folder belongs to something else.
    """
    locks.enter_context(closing(lock_folder(results)))
    refuse_other_runs(results)
    if results.resolve() in model.path.resolve().parents:
        return None
    return check_results_of(results, model)


def load_fine_tuned(
    head: str,
    config: ModelConfig,
    folder: ModelFolder,
    runtime: Runtime,
    strategies: ParallelConfig | None = None,
    log: Callable[[str], None] = print_line,
) -> ParallelModel:
    """Loads the model in `folder` for prediction.

    head: a key of modeling.MODELS; the folder must have all of it.
    strategies: by default those of one process.
    """
    with torch.device("meta"):
        model = make_model(head, config)
    parallel = parallelize(model, strategies or ParallelConfig(), runtime, trains=False)
    log = log if runtime.distributed.is_main else no_log
    load_weights(parallel, folder, log, needs_head=True)
    return parallel


def predict_all(
    config: RunConfig,
    task: FineTuningTask,
    parallel: ParallelModel,
    sets: list[PredictionSet],
    folder: Path,
    runtime: Runtime,
    model_folder: Path | None,
) -> dict[str, float]:
    """Predicts all sets. The main process writes predictions and scores to `folder`; it alone
    returns scores. model_folder: whose calibration applies to what is predicted. Scored rows are
    as the model gives them, since compare.py --calibrate fits the temperature on them.
    """
    writes = runtime.distributed.is_main and not config.trainer.benchmark
    if writes:  # fail on a bad path before the work
        folder.mkdir(parents=True, exist_ok=True)
    parallel.prepare_for_inference(runtime.precision.dtype)
    has_scored = any(prediction_set.is_scored for prediction_set in sets)
    scores: dict[str, Any] = {}
    warnings: list[str] = []
    for prediction_set in sets:
        # The last figures in the log are those of the scored set.
        is_logged = prediction_set.is_scored or not has_scored
        logits = predict_set(task, parallel, prediction_set.dataset, config, is_logged, runtime)
        if model_folder is not None and not prediction_set.is_scored:
            logits = calibrated(logits, model_folder)
        if writes:
            scores |= prediction_set.finish(logits, folder)
            warnings += filter(None, [scores.pop(WARNING, None)])
    if warnings:
        scores[WARNING] = "; ".join(warnings)
    if scores:
        report_scores(scores, task, folder, runtime)
        # Later, so that nothing keeps the scores from being written.
        if (baselines := baselines_of(sets)) is not None:
            scores[BASELINES] = for_json(baselines.scores)
            report_baselines(scores, baselines, task, folder, runtime)
    return scores


def baselines_of(sets: Sequence[PredictionSet]) -> Baselines | None:
    """The scores of simple methods on the sets that have some."""
    computed = [prediction_set.baselines() for prediction_set in sets if prediction_set.baselines]
    known = [baselines for baselines in computed if baselines is not None]
    return joined(known) if known else None


def predict_set(
    task: FineTuningTask,
    parallel: ParallelModel,
    dataset: SequenceDataset,
    config: RunConfig,
    is_logged: bool,
    runtime: Runtime,
) -> np.ndarray:
    """The logits of a data set (see evaluation.predict). is_logged: its counts and its speed go to
    all logs, not to the terminal only.
    """
    size, measured = config.prediction.batch_size, config.trainer.measured_batches
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
    axis = task.logits_axis
    outputs, speed = predict(parallel, dataset, axis, size, runtime, measured=measured)
    speed["e2e_inference_time"] = time.perf_counter() - started
    text = f"prediction of {size} sequences at a time: {describe(speed, '.4g')}"
    runtime.reporter.log((), speed if is_logged else {}, text)
    return task.logits_of(outputs)


def report_scores(scores: JsonObject, task: FineTuningTask, folder: Path, runtime: Runtime) -> None:
    """Logs the scores and writes SCORES_FILE, where those that are not defined are null."""
    values = only_numbers(scores)
    nvidias = {"F1": scores["f1"]} if "f1" in scores else {}  # the key in NVIDIA's logs
    text = f"{task.name} dev: {describe(values, '.6g')}"
    tables = {name: value for name, value in scores.items() if name != WARNING}
    runtime.reporter.log((), tables | nvidias, text)
    if WARNING in scores:
        print_line(f"warning: {scores[WARNING]}")
    write_json(folder / SCORES_FILE, stored_scores(scores))


def stored_scores(scores: JsonObject) -> JsonObject:
    """What SCORES_FILE has."""
    return without_mistakes(scores) | with_nulls(only_numbers(scores))


def report_baselines(
    scores: JsonObject, baselines: Baselines, task: FineTuningTask, folder: Path, runtime: Runtime
) -> None:
    """Logs the baselines, and adds them to SCORES_FILE."""
    metric = task.metric
    value = scores[metric]
    text = None
    if not math.isnan(value):
        text = comparison_line(metric, percent(value), baselines.scores)
    runtime.reporter.log((), {BASELINES: scores[BASELINES]}, text)
    confusion = scores.get("confusion_matrix", ())
    note = frozen_line(metric, value, baselines)
    advice = f"{FROZEN}, or {task.chance_advice}" if note else task.chance_advice
    if warning := chance_line(metric, value, baselines, advice, confusion):
        print_line(f"warning: {warning}")
        scores[WARNING] = "; ".join(filter(None, (scores.get(WARNING), warning)))
    if note:
        print_line(f"note: {note}")
    write_json(folder / SCORES_FILE, stored_scores(scores))
