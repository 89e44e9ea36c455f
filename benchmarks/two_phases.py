#!/usr/bin/env python3
"""Draws the losses of both phases of a pre-training run, from the logs that report.py reads.

    python3 benchmarks/two_phases.py quickstart/results --drawing docs/two_phases.svg

The updates of phase 2 follow those of phase 1.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.drawing import Losses, LossPlot
from bert_recipe.reporting.records import Point, RunPhase, read_runs
from bert_recipe.utils.command_line import REQUIRED, ArgumentParser, Flag
from bert_recipe.utils.errors import UserError, run_main

UPDATES_PER_TICK = 100
COLORS = {"phase1": "#1f6fb5", "phase2": "#d9730d"}
HELD_OUT_COLOR = "#333"
FLAGS = (
    Flag("results", Path, REQUIRED, "RESULTS_DIR of scripts/run_pretraining.sh"),
    Flag("--drawing", Path, Path("two_phases.svg"), "the SVG file"),
)


def losses_of(points: list[Point], first: int) -> Losses:
    """first: the number of updates before those of the phase."""
    return [
        (first + point.step, point.metrics["loss"]) for point in points if "loss" in point.metrics
    ]


def draw(phases: list[RunPhase]) -> str:
    if [phase.name for phase in phases] != list(COLORS):
        raise UserError("the folder has to hold one run of phase 1 and phase 2, with one seed")
    curves: list[Losses] = []
    evaluations: list[Losses] = []
    starts = [0]
    for phase in phases:
        curves.append(losses_of(phase.points, starts[-1]))
        evaluations.append(losses_of(phase.evaluations, starts[-1]))
        starts.append(curves[-1][-1][0])
    lengths = [phase.settings["max_seq_length"] for phase in phases]
    caption = f"Loss of both phases: {lengths[0]}, then {lengths[1]} tokens per sequence"
    values = [loss for losses in curves + evaluations for _, loss in losses]
    ticks = [*range(0, starts[-1], UPDATES_PER_TICK), starts[-1]]
    plot = LossPlot(caption, "update", ticks, values)
    for losses, color in zip(curves, COLORS.values(), strict=True):
        plot.curve(losses, f'stroke="{color}" stroke-width="2"')
    for losses in evaluations:
        plot.dots(losses, HELD_OUT_COLOR)
    plot.mark(starts[1], "phase 2", COLORS["phase2"])
    plot.legend(
        [*zip(("phase 1", "phase 2"), COLORS.values(), strict=True), ("held out", HELD_OUT_COLOR)]
    )
    return plot.text()


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_flags("flags", FLAGS)
    args = parser.parse_args(argv)
    (run,) = read_runs([args.results])
    args.drawing.write_text(draw([phase for phase in run.phases if phase.name in COLORS]))


if __name__ == "__main__":
    run_main(main)
