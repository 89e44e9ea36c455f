"""BERT's tokenizer: clean, split at white space and punctuation, then WordPiece (Devlin et al. 2019).

`basic_tokenize` and `wordpiece` are the specification, written to be read. `encode_lines` and
`encode_batch_with_offsets` give the same ids and offsets many times faster, because nothing in BERT's tokenization
crosses white space: each distinct white-space word is tokenized once and looked up afterwards.

Text is ordinary text: "[SEP]" in it becomes "[", "sep", "]" as in Google's original, so that no corpus or question
can forge a separator. Special tokens are added by id by whoever builds a sequence.
"""

import hashlib
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, repeat
from pathlib import Path

import numpy as np

from utils.errors import UserError
from utils.files import read_json_object

PAD, UNK, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
MAX_CHARACTERS_PER_WORD = 100  # longer words are [UNK]: Google's limit
MAX_CACHED_WORDS = 500_000  # about 100 MB; the caches start afresh above it
WORD_SLOTS = 1 << 20  # of 32 bytes each: enough that few of MAX_CACHED_WORDS lose theirs to another
PART_SLOTS = 1 << 17

# str.split() takes these controls for white space; BERT removes them, as it does NUL, which str.split() leaves alone.
CONTROLS_THAT_SPLIT = str.maketrans(dict.fromkeys("\x0b\x0c\x1c\x1d\x1e\x1f\x85", "\0"))

CJK_BLOCKS = (
    (0x4E00, 0x9FFF),  # unified ideographs
    (0x3400, 0x4DBF),  # extension A
    (0x20000, 0x2A6DF),  # extension B
    (0x2A700, 0x2B73F),  # extension C
    (0x2B740, 0x2B81F),  # extension D
    (0x2B820, 0x2CEAF),  # extension E
    (0xF900, 0xFAFF),  # compatibility ideographs
    (0x2F800, 0x2FA1F),  # compatibility supplement
)


def is_whitespace(character: str) -> bool:
    return character in " \t\n\r" or unicodedata.category(character) in ("Zs", "Zl", "Zp")


def is_removed(character: str) -> bool:
    """Controls (NUL too), formats such as the zero-width joiner, private use, and the replacement character."""
    return character == "\ufffd" or unicodedata.category(character) in ("Cc", "Cf", "Co", "Cs")


def is_punctuation(character: str) -> bool:
    """Unicode's punctuation, and every ASCII symbol ("$", "+", "^", "`" too)."""
    return ("!" <= character <= "~" and not character.isalnum()) or unicodedata.category(character).startswith("P")


def is_cjk(character: str) -> bool:
    """Chinese characters, which are words of their own; not kana or hangul, which are written with spaces or runs."""
    return any(first <= ord(character) <= last for first, last in CJK_BLOCKS)


def is_accent(character: str) -> bool:
    return unicodedata.category(character) == "Mn"


def normalize_character(character: str, do_lower_case: bool) -> str:
    """What BERT makes of one character: nothing, itself, its lower-case letter without accents, a space, or a
    punctuation mark or Chinese character with a space on each side."""
    if is_whitespace(character):
        return " "
    if is_removed(character):
        return ""
    isolated = is_cjk(character)
    if do_lower_case:
        decomposed = unicodedata.normalize("NFD", character)
        character = "".join(part for part in decomposed if not is_accent(part)).lower()
    return "".join(f" {part} " if isolated or is_punctuation(part) else part for part in character)


class CharacterMap(dict):
    """code point -> `normalize_character` of it, filled as characters are met; a table for `str.translate`."""

    def __init__(self, do_lower_case: bool):
        super().__init__()
        self.do_lower_case = do_lower_case

    def __missing__(self, code_point: int) -> str:
        normalized = self[code_point] = normalize_character(chr(code_point), self.do_lower_case)
        return normalized


