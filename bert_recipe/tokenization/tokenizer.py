"""BERT's tokenizer: clean, split at white space and punctuation, then WordPiece (Devlin et al.
2019), by Hugging Face's `tokenizers` library; and `load_tokenizer`, which also loads any
`tokenizer.json` of Hugging Face, with the same interface.

BERT's tokens never cross white space, so `encode_lines` encodes each distinct word once and caches
its ids, which is about ten times as fast as the library.

`encode_lines` is for corpora: "[SEP]" becomes "[", "sep", "]" as in Google's code, so that a line
cannot inject a separator or a mask. `encode_text` is for the texts of tasks: it takes special and
added tokens for what they are, as transformers' AutoTokenizer does. The tokens around a text, which
`layout` says, are added by the caller. Truncation and padding of a `tokenizer.json` are not used.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bert_recipe.tokenization.declared import check_layout, check_tokens
from bert_recipe.tokenization.files import (
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
    added_token_settings,
    list_casing,
    open_tokenizer,
)
from bert_recipe.tokenization.hugging_face import HuggingFaceTokenizer
from bert_recipe.utils.words import LONE_SURROGATE
from bert_recipe.tokenization.layouts import Layout, bert_layout, is_bert_template
from bert_recipe.tokenization.word_starts import WordStarts
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import JsonObject, json_bytes
from bert_recipe.utils.words import with_marks

# The library is imported by the methods that need it: runs from shards encode no text.
if TYPE_CHECKING:
    import tokenizers

MAX_CACHED_WORDS = 500_000  # about 100 MB


class Cache(dict[Any, Any]):
    """key -> function(key), filled on demand."""

    def __init__(self, function: Callable[[Any], Any]):
        super().__init__()
        self.function = function

    def __missing__(self, key: Any) -> Any:
        if len(self) >= MAX_CACHED_WORDS:
            self.clear()
        value = self[key] = self.function(key)
        return value


class BertWords:
    """BERT's normalization and its division of text into words and punctuation marks."""

    def __init__(self, casing: Casing):
        from tokenizers import normalizers, pre_tokenizers

        self.normalizer = normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=True,
            strip_accents=casing.strip_accents,
            lowercase=casing.do_lower_case,
        )
        self.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        self._cache = Cache(self._split)

    def __call__(self, text: str) -> list[str]:
        """The words and punctuation marks of `text`, normalized."""
        parts = text.replace("\n", " ").split(" ")
        return list(chain.from_iterable(map(self._cache.__getitem__, parts)))

    def _split(self, text: str) -> tuple[str, ...]:
        normalized = self.normalizer.normalize_str(text)
        return tuple(word for word, _ in self.pre_tokenizer.pre_tokenize_str(normalized))


