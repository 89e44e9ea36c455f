"""Rate, batch and epochs of fine-tuning that no flag gives: by the model and the rows, as a choice
of all runs of a command, and on resume as recorded.
"""

import json
import math
import shutil
from dataclasses import replace

import glue_runs
import pytest
from conftest import TINY, log_entries, read_json
from small_runs import rewrite_manifest

import run_glue
import run_ner
import run_squad
from bert_recipe.checkpoint.record import read_record
from bert_recipe.config.arguments import make_run_config
from bert_recipe.config.fine_tuning_defaults import BY_RULE, fine_tuning_defaults
from bert_recipe.training.chosen_settings import loader_of

ROWS = 48  # of glue_runs' training file
GLOBAL_BATCH = "the global batch size"
DATA_FLAGS = ["--do-train", "--train-file", "a.csv", "--output-dir", "o"]
COLUMNS = ["--text-column", "t", "--label-column", "l"]


@pytest.mark.parametrize("kind", ["texts", "words", "embeddings", "questions"])
def test_few_rows_are_repeated_until_there_are_enough_updates(kind):
    for rows in (100, 300, 1000, 4999):
        values = fine_tuning_defaults(kind, 384, "AdamW", rows)
        updates = values.epochs * rows / values.batch_size
        assert 3 <= values.epochs <= 20
        assert updates >= 150 or values.epochs == 20
        assert values.batch_size == 16


@pytest.mark.parametrize("kind", ["texts", "words", "embeddings", "questions"])
def test_many_rows_take_as_many_updates_as_with_nvidias_values(kind):
    values = fine_tuning_defaults(kind, 1024, "AdamW", 5000)
    assert (values.batch_size, values.epochs, values.warmup_proportion) == (32, 3, 0.1)
    assert kind != "texts" or values.learning_rate == 2.4e-5
    assert kind != "questions" or values.learning_rate == 5e-5


def test_narrower_models_have_higher_rates_and_lambs_are_relative():
    widths = (128, 256, 384, 768, 1024)
    rates = [fine_tuning_defaults("texts", width, "NorMuon", 300).learning_rate for width in widths]
    assert rates == sorted(rates, reverse=True) and len(set(rates)) == len(rates)
    for optimizer in ("Lamb", "FusedLAMB"):
        lamb = [
            fine_tuning_defaults("texts", width, optimizer, 300).learning_rate for width in widths
        ]
        assert len(set(lamb)) == 1 and lamb[0] > rates[2]
    many_questions = fine_tuning_defaults("questions", 384, "Lamb", 5000)
    assert many_questions.learning_rate == lamb[0]  # AdamW's rate for SQuAD trains nothing


@pytest.mark.parametrize("rows", [300, 5000])
@pytest.mark.parametrize("kind", ["texts", "words", "embeddings", "questions"])
@pytest.mark.parametrize("is_random", [False, True])
def test_muon_takes_twice_the_rate_on_trained_weights_and_all_take_as_many_updates(
    kind, rows, is_random
):
    adamw, muon, normuon, lamb = (
        fine_tuning_defaults(kind, 768, name, rows, is_random)
        for name in ("AdamW", "Muon", "NorMuon", "Lamb")
    )
    assert muon == normuon
    factor = 1 if is_random else 2
    assert muon.learning_rate == pytest.approx(factor * adamw.learning_rate, rel=0.05)
    for other in (muon, lamb):
        assert replace(other, learning_rate=adamw.learning_rate) == adamw


@pytest.mark.parametrize("rows", [100, 300, 5000])
def test_embeddings_take_smaller_steps_and_no_fewer(rows):
    vectors, classes = (
        fine_tuning_defaults(kind, 384, "AdamW", rows) for kind in ("embeddings", "texts")
    )
    assert vectors.learning_rate == pytest.approx(classes.learning_rate / 5, rel=0.05)
    assert replace(vectors, learning_rate=classes.learning_rate) == classes
    from_nothing = fine_tuning_defaults("embeddings", 384, "AdamW", rows, from_random_weights=True)
    assert from_nothing.learning_rate > classes.learning_rate


def test_many_classes_take_more_updates():
    def updates(num_labels, rows=1000, kind="texts"):
        values = fine_tuning_defaults(kind, 384, "AdamW", rows, num_labels=num_labels)
        return values.epochs * rows / values.batch_size

    assert updates(2) == updates(6) < updates(10) < updates(30) < updates(48) == updates(200)
    assert updates(6, kind="words") == updates(30, kind="words")
    assert updates(30, rows=5000) == updates(2, rows=5000)


