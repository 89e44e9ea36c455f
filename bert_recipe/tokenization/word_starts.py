"""Which tokens begin a word, for whole-word masking.

Legend: n sequences, S their length, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bert_recipe.utils.words import word_spans

SEPARATOR = b"\n"  # in the place of a token that is no text


@dataclass(frozen=True)
class WordStarts:
    """Token b continues the word of the token a before it if left_V[b] == right_V[a]. If one of
    them has a part of a character, as pieces of byte-level BPE may, it does if the text says so.

    is_partial_V: whether a token has a part of a character; None: none has.
    pieces: the bytes of each token, if some have.
    """

    left_V: np.ndarray
    right_V: np.ndarray
    is_partial_V: np.ndarray | None = None
    pieces: Sequence[bytes] = ()

    def find(self, input_ids: np.ndarray, is_text: np.ndarray) -> np.ndarray:
        """Which tokens of `input_ids` [n, S] begin a word. Those that are not `is_text` [n, S],
        such as [SEP], do not, and divide words.
        """
        continues = self.left_V[input_ids[:, 1:]] == self.right_V[input_ids[:, :-1]]
        if self.is_partial_V is not None:
            is_partial = self.is_partial_V[input_ids] & is_text
            is_doubtful = is_partial[:, 1:] | is_partial[:, :-1]
            for row in np.flatnonzero(is_partial.any(axis=1)):
                is_continued = self._continues_in_text(input_ids[row], is_text[row])
                np.copyto(continues[row], is_continued, where=is_doubtful[row])
        begins_word = is_text.copy()
        begins_word[:, 1:] &= ~(continues & is_text[:, :-1])
        return begins_word

    def _continues_in_text(self, input_ids: np.ndarray, is_text: np.ndarray) -> np.ndarray:
        """Whether the text of each token but the first, [S - 1], begins within a word or within a
        character.
        """
        pieces = [
            self.pieces[token_id] if is_own else SEPARATOR
            for token_id, is_own in zip(input_ids.tolist(), is_text.tolist(), strict=True)
        ]
        token_starts_S = np.cumsum([0, *map(len, pieces)])[:-1]  # in bytes
        # A byte that is no part of a whole character becomes a lone surrogate, U+DC80 to U+DCFF.
        text = b"".join(pieces).decode("utf-8", "surrogateescape")

        # Where each character begins, in bytes of UTF-8.
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        num_bytes = 1 + np.sum([codes >= bound for bound in (0x80, 0x800, 0x10000)], axis=0)
        num_bytes[(codes >= 0xDC80) & (codes <= 0xDCFF)] = 1
        character_starts = np.concatenate([[0], np.cumsum(num_bytes)])
        is_character_start = np.zeros(character_starts[-1] + 2, bool)
        is_character_start[character_starts] = True

        # Bytes after the first one of a word are within it: +1 there, and -1 at its end, so that
        # the sum is the number of words around a byte.
        words = np.array(list(word_spans(text)), np.int64).reshape(-1, 2)
        word_bounds = character_starts[words]
        changes = np.zeros(len(is_character_start), np.int64)
        changes[word_bounds[:, 0] + 1] += 1
        changes[word_bounds[:, 1]] -= 1
        is_in_word = np.cumsum(changes) > 0

        is_within = is_in_word | ~is_character_start
        return is_within[token_starts_S[1:]]
