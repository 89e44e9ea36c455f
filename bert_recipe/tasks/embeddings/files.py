"""Files of pairs and triplets of texts, for sentence embeddings."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bert_recipe.checkpoint.sentence_folders import PROMPTS, EmbeddingSettings
from bert_recipe.tasks.doubtful_rows import is_blank, warn_of_blank, warn_of_contradictions
from bert_recipe.tasks.labels import is_number, with_point
from bert_recipe.tasks.reading import DEFAULT_READING, ReadingOptions
from bert_recipe.tasks.squad.files import read_squad
from bert_recipe.utils.bad_rows import BadRows
from bert_recipe.utils.command_line import (
    MAX_FLOAT32,
)
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.tables import Row, check_lists, read_texts, texts_in
from bert_recipe.utils.text_files import TextFile, table_parts


class TextTuples(NamedTuple):
    """texts: distinct, with their prompts.
    rows: those of each sample: anchor, positive, hard negatives.
    scores: of pairs, or None.
    originals: the texts without their prompts.
    corpus: further texts among which the positives have to be found, by index.
    teacher_scores: of the anchor with each other text of its sample, or None.
    """

    texts: list[str]
    rows: list[list[int]]
    scores: list[float] | None
    originals: list[str]
    corpus: Sequence[int] = ()
    teacher_scores: list[list[float]] | None = None

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
    teacher: Sequence[str] = (),
    num_negatives: int | None = None,
    prompt: str | None = None,
) -> TextTuples:
    """Reads the texts in `columns` of a table, or of the files that `table_parts` finds. Without
    columns: neighbouring lines of a .txt file, where an empty line ends a document, or the
    questions of SQuAD's .json with their paragraphs. Each text in a list of positives is a sample.

    score: column of the scores of pairs.
    settings: with the prompts `query` of the first text and `document` of the others.
    teacher: columns of a teacher's scores, one for each column but the first one, or one of the
        margin.
    num_negatives: how many of the negatives of a row are used; needed where cells have lists of
        them.
    prompt: column of the prompts of the first texts, instead of `query`.

    Raises UserError naming the bad lines.
    """
    bad = reading.bad_rows(path)
    score_columns = teacher if score is None else (score,)
    kept = []
    for part in table_parts(path):
        file = reading.open_table(part, bad)
        if columns:
            groups = table_rows(file, columns, score_columns, reading, bad, prompt)
            samples = samples_of(groups, file, num_negatives, bad)
        elif part.name.lower().removesuffix(file.compression).endswith(".json"):
            samples = squad_pairs(file)
        else:
            samples = neighbouring_lines(file, bad)
        kept += without_blank(samples, file, bad)
    bad.finish(len(kept))
    if not kept:
        advice = "check the file"
        if not columns and path.suffix != ".json":
            advice = "neighbouring lines are pairs, and an empty line ends a document: remove those"
        raise UserError(f"{path} has no pairs of texts: {advice}")
    warn_of_blank(path, [(sample.texts, sample.line) for sample in kept])
    tuples = distinct_texts(kept, settings or EmbeddingSettings())
    if score is not None:
        pair_scores = [sample.scores[0] for sample in kept]
        lines = [sample.line for sample in kept]
        pairs = zip(map(tuple, tuples.rows), pair_scores, lines, strict=True)
        warn_of_contradictions(path, pairs, "pairs of texts")
        return tuples._replace(scores=pair_scores)
    if not teacher:
        return tuples
    teacher_scores = [sample.scores for sample in kept]
    if len(teacher) == 1:
        teacher_scores = [[margin, 0.0] for (margin,) in teacher_scores]
    return tuples._replace(teacher_scores=teacher_scores)


class TextSample(NamedTuple):
    """texts: anchor, positive, hard negatives.
    scores: of the pair, or a teacher's; none without columns of scores.
    prompt: of the anchor, where rows have prompts.
    """

    line: int
    texts: list[str]
    scores: list[float]
    prompt: str | None = None


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
        row_settings = settings.with_query_prompt(sample.prompt)
        for place, text in enumerate(sample.texts):
            kind = PROMPTS[min(place, 1)]  # a query, then documents
            prompted = row_settings.prompted(kind, text)
            if prompted not in index:
                index[prompted] = len(index)
                originals.append(text)
            row.append(index[prompted])
        rows.append(row)
    return TextTuples(list(index), rows, None, originals)


class TextGroup(NamedTuple):
    """A row of a table.

    scores: of the positives, or the margins of a single negative.
    negative_scores: as many as negatives, or none.
    """

    anchor: str
    positives: list[str]
    negatives: list[str]
    scores: list[float]
    negative_scores: list[float]
    has_list: bool  # of negatives
    prompt: str | None = None


def table_rows(
    file: TextFile,
    columns: Sequence[str],
    scores: Sequence[str],
    reading: ReadingOptions,
    bad: BadRows,
    prompt: str | None,
) -> list[tuple[int, TextGroup]]:
    """The rows of a table with their numbers. prompt: column of the anchors' prompts, or None."""
    anchor, *others = columns
    strings = [anchor] if prompt is None else [anchor, prompt]
    path, table_format = Path(file.path), reading.table_format
    groups = []
    rows = read_texts(path, strings, (*others, *scores), table_format, bad)
    for number, row in rows[:1]:
        check_lists(file.where(number), row, others)
    for number, row in rows:
        try:
            if reading.decimal == ",":
                row = row | {name: with_points(row[name], name) for name in scores}
            group = parse_row(row, columns, scores)
            if prompt is not None:
                group = group._replace(prompt=row[prompt])
            groups.append((number, group))
        except ValueError as error:
            bad.add(file.where(number), str(error))
    return groups


