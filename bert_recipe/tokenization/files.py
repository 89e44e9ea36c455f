"""The files of tokenizers: BERT's list of tokens, Hugging Face's `tokenizer.json`, and the files
beside them, which say the casing and may add tokens: special ones, and a user's own.
"""

import hashlib
from collections.abc import Container, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import refuse_pointer
from bert_recipe.utils.json_files import JsonObject, parse_json, read_json
from bert_recipe.utils.known_tools import MODELS, refuse_known
from bert_recipe.utils.words import has_accent

VOCAB_FILE, TOKENIZER_JSON = "vocab.txt", "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
# All that is read of a tokenizer in a model folder.
TOKENIZER_FILES = (VOCAB_FILE, TOKENIZER_JSON, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS)
PAD, UNK, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
MAX_UNKNOWN = 0.1  # share of [UNK] above which the vocabulary does not fit the text
SPECIAL_TOKENS = {
    "pad_token": PAD,
    "unk_token": UNK,
    "cls_token": CLS,
    "sep_token": SEP,
    "mask_token": MASK,
}
# The usual names of special tokens in other tokenizers.
USUAL_TOKENS: dict[str, tuple[str, ...]] = {
    name: (bert, f"<{name.removesuffix('_token')}>") for name, bert in SPECIAL_TOKENS.items()
}
USUAL_TOKENS |= {"cls_token": (CLS, "<s>", "<cls>"), "sep_token": (SEP, "</s>", "<sep>")}
MAX_CHARACTERS_PER_WORD = 100  # longer words become [UNK], as in Google's code
TOKENIZER_CLASSES = (
    "BertTokenizer",
    "BertTokenizerFast",
    "DistilBertTokenizer",
    "DistilBertTokenizerFast",
    "ElectraTokenizer",
    "ElectraTokenizerFast",
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
)
# With them transformers takes a tokenizer.json as it is; with others it makes parts of it anew.
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
# Those that transformers takes for a model whose folder declares none.
MODEL_CLASSES = {
    "bert": "BertTokenizer",
    "electra": "BertTokenizer",
    "distilbert": "BertTokenizer",
    "roberta": "RobertaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "camembert": "CamembertTokenizer",
}
# They give no token types unless the folder says so; the first is the general one of version 5.
CLASSES_WITHOUT_TYPES = (
    "TokenizersBackend",
    "DistilBertTokenizer",
    "RobertaTokenizer",
    "XLMRobertaTokenizer",
    "CamembertTokenizer",
)
NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# Both are lists; the first is the name of transformers 5.
EXTRA_TOKENS = ("extra_special_tokens", "additional_special_tokens")
TOKEN_PROPERTIES = ("single_word", "lstrip", "rstrip", "normalized", "special")
OTHER_FORMATS = ("vocab.json", "*.model")  # byte-level BPE; SentencePiece

# The keys of `tokenizer_config.json` that matter here.
BOOLEANS = ("do_lower_case", "strip_accents", "tokenize_chinese_chars", "do_basic_tokenize")
SETTINGS: JsonObject = {
    "tokenizer_class": str | None,
    "model_max_length": float | None,
    **dict.fromkeys(BOOLEANS, bool | None),
}
SETTINGS |= {
    "model_input_names": list[str] | None,
    "added_tokens_decoder": JsonObject | None,
    **dict.fromkeys(SPECIAL_TOKENS, str | JsonObject | None),
}

AddedTokens = dict[str, dict[str, bool]]  # content -> properties, as tokenizers.AddedToken has them


class Casing(NamedTuple):
    """Whether BertTokenizer lower-cases, and whether it strips accents."""

    do_lower_case: bool
    strip_accents: bool

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Casing | None":
        """That of a tokenizer's config, or of the attributes of shards; None if they do not say it.
        As in transformers, accents are stripped with lower-casing unless `strip_accents` is given.
        """
        do_lower_case = settings.get("do_lower_case")
        if do_lower_case is None:
            return None
        strip_accents = settings.get("strip_accents")
        if strip_accents is None:
            strip_accents = do_lower_case
        return cls(bool(do_lower_case), bool(strip_accents))

    @property
    def is_usual(self) -> bool:
        return self.strip_accents == self.do_lower_case

    def settings(self) -> dict[str, bool]:
        """What `of` reads, without defaults."""
        if self.is_usual:
            return {"do_lower_case": self.do_lower_case}
        return self._asdict()

    def __str__(self) -> str:
        name = "lower-cased" if self.do_lower_case else "cased"
        if self.is_usual:
            return name
        return f"{name} {'without' if self.strip_accents else 'with'} accents"


