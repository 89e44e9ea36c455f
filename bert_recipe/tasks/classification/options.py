"""The flags of run_glue.py: tasks of GLUE and SuperGLUE, and the user's own files of classes,
labels or numbers.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bert_recipe.tasks.classification.specs import (
    LABEL_SEPARATOR,
    TASKS,
    TaskSpec,
    custom_spec,
    set_prefix,
)
from bert_recipe.tasks.fine_tuning import FineTuningOptions
from bert_recipe.tasks.own_files import OwnFileOptions, SplitOptions
from bert_recipe.tasks.reading import NumberReadingOptions
from bert_recipe.utils.command_line import option, optional_path

CUSTOM, MULTI_LABEL = "custom", "multi-label"
PUBLISHED = tuple(f"--task-name {name}" for name in TASKS)
UNWEIGHTED = ("--task-name sts-b", "--regression", "--negative-columns")


HUGGING_FACE_NAMES = {"sst2": "sst-2", "stsb": "sts-b"}


def task_name(text: str) -> str:
    name = text.lower()
    return HUGGING_FACE_NAMES.get(name, name)


@dataclass(frozen=True)
class TaskChoice:
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
    shrink_outputs: bool = option(
        "--shrink-outputs",
        bool,
        True,
        "where one class has 60% or more of 100 to 1,999 rows: first train on four fifths of them "
        "and measure on the rest how reliable the outputs are, with few rows up to five times; "
        "then train on all, and draw the outputs towards the class shares if they are not "
        "reliable; --no-shrink-outputs leaves that out",
        ("--do-train",),
        (
            *UNWEIGHTED,
            "--class-weights balanced",
            "--group-column",
            "--frozen-encoder",
            "--task-name multi-label",
            "--eval-steps",
            "--benchmark",
        ),
        result=True,
    )
    frozen_encoder: bool = option(
        "--frozen-encoder",
        bool,
        False,
        "for few labels: train no encoder, and fit scikit-learn's logistic regression, or ridge "
        "regression for numbers, to its vectors, in seconds; the two vectors of pairs are compared",
        ("--do-train",),
        ("--negative-columns", "--from-checkpoint", "--benchmark"),
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


@dataclass(frozen=True)
class ClassificationOptions(
    TaskChoice, FileOptions, NumberReadingOptions, SplitOptions, FineTuningOptions
):
    """What the flags of run_glue.py say."""

    task_path = "classification.task.ClassificationTask"
    head = "sequence_classification"

    @property
    def is_published(self) -> bool:
        """Whether the task is one of GLUE or SuperGLUE, with its own files."""
        return self.task_name in TASKS

    @property
    def name(self) -> str:
        """Of the task, and of the folder for results."""
        if self.task_name != CUSTOM:
            return self.task_name
        if self.negative_columns is not None:
            return "reranker"
        return "regression" if self.regression else "classification"

    @property
    def spec(self) -> TaskSpec:
        """Columns and metrics; of the user's own files without labels."""
        if self.is_published:
            return TASKS[self.task_name]
        label_columns = tuple(self.label_column or ())
        return custom_spec(
            self.text_column or "",
            self.pair_column,
            next(iter(label_columns), ""),
            regression=self.regression,
            multi_label=self.task_name == MULTI_LABEL,
            label_columns=label_columns if len(label_columns) > 1 else (),
            label_separator=self.label_separator,
            negatives=tuple(self.negative_columns or ()),
        )

    @property
    def score_names(self) -> tuple[str, ...]:
        spec = self.spec
        prefixes = [set_prefix(name) for name in spec.sets]
        return tuple(prefix + name for prefix in prefixes for name in spec.metrics)

    @property
    def training_file(self) -> Path:
        return self.spec.train_file(self.folder) if self.is_published else super().training_file

    @property
    def folder(self) -> Path:
        """Of a published task's files."""
        return self.data_dir or Path()

    @property
    def eval_files(self) -> Mapping[str, Path]:
        """Files to score, by the name of the set; with a split the file to train on."""
        if not self.do_eval:
            return {}
        if self.is_published:
            return self.spec.evaluation_files(self.folder)
        return {"": self.eval_file or self.training_file}

    @property
    def predict_files(self) -> Mapping[str, Path]:
        """Files to predict."""
        if not self.do_predict:
            return {}
        if self.is_published:
            return self.spec.test_files(self.folder)
        return {} if self.predict_file is None else {"": self.predict_file}
