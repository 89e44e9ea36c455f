"""Compares the scores of runs on the same rows."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert_recipe.checkpoint.folder import SEED_FOLDER
from bert_recipe.reporting.paired_scores import (
    Calibration,
    Difference,
    calibration,
    compare_scores,
)
from bert_recipe.reporting.scored_rows import SCORES_FILE, STEM, ScoredRows, read_scored_rows
from bert_recipe.utils.errors import UserError, one_line


@dataclass(frozen=True)
class ScoredModel:
    """The scored rows of a model, by evaluation set and run: of each seed, or with the name "" of
    the only run. folds: how many runs of cross-validation were joined into one.
    """

    path: Path
    sets: Mapping[str, Mapping[str, ScoredRows]]
    folds: int = 0

    @property
    def runs(self) -> list[str]:
        return list(next(iter(self.sets.values())))

    @property
    def title(self) -> str:
        """The path, and what was joined."""
        if self.folds:
            return f"{self.path} ({self.folds} folds)"
        return f"{self.path} ({len(self.runs)} seeds)" if len(self.runs) > 1 else str(self.path)


def find_runs(path: Path) -> list[dict[str, Path]]:
    """The runs with scored rows in `path` or below it. Those of the seeds or folds of a run are
    together, by the names of their folders.
    """
    if is_scored(path):
        return [{"": path}]
    found: dict[Path, dict[str, Path]] = {}
    for scores in sorted(path.rglob(SCORES_FILE)):
        folder = scores.parent
        if not is_scored(folder):
            continue
        if SEED_FOLDER.fullmatch(folder.name):
            found.setdefault(folder.parent, {})[folder.name] = folder
        else:
            found[folder] = {"": folder}
    return list(found.values())


def is_scored(folder: Path) -> bool:
    return (folder / SCORES_FILE).is_file() and any(folder.glob(f"{STEM}*"))


def read_model(path: Path) -> ScoredModel:
    """The only run in `path`. Raises UserError if there is none, or there are several."""
    if not path.exists():
        raise UserError(f"{path} does not exist: check the path")
    runs = find_runs(path)
    if not runs:
        raise UserError(
            f"{path} has no rows that were scored ({STEM} and {SCORES_FILE}): score the model with "
            f"--do-eval"
        )
    if len(runs) > 1:
        names = ", ".join(str(folder_of(folders)) for folders in runs)
        raise UserError(f"{path} has several runs: give one of {names}")
    return read_runs_of(runs[0])


def folder_of(folders: Mapping[str, Path]) -> Path:
    """Of a run with its seeds or folds."""
    name, folder = next(iter(folders.items()))
    return folder.parent if name else folder


def read_runs_of(folders: Mapping[str, Path]) -> ScoredModel:
    path = folder_of(folders)
    are_folds = next(iter(folders)).startswith("fold-")
    groups = {"": [*folders.values()]} if are_folds else {name: [folders[name]] for name in folders}
    by_run = {name: read_scored_rows(group) for name, group in groups.items()}
    sets = {
        set_name: {name: rows[set_name] for name, rows in by_run.items()}
        for set_name in next(iter(by_run.values()))
    }
    for runs in sets.values():
        first, *others = runs.values()
        for rows in others:
            check_same_rows(first, rows, str(path), "another seed of it")
    return ScoredModel(path, sets, len(folders) if are_folds else 0)


def check_same_rows(first: ScoredRows, other: ScoredRows, name: str, other_name: str) -> None:
    """Raises UserError if the texts or labels differ."""
    if first.keys == other.keys:
        return
    lacking = Counter(first.keys) - Counter(other.keys)
    what = f"{lacking.total()} of the {len(first.keys)} rows of {name} are not in {other_name}"
    example = next(iter(lacking), None)
    if example is None:
        what = f"{other_name} has {len(other.keys)} rows, and {name} only {len(first.keys)}"
    else:
        what += f", such as {one_line(' | '.join(example))[:100]!r}"
    raise UserError(f"other rows were scored: {what}: score both on the same file with --do-eval")


class ScoreDifference(NamedTuple):
    """set_name: of several evaluation sets, or ""."""

    set_name: str
    name: str
    num_rows: int
    difference: Difference

    @property
    def title(self) -> str:
        return " ".join(filter(None, (self.set_name, self.name.replace("_", " "))))


def differences_of(first: ScoredModel, other: ScoredModel) -> Iterator[ScoreDifference]:
    """The differences of all scores that both have. Raises UserError if other rows were scored."""
    if first.sets.keys() != other.sets.keys():
        raise UserError(f"{first.path} and {other.path} scored other files: compare one task")
    same_seeds = first.runs == other.runs
    for set_name, runs in first.sets.items():
        others = other.sets[set_name]
        rows, other_rows = (next(iter(own.values())) for own in (runs, others))
        check_same_rows(rows, other_rows, str(first.path), str(other.path))
        for name in rows.scores:
            if name not in other_rows.scores:
                continue
            scores, other_scores = (
                [own.scores[name] for own in side.values()] for side in (runs, others)
            )
            difference = compare_scores(scores, other_scores, len(rows.keys), same_seeds)
            yield ScoreDifference(set_name, name, len(rows.keys), difference)


def calibrations(model: ScoredModel) -> list[Calibration]:
    """Of each run and set with probabilities of classes."""
    return [
        calibration(rows.probabilities_nC, rows.labels_n)
        for runs in model.sets.values()
        for rows in runs.values()
        if rows.probabilities_nC is not None and rows.labels_n is not None
    ]


def percent(value: float) -> str:
    return f"{100 * value:.2f}"


def points(value: float) -> str:
    """A difference in percentage points, with its sign."""
    return f"{100 * value:+.2f}"


def interval_text(difference: Difference) -> str:
    return " to ".join(map(points, difference.interval))


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns are aligned, also as plain text."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return f"| {' | '.join(padded)} |"

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])


def difference_table(found: Sequence[ScoreDifference]) -> str:
    header = ["score, in percent", "A", "B", "B - A", "95% interval"]
    rows = []
    for one in found:
        difference = one.difference
        row = [one.title, *map(percent, difference.means), points(difference.value)]
        rows.append([*row, interval_text(difference)])
    return markdown(header, rows)


def calibration_table(models: Mapping[str, ScoredModel]) -> str | None:
    """The means over runs and sets; None without probabilities of classes."""
    rows = []
    for letter, model in models.items():
        if found := calibrations(model):
            error, temperature = np.mean(found, axis=0)
            rows.append([letter, percent(error), f"{temperature:.2f}"])
    header = ["", "expected calibration error, in percent", "temperature"]
    return markdown(header, rows) if rows else None


def verdict(one: ScoreDifference) -> str:
    """What the interval says of B."""
    difference = one.difference
    if not difference.is_shown:
        return f"{one.title}: these rows do not show a difference"
    return f"{one.title}: B is {'better' if difference.value > 0 else 'worse'} than A"


def comparison_lines(paths: Sequence[Path]) -> list[str]:
    """For the report page: each run in `paths` beside the first one that scored the same task."""
    by_task: dict[str, list[dict[str, Path]]] = {}
    for path in filter(Path.is_dir, paths):
        for folders in find_runs(path):
            by_task.setdefault(folder_of(folders).name, []).append(folders)
    lines = []
    for first, *others in by_task.values():
        for other in others:
            try:
                models = read_runs_of(first), read_runs_of(other)
                one = next(differences_of(*models), None)
            except UserError as error:
                names = f"{folder_of(other)} beside {folder_of(first)}"
                lines.append(f"{names} cannot be compared: {error}")
                continue
            if one is not None:
                lines.append(comparison_line(*models, one))
    return lines


def comparison_line(first: ScoredModel, other: ScoredModel, one: ScoreDifference) -> str:
    difference = one.difference
    seen = "" if difference.is_shown else "; these rows do not show a difference"
    return (
        f"{other.title} beside {first.title}: {one.title} {points(difference.value)} points, 95% "
        f"interval {interval_text(difference)}, {one.num_rows:,} rows{seen}"
    )
