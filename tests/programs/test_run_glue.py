"""run_glue.py through its command line, on a tiny model and texts that it can learn by heart."""

import csv
import json
import random
import shutil
from functools import partial
from math import nan
from pathlib import Path

import pytest
import torch
from conftest import read_json, reported
from glue_runs import (
    own_files,
    predictions_in,
    run,
    scores_in,
    sentences,
    sst_2,
    words,
    write_csv,
)
from processes import exit_codes, fine_tune_on_ports, free_port, start_several
from safetensors.torch import load_file, save_file
from small_runs import evaluations, files_of, rewrite_manifest
from transformers import pipeline

import inference
import report
import run_glue
from bert_recipe.training import setup
from bert_recipe.utils.errors import UserError


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def files(glue_files) -> Path:
    return glue_files


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory) -> Path:
    """The results of SST-2."""
    output = tmp_path_factory.mktemp("trained")
    assert run(files, output, *sst_2(files, "--do-train", "--do-eval", "--do-predict")) == 0
    return output / "custom" / "sst-2"


def test_a_rule_is_learnt_scored_and_predicted_and_transformers_predicts_the_same(trained):
    assert scores_in(trained) == {"accuracy": 1.0}
    assert predictions_in(trained / "SST-2.tsv") == [label for _, label in sentences(21, 1)]
    assert read_json(trained / "48" / "config.json")["id2label"] == {"0": "0", "1": "1"}
    losses = [
        data["loss"] for _, data in sorted(reported(trained.parents[1] / "report.json").items())
    ]
    assert losses[-1] < 0.1 < losses[0]
    classify = pipeline("text-classification", model=str(trained / "48"), device="cpu")
    texts = [text for text, _ in sentences(21, 1)]
    assert [result["label"] for result in classify(texts)] == predictions_in(trained / "SST-2.tsv")


