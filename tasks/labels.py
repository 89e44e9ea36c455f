"""The labels of classification tasks: order, and spellings that are most likely one label."""

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from utils.errors import UserError, one_line
from utils.progress import print_line

TRUTH_VALUES = {"false": 0.0, "true": 1.0}


def sort_labels(labels: Iterable[str]) -> tuple[str, ...]:
    """Sorts by value if all are numbers, else by name."""
    if all(map(is_number, labels)):
        return tuple(sorted(labels, key=lambda label: (float(label), label)))
    return tuple(sorted(labels))


def listed(labels: Sequence[str]) -> str:
    """The labels for a message: at most ten."""
    return ", ".join(labels[:10]) + (f" and {len(labels) - 10} more" if len(labels) > 10 else "")


def is_number(text: str) -> bool:
    """Whether `text` is a finite decimal number. Stricter than float(), which accepts `1_000` and `
    1`.
    """
    is_decimal = re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", text)
    return is_decimal is not None and math.isfinite(float(text))


def check_spelling(path: Path, labels: Iterable[str]) -> None:
    """Raises UserError if two of the labels in `path` are the same value or look the same: another
    Unicode form, or a character that is not shown. Prints a warning if they differ in case only.
    """
    labels = sorted(labels)
    if missing := [label for label in labels if label.casefold() == "nan"]:
        print_line(
            f"warning: {path}: the label {missing[0]!r} is most likely a missing value: leave out "
            f"such lines"
        )

    def find_equal(key: Callable[[str], str | float]) -> str | None:
        seen: dict[str | float, str] = {}
        for label in labels:
            if (other := seen.setdefault(key(label), label)) != label:
                return f"{path}: labels {other!a} and {label!a}"
        return None

    values = {
        label: TRUTH_VALUES.get(label.casefold(), float(label) if is_number(label) else None)
        for label in labels
    }
    if None not in values.values() and (found := find_equal(values.__getitem__)):
        raise UserError(f"{found} are the same value: write it in one way")
    if found := find_equal(visible):
        raise UserError(f"{found} look the same: write them in one way")
    if found := find_equal(str.casefold):
        print_line(f"warning: {one_line(found)} differ in case only: they are two labels")


def visible(label: str) -> str:
    text = re.sub("[\ufe00-\ufe0f]", "", unicodedata.normalize("NFKC", label))  # variants of emojis
    return "".join(
        character for character in text if unicodedata.category(character) not in ("Cc", "Cf")
    )
