"""Files of pairs and triplets of texts, for sentence embeddings."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bert_recipe.checkpoint.sentence_folders import PROMPTS, EmbeddingSettings
from bert_recipe.tasks.doubtful_rows import is_blank, warn_of_blank, warn_of_contradictions
from bert_recipe.tasks.labels import is_number
from bert_recipe.tasks.reading import DEFAULT_READING, ReadingOptions
from bert_recipe.tasks.squad.files import read_squad
from bert_recipe.utils.bad_rows import BadRows
from bert_recipe.utils.command_line import (
    MAX_FLOAT32,
)
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.tables import read_texts
from bert_recipe.utils.text_files import TextFile, table_parts


class TextTuples(NamedTuple):
    """texts: distinct, with their prompts. rows: those of each sample: anchor, positive, hard
    negatives. scores: of pairs, or None. originals: the texts without their prompts. corpus:
    further texts among which the positives have to be found, by index.
    """

    texts: list[str]
    rows: list[list[int]]
    scores: list[float] | None
    originals: list[str]
    corpus: Sequence[int] = ()

    def with_corpus(self, texts: Sequence[str], settings: EmbeddingSettings) -> "TextTuples":
        """With `texts` as the corpus."""
        originals = dict(zip(self.texts, self.originals, strict=True))
        prompted = [settings.prompted("document", text) for text in texts]
        for name, text in zip(prompted, texts, strict=True):
            originals.setdefault(name, text)
        index = {name: number for number, name in enumerate(originals)}
        corpus = sorted({index[name] for name in prompted})
        return self._replace(
            texts=list(originals), originals=list(originals.values()), corpus=corpus
        )


def read_tuples(
    path: Path,
    columns: Sequence[str],
    score: str | None,
    settings: EmbeddingSettings | None = None,
    reading: ReadingOptions = DEFAULT_READING,
) -> TextTuples:
    """Reads the texts in `columns` of a table, or of the files that `table_parts` finds. Without
    columns: neighbouring lines of a .txt file, where an empty line ends a document, or the
    questions of SQuAD's .json with their paragraphs. score: column of the scores of pairs.
    settings: with the prompts `query` of the first text and `document` of the others. Raises
    UserError naming the bad lines.
    """
    bad = reading.bad_rows(path)
    kept = []
    for part in table_parts(path):
        file = reading.open(part, bad)
        if columns:
            samples = table_samples(file, columns, score, reading, bad)
        elif part.suffix == ".json":
            samples = squad_pairs(file)
        else:
            samples = neighbouring_lines(file)
        kept += without_blank(samples, file, bad)
    bad.finish()
    if not kept:
        advice = "check the file"
        if not columns and path.suffix != ".json":
            advice = "neighbouring lines are pairs, and an empty line ends a document: remove those"
        raise UserError(f"{path} has no pairs of texts: {advice}")
    warn_of_blank(path, [(sample.texts, sample.line) for sample in kept])
    tuples = distinct_texts(kept, settings or EmbeddingSettings())
    if score is None:
        return tuples
    scores = [sample.score for sample in kept]
    lines = [sample.line for sample in kept]
    pairs = zip(map(tuple, tuples.rows), scores, lines, strict=True)
    warn_of_contradictions(path, pairs, "pairs of texts")
    return tuples._replace(scores=scores)


class TextSample(NamedTuple):
    """texts: anchor, positive, hard negatives. score: of the pair; 0 without scores."""

    line: int
    texts: list[str]
    score: float = 0.0


def without_blank(samples: Iterable[TextSample], file: TextFile, bad: BadRows) -> list[TextSample]:
    """The samples but for those with a text that has nothing to see, which `bad` takes."""
    kept = []
    for sample in samples:
        if blank := [text for text in sample.texts if is_blank(text)]:
            why = f"a text is {blank[0]!r}, expected words: correct the line"
            bad.add(file.where(sample.line), why)
        else:
            kept.append(sample)
    return kept


def distinct_texts(samples: Sequence[TextSample], settings: EmbeddingSettings) -> TextTuples:
    """The texts of `samples` with their prompts, each once, and the samples as their numbers."""
    index: dict[str, int] = {}
    originals: list[str] = []
    rows = []
    for sample in samples:
        row = []
        for place, text in enumerate(sample.texts):
            prompted = settings.prompted(PROMPTS[min(place, 1)], text)
            if prompted not in index:
                index[prompted] = len(index)
                originals.append(text)
            row.append(index[prompted])
        rows.append(row)
    return TextTuples(list(index), rows, None, originals)


def table_samples(
    file: TextFile, columns: Sequence[str], score: str | None, reading: ReadingOptions, bad: BadRows
) -> Iterator[TextSample]:
    """A sample for each row of a table."""
    scores = () if score is None else (score,)
    rows = read_texts(Path(file.path), columns, scores, reading.table_format, bad)
    for number, row in rows:
        texts = [row[name] for name in columns]
        if score is None:
            yield TextSample(number, texts)
        elif (value := to_number(row[score])) is not None:
            yield TextSample(number, texts, value)
        else:
            why = f"{score!r} is {row[score]!r}, expected a number: correct the line"
            bad.add(file.where(number), why)


def to_number(value: Any) -> float | None:
    """A finite number, or a string with one; None for anything else."""
    if isinstance(value, str) and is_number(value):
        value = float(value)
    if isinstance(value, int | float) and abs(value) <= MAX_FLOAT32:
        return float(value)
    return None


def neighbouring_lines(file: TextFile) -> Iterator[TextSample]:
    before = ""
    for line in file:
        if before and line.strip():
            yield TextSample(file.number, [before, line.strip()])
        before = line.strip()


def squad_pairs(file: TextFile) -> Iterator[TextSample]:
    squad = read_squad(file.path)
    for number, question in enumerate(squad.questions, 1):
        texts = [question.text, squad.contexts[question.context]]
        yield TextSample(number, texts)
