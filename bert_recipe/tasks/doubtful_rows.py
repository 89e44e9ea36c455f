"""Rows that a file may have, but that are most likely mistakes: named before training."""

import re
import unicodedata
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path

import numpy as np

from bert_recipe.utils.errors import listed, one_line
from bert_recipe.utils.progress import print_once

MAX_PLACES = 3  # of a message
LEAST_NUMBERS, FAR_SHARE = 50, 0.5  # of squared distances
EMPTY = "an empty text"
# What pandas and spreadsheets write for a missing text.
MISSING_TEXTS = ("nan", "NaN", "<NA>", "#N/A", "NULL", "null", "None")


def is_blank(text: str) -> bool:
    """Whether a text has nothing to see: only spaces, and characters of control or format."""
    return all(
        category in ("Cc", "Cf", "Zs", "Zl", "Zp") for category in map(unicodedata.category, text)
    )


def warn_of_contradictions(
    path: Path, rows: Iterable[tuple[Hashable, Hashable, object]], what: str = "texts"
) -> None:
    """Warns of equal texts with different labels.

    rows: text, label and place, which is the number of a line or a description.
    what: the texts are, in the warning.
    """
    first_of_text: dict[Hashable, tuple[Hashable, object]] = {}
    contradictions: dict[Hashable, str] = {}  # of each text the first one
    for text, label, place in rows:
        first_label, first_place = first_of_text.setdefault(text, (label, place))
        if label != first_label and text not in contradictions:
            first = f"{place_text(first_place)} ({label_text(first_label)})"
            contradictions[text] = f"{first} and {place_text(place)} ({label_text(label)})"
    if contradictions:
        examples = one_line(listed(list(contradictions.values()), MAX_PLACES))
        print_once(
            f"warning: {one_line(str(path))}: {have(len(contradictions), what)} contradicting "
            f"labels: {examples}: keep one label for each"
        )


def have(number: int, things: str) -> str:
    """Such as `2 pairs of texts have` or `1 pair of texts has`."""
    if number > 1:
        return f"{number} {things} have"
    return re.sub(r"s\b", "", f"1 {things} has", count=1)


def place_text(place: object) -> str:
    return f"line {place}" if isinstance(place, int) else str(place)


def label_text(label: Hashable) -> str:
    return " ".join(map(str, label)) if isinstance(label, tuple) else str(label)


def warn_of_blank(path: Path, rows: Iterable[tuple[Sequence[str], int | str]]) -> None:
    """Warns of texts to train on that are empty, or what other programs write for that. rows: the
    texts of a row, and its line.
    """
    rows = list(rows)
    missing = [line for texts, line in rows if any(text in MISSING_TEXTS for text in texts)]
    advice = "leave them out if that is a missing value"
    warn_of_lines(path, "a text such as 'nan'", missing, advice)
    lines = [line for texts, line in rows if any(map(is_blank, texts))]
    warn_of_lines(path, EMPTY, lines, "leave them out if that is a mistake")


def warn_of_predicted_blanks(path: Path, rows: Iterable[tuple[Iterable[str], object]]) -> None:
    """Warns of texts to predict that are empty. rows: the texts of a row, and its line."""
    lines = [line for texts, line in rows if all(map(is_blank, texts))]
    warn_of_lines(path, EMPTY, lines, "their prediction says nothing")


def warn_of_far_numbers(path: Path, numbers: Sequence[float], places: Sequence[object]) -> None:
    """Warns if one row in a hundred, at least one, makes most of the squared error of the median,
    so that a model learns little of the other rows.
    """
    median = float(np.median(numbers))
    with np.errstate(over="ignore", invalid="ignore"):
        squares_n = (np.array(numbers) - median) ** 2
    farthest = np.argsort(-squares_n, kind="stable")[: max(1, round(len(numbers) / 100))]
    farthest = farthest[squares_n[farthest] > squares_n.mean()]  # the others are not far
    if len(numbers) < LEAST_NUMBERS or not squares_n[farthest].sum() > FAR_SHARE * squares_n.sum():
        return
    shown = [f"{place_text(places[index])} ({numbers[index]:g})" for index in farthest]
    share = squares_n[farthest].sum() / squares_n.sum()
    advice = "learn the logarithms" if min(numbers) > 0 else "limit the range of the numbers"
    print_once(
        f"warning: {one_line(str(path))}: {len(farthest)} of {len(numbers)} numbers make "
        f"{share:.0%} of the squared distances from the median, {median:g}: "
        f"{one_line(listed(shown, MAX_PLACES))}: training follows these; correct them, or if they "
        f"are right, {advice}"
    )


def warn_of_lines(path: Path, what: str, lines: Sequence[object], advice: str) -> None:
    if lines:
        places = f"line{'s' * (len(lines) > 1)} {listed(lines, MAX_PLACES)}"
        print_once(
            f"warning: {one_line(str(path))}: {have(len(lines), 'rows')} {what}: {places}: {advice}"
        )
