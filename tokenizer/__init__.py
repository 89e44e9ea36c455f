"""Tokenizers behind one interface: BERT's own, which is fast, and any `tokenizer.json` of Hugging Face.

Special tokens in text are not recognized, so that input cannot forge a separator. The caller adds special tokens by id;
the post-processor, truncation and padding of a `tokenizer.json` are not applied.
"""

import json
from pathlib import Path
from typing import Any

from tokenizer.files import (
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    VOCAB_FILE,
    bert_casing,
    is_tokenizer_json,
    read_vocabulary,
)
from tokenizer.hugging_face import HuggingFaceTokenizer
from tokenizer.wordpiece import BertTokenizer
from utils.errors import UserError
from utils.files import read_json_object

Tokenizer = BertTokenizer | HuggingFaceTokenizer


def load_tokenizer(vocab_file: str | Path, do_lower_case: bool | None = None) -> Tokenizer:
    """The tokenizer in `vocab_file`: a vocabulary with one token per line, or a `tokenizer.json`.

    do_lower_case: whether a vocabulary is for lower-cased text; by default if it has no capital letters. A
    `tokenizer.json` says that itself. Raises UserError if it says something else, and for bad files."""
    if not is_tokenizer_json(vocab_file):
        if do_lower_case is None:
            words = [token for token in read_vocabulary(vocab_file)[0] if not token.startswith("[")]
            do_lower_case = all(word == word.lower() for word in words)
        return BertTokenizer(vocab_file, do_lower_case)
    lowercase = bert_casing(read_json_object(vocab_file, "tokenizer"))
    tokenizer = HuggingFaceTokenizer(vocab_file) if lowercase is None else BertTokenizer(vocab_file, lowercase)
    if do_lower_case not in (None, tokenizer.do_lower_case):
        flag = "--do-lower-case" if do_lower_case else "--no-do-lower-case"
        raise UserError(f"{flag} contradicts {vocab_file}, which says itself whether it lower-cases: leave {flag} out")
    return tokenizer


def model_files(tokenizer: Tokenizer, config: dict[str, Any]) -> dict[str, bytes]:
    """The files with which transformers' AutoTokenizer makes the same tokens in the folder of a model with `config`, by
    name. The tokenizer's own file is as it came."""
    is_json, is_modern = is_tokenizer_json(tokenizer.vocab_file), config.get("model_type") == "modernbert"
    files = {TOKENIZER_JSON if is_json else VOCAB_FILE: tokenizer.vocab_file.read_bytes()}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast" if is_json else "BertTokenizer"}
    if is_json or is_modern:
        settings |= tokenizer.special_tokens
    if not is_json:
        settings["do_lower_case"] = tokenizer.do_lower_case
    if is_modern and not is_json:  # for it, transformers reads no vocab.txt
        from tokenizers import BertWordPieceTokenizer  # here, because BERT's runs do not need it

        fast = BertWordPieceTokenizer(str(tokenizer.vocab_file), lowercase=tokenizer.do_lower_case)
        files[TOKENIZER_JSON] = fast.to_str().encode()
    settings["model_max_length"] = config.get("max_position_embeddings", 512)
    return files | {TOKENIZER_CONFIG: json.dumps(settings, indent=2).encode() + b"\n"}
