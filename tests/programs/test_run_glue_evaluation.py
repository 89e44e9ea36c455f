"""Scores of run_glue.py: the best checkpoint, scores that are not defined, seeds and folds."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from conftest import VOCAB_FILE, assert_refused, read_json, reported
from glue_runs import (
    WORDS,
    own_files,
    run,
    scores_in,
    sentences,
    sst_2,
    words,
    write_csv,
)
from processes import exit_codes, start_several
from safetensors.torch import load_file
from small_runs import evaluations, files_of, run_here

import report
import run_embeddings
import run_glue
from bert_recipe.checkpoint.folder import find_model_folder
from bert_recipe.training import prediction, workflow
from bert_recipe.training.trainer import Trainer
from bert_recipe.utils.errors import UserError


@pytest.fixture(scope="module")
def files(glue_files) -> Path:
    return glue_files


@pytest.mark.parametrize("place", ["last update", "prediction"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_seeds_wherever_it_comes(
    files, tmp_path, monkeypatch, capsys, place, number, code
):
    """No further seed begins, and the same command goes on."""
    owner, name = {
        "last update": (Trainer, "optimizer_step"),
        "prediction": (workflow, "predict_all"),
    }[place]
    original, calls = getattr(owner, name), []

    def signalled(*arguments):
        calls.append(1)
        if len(calls) == {"last update": 2, "prediction": 1}[place]:
            os.kill(os.getpid(), number)
        return original(*arguments)

    monkeypatch.setattr(owner, name, signalled)
    flags = (*own_files(files, "--do-train", "--do-eval"), "--num-seeds", 2, "--max-steps", 2)
    before = signal.getsignal(number)
    assert run(files, tmp_path, *flags) == code
    folder = tmp_path / "custom" / "classification"
    assert len([*folder.glob("seed-*/2")]) == 1 and not (folder / "scores.json").exists()
    assert signal.getsignal(number) == before
    if (place, number) != ("last update", signal.SIGINT):
        says = "stopped by a signal: rerun the same command with --resume-from-checkpoint\n"
        assert says in capsys.readouterr().out
    assert run(files, tmp_path, *flags, "--resume-from-checkpoint") == 0
    assert len([*folder.glob("seed-*/scores.json")]) == 2 and (folder / "scores.json").exists()


def signalled_in_prediction(argv: list[str]) -> int:
    original = prediction.predict

    def signalled(*arguments, **options):
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments, **options)

    prediction.predict = signalled
    return run_glue.main(argv)


def test_a_signal_to_one_process_in_a_prediction_meets_no_collective_of_another(files, tmp_path):
    argv = words(files, tmp_path, *own_files(files, "--do-train", "--do-eval"), "--max-steps", 1)
    processes = start_several(argv, tmp_path / "log", function=signalled_in_prediction)
    assert exit_codes(processes) == [0, 2]
    assert "stopped by a signal: rerun" in (tmp_path / "log.0").read_text()
    assert "another rank failed" in (tmp_path / "log.1").read_text()


@pytest.mark.parametrize("change", ["damaged", "gone"])
def test_a_best_model_that_is_damaged_or_gone_ends_a_resumed_run(files, tmp_path, change):
    """Its weights would have the final scores if no later evaluation is better."""
    flags = (*sst_2(files, "--do-train", "--do-eval"), "--resume-from-checkpoint")
    flags += ("--max-steps", 3, "--eval-steps", 1, "--learning-rate", 1e-9)
    assert run(files, tmp_path, *flags, "--steps-this-run", 2) == 0
    folder = tmp_path / "custom/sst-2"
    assert str((folder / "best").readlink()) == "1"
    weights = folder / "1/model.safetensors"
    if change == "damaged":
        weights.write_bytes(weights.read_bytes()[:-2] + b"\0\1")
    else:
        shutil.rmtree(folder / "1")
        with pytest.raises(UserError, match="1, the step with the best score, is gone"):
            find_model_folder(folder)
    with pytest.raises(UserError, match=r"1/model.*is damaged|1, the best model .*, is gone"):
        run(files, tmp_path, *flags)
    assert not (folder / "3").exists()
    assert find_model_folder(folder / "2") == folder / "2"


@pytest.mark.parametrize("steps_before", [2, 4])
def test_a_run_without_evaluations_does_not_remove_or_ignore_the_best_model(
    files, tmp_path, steps_before
):
    """Of a run that is not finished, and of a finished one."""
    flags = (*sst_2(files, "--do-train", "--do-eval"), "--resume-from-checkpoint")
    flags += ("--max-steps", 4)
    folder = tmp_path / "custom" / "sst-2"
    evaluates = ("--eval-steps", 2)
    assert run(files, tmp_path, *flags, "--steps-this-run", 1) == 0
    assert run(files, tmp_path, *flags, *evaluates, "--steps-this-run", steps_before - 1) == 0
    before = files_of(folder)
    result = run_here(words(files, tmp_path, *flags), run_glue.main)
    assert_refused(result, "has the best model of its evaluations", "add --eval-steps as before")
    assert files_of(folder) == before
    assert run(files, tmp_path, *flags, *evaluates) == 0
    assert [entry["step"] for entry in evaluations(folder)] == [2, 4]
    longer = ("--max-steps", 6, *evaluates, "--steps-this-run", 1)
    assert run(files, tmp_path, *flags, *longer) == 0
    assert not (folder / "scores.json").exists()  # it was of step 4


def test_another_casing_is_refused_also_for_texts_that_have_no_capitals(files, tmp_path):
    flags = (*sst_2(files, "--do-train"), "--max-steps", 2, "--resume-from-checkpoint")
    assert run(files, tmp_path, *flags, "--steps-this-run", 1) == 0
    changed = words(files, tmp_path, *flags, "--do-lower-case", "false")
    says = "the casing of the vocabulary was lower-cased; this run uses cased"
    assert_refused(run_here(changed, run_glue.main), says)
    assert run(files, tmp_path, *flags) == 0


@pytest.mark.parametrize("changed", [("--max-seq-length", 8), ("--do-lower-case", "false")])
def test_a_history_of_scores_has_one_reading_of_the_development_file(files, tmp_path, changed):
    """Only texts of the development file differ by the flags."""
    train = [("sea", "a"), ("ship", "b"), ("river", "a"), ("bank", "b")]
    dev = [("The Sea and the ship on the river at the bank", "a"), ("ship", "b")]
    for name, rows in (("train.csv", train), ("dev.csv", dev)):
        write_csv(tmp_path / name, ("text", "label"), *rows)
    flags = ("--do-train", "--train-file", tmp_path / "train.csv", "--text-column", "text")
    flags += ("--label-column", "label", "--eval-file", tmp_path / "dev.csv", "--eval-steps", 1)
    flags += ("--max-steps", 2, "--resume-from-checkpoint")
    assert run(files, tmp_path, *flags, "--steps-this-run", 1) == 0
    result = run_here(words(files, tmp_path, *flags, *changed), run_glue.main)
    assert_refused(result, "another reading of the development data")
    assert run(files, tmp_path, *flags) == 0


def test_names_of_files_that_are_not_utf_8_are_names_like_others(files, tmp_path):
    """Of data, vocabulary and results: saved, resumed, scored with the best model and predicted."""
    folder = tmp_path / os.fsdecode(b"m\xfcnchen")
    folder.mkdir()
    train, dev, vocab = (
        folder / os.fsdecode(b"\xe4" + name) for name in (b"t.csv", b"d.csv", b"v")
    )
    for path, source in ((train, "train.csv"), (dev, "dev.csv")):
        shutil.copy(files / source, path)
    shutil.copy(VOCAB_FILE, vocab)
    flags = ("--text-column", "review", "--label-column", "verdict", "--vocab-file", vocab)
    flags += ("--do-train", "--do-eval", "--train-file", train, "--eval-file", dev)
    flags += ("--max-steps", 2, "--eval-steps", 1, "--resume-from-checkpoint")
    flags += ("--learning-rate", 1e-9)  # so that step 1 is the best
    assert run(files, folder, *flags, "--steps-this-run", 1) == 0
    assert run(files, folder, *flags) == 0
    results = folder / "custom" / "classification"
    assert scores_in(results)
    card = (results / "best" / "README.md").read_text(encoding="utf-8")
    assert "| training file | \N{REPLACEMENT CHARACTER}t.csv |" in card
    predict = ("--do-predict", "--predict-file", dev, "--text-column", "review")
    start = ("--init-checkpoint", results)
    assert run(files, folder / "again", *predict, *start) == 0
    report.main([str(folder)])


# Task: the rows of the file to score, the flags, and why its score is not defined.
SCORED = ("--text-column", "text", "--label-column", "label")
UNDEFINED = {
    "regression": ([("sea", "3"), ("ship", "3")], (*SCORED, "--regression"), "all labels are 3"),
    "similarity": (
        [("sea", "3"), ("ship", "3")],
        ("--text-column", "text", "--pair-column", "text2"),
        "all scores are 3",
    ),
    "multi-label": (
        [("sea", ""), ("ship", "")],
        (*SCORED, "--task-name", "multi-label"),
        "no text has a label",
    ),
}


@pytest.mark.parametrize("case", UNDEFINED)
def test_a_score_that_no_model_can_change_is_not_defined(files, tmp_path, case):
    dev, flags, why = UNDEFINED[case]
    train = [("sea", "1"), ("ship", "2"), ("river", "1")]
    for name, rows in (("train.csv", train), ("dev.csv", dev)):
        rows = [(text, f"{text} too", label) for text, label in rows]
        write_csv(tmp_path / name, ("text", "text2", "label"), *rows)
    if case == "similarity":
        flags = (*flags, "--label-column", "label")
    flags += ("--do-train", "--train-file", tmp_path / "train.csv", "--max-steps", 1)
    flags += ("--eval-file", tmp_path / "dev.csv")
    program = run_embeddings if case == "similarity" else run_glue
    result = run_here(words(files, tmp_path, *flags, "--eval-steps", 1), program.main)
    assert_refused(result, "is not defined for the file to score", why, "leave out --eval-steps")
    result = run_here(words(files, tmp_path, *flags), program.main)
    assert result.returncode == 0, result.stderr
    assert f"since {why}" in result.stdout.partition("step 1/1")[0], "warned before training"
    assert "not defined" in result.stdout.splitlines()[-1]
    (scores,) = tmp_path.glob("custom/*/scores.json")
    assert None in read_json(scores).values()


def test_training_ends_early_without_a_better_score_and_is_not_continued(files, tmp_path, capsys):
    flags = (*sst_2(files, "--do-train", "--do-eval"), "--eval-steps", 3, "--early-stopping", 2)
    flags += ("--resume-from-checkpoint", "--learning-rate", 1e-9)
    for is_new in (True, False):
        assert run(files, tmp_path, *flags) == 0
        folder = tmp_path / "custom" / "sst-2"
        history = evaluations(folder)
        assert [entry["step"] for entry in history] == [3, 6, 9]
        assert scores_in(folder) == {"accuracy": history[0]["accuracy"]}
        output = capsys.readouterr().out
        assert f"best: accuracy {history[0]['accuracy']:.6g} at step 3" in output
        assert ("starts from random weights" in output) is is_new
        assert sorted(path.name for path in folder.iterdir() if path.name.isdigit()) == ["3", "9"]


def test_any_score_of_the_task_selects_the_best_checkpoint(files, tmp_path):
    flags = (*own_files(files, "--do-train", "--do-eval"), "--max-steps", 6, "--eval-steps", 1)
    flags += ("--seed", 3, "--resume-from-checkpoint")
    metric = ("--metric-for-best-model", "eval_f1_macro")  # as Trainer names it
    assert run(files, tmp_path, *flags, *metric) == 0
    folder = tmp_path / "custom" / "classification"
    history = evaluations(folder)
    best = max(history, key=lambda entry: entry["f1_macro"])
    assert scores_in(folder)["f1_macro"] == best["f1_macro"]
    assert str((folder / "best").readlink()) == str(best["step"])
    result = run_here(words(files, tmp_path, *flags), run_glue.main)
    assert_refused(result, "--metric-for-best-model f1_macro (this run uses None)")


def test_several_seeds_are_runs_of_their_own_with_mean_and_deviation(files, tmp_path):
    flags = (*sst_2(files, "--do-train", "--do-eval"), "--max-steps", 6, "--seed", 7)
    assert run(files, tmp_path / "three", *flags, "--num-seeds", 3) == 0
    folder = tmp_path / "three" / "custom" / "sst-2"
    scores = [read_json(folder / f"seed-{seed}" / "scores.json")["accuracy"] for seed in (7, 8, 9)]
    summary = read_json(folder / "scores.json")
    mean = sum(scores) / 3
    assert summary["accuracy_mean"] == pytest.approx(mean)
    assert summary["accuracy_std"] == pytest.approx(
        (sum((score - mean) ** 2 for score in scores) / 2) ** 0.5
    )
    weights = {
        seed: load_file(folder / f"seed-{seed}" / "6" / "model.safetensors") for seed in (7, 8, 9)
    }
    assert not torch.equal(weights[7]["classifier.weight"], weights[8]["classifier.weight"])
    assert run(files, tmp_path / "one", *flags, "--seed", 8) == 0
    alone = load_file(tmp_path / "one" / "custom" / "sst-2" / "6" / "model.safetensors")
    assert all(torch.equal(weights[8][name], alone[name]) for name in alone)
    with pytest.raises(UserError, match="has a run without --num-seeds"):
        run(files, tmp_path / "one", *flags, "--num-seeds", 2)
    assert max(reported(tmp_path / "three" / "report-seed-9.json")) == 6
    for refused, says in (
        (flags, "has the runs of several seeds or folds, such as seed-7: add --num-seeds"),
        ((*flags, "--num-seeds", 3), "seed-7 already holds step 6: add --resume-from-checkpoint"),
        (
            (*sst_2(files, "--do-eval"), "--init-checkpoint", folder / "seed-7"),
            "has the runs of several seeds or folds",
        ),
    ):
        assert_refused(run_here(words(files, tmp_path / "three", *refused), run_glue.main), says)
        assert read_json(folder / "scores.json") == summary

    shutil.rmtree(folder / "seed-7")
    with pytest.raises(
        UserError,
        match=r"seed-9 already holds step 6: add --resume-from-checkpoint .* or --overwrite",
    ):
        shutil.rmtree(folder / "seed-8")
        run(files, tmp_path / "three", *flags, "--num-seeds", 3)
    assert not (folder / "seed-7").exists()  # refused before the first seed's run


def test_a_score_that_is_not_defined_for_a_fold_has_no_mean(files, tmp_path):
    # In one fold, both are for training.
    rows = [(f"a {word}", "4" if word in ("ship", "cloud") else "3") for word in WORDS]
    write_csv(tmp_path / "train.csv", ("text", "label"), *rows)
    flags = ("--do-train", "--do-eval", "--train-file", tmp_path / "train.csv", *SCORED)
    flags += ("--regression", "--max-steps", 1, "--num-folds", 3)
    result = run_here(words(files, tmp_path, *flags), run_glue.main)
    assert result.returncode == 0, result.stderr
    assert "pearson_mean not defined" in result.stdout.splitlines()[-1]
    summary = (tmp_path / "custom/regression/scores.json").read_text()
    assert json.loads(summary)["pearson_mean"] is None and "NaN" not in summary
    report.main([str(tmp_path)])
    page = (tmp_path / "report.html").read_text()
    assert ">not defined<" in page and "nan" not in page


def test_folds_are_runs_whose_scored_rows_are_the_file_and_a_fraction_is_one(files, tmp_path):
    flags = ("--text-column", "review", "--label-column", "verdict", "--max-steps", 3)
    flags += ("--do-train", "--do-eval", "--train-file", files / "train.csv")
    assert run(files, tmp_path, *flags, "--num-folds", 3) == 0
    folder = tmp_path / "custom" / "classification"
    scores, rows = [], []
    for number in (1, 2, 3):
        fold = folder / f"fold-{number}"
        scores.append(read_json(fold / "scores.json")["accuracy"])
        rows += (fold / "eval_predictions.csv").read_text().splitlines()[1:]
    texts = [text for text, _ in sentences(48, 0)]
    assert sorted(row.split(",")[0] for row in rows) == sorted(texts)
    summary = read_json(folder / "scores.json")
    assert summary["accuracy_mean"] == pytest.approx(sum(scores) / 3)
    report.main([str(tmp_path)])
    page = (tmp_path / "report.html").read_text()
    assert "classification, folds 1 to 3" in page and " ± " in page and "fold 2" in page

    seeds = (*flags, "--do-eval", "--eval-file", files / "dev.csv", "--num-seeds", 2)
    for kind, others in (("fold", seeds), ("seed", (*flags, "--num-folds", 3))):
        for path in list(folder.glob("fold-*")):
            path.rename(folder / path.name.replace("fold", kind))
        before = files_of(folder)
        with pytest.raises(UserError, match=f"several seeds or folds, such as {kind}-1: add"):
            run(files, tmp_path, *others)
        assert files_of(folder) == before  # the means, too

    assert run(files, tmp_path / "share", *flags, "--eval-fraction", 0.25) == 0
    scored = tmp_path / "share" / "custom" / "classification" / "eval_predictions.csv"
    assert len(scored.read_text().splitlines()) == 1 + 12
