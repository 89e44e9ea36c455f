"""Converts Wikipedia's markup to paragraphs of prose: one pass over the brackets with a stack, one
over the lines.

The time of each step is proportional to the length of the text, also with unclosed brackets and
tags.

Lists, tables and reference sections are not prose, but some pages have prose in them: a layout
table, the definitions of a glossary, a discussion of the sources. For text in such places
`is_passage` decides.
"""

import html
import re
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

import regex

from bert_recipe.data_preparation.sources.documents import CLOSERS, ENDS
from bert_recipe.data_preparation.sources.wikipedia_names import (
    FILE_ALIASES,
    REFERENCE_HEADINGS,
    words,
)
from bert_recipe.data_preparation.sources.wikitext_formulas import short_formula
from bert_recipe.data_preparation.sources.wikitext_templates import template_text

# Elements that are removed with their content. Of other elements only the tags are removed.
DROPPED_ELEMENTS = words(
    "ref references gallery imagemap graph timeline score syntaxhighlight source pre hiero math "
    "chem ce mapframe maplink section templatestyles inputbox categorytree indicator ul ol "
    "includeonly noinclude"
)
# HTML tables and definitions are converted to wikitext.
WIKITEXT_OF = {
    "table": "\n{|\n",
    "/table": "\n|}\n",
    "caption": "\n|+ ",
    "tr": "\n|-\n",
    "td": "\n| ",
    "th": "\n| ",
    "dt": "\n;",
    "dd": "\n:",
    "/dl": "\n",
}
BLOCK_ELEMENTS = words("blockquote br center div hr p poem")
INLINE_ELEMENTS = words(
    "a abbr b bdi bdo big cite code data del dfn em font h1 h2 h3 h4 h5 h6 i ins kbd li mark nobr "
    "nowiki onlyinclude q rb rp rt ruby s samp small span strike strong sub sup time tt u var wbr"
)
KNOWN_ELEMENTS = (
    DROPPED_ELEMENTS
    | BLOCK_ELEMENTS
    | INLINE_ELEMENTS
    | {"!--", *(name.strip("/") for name in WIKITEXT_OF)}
)
ORDINAL = re.compile(r"(?:st|nd|rd|th|er|re|e|ère|ème)<")  # 1<sup>st</sup>, 2<sup>e</sup>
TAG = re.compile(r"<(?:!--|(/?)([a-zA-Z][a-zA-Z0-9]*)\b([^<>]*)>)")
ELEMENT_END = {name: re.compile(rf"</{name}\s*>", re.I) for name in (*DROPPED_ELEMENTS, "nowiki")}
ELEMENT_END["!--"] = re.compile("-->")

# Runs of brackets, and bars. The brackets of a table count only at the start of a line, as in
# MediaWiki.
MAX_DEPTH = 100  # MediaWiki's own limit for templates is 40
TOKEN = re.compile(r"^[ \t:]*\{\||^[ \t]*\|\}(?!\})|\{\{+|\}\}+|\[\[+|\]\]+|\|", re.M)

# In lower case, as all such links are: [[CSI: Miami]] is an article.
LANGUAGE_CODE = re.compile(r"[a-z]{2,3}(?:-[a-z]+)*|simple")

HEADING = re.compile(r"(={1,6})\s*(.*?)\s*\1$")


class Frame(NamedTuple):
    """An open bracket and its arguments so far, each a list of pieces of text."""

    kind: str
    arguments: list[list[str]]

    def texts(self) -> list[str]:
        return ["".join(argument) for argument in self.arguments]


def prose_of(
    wikitext: str, hidden: frozenset[str] = FILE_ALIASES | {"file", "category"}
) -> list[str]:
    """The paragraphs of prose of a page: no headings, lists, tables, templates, references, files
    or categories, but passages of prose in tables and reference sections.

    hidden: prefixes, in lower case, of links that show no text.
    """
    text = without_brackets(without_tags(wikitext), hidden)
    if "-{" in text:
        text = LANGUAGE_VARIANTS.sub(first_variant, text)
    paragraphs = []
    for raw, is_in_references in prose_lines(text):
        paragraph = clean(raw)
        is_wanted = is_passage if is_in_references else is_prose
        if is_wanted(paragraph):
            paragraphs.append(paragraph)
    return paragraphs


