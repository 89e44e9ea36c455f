#!/usr/bin/env python3
"""Fine-tunes BERT on a task of GLUE or SuperGLUE, or on your own file; scores it, and predicts.

    python3 run_glue.py --task-name mrpc --data-dir data/download/glue/MRPC --do-train --do-eval \\
        --init-checkpoint results/bert-base-uncased/phase2 --output-dir results

    python3 run_glue.py --train-file reviews.csv --eval-file held_out.csv --text-column review --label-column stars \\
        --do-train --do-eval --init-checkpoint MODEL_FOLDER --output-dir results

Checkpoints, scores.json and predictions go to <output-dir>/<model>/<task>. Under torchrun it runs on several GPUs.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from arguments import (
    TRAINING_FLAGS,
    add_global_arguments,
    add_parallel_arguments,
    add_precision_arguments,
    add_training_arguments,
    check_shared_arguments,
)
from device import Runtime
from evaluation import combine_ranks, log_speed, predict
from metrics import make_reporter
from model_choice import ModelChoice, choose_model, read_config
from modeling import BertForSequenceClassification
from parallel.base import ParallelModel
from parallel.deepspeed_config import parse_with_deepspeed
from run_config import PredictionConfig
from run_setup import (
    TrainingPlan,
    find_fine_tuned,
    fine_tune,
    load_fine_tuned,
    plan_fine_tuning,
    print_estimate,
    start_runtime,
)
from tasks.glue import (
    REGRESSION_LABELS,
    SCORES_FILE,
    ClassificationTask,
    TextDataset,
    find_labels,
    label_values,
    load_metrics,
    mean_and_deviation,
    result_files,
    score,
    write_submission,
)
from tasks.glue_files import TASKS, Examples, TextTask, custom_task, read_examples
from tokenizer import BertTokenizer
from utils.command_line import ArgumentParser, Arguments, BooleanFlag, optional_path, positive_float, positive_int
from utils.errors import UserError, run_main
from utils.files import write_json
from utils.progress import print_line

CUSTOM = "custom"
FILE_FLAGS = ("train_file", "eval_file", "predict_file", "text_column", "pair_column", "label_column", "regression")


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    data = parser.add_argument_group("data and tasks")
    data.add_argument(
        "--task-name", type=str.lower, choices=(*TASKS, CUSTOM), default=CUSTOM, help="custom: your own file"
    )
    data.add_argument("--data-dir", type=optional_path, help="folder of the task's files, as distributed")
    data.add_argument("--do-train", action=BooleanFlag, help="fine-tune on the training file")
    data.add_argument("--do-eval", action=BooleanFlag, help="score the model on the development file")
    data.add_argument("--do-predict", action=BooleanFlag, help="write predictions for the test file")
    data.add_argument("--num-seeds", type=positive_int, default=1, help="number of runs, with the seeds from --seed up")
    data.add_argument(
        "--do-lower-case",
        action=BooleanFlag,
        default=None,
        help="lower-case and strip accents; by default if the vocabulary has no capital letters",
    )
    files = parser.add_argument_group("your own file (--task-name custom): .tsv, .csv or .jsonl")
    files.add_argument("--train-file", type=optional_path, help="file to train on")
    files.add_argument("--eval-file", type=optional_path, help="file to score the model on")
    files.add_argument("--predict-file", type=optional_path, help="file to write predictions for")
    files.add_argument("--text-column", help="column of the text")
    files.add_argument("--pair-column", help="column of the second text, if the samples are pairs")
    files.add_argument("--label-column", help="column of the class, or of the number for --regression")
    files.add_argument("--regression", action=BooleanFlag, help="labels are numbers to predict, not classes")
    add_global_arguments(parser, steps_required=False)
    group = add_training_arguments(parser, "AdamW", 2.4e-5, 0.1)
    group.add_argument(
        "--epochs", "--num-train-epochs", type=positive_float, default=3, help="passes over the training data"
    )
    group.add_argument("--train-batch-size", type=positive_int, default=32, help="sequences per GPU and micro-batch")
    group.add_argument(
        "--predict-batch-size",
        "--eval-batch-size",
        type=positive_int,
        default=32,
        help="sequences per GPU and forward pass",
    )
    group.add_argument(
        "--max-seq-length", type=positive_int, default=128, help="maximum tokens of a sample; longer ones are cut"
    )
    add_parallel_arguments(parser)
    add_precision_arguments(parser)
    args = parse_with_deepspeed(parser, argv)
    check_tasks(args, parser)
    return args


def check_tasks(args: Arguments, parser: ArgumentParser) -> None:
    if not (args.do_train or args.do_eval or args.do_predict):
        parser.error("nothing to do: give --do-train, --do-eval or --do-predict")
    if not args.do_train and args.from_pretrained_params is None and args.from_checkpoint is None:
        parser.error("without --do-train there has to be a fine-tuned model: give --init-checkpoint")
    effects = [
        (TRAINING_FLAGS, args.do_train, "--do-train"),
        (("predict_batch_size",), args.do_eval or args.do_predict, "--do-eval or --do-predict"),
    ]
    parser.refuse_without_effect(args, effects)
    check_shared_arguments(args, parser)
    if args.num_seeds > 1 and (args.benchmark or not args.do_train):
        parser.error("--num-seeds is for training: add --do-train, and leave out --benchmark")
    if args.num_seeds > 1 and args.from_checkpoint is not None and args.last_step_of_checkpoint != "auto":
        parser.error("--from-checkpoint with --num-seeds needs --last-step-of-checkpoint auto")
    if args.max_seq_length < 8:
        parser.error(f"--max-seq-length {args.max_seq_length} leaves no room for texts: give at least 8")
    if args.task_name != CUSTOM:
        given = [name for name in FILE_FLAGS if getattr(args, name)]
        if given:
            parser.error(
                f"--{given[0].replace('_', '-')} is for --task-name custom: leave it out, or leave out the task"
            )
        if args.data_dir is None:
            parser.error(f"--task-name {args.task_name} needs --data-dir")
        return
    if args.data_dir is not None:
        parser.error("--data-dir is for a task of GLUE or SuperGLUE: add --task-name, or give files")
    if args.text_column is None:
        parser.error("your own file needs --text-column (or give --task-name for a task of GLUE)")
    for flag, file in (("do_train", "train_file"), ("do_eval", "eval_file"), ("do_predict", "predict_file")):
        if getattr(args, flag) != (getattr(args, file) is not None):
            parser.error(f"--{flag.replace('_', '-')} and --{file.replace('_', '-')} go together: give both or neither")
    if (args.do_train or args.do_eval) != (args.label_column is not None):
        parser.error("--label-column goes together with --do-train and --do-eval")


# --- data -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvaluationSet:
    """A file to predict for. `values` [n] are its label ids or scores, None for a test file."""

    name: str
    examples: Examples
    dataset: TextDataset
    values: np.ndarray | None


def choose_task(args: Arguments) -> TextTask:
    if args.task_name != CUSTOM:
        return TASKS[args.task_name]
    return custom_task(args.text_column, args.pair_column, args.label_column or "", args.regression)


def open_evaluation_sets(args: Arguments, task: TextTask, tokenizer: BertTokenizer) -> list[EvaluationSet]:
    """The development files and then the test files that the flags ask for."""
    sets = []
    if args.do_eval:
        files = task.evaluation_files(args.data_dir) if args.data_dir else {"": args.eval_file}
        for name, path in files.items():
            examples = read_examples(path, task, labelled=True)
            values = label_values(examples, task)
            sets.append(EvaluationSet(name, examples, TextDataset(examples, tokenizer, args.max_seq_length), values))
    if args.do_predict:
        files = task.test_files(args.data_dir) if args.data_dir else {"": args.predict_file}
        for name, path in files.items():
            examples = read_examples(path, task, labelled=False, is_test=True)
            sets.append(EvaluationSet(name, examples, TextDataset(examples, tokenizer, args.max_seq_length), None))
    return sets


def make_tokenizer(args: Arguments, choice: ModelChoice) -> BertTokenizer:
    if args.max_seq_length > choice.config.max_position_embeddings:
        raise UserError(
            f"--max-seq-length {args.max_seq_length} is above the config's max_position_embeddings "
            f"{choice.config.max_position_embeddings}: use shorter texts or another config"
        )
    do_lower_case = choice.do_lower_case if args.do_lower_case is None else args.do_lower_case
    return BertTokenizer(choice.vocab_file, do_lower_case)


def phase_of(args: Arguments) -> str:
    """The name of the folder for results."""
    return args.task_name if args.task_name != CUSTOM else "regression" if args.regression else "classification"


@dataclass(frozen=True)
class TrainingSet:
    """The training file. `task` and `choice` have its labels."""

    task: TextTask
    choice: ModelChoice
    tokenizer: BertTokenizer
    dataset: TextDataset

    def plan(self, args: Arguments, runtime: Runtime, name: str = "") -> TrainingPlan:
        """`name`: the subfolder of one of several seeds."""
        task = ClassificationTask(self.task.regression, args.max_seq_length)
        return plan_fine_tuning(
            args,
            self.choice,
            BertForSequenceClassification,
            task,
            self.dataset,
            self.tokenizer,
            str(Path(phase_of(args), name)),
            runtime,
            result_files(self.task),
            None if self.task.regression else math.log(len(self.task.labels)),
        )


def open_training_set(args: Arguments) -> TrainingSet:
    task, choice = choose_task(args), choose_model(args)
    tokenizer = make_tokenizer(args, choice)
    path = task.train_file(args.data_dir) if args.data_dir else args.train_file
    examples = read_examples(path, task, labelled=True)
    labels = REGRESSION_LABELS if task.regression else task.labels or find_labels(examples)
    task = dataclasses.replace(task, labels=labels)
    choice = dataclasses.replace(choice, config=dataclasses.replace(choice.config, labels=labels))
    dataset = TextDataset(examples, tokenizer, args.max_seq_length, label_values(examples, task))
    return TrainingSet(task, choice, tokenizer, dataset)


def plan_training(args: Arguments, runtime: Runtime) -> TrainingPlan:
    return open_training_set(args).plan(args, runtime)


def stored_labels(folder: Path, task: TextTask) -> tuple[str, ...]:
    """The labels of a fine-tuned model in the order of its ids, which another library may have chosen."""
    labels = read_config(folder / "config.json").labels
    if task.regression:
        return REGRESSION_LABELS
    has_names = any(label != f"LABEL_{index}" for index, label in enumerate(labels))
    if not task.labels:
        if not labels:
            raise UserError(f"{folder / 'config.json'} has no id2label: was this model fine-tuned on classes?")
        return labels
    if has_names and sorted(labels) != sorted(task.labels):
        raise UserError(
            f"{folder} predicts {', '.join(labels)}, and {task.name} has {', '.join(task.labels)}: use a model that "
            f"was fine-tuned on this task"
        )
    return labels if has_names else task.labels


# --- train, evaluate, predict -----------------------------------------------------------------------------------------


def predict_all(
    args: Arguments,
    task: TextTask,
    parallel: ParallelModel,
    sets: list[EvaluationSet],
    folder: Path,
    runtime: Runtime,
) -> dict[str, float]:
    """Predicts for all evaluation sets. Scores those with labels, and returns the scores; the main process writes
    `scores.json` and the submission files of the others."""
    writes = runtime.distributed.is_main and not args.benchmark
    if writes:  # before the work, so that a path that cannot be made is known early
        folder.mkdir(parents=True, exist_ok=True)
    config = PredictionConfig(
        args.predict_batch_size, args.seed, args.benchmark, args.benchmark_steps, args.benchmark_warmup_steps
    )
    parallel.prepare_for_inference(runtime.precision.dtype)
    scores: dict[str, float] = {}
    for evaluation_set in sets:
        logits_nC = np.zeros((len(evaluation_set.examples), parallel.model.config.num_labels), np.float32)

        def collect(indices: np.ndarray, output, logits_nC: np.ndarray = logits_nC) -> None:
            logits_nC[indices] = output.logits[: len(indices)].float().cpu().numpy()

        figures = predict(parallel, evaluation_set.dataset, config, runtime, collect)
        combine_ranks(logits_nC, runtime)
        log_speed(figures, config, runtime)
        if args.benchmark:
            continue
        if evaluation_set.values is not None:
            scores |= score(logits_nC, evaluation_set.values, task, evaluation_set.name)
        elif writes:
            path = write_submission(folder, evaluation_set.examples, logits_nC, task, evaluation_set.name)
            print_line(f"predictions for {len(evaluation_set.examples)} samples in {path}")
    if scores:
        report_scores(scores, folder, task.name, writes, runtime)
    return scores


def report_scores(scores: dict[str, float], folder: Path, title: str, writes: bool, runtime: Runtime) -> None:
    text = "  ".join(f"{name} {value:.6g}" for name, value in scores.items())
    runtime.reporter.log((), scores, f"{title}: {text}")
    if writes:
        write_json(folder / SCORES_FILE, scores)


def run_glue(args: Arguments, runtime: Runtime) -> int:
    if args.do_eval:
        load_metrics()  # a missing package is known before the training
    if not args.do_train:
        task, choice = choose_task(args), choose_model(args)
        tokenizer = make_tokenizer(args, choice)
        model_folder = find_fine_tuned(args, runtime)
        task = dataclasses.replace(task, labels=stored_labels(model_folder, task))
        config = dataclasses.replace(choice.config, labels=task.labels)
        sets = open_evaluation_sets(args, task, tokenizer)
        parallel = load_fine_tuned(BertForSequenceClassification, config, model_folder, ("classifier.",), runtime)
        predict_all(args, task, parallel, sets, args.output_dir / choice.name / phase_of(args), runtime)
        return 0

    training_set = open_training_set(args)
    task, folder = training_set.task, args.output_dir / training_set.choice.name / phase_of(args)
    sets = open_evaluation_sets(args, task, training_set.tokenizer)
    if args.overwrite and args.num_seeds > 1 and runtime.distributed.is_main:
        (folder / SCORES_FILE).unlink(missing_ok=True)  # the mean of other runs
    scores: dict[str, dict[str, float]] = {}
    for seed in range(args.seed, args.seed + args.num_seeds):
        name = f"seed-{seed}" if args.num_seeds > 1 else ""
        seed_args = arguments_of_seed(args, seed, name) if name else args
        with runtime_of_seed(args, runtime, name) as seed_runtime:
            plan = training_set.plan(seed_args, seed_runtime, name)
            parallel, exit_code, is_complete = fine_tune(seed_args, plan, seed_runtime)
            if not is_complete:
                return exit_code
            scores[name] = predict_all(seed_args, task, parallel, sets, folder / name, seed_runtime)
    if args.num_seeds > 1 and args.do_eval:
        title = f"{task.name}, seeds {args.seed} to {args.seed + args.num_seeds - 1}"
        report_scores(mean_and_deviation(list(scores.values())), folder, title, runtime.distributed.is_main, runtime)
    return 0


def arguments_of_seed(args: Arguments, seed: int, name: str) -> Arguments:
    from_checkpoint = args.from_checkpoint and args.from_checkpoint / name
    return args.replace(seed=seed, from_checkpoint=from_checkpoint)


@contextlib.contextmanager
def runtime_of_seed(args: Arguments, runtime: Runtime, name: str) -> Iterator[Runtime]:
    """The runtime with a log of its own, named after the seed beside that of the whole command."""
    if not name:
        yield runtime
        return
    report_file = args.report_file and args.report_file.with_stem(f"{args.report_file.stem}-{name}")
    tensorboard_dir = args.tensorboard_dir and args.tensorboard_dir / name
    with contextlib.closing(make_reporter(report_file, tensorboard_dir, runtime.distributed.is_main)) as reporter:
        yield dataclasses.replace(runtime, reporter=reporter)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    if args.estimate_memory is not None:
        print_estimate(BertForSequenceClassification, choose_model(args).config, args, args.train_batch_size)
        return 0
    with start_runtime(args, "GLUE") as runtime:
        return run_glue(args, runtime)


if __name__ == "__main__":
    run_main(main)
