#!/usr/bin/env python3
"""Prints metrics of runs with different seeds as a table, with mean and sample standard deviation:

python3 scripts/seed_summary.py METRIC[,METRIC...] SEED=REPORT_FILE [SEED=REPORT_FILE ...]

The value of a run is the last one in its report; upper and lower case are the same.
"""

import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reporting.records import numbers, read_sessions
from utils.errors import UserError, run_main


def last_value(report_file: Path, metric: str) -> float:
    if not report_file.is_file():
        raise UserError(f"{report_file} does not exist: run this seed to its end first")
    sessions, _ = read_sessions(report_file)
    records = [data for session in sessions for data in [*(data for *_, data in session.steps), session.results]]
    values = [value for data in records for name, value in numbers(data).items() if name.lower() == metric.lower()]
    values = [value for value in values if math.isfinite(value)]  # NaN: the update was skipped
    if not values:
        raise UserError(f"{report_file} holds no {metric}: run this seed to its end first")
    return values[-1]


def main(metrics: list[str], reports: dict[str, Path]) -> None:
    columns = [*(f"seed {seed}" for seed in reports), "mean", "standard deviation"]
    print("| metric |", " | ".join(columns), "|")
    print("|---" * (len(columns) + 1) + "|")
    for metric in metrics:
        values = [last_value(report_file, metric) for report_file in reports.values()]
        cells = [f"{value:.5g}" for value in [*values, statistics.fmean(values)]]
        deviation = f"{statistics.stdev(values):.3f}" if len(values) > 1 else "-"
        print("|", " | ".join([metric, *cells, deviation]), "|")


if __name__ == "__main__":
    names, *pairs = sys.argv[1:]
    files = {seed: Path(path) for seed, _, path in (pair.partition("=") for pair in pairs)}
    run_main(lambda: main(names.split(","), files))
