#!/usr/bin/env python3
"""Fine-tunes with several learning rates and numbers of epochs, and compares their scores on the
development file.

    python3 scripts/search_rates.py --learning-rates 1e-5 2e-5 5e-5 --epochs 2 3 --num-seeds 3 \\
        --output-dir search run_glue.py --init-checkpoint MODEL_FOLDER --do-train --do-eval \\
        --train-file train.csv --eval-file dev.csv --text-column review --label-column stars

The rest of the line is a command of run_glue.py or run_squad.py. Each setting has the same seeds.
Writes search.md and report.html. If interrupted, rerun the same command to resume.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from utils.errors import run_main  # first, because it handles errors of the other imports

# isort: split
import argparse
import statistics
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import report
from reporting.records import is_score
from run_config import CheckpointMetadata
from utils.command_line import (
    REQUIRED,
    ArgumentParser,
    Arguments,
    Flag,
    HelpFormatter,
    positive_float,
    positive_int,
)
from utils.errors import UserError
from utils.files import read_json, write_atomically
from utils.progress import print_line

PROGRAMS = ("run_glue.py", "run_squad.py")
NEEDED = ("--do-train", "--do-eval")
# What this program sets, and what would leave nothing to compare.
OWN = ("--learning-rate", "--lr", "--epochs", "--num-train-epochs", "--max-steps", "--output-dir")
OWN += (
    "--resume-from-checkpoint",
    "--overwrite",
    "--seed",
    "--num-seeds",
    "--num-folds",
    "--benchmark",
    "--report-file",
)
FLAGS = (
    Flag("--learning-rates", positive_float, REQUIRED, "rates to try", options={"nargs": "+"}),
    Flag("--epochs", positive_float, REQUIRED, "numbers of epochs to try", options={"nargs": "+"}),
    Flag("--num-seeds", positive_int, 3, "seeds of each setting, which are compared in pairs"),
    Flag("--seed", int, CheckpointMetadata.seed, "the first seed"),
    Flag("--metric", str, None, "score to compare; by default the first one in scores.json"),
    Flag("--output-dir", Path, REQUIRED, "folder for the runs, search.md and report.html"),
)


class RawHelpFormatter(HelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description."""


class Setting(NamedTuple):
    learning_rate: float
    epochs: float

    @property
    def name(self) -> str:
        return f"rate-{self.learning_rate:.12g}-epochs-{self.epochs:.12g}"


def split_command(argv: Sequence[str]) -> tuple[list[str], str | None, list[str]]:
    """The words of this program, and the program to run with its own."""
    for place, word in enumerate(argv):
        if Path(word).name in PROGRAMS:
            return list(argv[:place]), Path(word).name, list(argv[place + 1 :])
    return list(argv), None, []


def check_command(parser: ArgumentParser, program: str | None, command: Sequence[str]) -> None:
    if program is None:
        parser.error(f"give a command of {' or '.join(PROGRAMS)} after the flags")
    given = {word.partition("=")[0].replace("_", "-") for word in command if word.startswith("--")}
    if missing := [flag for flag in NEEDED if flag not in given]:
        parser.error(f"the command of {program} needs {' and '.join(missing)}")
    if own := sorted(given.intersection(OWN)):
        parser.error(f"leave {own[0]} out of the command of {program}: this program decides it")


def run_setting(program: str, command: Sequence[str], setting: Setting, args: Arguments) -> int:
    """Trains and scores all seeds of `setting`; returns the exit code. What is there is resumed.
    After a signal the code may be 0, and scores are missing.
    """
    import run_glue
    import run_squad

    main = run_glue.main if program == "run_glue.py" else run_squad.main
    values = {
        "--learning-rate": setting.learning_rate,
        "--epochs": setting.epochs,
        "--seed": args.seed,
        "--num-seeds": args.num_seeds,
        "--output-dir": args.output_dir / setting.name,
    }
    words = [str(word) for pair in values.items() for word in pair]
    return main([*command, *words, "--resume-from-checkpoint"])


def find_scores(folder: Path, args: Arguments) -> list[Path]:
    """The file of each seed that has one."""
    names = [f"seed-{seed}" for seed in range(args.seed, args.seed + args.num_seeds)]
    if args.num_seeds == 1:
        names = ["."]
    files = [path for name in names for path in folder.glob(f"*/*/{name}/scores.json")]
    if len(files) > len(names):
        raise UserError(f"{folder} has the scores of several models: choose another --output-dir")
    return files


def read_scores(folder: Path, files: Sequence[Path], metric: str | None) -> tuple[str, list[float]]:
    """The metric's name, and its value in each file."""
    found = [read_json(path, "the scores") for path in files]
    scores = [name for name, value in found[0].items() if isinstance(value, float | int)]
    if metric is None:
        metric = next(filter(is_score, scores), scores[0])
    values = [each.get(metric) for each in found]
    if not all(isinstance(value, float | int) for value in values):
        raise UserError(f"{folder}: {metric} is no score: give --metric one of {', '.join(scores)}")
    return metric, values


def spread(values: Sequence[float]) -> str:
    """Mean, and the standard deviation if there are several."""
    text = f"{statistics.mean(values):.4g}"
    return text if len(values) == 1 else f"{text} ± {statistics.stdev(values):.2g}"


def table(metric: str, scores: dict[Setting, list[float]]) -> str:
    """Markdown: the scores of each setting, and its difference from the best one, seed by seed."""
    best = max(scores, key=lambda setting: statistics.mean(scores[setting]))
    rows = [["learning rate", "epochs", metric, "seeds", "difference from the best, in pairs"]]
    rows.append(["---"] * len(rows[0]))
    for setting, values in scores.items():
        pairs = [value - top for value, top in zip(values, scores[best], strict=True)]
        each = ", ".join(f"{value:.4g}" for value in values)
        cells = [f"{setting.learning_rate:g}", f"{setting.epochs:g}", spread(values), each]
        rows.append([*cells, "**best**" if setting == best else spread(pairs)])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    note = (
        f"Mean ± standard deviation over the seeds. Best: --learning-rate {best.learning_rate:g} "
        f"--epochs {best.epochs:g}. It was chosen on the development file: score it on another one."
    )
    return "\n".join([*lines, "", note, ""])


def main(argv: Sequence[str] | None = None) -> int:
    words, program, command = split_command(sys.argv[1:] if argv is None else argv)
    parser = ArgumentParser(description=__doc__, formatter_class=RawHelpFormatter)
    parser.add_flags("search", FLAGS)
    args = parser.parse_args(words)
    parser.check_flags(args)
    check_command(parser, program, command)
    pairs = product(dict.fromkeys(args.learning_rates), dict.fromkeys(args.epochs))
    settings = [Setting(*pair) for pair in pairs]
    scores: dict[Setting, list[float]] = {}
    metric = args.metric
    for number, setting in enumerate(settings, 1):
        print_line(f"setting {number} of {len(settings)}: {setting.name}")
        folder = args.output_dir / setting.name
        exit_code, files = run_setting(program, command, setting, args), find_scores(folder, args)
        if exit_code or len(files) < args.num_seeds:
            return exit_code
        metric, scores[setting] = read_scores(folder, files, metric)
    text = table(metric, scores)
    write_atomically(args.output_dir / "search.md", text)
    folders = [str(args.output_dir / setting.name) for setting in scores]
    report.main([*folders, "--output", str(args.output_dir / "report.html")])
    print_line(f"{text}\nwritten to {args.output_dir / 'search.md'}")
    return 0


if __name__ == "__main__":
    run_main(main)
