"""GLUE (Wang et al., 2018) and SuperGLUE (2019) tasks, and the samples in their files and in custom
ones.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.command_line import option, optional_path
from utils.errors import UserError
from utils.progress import print_line
from utils.tables import TextFile, read_rows

MAX_SEQ_LENGTH = 128  # by default
LABEL_SEPARATOR = "|"


@dataclass(frozen=True)
class TaskSpec:
    """What distinguishes a task on texts or pairs of texts.

    name: name of the submission file. text, pair, label: column names. labels: classes in the order
    of their ids; empty for regression, and for a custom file until its labels are known. header:
    columns of training and development files without a header. index: column with the sample's name
    in submissions; by default its number. sets: names of the evaluation sets, with which the names
    of their files end; an empty name if there is only one. is_custom: a file of the user, whose
    lines must have as many columns as the header. skips_incomplete_lines: skip broken lines in
    training and development files. multi_label: samples have any number of labels, separated by
    LABEL_SEPARATOR.
    """

    name: str
    text: str
    pair: str | None
    label: str
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    regression: bool = False
    score_range: tuple[float, float] | None = None
    header: tuple[str, ...] | None = None
    index: str | None = None
    extension: str = ".tsv"
    splits: tuple[str, str, str] = ("train", "dev", "test")
    sets: tuple[str, ...] = ("",)
    is_custom: bool = False
    skips_incomplete_lines: bool = False
    multi_label: bool = False

    def train_file(self, folder: Path) -> Path:
        return folder / (self.splits[0] + self.extension)

    def evaluation_files(self, folder: Path) -> dict[str, Path]:
        """Development files by the name of the set."""
        return self._files(folder, self.splits[1])

    def test_files(self, folder: Path) -> dict[str, Path]:
        return self._files(folder, self.splits[2])

    def _files(self, folder: Path, split: str) -> dict[str, Path]:
        return {
            name: folder / ("_".join(filter(None, (split, name))) + self.extension)
            for name in self.sets
        }


def superglue(
    name: str, text: str, pair: str, labels: tuple[str, ...], metrics: tuple[str, ...]
) -> TaskSpec:
    options = {"index": "idx", "extension": ".jsonl", "splits": ("train", "val", "test")}
    return TaskSpec(name, text, pair, "label", labels, metrics, **options)


# fmt: off
BINARY, ENTAILMENT, MNLI = ("0", "1"), ("entailment", "not_entailment"), ("entailment", "neutral", "contradiction")
CB, TRUTH, COLA = ("entailment", "contradiction", "neutral"), ("false", "true"), ("source", "label", "mark", "sentence")
ACCURACY, F1, CORRELATIONS = ("accuracy",), ("accuracy", "f1"), ("pearson", "spearman")
TASKS = {
    "cola": TaskSpec("CoLA", "sentence", None, "label", BINARY, ("matthews_correlation",), header=COLA),
    "sst-2": TaskSpec("SST-2", "sentence", None, "label", BINARY, ACCURACY),
    "mrpc": TaskSpec("MRPC", "#1 String", "#2 String", "Quality", BINARY, F1),
    "sts-b": TaskSpec("STS-B", "sentence1", "sentence2", "score", (), CORRELATIONS, True, (0.0, 5.0)),
    "qqp": TaskSpec("QQP", "question1", "question2", "is_duplicate", BINARY, F1, skips_incomplete_lines=True),
    "mnli": TaskSpec("MNLI", "sentence1", "sentence2", "gold_label", MNLI, ACCURACY, sets=("matched", "mismatched")),
    "qnli": TaskSpec("QNLI", "question", "sentence", "label", ENTAILMENT, ACCURACY),
    "rte": TaskSpec("RTE", "sentence1", "sentence2", "label", ENTAILMENT, ACCURACY),
    "wnli": TaskSpec("WNLI", "sentence1", "sentence2", "label", BINARY, ACCURACY),
    "boolq": superglue("BoolQ", "question", "passage", TRUTH, ACCURACY),
    "cb": superglue("CB", "premise", "hypothesis", CB, ("accuracy", "f1_macro")),
    "superglue-rte": superglue("RTE", "premise", "hypothesis", ENTAILMENT, ACCURACY),
}


CUSTOM, MULTI_LABEL, NER, EMBEDDING = "custom", "multi-label", "ner", "embedding"
PUBLISHED = tuple(f"--task-name {name}" for name in TASKS)
WITHOUT_COLUMNS = (*PUBLISHED, "--task-name ner")
NOT_CLASSES = ("--task-name multi-label", "--task-name ner", "--task-name embedding", "--regression")


@dataclass(frozen=True)
class TaskOptions:
    """Which task run_glue.py is run for."""

    task_name: str = option("--task-name", (*TASKS, CUSTOM, MULTI_LABEL, NER, EMBEDDING), CUSTOM,
        "custom: your own files; multi-label: your own files with any number of labels per text; "
        "ner: your own files "
        "with a tag for each word; embedding: pairs of texts with similar meaning, or with a score",
        options={"type": str.lower})
    data_dir: Path | None = option("--data-dir", optional_path, None, (
        "folder of the task's files, "
        "as distributed"
    ),
        (" or ".join(PUBLISHED),))
    class_weights: str = option("--class-weights", ("none", "balanced"), "none",
        "balanced: rare classes count more in the loss, as in scikit-learn", ("--do-train",),
        (*NOT_CLASSES, "--task-name sts-b"), result=True)


@dataclass(frozen=True)
class FileOptions:
    """The user's own files and their columns."""

    eval_file: Path | None = option("--eval-file --validation-file", optional_path, None, "file to score the model on",
        excludes=PUBLISHED)
    predict_file: Path | None = option("--predict-file --test-file", optional_path, None, "file to predict",
        ("--do-eval or --do-predict",), PUBLISHED)
    text_column: str | None = option("--text-column --text-column-name --text-column-names", str, None,
        "column of the text", excludes=WITHOUT_COLUMNS)
    pair_column: str | None = option("--pair-column", str, None, (
        "column of the second text, if "
        "the samples are pairs"
    ),
        ("--text-column",), WITHOUT_COLUMNS)
    label_column: str | None = option("--label-column --label-column-name", str, None,
        "column of the class, or of the number for --regression", ("--text-column", "--do-train or --do-eval"),
        WITHOUT_COLUMNS)
    regression: bool = option("--regression", bool, False, (
        "labels are numbers to predict, not "
        "classes"
    ),
        ("--text-column",), (*WITHOUT_COLUMNS, *NOT_CLASSES[:-1]))
