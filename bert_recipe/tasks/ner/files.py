"""Sentences of files for token classification: CoNLL columns, JSON lines with spans or with tokens
and tags.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from bert_recipe.tasks.doubtful_rows import warn_of_contradictions, warn_of_predicted_blanks
from bert_recipe.tasks.ner.columns import Layouts, SentenceColumns, find_layouts, read_columns
from bert_recipe.tasks.ner.tags import Entity, TagForm, entities, to_iob2
from bert_recipe.tasks.reading import DEFAULT_READING, ReadingOptions, read_group
from bert_recipe.utils.bad_rows import BadRows
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.known_tools import DATA, LABEL_STUDIO, OTHER_TOOLS, refuse_known
from bert_recipe.utils.tables import Row, absent_column, plain_row, read_rows
from bert_recipe.utils.text_files import TextFile

WORD_COLUMNS = ("tokens", "words")
TAG_COLUMNS = ("ner_tags", "tags", "labels", "ner")
SPAN_COLUMNS = ("spans", "label", "labels", "entities")  # the latter are doccano's
TOKENS_FORM = '{"tokens": ["Anna", "lived"], "ner_tags": ["B-PER", "O"]}'
FOUND_COLUMNS = SentenceColumns()
ROW_FORMATS = (".json", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Sentence:
    """A text with entities as characters, or words with tags (see tags.py). Files without
    them have neither `tags` nor `spans`.
    """

    words: Sequence[str] = ()
    tags: Sequence[str] = ()
    text: str | None = None
    spans: tuple[Entity, ...] = ()
    group: str = ""  # such as its document, where sentences are held out by it

    @property
    def content(self) -> str | tuple[str, ...]:
        return tuple(self.words) if self.text is None else self.text

    @property
    def labels(self) -> tuple[str, ...]:
        if self.text is None:
            return tuple(self.tags)
        return tuple(f"{start}-{stop} {kind}" for kind, start, stop in self.spans)

    @property
    def entities(self) -> set[Entity]:
        """Of words, or of characters of the text."""
        return entities(self.tags) if self.text is None else set(self.spans)

    @property
    def shown(self) -> str:
        return " ".join(self.words) if self.text is None else self.text

    def shown_entity(self, entity: Entity) -> str:
        _, start, stop = entity
        return " ".join(self.words[start:stop]) if self.text is None else self.text[start:stop]

    def in_characters(self, spans: set[Entity]) -> set[Entity]:
        """Entities like `entities`, as characters of `shown`."""
        if self.text is not None:
            return spans
        starts = [0, *accumulate(len(word) + 1 for word in self.words)]
        return {(kind, starts[first], starts[stop] - 1) for kind, first, stop in spans}


@dataclass(frozen=True)
class SentenceForm:
    """How the files of a task are read together. layouts: of files of columns."""

    tags: TagForm
    layouts: Layouts


def find_form(
    files: Sequence[tuple[Path, bool]],
    reading: ReadingOptions = DEFAULT_READING,
    chosen: SentenceColumns = FOUND_COLUMNS,
) -> SentenceForm:
    """The form of all files of a task, each with whether it has tags: one of them alone may not
    show it. Bad rows are left out here, and named by `read_sentences`.
    """
    opened = []
    tags: set[str] = set()
    for path, tagged in files:
        refuse_known(path, DATA)
        file = TextFile(path, lambda where, why: None, reading.table_format)
        if file.format not in ROW_FORMATS:
            opened.append((file, tagged))
        elif tagged:
            for _, row in read_rows(file):
                if not absent_column(row, filter(None, chosen)):
                    tags.update(tag for tag in row_tags(renamed(row, chosen)) if type(tag) is str)
    layouts, others = find_layouts(opened, chosen)
    return SentenceForm(TagForm.of(tags | others), layouts)


def row_tags(row: Row) -> Sequence[Any]:
    """The tags of a row with words."""
    words = words_of(row)
    tags = next((row[name] for name in TAG_COLUMNS if name in row), None)
    return tags if isinstance(words, list) and isinstance(tags, list) else ()


def read_sentences(
    path: Path,
    tagged: bool,
    reading: ReadingOptions = DEFAULT_READING,
    chosen: SentenceColumns = FOUND_COLUMNS,
    form: SentenceForm | None = None,
) -> list[Sentence]:
    """Reads CoNLL columns (word first, tag last, an empty line between sentences), or JSON with
    `{"text": ..., "spans": [{"start": ..., "end": ..., "label": ...}]}`, or with tokens and tags;
    or the columns `chosen`. The tags of entities become IOB2. form: of all files of the task; by
    default that of this one. Raises UserError naming the bad lines.
    """
    form = form or find_form([(path, tagged)], reading, chosen)
    bad = reading.bad_rows(path, is_predicted=not tagged)
    file = reading.open_table(path, bad)
    sentences = []
    labelled = []
    texts = []  # to predict
    for where, sentence in read_any(file, tagged, bad, chosen, form):
        if tagged and sentence.text is None and not form.tags.is_class:
            sentence = replace(sentence, tags=to_iob2(sentence.tags))
        if tagged:
            labelled.append((sentence.content, sentence.labels, bad.place(where)))
        elif sentence.text is not None:
            texts.append(((sentence.text,), bad.place(where)))
        sentences.append(sentence)
    bad.finish(len(sentences))
    warn_of_contradictions(path, labelled, "sentences")
    warn_of_predicted_blanks(path, texts)
    if not sentences:
        raise UserError(f"{path} has no sentences: check the file")
    return sentences


def read_any(
    file: TextFile, tagged: bool, bad: BadRows, chosen: SentenceColumns, form: SentenceForm
) -> Iterator[tuple[str, Sentence]]:
    if file.format in ROW_FORMATS:
        yield from read_rows_of(file, tagged, bad, chosen, form)
        return
    layout = form.layouts[file.path, tagged]
    for where, words, tags, group in read_columns(file, layout, form.tags, bad):
        yield where, Sentence(words, tags, group=group)


def read_rows_of(
    file: TextFile, tagged: bool, bad: BadRows, chosen: SentenceColumns, form: SentenceForm
) -> Iterator[tuple[str, Sentence]]:
    for number, row in read_rows(file):
        where = file.where(number)
        try:
            sentence = row_sentence(renamed(plain_row(row), chosen), form.tags if tagged else None)
            if chosen.group is not None:
                group = read_group(row[chosen.group], chosen.group)
                sentence = replace(sentence, group=group)
            yield where, sentence
        except ValueError as error:
            bad.add(where, str(error))


def row_sentence(row: Row, form: TagForm | None) -> Sentence:
    """The words or the text of a row. form: None without tags. Raises ValueError for a bad row."""
    if (words := words_of(row)) is not None:
        return token_sentence(words, row, form)
    spans = [] if form is None else spans_of(row)
    if not isinstance(spans, list):
        raise ValueError(
            f"'spans' is {spans!r}, expected a list: correct it, or give rows as {TOKENS_FORM}"
        )
    return text_sentence(row.get("text"), spans, tagged=form is not None)


def renamed(row: Row, chosen: SentenceColumns) -> Row:
    """The row with the columns `chosen` under the names that `row_sentence` reads. Raises
    ValueError if it lacks one.
    """
    if problem := absent_column(row, [name for name in chosen if name is not None]):
        raise ValueError(problem)
    columns = dict(row)
    if chosen.words is not None:
        words = row[chosen.words]
        columns = {name: value for name, value in row.items() if name not in WORD_COLUMNS}
        columns["tokens" if isinstance(words, list) else "text"] = words
    if chosen.tags is not None:
        has_words = any(name in columns for name in WORD_COLUMNS)
        columns["ner_tags" if has_words else "spans"] = row[chosen.tags]
    return columns


def words_of(row: Row) -> Any:
    """The words of a row; None if it has a text with spans, as Prodigy's that also have tokens."""
    words = next((row[name] for name in WORD_COLUMNS if name in row), None)
    is_prodigys = "spans" in row and has_objects(words)
    return None if is_prodigys else words


