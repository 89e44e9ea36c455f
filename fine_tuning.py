"""The generic fine-tuning program behind run_squad.py and run_glue.py: training, scores,
predictions, seeds.
"""

import dataclasses
import re
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

from checkpoint.folder import (
    BEST_FOLDER,
    EVALUATIONS_FILE,
    check_best,
    has_weights,
    model_digest,
    read_manifest,
    write_part_of_manifest,
)
from checkpoint.identity import WEIGHTS, check_results_of, write_record
from checkpoint.model_choice import ModelChoice, choose_model
from checkpoint.model_folder import ModelFolder
from checkpoint.start import Start, find_fine_tuned, find_start
from checkpoint.state import load_weights
from checkpoint.weights import check_head
from evaluation import predict
from modeling import MODELS
from parallel.base import ParallelModel
from parallel.runtime import Runtime
from run_config import RunConfig, RunRecord
from run_setup import (
    TrainingPlan,
    check_seeds,
    load_fine_tuned,
    open_report,
    plan_run,
    report_seeds,
    seed_logs,
    seeds_of,
    start_runtime,
)
from tasks import FineTuningTask, PredictionSet
from tasks.predictors import PREDICTORS, EmbeddingPredictor
from tasks.text_sequences import SequenceDataset
from trainer import Trainer
from utils.errors import UserError
from utils.files import atomic_folder, file_digest, json_digest, read_json, remove, write_json
from utils.progress import print_line

SCORES_FILE = "scores.json"
MODEL_FILES = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|(config|tokenizer(_config)?)\.json|vocab\.txt"
)


def fine_tuning_main(config: RunConfig, task: FineTuningTask, title: str) -> int:
    """Trains, scores and predicts, as the flags request; returns the exit code."""
    with start_runtime(config, title) as runtime:
        work = train_and_predict if config.fine_tuning.do_train else predict_only
        return work(config, task, runtime)


@dataclasses.dataclass(frozen=True)
class TrainingSet:
    """The training file. `task` and `choice` contain its labels."""

    task: FineTuningTask
    choice: ModelChoice
    dataset: SequenceDataset
    start: Start

    @classmethod
    def open(cls, config: RunConfig, task: FineTuningTask, runtime: Runtime) -> "TrainingSet":
        if (batch := config.loader.global_batch_size) < (
            processes := runtime.distributed.world_size
        ):
            what = (
                f"the global batch ({batch}) is smaller than the number of processes ({processes})"
            )
            raise UserError(f"{what}: raise --global-batch-size, or start fewer processes")
        if batch < task.min_batch:
            raise UserError(
                f"the global batch is {batch}, and --task-name {task.name} compares texts of a "
                f"batch: raise it"
            )
        task.check_held_out()
        start = find_start(config.start, runtime.distributed.on_main)
        choice = choose_model(config.model, start.folder)
        check_length(task, choice)
        if start.folder is not None:
            task = task.for_start(start.folder.path)
        task, dataset = task.training_set(choice.tokenizer)
        return cls(
            task, dataclasses.replace(choice, config=task.configure(choice.config)), dataset, start
        )

    def plan(self, config: RunConfig, runtime: Runtime, name: str = "") -> TrainingPlan:
        """`name`: subfolder of the seed, if there are several."""
        start, files = self.start, self.task.model_files(self.choice.config)
        config = config.with_values(
            metadata={"max_length": self.task.max_seq_length, "files": files}
        )
        if name and config.start.from_checkpoint is not None:
            start = find_start(config.start.of_seed(name), runtime.distributed.on_main)
        options = {"result_files": (*self.task.result_files, SCORES_FILE, EVALUATIONS_FILE)}
        if config.trainer.eval_steps:
            digests = [file_digest(path) for path in self.task.development_files]
            options["development_data"] = json_digest(digests)[:16]
        options |= {
            "phase": str(Path(self.task.name, name)),
            "initial_loss": self.task.initial_loss,
        }
        parts = self.choice, self.task.head, self.task, self.dataset
        return plan_run(config, start, *parts, runtime=runtime, **options)


