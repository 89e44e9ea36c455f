"""Files: read JSON with clear errors, write atomically, hash."""

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from utils.errors import UserError

HASH_BLOCK = 1 << 20  # bytes hashed between two progress reports
LOCK_SECONDS_VARIABLE = "LOCK_SECONDS"  # how long to wait for a lock; set by elastic/agent.py


def read_json(path: str | Path, description: str) -> Any:
    """The JSON value in the file `path`. `description` names the kind of file in errors.

    Raises UserError if the file does not exist or is not valid JSON.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{description} {path} does not exist: check the path")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # JSONDecodeError, UnicodeDecodeError, integers that are too long
        raise UserError(
            f"{description} {path} is not valid JSON ({error}): it may be cut off, fetch it again"
        ) from error


def read_json_object(path: str | Path, description: str) -> dict[str, Any]:
    """`read_json` of a file that must hold a JSON object; raises UserError for another value."""
    value = read_json(path, description)
    if not isinstance(value, dict):
        raise UserError(f"{description} {path} is not a JSON object: check the path, or fetch it again")
    return value


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A temporary path to write to. At the end it is synced and renamed to `path`; on an error it is removed, and an
    older file at `path` stays unchanged."""
    path = Path(path)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with name_in_errors(path):
            yield temporary
            sync(temporary)
            temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Adds the path to errors that have none, such as those of a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Writes the file `path`, or leaves what was there before."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


def write_json(path: str | Path, value: Any, indent: int = 2) -> None:
    """Writes `value` as JSON to the file `path`, atomically.

    File names that are not UTF-8 have lone surrogates in Python, which are written as JSON escapes.
    """
    text = json.dumps(value, indent=indent, ensure_ascii=False) + "\n"
    write_atomically(path, text.encode("utf-8", "backslashreplace"))


def sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_folder(folder: Path) -> BinaryIO:
    """Locks `folder` for this process until the returned file is closed or the process ends, however it ends.

    Raises UserError, naming the host and process that hold the lock, if there is one; waits for it first if the
    environment says so. A file system without locks is noted on standard error.
    """
    file = (folder / ".lock").open("a+b")
    patience = os.environ.get(LOCK_SECONDS_VARIABLE, "")
    end = time.monotonic() + (int(patience) if patience.isdecimal() else 0)
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise
            time.sleep(0.5)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read().decode("utf-8", "replace").strip() or "another process"
        file.close()
        raise UserError(f"{folder} is in use by {holder}: wait for it, stop it, or choose another folder") from error
    except OSError as error:
        print(f"warning: {folder} cannot be locked ({error.strerror}): run only one program there", file=sys.stderr)
        return file
    with name_in_errors(folder / ".lock"):
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        file.flush()
    return file


def file_digest(path: str | Path, algorithm: str = "sha256", progress: Callable[[int], Any] | None = None) -> str:
    """The hash of a file in hex. `progress` is called with the number of bytes of each block."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with Path(path).open("rb") as file:
        while block := file.read(HASH_BLOCK):
            digest.update(block)
            if progress is not None:
                progress(len(block))
    return digest.hexdigest()
