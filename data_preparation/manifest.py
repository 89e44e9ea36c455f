"""The `manifest.json` of a stage's folder: what the stage read and made, and whether that is still up to date.

A manifest depends only on the inputs, the options and the installed versions: no times, no number of workers.
"""

import json
import os
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from data_preparation.inputs import identity_of, is_remote, size_of
from data_preparation.tasks import package_versions
from utils.files import write_json

FILE_NAME = "manifest.json"
SCHEMA_VERSION = 2  # increases when a stage makes other bytes than before from the same input and options


def relative_path(path: str, folder: Path) -> str:
    """`path` relative to `folder`, so that a data folder can be moved as a whole; an address as it is."""
    return path if is_remote(path) else os.path.relpath(Path(path).resolve(), folder.resolve())


def describe(paths: Sequence[str], folder: Path, executor: Executor) -> list[dict[str, Any]]:
    """Relative path, size and SHA-256 (of an address: its version) of each file."""
    return [
        {"path": relative_path(path, folder), "bytes": size_of(path), "sha256": identity}
        for path, identity in zip(paths, executor.map(identity_of, paths), strict=True)
    ]


def write(
    folder: Path,
    stage: str,
    options: dict[str, Any],
    inputs: list[dict[str, Any]],
    outputs: list[dict[str, Any]],
    counts: dict[str, Any],
) -> None:
    """Writes the manifest of `folder`, whose `outputs` are complete. inputs, outputs: what `describe` returns."""
    content = {
        "stage": stage,
        "schema_version": SCHEMA_VERSION,
        "options": options,
        "counts": counts,
        "inputs": inputs,
        "outputs": outputs,
        "versions": package_versions(),
    }
    write_json(folder / FILE_NAME, content, indent=1)


def read(folder: Path) -> dict[str, Any] | None:
    """The manifest of `folder`; None if there is none, or none that this version can read."""
    try:
        content = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and content.get("schema_version") == SCHEMA_VERSION else None


def stale_reason(folder: Path, options: dict[str, Any], inputs: Sequence[str]) -> str | None:
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
        if is_remote(entry["path"]):
            if identity_of(entry["path"]) != entry["sha256"]:
                return f"{entry['path']} has changed"
            continue
        path = folder.resolve() / entry["path"]
        if not path.is_file():
            return f"{path} is missing"
        status = path.stat()
        is_newer = max(status.st_mtime, status.st_ctime) > manifest_time
        if status.st_size != entry["bytes"] or (is_newer and identity_of(str(path)) != entry["sha256"]):
            return f"{path} has changed"
    return None