def check_length(task: FineTuningTask, choice: ModelChoice) -> None:
    if (length := task.max_seq_length) > choice.config.max_length:
        positions = f"the config's {choice.config.max_length} positions"
        raise UserError(
            f"--max-seq-length {length} is above {positions}: lower it or use another config"
        )


def train_and_predict(config: RunConfig, task: FineTuningTask, runtime: Runtime) -> int:
    training_set = TrainingSet.open(config, task, runtime)
    task, folder = (
        training_set.task,
        config.trainer.checkpoint_folder / training_set.choice.name / task.name,
    )
    sets = task.prediction_sets(training_set.choice.tokenizer)
    if runtime.distributed.is_main:
        known = training_set.dataset.distinct_sequences()
        for each in sets:
            if each.is_scored and each.dataset.distinct_sequences() <= known:
                print_line(
                    "warning: every text to score is in the training file: the scores are not of "
                    "unseen texts"
                )
    open_report(config, folder, runtime)
    scores: list[dict[str, float]] = []
    plans = {
        name: training_set.plan(each, runtime, name) for name, each in seeds_of(config).items()
    }
    check_seeds(plans, runtime)
    if config.num_seeds > 1 and runtime.distributed.is_main:
        (folder / SCORES_FILE).unlink(missing_ok=True)  # of earlier runs
    for name, plan in plans.items():
        with seed_logs(config, name, runtime) as seed_runtime:
            if name:
                open_report(config, folder / name, seed_runtime)
            parallel, exit_code = train(plan, sets, seed_runtime)
            if parallel is None:
                return exit_code
            if sets:
                scores.append(
                    predict_all(plan.config, task, parallel, sets, folder / name, seed_runtime)
                )
    if config.num_seeds > 1 and any(scores):
        first = config.metadata.seed
        title = f"{task.name} dev, seeds {first} to {first + config.num_seeds - 1}"
        write_json(folder / SCORES_FILE, report_seeds(scores, title, runtime))
    return 0


def train(
    plan: TrainingPlan, sets: list[PredictionSet], runtime: Runtime
) -> tuple[ParallelModel | None, int]:
    """Trains; returns the model, or None if training is incomplete, and the exit code."""
    config, steps = plan.config, plan.config.trainer.max_steps
    trainer = plan.build_trainer(runtime)
    if trainer.state.step == 0 and plan.start.weights is None and runtime.distributed.is_main:
        print_line("warning: fine-tuning starts from random weights: give --init-checkpoint")
    counts = {"training_samples": plan.dataset.num_examples, "training_features": len(plan.dataset)}
    counts |= {"train_batch_size": config.loader.batch_size, "steps": steps}
    trainer.settings |= {"task": trainer.task.name} | counts
    best, stale = None, {*plan.start.config.result_files, BEST_FOLDER}
    if config.trainer.eval_steps:
        stale -= {BEST_FOLDER, EVALUATIONS_FILE}
        best = trainer.evaluate = BestCheckpoint(config, trainer, sets)
        trainer.is_finished = best.is_exhausted
        if best.lacks_checkpoint:
            trainer.log_evaluation()
    is_finished = trainer.state.step >= steps or trainer.is_finished
    if runtime.distributed.is_main and not is_finished and not config.trainer.benchmark:
        for name in stale:  # of earlier weights
            remove(trainer.config.checkpoint_folder / name)
    exit_code = trainer.train(plan.make_loader(trainer))
    trainer.evaluate = (
        None  # break the reference cycle, so that the trainer and its folder lock are freed
    )
    if trainer.state.step < steps and not trainer.is_finished and not config.trainer.benchmark:
        return None, exit_code
    if best is not None:
        best.load()
    return trainer.parallel, exit_code


