"""Tags of words: the forms in which files have them, and the entities that they mark.

Read tags are `O`, or B-, I-, E- or S- and a type; or, of parts of speech, any class for each word.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bert_recipe.utils.errors import UserError

Entity = tuple[str, int, int]  # type, first word, last word + 1; or characters

OTHER_LETTERS = {"L": "E", "U": "S", "W": "S", "M": "I"}  # of BILOU, BMES and BMEWO
PREFIXED = re.compile("(?P<prefix>[BIESLUMWbieslumw])[-_](?P<type>.+)")
FIRST_PREFIXED = re.compile("[BISUWbisuw][-_].+")  # what some tag of each scheme begins with
SUFFIXED = re.compile("(?P<type>.+)[-_](?P<prefix>[BIESLUMW])")
BARE = re.compile("(?P<prefix>[BIESLUMWbieslumw])(?P<type>)")
READ = re.compile("O|[BIES]-.+")
UNNAMED_TYPE = "ENTITY"  # of files that have B, I and O only


@dataclass(frozen=True)
class TagForm:
    """How tags are written.

    pattern: of tags other than O; None for types or classes alone.
    is_class: each word has a class, such as its part of speech.
    outside: what is written for O.
    """

    pattern: re.Pattern[str] | None = PREFIXED
    is_class: bool = False
    outside: tuple[str, ...] = ("O", "o")

    @classmethod
    def of(cls, tags: Iterable[str]) -> "TagForm":
        """The form of the tags in all files together. With O and a tag such as B-PER, those that
        are not so are mistakes; without O, they are classes.
        """
        others = set(tags) - {"O", "o"}
        has_outside = len(others) < len(set(tags))
        if all(map(PREFIXED.fullmatch, others)):
            return cls()
        if has_outside and any(map(FIRST_PREFIXED.fullmatch, others)):
            return cls()
        unread = [tag for tag in others if not PREFIXED.fullmatch(tag)]
        prefixed = sorted(filter(FIRST_PREFIXED.fullmatch, others))
        if prefixed and len(unread) == 1:
            raise UserError(
                f"the tags are such as {prefixed[0]}, and {unread[0]!r}: write O for words that "
                "are in no entity"
            )
        letters = {tag.upper() for tag in others}
        if all(map(BARE.fullmatch, others)) and ("B" in letters or letters <= {"I"}):
            return cls(BARE)
        if all(map(SUFFIXED.fullmatch, others - {"-"})):
            return cls(SUFFIXED, outside=("O", "-"))
        return cls(None, is_class="O" not in tags, outside=("O",))

    @property
    def is_scheme(self) -> bool:
        """Whether the tags are IOB's, BIOES's or BMES's, which can be nothing else."""
        return self.pattern in (PREFIXED, BARE)

    @property
    def example(self) -> str:
        """Tags of this form, for messages."""
        if self.pattern is None:
            return "NOUN" if self.is_class else "O or PER"
        return {BARE: "O or B", SUFFIXED: "O or PER-B"}.get(self.pattern, "O or B-PER")

    def read(self, tag: str) -> str | None:
        """`tag` as O, B-, I-, E-, S- or a class; None if it is not of this form."""
        if self.is_class:
            return tag or None
        if tag in self.outside:
            return "O"
        if self.pattern is None:
            return f"I-{tag}" if tag else None
        match = self.pattern.fullmatch(tag)
        if match is None:
            return None
        prefix = match["prefix"].upper()
        return f"{OTHER_LETTERS.get(prefix, prefix)}-{match['type'] or UNNAMED_TYPE}"

    def read_known(self, tag: str) -> str:
        """As `read`, for a tag that is of this form."""
        known = self.read(tag)
        if known is None:
            raise ValueError(f"the tag {tag!r} is not such as {self.example}")
        return known


def has_classes(tags: Iterable[str]) -> bool:
    """Whether read tags are classes of words, not those of entities."""
    return not all(map(READ.fullmatch, tags))


def types_of(tags: Iterable[str]) -> set[str]:
    """The types of entities in read tags."""
    return {tag[2:] for tag in tags if tag != "O"}


def to_iob2(tags: Sequence[str]) -> list[str]:
    """Tags of any scheme as B- and I- tags."""
    return tags_of(entities(tags), [(place, place + 1) for place in range(len(tags))])


def tags_of(spans: Iterable[Entity], bounds: Sequence[tuple[int, int]]) -> list[str]:
    """B- and I- tags of units with `bounds`, in order, in which the entities are given: a unit
    belongs to the first entity that it overlaps.
    """
    tags = []
    remaining = iter(sorted(spans, key=lambda entity: entity[1:]))
    entity, is_first = next(remaining, None), True
    for start, stop in bounds:
        while entity is not None and entity[2] <= start:
            entity, is_first = next(remaining, None), True
        if entity is None or entity[1] >= stop:
            tags.append("O")
        else:
            tags.append(f"{'B' if is_first else 'I'}-{entity[0]}")
            is_first = False
    return tags


def entities(tags: Sequence[str]) -> set[Entity]:
    """The type, first word and last word + 1 of each entity, as in the CoNLL-2000 script and
    seqeval: an entity starts at B or S, and at I or E after another type, O, E or S.
    """
    result = set()
    start = 0
    pairs = [("O", ""), *(tag.partition("-")[::2] for tag in tags), ("O", "")]
    for place, ((before, kind_before), (prefix, kind)) in enumerate(pairwise(pairs)):
        is_other_kind = kind != kind_before
        has_ended = before in "ES" or prefix in "BSO" or is_other_kind
        if before != "O" and has_ended:
            result.add((kind_before, start, place))
        continues = before not in "OES" and not is_other_kind
        if prefix in "BS" or (prefix != "O" and not continues):
            start = place
    return result
