"""Compares the scores of runs on the same rows."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert_recipe.checkpoint.calibration import CALIBRATION_FILE, write_temperature
from bert_recipe.checkpoint.folder import SEED_FOLDER, find_model_folder
from bert_recipe.checkpoint.record import SCORES_FILE
from bert_recipe.reporting.calibration import (
    LEAST_WRONG,
    Calibration,
    calibration,
    scored_probabilities,
)
from bert_recipe.reporting.markdown import markdown_table
from bert_recipe.reporting.paired_scores import (
    Difference,
    compare_scores,
    holm,
)
from bert_recipe.reporting.scored_rows import (
    STEM,
    ScoredRows,
    read_scored_rows,
    scored_files,
)
from bert_recipe.utils.errors import UserError, one_line
from bert_recipe.utils.progress import print_line


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
    """The runs with scored rows in `path` or below it: of each the folders of its seeds or folds by
    name, such as {"seed-1": ...}, or {"": folder} if it has none.
    """
    if is_scored(path):
        return [{"": path}]
    folders_of_run: dict[Path, dict[str, Path]] = {}
    for scores in sorted(path.rglob(SCORES_FILE)):
        folder = scores.parent
        if not is_scored(folder):
            continue
        if SEED_FOLDER.fullmatch(folder.name):
            folders_of_run.setdefault(folder.parent, {})[folder.name] = folder
        else:
            folders_of_run[folder] = {"": folder}
    return list(folders_of_run.values())


def is_scored(folder: Path) -> bool:
    return (folder / SCORES_FILE).is_file() and bool(scored_files(folder))


def read_model(path: Path) -> ScoredModel:
    """The only run in `path`. Raises UserError if there is none, or there are several."""
    return read_run(only_run(path))


def only_run(path: Path) -> dict[str, Path]:
    """The only run in `path`, as `find_runs` has it. Raises UserError if there is none, or there
    are several.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist: check the path")
    runs = find_runs(path)
    if not runs:
        raise UserError(
            f"{path} has no rows that were scored ({STEM} and {SCORES_FILE}): score the model with "
            f"--do-eval"
        )
    if len(runs) > 1:
        names = ", ".join(str(run_folder(seeds)) for seeds in runs)
        raise UserError(f"{path} has several runs: give one of {names}")
    return runs[0]


def scores_of_seeds(output_dir: Path, first: int, count: int) -> list[Path]:
    """SCORES_FILE of each seed of a command with this --output-dir that has one; a single seed has
    it in the folder of the run itself. Raises UserError if there are those of several models.
    """
    names = [""] if count == 1 else [f"seed-{seed}" for seed in range(first, first + count)]
    patterns = [str(Path("*", "*", name, SCORES_FILE)) for name in names]
    files = [path for pattern in patterns for path in output_dir.glob(pattern)]
    runs = {str(Path(*file.relative_to(output_dir).parts[:2])) for file in files}
    if len(runs) > 1:
        raise UserError(
            f"{output_dir} has the scores of {', '.join(sorted(runs))}: keep those of one there"
        )
    return files


def run_folder(seeds: Mapping[str, Path]) -> Path:
    """The folder of a run, in which its seeds or folds have theirs. seeds: those by name, such as
    `seed-1`, or the run's own folder with the name "" (see `find_runs`).
    """
    name, folder = next(iter(seeds.items()))
    return folder.parent if name else folder


def read_run(seeds: Mapping[str, Path]) -> ScoredModel:
    """The scored rows of a run with the folders `seeds`; those of folds are joined. Raises
    UserError if seeds scored different rows.
    """
    path = run_folder(seeds)
    first_seed, *other_seeds = seeds
    for name in other_seeds:
        if scored_files(seeds[name]).keys() != scored_files(seeds[first_seed]).keys():
            raise UserError(
                f"{path}: {first_seed} and {name} scored other files: score all on the same one"
            )
    if first_seed.startswith("fold-"):
        num_folds = len(seeds)
        rows_of_seeds = {"": read_scored_rows(list(seeds.values()))}
    else:
        num_folds = 0
        rows_of_seeds = {name: read_scored_rows([folder]) for name, folder in seeds.items()}
    sets: dict[str, dict[str, ScoredRows]] = {}
    for set_name in next(iter(rows_of_seeds.values())):
        sets[set_name] = {seed: rows[set_name] for seed, rows in rows_of_seeds.items()}
    for rows_by_seed in sets.values():
        first, *others = rows_by_seed.values()
        for rows in others:
            check_same_rows(first, rows, str(path), "another seed of it")
    return ScoredModel(path, sets, num_folds)


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


DIFFERENCE_HEADER = ["score, in percent", "A", "B", "B - A", "95% interval", "p"]


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
    """The differences of all scores that are defined for all runs of both, set by set. Raises
    UserError if the models scored different rows.
    """
    if first.sets.keys() != other.sets.keys():
        raise UserError(f"{first.path} and {other.path} scored other files: compare one task")
    same_seeds = first.runs == other.runs
    for set_name in first.sets:
        seeds = list(first.sets[set_name].values())  # the rows of each seed
        other_seeds = list(other.sets[set_name].values())
        check_same_rows(seeds[0], other_seeds[0], str(first.path), str(other.path))
        num_rows = len(seeds[0].keys)
        for name in seeds[0].scores:
            if not all(name in rows.scores for rows in (*seeds, *other_seeds)):
                continue
            scores = [rows.scores[name] for rows in seeds]
            other_scores = [rows.scores[name] for rows in other_seeds]
            difference = compare_scores(scores, other_scores, same_seeds)
            yield ScoreDifference(set_name, name, num_rows, difference)


