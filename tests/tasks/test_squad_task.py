"""SQuAD: features against Google's algorithm, damaged files, and decoding against a loop over every
span.
"""

import bz2
import gzip
import json
import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import BERT_VOCAB_FILE, ROOT, write_json_lines
from conftest import SHARED as SHARED_DATA
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from squad_documents import document, entry, flat_row

from bert_recipe.tasks.squad.baseline import sentence_f1
from bert_recipe.tasks.squad.files import Answer, Question, Squad, read_squad
from bert_recipe.tasks.squad.options import SquadOptions, SquadTaskOptions
from bert_recipe.tasks.squad.scores import evaluate
from bert_recipe.tasks.squad.task import (
    SquadDataset,
    SquadTask,
    decode,
    max_context_bounds,
    window_bounds,
    write_predictions,
)
from bert_recipe.tokenization.tokenizer import BertTokenizer
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.output_tables import encode_table
from bert_recipe.utils.progress import printed_once

SAMPLE, SHARED = ROOT / "data/sample/squad", SHARED_DATA / "squad"
TOKENIZER = BertTokenizer(BERT_VOCAB_FILE)


def squad_of(context, answers=()):
    question = Question("q1", "what is it ?", 0, tuple(answers))
    return Squad(Path("squad.json"), [context], [question], version_2=not answers)


def google_features(squad, max_seq_length, doc_stride, max_query_length, training):
    """Google's `read_squad_examples` and `convert_examples_to_features`, on words and their tokens.
    Yields (input ids, first context position, start position, end position, max-context flag of
    each context token).
    """
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
            first_word = word_of_character[offset]
            last_word = word_of_character[offset + len(text) - 1]
            token_first = first_token_of_word[first_word]
            token_last = [*first_token_of_word, len(tokens)][last_word + 1] - 1
            token_first, token_last = tightened(
                tokens, token_first, token_last, TOKENIZER.tokenize(text)
            )
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
            if (
                training
                and question.answers
                and token_first >= start
                and token_last <= start + length - 1
            ):
                positions = (token_first - start + first, token_last - start + first)
            flags = [
                is_max_context(spans, span, position) for position in range(start, start + length)
            ]
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


REAL_FILES = [SAMPLE / "train-v1.1.json", SAMPLE / "train-v2.0.json", SHARED / "dev-v1.1.json"]


