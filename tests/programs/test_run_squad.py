"""run_squad.py through its command line, on a tiny model and questions that it can memorize."""

import dataclasses
import json
from collections import ChainMap
from functools import partialmethod
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    NO_DROPOUT,
    TINY,
    VOCAB_FILE,
    assert_refused,
    fine_tuning_words,
    log_entries,
    read_json,
    reported,
)
from small_runs import evaluations, run_here, torchs_adamw
from squad_documents import squad_document
from torch import nn

import run_squad
from bert_recipe.checkpoint.folder import newest_checkpoint
from bert_recipe.data_loading.sample_order import sample_order
from bert_recipe.tasks.squad.files import read_squad
from bert_recipe.tasks.squad.options import SquadOptions
from bert_recipe.tasks.squad.task import SquadDataset
from bert_recipe.tokenization.tokenizer import BertTokenizer

OPTIONS = SquadOptions(max_seq_length=28, doc_stride=8, max_query_length=10)


def answers_of(document: dict) -> dict[str, str]:
    return {
        entry["id"]: entry["answers"][0]["text"] if entry["answers"] else ""
        for paragraph in document["data"][0]["paragraphs"]
        for entry in paragraph["qas"]
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("squad")
    contents = {
        "v1": squad_document(with_impossible=False),
        "v2": squad_document(with_impossible=True),
        "config": {**TINY, **NO_DROPOUT},
    }
    # The same questions, but not the same file.
    contents |= {"v1-dev": contents["v1"], "v2-dev": contents["v2"]}
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(
            json.dumps(content, indent=name.endswith("dev") or None), encoding="utf-8"
        )
    return {name: folder / f"{name}.json" for name in contents}


def arguments(files: dict[str, Path], output: Path, *extra) -> list[str]:
    """A command line without tasks. Windows are so short that a context has several."""
    training = (
        ("--train-batch-size", 8, "--learning-rate", 0.005, "--epochs", 40)
        if "--do-train" in extra
        else ()
    )
    windows = ("--max-seq-length", 28, "--doc-stride", 8, "--max-query-length", 10)
    return fine_tuning_words(
        files["config"], output, "--bert-model", "custom", *windows, *training, *extra
    )


def run(files: dict[str, Path], output: Path, *extra) -> int:
    return run_squad.main(arguments(files, output, *extra))


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("trained")
    flags = (
        "--do-train",
        "--do-eval",
        "--train-file",
        files["v1"],
        "--predict-file",
        files["v1-dev"],
    )
    assert run(files, output, *flags) == 0
    return output / "custom" / "squad"


def scores_in(report: Path) -> dict[str, float]:
    return next(entry["data"] for entry in log_entries(report) if "f1" in entry["data"])


def test_half_of_a_surrogate_pair_in_a_file_to_score_is_in_the_results(files, tmp_path, capsys):
    question = {"id": "1\udfff", "question": "Who \ud83d?"}
    question["answers"] = [{"text": "Anna \udd83"}, {"text": "Anna"}]  # needs no answer_start
    paragraphs = [{"context": "Anna \ud83d\ud83d sang.", "qas": [question]}]
    dev = tmp_path / "dev.json"
    dev.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    flags = ("--do-train", "--train-file", files["v1"], "--do-eval", "--predict-file", dev)
    assert run(files, tmp_path, *flags, "--max-steps", 2, "--eval-steps", 1) == 0
    # Of the scores at the end, not of each evaluation.
    assert capsys.readouterr().out.count("(most similar sentence ") == 1
    (line,) = (tmp_path / "custom/squad/eval_predictions.jsonl").read_text("utf-8").splitlines()
    row = json.loads(line)
    assert row["question"] == question["question"] and row["context"] == paragraphs[0]["context"]
    assert row["answers"] == ["Anna \udd83", "Anna"]


def test_log_has_the_counts_and_marks_of_nvidias_logs(trained, files):
    entries = log_entries(trained.parents[1] / "report.json")
    settings = dict(ChainMap(*(entry["data"] for entry in entries if entry["step"] == "PARAMETER")))
    squad = read_squad(files["v1"])
    dataset = SquadDataset(squad, BertTokenizer(VOCAB_FILE), OPTIONS)
    questions = len(squad.questions)
    windows = len(dataset)
    assert questions < windows
    marks = {"predict_start": True, "eval_start": True, "SEED": 42, "predict_batch_size": 8}
    counts = {"eval_samples": questions, "eval_features": windows}
    training = {"training_samples": questions, "training_features": windows, "train_batch_size": 8}
    training["steps"] = -(-40 * windows // 8)
    assert settings.items() >= (training | counts | marks).items()


def test_a_prediction_logs_the_time_of_a_thousand_windows(trained, files, tmp_path):
    article = json.dumps(squad_document(with_impossible=False)["data"][0])
    articles = [
        json.loads(article.replace('-0"', f'-0-{n}"').replace('-1"', f'-1-{n}"'))
        for n in range(130)
    ]
    (tmp_path / "many.json").write_text(json.dumps({"data": articles}))
    flags = ("--do-predict", "--predict-file", tmp_path / "many.json", "--init-checkpoint", trained)
    assert run(files, tmp_path, *flags) == 0
    (times,) = (
        e["data"] for e in log_entries(tmp_path / "report.json") if "sample_number" in e["data"]
    )
    assert times["sample_number"] >= 1000 and times["time_per_1000"] > 0


def test_predictions_after_compiled_training_are_not_compiled(files, tmp_path, monkeypatch):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend))
    flags = ("--do-train", "--train-file", files["v1"], "--max-steps", 1, "--compile", "model")
    predict = ("--do-predict", "--predict-file", files["v1"])
    assert run(files, tmp_path / "predicted", *flags, *predict) == 0
    assert len(graphs) == 1  # of training


