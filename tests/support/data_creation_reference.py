"""Data creation as Google's BERT and NVIDIA's recipe publish it, written out: slow, and short
enough to check by eye.

Tokens are strings, made by tokenizer.py, one sample is made after
another, and every random decision about them is a method of `Draws`. The tests hold
create_pretraining_data.py to it.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bert_recipe.data_preparation.options import SampleOptions
from bert_recipe.tokenization.tokenizer import BertTokenizer

Document = list[list[str]]  # sentences of tokens


def read_documents(path: Path, tokenizer: BertTokenizer) -> list[Document]:
    documents: list[Document] = [[]]
    with path.open(encoding="utf-8") as file:
        for line in file:
            if not line.strip():
                documents.append([])
            elif tokens := tokenizer.tokenize(line):
                documents[-1].append(tokens)
    return [document for document in documents if document]


class Draws:
    """The random decisions of data creation."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)

    def target_length(self, longest: int, short_seq_prob: float) -> int:
        return self.rng.randint(2, longest) if self.rng.random() < short_seq_prob else longest

    def sentences_of_a(self, sentences: int) -> int:
        return self.rng.randint(1, sentences - 1)

    def next_is_random(self) -> bool:
        return self.rng.random() < 0.5

    def other_document(self, documents: int, own: int) -> int:
        other = self.rng.randrange(documents - 1)
        return other + (other >= own)

    def first_sentence(self, sentences: int) -> int:
        return self.rng.randrange(sentences)

    def first_length(self, tokens: int, longest: int) -> int:
        """Without next-sentence prediction, of as few samples as hold a document."""
        return longest - self.rng.randint(0, -tokens % longest)

    def cut_front(self) -> bool:
        return self.rng.random() < 0.5


class Pair(NamedTuple):
    tokens_a: list[str]
    tokens_b: list[str]
    is_random_next: bool


def create_pairs(
    documents: list[Document], index: int, options: SampleOptions, draws: Draws
) -> Iterator[Pair]:
    """The pairs of segments of one pass over document `index`, not yet truncated."""
    document = documents[index]
    target = draws.target_length(
        options.sequence_length - options.special_tokens, options.short_seq_prob
    )
    if not options.next_sentence_prediction:
        yield from cut(joined(document), options, target, draws)
        return
    chunk: Document = []
    position = 0
    while position < len(document):
        chunk.append(document[position])
        position += 1
        if position < len(document) and sum(map(len, chunk)) < target:
            continue
        if len(documents) == 1 and len(chunk) == 1:
            pass  # neither a next sentence nor another document to draw one from
        else:
            a_end = draws.sentences_of_a(len(chunk)) if len(chunk) > 1 else 1
            tokens_a = joined(chunk[:a_end])
            if len(documents) > 1 and (len(chunk) == 1 or draws.next_is_random()):
                other = documents[draws.other_document(len(documents), index)]
                tokens_b: list[str] = []
                for sentence in other[draws.first_sentence(len(other)) :]:
                    tokens_b += sentence
                    if len(tokens_b) >= target - len(tokens_a):
                        break
                position -= len(chunk) - a_end  # the sentences that were not used are put back
                yield Pair(tokens_a, tokens_b, True)
            else:
                yield Pair(tokens_a, joined(chunk[a_end:]), False)
        chunk = []


def cut(tokens: list[str], options: SampleOptions, target: int, draws: Draws) -> Iterator[Pair]:
    """A document that is cut where a sample is full. (Not Google's, which has pairs only.)"""
    longest = options.sequence_length - options.special_tokens
    start = 0
    stop = target if target < longest else draws.first_length(len(tokens), longest)
    while start < len(tokens):
        yield Pair(tokens[start:stop], [], False)
        start, stop = stop, stop + longest


def joined(sentences: Document) -> list[str]:
    return [token for sentence in sentences for token in sentence]


def truncate_pair(tokens_a: list[str], tokens_b: list[str], longest: int, draws: Draws) -> None:
    """Takes tokens off the longer of the two, at a tie off B, from its front or back, until both
    fit.
    """
    while len(tokens_a) + len(tokens_b) > longest:
        longer = tokens_a if len(tokens_a) > len(tokens_b) else tokens_b
        longer.pop(0 if draws.cut_front() else -1)


def create_samples(documents: list[Document], options: SampleOptions) -> list[Pair]:
    """The truncated pairs of all passes, not shuffled. Masks are those that training draws, see
    test_dynamic_masking.py."""
    draws = Draws(options.random_seed)
    samples = []
    for _ in range(options.dupe_factor):
        for index in range(len(documents)):
            for pair in create_pairs(documents, index, options, draws):
                longest = options.sequence_length - options.special_tokens
                truncate_pair(pair.tokens_a, pair.tokens_b, longest, draws)
                samples.append(pair)
    return samples
