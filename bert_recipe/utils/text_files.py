"""Text files of lines, also compressed or in another encoding, read in bounded memory.

`on_bad` is called for bad input and may raise; else it is left out.
"""

import bz2
import codecs
import gzip
import io
import itertools
import re
import sys
import unicodedata
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn, cast

from bert_recipe.utils.errors import UserError, listed
from bert_recipe.utils.files import is_hidden, refuse_pointer
from bert_recipe.utils.known_tools import DATA, refuse_known
from bert_recipe.utils.progress import print_once

# What reading a truncated or damaged compressed file raises; an OSError only without `errno`.
DECOMPRESSION_ERRORS = (EOFError, zlib.error, OSError)
MAX_LINE = 64 << 20  # bytes of a line, characters of a cell
TABLES = (".csv", ".tsv", ".jsonl", ".parquet")
FORMATS = (*TABLES, ".json", ".txt", ".xml")
SPLIT_WORDS = {  # in the names of files, also those that other languages have for them
    "train": "train|trainings?|entrainement|entrenamiento|treino|treinamento|训练",
    "test": "test|testing|holdout|heldout|prueba|teste|测试",
    "development": "dev|devel|development|eval|evaluation|val|valid|valida(tion|cion|cao)|验证",
    "predictions": "predictions|predicted|preds|submission",
}
AFTER_SPLIT_WORD = "set|data|daten|集"  # such as testset
# Of a file's name, also reviewsTest or test2.
WORD = re.compile("[A-Z]?[a-z]+|[A-Z]+(?![a-z])|(训练|测试|验证)集?")
ACCENTS = re.compile("[\u0300-\u036f]")
PART_OF_DUMP = re.compile(r"(?<=\.xml)-p\d+p\d+$")  # by the numbers of Wikipedia's pages
COMPRESSIONS = (".gz", ".bz2", ".zst")
OTHER_MARKS = [
    (getattr(codecs, f"BOM_UTF{bits}_{end}"), f"UTF-{bits}")
    for bits in (32, 16)
    for end in ("LE", "BE")
]

OnBad = Callable[[str, str], Any]  # called with where bad input is, and why


class TableFormat(NamedTuple):
    """How the user says that a file is written.

    delimiter: between columns; None: as the extension says.
    encoding: None for UTF-8.
    decimal: the mark of numbers in CSV and TSV, a point or a comma.
    """

    delimiter: str | None = None
    encoding: str | None = None
    decimal: str = "."


class Recoded(io.TextIOWrapper):
    """The lines of a text in another encoding, as UTF-8."""

    def readline(self, size: int = -1) -> bytes:
        return super().readline(size).encode()


def raise_error(where: str, why: str) -> NoReturn:
    """The default `on_bad`."""
    raise UserError(f"{where}: {why}")


def kind_of(path: str) -> tuple[str, str]:
    """Format and compression, as file extensions; empty if there is none that is known."""
    name = path.lower()
    compression = next((suffix for suffix in COMPRESSIONS if name.endswith(suffix)), "")
    name = PART_OF_DUMP.sub("", name.removesuffix(compression))
    if compression and name.endswith(".json"):  # as in C4: one object per line
        return ".jsonl", compression
    return next((suffix for suffix in FORMATS if name.endswith(suffix)), ""), compression


def decompress(file: BinaryIO, compression: str) -> BinaryIO:
    """The decompressed bytes of `file`. compression: one of COMPRESSIONS, or empty."""
    if compression == ".zst":
        import pyarrow  # zstandard's own reader takes a truncated file for a complete one

        return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))
    if compression == ".gz":
        return cast(BinaryIO, gzip.open(file))
    if compression == ".bz2":
        return cast(BinaryIO, bz2.open(file))
    return file