def without_tags(text: str) -> str:
    """`text` without comments, without the elements in `DROPPED_ELEMENTS`, and without the tags of
    other elements.
    """
    pieces: list[str] = []
    position = 0
    unclosed: set[str] = set()  # elements without an end tag from here on
    for tag in TAG.finditer(text):
        name = (tag[2] or "!--").lower()
        if tag.start() < position or name not in KNOWN_ELEMENTS:
            continue
        pieces.append(text[position : tag.start()])
        pieces.append(tag_text(name, tag))
        position = tag.end()
        is_empty = tag[1] or (tag[3] and tag[3].endswith("/"))
        if is_empty or name in unclosed or name not in ELEMENT_END:
            continue
        end = ELEMENT_END[name].search(text, position)
        if end is None:
            unclosed.add(name)
            continue
        pieces.append(content_text(name, text[position : end.start()]))
        position = end.end()
    pieces.append(text[position:])
    return "".join(pieces)


def tag_text(name: str, tag: re.Match[str]) -> str:
    """What stands for the tag of an element."""
    is_end = bool(tag[1])
    if name == "br":
        return " "
    if name in BLOCK_ELEMENTS:
        return "\n\n"
    markup = f"/{name}" if is_end else name
    if markup in WIKITEXT_OF:
        return WIKITEXT_OF[markup]
    is_exponent = name == "sup" and not is_end and tag.string[tag.start() - 1].isdigit()
    return "^" if is_exponent and not ORDINAL.match(tag.string, tag.end()) else ""


def content_text(name: str, content: str) -> str:
    """What stands for the content of an element that has an end in `ELEMENT_END`."""
    if name == "nowiki":
        return re.sub(r"[][{}|<>]|''+", "", content)
    if name == "math":
        return short_formula(content)
    return ""


def without_brackets(text: str, hidden: frozenset[str]) -> str:
    """`text` with each template, table and link replaced by the text that it shows, and without
    unclosed brackets.
    """
    page = OpenBrackets(hidden)
    position = 0
    for token in TOKEN.finditer(text):
        page.show(text[position : token.start()])
        page.read(token[0])
        position = token.end()
    page.show(text[position:])
    return page.text()


