"""Trains tokenizers on formatted text with the `tokenizers` package.

For WordPiece, the text is normalized and split into words by the rules of BertTokenizer, so that
the vocabulary fits it exactly. The trainer numbers characters in the order of a hash table, which
differs from run to run and decides between pieces of equal count; so the alphabet is counted here
and passed in a fixed order.
"""

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from bert_recipe.data_preparation.options import (
    ALPHABET_COVERAGE,
    MIN_ALPHABET,
    SAMPLE_MB,
    VocabularyOptions,
)
from bert_recipe.tokenization.files import (
    CLS,
    MASK,
    MAX_CHARACTERS_PER_WORD,
    PAD,
    SEP,
    TOKENIZER_JSON,
    UNK,
    VOCAB_FILE,
    Casing,
)
from bert_recipe.tokenization.tokenizer import (
    BertWords,
)
from bert_recipe.utils.errors import UserError, one_line
from bert_recipe.utils.progress import print_line
from bert_recipe.utils.words import has_accent, is_accent, spaced_spans

CASED = Casing(do_lower_case=False, strip_accents=False)
MIN_FREQUENCY = 2  # of a pair of pieces that is merged
MARKED_SHARE = 0.005  # of marks among letters
PART_SIZE = 100_000  # characters to read at once, or a line
NO_WORDS = "{}: no words in the text to train a vocabulary on: check the text"


def train_tokenizer(
    paths: Sequence[Path],
    options: VocabularyOptions,
    progress: Callable[[int], Any] = lambda size: None,
) -> tuple[str, str]:
    """Name and content of the file of a tokenizer of kind `options.tokenizer`. Prints what is lost
    if accents are stripped from text in which they matter.
    """
    if options.casing.strip_accents:
        lost = stripped_marks("".join(read_beginnings(paths, megabytes=1)))
        if lost is not None:
            print_line(f"warning: vocabulary: {lost}")
    if options.tokenizer == "wordpiece":
        return VOCAB_FILE, "".join(
            f"{token}\n" for token in train_vocabulary(paths, options, progress)
        )
    casing = options.casing
    steps: list[normalizers.Normalizer] = [normalizers.NFD()] if casing.strip_accents else []
    steps += [normalizers.Lowercase()] if casing.do_lower_case else []
    steps += [normalizers.StripAccents()] if casing.strip_accents else []
    special = [PAD, *(f"[unused{number}]" for number in range(options.unused)), UNK, CLS, SEP]
    settings: dict[str, Any] = {
        "vocab_size": options.size,
        "special_tokens": [*special, AddedToken(MASK, lstrip=True, special=True)],
        "show_progress": False,
    }
    if options.tokenizer == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.NFC()])
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer: trainers.Trainer = trainers.BpeTrainer(
            min_frequency=MIN_FREQUENCY, initial_alphabet=alphabet, **settings
        )
    else:
        tokenizer = Tokenizer(models.Unigram())
        alphabet = []
        tokenizer.normalizer = normalizers.Sequence(
            [*steps, normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " ")]
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(unk_token=UNK, **settings)
    if (fixed := len(special) + 1 + len(alphabet)) >= options.size:
        raise UserError(
            f"{fixed} special tokens and bytes leave no room in a vocabulary of {options.size}: "
            "raise --vocab-size"
        )
    lines = read_beginnings(paths, progress)
    try:
        tokenizer.train_from_iterator((" ".join(text.split()) for text in lines), trainer)
    except Exception as error:  # the library's errors have no class of their own
        raise UserError(
            f"{paths[0]}: no tokenizer can be trained on this text ({one_line(str(error))})"
        ) from error
    if tokenizer.get_vocab_size() <= fixed:
        raise UserError(NO_WORDS.format(", ".join(map(str, paths[:3]))))
    ids = [(token, tokenizer.token_to_id(token)) for token in (CLS, SEP)]
    single, pair = f"{CLS} $A {SEP}", f"{CLS} $A {SEP} $B:1 {SEP}:1"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=ids
    )
    return TOKENIZER_JSON, tokenizer.to_str(pretty=True)


