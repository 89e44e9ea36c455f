"""The best model of a run: a step that is kept, and a link to it."""

import errno
import json
import os
import shutil
import threading
from pathlib import Path

import pytest
import transformers
from conftest import read_json
from small_runs import (
    evaluations,
    files_of,
    resuming,
    rewrite_manifest,
    run_here,
    steps_folder,
    steps_in,
    train,
)

from bert_recipe.checkpoint.folder import (
    MANIFEST_FILE,
    find_model_folder,
    is_valid,
    model_digest,
    verify_checkpoint,
)
from bert_recipe.utils.errors import UserError

# The loss rises after the first evaluations.
RISING = ("--optimizer", "AdamW", "--learning-rate", 0.5, "--warmup-proportion", 0)
FLAGS = ("--max-steps", 8, "--num-steps-per-checkpoint", 2, "--eval-steps", 1, *RISING)


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("whole")
    train(command(inputs, output))
    return output


def command(inputs, output: Path, *flags) -> list[str]:
    return inputs.command(output, *FLAGS, "--eval-dir", inputs.held_out, *flags)


def best_of(output: Path) -> int:
    """The step that `best` is a link to."""
    target = (steps_folder(output) / "best").readlink()
    assert len(target.parts) == 1  # relative
    return int(str(target))


def lowest(output: Path) -> int:
    """The step whose loss is the lowest of the evaluations."""
    return min(evaluations(steps_folder(output)), key=lambda entry: entry["loss"])["step"]


def test_the_best_step_is_kept_without_its_optimizer_and_loads_everywhere(inputs, whole, tmp_path):
    folder = steps_folder(whole)
    history = evaluations(folder)
    assert [entry["step"] for entry in history] == list(range(1, 9))
    best = best_of(whole)
    assert best == lowest(whole) < 4
    assert steps_in(whole) == [str(best), "4", "6", "8", "best"]
    verify_checkpoint(folder / "best", with_state=False)
    assert "model_optimizer.safetensors" not in {path.name for path in (folder / "best").iterdir()}
    assert read_json(folder / "best/model_progress.json")["best_step"] == best
    with pytest.raises(UserError, match="has no optimizer state, since it was kept only as the"):
        verify_checkpoint(folder / str(best))
    shutil.copytree(whole, tmp_path / "copy")  # follows links
    for path in (folder / "best", steps_folder(tmp_path / "copy") / "best"):
        transformers.AutoModelForPreTraining.from_pretrained(path)
    without_links = steps_folder(tmp_path / "without links")
    shutil.copytree(folder, without_links, ignore=shutil.ignore_patterns("best"))
    assert find_model_folder(without_links) == without_links / str(best)
    assert find_model_folder(without_links, takes_best=False) == without_links / "8"
    longer = ("--max-steps", 9, *resuming(tmp_path / "copy"))
    train(command(inputs, tmp_path / "copy", *longer))
    assert best_of(tmp_path / "copy") == lowest(tmp_path / "copy")


def test_a_run_that_goes_on_elsewhere_takes_its_best_model_along(inputs, whole, tmp_path):
    whole_steps = steps_folder(whole)
    start = ("--from-checkpoint", whole_steps / "8", "--max-steps", 9, "--learning-rate", 9)
    best = best_of(whole)
    calibration = whole_steps / "best" / "calibration.json"
    calibration.write_text('{"temperature": 2.0, "rows": 9}')
    train(command(inputs, tmp_path, *start))
    assert (steps_folder(tmp_path) / "best" / calibration.name).is_file()
    calibration.unlink()
    assert best_of(tmp_path) == best
    here, there = (
        path / "best/model.safetensors" for path in (steps_folder(tmp_path), whole_steps)
    )
    assert here.read_bytes() == there.read_bytes()
    assert steps_in(tmp_path) == [str(best), "9", "best"]
    longer = ("--max-steps", 10, "--learning-rate", 9, *resuming(tmp_path))
    train(command(inputs, tmp_path, *longer))
    assert [entry["step"] for entry in evaluations(steps_folder(tmp_path))] == list(range(1, 11))


