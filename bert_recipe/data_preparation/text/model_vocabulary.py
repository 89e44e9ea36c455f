"""The vocabulary of a model for a new text: its own with words of the text added, or a new one."""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bert_recipe.checkpoint.derived.vocabulary import write_with_vocabulary
from bert_recipe.checkpoint.model_card import write_derived_card
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.data_preparation.options import (
    SAMPLE_MB,
    ModelVocabularyOptions,
    VocabularyOptions,
)
from bert_recipe.data_preparation.text.vocabulary import (
    MIN_FREQUENCY,
    read_beginnings,
    train_tokenizer,
)
from bert_recipe.tokenization.files import (
    MAX_CHARACTERS_PER_WORD,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    VOCAB_FILE,
)
from bert_recipe.tokenization.tokenizer import (
    BertTokenizer,
    Tokenizer,
    load_tokenizer,
    vocabulary_config,
)
from bert_recipe.utils.files import write_atomically
from bert_recipe.utils.json_files import read_json
from bert_recipe.utils.progress import progress_bar
from bert_recipe.utils.words import is_unspaced, word_spans

COUNTED_MB = 10  # of the text, whose tokens are counted before and after
CONTINUES = "##"  # before a piece that continues a word, in BERT's vocabularies
UNUSED = re.compile(r"\[unused\d+\]")
# An added token that replaces whole words, also after a space; in scripts without spaces any.
ADDED = {"single_word": True, "lstrip": True, "rstrip": False, "normalized": True, "special": False}


def change_vocabulary(
    folder: Path,
    name: str,
    source: ModelFolder,
    paths: Sequence[Path],
    training: VocabularyOptions,
    options: ModelVocabularyOptions,
) -> dict[str, int]:
    """Writes a tokenizer for the text in `paths` to `folder`, and the model in `source` with it and
    a model card to `folder`/`name`.
    """
    old = source.tokenizer
    size = min(SAMPLE_MB * 1_000_000, sum(path.stat().st_size for path in paths))
    counts: dict[str, int] = {}
    with progress_bar(size, "vocabulary") as bar:
        if options.extend:
            words = most_split_words(paths, old, options.add, bar.update)
            file_name, content = extended_vocabulary(old, [word for word, _, _ in words])
            rows = ["word\toccurrences\tpieces", *("\t".join(map(str, word)) for word in words)]
            write_atomically(folder / "new_words.tsv", "\n".join(rows) + "\n")
            counts["words_added"] = len(words)
        else:
            file_name, content = train_tokenizer(paths, training, bar.update)
    write_atomically(folder / file_name, content)
    if file_name == VOCAB_FILE:
        casing = old.casing_settings() if options.extend else training.casing.settings()
        write_atomically(folder / TOKENIZER_CONFIG, vocabulary_config(casing))
    new = load_tokenizer(folder / file_name)
    extends = options.extend is not None
    kept = write_with_vocabulary(folder / name, source, new, extends=extends)
    counts |= {"tokens": new.vocab_size, "tokens_with_their_old_rows": kept}
    is_all = sum(path.stat().st_size for path in paths) <= COUNTED_MB * 1_000_000
    what = "the_text" if is_all else f"the_first_{COUNTED_MB}_MB"
    for when, tokenizer in (("before", old), ("after", new)):
        tokens, unknown = count_tokens(paths, tokenizer)
        counts |= {f"tokens_of_{what}_{when}": tokens, f"unknown_{when}": unknown}
    facts = {count.replace("_", " "): f"{number:,}" for count, number in counts.items()}
    program = "data/prepare.py vocabulary"
    write_derived_card(folder / name, name, program, [source.name], source.name, facts)
    return counts


def most_split_words(
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    limit: int,
    progress: Callable[[int], Any],
) -> list[tuple[str, int, int]]:
    """The `limit` words of the text whose own tokens would save most tokens, best first, each with
    the number of its occurrences and of the tokens that it has now. An unknown word counts as one
    token more.
    """
    counts: Counter[str] = Counter()
    for text in read_beginnings(paths, progress):
        counts.update(tokenizer.words(text))
    if isinstance(tokenizer, BertTokenizer):
        counts = divided(counts)
    in_context = saved_in_context(paths, tokenizer)
    words = []
    for word, count in counts.items():
        is_new = word not in tokenizer.vocab and count >= MIN_FREQUENCY
        if is_new and any(map(str.isalpha, word)) and len(word) <= MAX_CHARACTERS_PER_WORD:
            words.append(word)
    ids, offsets = tokenizer.encode_lines((" " + "\n".join(words)).encode())
    candidates = []
    for word, (start, stop) in zip(words, pairwise(offsets), strict=False):
        if is_unspaced(word):
            saved = in_context.get(word, 0.0)
            pieces = len(tokenizer.encode(word.removeprefix(CONTINUES)))
        else:
            pieces = int(stop - start)
            is_unknown = tokenizer.unk_token_id in ids[start:stop]
            saved = float(pieces - 1 + is_unknown)
        if saved > 0:
            candidates.append((-saved * counts[word], (word, counts[word], pieces)))
    candidates.sort()  # most saved tokens first, because they are negative
    return [word for _, word in candidates[:limit]]


def divided(counts: Mapping[str, int]) -> Counter[str]:
    """The words of a BERT tokenizer, of which one in a script without spaces is a whole clause,
    with the words of these clauses instead, as BERT's vocabulary names them.
    """
    divided_counts: Counter[str] = Counter()
    for word, count in counts.items():
        if not is_unspaced(word):
            divided_counts[word] += count
            continue
        for start, stop in word_spans(word):
            part = word[start:stop]
            name = f"{CONTINUES}{part}" if start > 0 else part
            divided_counts[name] += count
    return divided_counts


def saved_in_context(paths: Sequence[Path], tokenizer: Tokenizer) -> dict[str, float]:
    """For words of scripts without spaces in the beginning of the text, as the vocabulary names
    them: the tokens that a token of their own would save at each occurrence. One that goes beyond
    the word, such as one of two characters, would be divided.
    """
    counts: Counter[str] = Counter()
    total: Counter[str] = Counter()
    is_bert = isinstance(tokenizer, BertTokenizer)
    for text in read_beginnings(paths, megabytes=COUNTED_MB):
        clauses = Counter(tokenizer.words(text) if is_bert else text.splitlines())
        for clause, count in clauses.items():
            if not is_unspaced(clause):
                continue
            spans = np.array(list(word_spans(clause)))
            saved_by_span = saved_tokens(clause, spans, tokenizer)
            for (start, stop), saved in zip(spans, saved_by_span, strict=True):
                word = clause[start:stop]
                if not is_unspaced(word):
                    continue
                name = f"{CONTINUES}{word}" if is_bert and start > 0 else word
                counts[name] += count
                total[name] += saved * count
    return {name: total[name] / count for name, count in counts.items()}


def saved_tokens(line: str, words: np.ndarray, tokenizer: Tokenizer) -> list[int]:
    """How many tokens each of the words would save if it was a token, [W] numbers; -1 where a token
    goes beyond the word, and would be divided. An unknown token counts as two.

    words: start and stop in `line` [W, 2].
    """
    ids, spans = tokenizer.encode_text(line)
    token_starts, token_stops = spans.T
    first_tokens = np.searchsorted(token_stops, words[:, 0], "right").tolist()
    stop_tokens = np.searchsorted(token_starts, words[:, 1], "left").tolist()
    is_unknown = ids == tokenizer.unk_token_id
    saved = []
    for (start, stop), first, end in zip(words.tolist(), first_tokens, stop_tokens, strict=True):
        has_unknown = bool(is_unknown[first:end].any())
        goes_beyond = False
        if first < end:
            before_word = line[token_starts[first] : start]  # a token may have the space before it
            goes_beyond = token_stops[end - 1] > stop or before_word.strip() != ""
        if goes_beyond and not has_unknown:
            saved.append(-1)
        else:
            saved.append(max(end - first - 1, 0) + int(has_unknown))
    return saved


def extended_vocabulary(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[str, str]:
    """Name and content of the tokenizer's file with `words`: in the place of [unused...] tokens,
    then at the end. In a tokenizer.json they are added tokens, so that no other word is encoded in
    another way.
    """
    unused = [token for token in tokenizer.vocab if UNUSED.fullmatch(token)]
    unused.sort(key=lambda token: tokenizer.vocab[token])
    new_name = dict(zip(unused, words, strict=False))  # such as {"[unused0]": "covid"}
    appended = words[len(unused) :]
    if isinstance(tokenizer, BertTokenizer):
        tokens = [new_name.get(token, token) for token in tokenizer.vocab] + list(appended)
        return VOCAB_FILE, "".join(f"{token}\n" for token in tokens)
    content = read_json(tokenizer.vocab_file, "tokenizer")
    model = content["model"]
    if isinstance(model["vocab"], dict):
        ids = model["vocab"]
        model["vocab"] = {new_name.get(token, token): ids[token] for token in ids}
    else:  # of a Unigram model, with scores
        model["vocab"] = [[new_name.get(token, token), score] for token, score in model["vocab"]]
    id_of_word = {word: tokenizer.vocab[token] for token, word in new_name.items()}
    for number, word in enumerate(appended):
        id_of_word[word] = tokenizer.vocab_size + number
    added = [token for token in content["added_tokens"] if token["content"] not in new_name]
    for word, token_id in id_of_word.items():
        is_single = not is_unspaced(word)
        added.append({"id": token_id, "content": word, **ADDED, "single_word": is_single})
    content["added_tokens"] = sorted(added, key=lambda token: token["id"])
    return TOKENIZER_JSON, json.dumps(content, ensure_ascii=False, indent=2)


def count_tokens(paths: Sequence[Path], tokenizer: Tokenizer) -> tuple[int, int]:
    """Tokens, and unknown ones, of the beginning of the text."""
    tokens = unknown = 0
    for text in read_beginnings(paths, megabytes=COUNTED_MB):
        ids, _ = tokenizer.encode_lines(text.encode())
        tokens += len(ids)
        unknown += int((ids == tokenizer.unk_token_id).sum())
    return tokens, unknown