class TextFile:
    """A file of lines or of rows. Iterates over the lines with their ends, without bad ones.

    number: the current line, from 1.
    first: the byte where the first line starts, in subclasses that read a part.
    table_format: given by programs that have flags for it.
    """

    first = 0

    def __init__(
        self,
        path: str | Path,
        on_bad: OnBad = raise_error,
        table_format: TableFormat | None = None,
    ):
        self.path = str(path)
        self.on_bad = on_bad
        self.number = 0
        self.format, self.compression = kind_of(self.path)
        self.has_flags = table_format is not None
        self.delimiter, self.encoding, _ = table_format or TableFormat()
        if self.encoding is not None and self.format == ".parquet":
            raise UserError(f"{self.path}: --encoding has no effect on Parquet: leave it out")
        if self.delimiter is not None and self.format in (".jsonl", ".parquet", ".json"):
            raise UserError(f"{self.path}: --delimiter has no effect on this format: leave it out")

    def open(self) -> BinaryIO:
        """The bytes as they are stored."""
        path = Path(self.path)
        if not path.is_file():
            refuse_known(path, DATA)
            raise UserError(f"{path} {why_no_file(path)}")
        refuse_pointer(path)
        if not self.format:
            refuse_known(path, DATA)
        return path.open("rb")

    def open_lines(self) -> tuple[BinaryIO, int]:
        """The text, at the first line to read, and the number of bytes to read."""
        file = decompress(self.open(), self.compression)
        if self.encoding is not None:
            file = cast(BinaryIO, Recoded(file, self.encoding, newline="\n"))
        return file, sys.maxsize

    def lines_before(self) -> int:
        """The number of lines before byte `first`."""
        return 0

    def includes(self, position: int) -> bool:
        """Whether a row group of Parquet that starts at byte `position` is to be read."""
        return True

    def where(self, number: int | None = None) -> str:
        """The line or row `number`, by default the current one, for messages."""
        number = self.number if number is None else number
        is_row = self.format == ".parquet"
        if is_row:
            return f"{self.path}, row {number}"
        return f"{self.path}:{self.lines_before() + number}"

    def __iter__(self) -> Iterator[str]:
        for line, why in self.checked_lines():
            if why is None:
                yield line
            else:
                self.on_bad(self.where(), why)

    def checked_lines(self) -> Iterator[tuple[str, str | None]]:
        """All lines, each with what is wrong with it, or None: for readers whose records may have
        several lines. A byte that is not UTF-8 is half of a surrogate pair.
        """
        try:
            file, size = self.open_lines()
            with file:
                for raw in self.split(file, size):
                    self.number += 1
                    starts_file = self.number == 1 and self.first == 0
                    marks = [name for mark, name in OTHER_MARKS if raw.startswith(mark)]
                    if starts_file and marks:
                        advice = f"convert it with iconv -f {marks[0]} -t UTF-8"
                        if self.has_flags:
                            advice += f", or give --encoding {marks[0]}"
                        self.on_bad(self.path, f"{marks[0]}, not UTF-8: {advice}")
                        return
                    if starts_file and self.format != ".json" and is_one_line_of_several(raw):
                        advice = "convert it with tr '\\r' '\\n' < FILE > NEW_FILE"
                        self.on_bad(
                            self.path, f"lines end with carriage returns, as on old Macs: {advice}"
                        )
                        return
                    line, why = decode(raw, "utf-8-sig" if starts_file else "utf-8")
                    if why is not None and self.has_flags and "iconv" in why:
                        why += ", or give --encoding"
                    yield line, why
        except UnicodeError as error:
            self.on_bad(
                f"{self.path}, after line {self.number}",
                f"not {self.encoding} ({error}): give its --encoding",
            )
        except DECOMPRESSION_ERRORS as error:
            if getattr(error, "errno", None):
                raise
            why = f"the file is truncated or damaged ({error}): download it again"
            self.on_bad(f"{self.path}, after line {self.number}", why)

    def split(self, file: BinaryIO, size: int) -> Iterator[bytes]:
        """The lines as bytes; of a longer line `MAX_LINE` + 1 bytes."""
        while size > 0 and (raw := file.readline(min(size, MAX_LINE + 1))):
            size -= len(raw)
            yield raw
            while len(raw) > MAX_LINE and not raw.endswith(b"\n") and size > 0:
                raw = file.readline(min(size, MAX_LINE + 1))
                size -= len(raw)


