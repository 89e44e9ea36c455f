"""The generic fine-tuning program behind run_squad.py and run_glue.py: shared flags, training, scoring and prediction,
with one or several seeds."""

import contextlib
import dataclasses
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from arguments import make_run_config
from checkpoint.model_choice import ModelChoice, choose_model, read_config
from checkpoint.state import load_weights
from diagnostics.estimates import print_estimate
from encoders.config import ModelConfig
from evaluation import predict
from metrics.sinks import make_reporter
from parallel.base import ParallelModel
from parallel.runtime import Runtime
from run_setup import TrainingPlan, find_fine_tuned, load_fine_tuned, open_report, plan_run, start_runtime
from tasks import FineTuningTask, PredictionSet
from tasks.text_sequences import SequenceDataset
from trainer import Trainer
from utils.command_line import Arguments
from utils.errors import UserError
from utils.files import atomic_folder, read_json, write_json
from utils.progress import print_line

SCORES_FILE, EVALUATIONS_FILE, BEST_FOLDER = "scores.json", "evaluations.json", "best"
MODEL_FILES = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|(config|tokenizer(_config)?)\.json|vocab\.txt"
)


def fine_tuning_main(args: Arguments, task: FineTuningTask, title: str) -> int:
    """Trains, scores and predicts as the flags request; returns the exit code."""
    config = make_run_config(args)
    if args.estimate_memory is not None:
        return print_estimate(task.head, config)
    with start_runtime(config, title) as runtime:
        return train_and_predict(args, task, runtime) if args.do_train else predict_only(args, task, runtime)


@dataclasses.dataclass(frozen=True)
class TrainingSet:
    """The training file. `task` and `choice` contain its labels."""

    task: FineTuningTask
    choice: ModelChoice
    dataset: SequenceDataset

    @classmethod
    def open(cls, args: Arguments, task: FineTuningTask, runtime: Runtime) -> "TrainingSet":
        choice = choose_from_flags(args, runtime)
        task, dataset = task.training_set(choice.tokenizer)
        return cls(task, dataclasses.replace(choice, config=with_labels(choice.config, task)), dataset)

    def plan(self, args: Arguments, runtime: Runtime, name: str = "") -> TrainingPlan:
        """`name`: subfolder of the seed, if there are several."""
        config, task = make_run_config(args), self.task
        loader = dataclasses.replace(config.loader, max_predictions_per_seq=int(self.dataset.num_labelled.max()))
        return plan_run(
            dataclasses.replace(config, loader=loader),
            self.choice,
            task.head,
            task,
            self.dataset,
            str(Path(task.name, name)),
            runtime,
            result_files=(*task.result_files, SCORES_FILE, EVALUATIONS_FILE),
            initial_loss=task.initial_loss,
        )


def choose_from_flags(args: Arguments, runtime: Runtime) -> ModelChoice:
    config = make_run_config(args)
    choice = choose_model(config.model, config.start, runtime.distributed.on_main)
    if args.max_seq_length > choice.config.max_length:
        raise UserError(
            f"--max-seq-length {args.max_seq_length} is above the config's {choice.config.max_length} "
            f"positions: lower it or use another config"
        )
    return choice


def with_labels(config: ModelConfig, task: FineTuningTask) -> ModelConfig:
    return dataclasses.replace(config, labels=task.labels, multi_label=task.multi_label)


def train_and_predict(args: Arguments, task: FineTuningTask, runtime: Runtime) -> int:
    training_set = TrainingSet.open(args, task, runtime)
    task, folder = training_set.task, args.output_dir / training_set.choice.name / task.name
    sets = task.prediction_sets(training_set.choice.tokenizer)
    open_report(make_run_config(args), folder, runtime)
    if args.overwrite and args.num_seeds > 1 and runtime.distributed.is_main:
        (folder / SCORES_FILE).unlink(missing_ok=True)  # of earlier runs
    scores: list[dict[str, float]] = []
    for seed in range(args.seed, args.seed + args.num_seeds):
        name = f"seed-{seed}" if args.num_seeds > 1 else ""
        seed_args = args.replace(seed=seed, from_checkpoint=args.from_checkpoint and args.from_checkpoint / name)
        with runtime_of_seed(args, runtime, name, folder) as seed_runtime:
            plan = training_set.plan(seed_args, seed_runtime, name)
            parallel, exit_code = train(seed_args, plan, sets, seed_runtime)
            if parallel is None:
                return exit_code
            if sets:
                scores.append(predict_all(seed_args, task, parallel, sets, folder / name, seed_runtime))
    if args.num_seeds > 1 and any(scores):
        title = f"{task.name} dev, seeds {args.seed} to {args.seed + args.num_seeds - 1}"
        report_scores(mean_and_deviation(scores), folder, title, runtime)
    return 0