@pytest.mark.parametrize("missing", [("symlink",), ("symlink", "link")])
def test_on_a_file_system_without_links_best_is_a_copy(
    inputs, whole, tmp_path, monkeypatch, missing
):
    def refuse(*_args, **_kwargs) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    for name in missing:
        monkeypatch.setattr(os, name, refuse)
    stopped = ("--steps-this-run", 3)
    train(command(inputs, tmp_path, *stopped))
    train(command(inputs, tmp_path, *resuming(tmp_path)))
    best = steps_folder(tmp_path) / "best"
    assert best.is_dir() and not best.is_symlink()
    assert steps_in(tmp_path) == steps_in(whole)
    verify_checkpoint(best, with_state=False)
    transformers.AutoModelForPreTraining.from_pretrained(best)
    expected = steps_folder(whole) / "best" / "model.safetensors"
    assert (best / "model.safetensors").read_bytes() == expected.read_bytes()
    monkeypatch.undo()
    train(command(inputs, tmp_path, *resuming(tmp_path)))
    assert best_of(tmp_path) == best_of(whole)


def test_hidden_files_that_a_copy_has_besides_are_not_the_runs_own(inputs, whole, tmp_path):
    """As macOS adds them to archives."""
    for source, name in ((whole, "run"), (inputs.shards, "shards")):
        shutil.copytree(source, tmp_path / name, symlinks=True)
        for path in [*(tmp_path / name).rglob("*.*")]:
            path.with_name(f"._{path.name}").write_bytes(b"\0\5\x16\7")
    flags = ("--input-dir", tmp_path / "shards", "--max-steps", 9, *resuming(tmp_path / "run"))
    train(command(inputs, tmp_path / "run", *flags))
    assert best_of(tmp_path / "run") == lowest(tmp_path / "run")


CHANGES = ("rename", "replace", "unlink", "symlink", "link", "rmdir", "mkdir")


def test_a_run_that_is_killed_at_any_change_of_its_folder_goes_on_the_same(
    inputs, whole, tmp_path, monkeypatch
):
    """What a kill leaves is what the folder has before the change."""
    copies, contents = [], []
    killed = tmp_path / "killed"
    copying = threading.Lock()

    def watch(name: str) -> None:
        change = getattr(os, name)

        def changing(*args, **kwargs):
            if copying.acquire(blocking=False):  # not of the copy itself
                try:
                    keep()
                finally:
                    copying.release()
            return change(*args, **kwargs)

        monkeypatch.setattr(os, name, changing)

    def keep() -> None:
        content = names_in(steps_folder(killed))
        if steps_folder(killed).is_dir() and content not in contents:
            copies.append(tmp_path / f"copy-{len(copies)}")
            shutil.copytree(killed, copies[-1], symlinks=True)
            contents.append(content)

    for name in CHANGES:
        watch(name)
    train(command(inputs, killed))
    monkeypatch.undo()
    expected = {path.relative_to(whole): content for path, (_, content) in weights_of(whole)}
    assert len(copies) > 20
    every = int(os.environ.get("EVERY_KILL", 10))
    for copy in copies[::every]:
        for step in steps_folder(copy).glob("[0-9]"):  # a step is complete at any time
            verify_checkpoint(step, with_state=False)
        train(command(inputs, copy, *resuming(copy)))
        assert {path.relative_to(copy): content for path, (_, content) in weights_of(copy)} == (
            expected
        )
        assert evaluations(steps_folder(copy)) == evaluations(steps_folder(whole))
        assert best_of(copy) == best_of(whole) and steps_in(copy) == steps_in(whole)


def names_in(folder: Path) -> list:
    """The files in a folder with their sizes, and the targets of links."""
    return sorted(
        (str(path), str(path.readlink()) if path.is_symlink() else path.stat().st_size)
        for path in folder.rglob("*")
    )


def weights_of(output: Path) -> list:
    items = files_of(steps_folder(output)).items()
    return [item for item in items if item[0].name.endswith(".safetensors")]


def test_a_step_that_a_kill_left_under_another_name_is_found(inputs, whole, tmp_path):
    """Between the two renames that replace it, as where a missing evaluation is added to it."""
    shutil.copytree(whole, tmp_path / "run", symlinks=True)
    folder = steps_folder(tmp_path / "run")
    (folder / "8").rename(folder / "8.tmp-1234")
    output = train(command(inputs, tmp_path / "run", *resuming(tmp_path / "run"))).stdout
    assert f"resumed from {folder / '8'}: step 8" in output
    assert is_valid(folder / "8") and steps_in(tmp_path / "run") == steps_in(whole)


def test_multiples_of_keep_every_are_kept_beside_the_newest_three(inputs, tmp_path):
    train(
        inputs.command(
            tmp_path, "--max-steps", 9, "--num-steps-per-checkpoint", 1, "--keep-every", 4
        )
    )
    assert steps_in(tmp_path) == ["4", "7", "8", "9"]


def as_of_an_older_version(steps: Path) -> None:
    """Rewrites a folder of steps in the form of versions before 1.0.0: the record and the scores in
    files of their own, and the best model as a copy of a step that is not kept.
    """
    history = evaluations(steps)
    best_so_far = min(history, key=lambda entry: entry["loss"])["step"]
    folders = [path for path in steps.iterdir() if path.name.isdigit()]
    for folder in folders:
        path = folder / "model_progress.json"
        progress = read_json(path)
        identity = progress.pop("identity")
        last = progress.pop("evaluations")[-1]["step"]
        del progress["best_step"]
        progress |= {"data": identity["data"], "evaluated_step": last}
        path.write_text(json.dumps(progress))
        rewrite_manifest(folder)
        manifest = read_json(folder / MANIFEST_FILE) | {"format_version": 2}
        del manifest["files"]["README.md"]
        (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    best = steps / "best"
    best.unlink()
    (steps / str(best_so_far)).rename(best)
    for path in best.glob("model_*.json"):
        path.unlink()
    manifest = read_json(best / MANIFEST_FILE)
    del manifest["files"]["model_progress.json"]
    (best / MANIFEST_FILE).write_text(json.dumps(manifest))
    for entry in history:
        entry["model"] = model_digest(best) if entry["step"] == best_so_far else None
    (steps / "evaluations.json").write_text(json.dumps(history))
    (steps / "run.json").write_text(json.dumps({"identity": identity}))


def test_a_folder_of_an_older_version_goes_on_the_same(inputs, whole, tmp_path):
    train(command(inputs, tmp_path, "--steps-this-run", 4))
    steps = steps_folder(tmp_path)
    as_of_an_older_version(steps)
    assert str(best_of(whole)) not in steps_in(tmp_path)
    other = tmp_path / "other"
    shutil.copytree(steps, steps_folder(other))
    train(command(inputs, tmp_path, *resuming(tmp_path)))
    assert evaluations(steps) == evaluations(steps_folder(whole))
    assert best_of(tmp_path) == best_of(whole)
    for step in ("8", "best"):
        here, there = (
            folder / step / "model.safetensors" for folder in (steps, steps_folder(whole))
        )
        assert here.read_bytes() == there.read_bytes()
    (steps_folder(other) / "evaluations.json").write_text("[]")
    result = run_here(command(inputs, other, *resuming(other)))
    assert result.returncode == 2
    assert "lacks the evaluation of step 4, which was made before step 4" in result.stderr


def test_a_model_has_the_digest_that_older_versions_recorded(tmp_path):
    files = {"model.safetensors": {"size": 3, "sha256": ["ab"]}}
    manifest = {"format_version": 2, "block_size": 16 << 20, "files": files}
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(manifest))
    assert model_digest(tmp_path) == "cf5e76a2e0b9d28e"