def test_results_have_the_name_of_the_models_folder_or_its_checkpoints_and_beside_them_a_report(
    trained, files, tmp_path, monkeypatch, capsys
):
    model = tmp_path / "my-bert"
    model.mkdir()
    for name in ("config.json", "vocab.txt", "model.safetensors"):
        (model / name).write_bytes((trained / "48" / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    flags = [
        "--device",
        "cpu",
        *sst_2(files, "--do-train", "--do-eval"),
        "--max-steps",
        2,
        "--eval-steps",
        1,
    ]
    for start, output in (
        ("my-bert", "a"),
        ("a/my-bert/sst-2", "b"),
        ("b/my-bert/sst-2/best", "c"),
    ):
        command = [
            *flags,
            "--max-seq-length",
            16,
            "--init-checkpoint",
            start,
            "--output-dir",
            output,
        ]
        assert run_glue.main([str(word) for word in command]) == 0
        assert (tmp_path / output / "my-bert" / "sst-2" / "scores.json").is_file()
    assert "sst-2  step 1/2 " in capsys.readouterr().out
    assert sorted(reported(tmp_path / "c" / "my-bert" / "sst-2" / "report.json")) == [1, 2]
    report.main(["c"])
    page = (tmp_path / "c" / "report.html").read_text()
    assert "Accuracy" in page and "confusion matrix" in page.lower()


def learn_numbers(files: Path, folder: Path, numbers: tuple[int, int], *flags: object) -> float:
    """Pearson's correlation of a run whose texts have one of two numbers, by a rule."""
    rows = [(text, numbers[int(label)]) for text, label in sentences(48, 0)]
    table = write_csv(folder / "rows.csv", ("text", "label"), *rows)
    flags = (*flags, "--train-file", table, "--eval-file", table, "--regression")
    flags += ("--text-column", "text", "--label-column", "label", "--do-train", "--do-eval")
    assert run(files, folder, *flags) == 0
    (scores,) = folder.glob("*/regression/scores.json")
    return read_json(scores)["pearson"]


@pytest.mark.parametrize("numbers", [(1000, 5000), (2005, 2000)])
def test_numbers_far_from_0_are_learnt_like_those_near_it(numbers, files, tmp_path):
    assert learn_numbers(files, tmp_path, numbers, "--epochs", 16) > 0.95


def test_an_earlier_run_of_numbers_is_resumed(files, tmp_path):
    """Its config has no `problem_type`."""
    learn_numbers(files, tmp_path, (0, 1), "--max-steps", 1)
    (checkpoint,) = tmp_path.glob("*/regression/1")
    config, progress = (
        read_json(checkpoint / name) for name in ("config.json", "model_progress.json")
    )
    del config["problem_type"]
    progress["identity"]["architecture"].pop("problem_type", None)
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / "model_progress.json").write_text(json.dumps(progress))
    rewrite_manifest(checkpoint)
    learn_numbers(files, tmp_path, (0, 1), "--max-steps", 2, "--resume-from-checkpoint")
    assert read_json(checkpoint.parent / "2" / "config.json")["problem_type"] == "regression"


def test_a_model_of_other_numbers_goes_on_from_what_it_has_learnt(files, tmp_path, capsys):
    """Also where larger ones mean the opposite; numbers alike leave it as it is. That is logged
    after the settings of the run, which open the logs.
    """
    assert learn_numbers(files, tmp_path, (0, 1), "--epochs", 16) > 0.95
    (model,) = tmp_path.glob("*/regression/*/model.safetensors")
    for name, numbers in {"far": (1000, 5000), "opposite": (-300, -400), "alike": (0, 2)}.items():
        folder = tmp_path / name
        folder.mkdir()
        capsys.readouterr()
        flags = ("--init-checkpoint", model.parent, "--max-steps", 2, "--learning-rate", 1e-5)
        assert learn_numbers(files, folder, numbers, *flags) > 0.95
        assert ("was fitted to other numbers" in capsys.readouterr().out) == (name != "alike")
        (log,) = folder.rglob("report.json")
        first_record = log.read_text().splitlines()[0]
        assert '"step": "PARAMETER"' in first_record and "starting_weights" in first_record


def test_a_model_of_classes_has_no_numbers_to_scale(files, tmp_path, capsys):
    """Its output layer is left out, and the new one begins at the numbers."""
    assert run(files, tmp_path, *own_files(files, "--do-train"), "--max-steps", 1) == 0
    (model,) = tmp_path.glob("*/classification/*/model.safetensors")
    flags = ("--init-checkpoint", model.parent, "--max-steps", 1)
    learn_numbers(files, tmp_path, (1000, 5000), *flags)
    assert "was fitted to other numbers" not in capsys.readouterr().out


def test_that_there_is_no_checkpoint_is_said_once_for_all_seeds(files, tmp_path, capsys):
    flags = ("--num-seeds", 2, "--resume-from-checkpoint", "--max-steps", 1)
    assert run(files, tmp_path, *own_files(files, "--do-train"), *flags) == 0
    folder = tmp_path / "custom" / "classification"
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "no checkpoint" in line]
    assert line == f"no checkpoint in {folder} yet: starting at step 1"
    shutil.rmtree(max(folder.glob("seed-*")))
    assert run(files, tmp_path, *own_files(files, "--do-train"), *flags) == 0
    assert "no checkpoint in" not in capsys.readouterr().out


