"""The samples in files of GLUE's and SuperGLUE's tasks, and in those that users bring."""

import ast
import contextlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from bert_recipe.tasks.classification.specs import LABEL_SEPARATOR, NEGATIVE, POSITIVE, TaskSpec
from bert_recipe.tasks.labels import TRUTH_VALUES, is_number, known_label, with_point
from bert_recipe.tasks.reading import DEFAULT_READING, ReadingOptions, read_group
from bert_recipe.utils.errors import UserError, listed, one_line
from bert_recipe.utils.progress import print_once
from bert_recipe.utils.tables import (
    Row,
    absent_column,
    check_lists,
    not_a_string,
    plain_row,
    read_rows,
    texts_in,
)
from bert_recipe.utils.text_files import table_parts

Cell = TypeVar("Cell")
LISTS: Mapping[str, Any] = {"[": list}
COLLECTIONS: Mapping[str, Any] = {**LISTS, "(": tuple, "{": set}  # as pandas writes cells to CSV
# A set or tuple of strings; other labels may begin with such brackets.
COLLECTION = re.compile(r"""(frozen)?set\(.*\)|[({]\s*['"].*['"],?\s*[)}]""", re.DOTALL)


@dataclass(frozen=True)
class Examples:
    """The rows of a file.

    pairs: None for single texts.
    label_sets: the label of each row, or with `spec.multi_label` all of them; empty for files to
        predict.
    lines: line numbers, with the name of the file if there are several.
    groups: of each row, if they were asked for.
    """

    path: Path
    texts: list[str]
    pairs: list[str] | None
    label_sets: list[tuple[str, ...]]
    indices: list[str]
    lines: list[int | str]
    groups: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def labels(self) -> list[str]:
        """The label of each row, of which each has one."""
        return [label for (label,) in self.label_sets]

    def where(self, is_kept: np.ndarray) -> "Examples":
        """The rows that are kept."""

        def kept(values: Sequence[Cell]) -> list[Cell]:
            return list(itertools.compress(values, is_kept))

        return Examples(
            self.path,
            kept(self.texts),
            None if self.pairs is None else kept(self.pairs),
            kept(self.label_sets),
            kept(self.indices),
            kept(self.lines),
            kept(self.groups),
        )


class Example(NamedTuple):
    """A row of a file. `pair` is None for single texts; `labels` is empty in files to predict."""

    line: int | str
    number: int
    text: str
    pair: str | None
    labels: tuple[str, ...]
    group: str = ""


def read_examples(
    path: Path,
    spec: TaskSpec,
    labelled: bool,
    is_test: bool = False,
    reading: ReadingOptions = DEFAULT_READING,
    group_column: str | None = None,
) -> Examples:
    """Reads the texts of a file, or of the files that `table_parts` finds, and the labels if
    `labelled`: any, if `spec` has none; and the groups in `group_column`. Raises UserError naming
    the bad lines.
    """
    reader = ExampleReader(spec, labelled, is_test, reading, group_column)
    parts = table_parts(path)
    for part in parts:
        reader.read(part, prefix=f"{part.name}:" if len(parts) > 1 else "")
    return join_examples(path, spec, labelled, list(reader.examples.values()))


