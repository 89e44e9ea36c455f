"""Tasks of texts: those of GLUE (Wang et al., 2018) and SuperGLUE (2019), those in files of one's
own, and their flags.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from bert_recipe.utils.command_line import bounded_float, input_path, option, positive_int

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
    training and development files. multi_label: samples have any number of labels. label_columns:
    columns of 0 and 1, one per label, instead of `label`. label_separator: between the labels of a
    cell, as the user says; None: LABEL_SEPARATOR, and files of other tools are refused. negatives:
    of a reranker, columns of second texts that do not answer the text, instead of `label`; those in
    `pair` do. It predicts one number, the logit of an answer.
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
    label_columns: tuple[str, ...] = ()
    label_separator: str | None = None
    negatives: tuple[str, ...] = ()

    @property
    def text_columns(self) -> tuple[str, ...]:
        return (self.text,) if self.pair is None else (self.text, self.pair)

    @property
    def separator(self) -> str:
        return self.label_separator or LABEL_SEPARATOR

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


BINARY = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")
MNLI = ("entailment", "neutral", "contradiction")
NEGATIVE, POSITIVE = BINARY
CB = ("entailment", "contradiction", "neutral")
TRUTH = ("false", "true")
COLA = ("source", "label", "mark", "sentence")
ACCURACY, F1, CORRELATIONS = ("accuracy",), ("accuracy", "f1"), ("pearson", "spearman")
TASKS = {
    "cola": TaskSpec(
        "CoLA", "sentence", None, "label", BINARY, ("matthews_correlation",), header=COLA
    ),
    "sst-2": TaskSpec("SST-2", "sentence", None, "label", BINARY, ACCURACY),
    "mrpc": TaskSpec("MRPC", "#1 String", "#2 String", "Quality", BINARY, F1),
    "sts-b": TaskSpec(
        "STS-B", "sentence1", "sentence2", "score", (), CORRELATIONS, True, (0.0, 5.0)
    ),
    "qqp": TaskSpec(
        "QQP", "question1", "question2", "is_duplicate", BINARY, F1, skips_incomplete_lines=True
    ),
    "mnli": TaskSpec(
        "MNLI",
        "sentence1",
        "sentence2",
        "gold_label",
        MNLI,
        ACCURACY,
        sets=("matched", "mismatched"),
    ),
    "qnli": TaskSpec("QNLI", "question", "sentence", "label", ENTAILMENT, ACCURACY),
    "rte": TaskSpec("RTE", "sentence1", "sentence2", "label", ENTAILMENT, ACCURACY),
    "wnli": TaskSpec("WNLI", "sentence1", "sentence2", "label", BINARY, ACCURACY),
    "boolq": superglue("BoolQ", "question", "passage", TRUTH, ACCURACY),
    "cb": superglue("CB", "premise", "hypothesis", CB, ("accuracy", "f1_macro")),
    "wic": superglue("WiC", "sentence1", "sentence2", TRUTH, ACCURACY),  # the word is not marked
    "superglue-rte": superglue("RTE", "premise", "hypothesis", ENTAILMENT, ACCURACY),
}


CUSTOM, MULTI_LABEL, NER, EMBEDDING = "custom", "multi-label", "ner", "embedding"
PUBLISHED = tuple(f"--task-name {name}" for name in TASKS)
WITHOUT_COLUMNS = (*PUBLISHED, "--task-name ner")
SPLIT = ("--do-train", "--do-eval")
UNSPLIT = (*PUBLISHED, "--task-name embedding", "--eval-file")
NUMBERS = ("--task-name embedding", "--regression", "--negative-columns")
UNWEIGHTED = ("--task-name ner", "--task-name sts-b", *NUMBERS)


HUGGING_FACE_NAMES = {"sst2": "sst-2", "stsb": "sts-b"}


def task_name(text: str) -> str:
    name = text.lower()
    return HUGGING_FACE_NAMES.get(name, name)


@dataclass(frozen=True)
class TaskOptions:
    """Which task run_glue.py is run for."""

    task_name: str = option(
        "--task-name",
        (*TASKS, CUSTOM, MULTI_LABEL, NER, EMBEDDING),
        CUSTOM,
        "custom: your own files; multi-label: your own files with any number of labels per text; "
        "ner: your own files "
        "with a tag for each word; embedding: pairs of texts with similar meaning, or with a score",
        options={"type": task_name},
    )
    data_dir: Path | None = option(
        "--data-dir",
        input_path,
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
    tune_thresholds: bool = option(
        "--tune-thresholds",
        bool,
        False,
        "choose the probability above which a text has a label on the development file, for each "
        "label by its F1, and store it with the model",
        ("--task-name multi-label", "--do-train", "--do-eval"),
        ("--benchmark",),
    )


def num_folds(text: str) -> int:
    count = positive_int(text)
    if count < 2:
        raise argparse.ArgumentTypeError(f"expected at least 2, not {text}")
    return count


@dataclass(frozen=True)
class SplitOptions:
    """Development samples from the training file."""

    eval_fraction: float | None = option(
        "--eval-fraction",
        bounded_float(0, 0.5, exclusive=True),
        None,
        "hold out this share of the training file, of each class, and score that",
        SPLIT,
        (*UNSPLIT, "--num-folds"),
        result=True,
    )
    num_folds: int | None = option(
        "--num-folds",
        num_folds,
        None,
        "divide the training file into so many parts, hold out each in turn, and give mean and "
        "standard deviation of the scores",
        SPLIT,
        (*UNSPLIT, "--num-seeds", "--benchmark"),
        result=True,
    )


def label_separator(text: str) -> str:
    separator = text.replace("\\n", "\n").replace("\\t", "\t")
    if not separator:
        raise argparse.ArgumentTypeError("the separator is empty")
    return separator


@dataclass(frozen=True)
class FileOptions:
    """The user's own files and their columns."""

    eval_file: Path | None = option(
        "--eval-file --validation-file",
        input_path,
        None,
        "file to score the model on",
        excludes=PUBLISHED,
    )
    predict_file: Path | None = option(
        "--predict-file --test-file",
        input_path,
        None,
        "file to predict",
        ("--do-eval or --do-predict",),
        PUBLISHED,
    )
    text_column: str | None = option(
        "--text-column --text-column-name --text-column-names",
        str,
        None,
        "column of the text, or with --task-name ner of the words",
        excludes=PUBLISHED,
    )
    pair_column: str | None = option(
        "--pair-column",
        str,
        None,
        ("column of the second text, if the samples are pairs"),
        ("--text-column",),
        WITHOUT_COLUMNS,
    )
    label_column: list[str] | None = option(
        "--label-column --label-column-name",
        str,
        None,
        "column of the class, or of the number for --regression; with --task-name multi-label also "
        "several columns of 0 and 1, one per label; with --task-name ner that of tags, a number "
        "from 1 where columns have no names; with --embedding-loss margin-mse the scores of "
        "--pair-column and of each of --negative-columns",
        ("--text-column or --task-name ner", "--do-train or --do-eval"),
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
        (*WITHOUT_COLUMNS, "--task-name multi-label", "--task-name embedding"),
    )


def custom_spec(
    text: str,
    pair: str | None,
    label: str,
    regression: bool = False,
    multi_label: bool = False,
    label_columns: tuple[str, ...] = (),
    label_separator: str | None = None,
    negatives: tuple[str, ...] = (),
) -> TaskSpec:
    """The spec of a custom file, with the columns given by the flags. negatives: see TaskSpec."""
    metrics = ("f1_micro", "f1_macro", "exact_match") if multi_label else ("accuracy", "f1_macro")
    if regression:
        metrics = CORRELATIONS
    if negatives:
        regression, metrics = True, ("average_precision",)
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
        label_columns=label_columns,
        label_separator=label_separator,
        negatives=negatives,
    )
