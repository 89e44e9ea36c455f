#!/usr/bin/env python3
"""Fine-tunes and evaluates BERT on GLUE, SuperGLUE or your own files, and predicts.

    python3 run_glue.py --task-name mrpc --data-dir data/download/glue/MRPC --do-train --do-eval \\
        --init-checkpoint results/bert-base-uncased/phase2 --output-dir results

    python3 run_glue.py --train-file reviews.csv --eval-file held_out.csv \\
        --text-column review --label-column stars \\
        --do-train --do-eval --init-checkpoint MODEL_FOLDER --output-dir results

Checkpoints, scores.json and predictions go to <output-dir>/<model>/<task>. Under torchrun it runs
on several GPUs.
"""

from bert_recipe.utils.errors import handle_uncaught_errors, run_main

if __name__ == "__main__":
    handle_uncaught_errors()  # also of the imports below

import shlex
import sys
from collections.abc import Sequence

from bert_recipe.config import (
    LoaderConfig,
    OptimizerConfig,
    ParallelConfig,
    ScheduleConfig,
    TrainerConfig,
)
from bert_recipe.config.arguments import check_weights, make_run_config, parse_fine_tuning
from bert_recipe.tasks.classification.options import (
    MULTI_LABEL,
    ClassificationOptions,
    FileOptions,
    TaskChoice,
)
from bert_recipe.tasks.classification.specs import TASKS
from bert_recipe.tasks.own_files import DEFAULTS, SplitOptions, check_own_files
from bert_recipe.tasks.reading import NumberReadingOptions
from bert_recipe.tasks.task import TaskOptions
from bert_recipe.utils.command_line import (
    ArgumentParser,
    Arguments,
    flags_of,
    from_flags,
    hyphenated,
)

# Functions import what needs torch, so that --help and errors of the command line do not wait for
# it.

OTHER_PROGRAMS = {"ner": "run_ner.py", "embedding": "run_embeddings.py"}  # by task


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    parser = ArgumentParser(description=__doc__)
    refuse_other_tasks(sys.argv[1:] if argv is None else argv, parser)
    own_files = (
        "your own files (--task-name custom): .csv, .tsv, .jsonl or .parquet, also compressed"
    )
    groups = {
        "which task": flags_of(TaskChoice),
        own_files: flags_of(FileOptions),
        "reading your own files": flags_of(NumberReadingOptions),
        "without --eval-file": flags_of(SplitOptions),
    }
    args = parse_fine_tuning(parser, argv, groups, **DEFAULTS)
    if args.task_name in TASKS:
        check_published_task(args, parser)
    else:
        check_own_files(args, parser)
        check_class_columns(args, parser)
    numbers = args.regression or args.negative_columns or args.task_name == "sts-b"
    if args.label_smoothing and (numbers or args.task_name == MULTI_LABEL):
        parser.error("--label-smoothing is for tasks with one class per text: leave it out")
    if args.frozen_encoder:
        check_frozen(args, parser)
    return args


def check_frozen(args: Arguments, parser: ArgumentParser) -> None:
    """Exits with an error for flags of the encoder's training, which there is not."""
    if args.do_train and args.from_pretrained_params is None:
        parser.error("--frozen-encoder needs an encoder: give --init-checkpoint")
    flags = flags_of(TrainerConfig, LoaderConfig, OptimizerConfig, ScheduleConfig, ParallelConfig)
    names = {flag.name for flag in flags} - {"output_dir", "max_seq_length"}
    given = [args._given[name] for name in names if args.given(name) and args.get(name)]
    if given:
        parser.error(
            f"{min(given)} has no effect with --frozen-encoder, which trains no encoder: leave "
            f"one of them out"
        )


def refuse_other_tasks(argv: Sequence[str], parser: ArgumentParser) -> None:
    """Exits with the command to type if the task has its own program."""
    for place, word in enumerate(argv):
        flag, equals, value = hyphenated(word).partition("=")
        task = value if equals else "".join(argv[place + 1 : place + 2])
        program = OTHER_PROGRAMS.get(task.lower())
        if flag == "--task-name" and program is not None:
            others = [*argv[:place], *argv[place + (1 if equals else 2) :]]
            parser.error(
                f"--task-name {task} has its own program: {program} {shlex.join(others)}".rstrip()
            )


def check_published_task(args: Arguments, parser: ArgumentParser) -> None:
    if args.train_file:
        parser.error("--train-file is for --task-name custom: leave it out, or leave out the task")
    if args.data_dir is None:
        parser.error(
            f"--task-name {args.task_name} needs --data-dir, the folder of its files: python3 "
            f"data/prepare.py download glue --tasks {args.task_name} fetches them"
        )


def check_class_columns(args: Arguments, parser: ArgumentParser) -> None:
    """Texts have a column and, where they are trained on or scored, labels."""
    complaints = []
    if args.text_column is None:
        complaints.append(
            "your own file needs --text-column (or give --task-name for a task of GLUE)"
        )
    labels = args.label_column or []
    if labels and args.negative_columns is not None:
        complaints.append(
            "--negative-columns do not answer --text-column, and --pair-column does: leave out "
            "--label-column"
        )
    if (args.do_train or args.do_eval) and not labels and args.negative_columns is None:
        complaints.append(
            "--do-train and --do-eval need --label-column, the column of the classes or numbers"
        )
    if len(labels) > 1 and args.task_name != MULTI_LABEL:
        complaints.append(
            "several names after --label-column are columns of 0 and 1, one per label: add "
            "--task-name multi-label, or give one name"
        )
    parser.refuse(complaints)


def task_options(args: Arguments) -> TaskOptions:
    return from_flags(ClassificationOptions, args)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    check_weights(args.from_pretrained_params)
    # A fit is one update, which is repeated if it is there.
    changes = {"max_steps": 1, "epochs": None, "resume_from_checkpoint": True}
    config = make_run_config(args, **changes if args.frozen_encoder else {})
    options = task_options(args)
    from bert_recipe.training.frozen_encoder import fit_and_predict
    from bert_recipe.training.trial import run_classifier
    from bert_recipe.training.workflow import run_task

    train_run = fit_and_predict if args.frozen_encoder else run_classifier
    return run_task(config, options, "GLUE", train_run)


if __name__ == "__main__":
    run_main(main)