def read_settings(folder: Path) -> JsonObject:
    """transformers' `tokenizer_config.json` of a model folder. What matters here is None if it is
    missing.
    """
    path = folder / TOKENIZER_CONFIG
    if not path.is_file():
        return dict.fromkeys(SETTINGS)
    return read_json(path, "the tokenizer's config", SETTINGS)


def trained_length(settings: JsonObject, max_length: int) -> int:
    """The most tokens of a text in training, by the tokenizer's `settings`; at most `max_length`,
    the model's positions.
    """
    length = settings["model_max_length"]
    if length is None or not 1 <= length < max_length:
        return max_length
    return int(length)


class TokenizerFile:
    """The file of a tokenizer, read and parsed once: BERT's vocabulary with one token per line, or
    Hugging Face's `tokenizer.json`. Raises UserError if it is missing.

    content: the file's bytes.
    is_json: whether it is a JSON object.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_file():
            raise UserError(f"vocabulary {path} does not exist: check --vocab-file")
        refuse_pointer(self.path)
        # Those of transformers beside a file of such a name belong to it.
        self.has_files_beside = self.path.name in (VOCAB_FILE, TOKENIZER_JSON)
        self.content = self.path.read_bytes()
        self.is_json = self.content[:64].lstrip().startswith(b"{")

    @cached_property
    def values(self) -> JsonObject:
        """The object in a `tokenizer.json`."""
        return parse_json(self.content, f"tokenizer {self.path}")

    @cached_property
    def settings(self) -> JsonObject:
        """The tokenizer's config beside the file, see `read_settings`."""
        return read_settings(self.path.parent) if self.has_files_beside else dict.fromkeys(SETTINGS)

    def read_beside(self, name: str, description: str = "the tokenizer's file") -> JsonObject:
        """The object in transformers' file `name` beside the file; {} without one."""
        path = self.path.with_name(name)
        if not self.has_files_beside or not path.is_file():
            return {}
        return read_json(path, description)

    @cached_property
    def model_values(self) -> JsonObject:
        """The config of the model in whose folder the file is, always with its `model_type`; {} if
        there is none, as in a folder of a new vocabulary, which has no weights.
        """
        values = self.read_beside("config.json", "the model's config")
        if not values or not any(self.path.parent.glob("*.safetensors")):
            return {}
        return {"model_type": "bert", **values}

    @property
    def model_takes_types(self) -> bool:
        """Whether that is a model of transformers which takes token types."""
        values = self.model_values
        is_such_model = values.get("model_type") in ("bert", "electra")
        return is_such_model and values.get("type_vocab_size", 2) > 1

    @property
    def declared_class(self) -> str | None:
        """The class of which transformers 5 makes the tokenizer, without "Fast", see its
        models/auto/tokenization_auto.py; None if nothing says one.
        """
        model_type = self.model_values.get("model_type", "")
        if model_type == "modernbert":  # whatever its folder declares
            return GENERIC_CLASSES[1]
        name = self.settings["tokenizer_class"] or self.model_values.get("tokenizer_class")
        if name in GENERIC_CLASSES:
            return str(name)
        return name.removesuffix("Fast") if name else MODEL_CLASSES.get(model_type)

    @property
    def is_taken_as_it_is(self) -> bool:
        """Whether transformers takes all of a `tokenizer.json` for what it says."""
        return self.declared_class in GENERIC_CLASSES

    @property
    def types_are_said(self) -> bool:
        """Whether the folder says if a model is given token types."""
        is_said = self.settings["model_input_names"] is not None
        return is_said or self.declared_class in CLASSES_WITHOUT_TYPES

    @property
    def has_token_types(self) -> bool:
        """Whether a model is given token types. Without a word on that, transformers' general
        classes gave them until version 5, whose class has a name of its own.
        """
        names = self.settings["model_input_names"]
        if names is None:
            return self.declared_class not in CLASSES_WITHOUT_TYPES
        return "token_type_ids" in names

    @property
    def bert_casing(self) -> Casing | None:
        """The casing of a `tokenizer.json`, if it makes the same tokens as BertTokenizer; None if
        not. Where transformers makes a BertTokenizer of it, the config beside it counts.
        """
        declared = None if self.is_taken_as_it_is else Casing.of(self.settings)
        return self.json_casing and (declared or self.json_casing)

    @cached_property
    def json_casing(self) -> Casing | None:
        """What a `tokenizer.json` of BERT's kind itself says; None if it is of another kind."""
        try:
            normalizer = self.values["normalizer"]
            lowercase = normalizer["lowercase"]
            strip_accents = normalizer.get("strip_accents")
            is_bert = isinstance(lowercase, bool) and is_bert_tokenizer(self.values)
        except (KeyError, TypeError, AttributeError):
            return None
        if not is_bert or strip_accents not in (None, True, False):
            return None
        return Casing.of({"do_lower_case": lowercase, "strip_accents": strip_accents})

    @cached_property
    def tokens(self) -> list[str]:
        """BERT's tokens in the order of their ids. Raises UserError unless each is given once, and
        the special tokens are among them.
        """
        if self.is_json:
            vocab = self.values["model"]["vocab"]
            lines = sorted(vocab, key=vocab.__getitem__)
        else:
            lines = self._lines()
        tokens: dict[str, int] = {}
        for number, token in enumerate(lines, 1):
            where = f"vocabulary {self.path}, line {number}"
            if not token:
                raise UserError(f"{where}: empty line: give one token a line")
            if token in tokens:
                raise UserError(
                    f"{where}: {token!r} stands on line {tokens[token]} already: give each token "
                    "once"
                )
            tokens[token] = number
        if missing := [token for token in SPECIAL_TOKENS.values() if token not in tokens]:
            refuse_known(self.path, MODELS)
            raise UserError(
                f"vocabulary {self.path} has no {', '.join(missing)}: BERT needs it, add it or "
                "choose another file"
            )
        return list(tokens)

    def _lines(self) -> list[str]:
        try:
            text = self.content.decode("utf-8").removesuffix("\n")
        except UnicodeDecodeError as error:
            line = self.content.count(b"\n", 0, error.start) + 1
            raise UserError(
                f"vocabulary {self.path}, line {line}: not UTF-8: save the file as UTF-8"
            ) from error
        if text.startswith("\ufeff"):
            raise UserError(
                f"vocabulary {self.path} begins with a byte order mark: save it as UTF-8 without "
                "one"
            )
        return [line.removesuffix("\r") for line in text.split("\n")]

    def added_tokens(self, vocab: Container[str]) -> AddedTokens:
        """The tokens that the file itself and transformers' files beside it add to `vocab`."""
        added: AddedTokens = {}
        if self.has_files_beside:
            added = tokens_added_beside(self, vocab)
        if self.is_json:
            in_file = self.values.get("added_tokens") or ()
            added |= dict(parse_token(token, self.path) for token in in_file)
        return added

    @property
    def tokens_sha256(self) -> str:
        """The SHA-256 of BERT's vocabulary; that of a `tokenizer.json` is that of a file with one
        of its tokens per line.
        """
        content = self.content
        if self.is_json:
            content = "".join(f"{token}\n" for token in self.tokens).encode()
        return hashlib.sha256(content).hexdigest()

    def special_tokens(self, vocab: dict[str, int], added: dict[str, str]) -> dict[str, str]:
        """The special tokens of a `tokenizer.json`, in the order of SPECIAL_TOKENS: those that its
        post-processor puts around a text (`added`, by name), else those that transformers' files
        beside it name, else the usual names. Raises UserError for those that are not in `vocab`.
        """
        in_config = {name: value for name, value in self.settings.items() if value is not None}
        named = self.read_beside(SPECIAL_TOKENS_MAP) | in_config | added
        by_role: dict[str, str] = {}
        for name, usual in USUAL_TOKENS.items():
            for token in (content_of(named.get(name)), *usual):
                if isinstance(token, str) and token in vocab:
                    by_role[name] = token
                    break
        if missing := [name for name in USUAL_TOKENS if name not in by_role]:
            raise UserError(
                f"{self.path} has no {', '.join(missing)}, which BERT needs: train a tokenizer "
                "with data/prepare.py vocabulary, or add the tokens and name them in "
                f"{TOKENIZER_CONFIG} beside it"
            )
        return by_role


