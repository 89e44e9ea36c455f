"""Sentences of files for token classification: CoNLL columns, JSON lines with spans or with tokens
and tags, and the schemes of tags.

Tags are `O`, or B-, I-, E- (L- in BILOU) or S- (U-), followed by a type.
"""

import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from tasks.annotation_files import TAG_COLUMNS, TOKENS_FORM, WORD_COLUMNS, plain_row, spans_of
from tasks.doubtful_rows import (
    cut_words,
    warn_of_contradictions,
    warn_of_cut_words,
    warn_of_long_sentences,
)
from tasks.labels import listed
from tasks.reading import DEFAULT_READING, ReadingOptions
from utils.bad_rows import BadRows
from utils.errors import UserError, one_line
from utils.progress import print_once
from utils.tables import Row, read_rows
from utils.text_files import TextFile

TAG = re.compile("O|[BIESLU]-.+")
BILOU = {"L": "E", "U": "S"}  # other letters for the same
SCHEMES = ("IOB2", "IOB1", "BIOES or BILOU")
WORD = re.compile(r"\w+|[^\w\s]")


class SentenceColumns(NamedTuple):
    """Columns that the user chose: numbers from 1 in files of columns, names in JSON and Parquet.
    None: found by `read_columns` and `row_sentence`.
    """

    words: str | None = None
    tags: str | None = None


FOUND_COLUMNS = SentenceColumns()


@dataclass(frozen=True)
class Sentence:
    """`tags` is None for files without tags. JSON lines have `text` and the [start, end) of each
    word in it.
    """

    words: list[str]
    tags: list[str] | None
    text: str | None = None
    offsets: Sequence[tuple[int, int]] = ()

    def spaced_words(self) -> list[str]:
        """The words, with a space before those that do not follow the word before them directly."""
        starts = [start for start, _ in self.offsets] or range(len(self.words))
        has_space = [
            start > 0 and (self.text is None or self.text[start - 1].isspace()) for start in starts
        ]
        return [
            f" {word}" if spaced else word
            for word, spaced in zip(self.words, has_space, strict=True)
        ]


def read_sentences(
    path: Path,
    tagged: bool,
    reading: ReadingOptions = DEFAULT_READING,
    chosen: SentenceColumns = FOUND_COLUMNS,
) -> list[Sentence]:
    """Reads CoNLL columns (word first, tag last, an empty line between sentences), or JSON with
    `{"text": ..., "spans": [{"start": ..., "end": ..., "label": ...}]}`, or with tokens and tags;
    or the columns `chosen`. The tags become IOB2. Raises UserError naming the bad lines.
    """
    bad = reading.bad_rows(path, is_predicted=not tagged)
    file = reading.open(path, bad)
    read = read_columns if file.format not in (".json", ".jsonl", ".parquet") else read_rows_of
    sentences = []
    places = {}
    labelled, cut = [], []
    for where, sentence in read(file, tagged, bad, chosen):
        if tagged:
            schemes = schemes_of(sentence.tags)
            if not schemes:
                tags = " ".join(sentence.tags)
                why = f"the tags {tags!r} follow none of {', '.join(SCHEMES)}: correct them"
                bad.add(where, why)
                continue
            if len(schemes) == 1:
                places.setdefault(schemes[0], where)
            sentence = replace(sentence, tags=to_iob2(sentence.tags))
            place = bad.place(where)
            labelled.append((tuple(sentence.words), tuple(sentence.tags), place))
            words = cut_words(sentence.text or "", sentence.offsets)
            cut += [f"{place} ({word!r})" for word in words]
        sentences.append(sentence)
    bad.finish()
    warn_of_contradictions(path, labelled, "sentences")
    warn_of_cut_words(path, cut)
    if len(places) > 1:
        found = ", ".join(f"{scheme} ({bad.place(where)})" for scheme, where in places.items())
        print_once(f"warning: {one_line(str(path))} mixes tagging schemes: {found}: read as IOB2")
    if not sentences:
        raise UserError(f"{path} has no sentences: check the file")
    warn_of_long_sentences(path, [len(sentence.words) for sentence in sentences])
    return sentences


