"""SQuAD features against Google's algorithm, and the span task."""

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tasks.squad_features import SquadDataset, max_context_bounds, window_bounds
from tasks.squad_file import Answer, Question, Squad, SquadOptions, read_squad
from token_stream import STREAM_INPUTS
from tokenizer import BertTokenizer

ROOT = Path(__file__).resolve().parent.parent
VOCAB = ROOT / "vocab/bert-base-uncased-vocab.txt"
SAMPLE = ROOT / "data/sample/squad"
SHARED = ROOT.parent / "shared/data/squad"
TOKENIZER = BertTokenizer(VOCAB, do_lower_case=True)


def squad_of(context, question="what is it ?", answers=(), path="squad.json"):
    return Squad(Path(path), [context], [Question("q1", question, 0, tuple(answers))], version_2=not answers)


# --- Google's algorithm, as a reference -------------------------------------------------------------------------------


def google_features(squad, max_seq_length, doc_stride, max_query_length, training):
    """Google's `read_squad_examples` and `convert_examples_to_features`, on words and their tokens. Yields (input ids,
    first context position, start position, end position, max-context flag of each context token)."""
    for question in squad.questions:
        context = squad.contexts[question.context]
        words, word_of_character, in_word = [], [], False
        for character in context:
            if character in " \t\r\n\u202f":
                in_word = False
            else:
                if in_word:
                    words[-1] += character
                else:
                    words.append(character)
                in_word = True
            word_of_character.append(len(words) - 1)
        tokens, first_token_of_word = [], []
        for word in words:
            first_token_of_word.append(len(tokens))
            tokens += TOKENIZER.tokenize(word)
        query = TOKENIZER.tokenize(question.text)[:max_query_length]
        if training and question.answers:
            text, offset = question.answers[0].text, question.answers[0].answer_start
            first_word, last_word = word_of_character[offset], word_of_character[offset + len(text) - 1]
            token_first = first_token_of_word[first_word]
            token_last = [*first_token_of_word, len(tokens)][last_word + 1] - 1
            token_first, token_last = tightened(tokens, token_first, token_last, TOKENIZER.tokenize(text))
        capacity = max_seq_length - len(query) - 3
        spans, start = [], 0
        while start < len(tokens):
            length = min(len(tokens) - start, capacity)
            spans.append((start, length))
            if start + length == len(tokens):
                break
            start += min(length, doc_stride)
        for span in spans:
            start, length = span
            sequence = ["[CLS]", *query, "[SEP]", *tokens[start : start + length], "[SEP]"]
            first = len(query) + 2
            positions = (0, 0)
            if training and question.answers and token_first >= start and token_last <= start + length - 1:
                positions = (token_first - start + first, token_last - start + first)
            flags = [is_max_context(spans, span, position) for position in range(start, start + length)]
            yield [TOKENIZER.vocab[token] for token in sequence], first, *positions, flags


def tightened(tokens, first, last, answer_tokens):
    for new_first in range(first, last + 1):
        for new_last in range(last, new_first - 1, -1):
            if tokens[new_first : new_last + 1] == answer_tokens:
                return new_first, new_last
    return first, last


def is_max_context(spans, span, position):
    best_score, best_span = None, None
    for start, length in spans:
        if start <= position < start + length:
            score = min(position - start, start + length - 1 - position) + 0.01 * length
            if best_score is None or score > best_score:
                best_score, best_span = score, (start, length)
    return best_span == span


def real_files():
    return [SAMPLE / "train-v1.1.json", SAMPLE / "train-v2.0.json", SHARED / "dev-v1.1.json"]


@pytest.mark.parametrize("path", real_files(), ids=lambda path: f"{path.parts[-3]}-{path.stem}")
@pytest.mark.parametrize("lengths", [(384, 128, 64), (64, 24, 12)], ids=["384", "64"])
def test_features_of_real_questions_match_google(path, lengths):
    if not path.is_file():
        pytest.skip(f"needs {path}")
    squad = read_squad(path)
    max_seq_length, doc_stride, max_query_length = lengths
    dataset = SquadDataset(
        squad,
        TOKENIZER,
        SquadOptions(
            max_seq_length=max_seq_length,
            doc_stride=doc_stride,
            max_query_length=max_query_length,
            version_2_with_negative=True,
        ),
        training=True,
    )
    stream = dataset.stream(np.arange(len(dataset)))
    expected = list(google_features(squad, *lengths, training=True))
    assert len(dataset) == len(expected)
    inside_a_word = 0
    for feature, (ids, first, start, end, flags) in enumerate(expected):
        tokens = slice(stream["cu_seqlens"][feature], stream["cu_seqlens"][feature + 1])
        assert stream["input_ids"][tokens].tolist() == ids
        assert stream["token_type_ids"][tokens].tolist() == [0] * first + [1] * (len(ids) - first)
        assert stream["position_ids"][tokens].tolist() == list(range(len(ids)))
        mine, stop = dataset.max_context[feature]
        assert [first + place for place, flag in enumerate(flags) if flag] == list(range(mine, stop))
        if (stream["start_positions"][feature], stream["end_positions"][feature]) != (start, end):
            # Google falls back to whole words where the answer begins or ends inside a token; ours is tighter there.
            question = squad.questions[dataset.question_index[feature]]
            text, offset = question.answers[0].text, question.answers[0].answer_start
            starts, stops = dataset.context_characters[question.context].T
            assert offset not in starts or offset + len(text) not in stops
            inside_a_word += 1
    assert inside_a_word <= 0.01 * len(dataset)