def list_casing(
    file: TokenizerFile, do_lower_case: bool | None, strip_accents: bool | None
) -> Casing:
    """The casing of a vocabulary with one token per line: as given, else as the config beside a
    `vocab.txt` says. Without both, it is for lower-cased text if it has no capital letters, and for
    such text without accents if it has none.
    """
    words = [token for token in file.tokens if not token.startswith("[")]
    settings = file.settings
    stored = settings["do_lower_case"]
    if do_lower_case is None:
        do_lower_case = stored
    if do_lower_case is None:
        do_lower_case = all(word == word.lower() for word in words)
    if strip_accents is None:
        strip_accents = settings["strip_accents"]
    if strip_accents is None and stored is not None:
        strip_accents = do_lower_case  # transformers' default
    if strip_accents is None:
        strip_accents = do_lower_case and not any(map(has_accent, words))
    return Casing(do_lower_case, strip_accents)


def is_bert_tokenizer(values: JsonObject) -> bool:
    """Whether the object in a `tokenizer.json` makes the same tokens as BertTokenizer. Raises
    KeyError or TypeError for a tokenizer with other parts.
    """
    model, normalizer, vocab = values["model"], values["normalizer"], values["model"]["vocab"]
    special_tokens = {*SPECIAL_TOKENS.values()}
    has_bert_words = (
        model["type"] == "WordPiece"
        and model["unk_token"] == UNK
        and model["continuing_subword_prefix"] == "##"
        and model["max_input_chars_per_word"] == MAX_CHARACTERS_PER_WORD
    )
    splits_as_bert = (
        normalizer["type"] == "BertNormalizer"
        and values["pre_tokenizer"]["type"] == "BertPreTokenizer"
        and normalizer["clean_text"] is True
        and normalizer["handle_chinese_chars"] is True
    )
    added = {token["content"] for token in values["added_tokens"]}
    has_bert_tokens = added <= special_tokens <= vocab.keys()
    ids_have_no_gaps = sorted(vocab.values()) == list(range(len(vocab)))
    return has_bert_words and splits_as_bert and has_bert_tokens and ids_have_no_gaps


