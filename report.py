#!/usr/bin/env python3
"""Writes an HTML report of training runs from their log files.

python3 report.py results/bert-large-uncased                 one run: both phases and fine-tuning
python3 report.py results/a results/b --output compare.html  two runs, with a comparison of their settings
python3 report.py results/bert-large-uncased --watch 60      updates the page during training, until Ctrl-C
"""

from utils.errors import run_main  # first, because it handles errors of the other imports

# isort: split
import argparse
import time
from pathlib import Path

from reporting.page import render
from reporting.records import find_log_files, has_records, printable, read_runs
from utils import command_line
from utils.errors import UserError
from utils.files import write_atomically
from utils.progress import print_line

WATCH_HELP = "look for new records every SECONDS (30) and write the page again, until Ctrl-C"


def parse_arguments(argv: list[str] | None = None) -> command_line.Arguments:
    parser = command_line.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=None
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder to search for log files, or a log file")
    add("--output", type=Path, default=Path("report.html"), help="the page (report.html)")
    add("--watch", nargs="?", type=command_line.positive_float, const=30, metavar="SECONDS", help=WATCH_HELP)
    args = parser.parse_args(argv)
    if args.output.exists() and not args.output.is_file():
        raise UserError(f"--output {args.output} is not a regular file: choose another path")
    return args


def write_page(paths: list[Path], output: Path, refresh_seconds: float | None = None) -> list[str]:
    """Writes the page and returns notes about the logs."""
    runs = read_runs(paths)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, render(runs, refresh_seconds))
    return [run.note for run in runs if run.note]


def watch(paths: list[Path], output: Path, seconds: float) -> list[str]:
    """Writes the page whenever the logs have grown; the final version does not reload itself. Waits for the first
    record of each run."""
    written, waits = None, False
    try:
        while True:
            missing = [path for path in paths if written is None and not has_records(path)]
            if missing and not waits:
                print_line(f"waiting for the first record in {missing[0]}; Ctrl-C ends this")
                waits = True
            if not missing:
                sizes = {file: file.stat().st_size for path in paths for file in find_log_files(path)}
                if sizes != written:
                    write_page(paths, output, seconds)
                if written is None:
                    print_line(f"{output} is written again every {seconds:g} s while the logs grow; Ctrl-C ends this")
                written = sizes
            time.sleep(seconds)
    except KeyboardInterrupt:
        if written is None:
            raise
        return write_page(paths, output)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    notes = write_page(args.runs, args.output) if args.watch is None else watch(args.runs, args.output, args.watch)
    for line in [*(f"note: {note}" for note in notes), f"report: {args.output}"]:
        print_line(printable(line))


if __name__ == "__main__":
    run_main(main)
