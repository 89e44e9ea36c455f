"""Names that a Wikipedia's dump does not contain, from wikipedia.json, in lower case.

File aliases are old names of the file namespace. Some headings of reference sections are also used
above prose, and `wikitext.is_passage` decides. `constants` and `templates` are what templates show,
with their names.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

Shown = TypeVar("Shown")


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def by_name(shown: Mapping[Shown, str]) -> dict[str, Shown]:
    """What is shown, by each of its names."""
    return {name: show for show, names in shown.items() for name in names.split(", ")}


NAMES = json.loads(Path(__file__).with_name("wikipedia.json").read_text(encoding="utf-8"))
FILE_ALIASES = frozenset(NAMES["file_aliases"].split(", "))
DISAMBIGUATION = frozenset(NAMES["disambiguation"].split(", "))  # templates
REFERENCE_HEADINGS = frozenset(
    name for names in NAMES["reference_headings"].values() for name in names.split(", ")
)
