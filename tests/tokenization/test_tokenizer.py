"""BERT's tokenizer against transformers on real text and all of Unicode, with and without its
cache of words.
"""

import bz2
import sys
import tracemalloc
import unicodedata
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from conftest import BERT_VOCAB_FILE, ROOT, SHARED, needs_shared_data, read_json
from hugging_face import bert_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_kinds import TRICKY, sample_texts

from bert_recipe.tokenization import tokenizer as tokenizer_module
from bert_recipe.tokenization.tokenizer import BertTokenizer

pytestmark = pytest.mark.fast

VOCAB_FILES = {True: BERT_VOCAB_FILE, False: ROOT / "vocab" / "bert-base-cased-vocab.txt"}
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@cache
def all_characters() -> list[str]:
    return [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code <= 0xDFFF]


@cache
def accents() -> str:
    return "".join(c for c in all_characters() if unicodedata.category(c) == "Mn")


def make_tokenizer(do_lower_case: bool) -> BertTokenizer:
    return BertTokenizer(VOCAB_FILES[do_lower_case], do_lower_case)


ours = cache(make_tokenizer)


def hugging_face_backend(do_lower_case: bool):
    backend = bert_tokenizer(VOCAB_FILES[do_lower_case], do_lower_case).backend_tokenizer
    backend.no_padding()  # which a call by another test leaves on
    return backend


def hugging_face_batch(
    texts: list[str], do_lower_case: bool
) -> tuple[list[list[int]], list[list[tuple[int, int]]]]:
    encoded = hugging_face_backend(do_lower_case).encode_batch(texts, add_special_tokens=False)
    return [encoding.ids for encoding in encoded], [encoding.offsets for encoding in encoded]


def rows(values: np.ndarray, offsets: np.ndarray) -> list[list]:
    return [values[begin:end].tolist() for begin, end in pairwise(offsets)]


def assert_agrees_with_hugging_face(texts: list[str], do_lower_case: bool) -> None:
    ids_and_spans = [
        tuple(a.tolist() for a in ours(do_lower_case).encode_text(text)) for text in texts
    ]
    expected_ids, expected_spans = hugging_face_batch(texts, do_lower_case)
    for text, (our_ids, our_spans), their_ids, their_spans in zip(
        texts, ids_and_spans, expected_ids, expected_spans, strict=True
    ):
        assert our_ids == their_ids, text
        # Our spans include the accents that were stripped from the last letter; theirs end before
        # them.
        ends = [
            end - len(text[begin:end]) + len(text[begin:end].rstrip(accents()))
            for begin, end in our_spans
        ]
        if do_lower_case:
            our_spans = [
                [begin, max(end, begin + 1)]
                for (begin, _), end in zip(our_spans, ends, strict=True)
            ]
        assert [tuple(span) for span in our_spans] == their_spans, text


@cache
def all_shared_texts() -> list[str]:
    texts = [path.read_text(encoding="utf-8") for path in sorted((SHARED / "books").glob("*.txt"))]
    texts.append(bz2.decompress(next((SHARED / "wiki").glob("*.bz2")).read_bytes()).decode("utf-8"))
    squad = read_json(SHARED / "squad/train-v1.1.json")
    for article in squad["data"]:
        for paragraph in article["paragraphs"]:
            texts += [
                paragraph["context"],
                *(question["question"] for question in paragraph["qas"]),
            ]
    return [line for text in texts for line in text.split("\n")]


def encode_texts(tokenizer: BertTokenizer, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """`encode_lines` of one text per line. Newlines in a text become spaces, which are the same to
    BERT.
    """
    ids, offsets = tokenizer.encode_lines(
        "\n".join(text.replace("\n", " ") for text in texts).encode()
    )
    return ids, offsets[: len(texts) + 1]


@pytest.mark.parametrize("do_lower_case", [True, False])
def test_ids_and_offsets_match_transformers_on_the_sample_text(do_lower_case):
    assert_agrees_with_hugging_face(sample_texts()[do_lower_case::2], do_lower_case)


@needs_shared_data
@pytest.mark.parametrize(("do_lower_case", "every"), [(True, 100), (False, 101)])
def test_ids_and_offsets_match_transformers_on_books_wikipedia_and_squad(do_lower_case, every):
    assert_agrees_with_hugging_face(all_shared_texts()[::every], do_lower_case)


@pytest.mark.parametrize("do_lower_case", [True, False])
def test_every_unicode_character_is_tokenized_as_in_transformers(do_lower_case):
    """Of the planes 4 to 13, which have none, of those for private use, and of the ideographs in
    planes 2 and 3 every 100th code point and the edges of their blocks. In texts of 500 words: a
    text costs transformers more than a word.
    """
    alike = (*range(0x20000, 0x2F800), *range(0x2FA20, 0xE0000), *range(0xF0000, 0x110000))
    edges = {code + shift for block in CJK for code in block for shift in (-1, 0, 1)}
    left_out = {chr(code) for code in alike if code % 100 and code not in edges}
    words = [f"x{character}y" for character in all_characters() if character not in left_out]
    texts = [" ".join(words[start : start + 500]) for start in range(0, len(words), 500)]
    ids, offsets = encode_texts(ours(do_lower_case), texts)
    backend = hugging_face_backend(do_lower_case)
    assert rows(ids, offsets) == [
        backend.encode(text, add_special_tokens=False).ids for text in texts
    ]


CJK = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2A6DF))
CJK += ((0x2A700, 0x2B73F), (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0x2F800, 0x2FA1F))


