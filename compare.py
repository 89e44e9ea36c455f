#!/usr/bin/env python3
"""Compares the scores of two or more models on the same rows, and the calibration of their
probabilities.

python3 compare.py results/a results/b  # two runs of --do-eval: the folders of models, or above
python3 compare.py results/a results/b results/c  # each beside the first
python3 compare.py results/a --calibrate  # probabilities of inference.py say how often it is right

A run with --num-seeds has all its seeds; one with --num-folds has its folds as one file. "Better"
needs several seeds of both: one seed says nothing of another one. Of several runs, the p-values are
corrected for their number (Holm).
"""

from pathlib import Path

from bert_recipe.utils.errors import UserError, handle_uncaught_errors, run_main

if __name__ == "__main__":
    handle_uncaught_errors()  # also of the imports below

from bert_recipe.reporting.comparison import (
    calibrate,
    calibration_table,
    corrected,
    difference_table,
    differences_of,
    left_out,
    read_model,
    verdict,
)
from bert_recipe.utils.command_line import REQUIRED, ArgumentParser, Flag
from bert_recipe.utils.progress import print_line

FLAGS = (
    Flag(
        "runs",
        Path,
        REQUIRED,
        "folder with the scored rows of one run, its seeds or folds, or a folder above it",
        options={"nargs": "+", "metavar": "RUN"},
    ),
    Flag(
        "--calibrate",
        bool,
        False,
        "write the temperature of the probabilities of classes to the folder of each model, by "
        "which inference.py divides logits",
    ),
)


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_flags("flags", FLAGS)
    args = parser.parse_args(argv)
    if args.calibrate:
        for run in args.runs:
            print_line("\n".join(calibrate(run)))
        return
    if len(args.runs) < 2:
        raise UserError("a comparison needs two runs: give their folders")
    first, *others = map(read_model, args.runs)
    comparisons = [list(differences_of(first, other)) for other in others]
    for other, differences in zip(others, comparisons, strict=True):
        if not differences:
            raise UserError(f"{first.path} and {other.path}: {left_out((first, other), [])}")
    for number, (other, differences) in enumerate(zip(others, corrected(comparisons), strict=True)):
        parts = [
            f"A: {first.title}\nB: {other.title}",
            f"{differences[0].num_rows:,} rows with the same texts and labels",
            difference_table(differences),
            left_out((first, other), differences),
            "\n".join(map(verdict, differences)),
            calibration_table({"A": first, "B": other}),
        ]
        print_line(("\n" if number else "") + "\n\n".join(filter(None, parts)))


if __name__ == "__main__":
    run_main(main)
