"""What the fine-tuning programs that read the user's own files share: flags and their checks. Does
not import torch, so that parsing is fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_recipe.utils.command_line import (
    ArgumentParser,
    Arguments,
    bounded_float,
    bounded_int,
    option,
    optional_path,
    value_of,
)

if TYPE_CHECKING:
    from bert_recipe.tasks.splits import Split

MAX_SEQ_LENGTH = 128  # by default
DEFAULTS: dict[str, Any] = {"max_seq_length": MAX_SEQ_LENGTH}
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
    seed: int = value_of("--seed", 42)
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
    group_column: str | None = option(
        "--group-column",
        str,
        None,
        "column of the group of a row, such as its document, patient or author: rows of one group "
        "are held out together, so that a model is scored on groups that it has not seen; in files "
        "of columns without names its number",
        ("--eval-fraction or --num-folds",),
        PUBLISHED_TASK,
        result=True,
    )

    def split(self, fold: int = 0) -> Split | None:
        """What is held out of the training file, or None."""
        from bert_recipe.tasks.splits import Split

        if not (self.eval_fraction or self.num_folds):
            return None
        return Split(self.eval_fraction, self.num_folds, self.seed, fold, self.group_column)


def check_own_files(args: Arguments, parser: ArgumentParser) -> None:
    """Exits with an error unless there is a file for each thing to do, and no other; a part of the
    training file may be scored. Nor may a column have two meanings, such as a text that is its own
    label: scores would be perfect.
    """
    advice = "give both or neither"
    complaints = []
    if args.do_train != (args.train_file is not None):
        complaints.append(f"--do-train and --train-file go together: {advice}")
    can_split = "eval_fraction" in args
    is_split = can_split and bool(args.eval_fraction or args.num_folds)
    has_eval_rows = args.eval_file is not None or is_split
    if args.do_eval != has_eval_rows:
        split_advice = ""
        if args.do_train and can_split:
            split_advice = ", or --eval-fraction 0.1 to hold out a part of the training file"
        complaints.append(f"--do-eval and --eval-file go together: {advice}{split_advice}")
    if args.get("do_predict", False) != (args.get("predict_file") is not None):
        complaints.append(f"--do-predict and --predict-file go together: {advice}")
    columns: list[str] = []
    for name in ("text_column", "pair_column", "label_column", "negative_columns"):
        value = args.get(name) or []
        columns += [value] if isinstance(value, str) else value
    repeated = [column for column in columns if columns.count(column) > 1]
    if repeated:
        complaints.append(f"column {repeated[0]!r} is given twice: give each column once")
    parser.refuse(complaints)
