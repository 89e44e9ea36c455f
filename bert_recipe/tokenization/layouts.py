"""Layouts of sequences: the special tokens that a tokenizer puts around one text or two, and the
token types.
"""

from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from bert_recipe.tokenization.files import CLS, SEP
from bert_recipe.utils.json_files import JsonObject

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True)
class Layout:
    """The parts of a sequence in order: the id of a special token, or None where a text stands.

    types: the token type of each part.
    """

    parts: tuple[int | None, ...]
    types: tuple[int, ...]

    @property
    def num_special(self) -> int:
        return len(self.parts) - self.parts.count(None)

    @property
    def num_after(self) -> int:
        """Special tokens after the last text."""
        return self.parts[::-1].index(None)

    def num_before(self, text: int) -> int:
        """Special tokens before the text of this number, counted from 0."""
        places = [place for place, part in enumerate(self.parts) if part is None]
        return places[text] - text

    def is_text(self, num_tokens: int) -> list[bool]:
        """Whether each token of a sequence is of its only text, which has so many tokens."""
        before, after = [False] * self.num_before(0), [False] * self.num_after
        return [*before, *[True] * num_tokens, *after]

    def without_types(self) -> "Layout":
        return replace(self, types=(0,) * len(self.types))


def bert_layout(cls: int, sep: int, num_texts: int) -> Layout:
    """`[CLS] text [SEP]`, or `[CLS] first [SEP] second [SEP]`, whose second part has type 1."""
    if num_texts == 1:
        return Layout((cls, None, sep), (0, 0, 0))
    return Layout((cls, None, sep, None, sep), (0, 0, 0, 1, 1))


def roberta_layout(cls: int, sep: int, num_texts: int) -> Layout:
    """`<s> text </s>`, or `<s> first </s></s> second </s>`, without types."""
    parts = (cls, None, sep) if num_texts == 1 else (cls, None, sep, sep, None, sep)
    return Layout(parts, (0,) * len(parts))


def layout_of(encoder: "tokenizers.Tokenizer", num_texts: int) -> Layout | None:
    """What the post-processor of `encoder` makes of so many texts; None if that is no layout, as
    when a text is not there once, or in another order.
    """
    encoding = encoder.encode("a", "a" if num_texts == 2 else None)
    text_ids = encoder.encode("a", add_special_tokens=False).ids
    parts: list[int | None] = []
    types: list[int] = []
    texts: list[int] = []  # the numbers of the texts that have been seen
    tokens = zip(encoding.sequence_ids, encoding.ids, encoding.type_ids, strict=True)
    for number, group in groupby(tokens, key=lambda token: token[0]):
        _, ids, type_ids = zip(*group, strict=True)
        if number is None:
            parts += ids
            types += type_ids
            continue
        if list(ids) != text_ids or len({*type_ids}) > 1:
            return None
        texts.append(number)
        parts.append(None)
        types.append(type_ids[0])
    return Layout(tuple(parts), tuple(types)) if texts == [*range(num_texts)] else None


def is_bert_template(post_processor: Any) -> bool:
    """Whether the post-processor in a `tokenizer.json` makes BERT's layout."""

    def token(name: str, type_id: int) -> JsonObject:
        return {"SpecialToken": {"id": name, "type_id": type_id}}

    def text(name: str, type_id: int) -> JsonObject:
        return {"Sequence": {"id": name, "type_id": type_id}}

    single = [token(CLS, 0), text("A", 0), token(SEP, 0)]
    match post_processor:
        case {"type": "BertProcessing", "cls": [name, _], "sep": [other, _]}:
            return (name, other) == (CLS, SEP)
        case {"type": "TemplateProcessing", "single": one, "pair": two}:
            return one == single and two == [*single, text("B", 1), token(SEP, 1)]
    return False