def has_objects(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, dict) for value in values)


def spans_of(row: Row) -> Any:
    """The spans of a row in the first of SPAN_COLUMNS that it has, as `{start, end, label}`."""
    spans = next((row[name] for name in SPAN_COLUMNS if name in row), None)
    return [*map(plain_span, spans)] if isinstance(spans, list) else spans


def plain_span(span: Any) -> Any:
    """A span of doccano, `[start, end, label]` or with `start_offset` and `end_offset`, as
    `{start, end, label}`; anything else as it is.
    """
    if isinstance(span, list) and len(span) == 3:
        return dict(zip(("start", "end", "label"), span, strict=True))
    if isinstance(span, dict) and "start_offset" in span:
        start, end, label = (span.get(name) for name in ("start_offset", "end_offset", "label"))
        return {"start": start, "end": end, "label": label}
    return span


def token_sentence(words: Any, row: Row, form: TagForm | None) -> Sentence:
    """A row of Hugging Face's token classification. form: None without tags."""
    given = next((row[name] for name in TAG_COLUMNS if name in row), None)
    tags = words if form is None else given
    if not isinstance(words, list) or not isinstance(tags, list) or not words or not tags:
        raise ValueError(f"tokens {words!r} and tags {tags!r}, expected {TOKENS_FORM}")
    if not all(isinstance(word, str) for word in words):
        raise ValueError(f"tokens {words!r}, expected words")
    if len(words) != len(tags):
        raise ValueError(f"{len(words)} tokens and {len(tags)} tags: correct the row")
    if form is None:
        return Sentence(words)
    known_tags = []
    for tag in tags:
        known = form.read(tag) if isinstance(tag, str) else None
        if known is None:
            advice = f"write the names of tags, such as {form.example}"
            if isinstance(tag, int):
                advice += ", or give the hub's Parquet file, which has them"
            raise ValueError(f"the tag {tag!r}: {advice}, as {TOKENS_FORM}")
        known_tags.append(known)
    return Sentence(words, known_tags)


