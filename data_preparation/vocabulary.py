"""Trains a WordPiece vocabulary on formatted text with the `tokenizers` package.

The text is normalized and split into words by the rules of `tokenizer.py`, so that the vocabulary fits the tokenizer
exactly. The trainer numbers characters in the order of a hash table, which differs from run to run and decides between
pieces of equal count; so the alphabet is counted here and passed in a fixed order.
"""

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from data_preparation.options import VocabularyOptions
from tokenizer import CLS, MASK, MAX_CHARACTERS_PER_WORD, PAD, SEP, UNK, CharacterMap, normalize_character
from utils.errors import UserError

MIN_FREQUENCY = 2  # of a pair of pieces that is merged


def train_vocabulary(
    paths: Sequence[Path], options: VocabularyOptions, progress: Callable[[int], Any] = lambda size: None
) -> list[str]:
    """The tokens in the order of their ids: [PAD], the unused ones, [UNK] [CLS] [SEP] [MASK], the reserved ones, the
    alphabet, then the pieces in the order in which they were merged. Fewer than `options.size` if the text is short."""
    reserved = [reserved_token(word, options.do_lower_case) for word in options.reserved]
    fixed = [PAD, *(f"[unused{number}]" for number in range(options.unused)), UNK, CLS, SEP, MASK, *reserved]
    characters = Counter()
    for text in normalized_text(paths, options, progress):
        characters.update(text)
    # Ties go to the lower code point; a Counter's own order is that of the first occurrence.
    by_count = sorted(characters, key=lambda character: (-characters[character], character))
    alphabet = sorted([character for character in by_count if not character.isspace()][: options.alphabet])
    if not alphabet:
        raise UserError(
            f"{', '.join(map(str, paths[:3]))}: no words in the text to train a vocabulary on: check the text"
        )
    # Punctuation and Chinese characters are separate words.
    inside_words = [f"##{c}" for c in alphabet if " " not in normalize_character(c, do_lower_case=False)]
    fixed = list(dict.fromkeys([*fixed, *alphabet, *inside_words]))
    if len(fixed) >= options.size:
        raise UserError(
            f"{len(fixed)} special, reserved and single-character tokens leave no room in a vocabulary of "
            f"{options.size}: raise --vocab-size or lower --alphabet"
        )
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(
        vocab_size=options.size,
        special_tokens=fixed,
        limit_alphabet=len(alphabet),
        min_frequency=MIN_FREQUENCY,
        show_progress=False,
    )
    known = set(alphabet)

    def trainable(text: str) -> str:
        return " ".join(
            word for word in text.split() if len(word) <= MAX_CHARACTERS_PER_WORD and known.issuperset(word)
        )

    tokenizer.train_from_iterator(map(trainable, normalized_text(paths, options, progress)), trainer)
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.__getitem__)


def normalized_text(paths: Sequence[Path], options: VocabularyOptions, progress: Callable[[int], Any]) -> Iterator[str]:
    """The beginning of each file, a thousand lines at a time, with words and punctuation separated by spaces."""
    table = CharacterMap(options.do_lower_case)
    left = options.sample_mb * 1_000_000
    for index, path in enumerate(paths):
        share = left // (len(paths) - index)  # later files get what short files leave over
        with path.open(encoding="utf-8") as file:
            while share > 0 and (lines := list(islice(file, 1000))):
                text = "".join(lines)
                size = len(text.encode())
                share -= size
                left -= size
                progress(size)
                yield text.translate(table)


def reserved_token(word: str, do_lower_case: bool) -> str:
    """`word` as the tokenizer normalizes it."""
    parts = unicodedata.normalize("NFC", word).translate(CharacterMap(do_lower_case)).split()
    if len(parts) != 1 or len(parts[0]) > MAX_CHARACTERS_PER_WORD:
        raise UserError(
            f"reserved word {word!r} can never be one token, because the tokenizer splits it into {parts}: "
            "reserve words without spaces and punctuation"
        )
    return parts[0]
