"""What a search writes to files: the texts that it found, and pairs with hard negatives."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search.engine import SearchEngine
from search.negatives import MinedNegatives, mine_negatives
from search.reranker import Reranker
from search.vectors import ROWS_PER_PART
from utils.errors import UserError
from utils.files import write_atomically
from utils.output_tables import add_columns, check_output, encode_table, format_like
from utils.progress import print_line, progress_bar
from utils.tables import Row, read_texts
from utils.text_files import TableFormat, TextFile


@dataclass(frozen=True)
class PairFile:
    """A table of queries and their answers, in the columns of these names."""

    path: Path
    query_column: str
    answer_column: str
    table_format: TableFormat


def write_found(
    engine: SearchEngine,
    queries_file: Path,
    column: str,
    table_format: TableFormat,
    count: int,
    output: Path,
) -> None:
    """Writes a row for each query and each of the `count` best texts that were found for it, with
    the other columns of that text.
    """
    check_output(output, (queries_file, engine.corpus.path))
    rows = read_texts(queries_file, [column], table_format=table_format)
    source = TextFile(queries_file, table_format=table_format)
    output_format = format_like(source)
    queries = [row[column] for _, row in rows]
    places = [source.where(number) for number, _ in rows]
    found, scores = engine.find(queries, places, count)
    repeated, added = [], []
    for number, (_, row) in enumerate(rows):
        for rank, index in enumerate(found[number].tolist(), 1):
            score, text = float(scores[number][rank - 1]), engine.corpus.texts[index]
            found_row = {"rank": rank, "score": score, "row": index, "text": text}
            for name, value in engine.corpus.others[index].items():
                is_taken = name in row or name in found_row
                found_row[f"corpus {name}" if is_taken else name] = value
            repeated.append(row)
            added.append(found_row)
    content = encode_table(output, add_columns(repeated, added), output_format)
    write_atomically(output, content)
    print_line(f"{found.shape[1]} texts for each of {len(rows):,} queries in {output}")


def write_negatives(
    engine: SearchEngine, pairs: PairFile, num_negatives: int, margin: float, output: Path
) -> None:
    """Writes the pairs with their negatives, and with a reranker the scores of both. Pairs with too
    few negatives are left out. margin: see mine_negatives.
    """
    check_output(output, (pairs.path, engine.corpus.path))
    columns = [pairs.query_column, pairs.answer_column]
    numbered = read_texts(pairs.path, columns, table_format=pairs.table_format)
    source = TextFile(pairs.path, table_format=pairs.table_format)
    output_format = format_like(source)
    rows = [row for _, row in numbered]
    places = [source.where(number) for number, _ in numbered]
    mined = mine_pairs(engine, pairs, rows, places, num_negatives, margin)
    kept, negatives = [], []
    for row, found in zip(rows, mined.rows, strict=True):
        if len(found) == num_negatives:
            kept.append(row)
            negatives.append([engine.corpus.texts[index] for index in found])
    if not {row[pairs.answer_column] for row in rows}.intersection(engine.corpus.texts):
        print_line(
            f"note: none of the answers in {pairs.path} is a text of {engine.corpus.path}: other "
            f"answers can be among the negatives; check --pair-column"
        )
    if not kept:
        raise UserError(
            f"no pair has {num_negatives} negatives in {engine.corpus.path}: lower --num-negatives "
            f"or --negative-margin, or give more texts"
        )
    numbers = range(1, num_negatives + 1)
    columns = [f"negative_{number}" for number in numbers]
    values: list[list[Any]] = [*negatives]
    if engine.reranker is not None:
        columns += ["score", *(f"score_{number}" for number in numbers)]
        scores = score_tuples(engine.reranker, pairs, kept, negatives)
        values = [texts + row for texts, row in zip(negatives, scores, strict=True)]
    added = [dict(zip(columns, row, strict=True)) for row in values]
    table = add_columns(kept, added)
    write_atomically(output, encode_table(output, table, output_format))
    columns = list(table[0])[len(kept[0]) :]  # another one where the pairs have such a column
    flags = training_flags(pairs, output, columns[:num_negatives], columns[num_negatives:])
    if pairs.table_format.delimiter is not None and output_format.delimiter is not None:
        flags += ["--delimiter", output_format.delimiter]
    print_line(
        f"{len(kept):,} of {len(rows):,} pairs with {num_negatives} negatives in "
        f"{output}; left out {mined.too_similar:,} texts as similar as the answer. To train: "
        f"run_glue.py --init-checkpoint MODEL {shlex.join(flags)}"
    )


def mine_pairs(
    engine: SearchEngine,
    pairs: PairFile,
    rows: list[Row],
    places: list[str],
    num_negatives: int,
    margin: float,
) -> MinedNegatives:
    """The negatives of the pairs in `rows`. All of their texts are checked before the corpus is
    embedded. places: names of the rows in errors.
    """
    queries = [row[pairs.query_column] for row in rows]
    answers = [row[pairs.answer_column] for row in rows]
    embed_queries = engine.embedder.prepare("query", queries, places)
    embed_answers = engine.embedder.prepare("document", answers, places)
    vectors = engine.vectors
    return mine_negatives(
        queries,
        answers,
        embed_queries(),
        embed_answers(),
        engine.corpus.texts,
        vectors,
        num_negatives,
        margin,
    )


def training_flags(
    pairs: PairFile, output: Path, negative_columns: list[str], score_columns: list[str]
) -> list[str]:
    """The flags of run_glue.py that train on the pairs, with the scores of a reranker if there are
    any.
    """
    flags = ["--task-name", "embedding", "--do-train", "--train-file", str(output)]
    flags += ["--text-column", pairs.query_column, "--pair-column", pairs.answer_column]
    flags += ["--negative-columns", *negative_columns]
    if score_columns:
        flags += ["--embedding-loss", "margin-mse", "--label-column", *score_columns]
    return flags


def score_tuples(
    reranker: Reranker, pairs: PairFile, rows: list[Row], negatives: list[list[str]]
) -> list[list[float]]:
    """The scores of the answer and the negatives of each row."""
    scores = []
    with progress_bar(len(rows), "scoring", "pair") as bar:
        for first in range(0, len(rows), ROWS_PER_PART):
            part = slice(first, first + ROWS_PER_PART)
            queries, texts = [], []
            for row, found in zip(rows[part], negatives[part], strict=True):
                queries += [row[pairs.query_column]] * (1 + len(found))
                texts += [row[pairs.answer_column], *found]
            found_scores = reranker.scores(queries, texts)
            scores += found_scores.reshape(-1, 1 + len(negatives[0])).tolist()
            bar.update(len(rows[part]))
    return scores
