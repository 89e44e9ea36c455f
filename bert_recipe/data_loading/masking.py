"""Masked language modelling: chooses the tokens to predict, and masks them.

`create_pretraining_data.py` masks shards with the random numbers of a generator. For shards without
masks, the loader does it, with a function of the run's seed and the position in the sample order.

Legend: n samples, S sequence length, P masked tokens of a sequence at most, V vocabulary.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from bert_recipe.data_loading.sample_order import mix64

if TYPE_CHECKING:
    from bert_recipe.tokenization.tokenizer import Tokenizer
    from bert_recipe.tokenization.word_starts import WordStarts

DEFAULT_RATE = 0.15  # share of the tokens to mask
WEYL = np.uint64(0x9E3779B97F4A7C15)  # the increment of SplitMix64


@dataclass(frozen=True)
class MaskRule:
    """Which tokens are masked.

    max_masked: per sample.
    word_starts: with whole-word masking, which tokens begin a word; else None.
    """

    probability: float
    max_masked: int
    word_starts: "WordStarts | None" = None


def text_tokens(
    input_ids: np.ndarray, is_real: np.ndarray, special_ids: tuple[int, int]
) -> np.ndarray:
    """The tokens [n, S] that may be masked: neither padding nor one of `special_ids`, [CLS] and
    [SEP].
    """
    return is_real & (input_ids != special_ids[0]) & (input_ids != special_ids[1])


def num_random(length: int) -> int:
    """How many random numbers of 64 bits `choose_positions` needs for a sequence of `length`
    tokens: half of one per token.
    """
    return (length + 1) // 2


def choose_positions(
    input_ids: np.ndarray,
    is_text: np.ndarray,
    lengths: np.ndarray,
    rule: MaskRule,
    random: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens of each row to mask: positions [n, P], ascending and zero-padded, and their
    number [n].

    min(P, max(1, round(probability * length))) of the tokens `is_text` [n, S], that is, of those
    that are not special, every set being equally likely. With whole-word masking, words in random
    order as long as they fit. A word starts at the beginning of a segment and at every token that
    does not continue the one before it.

    lengths [n]: with special tokens.
    random: uint64 [n, num_random(S)].
    """
    length = input_ids.shape[1]
    columns = np.arange(length, dtype=np.uint32)
    places = np.arange(rule.max_masked)
    counts = np.rint(rule.probability * lengths).astype(np.int64)
    counts = np.minimum(np.clip(counts, 1, rule.max_masked), is_text.sum(axis=1))

    # Random numbers with the column in their low bits: sorting them shuffles the columns. Excluded
    # columns sort last.
    low_bits = np.uint32((1 << (length - 1).bit_length()) - 1)
    keys = random.view(np.uint32)[:, :length] & ~low_bits
    keys |= columns
    excluded = ~low_bits | columns
    if rule.word_starts is not None:
        begins_word = rule.word_starts.find(input_ids, is_text)
        order = np.sort(np.where(begins_word, keys, excluded), axis=1) & low_bits
        is_chosen = choose_words(order, begins_word, is_text, counts)
        counts = np.count_nonzero(is_chosen, axis=1)
        positions = np.zeros((len(input_ids), rule.max_masked), np.uint16)
        _, chosen_columns = np.nonzero(is_chosen)  # row by row, as a mask is filled
        positions[places < counts[:, None]] = chosen_columns
        return positions, counts
    np.copyto(keys, excluded, where=~is_text)
    keys.sort(axis=1)
    positions = (keys[:, : rule.max_masked] & low_bits).astype(np.uint16)
    is_unused = places >= counts[:, None]
    positions[is_unused] = length  # so that they sort last
    positions.sort(axis=1)
    positions[is_unused] = 0
    return positions, counts


