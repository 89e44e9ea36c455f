"""Predictions for all rows of a table, as further columns.

Intermediate predictions are stored in `<output>.parts`: if interrupted, rerun the same command to resume.
"""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from utils.errors import UserError
from utils.files import (
    LOCK_FILE,
    TEMPORARY_SUFFIX,
    file_digest,
    json_digest,
    lock_folder,
    read_json,
    write_atomically,
    write_json,
)
from utils.progress import print_line, progress_bar
from utils.tables import TABLES, Row, TextFile, encode_table, kind_of, read_rows

ROWS_PER_PART = 4096
OUTPUTS = (*TABLES, ".csv.gz", ".tsv.gz", ".jsonl.gz")
SETTINGS_FILE = "settings.json"
PART_FILE = re.compile(rf"(\d+|settings)\.json({TEMPORARY_SUFFIX}-\w+)?")


class Parts:
    """The folder of intermediate predictions: a file for each ROWS_PER_PART rows, named by its first row, with a digest
    of these predictions and what they were made with. One process uses it at a time.

    Raises UserError if `folder` contains anything else, or predictions made with other `settings`."""

    def __init__(self, folder: Path, settings: dict[str, Any]):
        self.folder, self.settings = folder, json.loads(json.dumps(settings, default=str))
        folder.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in folder.iterdir()} - {LOCK_FILE}
        strange = sorted(name for name in names if not PART_FILE.fullmatch(name))
        if strange or (names and SETTINGS_FILE not in names):
            what = f"contains {strange[0]}" if strange else f"has no {SETTINGS_FILE}"
            raise UserError(f"{folder} {what}, so it is no folder of this program: rename it, or change --output")
        self.lock = lock_folder(folder)
        found = read_json(folder / SETTINGS_FILE, "the settings of the predictions") if names else self.settings
        if found != self.settings and (len(names) > 1 or found.keys() != self.settings.keys()):
            raise UserError(f"{folder} has predictions of another input, model or flags: remove it, or change --output")
        write_json(folder / SETTINGS_FILE, self.settings)

    def read(self, first: int, count: int) -> list[Row] | None:
        """The predictions for `count` rows; None if they are not there or damaged."""
        try:
            rows, digest = read_json(self.folder / f"{first}.json", "predictions", list[Any])
        except (OSError, ValueError, UserError):
            return None
        return rows if digest == self.digest(first, rows) and len(rows) == count else None

    def write(self, first: int, rows: list[Row]) -> None:
        write_json(self.folder / f"{first}.json", [rows, self.digest(first, rows)], indent=None)

    def digest(self, first: int, rows: list[Row]) -> str:
        return json_digest([self.settings, first, rows])

    def remove(self) -> None:
        for path in self.folder.iterdir():
            path.unlink()
        self.folder.rmdir()


def check_files(source: Path, target: Path, embed: bool) -> None:
    """Raises UserError if the rows of `source` cannot be predicted to the file `target`, without reading them."""
    extensions = (*OUTPUTS, ".npy") if embed else OUTPUTS
    if not target.name.lower().endswith(extensions):
        raise UserError(f"{target}: unknown file extension: give one of {', '.join(extensions)}")
    if target.is_dir():
        raise UserError(f"{target} is a folder: give the name of a file")
    TextFile(source).open().close()
    if target.exists() and target.samefile(source):
        raise UserError(f"--output {target} is the file to predict, which would be replaced: give another name")


def predict_file(
    source: Path,
    target: Path,
    columns: dict[str, str],
    prepare: Callable[[list[str], list[Row]], Callable[[], list[Row]]],
    settings: dict[str, Any],
) -> None:
    """Writes the rows of `source`, with the columns that are predicted for them, to `target`.

    prepare: takes the places of rows, for errors, and the rows by field; checks them and returns a function that
    predicts them. All rows are prepared before the first one is predicted. columns: column of each field. settings: all
    else that the predictions depend on."""
    rows = read_texts(source, list(columns.values()))
    if kind_of(target.name)[0] == ".parquet":
        encode_table(target, [row for _, row in rows])  # what it cannot store is refused here
    parts = Parts(target.with_name(f"{target.name}.parts"), settings | {"input": file_digest(source)})
    file, predictions = TextFile(source), []
    for first in range(0, len(rows), ROWS_PER_PART):
        chunk = rows[first : first + ROWS_PER_PART]
        if (found := parts.read(first, len(chunk))) is not None:
            predictions.append(lambda found=found: found)
            continue
        fields = [{field: row[column] for field, column in columns.items()} for _, row in chunk]
        predictions.append(prepare([file.where(number) for number, _ in chunk], fields))
    predicted: list[Row] = []
    with progress_bar(len(rows), "prediction", "row") as bar:
        for predict in predictions:
            added = predict()
            parts.write(len(predicted), added)
            predicted += added
            bar.update(len(added))
    if target.suffix == ".npy":
        import numpy as np  # here, so that the command lines of training do not wait for it

        content = io.BytesIO()
        np.save(content, np.array([row["embedding"] for row in predicted], np.float32))
        write_atomically(target, content.getvalue())
    else:
        write_atomically(target, encode_table(target, add_columns([row for _, row in rows], predicted)))
    parts.remove()
    print_line(f"predictions for {len(rows)} rows in {target}")


def read_texts(path: Path, columns: list[str]) -> list[tuple[int, Row]]:
    """All rows with their line numbers. Raises UserError naming the line if one of `columns` is not a string."""
    file = TextFile(path)
    rows = list(read_rows(file, exact=True))
    for number, row in rows:
        for name in columns:
            if name not in row:
                found = ", ".join(map(repr, row))
                raise UserError(f"{file.where(number)}: no column {name!r}; it has {found}: check the column's name")
            if not isinstance(row[name], str):
                raise UserError(f"{file.where(number)}: {name!r} is {row[name]!r}, expected a string: correct the line")
    if not rows:
        raise UserError(f"{path} has no rows: check the file")
    return rows


def add_columns(rows: list[Row], predicted: list[Row]) -> list[Row]:
    """`rows` with the columns of `predicted`, called `predicted NAME` where the rows have a column of that name."""
    taken = set().union(*rows)
    names = dict.fromkeys(name for row in predicted for name in row)
    for name in names:
        new = name
        while new in taken:
            new = f"predicted {new}"
        names[name] = new
        taken.add(new)
    return [
        row | {names[name]: value for name, value in added.items()} for row, added in zip(rows, predicted, strict=True)
    ]
