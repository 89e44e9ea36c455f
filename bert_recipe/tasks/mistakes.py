"""The most confident mistakes on a development file, which are often wrong labels."""

from collections.abc import Sequence
from typing import Any, NamedTuple

NUM_SHOWN = 20
MAX_CHARACTERS = 300  # of a text that is shown
MISTAKES = "most_confident_mistakes"  # the key of the list among the scores


class Mistake(NamedTuple):
    """confidence: the probability of what is wrong, or the absolute error of a number."""

    text: str
    label: str
    prediction: str
    confidence: float


def most_confident(mistakes: Sequence[Mistake], prefix: str = "") -> dict[str, Any]:
    """The worst mistakes as a table among the scores; nothing without any. prefix: of the name."""
    worst = sorted(mistakes, key=lambda mistake: -mistake.confidence)[:NUM_SHOWN]
    rows = []
    for mistake in worst:
        text = mistake.text
        shown = text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + " ..."
        rows.append(mistake._replace(text=shown)._asdict())
    return {f"{prefix}{MISTAKES}": rows} if rows else {}


def without_mistakes(scores: dict[str, Any]) -> dict[str, Any]:
    """The scores without texts."""
    return {name: value for name, value in scores.items() if not name.endswith(MISTAKES)}
