"""Data sets of texts, as sequences `[CLS] first [SEP]` and `[CLS] first [SEP] second [SEP]`,
without padding, or with what else the tokenizer puts around texts (tokenization/layouts.py).

Legend: n sequences of the data set, N sequences of a stream, T tokens of a stream, C tokens of a
text, or labels of a classifier.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol, Self

import numpy as np

from bert_recipe.data_loading.loader import StreamDataset
from bert_recipe.data_loading.packing import Label
from bert_recipe.model.token_stream import IGNORED_LABEL
from bert_recipe.tokenization.files import MAX_UNKNOWN
from bert_recipe.tokenization.tokenizer import Tokenizer, sizes_of_words
from bert_recipe.utils.progress import print_line, print_once, progress_bar

COUNTED_TOKENS = 100_000  # of the words of a training file
# Letters of a token, in words of LONG_WORD letters or more. Texts of languages that a model was
# trained on have 3.3 or more, also tweets, Turkish with e5, and medical English with BERT. MiniLM
# has 3.0 in Spanish and 2.0 in Turkish, e5 has 2.7 in Oromo and 2.1 in Yoruba.
LONG_WORD, MIN_LETTERS = 4, 3.2


class TextSamples(StreamDataset, Protocol):
    """Texts to train on.

    input_ids: the tokens of all sequences.
    unknown_share: of the tokens that are [UNK].
    """

    input_ids: np.ndarray
    unknown_share: float

    @property
    def num_examples(self) -> int:
        """Number of examples in the file, each of which makes one or several samples."""

    def distinct_sequences(self) -> set[bytes]:
        """The tokens of the sequences."""


def warn_of_vocabulary(dataset: TextSamples, tokenizer: Tokenizer) -> None:
    """Warns of texts that the vocabulary does not have the characters of, and says if it was not
    made for their language: a model of that language usually scores higher (Rust et al., 2021, "How
    Good is Your Tokenizer?").
    """
    letters = letters_of_token(dataset.input_ids[:COUNTED_TOKENS], tokenizer)
    if dataset.unknown_share > MAX_UNKNOWN:
        print_line(
            f"warning: {dataset.unknown_share:.0%} of the tokens of the training file are [UNK]: "
            f"the model cannot tell their words apart; take one whose vocabulary has the "
            f"characters of these texts"
        )
    elif letters is not None and letters < MIN_LETTERS:
        print_line(
            f"note: the words of the training file are split into tokens of {letters:.1f} letters "
            f"on average: the vocabulary is small, or was made for another language, or the texts "
            f"have many rare words, names or codes; a model of the texts' language, or of their "
            f"field, usually scores higher"
        )


def letters_of_token(token_ids: np.ndarray, tokenizer: Tokenizer) -> float | None:
    """The mean number of letters of a token, in words of LONG_WORD letters or more; None if there
    are none, or if tokens do not show words.
    """
    sizes = sizes_of_words(token_ids, tokenizer)
    if sizes is None:
        return None
    is_long = sizes.letters >= LONG_WORD
    if not is_long.any():
        return None
    return float(sizes.letters[is_long].sum() / sizes.tokens[is_long].sum())


class SequenceDataset:
    """Sequences as rows of flat arrays (see data_loading.loader.StreamDataset).

    texts: the tokens [C] of the one or two texts of each sequence; `labels`: by name, empty for
    prediction; one per sequence [n, ...], or one per token, like `input_ids`, if `label_axis` is
    `token`. `input_ids`, `token_types`: of the tokens of all sequences, concatenated; `lengths`
    [n]: tokens per sequence; `second_starts` [n]: position of the second text's first token, or
    the sequence's length if there is none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: Sequence[Sequence[np.ndarray]],
        labels: Mapping[str, np.ndarray],
        label_axis: Literal["token", "sequence"] = "sequence",
    ):
        layouts = {count: tokenizer.layout(count) for count in {len(row) for row in texts}}
        special = {
            count: [None if part is None else np.array([part]) for part in layout.parts]
            for count, layout in layouts.items()
        }
        all_pieces: list[np.ndarray] = []
        types: list[int] = []  # of the pieces
        lengths, second_starts = [], []
        for row in texts:
            remaining = iter(row)
            pieces = [next(remaining) if part is None else part for part in special[len(row)]]
            all_pieces += pieces
            types += layouts[len(row)].types
            lengths.append(sum(map(len, pieces)))
            is_pair = len(row) == 2
            before_second = layouts[2].num_before(1) + len(row[0]) if is_pair else lengths[-1]
            second_starts.append(before_second)
        self.input_ids = np.concatenate(all_pieces).astype(np.int32)
        self.unknown_share = float((self.input_ids == tokenizer.unk_token_id).mean())
        piece_lengths = np.array([len(piece) for piece in all_pieces])
        self.token_types = np.repeat(np.array(types, np.int8), piece_lengths)
        self.lengths = np.array(lengths)
        self.second_starts = np.array(second_starts)
        self.labels = labels
        self.token_bounds = np.concatenate([[0], np.cumsum(self.lengths)])
        self.stream_labels = tuple(
            Label(name, label_axis, shape=values.shape[1:]) for name, values in labels.items()
        )
        self.num_labelled = np.zeros(len(self), np.int64)  # labelled tokens of each sequence
        if label_axis == "token":
            for values in labels.values():
                self.num_labelled += np.add.reduceat(
                    values != IGNORED_LABEL, self.token_bounds[:-1]
                )

    max_sequences_per_sample = 1
    num_cut = 0  # texts, or questions, that are longer than the model takes, and are cut
    texts_per_row = 1  # sequences in turn that are one row of the file
    num_rows: int | None = None  # of the file, if rows share texts or have several

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_examples(self) -> int:
        """Number of examples in the file, each of which makes one or several sequences."""
        return len(self) // self.texts_per_row if self.num_rows is None else self.num_rows

    @property
    def max_labelled_per_sample(self) -> int:
        return int(self.num_labelled.max(initial=0))

    def distinct_sequences(self) -> set[bytes]:
        """The tokens of the sequences, of those of a row together."""
        sequences = self.sequences()
        columns = [sequences[place :: self.texts_per_row] for place in range(self.texts_per_row)]
        return set(map(b"".join, zip(*columns, strict=True)))

    def sequences(self) -> list[bytes]:
        """The tokens of each sequence."""
        parts = np.split(self.input_ids, self.token_bounds[1:-1])
        return [tokens.tobytes() for tokens in parts]

    def part(self, indices: np.ndarray) -> Self:
        """The sequences `indices` [N] as a data set."""
        part = copy(self)
        tokens = self.rows(indices, "token")
        part.input_ids, part.token_types = self.input_ids[tokens], self.token_types[tokens]
        part.lengths, part.second_starts = self.lengths[indices], self.second_starts[indices]
        part.num_labelled = self.num_labelled[indices]
        part.token_bounds = np.concatenate([[0], np.cumsum(part.lengths)])
        part.labels = {
            name: self.labels[name][self.rows(indices, axis)]
            for name, axis, *_ in self.stream_labels
        }
        return part

    def digest(self) -> str:
        """Digest of all sequences and labels, which identifies the training data of a run."""
        digest = hashlib.sha256()
        for array in (self.input_ids, self.lengths, *self.labels.values()):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]

    def read(
        self, indices: np.ndarray, seeds: np.ndarray | None = None, progress: float = 0.0
    ) -> "SequenceSamples":
        counts = self.lengths[indices], self.num_labelled[indices], np.ones(len(indices), np.int64)
        return SequenceSamples(*counts, lambda rows: self.stream(indices[rows]))

    def stream(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The sequences `indices` [N] as a token stream (see model/token_stream.py), with all
        labels.
        """
        length_N = self.lengths[indices]
        row_T = self.rows(indices, "token")
        cu_seqlens = np.concatenate([[0], np.cumsum(length_N)])
        stream = {
            "input_ids": self.input_ids[row_T].astype(np.int64),
            "token_type_ids": self.token_types[row_T].astype(np.int64),
            "position_ids": row_T - np.repeat(self.token_bounds[indices], length_N),
            "cu_seqlens": cu_seqlens.astype(np.int32),
        }
        for name, axis, *_ in self.stream_labels:
            stream[name] = self.labels[name][self.rows(indices, axis)]
        return stream

    def rows(self, indices: np.ndarray, axis: str) -> np.ndarray:
        """Index of each sequence [N] or token [T] of `stream(indices)` in the arrays of the whole
        data set.
        """
        if axis == "sequence":
            return indices
        length_N = self.lengths[indices]
        cu_seqlens = np.concatenate([[0], np.cumsum(length_N)])
        return np.arange(cu_seqlens[-1]) + np.repeat(
            self.token_bounds[indices] - cu_seqlens[:-1], length_N
        )


class TextDataset(SequenceDataset):
    """Texts as `[CLS] text [SEP]`, or with `pairs` as `[CLS] text [SEP] pair [SEP]`, truncated to
    `max_seq_length` tokens, longest text first. `values`: label ids [n] or [n, C], or scores [n],
    for training; None for prediction. tokens_cut: share of all tokens that truncation leaves out.

    columns: the texts and pairs of the file, where they may be read in another way, too.
    groups: of the rows to learn from, if rows of one group are held out together.
    """

    columns: tuple[list[str], list[str] | None] = ([], None)
    groups: Sequence[str] = ()

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_seq_length: int,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        values: np.ndarray | None = None,
    ):
        first_ids, _ = encode(tokenizer, texts, "texts")
        whole: list[tuple[np.ndarray, ...]] = [(ids,) for ids in first_ids]
        room = max_seq_length - tokenizer.layout(1 if pairs is None else 2).num_special
        rows: list[tuple[np.ndarray, ...]] = [(ids[:room],) for ids in first_ids]
        if pairs is not None:
            second_ids, _ = encode(tokenizer, pairs, "second texts")
            pair_ids = list(zip(first_ids, second_ids, strict=True))
            whole = [*pair_ids]
            rows = [truncate_pair(first, second, room) for first, second in pair_ids]
        num_tokens = np.array([sum(map(len, row)) for row in whole])
        tokens_cut = num_tokens - np.array([sum(map(len, row)) for row in rows])
        self.max_seq_length = max_seq_length
        self.num_cut = int(np.count_nonzero(tokens_cut))
        self.tokens_cut = tokens_cut.sum() / max(1, num_tokens.sum())
        labels = {}
        if values is not None and values.dtype == np.int64:
            labels = {"labels": values}
        elif values is not None:  # labels distinguish real sequences from filler
            labels = {
                "labels": np.zeros(len(values), np.int64),
                "scores": values.astype(np.float32),
            }
        super().__init__(tokenizer, rows, labels)

    @property
    def values(self) -> np.ndarray | None:
        """The values that it was made with, numbers as float32."""
        return self.labels.get("scores", self.labels.get("labels"))

    def say_what_is_cut(self, path: Path) -> None:
        """Says which share of the texts in the file `path` the model does not see."""
        if self.num_cut:
            print_once(
                f"note: {path}: {self.num_cut / len(self):.1%} of the texts are longer than "
                f"{self.max_seq_length} tokens, and {self.tokens_cut:.1%} of all tokens are cut "
                f"off: --max-seq-length changes that"
            )


def truncate_pair(a: np.ndarray, b: np.ndarray, total: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts token by token from the longer text (the second on ties) to `total` tokens, as in
    Google's BERT.
    """
    room_for_b = max(total // 2, total - len(a))  # half, or more if `a` does not fill its half
    kept_b = min(len(b), room_for_b)
    return a[: total - kept_b], b[:kept_b]


class SequenceSamples(NamedTuple):
    """Sequences as token streams (see data_loading.loader.Samples)."""

    lengths: np.ndarray
    num_labelled: np.ndarray
    num_sequences: np.ndarray
    stream: Callable[[np.ndarray], dict[str, np.ndarray]]
    metrics: Mapping[str, float] = MappingProxyType({})


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], what: str
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Token ids [C] of each text, and the characters [C, 2] (start, stop) of each token."""
    with progress_bar(len(texts), f"tokenizing {what}", "text", delay=1) as bar:
        encoded = []
        for text in texts:
            encoded.append(tokenizer.encode_text(text))
            bar.update()
    return [ids for ids, _ in encoded], [characters for _, characters in encoded]
