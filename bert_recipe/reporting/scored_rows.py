"""The rows that a run has scored, as the tasks write them to the run's folder.

Legend: n rows, C classes.
"""

import csv
import io
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bert_recipe.checkpoint.record import SCORES_FILE, read_record
from bert_recipe.reporting.paired_scores import (
    MeanScore,
    OrderScore,
    PairScore,
    RowScore,
    SumScore,
)
from bert_recipe.tasks.classification.specs import (
    LABEL_SEPARATOR,
    SUBMISSION_SETS,
    set_prefix,
)
from bert_recipe.tasks.embeddings.retrieval import RETRIEVAL_SCORES
from bert_recipe.tasks.ner.scores import ENTITY_SCORES, entity_counts, f1
from bert_recipe.tasks.ner.tags import entities, has_classes
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import read_json
from bert_recipe.utils.tables import read_rows
from bert_recipe.utils.text_files import MAX_LINE, TextFile

STEM = "eval_predictions"
PROBABILITY = "probability "  # before the label, in the names of columns
NER_HEADER = ["word", "tag", "prediction", "probability"]
# Of texts with entities, there is also a table of their tokens, which differ between models.
SUFFIXES = (".jsonl", ".csv", ".tsv", ".parquet")
Key = tuple[str, ...]


@dataclass(frozen=True)
class Outcomes:
    """What a model said of each row [n], to be read. goodness_n: more is better, such as 1 for the
    right class.
    """

    texts: Sequence[str]
    truths: Sequence[str]
    predictions: Sequence[str]
    goodness_n: np.ndarray

    def in_order(self, order: np.ndarray) -> "Outcomes":
        columns = (self.texts, self.truths, self.predictions)
        texts, truths, predictions = ([column[row] for row in order] for column in columns)
        return Outcomes(texts, truths, predictions, self.goodness_n[order])


@dataclass(frozen=True)
class ScoredRows:
    """The rows of a file with labels and what a model predicted.

    keys [n]: texts and labels of the rows, in which rows are sorted.
    scores: by name.
    probabilities_nC, labels_n: of classes.
    """

    keys: list[Key]
    scores: Mapping[str, RowScore]
    outcomes: Outcomes
    probabilities_nC: np.ndarray | None = None
    labels_n: np.ndarray | None = None


Cells = Mapping[str, list[str]]  # by column


def read_scored_rows(folders: Sequence[Path]) -> dict[str, ScoredRows]:
    """The rows of a run by the name of the evaluation set, which is empty if there is only one.
    folders: of the run, or of its folds, which together are one set.
    """
    files = [scored_files(folder) for folder in folders]
    return {
        set_name: read_set([of_folder[set_name] for of_folder in files], set_prefix(set_name))
        for set_name in files[0]
    }


def scored_files(folder: Path) -> dict[str, Path]:
    """The files with scored rows of a run, by the names of the evaluation sets."""
    files: dict[str, Path] = {}
    for set_name, ending in SUBMISSION_SETS.items():
        paths = [folder / f"{STEM}{ending}{suffix}" for suffix in SUFFIXES]
        if path := next(filter(Path.is_file, paths), None):
            files[set_name] = path
    return files


def read_set(paths: Sequence[Path], prefix: str) -> ScoredRows:
    names: dict[str, None] = {}
    for path in paths:
        scores = read_json(path.parent / SCORES_FILE, "the scores")
        # Those that are not defined for the rows are null, such as the F1 of a fold without any.
        names |= {
            name.removeprefix(prefix): None
            for name, value in scores.items()
            if name.startswith(prefix) and isinstance(value, int | float)
        }
    try:
        if paths[0].suffix in (".jsonl", ".parquet"):
            rows = [row for path in paths for _, row in read_rows(TextFile(path))]
            if not {"text", "prediction"} <= rows[0].keys():
                return rows_of_json(rows)
            columns: Cells = {name: [str(row[name]) for row in rows] for name in rows[0]}
        else:
            tables = [read_table(path) for path in paths]
            if tables[0][0] == NER_HEADER:
                return rows_of_words(tables)
            columns = join_tables(tables)
        return rows_of_texts(columns, [*names], paths[0].parent)
    except (csv.Error, KeyError, ValueError, IndexError, TypeError, RecursionError) as error:
        raise UserError(
            f"{paths[0]} is not what --do-eval writes ({type(error).__name__}: {error}): score the "
            f"model again"
        ) from error


