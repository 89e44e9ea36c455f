"""BERT's tokenizer: clean, split at white space and punctuation, then WordPiece (Devlin et al.
2019); and `load_tokenizer`, which also loads any `tokenizer.json` of Hugging Face, with the same
interface.

`basic_tokenize` and `wordpiece` are the readable reference. `encode_lines` and `encode_text` return
the same ids and offsets faster: BERT's tokens never cross white space, so each distinct word is
tokenized once and cached.

Special tokens in text are not recognized: "[SEP]" becomes "[", "sep", "]" as in Google's code, so
that input cannot forge a separator. The caller adds special tokens by id; the post-processor,
truncation and padding of a `tokenizer.json` are not applied.
"""

import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tokenizer_formats.files import (
    CLS,
    MASK,
    MAX_CHARACTERS_PER_WORD,
    PAD,
    SEP,
    SPECIAL_TOKENS,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    UNK,
    VOCAB_FILE,
    Casing,
    TokenizerFile,
)
from tokenizer_formats.hugging_face import HuggingFaceTokenizer
from utils.errors import UserError

MAX_CACHED_WORDS = 500_000  # about 100 MB
MAX_CACHED_SPANS = 100_000  # words with offsets; about 50 MB

# str.split() splits at these control characters, but BERT removes them. It also removes NUL, where
# str.split() does not split.
CONTROLS_THAT_SPLIT = str.maketrans(dict.fromkeys("\x0b\x0c\x1c\x1d\x1e\x1f\x85", "\0"))

# Unified ideographs and their extensions A to E, compatibility ideographs and their supplement.
CJK_BLOCKS = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
)
CJK_BLOCKS += ((0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F))


def is_whitespace(character: str) -> bool:
    return character in " \t\n\r" or unicodedata.category(character) in ("Zs", "Zl", "Zp")


def is_removed(character: str) -> bool:
    """Whether BERT removes it: control (including NUL), format, private-use and replacement
    characters.
    """
    return character == "\ufffd" or unicodedata.category(character) in ("Cc", "Cf", "Co", "Cs")


def is_punctuation(character: str) -> bool:
    """Unicode punctuation and all ASCII symbols (including "$", "+", "^", "`")."""
    if "!" <= character <= "~" and not character.isalnum():
        return True
    return unicodedata.category(character).startswith("P")


def is_cjk(character: str) -> bool:
    """Chinese characters, each of which is a separate word; not kana or hangul."""
    return any(first <= ord(character) <= last for first, last in CJK_BLOCKS)


def is_accent(character: str) -> bool:
    return unicodedata.category(character) == "Mn"


def has_accent(text: str) -> bool:
    """Whether stripping accents changes `text`."""
    return not text.isascii() and any(map(is_accent, unicodedata.normalize("NFD", text)))


def normalize_character(character: str, casing: Casing) -> str:
    """Normalizes one character: removes it, keeps it, strips accents, lower-cases it, replaces it
    by a space, or surrounds it by spaces (punctuation and Chinese characters).
    """
    if is_whitespace(character):
        return " "
    if is_removed(character):
        return ""
    isolated = is_cjk(character)
    if casing.strip_accents:
        decomposed = unicodedata.normalize("NFD", character)
        character = "".join(part for part in decomposed if not is_accent(part))
    if casing.do_lower_case:
        character = character.lower()
    return "".join(f" {part} " if isolated or is_punctuation(part) else part for part in character)


class Cache(dict):
    """key -> function(key), filled on demand."""

    def __init__(self, function: Callable[[Any], Any]):
        super().__init__()
        self.function = function

    def __missing__(self, key: Any) -> Any:
        if len(self) >= MAX_CACHED_WORDS:
            self.clear()
        value = self[key] = self.function(key)
        return value


def character_map(casing: Casing) -> Cache:
    """Table for `str.translate`: code point -> `normalize_character`."""
    return Cache(lambda code_point: normalize_character(chr(code_point), casing))