# fmt: on


def custom_spec(
    text: str, pair: str | None, label: str, regression: bool = False, multi_label: bool = False
) -> TaskSpec:
    """The spec of a custom file, with the columns given by the flags."""
    metrics = ("f1_micro", "f1_macro", "exact_match") if multi_label else ("accuracy", "f1_macro")
    metrics = CORRELATIONS if regression else metrics
    return TaskSpec(
        "predictions",
        text,
        pair,
        label,
        (),
        metrics,
        regression,
        is_custom=True,
        multi_label=multi_label,
    )


@dataclass(frozen=True)
class Examples:
    """The rows of a file. `pairs` is None for single texts, `labels` for files to predict; `lines`
    are line numbers.
    """

    path: Path
    texts: list[str]
    pairs: list[str] | None
    labels: list[str] | None
    indices: list[str]
    lines: list[int]

    def __len__(self) -> int:
        return len(self.texts)


def read_examples(path: Path, spec: TaskSpec, labelled: bool, is_test: bool = False) -> Examples:
    """Reads the texts of a file, and the labels if `labelled`. Raises UserError naming the bad
    line.
    """
    wanted = [
        name
        for name in (spec.text, spec.pair, spec.label if labelled else None)
        if name is not None
    ]
    skips = spec.skips_incomplete_lines and not is_test
    columns: dict[str, list[str]] = {name: [] for name in wanted}
    indices, lines, skipped, file = {}, [], 0, TextFile(path)
    for line, row in read_rows(file, wanted, None if is_test else spec.header, spec.is_custom):
        where, missing = file.where(line), [name for name in wanted if name not in row]
        if missing and skips:
            skipped += 1
            continue
        if missing:
            raise UserError(
                f"{where} has no {missing[0]!r}: correct the line, or check the column's name"
            )
        for name in wanted:
            convert = to_text if name != spec.label else to_labels if spec.multi_label else to_label
            columns[name].append(convert(row[name], f"{where}: {name!r}"))
        index = row.get(spec.index, len(lines))
        if type(index) is not int or index in indices:
            raise UserError(
                f"{where}: {spec.index!r} is {index!r}, expected a unique whole number: correct it"
            )
        indices[index] = str(index)
        lines.append(line)
    if skipped:
        print_line(f"note: {path}: {skipped} incomplete lines are skipped")
    if not lines:
        raise UserError(f"{path} holds no samples: check the file")
    for name in wanted:
        if name != spec.label and not any(map(str.strip, columns[name])):
            raise UserError(
                f"{path}: the column {name!r} is empty in all rows: check the column's name"
            )
    labels = columns[spec.label] if labelled else None
    return Examples(
        path, columns[spec.text], columns.get(spec.pair), labels, list(indices.values()), lines
    )


def to_labels(value: Any, where: str) -> str:
    """Converts the labels of a text, a list or a string, to a string with LABEL_SEPARATOR between
    them.
    """
    labels = (
        []
        if value in (None, "")
        else value.split(LABEL_SEPARATOR)
        if isinstance(value, str)
        else value
    )
    if not isinstance(labels, list):
        raise UserError(
            f"{where} is {value!r}, expected labels with {LABEL_SEPARATOR!r} between them, or a "
            f"list"
        )
    labels = [to_label(label, where) for label in labels]
    if wrong := [label for label in labels if LABEL_SEPARATOR in label]:
        raise UserError(
            f"{where} has the label {wrong[0]!r}, and {LABEL_SEPARATOR!r} separates labels: rename "
            f"it"
        )
    return LABEL_SEPARATOR.join(labels)


def to_label(value: Any, where: str) -> str:
    """Converts a label to a string. In JSON it may also be a boolean or a number."""
    if isinstance(value, bool | int | float) and -math.inf < value < math.inf:
        return json.dumps(value)
    if isinstance(value, str) and value and value == value.strip():
        return value
    raise UserError(
        f"{where} is {value!r}, expected a label without space around it: correct the line"
    )


def to_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where} is {value!r}, expected a string: correct the line")
    return value