def read_columns(
    file: TextFile, tagged: bool, bad: BadRows, chosen: SentenceColumns
) -> Iterator[tuple[str, Sentence]]:
    """The word is in the first column; in the second one if the first one numbers the words of all
    sentences, as in CoNLL-U. The tag is in the last column. Comments before a sentence are left
    out.
    """
    if file.format == ".csv" and file.delimiter is None:
        raise UserError(
            f"{file.path}: tables with tags are not read: give a word per line, a tab and its tag, "
            f"with an empty line between sentences, or JSON lines as {TOKENS_FORM}"
        )
    word_at = column_index(file, "--text-column", chosen.words)
    tag_at = column_index(file, "--label-column", chosen.tags)
    needed = max(word_at or 0, tag_at or 0) + 1
    found = [*read_blocks(file, -1 if tag_at is None else tag_at, needed, tagged, bad)]
    if tagged and tag_at is None:
        check_tag_columns(file, [rows for _, rows in found])
    if word_at is None:
        is_numbered = any(len(rows) > 1 for _, rows in found) and all(
            [row[0] for row in rows] == [*map(str, range(1, 1 + len(rows)))]
            and min(map(len, rows)) > 1 + tagged
            for _, rows in found
        )
        word_at = int(is_numbered)
    for start, rows in found:
        tags = [row[-1 if tag_at is None else tag_at] for row in rows] if tagged else None
        yield start, Sentence([row[word_at] for row in rows], tags)


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


def check_tag_columns(file: TextFile, blocks: list[list[list[str]]]) -> None:
    """Raises UserError if another column than the last one has tags of the same types, such as
    those of the entities around others in GermEval 2014, or the last one has O only. (The chunks of
    CoNLL-2003 have their own types.)
    """
    rows = [row for block in blocks for row in block]
    last = types_of({row[-1] for row in rows})
    for index in range(1, min(map(len, rows), default=0) - 1):
        tags = {row[index] for row in rows}
        types = types_of(tags)
        if all(map(TAG.fullmatch, tags)) and types and (types & last or not last):
            count = len(rows[0])
            found = f"of {listed(sorted(last))}" if last else "O only"
            raise UserError(
                f"{file.path}: column {index + 1} has tags of {listed(sorted(types))}, and column "
                f"{count} {found}: choose one with "
                f"--label-column {index + 1} or --label-column {count}"
            )


def types_of(tags: Collection[str]) -> set[str]:
    """The types of entities in `tags`."""
    return {tag[2:] for tag in tags if tag != "O"}


def read_blocks(
    file: TextFile, tag_at: int, needed: int, tagged: bool, bad: BadRows
) -> Iterator[tuple[str, list[list[str]]]]:
    """The first line and the columns of each sentence without bad lines. tag_at: index of the tag.
    needed: number of columns that each line must have.
    """
    rows: list[list[str]] = []
    start, is_bad = "", False
    for line in itertools.chain(file, [""]):
        line = line.rstrip("\r\n")
        # Other spaces, such as those that are not broken, are in words.
        separator = file.delimiter or ("\t" if "\t" in line else None)
        columns = line.split(separator) if separator else [each for each in line.split(" ") if each]
        if columns[:1] == ["-DOCSTART-"]:
            continue
        tag = columns[tag_at] if -len(columns) <= tag_at < len(columns) else ""
        if tagged and not rows and line.startswith("#") and not TAG.fullmatch(tag):
            continue  # a comment before a sentence, as in CoNLL-U
        if line.strip():
            start = start or file.where()
            if why := column_problem(line, columns, rows, needed, tag if tagged else None):
                bad.add(file.where(), why)
                is_bad = True
            rows.append(columns)
        elif rows:
            if not is_bad:
                yield start, rows
            rows, start, is_bad = [], "", False


