"""One run has one verdict, in its folder and elsewhere, and nobody else writes to its folder before
its scores are written.
"""

import shutil
from pathlib import Path

import pytest
from conftest import assert_refused
from glue_runs import own_files, run, words
from small_runs import files_of, run_here

import run_glue
from bert_recipe.checkpoint import start as starts
from bert_recipe.training import prediction
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import lock_folder

STEPS = Path("custom/classification")


@pytest.fixture(scope="module")
def files(glue_files) -> Path:
    return glue_files


@pytest.fixture(scope="module")
def begun(files, tmp_path_factory) -> Path:
    """A run of four updates, stopped after two."""
    output = tmp_path_factory.mktemp("begun")
    flags = own_files(files, "--do-train", "--do-eval")
    assert run(files, output, *flags, *LENGTH, "--steps-this-run", 2) == 0
    return output


LENGTH = ("--max-steps", 4, "--eval-steps", 2)


def resumed(files: Path, begun: Path, output: Path, way: str, *flags):
    """The run resumed with other flags: in its folder, or elsewhere."""
    given = (*own_files(files, "--do-train", "--do-eval"), *LENGTH, *flags)
    shutil.copytree(begun, output / "a")
    if way == "elsewhere":
        checkpoint = output / "a" / STEPS / "2"
        given = (*given, "--from-checkpoint", checkpoint)
        return run_here(words(files, output / "b", *given), run_glue.main)
    given = (*given, "--resume-from-checkpoint")
    return run_here(words(files, output / "a", *given), run_glue.main)


WAYS = ("in its folder", "elsewhere")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--dropout", 0.5), "dropout_prob"),
        (("--seed", 7), "seed"),
        (("--metric-for-best-model", "f1_macro"), "metric"),
    ],
)
def test_what_makes_another_run_is_refused_by_every_way(files, begun, tmp_path, way, flags, says):
    result = resumed(files, begun, tmp_path, way, *flags)
    assert_refused(result, says)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "flags",
    [("--eval-steps", 1), ("--early-stopping", 1), ("--class-weights", "balanced")],
)
def test_what_changes_the_result_of_a_run_is_a_line_by_every_way(
    files, begun, tmp_path, way, flags
):
    result = resumed(files, begun, tmp_path, way, *flags)
    assert result.returncode in (None, 0), result.stderr
    assert f"note: {flags[0]} was " in result.stdout
    folder = tmp_path / ("b" if way == "elsewhere" else "a") / STEPS
    # Finished, the run takes no other settings.
    elsewhere = ("--from-checkpoint", folder / "4"), ("--resume-from-checkpoint",)
    for number, start in enumerate(elsewhere):
        output = tmp_path / "c" if number == 0 else folder.parents[1]
        given = (*own_files(files, "--do-train", "--do-eval"), *LENGTH, *start)
        assert_refused(run_here(words(files, output, *given), run_glue.main), flags[0])


def test_the_means_of_finished_seeds_stay_whatever_is_asked_of_them_again(files, tmp_path):
    training, seeds = own_files(files, "--do-train"), ("--num-seeds", 2, "--max-steps", 2)
    scored = own_files(files, "--do-train", "--do-eval")
    assert run(files, tmp_path, *scored, *seeds) == 0
    folder = tmp_path / STEPS
    before = files_of(folder)
    assert run(files, tmp_path, *training, *seeds, "--resume-from-checkpoint") == 0
    assert files_of(folder).keys() == before.keys()
    after = files_of(folder)
    for path, (_, content) in before.items():
        assert path.name != "scores.json" or after[path][1] == content
    refused = (*scored, "--num-seeds", 2, "--max-steps", 1, "--resume-from-checkpoint")
    with pytest.raises(UserError, match="already holds step 2"):
        run(files, tmp_path, *refused)
    assert (folder / "scores.json").exists()


@pytest.mark.parametrize("trains", [True, False])
def test_a_folder_is_locked_until_its_scores_are_written(
    files, begun, tmp_path, monkeypatch, trains
):
    """Of a run, and of a prediction with a model that is elsewhere."""
    held = []

    def check(results: Path) -> None:
        with pytest.raises(UserError, match="is in use by process"):
            lock_folder(results)
        held.append(results)

    write = prediction.report_scores

    def report(scores, task, folder, runtime):
        check(folder)
        write(scores, task, folder, runtime)

    monkeypatch.setattr(prediction, "report_scores", report)
    flags = own_files(files, "--do-eval")
    if trains:
        flags = (*own_files(files, "--do-train", "--do-eval"), "--max-steps", 2)
    else:
        flags = (*flags, "--init-checkpoint", begun / STEPS / "2")
    assert run(files, tmp_path, *flags) == 0
    assert held == [tmp_path / STEPS]
    lock_folder(tmp_path / STEPS).close()


def test_where_runs_start_is_decided_once_under_their_locks(files, tmp_path, monkeypatch, capsys):
    """Of the seeds of a command, before the first of them trains."""
    flags = (*own_files(files, "--do-train", "--do-eval"), "--num-seeds", 2, "--save-steps", 2)
    assert run(files, tmp_path, *flags, "--max-steps", 4) == 0
    folders = [tmp_path / STEPS / name for name in ("seed-42", "seed-43")]
    for folder in folders:
        shutil.rmtree(folder / "4")
    steps = starts.newest_checkpoint
    decided = []

    def newest_checkpoint(folder, *arguments):
        with pytest.raises(UserError, match="is in use by process"):
            lock_folder(folder)
        decided.append(folder)
        return steps(folder, *arguments)

    monkeypatch.setattr(starts, "newest_checkpoint", newest_checkpoint)
    capsys.readouterr()
    assert run(files, tmp_path, *flags, "--max-steps", 4, "--resume-from-checkpoint") == 0
    assert decided == folders
    assert capsys.readouterr().out.count("resumed from") == 2