def parse_row(row: Row, columns: Sequence[str], score_columns: Sequence[str]) -> TextGroup:
    """The texts and scores of a row of a table.

    columns: of the anchor, of the positives, and any number of negatives.
    score_columns: of the positives' scores and of the negatives'; either may be absent.

    Raises ValueError if a column has neither a text nor texts, or not a score for each text.
    """
    anchor, positive, *negative_columns = columns
    positives = texts_in(row, [positive])
    negatives = texts_in(row, negative_columns)
    scores = scores_in(row, score_columns[:1], positives)
    negative_scores = scores_in(row, score_columns[1:], negatives)
    has_list = any(isinstance(row[name], list) for name in negative_columns)
    return TextGroup(row[anchor], positives, negatives, scores, negative_scores, has_list)


def scores_in(row: Row, columns: Sequence[str], texts: Sequence[str]) -> list[float]:
    """The scores of `texts`; none without columns. Raises ValueError unless each text has one."""
    scores = numbers_in(row, columns)
    if columns and len(scores) != len(texts):
        counts = f"{len(scores)} numbers in {', '.join(columns)} and {len(texts)} texts"
        raise ValueError(f"{counts}: correct the line")
    return scores


def samples_of(
    groups: Sequence[tuple[int, TextGroup]], file: TextFile, num_negatives: int | None, bad: BadRows
) -> Iterator[TextSample]:
    """A sample for each positive, with negatives of its row. Raises UserError if the
    number of negatives in lists is to be chosen.
    """
    counts = [len(group.negatives) for _, group in groups]
    if num_negatives is None and any(group.has_list for _, group in groups):
        least, most = min(counts), max(counts)
        shown = f"{least}" if least == most else f"{least} to {most}"
        raise UserError(
            f"{file.path}: its rows have lists of {shown} negatives: say how many of them a sample "
            f"has, such as --num-negatives {least}"
        )
    for number, group in groups:
        count = len(group.negatives) if num_negatives is None else num_negatives
        if len(group.negatives) < count:
            why = f"{len(group.negatives)} negatives, fewer than --num-negatives {count}: give more"
            bad.add(file.where(number), why)
            continue
        for place, positive in enumerate(group.positives):
            scores = group.scores[place : place + 1] + group.negative_scores[:count]
            texts = [group.anchor, positive, *group.negatives[:count]]
            yield TextSample(number, texts, scores, group.prompt)


def numbers_in(row: Row, columns: Sequence[str]) -> list[float]:
    """The numbers of columns that have one or a list of them. Raises ValueError for others."""
    numbers = []
    for name in columns:
        values = row[name] if isinstance(row[name], list) else [row[name]]
        for value in values:
            number = to_number(value)
            if number is None:
                advice = "correct the line"
                if isinstance(value, str) and is_number(value.replace(",", ".")):
                    advice = "give --decimal ,"
                raise ValueError(f"{name!r} is {value!r}, expected a number: {advice}")
            numbers.append(number)
    return numbers


def with_points(value: Any, name: str) -> Any:
    """`with_point` of a number or of a list of them, as the column `name` has."""
    if isinstance(value, list):
        return [with_point(item, name) for item in value]
    return with_point(value, name)


def to_number(value: Any) -> float | None:
    """A finite number, or a string with one; None for anything else."""
    if isinstance(value, str) and is_number(value):
        value = float(value)
    if isinstance(value, int | float) and abs(value) <= MAX_FLOAT32:
        return float(value)
    return None


def neighbouring_lines(file: TextFile, bad: BadRows) -> Iterator[TextSample]:
    """Pairs of lines. The lines before and after a bad one are not neighbours."""
    before = ""
    for line, why in file.checked_lines():
        if why is not None:
            bad.add(file.where(), why)
            line = ""
        if before and line.strip():
            yield TextSample(file.number, [before, line.strip()], [])
        before = line.strip()


def squad_pairs(file: TextFile) -> Iterator[TextSample]:
    squad = read_squad(file.path)
    for number, question in enumerate(squad.questions, 1):
        texts = [question.text, squad.contexts[question.context]]
        yield TextSample(number, texts, [])