@pytest.mark.parametrize("path", REAL_FILES, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
@pytest.mark.parametrize("lengths", [(384, 128, 64), (64, 24, 12)], ids=["384", "64"])
def test_features_of_real_questions_match_google(path, lengths):
    if not path.is_file():
        pytest.skip(f"needs {path}")
    squad = read_squad(path)
    if path.is_relative_to(SHARED):  # the same articles have many questions
        squad = Squad(path, squad.contexts, squad.questions[::4], squad.version_2)
    length, stride, query = lengths
    options = SquadOptions(
        length, doc_stride=stride, max_query_length=query, version_2_with_negative=True
    )
    dataset = SquadDataset(squad, TOKENIZER, options, training=True)
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
        assert [first + place for place, flag in enumerate(flags) if flag] == list(
            range(mine, stop)
        )
        if (stream["start_positions"][feature], stream["end_positions"][feature]) != (start, end):
            # Google falls back to whole words where the answer begins or ends inside a token; ours
            # is tighter there.
            question = squad.questions[dataset.question_index[feature]]
            text, offset = question.answers[0].text, question.answers[0].answer_start
            starts, stops = dataset.context_characters[question.context].T
            assert offset not in starts or offset + len(text) not in stops
            inside_a_word += 1
    assert inside_a_word <= 0.01 * len(dataset)


def test_time_of_max_context_is_linear_in_the_number_of_windows():
    windows = window_bounds(30_000, 40, 1)
    started = time.process_time()
    bounds = max_context_bounds(windows)
    assert time.process_time() - started < 10  # 30,000^2 scores would take minutes, or 7 GB
    assert [first for first, _ in bounds[1:]] == [last for _, last in bounds[:-1]]
    # Of windows of even length, the first with the token left of its middle has the most context.
    assert bounds[1000:1003] == [(1020, 1021), (1021, 1022), (1022, 1023)]


WORDS = st.sampled_from(
    ["the", "cat", "Été", "1895-1943", "(U.S.)", "unaffable", "東京", "naïve.", "\u200b", "$5,000"]
)
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
    touched = [span for span in TOKENIZER.encode_text(context)[1] if span[0] < start + len(answer)]
    touched = [span for span in touched if span[1] > start]
    assume(answer.strip() and touched)
    dataset = SquadDataset(
        squad_of(context, answers=[Answer(answer, start)]), TOKENIZER, training=True
    )
    text = dataset.span_text(0, dataset.start_positions[0], dataset.end_positions[0])
    assert text == context[touched[0][0] : touched[-1][1]]


@pytest.mark.parametrize(
    ("context", "answer", "start", "text"),
    [
        ("He was  born in Rome.", "was born", 3, "was  born"),  # a run of spaces counts as one
        ("He was born in Rome.", "Rome", 17, "Rome"),  # off by one inside the same word
        ("He was born\nin Rome.", " born in ", 6, "born\nin"),
        ("In (1895) he", "1895", 4, "1895"),
        ("it was \ud83d Bob \udc00 again", "Bob", 9, "Bob"),  # lone surrogates
    ],
)
def test_slightly_misplaced_answer_is_found_as_in_google(context, answer, start, text):
    dataset = SquadDataset(
        squad_of(context, answers=[Answer(answer, start)]), TOKENIZER, training=True
    )
    assert dataset.span_text(0, dataset.start_positions[0], dataset.end_positions[0]) == text


def test_all_bad_questions_are_named_at_once_or_left_out(tmp_path, capsys):
    """Of all kinds: the structure of the file, and offsets."""
    wrong = [{"text": "Anne", "answer_start": 0}]
    entries = [
        *(entry(id=None), entry(), entry(), entry(id="q2", question=3)),
        *(entry(id="q3", answers=wrong), entry(id="q4", answers=[{"text": 7}])),
        *(entry(id=None), "Who?"),
    ]
    content = document(*entries)
    content["data"] += [7, {"paragraphs": [{"qas": [entry(id="q5")]}]}]
    path = tmp_path / "train.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError) as error:
        read_squad(path)
    message = str(error.value)
    assert "8 bad rows" in message and "id is missing" in message
    assert "(also at data[0]: paragraphs[0]: qas[6])" in message
    assert "question q1 is there twice" in message and "1 further kinds" in message
    options = SquadTaskOptions(train_file=path, skip_bad=True, output_dir=tmp_path)
    assert len(SquadTask.learning(options, TOKENIZER)[1]) == 1
    assert "9 bad rows are left out" in capsys.readouterr().out
    log = (tmp_path / "skipped_train.json.log").read_text()
    assert "question q3: its answer 'Anne'" in log and "context is None" in log
    options = replace(options, predict_file=path, do_eval=True)
    (prediction_set,) = SquadTask(options).prediction_sets(TOKENIZER)
    assert [question.id for question in prediction_set.dataset.squad.questions] == ["q1", "q3"]
    log = (tmp_path / "skipped_train.json.log").read_text()
    assert "question q1 is there twice" in log and "context is None" in log


def test_questions_that_are_cut_are_told(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    question = "Who is the one who is it?"  # eight tokens
    write_json_lines(path, [flat_row({"text": ["Anna"], "answer_start": [0]}, question)])
    for length, is_told in ((4, True), (8, False)):
        lengths = {"max_seq_length": 32, "max_query_length": length}
        options = SquadTaskOptions(train_file=path, predict_file=path, **lengths)
        for opens in (partial(SquadTask.learning, options), SquadTask(options, 32).prediction_sets):
            printed_once.clear()
            opens(TOKENIZER)
            told = f"{path}: 1 questions are longer than 4 tokens, and are cut"
            assert (told in capsys.readouterr().out) == is_told


@pytest.mark.parametrize("flag", [True, False])
def test_the_flag_decides_which_scores_a_file_of_v2_has_that_lacks_no_answer(tmp_path, flag):
    """Such as GermanQuAD's; the scores that can be selected are those that there are."""
    path = tmp_path / "a.json"
    path.write_text(json.dumps(document(entry(is_impossible=False))), encoding="utf-8")
    options = SquadTaskOptions(predict_file=path, do_eval=True, version_2_with_negative=flag)
    task = SquadTask(options)
    (scored,) = task.prediction_sets(TOKENIZER)
    scores = scored.finish(np.zeros((scored.dataset.token_bounds[-1], 2), np.float32), None)
    assert {*task.score_names} <= {*scores} and ("HasAns_f1" in scores) == flag


@pytest.mark.parametrize("length", [20, 18])
def test_a_stride_above_the_window_is_refused_and_the_default_fits(length):
    squad = squad_of("word " * 40)
    options = {"max_query_length": 4}
    with pytest.raises(UserError, match=f"--doc-stride {length} is above the {length - 7} tokens"):
        SquadDataset(squad, TOKENIZER, SquadOptions(length, doc_stride=length, **options))
    by_default = SquadDataset(squad, TOKENIZER, SquadOptions(length, **options))
    highest = SquadDataset(squad, TOKENIZER, SquadOptions(length, doc_stride=length - 7, **options))
    assert by_default.window_starts.tolist() == highest.window_starts.tolist()
    # A context of one window has no stride.
    short = squad_of("word " * 5)
    assert len(SquadDataset(short, TOKENIZER, SquadOptions(length, doc_stride=99, **options))) == 1


def test_a_question_per_row_is_read_as_in_hugging_faces_data_sets(tmp_path):
    """As `data` of a JSON file, and JSON lines; rows of v2.0 may have no answers."""
    answers = {"text": ["Anna"], "answer_start": [0]}
    rows = [flat_row(answers), flat_row({"text": [], "answer_start": []}, "What?") | {"id": 2}]
    nested = [
        {"id": "q1", "question": "Who?", "is_impossible": False}
        | {"answers": [{"text": "Anna", "answer_start": 0}]},
        {"id": "2", "question": "What?", "is_impossible": True, "answers": []},
    ]
    (tmp_path / "nested.json").write_text(json.dumps(document(*nested)))
    expected = read_squad(tmp_path / "nested.json")
    assert expected.version_2
    (tmp_path / "a.json").write_text(json.dumps({"version": "0.1.0", "data": rows}))
    write_json_lines(tmp_path / "a.jsonl", rows)
    for path in (tmp_path / "a.json", tmp_path / "a.jsonl"):
        assert read_squad(path) == replace(expected, path=path)
    unanswered = [{"context": "Anna sang.", "question": "Who?"}] * 2
    (tmp_path / "a.json").write_text(json.dumps({"data": unanswered}))
    squad = read_squad(tmp_path / "a.json")
    assert [question.id for question in squad.questions] == ["0", "1"] and not squad.version_2


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("a.jsonl", {"answer": "Anna", "answer_start": 0}),
        ("a.jsonl", {"answer_text": "Anna", "answer_start": 0}),
        ("a.jsonl", {"answer": {"text": "Anna", "answer_start": 0}}),
        ("a.jsonl", {"answer": ["Anna"], "answer_start": [0]}),
        ("a.csv", {"answer": "Anna", "answer_start": 0}),
        ("a.tsv.gz", {"answer": "Anna", "answer_start": 0}),
        ("a.parquet", {"answer": "Anna", "answer_start": 0}),
        ("a.csv", {"answer": "Anna", "answer_start": 0.0}),  # of pandas, where another is missing
        ("a.parquet", {"answer": "Anna", "answer_start": 0.0}),
        ("a.csv", {"answers": "Anna", "answer_start": 0}),
        ("a.jsonl", {"answers": [{"text": "Anna", "answer_start": 0}]}),
    ],
)
def test_an_answer_in_columns_is_read(tmp_path, name, columns):
    empty = dict.fromkeys(columns, "") if name[2] in "ct" else dict.fromkeys(columns)
    row = {"id": "1", "context": "Anna sang.", "question": "Who?"}
    rows = [row | columns, row | {"id": "2"} | empty]
    (tmp_path / name).write_bytes(encode_table(tmp_path / name, rows))
    squad = read_squad(tmp_path / name)
    assert [question.answers for question in squad.questions] == [(Answer("Anna", 0),), ()]
    assert squad.version_2


