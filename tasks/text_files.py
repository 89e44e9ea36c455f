"""Predicts the rows of a file and adds the predictions as columns.

Files are CSV, TSV or JSON lines, optionally .gz, or Parquet (with pyarrow). Intermediate predictions are stored in
`<output>.parts`: after an interruption, rerun the same command to resume.
"""

import csv
import gzip
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tasks.glue_files import format_of, read_rows
from utils.errors import UserError
from utils.files import file_digest, read_json, write_atomically, write_json
from utils.progress import print_line, progress_bar

ROWS_PER_PART = 4096
FORMATS = (".csv", ".tsv", ".jsonl", ".parquet")
Row = dict[str, Any]


def read_table(path: Path, columns: list[str]) -> list[tuple[int, Row]]:
    """Rows with their line numbers. Raises UserError naming the line if one of `columns` is not a string."""
    if format_of(path) == ".parquet":
        if not path.is_file():
            raise UserError(f"{path} does not exist: check the path")
        import pyarrow.parquet

        rows = list(enumerate(pyarrow.parquet.read_table(path).to_pylist(), 1))
    else:
        rows = list(read_rows(path, None, columns, exact=True))
    for line, row in rows:
        for name in columns:
            if not isinstance(row.get(name), str):
                raise UserError(
                    f"{path}, line {line}: {name!r} is {row.get(name)!r}, expected a string: correct the line"
                )
    if not rows:
        raise UserError(f"{path} has no rows: check the file")
    return rows


def write_table(path: Path, rows: list[Row]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO(newline="")
    if format_of(path) == ".parquet":
        import pyarrow.parquet

        content = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), content)
        return write_atomically(path, content.getvalue())
    if format_of(path) == ".jsonl":
        text.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    else:
        cells = [[as_cell(row.get(name, "")) for name in names] for row in rows]
        if format_of(path) == ".csv":
            csv.writer(text, lineterminator="\n").writerows([names, *cells])
        else:
            text.writelines("\t".join(cell.translate(NO_BREAKS) for cell in row) + "\n" for row in [names, *cells])
    content = text.getvalue().encode("utf-8")
    return write_atomically(path, gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


NO_BREAKS = str.maketrans("\t\r\n", "   ")  # TSV has no quoting


def as_cell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def predict_file(
    source: Path,
    target: Path,
    columns: dict[str, str],
    predict: Callable[[list[str], list[Row]], list[Row]],
    settings: dict[str, Any],
) -> None:
    """Writes the rows of `source`, with the columns that `predict` returns for them, to `target`. predict: takes the
    places of rows, for errors, and the rows by field. columns: column of each field. settings: all else that the
    predictions depend on. Intermediate predictions with other settings are an error."""
    extensions = (*FORMATS, ".npy") if settings["embed"] else FORMATS
    if format_of(target) not in extensions:
        raise UserError(f"{target}: unknown file extension: give one of {', '.join(extensions)}")
    rows = read_table(source, list(columns.values()))
    folder = target.with_name(f"{target.name}.parts")
    settings = json.loads(json.dumps(settings | {"input": file_digest(source)}, default=str))
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "settings.json"
    has_parts = any(path.stem.isdecimal() for path in folder.glob("*.json"))
    if has_parts and read_json(record, "the settings of the predictions") != settings:
        raise UserError(f"{folder} has predictions of another input, model or flags: remove it, or change --output")
    write_json(record, settings)
    added: list[Row] = []
    with progress_bar(len(rows), "prediction", "row") as bar:
        for first in range(0, len(rows), ROWS_PER_PART):
            part, chunk = folder / f"{first}.json", rows[first : first + ROWS_PER_PART]
            if not part.exists():
                places = [f"{source}, line {line}" for line, _ in chunk]
                fields = [{field: row[column] for field, column in columns.items()} for _, row in chunk]
                write_json(part, predict(places, fields), indent=None)
            added += read_json(part, "predictions")
            bar.update(len(chunk))
    if repeated := added[0].keys() & rows[0][1].keys():
        raise UserError(f"{source} has the column {min(repeated)!r} already: rename it")
    if target.suffix == ".npy":
        content = io.BytesIO()
        np.save(content, np.array([row["embedding"] for row in added], np.float32))
        write_atomically(target, content.getvalue())
    else:
        write_table(target, [row | new for (_, row), new in zip(rows, added, strict=True)])
    shutil.rmtree(folder)
    print_line(f"predictions for {len(rows)} rows in {target}")
