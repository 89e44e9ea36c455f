"""Baselines of tags: the most frequent class of words, and the tags that words had in training."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bert_recipe.tasks.baselines import ROWS, Baselines, drawn_rows
from bert_recipe.tasks.ner.token_labels import TaggedDataset

TagScores = Callable[[TaggedDataset, list[list[str]]], Mapping[str, Any]]
ONE_TAG = "words seen with one tag in training"
FREQUENT_TAG = "most frequent tag of each word"


class WordTags(NamedTuple):
    """The counts of the tags of each word in a training file, or in `num_drawn` of its `num_rows`
    sentences.
    """

    counts: Mapping[str, Counter[str]]
    num_drawn: int
    num_rows: int

    @classmethod
    def draw(cls, dataset: TaggedDataset) -> "WordTags":
        rows = drawn_rows(len(dataset.sentences))
        words, tags = unit_words(dataset), dataset.unit_tags()
        counts: dict[str, Counter[str]] = {}
        for row in rows:
            for word, tag in zip(words[row], tags[row], strict=True):
                counts.setdefault(word, Counter())[tag] += 1
        return cls(counts, len(rows), len(words))


def unit_words(dataset: TaggedDataset) -> list[list[str]]:
    """What the units of each sentence stand for."""
    return [
        [sentence.shown_entity(("", start, stop)) for start, stop in bounds]
        for sentence, bounds in zip(dataset.sentences, dataset.bounds, strict=True)
    ]


def tag_baselines(
    train: WordTags, dataset: TaggedDataset, tag_scores: TagScores, has_classes: bool
) -> Baselines:
    """The scores of `dataset`. Entities are those of words that had one tag only in training, as in
    CoNLL-2003's baseline; of classes, each word has its most frequent one.

    tag_scores: of predicted tags of the units of each sentence.
    """
    words = unit_words(dataset)
    default = "O"
    method = ONE_TAG
    tag_of = {word: next(iter(tags)) for word, tags in train.counts.items() if len(tags) == 1}
    if has_classes:
        totals = sum(train.counts.values(), Counter())
        default = totals.most_common(1)[0][0]
        method = FREQUENT_TAG
        tag_of = {word: tags.most_common(1)[0][0] for word, tags in train.counts.items()}

    def scores_of(known: Mapping[str, str]) -> dict[str, float]:
        tags = [[known.get(word, default) for word in sentence] for sentence in words]
        scores = tag_scores(dataset, tags)
        return {name: value for name, value in scores.items() if isinstance(value, float)}

    scores = {method: scores_of(tag_of)}
    if train.num_drawn < train.num_rows:
        scores[method][ROWS] = train.num_drawn
    if has_classes:
        chance = "most frequent class"
        return Baselines({chance: scores_of({})} | scores, chance, sum(map(len, words)))
    num_entities = sum(len(sentence.entities) for sentence in dataset.sentences)
    return Baselines(scores, None, max(1, num_entities))
