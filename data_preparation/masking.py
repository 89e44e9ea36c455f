"""Chooses the tokens to predict and masks them. Legend: n samples, S sequence length, P predictions per sequence, V
vocabulary."""

import numpy as np

from data_preparation.options import SampleOptions
from tokenizer import BertTokenizer


def choose_positions(
    input_ids: np.ndarray,
    samples: np.ndarray,
    options: SampleOptions,
    continues_word: np.ndarray,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens of each row to predict: positions [n, P], ascending and zero-padded, and their number [n].

    min(P, max(1, round(prob * length))) of the tokens that are not special, every set being equally likely. With
    whole-word masking, words in random order as long as they fit. A word starts at the beginning of a segment and at
    every token that does not begin with "##"; `continues_word` [V] says which tokens do.
    """
    rows, length = input_ids.shape
    column = np.arange(length, dtype=np.int32)
    second = samples["a_length"][:, None] + 2
    text_length = samples["a_length"] + samples["b_length"]
    is_text = (column > 0) & (column < second + samples["b_length"][:, None]) & (column != second - 1)
    counts = np.rint(options.masked_lm_prob * (text_length + options.special_tokens)).astype(np.int64)
    counts = np.minimum(np.clip(counts, 1, options.predictions_per_sequence), text_length)

    # Random numbers with the column in their low bits: sorting them shuffles the columns. Excluded columns sort last.
    low_bits = np.uint32((1 << (length - 1).bit_length()) - 1)
    excluded = ~low_bits | column.astype(np.uint32)
    keys = rng.integers(0, 1 << 64, (rows, (length + 1) // 2), np.uint64).view(np.uint32)[:, :length]  # two per draw
    keys |= low_bits
    keys &= excluded
    if options.whole_word_mask:
        begins_word = ~continues_word[input_ids] | (column == 1) | (column == second)
        begins_word &= is_text
        order = np.sort(np.where(begins_word, keys, excluded), axis=1) & low_bits
        is_text = choose_words(order, begins_word, is_text, counts)
        counts = is_text.sum(axis=1)
    np.copyto(keys, excluded, where=~is_text)
    keys.sort(axis=1)
    positions = (keys[:, : options.predictions_per_sequence] & low_bits).astype(np.uint16)
    is_real = np.arange(options.predictions_per_sequence) < counts[:, None]
    positions[~is_real] = length
    positions.sort(axis=1)
    positions[~is_real] = 0
    return positions, counts


def choose_words(order: np.ndarray, begins_word: np.ndarray, is_text: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The tokens [n, S] of words that together have at most `counts` tokens [n], tried in `order`: the columns [n, S]
    where words begin, shuffled, followed by the other columns."""
    rows, length = order.shape
    word_of_column = np.maximum.accumulate(np.where(begins_word, np.arange(length), 0), axis=1)
    word_of_token = (word_of_column + np.arange(rows)[:, None] * length)[is_text]
    sizes = np.bincount(word_of_token, minlength=rows * length).reshape(rows, length)
    sizes = np.take_along_axis(sizes, order, axis=1)
    fits = np.zeros((rows, length), bool)
    left = counts.copy()
    for place in range(begins_word.sum(axis=1).max()):
        fits[:, place] = sizes[:, place] <= left
        left -= sizes[:, place] * fits[:, place]
    is_chosen = np.zeros_like(fits)
    np.put_along_axis(is_chosen, order, fits, axis=1)
    return np.take_along_axis(is_chosen, word_of_column, axis=1) & is_text


def mask_tokens(
    input_ids: np.ndarray,
    positions: np.ndarray,
    counts: np.ndarray,
    tokenizer: BertTokenizer,
    rng: np.random.Generator,
) -> np.ndarray:
    """Masks the tokens of `input_ids` at `positions` [n, P] in place and returns the original ids [n, P], zero-padded.

    80% become [MASK], 10% a random id of the whole vocabulary, 10% stay. The first `counts` [n] positions of each row
    are real."""
    flat_positions = positions + np.arange(0, input_ids.size, input_ids.shape[1])[:, None]
    originals = input_ids.take(flat_positions)
    action = rng.random(positions.shape, np.float32)
    random_ids = rng.integers(0, tokenizer.vocab_size, positions.shape, np.uint32).astype(input_ids.dtype)
    replacement = np.where(action < 0.8, input_ids.dtype.type(tokenizer.mask_token_id), random_ids)
    is_real = np.arange(positions.shape[1]) < counts[:, None]
    # The padding positions are 0: there, [CLS] must stay.
    input_ids.put(flat_positions, np.where((action < 0.9) & is_real, replacement, originals))
    originals[~is_real] = 0
    return originals
