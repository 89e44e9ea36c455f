#!/usr/bin/env python3
"""Fine-tunes with several learning rates and numbers of epochs, and compares their scores on the
development file.

    python3 scripts/search_rates.py --learning-rates 1e-5 2e-5 5e-5 --epochs 2 3 --num-seeds 3 \\
        --output-dir search run_glue.py --init-checkpoint MODEL_FOLDER --do-train --do-eval \\
        --train-file train.csv --eval-file dev.csv --text-column review --label-column stars

The rest of the line is a command of run_glue.py, run_ner.py, run_embeddings.py or run_squad.py.
Each setting has the same seeds. Without --learning-rates, the rate that the program chooses, half
of it and twice it are tried; without --epochs, its epochs. Writes search.md and report.html. If
interrupted, rerun the same command to resume.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import math
import statistics
from collections.abc import Sequence
from importlib import import_module
from itertools import product
from types import ModuleType
from typing import Any, NamedTuple

from bert_recipe.utils.errors import UserError, handle_uncaught_errors, run_main

if __name__ == "__main__":
    handle_uncaught_errors()  # also of the imports below

import numpy as np

import report
from bert_recipe.checkpoint.record import read_record
from bert_recipe.config import RunConfig
from bert_recipe.config.arguments import all_names
from bert_recipe.config.fine_tuning_defaults import BY_RULE
from bert_recipe.reporting.comparison import scores_of_seeds
from bert_recipe.reporting.markdown import markdown_table
from bert_recipe.reporting.paired_scores import (
    LEVEL,
    ROUNDING,
    holm,
    p_value_of,
    paired_part,
)
from bert_recipe.utils.command_line import (
    REQUIRED,
    ArgumentParser,
    Arguments,
    Computed,
    Flag,
    positive_float,
    positive_int,
)
from bert_recipe.utils.files import write_atomically
from bert_recipe.utils.json_files import read_json
from bert_recipe.utils.progress import print_line

PROGRAMS = ("run_glue.py", "run_ner.py", "run_embeddings.py", "run_squad.py")
NEEDED = ("--do-train", "--do-eval")
# What this program sets, and what would leave nothing to compare.
REFUSED = (
    *("--learning-rate", "--epochs", "--max-steps", "--output-dir", "--seed", "--num-seeds"),
    *("--num-folds", "--resume-from-checkpoint", "--overwrite", "--benchmark", "--report-file"),
)
FLAGS = (
    Flag(
        "--learning-rates",
        positive_float,
        Computed(f"{BY_RULE}, half and twice that"),
        "rates to try",
        options={"nargs": "+"},
    ),
    Flag(
        "--epochs",
        positive_float,
        Computed(BY_RULE),
        "numbers of epochs to try",
        options={"nargs": "+"},
    ),
    Flag("--num-seeds", positive_int, 3, "seeds of each setting, which are compared in pairs"),
    Flag("--seed", int, RunConfig.seed, "the first seed"),
    Flag("--output-dir", Path, REQUIRED, "folder for the runs, search.md and report.html"),
)


class Setting(NamedTuple):
    learning_rate: Any  # a number; before the run, None for that of the program's rule
    epochs: Any

    @property
    def name(self) -> str:
        rate, epochs = ("by-rule" if value is None else f"{value:.12g}" for value in self)
        return f"rate-{rate}-epochs-{epochs}"


def split_command(argv: Sequence[str]) -> tuple[list[str], str | None, list[str]]:
    """The words of this program, and the program to run with its own."""
    for place, word in enumerate(argv):
        if Path(word).name in PROGRAMS:
            return list(argv[:place]), Path(word).name, list(argv[place + 1 :])
    return list(argv), None, []


def check_command(parser: ArgumentParser, program: str, command: Sequence[str]) -> None:
    given = {word.partition("=")[0].replace("_", "-") for word in command if word.startswith("--")}
    if missing := [flag for flag in NEEDED if flag not in given]:
        parser.error(f"the command of {program} needs {' and '.join(missing)}")
    if refused := sorted(given & all_names(REFUSED)):
        parser.error(f"leave {refused[0]} out of the command of {program}: this program decides it")


def parts_of(program: str) -> ModuleType:
    return import_module(Path(program).stem)


def words_of(command: Sequence[str], setting: Setting, args: Arguments) -> list[str]:
    """The command line of a setting. What is there is resumed."""
    values = {
        "--learning-rate": setting.learning_rate,
        "--epochs": setting.epochs,
        "--seed": args.seed,
        "--num-seeds": args.num_seeds,
        "--output-dir": args.output_dir / setting.name,
    }
    given = {flag: value for flag, value in values.items() if value is not None}
    words = [str(word) for pair in given.items() for word in pair]
    return [*command, *words, "--resume-from-checkpoint"]


def recorded_setting(scores_file: Path) -> Setting:
    """The rate and the epochs of the run with these scores."""
    values = read_record(scores_file.parent).hyperparameters
    return Setting(values["--learning-rate"], values["--epochs"])


def choose_metric(words: Sequence[str], program: str) -> str:
    """The score to compare, of which more is better: the one that chooses the best checkpoint.
    Raises UserError if the task of the command `words` does not have it.
    """
    parts = parts_of(program)
    options = parts.task_options(parts.parse_arguments(list(words)))
    options.check_metric(options.score_names)
    return options.metric_for_best_model or options.score_names[0]


def read_scores(folder: Path, files: Sequence[Path], metric: str) -> list[float]:
    """The value of the metric in each file."""
    values = [read_json(path, "the scores").get(metric) for path in files]
    if not all(isinstance(value, float | int) for value in values):
        raise UserError(
            f"{folder}: {metric} is not defined for all seeds: choose another "
            f"--metric-for-best-model"
        )
    return values


def spread(values: Sequence[float]) -> str:
    """Mean, and the standard deviation if there are several, in two digits; both as far."""
    mean = statistics.mean(values)
    deviation = statistics.stdev(values) if len(values) > 1 else 0
    if not deviation:
        return f"{mean:.4g}" + " ± 0" * (len(values) > 1)
    decimals = max(0, 1 - math.floor(math.log10(deviation)))
    return f"{mean:.{decimals}f} ± {deviation:.{decimals}f}"


def table(metric: str, scores: dict[Setting, list[float]]) -> str:
    """Markdown: the scores of each setting, and its difference from the best one, seed by seed."""
    best = max(scores, key=lambda setting: statistics.mean(scores[setting]))
    header = ["learning rate", "epochs", metric, "seeds", "difference from the best, in pairs"]
    rows = []
    for setting, values in scores.items():
        pairs = [value - top for value, top in zip(values, scores[best], strict=True)]
        shown = ", ".join(f"{value:.4g}" for value in values)
        cells = [f"{setting.learning_rate:g}", f"{setting.epochs:g}", spread(values), shown]
        rows.append([*cells, "**best**" if setting == best else spread(pairs)])
    note = f"Mean ± standard deviation over the seeds. {advice_on(best, scores)}"
    note += what_seeds_tell(best, scores)
    return "\n".join([markdown_table(header, rows), "", note, ""])


def what_seeds_tell(best: Setting, scores: dict[Setting, list[float]]) -> str:
    """How many settings the seeds tell apart from the best one, on the same rows: pairs of seeds,
    Student's t with Holm's correction.
    """
    others = [values for setting, values in scores.items() if setting != best]
    if not others:
        return ""
    if len(scores[best]) == 1:
        return " One seed tells none of them apart: another one may choose another setting."
    p_values = []
    for values in others:
        pairs = np.subtract(values, scores[best])
        part = paired_part(pairs)
        # Equal differences, such as of one row with each seed, do not say how they spread.
        is_known = part.variance > ROUNDING**2
        p_values.append(p_value_of(float(pairs.mean()), [part]) if is_known else 1.0)
    num_apart = sum(p_value < LEVEL for p_value in holm(p_values))
    return f" The seeds tell {num_apart} of the {len(others)} other settings apart from it."


def advice_on(best: Setting, scores: dict[Setting, list[float]]) -> str:
    advice = (
        f"Best: --learning-rate {best.learning_rate:g} --epochs {best.epochs:g}. It was chosen on "
        f"the development file: score it on another one."
    )
    rates = sorted({setting.learning_rate for setting in scores})
    if len(rates) > 1 and best.learning_rate in (rates[0], rates[-1]):
        side = "lowest" if best.learning_rate == rates[0] else "highest"
        advice += f" Its rate is the {side} of the search: add one beyond it."
    return advice


def main(argv: Sequence[str] | None = None) -> int:
    words, program, command = split_command(sys.argv[1:] if argv is None else argv)
    parser = ArgumentParser(description=__doc__)
    parser.add_flags("search", FLAGS)
    args = parser.parse_args(words)
    parser.check_flags(args)
    if program is None:
        parser.error(f"give a command of {' or '.join(PROGRAMS)} after the flags")
    check_command(parser, program, command)
    pairs = product(
        dict.fromkeys(args.learning_rates or [None]), dict.fromkeys(args.epochs or [None])
    )
    settings = [Setting(*pair) for pair in pairs]
    scores: dict[Setting, list[float]] = {}
    folders: list[str] = []
    metric = choose_metric(words_of(command, settings[0], args), program)
    for number, setting in enumerate(settings, 1):  # which grow when the rule's rate is known
        print_line(f"setting {number}: {setting.name}")
        folder = args.output_dir / setting.name
        exit_code = parts_of(program).main(words_of(command, setting, args))
        files = scores_of_seeds(folder, args.seed, args.num_seeds)
        if exit_code or len(files) < args.num_seeds:  # after a signal the code may be 0
            return exit_code
        recorded = recorded_setting(files[0])
        scores[recorded] = read_scores(folder, files, metric)
        folders.append(str(folder))
        if setting.learning_rate is None:
            around = (recorded.learning_rate / 2, recorded.learning_rate * 2)
            settings += [Setting(rate, setting.epochs) for rate in around]
    scores = dict(sorted(scores.items()))
    text = table(metric, scores)
    write_atomically(args.output_dir / "search.md", text)
    report.main([*folders, "--output", str(args.output_dir / "report.html")])
    print_line(f"{text}\nwritten to {args.output_dir / 'search.md'}")
    return 0


if __name__ == "__main__":
    run_main(main)