class WordTable(dict):
    """word -> its row in the ragged arrays `ids` and `spans` (start, end, start, end, ... in the word), filled by
    `encode_words` as words are met; that returns tokens a word, ids and spans of a list of distinct words."""

    def __init__(self, encode_words: Callable[[list], tuple[Iterable[int], Iterable[int], Iterable[int]]]):
        super().__init__()
        self.encode_words = encode_words
        self.start_afresh()

    def start_afresh(self) -> None:
        self.clear()
        self.ids = array("i")
        self.spans = array("i")
        self.row_starts = array("q", [0])

    def look_up(self, words: Sequence) -> tuple[np.ndarray, np.ndarray]:
        """Where the tokens of `words` begin in `ids` and `spans`, and how many each word has [W]."""
        if len(self) > MAX_CACHED_WORDS:
            self.start_afresh()
        rows_W = np.fromiter(map(self.get, words, repeat(-1)), np.int64, len(words))
        unknown = np.flatnonzero(rows_W < 0)
        if len(unknown):
            unknown_words = [words[place] for place in unknown.tolist()]
            self.add(list(dict.fromkeys(unknown_words)))
            rows_W[unknown] = list(map(self.get, unknown_words))
        row_starts = np.asarray(self.row_starts)  # a view: gone before the table grows again
        return row_starts[rows_W], row_starts[rows_W + 1] - row_starts[rows_W]

    def add(self, words: list) -> None:
        tokens_W, ids, spans = self.encode_words(words)
        self.update(zip(words, count(len(self)), strict=False))
        self.row_starts.extend((np.cumsum(tokens_W) + len(self.ids)).tolist())
        self.ids.extend(ids)
        self.spans.extend(spans)


