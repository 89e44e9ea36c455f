"""Splits paragraphs into sentences: by Punkt's rules, with its parameters in a JSON file; and
`newline`, for text that has one sentence per line already.

Punkt: Kiss and Strunk, "Unsupervised Multilingual Sentence Boundary Detection", Computational
Linguistics 32, 2006.
"""

import collections
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path

from bert_recipe.utils.json_files import read_json, write_json
from bert_recipe.utils.words import FULL_STOPS, QUOTES, SENTENCE_ENDS

PARAMETERS_FOLDER = Path(__file__).parent / "punkt"

# Longer paragraphs are split: the time of a regular expression grows with the square of a run
# without white space.
MAX_PIECE = 20_000  # characters

# Punkt's orthographic context of a word, as bits: the case of its first letter and where in a
# sentence (section 4.1.1).
UPPER_INSIDE, UPPER_SOMEWHERE, LOWER_FIRST, LOWER_SOMEWHERE = 4, 8, 16, 32
UPPER, LOWER = 2 | 4 | 8, 16 | 32 | 64
NUMBER = "##number##"

CLOSERS = re.escape(QUOTES + ")]}")
OPENERS = re.escape(QUOTES + "([{\u00bf\u00a1")

AFTER_FULL_STOP = "\u300d\u300f\u201d\u2019\uff09\u00bb"
FULL_STOP = re.compile(rf"[{FULL_STOPS}]+(?:[{AFTER_FULL_STOP}]|[\"')](?=\s|$))*")
# After a Greek word, a semicolon is the question mark; after a letter, which may be a symbol, not.
GREEK = "\u0370-\u03ff\u1f00-\u1fff"
ENDS = rf"(?:[{re.escape(SENTENCE_ENDS)}]+|(?<=[{GREEK}]{{2}})[;\u037e])"
# French has a space inside the marks of a quotation.
CANDIDATE = re.compile(rf"{ENDS}[{CLOSERS}]*(?: \u00bb)?(?:\s+|$)")
NEXT_WORD = re.compile(rf"(?:\u00ab |[{OPENERS}])*([^\s{CLOSERS};:*@,?!]+|,)")
NUMERIC = re.compile(r"-?[.,]?\d[\d,.-]*")


def split_lines(paragraph: str) -> list[str]:
    """One sentence per line."""
    lines = (" ".join(line.split()) for line in paragraph.splitlines())
    return [line for line in lines if line]


@dataclass(frozen=True)
class PunktParameters:
    """What Punkt learns from text; the names are those of nltk, whose own object serves as well."""

    abbrev_types: set[str] = field(default_factory=set)
    collocations: set[tuple[str, str]] = field(default_factory=set)
    sent_starters: set[str] = field(default_factory=set)
    ortho_context: dict[str, int] = field(default_factory=lambda: collections.defaultdict(int))


