"""Tables: CSV, TSV, JSON lines and Parquet, also compressed, read row by row in bounded memory.

CSV has standard quoting; TSV has none, unless all of a user's file is written with it, as by
pandas. `on_bad` is called for bad input and may raise; else it is
left out.
"""

import csv
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bert_recipe.utils.bad_rows import BadRows
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.known_tools import DATA, LABEL_STUDIO, refuse_known
from bert_recipe.utils.parquet_values import class_names, named_class
from bert_recipe.utils.progress import print_once
from bert_recipe.utils.text_files import MAX_LINE, TABLES, TableFormat, TextFile
from bert_recipe.utils.words import LONE_SURROGATE

SEPARATORS = frozenset(",;\t|")  # of columns, in files of any program
SEPARATOR_LINE = re.compile(r'"?sep=(.)"?[\r\n]*', re.IGNORECASE)  # the first one, for Excel
BYTE_ORDER_MARK = "\ufeff"
# A whole cell of TSV with a quotation mark inside, in standard quoting.
QUOTED_CELL = re.compile(r'(?:^|\t)"(?:[^"\t]|"")*""(?:[^"\t]|"")*"(?:\t|\r?\n?$)')
QUOTED_HEADER = re.compile(r'"[^"\t]+"(?:\t"[^"\t]+")*\r?\n')
LIST_AS_TEXT = re.compile(r"""\[\s*(['"]).*\1\s*\]""", re.DOTALL)  # as pandas writes it to CSV

Row = dict[str, Any]


def read_rows(
    file: TextFile,
    columns: Sequence[str] | None = None,
    header: Sequence[str] | None = None,
    exact: bool = False,
    keeps_empty: bool = False,
) -> Iterator[tuple[int, Row]]:
    """Yields the number of each row's first line and its values by column, strings in CSV and TSV.
    A row with more cells than the header is bad.

    columns: the columns that are used; of a table with a header each must be there once. By default
        all of them.
    header: columns of a CSV or TSV file without a header.
    exact: with it, a row with fewer cells than the header is bad, and one with empty cells only is
        left out, unless it `keeps_empty` rows, as where all have a prediction; without it, the last
        columns of a shorter row are left out.
    """
    readers = {".jsonl": read_json_lines, ".json": read_json_list, ".parquet": read_parquet}
    if file.has_flags:
        readers[".txt"] = read_text_lines
    if file.format in readers:
        yield from readers[file.format](file, columns)
    elif file.format in TABLES:
        yield from read_delimited(file, columns, header, exact, keeps_empty)
    else:
        file.open().close()  # a missing file is another error
        raise UserError(
            f"{file.path}: unknown file extension: give a file of {', '.join(TABLES)}, .json; save "
            f"a spreadsheet as CSV"
        )


def read_delimited(
    file: TextFile,
    columns: Sequence[str] | None,
    header: Sequence[str] | None,
    exact: bool,
    keeps_empty: bool,
) -> Iterator[tuple[int, Row]]:
    """The rows of CSV and TSV, as `read_rows` describes them."""
    if header is None and (delimiter := found_delimiter(file)):
        print_once(f"note: {file.path}: its columns are separated by {delimiter!r}")
        file.delimiter = delimiter
    is_quoted = exact and header is None and file.format == ".tsv" and has_quoting(file)
    rows = read_quoted(file, "\t") if is_quoted else read_cells(file)
    has_header = header is None
    if header is None:
        header, problem = read_header(file, rows)
        problem = problem or column_problem(header, columns)
        if problem is not None and file.has_flags and "separate the columns" in problem:
            problem += ", or give --delimiter"
        if problem is not None:
            refuse_known(Path(file.path), DATA)
            file.on_bad(file.path, problem)
            return
    repeats = 0
    for number, cells in rows:
        is_empty = len(cells) > 1 and not any(cells)  # as spreadsheets write an empty row
        if exact and is_empty:
            if not keeps_empty:
                continue
            cells = [""] * len(header)  # it may have fewer or more
        if has_header and is_header_again(cells, header):
            repeats += 1
            continue
        excess = len(cells) - len(header)
        if excess > 0 or (exact and excess < 0):
            file.on_bad(file.where(number), wrong_count(file, len(cells), len(header)))
        else:
            yield number, dict(zip(header, cells, strict=False))
    if repeats and file.has_flags:
        several = f"{repeats} rows repeat the header, and are"
        what = several if repeats > 1 else "1 row repeats the header, and is"
        print_once(f"note: {file.path}: {what} left out")