def test_overwriting_leaves_no_result_of_the_run_before(files, tmp_path, capsys):
    """Of a task with two submission files; what the program did not write stays."""
    folder = tmp_path / "custom" / "mnli"
    flags = ("--task-name", "MNLI", "--data-dir", files / "MNLI", "--do-train")
    run(files, tmp_path, *flags, "--do-eval", "--do-predict", "--seed", 1, "--max-steps", 2)
    (folder / "notes.tsv").touch()
    assert scores_in(folder).keys() == {"matched_accuracy", "mismatched_accuracy"}
    for name in ("MNLI-m.tsv", "MNLI-mm.tsv"):
        assert set(predictions_in(folder / name)) <= {"entailment", "neutral", "contradiction"}
    run(files, tmp_path, *flags, "--seed", 2, "--max-steps", 1, "--overwrite")
    assert {path.name for path in folder.iterdir()} == {"1", ".lock", "notes.tsv"}
    assert f"--overwrite: removed the run in {folder} with step 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "says"), [(None, "are missing"), (nan, "finite"), (0, "are zero")]
)
def test_overwriting_keeps_the_run_where_the_new_one_cannot_start(
    files, tmp_path, capsys, value, says
):
    folder, weights = tmp_path / "custom" / "mnli", tmp_path / "new" / "custom"
    flags = ("--task-name", "MNLI", "--data-dir", files / "MNLI", "--max-steps", 1, "--do-train")
    run(files, tmp_path, *flags)
    before = files_of(folder)
    shutil.copytree(folder / "1", weights)
    (weights / "manifest.json").unlink()
    tensors = load_file(weights / "model.safetensors")
    embeddings = tensors.pop("bert.embeddings.word_embeddings.weight")
    if value is not None:
        tensors["bert.embeddings.word_embeddings.weight"] = torch.full_like(embeddings, value)
    save_file(tensors, weights / "model.safetensors")
    with pytest.raises(UserError, match=says):
        run(files, tmp_path, *flags, "--overwrite", "--init-checkpoint", weights)
    with pytest.raises(UserError, match="cannot write"):
        run(files, tmp_path, *flags, "--overwrite", "--report-file", "/proc/none/report.json")
    assert files_of(folder) == before
    assert "--overwrite: removed" not in capsys.readouterr().out


def test_the_estimate_of_memory_reads_and_writes_nothing(tmp_path, files, capsys):
    flags = (
        "--task-name",
        "mrpc",
        "--data-dir",
        tmp_path / "none",
        "--do-train",
        "--estimate-memory",
        2,
    )
    assert run(files, tmp_path / "out", *flags) == 0
    assert "memory of each of 2 x cpu" in capsys.readouterr().out and list(tmp_path.iterdir()) == []


def test_micro_batches_of_a_memory_estimate_are_no_larger_than_an_update(files, tmp_path, capsys):
    estimates = []
    for batch in (["--global-batch-size", 6], ["--batch-size", 3]):
        flags = ("--task-name", "mrpc", "--data-dir", tmp_path, "--do-train", *batch)
        assert run(files, tmp_path / "out", *flags, "--estimate-memory", 2) == 0
        estimates.append(capsys.readouterr().out)
    assert estimates[0] == estimates[1] and "3 x" in estimates[0]
    assert run(files, tmp_path / "out", *flags, "--estimate-memory", "--freeze-layers", 1) == 0
    assert "frozen ones need less" in capsys.readouterr().out


def test_texts_with_several_labels_get_those_of_transformers(files, tmp_path):
    texts = {
        "a red house": "red|house",
        "a blue house": "house",
        "red sky": "red",
        "a grey river": "",
        "red stone": "red",
    }
    train = write_csv(tmp_path / "train.csv", ("text", "label"), *list(texts.items())[::-1])
    path = write_csv(tmp_path / "dev.csv", ("text", "label"), *texts.items())
    flags = ("--task-name", "multi-label", "--text-column", "text", "--label-column", "label")
    flags += (
        "--do-train",
        "--train-file",
        train,
        "--train-batch-size",
        5,
        "--learning-rate",
        0.01,
        "--epochs",
        60,
    )
    flags += ("--do-eval", "--eval-file", path, "--do-predict", "--predict-file", path)
    assert run_glue.main(words(files, tmp_path, *flags)) == 0
    folder = tmp_path / "custom" / "multi-label"
    scores = read_json(folder / "scores.json")
    assert [scores[name] for name in ("f1_micro", "f1_macro", "exact_match")] == [1.0, 1.0, 1.0]
    rows = read_csv(folder / "predictions.csv")
    predicted = ["|".join(json.loads(row["labels"])) for row in rows]
    assert [row["text"] for row in rows] == list(texts)
    assert [set(labels.split("|")) for labels in predicted] == [
        set(labels.split("|")) for labels in texts.values()
    ]
    classify = pipeline("text-classification", model=str(folder / "60"), device="cpu", top_k=None)
    for row, labels, result in zip(rows, predicted, classify(list(texts)), strict=True):
        assert {entry["label"] for entry in result if entry["score"] > 0.5} == set(
            filter(None, labels.split("|"))
        )
        for entry in result:
            assert float(row[f"probability {entry['label']}"]) == pytest.approx(
                entry["score"], abs=1e-5
            )