def left_out(models: Sequence[ScoredModel], compared: Sequence[ScoreDifference]) -> str:
    """Says which scores of some runs are not `compared`; "" if all are."""
    runs = [rows for model in models for seeds in model.sets.values() for rows in seeds.values()]
    names = set().union(*(rows.scores for rows in runs)) - {score.name for score in compared}
    if compared and not names:
        return ""
    what = ", ".join(sorted(names)).replace("_", " ") or "any score"
    return f"not compared, since it is not defined for all runs: {what}"


def corrected(comparisons: Sequence[Sequence[ScoreDifference]]) -> list[list[ScoreDifference]]:
    """Several models beside the same first one: p-values of each score by Holm's correction."""
    p_values_of: dict[str, list[float]] = {}
    for score in itertools.chain(*comparisons):
        if score.difference.p_value is not None:
            p_values_of.setdefault(score.title, []).append(score.difference.p_value)
    queues = {title: iter(holm(p_values)) for title, p_values in p_values_of.items()}

    def correct(score: ScoreDifference) -> ScoreDifference:
        if score.difference.p_value is None:
            return score
        return score._replace(
            difference=score.difference._replace(p_value=next(queues[score.title]))
        )

    return [[correct(score) for score in differences] for differences in comparisons]


def calibrations(model: ScoredModel) -> list[Calibration]:
    """Of each run with probabilities of classes."""
    pairs = [
        scored_probabilities(runs[name] for runs in model.sets.values()) for name in model.runs
    ]
    return [calibration(*pair) for pair in pairs if pair is not None]


def calibrate(path: Path) -> list[str]:
    """Writes the temperature of the scored rows to the folders of the models of the only run in
    `path`, one for each seed or fold. Returns lines that say so. Raises UserError if there are no
    probabilities of classes, or no model.
    """
    fits = []
    for folder in only_run(path).values():
        sets = read_scored_rows([folder])
        pair = scored_probabilities(sets.values())
        if pair is None:
            raise UserError(
                f"{folder} has no probabilities of classes: --calibrate is for classifiers of texts"
            )
        num_wrong = int((pair[0].argmax(axis=1) != pair[1]).sum())
        if num_wrong < LEAST_WRONG:
            raise UserError(
                f"{folder}: {num_wrong} of {len(pair[1])} scored rows are wrong, and a temperature "
                f"is fitted on at least {LEAST_WRONG} wrong ones: score a larger file, of rows "
                f"that were not trained on"
            )
        model, result = find_model_folder(folder, print_line), calibration(*pair)
        if math.isinf(result.temperature):
            raise UserError(
                f"{folder}: equal probabilities of all classes are better than those of this "
                f"model, so that no temperature helps: train the model longer, or on more rows"
            )
        fits.append((model, result, len(pair[1])))
    lines = []
    for model, result, num_rows in fits:  # once all seeds have one
        write_temperature(model, result.temperature, num_rows)
        lines.append(
            f"{model / CALIBRATION_FILE}: temperature {result.temperature:.2f}; expected "
            f"calibration error {percent(result.error)}% without, "
            f"{percent(result.calibrated_error)}% with it"
        )
    return lines


def percent(value: float) -> str:
    return f"{100 * value:.2f}"


def points(value: float) -> str:
    """A difference in percentage points, with its sign."""
    return f"{100 * value:+.2f}"


def interval_text(difference: Difference) -> str:
    return " to ".join(map(points, difference.interval))


def p_value_text(difference: Difference) -> str:
    if difference.p_value is None:
        return "one seed"
    return "< 0.001" if difference.p_value < 0.001 else f"{difference.p_value:.3f}"


def difference_table(differences: Sequence[ScoreDifference]) -> str:
    return markdown_table(DIFFERENCE_HEADER, [difference_cells(score) for score in differences])


def difference_cells(score: ScoreDifference) -> list[str]:
    """A row of the table with DIFFERENCE_HEADER."""
    difference = score.difference
    cells = [score.title, *map(percent, difference.means), points(difference.value)]
    return [*cells, interval_text(difference), p_value_text(difference)]


def calibration_table(models: Mapping[str, ScoredModel]) -> str | None:
    """The means over runs and sets; None without probabilities of classes."""
    rows = []
    for letter, model in models.items():
        if errors_and_temperatures := calibrations(model):
            error, temperature, calibrated = np.mean(errors_and_temperatures, axis=0)
            rows.append([letter, percent(error), f"{temperature:.2f}", percent(calibrated)])
    header = ["", "expected calibration error, in percent", "temperature", "error with it"]
    return markdown_table(header, rows) if rows else None


def verdict(score: ScoreDifference) -> str:
    """What rows and seeds say of B."""
    difference = score.difference
    if difference.p_value is None and difference.leaves_out_zero:
        seen = f"B has {points(difference.value)} points on these rows with this seed"
        return f"{score.title}: {seen}; another seed may reverse it: train both with --num-seeds 5"
    if not difference.is_shown:
        return f"{score.title}: no difference is shown"
    return f"{score.title}: B is {'better' if difference.value > 0 else 'worse'} than A"
