"""Files and folders: written atomically, locked, hashed."""

import contextlib
import fcntl
import functools
import hashlib
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from bert_recipe.utils.errors import UserError, print_error

LOCK_FILE = ".lock"
LOCK_SECONDS_VARIABLE = "LOCK_SECONDS"  # how long to wait for a lock
TEMPORARY_SUFFIX = ".tmp"
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
IS_POINTER = "is a pointer of git LFS, not the file: fetch the file with git lfs pull"


def refuse_pointer(path: Path) -> None:
    """Raises UserError if the file `path` is what git leaves where git LFS is not installed."""
    with path.open("rb") as file:
        start = file.read(len(LFS_POINTER))
    if start == LFS_POINTER:
        raise UserError(f"{path} {IS_POINTER}")


def temporary_path(path: Path) -> Path:
    """An unused path beside `path`: `<name>.tmp-<random>`."""
    return path.with_name(f"{path.name}{TEMPORARY_SUFFIX}-{secrets.token_hex(8)}")


@contextlib.contextmanager
def atomic_path(path: str | Path, is_folder: bool = False) -> Iterator[Path]:
    """A new, empty temporary file or folder to write to. At the end it is synced and renamed to
    `path`; on an error it is removed, and an older file or folder at `path` stays unchanged.
    """
    path = Path(path)
    temporary = temporary_path(path)
    try:
        if is_folder:
            temporary.mkdir(parents=True)
        else:  # O_EXCL: a symbolic link that somebody placed there is not followed
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        yield temporary
        if is_folder:
            publish_folder(temporary, path)
        else:
            sync(temporary)
            temporary.rename(path)
    except OSError as error:  # a failed write to a full disk names no file
        if error.errno is not None and error.filename in (None, str(temporary)):
            error.filename = str(path)
            error.filename2 = None
        raise
    finally:
        remove(temporary)


atomic_folder = functools.partial(atomic_path, is_folder=True)


def publish_folder(temporary: Path, folder: Path) -> None:
    """Syncs the folder `temporary` with its files and renames it to `folder`, replacing an existing
    folder.
    """
    for path in (*temporary.rglob("*"), temporary):
        sync(path)
    old = temporary_path(folder)
    if folder.is_dir():  # renamed, so that a kill while it is removed leaves the new folder
        folder.rename(old)
    temporary.rename(folder)
    sync(folder.parent)
    remove(old)


def remove(path: Path) -> None:
    """Removes a file, a link, or a folder, which is renamed first, so that a kill leaves no
    incomplete one.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    temporary = temporary_path(path)
    path.rename(temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Writes the file `path` atomically: on an error, an existing file is unchanged. File names in
    a text that are not UTF-8 have lone surrogates in Python, which are written as escapes.
    """
    if isinstance(content, str):
        content = content.encode("utf-8", "backslashreplace")
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def files_below(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """What has one of `suffixes` in `folder` and below it, sorted, but for folders, what is hidden
    or in a hidden folder, and what cannot be listed.
    """
    paths = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(path for path in paths if path.suffix in suffixes)


def is_hidden(path: Path) -> bool:
    """Whether it is beside the files that a user sees, such as `._model.safetensors`, which macOS
    puts into archives and onto other systems' disks.
    """
    return path.name.startswith(".")


def is_same_path(path: Path, other: Path) -> bool:
    # Path.resolve fails on links that form a loop.
    return os.path.realpath(path) == os.path.realpath(other)


def last_change(path: Path) -> int:
    """The time in nanoseconds; also that of a rename, since a file that is moved to `path` may be
    older.
    """
    status = path.stat()
    return max(status.st_mtime_ns, status.st_ctime_ns)


class FolderLock:
    """An exclusive lock of a folder, until `close` or the end of the process. Made by
    `lock_folder`.

    The folder and the file `.lock` in it are locked. The file names the holder, and works on
    network file systems that cannot lock folders; the folder stays locked if somebody removes the
    file.

    Raises BlockingIOError if another process holds the lock.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.descriptors: list[int] = []  # of the folder and of the file in it
        self.descriptors.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
        lock_file = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        self.descriptors.append(lock_file)
        for descriptor in self.descriptors:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise
            except OSError as error:
                if descriptor == lock_file:
                    print_error(
                        f"warning: {folder} cannot be locked ({error.strerror}): run only one "
                        "program there"
                    )
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        with contextlib.suppress(OSError):  # a full disk: the caller's first file says so
            os.truncate(lock_file, 0)
            os.pwrite(lock_file, holder.encode(), 0)

    def current_path(self) -> Path | None:
        """Where the locked folder is now, which may have been renamed; None if it was removed."""
        folder_descriptor = self.descriptors[0]
        locked = os.fstat(folder_descriptor)
        link = Path(f"/proc/self/fd/{folder_descriptor}")  # to the folder, also if it was renamed
        with contextlib.suppress(OSError):
            if os.path.samestat(self.folder.stat(), locked) and locked.st_nlink:
                return self.folder
        with contextlib.suppress(OSError):
            if os.path.samestat(link.stat(), locked) and locked.st_nlink:
                return link.readlink()
        return None

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())

    __del__ = close


def lock_folder(folder: Path) -> FolderLock:
    """Makes `folder` if necessary, and locks it for this process. On a file system without locks,
    prints a warning.

    Raises UserError, naming the host and process that hold the lock, if it is not free within
    $LOCK_SECONDS.
    """
    folder.mkdir(parents=True, exist_ok=True)
    patience = os.environ.get(LOCK_SECONDS_VARIABLE, "")
    end = time.monotonic() + (int(patience) if patience.isdecimal() else 0)
    while True:
        try:
            return FolderLock(folder)
        except BlockingIOError as error:
            if time.monotonic() >= end:
                holder = ""
                with contextlib.suppress(OSError):
                    holder = (folder / LOCK_FILE).read_text(errors="replace").strip()
                advice = "wait for it, stop it, or choose another folder"
                raise UserError(
                    f"{folder} is in use by {holder or 'another process'}: {advice}"
                ) from error
        time.sleep(0.5)


def file_digest(path: str | Path, algorithm: str = "sha256") -> str:
    """The hash of a file in hex."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(
            file, lambda: hashlib.new(algorithm, usedforsecurity=False)
        ).hexdigest()
