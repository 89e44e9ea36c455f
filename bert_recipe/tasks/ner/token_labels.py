"""Sentences as tokens with labels: which tokens have one, and the words or characters that each of
them stands for.

Legend: U units, that is tokens with a label, of all sentences; T tokens.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bert_recipe.model.token_stream import IGNORED_LABEL
from bert_recipe.tasks.ner.files import Sentence
from bert_recipe.tasks.ner.tags import Entity, has_classes, tags_of
from bert_recipe.tasks.text_sequences import SequenceDataset, encode
from bert_recipe.utils.words import is_unspaced, split_words, word_spans

if TYPE_CHECKING:
    from bert_recipe.tokenization.tokenizer import Tokenizer

SEGMENTED_SHARE = 0.1


class TokenUnits(NamedTuple):
    """A sentence as tokens.

    first_tokens: of the units, indices in `ids`.
    bounds: [start, stop) of each unit, in words or in characters of the text.
    cuts: where a long sentence may be divided.
    """

    ids: np.ndarray
    first_tokens: list[int]
    bounds: list[tuple[int, int]]
    cuts: list[int]


def word_units(ids_of_words: Sequence[np.ndarray]) -> TokenUnits:
    """The label of a word is on its first token, as in transformers' examples. Words without
    tokens, such as blanks, have none.
    """
    starts = np.cumsum([0, *map(len, ids_of_words)]).tolist()
    places = [place for place, ids in enumerate(ids_of_words) if len(ids)]
    first_tokens = [starts[place] for place in places]
    bounds = [(place, place + 1) for place in places]
    return TokenUnits(np.concatenate(ids_of_words), first_tokens, bounds, first_tokens)


def text_units(text: str, ids: np.ndarray, spans: np.ndarray, label_all_tokens: bool) -> TokenUnits:
    """The units of a text: its tokens if `label_all_tokens`, else its words, whose first token has
    the label.

    ids: of the tokens.
    spans: the characters of each token, which may share some, or have spaces before.
    """
    word_starts = [start for start, _ in word_spans(text)]
    first_tokens: list[int] = []
    bounds: list[tuple[int, int]] = []
    cuts: list[int] = []
    last_word = -1  # the number of the word in which the token before ends
    for index, start, end in visible_tokens(text, spans.tolist()):
        first_word = bisect_right(word_starts, start) - 1  # in which this token begins
        begins_word = first_word > last_word
        last_word = max(last_word, bisect_right(word_starts, end - 1) - 1)
        if begins_word:
            cuts.append(index)
        if begins_word or label_all_tokens or not bounds:
            first_tokens.append(index)
            bounds.append((start, end))
        else:
            unit_start, _ = bounds[-1]
            bounds[-1] = (unit_start, end)
    return TokenUnits(ids, first_tokens, bounds, cuts)


def visible_tokens(text: str, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """The tokens with characters of their own that are no spaces: index, start and end of these.
    Byte-level tokenizers have several tokens of one character.
    """
    last = 0
    for index, (first, stop) in enumerate(spans):
        start = max(first, last)
        covered = text[start:stop]
        if covered.strip():
            start += len(covered) - len(covered.lstrip())
            last = start + len(covered.strip())
            yield index, start, last


def spaced_words(words: Sequence[str]) -> list[str]:
    """The words of a sentence, with a space before all but the first."""
    return [f" {word}" if place else word for place, word in enumerate(words)]


class TaggedDataset(SequenceDataset):
    """Sentences as `[CLS] tokens [SEP]`, divided if longer than `max_seq_length`. `first_tokens`
    [U]: index in `input_ids` of each unit's token, which has the label. `bounds`: those of the
    units, by sentence.

    labels: tags by id, for training.
    label_all_tokens: not only the first token of each word.
    """

    def __init__(
        self,
        sentences: Sequence[Sentence],
        tokenizer: "Tokenizer",
        max_seq_length: int,
        labels: Sequence[str] = (),
        label_all_tokens: bool = False,
    ):
        self.sentences = sentences
        layout = tokenizer.layout(1)
        max_tokens = max_seq_length - layout.num_special
        self.bounds: list[list[tuple[int, int]]] = []
        texts: list[list[np.ndarray]] = []
        first_tokens: list[int] = []
        num_tokens = 0  # of all sequences so far
        for units in units_of(sentences, tokenizer, label_all_tokens):
            self.bounds.append(units.bounds)
            for start, stop in windows(len(units.ids), units.cuts, max_tokens):
                first = bisect_left(units.first_tokens, start)
                last = bisect_left(units.first_tokens, stop)
                labelled_tokens = units.first_tokens[first:last]
                if not labelled_tokens:
                    continue
                offset = num_tokens + layout.num_before(0) - start
                first_tokens += [offset + token for token in labelled_tokens]
                texts.append([units.ids[start:stop]])
                num_tokens += stop - start + layout.num_special
        self.first_tokens = np.array(first_tokens, np.int64)
        # A sentence of control characters alone has no tokens.
        texts = texts or [[np.zeros(0, int)]]
        labels_T = {}
        if labels:
            is_text_T = np.concatenate([layout.is_text(len(tokens)) for (tokens,) in texts])
            labels_T["tags"] = self.token_labels(is_text_T, labels, label_all_tokens)
        super().__init__(tokenizer, texts, labels_T, label_axis="token")

    def token_labels(
        self, is_text_T: np.ndarray, labels: Sequence[str], label_all_tokens: bool
    ) -> np.ndarray:
        """The label ids [T]: those of tags on the first tokens of units. With `label_all_tokens`,
        the further tokens of a word have its label, with I- instead of B-.

        is_text_T: whether a token is of a text, not a special one around it.
        """
        ids = {label: index for index, label in enumerate(labels)}
        unit_tags = list(chain(*self.unit_tags()))
        labels_T = np.full(len(is_text_T), IGNORED_LABEL, np.int64)
        if label_all_tokens:
            inner_tags = [f"I-{tag[2:]}" if tag.startswith("B-") else tag for tag in unit_tags]
            inner_labels_U = np.array([ids.get(tag, IGNORED_LABEL) for tag in inner_tags])
            is_word_U = np.repeat(
                [sentence.text is None for sentence in self.sentences], list(map(len, self.bounds))
            )
            inner_labels_U[~is_word_U] = IGNORED_LABEL  # each visible token of a text is a unit
            # A token belongs to the last unit that begins at it or before.
            unit_T = np.searchsorted(self.first_tokens, np.arange(len(labels_T)), "right") - 1
            labels_T[is_text_T] = inner_labels_U[unit_T[is_text_T]]
        labels_T[self.first_tokens] = [ids[tag] for tag in unit_tags]
        return labels_T

    def unit_tags(self) -> list[list[str]]:
        """The tags of the units of each sentence, whose tags must be known."""
        if has_classes(chain(*(sentence.tags for sentence in self.sentences))):
            return [
                [sentence.tags[word] for word, _ in bounds]
                for sentence, bounds in zip(self.sentences, self.bounds, strict=True)
            ]
        return list(map(tags_of, self.entities(), self.bounds))

    def entities(self) -> list[set[Entity]]:
        """Those of each sentence. Words without tokens, such as characters of control, have no tag
        to learn or to predict, so that no entity begins or ends with one; those of such words alone
        stay.
        """
        return [
            set(sentence.spans)
            if sentence.text is not None
            else {within_units(entity, bounds) for entity in sentence.entities}
            for sentence, bounds in zip(self.sentences, self.bounds, strict=True)
        ]


def within_units(entity: Entity, bounds: Sequence[tuple[int, int]]) -> Entity:
    """An entity of words without those at its edges that are no units, if any word is one."""
    kind, start, stop = entity
    units = [word for word, _ in bounds if start <= word < stop]
    return (kind, units[0], units[-1] + 1) if units else entity


def are_segmented(sentences: Sequence[Sentence]) -> bool:
    """Whether the words are of a script without spaces, and more than its characters, so that a
    bare text does not show where they begin.
    """
    words = [word for sentence in sentences for word in sentence.words]
    num_segments = sum(is_unspaced(word) and len(split_words(word)) > 1 for word in words)
    return num_segments > SEGMENTED_SHARE * len(words)


def units_of(
    sentences: Sequence[Sentence], tokenizer: "Tokenizer", label_all_tokens: bool
) -> Iterator[TokenUnits]:
    words = [word for sentence in sentences for word in spaced_words(sentence.words)]
    texts = [sentence.text for sentence in sentences if sentence.text is not None]
    ids_of_words, _ = encode(tokenizer, words, "words")
    remaining_words = iter(ids_of_words)
    remaining_texts = zip(*encode(tokenizer, texts, "texts"), strict=True)
    for sentence in sentences:
        if sentence.text is None:
            yield word_units([next(remaining_words) for _ in sentence.words])
        else:
            ids, spans = next(remaining_texts)
            yield text_units(sentence.text, ids, spans, label_all_tokens)


def windows(length: int, cuts: Sequence[int], room: int) -> Iterator[tuple[int, int]]:
    """Divides `length` tokens into parts [start, stop) of at most `room` tokens, at the last of
    `cuts` (ascending) that leaves a part that short, or after `room` tokens if there is none.
    """
    start = 0
    while length - start > room:
        stop = start + room
        last_cut = bisect_right(cuts, stop) - 1
        if last_cut >= 0 and cuts[last_cut] > start:
            stop = cuts[last_cut]
        yield start, stop
        start = stop
    yield start, length
