"""Tables to fine-tune on, made of the data beside the repository: classes, numbers, several labels,
pairs, entities, pairs to find, questions.
"""

import csv
import gettext
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import run_embeddings
import run_glue
import run_ner
import run_squad

SIX = {
    "Austen": ("pride-and-prejudice", "sense-and-sensibility"),
    "Dickens": ("bleak-house", "great-expectations"),
    "Twain": ("adventures-of-huckleberry-finn", "the-adventures-of-tom-sawyer"),
    "Tolstoy": ("anna-karenina", "war-and-peace"),
    "Dostoevsky": ("crime-and-punishment", "the-brothers-karamazov"),
    "Bronte": ("jane-eyre", "wuthering-heights"),
}
# What is known of a book: several labels for each of its passages.
TRAITS = {
    "woman": "frankenstein jane-eyre little-women middlemarch pride-and-prejudice "
    "sense-and-sensibility wuthering-heights",
    "translated": "anna-karenina crime-and-punishment don-quixote les-mis-rables "
    "the-brothers-karamazov war-and-peace",
    "narrator": "adventures-of-huckleberry-finn david-copperfield frankenstein great-expectations "
    "jane-eyre moby-dick-or-the-whale the-time-machine treasure-island wuthering-heights",
    "american": "adventures-of-huckleberry-finn little-women moby-dick-or-the-whale "
    "the-adventures-of-tom-sawyer",
}
PASSAGE = 300  # characters
OTHERS = """
    alice-s-adventures-in-wonderland don-quixote frankenstein les-mis-rables little-women
    middlemarch moby-dick-or-the-whale the-picture-of-dorian-gray the-time-machine treasure-island
    ulysses
"""
# Question words, and what their answers are.
ASKED = {"who": "PERSON", "when": "TIME", "where": "PLACE", "how many": "NUMBER"}
PROGRAMS = "bash coreutils dpkg gettext-tools git glib20 gnupg2 gtk30 libc postgres-15"
MESSAGES = Path("/usr/share/locale")  # translated messages of programs, on most Linux machines

Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """rows: to draw the training rows from, and those to score.
    flags: of the columns.
    """

    program: Any
    rows: Sequence[Any]
    scored: Sequence[Any]
    metric: str
    flags: list[str] = field(default_factory=list)
    ending: str = "csv"


def tab_separated(path: Path, columns: dict[str, int | str]) -> list[Row]:
    """The chosen columns of a file of GLUE, by the names that the table has."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = [line.rstrip("\r\n").split("\t") for line in file]
    header = lines[0]
    has_header = any(isinstance(column, str) for column in columns.values())
    indices = {
        name: header.index(column) if isinstance(column, str) else column
        for name, column in columns.items()
    }
    return [{name: line[index] for name, index in indices.items()} for line in lines[has_header:]]


def passages(books: Path, names: Sequence[str]) -> tuple[list[tuple[str, str]], ...]:
    """(book, passage) of the first four fifths of each book, and of the last fifth."""
    training, scored = [], []
    for name in names:
        paragraphs = (books / f"{name}.txt").read_text(encoding="utf-8").split("\n\n")
        texts = [" ".join(paragraph.split())[:PASSAGE] for paragraph in paragraphs]
        texts = [text for text in texts if len(text) >= PASSAGE // 2]
        end = len(texts) * 4 // 5
        training += [(name, text) for text in texts[:end]]
        scored += [(name, text) for text in texts[end:]]
    return training, scored


def book_table(
    data: Path, names: Sequence[str], label: Callable[[str], str], **options: Any
) -> Table:
    def rows(named_passages: list[tuple[str, str]]) -> list[Row]:
        return [{"text": text, "label": label(name)} for name, text in named_passages]

    training, scored = passages(data / "books", names)
    return Table(run_glue, rows(training), rows(scored), **options)


def traits_of(book: str) -> str:
    return "|".join(name for name, books in TRAITS.items() if book in books.split())


def glue_table(
    folder: Path, columns: dict[str, int | str], metric: str, flags: Sequence[str] = ()
) -> Table:
    parts = [tab_separated(folder / name, columns) for name in ("train.tsv", "dev.tsv")]
    if "pair" in columns:
        flags = [*flags, "--pair-column", "pair"]
    return Table(run_glue, *parts, metric, [*flags])


def sentences_of(path: Path) -> list[str]:
    """The sentences of a file of WNUT 2017, in CoNLL's columns."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = ["\t".join(part.split("\t")[:2]).strip() for part in lines]
    return [block for block in "\n".join(rows).split("\n\n") if block.strip()]


