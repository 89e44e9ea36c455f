#!/usr/bin/env python3
"""Fine-tunes a model before and after continued pre-training on a task, and compares accuracies.

    python3 scripts/compare_on_task.py --before MODEL_FOLDER --after law/results/MODEL/phase1 \\
        --output-dir law/task --train-file train.csv --text-column review --label-column stars

Other flags are those of run_glue.py. Each model is fine-tuned shortly (1 epoch, batches of 32) and
long (4 epochs, batches of 16) with the same seeds, and scored on a fifth of the file that is held
out, or on --eval-file. If interrupted, rerun the same command to resume.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bert_recipe.utils.errors import (
    run_main,  # first, because it handles errors of the other imports
)

# isort: split
import argparse
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

import run_glue
from bert_recipe.config import CheckpointMetadata
from bert_recipe.utils.command_line import (
    REQUIRED,
    ArgumentParser,
    Flag,
    HelpFormatter,
    input_path,
    positive_int,
)
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import write_atomically
from bert_recipe.utils.progress import print_line

LENGTHS = {"short": (1, 32), "long": (4, 16)}  # epochs, sequences per update
FLAGS = (
    Flag("--before", input_path, REQUIRED, "model folder before"),
    Flag("--after", input_path, REQUIRED, "model folder, or folder of steps, after"),
    Flag("--output-dir", Path, REQUIRED, "folder for the runs and comparison.txt"),
    Flag("--num-seeds", positive_int, 3, "seeds of each model and length"),
    Flag("--seed", int, CheckpointMetadata.seed, "the first seed"),
)
# What this program decides, and what has no accuracy.
REFUSED = ("--epochs", "--train-batch-size", "--batch-size", "--init-checkpoint", "--max-steps")
REFUSED += ("--task-name", "--regression", "--num-folds", "--label-separator")
PREDICTIONS = "eval_predictions.tsv"
RESAMPLES = 9999


class RawHelpFormatter(HelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description."""


class Difference(NamedTuple):
    """Accuracies in percent, of `num_texts` texts, and the 95% interval of after minus before."""

    before: float
    after: float
    low: float
    high: float
    num_texts: int

    @property
    def verdict(self) -> str:
        if self.high < 0:
            return "the model became WORSE"
        return "better" if self.low > 0 else "no difference that these texts show"

    def __str__(self) -> str:
        change = self.after - self.before
        return (
            f"accuracy {self.before:.1f} before, {self.after:.1f} after: {change:+.1f} (95% "
            f"interval {self.low:+.1f} to {self.high:+.1f}, {self.num_texts} texts): {self.verdict}"
        )


def read_answers(files: Iterable[Path]) -> dict[str, list[bool]]:
    """Whether each prediction is right, by text; several seeds may have the same text."""
    answers = defaultdict(list)
    for path in files:
        header, *lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
        names = header.split("\t")
        for line in lines:
            row = dict(zip(names, line.split("\t"), strict=True))
            key = f"{row['text']}\t{row.get('pair', '')}"
            answers[key].append(row["label"] == row["prediction"])
    return answers


def compare(before: dict[str, list[bool]], after: dict[str, list[bool]]) -> Difference:
    """The paired bootstrap over the texts (Efron and Tibshirani, 1993, chapter 13: percentiles),
    each with the mean of its seeds. Raises UserError unless both have the same texts.
    """
    if before.keys() != after.keys():
        raise UserError("the two models were scored on different texts: use another --output-dir")
    pairs = [(np.mean(before[text]), np.mean(after[text])) for text in before]
    scores = 100 * np.array(pairs)
    changes = scores[:, 1] - scores[:, 0]
    low = high = float(changes.mean())
    if np.ptp(changes) > 0:
        interval = stats.bootstrap(
            (changes,), np.mean, n_resamples=RESAMPLES, method="percentile", random_state=0
        ).confidence_interval
        low, high = float(interval.low), float(interval.high)
    mean_before, mean_after = scores.mean(axis=0).tolist()
    return Difference(mean_before, mean_after, low, high, len(scores))


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The arguments of this program, and the flags of run_glue.py that all runs have."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawHelpFormatter)
    parser.add_flags("comparison", FLAGS)
    args, command = parser.parse_known_args(argv)
    given = {word.partition("=")[0].replace("_", "-") for word in command if word.startswith("--")}
    if refused := sorted(given.intersection(REFUSED)):
        parser.error(f"leave {refused[0]} out: classes are compared, at lengths of this program")
    if "--eval-file" not in given and "--eval-fraction" not in given:
        command += ["--eval-fraction", "0.2"]
    command += ["--do-train", "--do-eval", "--resume-from-checkpoint"]
    command += ["--num-seeds", str(args.num_seeds), "--seed", str(args.seed)]
    folders = ["--init-checkpoint", str(args.before), "--output-dir", str(args.output_dir)]
    run_glue.parse_arguments([*command, *folders])
    return args, command


def main(argv: Sequence[str] | None = None) -> int:
    args, command = parse_arguments(argv)
    lines = []
    for length, (epochs, batch_size) in LENGTHS.items():
        answers = []
        for name, model in (("before", args.before), ("after", args.after)):
            folder = args.output_dir / length / name
            words = ["--epochs", str(epochs), "--train-batch-size", str(batch_size)]
            words += ["--init-checkpoint", str(model), "--output-dir", str(folder)]
            exit_code = run_glue.main([*command, *words])
            files = sorted(folder.glob(f"**/{PREDICTIONS}"))
            if exit_code or len(files) < args.num_seeds:  # after a signal the code may be 0
                return exit_code
            answers.append(read_answers(files))
        epochs_text = "1 epoch" if epochs == 1 else f"{epochs} epochs"
        difference = compare(*answers)
        lines.append(f"{length} fine-tuning ({epochs_text}, batches of {batch_size}): {difference}")
    lines.append(f"{args.num_seeds} seeds; before: {args.before}; after: {args.after}")
    text = "\n".join(lines)
    write_atomically(args.output_dir / "comparison.txt", f"{text}\n")
    print_line(f"{text}\nwritten to {args.output_dir / 'comparison.txt'}")
    return 0


if __name__ == "__main__":
    run_main(main)