def test_the_labels_that_were_scored_are_predicted_and_the_least_certain_one_counts(
    files, tmp_path
):
    rng = random.Random(0)
    rows = []
    for text, label in sentences(40, 0):
        labels = [
            name for name, chance in (("good", int(label)), ("rare", 0.2)) if rng.random() < chance
        ]
        rows.append((text, "|".join(labels)))
    path = write_csv(tmp_path / "all.csv", ("text", "label"), *rows)
    train = write_csv(tmp_path / "train.csv", ("text", "label"), *rows[1:])
    flags = ("--task-name", "multi-label", "--text-column", "text", "--label-column", "label")
    flags += ("--do-train", "--train-file", train, "--max-steps", 4, "--eval-steps", 2)
    flags += ("--do-eval", "--eval-file", path, "--do-predict", "--predict-file", path)
    assert run(files, tmp_path, *flags) == 0
    folder = tmp_path / "custom" / "multi-label"
    scores = read_json(folder / "scores.json")
    card = (folder / "best" / "README.md").read_text()
    assert f"| f1_macro | {scores['f1_macro']:.4g} |" in card and "labels | `good`, `rare`" in card

    scored = read_csv(folder / "eval_predictions.csv")
    predicted = read_csv(folder / "predictions.csv")
    assert [(row["text"], row["label"]) for row in scored] == rows
    for row, other in zip(scored, predicted, strict=True):
        chances = {name: float(row[f"probability {name}"]) for name in ("good", "rare")}
        above = [name for name, chance in chances.items() if chance > 0.5]
        assert row["prediction"] == "|".join(above) and json.loads(other["labels"]) == above
        least = min(value if name in above else 1 - value for name, value in chances.items())
        assert float(row["confidence"]) == pytest.approx(least)


def test_every_scored_row_is_written_and_the_report_lists_confident_mistakes(files, tmp_path):
    rows = [*((text, "ny"[int(label)]) for text, label in sentences(12, 5)), ("a great ship", "n")]
    dev = write_csv(tmp_path / "dev.csv", ("review", "verdict"), *rows)
    flags = (*own_files(files, "--do-train")[:-1], files / "train.csv", "--do-eval")
    assert run(files, tmp_path, *flags, "--eval-file", dev) == 0
    folder = tmp_path / "custom" / "classification"
    header, *lines = (folder / "eval_predictions.csv").read_text().splitlines()
    assert header == "text,label,prediction,confidence,index,probability n,probability y"
    cells = [*csv.reader(lines)]
    assert [(text, label) for text, label, *_ in cells] == rows
    assert [(true, predicted) for _, true, predicted, *_ in cells if true != predicted] == [
        ("n", "y")
    ]
    for _, _, predicted, confidence, _, *probabilities in cells:
        assert confidence == probabilities["ny".index(predicted)] == max(probabilities)
    assert "most_confident_mistakes" not in read_json(folder / "scores.json")
    report.main([str(tmp_path)])
    page = (tmp_path / "report.html").read_text()
    assert "<td>a great ship</td><td>n</td><td>y</td><td>" in page


