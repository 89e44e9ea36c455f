#!/usr/bin/env python3
"""Draws the ratios of docs/performance.md, with their quartiles, from the result files of its rows.

    python3 benchmarks/speed_picture.py --drawing docs/speed.svg

A ratio is the median of paired ratios: of the rounds in which both sides take turns, or of seeds.
Two seeds show both ratios instead of quartiles. A new row of the page is in the picture after the
next call.
"""

import math
import re
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.results import RESULTS, ROOT, paired_ratio
from bert_recipe.utils.command_line import ArgumentParser, Flag
from bert_recipe.utils.errors import run_main
from bert_recipe.utils.json_files import read_json

PAGE = ROOT / "docs" / "performance.md"
STEPS = "How fast is a pre-training step?"
FINE_TUNING = "How fast is fine-tuning?"
INFERENCE = "How fast is inference?"
TITLES = {STEPS: "pre-training", FINE_TUNING: "fine-tuning", INFERENCE: "inference"}
# Of each machine its colour, and whether its points are filled: those of bfloat16 are not.
MACHINES = {
    "AVX2": ("#1f6fb5", True),
    "AVX-512": ("#c2410c", True),
    "AVX-512, bfloat16": ("#c2410c", False),
    "AVX-512, Intel": ("#7c3aed", True),
    "AMX": ("#15803d", False),
}
WIDTH, LEFT, RIGHT, TOP, LINE, BAR = 760, 350, 20, 66, 20, 4
LOWEST, HIGHEST = 0.6, 3.0
MIDDLE = 'text-anchor="middle"'
TICKS = (0.7, 1, 1.5, 2, 2.5, 3)


class Rates(NamedTuple):
    """here, peer: per second.
    ratio: its median with quartiles (`low`, `high`).
    """

    here: float
    peer: float
    ratio: dict[str, float]


class SpeedRow(NamedTuple):
    """A row of a table of the page.

    cells: as printed, without the last one, whose text is `printed`.
    rates: those of the result file that it links.
    """

    section: str
    cells: list[str]
    printed: str
    rates: Rates

    def work(self) -> str:
        if self.section == INFERENCE:
            return f"{self.cells[0]}: {self.cells[3]}"
        return self.cells[0]


def step_rates(result: dict[str, Any], _peer: str) -> Rates:
    """Beside the way of calling transformers that is fastest."""
    ratios = result["speedup"]
    peer = min(ratios, key=lambda name: ratios[name]["median"])
    rates = {
        name: side["tokens_per_second"]["median"]
        for name, side in result["implementations"].items()
    }
    return Rates(rates["this project"], rates[peer], ratios[peer])


def fine_tuning_rates(result: dict[str, Any], _peer: str) -> Rates:
    """Means over seeds. transformers has batches grouped by length where there are such runs."""
    by_name: dict[str, list[float]] = {}
    for run in result["runs"]:
        (rate,) = (value for name, value in run.items() if name.startswith("training_"))
        by_name.setdefault(run["contestant"], []).append(rate)
    here = by_name["this project"]
    theirs = by_name.get("transformers, grouped by length", by_name["transformers"])
    ratio = paired_ratio(here, theirs)
    if len(here) == 2:  # whose quartiles would lie between the two
        ratios = [a / b for a, b in zip(here, theirs, strict=True)]
        ratio |= {"low": min(ratios), "high": max(ratios)}
    return Rates(statistics.mean(here), statistics.mean(theirs), ratio)


def inference_rates(result: dict[str, Any], peer: str) -> Rates:
    """peer: its name on the page."""
    name = peer.replace("transformers' pipeline", "transformers").replace("8-bit weights", "int8")
    rates = {side: rate["median"] for side, rate in result["texts_per_cpu_second"].items()}
    ratios = result["speedup"]
    return Rates(rates["this project"], rates[name], ratios.get(name, ratios))


READERS = {STEPS: step_rates, FINE_TUNING: fine_tuning_rates, INFERENCE: inference_rates}


def read_rows(page: str) -> list[SpeedRow]:
    """The rows of the three tables of ratios."""
    rows = []
    for part in page.split("\n## ")[1:]:
        section, _, text = part.partition("\n")
        if section not in READERS:
            continue
        for line in re.findall(r"^\|.*benchmarks/results/.*\|$", text, re.MULTILINE):
            (name,) = re.findall(r"benchmarks/results/([^)]+)\)", line)
            without_links = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line)
            *cells, printed = (cell.strip(" *") for cell in without_links.strip("|").split("|"))
            result = read_json(RESULTS / name, "the result file")
            peer = cells[3] if section == INFERENCE else ""
            rows.append(SpeedRow(section, cells, printed, READERS[section](result, peer)))
    return rows


def x_of(ratio: float) -> float:
    share = math.log(ratio / LOWEST) / math.log(HIGHEST / LOWEST)
    return round(LEFT + (WIDTH - LEFT - RIGHT) * share, 1)


def draw_point(row: SpeedRow, middle: float) -> str:
    """A line from the first to the third quartile, and the median."""
    color, filled = MACHINES[row.cells[1]]
    y = middle + BAR * (list(MACHINES).index(row.cells[1]) - 2)
    low, median, high = (x_of(row.rates.ratio[name]) for name in ("low", "median", "high"))
    return (
        f'<path d="M{low} {y}H{high}" stroke="{color}" stroke-width="2"/>'
        f'<circle cx="{median}" cy="{y}" r="4" stroke="{color}" stroke-width="1.5" '
        f'fill="{color if filled else "#fff"}"/>'
    )


def label(words: str, at: float, height: float, style: str = "") -> str:
    return f'<text x="{at}" y="{height}" {style}>{words}</text>'


def draw(rows: list[SpeedRow]) -> str:
    works: dict[str, dict[str, list[SpeedRow]]] = {}
    for row in rows:
        works.setdefault(row.section, {}).setdefault(row.work(), []).append(row)
    parts = []
    y = TOP
    for section, lines in works.items():
        parts.append(label(TITLES[section], 10, y + 14, 'font-weight="bold"'))
        y += LINE
        for work, points in lines.items():
            middle = y + LINE / 2
            parts.append(f'<path d="M{LEFT} {middle}H{WIDTH - RIGHT}" stroke="#eee"/>')
            parts.append(label(work, 20, middle + 4))
            parts += [draw_point(row, middle) for row in points]
            y += LINE
    grid = []
    for ratio in TICKS:
        color = "#333" if ratio == 1 else "#ddd"
        grid.append(f'<path d="M{x_of(ratio)} {TOP}V{y}" stroke="{color}"/>')
        grid.append(label(str(ratio), x_of(ratio), y + 16, MIDDLE))
    caption = "Times as fast as the peer: median and quartiles"
    height = y + 26
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="sans-serif" font-size="12" fill="#333">',
        f"<title>{caption}</title>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        label(caption, 10, 20, 'font-size="14"'),
    ]
    for number, (machine, (color, filled)) in enumerate(MACHINES.items()):
        x = 20 + 130 * number
        head.append(
            f'<circle cx="{x}" cy="42" r="4" stroke="{color}" stroke-width="1.5" '
            f'fill="{color if filled else "#fff"}"/>' + label(machine, x + 10, 46)
        )
    return "\n".join([*head, *grid, *parts, "</svg>"]) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_flags("flags", (Flag("--drawing", Path, Path("speed.svg"), "the SVG file"),))
    args = parser.parse_args(argv)
    args.drawing.write_text(draw(read_rows(PAGE.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    run_main(main)
