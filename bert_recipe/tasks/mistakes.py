"""The most confident mistakes on a development file, which are often wrong labels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bert_recipe.utils.errors import one_line, shortened

NUM_SHOWN = 20
MAX_CHARACTERS = 300  # of a text that is shown
NUM_LINES, LINE_CHARACTERS, LABEL_CHARACTERS = 3, 100, 50  # of the terminal
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
        text = shortened(mistake.text, MAX_CHARACTERS)
        rows.append(mistake._replace(text=text)._asdict())
    return {f"{prefix}{MISTAKES}": rows} if rows else {}


def mistake_lines(mistakes: Sequence[Mistake], num_rows: int, path: Path) -> list[str]:
    """What the terminal shows of the mistakes among `num_rows` rows, which are all in `path`."""
    lines = [f"{len(mistakes)} of {num_rows} predictions are wrong; all rows are in {path}"]
    worst = sorted(mistakes, key=lambda mistake: -mistake.confidence)[:NUM_LINES]
    if worst:
        lines.append("the most confident mistakes (check their labels, too):")
    for mistake in worst:
        text = shortened(one_line(mistake.text), LINE_CHARACTERS)
        label = shortened(one_line(mistake.label), LABEL_CHARACTERS)
        prediction = shortened(one_line(mistake.prediction), LABEL_CHARACTERS)
        lines.append(f"  {mistake.confidence:.2f}  {label}, predicted {prediction}: {text}")
    return lines


def without_mistakes(scores: dict[str, Any]) -> dict[str, Any]:
    """The scores without texts."""
    return {name: value for name, value in scores.items() if not name.endswith(MISTAKES)}
