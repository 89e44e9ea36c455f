"""Texts to search in, and benchmarks of search in the formats of BEIR, MTEB and NanoBEIR."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from utils.errors import UserError
from utils.tables import Row, read_rows, read_texts
from utils.text_files import TableFormat, TextFile, kind_of

# The names that BEIR, MTEB and NanoBEIR give to the columns of relevance judgements and of texts.
QUERY_COLUMNS, TEXT_COLUMNS = ("query-id", "query_id", "qid"), ("corpus-id", "corpus_id", "docid")
ID_COLUMNS = ("_id", "id")
SPLITS = ("test", "dev", "train")  # the first one that is there is used
PART = re.compile(r"(.*-)[0-9]+-of-([0-9]+)(\..*)")  # of a table in several files


@dataclass(frozen=True)
class Corpus:
    """Texts of a table. names: their ids, or their row numbers from 0 in a file without ids.
    places: where each is, for errors. others: the other columns of a table, such as titles.
    """

    path: Path
    texts: list[str]
    names: list[str]
    places: list[str]
    others: list[Row] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, column: str, table_format: TableFormat | None = None) -> "Corpus":
        rows = read_texts(path, [column], table_format=table_format)
        file = TextFile(path)
        texts = [row[column] for _, row in rows]
        names = [str(number) for number in range(len(rows))]
        places = [file.where(number) for number, _ in rows]
        others = [without(row, column) for _, row in rows]
        return cls(path, texts, names, places, others)


def without(row: Row, column: str) -> Row:
    return {name: value for name, value in row.items() if name != column}


@dataclass(frozen=True)
class Benchmark:
    """Queries, the texts among which their answers are to be found, and which these are.

    relevance: for each query its relevant texts, as rows of the corpus, with their grades.
    """

    queries: Corpus
    corpus: Corpus
    relevance: list[dict[int, float]]


def read_benchmark(folder: Path) -> Benchmark:
    """Reads `corpus`, `queries` and `qrels`, each a table or a folder with one, as BEIR and MTEB
    publish them. Queries without a relevant text are left out. Raises UserError naming the file.
    """
    corpus, queries = read_named(folder, "corpus"), read_named(folder, "queries")
    places = {name: row for row, name in enumerate(corpus.names)}
    relevance: dict[str, dict[int, float]] = {name: {} for name in queries.names}
    paths = find_table(folder, ("qrels", "default", "data"))
    for where, row in table_rows(paths):
        query = str(value_of(row, QUERY_COLUMNS, where))
        text = str(value_of(row, TEXT_COLUMNS, where))
        grade = grade_of(row, where)
        if query not in relevance or text not in places:
            what = f"text {text!r}" if query in relevance else f"query {query!r}"
            raise UserError(f"{where}: the {what} is not in {folder}: download the folder again")
        if grade > 0:
            relevance[query][places[text]] = grade
    judged = [row for row, name in enumerate(queries.names) if relevance[name]]
    if not judged:
        raise UserError(
            f"{paths[0]} judges none of the queries in {folder}: give the files of one set"
        )
    kept = Corpus(
        queries.path,
        [queries.texts[row] for row in judged],
        [queries.names[row] for row in judged],
        [queries.places[row] for row in judged],
    )
    return Benchmark(kept, corpus, [relevance[name] for name in kept.names])


def read_named(folder: Path, name: str) -> Corpus:
    """The texts of a benchmark; a title is put before its text."""
    paths = find_table(folder, (name,))
    texts, names, places = [], [], []
    for where, row in table_rows(paths):
        parts = [row.get("title"), value_of(row, ("text",), where)]
        names.append(str(value_of(row, ID_COLUMNS, where)))
        texts.append(" ".join(part.strip() for part in parts if isinstance(part, str)).strip())
        places.append(where)
    if len(set(names)) < len(names):
        raise UserError(f"{paths[0]} has an id twice: correct the file")
    if not texts:
        raise UserError(f"{paths[0]} has no rows: download the folder again")
    return Corpus(paths[0], texts, names, places)


def find_table(folder: Path, names: tuple[str, ...]) -> list[Path]:
    """The files of the table `NAME.EXTENSION`, or of the one in the folder NAME for the first of
    SPLITS.
    """
    for name in names:
        files = [path for path in sorted(folder.glob(f"{name}.*")) if kind_of(path.name)[0]]
        inside = [path for path in sorted(folder.glob(f"{name}/*")) if kind_of(path.name)[0]]
        for split in SPLITS:
            files += [path for path in inside if path.name.startswith(split)]
        files += inside
        if files:
            return all_parts(files[0])
    expected = "corpus.jsonl, queries.jsonl and qrels/test.tsv, or folders of Parquet files"
    raise UserError(f"{folder} has no {names[0]}: expected {expected}, as BEIR and MTEB have")


def all_parts(path: Path) -> list[Path]:
    """The files of a table that the hub has divided, as `test-00000-of-00002.parquet`; those of
    other tables are one.
    """
    match = PART.fullmatch(path.name)
    if match is None:
        return [path]
    beginning, count, ending = match.groups()
    parts = sorted(path.parent.glob(f"{beginning}*-of-{count}{ending}"))
    if len(parts) != int(count):
        raise UserError(
            f"{path.parent} has {len(parts)} of the {int(count)} files "
            f"{beginning}*-of-{count}{ending}: download the others"
        )
    return parts


def table_rows(paths: Sequence[Path]) -> Iterator[tuple[str, Row]]:
    for path in paths:
        file = TextFile(path)
        for number, row in read_rows(file):
            yield file.where(number), row


def value_of(row: Row, names: tuple[str, ...], where: str) -> object:
    for name in names:
        if name in row:
            return row[name]
    found = ", ".join(map(repr, row))
    raise UserError(f"{where}: no column {names[0]!r}; it has {found}: check the file")


def grade_of(row: Row, where: str) -> float:
    try:
        return float(row.get("score", 1))
    except (TypeError, ValueError) as error:
        message = f"{where}: the score is {row['score']!r}, expected a number: correct the line"
        raise UserError(message) from error