def text_sentence(text: Any, spans: Sequence[Any], tagged: bool) -> Sentence:
    """A text with entities."""
    if not isinstance(text, str) or (tagged and not text.strip()):
        raise ValueError(f"'text' is {text!r}, expected a string with words: correct it")
    checked = [check_span(span, text) for span in spans]
    ordered = sorted(checked, key=lambda entity: entity[1:])
    end = 0
    for _, start, stop in ordered:
        if start < end:
            raise ValueError(f"spans overlap at character {start}: keep one of them")
        end = stop
    return Sentence(text=text, spans=tuple(ordered) if tagged else ())


def check_span(span: Any, text: str) -> Entity:
    """The entity of a span, without space around it."""
    wrong = ValueError(
        f"span {span!r} is not {{start, end, label}} of words in the text: correct it"
    )
    if isinstance(span, dict) and isinstance(span.get("labels"), list):
        raise ValueError(LABEL_STUDIO)
    values = span if isinstance(span, dict) else {}
    start, end, label = (values.get(key) for key in ("start", "end", "label"))
    # JSON's true is no number, though Python's True is an int.
    if type(start) is not int or type(end) is not int or not isinstance(label, str) or start < 0:
        raise wrong
    covered = text[start:end]
    if not label or end > len(text) or not covered.strip():
        raise wrong
    given = values.get("text")
    if isinstance(given, str) and given.strip() != covered.strip():
        raise ValueError(
            f"span {span!r} is {covered!r} in the text: count characters as Python does "
            f"({OTHER_TOOLS})"
        )
    start += len(covered) - len(covered.lstrip())
    return " ".join(label.split()), start, start + len(covered.strip())