def test_memorized_questions_are_answered_and_scored(trained, files):
    predictions = read_json(trained / "predictions.json")
    assert predictions == answers_of(read_json(files["v1"]))
    lines = (trained / "eval_predictions.jsonl").read_text().splitlines()
    rows = {row["id"]: row for row in map(json.loads, lines)}
    assert {name: row["prediction"] for name, row in rows.items()} == predictions
    assert all(row["prediction"] in row["answers"] and row["f1"] == 1 for row in rows.values())
    scores = scores_in(trained.parents[1] / "report.json")
    assert scores.pop("baselines").keys() == {"most similar sentence"}
    assert scores == {
        "exact_match": 100.0,
        "f1": 100.0,
        "F1": 100.0,
    }


def test_checkpoint_gives_the_answers_of_the_training_run(trained, files, tmp_path):
    # The folder of steps, and one of its checkpoints.
    for given in (trained, newest_checkpoint(trained)):
        assert (
            run(
                files,
                tmp_path,
                "--do-predict",
                "--predict-file",
                files["v1"],
                "--init-checkpoint",
                given,
            )
            == 0
        )
        for name in ("predictions.json", "nbest_predictions.json"):
            assert (tmp_path / "custom" / "squad" / name).read_text() == (
                trained / name
            ).read_text()
    assert not any(path.name.isdigit() for path in (tmp_path / "custom" / "squad").iterdir())


def test_v20_predicts_which_questions_have_no_answer(files, tmp_path, capsys):
    tasks = (
        "--do-train",
        "--do-eval",
        "--train-file",
        files["v2"],
        "--predict-file",
        files["v2-dev"],
    )
    flags = ("--version-2-with-negative", "--max-seq-length", 48, "--epochs", 100)
    assert run(files, tmp_path, *tasks, *flags) == 0
    folder = tmp_path / "custom" / "squad"
    expected = answers_of(read_json(files["v2"]))
    assert read_json(folder / "predictions.json") == expected
    odds = read_json(folder / "null_odds.json")
    assert {question: odd > 0 for question, odd in odds.items()} == {
        q: text == "" for q, text in expected.items()
    }
    scores = scores_in(tmp_path / "report.json")
    assert (scores["exact"], scores["HasAns_exact"], scores["NoAns_exact"], scores["best_f1"]) == (
        100,
        100,
        100,
        100,
    )
    assert "warning: f1" not in capsys.readouterr().out
    assert "warning" not in read_json(folder / "scores.json")


def test_scores_of_empty_answers_alone_are_named(files, tmp_path, capsys):
    tasks = ("--do-train", "--do-eval", "--train-file", files["v2"], "--predict-file", files["v2"])
    flags = ("--version-2-with-negative", "--max-seq-length", 48, "--epochs", 1)
    flags += ("--null-score-diff-threshold", -1e9, "--num-seeds", 2)
    assert run(files, tmp_path, *tasks, *flags) == 0
    output = capsys.readouterr().out
    before, _, after = output.partition("squad dev: ")
    assert "exact" in after and "warning: f1" in after
    assert "(most similar sentence " in before
    (scores_file,) = tmp_path.glob("*/squad/seed-42/scores.json")
    scores = read_json(scores_file)
    assert "that of the empty answer" in scores["warning"]
    # In percent, as the official scores.
    empty = scores["baselines"]["empty answer"]["f1"]
    assert empty == pytest.approx(100 * scores["NoAns_total"] / scores["total"])
    of_seeds = output.partition("squad, seeds 42 to 43: ")[2]
    assert f"f1 {empty:.1f} ± 0.0 (most similar sentence " in of_seeds
    assert f"empty answer {empty:.1f})" in of_seeds


