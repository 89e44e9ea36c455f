"""data/prepare.py run in this process, and the files that it makes."""

import hashlib
import subprocess
from pathlib import Path

from conftest import ROOT, assert_refused
from small_runs import run_here

from data import prepare

SAMPLE = ROOT / "data" / "sample" / "books"


def prepare_data(*arguments: object, code: int = 0) -> subprocess.CompletedProcess:
    """In this process, which need not start and import again."""
    done = run_here(arguments, prepare.main)
    assert done.returncode == code, done.stderr
    if code == 2:
        assert_refused(done)
    return done


def digests(folder: Path) -> dict[str, str]:
    """Every file by path, except the lock, and manifests, which name input paths."""
    files = (
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name not in (".lock", "manifest.json")
    )
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }
