"""Tokenizers of every kind, trained on sample texts: as files, and as transformers reads them."""

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

import tokenizers
import transformers
from conftest import ROOT, read_json
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from bert_recipe.data_preparation.options import VocabularyOptions
from bert_recipe.data_preparation.text.vocabulary import train_tokenizer
from bert_recipe.tokenization.tokenizer import load_tokenizer


def sample_texts() -> list[str]:
    books = [
        line
        for path in sorted((ROOT / "data/sample/books").glob("*.txt"))
        for line in path.open(encoding="utf-8")
    ]
    squad = read_json(ROOT / "data/sample/squad/dev-v1.1.json")
    return books + [
        paragraph["context"] for article in squad["data"] for paragraph in article["paragraphs"]
    ]


TRICKY = (
    "aZéÉßſİıΣς’-.,$+^~`\t\n\r\v\f\x00\x1c\x85\xa0\u2028\u200b\u200d\ufeff\ufffd\u0301\u0327"
    "漢字한국のкий🙂👩𝔘ﬁ […]"
)
NAMES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXT = sample_texts()[:400]


@cache
def folder() -> Path:
    made = Path(tempfile.mkdtemp(prefix="tokenizers-"))
    atexit.register(shutil.rmtree, made)
    return made


def trained(tokenizer: tokenizers.Tokenizer, trainer) -> dict:
    tokenizer.train_from_iterator(TEXT, trainer)
    return json.loads(tokenizer.to_str())


def by_prepare(kind: str, **options) -> dict:
    path = Path(folder() / "text.txt")
    path.write_text("\n".join(TEXT))
    settings = VocabularyOptions(kind, size=600, unused=3, **options)
    name, content = train_tokenizer([path], settings)
    assert name == "tokenizer.json"
    return json.loads(content)


def wordpiece() -> dict:
    """Not BERT's: apostrophes stay in words, and accents too."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return trained(
        tokenizer,
        trainers.WordPieceTrainer(vocab_size=600, special_tokens=NAMES, show_progress=False),
    )


def modernbert() -> dict:
    """Shaped like ModernBERT's: runs of spaces, [unused...] and placeholders are added tokens after
    the vocabulary.
    """
    content = by_prepare("bpe", do_lower_case=False) | {"added_tokens": [], "post_processor": None}
    words = [word for word in content["model"]["vocab"] if not word.startswith("[")]
    content["model"]["vocab"] = {word: place for place, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    tokenizer.add_tokens(
        ["|||IP_ADDRESS|||", *(" " * n for n in range(24, 1, -1)), "|||EMAIL_ADDRESS|||"]
    )
    tokenizer.add_special_tokens(
        ["<|endoftext|>", "[UNK]", "[CLS]", "[SEP]", "[PAD]", AddedToken("[MASK]", lstrip=True)]
    )
    tokenizer.add_tokens([f"[unused{n}]" for n in range(83)])
    ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ids
    )
    return json.loads(tokenizer.to_str())


def gemma() -> dict:
    """Shaped like mmBERT's, which is Gemma's: spaces as U+2581, bytes for unknown characters, and
    <bos> and <eos> around a text, which no file calls [CLS] and [SEP].
    """
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    words = pre_tokenizers.Split("\u2581", "merged_with_next")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.Punctuation()])
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    content = trained(tokenizer, trainer)
    learned = [word for word in content["model"]["vocab"] if word not in special]
    vocab = {word: place for place, word in enumerate(tokens + learned)}
    content["model"] |= {"vocab": vocab, "unk_token": "<unk>", "byte_fallback": True}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>",
        pair="<bos> $A <eos> $B <eos>",
        special_tokens=[("<bos>", 2), ("<eos>", 1)],
    )
    return json.loads(tokenizer.to_str())


def roberta() -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE with other names of special tokens."""
    trained = by_prepare("bpe", do_lower_case=False)["model"]
    own = [word for word in trained["vocab"] if not word.startswith("[")]
    words = ["<s>", "<pad>", "</s>", "<unk>", *own, "<mask>"]
    vocab = {word: place for place, word in enumerate(words)}
    merges = list(map(tuple, trained["merges"]))
    return transformers.RobertaTokenizer(vocab=vocab, merges=merges)


def unigram(make: type, before: list[tuple[str, float]]) -> transformers.PreTrainedTokenizerFast:
    """Unigram, whose model itself would find special tokens in a text."""
    pieces = [
        (word, score)
        for word, score in by_prepare("unigram", do_lower_case=False)["model"]["vocab"]
        if score
    ]
    return make(vocab=[*before, *pieces, ("<mask>", 0.0)])


XLM_R = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
CAMEMBERT = [
    ("<s>NOTUSED", 0.0),
    ("<pad>", 0.0),
    ("</s>NOTUSED", 0.0),
    ("<unk>", 0.0),
    ("<unk>NOTUSED", -100.0),
]
ROBERTA_KINDS = {  # by transformers' classes
    "roberta": roberta,
    "xlm-r": lambda: unigram(transformers.XLMRobertaTokenizer, XLM_R),
    "camembert": lambda: unigram(
        transformers.CamembertTokenizer, [*CAMEMBERT, ("<s>", 0.0), ("</s>", 0.0)]
    ),
}


MAKERS = {
    "bpe": lambda: by_prepare("bpe", do_lower_case=False),
    "uncased-bpe": lambda: by_prepare("bpe"),
    "unigram": lambda: by_prepare("unigram", do_lower_case=False),
    "wordpiece": wordpiece,
    "modernbert": modernbert,
    "gemma": gemma,
    **{
        kind: lambda make=make: json.loads(make().backend_tokenizer.to_str())
        for kind, make in ROBERTA_KINDS.items()
    },
}


@cache
def file_of(kind: str) -> Path:
    path = folder() / kind / "tokenizer.json"
    path.parent.mkdir()
    path.write_text(json.dumps(MAKERS[kind](), ensure_ascii=False), encoding="utf-8")
    return path


@cache
def ours(kind: str):
    return load_tokenizer(file_of(kind))


@cache
def theirs(kind: str, split: bool = False) -> transformers.PreTrainedTokenizerFast:
    """split: whether special tokens in texts are ordinary text."""
    names = ours(kind).special_tokens
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(file_of(kind)), split_special_tokens=split, **names
    )