def column_problem(
    line: str, columns: list[str], rows: list[list[str]], needed: int, tag: str | None
) -> str | None:
    """What is wrong with a line of columns after the lines `rows` of its sentence. tag: None for
    files without tags.
    """
    if "\r" in line:  # `split` would take it for a space, and the words after it would be lost
        return "a carriage return inside the line: end lines with a line feed"
    if len(columns) < needed:
        return f"{line!r} has no column {needed}: correct it, or the number of the column"
    if tag is not None and (len(columns) < 2 or not TAG.fullmatch(tag)):
        if tag not in columns[-1:]:
            return f"{line!r} has {tag!r}, which is no tag such as O or B-PER: correct it"
        return f"{line!r} does not end in a tag such as O or B-PER: correct it"
    if tag is None and rows and len(columns) != len(rows[-1]):  # a comment, or text not split
        return (
            f"{line!r} has another number of columns ({len(columns)}) than the line before "
            f"({len(rows[-1])}): give one word per line, without comments"
        )
    return None


def read_rows_of(
    file: TextFile, tagged: bool, bad: BadRows, chosen: SentenceColumns
) -> Iterator[tuple[str, Sentence]]:
    for number, row in read_rows(file):
        where = file.where(number)
        try:
            row = renamed(plain_row(row, needs_spans=True), chosen)
            yield where, row_sentence(row, where, tagged)
        except (UserError, ValueError) as error:
            bad.add(where, str(error).removeprefix(f"{where}: "))


def renamed(row: Row, chosen: SentenceColumns) -> Row:
    """The row with the columns `chosen` under the names that `row_sentence` reads. Raises
    ValueError if it lacks one.
    """
    absent = [name for name in chosen if name is not None and name not in row]
    if absent:
        has = ", ".join(map(repr, row))
        raise ValueError(f"no column {absent[0]!r}; it has {has}: check the column's name")
    found = dict(row)
    if chosen.words is not None:
        words = row[chosen.words]
        found = {name: value for name, value in row.items() if name not in WORD_COLUMNS}
        found["tokens" if isinstance(words, list) else "text"] = words
    if chosen.tags is not None:
        has_words = any(name in found for name in WORD_COLUMNS)
        found["ner_tags" if has_words else "spans"] = row[chosen.tags]
    return found


def row_sentence(row: Row, where: str, tagged: bool) -> Sentence:
    words = next((row[name] for name in WORD_COLUMNS if name in row), None)
    if words is not None and not ("spans" in row and has_objects(words)):  # not Prodigy's
        return token_sentence(words, row, tagged)
    spans = spans_of(row) if tagged else []
    if not isinstance(spans, list):
        raise ValueError(
            f"'spans' is {spans!r}, expected a list: correct it, or give rows as {TOKENS_FORM}"
        )
    return sentence_of(row.get("text"), where, spans, tagged)


def has_objects(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(each, dict) for each in values)


def token_sentence(words: Any, row: Row, tagged: bool) -> Sentence:
    """A row of Hugging Face's token classification."""
    tags = next((row[name] for name in TAG_COLUMNS if name in row), None) if tagged else words
    if not all(isinstance(each, list) and len(each) > 0 for each in (words, tags)):
        raise ValueError(f"tokens {words!r} and tags {tags!r}, expected {TOKENS_FORM}")
    if not all(isinstance(word, str) and word.strip() for word in words):
        raise ValueError(f"tokens {words!r}, expected words")
    if len(words) != len(tags):
        raise ValueError(f"{len(words)} tokens and {len(tags)} tags: correct the row")
    if tagged and (wrong := [tag for tag in tags if not TAG.fullmatch(str(tag))]):
        advice = "write the names of tags, such as O or B-PER"
        if isinstance(wrong[0], int):
            advice += ", or give the hub's Parquet file, which has them"
        raise ValueError(f"the tag {wrong[0]!r}: {advice}, as {TOKENS_FORM}")
    return Sentence(words, list(tags) if tagged else None)


