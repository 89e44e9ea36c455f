"""Which flags an unknown one may mean."""

import difflib
from collections.abc import Mapping
from typing import Any

LEAST_LIKENESS = 0.8
MOST_FLAGS = 3  # that are named; of a word that begins many flags nothing follows


def suggestion(typed: str, actions: Mapping[str, Any]) -> str:
    """Such as ": did you mean --seed?", of the likest flags, or "" if none is like it, or too many
    are. actions: what each flag does; of several names of the same, the first is named.
    """
    likeness = {flag: flag_likeness(typed, flag) for flag in actions}
    best = max(likeness.values())
    if best < LEAST_LIKENESS:
        return ""
    likest: dict[int, str] = {}
    for flag, action in actions.items():
        if likeness[flag] == best:
            likest.setdefault(id(action), flag)
    if len(likest) > MOST_FLAGS:
        return ""
    return f": did you mean {' or '.join(likest.values())}?"


def flag_likeness(typed: str, flag: str) -> float:
    """The mean likeness of each word of two flags to the likest of the other, in any order."""
    words, others = typed.strip("-").split("-"), flag.strip("-").split("-")
    likeness = [[word_likeness(word, other) for other in others] for word in words]
    best = [*map(max, likeness), *map(max, zip(*likeness, strict=True))]
    return max(sum(best) / len(best), word_likeness("".join(words), "".join(others)))


def word_likeness(word: str, other: str) -> float:
    """1 for equal words, and above 0 for a misspelling or a beginning."""
    ratio = difflib.SequenceMatcher(None, word, other).ratio()
    shorter, longer = sorted((word, other), key=len)
    is_beginning = len(shorter) >= 3 and longer.startswith(shorter)
    return max(ratio, 0.9) if is_beginning else ratio * (ratio >= LEAST_LIKENESS)