def squad_questions(path: Path) -> Iterator[tuple[Row, Row, Row]]:
    """The article, paragraph and question of each question in SQuAD's file."""
    for article in json.loads(path.read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                yield article, paragraph, question


def question_pairs(path: Path) -> list[Row]:
    return [
        {"text": question["question"], "pair": paragraph["context"]}
        for _, paragraph, question in squad_questions(path)
    ]


def answer_sentences(path: Path) -> list[tuple[str, str, str]]:
    """(question, the sentence with its answer, answer) for each question of SQuAD's file."""
    answered = []
    for _, paragraph, question in squad_questions(path):
        context = paragraph["context"]
        answer = question["answers"][0]
        start = answer["answer_start"]
        ends = [match.end() for match in re.finditer(r"[.?!] ", context)]
        first = max([0, *(end for end in ends if end <= start)])
        last = min([len(context), *(end for end in ends if end > start)])
        answered.append((question["question"], context[first:last].strip(), answer["text"]))
    return answered


def asked_entities(path: Path) -> list[str]:
    """Sentences of SQuAD in CoNLL's columns, in which what was asked for is tagged by the question
    word.
    """
    kinds_of: dict[str, dict[str, str]] = {}
    for question, sentence, answer in answer_sentences(path):
        for word, kind in ASKED.items():
            if question.lower().startswith(word):
                kinds_of.setdefault(sentence, {})[answer] = kind
    blocks = []
    for sentence, kinds in kinds_of.items():
        words = re.findall(r"\w+|[^\w\s]", sentence)
        tags = ["O"] * len(words)
        for answer, kind in kinds.items():
            parts = re.findall(r"\w+|[^\w\s]", answer)
            for start in range(len(words) - len(parts) + 1):
                if words[start : start + len(parts)] == parts:
                    inside = [f"I-{kind}"] * (len(parts) - 1)
                    tags[start : start + len(parts)] = [f"B-{kind}", *inside]
                    break
        blocks.append("\n".join(f"{word}\t{tag}" for word, tag in zip(words, tags, strict=True)))
    return blocks


def split_rows(rows: list[Any]) -> tuple[list[Any], list[Any]]:
    """Four fifths to train on, drawn, and the others."""
    rows = drawn(rows, len(rows), 0)
    return rows[: len(rows) * 4 // 5], rows[len(rows) * 4 // 5 :]


def article_questions(path: Path) -> list[Row]:
    """Questions with the title of their article, one of 30."""
    return [
        {"text": question["question"], "label": article["title"]}
        for article, _, question in squad_questions(path)
    ]


def program_messages(language: str) -> list[Row]:
    """Messages of ten programs in a language, with the name of the program."""
    rows = []
    for program in PROGRAMS.split():
        with (MESSAGES / language / "LC_MESSAGES" / f"{program}.mo").open("rb") as file:
            catalog = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
        texts = {" ".join(text.split())[:PASSAGE] for text in catalog.values()}
        texts = drawn(sorted(text for text in texts if len(text) >= 20), 400, 0)
        rows += [{"text": text, "label": program} for text in texts]
    return rows


def alike_or_not(table: Table) -> Table:
    """Pairs whose similarity is 4 or more, or 2 or less."""
    parts = [
        [
            row | {"label": "alike" if float(row["label"]) >= 4 else "different"}
            for row in part
            if not 2 < float(row["label"]) < 4
        ]
        for part in (table.rows, table.scored)
    ]
    return Table(run_glue, *parts, "accuracy", ["--pair-column", "pair"])


def questions(path: Path) -> list[Row]:
    """Each a document of SQuAD's file with one question."""
    return [
        {"title": "", "paragraphs": [{"context": paragraph["context"], "qas": [question]}]}
        for _, paragraph, question in squad_questions(path)
    ]


def make_table(name: str, data: Path, entities: Path | None) -> Table:
    glue, squad = data / "glue", data / "squad"
    if name == "sentiment":
        return glue_table(glue / "SST-2", {"text": "sentence", "label": "label"}, "accuracy")
    if name == "acceptability":
        return glue_table(glue / "CoLA", {"text": 3, "label": 1}, "accuracy")
    if name == "paraphrases":
        columns: dict[str, int | str] = {
            "text": "#1 String",
            "pair": "#2 String",
            "label": "Quality",
        }
        return glue_table(glue / "MRPC", columns, "accuracy")
    if name == "similarity":
        columns = {"text": "sentence1", "pair": "sentence2", "label": "score"}
        return glue_table(glue / "STS-B", columns, "spearman", ["--regression"])
    if name == "authors":
        books = {book: author for author, pair in SIX.items() for book in pair}
        return book_table(data, list(books), lambda book: books[book], metric="accuracy")
    if name == "books":
        books_there = sorted(path.stem for path in (data / "books").glob("*.txt"))
        return book_table(data, books_there, str, metric="accuracy")
    if name == "traits":
        books_there = sorted({book for books in TRAITS.values() for book in books.split()})
        flags = ["--task-name", "multi-label"]
        return book_table(data, books_there, traits_of, metric="f1_micro", flags=flags)
    if name == "entities" and entities is not None:
        parts = [
            sentences_of(entities / part)
            for part in ("wnut17train.conll", "emerging.test.annotated")
        ]
        return Table(run_ner, *parts, "f1", ending="conll")
    if name == "search":
        parts = [question_pairs(squad / f"{part}-v1.1.json") for part in ("train", "dev")]
        flags = ["--pair-column", "pair"]
        return Table(run_embeddings, *parts, "ndcg@10", flags)
    if name == "questions":
        parts = [questions(squad / f"{part}-v1.1.json") for part in ("train", "dev")]
        return Table(run_squad, *parts, "f1", ending="json")
    return further_table(name, data)


def further_table(name: str, data: Path) -> Table:
    """Those on which no value of the rule was chosen, but for pairs to find."""
    squad = data / "squad"
    if name == "answers":
        parts = [
            [
                {"text": question, "pair": sentence}
                for question, sentence, _ in answer_sentences(path)
            ]
            for path in (squad / "train-v1.1.json", squad / "dev-v1.1.json")
        ]
        return Table(run_embeddings, *parts, "ndcg@10", ["--pair-column", "pair"])
    if name == "similar-texts":
        table = make_table("similarity", data, None)
        flags = ["--pair-column", "pair"]
        return Table(run_embeddings, table.rows, table.scored, "spearman", flags)
    if name == "alike":
        return alike_or_not(make_table("similarity", data, None))
    if name == "topics":
        parts = split_rows(article_questions(squad / "train-v1.1.json"))
        return Table(run_glue, *parts, "accuracy")
    if name == "other-books":
        return book_table(data, OTHERS.split(), str, metric="accuracy")
    if name == "asked":
        parts = [asked_entities(squad / f"{part}-v1.1.json") for part in ("train", "dev")]
        return Table(run_ner, *parts, "f1", ending="conll")
    if name.startswith("messages-"):
        parts = split_rows(program_messages(name.removeprefix("messages-")))
        return Table(run_glue, *parts, "accuracy")
    raise SystemExit(f"error: there is no table {name}, or --entities is missing")


def drawn(rows: Sequence[Any], count: int, seed: int) -> list[Any]:
    order = np.random.default_rng(seed).permutation(len(rows))[:count]
    return [rows[index] for index in order]


def write_rows(path: Path, table: Table, rows: Sequence[Any]) -> None:
    if table.ending == "conll":
        path.write_text("\n\n".join(rows) + "\n", encoding="utf-8")
        return
    if table.ending == "json":
        path.write_text(json.dumps({"version": "1.1", "data": rows}), encoding="utf-8")
        return
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
