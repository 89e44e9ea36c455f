"""The text that Wikipedia's templates show, for templates that stand for words in a sentence or for a quotation. All
others (infoboxes, references, notices, navigation) are not prose and show nothing.

One table is used for all languages, so it has no name that means different things in different languages."""

import calendar
import re
from collections.abc import Callable, Sequence

NAMED_ARGUMENT = re.compile(r"\s*[\w\- ]+=")
TEXT_ARGUMENT = re.compile(r"\s*(?:1|2|text|texte|testo|texto|quote|content|цитата|текст)\s*=", re.I)
# The names of numbers and centuries in French: {{XIXe siècle}}, {{1er}}.
ORDINAL_NAME = re.compile(r"[ivxlc\d]+(?:er|re|e|es|ème)(?: siècle)?")
ROMAN = re.compile(r"[ivxlc]+", re.I)
MEASURE = re.compile(r"[-−–+]?[\d.,/+e]+")
RANGE_WORDS = {
    **dict.fromkeys(["-", "–", "(-)", "to(-)"], "–"),
    **{word: f" {word} " for word in ("to", "and", "or", "by", "x", "±")},
    **{"*": " x ", "×": " x ", "xx": " x ", "+/-": " ± ", "+": " + ", ",": ", "},
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
    show = first if name.startswith(("lang-", "script/")) else SHOW.get(name)
    show_named = SHOW_NAMED.get(name.partition("/")[0])
    if not (show or show_named):
        return ""
    values = [value.strip() for value in arguments[1:] if not NAMED_ARGUMENT.match(value)]
    if show_named:
        named = (value.partition("=") for value in arguments[1:] if NAMED_ARGUMENT.match(value))
        return show_named(values or [""], {key.strip().lower(): value.strip() for key, _, value in named})
    if not values and name != "citation":  # a quotation in French, a reference with named arguments in English
        values = [value.partition("=")[2].strip() for value in arguments[1:] if TEXT_ARGUMENT.match(value)][:1]
    return show(values) if values else ""


def first(values: list[str]) -> str:
    return values[0]


def second(values: list[str]) -> str:
    return values[1] if len(values) > 1 else ""


def last(values: list[str]) -> str:
    return values[-1]


def quotation(values: list[str]) -> str:
    return f"\n\n{values[0]}\n\n"


def quoted(values: list[str]) -> str:
    return f"“{values[0]}”"


def with_reading(values: list[str]) -> str:
    return f"{values[0]} ({values[1]})" if len(values) > 1 else values[0]


def century(values: list[str]) -> str:
    """The French {{s|XIX}}; in other Wikipedias this name means small text."""
    return f"{values[0].upper()}e siècle" if ROMAN.fullmatch(values[0]) else values[0]


def circa(values: list[str]) -> str:
    return "c. " + " – ".join(values[:2])


def fraction(values: list[str]) -> str:
    if len(values) == 1:
        return f"1/{values[0]}"
    return (f"{values[0]} " if len(values) == 3 else "") + "/".join(values[-2:])


def date(values: list[str]) -> str:
    """Year, month and day as July 20, 1969, or as many of them as are given."""
    year, month, day = (*values[:3], "", "")[:3]
    if month.isdigit() and 1 <= int(month) <= 12:
        month = calendar.month_name[int(month)]
    return f"{month} {day}, {year}" if month and day else f"{month} {year}".strip()


def as_of(values: list[str], named: dict[str, str]) -> str:
    """{{as of|2010|lc=y}}: as of 2010."""
    return f"{'as' if named.get('lc') else 'As'} of {date(values)}"


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
    return quotation([text]) if text else ""


def superscript(values: list[str]) -> str:
    return values[0] if values[0].isalpha() else f"^{values[0]}"


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


def ship(prefix: str) -> Callable[[list[str]], str]:
    return lambda values: f"{prefix} {values[0]}"


def currency(sign: str) -> Callable[[list[str]], str]:
    return lambda values: sign + values[0]


def by_names(show: str | Callable[[list[str]], str], names: str) -> dict:
    return dict.fromkeys(names.split(", "), show)


CONSTANTS: dict[str, str] = {
    **by_names(" – ", "snd, spnd, sndash, spaced ndash, spaced en dash"),
    **by_names("–", "ndash, en dash, nsndns"),
    **by_names("—", "mdash, em dash, mdashb"),
    **by_names(" — ", "spaced mdash, spaced em dash"),
    **by_names(" ", "nbsp, nnbsp, space, spaces, thinsp, pad, ·, •, bull"),
    **by_names("'", "', `"),
    **by_names("'\"", "' \", '\""),
    **by_names("\"'", "\" ', \"'"),
    **by_names("av. J.-C.", "av jc, av. j.-c., -jc"),
    **{
        "'s": "'s",
        "=": "=",
        "minus": "−",
        "times": "×",
        "co2": "CO2",
        "h2o": "H2O",
        "okina": "ʻ",
        "c.": "c.",
        "pi": "π",
    },
}

SHOW: dict[str, Callable[[list[str]], str]] = {
    **by_names(first, "nowrap, nobr, nobreak, nowr, j, small, smaller, big, larger, large, avoidwrap, keep together"),
    **by_names(superscript, "sup"),
    **by_names(first, "sub, em, strong, var, mvar, math, bigmath, tt, mono, code, kbd, samp, keypress, underline"),
    **by_names(first, "smallcaps, small caps, sc, smallcaps2, uc, lc, i, italics, b, bold, noitalic, nobold, normal"),
    **by_names(first, "abbr, abbrv, tooltip, hover, unicode, polytonic, hebrew, bdi, angbr, linktext, ordinal, ord"),
    **by_names(first, "ill, illm, link, interlanguage link, interlanguage link multi, visible anchor, vanchor"),
    **by_names(
        first,
        "sic, sic!, typo, not a typo, as written, q, iast, bibleref, chem2, format price, translation, ipa, music",
    ),
    **by_names(first, "flag, flagu, flagcountry, flag country, nihongo, nihongo2, nihongo3, nihongo foot, nihongo krt"),
    **by_names(second, "lang, lang2, color, colour, font color, script, rtl-lang, audio, native phrase"),
    **by_names(last, "transl, translit, transliteration, wikt-lang"),
    **by_names(quotation, "quote, blockquote, quotation, bquote, cquote, quote paragraph, gquote, pull quote, pquote"),
    **by_names(quotation, "quote box, quotebox, quote frame, talkquote, poemquote, poem quote, quote inline"),
    **by_names(quotation, "zitat, citation bloc, cita, citazione, cytat, citaat, citát, alıntı, цитата, 인용문, 引用"),
    **by_names(quoted, 'citation, guil, ", «'),
    **by_names(circa, "circa, ca, ca., c"),
    **by_names(fraction, "frac, fraction, sfrac, tfrac"),
    **by_names(measure, "convert, cvt, conv"),
    **by_names(date, "start date, end date, birth date, death date, start date and age, birth date and age"),
    **by_names(first, "birth-date, death-date, start-date, end-date, birth year"),
    **by_names(lambda values: quotation([second(values)]), "rquote"),
    **by_names(first, "center, centre, block indent"),
    **by_names("".join, "chem, gaps"),
    **by_names(lambda values: f"√{values[0]}", "sqrt, radic"),
    **by_names(lambda values: f"AD {values[0]}", "ad"),
    **by_names(lambda values: f"{values[0]} BC", "bc"),
    **by_names(lambda values: f"{'–'.join(values[:2])} million years ago", "mya"),
    **by_names(lambda values: f"×10^{values[0]}", "e"),
    **by_names(lambda values: f"U.S. Patent {values[-1]}", "us patent"),
    **by_names(first, "nq, nastaliq, petit, nb, esd, fmtn, нобр, 仮リンク, ruby, 要出典範囲"),
    **by_names(first, "link-en, link-de, link-fr, link-ja, link-ru, le, internal link helper/en, lien"),
    **by_names(first, "ens, frs, las, grcs, its, ess, rus, pls, nls"),  # German: {{laS|…}} for Latin
    **by_names(first, "fact, refnec, référence nécessaire, quand, lesquelles, нет аи 2, arf, drapeau"),
    **by_names(second, "langue, llang, citation étrangère"),
    **by_names(lambda values: quotation([second(values)]), "citation bilingue bloc, citation étrangère bloc"),
    **by_names(century, "s, s-"),
    **by_names(lambda values: f"{century(values)} av. J.-C.", "-s, -s-"),
    **by_names(last, "tsl"),
    **by_names(with_reading, "読み仮名, 読み"),
    **by_names(lambda values: values[min(1, len(values) - 1)], "нп, нп2, нп3, нп4, нп5, не переведено, iw"),
    **by_names(measure, "unité, unidad, unità"),
    **by_names(" ".join, "date-, date"),
    **by_names(" ".join, "bibleverse"),
    **by_names(lambda values: "-".join(values[:2]), "nuclide, nuclide2, simplenuclide, simplenuclide2"),
    **by_names(lambda values: f"r. {'–'.join(values[:2])}", "reign"),
    **by_names(lambda values: f"fl. {'–'.join(values[:2])}", "floruit, fl."),
    **by_names(lambda values: " ".join(values[:2]), "ship"),
    **{name.lower(): ship(name) for name in ("HMS", "USS", "SS", "RMS", "MV", "USNS", "HMCS", "HMAS", "SMS", "HMNZS")},
    **by_names(currency("US$"), "us$, usd"),
    **by_names(currency("A$"), "a$, aud"),
    **by_names(currency("C$"), "c$, cad"),
    **by_names(currency("£"), "£, gbp"),
    **by_names(currency("€"), "€, eur"),
    **by_names(currency("₹"), "inr, indian rupee"),
    **by_names(currency("¥"), "jpy, yen, ¥"),
}

# Templates whose text depends on named arguments.
SHOW_NAMED: dict[str, Callable[[list[str], dict[str, str]], str]] = {
    **by_names(as_of, "as of"),
    **by_names(quantity, "val"),
    **by_names(summary, "episode table, episode list, japanese episode list, graphic novel list"),
}
