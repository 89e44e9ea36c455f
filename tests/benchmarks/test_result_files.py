"""Every row of a table of results names its file in benchmarks/results."""

import re

import pytest
from conftest import ROOT

HEADING = re.compile(r"^## ", re.MULTILINE)


SECTIONS = {"README.md": "Results", "docs/coming_from_hugging_face.md": "Is it worth changing?"}


def result_rows(page: str) -> list[str]:
    """The rows of all tables, or of those of the first paragraphs of a section."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if page in SECTIONS:
        (text,) = (part for part in HEADING.split(text) if part.startswith(SECTIONS[page]))
        text = text.partition("What there is to type")[0]
    lines = [line for line in text.split("\n") if line.startswith("|")]
    separators = {number for number, line in enumerate(lines) if set(line) <= set("|- ")}
    headers = {number - 1 for number in separators}
    return [line for number, line in enumerate(lines) if number not in separators | headers]


@pytest.mark.parametrize("page", [*SECTIONS, "docs/performance.md"])
def test_every_row_of_results_has_a_file(page):
    rows = result_rows(page)
    assert len(rows) >= 5
    for row in rows:
        links = re.findall(r"\]\(([^)]*benchmarks/results/[^)]+)\)", row)
        assert links, f"no file in benchmarks/results: {row}"
        for link in links:
            assert ((ROOT / page).parent / link).is_file(), link