def test_a_table_of_many_classes_is_repeated_more_often(glue_files, tmp_path):
    rows = [f"{text},{number % 12}" for number, text in enumerate(["good film", "bad film"] * 600)]
    table = tmp_path / "many.csv"
    table.write_text("\n".join(["t,l", *rows]))
    flags = ["--train-file", table, "--text-column", "t", "--label-column", "l"]
    words = glue_runs.words(glue_files, tmp_path / "o", "--do-train", *flags, "--max-steps", 1)
    assert run_glue.main([*map(str, words)]) == 0
    assert chosen(*run_folders(tmp_path / "o"))[2] == 8


@pytest.mark.parametrize("rows", range(1, 40))
def test_an_update_takes_no_row_twice(rows):
    assert fine_tuning_defaults("texts", 128, "AdamW", rows).batch_size <= rows


@pytest.mark.parametrize(
    ("flags", "processes", "micro_batch"),
    [
        ([], 1, 16),
        ([], 4, 4),
        ([], 3, 6),
        (["--gradient-merge-steps", "8"], 1, 2),
        (["--gradient-merge-steps", "8"], 4, 1),
    ],
)
def test_the_batch_is_that_of_all_processes_and_micro_batches(flags, processes, micro_batch):
    args = run_glue.parse_arguments([*DATA_FLAGS, *COLUMNS, *flags])
    loader = loader_of(make_run_config(args, processes).loader, 16, processes)
    assert (loader.batch_size, loader.global_batch_size) == (micro_batch, 16)


@pytest.mark.parametrize(
    ("flags", "batch", "global_batch"),
    [
        (["--train-batch-size", "48"], 48, 96),
        (["--train-batch-size", "4", "--gradient-merge-steps", "3"], 4, 24),
        (["--global-batch-size", "100"], 32, 100),
    ],
)
def test_a_given_batch_is_taken_as_given(flags, batch, global_batch):
    args = run_glue.parse_arguments([*DATA_FLAGS, *COLUMNS, *flags])
    config = make_run_config(args, 2)
    assert "global_batch_size" not in config.chosen_by_rule
    assert (config.loader.batch_size, config.loader.global_batch_size) == (batch, global_batch)


