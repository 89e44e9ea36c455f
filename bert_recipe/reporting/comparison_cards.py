"""What the report page shows of two runs that scored the same rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bert_recipe.checkpoint.folder import without_seed
from bert_recipe.reporting.comparison import (
    ScoreDifference,
    ScoredModel,
    corrected,
    difference_cells,
    differences_of,
    find_runs,
    read_run,
    run_folder,
    verdict,
)
from bert_recipe.reporting.records import Run, RunPhase, differences, short_names
from bert_recipe.reporting.scored_rows import ScoredRows
from bert_recipe.tasks.mistakes import MAX_CHARACTERS
from bert_recipe.utils.errors import UserError, shortened

NUM_CHANGES = 10  # rows that are shown of those gained, and of those lost
TINY = 1e-9  # differences that are rounding


class ChangedRow(NamedTuple):
    """A row, its label, and what A and B say of it, in all their seeds."""

    text: str
    label: str
    first: str
    other: str


@dataclass(frozen=True)
class ComparisonCard:
    """task: the name of the runs' folders.
    names: of A and B.
    scores: rows with DIFFERENCE_HEADER.
    settings: those that differ, with the values of A and B.
    changes: by their titles, the clearest rows that B has right more often than A, and less often.
    error: why the runs cannot be compared, and nothing else is known.
    """

    task: str
    names: Sequence[str]
    num_rows: int = 0
    scores: Sequence[Sequence[str]] = ()
    verdicts: Sequence[str] = ()
    settings: Sequence[tuple[str, list[Any]]] = ()
    changes: Sequence[tuple[str, list[ChangedRow]]] = ()
    error: str = ""


def comparison_cards(paths: Sequence[Path], runs: Sequence[Run]) -> list[ComparisonCard]:
    """Each run in `paths` beside the first one that scored the same task. runs: their logs."""
    runs_of_task: dict[str, list[dict[str, Path]]] = {}
    for path in filter(Path.is_dir, paths):
        for seeds in find_runs(path):
            task = without_seed(run_folder(seeds)).name
            runs_of_task.setdefault(task, []).append(seeds)
    cards = []
    for task, folders in runs_of_task.items():
        if len(folders) > 1:
            cards += cards_of_task(task, folders, runs)
    return cards


def cards_of_task(
    task: str, folders: Sequence[dict[str, Path]], runs: Sequence[Run]
) -> list[ComparisonCard]:
    first_name, *other_names = short_names([run_folder(seeds) for seeds in folders])
    cards: list[ComparisonCard] = []
    models: list[tuple[str, ScoredModel]] = []
    comparisons: list[list[ScoreDifference]] = []
    for name, seeds in zip(other_names, folders[1:], strict=True):
        try:
            first, other = read_run(folders[0]), read_run(seeds)
            comparisons.append(list(differences_of(first, other)))
        except UserError as error:
            cards.append(ComparisonCard(task, (first_name, name), error=str(error)))
            continue
        models.append((name, other))
    for (name, other), scores in zip(models, corrected(comparisons), strict=True):
        if scores:
            names = (titled(first_name, first), titled(name, other))
            cards.append(make_card(task, names, (first, other), scores, runs))
    return cards


def titled(name: str, model: ScoredModel) -> str:
    return name + model.title.removeprefix(str(model.path))


def make_card(
    task: str,
    names: Sequence[str],
    models: tuple[ScoredModel, ScoredModel],
    scores: Sequence[ScoreDifference],
    runs: Sequence[Run],
) -> ComparisonCard:
    logs = [phases_of(model.path, task, runs) for model in models]
    return ComparisonCard(
        task,
        names,
        scores[0].num_rows,
        [difference_cells(score) for score in scores],
        [verdict(score) for score in scores],
        list(differences(logs).items()) if all(logs) else [],
        changes_of(*(list(next(iter(model.sets.values())).values()) for model in models)),
    )


def phases_of(folder: Path, task: str, runs: Sequence[Run]) -> list[RunPhase]:
    """The logs of the runs of `task` in `folder`, one for each seed."""
    phases = []
    for phase in (phase for run in runs for phase in run.phases if phase.name == task):
        folders = (phase.run_folder, phase.sessions[-1].file.parent)
        if folder.resolve() in [path.resolve() for path in folders]:
            phases.append(phase)
    return phases


def changes_of(
    first: Sequence[ScoredRows], other: Sequence[ScoredRows]
) -> list[tuple[str, list[ChangedRow]]]:
    """The rows that B gained and lost, the most first. first, other: the seeds of A and B."""
    changes_n = goodness(other) - goodness(first)
    sureness_n = sureness(other) - sureness(first)
    order = np.lexsort([-sureness_n, -changes_n])
    tables = []
    for title, rows in (
        ("gained", [row for row in order if changes_n[row] > TINY]),
        ("lost", [row for row in order[::-1] if changes_n[row] < -TINY]),
    ):
        shown = [changed_row(first, other, row) for row in rows[:NUM_CHANGES]]
        which = f", the clearest {NUM_CHANGES}" if len(rows) > NUM_CHANGES else ""
        tables.append((f"{len(rows):,} of {len(changes_n):,} rows {title} by B{which}", shown))
    return tables


def goodness(seeds: Sequence[ScoredRows]) -> np.ndarray:
    """Of each row, the mean of the seeds [n]."""
    return np.mean([rows.outcomes.goodness_n for rows in seeds], axis=0)


def sureness(seeds: Sequence[ScoredRows]) -> np.ndarray:
    """The probability of each row's class, the mean of the seeds [n]; 0 without classes."""
    means = np.zeros(len(seeds[0].keys))
    for rows in seeds:
        if rows.probabilities_nC is not None and len(rows.probabilities_nC) == len(means):
            means += rows.probabilities_nC[np.arange(len(means)), rows.labels_n] / len(seeds)
    return means


def changed_row(first: Sequence[ScoredRows], other: Sequence[ScoredRows], row: int) -> ChangedRow:
    outcomes = first[0].outcomes
    said = []
    for seeds in (first, other):
        predictions = [rows.outcomes.predictions[row] for rows in seeds]
        said.append(", ".join(dict.fromkeys(text or "(nothing)" for text in predictions)))
    texts = (outcomes.texts[row], outcomes.truths[row], *said)
    return ChangedRow(*(shortened(text, MAX_CHARACTERS) for text in texts))
