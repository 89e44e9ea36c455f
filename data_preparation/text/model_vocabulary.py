"""Gives a model another vocabulary: its own with words of a new text added, or a whole new one.

A token that the old vocabulary has keeps its rows of the word embeddings and of the decoder's bias.
Another token starts from the mean of the rows of its pieces by the old tokenizer, or from random
values.

Legend: V tokens of the new vocabulary, E hidden size.
"""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from checkpoint.folder import CONFIG_FILE, MODEL_FILE, OPTIMIZER_SUFFIX, PROGRESS_SUFFIX
from checkpoint.model_choice import ModelChoice, choose_model
from checkpoint.weights import canonical_names, checkpoint_shapes, open_model_weights
from data_preparation.options import ModelVocabularyOptions, VocabularyOptions
from data_preparation.text.vocabulary import MIN_FREQUENCY, read_beginnings, train_tokenizer
from encoders.modules import VocabularyEmbedding
from modeling import make_model
from run_config import CUSTOM, ModelSelection
from tasks.sentence_folders import sentence_files
from tokenizer import (
    TOKENIZER_JSON,
    VOCAB_FILE,
    BertTokenizer,
    Tokenizer,
    load_tokenizer,
    model_files,
)
from tokenizer_formats.files import MAX_CHARACTERS_PER_WORD, trained_length
from utils.errors import UserError
from utils.files import read_json, write_atomically, write_json
from utils.progress import progress_bar

COUNTED_MB = 10  # of the text, whose tokens are counted before and after
UNUSED = re.compile(r"\[unused\d+\]")
# An added token that replaces whole words, also after a space.
ADDED = {"single_word": True, "lstrip": True, "rstrip": False, "normalized": True, "special": False}


def open_model(folder: Path) -> ModelChoice:
    """The config and the tokenizer in a model folder."""
    return choose_model(ModelSelection(CUSTOM), folder)


def model_inputs(folder: Path) -> list[str]:
    """The files of a model folder that decide the result."""
    files = {path for path in folder.iterdir() if path.is_file()}.union(sentence_files(folder))
    return [
        str(path)
        for path in sorted(files)
        if not path.name.endswith((OPTIMIZER_SUFFIX, PROGRESS_SUFFIX))
    ]


def change_vocabulary(
    folder: Path,
    source: Path,
    old: ModelChoice,
    paths: Sequence[Path],
    training: VocabularyOptions,
    options: ModelVocabularyOptions,
) -> dict[str, int]:
    """Writes a tokenizer for the text in `paths` to `folder`, and the model in `source` with it to
    `folder`/model.
    """
    size = min(training.sample_mb * 1_000_000, sum(path.stat().st_size for path in paths))
    counts: dict[str, int] = {}
    with progress_bar(size, "vocabulary") as bar:
        if options.extend:
            words = most_split_words(paths, training, old.tokenizer, options.add, bar.update)
            name, content = extended_vocabulary(old.tokenizer, [word for word, _, _ in words])
            rows = ["word\toccurrences\tpieces", *("\t".join(map(str, each)) for each in words)]
            write_atomically(folder / "new_words.tsv", "\n".join(rows) + "\n")
            counts["words_added"] = len(words)
        else:
            name, content = train_tokenizer(paths, training, bar.update)
    write_atomically(folder / name, content)
    casing = old.tokenizer.do_lower_case if options.extend else training.do_lower_case
    new = load_tokenizer(folder / name, casing if name == VOCAB_FILE else None)
    kept = write_model(folder / "model", source, old, new, options)
    counts |= {"tokens": new.vocab_size, "tokens_with_their_old_rows": kept}
    for when, tokenizer in (("before", old.tokenizer), ("after", new)):
        tokens, unknown = count_tokens(paths, training, tokenizer)
        counts |= {f"tokens_of_the_text_{when}": tokens, f"unknown_{when}": unknown}
    return counts


def most_split_words(
    paths: Sequence[Path],
    options: VocabularyOptions,
    tokenizer: Tokenizer,
    limit: int,
    progress: Callable[[int], Any],
) -> list[tuple[str, int, int]]:
    """The `limit` words of the text whose own tokens would save most tokens, best first, with their
    occurrences and pieces. An unknown word counts as one piece more.
    """
    counts = Counter()
    for text in read_beginnings(paths, options, progress):
        counts.update(tokenizer.words(text))
    words = [
        word
        for word, count in counts.items()
        if count >= MIN_FREQUENCY and word not in tokenizer.vocab and any(map(str.isalpha, word))
    ]
    words = [word for word in words if len(word) <= MAX_CHARACTERS_PER_WORD]
    ids, offsets = tokenizer.encode_lines((" " + "\n".join(words)).encode())
    found = []
    for word, (start, stop) in zip(words, pairwise(offsets), strict=False):
        saved = stop - start - 1 + (tokenizer.unk_token_id in ids[start:stop])
        found += (
            [(-int(saved) * counts[word], (word, counts[word], int(stop - start)))]
            if saved > 0
            else []
        )
    if not found:
        raise UserError(
            f"{tokenizer.vocab_file} splits no word of {paths[0]} that occurs twice: nothing to add"
        )
    return [word for _, word in sorted(found)[:limit]]