@pytest.mark.parametrize("program", [run_glue, run_ner, run_squad])
def test_the_help_shows_the_rule(program, capsys):
    with pytest.raises(SystemExit):
        program.parse_arguments(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert text.count(f"(default: {BY_RULE})") == 3  # rate, batch and epochs


def command(files, output, *flags) -> list[str]:
    words = glue_runs.words(files, output)  # which has no rate, batch or epochs without --do-train
    return [*map(str, [*words, *glue_runs.own_files(files, "--do-train"), *flags])]


def run_folders(output):
    """The folders of steps."""
    return sorted({path.parents[1] for path in output.rglob("model_progress.json")})


def chosen(folder) -> tuple[float, int, float]:
    values = read_record(folder).hyperparameters
    return values["--learning-rate"], values[GLOBAL_BATCH], values["--epochs"]


def test_the_choice_is_printed_once_recorded_and_logged(glue_files, tmp_path, capsys):
    assert run_glue.main(command(glue_files, tmp_path, "--num-seeds", 2, "--max-steps", 2)) == 0
    rule = fine_tuning_defaults("texts", TINY["hidden_size"], "AdamW", ROWS, True)
    text = capsys.readouterr().out
    basis = f"width {TINY['hidden_size']}, AdamW, {ROWS} rows, 2 classes"
    assert text.count(f"{BY_RULE} ({basis}): --learning-rate") == 1
    folders = run_folders(tmp_path)
    assert len(folders) == 2
    for folder in folders:
        assert chosen(folder) == (rule.learning_rate, rule.batch_size, rule.epochs)
        settings = log_entries(tmp_path / f"report-{folder.name}.json")[0]["data"]
        assert settings["learning_rate"] == rule.learning_rate
        assert (settings["epochs"], settings["batch_size"]) == (rule.epochs, rule.batch_size)


def test_folds_share_the_choice_of_the_whole_file(glue_files, tmp_path):
    flags = ["--do-eval", "--num-folds", 3, "--max-steps", 1]
    assert run_glue.main(command(glue_files, tmp_path, *flags)) == 0
    rule = fine_tuning_defaults("texts", TINY["hidden_size"], "AdamW", ROWS, True)
    choices = {chosen(folder) for folder in run_folders(tmp_path)}
    assert choices == {(rule.learning_rate, rule.batch_size, rule.epochs)}


def test_given_flags_are_taken_as_given(glue_files, tmp_path, capsys):
    flags = ["--learning-rate", 0.003, "--train-batch-size", 5, "--epochs", 0.25]
    assert run_glue.main(command(glue_files, tmp_path, *flags)) == 0
    assert chosen(*run_folders(tmp_path)) == (0.003, 5, 0.25)
    assert BY_RULE not in capsys.readouterr().out


def interrupted(files, output, *flags) -> None:
    """A folder of a run of 3 updates of 6, with the values and the record that commit 249ca2c9
    has.
    """
    old = ["--learning-rate", 2.4e-5, "--train-batch-size", 32, "--epochs", 3]
    words = command(files, output, *old, *flags, "--steps-this-run", 3)
    assert run_glue.main(words) == 0
    for folder in run_folders(output):
        path = folder / "3" / "model_progress.json"
        progress = read_json(path)
        del progress["hyperparameters"]["--epochs"]
        path.write_text(json.dumps(progress))
        rewrite_manifest(folder / "3")


@pytest.mark.parametrize("way", ["--resume-from-checkpoint", "--from-checkpoint"])
def test_an_older_run_goes_on_with_its_values(glue_files, tmp_path, capsys, way):
    interrupted(glue_files, tmp_path)
    [folder] = run_folders(tmp_path)
    flags = [way] if way == "--resume-from-checkpoint" else [way, folder / "3"]
    assert run_glue.main(command(glue_files, tmp_path, *flags)) == 0
    assert "as recorded by the run that is resumed" in capsys.readouterr().out
    values = read_record(folder).hyperparameters
    assert (values["--learning-rate"], values[GLOBAL_BATCH]) == (2.4e-5, 32)
    assert values["--max-steps"] == math.ceil(3 * ROWS / 32)
    assert values["--warmup-proportion"] == 0.1


def test_given_flags_change_a_resumed_run_and_others_are_kept(glue_files, tmp_path):
    interrupted(glue_files, tmp_path, "--warmup-proportion", 0.5)
    flags = ["--resume-from-checkpoint", "--learning-rate", 0.001, "--train-batch-size", 16]
    assert run_glue.main(command(glue_files, tmp_path, *flags)) == 0
    [folder] = run_folders(tmp_path)
    values = read_record(folder).hyperparameters
    assert (values["--learning-rate"], values[GLOBAL_BATCH]) == (0.001, 16)
    assert values["--max-steps"] == 10  # as many sequences as recorded, 5 updates of 32
    assert values["--warmup-proportion"] == 0.5


def test_folds_that_have_not_begun_train_for_the_recorded_epochs(glue_files, tmp_path):
    """Of 38 rows or of 39, which are 4 or 5 updates."""
    flags = ["--do-eval", "--num-folds", 5, "--train-batch-size", 19]
    begun = command(glue_files, tmp_path, *flags, "--epochs", 2, "--steps-this-run", 2)
    assert run_glue.main(begun) == 0
    assert run_glue.main(command(glue_files, tmp_path, *flags, "--resume-from-checkpoint")) == 0
    updates = [
        read_record(folder).hyperparameters["--max-steps"] for folder in run_folders(tmp_path)
    ]
    assert sorted(updates) == [4, 4, 4, 5, 5]


def test_seeds_that_have_not_begun_take_what_the_first_one_recorded(glue_files, tmp_path):
    interrupted(glue_files, tmp_path / "one", "--num-seeds", 1)
    [folder] = run_folders(tmp_path / "one")
    several = tmp_path / "several" / folder.relative_to(tmp_path / "one")
    shutil.copytree(folder, several / "seed-42")
    progress = several / "seed-42" / "3" / "model_progress.json"
    values = read_json(progress)
    progress.write_text(json.dumps(values | {"phase": f"{values['phase']}/seed-42"}))
    rewrite_manifest(progress.parent)
    flags = ["--num-seeds", 2, "--resume-from-checkpoint"]
    assert run_glue.main(command(glue_files, tmp_path / "several", *flags)) == 0
    rates = {chosen_rate(folder) for folder in run_folders(tmp_path / "several")}
    assert rates == {(2.4e-5, 32, 5)}


def chosen_rate(folder) -> tuple[float, int, int]:
    values = read_record(folder).hyperparameters
    return values["--learning-rate"], values[GLOBAL_BATCH], values["--max-steps"]


def test_overwriting_forgets_what_was_recorded(glue_files, tmp_path):
    interrupted(glue_files, tmp_path)
    flags = ["--overwrite", "--resume-from-checkpoint", "--max-steps", 2]
    assert run_glue.main(command(glue_files, tmp_path, *flags)) == 0
    rule = fine_tuning_defaults("texts", TINY["hidden_size"], "AdamW", ROWS, True)
    assert chosen(*run_folders(tmp_path)) == (rule.learning_rate, rule.batch_size, rule.epochs)
