"""Draws pre-training samples from a corpus: pairs of segments for next-sentence prediction, or
single segments.

The algorithm is Google's; `create_samples` in tests/support/data_creation_reference.py is its
readable form, and the tests compare this module with it. Two observations make it fast. A sample is
fully described by where its two segments are in the shard's tokens, so no sentence is copied before
the last step. And the samples of a pass start at increasing sentences, so random numbers can be
drawn per sentence instead of per sample: the chunk that would start at each sentence is computed
for all sentences at once, and `chunk_starts` then picks the sentences where one does start.

Legend: T tokens of the shard, L its sentences, D its documents, n samples, S sequence length.
"""

import numpy as np

from bert_recipe.data_loading.hdf5_shards import max_documents
from bert_recipe.data_preparation.options import SampleOptions
from bert_recipe.data_preparation.samples.corpus import Corpus
from bert_recipe.tokenization.tokenizer import Tokenizer

NO_LABEL = -1  # next_sentence_labels without next-sentence prediction

# A piece of a document, in a row of several.
PIECE = np.dtype([("row", "i8"), ("start", "i8"), ("length", "i4")])
SHORTEST_BEGINNING = 16  # tokens of a document that begins in a row after another one

# Where the two segments of a sample are in the shard's tokens.
SAMPLE = np.dtype(
    [("a_start", "i8"), ("a_length", "i4"), ("b_start", "i8"), ("b_length", "i4"), ("label", "i1")]
)


def draw_samples(corpus: Corpus, options: SampleOptions, rng: np.random.Generator) -> np.ndarray:
    """The samples of one pass over the corpus, in its order and not yet truncated [n] SAMPLE.

    A chunk is as many whole sentences of a document as reach the target length, or the rest of the
    document. Its first U[1, sentences - 1] sentences are segment A. With probability 1/2, and
    always if the chunk is a single sentence, B is random: sentences of another document, from a
    random one until the target length is reached; the next chunk then starts after A. Otherwise B
    is the rest of the chunk. Without next-sentence prediction documents are cut, see
    `cut_documents`.
    """
    sentence_starts, document_starts = corpus.sentence_starts, corpus.document_starts
    sizes_D = np.diff(document_starts)  # in sentences
    document_of_L = np.repeat(np.arange(len(sizes_D)), sizes_D)

    longest = options.sequence_length - options.special_tokens
    is_short_D = rng.random(len(sizes_D)) < options.short_seq_prob
    short_D = rng.integers(2, longest, len(sizes_D), endpoint=True)
    if not options.next_sentence_prediction:
        bounds = sentence_starts[document_starts]
        return cut_documents(bounds, np.where(is_short_D, short_D, 0), longest, rng)
    target_D = np.where(is_short_D, short_D, longest)

    # The chunk that would start at each sentence.
    begin_L = np.arange(len(document_of_L))
    target_end_L = sentence_starts[:-1] + target_D[document_of_L]  # in tokens
    end_L = np.searchsorted(sentence_starts, target_end_L)
    end_L = np.minimum(end_L, document_starts[document_of_L + 1])
    sentences_L = end_L - begin_L
    a_end_L = begin_L + 1 + (rng.random(len(begin_L)) * (sentences_L - 1)).astype(np.int64)
    is_random_L = (sentences_L == 1) | (rng.random(len(begin_L)) < 0.5)
    chosen = chunk_starts(np.where(is_random_L, a_end_L, end_L))
    samples = np.zeros(len(chosen), SAMPLE)
    is_random = is_random_L[chosen]
    samples["label"] = is_random
    samples["a_start"] = sentence_starts[chosen]
    samples["a_length"] = sentence_starts[a_end_L[chosen]] - sentence_starts[chosen]
    b_begin, b_end = a_end_L[chosen], end_L[chosen]
    if is_random.any():
        document = document_of_L[chosen[is_random]]
        other = rng.integers(0, len(sizes_D) - 1, len(document))
        other += other >= document  # any document but the sample's own
        sentence = (rng.random(len(other)) * sizes_D[other]).astype(np.int64)
        begin = document_starts[other] + sentence
        tokens_left = np.maximum(target_D[document] - samples["a_length"][is_random], 1)
        end = np.searchsorted(sentence_starts, sentence_starts[begin] + tokens_left)
        b_begin[is_random] = begin
        b_end[is_random] = np.minimum(end, document_starts[other + 1])
    samples["b_start"] = sentence_starts[b_begin]
    samples["b_length"] = sentence_starts[b_end] - sentence_starts[b_begin]
    return samples


