"""SQuAD reading and features, against Google's algorithm written out and the tokenizers package."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import BertWordPieceTokenizer

from squad_dataset import Answer, Question, Squad, SquadDataset, read_squad
from tokenizer import BertTokenizer
from utils.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
VOCAB = ROOT / "vocab/bert-base-uncased-vocab.txt"
SAMPLE = ROOT / "data/sample/squad"
SHARED = ROOT.parent / "shared/data/squad"
TOKENIZER = BertTokenizer(VOCAB, do_lower_case=True)


def squad_of(context, question="what is it ?", answers=(), path="squad.json"):
    return Squad(Path(path), [context], [Question("q1", question, 0, tuple(answers))], version_2=not answers)


# --- the original, written out ----------------------------------------------------------------------------------------


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
            text, offset = question.answers[0]
            first_word, last_word = word_of_character[offset], word_of_character[offset + len(text) - 1]
            token_first = first_token_of_word[first_word]
            token_last = [*first_token_of_word, len(tokens)][last_word + 1] - 1
            token_first, token_last = improved(tokens, token_first, token_last, TOKENIZER.tokenize(text))
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
            yield TOKENIZER.convert_tokens_to_ids(sequence), first, *positions, flags


def improved(tokens, first, last, answer_tokens):
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
def test_features_on_real_questions_are_googles(path, lengths):
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    squad = read_squad(path)
    max_seq_length, doc_stride, max_query_length = lengths
    dataset = SquadDataset(
        squad,
        TOKENIZER,
        max_seq_length=max_seq_length,
        doc_stride=doc_stride,
        max_query_length=max_query_length,
        training=True,
        version_2_with_negative=True,
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
            text, offset = question.answers[0]
            starts, stops = dataset.context_characters[question.context].T
            assert offset not in starts or offset + len(text) not in stops
            inside_a_word += 1
    assert inside_a_word <= 0.01 * len(dataset)


def test_windows_are_those_of_the_tokenizers_package():
    squad = read_squad(SAMPLE / "dev-v1.1.json")
    reference = BertWordPieceTokenizer(str(VOCAB), lowercase=True)
    reference.enable_truncation(96, stride=20, strategy="only_second")
    expected = []
    for question in squad.questions:
        encoding = reference.encode(question.text, squad.contexts[question.context])
        expected += [encoding.ids, *(part.ids for part in encoding.overflowing)]
    for question in squad.questions:  # the package's stride is the overlap, which depends on the question's length
        capacity = 96 - 3 - len(TOKENIZER.encode(question.text))
        single = Squad(squad.path, squad.contexts, [question], squad.version_2)
        dataset = SquadDataset(single, TOKENIZER, max_seq_length=96, doc_stride=capacity - 20, max_query_length=40)
        for feature in range(len(dataset)):
            assert dataset.stream([feature])["input_ids"].tolist() == expected.pop(0)
    assert not expected


# --- properties -------------------------------------------------------------------------------------------------------

WORDS = st.sampled_from(["the", "cat", "Été", "1895-1943", "(U.S.)", "unaffable", "東京", "naïve.", "\u200b", "$5,000"])
SPACES = st.sampled_from([" ", "  ", "\n", "\t", "\u00a0", " \u202f"])


@st.composite
def contexts(draw):
    parts = draw(st.lists(st.tuples(WORDS, SPACES), max_size=40))
    return draw(st.sampled_from(["", " "])) + "".join(word + space for word, space in parts)


@given(contexts(), st.integers(1, 30), st.integers(0, 12), st.integers(0, 20))
@settings(max_examples=150, deadline=None)
def test_windows_cover_the_context_and_each_token_is_at_home_in_one(context, stride, query_length, spare):
    dataset = SquadDataset(
        squad_of(context, "cat " * 12),
        TOKENIZER,
        max_seq_length=12 + 4 + spare,
        doc_stride=stride,
        max_query_length=query_length,
    )
    ids = TOKENIZER.encode(context)
    home = []
    seen = set()
    for feature in range(len(dataset)):
        stream = dataset.stream([feature])
        first, start = query_length + 2, dataset.window_starts[feature]
        window = stream["input_ids"][first:-1].tolist()
        assert window == ids[start : start + len(window)]
        assert len(stream["input_ids"]) <= 12 + 4 + spare
        seen |= set(range(start, start + len(window)))
        home += [position - first + start for position in range(*dataset.max_context[feature])]
    assert seen == set(range(len(ids)))
    assert home == list(range(len(ids)))


@given(contexts(), st.data())
@settings(max_examples=150, deadline=None)
def test_answers_come_back_from_their_tokens(context, data):
    _, offsets = TOKENIZER.encode_with_offsets(context)
    assume(offsets)
    first = data.draw(st.integers(0, len(offsets) - 1))
    last = data.draw(st.integers(first, len(offsets) - 1))
    start, stop = offsets[first][0], offsets[last][1]
    squad = squad_of(context, answers=[Answer(context[start:stop], start)])
    dataset = SquadDataset(squad, TOKENIZER, max_seq_length=30, doc_stride=7, max_query_length=10, training=True)
    window_stops = dataset.window_starts + dataset.lengths - dataset.query_lengths - 3
    inside = (dataset.window_starts <= first) & (last < window_stops)
    for feature, positions in enumerate(zip(dataset.start_positions, dataset.end_positions, strict=True)):
        if inside[feature]:
            assert dataset.text(feature, *positions) == context[start:stop]
        else:
            assert positions == (0, 0)


@given(contexts(), st.data())
@settings(max_examples=150, deadline=None)
def test_an_answer_that_cuts_tokens_trains_to_the_fewest_that_hold_it(context, data):
    start = data.draw(st.integers(0, len(context)))
    answer = context[start : data.draw(st.integers(start, len(context)))]
    touched = [span for span in TOKENIZER.encode_with_offsets(context)[1] if span[0] < start + len(answer)]
    touched = [span for span in touched if span[1] > start]
    assume(answer.strip() and touched)
    dataset = SquadDataset(squad_of(context, answers=[Answer(answer, start)]), TOKENIZER, training=True)
    text = dataset.text(0, dataset.start_positions[0], dataset.end_positions[0])
    assert text == context[touched[0][0] : touched[-1][1]]


def test_a_stream_joins_features_in_the_order_asked():
    dataset = SquadDataset(read_squad(SAMPLE / "train-v1.1.json"), TOKENIZER, training=True)
    order = np.random.default_rng(0).permutation(len(dataset))[:17]
    stream = dataset.stream(order)
    parts = [dataset.stream([feature]) for feature in order]
    for name in ("input_ids", "token_type_ids", "position_ids", "start_positions", "end_positions"):
        assert stream[name].dtype == np.int64
        np.testing.assert_array_equal(stream[name], np.concatenate([part[name] for part in parts]))
    np.testing.assert_array_equal(np.diff(stream["cu_seqlens"]), dataset.lengths[order])
    assert stream["cu_seqlens"].dtype == np.int32
    np.testing.assert_array_equal(dataset.sizes(order)[:, 0], dataset.lengths[order])


@pytest.mark.parametrize(
    ("context", "answer", "start", "found"),
    [
        ("He was  born in Rome.", "was born", 3, "was  born"),  # a run of spaces counts as one
        ("He was born in Rome.", "Rome", 17, "Rome"),  # off by one inside the same word
        ("He was born\nin Rome.", " born in ", 6, "born\nin"),
        ("In (1895) he", "1895", 4, "1895"),
    ],
)
def test_a_slightly_misplaced_answer_is_found_as_in_the_original(context, answer, start, found):
    dataset = SquadDataset(squad_of(context, answers=[Answer(answer, start)]), TOKENIZER, training=True)
    assert dataset.text(0, dataset.start_positions[0], dataset.end_positions[0]) == found


def test_a_context_without_tokens_still_gives_a_feature():
    dataset = SquadDataset(squad_of(" \n "), TOKENIZER)
    assert len(dataset) == 1
    assert dataset.stream([0])["input_ids"][-1] == TOKENIZER.sep_token_id


# --- bad input --------------------------------------------------------------------------------------------------------


def qa(**changes):
    entry = {"id": "q1", "question": "Who?", "answers": [{"text": "Anna", "answer_start": 0}], **changes}
    return {key: value for key, value in entry.items() if value is not None}


def document(*entries, **paragraph):
    paragraphs = [{"context": "Anna sang.", "qas": list(entries), **paragraph}]
    return {"version": "1.1", "data": [{"title": "Anna", "paragraphs": paragraphs}]}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (json.dumps(document(qa()))[:-9], "not valid JSON"),
        (json.dumps([1]), "not a JSON object"),
        (json.dumps({"version": "1.1"}), "has no 'data'"),
        (json.dumps({"data": []}), "has no questions"),
        (json.dumps({"data": [{"title": "Anna"}]}), "article 1 has no 'paragraphs'"),
        (json.dumps(document(qa(), context=5)), "article 1, paragraph 1: 'context' is not a text"),
        (json.dumps(document(qa(id=None))), "a question has no 'id'"),
        (json.dumps(document(qa(question=None))), "question q1 has no 'question'"),
        (json.dumps(document(qa(answers="Anna"))), "question q1: 'answers' is not a list"),
        (json.dumps(document(qa(answers=[{"text": "Anna"}]))), "question q1 has no 'answer_start'"),
        (json.dumps(document(qa(answers=[{"text": "Anna", "answer_start": "0"}]))), "is not a whole number"),
        (json.dumps(document(qa(), qa())), "question q1 is there twice"),
        (json.dumps(document(qa(answers=[{"text": "Anne", "answer_start": 0}]))), "question q1: its answer 'Anne'"),
        (json.dumps(document(qa(answers=[{"text": "Anna", "answer_start": 5}]))), "not in its context at character 5"),
        (json.dumps(document(qa(answers=[{"text": "Anna", "answer_start": 500}]))), "at character 500"),
        (json.dumps(document(qa(answers=[{"text": "Anna", "answer_start": -4}]))), "at character -4"),
        (json.dumps(document(qa(answers=[{"text": " ", "answer_start": 4}]))), "question q1: its answer ' '"),
        (json.dumps(document(qa(answers=[]))), "question q1 has no answer to train on"),
    ],
)
def test_a_bad_training_file_is_refused_by_name(tmp_path, content, says):
    path = tmp_path / "train.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as error:
        SquadDataset(read_squad(path), TOKENIZER, training=True)
    assert says in str(error.value)
    assert str(path) in str(error.value)


def test_a_missing_file_is_refused_by_name():
    with pytest.raises(UserError, match=r"nowhere\.json does not exist"):
        read_squad("nowhere.json")


def test_a_file_to_predict_for_needs_no_answers(tmp_path):
    path = tmp_path / "questions.json"
    path.write_text(json.dumps(document(qa(answers=None))), encoding="utf-8")
    assert len(SquadDataset(read_squad(path), TOKENIZER)) == 1


def test_windows_without_room_for_the_context_are_refused():
    with pytest.raises(UserError, match="--max-seq-length 64 leaves no room"):
        SquadDataset(squad_of("Anna sang."), TOKENIZER, max_seq_length=64, max_query_length=64)
