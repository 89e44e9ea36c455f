"""The `manifest.json` of a stage's folder: what the stage read and made, and whether that is still up to date.

A manifest depends only on the inputs, the options and the installed versions: no times, no number of workers.
"""

import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from utils.files import file_digest, write_json
from utils.progress import progress_bar

FILE_NAME = "manifest.json"
SCHEMA_VERSION = 1  # increases when a stage makes other bytes than before from the same input and options
PACKAGES = ("numpy", "h5py", "tokenizers", "nltk")


def relative_path(path: Path, folder: Path) -> str:
    """`path` relative to `folder`, so that a data folder can be moved as a whole."""
    return os.path.relpath(path.resolve(), folder.resolve())


def describe(paths: Iterable[Path], folder: Path, threads: int) -> list[dict[str, Any]]:
    """Relative path, size and SHA-256 of each file."""
    paths = list(paths)
    total = sum(path.stat().st_size for path in paths)
    with (
        progress_bar(total, "checksums", delay=1) as bar,
        ThreadPoolExecutor(threads) as pool,
    ):
        digests = list(pool.map(lambda path: file_digest(path, progress=bar.update), paths))
    return [
        {"path": relative_path(path, folder), "bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, digests, strict=True)
    ]


def write(
    folder: Path,
    stage: str,
    options: dict[str, Any],
    inputs: Sequence[Path],
    outputs: Sequence[Path],
    counts: dict[str, Any],
    threads: int = 1,
) -> None:
    """Writes the manifest of `folder`, whose `outputs` are complete."""
    content = {
        "stage": stage,
        "schema_version": SCHEMA_VERSION,
        "options": options,
        "counts": counts,
        "inputs": describe(inputs, folder, threads),
        "outputs": describe(outputs, folder, threads),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
    }
    write_json(folder / FILE_NAME, content, indent=1)


def read(folder: Path) -> dict[str, Any] | None:
    """The manifest of `folder`; None if there is none, or none that this version can read."""
    try:
        content = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and content.get("schema_version") == SCHEMA_VERSION else None


def stale_reason(folder: Path, options: dict[str, Any], inputs: Sequence[Path]) -> str | None:
    """Why `folder` is not what these options make of these inputs; None if it is up to date.

    A file of the same size that is not newer than the manifest counts as unchanged; a newer one is hashed.
    """
    content = read(folder)
    if content is None:
        return "not made yet"
    options = json.loads(json.dumps(options))
    for name in sorted(options.keys() | content["options"].keys()):
        old, new = content["options"].get(name), options.get(name)
        if old != new:
            return f"{name} was {old}, is {new}"
    if {entry["path"] for entry in content["inputs"]} != {relative_path(path, folder) for path in inputs}:
        return "the input files are others than before"
    manifest_time = (folder / FILE_NAME).stat().st_mtime
    for entry in content["inputs"] + content["outputs"]:
        path = folder.resolve() / entry["path"]
        if not path.is_file():
            return f"{path} is missing"
        status = path.stat()
        is_newer = max(status.st_mtime, status.st_ctime) > manifest_time
        if status.st_size != entry["bytes"] or (is_newer and file_digest(path) != entry["sha256"]):
            return f"{path} has changed"
    return None