def train(
    args: Arguments, plan: TrainingPlan, sets: list[PredictionSet], runtime: Runtime
) -> tuple[ParallelModel | None, int]:
    """Trains; returns the model, or None if training is incomplete, and the exit code."""
    steps = plan.config.trainer.max_steps
    trainer = plan.build_trainer(runtime)
    trainer.settings |= {
        "training_samples": plan.dataset.num_examples,
        "training_features": len(plan.dataset),
        "train_batch_size": args.batch_size,
        "steps": steps,
    }
    evaluation = None
    if args.eval_steps:
        evaluation = trainer.evaluate = Evaluation(args, trainer, sets)
        trainer.is_finished = evaluation.is_exhausted
    elif args.overwrite and runtime.distributed.is_main:
        shutil.rmtree(trainer.config.checkpoint_folder / BEST_FOLDER, ignore_errors=True)  # of an earlier run
    exit_code = trainer.train(plan.make_loader(trainer))
    trainer.evaluate = None  # break the reference cycle, so that the trainer and its folder lock are freed
    if trainer.state.step < steps and not trainer.is_finished and not args.benchmark:
        return None, exit_code
    if evaluation is not None:
        evaluation.load_best()
    return trainer.parallel, exit_code


class Evaluation:
    """Scores the labelled files during training, saves the best weights in BEST_FOLDER, and stops training after
    --early-stopping evaluations without improvement."""

    def __init__(self, args: Arguments, trainer: Trainer, sets: list[PredictionSet]):
        self.trainer, self.task, self.patience = trainer, trainer.task, args.early_stopping
        self.sets = [prediction_set for prediction_set in sets if prediction_set.is_scored]
        self.config = make_run_config(args).prediction
        self.folder = trainer.config.checkpoint_folder
        path, step = self.folder / EVALUATIONS_FILE, trainer.state.step
        # When resuming: the evaluations up to the checkpoint.
        found = trainer.distributed.on_main(lambda: read_json(path, "evaluations") if step and path.exists() else [])
        self.history: list[dict[str, float]] = [entry for entry in found if entry["step"] <= step]

    def best(self) -> dict[str, float]:
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
            logits, _ = predict(trainer.parallel, each.dataset, self.task.logits_axis, self.config, trainer.runtime)
            scores |= only_numbers(trainer.distributed.on_main(partial(each.finish, logits, None)))
        step = trainer.state.step
        if step == 0 or (step % trainer.config.eval_steps and step < trainer.config.max_steps):
            # Skipped updates only, or the end of --steps-this-run, where an uninterrupted run does not evaluate.
            return scores
        self.history.append({"step": step, **scores})
        trainer.is_finished = self.is_exhausted
        if trainer.is_finished or self.best() is self.history[-1]:
            trainer.save()
            trainer.writer.wait()
        trainer.distributed.on_main(self.write)
        return scores

    def write(self) -> None:
        if self.best() is self.history[-1]:
            with atomic_folder(self.folder / BEST_FOLDER) as best:
                for file in (self.folder / str(self.trainer.state.step)).iterdir():
                    if MODEL_FILES.fullmatch(file.name):
                        shutil.copy2(file, best / file.name)
        write_json(self.folder / EVALUATIONS_FILE, self.history)

    def load_best(self) -> None:
        if self.best()["step"] != self.trainer.state.step:
            load_weights(self.trainer.parallel, self.folder / BEST_FOLDER, lambda _text: None)
        if self.trainer.distributed.is_main:
            print_line(
                f"best: {self.task.metric} {self.best()[self.task.metric]:.6g} at step {self.best()['step']:.0f}"
            )