def has_quoting(file: TextFile) -> bool:
    """Whether a TSV file is written with standard quoting, as pandas and this program do: so read,
    more rows have as many cells as the header; or the header, or cells with a quotation mark
    inside, show it, and fewer rows contradict. A text without quoting that only begins and ends
    with a quotation mark keeps them.
    """
    lines = TextFile(file.path, lambda where, why: None, TableFormat(encoding=file.encoding))
    delimiter = file.delimiter or "\t"
    shown = wrong_lines = 0
    width = 0  # of the header

    def watched() -> Iterator[str]:
        nonlocal shown, wrong_lines, width
        for line, _ in lines.checked_lines():  # also bad ones, which may be a part of a cell
            line_width = line.count(delimiter) + 1
            width = width or line_width
            wrong_lines += line_width != width and bool(line.strip("\r\n"))
            shown += QUOTED_CELL.search(line) is not None
            shown += lines.number == 1 and QUOTED_HEADER.fullmatch(line) is not None
            yield line

    csv.field_size_limit(MAX_LINE)
    reader = csv.reader(watched(), strict=True, delimiter=delimiter)
    num_rows = wrong_rows = 0
    while True:
        num_rows += 1
        try:
            cells = next(reader)
            wrong_rows += len(cells) not in (0, width)
        except StopIteration:
            break
        except csv.Error:
            wrong_rows += 1
    has_several_lines = num_rows <= lines.number  # a row; the end of the file was counted, too
    if width == 1 and has_several_lines:
        return not wrong_rows
    return wrong_rows - wrong_lines < shown


def is_header_again(cells: Sequence[str], header: Sequence[str]) -> bool:
    """Whether a row is the header of another file, which was appended to this one."""
    return len(cells) > 1 and [cells[0].removeprefix(BYTE_ORDER_MARK), *cells[1:]] == [*header]


def wrong_count(file: TextFile, count: int, expected: int) -> str:
    """What is wrong with a row of `count` cells."""
    comparison = "more" if count > expected else "fewer"
    advice = "correct the line"
    if count > expected and file.format == ".csv":
        advice = 'quote cells with commas with "'
    return f"{count} cells, {comparison} than the {expected} columns: {advice}"


def found_delimiter(file: TextFile) -> str | None:
    """The delimiter that the first line of a CSV file shows: the one that it declares (see
    SEPARATOR_LINE), or the semicolon or the tab if it has only one of these, and no comma. None if
    it shows none, or the user gave one.
    """
    if file.format != ".csv" or file.delimiter is not None:
        return None
    table_format = TableFormat(encoding=file.encoding)
    lines = iter(TextFile(file.path, lambda where, why: None, table_format))
    first_line = next(lines, "")
    declared = SEPARATOR_LINE.fullmatch(first_line)
    if declared:
        return declared[1]
    marks = [mark for mark in (",", ";", "\t") if mark in first_line]
    if marks in ([";"], ["\t"]):
        return marks[0]
    return None


def read_header(
    file: TextFile, rows: Iterator[tuple[int, list[str]]]
) -> tuple[list[str], str | None]:
    """The first row of a table, and what is wrong with it, or None. With a wrong header the other
    rows cannot be read.
    """
    problems: list[tuple[str, str]] = []
    on_bad = file.on_bad
    file.on_bad = lambda *problem: problems.append(problem)  # while the header is read
    _, header = next(rows, (1, []))
    file.on_bad = on_bad
    if not problems:
        return header, None
    where, why = problems[0]
    if where != file.path:  # a line of the file
        why = f"the header is {why}"
    return header, why


