"""What the fine-tuning programs that read the user's own files share: flags, their checks, and the
options that tasks have in common. Does not import torch, so that parsing is fast.
"""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from bert_recipe.config import LearningOptions
from bert_recipe.utils.command_line import (
    ArgumentParser,
    Arguments,
    bounded_float,
    bounded_int,
    from_flags,
    option,
    optional_path,
)

MAX_SEQ_LENGTH = 128  # by default
DEFAULTS = {"learning_rate": 2.4e-5, "max_seq_length": MAX_SEQ_LENGTH}
PUBLISHED_TASK = ("--data-dir",)  # has files to score and to predict
SPLIT = ("--do-train", "--do-eval")


@dataclass(frozen=True)
class ScoredFileOptions:
    """The user's own file for development."""

    eval_file: Path | None = option(
        "--eval-file --validation-file",
        optional_path,
        None,
        "file to score the model on",
        excludes=PUBLISHED_TASK,
    )


@dataclass(frozen=True)
class OwnFileOptions(ScoredFileOptions):
    """The user's own files besides --train-file."""

    predict_file: Path | None = option(
        "--predict-file --test-file",
        optional_path,
        None,
        "file to predict",
        ("--do-eval or --do-predict",),
        PUBLISHED_TASK,
    )


@dataclass(frozen=True)
class SplitOptions:
    """Development samples from the training file."""

    eval_fraction: float | None = option(
        "--eval-fraction",
        bounded_float(0, 0.5, exclusive=True),
        None,
        "hold out this share of the training file, of each class, and score that; equal texts "
        "stay together",
        SPLIT,
        (*PUBLISHED_TASK, "--eval-file", "--num-folds"),
        result=True,
    )
    num_folds: int | None = option(
        "--num-folds",
        bounded_int(2, 2**31 - 1),
        None,
        "cross-validation: divide the training file into so many parts, hold out each in turn, and "
        "give mean and standard deviation of the scores",
        SPLIT,
        (*PUBLISHED_TASK, "--eval-file", "--num-seeds", "--benchmark"),
        result=True,
    )


def check_own_files(args: Arguments, parser: ArgumentParser) -> None:
    """There is a file for each thing to do, and no other; parts of the training file are scored.
    No column has two meanings, such as a text that is its own label: scores would be perfect.
    """
    can_split = "eval_fraction" in args
    is_split = can_split and bool(args.eval_fraction or args.num_folds)
    is_predicted, predict_file = args.get("do_predict", False), args.get("predict_file")
    files = {
        "--do-train": ("--train-file", args.do_train, args.train_file is not None),
        "--do-eval": ("--eval-file", args.do_eval, args.eval_file is not None or is_split),
        "--do-predict": ("--predict-file", is_predicted, predict_file is not None),
    }
    complaints = []
    for do_flag, (file_flag, is_done, is_given) in files.items():
        if is_done != is_given:
            advice = "give both or neither"
            if do_flag == "--do-eval" and args.do_train and can_split:
                advice += ", or --eval-fraction 0.1 to hold out a part of the training file"
            complaints.append(f"{do_flag} and {file_flag} go together: {advice}")
    names = ("text_column", "pair_column", "label_column", "negative_columns")
    given = [args.get(name) or [] for name in names]
    columns = [*chain.from_iterable([each] if isinstance(each, str) else each for each in given)]
    repeated = [column for column in columns if columns.count(column) > 1]
    if repeated:
        complaints.append(f"column {repeated[0]!r} is given twice: give each column once")
    parser.refuse(complaints)


def learning_options(args: Arguments) -> dict[str, Any]:
    """The options of tasks that can hold out a part of the training file."""
    from bert_recipe.tasks.splits import Split

    options = vars(from_flags(LearningOptions, args))
    if args.eval_fraction or args.num_folds:
        options["split"] = Split(args.eval_fraction, args.num_folds, args.seed)
    return options