def read_table(path: Path) -> list[list[str]]:
    """The rows of a CSV or TSV file, the header first."""
    csv.field_size_limit(MAX_LINE)
    text = path.read_bytes().decode("utf-8-sig")
    # CSV's delimiter is the character after `text`, the name of its first column.
    delimiter = text[len("text")] if path.suffix == ".csv" else "\t"
    return list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))


def sorted_rows(
    keys: Sequence[Key],
    make_scores: Callable[[np.ndarray], Mapping[str, RowScore]],
    outcomes: Outcomes,
) -> ScoredRows:
    """The rows of a file in the order of their keys.

    make_scores: takes that order.
    outcomes: not yet in it.
    """
    order = sort_order(keys)
    keys = [keys[place] for place in order]
    return ScoredRows(keys, make_scores(order), outcomes.in_order(order))


def sort_order(keys: Sequence[Key]) -> np.ndarray:
    return np.array(sorted(range(len(keys)), key=keys.__getitem__))


def rows_of_json(rows: list[dict[str, Any]]) -> ScoredRows:
    """SQuAD's questions, queries of retrieval, or texts with entities."""
    if "entities" in rows[0]:
        return rows_of_spans(rows)
    names = [*RETRIEVAL_SCORES, "exact_match", "exact", "f1"]
    names = [name for name in names if name in rows[0]]
    contents = ("id", "question", "context", "answers", "query", "positives", "corpus")
    keys = [tuple(json.dumps(row[name]) for name in contents if name in row) for row in rows]

    def scores(order: np.ndarray) -> dict[str, RowScore]:
        return {name: MeanScore(np.array([row[name] for row in rows])[order]) for name in names}

    main = "f1" if "f1" in names else names[0]
    outcomes = Outcomes(
        [row.get("question") or row.get("query", "") for row in rows],
        ["; ".join(row.get("answers") or row.get("positives") or ["(none)"]) for row in rows],
        [f"{row.get('prediction', '')} ({main} {row[main]:.2f})" for row in rows],
        np.array([row[main] for row in rows], float),
    )
    return sorted_rows(keys, scores, outcomes)


def rows_of_spans(rows: list[dict[str, Any]]) -> ScoredRows:
    def spans(row: dict[str, Any], name: str) -> set[tuple[Any, ...]]:
        return {(span["label"], span["start"], span["end"]) for span in row[name]}

    keys = [(row["text"], str(sorted(spans(row, "entities")))) for row in rows]
    counts_n3 = np.array(
        [entity_counts(spans(row, "entities"), spans(row, "predicted")) for row in rows]
    )

    def shown(row: dict[str, Any], name: str) -> str:
        in_order = sorted(row[name], key=lambda span: span["start"])
        texts = (
            f"{span['label']}: {row['text'][span['start'] : span['end']]}" for span in in_order
        )
        return "; ".join(texts)

    outcomes = Outcomes(
        [row["text"] for row in rows],
        [shown(row, "entities") for row in rows],
        [shown(row, "predicted") for row in rows],
        -num_wrong(counts_n3),
    )
    return sorted_rows(keys, lambda order: entity_rows(counts_n3[order]), outcomes)


def num_wrong(counts_n3: np.ndarray) -> np.ndarray:
    """Entities that are missing or too many [n]. counts: as of `entity_counts`."""
    correct_n, predicted_n, expected_n = counts_n3.T
    return predicted_n + expected_n - 2 * correct_n