def read_texts(
    path: Path,
    columns: Sequence[str],
    others: Sequence[str] = (),
    table_format: TableFormat | None = None,
    bad: BadRows | None = None,
    is_whole: bool = False,
) -> list[tuple[int, Row]]:
    """All rows of a table with their line numbers.

    columns: those that each row must have, with a string.
    others: further ones that each row must have, with any value.
    is_whole: all rows with all columns of the table, for programs that write them, too.
    bad: takes the rows that are not so; by default these raise UserError.
    """
    bad_rows = BadRows(path) if bad is None else bad
    file = TextFile(path, bad_rows.add, table_format)
    rows = []
    needed = None if is_whole else (*columns, *others)
    for number, row in read_rows(file, needed, exact=True, keeps_empty=is_whole):
        problem = absent_column(row, (*columns, *others))
        if problem is not None:
            bad_rows.add(file.where(number), problem)
            continue
        not_strings = [name for name in columns if not isinstance(row[name], str)]
        if not_strings:
            name = not_strings[0]
            bad_rows.add(file.where(number), not_a_string(row[name], name))
            continue
        rows.append((number, row))
    if bad is None:
        bad_rows.finish()
    if not rows and not bad_rows.rows:
        raise UserError(f"{path} has no rows: check the file")
    return rows


def absent_column(row: Row, columns: Iterable[str]) -> str | None:
    """What is wrong if the row lacks one of `columns`."""
    for column in columns:
        if column not in row:
            has = ", ".join(map(repr, row))
            return f"no column {column!r}; it has {has}: check the column's name"
    return None


def not_a_string(value: Any, column: str) -> str:
    if isinstance(value, list | dict):
        return (
            f"{column!r} is a {type(value).__name__}, expected a string: give one object for each "
            f"row (pandas: to_json(FILE, orient='records', lines=True))"
        )
    return f"{column!r} is {value!r}, expected a string: correct the line"


def plain_row(row: Row, columns: Sequence[str] = ()) -> Row:
    """A row of an annotation tool as columns: of Label Studio's JSON-MIN, where several labels are
    `{"choices": [...]}`, these labels. columns: those that are used. Raises ValueError for a row
    that Prodigy's annotator did not accept, unless the answer is the label.
    """
    answer = row.get("answer")
    if "_task_hash" in row and (
        answer == "ignore" or (answer == "reject" and "answer" not in columns)
    ):
        advice = ""
        if columns and answer == "reject":
            advice = ", or learn accept and reject: --label-column answer"
        raise ValueError(f"Prodigy's answer is {answer!r}: leave the row out{advice}")
    return {name: plain_choice(value) for name, value in row.items()}


def plain_choice(value: Any) -> Any:
    is_choice = isinstance(value, dict) and isinstance(value.get("choices"), list)
    return value["choices"] if is_choice else value


def texts_in(row: Row, columns: Sequence[str]) -> list[str]:
    """The texts of columns that have one text or, as in FlagEmbedding's files, a list of them.
    Raises ValueError for anything else.
    """
    texts_of_columns: list[str] = []
    for name in columns:
        texts = row[name] if isinstance(row[name], list) else [row[name]]
        if not texts:
            raise ValueError(f"no text in {name!r}: give one")
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise ValueError(not_a_string(wrong[0], name))
        texts_of_columns += texts
    return texts_of_columns


def check_lists(place: str, row: Row, columns: Sequence[str]) -> None:
    """Raises UserError if a column of a file's first row, at `place`, has a list as text."""
    for name in columns:
        if isinstance(row[name], str) and LIST_AS_TEXT.fullmatch(row[name]):
            raise UserError(
                f"{place}: {name!r} is a list that was written as text, {row[name]!r:.40}: give "
                f"JSON lines (pandas: to_json(FILE, orient='records', lines=True))"
            )


def column_problem(names: Sequence[str], columns: Sequence[str] | None) -> str | None:
    """What is wrong if not each of `columns`, by default each of `names`, is in `names` once."""
    if not names:
        return "the file is empty: give one with a header"
    for column in columns or names:
        if column not in names:
            advice = "check the column's name; the first line must have the names"
            if len(names) == 1 and not SEPARATORS.isdisjoint(names[0]):
                advice = "separate the columns with commas, in a .tsv with tabs"
            return f"no column {column!r}; it has {', '.join(map(repr, names))}: {advice}"
        if names.count(column) > 1:
            return f"two columns {column!r}: rename one"
    return None


