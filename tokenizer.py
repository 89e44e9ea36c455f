"""BERT's tokenizer and `load_tokenizer`; implemented in bert_recipe/tokenization/."""

from bert_recipe.tokenization.files import list_casing
from bert_recipe.tokenization.tokenizer import (
    BertTokenizer,
    BertWords,
    Cache,
    load_tokenizer,
    model_files,
    vocabulary_config,
    with_stripped_accents,
)
from bert_recipe.utils.words import has_accent, is_accent

__all__ = [
    "BertTokenizer",
    "BertWords",
    "Cache",
    "has_accent",
    "is_accent",
    "list_casing",
    "load_tokenizer",
    "model_files",
    "vocabulary_config",
    "with_stripped_accents",
]