def rows_of_words(tables: Sequence[list[list[str]]]) -> ScoredRows:
    """Sentences with a tag for each word, and an empty row between them."""
    keys = []
    counts = []  # of entities, of each sentence
    num_right = []  # of each sentence: the right tags, and all tags
    shown = []  # of each sentence: its text, true and predicted tags
    all_tags: set[str] = set()
    rows = itertools.chain.from_iterable(table[1:] for table in tables)
    for has_words, lines in itertools.groupby(rows, key=lambda row: len(row) > 1):
        if not has_words:
            continue
        words, tags, predicted, _probabilities = zip(*lines, strict=True)
        keys.append((*words, "", *tags))
        counts.append(entity_counts(entities(tags), entities(predicted)))
        is_right = [tag == guess for tag, guess in zip(tags, predicted, strict=True)]
        num_right.append((sum(is_right), len(tags)))
        all_tags |= set(tags)
        shown.append((" ".join(words), tagged(words, tags), tagged(words, predicted)))

    def scores(order: np.ndarray) -> dict[str, RowScore]:
        entity_f1: dict[str, RowScore] = {}
        if not has_classes(all_tags):
            entity_f1 = entity_rows(np.array(counts)[order])
        right_n2 = np.array(num_right, float)[order]
        return entity_f1 | {"accuracy": SumScore(right_n2, lambda sums: sums[:, 0] / sums[:, 1])}

    shares_n = np.array([right / total for right, total in num_right])
    texts, truths, predictions = map(list, zip(*shown, strict=True))
    return sorted_rows(keys, scores, Outcomes(texts, truths, predictions, shares_n))


def tagged(words: Sequence[str], tags: Sequence[str]) -> str:
    """The words that have a tag, with it."""
    return " ".join(f"{word}/{tag}" for word, tag in zip(words, tags, strict=True) if tag != "O")


def entity_rows(counts_n3: np.ndarray) -> dict[str, RowScore]:
    """The scores of the numbers of correct, predicted and expected entities in each row [n, 3]."""
    rows = counts_n3.astype(float)
    return {name: SumScore(rows, function) for name, function in ENTITY_SCORES.items()}


def rows_of_texts(columns: Cells, names: Sequence[str], folder: Path) -> ScoredRows:
    """Texts and pairs with a class, labels, or a number.

    names: of the scores.
    folder: of the run.
    """
    texts = [columns[name] for name in ("text", "pair", "label") if name in columns]
    keys = list(zip(*texts, strict=True))
    labels = [name.removeprefix(PROBABILITY) for name in columns if name.startswith(PROBABILITY)]
    if not labels:
        return sorted_rows(
            keys, partial(number_scores, columns, names), number_outcomes(keys, columns)
        )
    order = sort_order(keys)
    keys = [keys[row] for row in order]
    truths = [columns["label"][row] for row in order]
    predictions = [columns["prediction"][row] for row in order]
    is_right_n = np.array([a == b for a, b in zip(truths, predictions, strict=True)], float)
    outcomes = Outcomes([" | ".join(key[:-1]) for key in keys], truths, predictions, is_right_n)
    cells_Cn = [columns[PROBABILITY + name] for name in labels]
    probabilities_nC = np.array([[*map(number, cells_n)] for cells_n in cells_Cn]).T[order]
    if "exact_match" in names:
        separator = label_separator(folder)
        scores, truths_nC = several_label_scores(truths, predictions, labels, names, separator)
        # Each label is a question of two classes.
        present = probabilities_nC.ravel()
        pairs = np.stack([1 - present, present], axis=1)
        return ScoredRows(keys, scores, outcomes, pairs, truths_nC.ravel().astype(np.int64))
    truths_n = np.array([labels.index(label) for label in truths])
    predictions_n = np.array([labels.index(label) for label in predictions])
    scores = class_scores(truths_n, predictions_n, names)
    return ScoredRows(keys, scores, outcomes, probabilities_nC, truths_n)