def open_tokenizer(path: str | Path) -> TokenizerFile:
    """The tokenizer's file at `path`, or in the model folder `path`."""
    if not Path(path).is_dir():
        return TokenizerFile(path)
    if (file := find_tokenizer(Path(path))) is None:
        raise UserError(f"{path} has no tokenizer: copy it there")
    return file


def find_tokenizer(folder: Path) -> TokenizerFile | None:
    """The tokenizer of a model folder: `tokenizer.json`, which transformers reads too, unless there
    is a `vocab.txt` with which BertTokenizer makes the same tokens. None if there is no tokenizer.
    Raises UserError if there are only other formats, or a `vocab.txt` that is for another
    tokenizer.
    """
    has_list, has_json = (folder / VOCAB_FILE).is_file(), (folder / TOKENIZER_JSON).is_file()
    if not (has_list or has_json):
        refuse_other_formats(folder)
        return None
    file = TokenizerFile(folder / (TOKENIZER_JSON if has_json else VOCAB_FILE))
    if has_json:
        if not has_list or (casing := file.bert_casing) is None:
            return file
        listed = TokenizerFile(folder / VOCAB_FILE)
        is_usual = casing.is_usual or Casing.of(listed.settings) == casing
        if listed.tokens != file.tokens or not is_usual:
            return file
        file = listed
    refuse_known(file.path, MODELS)
    check_bert_settings(folder, file.settings)
    return file


def refuse_other_formats(folder: Path) -> None:
    """Raises UserError if a folder has a tokenizer of a format that is not read."""
    for name in OTHER_FORMATS:
        for path in sorted(folder.glob(name)):
            raise UserError(
                f"{folder} has its tokenizer as {path.name} only: make {TOKENIZER_JSON} with "
                "transformers: "
                f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
            )