@dataclass
class ExampleReader:
    """Reads files of one task.

    labelled: whether the rows have labels.
    is_test: whether they are to predict: such files have a header, and their lines are complete.
    examples: all that were read, by index (see `index_of`).
    """

    spec: TaskSpec
    labelled: bool
    is_test: bool
    reading: ReadingOptions
    group_column: str | None
    examples: dict[int, Example] = field(default_factory=dict)

    @property
    def columns(self) -> tuple[str, ...]:
        """Those that are used."""
        spec, columns = self.spec, self.spec.text_columns
        if self.labelled:
            columns += spec.negatives or spec.label_columns or (spec.label,)
        if self.group_column is not None:
            columns += (self.group_column,)
        return tuple(dict.fromkeys(columns))

    def read(self, path: Path, prefix: str) -> None:
        """Adds the examples of one file. prefix: of line numbers."""
        spec, columns = self.spec, self.columns
        header = None if self.is_test else spec.header
        skips_incomplete = spec.skips_incomplete_lines and not self.is_test
        bad = self.reading.bad_rows(path, is_predicted=self.is_test)
        file = self.reading.open_table(path, bad)
        num_before, skipped = len(self.examples), 0
        merged: dict[str, str] = {}  # labels that are read as other ones
        for line, row in read_rows(file, columns, header, spec.is_custom):
            try:
                if file.format.startswith(".json"):
                    row = plain_row(row, columns)
                if problem := absent_column(row, columns):
                    if skips_incomplete:
                        skipped += 1
                        continue
                    raise ValueError(problem)
                is_first = len(self.examples) == num_before
                if spec.negatives and self.labelled and is_first:
                    check_lists(file.where(line), row, (*spec.text_columns[1:], *spec.negatives))
                if self.has_number and self.reading.decimal == ",":
                    row = row | {spec.label: with_point(row[spec.label], spec.label)}
                samples = samples_of(row, spec, self.labelled, merged)
                index = self.index_of(row)
                group = ""
                if self.group_column is not None:
                    group = read_group(row[self.group_column], self.group_column)
            except ValueError as error:
                bad.add(file.where(line), str(error))
                continue
            place = f"{prefix}{line}" if prefix else line
            for text, pair, labels in samples:
                self.examples[index] = Example(place, index, text, pair, labels, group)
                index = len(self.examples)  # of the next sample of the row
        bad.finish(num_kept=None if len(self.examples) > num_before else 0)
        if skipped:
            print_once(f"note: {path}: {skipped} incomplete lines are skipped")
        if merged:
            pairs = [f"{label!r} as {known!r}" for label, known in merged.items()]
            print_once(
                one_line(f"note: {path}: labels are read as those that are known: {listed(pairs)}")
            )

    @property
    def has_number(self) -> bool:
        """Whether the label is a number."""
        return self.labelled and self.spec.regression and not self.spec.negatives

    def index_of(self, row: Row) -> int:
        """The name of a row's sample in submissions, by default its number."""
        name, number = self.spec.index, len(self.examples)
        index = number if name is None else row.get(name, number)
        if type(index) is not int or index in self.examples:
            raise ValueError(f"{name!r} is {index!r}, expected a unique whole number: correct it")
        return index


def join_examples(path: Path, spec: TaskSpec, labelled: bool, rows: list[Example]) -> Examples:
    """The rows of a file as lists. Raises UserError if there are none, or texts are all empty."""
    if not rows:
        raise UserError(f"{path} holds no samples: check the file")
    texts = [row.text for row in rows]
    pairs = [row.pair for row in rows if row.pair is not None]
    for column, values in zip(spec.text_columns, (texts, pairs), strict=False):
        if not any(map(str.strip, values)):
            raise UserError(
                f"{path}: the column {column!r} is empty in all rows: check the column's name"
            )
    return Examples(
        path,
        texts,
        None if spec.pair is None else pairs,
        [row.labels for row in rows] if labelled else [],
        [str(row.number) for row in rows],
        [row.line for row in rows],
        [row.group for row in rows],
    )


Sample = tuple[str, str | None, tuple[str, ...]]  # text, pair and labels of an Example


def samples_of(row: Row, spec: TaskSpec, labelled: bool, merged: dict[str, str]) -> list[Sample]:
    """The sample in a row, or with `spec.negatives` one for each of its second texts. Raises
    ValueError for bad texts and labels. merged: see `read_labels`.
    """
    if spec.negatives and labelled:
        return judged_pairs(row, spec)
    labels = read_labels(row, spec, merged) if labelled else ()
    text = to_text(row[spec.text], spec.text)
    pair = None if spec.pair is None else to_text(row[spec.pair], spec.pair)
    return [(text, pair, labels)]


def judged_pairs(row: Row, spec: TaskSpec) -> list[Sample]:
    """The text with each positive and each negative, and their labels."""
    text = to_text(row[spec.text], spec.text)
    samples: list[Sample] = []
    for positive in texts_in(row, spec.text_columns[1:]):
        samples.append((text, positive, (POSITIVE,)))
    for negative in texts_in(row, spec.negatives):
        samples.append((text, negative, (NEGATIVE,)))
    return samples


def read_labels(row: Row, spec: TaskSpec, merged: dict[str, str]) -> tuple[str, ...]:
    """The label of a row, or with `spec.multi_label` all of them. Raises ValueError if one is bad
    or not in `spec.labels`. merged: takes those that are read as another one.
    """
    if spec.label_columns:
        return tuple(name for name in spec.label_columns if is_one(row[name], name))
    value = row[spec.label]
    # A number, not a text, as a code is.
    if isinstance(value, float) and value % 1 > 0 and not spec.regression:
        raise ValueError(f"{spec.label!r} is {value!r}: add --regression, or write classes as text")
    cell = to_labels(value, spec) if spec.multi_label else (to_label(value, spec.label),)
    labels = tuple(known_label(label, spec.labels) for label in cell)
    merged |= {given: label for given, label in zip(cell, labels, strict=True) if given != label}
    for label in labels:
        check_label(label, spec)
    return labels