class BertTokenizer:
    """BERT's WordPiece tokenizer.

    `vocab_file` has one token per line; the line number is the id. Or it is the `tokenizer.json` of
    such a tokenizer. A TokenizerFile is not read again. `do_lower_case` is for uncased
    vocabularies. `strip_accents` removes accents; if None, with lower-casing only.
    added_tokens: the special tokens, and those that the files beside a `vocab.txt` add, with their
    properties. Offsets are [start, end) in characters of the original text. They include accents
    that were stripped from a token's last letter.
    """

    special_tokens = SPECIAL_TOKENS

    def __init__(
        self,
        vocab_file: str | Path | TokenizerFile,
        do_lower_case: bool = True,
        strip_accents: bool | None = None,
    ):
        file = vocab_file if isinstance(vocab_file, TokenizerFile) else TokenizerFile(vocab_file)
        self.vocab_file, self.is_json = file.path, file.is_json
        self.has_token_types = file.has_token_types
        self._file = file
        self.do_lower_case = do_lower_case
        self.strip_accents = do_lower_case if strip_accents is None else strip_accents
        self.vocab_sha256 = file.tokens_sha256
        listed = dict.fromkeys(file.tokens)
        self.added_tokens = file.added_tokens(listed)
        for token in SPECIAL_TOKENS.values():
            self.added_tokens.setdefault(token, {"special": True})
        self.tokens = [*(listed | dict.fromkeys(self.added_tokens))]
        self.vocab = {token: token_id for token_id, token in enumerate(self.tokens)}
        self._num_listed = len(listed)
        (
            self.pad_token_id,
            self.unk_token_id,
            self.cls_token_id,
            self.sep_token_id,
            self.mask_token_id,
        ) = (self.vocab[token] for token in (PAD, UNK, CLS, SEP, MASK))
        self._cache = Cache(self._encode_part)

    @cached_property
    def _words(self) -> BertWords:
        return BertWords(Casing(self.do_lower_case, self.strip_accents))

    @cached_property
    def _model(self) -> "tokenizers.models.WordPiece":
        from tokenizers import models

        listed = dict(islice(self.vocab.items(), self._num_listed))
        return models.WordPiece(
            listed, unk_token=UNK, max_input_chars_per_word=MAX_CHARACTERS_PER_WORD
        )

    def _encoder(self, is_for_corpora: bool) -> "tokenizers.Tokenizer":
        from tokenizers import AddedToken, Tokenizer

        encoder = Tokenizer(self._model)
        encoder.normalizer = self._words.normalizer
        encoder.pre_tokenizer = self._words.pre_tokenizer
        encoder.add_tokens([AddedToken(token, **kind) for token, kind in self.added_tokens.items()])
        encoder.encode_special_tokens = is_for_corpora
        return encoder

    @cached_property
    def _text_encoder(self) -> "tokenizers.Tokenizer":
        return self._encoder(is_for_corpora=False)

    @cached_property
    def _line_encoder(self) -> "tokenizers.Tokenizer":
        return self._encoder(is_for_corpora=True)

    @cached_property
    def _adds_words(self) -> bool:
        """Whether added tokens are not special. They may contain spaces, or take those beside."""
        return not all(kind.get("special") for kind in self.added_tokens.values())

    @property
    def vocab_size(self) -> int:
        return len(self.vocab)

    def layout(self, num_texts: int) -> Layout:
        """The special tokens and the token types of sequences of one text or two. Raises UserError
        for a `tokenizer.json` that puts none around texts.
        """
        if self._has_own_template:
            return self._own_layouts.layout(num_texts)
        layout = bert_layout(self.cls_token_id, self.sep_token_id, num_texts)
        if not self.has_token_types:
            layout = layout.without_types()
        check_layout(self._file, self.vocab, layout, num_texts)
        return layout

    @cached_property
    def _has_own_template(self) -> bool:
        """Whether a `tokenizer.json` says another layout than BERT's. Without a word on it, that is
        BERT's unless transformers takes the file as it is.
        """
        if not self.is_json:
            return False
        template = self._file.values.get("post_processor")
        if template is None:
            return self._file.is_taken_as_it_is
        return not is_bert_template(template)

    @cached_property
    def _own_layouts(self) -> HuggingFaceTokenizer:
        return HuggingFaceTokenizer(self._file)

    @property
    def lacks_template(self) -> bool:
        """Whether the layout is not in the `tokenizer.json` itself."""
        is_missing = self.is_json and self._file.values.get("post_processor") is None
        return is_missing and not self._has_own_template

    def as_json(self) -> str:
        """The content of a `tokenizer.json`."""
        from tokenizers import decoders, processors

        encoder = self._encoder(is_for_corpora=False)
        encoder.decoder = decoders.WordPiece()
        encoder.post_processor = processors.BertProcessing(
            (SEP, self.sep_token_id), (CLS, self.cls_token_id)
        )
        return encoder.to_str()

    def casing_settings(self) -> dict[str, bool]:
        """The casing as files store it, see `Casing.of`."""
        return Casing(self.do_lower_case, self.strip_accents).settings()

    def word_starts(self) -> WordStarts:
        """Here, a token continues a word if it begins with "##"."""
        is_inside = np.array([token.startswith("##") for token in self.vocab], np.int8)
        return WordStarts(is_inside, np.ones(self.vocab_size, np.int8))

    def encode(self, text: str) -> list[int]:
        """The ids of `encode_text`."""
        return self.encode_text(text)[0].tolist()

    def tokenize(self, text: str) -> list[str]:
        return [self.tokens[token_id] for token_id in self.encode(text)]

    def words(self, text: str) -> list[str]:
        """The words and punctuation marks of `text`, normalized."""
        return self._words(text)

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

    def encode_lines(self, text: bytes) -> tuple[np.ndarray, np.ndarray]:
        """Encodes each line of UTF-8 `text`, in which special tokens are ordinary text. Line i has
        the ids ids[offsets[i]:offsets[i + 1]]; the last line needs no newline.

        Returns ids [T] int32 and offsets [L + 1] int64. Raises UnicodeDecodeError.
        """
        decoded = text.decode("utf-8")
        # Words, or lines if an added token may contain spaces, and "\n" between lines.
        if self._adds_words:
            parts = re.split("(\n)", decoded)
        else:
            parts = decoded.replace("\n", " \n ").split(" ")
        ids = np.fromiter(chain.from_iterable(map(self._cache.__getitem__, parts)), np.int32)
        is_newline = ids < 0  # see `_encode_part`
        newlines = np.flatnonzero(is_newline)
        line_ends = newlines - np.arange(len(newlines))  # without the newlines before
        num_ids = len(ids) - len(newlines)
        return ids[~is_newline], np.concatenate([[0], line_ends, [num_ids]])

    def _encode_part(self, part: str) -> tuple[int, ...]:
        """Ids of what stands between two spaces, or of a line; -1 for a newline."""
        if part == "\n":
            return (-1,)
        return tuple(self._line_encoder.encode(part, add_special_tokens=False).ids)

    def encode_text(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids [T] without the special tokens around a text, and the [start, end) of each token in
        `text`, [T, 2]; both int32.
        """
        text = LONE_SURROGATE.sub("\ufffd", text)
        encoding = self._text_encoder.encode(text, add_special_tokens=False)
        spans = with_marks(encoding.offsets, text)
        return np.array(encoding.ids, np.int32), np.array(spans, np.int32).reshape(-1, 2)


Tokenizer = BertTokenizer | HuggingFaceTokenizer


# Of Korean and Amharic: each has the letters of a consonant and a vowel.
SYLLABLE = re.compile("[\uac00-\ud7a3\u1200-\u135a]")


class WordSizes(NamedTuple):
    """The number of tokens [W] of words, and of their letters [W]; a syllable that is one character
    counts as two.
    """

    tokens: np.ndarray
    letters: np.ndarray


def sizes_of_words(token_ids: np.ndarray, tokenizer: Tokenizer) -> WordSizes | None:
    """The sizes of the words without digits in `token_ids` [T], which are sequences with [CLS] and
    [SEP]; None if there are none, or if tokens do not show words.
    """
    try:
        word_starts = tokenizer.word_starts()
    except UserError:
        return None
    is_text_T = ~np.isin(token_ids, (tokenizer.cls_token_id, tokenizer.sep_token_id))
    (begins_word_T,) = word_starts.find(token_ids[None], is_text_T[None])
    word_T = np.cumsum(begins_word_T)[is_text_T]  # the number of each token's word, from 1
    digits = re.compile(r"\d")
    texts = tokenizer.texts()
    has_digit_V = np.array([digits.search(text) is not None for text in texts])
    length_V = np.array([len(text.strip()) + len(SYLLABLE.findall(text)) for text in texts])
    text_ids = token_ids[is_text_T]
    tokens = np.bincount(word_T)
    letters = np.bincount(word_T, weights=length_V[text_ids])
    tokens[word_T[has_digit_V[text_ids]]] = 0
    is_counted = tokens > 0
    return WordSizes(tokens[is_counted], letters[is_counted]) if is_counted.any() else None


def load_tokenizer(
    vocab_file: str | Path | TokenizerFile,
    do_lower_case: bool | None = None,
    strip_accents: bool | None = None,
) -> Tokenizer:
    """The tokenizer in `vocab_file`: a vocabulary with one token per line, a `tokenizer.json`, or a
    model folder with one of them. A TokenizerFile is not read again.

        tokenizer = load_tokenizer("bert-base-uncased")
        tokenizer.tokenize("Hello, world!")  # ['hello', ',', 'world', '!']
        tokenizer.encode("Hello, world!")  # ids, without [CLS] and [SEP]

    do_lower_case, strip_accents: of a vocabulary; see `list_casing` for the defaults. A
    `tokenizer.json` says them itself. Raises UserError if it says another `do_lower_case`, and for
    bad files.
    """
    file = vocab_file if isinstance(vocab_file, TokenizerFile) else open_tokenizer(vocab_file)
    if not file.is_json:
        listed_casing = list_casing(file, do_lower_case, strip_accents)
        return BertTokenizer(file, *listed_casing)
    casing = file.bert_casing
    if casing is not None and (casing.is_usual or casing != file.json_casing):
        tokenizer: Tokenizer = BertTokenizer(file, *casing)
    else:  # shards and runs know the others by the digest of the whole file
        tokenizer = HuggingFaceTokenizer(file)
    check_tokens(file)
    if do_lower_case not in (None, tokenizer.do_lower_case):
        flag = "--do-lower-case" if do_lower_case else "--no-do-lower-case"
        raise UserError(
            f"{flag} contradicts {file.path}, which says itself whether it lower-cases: leave "
            f"{flag} out"
        )
    return tokenizer


def vocabulary_config(casing: dict[str, bool]) -> bytes:
    """The `tokenizer_config.json` that says the casing of the `vocab.txt` beside it."""
    settings = {"tokenizer_class": "BertTokenizer", **casing}
    return json_bytes(settings)


def model_files(
    tokenizer: Tokenizer, max_length: int, needs_json: bool = False, takes_types: bool = True
) -> dict[str, bytes]:
    """The files with which transformers' AutoTokenizer makes the same tokens, around a text, too,
    in a model folder, by name; the tokenizer's own file is as it came, unless it does not say
    these.

    needs_json: transformers needs a `tokenizer.json` for the model.
    takes_types: the model takes token types.
    """
    is_json = tokenizer.is_json
    files = {TOKENIZER_JSON if is_json else VOCAB_FILE: tokenizer.vocab_file.read_bytes()}
    settings: JsonObject = {
        "tokenizer_class": "PreTrainedTokenizerFast" if is_json else "BertTokenizer"
    }
    if is_json or needs_json:
        settings |= tokenizer.special_tokens
    if not is_json:
        settings |= tokenizer.casing_settings()
    if tokenizer.lacks_template or (needs_json and not is_json):
        files[TOKENIZER_JSON] = tokenizer.as_json().encode()
    added = {token: {"special": True} for token in tokenizer.special_tokens.values()}
    if not tokenizer.added_tokens.items() <= added.items():
        settings |= added_token_settings(tokenizer.vocab, tokenizer.added_tokens)
    takes_types = takes_types and tokenizer.has_token_types
    if is_json or not takes_types:  # of transformers' own classes, BertTokenizer says it itself
        types = ("token_type_ids",) if takes_types else ()
        settings["model_input_names"] = ["input_ids", *types, "attention_mask"]
    settings["model_max_length"] = max_length
    return files | {TOKENIZER_CONFIG: json_bytes(settings)}