def test_a_list_of_rows_with_a_byte_order_mark_is_read(tmp_path):
    rows = [flat_row({"text": ["Anna"], "answer_start": [0]})]
    (tmp_path / "a.json").write_text(json.dumps(rows), encoding="utf-8-sig")
    (question,) = read_squad(tmp_path / "a.json").questions
    assert question.answers == (Answer("Anna", 0),)


@pytest.mark.parametrize("name", ["a.json.gz", "a.JSON.bz2", "a.jsonl.gz"])
def test_compressed_files_are_read(tmp_path, name):
    rows = [flat_row({"text": ["Anna"], "answer_start": [0]})]
    content = json.dumps(rows[0] if "jsonl" in name else {"data": rows}).encode()
    compress = bz2.compress if name.endswith("bz2") else gzip.compress
    (tmp_path / name).write_bytes(compress(content))
    (question,) = read_squad(tmp_path / name).questions
    assert question.answers == (Answer("Anna", 0),)
    (tmp_path / name).write_bytes(compress(content)[:-9])
    with pytest.raises(UserError, match="truncated or damaged"):
        read_squad(tmp_path / name)


DEV = read_squad(SAMPLE / "dev-v2.0.json")


def dataset_of(questions=12):
    squad = Squad(DEV.path, DEV.contexts, DEV.questions[:questions], DEV.version_2)
    options = SquadOptions(48, doc_stride=16, max_query_length=24)
    return SquadDataset(squad, TOKENIZER, options)