def read_cells(file: TextFile) -> Iterator[tuple[int, list[str]]]:
    """The rows of CSV, without empty lines, and of TSV."""
    if file.format == ".tsv":
        for line in file:
            cells = line.removesuffix("\n").removesuffix("\r").split(file.delimiter or "\t")
            yield file.number, cells
        return
    yield from read_quoted(file, ",")


def read_quoted(file: TextFile, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The rows of a table with standard quoting. delimiter: if the user gave none."""
    csv.field_size_limit(MAX_LINE)
    problems: list[tuple[str, str]] = []  # of the lines of the row
    lines = without_separator_line(file, problems)
    reader = csv.reader(lines, strict=True, delimiter=file.delimiter or delimiter)
    start = 1  # the first line of the row
    while True:
        problems.clear()
        try:
            cells = next(reader)
            if problems:
                file.on_bad(*problems[0])
            elif cells:
                yield start, cells
        except StopIteration:
            return
        except csv.Error as error:
            advice = 'quote cells with " and double quotes inside them'
            if "unexpected end" in str(error):  # the row has taken all lines to the end
                where = f"{file.path}, after line {start - 1}"
                why = f"not valid CSV ({error}): the quotation mark of line {start} is not closed"
                file.on_bad(where, f"{why}; {advice}")
            else:
                file.on_bad(file.where(start), f"not valid CSV ({error}): {advice}")
        start = file.number + 1


def without_separator_line(file: TextFile, problems: list[tuple[str, str]]) -> Iterator[str]:
    """The lines of CSV, without a first one that only declares the delimiter; also bad ones, whose
    quotation marks tell where the row ends. problems: gets where bad lines are, and why.
    """
    for line, why in file.checked_lines():
        if why is not None:
            problems.append((file.where(), why))
        is_first = file.number == 1 and file.first == 0
        if not (is_first and SEPARATOR_LINE.fullmatch(line)):
            yield line


def read_text_lines(
    file: TextFile, columns: Sequence[str] | None = None
) -> Iterator[tuple[int, Row]]:
    """The lines of a .txt file, also empty ones, in a column `text`."""
    if problem := column_problem(["text"], columns):
        refuse_known(Path(file.path), DATA)
        file.on_bad(file.path, problem)
        return
    for line in file:
        yield file.number, {"text": line.rstrip("\r\n")}


def read_json_lines(
    file: TextFile, columns: Sequence[str] | None = None
) -> Iterator[tuple[int, Row]]:
    """The objects of JSON lines. Empty lines are left out."""
    for line in file:
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            why = None
            refuse_nested(file, row)
            if not isinstance(row, dict):
                why = "not a JSON object: a .jsonl file has one per line"
            elif "\\u" in line:  # else all characters are valid
                why = bad_text(row, columns)
        except (ValueError, RecursionError) as error:
            why = f"not valid JSON ({error}): a .jsonl file has one JSON object per line"
        if why is None:
            yield file.number, row
        else:
            file.on_bad(file.where(), why)


def read_json_list(
    file: TextFile, columns: Sequence[str] | None = None
) -> Iterator[tuple[int, Row]]:
    """The objects in the list of a .json file, numbered from 1, those of the list `data` of a
    single object, as `datasets` and pandas have it, or those of JSON lines.
    """
    lines, problems = [], []
    for line, problem in file.checked_lines():
        lines.append(line)
        if problem is not None:
            problems.append((file.where(), problem))
    text = "".join(lines)
    is_list = text.lstrip().startswith("[")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        if is_list and problems:
            file.on_bad(file.path, "{}: {}".format(*problems[0]))
            return
        if is_list:
            file.on_bad(file.path, f"not valid JSON ({error}): give a list of objects")
            return
        content = None  # JSON lines are not one value
    refuse_nested(file, content)
    rows = content.get("data") if isinstance(content, dict) else content
    if not isinstance(rows, list):
        file_of_lines = TextFile(file.path, file.on_bad, TableFormat(encoding=file.encoding))
        yield from read_json_lines(file_of_lines, columns)
        return
    for number, row in enumerate(rows, 1):
        refuse_nested(file, row)
        why = "not a JSON object" if not isinstance(row, dict) else bad_text(row, columns)
        if why is None:
            yield number, row
        else:
            file.on_bad(file.where(number), why)


def refuse_nested(file: TextFile, row: Any) -> None:
    """Raises UserError for a task of Label Studio with its annotations."""
    if not isinstance(row, dict) or not isinstance(row.get("data"), dict):
        return
    if any(isinstance(row.get(name), list) for name in ("annotations", "completions")):
        raise UserError(f"{file.path}: {LABEL_STUDIO}")


def bad_text(row: Row, columns: Sequence[str] | None) -> str | None:
    """Why a string in `columns` of `row` is not a valid text; None if all are."""
    for text in strings_in(row if columns is None else [row.get(name) for name in columns]):
        if len(text) > MAX_LINE:
            return f"the text is longer than {MAX_LINE >> 20} MB: divide it"
        if "\0" in text:
            return "NUL characters in the text: convert or remove it"
        if LONE_SURROGATE.search(text):
            return (
                "half of a surrogate pair, or bytes that are not UTF-8, in the text: correct it, "
                "or convert the file with iconv"
            )
    return None


def strings_in(value: Any) -> Iterator[str]:
    """All strings in a JSON value, also the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from strings_in(part)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from strings_in(key)
            yield from strings_in(part)


def read_parquet(file: TextFile, columns: Sequence[str] | None = None) -> Iterator[tuple[int, Row]]:
    """The rows of a Parquet file, numbered from 1."""
    import pyarrow.parquet

    number = 0
    try:
        with file.open() as raw, pyarrow.parquet.ParquetFile(raw) as table:
            if problem := column_problem(table.schema_arrow.names, columns):
                if file.includes(0):
                    file.on_bad(file.path, problem)
                return
            classes = class_names(table.schema_arrow.metadata)
            for group in range(table.num_row_groups):
                metadata = table.metadata.row_group(group)
                if not file.includes(first_byte(metadata)):
                    number += metadata.num_rows
                    continue
                for cells in parquet_cells(table, group, columns):
                    number += 1
                    row, why = parquet_row(cells, classes)
                    why = why or bad_text(row, columns)
                    if why is None:
                        yield number, row
                    else:
                        file.on_bad(file.where(number), why)
    except (pyarrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None):
            raise
        why = f"the parquet file is truncated or damaged ({error}): download it again"
        file.on_bad(f"{file.path}, after row {number}", why)


def first_byte(metadata: Any) -> int:
    """Where a row group starts in its file. metadata: pyarrow's of the group."""
    chunks = [metadata.column(index) for index in range(metadata.num_columns)]
    return min(chunk.dictionary_page_offset or chunk.data_page_offset for chunk in chunks)


def parquet_cells(
    table: Any, group: int, columns: Sequence[str] | None
) -> Iterator[dict[str, Any]]:
    """The cells of each row of a row group by column, as pyarrow's scalars."""
    names = columns or table.schema_arrow.names
    for batch in table.iter_batches(batch_size=256, row_groups=[group], columns=columns):
        for index in range(batch.num_rows):
            yield {name: batch.column(name)[index] for name in names}


def parquet_row(cells: dict[str, Any], classes: dict[str, list[str]]) -> tuple[Row, str | None]:
    """The values of a row, and what is wrong with them. classes: names of classes by column."""
    try:
        row = {name: cell.as_py() for name, cell in cells.items()}
    except UnicodeDecodeError:
        return {}, "not UTF-8: convert it"
    except (ValueError, OverflowError, LookupError) as error:  # such as times after the year 9999
        return {}, f"Python has no such value ({error}): leave this column out of the file"
    for name in classes.keys() & row.keys():
        row[name] = named_class(row[name], classes[name])
    return row, None
