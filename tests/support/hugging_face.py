"""transformers' tokenizers of the vocabularies here, and models in folders."""

from functools import cache
from pathlib import Path

import torch
from conftest import TINY, VOCAB_FILE
from transformers import BertTokenizerFast

# Random weights that are large enough to prefer some answers.
LARGE = {**TINY, "initializer_range": 0.3}
# Of a config that transformers makes.
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "vocab_size": 90,
    "pad_token_id": 0,
}


@cache
def bert_tokenizer(vocab_file: Path = VOCAB_FILE, do_lower_case: bool = True):
    vocab = {
        token: number
        for number, token in enumerate(vocab_file.read_text(encoding="utf-8").splitlines())
    }
    fast = BertTokenizerFast(vocab=vocab, vocab_file=str(vocab_file), do_lower_case=do_lower_case)
    assert fast.get_vocab() == vocab
    return fast


def save(model, folder: Path) -> Path:
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_bytes(VOCAB_FILE.read_bytes())
    return folder


def logits_of_transformers(model_class: type, folder: Path, *texts: str | None) -> torch.Tensor:
    with torch.no_grad():
        peer = model_class.from_pretrained(folder).eval()
        return peer(**bert_tokenizer()(*texts, return_tensors="pt")).logits[0]