def random_logits(dataset, seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(2, dataset.token_bounds[-1])).astype(np.float32) * 4


def brute_force(dataset, start_logits, end_logits, n_best_size, max_answer_length):
    """For each question: {text: best (score, start logit, end logit)} of every span that decoding
    may choose, and the lowest score of [CLS].
    """
    candidates = []
    for index, question in enumerate(dataset.squad.questions):
        texts = {}
        null = math.inf
        for feature in np.flatnonzero(dataset.question_index == index):
            begin, stop = dataset.token_bounds[feature], dataset.token_bounds[feature + 1]
            starts, ends = start_logits[begin:stop].tolist(), end_logits[begin:stop].tolist()
            null = min(null, starts[0] + ends[0])
            context_positions = range(dataset.second_starts[feature], stop - begin - 1)
            max_context = range(*dataset.max_context[feature])
            allowed = [position for position in context_positions if position in max_context]
            best_starts = sorted(allowed, key=lambda position, starts=starts: -starts[position])[
                :n_best_size
            ]
            best_ends = sorted(context_positions, key=lambda position, ends=ends: -ends[position])[
                :n_best_size
            ]
            for start in best_starts:
                for end in best_ends:
                    if start <= end < start + max_answer_length:
                        offset = int(
                            dataset.window_starts[feature] - dataset.second_starts[feature]
                        )
                        spans = dataset.context_characters[question.context]
                        text = DEV.contexts[question.context][
                            spans[start + offset][0] : spans[end + offset][1]
                        ]
                        score = starts[start] + ends[end]
                        if text not in texts or score > texts[text][0]:
                            texts[text] = (score, starts[start], ends[end])
        candidates.append((question.id, texts, null))
    return candidates