def sentence_of(text: Any, where: str, spans: Sequence[Any] = (), tagged: bool = False) -> Sentence:
    """The words of `text`, which are cut at the edges of `spans`, with their tags. `where`: place
    in errors.
    """
    if not isinstance(text, str) or not WORD.search(text):
        raise UserError(f"{where}: 'text' is {text!r}, expected a string with words: correct it")
    edges = {0, len(text)}
    entity_at = {}
    for span in spans:
        start, end, label = check_span(span, text, where)
        edges |= {start, end}
        for place in range(start, end):
            if place in entity_at:
                raise UserError(f"{where}: spans overlap at character {place}: keep one of them")
            entity_at[place] = (start, label)
    offsets = [
        (first + match.start(), first + match.end())
        for first, stop in itertools.pairwise(sorted(edges))
        for match in WORD.finditer(text[first:stop])
    ]
    found = [entity_at.get(start) for start, _ in offsets]
    tags = [
        "O" if entity is None else f"{'I' if entity == before else 'B'}-{entity[1]}"
        for before, entity in itertools.pairwise([None, *found])
    ]
    return Sentence([text[a:b] for a, b in offsets], tags if tagged else None, text, offsets)


def check_span(span: Any, text: str, where: str) -> tuple[int, int, str]:
    values = (
        tuple(span.get(key) for key in ("start", "end", "label")) if isinstance(span, dict) else ()
    )
    is_valid = (
        list(map(type, values)) == [int, int, str]
        and values[2]
        and 0 <= values[0] < values[1] <= len(text)
    )
    if is_valid and (values[2] == "O" or values[2] != " ".join(values[2].split())):
        raise UserError(
            f"{where}: the label {values[2]!r} of a span: O means no entity, and labels have no "
            f"space around them: rename it, or leave the span out"
        )
    if is_valid and WORD.search(text[values[0] : values[1]]):
        return values
    raise UserError(
        f"{where}: span {span!r} is not {{start, end, label}} of words in the text: correct it"
    )


def schemes_of(tags: Sequence[str]) -> list[str]:
    """The schemes that `tags` follow; all without entities."""
    pairs = [tag.partition("-")[::2] for tag in tags]
    pairs = [("O", ""), *((BILOU.get(prefix, prefix), kind) for prefix, kind in pairs), ("O", "")]
    follows = dict.fromkeys(SCHEMES, True)
    for (before, kind_before), (prefix, kind), (after, kind_after) in zip(
        pairs, pairs[1:], pairs[2:], strict=False
    ):
        is_inside = kind == kind_before
        continues = before in "BI" and is_inside
        goes_on = after in "IE" and kind == kind_after
        follows["IOB2"] &= prefix in "OB" or (prefix == "I" and continues)
        follows["IOB1"] &= prefix in "OI" or (prefix == "B" and continues)
        starts_well = continues if prefix in "IE" else before not in "BI"
        follows["BIOES or BILOU"] &= starts_well and (prefix not in "BI" or goes_on)
    return [scheme for scheme, holds in follows.items() if holds]


def to_iob2(tags: Sequence[str]) -> list[str]:
    """Tags of any scheme as B- and I- tags."""
    found = ["O"] * len(tags)
    for kind, start, stop in entities(tags):
        found[start:stop] = [f"B-{kind}", *[f"I-{kind}"] * (stop - start - 1)]
    return found


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """The type, first word and last word + 1 of each entity, as in the CoNLL-2000 script and
    seqeval: an entity starts at B or S, and at I or E after another type, O, E or S.
    """
    found = set()
    start = 0
    before = "O"
    kind_before = ""
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        prefix = BILOU.get(prefix, prefix)
        if before != "O" and (before in "ES" or prefix in "BSO" or kind != kind_before):
            found.add((kind_before, start, place))
        if prefix in "BS" or (prefix != "O" and (before in "OES" or kind != kind_before)):
            start = place
        before, kind_before = prefix, kind
    return found