class BestCheckpoint:
    """Scores the labelled files, saves the best weights in BEST_FOLDER, and stops training for
    --early-stopping.
    """

    def __init__(self, config: RunConfig, trainer: Trainer, sets: list[PredictionSet]):
        self.trainer, self.task, self.patience = (
            trainer,
            trainer.task,
            config.fine_tuning.early_stopping,
        )
        self.sets = [prediction_set for prediction_set in sets if prediction_set.is_scored]
        self.config = config.prediction
        self.folder, record = trainer.config.checkpoint_folder, trainer.config.record
        self.development_data = (
            record and record.identity["development data"]
        )  # on the main process
        # When resuming: the evaluations up to the checkpoint, and those after it, which are made
        # again.
        step, found = trainer.state.step, []
        if step:
            read = partial(read_evaluations, self.folder, self.task.metric, self.development_data)
            found = trainer.distributed.on_main(read)
        self.history: list[dict[str, Any]] = [entry for entry in found if entry["step"] <= step]
        self.later = [entry for entry in found if entry["step"] > step]

    @property
    def lacks_checkpoint(self) -> bool:
        """Whether the run resumes a checkpoint that should have been evaluated, and was stopped
        before.
        """
        step = self.trainer.state.step
        return self.trainer.is_evaluation_due and all(
            entry["step"] != step for entry in self.history
        )

    def best(self) -> dict[str, Any]:
        return max(self.history, key=lambda entry: entry[self.task.metric])  # the first on ties

    @property
    def is_exhausted(self) -> bool:
        if not self.history or self.patience is None:
            return False
        return len(self.history) - 1 - self.history.index(self.best()) >= self.patience

    def __call__(self) -> dict[str, float]:
        trainer = self.trainer
        scores: dict[str, float] = {}
        for each in self.sets:
            logits, _ = predict(
                trainer.parallel, each.dataset, self.task.logits_axis, self.config, trainer.runtime
            )
            scores |= only_numbers(trainer.distributed.on_main(partial(each.finish, logits, None)))
        step = trainer.state.step
        if step == 0 or (step % trainer.config.eval_steps and step < trainer.config.max_steps):
            # Skipped updates only, or the end of --steps-this-run, where an uninterrupted run does
            # not evaluate.
            return scores
        self.history.append({"step": step, "development_data": self.development_data, **scores})
        trainer.is_finished = self.is_exhausted
        if trainer.is_finished or self.best() is self.history[-1]:
            trainer.save()
            trainer.writer.wait()
        trainer.distributed.on_main(self.write)
        return scores

    def write(self) -> None:
        if self.trainer.folder_moved():  # the run stops
            return
        if self.best() is self.history[-1]:
            with atomic_folder(self.folder / BEST_FOLDER) as best:
                step, further = (
                    self.folder / str(self.trainer.state.step),
                    self.trainer.state.metadata.files,
                )
                names = [
                    name
                    for name in read_manifest(step)
                    if MODEL_FILES.fullmatch(name) or name in further
                ]
                for name in names:
                    (best / name).parent.mkdir(exist_ok=True)
                    shutil.copy2(step / name, best / name)
                write_part_of_manifest(best, step, {name: name for name in names})
                self.history[-1]["model"] = model_digest(best)
        later = [entry for entry in self.later if entry["step"] > self.trainer.state.step]
        write_json(self.folder / EVALUATIONS_FILE, self.history + later)

    def load(self) -> None:
        if self.best()["step"] != self.trainer.state.step:
            self.trainer.distributed.on_main(partial(check_best, self.folder))
            load_weights(
                self.trainer.parallel, ModelFolder(self.folder / BEST_FOLDER), lambda _text: None
            )
        best, name = self.best(), self.task.metric
        text = f"best: {name} {best[name]:.6g} at step {best['step']:.0f}"
        self.trainer.runtime.reporter.log((), {"best_step": best["step"]}, text)