@pytest.mark.parametrize(("n_best_size", "max_answer_length"), [(20, 30), (5, 3), (1, 1), (60, 10)])
def test_decoding_matches_a_loop_over_all_spans(n_best_size, max_answer_length):
    dataset = dataset_of()
    assert len(dataset) > 2 * len(dataset.squad.questions)  # several windows a question
    logits = random_logits(dataset, seed=n_best_size)
    predictions = decode(
        dataset,
        logits.T,
        SquadOptions(n_best_size=n_best_size, max_answer_length=max_answer_length),
    )
    assert predictions.null_odds is None
    for question_id, texts, _ in brute_force(dataset, *logits, n_best_size, max_answer_length):
        expected = sorted(texts.items(), key=lambda item: -item[1][0])[:n_best_size]
        entries = predictions.nbest[question_id]
        if not expected:
            assert predictions.answers[question_id] == ""
            assert [entry["text"] for entry in entries] == [""]
            continue
        assert predictions.answers[question_id] == expected[0][0]
        assert [(e["text"], e["start_logit"], e["end_logit"]) for e in entries] == [
            (text, start, end) for text, (_, start, end) in expected
        ]
        normalizer = sum(math.exp(score) for _, (score, _, _) in expected)
        for answer, (_, (score, _, _)) in zip(entries, expected, strict=True):
            assert answer["probability"] == pytest.approx(math.exp(score) / normalizer, rel=1e-9)


@pytest.mark.parametrize("threshold", [-2.0, 0.0, 1.0])
def test_no_answer_is_predicted_above_the_threshold(threshold):
    dataset = dataset_of()
    logits = random_logits(dataset, seed=3)
    logits[:, dataset.token_bounds[:-1]] += 12  # [CLS] competes
    predictions = decode(
        dataset,
        logits.T,
        SquadOptions(version_2_with_negative=True, null_score_diff_threshold=threshold),
    )
    empty = 0
    for question_id, texts, null in brute_force(dataset, *logits, 20, 30):
        best_text, (best_score, _, _) = max(texts.items(), key=lambda item: item[1][0])
        assert predictions.null_odds[question_id] == pytest.approx(null - best_score)
        assert predictions.answers[question_id] == (
            "" if null - best_score > threshold else best_text
        )
        empty += predictions.answers[question_id] == ""
        entries = predictions.nbest[question_id]
        assert sum(entry["text"] == "" for entry in entries) == 1
        assert sum(entry["probability"] for entry in entries) == pytest.approx(1)
        scores = [entry["start_logit"] + entry["end_logit"] for entry in entries]
        assert scores == sorted(scores, reverse=True)
    assert 0 < empty < len(dataset.squad.questions)


@pytest.mark.parametrize("threshold", [-1e9, -2.0, 1.0, 1e9])
def test_the_best_threshold_does_not_depend_on_the_given_one(threshold):
    questions = [
        question if number % 3 else question._replace(answers=())
        for number, question in enumerate(DEV.questions[:30])
    ]
    flags = {"version_2_with_negative": True, "do_eval": True, "predict_file": DEV.path}
    options = SquadTaskOptions(**flags, null_score_diff_threshold=threshold)
    dataset = SquadDataset(Squad(DEV.path, DEV.contexts, questions, True), TOKENIZER, options, True)
    logits = random_logits(dataset, seed=3)
    true = (dataset.start_positions, dataset.end_positions)
    for row, positions in enumerate(true):  # [CLS] without an answer
        logits[row, dataset.token_bounds[:-1] + positions] += 20
    logits[:, dataset.token_bounds[:-1]] += 30  # in doubt, none
    scores = SquadTask(options).finish(dataset, logits.T, None)
    for name in ("exact", "f1"):
        by_threshold = {}
        for odd in decode(dataset, logits.T, options).null_odds.values():
            tried = replace(options, null_score_diff_threshold=odd)
            predictions = decode(dataset, logits.T, tried)
            by_threshold[odd] = evaluate(dataset.squad, predictions.answers)[name]
        assert scores[f"best_{name}"] == pytest.approx(max(by_threshold.values()))
        assert by_threshold[scores[f"best_{name}_thresh"]] == pytest.approx(scores[f"best_{name}"])
        assert scores[f"best_{name}_thresh"] > 0
    given = decode(dataset, logits.T, options).answers
    assert scores["f1"] == pytest.approx(evaluate(dataset.squad, given)["f1"])


