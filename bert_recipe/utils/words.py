"""Divides texts of any script into words, and finds their accents."""

import re
import unicodedata
from collections.abc import Iterator, Sequence

import regex

# Scripts without spaces between words: Han and kana are divided by character, those of South East
# Asia, whose vowels stand around a consonant, by grapheme cluster (Unicode's annex 29).
BY_CHARACTER = r"\p{Han}\p{Hiragana}\p{Katakana}\u30fc\uff70"
BY_CLUSTER = r"\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
IN_WORD = r"\w\p{M}\u200c\u200d"  # combining marks and joiners, as in Devanagari and Persian
# Marks that end a sentence before a space, also Arabic, Devanagari and Armenian ones.
SENTENCE_ENDS = ".?!\u2026\u061f\u06d4\u0964\u0965\u0589"
# Chinese and Japanese, Ethiopic, Burmese and Khmer ones, which are not used for anything else, and
# may have no space after them.
FULL_STOPS = "\u3002\uff01\uff1f" + "\u1362\u1367\u1368" + "\u104b" + "\u17d4\u17d5"
# Some languages close quotations with marks that open them in others.
QUOTES = "\"'\u2018\u2019\u201a\u201c\u201d\u201e\u00ab\u00bb\u2039\u203a"
# Chinese and Japanese characters and their punctuation. Lines of them are joined without a space.
WIDE = "\u3001-\u30ff\u3400-\u9fff\uf900-\ufaff\uff01-\uff9f"
WIDE_BREAK = re.compile(
    rf"(?:(?<=[{WIDE}])|(?<=[{WIDE}][\u201d\u2019]))[^\S\n]*\n\s*(?=[{WIDE}\u201c\u2018])"
)
BEYOND_FFFF = regex.compile("[\U00010000-\U0010ffff]")
NOT_SPACE = regex.compile(r"\S+")
# What follows a letter and belongs to it: accents, vowel signs, the vowels and ends of Korean
# syllables that are written as several characters.
MARK = regex.compile(r"[\p{M}\u1160-\u11ff]")
UNSPACED = regex.compile(f"[{BY_CHARACTER}{BY_CLUSTER}]")
WORD = regex.compile(
    rf"[{BY_CHARACTER}][\p{{M}}\u30fc\uff70]*"
    rf"|(?=[{BY_CLUSTER}])\X"
    rf"|[\w--[{BY_CHARACTER}{BY_CLUSTER}]][{IN_WORD}--[{BY_CHARACTER}{BY_CLUSTER}]]*"
    r"|(?=\S)\X",
    regex.VERSION1,
)
# Half of a pair, which JSON, command lines and names of files may have: libraries refuse it.
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
ASCII_WORD = re.compile(r"\w+|[^\w\s]")  # the same, several times as fast


def join_lines(text: str) -> str:
    """The wrapped lines of a paragraph, or its sentences, as one line with single spaces."""
    return " ".join(WIDE_BREAK.sub("", text).split())


def word_spans(text: str) -> Iterator[tuple[int, int]]:
    """The [start, end) of each word and of each other visible character, such as a punctuation
    mark or an emoji, in order.
    """
    return (match.span() for match in pattern_for(text).finditer(text))


def spaced_spans(text: str) -> Iterator[tuple[int, int]]:
    """The [start, end) of what stands between spaces, in order; of its words where it has a script
    without spaces.
    """
    for match in NOT_SPACE.finditer(text):
        if is_unspaced(match[0]):
            yield from ((match.start() + a, match.start() + b) for a, b in word_spans(match[0]))
        else:
            yield match.span()


def split_words(text: str) -> list[str]:
    """The words of `text`, and its other visible characters."""
    return pattern_for(text).findall(text)


def pattern_for(text: str) -> "re.Pattern[str] | regex.Pattern[str]":
    return ASCII_WORD if text.isascii() else WORD


def is_unspaced(text: str) -> bool:
    """Whether `text` has a character of a script without spaces between words."""
    return not text.isascii() and UNSPACED.search(text) is not None


def from_utf16(text: str, offset: int) -> int:
    """The index of a character of `text` whose `offset` was counted in UTF-16, where characters
    beyond U+FFFF, such as emojis, count as two: in JavaScript, Java and C#.
    """
    num_before = 0  # such characters before the offset
    for match in BEYOND_FFFF.finditer(text):
        end_in_utf16 = match.start() + num_before + 2
        if end_in_utf16 > offset:
            break
        num_before += 1
    return offset - num_before


def is_accent(character: str) -> bool:
    return unicodedata.category(character) == "Mn"


def has_accent(text: str) -> bool:
    """Whether stripping accents changes `text`."""
    return not text.isascii() and any(map(is_accent, unicodedata.normalize("NFD", text)))


def with_marks(spans: Sequence[tuple[int, int]], text: str) -> Sequence[tuple[int, int]]:
    """The `spans` of tokens in `text`, in order, each with the marks after it that are in no other
    token: those that the tokenizer stripped, or composed with the letter before them.
    """
    if text.isascii() or MARK.search(text) is None:
        return spans
    extended = []
    next_starts = [*(start for start, _ in spans[1:]), len(text)]
    for (start, end), next_start in zip(spans, next_starts, strict=False):
        while end < next_start and MARK.match(text, end):
            end += 1
        extended.append((start, end))
    return extended
