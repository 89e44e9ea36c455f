#!/usr/bin/env python3
"""Fine-tunes BERT on a task of GLUE or SuperGLUE, or on your own file; scores it, and predicts.

    python3 run_glue.py --task-name mrpc --data-dir data/download/glue/MRPC --do-train --do-eval \\
        --init-checkpoint results/bert-base-uncased/phase2 --output-dir results

    python3 run_glue.py --train-file reviews.csv --eval-file held_out.csv --text-column review --label-column stars \\
        --do-train --do-eval --init-checkpoint MODEL_FOLDER --output-dir results

Checkpoints, scores.json and predictions go to <output-dir>/<model>/<task>. Under torchrun it runs on several GPUs.
"""

from device import Runtime
from fine_tuning import TrainingSet, fine_tuning_main, make_parser, parse_fine_tuning
from run_setup import TrainingPlan
from tasks import FineTuningTask
from tasks.glue import ClassificationTask
from tasks.glue_files import TASKS, custom_task
from tasks.multi_label import MultiLabelTask, multi_label_task
from tasks.ner import TokenClassificationTask
from utils.command_line import ArgumentParser, Arguments, BooleanFlag, optional_path
from utils.errors import run_main

CUSTOM, MULTI_LABEL, NER = "custom", "multi-label", "ner"
COLUMN_FLAGS = ("text_column", "pair_column", "label_column", "regression")
FILE_FLAGS = ("train_file", "eval_file", "predict_file", *COLUMN_FLAGS)


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    parser, data = make_parser(
        __doc__.splitlines()[0],
        learning_rate=2.4e-5,
        max_seq_length=ClassificationTask.max_seq_length,
        predict_batch_size=32,
    )
    data.add_argument(
        "--task-name",
        type=str.lower,
        choices=(*TASKS, CUSTOM, MULTI_LABEL, NER),
        default=CUSTOM,
        help="custom: your own files; multi-label: your own files with any number of labels per text; ner: your own "
        "files with a tag for each word",
    )
    data.add_argument("--data-dir", type=optional_path, help="folder of the task's files, as distributed")
    data.add_argument(
        "--class-weights",
        choices=("none", "balanced"),
        default="none",
        help="balanced: rare classes count more in the loss, as in scikit-learn",
    )
    files = parser.add_argument_group("your own files (--task-name custom): .tsv, .csv or .jsonl")
    files.add_argument("--eval-file", type=optional_path, help="file to score the model on")
    files.add_argument("--text-column", help="column of the text")
    files.add_argument("--pair-column", help="column of the second text, if the samples are pairs")
    files.add_argument("--label-column", help="column of the class, or of the number for --regression")
    files.add_argument("--regression", action=BooleanFlag, help="labels are numbers to predict, not classes")
    args = parse_fine_tuning(parser, argv)
    check_files(args, parser)
    return args


def check_files(args: Arguments, parser: ArgumentParser) -> None:
    if args.class_weights == "balanced":
        has_classes = args.task_name not in (MULTI_LABEL, NER, "sts-b") and not args.regression
        parser.refuse_without_effect(args, [(("class_weights",), args.do_train and has_classes, "training on classes")])
    if args.max_seq_length < 8:
        parser.error(f"--max-seq-length {args.max_seq_length} leaves no room for texts: give at least 8")
    if args.task_name in TASKS:
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
    if args.text_column is None and args.task_name != NER:
        parser.error("your own file needs --text-column (or give --task-name for a task of GLUE)")
    for flag, file in (("do_train", "train_file"), ("do_eval", "eval_file"), ("do_predict", "predict_file")):
        if getattr(args, flag) != (getattr(args, file) is not None):
            parser.error(f"--{flag.replace('_', '-')} and --{file.replace('_', '-')} go together: give both or neither")
    if args.task_name == MULTI_LABEL and args.regression:
        parser.error("--regression has no effect with --task-name multi-label: leave it out")
    if args.task_name == NER:
        given = [name for name in COLUMN_FLAGS if getattr(args, name)]
        if given:
            parser.error(f"--{given[0].replace('_', '-')} has no effect with --task-name ner: leave it out")
    elif (args.do_train or args.do_eval) != (args.label_column is not None):
        parser.error("--label-column goes together with --do-train and --do-eval")


def make_task(args: Arguments) -> FineTuningTask:
    if args.task_name == NER:
        return TokenClassificationTask(args.max_seq_length, args.train_file, args.eval_file, args.predict_file)
    task = ClassificationTask
    if args.task_name not in TASKS:
        spec = custom_task(args.text_column, args.pair_column, args.label_column or "", args.regression)
        name = "regression" if args.regression else "classification"
        if args.task_name == MULTI_LABEL:
            task, name = MultiLabelTask, MULTI_LABEL
            spec = multi_label_task(args.text_column, args.pair_column, args.label_column or "")
        train_file, eval_files, predict_files = args.train_file, {"": args.eval_file}, {"": args.predict_file}
    else:
        spec, name, folder = TASKS[args.task_name], args.task_name, args.data_dir
        train_file, eval_files = spec.train_file(folder), spec.evaluation_files(folder)
        predict_files = spec.test_files(folder)
    return task(
        spec,
        args.max_seq_length,
        name,
        train_file,
        eval_files if args.do_eval else {},
        predict_files if args.do_predict else {},
        balanced=args.class_weights == "balanced",
    )


def plan_training(args: Arguments, runtime: Runtime) -> TrainingPlan:
    return TrainingSet.open(args, make_task(args), runtime).plan(args, runtime)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    return fine_tuning_main(args, make_task(args), "GLUE")


if __name__ == "__main__":
    run_main(main)