def choose_words(
    order: np.ndarray, begins_word: np.ndarray, is_text: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """The tokens [n, S] of words that together have at most `counts` tokens [n], tried in `order`:
    the columns [n, S] where words begin, shuffled, followed by the other columns.
    """
    rows, length = order.shape
    size = rows * length
    # The flattened rows are divided into words and single tokens that are no text.
    starts = np.flatnonzero(begins_word | ~is_text)
    lengths = np.diff(starts, append=size)
    is_word = begins_word.ravel()[starts]
    # The length of the word that begins at a token; where none does, a length that never fits.
    word_lengths = np.full(size, length + 1)
    word_lengths[starts[is_word]] = lengths[is_word]

    is_first_chosen = np.zeros(size, bool)  # at the first token of each chosen word
    left = counts.copy()
    flat_order = order + np.arange(0, size, length)[:, None]
    for tokens in flat_order.T:  # of each row one
        fits = word_lengths[tokens] <= left
        is_first_chosen[tokens] = fits
        left -= word_lengths[tokens] * fits
        if not left.any():
            break
    return np.repeat(is_first_chosen[starts], lengths).reshape(rows, length)


def mask_tokens(
    input_ids: np.ndarray,
    positions: np.ndarray,
    counts: np.ndarray,
    mask_token_id: int,
    action: np.ndarray,
    random_ids: np.ndarray,
) -> np.ndarray:
    """Masks the tokens of `input_ids` at `positions` [n, P] in place and returns the original ids
    [n, P], zero-padded.

    80% become [MASK], 10% a random id of the whole vocabulary, 10% stay: as `action` [n, P],
    uniform in [0, 1), is below 0.8, below 0.9, or above. The first `counts` [n] positions of each
    row are real.
    """
    flat_positions = positions + np.arange(0, input_ids.size, input_ids.shape[1])[:, None]
    originals = input_ids.take(flat_positions)
    replacement = np.where(
        action < 0.8, input_ids.dtype.type(mask_token_id), random_ids.astype(input_ids.dtype)
    )
    is_real = np.arange(positions.shape[1]) < counts[:, None]
    # The padding positions are 0: there, [CLS] must stay.
    input_ids.put(flat_positions, np.where((action < 0.9) & is_real, replacement, originals))
    originals[~is_real] = 0
    return originals


def mask_rates(rate: float | str) -> tuple[float, float]:
    """The first and the last rate of `rate`: a number, or a schedule such as "0.3:0.15"."""
    first, _, last = str(rate).partition(":")
    return float(first), float(last or first)


def max_masked_at(rate: float | str, length: int) -> int:
    """The masked tokens of a sample of `length` tokens, at the highest rate of `rate`."""
    return max(1, round(max(mask_rates(rate)) * length))


class Masking:
    """Masks as a function of a random number per sample. rate: share of the tokens to mask (see
    `mask_rates`).
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        rate: float | str,
        max_masked: int,
        whole_word: bool,
    ):
        self.rates = mask_rates(rate)
        self.rule = MaskRule(
            self.rates[0], max_masked, tokenizer.word_starts() if whole_word else None
        )
        self.vocab_size, self.mask_token_id = tokenizer.vocab_size, tokenizer.mask_token_id
        self.special_ids = tokenizer.cls_token_id, tokenizer.sep_token_id

    def rate(self, progress: float) -> float:
        """The rate when the share `progress` of the updates is done."""
        first, last = self.rates
        return first + (last - first) * progress

    def draw(
        self, input_ids: np.ndarray, is_real: np.ndarray, seeds: np.ndarray, progress: float = 0.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Masks `input_ids` [n, S] in place. Returns the positions and the original ids [n, P],
        zero-padded.

        is_real [n, S]: which tokens are no padding.
        seeds [n]: random numbers, uint64.
        """
        length, max_masked = input_ids.shape[1], self.rule.max_masked
        # Random numbers of 64 bits for each sample: the first ones choose positions, the others
        # say what is done at each.
        num_sort = num_random(length)
        steps = np.arange(1, num_sort + max_masked + 1, dtype=np.uint64) * WEYL
        random = mix64(seeds[:, None] + steps)
        sort_random = np.ascontiguousarray(random[:, :num_sort])
        action_random = random[:, num_sort:]

        is_text = text_tokens(input_ids, is_real, self.special_ids)
        lengths = np.count_nonzero(is_real, axis=1)
        rule = replace(self.rule, probability=self.rate(progress))
        positions, counts = choose_positions(input_ids, is_text, lengths, rule, sort_random)
        # The upper 24 bits as a number in [0, 1), and the lower 32 bits as one below `vocab_size`.
        action = (action_random >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
        low_bits = action_random & np.uint64(0xFFFFFFFF)
        random_ids = (low_bits * np.uint64(self.vocab_size)) >> np.uint64(32)
        original_ids = mask_tokens(
            input_ids, positions, counts, self.mask_token_id, action, random_ids
        )
        return positions, original_ids
