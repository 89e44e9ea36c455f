"""What transformers makes of the `tokenizer.json` in a model's folder, where that is not what the
file says: version 4 took the file, version 5 makes the tokens and the template anew from the class
that the folder declares (models/bert/tokenization_bert.py). Such a folder is refused.
"""

from bert_recipe.tokenization.files import (
    CLS,
    MAX_CHARACTERS_PER_WORD,
    SEP,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    UNK,
    Casing,
    TokenizerFile,
    content_of,
)
from bert_recipe.tokenization.layouts import Layout, bert_layout, roberta_layout
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import JsonObject

BERT_CLASSES = ("BertTokenizer", "ElectraTokenizer", "DistilBertTokenizer")
ROBERTA_CLASSES = ("RobertaTokenizer", "XLMRobertaTokenizer", "CamembertTokenizer")
WITH_TYPES = '"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]'


def check_tokens(file: TokenizerFile) -> None:
    """Raises UserError if transformers 5 makes a BertTokenizer of another tokenizer's file."""
    if not file.model_values or file.declared_class not in BERT_CLASSES:
        return
    settings = file.settings
    has_chinese = settings["tokenize_chinese_chars"]
    expected: JsonObject = {
        "model": {
            "type": "WordPiece",
            "unk_token": named_token(file, "unk_token", UNK),
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": MAX_CHARACTERS_PER_WORD,
        },
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": has_chinese is None or has_chinese,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
    }
    for part, values in expected.items():
        given = file.values.get(part)
        if not isinstance(given, dict):
            raise differs(file, f"{part} is missing")
        for key, value in values.items():
            if given.get(key, value) != value:
                raise differs(file, f"{part}.{key} is {given[key]!r:.40}, not {value!r}")
    normalizer = file.values["normalizer"]
    lowercase = normalizer.get("lowercase")
    in_file = {"do_lower_case": lowercase, "strip_accents": normalizer.get("strip_accents")}
    lower = settings["do_lower_case"]
    by_class = Casing.of({**settings, "do_lower_case": lower is None or lower})
    used = file.bert_casing or Casing.of(in_file)
    if used != by_class:
        raise differs(file, f"it is {used}, not {by_class}")


def check_layout(file: TokenizerFile, vocab: dict[str, int], layout: Layout, texts: int) -> None:
    """Raises UserError if transformers puts other tokens or types around so many texts than
    `layout`, or if that depends on its version.
    """
    if not file.is_json or not file.model_values:
        return
    name = file.declared_class
    if name in BERT_CLASSES:
        cls, sep = (vocab.get(token, -1) for token in around(file, CLS, SEP))
        expected = bert_layout(cls, sep, texts)
    elif name in ROBERTA_CLASSES:
        cls, sep = (vocab.get(token, -1) for token in around(file, "<s>", "</s>"))
        expected = roberta_layout(cls, sep, texts)
    elif file.types_are_said or not file.model_takes_types or not any(layout.types):
        return
    else:
        raise UserError(
            f"{file.path.with_name(TOKENIZER_CONFIG)} has no model_input_names: for a pair "
            f"transformers 4 gave token types, version 5 gives none: add {WITH_TYPES} if the "
            "model was trained with types, as by version 4 or this project, or the same without "
            '"token_type_ids"'
        )
    expected = expected if file.has_token_types else expected.without_types()
    if layout != expected:
        what = "a text" if texts == 1 else "two texts"
        raise differs(file, f"its post_processor puts other tokens or types around {what}")


def named_token(file: TokenizerFile, role: str, default: str) -> str:
    """The token of a role, as the files beside the tokenizer name it."""
    token = content_of(file.settings[role] or file.read_beside(SPECIAL_TOKENS_MAP).get(role))
    return token if isinstance(token, str) else default


def around(file: TokenizerFile, cls: str, sep: str) -> tuple[str, str]:
    return named_token(file, "cls_token", cls), named_token(file, "sep_token", sep)


def differs(file: TokenizerFile, what: str) -> UserError:
    return UserError(
        f"{file.path}: {what}, and transformers 5 makes {file.declared_class} of the folder: to "
        f'use the {TOKENIZER_JSON} as it is, write "tokenizer_class": "PreTrainedTokenizerFast", '
        f"{WITH_TYPES} to {TOKENIZER_CONFIG}"
    )
