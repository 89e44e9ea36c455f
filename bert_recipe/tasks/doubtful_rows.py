"""Rows that a file may have, but that are most likely mistakes: named before training."""

import re
import unicodedata
from collections.abc import Collection, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bert_recipe.utils.errors import one_line
from bert_recipe.utils.progress import print_once
from bert_recipe.utils.words import word_spans

MAX_PLACES = 3  # of a message
LONGEST_SENTENCE = 250  # words; those of laws have fewer
# What pandas and spreadsheets write for a missing text.
MISSING_TEXTS = ("nan", "NaN", "<NA>", "#N/A", "NULL", "null", "None")
QUOTED = re.compile(r'"([^"]|"")*"')


def is_blank(text: str) -> bool:
    """Whether a text has nothing to see: only spaces, and characters of control or format."""
    return all(unicodedata.category(each) in ("Cc", "Cf", "Zs", "Zl", "Zp") for each in text)


def first_of(places: Sequence[object]) -> str:
    more = f" and {len(places) - MAX_PLACES} more" if len(places) > MAX_PLACES else ""
    return ", ".join(map(str, places[:MAX_PLACES])) + more


def warn_of_contradictions(
    path: Path, rows: Iterable[tuple[Hashable, Hashable, object]], what: str = "texts"
) -> None:
    """Warns of equal texts with different labels. rows: text, label and place."""
    first: dict[Hashable, tuple[Hashable, object]] = {}
    found: dict[Hashable, str] = {}
    for text, label, place in rows:
        before, where = first.setdefault(text, (label, place))
        if label != before:
            where, place = (f"line {at}" if isinstance(at, int) else at for at in (where, place))
            found.setdefault(text, f"{where} ({shown(before)}) and {place} ({shown(label)})")
    if found:
        print_once(
            f"warning: {one_line(str(path))}: {len(found)} {what} have contradicting labels: "
            f"{one_line(first_of(list(found.values())))}: keep one label for each"
        )


def shown(label: Hashable) -> str:
    return " ".join(map(str, label)) if isinstance(label, tuple) else str(label)


def warn_of_blank(path: Path, rows: Iterable[tuple[Sequence[str], int]]) -> None:
    """Warns of texts to train on that are empty, or what other programs write for that. rows: the
    texts of a row, and its line.
    """
    rows = list(rows)
    missing = [line for texts, line in rows if any(text in MISSING_TEXTS for text in texts)]
    if missing:
        print_once(
            f"warning: {one_line(str(path))}: {len(missing)} rows have a text such as 'nan': lines "
            f"{first_of(missing)}: leave them out if that is a missing value"
        )
    lines = [line for texts, line in rows if any(map(is_blank, texts))]
    if lines:
        print_once(
            f"warning: {one_line(str(path))}: {len(lines)} rows have an empty text: lines "
            f"{first_of(lines)}: leave them out if that is a mistake"
        )


def warn_of_predicted_blanks(path: Path, rows: Iterable[tuple[Iterable[str], object]]) -> None:
    """Warns of texts to predict that are empty. rows: the texts of a row, and its line."""
    lines = [line for texts, line in rows if all(map(is_blank, texts))]
    if lines:
        print_once(
            f"warning: {one_line(str(path))}: {len(lines)} rows have an empty text: lines "
            f"{first_of(lines)}: their prediction says nothing"
        )


def is_quoted(cell: Any) -> bool:
    """Whether a cell is written as CSV would be that has to quote it."""
    return isinstance(cell, str) and QUOTED.fullmatch(cell) is not None


def warn_of_quotes(path: Path, lines: Sequence[int]) -> None:
    """Warns of cells of a TSV file that are in quotation marks. lines: where they are."""
    if lines:
        print_once(
            f"warning: {one_line(str(path))}: {len(lines)} rows have cells in quotation marks: "
            f"lines {first_of(lines)}: they are a part of the text, since TSV has no quoting; if "
            f"another program quoted them, name the file .csv and add --delimiter '\\t'"
        )


def cut_words(text: str, edges: Collection[int]) -> list[str]:
    """The words of `text` that one of `edges` of spans divides, but not in scripts without case,
    in which endings and particles belong to a word, such as Korean and Arabic.
    """
    found = []
    for start, stop in word_spans(text) if edges else ():
        inside = [edge for edge in edges if start < edge < stop]
        around = "".join(text[edge - 1 : edge + 1] for edge in inside)
        if any(unicodedata.category(each) not in ("Lo", "Mn", "Mc") for each in around):
            found.append(text[start:stop])
    return found


def warn_of_cut_words(path: Path, found: Sequence[str]) -> None:
    """Warns of words that the edge of a span divides. found: places and words."""
    if found:
        print_once(
            f"warning: {one_line(str(path))}: {len(found)} words are divided by the edge of a "
            f"span: {one_line(first_of(found))}: correct the offsets, unless that is meant"
        )


def warn_of_long_sentences(path: Path, lengths: Sequence[int]) -> None:
    """Warns of sentences that are most likely several, as in files without empty lines."""
    if max(lengths) > LONGEST_SENTENCE:
        print_once(
            f"warning: {one_line(str(path))}: a sentence has {max(lengths)} words: divide texts "
            f"into sentences, in columns by empty lines; long ones are read in parts"
        )