class BertTokenizer:
    """BERT's WordPiece tokenizer.

    `vocab_file` has one token per line; the line number is the id. Or it is the `tokenizer.json` of
    such a tokenizer. A TokenizerFile is not read again. `do_lower_case` is for uncased
    vocabularies. `strip_accents` removes accents; if None, with lower-casing only.
    Offsets are [start, end) in characters of the original text. They include accents that were
    stripped from a token's last letter.
    """

    special_tokens = SPECIAL_TOKENS
    # [CLS] first [SEP] second [SEP]; token_type_ids of the second text
    num_pair_separators, second_type_id = 1, 1

    def __init__(
        self,
        vocab_file: str | Path | TokenizerFile,
        do_lower_case: bool = True,
        strip_accents: bool | None = None,
    ):
        file = vocab_file if isinstance(vocab_file, TokenizerFile) else TokenizerFile(vocab_file)
        self.vocab_file, self.is_json = file.path, file.is_json
        self.do_lower_case = do_lower_case
        self.strip_accents = do_lower_case if strip_accents is None else strip_accents
        casing = Casing(self.do_lower_case, self.strip_accents)
        self.tokens, self.vocab_sha256 = file.tokens, file.tokens_sha256
        self.vocab = {token: token_id for token_id, token in enumerate(self.tokens)}
        (
            self.pad_token_id,
            self.unk_token_id,
            self.cls_token_id,
            self.sep_token_id,
            self.mask_token_id,
        ) = (self.vocab[token] for token in (PAD, UNK, CLS, SEP, MASK))
        self._longest_token = max(map(len, self.vocab))
        self._continuations = {
            token[2:]: token_id for token, token_id in self.vocab.items() if token.startswith("##")
        }
        self._characters = character_map(casing)
        self._words = Cache(self._encode_word)
        # "house", "house," and "(house" are three words that share one part.
        self._parts = Cache(lambda part: tuple(token_id for token_id, _, _ in self.wordpiece(part)))
        self._encode_span = lru_cache(MAX_CACHED_SPANS)(self.encode_with_offsets)

    @property
    def vocab_size(self) -> int:
        return len(self.vocab)

    def casing_settings(self) -> dict[str, bool]:
        """The casing as files store it, see `Casing.of`."""
        return Casing(self.do_lower_case, self.strip_accents).settings()

    def word_edges(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (left, right), each [vocab_size] int8: token b continues token a's word if
        left[b] == right[a]. Here that is so for all tokens b that begin with "##".
        """
        return np.array([token.startswith("##") for token in self.vocab], np.int8), np.ones(
            self.vocab_size, np.int8
        )

    # Reference implementation.

    def basic_tokenize(self, text: str) -> Iterator[tuple[str, list[tuple[int, int]]]]:
        """Yields words and punctuation marks, each with the [start, end) in `text` of each of its
        characters. What is beyond MAX_CHARACTERS_PER_WORD + 1 characters is left out, so that a
        text without spaces needs no memory.
        """
        word, spans = "", []
        for position, character in enumerate(text):
            normalized = self._characters[ord(character)]
            if normalized == "" and spans and is_accent(character):
                spans[-1] = (spans[-1][0], position + 1)
            for part in normalized:
                if part != " " and len(word) > MAX_CHARACTERS_PER_WORD:  # [UNK], of any length
                    spans[-1] = (spans[-1][0], position + 1)
                elif part != " ":
                    word += part
                    spans.append((position, position + 1))
                elif word:
                    yield word, spans
                    word, spans = "", []
        if word:
            yield word, spans

    def wordpiece(self, word: str) -> list[tuple[int, int, int]]:
        """Returns (id, start, end) of the pieces of `word` by greedy longest-match-first; pieces
        after the first start with "##". Returns one [UNK] if no piece matches or the word is too
        long.
        """
        unknown = [(self.unk_token_id, 0, len(word))]
        if len(word) > MAX_CHARACTERS_PER_WORD:
            return unknown
        pieces, start, tokens = [], 0, self.vocab
        while start < len(word):
            for end in range(min(len(word), start + self._longest_token), start, -1):
                token_id = tokens.get(word[start:end])
                if token_id is not None:
                    break
            else:
                return unknown
            pieces.append((token_id, start, end))
            start, tokens = end, self._continuations
        return pieces

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids without special tokens, and the [start, end) of each token in `text`."""
        ids, offsets = [], []
        for word, spans in self.basic_tokenize(text):
            for token_id, start, end in self.wordpiece(word):
                ids.append(token_id)
                offsets.append((spans[start][0], spans[end - 1][1]))
        return ids, offsets

    def encode(self, text: str) -> list[int]:
        """Ids without special tokens."""
        return self.encode_with_offsets(text)[0]

    def tokenize(self, text: str) -> list[str]:
        return [self.tokens[token_id] for token_id in self.encode(text)]

    def words(self, text: str) -> list[str]:
        """The words and punctuation marks of `text`, normalized."""
        return text.translate(self._characters).split()

    def texts(self) -> list[str]:
        """The text that each token stands for, with a space before it if it begins a word."""
        return [token[2:] if token.startswith("##") else f" {token}" for token in self.vocab]

    def text_of(self, token_id: int) -> str:
        """How to show a token to people: here, as it is in the vocabulary."""
        return self.tokens[token_id]

    def join(self, tokens: Iterable[str]) -> str:
        """The text of tokens from `text_of`."""
        return "".join(
            token[2:] if token.startswith("##") else f" {token}" for token in tokens
        ).strip()

    # Fast path.

    def encode_lines(self, text: bytes) -> tuple[np.ndarray, np.ndarray]:
        """Encodes each line of UTF-8 `text` without special tokens. Line i has the ids
        ids[offsets[i]:offsets[i + 1]]; the last line needs no newline.

        Returns ids [T] int32 and offsets [L + 1] int64. Raises UnicodeDecodeError.
        """
        words = text.decode("utf-8").replace("\n", " \n ").split(" ")
        ids = np.fromiter(chain.from_iterable(map(self._words.__getitem__, words)), np.int32)
        line_ends = np.flatnonzero(ids < 0)
        offsets = np.concatenate(
            [[0], line_ends - np.arange(len(line_ends)), [len(ids) - len(line_ends)]]
        )
        return ids[ids >= 0], offsets

    def _encode_word(self, word: str) -> tuple[int, ...]:
        """Ids of what stands between two spaces; -1 for a newline."""
        if word == "\n":
            return (-1,)
        return tuple(
            chain.from_iterable(
                map(self._parts.__getitem__, word.translate(self._characters).split())
            )
        )

    def encode_text(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids [T] without special tokens, and the [start, end) of each token in `text`, [T, 2];
        both int32.
        """
        ids, bounds, end = [], [], 0
        text = text if text.isprintable() else text.translate(CONTROLS_THAT_SPLIT)
        for word in text.split():
            start = text.index(word, end)
            end = start + len(word)
            word_ids, spans = self._encode_span(word)
            ids += word_ids
            for first, stop in spans:
                bounds += (start + first, start + stop)
        return np.array(ids, np.int32), np.array(bounds, np.int32).reshape(-1, 2)


Tokenizer = BertTokenizer | HuggingFaceTokenizer


def load_tokenizer(
    vocab_file: str | Path | TokenizerFile,
    do_lower_case: bool | None = None,
    strip_accents: bool | None = None,
) -> Tokenizer:
    """The tokenizer in `vocab_file`: a vocabulary with one token per line, or a `tokenizer.json`. A
    TokenizerFile is not read again.

    do_lower_case, strip_accents: of a vocabulary; see `list_casing` for the defaults. A
    `tokenizer.json` says them itself. Raises UserError if it says another `do_lower_case`, and for
    bad files.
    """
    file = vocab_file if isinstance(vocab_file, TokenizerFile) else TokenizerFile(vocab_file)
    if not file.is_json:
        return BertTokenizer(file, *list_casing(file, do_lower_case, strip_accents))
    casing = file.bert_casing
    if casing is not None and casing.is_usual:
        tokenizer = BertTokenizer(file, *casing)
    else:  # shards and runs know the others by the digest of the whole file
        tokenizer = HuggingFaceTokenizer(file)
    if do_lower_case not in (None, tokenizer.do_lower_case):
        flag = "--do-lower-case" if do_lower_case else "--no-do-lower-case"
        raise UserError(
            f"{flag} contradicts {file.path}, which says itself whether it lower-cases: leave "
            f"{flag} out"
        )
    return tokenizer


def list_casing(
    file: TokenizerFile, do_lower_case: bool | None = None, strip_accents: bool | None = None
) -> Casing:
    """The casing of a vocabulary with one token per line: as given, else as the config beside a
    `vocab.txt` says. Without both, it is for lower-cased text if it has no capital letters, and for
    such text without accents if it has none.
    """
    words = [token for token in file.tokens if not token.startswith("[")]
    settings = file.settings if file.path.name == VOCAB_FILE else {}
    stored = settings.get("do_lower_case")
    if do_lower_case is None:
        do_lower_case = stored
    if do_lower_case is None:
        do_lower_case = all(word == word.lower() for word in words)
    if strip_accents is None:
        strip_accents = settings.get("strip_accents")
    if strip_accents is None and stored is not None:
        strip_accents = do_lower_case  # transformers' default
    if strip_accents is None:
        strip_accents = do_lower_case and not any(map(has_accent, words))
    return Casing(do_lower_case, strip_accents)


def vocabulary_config(casing: dict[str, bool]) -> bytes:
    """The `tokenizer_config.json` that says the casing of the `vocab.txt` beside it."""
    settings = {"tokenizer_class": "BertTokenizer", **casing}
    return json.dumps(settings, indent=2).encode() + b"\n"


def model_files(
    tokenizer: Tokenizer, max_length: int, needs_json: bool = False
) -> dict[str, bytes]:
    """The files with which transformers' AutoTokenizer makes the same tokens in a model folder, by
    name; the tokenizer's own file is as it came. needs_json: transformers needs a `tokenizer.json`
    for the model.
    """
    is_json = tokenizer.is_json
    files = {TOKENIZER_JSON if is_json else VOCAB_FILE: tokenizer.vocab_file.read_bytes()}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast" if is_json else "BertTokenizer"}
    if is_json or needs_json:
        settings |= tokenizer.special_tokens
    if not is_json:
        settings |= tokenizer.casing_settings()
    if needs_json and not is_json:
        from tokenizers import BertWordPieceTokenizer  # here, because BERT's runs do not need it

        fast = BertWordPieceTokenizer(
            {token: token_id for token_id, token in enumerate(tokenizer.tokens)},
            lowercase=tokenizer.do_lower_case,
            strip_accents=tokenizer.casing_settings().get("strip_accents"),
        )
        files[TOKENIZER_JSON] = fast.to_str().encode()
    settings["model_max_length"] = max_length
    return files | {TOKENIZER_CONFIG: json.dumps(settings, indent=2).encode() + b"\n"}
