"""Files of columns for token classification: a word per line, an empty line between sentences, as
CoNLL's and CoNLL-U's.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bert_recipe.tasks.ner.tags import PREFIXED, TagForm, types_of
from bert_recipe.tasks.reading import read_group
from bert_recipe.utils.bad_rows import BadRows
from bert_recipe.utils.errors import UserError, listed
from bert_recipe.utils.text_files import TextFile

NUMBER = re.compile(r"\d+")
# In CoNLL-U: "2-3" for a word that is written as one and divided, "3.1" for one that is not written
UNWRITTEN = re.compile(r"\d+[-.]\d+")
COMMENT = re.compile(r"#\s*\S+\s*=\s")
CONLL_U_COLUMNS = 10  # the fourth one has parts of speech, the last one remarks


class SentenceColumns(NamedTuple):
    """Columns that the user chose: numbers from 1 in files of columns, names in JSON and Parquet.

    words, tags: None if they follow from the file's form.
    group: of what is held out together; None for none.
    """

    words: str | None = None
    tags: str | None = None
    group: str | None = None


@dataclass
class Columns:
    """What the lines of a file have in common, but for comments.

    num_columns, is_tabbed: of the first word.
    tags: of the column `tag_at`, without those of words that are not written.
    counted: the line of the first sentence of several words whose first columns count from 0 or 1.
    uncounted: of the first one whose first columns are other numbers.
    """

    tag_at: int | None
    num_columns: int = 0
    is_tabbed: bool = False
    tags: set[str] = field(default_factory=set)
    counted: int | None = None
    uncounted: int | None = None
    first_column: list[str] = field(default_factory=list)  # of the current sentence
    start: int = 0  # its line

    def add(self, number: int, line: str, columns: list[str], has_tag: bool) -> None:
        """Takes line `number`, which is in a sentence and has the `columns`; a bad one without its
        tag.
        """
        if not self.num_columns:
            self.num_columns, self.is_tabbed = len(columns), "\t" in line
        if not self.first_column:
            self.start = number
        self.first_column.append(columns[0])
        if not has_tag or self.tag_at is None or UNWRITTEN.fullmatch(columns[0]):
            return
        if self.tag_at == -1:
            has_tag = len(columns) == self.num_columns > 1
        if has_tag and self.tag_at < len(columns):
            self.tags.add(columns[self.tag_at])

    def end_sentence(self) -> None:
        """Looks at the numbers of the sentence whose lines were added."""
        written = [value for value in self.first_column if not UNWRITTEN.fullmatch(value)]
        self.first_column = []
        if len(written) < 2 or not all(map(NUMBER.fullmatch, written)):
            return
        numbers = [int(value) for value in written]
        if numbers[0] in (0, 1) and numbers == [*range(numbers[0], numbers[0] + len(numbers))]:
            self.counted = self.counted or self.start
        else:
            self.uncounted = self.uncounted or self.start


@dataclass(frozen=True)
class ColumnLayout:
    """How a file of columns is read.

    num_columns, is_tabbed: of its first word.
    is_numbered: whether the first column numbers the words of each sentence.
    word_at, tag_at: indices of columns; tag_at is None without tags, -1 for the last column.
    needed: number of columns that each line must have.
    """

    num_columns: int
    is_tabbed: bool
    is_numbered: bool
    word_at: int
    tag_at: int | None
    needed: int
    group_at: int | None = None

    def is_comment(self, line: str, columns: list[str]) -> bool:
        """Whether a line that begins with # and is before a sentence is a comment, not the word
        "#".
        """
        if self.is_numbered or len(columns) != self.num_columns:
            return True
        lacks_tab = self.is_tabbed and "\t" not in line
        return lacks_tab or COMMENT.match(line) is not None

    def is_unwritten(self, columns: list[str]) -> bool:
        return self.is_numbered and UNWRITTEN.fullmatch(columns[0]) is not None


Layouts = dict[tuple[str, bool], ColumnLayout]  # by path, and whether tags are read


def find_columns(file: TextFile, tag_at: int | None) -> Columns:
    """What the lines of `file` have in common. tag_at: None without tags."""
    summary = Columns(tag_at)
    for line, problem in itertools.chain(file.checked_lines(), [("", None)]):
        line = line.rstrip("\r\n")
        columns = split_line(file, line)
        if columns[:1] == ["-DOCSTART-"] or (line.startswith("#") and not summary.first_column):
            continue
        if line.strip():
            summary.add(file.number, line, columns, has_tag=problem is None)
        else:
            summary.end_sentence()
    return summary


def find_layouts(
    files: Sequence[tuple[TextFile, bool]], chosen: SentenceColumns
) -> tuple[Layouts, set[str]]:
    """The layout of each file, and the tags in all of them.

    files: each with whether its tags are to be read.
    chosen: the user's columns.
    """
    layouts: Layouts = {}
    tags: set[str] = set()
    for file, tagged in files:
        word_at = column_index(file, "--text-column", chosen.words)
        tag_at = column_index(file, "--label-column", chosen.tags)
        group_at = column_index(file, "--group-column", chosen.group) if tagged else None
        needed = max(word_at or 0, tag_at or 0, group_at or 0) + 1
        if tag_at is None:
            tag_at = -1  # the last column
        columns = find_columns(file, tag_at if tagged else None)
        if tagged and word_at is not None and word_at == tag_at % max(columns.num_columns, 1):
            raise UserError(
                f"{file.path}: column {word_at + 1} would have the words and the tags: give other "
                f"numbers for --text-column and --label-column"
            )
        is_numbered = word_at != 0 and has_numbers(file, columns, word_at is None)
        if word_at is None:
            word_at = 1 if is_numbered else 0
        layouts[file.path, tagged] = ColumnLayout(
            columns.num_columns,
            columns.is_tabbed,
            is_numbered,
            word_at,
            columns.tag_at,
            needed,
            group_at,
        )
        tags |= columns.tags
    return layouts, tags


def has_numbers(file: TextFile, columns: Columns, decides: bool) -> bool:
    """Whether the first column numbers the words. decides: the word's column depends on it. Raises
    UserError if it does in some sentences only.
    """
    other_columns = 1 if columns.tag_at is None else 2  # the word, and its tag
    if columns.counted is None or columns.num_columns <= other_columns:
        return False
    if decides and columns.uncounted is not None:
        raise UserError(
            f"{file.path}: the first column counts the words at line {columns.counted}, and does "
            f"not at line {columns.uncounted}: correct it, or say which column has the words with "
            f"--text-column 1 or --text-column 2"
        )
    return True


def column_index(file: TextFile, flag: str, number: str | None) -> int | None:
    """The index of the column that the user chose by its number from 1."""
    if number is None:
        return None
    if not re.fullmatch("[1-9][0-9]{0,3}", number):
        raise UserError(
            f"{flag} {number}: the columns of {file.path} have no names: give the number of the "
            f"column, from 1"
        )
    return int(number) - 1


def split_line(file: TextFile, line: str) -> list[str]:
    """The columns of a line. Only U+0020 divides them: another space, such as a no-break space,
    belongs to its column.
    """
    separator = file.delimiter
    if not separator and "\t" in line:
        separator = "\t"
    if separator:
        return line.split(separator)
    return [part for part in line.split(" ") if part]


def read_columns(
    file: TextFile, layout: ColumnLayout, form: TagForm, bad: BadRows
) -> Iterator[tuple[str, list[str], list[str], str]]:
    """The first line, the words, the tags, if any, and the group, if any, of each sentence without
    bad lines. The word is in the first column; in the second one if the first one numbers the
    words, as in CoNLL-U. The tag is in the last column.
    """
    blocks = [*read_blocks(file, layout, form, bad)]
    if layout.tag_at == -1:
        check_tag_columns(file, [rows for _, rows in blocks], layout, form)
    for start, rows in blocks:
        tags: list[str] = []
        if layout.tag_at is not None:
            tags = [form.read_known(row[layout.tag_at]) for row in rows]
        try:
            group = "" if layout.group_at is None else group_of(rows, layout.group_at)
        except ValueError as error:
            bad.add(start, str(error))
            continue
        yield start, [row[layout.word_at] for row in rows], tags, group


def group_of(rows: list[list[str]], group_at: int) -> str:
    """The group of a sentence. Raises ValueError if it has none or several."""
    column = f"column {group_at + 1}"
    groups = sorted({read_group(row[group_at].strip("_"), column) for row in rows})
    if len(groups) > 1:
        raise ValueError(f"{column} has {listed(groups, 3)} in a sentence, expected one group")
    return groups[0]


def check_tag_columns(
    file: TextFile, blocks: list[list[list[str]]], layout: ColumnLayout, form: TagForm
) -> None:
    """Raises UserError if the last of several columns may not have the tags: it reads as no scheme
    of tags, or another column has tags of the same types, such as those of the entities around
    others in GermEval 2014, or the last one has O only. (The chunks of CoNLL-2003 have their own
    types.)
    """
    rows = [row for block in blocks for row in block]
    if layout.num_columns <= 2 or not rows:
        return
    count = layout.num_columns
    tags_of_column = {at: {row[at] for row in rows} for at in range(1, count - 1)}
    types_of_column = {
        at: types_of(tags)
        for at, tags in tags_of_column.items()
        if all(tag == "O" or PREFIXED.fullmatch(tag) for tag in tags) and tags != {"O"}
    }
    if not form.is_scheme:
        if layout.is_numbered and count == CONLL_U_COLUMNS:
            raise UserError(
                f"{file.path}: the last column of CoNLL-U has remarks: choose one with "
                f"--label-column, 4 for parts of speech"
            )
        value = next(row[-1] for row in rows if row[-1] != "O")
        example = min(types_of_column, default=count - 1) + 1
        raise UserError(
            f"{file.path}: the last of its {count} columns has {value!r}, which is no tag such as "
            f"B-PER: say which column has the tags, such as --label-column {example}"
        )
    last = types_of(form.read_known(row[-1]) for row in rows)
    for index, types in types_of_column.items():
        if types & last or not last:
            others = f"of {listed(sorted(last))}" if last else "O only"
            raise UserError(
                f"{file.path}: column {index + 1} has tags of {listed(sorted(types))}, and column "
                f"{count} {others}: choose one with "
                f"--label-column {index + 1} or --label-column {count}"
            )


def read_blocks(
    file: TextFile, layout: ColumnLayout, form: TagForm, bad: BadRows
) -> Iterator[tuple[str, list[list[str]]]]:
    """Where each sentence begins, and the columns of its lines; without sentences that have a bad
    line, which `bad` takes.
    """
    rows: list[list[str]] = []  # of the current sentence
    start = ""
    is_bad = False
    end = [("", None)]  # the end of the file ends the last sentence
    for line, bad_bytes in itertools.chain(file.checked_lines(), end):
        line = line.rstrip("\r\n")
        columns = split_line(file, line)
        if columns[:1] == ["-DOCSTART-"]:
            continue
        if line.startswith("#") and not rows and layout.is_comment(line, columns):
            continue
        if line.strip():
            start = start or file.where()
            if line.startswith(" ") and len(columns) == layout.num_columns - 1:
                columns = [" ", *columns]  # a word that is a blank
            if layout.is_unwritten(columns):
                continue
            problem = bad_bytes or column_problem(line, columns, rows, layout, form)
            if problem is not None:
                bad.add(file.where(), problem)
                is_bad = True
            rows.append(columns)
        elif rows:
            if not is_bad:
                yield start, rows
            rows = []
            start = ""
            is_bad = False


def column_problem(
    line: str, columns: list[str], rows: list[list[str]], layout: ColumnLayout, form: TagForm
) -> str | None:
    """What is wrong with a line of columns after the lines `rows` of its sentence."""
    if "\r" in line:  # `split` would take it for a space, and the words after it would be lost
        return "a carriage return inside the line: end lines with a line feed"
    if len(columns) < layout.needed:
        return f"{line!r} has no column {layout.needed}: correct it, or the number of the column"
    if layout.is_numbered and not NUMBER.fullmatch(columns[0]):
        return (
            f"{line!r} does not begin with a number, as other lines do: correct it, or give "
            f"--text-column"
        )
    if layout.tag_at is None:
        if rows and len(columns) != len(rows[-1]):  # a comment, or text not split
            return (
                f"{line!r} has another number of columns ({len(columns)}) than the line before "
                f"({len(rows[-1])}): give one word per line, without comments"
            )
    elif len(columns) < 2 or form.read(columns[layout.tag_at]) is None:
        example = form.example
        if layout.tag_at == -1 or len(columns) < 2:
            advice = "correct it"
            if len(columns) < 2 and (mark := re.search(r"\S([,;|])\S", line)):
                advice += f", or give --delimiter {mark[1]!r}"
            return f"{line!r} does not end in a tag such as {example}: {advice}"
        tag = columns[layout.tag_at]
        return f"{line!r} has {tag!r}, which is no tag such as {example}: correct it"
    elif layout.tag_at == -1 and len(columns) != layout.num_columns:
        return (
            f"{line!r} has {len(columns)} columns, and the first word of the file "
            f"{layout.num_columns}: correct it, or give --label-column"
        )
    return None
