"""The labels of classification tasks: order, and spellings that are most likely one label."""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

from bert_recipe.utils.errors import UserError, listed, one_line
from bert_recipe.utils.progress import print_once

MAX_PAIRS = 3  # of labels in a message
# What other programs write for a missing value.
MISSING = ("nan", "-nan", "null", "none", "na", "n/a", "<na>", "#n/a", "#na", "?", "-")
TRUTH_VALUES = {"false": 0.0, "true": 1.0}


def sort_labels(labels: Iterable[str]) -> tuple[str, ...]:
    """Sorts by value if all are numbers, else by name."""
    if all(map(is_number, labels)):
        return tuple(sorted(labels, key=lambda label: (Decimal(label), label)))
    return tuple(sorted(labels))


def is_number(text: str) -> bool:
    """Whether `text` is a finite decimal number. Stricter than float(), which accepts `1_000` and `
    1`.
    """
    is_decimal = re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", text)
    return is_decimal is not None and math.isfinite(float(text))


def with_point(value: Any, name: str) -> Any:
    """A number that is written with a decimal comma, and maybe points between thousands, as Python
    reads it. Other values stay as they are.
    """
    if not isinstance(value, str):
        return value
    if not re.fullmatch(r"\s*[-+]?(\d{1,3}(\.\d{3})+|\d*)(,\d*)?([eE][-+]?\d+)?\s*", value):
        raise ValueError(f"{name!r} is {value!r}, which has no decimal comma: correct the line")
    return value.replace(".", "").replace(",", ".")


def known_label(label: str, known: Collection[str]) -> str:
    """The one of `known` that is `label`; or, if all are whole numbers, the same number: pandas
    writes 1 as 1.0 where a number of the column is missing; or the only one that differs in case
    only, as pandas has True, and models of MNLI ENTAILMENT. `label` itself if there is none.
    """
    if label in known:
        return label
    number = whole_number(label)
    numbers = {whole_number(other): other for other in known}
    if number is not None and None not in numbers:
        return numbers.get(number, label)
    equal = [other for other in known if other.casefold() == label.casefold()]
    return equal[0] if len(equal) == 1 else label


def whole_number(label: str) -> int | None:
    """The number that is written as 1 or 1.0; None for other labels, such as the code 1.10."""
    match = re.fullmatch(r"(-?(?:0|[1-9][0-9]*))(?:\.0)?", label)
    return None if match is None else int(match[1])


def check_spelling(path: Path, labels: Iterable[str]) -> None:
    """Raises UserError if two of the labels in `path` look the same: another Unicode form, or a
    character that is not shown; or are the same number as pandas writes it in two ways, where all
    are whole numbers. Prints a warning if they differ in case only, or are the same number.
    """
    labels = sorted(labels)
    if missing := [label for label in labels if label.casefold() in MISSING]:
        names = one_line(", ".join(map(repr, missing)))
        print_once(
            f"warning: {path}: the label {names} is most likely a missing value, and is read as a "
            f"class: leave out such lines if it is none"
        )

    def equal_labels(key: Callable[[str], str | Decimal]) -> str | None:
        """The labels with the same `key` as an earlier one, for a message; None if there are
        none.
        """
        label_of_key: dict[str | Decimal, str] = {}
        pairs = []
        for label in labels:
            other = label_of_key.setdefault(key(label), label)
            if other != label:
                pairs.append(f"{other!a} and {label!a}")
        return f"{path}: labels {listed(pairs, MAX_PAIRS)}" if pairs else None

    same_number = equal_labels(lambda label: Decimal(label) if is_number(label) else label)
    if same_number is not None and all(whole_number(label) is not None for label in labels):
        raise UserError(f"{same_number} are the same value: write it in one way")
    if same_number is not None:
        print_once(
            f"warning: {one_line(same_number)} are the same number: each is a label of its own"
        )
    same_look = equal_labels(visible)
    if same_look is not None:
        raise UserError(f"{same_look} look the same: write them in one way")
    other_case = equal_labels(lambda label: visible(label).casefold())
    if other_case is not None:
        print_once(
            f"warning: {one_line(other_case)} differ in case only: each is a label of its own"
        )


def visible(label: str) -> str:
    """What a reader sees of `label`: without variants of characters, and with simple spaces."""
    text = re.sub("[\ufe00-\ufe0f]", "", unicodedata.normalize("NFKC", label))  # of emojis
    shown = (character for character in text if unicodedata.category(character) not in ("Cc", "Cf"))
    text = "".join(shown)
    return " ".join(text.split())


SEPARATORS = (",", ";", "#", "|", "/", "\n", "\t", "&", "+", " ")


def other_separator(labels: Collection[str]) -> str | None:
    """The character that most likely divides several labels in one string of `labels`: parts of it
    appear in other labels, too. For a space, there must be fewer parts than labels.
    """
    for separator in SEPARATORS:
        parts_of_labels = []  # such as {"red", "blue"} of the label "red, blue"
        counts: Counter[str] = Counter()
        for label in labels:
            parts = {part.strip() for part in label.split(separator) if part.strip()}
            parts_of_labels.append(parts)
            counts.update(parts)
        joined = [parts for parts in parts_of_labels if len(parts) > 1]
        recurs = any(counts[part] > 1 for parts in joined for part in parts)
        if not recurs:
            continue
        if separator != " " or (len(counts) < len(labels) and len(joined) > 2):
            return separator
    return None