def table_parts(path: Path) -> list[Path]:
    """The files of one table: those in a folder, those whose names match `path` if that has a `*`,
    or `path` alone. Raises UserError if there are none, or if they are not one split.
    """
    if path.is_dir():
        refuse_known(path, DATA)
        visible = sorted(part for part in path.iterdir() if not part.name.startswith((".", "_")))
        parts = [part for part in visible if kind_of(part.name)[0] in (*TABLES, ".json")]
        if not parts:
            raise UserError(f"{path} is a folder without {', '.join(TABLES)}: check the path")
    elif "*" in path.name and not path.exists():
        parts = sorted(part for part in path.parent.glob(path.name) if not is_hidden(part))
        if not parts:
            raise UserError(f"{path}: no file has such a name: check the path")
    else:
        return [path]
    folder = path if path.is_dir() else path.parent
    names = [part.name for part in parts]
    check_one_split(path, names, f"name a single file, or those of one split, as '{folder}/train*'")
    compressed = [name for name in names if kind_of(name)[1]]
    for name in compressed:
        if name.removesuffix(kind_of(name)[1]) in names:
            raise UserError(f"{path} has {name} and the same without compression: remove one")
    if len({kind_of(part.name)[0] for part in parts}) > 1:
        raise UserError(
            f"{path}: {parts[0].name} and {parts[-1].name} have different formats: name files of "
            f"one format, such as '{folder}/*.csv'"
        )
    print_once(f"note: {path}: reads {listed(names)}")
    return parts


def check_one_split(path: Path, names: Sequence[str], advice: str) -> None:
    """Raises UserError if the files `names`, which `path` means, are of several splits, or only
    some of them have the word of a split in their names. advice: what to do besides moving files.
    """
    names_of_split: dict[str, list[str]] = {}
    for name in names:
        for split in splits_of(name) or [""]:
            names_of_split.setdefault(split, []).append(name)
    if len(names_of_split) < 2:
        return
    kinds = []
    for split, members in sorted(names_of_split.items()):
        kind = f"of {split}" if split else "without the word of a split"
        kinds.append(f"{listed(members, 2)} ({kind})")
    raise UserError(
        f"{path} has {' and '.join(kinds)}, and all would be read: {advice}, or move the others to "
        "another folder"
    )


def splits_of(name: str) -> list[str]:
    """The splits whose words are in the name of a file."""
    plain = ACCENTS.sub("", unicodedata.normalize("NFKD", name))
    words = [match[0].lower() for match in WORD.finditer(plain)]
    words += ["".join(pair) for pair in itertools.pairwise(words)]  # such as held-out
    return [
        split
        for split, names in SPLIT_WORDS.items()
        if any(re.fullmatch(f"({names})({AFTER_SPLIT_WORD})?", word) for word in words)
    ]


def why_no_file(path: Path) -> str:
    """What to say of a path that is not a regular file."""
    if path.is_dir():
        return "is a folder: check the path"
    if path.exists():  # files are read more than once
        return "is a pipe or a device: write its content to a file, and give that"
    return "does not exist: check the path"


def is_one_line_of_several(raw: bytes) -> bool:
    """Whether the first line of a file is all of it, and has line ends of old Macs."""
    return not raw.endswith(b"\n") and b"\r" in raw.rstrip(b"\r")


def decode(raw: bytes, encoding: str) -> tuple[str, str | None]:
    """The text of a line, and what is wrong with it, or None."""
    if len(raw) > MAX_LINE:
        return "", f"the line is longer than {MAX_LINE >> 20} MB: divide it"
    try:
        line = raw.decode(encoding)
    except UnicodeDecodeError as error:
        byte = f"byte 0x{raw[error.start]:02x} at {error.start}"
        escaped = raw.decode(encoding, "surrogateescape")
        return escaped, f"not UTF-8 ({byte}): convert it with iconv"
    if "\0" in line:
        return line, "NUL bytes: this is not UTF-8 text; convert or remove it"
    return line, None
