"""Every row of a table of results names its file, and every link of a page leads somewhere."""

import re
from pathlib import Path

import pytest
from conftest import ROOT

HEADING = re.compile(r"^## ", re.MULTILINE)
# Of performance.md all tables are results, of other pages those of a section.
TABLES = [
    ("docs/performance.md", ""),
    ("README.md", "Results"),
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
