"""Rows to predict, of a file or typed by a user: `--do-predict` of the training programs and
inference.py make them by the same functions, and write the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bert_recipe.tasks.doubtful_rows import warn_of_predicted_blanks
from bert_recipe.utils.output_tables import add_columns, write_like
from bert_recipe.utils.progress import print_line
from bert_recipe.utils.tables import Row, read_texts
from bert_recipe.utils.text_files import TableFormat, table_parts

if TYPE_CHECKING:
    from bert_recipe.tasks.text_sequences import SequenceDataset


class Prediction(NamedTuple):
    """What is predicted for a row.

    columns: of a table.
    n_best: for each place in the row, such as a masked word, probabilities and texts, best first.
    """

    columns: Row
    n_best: Sequence[Sequence[tuple[float, str]]] = ()


class PredictedRows(NamedTuple):
    """Rows to predict. predict: from the model's logits for `dataset`."""

    dataset: SequenceDataset
    predict: Callable[[Any], list[Prediction]]


class PlacedRow(NamedTuple):
    """A row of a table with all its columns, and its place for messages."""

    place: str
    row: Row


def read_table(
    path: Path, columns: Sequence[str], table_format: TableFormat | None = None
) -> list[PlacedRow]:
    """The rows of a table, or of the files that `table_parts` finds, which have texts in `columns`.
    Warns of empty ones.
    """
    rows = []
    parts = table_parts(path)
    for part in parts:
        table = read_texts(part, columns, table_format=table_format, is_whole=True)
        rows += [PlacedRow(f"{part}:{line}", row) for line, row in table]
        texts = (([row[name] for name in columns], line) for line, row in table)
        warn_of_predicted_blanks(part, texts)
    return rows


def write_predicted(
    stem: Path,
    rows: Sequence[Row],
    predictions: Sequence[Prediction],
    source: Path,
    table_format: TableFormat | None = None,
) -> None:
    """Writes the rows of the file `source` with what is predicted for them (see `write_like`)."""
    table = add_columns([*rows], [prediction.columns for prediction in predictions])
    path = write_like(stem, table, source, table_format or TableFormat())
    print_line(f"predictions for {len(rows)} rows in {path}")