def check_label(label: str, spec: TaskSpec) -> None:
    if spec.regression and not is_number(label):
        advice = "correct the line"
        if is_number(label.replace(",", ".")):
            advice = "give --decimal ,"
        raise ValueError(f"label {label!r}, expected a number: {advice}")
    if spec.labels and label not in spec.labels:
        raise ValueError(
            f"label {label!r}, expected one of {listed(spec.labels)}: correct the line"
        )


def is_one(value: Any, name: str) -> bool:
    """Whether a column of 0 and 1 has a 1."""
    text = str(value).strip().casefold()
    number = TRUTH_VALUES.get(text, float(text) if is_number(text) else None)
    if number not in (0.0, 1.0):
        raise ValueError(f"{name!r} is {value!r}, expected 0 or 1: correct the line")
    return bool(number)


def to_labels(value: Any, spec: TaskSpec) -> tuple[str, ...]:
    """The labels in a list, in a list as JSON or Python write it, or in a string that
    `spec.separator` divides.
    """
    name, separator = spec.label, spec.separator
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        value = unquoted(value)
        listed_labels = None if spec.label_separator else parse_list(value, name, COLLECTIONS)
        parts = [part.strip() for part in value.split(separator)]
        value = parts if listed_labels is None else listed_labels
    if not isinstance(value, list):
        raise ValueError(
            f"{name!r} is {value!r}, expected labels with {separator!r} between them, or a list"
        )
    labels = tuple(to_label(label, name) for label in value)
    if wrong := [label for label in labels if separator in label]:
        raise ValueError(
            f"{name!r} has the label {wrong[0]!r}, and {separator!r} separates labels: rename "
            f"it, or give another --label-separator"
        )
    return labels


def unquoted(text: str) -> str:
    """A cell without space around it; of CSV with a space after each comma, without the quotation
    marks, which do not begin the cell there.
    """
    stripped = text.strip()
    if text.startswith(" ") and re.fullmatch('"[^"]+"', stripped):
        return stripped[1:-1].strip()
    return stripped


def parse_list(text: str, name: str, kinds: Mapping[str, Any]) -> list[Any] | None:
    """The list that JSON or Python write as `text`; None if it is none. Raises ValueError for what
    looks like a list of another kind, such as an array of NumPy. kinds: what Python's values may
    be, by the bracket that they begin with.
    """
    if kinds is COLLECTIONS and (match := re.fullmatch(r"(?:frozen)?set\((.*)\)", text)):
        text = match[1] or "()"
    kind = kinds.get(text[:1])
    if kinds is COLLECTIONS and re.fullmatch(r"\w+\([\[{(].*\)", text, re.DOTALL):
        kind = set  # such as dict_keys(['a', 'b'])
    if kind is None or text[-1] not in "])}":
        return None
    for parse in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            value = parse(text)
            # Python joins strings without a comma between them, as NumPy writes them.
            if isinstance(value, kind) and not re.search(r"""(['"])\s+\1""", text):
                return sorted(value, key=str) if kind is set else list(value)
    has_parts = kind is list and text[-1] == "]" and re.search(r""",|[\d.'"]\s""", text)
    if has_parts or kind is set:
        raise ValueError(
            f"{name!r} is {text!r}, which is neither JSON's nor Python's list: write "
            f'["a", "b"], or labels with {LABEL_SEPARATOR!r} between them'
        )
    return None


def to_label(value: Any, name: str) -> str:
    """Converts a label to a string without space around it. In JSON it may also be a boolean, a
    number, or one of them in a list.
    """
    if isinstance(value, str):
        value = unquoted(value)
        kinds = COLLECTIONS if COLLECTION.fullmatch(value) else LISTS
        if (parsed := parse_list(value, name, kinds)) is not None:
            value = parsed
    if isinstance(value, list):
        if len(value) != 1 or isinstance(value[0], list):
            raise ValueError(
                f"{name!r} is {value!r}, expected one label: correct the line, or use --task-name "
                f"multi-label"
            )
        value = value[0]
    if isinstance(value, bool | int | float) and -math.inf < value < math.inf:
        return json.dumps(value)
    if isinstance(value, Decimal | date):  # of Parquet
        return str(value)
    if value is None or value == "" or value != value:
        raise ValueError(f"{name!r} is {value!r}, expected a label: it is missing, give one")
    if not isinstance(value, str):
        raise ValueError(f"{name!r} is {value!r}, expected a label: write it as text")
    return value


def to_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(not_a_string(value, name))
    return value