@contextlib.contextmanager
def runtime_of_seed(args: Arguments, runtime: Runtime, name: str, folder: Path) -> Iterator[Runtime]:
    """The runtime with a separate log per seed, named after the seed, beside the log of the whole command."""
    if not name:
        yield runtime
        return
    config = make_run_config(args).runtime
    logs = {
        "report_file": config.report_file and config.report_file.with_stem(f"{config.report_file.stem}-{name}"),
        "log_file": config.log_file and config.log_file.with_stem(f"{config.log_file.stem}-{name}"),
        "tensorboard_dir": config.tensorboard_dir and config.tensorboard_dir / name,
    }
    config = dataclasses.replace(config, **logs)
    with contextlib.closing(make_reporter(config, runtime.distributed.is_main)) as reporter:
        runtime = dataclasses.replace(runtime, reporter=reporter)
        open_report(make_run_config(args), folder, runtime, f"report-{name}.json")
        yield runtime


def predict_only(args: Arguments, task: FineTuningTask, runtime: Runtime) -> int:
    config, choice = make_run_config(args), choose_from_flags(args, runtime)
    model_folder, folder = find_fine_tuned(config, runtime), args.output_dir / choice.name / task.name
    task = task.for_model(read_config(model_folder / "config.json"), model_folder)
    sets = task.prediction_sets(choice.tokenizer)
    open_report(config, folder, runtime)
    runtime.reporter.log("PARAMETER", config.metadata.arguments | {"SEED": config.metadata.seed})
    parallel = load_fine_tuned(task.head, with_labels(choice.config, task), model_folder, runtime)
    predict_all(args, task, parallel, sets, folder, runtime)
    return 0


def predict_all(
    args: Arguments,
    task: FineTuningTask,
    parallel: ParallelModel,
    sets: list[PredictionSet],
    folder: Path,
    runtime: Runtime,
) -> dict[str, float]:
    """Predicts all sets. The main process writes predictions and scores to `folder` and returns the scores; the other
    processes return nothing."""
    writes = runtime.distributed.is_main and not args.benchmark
    if writes:  # fail on a bad path before the work
        folder.mkdir(parents=True, exist_ok=True)
    config = make_run_config(args).prediction
    parallel.prepare_for_inference(runtime.precision.dtype)
    scores: dict[str, float] = {}
    for prediction_set in sets:
        parameters = {
            "predict_start": True,
            "eval_samples": prediction_set.dataset.num_examples,
            "eval_features": len(prediction_set.dataset),
            "predict_batch_size": args.predict_batch_size,
            "eval_start": True,
        }
        runtime.reporter.log("PARAMETER", parameters)
        started = time.perf_counter()
        logits, speed = predict(parallel, prediction_set.dataset, task.logits_axis, config, runtime)
        speed["e2e_inference_time"] = time.perf_counter() - started
        text = "  ".join(f"{name} {value:.4g}" for name, value in speed.items())
        runtime.reporter.log((), speed, f"prediction of {config.batch_size} sequences at a time: {text}")
        if writes:
            scores |= prediction_set.finish(logits, folder)
    if scores:
        report_scores(scores, folder, f"{task.name} dev", runtime)
    return scores


def only_numbers(scores: dict[str, Any]) -> dict[str, float]:
    """The scores that are numbers, without tables."""
    return {name: value for name, value in scores.items() if isinstance(value, int | float)}


def report_scores(scores: dict[str, Any], folder: Path, title: str, runtime: Runtime) -> None:
    numbers = only_numbers(scores)
    text = "  ".join(f"{name} {value:.6g}" for name, value in numbers.items())
    nvidias = {"F1": scores["f1"]} if "f1" in scores else {}  # the key in NVIDIA's logs
    runtime.reporter.log((), scores | nvidias, f"{title}: {text}")
    write_json(folder / SCORES_FILE, scores)


def mean_and_deviation(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean and sample standard deviation (n - 1) of each metric over `runs`, one per seed."""
    result = {}
    for name in only_numbers(runs[0]):
        values = np.array([run[name] for run in runs])
        result |= {f"{name}_mean": float(values.mean()), f"{name}_std": float(values.std(ddof=1))}
    return result
