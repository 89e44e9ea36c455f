"""Cleans plain-text books, in the format of Project Gutenberg and others: chapters of prose.

Removes title pages, dedications, tables of contents, headings, ornaments, illustrations, footnotes.
Prefaces stay.
"""

import re
from collections.abc import Iterator

import regex

from bert_recipe.data_preparation.sources.documents import (
    CLOSERS,
    ENDS,
    Document,
    split_paragraphs,
)
from bert_recipe.utils.words import join_lines

# Characters. A shorter section is front matter before the first chapter; later it is joined to the
# next section.
MIN_CHARACTERS = 500

GUTENBERG_START = re.compile(r"\*\*\* ?START OF (?:THE|THIS) PROJECT GUTENBERG[^*]*\*\*\*")
GUTENBERG_END = re.compile(
    r"\*\*\* ?END OF (?:THE|THIS) PROJECT GUTENBERG|^End of (?:the )?Project Gutenberg", re.M
)

NUMBER = (
    r"(?:[ivxlcdm]+|\d+|"
    r"(?:the )?(?:first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|last)|"
    r"one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|"
    r"(?:twenty|thirty|forty|fifty)(?:[- ]\w+)?)\b"
)
PARTS = r"chapter|chap\.?|book|part|volume|vol\.?|letter|act|scene|stave|canto|section"
NUMBERED = re.compile(rf"\W*(?:{PARTS})\s+(?:{NUMBER}|\W*$)", re.I)
# Headings of other languages: a word for chapters, or for larger parts, with its number or within
# three words, such as "Kapitel 1: Der Anfang", "Erster Teil" and "第一章".
CHAPTERS = (
    r"kapitel|kapittel|aufzug|chapitre|cap[ií]tulo|capitolo|hoofdstuk|rozdział|kapitola|"
    r"глава|розділ|bölüm|fejezet|luku|κεφάλαιο|अध्याय|الفصل|פרק"
)
FOREIGN = rf"(?:{CHAPTERS}|teil|buch|livre|partie|acte|libro|parte|atto|część|часть|книга|частина)"
DIGITS = r"(?:(?-i:[IVXLCDM]+)|\d+)"
TITLE = r"\s*(?:$|[.:—–-])"  # may follow
FOREIGN_TITLE = re.compile(
    rf"\W*(?:\w+\W+)?(?:{FOREIGN}\b(?:\W+{DIGITS}\b|(?:\W+\w+)?{TITLE})|"
    rf"(?:{CHAPTERS})(?:\W+\w+){{2}}{TITLE})|"
    r"\W*第\s*[\d一二三四五六七八九十百〇零]+\s*[章回節节部卷話话]|\W*제\s*\d+\s*[장부]",
    re.I,
)
# Those that are headings also where they end like a sentence: "Kapitel 1." and "Erstes Kapitel."
FOREIGN_NUMBERED = re.compile(
    rf"\s*_?(?:{FOREIGN}\W+{DIGITS}|{DIGITS}\W+{FOREIGN}){TITLE}|"
    rf"\s*_?(?:\w+\W+(?:{CHAPTERS})|(?:{CHAPTERS})\W+\w+)(?:[.\s]*_?$|:)",
    re.I,
)
NAMED = re.compile(
    r"\W*(?:the |author's |translator.s )?"
    r"(?:preface|prologue|epilogue|introduction|(?:table of )?contents|dedication|"
    r"(?:list of )?illustrations|etymology|extracts|footnotes?|notes?|appendix|index|conclusion|"
    r"finis|the end)\W*$",
    re.I,
)
APPARATUS = re.compile(r"\W*(?:(?:list of )?illustrations|footnotes|notes|index)\W*$", re.I)
BARE_NUMBER = re.compile(r"[\W_]*(?:[IVXLCDM]+|\d+)[\W_]*")
NUMBER_AND_TITLE = re.compile(r"\W*(?:[IVXLCDM]+|\d+)[.:]?\s[\W_]*[A-Z][^\n]*")
RULE = re.compile(r"[\W_\d]*")
FOOTNOTE = re.compile(r"\[(?:\*+|\d+)\]|\*+\s|\[Footnote\b", re.I)
EDITORIAL = re.compile(
    r"\[(?:Illustration|Footnote|Transcriber)\b[^\]]*\]|\[(?:\*+|\d+)\]|(?<!\S)\*+(?!\S)", re.I
)
PROSE_END = re.compile(rf"(?:[{ENDS}:;,—：；，、؛،]|--)(?:\s?[{CLOSERS}_])*$")
WORD = regex.compile(r"[\p{L}\p{M}]{2,}|[aI]")
# A line break that is not a space: after a hyphen or a dash, before a dash.
JOINING_BREAK = re.compile(r"(?<=\w-)\n(?=\w)|(?<=--)\n|(?<=—)\n|\n(?=--|—)")

