"""Folders of several programs: one lock, atomic writes, nothing outside is touched."""

import fcntl
import shutil

import pytest
from conftest import assert_refused
from processes import start, wait_until
from small_runs import resuming, run_here, steps_folder, steps_in, train

from bert_recipe.utils import files
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import (
    LOCK_FILE,
    LOCK_SECONDS_VARIABLE,
    atomic_path,
    lock_folder,
    write_atomically,
)


def test_second_start_touches_nothing_while_a_run_writes(inputs, tmp_path):
    """Not even temporary folders, and not after somebody has removed the lock file."""
    flags = ("--max-steps", 100_000, "--log-freq", 1, "--num-steps-per-checkpoint", 2)
    first = start(inputs.command(tmp_path, *flags), tmp_path / "first")
    wait_until(lambda: any(name.isdigit() for name in steps_in(tmp_path)))
    live = steps_folder(tmp_path) / "99999.tmp-1a2b3c4d"
    live.mkdir()
    second = inputs.command(
        tmp_path, *flags, *resuming(tmp_path), "--report-file", tmp_path / "second.json"
    )
    assert_refused(run_here(second), str(steps_folder(tmp_path)), f"process {first.pid} on ")
    (steps_folder(tmp_path) / LOCK_FILE).unlink()
    assert_refused(run_here(second), str(steps_folder(tmp_path)), "is in use by another process")
    assert live.is_dir() and first.is_alive()
    first.kill()
    first.join()
    train([*second, "--steps-this-run", "1"])
    assert not live.exists()


def test_lock_file_that_is_a_link_is_refused_and_its_target_kept(tmp_path):
    folder, target = tmp_path / "folder", tmp_path / "target"
    folder.mkdir()
    target.write_text("precious")
    (folder / LOCK_FILE).symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        lock_folder(folder)
    assert target.read_text() == "precious"


def test_file_is_complete_or_unchanged_and_has_the_permissions_of_new_files(tmp_path):
    path, plain = tmp_path / "file", tmp_path / "plain"
    write_atomically(path, "old")
    with pytest.raises(ZeroDivisionError), atomic_path(path) as temporary:
        temporary.write_text("new")
        raise ZeroDivisionError
    plain.write_text("")
    assert path.read_text() == "old" and path.stat().st_mode == plain.stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "plain"]


def test_run_unlinks_links_and_stray_files_among_its_leftovers(inputs, tmp_path):
    """Steps that are links are pruned as links, too."""
    flags = ("--max-steps", 6, "--num-steps-per-checkpoint", 1)
    train(inputs.command(tmp_path, *flags, "--steps-this-run", 2))
    folder = steps_folder(tmp_path)
    precious = tmp_path / "precious"
    shutil.copytree(folder / "1", precious)
    shutil.rmtree(folder / "1")
    (folder / "1").symlink_to(precious)
    (folder / "7.tmp-link").symlink_to(precious)
    (folder / "8.tmp").write_text("stray")
    (folder / "probe.tmp-1234").write_text("stray")
    files = sorted(path.name for path in precious.iterdir())
    train(inputs.command(tmp_path, *flags, *resuming(tmp_path)))
    assert steps_in(tmp_path) == ["4", "5", "6"]
    assert sorted(path.name for path in precious.iterdir()) == files


def test_identity_and_architecture_are_those_of_the_checkpoint_whose_weights_are_used(
    inputs, tmp_path
):
    """Phase 1's newest checkpoint is damaged, so the run starts from the one before it, and is
    resumed also after the damaged one was removed.
    """
    train(inputs.command(tmp_path, "--max-steps", 4, "--num-steps-per-checkpoint", 2))
    (steps_folder(tmp_path) / "4" / "config.json").write_text("{")
    command = inputs.command(tmp_path, "--phase2", "--max-steps", 4, "--steps-this-run", 1)
    for flag in ("--bert-model", "--config-file", "--vocab-file"):
        del command[command.index(flag) : command.index(flag) + 2]
    command += ["--from-pretrained-params", str(steps_folder(tmp_path))]
    result = train(command)
    assert "warning: " in result.stdout and "config.json is damaged" in result.stdout
    shutil.rmtree(steps_folder(tmp_path) / "4")
    assert "resumed from" in train([*command, *map(str, resuming(tmp_path, "phase2"))]).stdout


def test_a_resumed_run_keeps_the_record_of_its_starting_weights(inputs, tmp_path):
    """Also if it is resumed without the flag that named them."""
    train(inputs.command(tmp_path, "--max-steps", 2, "--num-steps-per-checkpoint", 1))
    flags = ("--phase2", "--max-steps", 3, *resuming(tmp_path, "phase2"), "--steps-this-run", 1)
    weights = ("--from-phase1-final-params", steps_folder(tmp_path))
    train(inputs.command(tmp_path, *flags, *weights))
    train(inputs.command(tmp_path, *flags))
    assert_refused(
        run_here(inputs.command(tmp_path, *flags, weights[0], weights[1] / "1")),
        "other starting weights",
    )
    train(inputs.command(tmp_path, *flags, *weights))
    assert steps_in(tmp_path, "phase2") == ["1", "2", "3"]


def test_a_run_waits_for_the_lock_of_one_that_ends(tmp_path, monkeypatch):
    with (tmp_path / LOCK_FILE).open("a+b") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="in use by"):
            lock_folder(tmp_path)
        monkeypatch.setenv(LOCK_SECONDS_VARIABLE, "30")
        monkeypatch.setattr(files.time, "sleep", lambda _: holder.close())
        lock_folder(tmp_path).close()
        assert holder.closed
