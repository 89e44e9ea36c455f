#!/usr/bin/env python3
"""Writes an HTML report of training runs from their log files.

python3 report.py results/bert-large-uncased  # one run: both phases and fine-tuning
python3 report.py results/a results/b --output compare.html  # two runs, with their differences
"""

from pathlib import Path

from bert_recipe.utils.errors import UserError, handle_uncaught_errors, run_main

if __name__ == "__main__":
    handle_uncaught_errors()  # also of the imports below

from bert_recipe.reporting.comparison_cards import comparison_cards
from bert_recipe.reporting.page import render
from bert_recipe.reporting.records import read_runs
from bert_recipe.utils.command_line import REQUIRED, ArgumentParser, Flag
from bert_recipe.utils.files import write_atomically
from bert_recipe.utils.progress import print_line

FLAGS = (
    Flag(
        "runs",
        Path,
        REQUIRED,
        "folder to search for log files, or a log file",
        options={"nargs": "+", "metavar": "RUN"},
    ),
    Flag("--output", Path, None, "the page; by default report.html in the folder of the first run"),
)


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_flags("flags", FLAGS)
    args = parser.parse_args(argv)
    first = args.runs[0]
    output = args.output or (first if first.is_dir() else first.parent) / "report.html"
    if output.exists() and not output.is_file():
        raise UserError(f"--output {output} is not a regular file: choose another path")
    runs = read_runs(args.runs)
    logs = {session.file.resolve() for run in runs for session in run.sessions}
    if output.resolve() in logs:
        raise UserError(f"--output {output} is a log to report on: choose another path")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, render(runs, comparison_cards(args.runs, runs)))
    for line in [*(f"note: {run.note}" for run in runs if run.note), f"report: {output}"]:
        print_line(line)


if __name__ == "__main__":
    run_main(main)
