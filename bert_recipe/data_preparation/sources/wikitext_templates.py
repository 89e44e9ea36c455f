"""The text that Wikipedia's templates show, for templates that stand for words in a sentence or for
a quotation. All others (infoboxes, references, notices, navigation) are not prose and show nothing.

One table is used for all languages, so it has no name that means different things in different
languages.
"""

import calendar
import re
from collections.abc import Callable, Sequence

from bert_recipe.data_preparation.sources.wikipedia_names import NAMES, by_name

NAMED_ARGUMENT = re.compile(r"\s*[\w\- ]+=")
TEXT_ARGUMENT = re.compile(
    r"\s*(?:1|2|text|texte|testo|texto|quote|content|цитата|текст)\s*=", re.I
)
# The names of numbers and centuries in French: {{XIXe siècle}}, {{1er}}.
ORDINAL_NAME = re.compile(r"[ivxlc\d]+(?:er|re|e|es|ème)(?: siècle)?")
ROMAN = re.compile(r"[ivxlc]+", re.I)
MEASURE = re.compile(r"[-−–+]?[\d.,/+e]+")
RANGE_WORDS = {
    **dict.fromkeys(["-", "–", "(-)", "to(-)"], "–"),
    **{word: f" {word} " for word in ("to", "and", "or", "by", "x", "±")},
    **dict.fromkeys(["*", "×", "xx"], " x "),
    "+/-": " ± ",
    "+": " + ",
    ",": ", ",
}


def template_text(arguments: Sequence[str]) -> str:
    """The text of the template named `arguments[0]`; empty if it is not in the tables."""
    name = arguments[0].strip().lower().replace("_", " ")
    if name in CONSTANTS:
        return CONSTANTS[name]
    if name.startswith(("formatnum:", "lc:", "uc:", "ucfirst:")):
        return arguments[0].partition(":")[2].strip()
    if ORDINAL_NAME.fullmatch(name):
        return arguments[0].strip()
    values = [value.strip() for value in arguments[1:] if not NAMED_ARGUMENT.match(value)]
    show_named = SHOW_NAMED.get(name.partition("/")[0])
    if show_named:
        return show_named(values or [""], named_values(arguments))
    show = "{0}" if name.startswith(("lang-", "script/")) else SHOW.get(name)
    if show is None:
        return ""
    # A quotation in French, a reference with named arguments in English.
    if not values and name != "citation":
        texts = (value for value in arguments[1:] if TEXT_ARGUMENT.match(value))
        values = [value.partition("=")[2].strip() for value in texts][:1]
    if not values:
        return ""
    if not isinstance(show, str):
        return show(values)
    # "" is {1} of a template with one value.
    return show.format(*values, "", last=values[-1], pair="–".join(values[:2]))


def named_values(arguments: Sequence[str]) -> dict[str, str]:
    """The values of the named arguments, by name in lower case."""
    named = (value.partition("=") for value in arguments[1:] if NAMED_ARGUMENT.match(value))
    return {key.strip().lower(): value.strip() for key, _, value in named}


def century(values: list[str]) -> str:
    """The French {{s|XIX}}; in other Wikipedias this name means small text."""
    return f"{values[0].upper()}e siècle" if ROMAN.fullmatch(values[0]) else values[0]


def fraction(values: list[str]) -> str:
    if len(values) == 1:
        return f"1/{values[0]}"
    whole = f"{values[0]} " if len(values) == 3 else ""
    return whole + "/".join(values[-2:])


def date(values: list[str]) -> str:
    """Year, month and day as July 20, 1969, or as many of them as are given."""
    year, month, day = (*values[:3], "", "")[:3]
    if month.isdigit() and 1 <= int(month) <= 12:
        month = calendar.month_name[int(month)]
    return f"{month} {day}, {year}" if month and day else f"{month} {year}".strip()


def as_of(values: list[str], named: dict[str, str]) -> str:
    """{{as of|2010|lc=y}}: as of 2010. {{as of|2010|alt=In 2010}}: In 2010."""
    return named.get("alt") or f"{'as' if named.get('lc') else 'As'} of {date(values)}"


def quantity(values: list[str], named: dict[str, str]) -> str:
    """{{val|6.24|(7)|e=18|u=C}}: 6.24(7)×10^18 C."""
    shown, uncertainty = (*values, "")[:2]
    if uncertainty:
        shown += uncertainty if uncertainty.startswith("(") else f"±{uncertainty}"
    if "e" in named:
        shown += f"×10^{named['e']}"
    return f"{shown} {named.get('u') or named.get('ul') or ''}".rstrip()


def summary(values: list[str], named: dict[str, str]) -> str:
    """The summary of an episode, also in tables of episodes."""
    text = named.get("shortsummary") or named.get("summary") or named.get("episodes")
    return f"\n\n{text}\n\n" if text else ""


def measure(values: list[str]) -> str:
    """{{convert|5|to|10|km|mi}}: the measure as written, 5 to 10 km."""
    shown, rest = values[0], values[1:]
    while len(rest) > 1 and rest[0] in RANGE_WORDS:
        shown += RANGE_WORDS[rest[0]] + rest[1]
        rest = rest[2:]
    if rest and rest[0]:
        shown += f" {rest[0]}"
    # Feet and inches, pounds and ounces.
    if len(rest) > 2 and MEASURE.fullmatch(rest[1]) and not MEASURE.fullmatch(rest[2]):
        shown += f" {rest[1]} {rest[2]}"
    return shown


CONSTANTS: dict[str, str] = by_name(NAMES["constants"])

# A string shows the arguments {0}, {1}, {last}, and {pair}, the first two with a dash.
SHOW: dict[str, str | Callable[[list[str]], str]] = by_name(
    {
        **NAMES["templates"],
        lambda values: values[0] if values[0].isalpha() else f"^{values[0]}": "sup",
        lambda values: "c. " + " – ".join(values[:2]): "circa, ca, ca., c",
        fraction: "frac, fraction, sfrac, tfrac",
        measure: "convert, cvt, conv, unité, unidad, unità",
        date: (
            "start date, end date, birth date, death date, start date and age, birth date and age"
        ),
        century: "s, s-",
        lambda values: (
            "{} ({})".format(*values) if len(values) > 1 else values[0]
        ): "読み仮名, 読み",
        "".join: "chem, gaps",
        " ".join: "date-, date, bibleverse",
        lambda values: f"{century(values)} av. J.-C.": "-s, -s-",
        lambda values: values[min(1, len(values) - 1)]: "нп, нп2, нп3, нп4, нп5, не переведено, iw",
        lambda values: "-".join(values[:2]): "nuclide, nuclide2, simplenuclide, simplenuclide2",
        "{pair} million years ago": "mya",
        "r. {pair}": "reign",
        "fl. {pair}": "floruit, fl.",
        lambda values: " ".join(values[:2]): "ship",
    }
)

# Templates whose text depends on named arguments.
SHOW_NAMED: dict[str, Callable[[list[str], dict[str, str]], str]] = by_name(
    {
        as_of: "as of",
        quantity: "val",
        summary: "episode table, episode list, japanese episode list, graphic novel list",
    }
)