def test_a_fine_tuned_model_predicts_as_in_training_and_keeps_escapes_from_the_terminal(
    files, tmp_path, capsys
):
    """With the length of training; --eval-file alone means --do-eval; a head for other labels is
    not reused.
    """
    labels = ["\x1b[31mred", "\x1b]0;title\x07"]
    for name, split in (("train.csv", 0), ("dev.csv", 1)):
        rows = (
            (text + " and more words" * 9, labels[int(label)])
            for text, label in sentences(21, split)
        )
        write_csv(tmp_path / name, ("review", "verdict"), *rows)
    flags = (
        "--text-column",
        "review",
        "--label-column",
        "verdict",
        "--max-seq-length",
        16,
        "--max-steps",
        2,
    )
    flags += (
        "--do-train",
        "--train-file",
        tmp_path / "train.csv",
        "--eval-file",
        tmp_path / "dev.csv",
    )
    predict = ("--do-predict", "--predict-file", tmp_path / "dev.csv")
    assert run(files, tmp_path, *flags, *predict) == 0
    results = tmp_path / "custom" / "classification"
    assert (results / "scores.json").is_file() and "texts to score" not in capsys.readouterr().out
    model = str(results)
    source = str(tmp_path / "dev.csv")
    target = str(tmp_path / "out.csv")
    start = ["--init-checkpoint", model, "--device", "cpu"]
    assert (
        inference.main([*start, "--input", source, "--output", target, "--text-column", "review"])
        == 0
    )
    assert inference.main([*start, "--text", "a house"]) == 0
    predicted = read_csv(results / "predictions.csv")
    for row, other in zip(predicted, read_csv(tmp_path / "out.csv"), strict=True):  # the same table
        same = ("review", "verdict", "label")
        assert row.keys() == other.keys() and all(row[name] == other[name] for name in same)
        for name in row.keys() - {*same}:
            assert float(row[name]) == pytest.approx(float(other[name]), abs=1e-6)
    again = (*start, "--output-dir", tmp_path / "again", "--text-column", "review", *predict)
    assert run_glue.main([str(word) for word in again]) == 0
    (path,) = (tmp_path / "again").rglob("predictions.csv")
    assert read_csv(path) == predicted

    other = tmp_path / "train.csv"
    other.write_text(other.read_text().replace(labels[0], "x").replace(labels[1], "y"))
    (tmp_path / "dev.csv").write_text("".join(other.read_text().splitlines(keepends=True)[:-1]))
    flags = (*flags, "--init-checkpoint", model, "--output-dir", tmp_path / "other")
    assert run(files, tmp_path / "other", *flags) == 0
    output = capsys.readouterr()
    assert "classifier.weight" in output.out and "(100.0%) are in the training file" in output.out
    assert "\x1b" not in output.out + output.err and "\x07" not in output.out + output.err