def stripped_marks(text: str) -> str | None:
    """What stripping accents does to `text`; None if it has few. Vowels of Hindi, Thai or Arabic
    are such marks, too.
    """
    counts = Counter(unicodedata.normalize("NFD", text))
    marks = sum(count for character, count in counts.items() if is_accent(character))
    letters = sum(count for character, count in counts.items() if character.isalpha())
    if marks <= MARKED_SHARE * letters:
        return None
    words = (text[start:stop] for start, stop in spaced_spans(text))
    word = Counter(filter(has_accent, words)).most_common(1)[0][0]
    word = word[:30]  # without spaces, a sentence
    decomposed = unicodedata.normalize("NFD", word)
    stripped = "".join(character for character in decomposed if not is_accent(character))
    return (
        f"{marks / letters:.1%} of the letters lose a mark, as {word} becomes {stripped}: give "
        f"--no-do-lower-case, or --no-strip-accents to lower-case only, if words differ by them"
    )


def train_vocabulary(
    paths: Sequence[Path],
    options: VocabularyOptions,
    progress: Callable[[int], Any] = lambda size: None,
) -> list[str]:
    """The tokens in the order of their ids: [PAD], the unused ones, [UNK] [CLS] [SEP] [MASK], the
    alphabet, then the pieces in the order in which they were merged. Fewer than
    `options.size` if the text is short.
    """
    fixed = [
        PAD,
        *(f"[unused{number}]" for number in range(options.unused)),
        UNK,
        CLS,
        SEP,
        MASK,
    ]
    characters: Counter[str] = Counter()
    for text in normalized_text(paths, options, progress):
        characters.update(text)
    # Ties go to the lower code point; a Counter's own order is that of the first occurrence.
    by_count = sorted(characters, key=lambda character: (-characters[character], character))
    by_count = [character for character in by_count if not character.isspace()]
    limit = options.alphabet or default_alphabet([characters[character] for character in by_count])
    alphabet = sorted(by_count[:limit])
    if not alphabet:
        raise UserError(NO_WORDS.format(", ".join(map(str, paths[:3]))))
    # Punctuation and Chinese characters are separate words.
    words = BertWords(CASED)
    inside_words = [f"##{c}" for c in alphabet if len(words(f"a{c}")) == 1]
    fixed = list(dict.fromkeys([*fixed, *alphabet, *inside_words]))
    if len(fixed) >= options.size:
        raise UserError(
            f"{len(fixed)} special and single-character tokens leave no room in a "
            f"vocabulary of {options.size}: raise --vocab-size or lower --alphabet"
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
            word
            for word in text.split()
            if len(word) <= MAX_CHARACTERS_PER_WORD and known.issuperset(word)
        )

    tokenizer.train_from_iterator(
        map(trainable, normalized_text(paths, options, progress)), trainer
    )
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.__getitem__)


def default_alphabet(counts: Sequence[int]) -> int:
    """The size of an alphabet with enough of the text. counts: of the characters, highest first."""
    needed = ALPHABET_COVERAGE * sum(counts)
    covering = sum(covered < needed for covered in accumulate(counts)) + 1
    return max(MIN_ALPHABET, covering)


def normalized_text(
    paths: Sequence[Path], options: VocabularyOptions, progress: Callable[[int], Any]
) -> Iterator[str]:
    """`read_beginnings`, with words and punctuation separated by spaces."""
    words = BertWords(options.casing)
    return (" ".join(words(text)) for text in read_beginnings(paths, progress))


def read_beginnings(
    paths: Sequence[Path],
    progress: Callable[[int], Any] = lambda size: None,
    megabytes: int = SAMPLE_MB,
) -> Iterator[str]:
    """The beginning of each file, some lines at a time; `megabytes` in all."""
    left = megabytes * 1_000_000
    for index, path in enumerate(paths):
        share = left // (len(paths) - index)  # later files get what short files leave over
        try:
            with path.open(encoding="utf-8-sig") as file:
                while share > 0 and (lines := file.readlines(min(share, PART_SIZE))):
                    part = "".join(lines).encode()[:share]  # a line may be longer
                    size = len(part)
                    share -= size
                    left -= size
                    progress(size)
                    yield part.decode(errors="ignore")  # of a character that is cut
        except UnicodeDecodeError as error:
            raise UserError(f"text {path} is not UTF-8: convert it with iconv") from error