def predict_only(config: RunConfig, task: FineTuningTask, runtime: Runtime) -> int:
    folder, choice = find_fine_tuned(
        config.start, config.model, on_main=runtime.distributed.on_main
    )
    check_head(folder, MODELS[type(choice.config)][task.head].__name__)
    if not config.fine_tuning.gives_length:  # as in training
        [predictor] = [each for each in (*PREDICTORS, EmbeddingPredictor) if each.head == task.head]
        task = dataclasses.replace(task, max_seq_length=predictor.max_length(choice.config, folder))
    check_length(task, choice)
    results = config.trainer.checkpoint_folder / choice.name / task.name
    task = task.for_model(folder.config, folder.path)
    sets = task.prediction_sets(choice.tokenizer)
    digest = None
    if results.resolve() not in folder.path.resolve().parents and not config.trainer.benchmark:
        digest = runtime.distributed.on_main(partial(check_results_of, results, folder))
    open_report(config, results, runtime)
    changed = {
        "SEED": config.metadata.seed,
        "task": task.name,
        "max_seq_length": task.max_seq_length,
    }
    runtime.reporter.log("PARAMETER", config.metadata.arguments | changed)
    parallel = load_fine_tuned(task.head, task.configure(choice.config), folder, runtime)
    predict_all(config, task, parallel, sets, results, runtime)
    if digest is not None and runtime.distributed.is_main:
        write_record(results, RunRecord({WEIGHTS: digest}, {}))
    return 0


def read_evaluations(folder: Path, metric: str, data: str | None = None) -> list[dict[str, Any]]:
    """The evaluations in a folder of steps. Raises UserError if the best model is missing or that
    of another run, or if they are of other development data than that with the digest `data`.
    """
    path, entry = (
        folder / EVALUATIONS_FILE,
        {"step": int, metric: float, "development_data": str | None},
    )
    found = read_json(path, "the evaluations", list[entry]) if path.exists() else []
    if found and not has_weights(folder / BEST_FOLDER):
        raise UserError(
            f"{folder / BEST_FOLDER}, the best model, is gone: restore it, or add --overwrite"
        )
    if any(entry["development_data"] not in (None, data) for entry in found):
        raise UserError(
            f"{path} has the scores of other development data: restore that, or add --overwrite"
        )
    if found:
        check_best(folder)
    return found


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
    scores: dict[str, Any] = {}
    for each in sets:
        # The last figures in the log are those of the scored set.
        is_logged = each.is_scored or not any(other.is_scored for other in sets)
        counts = {"eval_samples": each.dataset.num_examples, "eval_features": len(each.dataset)}
        marks = {
            "predict_start": True,
            "predict_batch_size": config.prediction.batch_size,
            "eval_start": True,
        }
        if is_logged:
            runtime.reporter.log("PARAMETER", counts | marks)
        started = time.perf_counter()
        logits, speed = predict(
            parallel, each.dataset, task.logits_axis, config.prediction, runtime
        )
        speed["e2e_inference_time"] = time.perf_counter() - started
        text = f"prediction of {config.prediction.batch_size} sequences at a time: {describe(speed, '.4g')}"
        runtime.reporter.log((), speed if is_logged else {}, text)
        if writes:
            scores |= each.finish(logits, folder)
    if scores:
        nvidias = {"F1": scores["f1"]} if "f1" in scores else {}  # the key in NVIDIA's logs
        runtime.reporter.log(
            (), scores | nvidias, f"{task.name} dev: {describe(only_numbers(scores), '.6g')}"
        )
        write_json(folder / SCORES_FILE, scores)
    return scores


def only_numbers(scores: dict[str, Any]) -> dict[str, float]:
    """The scores that are numbers, without tables."""
    return {name: value for name, value in scores.items() if isinstance(value, int | float)}


def describe(metrics: dict[str, float], form: str) -> str:
    return "  ".join(f"{name} {value:{form}}" for name, value in metrics.items())
