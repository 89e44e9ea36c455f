"""The flags of run_glue.py: tasks of GLUE and SuperGLUE, and the user's own files of classes,
labels or numbers.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from bert_recipe.tasks.classification.specs import LABEL_SEPARATOR, TASKS
from bert_recipe.tasks.own_files import OwnFileOptions
from bert_recipe.utils.command_line import option, optional_path

CUSTOM, MULTI_LABEL = "custom", "multi-label"
PUBLISHED = tuple(f"--task-name {name}" for name in TASKS)
UNWEIGHTED = ("--task-name sts-b", "--regression", "--negative-columns")


HUGGING_FACE_NAMES = {"sst2": "sst-2", "stsb": "sts-b"}


def task_name(text: str) -> str:
    name = text.lower()
    return HUGGING_FACE_NAMES.get(name, name)


@dataclass(frozen=True)
class TaskOptions:
    """Which task run_glue.py is run for."""

    task_name: str = option(
        "--task-name",
        (*TASKS, CUSTOM, MULTI_LABEL),
        CUSTOM,
        "custom: your own files; multi-label: your own files with any number of labels per text",
        options={"type": task_name},
    )
    data_dir: Path | None = option(
        "--data-dir",
        optional_path,
        None,
        ("folder of the task's files, as distributed"),
        (" or ".join(PUBLISHED),),
    )
    class_weights: str = option(
        "--class-weights",
        ("none", "balanced"),
        "none",
        "balanced: rare classes or labels count more in the loss, as in scikit-learn, at most ten "
        "times",
        ("--do-train",),
        UNWEIGHTED,
        result=True,
    )
    frozen_encoder: bool = option(
        "--frozen-encoder",
        bool,
        False,
        "for few labels: train no encoder, and fit scikit-learn's logistic regression to its "
        "vectors, in seconds; for classes of texts or pairs",
        ("--do-train",),
        (*UNWEIGHTED, "--task-name multi-label", "--from-checkpoint", "--benchmark"),
    )


def label_separator(text: str) -> str:
    separator = text.replace("\\n", "\n").replace("\\t", "\t")
    if not separator:
        raise argparse.ArgumentTypeError("the separator is empty")
    return separator


@dataclass(frozen=True)
class FileOptions(OwnFileOptions):
    """The user's own files and their columns."""

    text_column: str | None = option(
        "--text-column --text-column-name --text-column-names",
        str,
        None,
        "column of the text",
        excludes=PUBLISHED,
    )
    pair_column: str | None = option(
        "--pair-column",
        str,
        None,
        ("column of the second text, if the samples are pairs"),
        ("--text-column",),
        PUBLISHED,
    )
    negative_columns: list[str] | None = option(
        "--negative-columns",
        str,
        None,
        "columns of texts that are similar to --pair-column, but wrong: trains a reranker, a model "
        "of pairs with one number",
        ("--pair-column", "--do-train or --do-eval"),
        ("--regression", "--task-name multi-label"),
        {"nargs": "+", "metavar": "NAME"},
    )
    label_column: list[str] | None = option(
        "--label-column --label-column-name",
        str,
        None,
        "column of the class, or of the number for --regression; with --task-name multi-label also "
        "several columns of 0 and 1, one per label",
        ("--text-column", "--do-train or --do-eval"),
        PUBLISHED,
        {"nargs": "+"},
    )
    label_separator: str | None = option(
        "--label-separator",
        label_separator,
        None,
        f"what divides the labels of a cell, such as ';' or '\\n'; by default {LABEL_SEPARATOR}",
        ("--task-name multi-label",),
        result=True,
    )
    regression: bool = option(
        "--regression",
        bool,
        False,
        ("labels are numbers to predict, not classes"),
        ("--text-column",),
        (*PUBLISHED, "--task-name multi-label"),
    )
