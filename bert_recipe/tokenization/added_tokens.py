"""Tokens that transformers' files add to a tokenizer: its special tokens, and a user's own."""

from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import read_json
from bert_recipe.utils.typed_json import JsonObject

CONFIG, SPECIAL_TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# Both are lists; the first is the name of transformers 5.
EXTRA_TOKENS = ("extra_special_tokens", "additional_special_tokens")
PROPERTIES = ("single_word", "lstrip", "rstrip", "normalized", "special")

AddedTokens = dict[str, dict[str, bool]]  # content -> properties, as tokenizers.AddedToken has them


def read_added_tokens(folder: Path, vocab: Container[str]) -> AddedTokens:
    """The tokens that the files in `folder` add to the tokenizer in it, in the order in which
    those that are not in `vocab` get ids, as AutoTokenizer reads them (transformers,
    tokenization_utils_base.py). Raises UserError for values that are no tokens.
    """
    config = read_if_there(folder / CONFIG)
    if (decoder := config.get("added_tokens_decoder")) is not None:
        added = numbered_tokens(decoder, folder / CONFIG)
    else:  # older files
        config |= read_if_there(folder / SPECIAL_TOKENS_MAP)
        special = {token for token, _ in special_tokens(config, folder)}
        ids = read_if_there(folder / ADDED_TOKENS)
        kinds = {token: {"special": token in special} for token in ids}
        decoder = {
            str(token_id): {"content": token, **kinds[token]} for token, token_id in ids.items()
        }
        added = numbered_tokens(decoder, folder / ADDED_TOKENS)
    named = {parse_token(value, folder / CONFIG)[0] for value in named_tokens(config)}
    for token, properties in special_tokens(config, folder):
        if token in named and token in added:
            added[token]["special"] = True
        elif token in vocab or token not in named:
            added.setdefault(token, properties)
    return added


def read_if_there(path: Path) -> JsonObject:
    return read_json(path, "the tokenizer's file") if path.is_file() else {}


def numbered_tokens(tokens: Any, path: Path) -> AddedTokens:
    """Those of an object with ids as keys, in their order."""
    if not isinstance(tokens, dict) or not all(key.isdecimal() for key in tokens):
        raise UserError(f"{path}: the ids of added tokens must be whole numbers: correct the file")
    return dict(parse_token(tokens[key], path) for key in sorted(tokens, key=int))


def special_tokens(config: Mapping[str, Any], folder: Path) -> Iterable[tuple[str, JsonObject]]:
    """The special tokens that `config` names, and then those that it adds."""
    extra: object = next(filter(None, (config.get(key) for key in EXTRA_TOKENS)), [])
    if not isinstance(extra, dict | list):
        raise UserError(f"{folder / CONFIG}: the special tokens must be a list: correct the file")
    extra = extra.values() if isinstance(extra, dict) else extra
    for value in (*named_tokens(config), *extra):
        token, properties = parse_token(value, folder / CONFIG)
        yield token, properties | {"special": True}


def named_tokens(config: Mapping[str, Any]) -> list[Any]:
    values = (config.get(f"{name}_token") for name in NAMES)
    return [value for value in values if value is not None]


def parse_token(value: Any, path: Path) -> tuple[str, dict[str, bool]]:
    """Content and properties of a string or of an object with these keys."""
    value = {"content": value} if isinstance(value, str) else value
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        properties = {name: value[name] for name in PROPERTIES if name in value}
        if all(isinstance(flag, bool) for flag in properties.values()):
            return value["content"], properties
    raise UserError(f"{path}: {value!r:.60} is no token: correct the file, or fetch it again")


def content_of(token: Any) -> Any:
    """The text of a token in transformers' files: a string, or an object with its properties."""
    return token.get("content") if isinstance(token, dict) else token


def added_token_settings(vocab: Mapping[str, int], added: AddedTokens) -> JsonObject:
    """The keys of a `tokenizer_config.json` with which transformers adds the tokens `added`."""
    decoder = {
        str(vocab[token]): {"content": token, **properties}
        for token, properties in sorted(added.items(), key=lambda entry: vocab[entry[0]])
    }
    special = [token for token, properties in added.items() if properties.get("special")]
    return {"added_tokens_decoder": decoder, "additional_special_tokens": special}