def join_tables(tables: Sequence[list[list[str]]]) -> Cells:
    """The columns of tables with the same header."""
    header, *_ = tables[0]
    rows = []
    for first, *others in tables:
        if first != header:
            raise ValueError(f"columns {first} and {header}")
        rows += others
    return dict(zip(header, map(list, zip(*rows, strict=True)), strict=True))


def number(cell: str) -> float:
    """A number with a decimal point or comma."""
    return float(cell.replace(",", "."))


def number_outcomes(keys: Sequence[Key], columns: Cells) -> Outcomes:
    truths, predictions = columns["label"], columns["prediction"]
    distances = [
        abs(number(truth) - number(prediction))
        for truth, prediction in zip(truths, predictions, strict=True)
    ]
    texts = [" | ".join(key[:-1]) for key in keys]
    return Outcomes(texts, truths, predictions, -np.array(distances))


def number_scores(columns: Cells, names: Sequence[str], order: np.ndarray) -> dict[str, RowScore]:
    def numbers(name: str) -> np.ndarray:
        return np.array([number(cell) for cell in columns[name]])[order]

    from bert_recipe.tasks.classification.scores import load_metrics  # needs torch

    metrics = load_metrics()
    pair = numbers("label"), numbers("prediction")
    known = ("pearson", "spearman", "average_precision")
    return {name: OrderScore(*pair, metrics[name]) for name in names if name in known}


def class_scores(
    truths_n: np.ndarray, predicted_n: np.ndarray, names: Sequence[str]
) -> dict[str, RowScore]:
    """The scores called `names` of true and predicted classes."""
    from bert_recipe.tasks.classification.scores import load_metrics  # needs torch

    metrics = load_metrics()
    scores: dict[str, RowScore] = {"accuracy": MeanScore((truths_n == predicted_n).astype(float))}
    for name in ("f1", "f1_macro", "matthews_correlation"):
        scores[name] = PairScore(truths_n, predicted_n, metrics[name])
    return {name: scores[name] for name in names if name in scores}


def label_separator(folder: Path) -> str:
    """What divides the labels of a cell, as the record of the run says."""
    return read_record(folder).hyperparameters.get("--label-separator") or LABEL_SEPARATOR


def several_label_scores(
    truths: Sequence[str],
    predictions: Sequence[str],
    labels: Sequence[str],
    names: Sequence[str],
    separator: str,
) -> tuple[dict[str, RowScore], np.ndarray]:
    """The scores called `names`, and the true labels [n, C].

    truths, predictions: the cells of a file, with several labels each.
    labels: all labels.
    separator: what divides the labels of a cell.
    """
    expected_nC = label_matrix(truths, labels, separator)
    predicted_nC = label_matrix(predictions, labels, separator)
    counts = [expected_nC & predicted_nC, predicted_nC, expected_nC]
    counts_nC3 = np.stack(counts, axis=2).astype(float)

    def macro_f1(sums_nC3: np.ndarray) -> np.ndarray:
        num_rows, num_labels, _ = sums_nC3.shape
        return f1(sums_nC3.reshape(-1, 3)).reshape(num_rows, num_labels).mean(axis=1)

    is_equal = [truth == guess for truth, guess in zip(truths, predictions, strict=True)]
    scores: dict[str, RowScore] = {
        "exact_match": MeanScore(np.array(is_equal, float)),
        "f1_micro": SumScore(counts_nC3.sum(axis=1), f1),
        "f1_macro": SumScore(counts_nC3, macro_f1),
    }
    return {name: scores[name] for name in names if name in scores}, expected_nC


def label_matrix(cells: Sequence[str], labels: Sequence[str], separator: str) -> np.ndarray:
    """Whether each of `cells` has each of `labels`, [n, C] booleans."""
    rows = []
    for cell in cells:
        labels_of_cell = cell.split(separator)
        rows.append([label != "" and label in labels_of_cell for label in labels])
    return np.array(rows)
