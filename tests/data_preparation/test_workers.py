"""Worker processes of the data preparation end with their parent, and a stop is one line."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, assert_refused, run_program
from processes import PATIENCE, kill_and_wait_for_workers, running_in_session, wait_until

from bert_recipe.data_preparation.engine import versions

SLEEPERS = f"""
import os, sys, time
from bert_recipe.utils.work_units.executors import open_executor
from bert_recipe.utils.errors import run_main
def sleep(folder):
    open(f"{{folder}}/{{os.getpid()}}.pid", "w").close()
    time.sleep({2 * PATIENCE})
def main():
    with open_executor("local", 2) as executor:
        list(executor.map(sleep, [sys.argv[1]] * 99))
if __name__ == "__main__":
    run_main(main)
"""


def start_sleepers(folder: Path, **options) -> subprocess.Popen:
    """A program with two workers, which run when this returns."""
    (folder / "program.py").write_text(SLEEPERS)
    command = [sys.executable, folder / "program.py", folder]
    env = {"PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(command, env=env, start_new_session=True, **options)
    wait_until(lambda: len(list(folder.glob("*.pid"))) == 2)
    return parent


def test_workers_end_when_their_parent_is_killed(tmp_path):
    parent = start_sleepers(tmp_path)
    assert {int(path.stem) for path in tmp_path.glob("*.pid")} < set(running_in_session(parent.pid))
    kill_and_wait_for_workers(parent)


@pytest.mark.parametrize("gaps", [[], [0.05, 0.05]])
def test_any_number_of_ctrl_c_ends_a_run_at_once_in_one_line(tmp_path, gaps):
    parent = start_sleepers(tmp_path, stderr=subprocess.PIPE, text=True)
    os.killpg(parent.pid, signal.SIGINT)
    with contextlib.suppress(ProcessLookupError):
        for gap in gaps:
            time.sleep(gap)
            os.killpg(parent.pid, signal.SIGINT)
    _, errors = parent.communicate(timeout=PATIENCE)
    assert (parent.returncode, errors) == (130, "interrupted: rerun the same command to resume\n")
    wait_until(lambda: not running_in_session(parent.pid))


def test_a_machine_without_shared_memory_for_semaphores_is_one_line():
    """With a read-only /dev/shm, which a namespace of mounts of this test's own has."""
    mounted = 'mount -t tmpfs -o ro tmpfs /dev/shm && exec "$@"'
    mount = ["unshare", "--map-root-user", "--mount", "sh", "-c", mounted, "-"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*mount, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("needs the right to mount a file system")
    result = run_program(*mount, sys.executable, "-c", SLEEPERS)
    assert_refused(result, "holds no semaphores (Read-only file system)", "--num-workers 1")


def test_the_version_of_workers_is_that_of_all_that_decides_shards(monkeypatch):
    read = set()

    def digest(path: Path) -> str:
        read.add(path)
        return ""

    monkeypatch.setattr(versions, "file_digest", digest)
    versions.code_version.__wrapped__()
    folders = ("utils", "data_loading", "tokenization", "checkpoint", "data_preparation")
    for folder in folders:
        assert {*(ROOT / "bert_recipe" / folder).rglob("*.py")} <= read, folder
    assert ROOT / "bert_recipe/data_preparation/sources/wikipedia.json" in read
    assert {"numpy", "h5py", "tokenizers", "nltk", "regex"} <= versions.package_versions().keys()