def test_evaluation_keeps_the_best_checkpoint_and_changes_no_update(
    files, trained, tmp_path, capsys
):
    flags = (
        *sst_2(files, "--do-train", "--do-eval", "--do-predict"),
        "--eval-steps",
        6,
        "--resume-from-checkpoint",
    )
    flags += ("--num-steps-per-checkpoint", 12)
    folders = [tmp_path / name / "custom" / "sst-2" for name in ("whole", "parts")]
    assert run(files, tmp_path / "whole", *flags) == 0
    assert run(files, tmp_path / "parts", *flags, "--steps-this-run", 24) == 0
    assert not (folders[1] / "scores.json").exists()
    progress = read_json(folders[1] / "24/model_progress.json")
    assert progress["evaluations"].pop()["step"] == 24  # as if it was not evaluated
    (folders[1] / "24/model_progress.json").write_text(json.dumps(progress))
    rewrite_manifest(folders[1] / "24")
    assert run(files, tmp_path / "parts", *flags) == 0
    history = evaluations(folders[0])
    assert [entry["step"] for entry in history] == list(range(6, 49, 6))
    assert evaluations(folders[1]) == history
    best = max(history, key=lambda entry: entry["accuracy"])
    assert best["step"] > 6 and scores_in(folders[0]) == {"accuracy": best["accuracy"]}
    alone = load_file(trained / "48" / "model.safetensors")
    for folder in folders:
        last = load_file(folder / "48" / "model.safetensors")
        assert all(torch.equal(last[name], alone[name]) for name in alone)
        assert str((folder / "best").readlink()) == str(best["step"])
        names = {path.name for path in (folder / "best").iterdir()}
        assert names - {"model_optimizer.safetensors"} == {
            "README.md",
            "config.json",
            "manifest.json",
            "model.safetensors",
            "model_progress.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "vocab.txt",
        }
        log = [
            json.loads(line[5:])["data"]
            for line in (folder.parents[1] / "report.json").read_text().splitlines()
        ]
        assert {"best_step": best["step"]} in log
        # Of the scored file, not of the test file.
        assert sum("latency_ms_median" in data for data in log) == 1
    again = tmp_path / "again"
    assert (
        run(files, again, *sst_2(files, "--do-eval"), "--init-checkpoint", folders[1] / "best") == 0
    )
    assert (
        run(
            files,
            folders[1].parents[1],
            *sst_2(files, "--do-eval"),
            "--init-checkpoint",
            folders[1],
        )
        == 0
    )
    for other, model in ((folders[0].parents[1], folders[1]), (again, folders[1] / "48")):
        with pytest.raises(UserError, match="has the results of another model"):
            run(files, other, *sst_2(files, "--do-eval"), "--init-checkpoint", model)
    weights = folders[1] / "best" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(UserError, match="is damaged"):
        run(files, again, *sst_2(files, "--do-eval"), "--init-checkpoint", folders[1])
    assert scores_in(again / "custom" / "sst-2") == {"accuracy": best["accuracy"]}


def test_two_processes_are_one_replicated_and_sharded(files, tmp_path):
    flags = (
        *sst_2(files, "--do-train", "--do-eval", "--do-predict"),
        "--max-steps",
        5,
        "--eval-steps",
        2,
    )
    assert run(files, tmp_path / "one", *flags, "--train-batch-size", 8) == 0
    commands = [
        (
            str(free_port()),
            [*words(files, tmp_path / name, *flags, "--train-batch-size", 4), *extra],
        )
        for name, extra in (("ddp", ()), ("fsdp2", ("--data-parallel-shard-degree", "2")))
    ]
    function = partial(fine_tune_on_ports, run_glue.main)
    processes = start_several(commands, tmp_path / "log", function=function)
    assert exit_codes(processes) == [0, 0], (tmp_path / "log.0").read_text()
    one = tmp_path / "one" / "custom" / "sst-2"
    weights = load_file(one / "5" / "model.safetensors")
    for name in ("ddp", "fsdp2"):
        two = tmp_path / name / "custom" / "sst-2"
        torch.testing.assert_close(
            load_file(two / "5" / "model.safetensors"), weights, rtol=1e-3, atol=1e-5
        )
        assert (two / "SST-2.tsv").read_text() == (one / "SST-2.tsv").read_text()
        assert read_json(two / "scores.json") == read_json(one / "scores.json")
        assert evaluations(one) == evaluations(two)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_word_embeddings_with_sparse_gradients_are_those_with_dense_ones(
    files, tmp_path, monkeypatch, micro_batches
):
    merged = ("--gradient-merge-steps", micro_batches)
    flags = (*sst_2(files, "--do-train"), "--max-grad-norm", 1e9, *merged)
    assert run(files, tmp_path / "sparse", *flags, "--steps-this-run", 5) == 0
    assert run(files, tmp_path / "sparse", *flags, "--resume-from-checkpoint") == 0
    monkeypatch.setattr(setup, "takes_row_gradients", lambda *_: False)
    assert run(files, tmp_path / "dense", *flags) == 0
    last = f"{48 // micro_batches}/model.safetensors"
    (sparse,), (dense,) = (list((tmp_path / name).rglob(last)) for name in ("sparse", "dense"))
    assert sparse.read_bytes() == dense.read_bytes()
