"""Tasks of texts: those of GLUE (Wang et al., 2018) and SuperGLUE (2019), and those in your own
files.
"""

from dataclasses import dataclass
from pathlib import Path

LABEL_SEPARATOR = "|"
SUBMISSION_SETS = {"": "", "matched": "-m", "mismatched": "-mm"}  # in names of files


def set_prefix(set_name: str) -> str:
    """What the names of an evaluation set's scores begin with."""
    return f"{set_name}_" if set_name else ""


@dataclass(frozen=True)
class TaskSpec:
    """What distinguishes a task on texts or pairs of texts.

    name: name of the submission file.
    text, pair, label: column names.
    labels: classes in the order of their ids; empty for regression, and for a custom file until its
        labels are known.
    header: columns of training and development files without a header.
    index: column with the sample's name in submissions; by default its number.
    sets: names of the evaluation sets, with which the names of their files end; an empty name if
        there is only one.
    is_custom: a file of the user, whose lines must have as many columns as the header.
    skips_incomplete_lines: skip broken lines in training and development files.
    multi_label: samples have any number of labels.
    label_columns: columns of 0 and 1, one per label, instead of `label`.
    label_separator: between the labels of a cell, as the user says; None: LABEL_SEPARATOR, and
        files of other tools are refused.
    negatives: of a reranker, columns of second texts that do not answer the text, instead of
        `label`; those in `pair` do. It predicts one number, the logit of an answer.
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
    return TaskSpec(
        name,
        text,
        pair,
        "label",
        labels,
        metrics,
        index="idx",
        extension=".jsonl",
        splits=("train", "val", "test"),
    )


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
    metrics: tuple[str, ...] = ("accuracy", "f1_macro")
    if multi_label:
        metrics = ("f1_micro", "f1_macro", "exact_match")
    if regression:
        metrics = CORRELATIONS
    if negatives:
        regression = True
        metrics = ("average_precision",)
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
