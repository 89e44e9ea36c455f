"""Sentence embeddings: flags, and files of pairs and triplets of texts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tasks.doubtful_rows import is_blank, warn_of_blank, warn_of_contradictions
from tasks.labels import is_number
from tasks.reading import DEFAULT_READING, ReadingOptions
from tasks.sentence_folders import POOLINGS, PROMPTS, EmbeddingSettings
from tasks.squad_file import read_squad
from utils.bad_rows import BadRows
from utils.command_line import MAX_FLOAT32, option, optional_path, positive_float, positive_int
from utils.errors import UserError
from utils.tables import read_texts
from utils.text_files import TextFile

MARGIN_MSE = "margin-mse"
LOSSES = ("contrastive", "cosent", "cosine", MARGIN_MSE)
EMBEDDING = ("--task-name embedding",)
TRAIN = (*EMBEDDING, "--do-train")
UNSCORED = ("--label-column",)


@dataclass(frozen=True)
class EmbeddingOptions:
    """How sentence embeddings are trained and scored."""

    negative_columns: list[str] | None = option(
        "--negative-columns",
        str,
        None,
        "columns of texts that are similar to --pair-column, but wrong; without --task-name "
        "embedding, samples of class 0, and --pair-column those of class 1",
        ("--pair-column", "--do-train or --do-eval"),
        ("--regression", "--task-name multi-label"),
        {"nargs": "+", "metavar": "NAME"},
    )
    corpus_file: Path | None = option(
        "--corpus-file",
        optional_path,
        None,
        "further texts among which the second texts of --eval-file have to be found",
        (*EMBEDDING, "--do-eval", "--text-column"),
    )
    corpus_column: str | None = option(
        "--corpus-column",
        str,
        None,
        "column of the texts in --corpus-file; by default --pair-column",
        ("--corpus-file",),
    )
    embedding_loss: str | None = option(
        "--embedding-loss",
        LOSSES,
        None,
        "contrastive: the second text among all others of the global batch; cosent: order of the "
        "pairs by their score; "
        "cosine: squared error of the cosine; margin-mse: squared error of the cosine's margin "
        "between second text and negative, for scores of a cross-encoder in --label-column. By "
        "default contrastive, with --label-column cosent",
        TRAIN,
        result=True,
    )
    temperature: float = option(
        "--temperature", positive_float, 0.05, "divisor of cosines in the loss", TRAIN, result=True
    )
    symmetric_loss: bool = option(
        "--symmetric-loss",
        bool,
        False,
        "contrastive: also the first text among all first texts",
        TRAIN,
        UNSCORED,
        result=True,
    )
    matryoshka_dims: list[int] | None = option(
        "--matryoshka-dims",
        positive_int,
        None,
        "sum the losses of the first so many dimensions",
        TRAIN,
        options={"nargs": "+"},
        result=True,
    )
    pooling: str | None = option(
        "--pooling",
        tuple(POOLINGS),
        None,
        "mean of the tokens, or the first token; by default as the starting folder says, else mean",
        EMBEDDING,
    )
    query_prompt: str | None = option(
        "--query-prompt", str, None, "put before first texts", EMBEDDING, result=True
    )
    document_prompt: str | None = option(
        "--document-prompt", str, None, "put before all other texts", EMBEDDING, result=True
    )


class TextTuples(NamedTuple):
    """texts: distinct, with their prompts. rows: those of each sample: anchor, positive, hard
    negatives. scores: of pairs, or None. originals: the texts without their prompts. corpus:
    further texts among which the positives have to be found, by index. teacher_scores: of the
    anchor with each other text of its sample, or None.
    """

    texts: list[str]
    rows: list[list[int]]
    scores: list[float] | None
    originals: list[str]
    corpus: Sequence[int] = ()
    teacher_scores: list[list[float]] | None = None

    def equal_pairs(self) -> list[bool]:
        """Whether the positive of each sample is its anchor."""
        return [self.originals[row[0]] == self.originals[row[1]] for row in self.rows]

    def with_corpus(self, texts: Sequence[str], settings: EmbeddingSettings) -> "TextTuples":
        """With `texts` as the corpus."""
        found = dict(zip(self.texts, self.originals, strict=True))
        prompted = [settings.prompted("document", text) for text in texts]
        for name, text in zip(prompted, texts, strict=True):
            found.setdefault(name, text)
        index = {name: number for number, name in enumerate(found)}
        corpus = sorted({index[name] for name in prompted})
        return self._replace(texts=list(found), originals=list(found.values()), corpus=corpus)


def read_tuples(
    path: Path,
    columns: Sequence[str],
    score: str | None,
    settings: EmbeddingSettings | None = None,
    reading: ReadingOptions = DEFAULT_READING,
    teacher: Sequence[str] = (),
) -> TextTuples:
    """Reads the texts in `columns` of a table. Without columns: neighbouring lines of a .txt file,
    where an empty line ends a document, or the questions of SQuAD's .json with their paragraphs.
    settings: with the prompts `query` of the first text and `document` of the others. teacher:
    columns of a teacher's scores, one for each column but the first one, or one of the margin.
    Raises UserError naming the bad lines.
    """
    index: dict[str, int] = {}
    originals: list[str] = []
    rows = []
    settings = settings or EmbeddingSettings()
    scores: list[list[float]] = []
    lines: list[int] = []
    texts: list[list[str]] = []
    bad = reading.bad_rows(path)
    file = reading.open(path, bad)
    if columns:
        score_columns = teacher if score is None else (score,)
        tuples = table_rows(file, columns, score_columns, reading, bad)
    elif path.suffix == ".json":
        tuples = squad_pairs(file)
    else:
        tuples = neighbouring_lines(file)
    for number, values, row_scores in tuples:
        if empty := [text for text in values if is_blank(text)]:
            why = f"a text is {empty[0]!r}, expected words: correct the line"
            bad.add(file.where(number), why)
            continue
        row = []
        for place, text in enumerate(values):
            prompted = settings.prompted(PROMPTS[min(place, 1)], text)
            if prompted not in index:
                index[prompted] = len(index)
                originals.append(text)
            row.append(index[prompted])
        rows.append(row)
        scores.append(row_scores)
        lines.append(number)
        texts.append(values)
    bad.finish()
    if not rows:
        raise UserError(f"{path} has no pairs of texts: check the file")
    warn_of_blank(path, zip(texts, lines, strict=True))
    found = TextTuples(list(index), rows, None, originals)
    if score is not None:
        pair_scores = [value for (value,) in scores]
        pairs = zip(map(tuple, rows), pair_scores, lines, strict=True)
        warn_of_contradictions(path, pairs, "pairs of texts")
        return found._replace(scores=pair_scores)
    if len(teacher) == 1:
        scores = [[margin, 0.0] for (margin,) in scores]
    return found._replace(teacher_scores=scores) if teacher else found


def table_rows(
    file: TextFile,
    columns: Sequence[str],
    scores: Sequence[str],
    reading: ReadingOptions,
    bad: BadRows,
) -> Iterator[tuple[int, list[str], list[float]]]:
    for number, row in read_texts(Path(file.path), columns, scores, reading.table_format, bad):
        values = [to_number(row[name]) for name in scores]
        if None in values:
            name = scores[values.index(None)]
            why = f"{name!r} is {row[name]!r}, expected a number: correct the line"
            bad.add(file.where(number), why)
        else:
            yield number, [row[name] for name in columns], values


def to_number(value: Any) -> float | None:
    """A finite number, or a string with one; None for anything else."""
    if isinstance(value, str) and is_number(value):
        value = float(value)
    if isinstance(value, int | float) and abs(value) <= MAX_FLOAT32:
        return float(value)
    return None


def neighbouring_lines(file: TextFile) -> Iterator[tuple[int, list[str], list[float]]]:
    before = ""
    for line in file:
        if before and line.strip():
            yield file.number, [before, line.strip()], []
        before = line.strip()


def squad_pairs(file: TextFile) -> Iterator[tuple[int, list[str], list[float]]]:
    squad = read_squad(file.path)
    for number, question in enumerate(squad.questions, 1):
        yield number, [question.text, squad.contexts[question.context]], []