# --- windows ----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 300), st.integers(1, 60), st.integers(1, 70))
@settings(max_examples=200)
def test_max_context_matches_a_loop_over_all_windows_of_each_token(num_tokens, capacity, doc_stride):
    windows = window_bounds(num_tokens, capacity, doc_stride)
    spans = [(start, stop - start) for start, stop in windows]
    assert spans[0][0] == 0 and sum(spans[-1]) == num_tokens
    for span, (first, last) in zip(spans, max_context_bounds(windows), strict=True):
        expected = [position for position in range(span[0], sum(span)) if is_max_context(spans, span, position)]
        assert list(range(first, last)) == expected


def test_time_of_max_context_is_linear_in_the_number_of_windows():
    windows = window_bounds(30_000, 40, 1)
    started = time.process_time()
    bounds = max_context_bounds(windows)
    assert time.process_time() - started < 10  # 30,000^2 scores would take minutes, or 7 GB
    assert [first for first, _ in bounds[1:]] == [last for _, last in bounds[:-1]]
    # Of windows of even length, the first with the token left of its middle has the most context.
    assert bounds[1000:1003] == [(1020, 1021), (1021, 1022), (1022, 1023)]


# --- properties -------------------------------------------------------------------------------------------------------

WORDS = st.sampled_from(["the", "cat", "Été", "1895-1943", "(U.S.)", "unaffable", "東京", "naïve.", "\u200b", "$5,000"])
SPACES = st.sampled_from([" ", "  ", "\n", "\t", "\u00a0", " \u202f"])


@st.composite
def contexts(draw):
    parts = draw(st.lists(st.tuples(WORDS, SPACES), max_size=40))
    return draw(st.sampled_from(["", " "])) + "".join(word + space for word, space in parts)


@given(contexts(), st.data())
@settings(max_examples=150, deadline=None)
def test_answer_inside_tokens_trains_to_the_fewest_tokens_that_contain_it(context, data):
    start = data.draw(st.integers(0, len(context)))
    answer = context[start : data.draw(st.integers(start, len(context)))]
    touched = [span for span in TOKENIZER.encode_with_offsets(context)[1] if span[0] < start + len(answer)]
    touched = [span for span in touched if span[1] > start]
    assume(answer.strip() and touched)
    dataset = SquadDataset(squad_of(context, answers=[Answer(answer, start)]), TOKENIZER, training=True)
    text = dataset.text(0, dataset.start_positions[0], dataset.end_positions[0])
    assert text == context[touched[0][0] : touched[-1][1]]


def test_stream_holds_the_features_in_the_given_order():
    dataset = SquadDataset(read_squad(SAMPLE / "train-v1.1.json"), TOKENIZER, training=True)
    order = np.random.default_rng(0).permutation(len(dataset))[:17]
    stream, rows = dataset.stream(order), np.array([3, 0, 11])
    parts = [dataset.stream([feature]) for feature in order]
    for name in set(stream) - {"cu_seqlens"}:
        np.testing.assert_array_equal(stream[name], np.concatenate([part[name] for part in parts]))
    np.testing.assert_array_equal(np.diff(stream["cu_seqlens"]), dataset.lengths[order])
    samples = dataset.read(order)
    np.testing.assert_array_equal(samples.lengths, dataset.lengths[order])
    for name, values in samples.stream(rows).items():
        np.testing.assert_array_equal(values, dataset.stream(order[rows])[name])
    assert set(stream) == {*STREAM_INPUTS, *(label.name for label in dataset.stream_labels)}


@pytest.mark.parametrize(
    ("context", "answer", "start", "found"),
    [
        ("He was  born in Rome.", "was born", 3, "was  born"),  # a run of spaces counts as one
        ("He was born in Rome.", "Rome", 17, "Rome"),  # off by one inside the same word
        ("He was born\nin Rome.", " born in ", 6, "born\nin"),
        ("In (1895) he", "1895", 4, "1895"),
    ],
)
def test_slightly_misplaced_answer_is_found_as_in_google(context, answer, start, found):
    dataset = SquadDataset(squad_of(context, answers=[Answer(answer, start)]), TOKENIZER, training=True)
    assert dataset.text(0, dataset.start_positions[0], dataset.end_positions[0]) == found