@pytest.mark.parametrize("do_lower_case", [True, False])
def test_cached_words_have_the_ids_of_whole_texts_for_every_character(do_lower_case):
    tokenizer = make_tokenizer(do_lower_case)
    characters = all_characters()
    texts = ["".join(characters[start : start + 50]) for start in range(0, 0x30000, 50)]
    texts += [" a".join(text) for text in texts[:600]]
    assert_cache_agrees(tokenizer, texts)


any_text = st.text() | st.text(st.sampled_from(TRICKY), max_size=60)


@given(st.lists(any_text, max_size=8), st.booleans())
def test_cached_words_have_the_ids_of_whole_texts_for_any_text(texts, do_lower_case):
    assert_cache_agrees(ours(do_lower_case), texts)


def assert_cache_agrees(tokenizer: BertTokenizer, texts: list[str]) -> None:
    for text, line_ids in zip(texts, rows(*encode_texts(tokenizer, texts)), strict=True):
        assert line_ids == tokenizer.encode(text)


@given(st.lists(any_text, max_size=8))
def test_invalid_utf8_is_an_error_with_its_position_and_leaves_no_state(texts):
    tokenizer = ours(True)
    before = "\n".join(texts).encode()
    with pytest.raises(UnicodeDecodeError) as error:
        tokenizer.encode_lines(before + b"good b\xffd \xfe good")
    assert error.value.start == len(before) + len(b"good b")
    assert_cache_agrees(tokenizer, texts)


@given(any_text, st.booleans())
def test_spans_are_inside_the_text_in_order_and_do_not_overlap(text, do_lower_case):
    _, spans = ours(do_lower_case).encode_text(text)
    spans = spans.tolist()
    for begin, end in spans:
        assert 0 <= begin < end <= len(text)
    for (begin, end), (next_begin, next_end) in pairwise(spans):
        # Pieces of one character may share a span: letters that decompose, such as hangul in lower
        # case.
        assert next_begin >= end or next_begin == end - 1 or (begin, end) == (next_begin, next_end)


def test_full_caches_are_cleared(monkeypatch):
    monkeypatch.setattr(tokenizer_module, "MAX_CACHED_WORDS", 50)
    tokenizer = BertTokenizer(BERT_VOCAB_FILE)
    texts = sample_texts()[:400]
    for start in range(0, 400, 20):
        assert_cache_agrees(tokenizer, texts[start : start + 20])
    assert len(tokenizer._cache) <= 50


def test_a_profiler_that_keeps_frames_does_not_disturb_the_caches():
    """Dask's profiler keeps frames, and with them every local variable, while later words are
    added.
    """
    tokenizer = BertTokenizer(BERT_VOCAB_FILE)
    frames = []
    texts = sample_texts()[:40]
    sys.setprofile(lambda frame, *_: frames.append(frame))
    try:
        rows_of_text = [rows(*encode_texts(tokenizer, [text]))[0] for text in texts]
    finally:
        sys.setprofile(None)
    assert frames and rows_of_text == rows(*encode_texts(ours(True), texts))


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("w\u200bi\u00adn\ufefft\x00er e\ufffd", ["winter", "e"]),
        ("x" * 100, None),
        ("x" * 101, ["[UNK]"]),
        ("[MASK] [sep]", ["[MASK]", "[", "sep", "]"]),
    ],
)
def test_uncased_examples(text, tokens):
    got = ours(True).tokenize(text)
    assert got == tokens if tokens is not None else got[0] != "[UNK]"


def test_a_text_without_spaces_needs_little_memory():
    tracemalloc.start()
    text = "q" * 100_000
    assert ours(True).encode_text(text)[1].tolist() == [[0, len(text)]]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * len(text)


@pytest.mark.parametrize(("words", "expected"), [(["the", "a"], True), (["The", "the"], False)])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_casing_of_a_vocabulary_is_that_of_its_words_with_any_line_ends(
    tmp_path, words, expected, end
):
    path = tmp_path / "vocab.txt"
    path.write_bytes(end.join([*SPECIAL_TOKENS, *words, ""]).encode())
    tokenizer = tokenizer_module.load_tokenizer(path)
    assert tokenizer.do_lower_case is expected and list(tokenizer.vocab) == [
        *SPECIAL_TOKENS,
        *words,
    ]
