"""The files of tokenizers: BERT's list of tokens, Hugging Face's `tokenizer.json`, and what lies
beside them.
"""

import hashlib
from pathlib import Path
from typing import Any

from utils.errors import UserError
from utils.files import read_json

VOCAB_FILE, TOKENIZER_JSON, TOKENIZER_CONFIG = (
    "vocab.txt",
    "tokenizer.json",
    "tokenizer_config.json",
)
PAD, UNK, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
SPECIAL_TOKENS = {
    "pad_token": PAD,
    "unk_token": UNK,
    "cls_token": CLS,
    "sep_token": SEP,
    "mask_token": MASK,
}
MAX_CHARACTERS_PER_WORD = 100  # longer words become [UNK], as in Google's code


BOOLEANS = ("do_lower_case", "strip_accents", "tokenize_chinese_chars", "do_basic_tokenize")
SETTINGS = {
    "tokenizer_class": str | None,
    "model_max_length": float | None,
    **dict.fromkeys(BOOLEANS, bool | None),
}
SETTINGS |= {
    "added_tokens_decoder": dict[str, Any] | None,
    **dict.fromkeys(SPECIAL_TOKENS, str | dict[str, Any] | None),
}


def read_settings(folder: Path) -> dict[str, Any]:
    """transformers' `tokenizer_config.json` of a model folder. What matters here is None if it is
    missing.
    """
    path = folder / TOKENIZER_CONFIG
    return (
        read_json(path, "the tokenizer's config", SETTINGS)
        if path.is_file()
        else dict.fromkeys(SETTINGS)
    )


def is_tokenizer_json(path: str | Path) -> bool:
    """Whether a file is a JSON object, not a vocabulary with one token per line. Raises UserError
    if it is missing.
    """
    if not Path(path).is_file():
        raise UserError(f"vocabulary {path} does not exist: check --vocab-file")
    with Path(path).open("rb") as file:
        return file.read(64).lstrip().startswith(b"{")


def bert_casing(content: dict[str, Any]) -> bool | None:
    """Whether a `tokenizer.json` lower-cases, if it makes the same tokens as BertTokenizer; None if
    not.
    """
    try:
        model, normalizer, vocab = (
            content["model"],
            content["normalizer"],
            content["model"]["vocab"],
        )
        is_bert = (
            (model["type"], model["unk_token"], model["continuing_subword_prefix"])
            == ("WordPiece", UNK, "##")
            and model["max_input_chars_per_word"] == MAX_CHARACTERS_PER_WORD
            and normalizer["type"] == "BertNormalizer"
            and content["pre_tokenizer"]["type"] == "BertPreTokenizer"
            and normalizer["clean_text"] is normalizer["handle_chinese_chars"] is True
            and normalizer.get("strip_accents") in (None, normalizer["lowercase"])
            and {token["content"] for token in content["added_tokens"]}
            <= {*SPECIAL_TOKENS.values()}
            <= vocab.keys()
            and sorted(vocab.values()) == list(range(len(vocab)))
        )
        return (
            normalizer["lowercase"]
            if is_bert and isinstance(normalizer["lowercase"], bool)
            else None
        )
    except (KeyError, TypeError, AttributeError):
        return None


def content_of(token: Any) -> Any:
    """The text of a token in transformers' files: a string, or an object with its properties."""
    return token.get("content") if isinstance(token, dict) else token


USUAL_TOKENS = {
    name: (bert, f"<{name.removesuffix('_token')}>") for name, bert in SPECIAL_TOKENS.items()
}
USUAL_TOKENS |= {"cls_token": (CLS, "<s>", "<cls>"), "sep_token": (SEP, "</s>", "<sep>")}


def find_special_tokens(path: Path, vocab: dict[str, int]) -> dict[str, str]:
    """The special tokens of the `tokenizer.json` at `path`, in the order of SPECIAL_TOKENS: those
    that transformers' files beside it name, else the usual names. Raises UserError for those that
    are not in `vocab`.
    """
    named: dict[str, Any] = {}
    for file in (path.parent / "special_tokens_map.json", path.parent / TOKENIZER_CONFIG):
        if file.is_file():
            named |= read_json(file, "the tokenizer's file")
    candidates = {
        name: (content_of(named.get(name)), *usual) for name, usual in USUAL_TOKENS.items()
    }
    found = {
        name: next((t for t in tokens if isinstance(t, str) and t in vocab), None)
        for name, tokens in candidates.items()
    }
    if missing := [name for name, token in found.items() if token is None]:
        raise UserError(
            f"{path} has no {', '.join(missing)}, which BERT needs: train a tokenizer with "
            f"data/prepare.py vocabulary, "
            f"or add the tokens and name them in {TOKENIZER_CONFIG} beside it"
        )
    return found


