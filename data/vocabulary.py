"""A WordPiece vocabulary of one's own, trained on formatted text with the `tokenizers` package.

The text is normalized and cut into words by `tokenizer.py`'s own rules, so that the vocabulary fits the tokenizer to
the character. The trainer numbers characters in the order in which a hash table hands them out, which differs from run
to run and decides between pieces of equal count; so the alphabet is counted here and handed over in a fixed order.
"""

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tokenizer import CLS, MASK, MAX_CHARACTERS_PER_WORD, PAD, SEP, UNK, CharacterMap, normalize_character
from utils.errors import UserError

MIN_FREQUENCY = 2  # a pair of pieces that occurs once teaches nothing


class VocabularyOptions(NamedTuple):
    size: int = 30_522
    do_lower_case: bool = True
    alphabet: int = 1_000  # the most frequent characters; words with another one become [UNK]
    unused: int = 99  # [unused0]..., for words that fine-tuning brings; 99 put [UNK] at 100, as in Google's
    reserved: tuple[str, ...] = ()  # words that must be in the vocabulary whole
    sample_mb: int = 1_000  # MB of text that are read, spread evenly over the files


def train_vocabulary(
    paths: Sequence[Path], options: VocabularyOptions, progress: Callable[[int], Any] | None = None
) -> list[str]:
    """The tokens, in the order of their ids: [PAD], the unused, [UNK] [CLS] [SEP] [MASK], the reserved, the alphabet,
    then the pieces from the most to the least useful. May be fewer than asked for where the text is short."""
    reserved = [reserved_token(word, options.do_lower_case) for word in options.reserved]
    fixed = [PAD, *(f"[unused{number}]" for number in range(options.unused)), UNK, CLS, SEP, MASK, *reserved]
    characters = Counter()
    for text in normalized_text(paths, options, progress):
        characters.update(text)
    alphabet = sorted(character for character, _ in most_frequent(characters, options.alphabet))
    if not alphabet:
        raise UserError(f"{', '.join(map(str, paths[:3]))}: no words to train a vocabulary on: check the text")
    inside_words = [character for character in alphabet if stands_inside_words(character)]
    fixed = list(dict.fromkeys([*fixed, *alphabet, *(f"##{character}" for character in inside_words)]))
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
    tokenizer.train_from_iterator(
        (
            " ".join(word for word in text.split() if len(word) <= MAX_CHARACTERS_PER_WORD and known.issuperset(word))
            for text in normalized_text(paths, options, progress)
        ),
        trainer,
    )
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.__getitem__)


def most_frequent(characters: Counter, count: int) -> list[tuple[str, int]]:
    """Ties go to the lower code point: a Counter's own order is that of first sight."""
    counted = ((character, number) for character, number in characters.items() if not character.isspace())
    return sorted(counted, key=lambda item: (-item[1], item[0]))[:count]


def stands_inside_words(character: str) -> bool:
    """Punctuation and Chinese characters are words of their own."""
    return " " not in normalize_character(character, do_lower_case=False)


def normalized_text(
    paths: Sequence[Path], options: VocabularyOptions, progress: Callable[[int], Any] | None
) -> Iterator[str]:
    """The beginning of each file, words and punctuation apart by spaces, a few thousand lines at a time."""
    table = CharacterMap(options.do_lower_case)
    left = options.sample_mb * 1_000_000
    for index, path in enumerate(paths):
        share = left // (len(paths) - index)  # what short files leave goes to those that follow
        with path.open(encoding="utf-8") as file:
            while share > 0 and (lines := list(islice(file, 1000))):
                text = "".join(lines)
                size = len(text.encode())
                share -= size
                left -= size
                if progress:
                    progress(size)
                yield text.translate(table)


def reserved_token(word: str, do_lower_case: bool) -> str:
    """`word` as the tokenizer will meet it."""
    parts = unicodedata.normalize("NFC", word).translate(CharacterMap(do_lower_case)).split()
    if len(parts) != 1 or len(parts[0]) > MAX_CHARACTERS_PER_WORD:
        raise UserError(
            f"reserved word {word!r} can never be one token: the tokenizer makes {parts} of it; "
            "reserve words without spaces and punctuation"
        )
    return parts[0]
