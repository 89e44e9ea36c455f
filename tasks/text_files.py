"""Files of texts: reads and writes their rows, and adds predictions as columns.

Files are CSV (standard quoting), TSV (no quoting) or JSON lines, optionally .gz, or Parquet (with pyarrow; not for
training). Intermediate predictions are stored in `<output>.parts`: after an interruption, rerun the same command to
resume.
"""

import csv
import gzip
import io
import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from utils.errors import UserError
from utils.files import file_digest, read_json, write_atomically, write_json
from utils.progress import print_line, progress_bar

ROWS_PER_PART = 4096
EXTENSIONS = (".tsv", ".csv", ".jsonl")
FORMATS = (".csv", ".tsv", ".jsonl", ".parquet")
Row = dict[str, Any]


def read_rows(
    path: Path, header: tuple[str, ...] | None, wanted: list[str], exact: bool
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the line number of each row and its values by column. Rows with missing columns are an error if `exact`;
    rows with extra columns always are. header: columns of a file without a header."""
    extension = format_of(path)
    if path.is_file() and extension not in EXTENSIONS:
        raise UserError(f"{path}: unknown file extension {extension}: give a file of {', '.join(EXTENSIONS)}")
    text = read_text(path)
    if extension == ".jsonl":
        yield from read_json_lines(path, text)
        return
    rows = read_csv(path, text) if extension == ".csv" else read_tsv(text)
    if header is None:
        header = tuple(next(rows, (1, []))[1])
        missing = [name for name in wanted if name not in header]
        if missing:
            found = ", ".join(map(repr, header)) or "nothing"
            raise UserError(f"{path} has no column {missing[0]!r}; it has {found}: check the columns' names")
        repeated = [name for name in wanted if header.count(name) > 1]
        if repeated:
            raise UserError(f"{path} has the column {repeated[0]!r} twice: rename one")
    for line, values in rows:
        if len(values) > len(header) or (exact and len(values) < len(header)):
            raise UserError(
                f"{path}, line {line} has {len(values)} columns, and the header has {len(header)}: correct it"
            )
        yield line, dict(zip(header, values, strict=False))


def format_of(path: Path) -> str:
    """The extension of `path`, ignoring compression."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def read_text(path: Path) -> str:
    if not path.is_file():
        raise UserError(f"{path} does not exist: check the path")
    content = path.read_bytes()
    try:
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is no complete gzip file ({error}): fetch it again") from error
    try:
        return content.decode("utf-8-sig")  # MRPC's files start with a byte order mark
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line} is not UTF-8: save the file as UTF-8") from error


def read_tsv(text: str) -> Iterator[tuple[int, list[str]]]:
    for line, row in enumerate(text.removesuffix("\n").split("\n") if text else [], 1):
        yield line, row.removesuffix("\r").split("\t")


def read_csv(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    start = 1
    try:
        for row in reader:
            if row:  # not an empty line
                yield start, row
            start = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}, line {start} is not CSV ({error}): correct the quotation marks") from error


def read_json_lines(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, row in enumerate(text.removesuffix("\n").split("\n") if text else [], 1):
        try:
            values = json.loads(row)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {line} is not JSON ({error}): correct or remove it") from error
        if not isinstance(values, dict):
            raise UserError(f"{path}, line {line} is not a JSON object: correct or remove it")
        yield line, values


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
        import numpy as np  # here, so that the command lines of training do not wait for it

        content = io.BytesIO()
        np.save(content, np.array([row["embedding"] for row in added], np.float32))
        write_atomically(target, content.getvalue())
    else:
        write_table(target, [row | new for (_, row), new in zip(rows, added, strict=True)])
    shutil.rmtree(folder)
    print_line(f"predictions for {len(rows)} rows in {target}")