def test_context_without_tokens_gets_an_empty_answer():
    squad = Squad(Path("squad.json"), [" "], [Question("q1", "Who?", 0, ())], version_2=True)
    dataset = SquadDataset(squad, TOKENIZER)
    logits = random_logits(dataset, seed=0)
    for version_2 in (False, True):
        predictions = decode(dataset, logits.T, SquadOptions(version_2_with_negative=version_2))
        assert predictions.answers == {"q1": ""}


def test_prediction_files_of_a_run_before_do_not_stay(tmp_path):
    """What the files hold is in test_run_squad.py. Version 1.1 has no null odds."""
    dataset = dataset_of(questions=4)
    for options in (SquadOptions(version_2_with_negative=True), SquadOptions()):
        folder = write_predictions(
            tmp_path, decode(dataset, random_logits(dataset, 0).T, options)
        ).parent
        null_odds = ["null_odds.json"] if options.version_2_with_negative else []
        names = ["nbest_predictions.json", *null_odds, "predictions.json"]
        assert sorted(file.name for file in folder.iterdir()) == names


def test_files_of_annotation_tools_are_read_and_all_wrong_offsets_named(tmp_path, capsys):
    def question(name, text: str, start: int) -> dict:
        answers = [{"text": text, "answer_start": start}]
        return {"id": name, "question": "Who?", "answers": answers}

    paragraphs = [
        {"context": "Anna left early.", "qas": [question(7, "Anna", 0), question("b", "left", -1)]},
        {"context": "Then Boris came.", "qas": [question("c", "Boris", 10), question("d", "", -1)]},
    ]
    paragraphs[0]["qas"].append({"id": 9, "question": "Why?", "answers": None})
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    squad = read_squad(path)
    assert [question.id for question in squad.questions] == ["7", "b", "9", "c", "d"]
    tokenizer = BertTokenizer(BERT_VOCAB_FILE)
    options = {"version_2_with_negative": True, "output_dir": tmp_path}
    with pytest.raises(UserError, match=r"2 bad rows: question b: its answer .*at question c"):
        SquadDataset(squad, tokenizer, SquadOptions(**options), training=True)
    skipping = SquadOptions(skip_bad=True, **options)
    assert len(SquadDataset(squad, tokenizer, skipping, training=True)) == 3
    assert len((tmp_path / "skipped_a.json.log").read_text().splitlines()) == 2


def test_a_tsv_that_is_written_with_quoting_is_read_so(tmp_path):
    pandas = pytest.importorskip("pandas")
    context = 'She said "no"\tand\nleft.'
    row = {"id": "1", "question": "Who?", "context": context, "answer": "She", "answer_start": 0}
    for separator, name in (("\t", "a.tsv"), (",", "a.csv")):
        pandas.DataFrame([row]).to_csv(tmp_path / name, sep=separator, index=False)
        assert read_squad(tmp_path / name).contexts == [context]


def test_the_sentence_with_most_words_of_the_question_has_the_f1_of_a_whole_sentence():
    context = "Anna lived in Paris. It was Tom in Rome! Paris is what is left."
    # "Paris is what is left" shares what and is, and one of its five words is right.
    assert sentence_f1(squad_of(context, [Answer("Paris")])) == pytest.approx(2 / 6)
    assert sentence_f1(squad_of("", [Answer("Paris")])) == 0
    assert sentence_f1(squad_of("Nobody was there.")) == 0  # nor is there an answer


@pytest.mark.parametrize("start", [("id,", "1,", ","), ("", "", "")], ids=["id", "no id"])
def test_empty_rows_of_a_table_to_predict_are_kept(tmp_path, start):
    header, full, empty = start
    path = tmp_path / "a.csv"
    path.write_text(f"{header}question,context\n{empty},\n{full}Who?,Anna left.\n{empty},\n")
    assert [row["question"] for row in read_squad(path, keeps_empty=True).table()] == [
        "",
        "Who?",
        "",
    ]
    assert len(read_squad(path).questions) == 1