MAX_HEADING_LINES = 6
MAX_HEADING_WORDS = 30


def clean_book(text: str, name: str = "book") -> Iterator[Document]:
    """The chapters of `text` as documents named `name`#1, #2 and so on, with one line per
    paragraph.
    """
    start = GUTENBERG_START.search(text)
    end = GUTENBERG_END.search(text)
    if end is not None:
        text = text[: end.start()]
    if start is not None:
        text = text[start.end() :]
    count = 0
    section: list[str] = []
    for paragraph in prose_paragraphs(text):
        if paragraph is not None:
            section.append(paragraph)
        elif sum(map(len, section)) >= MIN_CHARACTERS:
            count += 1
            yield Document(f"{name}#{count}", section)
            section = []
        elif count == 0:
            section = []


def prose_paragraphs(text: str) -> Iterator[str | None]:
    """The paragraphs of prose; None at the start of each section and at the end."""
    is_apparatus = False  # whether the section is a list, notes or an index
    for block in split_paragraphs(text):
        if is_division(block):
            is_apparatus = bool(APPARATUS.match(block))
            yield None
            continue
        if is_apparatus:
            continue
        paragraph = clean_paragraph(block)
        if paragraph:
            yield paragraph
    yield None


def is_division(block: str) -> bool:
    """Whether `block` is the heading of a new section. The title may follow as a separate block."""
    is_long = len(WORD.findall(block)) > MAX_HEADING_WORDS and PROSE_END.search(block)
    if is_long or block.count("\n") >= MAX_HEADING_LINES:
        return False
    first_line = block.partition("\n")[0]
    return bool(
        NUMBERED.match(first_line)
        or NAMED.match(first_line)
        or BARE_NUMBER.fullmatch(block)
        or FOREIGN_NUMBERED.match(first_line)
        or (
            (NUMBER_AND_TITLE.fullmatch(block) or FOREIGN_TITLE.match(first_line))
            and not is_prose(block)
        )
    )


def is_prose(block: str) -> bool:
    """Whether `block` is prose: it ends like a sentence, or its lines are as long as those of a
    paragraph.
    """
    capitals, letters = sum(map(str.isupper, block)), sum(map(str.isalpha, block))
    is_in_capitals = " " in block and block.isupper() and 2 * capitals > letters
    if RULE.fullmatch(block) or is_in_capitals:
        return False
    words = len(WORD.findall(block))
    lines = block.count("\n") + 1
    return bool(PROSE_END.search(block)) or (words >= 15 and words >= 7 * lines)


def clean_paragraph(block: str) -> str:
    """`block` as one line without markup; empty if it is not prose: a title, a list, a footnote."""
    if FOOTNOTE.match(block):
        return ""
    text = "\n".join(line.strip() for line in EDITORIAL.sub("", block).split("\n")).strip()
    if not is_prose(text):
        return ""
    text = JOINING_BREAK.sub("", text)
    # These books write _italics_; a longer run of underscores is an omitted name.
    text = re.sub(r"_{2,}", "—", text).replace("_", "")
    return join_lines(text)