def check_bert_settings(folder: Path, settings: JsonObject) -> None:
    """Raises UserError if a folder's tokenizer config makes other tokens of its `vocab.txt` than
    BertTokenizer.
    """
    expected = {"tokenize_chinese_chars": True, "do_basic_tokenize": True, **SPECIAL_TOKENS}
    if settings["tokenizer_class"] not in TOKENIZER_CLASSES:
        expected["tokenizer_class"] = TOKENIZER_CLASSES[0]
    for key, value in expected.items():
        stored = content_of(settings[key])
        if stored not in (None, value):
            raise UserError(
                f"{folder}/{TOKENIZER_CONFIG}: {key} is {stored!r}, and {VOCAB_FILE} works only "
                f"with {value!r}: save the tokenizer with transformers as {TOKENIZER_JSON}, or use "
                "another model"
            )


def tokens_added_beside(file: TokenizerFile, vocab: Container[str]) -> AddedTokens:
    """The tokens that transformers' files beside `file` add, in the order in which those that are
    not in `vocab` get ids, as AutoTokenizer reads them (transformers, tokenization_utils_base.py).
    Raises UserError for values that are no tokens.

    vocab: the tokenizer's own tokens.
    """
    config, path = file.settings, file.path.with_name(TOKENIZER_CONFIG)
    if config["added_tokens_decoder"] is not None:
        added = numbered_tokens(config["added_tokens_decoder"], path)
    else:  # of transformers before 4.34
        config = config | file.read_beside(SPECIAL_TOKENS_MAP)
        added = tokens_with_ids(file.read_beside(ADDED_TOKENS), config, path)
    with_role = {parse_token(value, path)[0] for value in named_tokens(config)}
    for token, properties in special_tokens(config, path):
        has_role = token in with_role  # such as cls_token
        if has_role and token in added:
            added[token]["special"] = True
        elif not has_role or token in vocab:  # a role adds no token that is nowhere else
            added.setdefault(token, properties)
    return added


def tokens_with_ids(ids: JsonObject, config: JsonObject, path: Path) -> AddedTokens:
    """The tokens of an `added_tokens.json`, which has only their `ids`, in the order of these.

    config: of the tokenizer, which says which tokens are special.
    path: of the config.
    """
    special = {token for token, _ in special_tokens(config, path)}
    tokens = {
        str(token_id): {"content": token, "special": token in special}
        for token, token_id in ids.items()
    }
    return numbered_tokens(tokens, path.with_name(ADDED_TOKENS))


def numbered_tokens(tokens: Any, path: Path) -> AddedTokens:
    """Those of an object with ids as keys, in their order."""
    if not isinstance(tokens, dict) or not all(key.isdecimal() for key in tokens):
        raise UserError(f"{path}: the ids of added tokens must be whole numbers: correct the file")
    return dict(parse_token(tokens[key], path) for key in sorted(tokens, key=int))


def special_tokens(config: Mapping[str, Any], path: Path) -> Iterable[tuple[str, JsonObject]]:
    """The special tokens that `config`, in the file `path`, names, and then those that it adds."""
    extra: object = []
    for key in EXTRA_TOKENS:  # of several versions: the first that has a value counts
        extra = extra or config.get(key) or []
    if not isinstance(extra, dict | list):
        raise UserError(f"{path}: the special tokens must be a list: correct the file")
    extra_tokens = extra.values() if isinstance(extra, dict) else extra
    for value in (*named_tokens(config), *extra_tokens):
        token, properties = parse_token(value, path)
        yield token, properties | {"special": True}


def named_tokens(config: Mapping[str, Any]) -> list[Any]:
    values = (config.get(f"{name}_token") for name in NAMED_TOKENS)
    return [value for value in values if value is not None]


def parse_token(value: Any, path: Path) -> tuple[str, dict[str, bool]]:
    """Content and properties of a string or of an object with these keys."""
    value = {"content": value} if isinstance(value, str) else value
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        properties = {name: value[name] for name in TOKEN_PROPERTIES if name in value}
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
