"""SQuAD decoding against a loop over every span, and the prediction files."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tasks.squad import decode, write_predictions
from tasks.squad_features import SquadDataset
from tasks.squad_file import Question, Squad, SquadOptions, read_squad
from tokenizer import BertTokenizer

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = BertTokenizer(ROOT / "vocab/bert-base-uncased-vocab.txt", do_lower_case=True)
SAMPLE = read_squad(ROOT / "data/sample/squad/dev-v2.0.json")


def dataset_of(questions=12, max_seq_length=48, doc_stride=16):
    squad = Squad(SAMPLE.path, SAMPLE.contexts, SAMPLE.questions[:questions], SAMPLE.version_2)
    return SquadDataset(
        squad,
        TOKENIZER,
        SquadOptions(max_seq_length=max_seq_length, doc_stride=doc_stride, max_query_length=max_seq_length - 24),
    )


def random_logits(dataset, seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(2, dataset.token_bounds[-1])).astype(np.float32) * 4


def brute_force(dataset, start_logits, end_logits, n_best_size, max_answer_length):
    """For each question: {text: best (score, start logit, end logit)} of every span that decoding may choose, and the
    lowest score of [CLS]."""
    found = []
    for index, question in enumerate(dataset.squad.questions):
        texts, null = {}, math.inf
        for feature in np.flatnonzero(dataset.question_index == index):
            begin, stop = dataset.token_bounds[feature], dataset.token_bounds[feature + 1]
            starts, ends = start_logits[begin:stop].tolist(), end_logits[begin:stop].tolist()
            null = min(null, starts[0] + ends[0])
            context_positions = range(dataset.second_starts[feature], stop - begin - 1)
            max_context = range(*dataset.max_context[feature])
            allowed = [position for position in context_positions if position in max_context]
            best_starts = sorted(allowed, key=lambda position, starts=starts: -starts[position])[:n_best_size]
            best_ends = sorted(context_positions, key=lambda position, ends=ends: -ends[position])[:n_best_size]
            for start in best_starts:
                for end in best_ends:
                    if start <= end < start + max_answer_length:
                        offset = int(dataset.window_starts[feature] - dataset.second_starts[feature])
                        spans = dataset.context_characters[question.context]
                        text = SAMPLE.contexts[question.context][spans[start + offset][0] : spans[end + offset][1]]
                        score = starts[start] + ends[end]
                        if text not in texts or score > texts[text][0]:
                            texts[text] = (score, starts[start], ends[end])
        found.append((question.id, texts, null))
    return found


@pytest.mark.parametrize(("n_best_size", "max_answer_length"), [(20, 30), (5, 3), (1, 1), (60, 10)])
def test_decoding_matches_a_loop_over_all_spans(n_best_size, max_answer_length):
    dataset = dataset_of()
    assert len(dataset) > 2 * len(dataset.squad.questions)  # several windows a question
    logits = random_logits(dataset, seed=n_best_size)
    predictions = decode(dataset, logits.T, SquadOptions(n_best_size=n_best_size, max_answer_length=max_answer_length))
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
        for entry, (_, (score, _, _)) in zip(entries, expected, strict=True):
            assert entry["probability"] == pytest.approx(math.exp(score) / normalizer, rel=1e-9)


@pytest.mark.parametrize("threshold", [-2.0, 0.0, 1.0])
def test_no_answer_is_predicted_above_the_threshold(threshold):
    dataset = dataset_of()
    logits = random_logits(dataset, seed=3)
    logits[:, dataset.token_bounds[:-1]] += 12  # [CLS] competes
    predictions = decode(
        dataset, logits.T, SquadOptions(version_2_with_negative=True, null_score_diff_threshold=threshold)
    )
    empty = 0
    for question_id, texts, null in brute_force(dataset, *logits, 20, 30):
        best_text, (best_score, _, _) = max(texts.items(), key=lambda item: item[1][0])
        assert predictions.null_odds[question_id] == pytest.approx(null - best_score)
        assert predictions.answers[question_id] == ("" if null - best_score > threshold else best_text)
        empty += predictions.answers[question_id] == ""
        entries = predictions.nbest[question_id]
        assert sum(entry["text"] == "" for entry in entries) == 1
        assert sum(entry["probability"] for entry in entries) == pytest.approx(1)
        scores = [entry["start_logit"] + entry["end_logit"] for entry in entries]
        assert scores == sorted(scores, reverse=True)
    assert 0 < empty < len(dataset.squad.questions)


def test_context_without_tokens_gets_an_empty_answer():
    squad = Squad(Path("squad.json"), [" "], [Question("q1", "Who?", 0, ())], version_2=True)
    dataset = SquadDataset(squad, TOKENIZER)
    logits = random_logits(dataset, seed=0)
    for version_2 in (False, True):
        predictions = decode(dataset, logits.T, SquadOptions(version_2_with_negative=version_2))
        assert predictions.answers == {"q1": ""}


def test_prediction_files_hold_the_decoded_answers(tmp_path):
    dataset = dataset_of(questions=4)
    predictions = decode(dataset, random_logits(dataset, 0).T, SquadOptions(version_2_with_negative=True))
    path = write_predictions(tmp_path, predictions)
    assert json.loads(path.read_text(encoding="utf-8")) == predictions.answers
    folder = path.parent
    assert json.loads((folder / "nbest_predictions.json").read_text(encoding="utf-8")) == predictions.nbest
    assert json.loads((folder / "null_odds.json").read_text(encoding="utf-8")) == predictions.null_odds
    names = ["nbest_predictions.json", "null_odds.json", "predictions.json"]
    assert sorted(file.name for file in folder.iterdir()) == names
    write_predictions(
        tmp_path, decode(dataset, random_logits(dataset, 0).T)
    )  # v1.1 has no null odds: no stale ones stay
    assert sorted(file.name for file in folder.iterdir()) == [names[0], names[2]]