def read_vocabulary(path: str | Path) -> tuple[dict[str, int], str]:
    """token -> id, and the SHA-256, of BERT's vocabulary: a file with one token per line, or a
    `tokenizer.json`, which has the SHA-256 of such a file. Raises UserError for other files.
    """
    is_json, content = is_tokenizer_json(path), Path(path).read_bytes()
    if is_json:
        vocab = read_json(path, "tokenizer")["model"]["vocab"]
        content = "".join(f"{token}\n" for token in sorted(vocab, key=vocab.__getitem__)).encode()
    try:
        lines = content.decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"vocabulary {path}, line {line}: not UTF-8: save the file as UTF-8"
        ) from error
    if not content.strip():
        raise UserError(f"vocabulary {path} is empty: fetch it again or train one")
    if lines[0].startswith("\ufeff"):
        raise UserError(
            f"vocabulary {path} begins with a byte order mark: save it as UTF-8 without one"
        )
    vocab: dict[str, int] = {}
    for token_id, token in enumerate(line.removesuffix("\r") for line in lines):
        if not token:
            raise UserError(
                f"vocabulary {path}, line {token_id + 1}: empty line: give one token a line"
            )
        if token in vocab:
            raise UserError(
                f"vocabulary {path}, line {token_id + 1}: {token!r} stands on line "
                f"{vocab[token] + 1} already: "
                "give each token once"
            )
        vocab[token] = token_id
    missing = [token for token in (PAD, UNK, CLS, SEP, MASK) if token not in vocab]
    if missing:
        raise UserError(
            f"vocabulary {path} has no {', '.join(missing)}: BERT needs it, add it or choose "
            f"another file"
        )
    return vocab, hashlib.sha256(content).hexdigest()


def trained_length(folder: Path, max_length: int) -> int:
    """The most tokens of a text in training, by the tokenizer's config; at most max_length, the
    model's positions.
    """
    found = read_settings(folder)["model_max_length"]
    return int(found) if found is not None and 1 <= found < max_length else max_length


def find_tokenizer(folder: Path) -> Path | None:
    """The tokenizer of a model folder: `tokenizer.json`, which transformers reads too, unless there
    is a `vocab.txt` with which BertTokenizer makes the same tokens. Raises UserError if there are
    only other formats, or a `vocab.txt` that is for another tokenizer.
    """
    vocab_file = folder / VOCAB_FILE
    if (path := folder / TOKENIZER_JSON).is_file():
        is_bert = vocab_file.is_file() and bert_casing(read_json(path, "tokenizer")) is not None
        if not is_bert or read_vocabulary(vocab_file)[0] != read_vocabulary(path)[0]:
            return path
    if not vocab_file.is_file():
        if others := sorted(file.name for name in OTHER_FORMATS for file in folder.glob(name)):
            raise UserError(
                f"{folder} has its tokenizer as {others[0]} only: make {TOKENIZER_JSON} with "
                f"transformers: "
                f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
            )
        return None
    settings, path = read_settings(folder), folder / "added_tokens.json"
    added = read_json(path, "the added tokens") if path.is_file() else {}
    expected = {"tokenize_chinese_chars": True, "do_basic_tokenize": True, **SPECIAL_TOKENS}
    if settings["do_lower_case"] is not None:
        expected["strip_accents"] = settings["do_lower_case"]
    if settings["tokenizer_class"] not in TOKENIZER_CLASSES:
        expected["tokenizer_class"] = TOKENIZER_CLASSES[0]
    for key, value in expected.items():
        if (found := content_of(settings[key])) not in (None, value):
            raise UserError(
                f"{folder}/{TOKENIZER_CONFIG}: {key} is {found!r}, and {VOCAB_FILE} works only "
                f"with {value!r}: save "
                f"the tokenizer with transformers as {TOKENIZER_JSON}, or use another model"
            )
    decoder = (settings["added_tokens_decoder"] or {}).values()
    added = {*added, *(str(content_of(token)) for token in decoder)} - {*SPECIAL_TOKENS.values()}
    if added:
        raise UserError(
            f"{folder} adds tokens such as {min(added)!r} to {VOCAB_FILE}: save the tokenizer with "
            f"transformers as "
            f"{TOKENIZER_JSON}, or use another model"
        )
    return vocab_file


TOKENIZER_CLASSES = (
    "BertTokenizer",
    "BertTokenizerFast",
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
)
OTHER_FORMATS = ("vocab.json", "*.model")  # byte-level BPE; SentencePiece
