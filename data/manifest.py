"""What a stage of the data preparation read and made, in a `manifest.json` in its folder, and whether it still fits.

A manifest depends only on the inputs and the options: no times, no number of workers.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from utils.progress import progress_bar

FILE_NAME = "manifest.json"
# Goes up when a stage makes other bytes than before from the same input and options.
SCHEMA_VERSION = 1
PACKAGES = ("numpy", "h5py", "tokenizers", "nltk")


def file_digest(path: Path, algorithm: str = "sha256", progress: Callable[[int], Any] | None = None) -> str:
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            if progress:
                progress(len(chunk))
    return digest.hexdigest()


def write_atomically(path: Path, content: bytes) -> None:
    """`content` at `path`, or what was there before: on disk under another name first, then renamed."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def relative(path: Path, folder: Path) -> str:
    """`path` as seen from `folder`: a data folder that moves as a whole keeps its manifests."""
    return os.path.relpath(path.resolve(), folder.resolve())


def describe(paths: Iterable[Path], folder: Path, threads: int) -> list[dict[str, Any]]:
    """Path as seen from `folder`, size and SHA-256 of each file."""
    paths = list(paths)
    total = sum(path.stat().st_size for path in paths)
    with (
        progress_bar(total, "checksums", delay=1) as bar,
        ThreadPoolExecutor(threads) as pool,
    ):
        digests = list(pool.map(lambda path: file_digest(path, progress=bar.update), paths))
    return [
        {
            "path": relative(path, folder),
            "bytes": path.stat().st_size,
            "sha256": digest,
        }
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
    """Writes the manifest of `folder`, all of whose `outputs` are complete."""
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
    write_atomically(folder / FILE_NAME, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def read(folder: Path) -> dict[str, Any] | None:
    """The manifest of `folder`; None where there is none, or none that this version can read."""
    try:
        content = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and content.get("schema_version") == SCHEMA_VERSION else None


def misfit(folder: Path, options: dict[str, Any], inputs: Sequence[Path]) -> str | None:
    """Why what lies in `folder` is not what these options make of these inputs; None if it is.

    A file that has its size still and was not touched since the manifest was written is taken as unchanged; one that
    was touched is read again.
    """
    content = read(folder)
    if content is None:
        return "not made yet"
    options = json.loads(json.dumps(options))
    for name in sorted(options.keys() | content["options"].keys()):
        old, new = content["options"].get(name), options.get(name)
        if old != new:
            return f"{name} was {old}, is {new}"
    if {entry["path"] for entry in content["inputs"]} != {relative(path, folder) for path in inputs}:
        return "other input files than before"
    made = (folder / FILE_NAME).stat().st_mtime
    for entry in content["inputs"] + content["outputs"]:
        path = folder.resolve() / entry["path"]
        if not path.is_file():
            return f"{path} is gone"
        status = path.stat()
        touched = max(status.st_mtime, status.st_ctime) > made
        if status.st_size != entry["bytes"] or (touched and file_digest(path) != entry["sha256"]):
            return f"{path} has changed"
    return None
