"""How the user's own files are read: bad rows, delimiter and encoding."""

import argparse
import codecs
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_recipe.utils.bad_rows import BadRows
from bert_recipe.utils.command_line import option, value_of
from bert_recipe.utils.text_files import TableFormat, TextFile


def one_character(text: str) -> str:
    character = {"\\t": "\t", "tab": "\t"}.get(text, text)
    if len(character) != 1 or character in '"\r\n':
        raise argparse.ArgumentTypeError(f"expected one character, or tab, not {text!r}")
    return character


def text_encoding(text: str) -> str:
    try:
        "".encode(text)  # codecs that are no text encodings fail here
        return codecs.lookup(text).name
    except LookupError as error:
        raise argparse.ArgumentTypeError(f"there is no encoding {text!r}") from error


@dataclass(frozen=True, kw_only=True)
class SkipOptions:
    """What happens with bad rows. output_dir: the folder for the list of those left out."""

    skip_bad: bool = option(
        "--skip-bad",
        bool,
        False,
        "leave out bad rows of training and development files, count them, and list them in "
        "skipped_FILE.log in --output-dir",
        needs=("--do-train or --do-eval",),
        result=True,
    )
    output_dir: Path = value_of("--output-dir", Path())

    def bad_rows(self, path: str | Path, is_predicted: bool = False) -> BadRows:
        """The bad rows of `path`. is_predicted: all rows need a prediction."""
        if is_predicted:
            return BadRows(path)
        log = self.output_dir / f"skipped_{Path(path).name}.log" if self.skip_bad else None
        return BadRows(path, log, "--skip-bad")


@dataclass(frozen=True)
class ReadingOptions(SkipOptions):
    """How tables and columns are read; --input and --output are inference.py's. decimal: mark of
    numbers in CSV and TSV.
    """

    delimiter: str | None = option(
        "--delimiter",
        one_character,
        None,
        "character between the columns, such as ';' or tab; by default as the extension says",
        ("--input",),
        result=True,
    )
    encoding: str | None = option(
        "--encoding",
        text_encoding,
        None,
        "encoding of text files, such as cp1252; by default UTF-8",
        ("--input",),
        result=True,
    )
    decimal: str = "."

    @property
    def table_format(self) -> TableFormat:
        return TableFormat(self.delimiter, self.encoding, self.decimal)

    def open_table(self, path: Path, bad: BadRows) -> TextFile:
        return TextFile(path, bad.add, self.table_format)


@dataclass(frozen=True)
class NumberReadingOptions(ReadingOptions):
    """How tables with numbers to learn or to predict are read."""

    decimal: str = option(
        "--decimal",
        (".", ","),
        ".",
        "mark of the numbers in CSV and TSV: with ',' as spreadsheets of many languages have, "
        "numbers to learn are read and predictions written so",
        ("--output",),
        options={"metavar": "MARK"},
        result=True,
    )


DEFAULT_READING = ReadingOptions()


def read_group(value: Any, column: str) -> str:
    """The group of a row. Raises ValueError if it has none."""
    text = "" if value is None else str(value).strip()
    is_nan = isinstance(value, float) and math.isnan(value)
    if text == "" or is_nan or isinstance(value, list | dict):
        raise ValueError(
            f"{column!r} is {value!r}, expected the name of the row's group, such as its document"
        )
    return text