class OpenBrackets:
    """The brackets of a page that are open, each with its text so far. The outermost frame is the
    page itself.

    hidden: prefixes of links that show no text.
    """

    def __init__(self, hidden: frozenset[str]):
        self.hidden = hidden
        self.stack = [Frame("", [[]])]
        self.open_count = dict.fromkeys(("{{", "[[", "{|"), 0)

    def text(self) -> str:
        """The text of the page, which ends here."""
        while len(self.stack) > 1:
            self.show(unclosed_text(self.stack.pop()))
        return "".join(self.stack[0].arguments[0])

    def show(self, shown: str) -> None:
        self.stack[-1].arguments[-1].append(shown)

    def read(self, bracket: str) -> None:
        """Reads what TOKEN matches: a bar, or a run of brackets."""
        kind = bracket[:2]
        if bracket == "|":
            self.read_bar()
        elif kind in ("{{", "[["):
            if bracket == "[[[":
                self.show("[")
            for _ in range(len(bracket) // 2):
                self.open(kind)
        elif kind == "}}":
            for _ in range(min(len(bracket) // 2, self.open_count["{{"])):
                self.show(template_text(self.close("{{")))
        elif kind == "]]":
            self.read_link_ends(bracket)
        elif bracket.endswith("{|"):
            self.open("{|")
        elif self.open_count["{|"]:
            table, *_ = self.close("{|")
            self.show(table_text(table))

    def read_bar(self) -> None:
        if self.stack[-1].kind in ("{{", "[["):
            self.stack[-1].arguments.append([])
        else:
            self.show("|")

    def read_link_ends(self, bracket: str) -> None:
        is_odd = len(bracket) % 2 == 1
        if is_odd and len(self.stack) > 1:
            inside = "".join(self.stack[-1].arguments[-1])
            # The first one ends an [http://...] inside a link.
            if inside.count("[") > inside.count("]"):
                self.show("]")
                bracket = bracket[1:]
        while len(bracket) > 1 and self.stack[-1].kind == "[[":
            self.show(link_text(self.close("[["), self.hidden))
            bracket = bracket[2:]
        if len(bracket) % 2:
            self.show("]")

    def open(self, kind: str) -> None:
        if len(self.stack) <= MAX_DEPTH:
            self.stack.append(Frame(kind, [[]]))
            self.open_count[kind] += 1

    def close(self, kind: str) -> list[str]:
        """Closes the innermost open bracket of `kind` and returns its arguments. Unclosed brackets
        inside it go.
        """
        while True:
            frame = self.stack.pop()
            self.open_count[frame.kind] -= 1
            if frame.kind == kind:
                return frame.texts()
            self.show(unclosed_text(frame))


def unclosed_text(frame: Frame) -> str:
    """The text of an unclosed bracket, without the line of a template's name or of a table's
    attributes.
    """
    text = "|".join(frame.texts())
    if frame.kind == "[[":
        return text
    _first_line, line_end, others = text.partition("\n")
    return line_end + others


def link_text(arguments: Sequence[str], hidden: frozenset[str]) -> str:
    """The text that [[target|text]] shows: nothing for a file, a category or a link to another
    language.
    """
    target = arguments[0].strip()
    prefix, colon, rest = target.partition(":")
    if colon and prefix.strip().lower().replace("_", " ") in hidden:
        return ""
    if "\n\n" in "".join(arguments):
        return "|".join(arguments)  # the two brackets do not belong together
    if len(arguments) == 1:
        if colon and LANGUAGE_CODE.fullmatch(prefix):
            return ""
        return target.lstrip(":")
    if arguments[-1].strip():
        return arguments[-1]
    # [[Mercury (planet)|]] and [[Help:Link|]] show Mercury and Link.
    return re.sub(r"\s*\([^()]*\)$", "", rest if colon else target)


CELL_START = re.compile(r"\n[ \t]*(?:\|[-+]?|!)|\|\||!!")


def table_text(table: str) -> str:
    """The passages of prose in the cells of a layout table."""
    if len(table) < MIN_PASSAGE:
        return ""
    passages = []
    for cell in CELL_START.split(table)[1:]:
        if len(cell.encode()) < MIN_PASSAGE:
            continue
        attributes, bar, content = cell.partition("|")
        if not bar or "\n" in attributes:
            content = cell
        passages += [raw for raw, _ in prose_lines(content) if is_passage(clean(raw))]
    return "\n\n".join(["", *passages, ""]) if passages else ""


# -{zh-hans:计算机; zh-hant:電腦}- has a form for each variant of a language, -{text}- is the
# same in all, and -{H|...}- only defines a rule for the page.
LANGUAGE_VARIANTS = re.compile(r"-\{(?!\{)([^{}]*)\}-")
VARIANT_NAME = re.compile(r"\s*[a-z]{2,3}(?:-[a-z]+)*\s*:")


def first_variant(markup: re.Match[str]) -> str:
    """The text of MediaWiki's language variants: "colour" of `-{en-gb:colour; en-us:color}-`. Empty
    if flags before a bar, as in `-{T|...}-`, say that no text is shown.
    """
    flags, bar, text = markup[1].rpartition("|")
    shown_flags = {"", "A", "R", "N", "S"}
    if bar and not {flag.strip() for flag in flags.split(";")} <= shown_flags:
        return ""
    name = VARIANT_NAME.match(text)
    if name is None:
        return text
    first, _, _others = text[name.end() :].partition(";")
    return first.strip()


LineKind = Enum("LineKind", "TEXT INDENTED TERM HEADING OTHER")


def line_kind(content: str) -> LineKind:
    """The kind of a stripped line; OTHER: an empty line, a list item, a table row, a rule."""
    first = content[:1]
    if first == ":":
        return LineKind.INDENTED
    if first == ";":
        return LineKind.TERM
    if first == "=" and HEADING.fullmatch(content):
        return LineKind.HEADING
    if not content or first in "*#|" or content.startswith(("----", "! ")):
        return LineKind.OTHER
    return LineKind.TEXT


def prose_lines(text: str) -> Iterator[tuple[str, bool]]:
    """The paragraphs of `text`, with lines joined, each with whether it is in a reference section.

    Headings, list items, table rows and rules are left out. An indented line is a separate
    paragraph, except that a line that ends in a comma (verse) continues in the next. A definition
    is preceded by its term.
    """
    lines: list[str] = []
    is_indented = False  # the last line
    term = ""  # that the next line may define
    references_level = 0  # of the heading of the reference section; 0 outside of one
    for line in text.split("\n"):
        content = line.strip()
        kind = line_kind(content)
        if lines and not continues_paragraph(kind, lines[-1], is_indented):
            yield " ".join(lines), references_level > 0
            lines = []
        if kind is LineKind.TERM:
            term, definition = split_term(content)
            if definition is not None:
                lines.append(term + definition)
                is_indented = True
            continue
        if kind is LineKind.TEXT:
            lines.append(content)
            is_indented = False
        elif kind is LineKind.INDENTED:
            content = content.lstrip(": ")
            if content and content[0] not in "*#|":
                lines.append(term + content)
                is_indented = True
        elif kind is LineKind.HEADING:
            references_level = references_level_after(content, references_level)
        term = ""
    if lines:
        yield " ".join(lines), references_level > 0


def continues_paragraph(kind: LineKind, last: str, is_indented: bool) -> bool:
    """Whether a line belongs to the paragraph whose last line is `last`."""
    if is_indented:
        return kind is LineKind.INDENTED and last.rstrip("'").endswith((",", ";"))
    return kind is LineKind.TEXT


def split_term(content: str) -> tuple[str, str | None]:
    """The term of `; term` or `; term : definition`, the line before definitions, and the
    definition if the line has one.
    """
    content = content.strip("; ")
    term, colon, definition = content.rstrip(": ").partition(": ")
    term = f"{term.strip()}: "
    if not colon:
        return term, None
    if content.endswith(":"):
        return f"{term}{definition}: ", None
    return term, definition


def references_level_after(heading: str, level: int) -> int:
    """The level of the reference section, or 0, after `heading`; `level`: the one before it."""
    match = HEADING.fullmatch(heading)
    if match is None:  # the caller gives headings only
        return level
    heading_level = len(match[1])
    if level and heading_level > level:
        return level
    return heading_level if match[2].strip("' ").lower() in REFERENCE_HEADINGS else 0


# The character classes do not overlap and the quantifiers are possessive, so there is no
# backtracking.
EXTERNAL_LINK = re.compile(r"\[(?:https?:|ftp:|mailto:|//)[^\s\[\]]*+\s*+([^\[\]]*+)\]")
MAGIC_WORD = re.compile(r"__[A-Z]{3,}__")
# ''Titanic'''s: italics end, then an apostrophe; L'''Étoile'': an apostrophe, then italics begin.
APOSTROPHE = re.compile(r"(?<=\w)'''(?=s\b)|(?<![\w'])([LlDdMmNnSs])'''(?=\w)")
EMPHASIS = re.compile(r"'{2,}")
# Not the joiners U+200C and U+200D, which are letters of words in Persian and in scripts of India.
INVISIBLE = dict.fromkeys(map(ord, "\u00ad\u200b\u200e\u200f\u202a\u202b\u202c\u2060\ufeff"))
GAPS = (
    (re.compile(r"(?<=[(\[])[ ,;:]+"), ""),
    (re.compile(r"(?<![ ,;:])[ ,;:]+(?=[)\]])"), ""),
    # Not those of code: main(), int[].
    (re.compile(r"(?: |(?<![A-Za-z0-9_]))(?:\(\)|\[\])| ?(?:\([/–—-]+\)|“”|«»)"), ""),
    (re.compile(r"([,;])(?: ?[,;])+"), r"\1"),
    (re.compile(r" ([,.])(?= |$)"), r"\1"),
)


def clean(text: str) -> str:
    """`text` without the rest of the markup, and without the gaps that removed templates leave."""
    if "[" in text:
        text = EXTERNAL_LINK.sub(r"\1", text)
    text = html.unescape(text)
    if text.count("[") != text.count("]"):
        text = text.replace("[", "").replace("]", "")
    if "''" in text:
        text = EMPHASIS.sub("", APOSTROPHE.sub(r"\1'", text))
    if "__" in text:
        text = MAGIC_WORD.sub("", text)
    if not text.isascii():
        text = text.translate(INVISIBLE)
    text = " ".join(text.split())
    for gap, replacement in GAPS:
        text = gap.sub(replacement, text)
    return text.strip()


SENTENCE_END = re.compile(rf"[{ENDS}:](?:\s?[{CLOSERS}])*$")
WORD = regex.compile(r"[\p{L}\p{M}]{3}")  # with the vowels of Hindi, which are combining marks
MIN_FRAGMENT = 60
MIN_PASSAGE = 100  # bytes, not characters, because a character is a whole word in some scripts
# Fraction of the words of a passage; references are mostly names, titles and years
MIN_LOWER_CASE = 0.6


def is_prose(paragraph: str) -> bool:
    """Whether `paragraph` ends like a sentence, or is too long for a caption or a table row."""
    if "||" in paragraph:
        return False
    if len(paragraph) >= MIN_FRAGMENT:
        return True
    is_sentence = len(paragraph) >= 10 and SENTENCE_END.search(paragraph)
    return bool(is_sentence and WORD.search(paragraph))  # a formula has no word


def is_passage(paragraph: str) -> bool:
    """Whether `paragraph` is prose in any place: long, ends like a sentence, and not a reference or
    a list of names.
    """
    if len(paragraph.encode()) < MIN_PASSAGE or not SENTENCE_END.search(paragraph):
        return False
    tokens = paragraph.split()
    others = [token for token in tokens if token[0].isupper() or token[0].isdigit()]
    return len(tokens) - len(others) >= MIN_LOWER_CASE * len(tokens)