def extended_vocabulary(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[str, str]:
    """Name and content of the tokenizer's file with `words`: in the place of [unused...] tokens,
    then at the end. In a tokenizer.json they are added tokens, so that no other word is encoded in
    another way.
    """
    unused = sorted(
        (token_id, token) for token, token_id in tokenizer.vocab.items() if UNUSED.fullmatch(token)
    )
    replaced = dict(zip((token for _, token in unused), words, strict=False))
    appended = words[len(unused) :]
    if isinstance(tokenizer, BertTokenizer):
        return VOCAB_FILE, "".join(
            f"{replaced.get(token, token)}\n" for token in [*tokenizer.vocab, *appended]
        )
    content = read_json(tokenizer.vocab_file, "tokenizer")
    model, added = content["model"], content["added_tokens"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {
            replaced.get(token, token): token_id for token, token_id in model["vocab"].items()
        }
    else:
        model["vocab"] = [[replaced.get(token, token), score] for token, score in model["vocab"]]
    ids = {word: tokenizer.vocab[token] for token, word in replaced.items()}
    ids |= {word: tokenizer.vocab_size + place for place, word in enumerate(appended)}
    added = [token for token in added if token["content"] not in replaced]
    added += [{"id": token_id, "content": word, **ADDED} for word, token_id in ids.items()]
    content["added_tokens"] = sorted(added, key=lambda token: token["id"])
    return TOKENIZER_JSON, json.dumps(content, ensure_ascii=False, indent=2)


def row_sources(old: Tokenizer, new: Tokenizer) -> tuple[list[list[int]], int]:
    """For each new id the old ids whose rows it starts from: that of the same token, those of its
    pieces, or none; and the number of those that are the same.
    """
    old_texts, new_texts = old.texts(), new.texts()
    ids_by_text = {
        text: token_id for token_id, text in enumerate(old_texts) if text and "\ufffd" not in text
    }
    sources: list[list[int]] = [[] for _ in new_texts]
    kept = {new.vocab[token] for token in new.special_tokens.values()}
    for token, token_id in new.vocab.items():
        text, same = new_texts[token_id], old.vocab.get(token)
        # The other kind of tokenizer spells it in another way.
        if same is None or old_texts[same] != text:
            same = ids_by_text.get(text)
        sources[token_id] = old.encode(text) if same is None else [same]
        kept |= set() if same is None else {token_id}
    for role, token in new.special_tokens.items():
        sources[new.vocab[token]] = [old.vocab[old.special_tokens[role]]]
    return sources, len(kept)


def carry_rows(rows: Tensor, sources: Sequence[Sequence[int]], std: float, mean: bool) -> Tensor:
    """The mean of the rows of `rows` in each of `sources`. Random values for none, and without
    `mean` for several.
    """
    generator = torch.Generator().manual_seed(0)
    found = torch.empty(len(sources), *rows.shape[1:]).normal_(std=std, generator=generator)
    known = torch.tensor([len(ids) == 1 or (mean and len(ids) > 1) for ids in sources])
    flat = torch.tensor([token_id for ids in sources for token_id in ids])
    starts = torch.tensor([0, *map(len, sources)]).cumsum(0)[:-1]
    means = F.embedding_bag(flat, rows.float().reshape(len(rows), -1), starts, mode="mean")
    found[known] = means.reshape(found.shape)[known]
    return found.to(rows.dtype)


def write_model(
    folder: Path, source: Path, old: ModelChoice, new: Tokenizer, options: ModelVocabularyOptions
) -> int:
    """Writes the model in `source` with the tokenizer `new`. Returns the number of tokens that keep
    their rows.
    """
    sources, kept = row_sources(old.tokenizer, new)
    if options.extend:  # rows beyond the tokenizer's own vocabulary stay
        sources += [[token_id] for token_id in range(len(sources), old.config.vocab_size)]
    config = dataclasses.replace(old.config, vocab_size=len(sources)).with_padding(new.pad_token_id)
    config = config.with_vocabulary(new)
    first_row = old.config.max_position_embeddings - config.max_position_embeddings
    with torch.device("meta"):
        model = make_model("masked_lm", old.config)
    shapes = checkpoint_shapes(model)
    vocabulary = {
        f"{name}.weight"
        for name, part in model.named_modules()
        if isinstance(part, VocabularyEmbedding)
    }
    # The decoder's bias.
    vocabulary |= {name for name, shape in shapes.items() if shape == (old.config.vocab_size,)}
    tensors = {}
    for name, tensor in canonical_names(open_model_weights(source), model).items():
        if name in shapes and tensor.shape != shapes[name]:
            raise UserError(
                f"{source}: {name} is {list(tensor.shape)}, not {list(shapes[name])}: use a whole "
                "model"
            )
        values = tensor.read()[first_row if name.endswith("position_embeddings.weight") else 0 :]
        tensors[name] = values.contiguous()
        if name in vocabulary:
            std = config.initializer_range if tensors[name].dim() > 1 else 0.0
            tensors[name] = carry_rows(tensors[name], sources, std, options.new_rows == "mean")
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / MODEL_FILE, metadata={"format": "pt"})
    (folder / MODEL_FILE).chmod(folder.stat().st_mode & 0o666)  # safetensors' files are private
    architectures = read_json(source / CONFIG_FILE, "the config").get("architectures")
    write_json(folder / CONFIG_FILE, {"architectures": architectures, **config.to_dict()})
    files = model_files(new, trained_length(source, config.max_length), config.needs_tokenizer_json)
    files |= {str(path.relative_to(source)): path.read_bytes() for path in sentence_files(source)}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / name, content)
    return kept


def count_tokens(
    paths: Sequence[Path], options: VocabularyOptions, tokenizer: Tokenizer
) -> tuple[int, int]:
    """Tokens, and unknown ones, of the beginning of the text."""
    options = dataclasses.replace(options, sample_mb=min(options.sample_mb, COUNTED_MB))
    tokens = unknown = 0
    for text in read_beginnings(paths, options, lambda size: None):
        ids, _ = tokenizer.encode_lines(text.encode())
        tokens, unknown = tokens + len(ids), unknown + int((ids == tokenizer.unk_token_id).sum())
    return tokens, unknown
