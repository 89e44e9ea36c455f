"""Tokenizers of Hugging Face's `tokenizers` library."""

import contextlib
import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from bert_recipe.tokenization.declared import check_layout
from bert_recipe.tokenization.files import TokenizerFile
from bert_recipe.tokenization.layouts import Layout, bert_layout, layout_of
from bert_recipe.tokenization.word_starts import WordStarts
from bert_recipe.utils.errors import UserError, one_line
from bert_recipe.utils.words import LONE_SURROGATE, is_unspaced, split_words, with_marks

UNSPACED_START = 5  # continues no word; others see kind_of
BAD_RULES = "its rules are damaged or too slow; fetch it again"
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # of SentencePiece's byte fallback
TEMPLATE_KEY = rb'("post_processor"\s*:\s*)'


@contextlib.contextmanager
def library_errors(what: str, advice: str) -> Iterator[None]:
    """Raises UserError for errors of the library, which have no class of their own; those of Rust
    are no Exceptions.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise UserError(f"{what} ({one_line(str(error))}): {advice}") from error
        raise


class HuggingFaceTokenizer:
    """Any tokenizer of the `tokenizers` library, from its `tokenizer.json`, with the interface of
    BertTokenizer.

    added_tokens: those of the files beside the `tokenizer.json` that are not in it. Added tokens
    that are not special are recognized in all texts. Offsets may include the space before a word;
    they include the marks after a letter.
    """

    is_json = True

    def __init__(self, vocab_file: str | Path | TokenizerFile):
        file = vocab_file if isinstance(vocab_file, TokenizerFile) else TokenizerFile(vocab_file)
        self.vocab_file = file.path
        self._file = file
        # The programs divide the work between processes.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import AddedToken, Tokenizer  # here: runs from shards may not need it

        advice = "give a tokenizer.json of Hugging Face, or a vocabulary with one token per line"
        with library_errors(f"{self.vocab_file} is no complete tokenizer", advice):
            self._tokenizer = Tokenizer.from_str(file.content.decode("utf-8"))
            # Fails if the model has no token for unknown characters.
            self._tokenizer.encode("\U0010ffff")
        self.added_tokens = file.added_tokens(self._tokenizer.get_vocab())
        for token in self._tokenizer.get_added_tokens_decoder().values():
            self.added_tokens.pop(token.content, None)
        self._tokenizer.add_tokens(
            [AddedToken(token, **kind) for token, kind in self.added_tokens.items()]
        )
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab: dict[str, int] = self._tokenizer.get_vocab()
        self.vocab_size = max(self.vocab.values(), default=0) + 1
        self.special_tokens = file.special_tokens(self.vocab, self._tokens_around_text())
        special_ids = [self.vocab[token] for token in self.special_tokens.values()]
        (
            self.pad_token_id,
            self.unk_token_id,
            self.cls_token_id,
            self.sep_token_id,
            self.mask_token_id,
        ) = special_ids
        self.has_token_types = file.has_token_types
        # The template of a file without one, for transformers: it changes no token.
        template = {
            "type": "BertProcessing",
            "sep": [self.special_tokens["sep_token"], self.sep_token_id],
            "cls": [self.special_tokens["cls_token"], self.cls_token_id],
        }
        self._template = json.dumps(template).encode()
        with_template = re.compile(TEMPLATE_KEY + re.escape(self._template))
        plain = with_template.sub(rb"\1null", file.content, count=1)
        self.vocab_sha256 = hashlib.sha256(plain).hexdigest()
        has_none = self._tokenizer.post_processor is None and not file.is_taken_as_it_is
        self._content = file.content
        self.lacks_template = has_none and re.search(TEMPLATE_KEY + b"null", plain) is not None
        self._added = self._tokenizer.get_added_tokens_decoder()
        self._is_special = np.zeros(self.vocab_size, bool)
        self._is_special[special_ids] = True
        for token_id, token in self._added.items():
            if token.special:
                self._is_special[token_id] = True
        normalizer = self._tokenizer.normalizer
        self.do_lower_case = normalizer is not None and "A" not in normalizer.normalize_str("A")

    def layout(self, num_texts: int) -> Layout:
        """The special tokens and the token types of sequences of one text or two, as the
        post-processor makes them; BERT's if the file has none, and no config beside it says that
        transformers takes it as it is. Raises UserError if none are put around texts.
        """
        layout = layout_of(self._tokenizer, num_texts)
        if self.lacks_template:
            layout = bert_layout(self.cls_token_id, self.sep_token_id, num_texts)
        if layout is None or layout.num_special == 0:
            cls, sep = (self.special_tokens[name] for name in ("cls_token", "sep_token"))
            what = "a text" if num_texts == 1 else "two texts"
            raise UserError(
                f"{self.vocab_file} puts no special tokens around {what}: give it a post_processor "
                f"(tokenizers.processors.TemplateProcessing with {cls} and {sep}), or train a "
                "tokenizer with data/prepare.py vocabulary"
            )
        if not self.has_token_types:
            layout = layout.without_types()
        check_layout(self._file, self.vocab, layout, num_texts)
        return layout

    def as_json(self) -> str:
        """The content of a `tokenizer.json`, with a post-processor for BERT's layout."""
        completed = re.sub(
            TEMPLATE_KEY + b"null",
            lambda match: match[1] + self._template,
            self._content,
            count=1,
        )
        return completed.decode("utf-8")

    def _tokens_around_text(self) -> dict[str, str]:
        """The tokens that the post-processor puts before and after a text, as transformers does:
        other libraries' files may name other ones, or none, as Gemma's.
        """
        bare = self._tokenizer.encode("a", add_special_tokens=False)
        whole = self._tokenizer.encode("a", add_special_tokens=True)
        if len(whole.tokens) != len(bare.tokens) + 2 or whole.tokens[1:-1] != bare.tokens:
            return {}
        return {"cls_token": whole.tokens[0], "sep_token": whole.tokens[-1]}

    def casing_settings(self) -> dict[str, bool]:
        """As BertTokenizer's. Accents are left out: `vocab_sha256` is that of the whole file."""
        return {"do_lower_case": self.do_lower_case}

    def word_starts(self) -> WordStarts:
        """A word is a run of letters, of digits, or of other characters, without white space; in
        scripts without spaces a token, or, of tokens with parts of characters, as word_spans says.
        """
        texts = self.texts()
        first_V = np.array([kind_of(text[:1]) for text in texts], np.int8)
        last_V = np.array([kind_of(text[-1:]) for text in texts], np.int8)
        last_V[last_V == 0] = -1  # no token continues white space
        first_V[[begins_unspaced(text) for text in texts]] = UNSPACED_START
        marks_starts = first_V[~self._is_special].any()
        marks_ends = getattr(self._tokenizer.model, "end_of_word_suffix", None)
        if marks_ends or not marks_starts:
            raise UserError(
                f"--whole-word-mask: the tokens of {self.vocab_file} do not show where words "
                f"begin: omit it"
            )
        is_partial_V = np.array(["\ufffd" in text for text in texts]) & ~self._is_special
        if not is_partial_V.any():
            return WordStarts(first_V, last_V)
        pieces = [text.encode() for text in texts]
        for token_id in np.flatnonzero(is_partial_V).tolist():
            pieces[token_id] = bytes_of(self._tokenizer.id_to_token(token_id) or "")
        return WordStarts(first_V, last_V, is_partial_V, pieces)

    def encode(self, text: str) -> list[int]:
        """The ids of `encode_text`."""
        return self.encode_text(text)[0].tolist()

    def tokenize(self, text: str) -> list[str]:
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in self.encode(text)]

    def words(self, text: str) -> list[str]:
        """The words of `text`, normalized, without punctuation."""
        normalizer = self._tokenizer.normalizer
        lines = text if normalizer is None else normalizer.normalize_str(text)
        words = chain.from_iterable(map(split_words, lines.splitlines()))
        return [word for word in words if any(map(str.isalnum, word))]

    def texts(self) -> list[str]:
        """As BertTokenizer's. Ids that are not used have an empty text."""
        return self._texts(range(self.vocab_size))

    def text_of(self, token_id: int) -> str:
        """The text that a token stands for, with the space before it if it begins a word."""
        return self._texts([token_id])[0]

    def join(self, tokens: Iterable[str]) -> str:
        """The text of tokens from `text_of`."""
        return "".join(tokens).strip()

    def encode_lines(self, text: bytes) -> tuple[np.ndarray, np.ndarray]:
        """As BertTokenizer's, with the ids that the lines of a document would have if they were
        joined by spaces: each line is stripped, and has a space before it unless it follows an
        empty line. The first line has one if `text` begins with white space. Where the model itself
        would make a special token of ordinary text, as Unigram can, the token is [UNK].
        """
        self._tokenizer.encode_special_tokens = True
        decoded = text.decode("utf-8")
        spaced = []  # the lines, with the space before them
        has_space = decoded[:1].isspace()
        for raw_line in decoded.split("\n"):
            line = raw_line.strip()
            spaced.append(f" {line}" if line and has_space else line)
            has_space = line != ""
        with library_errors(f"{self.vocab_file} fails on a text", BAD_RULES):
            ids_L = [
                encoding.ids
                for encoding in self._tokenizer.encode_batch_fast(spaced, add_special_tokens=False)
            ]
        offsets = np.cumsum([0, *map(len, ids_L)], dtype=np.int64)
        ids = np.fromiter(chain.from_iterable(ids_L), np.int32, offsets[-1])
        return np.where(self._is_special[ids], np.int32(self.unk_token_id), ids), offsets

    def encode_text(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """As BertTokenizer's."""
        self._tokenizer.encode_special_tokens = False
        text = LONE_SURROGATE.sub("\ufffd", text)
        with library_errors(f"{self.vocab_file} fails on the text {text!r:.60}", BAD_RULES):
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        spans = np.array(with_marks(encoding.offsets, text), np.int32).reshape(-1, 2)
        return np.array(encoding.ids, np.int32), np.maximum.accumulate(spans)

    def _texts(self, token_ids: Iterable[int]) -> list[str]:
        """The texts of tokens, with the space before those that begin a word."""
        prefix = getattr(self._tokenizer.model, "continuing_subword_prefix", None)
        if prefix:  # of WordPiece, whose decoder would also remove spaces before punctuation
            return [self._wordpiece_text(prefix, token_id) for token_id in token_ids]
        # A decoder removes the space at the beginning, so each token is decoded twice in a row:
        # what follows the first one is the token with its space.
        decode = self._tokenizer.decode_batch
        singles = decode([[token_id] for token_id in token_ids], skip_special_tokens=False)
        doubles = decode(
            [[token_id, token_id] for token_id in token_ids], skip_special_tokens=False
        )
        texts = []
        for token_id, single, double in zip(token_ids, singles, doubles, strict=True):
            text = double[len(single) :]
            added = self._added.get(token_id)
            if added is not None and added.lstrip and not added.special:
                text = f" {text}"  # the token also stands for the space before it
            texts.append(text)
        return texts

    def _wordpiece_text(self, prefix: str, token_id: int) -> str:
        """The text of a token: "ing" of "##ing", if `prefix` is "##", and " sing" of "sing", which
        begins a word.
        """
        token = self._tokenizer.id_to_token(token_id) or ""  # ids may have gaps
        return token.removeprefix(prefix) if token.startswith(prefix) else f" {token}"


def bytes_of(token: str) -> bytes:
    """The bytes of a token with parts of characters: `<0xE6>`, or one character for each byte."""
    if match := BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(match[1])
    return bytes(BYTE_OF.get(character, ord("?")) for character in token)


def byte_alphabet() -> dict[str, int]:
    """The byte that each character of byte-level BPE stands for: printable ones for themselves, the
    others in their order for the characters from U+0100 on (Radford et al., 2019).
    """
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


BYTE_OF = byte_alphabet()


def begins_unspaced(text: str) -> bool:
    """Whether `text` begins with a character, but no mark, of a script without spaces."""
    return is_unspaced(text[:1]) and unicodedata.category(text[0])[0] != "M"


def kind_of(character: str) -> int:
    """0 for white space or no character, 1 for letters and their marks, 2 for digits, 4 for a part
    of a character, 3 for others.
    """
    if character == "\ufffd":
        return 4
    if not character or character.isspace():
        return 0
    category = unicodedata.category(character)[0]
    return {"L": 1, "M": 1, "N": 2}.get(category, 3)
