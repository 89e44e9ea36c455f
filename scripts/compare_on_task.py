#!/usr/bin/env python3
"""Fine-tunes a model before and after continued pre-training on a task, and compares the scores.

    python3 scripts/compare_on_task.py --before MODEL_FOLDER --after law/results/MODEL/phase1 \\
        --output-dir law/task --train-file train.csv --text-column review --label-column stars

Other flags are those of run_glue.py. Each model is fine-tuned shortly (1 epoch) and fully (as many
epochs as run_glue.py chooses by the rows) with the same seeds, and scored on a fifth of the file
that is held out, or on --eval-file. If interrupted, rerun the same command to resume.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bert_recipe.utils.errors import (
    run_main,  # first, because it handles errors of the other imports
)

# isort: split
import argparse
from collections.abc import Sequence

import run_glue
from bert_recipe.checkpoint.identity import read_record
from bert_recipe.checkpoint.progress import GLOBAL_BATCH
from bert_recipe.config import CheckpointMetadata
from bert_recipe.reporting.comparison import (
    ScoreDifference,
    differences_of,
    interval_text,
    p_value_text,
    percent,
    points,
    read_model,
)
from bert_recipe.utils.command_line import (
    REQUIRED,
    ArgumentParser,
    Flag,
    bounded_int,
)
from bert_recipe.utils.files import write_atomically
from bert_recipe.utils.progress import print_line

at_least_two = bounded_int(2, 100)
LENGTHS = {"short": ["--epochs", "1"], "full": []}  # flags
FLAGS = (
    Flag("--before", Path, REQUIRED, "model folder before"),
    Flag("--after", Path, REQUIRED, "model folder, or folder of steps, after"),
    Flag("--output-dir", Path, REQUIRED, "folder for the runs and comparison.txt"),
    Flag("--num-seeds", at_least_two, 5, "seeds of each model and length"),
    Flag("--seed", int, CheckpointMetadata.seed, "the first seed"),
)
# What this program decides.
REFUSED = ("--epochs", "--train-batch-size", "--batch-size", "--init-checkpoint", "--max-steps")
REFUSED += ("--num-folds",)


def describe(found: ScoreDifference) -> str:
    """A score before and after, with the interval of the difference and what it says."""
    difference = found.difference
    before, after = map(percent, difference.means)
    verdict = "no difference is shown"
    if difference.is_shown:
        verdict = "better" if difference.value > 0 else "the model became WORSE"
    return (
        f"{found.title} {before} before, {after} after: {points(difference.value)} points (95% "
        f"interval {interval_text(difference)}, p {p_value_text(difference)}, {found.num_rows:,} "
        f"rows): {verdict}"
    )


def settings_text(scores_file: Path) -> str:
    """How the run with these scores was trained."""
    values = read_record(scores_file.parent).hyperparameters
    epochs = f"{values['--epochs']:g}"
    return (
        f"{epochs} epoch{'s' * (epochs != '1')}, batches of {values[GLOBAL_BATCH]}, rate "
        f"{values['--learning-rate']:g}"
    )


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The arguments of this program, and the flags of run_glue.py that all runs have."""
    parser = ArgumentParser(description=__doc__)
    parser.add_flags("comparison", FLAGS)
    args, command = parser.parse_known_args(argv)
    given = {word.partition("=")[0].replace("_", "-") for word in command if word.startswith("--")}
    if refused := sorted(given.intersection(REFUSED)):
        parser.error(f"leave {refused[0]} out: this program decides it")
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
    for length, flags in LENGTHS.items():
        folders = {name: args.output_dir / length / name for name in ("before", "after")}
        for folder, model in zip(folders.values(), (args.before, args.after), strict=True):
            words = [*flags, "--init-checkpoint", str(model), "--output-dir", str(folder)]
            exit_code = run_glue.main([*command, *words])
            files = list(folder.rglob("seed-*/scores.json"))
            if exit_code or len(files) < args.num_seeds:  # after a signal the code may be 0
                return exit_code
        found = differences_of(*map(read_model, folders.values()))
        how = f"{length} fine-tuning ({settings_text(files[0])})"
        lines += [f"{how}: {describe(difference)}" for difference in found]
    lines.append(f"{args.num_seeds} seeds; before: {args.before}; after: {args.after}")
    text = "\n".join(lines)
    write_atomically(args.output_dir / "comparison.txt", f"{text}\n")
    print_line(f"{text}\nwritten to {args.output_dir / 'comparison.txt'}")
    return 0


if __name__ == "__main__":
    run_main(main)
