"""What the report page shows of two runs that scored the same rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bert_recipe.checkpoint.folder import SEED_FOLDER
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
from bert_recipe.reporting.records import short_names
from bert_recipe.utils.errors import UserError


@dataclass(frozen=True)
class ComparisonCard:
    """task: the name of the runs' folders. names: of A and B.

    scores: rows with DIFFERENCE_HEADER, as the first cell and the others.
    error: why the runs cannot be compared, and nothing else is known.
    """

    task: str
    names: Sequence[str]
    num_rows: int = 0
    scores: Sequence[tuple[str, Sequence[str]]] = ()
    verdicts: Sequence[str] = ()
    error: str = ""


def comparison_cards(paths: Sequence[Path]) -> list[ComparisonCard]:
    """Each run in `paths` beside the first one that scored the same task."""
    runs_of_task: dict[str, list[dict[str, Path]]] = {}
    for path in filter(Path.is_dir, paths):
        for seeds in find_runs(path):
            folder = run_folder(seeds)
            task = folder.parent.name if SEED_FOLDER.fullmatch(folder.name) else folder.name
            runs_of_task.setdefault(task, []).append(seeds)
    cards = []
    for task, folders in runs_of_task.items():
        if len(folders) > 1:
            cards += cards_of_task(task, folders)
    return cards


def cards_of_task(task: str, folders: Sequence[dict[str, Path]]) -> list[ComparisonCard]:
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
            rows = [(score.title, difference_cells(score)) for score in scores]
            verdicts = [verdict(score) for score in scores]
            cards.append(ComparisonCard(task, names, scores[0].num_rows, rows, verdicts))
    return cards


def titled(name: str, model: ScoredModel) -> str:
    return name + model.title.removeprefix(str(model.path))