def as_batch_of_one(stream: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """One sequence's stream as the batch of one row that transformers takes."""
    row = {name: torch.from_numpy(stream[name]) for name in ("start_positions", "end_positions")}
    return row | {
        name: torch.from_numpy(stream[name])[None] for name in ("input_ids", "token_type_ids")
    }


def test_training_losses_match_transformers(files, tmp_path):
    from transformers import BertConfig, BertForQuestionAnswering

    torch.manual_seed(0)
    reference = BertForQuestionAnswering(BertConfig.from_json_file(files["config"])).train()
    reference.save_pretrained(tmp_path / "start")
    flags = (
        "--do-train",
        "--train-file",
        files["v2"],
        "--version-2-with-negative",
        "--max-steps",
        12,
        "--log-freq",
        1,
    )
    assert run(files, tmp_path, *flags, "--init-checkpoint", tmp_path / "start") == 0
    losses = [
        data["loss"]
        for _, data in sorted(reported(tmp_path / "report.json").items())
        if "loss" in data
    ]

    options = dataclasses.replace(OPTIONS, version_2_with_negative=True)
    dataset = SquadDataset(
        read_squad(files["v2"]), BertTokenizer(VOCAB_FILE), options, training=True
    )
    optimizer = torchs_adamw(reference, 0.005)
    order = sample_order(np.arange(12 * 8), len(dataset), seed=42)
    for step, loss in enumerate(losses):
        rows = [dataset.stream(order[[place]]) for place in range(8 * step, 8 * step + 8)]
        for group in optimizer.param_groups:  # one update of warmup, from --warmup-proportion 0.1
            group["lr"] = 0.005 * min(step, (12 - step) / 11)
        # Row by row, because transformers gives probability to padding.
        expected = torch.stack([reference(**as_batch_of_one(row)).loss for row in rows]).mean()
        assert loss == pytest.approx(expected.item(), rel=1e-4)
        optimizer.zero_grad()
        expected.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
    assert len(losses) == 12
    assert losses[-1] < losses[0]


def test_a_history_of_scores_has_one_reading_of_the_development_file(files, tmp_path):
    flags = ("--do-train", "--train-file", files["v1"], "--do-eval", "--predict-file")
    flags += (files["v1-dev"], "--eval-steps", 1, "--max-steps", 3, "--resume-from-checkpoint")
    assert run(files, tmp_path, *flags, "--steps-this-run", 1) == 0
    for changed, says in (
        # to train on
        (("--doc-stride", 3, "--do-predict"), "other data (--doc-stride was 8 and is 3 now):"),
        (("--max-answer-length", 1), "--max-answer-length 30 (this run uses 1)"),
        (("--n-best-size", 2), "--n-best-size 20 (this run uses 2)"),
    ):
        result = run_here(arguments(files, tmp_path, *flags, *changed), run_squad.main)
        assert_refused(result, says)
    assert run(files, tmp_path, *flags) == 0
    (best,) = tmp_path.rglob("best")
    assert [entry["step"] for entry in evaluations(best.parent)] == [1, 2, 3]


def test_benchmark_reports_speeds_and_writes_no_results(files, tmp_path):
    tasks = (
        "--do-train",
        "--do-predict",
        "--train-file",
        files["v1"],
        "--predict-file",
        files["v1"],
    )
    benchmark = (
        "--benchmark",
        "--benchmark-steps",
        2,
        "--benchmark-warmup-steps",
        1,
        "--predict-batch-size",
        1,
    )
    assert run(files, tmp_path, *tasks, *benchmark) == 0
    figures = ChainMap(*(entry["data"] for entry in log_entries(tmp_path / "report.json")))
    assert figures["sequences_per_second"] > 0
    assert figures["inference_sequences_per_second"] > 0
    assert 0 < figures["latency_ms_median"] <= figures["latency_ms_p99"]
    assert not (tmp_path / "custom").exists()
