#!/usr/bin/env python3
"""Writes one HTML page about training runs from the log files that training writes.

python3 report.py results/bert-large-uncased                 one run: both phases and fine-tuning
python3 report.py results/a results/b --output compare.html  two runs, with what differs between their settings
python3 report.py results/bert-large-uncased --watch 60      written again while training goes on, until Ctrl-C
"""

import argparse
import time
from pathlib import Path

import report_page
from report_charts import check_matplotlib
from report_records import find_log_files, has_records, read_runs
from utils import command_line
from utils.errors import run_main
from utils.files import write_atomically
from utils.progress import print_line

DEFAULT_WATCH_SECONDS = 30


def parse_arguments(argv: list[str] | None = None) -> command_line.Arguments:
    parser = command_line.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=None
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="folder that a run wrote to (searched for log files), or a log file",
    )
    parser.add_argument("--output", type=Path, default=Path("report.html"), help="the page (report.html)")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=command_line.positive_float,
        const=DEFAULT_WATCH_SECONDS,
        metavar="SECONDS",
        help=f"look for new records every SECONDS ({DEFAULT_WATCH_SECONDS}) and write the page again, until Ctrl-C",
    )
    return parser.parse_args(argv)


def write_page(runs: list[Path], output: Path, refresh_seconds: float | None = None) -> None:
    page = report_page.render(read_runs(runs), refresh_seconds)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, page)


def log_sizes(runs: list[Path]) -> dict[Path, int]:
    return {file: file.stat().st_size for run in runs for file in find_log_files(run)}


def watch(runs: list[Path], output: Path, seconds: float) -> None:
    """Writes the page whenever the logs have grown, and at the end without the instruction to reload. Waits for the
    first record of each run."""
    written = None
    waits = False
    try:
        while True:
            missing = [run for run in runs if written is None and not has_records(run)]
            if missing and not waits:
                print_line(f"waiting for the first record in {missing[0]}; Ctrl-C ends this")
                waits = True
            if not missing and (sizes := log_sizes(runs)) != written:
                write_page(runs, output, seconds)
                if written is None:
                    print_line(f"{output} is written again every {seconds:g} s while the logs grow; Ctrl-C ends this")
                written = sizes
            time.sleep(seconds)
    except KeyboardInterrupt:
        if written is None:
            raise
        write_page(runs, output)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    check_matplotlib()
    if args.watch is not None:
        watch(args.runs, args.output, args.watch)
    else:
        write_page(args.runs, args.output)
    print_line(f"report: {args.output}")


if __name__ == "__main__":
    run_main(main)
