"""Tables that are written: their names, their content, and columns that are added to the rows of
another table. CSV and TSV have standard quoting, so that pandas and spreadsheets read them.
"""

import codecs
import csv
import gzip
import io
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import write_atomically
from bert_recipe.utils.tables import Row, found_delimiter
from bert_recipe.utils.text_files import (
    TABLES,
    TableFormat,
    TextFile,
    decompress,
    kind_of,
    table_parts,
)

OUTPUTS = (*TABLES, ".csv.gz", ".tsv.gz", ".jsonl.gz")


def check_output(
    target: Path, sources: Iterable[Path], extensions: tuple[str, ...] = OUTPUTS
) -> None:
    """Raises UserError if `target` cannot be written; makes its folder."""
    if not target.name.lower().endswith(extensions):
        raise UserError(f"{target}: unknown file extension: give one of {', '.join(extensions)}")
    if target.is_dir():
        raise UserError(f"{target} is a folder: give the name of a file")
    for source in sources:
        if target.exists() and source.exists() and target.samefile(source):
            raise UserError(
                f"--output {target} is the file to predict, which would be replaced: give another "
                f"name"
            )
    target.parent.mkdir(parents=True, exist_ok=True)


def add_columns(rows: list[Row], predicted: list[Row]) -> list[Row]:
    """`rows` with the columns of `predicted`, called `predicted NAME` where the rows have a column
    of that name.
    """
    taken: set[str] = set().union(*rows)
    new_names: dict[str, str] = {}
    for row in predicted:
        for name in row:
            if name in new_names:
                continue
            new_name = name
            while new_name in taken:
                new_name = f"predicted {new_name}"
            new_names[name] = new_name
            taken.add(new_name)
    table = []
    for row, added in zip(rows, predicted, strict=True):
        table.append(row | {new_names[name]: value for name, value in added.items()})
    return table


def format_like(source: TextFile, decimal: str) -> TableFormat:
    """How to write CSV and TSV made from `source`: the delimiter of CSV, and UTF-8, with a byte
    order mark where `source` has one or another encoding. Without it, spreadsheets that write such
    files would show other letters for accents.
    """
    delimiter = encoding = None
    if source.format == ".csv":
        delimiter = source.delimiter or found_delimiter(source)
    if source.format != ".parquet":
        with decompress(source.open(), source.compression) as file:
            has_mark = file.read(3) == codecs.BOM_UTF8
        is_utf8 = source.encoding is None or codecs.lookup(source.encoding).name == "utf-8"
        encoding = "utf-8-sig" if has_mark or not is_utf8 else None
    return TableFormat(delimiter, encoding, decimal)


def write_like(stem: Path, rows: list[Row], source: Path, table_format: TableFormat) -> Path:
    """Writes `rows`, which were made from the file or the files `source`, in the format of the
    first of these, as `stem` with its extension (CSV for .txt); removes such files of other
    formats. Returns the path.
    """
    file = TextFile(table_parts(source)[0], table_format=table_format)
    extension = {".json": ".jsonl"}.get(file.format, file.format)
    if extension not in TABLES:
        extension = ".csv"
    path = stem.with_name(stem.name + extension)
    write_atomically(path, encode_table(path, rows, format_like(file, table_format.decimal)))
    for name in names_like(stem.name):
        if name != path.name:
            path.with_name(name).unlink(missing_ok=True)
    return path


def names_like(stem: str) -> list[str]:
    """The names that `write_like` may give."""
    return [stem + extension for extension in TABLES]


def encode_table(path: Path, rows: list[Row], table_format: TableFormat | None = None) -> bytes:
    """The content of the file `path`, one of TABLES or its .gz. table_format: of CSV and TSV, where
    TSV has tabs. Raises UserError if the format cannot store `rows`.
    """
    columns = list(dict.fromkeys(itertools.chain(*rows)))  # of all rows, in order
    format_, compression = kind_of(path.name)
    if format_ == ".parquet":
        return encode_parquet(path, rows, columns)
    delimiter, encoding, decimal = table_format or TableFormat()
    if format_ == ".jsonl":
        lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
        # Half of a surrogate pair, as SQuAD files may have, becomes a JSON escape.
        encoded = "".join(lines).encode("utf-8", "backslashreplace")
    else:
        table = [columns]
        for row in rows:
            table.append([as_cell(row.get(column), decimal) for column in columns])
        separator = "\t" if format_ == ".tsv" else delimiter or ","
        encoded = quoted_lines(table, separator).encode(encoding or "utf-8")
    return gzip.compress(encoded, mtime=0) if compression else encoded


def quoted_lines(rows: Iterable[Sequence[str]], delimiter: str) -> str:
    """Rows of cells as lines, with standard quoting."""
    lines: list[str] = []

    class Lines:
        def write(self, line: str) -> None:
            lines.append(line.removesuffix("\r\n") + "\n")

    # The writer quotes cells with a character of its line ends: also those with one of old Macs.
    csv.writer(Lines(), delimiter=delimiter, lineterminator="\r\n").writerows(rows)
    return "".join(lines)


def encode_parquet(path: Path, rows: list[Row], columns: list[str]) -> bytes:
    import pyarrow.parquet

    content = io.BytesIO()
    try:
        table = pyarrow.table({name: [row.get(name) for row in rows] for name in columns})
        pyarrow.parquet.write_table(table, content)
    except (pyarrow.ArrowException, OverflowError) as error:
        raise UserError(
            f"{path}: Parquet cannot store these columns ({error}): write .jsonl"
        ) from error
    return content.getvalue()


def as_cell(value: Any, decimal: str) -> str:
    """The text of a value in CSV and TSV. decimal: the mark of floats, a point or a comma."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and decimal == ",":
        return json.dumps(value).replace(".", ",")
    if isinstance(value, bool | int | float | list | dict):
        return json.dumps(value, default=str)
    return str(value)