def cut_documents(
    bounds: np.ndarray, first_D: np.ndarray, longest: int, rng: np.random.Generator
) -> np.ndarray:
    """Samples of one segment with all tokens of the documents, which are cut where a sample is
    full, also inside a sentence [n] SAMPLE.

    bounds: where documents begin, in tokens, and the last one ends [D + 1].
    first_D: tokens of the first sample of a document; 0: a random number that needs no further
        sample, so that each pass cuts elsewhere.
    longest: tokens of its other samples, but for the last one.
    """
    starts_D, sizes_D = bounds[:-1], np.diff(bounds)
    spare_D = -sizes_D % longest
    missing_D = rng.integers(0, spare_D, endpoint=True)  # of the first sample, to be full
    missing_D = np.where(first_D > 0, longest - first_D, missing_D)
    counts_D = -(-(sizes_D + missing_D) // longest)
    document_n = np.repeat(np.arange(len(counts_D)), counts_D)
    place_n = np.arange(len(document_n)) - np.repeat(np.cumsum(counts_D) - counts_D, counts_D)
    begin_n = starts_D[document_n] - missing_D[document_n] + place_n * longest
    end_n = np.minimum(begin_n + longest, bounds[1:][document_n])
    samples = np.zeros(len(document_n), SAMPLE)
    samples["label"] = NO_LABEL
    samples["a_start"] = np.maximum(begin_n, starts_D[document_n])
    samples["a_length"] = end_n - samples["a_start"]
    return samples


def count_covered(samples: np.ndarray) -> int:
    """The number of the shard's tokens that are in at least one of `samples` [n] SAMPLE."""
    start = np.concatenate([samples["a_start"], samples["b_start"]])
    stop = start + np.concatenate([samples["a_length"], samples["b_length"]])
    order = np.argsort(start)
    start, stop = start[order], stop[order]
    covered_until = np.concatenate([[0], np.maximum.accumulate(stop)[:-1]])
    return int(np.maximum(stop - np.maximum(start, covered_until), 0).sum())


def chunk_starts(next_L: np.ndarray) -> np.ndarray:
    """The sentences at which chunks start, if the chunk at sentence i is followed by one at
    `next_L[i]`.
    """
    next_start = next_L.tolist()
    sentence = 0
    chosen = []
    while sentence < len(next_start):
        chosen.append(sentence)
        sentence = next_start[sentence]
    return np.array(chosen)


def truncate(samples: np.ndarray, options: SampleOptions, rng: np.random.Generator) -> int:
    """Shortens `samples` in place to the sequence length and returns the number of tokens removed.

    Google removes one token at a time from the longer segment (from B if they are equal), from its
    front or its back with probability 1/2. In closed form: first the difference in length, then
    tokens of both segments alternately, starting with B; and the number removed from the front is
    binomial.
    """
    excess = (
        samples["a_length"]
        + samples["b_length"]
        - (options.sequence_length - options.special_tokens)
    )
    excess = np.maximum(excess, 0)
    difference = samples["a_length"] - samples["b_length"]
    until_equal = np.minimum(excess, np.abs(difference))
    alternating = excess - until_equal
    for segment, is_longer, alternating_part in (
        ("a", difference > 0, alternating // 2),
        ("b", difference <= 0, alternating - alternating // 2),
    ):
        removed = np.where(is_longer, until_equal, 0) + alternating_part
        samples[f"{segment}_start"] += rng.binomial(removed, 0.5)
        samples[f"{segment}_length"] -= removed
    return int(excess.sum())


def assemble(
    windows: np.ndarray, samples: np.ndarray, options: SampleOptions, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unmasked input_ids, input_mask and segment_ids [n, S] of `samples`.

    windows: [T + S + 1, S], row i being the S tokens from token i - S on."""
    column = np.arange(options.sequence_length, dtype=np.int32)
    second = samples["a_length"][:, None] + 2  # first column of B; the one before it is [SEP]
    last = second + samples["b_length"][:, None]
    if not options.next_sentence_prediction:
        last -= 1  # there is no B, and no [SEP] after it
    in_b = column >= second
    input_mask = column <= last
    # Windows that have A, then B, in the right columns: copying whole rows is many times faster
    # than single tokens.
    input_ids = windows[samples["a_start"] - 1 + options.sequence_length]
    np.copyto(
        input_ids, windows[samples["b_start"] - second[:, 0] + options.sequence_length], where=in_b
    )
    np.putmask(input_ids, ~input_mask, tokenizer.pad_token_id)
    input_ids[:, 0] = tokenizer.cls_token_id
    np.put_along_axis(input_ids, second - 1, tokenizer.sep_token_id, axis=1)
    np.put_along_axis(input_ids, last, tokenizer.sep_token_id, axis=1)
    return input_ids, input_mask.view(np.int8), (in_b & input_mask).view(np.int8)


def pack_documents(corpus: Corpus, options: SampleOptions, rng: np.random.Generator) -> np.ndarray:
    """One pass over the corpus in full, shuffled rows [k] PIECE: documents in random order, cut
    where a row ends.
    """
    bounds = corpus.sentence_starts[corpus.document_starts].tolist()  # of documents, in tokens
    row_tokens = options.sequence_length - 2  # without one [CLS] and [SEP]
    shortest = min(SHORTEST_BEGINNING, row_tokens)
    pieces = []
    row = 0
    room = row_tokens  # left in the row
    documents = 0  # in the row
    for document in rng.permutation(len(bounds) - 1).tolist():
        start, stop = bounds[document], bounds[document + 1]
        while start < stop:
            if room < shortest or documents == max_documents(options.sequence_length):
                row += 1
                room = row_tokens
                documents = 0
            length = min(room, stop - start)
            pieces.append((row, start, length))
            start += length
            room -= length + 2
            documents += 1
    packed = np.array(pieces, PIECE)
    packed["row"] = rng.permutation(row + 1)[packed["row"]]
    return packed[np.argsort(packed["row"], kind="stable")]


def assemble_packed(
    ids: np.ndarray, pieces: np.ndarray, options: SampleOptions, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unmasked input_ids, input_mask and segment_ids [n, S] of the rows of `pieces`, from the
    tokens `ids` [T].
    """
    rows, first_pieces, counts = np.unique(pieces["row"], return_index=True, return_counts=True)
    shape = (len(rows), options.sequence_length)
    input_ids = np.full(shape, tokenizer.pad_token_id, ids.dtype)
    input_mask = np.zeros(shape, np.int8)
    # Per piece: its tokens with [CLS] and [SEP], those of all pieces before it, its row, and where
    # it begins in the flattened rows.
    lengths = pieces["length"] + 2
    offsets = np.cumsum(lengths) - lengths
    row = np.repeat(np.arange(len(rows)), counts)
    first_piece_of_row = first_pieces[row]
    begins = row * options.sequence_length + offsets - offsets[first_piece_of_row]
    # Per token of all pieces: where it goes in the flattened rows, and where it is in `ids`.
    numbers = np.arange(lengths.sum())
    targets = numbers + np.repeat(begins - offsets, lengths)
    sources = numbers + np.repeat(pieces["start"] - 1 - offsets, lengths)  # 1: [CLS]
    # The mask has the number of the document in its row, from 1.
    document = np.arange(len(pieces)) - first_piece_of_row + 1
    input_mask.ravel()[targets] = np.repeat(document, lengths)
    input_ids.ravel()[targets] = ids.take(sources, mode="clip")
    input_ids.ravel()[begins] = tokenizer.cls_token_id
    input_ids.ravel()[begins + lengths - 1] = tokenizer.sep_token_id
    return input_ids, input_mask, np.zeros(shape, np.int8)
