"""Every row of a table of results names its file and has its figures; every link of a page leads
somewhere.
"""

import json
import re
import statistics
from pathlib import Path

import pytest
from conftest import ROOT

HEADING = re.compile(r"^## ", re.MULTILINE)
# Of performance.md all tables are results, of other pages those of a section.
TABLES = [
    ("docs/performance.md", ""),
    ("README.md", "Results"),
    ("docs/continue_pretraining.md", "What was measured?"),
    ("docs/after_training.md", "What do 8 bits cost?"),
]


def result_rows(page: str, section: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    if section:
        (text,) = (part for part in HEADING.split(text) if part.startswith(section))
    lines = [line for line in text.split("\n") if line.startswith("|")]
    separators = {number for number, line in enumerate(lines) if set(line) <= set("|- ")}
    headers = {number - 1 for number in separators}
    return [line for number, line in enumerate(lines) if number not in separators | headers]


@pytest.mark.parametrize(("page", "section"), TABLES)
def test_every_row_of_results_has_a_file(page, section):
    rows = result_rows(page, section)
    assert len(rows) >= 3
    for row in rows:
        links = re.findall(r"\]\(([^)]*benchmarks/results/[^)]+)\)", row)
        assert links, f"no file in benchmarks/results: {row}"
        for link in links:
            assert ((ROOT / page).parent / link).is_file(), link


def anchor_of(heading: str) -> str:
    """As GitHub makes it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {anchor_of(heading) for heading in headings}


@pytest.mark.parametrize("folder", [".", "docs", "benchmarks"])
def test_links_between_pages_lead_to_a_file_and_a_heading(folder):
    pages = sorted((ROOT / folder).glob("*.md"))
    assert pages
    for page in pages:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if "://" in link:
                continue
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), f"{page.name}: {link}"
            if anchor:
                assert anchor in anchors(target), f"{page.name}: {link}"


Rates = tuple[float, float, list[float]]  # here, the peer's, their ratios: of rounds or seeds


def step_rates(result: dict, _row: str) -> Rates:
    """Beside the way of calling transformers that is fastest."""
    speedups = {name: speedup["median"] for name, speedup in result["speedup"].items()}
    peer = min(speedups, key=speedups.__getitem__)
    here, theirs = (
        result["implementations"][name]["tokens_per_second"]["median"]
        for name in ("this project", peer)
    )
    return here, theirs, [speedups[peer]]


def run_rates(result: dict, _row: str) -> Rates:
    """Means over seeds. transformers has batches grouped by length where there are such runs."""
    by_name: dict[str, list[float]] = {}
    for run in result["runs"]:
        (rate,) = (rate for name, rate in run.items() if name.startswith("training_"))
        by_name.setdefault(run["contestant"], []).append(rate)
    here = by_name["this project"]
    theirs = by_name.get("transformers, grouped by length", by_name["transformers"])
    ratios = [a / b for a, b in zip(here, theirs, strict=True)]
    return statistics.mean(here), statistics.mean(theirs), ratios


def inference_rates(result: dict, row: str) -> Rates:
    rates = {name: rate["median"] for name, rate in result["texts_per_cpu_second"].items()}
    peer = "transformers"
    if "pipeline" not in row:
        peer = "onnxruntime" if "onnxruntime" in row else "sentence-transformers"
    peer += ", int8" if "8-bit" in row else ""
    speedup = result["speedup"]
    speedup = speedup.get(peer, speedup)
    ratios = [speedup["low"], speedup["median"], speedup["high"]]
    return rates["this project"], rates[peer], ratios


RATES = {
    "How fast is a pre-training step?": step_rates,
    "How fast is fine-tuning?": run_rates,
    "How fast is inference?": inference_rates,
}


def rounds_to(value: float, figure: str) -> bool:
    digits = len(figure.partition(".")[2])
    return abs(value - float(figure)) <= 0.5000001 * 10**-digits


@pytest.mark.parametrize("section", RATES)
def test_rates_and_ratios_of_performance_md_are_those_of_their_files(section):
    for row in result_rows("docs/performance.md", section):
        (name,) = re.findall(r"benchmarks/results/([^)]+)\)", row)
        result = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
        here, theirs, ratios = RATES[section](result, row)
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        ratio = re.search(r"\[([\w.]+)\]\([^)]*results", cells.pop())[1]
        numbers = [cell.replace(",", "") for cell in cells if re.fullmatch(r"[\d,.]+", cell)]
        assert rounds_to(here, numbers[0]) and rounds_to(theirs, numbers[1]), row
        if ratio == "equal":
            assert min(ratios) < 1 < max(ratios), row
        else:
            assert rounds_to(statistics.median(ratios), ratio), row


def test_scores_before_and_after_more_pre_training_are_those_of_their_file():
    for row in result_rows("docs/continue_pretraining.md", "What was measured?"):
        (name,) = re.findall(r"benchmarks/results/([^)]+)\)", row)
        result = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        model, task, fine_tuning, *scores = cells[:-1]
        (found,) = (
            comparison
            for comparison in result["comparisons"]
            if (comparison["after"], comparison["task"]) == (model, task)
            if fine_tuning.startswith(f"{comparison['fine_tuning']}, {len(comparison['seeds'])} ")
        )
        values = [found["accuracy_before"], found["accuracy_after"], found["difference"]]
        values += found["interval"]
        figures = re.findall(r"[-+]?\d+\.\d", " ".join(scores))
        assert len(figures) == len(values)
        for value, figure in zip(values, figures, strict=True):
            assert rounds_to(100 * value, figure), row