class SentenceSplitter:
    """Punkt's decisions (sections 3 and 4 of the paper) where a sentence may end, without
    tokenizing the rest.
    """

    def __init__(self, params: PunktParameters):
        self.abbreviations = params.abbrev_types
        self.collocations = params.collocations
        self.starters = params.sent_starters
        self.contexts = dict(params.ortho_context)

    def split(self, paragraph: str) -> list[str]:
        return list(chain.from_iterable(map(self.split_piece, pieces(paragraph))))

    def split_piece(self, piece: str) -> Iterator[str]:
        start = 0
        for candidate in CANDIDATE.finditer(piece):
            following = NEXT_WORD.match(piece, candidate.end())
            space = piece.rfind(" ", start, candidate.start())  # before the last word
            word = piece[max(start, space + 1) : candidate.start()]
            if following and self.is_end(word, candidate[0].rstrip(), following[1]):
                yield piece[start : candidate.end()].rstrip()
                start = candidate.end()
        if start < len(piece):
            yield piece[start:]

    def is_end(self, word: str, mark: str, following: str) -> bool:
        """Whether a sentence ends at `mark` (a full stop or similar, with closing quotes) between
        `word` and the word `following`.
        """
        stop = mark.rstrip(QUOTES + ")]} ")
        is_capitalized = following[0].isupper()
        if stop.strip("."):  # another mark than full stops
            is_quoted = stop != mark
            return not (is_quoted and following[0].islower())
        starts = self.starts_sentence(following)  # or None, if that is undecided
        if len(stop) > 1:  # an ellipsis
            return starts is True or (is_capitalized and following.lower() in self.starters)

        # A full stop: is it one of an abbreviation, an initial or an ordinal number only?
        word = last_word(word)
        kind = word_type(word)
        next_kind = word_type(following)
        if (kind, next_kind) in self.collocations:
            return False
        is_abbreviation = kind in self.abbreviations
        if len(word) == 1 and word.isalpha():  # an initial
            if is_abbreviation or starts is False:
                return False
            is_name = is_capitalized and not self.contexts.get(next_kind, 0) & LOWER
            return starts is True or not is_name
        if is_abbreviation or kind.rpartition("-")[2] in self.abbreviations:
            return starts is True or (is_capitalized and next_kind in self.starters)
        is_ordinal = kind == NUMBER and starts is False
        return not is_ordinal

    def starts_sentence(self, word: str) -> bool | None:
        """Punkt's orthographic heuristic (section 4.1.1): None if it is undecided."""
        if not word[0].isalnum():
            return False
        context = self.contexts.get(word_type(word), 0)
        if word[0].isupper() and context & LOWER and not context & UPPER_INSIDE:
            return True
        if word[0].islower() and (context & UPPER or not context & LOWER_FIRST):
            return False
        return None


# The sentences of a paragraph in order, none empty, without line breaks and double spaces.
Splitter = Callable[[str], list[str]]


def last_word(text: str) -> str:
    """What follows the last opening mark, comma or dash of `text`, which has no spaces."""
    return re.split(rf"[{OPENERS},;:*@]|--+|\u2014", text)[-1]


def word_type(word: str) -> str:
    return NUMBER if NUMERIC.fullmatch(word) else word.lower().removesuffix(".")


def pieces(paragraph: str) -> Iterator[str]:
    """`paragraph` with single spaces, split after each FULL_STOP, and at a space, if any, where it
    is too long.
    """
    text = " ".join(paragraph.split())
    ends = [match.end() for match in FULL_STOP.finditer(text)]
    for first, stop in pairwise([0, *ends, len(text)]):
        piece = text[first:stop].strip()
        start = 0
        while len(piece) - start > MAX_PIECE:
            cut = piece.rfind(" ", start + 1, start + MAX_PIECE)
            cut = cut if cut > 0 else start + MAX_PIECE
            yield piece[start:cut]
            start = cut + (piece[cut] == " ")
        if start < len(piece):
            yield piece[start:]


def save_punkt(params: PunktParameters, path: str | Path, note: str) -> None:
    """Writes `params` as sorted JSON, so that results can be compared. `note` says what they were
    trained on. Only contexts, and bits of them, that can change a decision are kept.
    """
    contexts: dict[int, list[str]] = {}
    for word, bits in sorted(params.ortho_context.items()):
        if bits & LOWER:
            upper = 0
            if bits & UPPER_INSIDE:
                upper = UPPER_INSIDE
            elif bits & UPPER:
                upper = UPPER_SOMEWHERE
            lower = LOWER_FIRST if bits & LOWER_FIRST else LOWER_SOMEWHERE
            contexts.setdefault(upper | lower, []).append(word)
    values = {
        "note": note,
        "abbreviations": sorted(params.abbrev_types),
        "collocations": sorted(" ".join(pair) for pair in params.collocations),
        "sentence_starters": sorted(params.sent_starters),
        "contexts": {str(bits): " ".join(words) for bits, words in sorted(contexts.items())},
    }
    write_json(path, values, indent=1)


def load_punkt(path: str | Path) -> PunktParameters:
    """Reads what `save_punkt` wrote."""
    values = read_json(path, "sentence parameters")
    params = PunktParameters()
    params.abbrev_types.update(values["abbreviations"])
    params.collocations.update(tuple(pair.split(" ")) for pair in values["collocations"])
    params.sent_starters.update(values["sentence_starters"])
    for bits, words in values["contexts"].items():
        params.ortho_context.update(dict.fromkeys(words.split(" "), int(bits)))
    return params