class ShortWords:
    """A cache in front of the WordTable `table` of words as bytes, which looks up all words of a text at once, without
    making a Python object of each.

    The up to 16 bytes of a short word are two numbers, and these choose the one slot where it can be. Longer words,
    and those whose slot another word took first, are looked up in `table`: few, as frequent words come first. Bytes of
    value 0 fill up the numbers, so a word may end in NULs: BERT removes them. An empty slot is that of the empty word.
    """

    SLOT = np.dtype([("low_bytes", "u8"), ("high_bytes", "u8"), ("first_token", "i8"), ("tokens", "i8")])
    LOW_BYTES = np.array([(1 << 8 * count) - 1 for count in range(9)], np.uint64)
    MULTIPLIERS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)  # odd, without a pattern in their bits

    def __init__(self, table: WordTable, slots: int):
        self.table = table
        self.slots = np.zeros(slots, self.SLOT)

    def encode_lines(self, text: bytes) -> tuple[np.ndarray, np.ndarray]:
        """Ids of each line of `text`, ragged: those of line i are ids[offsets[i]:offsets[i + 1]]; what follows the last
        newline is a line too. Words are what spaces and newlines separate.

        Returns ids [T] int32 and offsets [L + 1] int64."""
        padded = text + b"\n" + bytes(16)
        characters = np.frombuffer(padded, np.uint8, len(text) + 1)
        ends_W = np.flatnonzero((characters == ord(" ")) | (characters == ord("\n")))
        starts_W = np.concatenate([[0], ends_W[:-1] + 1])
        first_token_W, tokens_W = self.look_up(padded, starts_W, ends_W)
        token_ends_W = np.cumsum(tokens_W)
        ids = np.asarray(self.table.ids)[ragged_indexes(first_token_W, tokens_W)]
        return ids, np.concatenate([[0], token_ends_W[characters[ends_W] == ord("\n")]])

    def look_up(self, text: bytes, starts_W: np.ndarray, ends_W: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`WordTable.look_up` of the words text[start:end]; the last start has 16 bytes or more behind it."""
        if len(self.table) > MAX_CACHED_WORDS:
            self.table.start_afresh()
            self.slots[:] = np.zeros((), self.SLOT)
        lengths_W = ends_W - starts_W
        eight_bytes = np.ndarray(len(text) - 7, "<u8", text, strides=1)  # those from each byte on
        low_W = eight_bytes[starts_W] & self.LOW_BYTES.take(lengths_W, mode="clip")
        high_W = eight_bytes[starts_W + 8] & self.LOW_BYTES.take(lengths_W - 8, mode="clip")
        hash_W = low_W * self.MULTIPLIERS[0] + high_W * self.MULTIPLIERS[1]
        slot_W = (hash_W >> np.uint64(65 - len(self.slots).bit_length())).view(np.int64)  # its highest bits
        found_W = self.slots.take(slot_W)
        is_other = (found_W["low_bytes"] != low_W) | (found_W["high_bytes"] != high_W)
        missed = np.flatnonzero(is_other | (lengths_W > 16))
        if len(missed):
            bounds = zip(starts_W[missed].tolist(), ends_W[missed].tolist(), strict=True)
            words = [text[start:end] for start, end in bounds]
            found_W["first_token"][missed], found_W["tokens"][missed] = self.table.look_up(words)
            is_free = (found_W["low_bytes"][missed] == 0) & (found_W["high_bytes"][missed] == 0)
            new = missed[is_free & (lengths_W[missed] <= 16)]
            found_W["low_bytes"][new], found_W["high_bytes"][new] = low_W[new], high_W[new]
            self.slots[slot_W[new]] = found_W[new]
        return found_W["first_token"], found_W["tokens"]


class BertTokenizer:
    """Text to BERT's WordPiece ids.

    `vocab_file` has one token a line, its line number being its id. `do_lower_case` lower-cases and strips accents,
    as the uncased vocabularies need. Offsets are [start, end) in characters of the text as given; they take in the
    accents that were stripped off a token's last letter.
    """

    def __init__(self, vocab_file: str | Path, do_lower_case: bool = True):
        self.vocab_file = str(vocab_file)
        self.do_lower_case = do_lower_case
        self.vocab, self.vocab_sha256 = read_vocabulary(vocab_file)
        self.tokens = list(self.vocab)
        self.pad_token_id, self.unk_token_id, self.cls_token_id, self.sep_token_id, self.mask_token_id = (
            self.vocab[token] for token in (PAD, UNK, CLS, SEP, MASK)
        )
        self._longest_token = max(map(len, self.vocab))
        self._continuations = {token[2:]: token_id for token, token_id in self.vocab.items() if token.startswith("##")}
        self._characters = CharacterMap(do_lower_case)
        self._characters_of_lines = CharacterMap(do_lower_case)
        self._characters_of_lines[ord("\n")] = "\n"
        self._words = ShortWords(WordTable(self._encode_words), WORD_SLOTS)
        # What words are made of: "house", "house," and "(house" are three words with one part in common.
        self._parts = ShortWords(WordTable(self._encode_parts), PART_SLOTS)
        self._words_with_spans = WordTable(self._encode_words_with_spans)

    @property
    def vocab_size(self) -> int:
        return len(self.vocab)

    # The specification.

    def basic_tokenize(self, text: str) -> Iterator[tuple[str, list[tuple[int, int]]]]:
        """Yields words and punctuation marks, each with the [start, end) in `text` of every character it is made of."""
        word, spans = "", []
        for position, character in enumerate(text):
            normalized = self._characters[ord(character)]
            if normalized == "" and spans and is_accent(character):
                spans[-1] = (spans[-1][0], position + 1)
            for part in normalized:
                if part != " ":
                    word += part
                    spans.append((position, position + 1))
                elif word:
                    yield word, spans
                    word, spans = "", []
        if word:
            yield word, spans

    def wordpiece(self, word: str) -> list[tuple[int, int, int]]:
        """(id, start, end) of the pieces of `word`: the longest token that begins it, and so on greedily, with "##"
        before all but the first; one [UNK] where a piece is not in the vocabulary or the word is overlong."""
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
        """Ids without special tokens, and each token's [start, end) in `text`."""
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
        return self.convert_ids_to_tokens(self.encode(text))

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int]:
        """Ids of `tokens`, [UNK]'s for those that the vocabulary lacks; one id for one string."""
        if isinstance(tokens, str):
            return self.vocab.get(tokens, self.unk_token_id)
        return [self.vocab.get(token, self.unk_token_id) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Iterable[int]) -> str | list[str]:
        """Tokens of `ids`; one string for one id. Raises IndexError for an id outside the vocabulary."""
        if isinstance(ids, int | np.integer):
            return self.tokens[ids]
        return [self.tokens[token_id] for token_id in ids]

    # The fast path.

    def encode_lines(self, text: bytes) -> tuple[np.ndarray, np.ndarray]:
        """Ids of each line of a UTF-8 `text` without special tokens, ragged: those of line i are
        ids[offsets[i]:offsets[i + 1]]; what follows the last newline is a line too.

        Returns ids [T] int32 and offsets [L + 1] int64. Raises UnicodeDecodeError."""
        try:
            return self._words.encode_lines(text)
        except UnicodeDecodeError:
            text.decode("utf-8")  # raises it again, with the position in `text`
            raise

    def encode_batch_with_offsets(self, texts: Iterable[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids of each text without special tokens, as in `encode_lines`, with each token's [start, end) in its text.

        Returns ids [T] int32, spans [T, 2] int32 and offsets [len(texts) + 1] int64."""
        words, words_per_text, positions = [], [], array("i")
        for text in texts:
            text = ready_to_split(text)
            words_of_text, end = text.split(), 0
            for word in words_of_text:
                start = text.index(word, end)
                positions.append(start)
                end = start + len(word)
            words += words_of_text
            words_per_text.append(len(words_of_text))
        first_token_W, tokens_W = self._words_with_spans.look_up(words)
        tokens_T = ragged_indexes(first_token_W, tokens_W)
        ids = np.asarray(self._words_with_spans.ids)[tokens_T]
        spans = np.asarray(self._words_with_spans.spans).reshape(-1, 2)[tokens_T]
        spans += np.repeat(np.array(positions, np.int32), tokens_W)[:, None]
        token_ends = np.concatenate([[0], np.cumsum(tokens_W)])
        return ids, spans, token_ends[np.concatenate([[0], np.cumsum(words_per_text, dtype=np.int64)])]

    def _encode_words(self, words: list[bytes]) -> tuple[np.ndarray, np.ndarray, tuple]:
        """Tokens of each word between spaces and newlines, ids, and no spans: all words in one pass."""
        normalized = b"\n".join(words).decode("utf-8").translate(self._characters_of_lines)
        ids, offsets = self._parts.encode_lines(normalized.encode("utf-8"))
        return np.diff(offsets), ids.tolist(), ()

    def _encode_parts(self, parts: list[bytes]) -> tuple[list[int], list[int], tuple]:
        """The same of words and punctuation marks as `basic_tokenize` gives them."""
        pieces = [self.wordpiece(part.decode("utf-8")) for part in parts]
        return list(map(len, pieces)), [token_id for piece in pieces for token_id, _, _ in piece], ()

    def _encode_words_with_spans(self, words: list[str]) -> tuple[list[int], list[int], list[int]]:
        """Tokens of each white-space word, ids and spans, by the specification."""
        encoded = [self.encode_with_offsets(word) for word in words]
        tokens_W = [len(ids) for ids, _ in encoded]
        return tokens_W, [i for ids, _ in encoded for i in ids], [e for _, spans in encoded for s in spans for e in s]


def ready_to_split(text: str) -> str:
    """`text`, of the same length and the same tokens, such that str.split() splits it where BERT does."""
    return text if text.isprintable() else text.translate(CONTROLS_THAT_SPLIT)


def ragged_indexes(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """starts[0], starts[0] + 1, ... (lengths[0] of them), starts[1], ... in one array [sum of lengths]."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + lengths, lengths)


def read_tokenizer_file(path: Path) -> tuple[list[str], bool]:
    """The tokens, by id, of a `tokenizer.json` of Hugging Face, and whether it lower-cases. Raises UserError unless it
    is BERT's tokenizer with its usual steps."""
    content = read_json_object(path, "a tokenizer")
    try:
        model, normalizer = content["model"], content["normalizer"]
        lowercase, strips_accents = normalizer["lowercase"], normalizer.get("strip_accents")
        is_bert = (
            (model["type"], normalizer["type"]) == ("WordPiece", "BertNormalizer")
            and content["pre_tokenizer"]["type"] == "BertPreTokenizer"
            and normalizer["clean_text"] is normalizer["handle_chinese_chars"] is True
            and isinstance(lowercase, bool)
            and strips_accents in (None, lowercase)
        )
        ids = {token_id: token for token, token_id in model["vocab"].items()}
        if is_bert:
            return [ids[token_id] for token_id in range(len(model["vocab"]))], lowercase
    except (KeyError, TypeError, AttributeError):
        pass
    raise UserError(f"{path} holds no complete WordPiece vocabulary of BERT's tokenizer: give --vocab-file")


SPECIAL_TOKENS = {"pad_token": PAD, "unk_token": UNK, "cls_token": CLS, "sep_token": SEP, "mask_token": MASK}
TOKENIZER_CLASSES = ("BertTokenizer", "BertTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend")


def check_tokenizer_folder(folder: Path, do_lower_case: bool) -> None:
    """Raises UserError if the tokenizer of a Hugging Face model folder makes other tokens than BertTokenizer."""
    files = {}
    for name in ("tokenizer_config.json", "added_tokens.json", "tokenizer.json"):
        files[name] = read_json_object(folder / name, "the tokenizer's file") if (folder / name).is_file() else {}
    config = files["tokenizer_config.json"]
    expected = {"tokenizer_class": config.get("tokenizer_class"), "tokenize_chinese_chars": True}
    expected |= {"do_basic_tokenize": True, "strip_accents": do_lower_case, **SPECIAL_TOKENS}
    if config.get("tokenizer_class") not in (None, *TOKENIZER_CLASSES):
        expected["tokenizer_class"] = TOKENIZER_CLASSES[0]
    for key, value in expected.items():
        found = config.get(key)
        found = found.get("content") if isinstance(found, dict) else found
        if found not in (None, value):
            raise UserError(
                f"{folder}/tokenizer_config.json: {key} is {found!r}, only {value!r} is supported: use another model"
            )
    entries = [*files["tokenizer.json"].get("added_tokens", ()), *config.get("added_tokens_decoder", {}).values()]
    added = {*files["added_tokens.json"], *(entry.get("content") for entry in entries)} - {*SPECIAL_TOKENS.values()}
    if added:
        raise UserError(
            f"{folder} adds tokens such as {min(added)!r} to its vocabulary, and this tokenizer ignores them: use "
            "another model"
        )


def read_vocabulary(path: str | Path) -> tuple[dict[str, int], str]:
    """token -> id, and the file's SHA-256. Raises UserError for a file that is no BERT vocabulary."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"vocabulary {path} does not exist: check --vocab-file")
    content = path.read_bytes()
    try:
        lines = content.decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"vocabulary {path}, line {line}: not UTF-8: save the file as UTF-8") from error
    if not content.strip():
        raise UserError(f"vocabulary {path} is empty: fetch it again or train one")
    vocab: dict[str, int] = {}
    for token_id, token in enumerate(line.removesuffix("\r") for line in lines):
        if not token:
            raise UserError(f"vocabulary {path}, line {token_id + 1}: empty line: give one token a line")
        if token in vocab:
            raise UserError(
                f"vocabulary {path}, line {token_id + 1}: {token!r} stands on line {vocab[token] + 1} already: "
                "give each token once"
            )
        vocab[token] = token_id
    missing = [token for token in (PAD, UNK, CLS, SEP, MASK) if token not in vocab]
    if missing:
        raise UserError(f"vocabulary {path} has no {', '.join(missing)}: BERT needs it, add it or choose another file")
    return vocab, hashlib.sha256(content).hexdigest()
