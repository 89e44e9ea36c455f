"""Input files: local paths and the addresses that fsspec knows (s3://, gs://, hf://, https://)."""

import io
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import file_digest
from bert_recipe.utils.text_files import kind_of

REMOTE_BLOCK = 1 << 20  # bytes read at a time


def is_remote(path: str) -> bool:
    return "://" in path


def filesystem(path: str) -> tuple[Any, str]:
    """The fsspec file system of an address, and the path in it."""
    try:
        import fsspec

        return fsspec.core.url_to_fs(path)
    except ImportError as error:
        raise UserError(
            f"{path} needs a package ({error}): pip install fsspec and the one of the protocol"
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is no address that fsspec knows ({error}): check it") from error


def open_input(path: str) -> BinaryIO:
    """The bytes of a file as they are stored."""
    return io.BufferedReader(RemoteFile(path)) if is_remote(path) else Path(path).open("rb")


class RemoteFile(io.RawIOBase):
    """A file that fsspec opens, read in blocks of `REMOTE_BLOCK` bytes."""

    def __init__(self, path: str):
        system, name = filesystem(path)
        self.path = path
        with remote_errors(path):
            self.file = system.open(name, "rb", block_size=REMOTE_BLOCK)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self.file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        with remote_errors(self.path):
            return self.file.readinto(buffer)

    def close(self) -> None:
        self.file.close()
        super().close()


@contextmanager
def remote_errors(path: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each protocol has its own errors
        raise UserError(
            f"{path} cannot be read ({str(error) or type(error).__name__}): check the address and "
            "the access to it; a web server must answer range requests, else download the file "
            "first"
        ) from error


def size_of(path: str) -> int:
    if not is_remote(path):
        return Path(path).stat().st_size
    system, name = filesystem(path)
    with remote_errors(path):
        if (size := system.size(name)) is None:
            raise ValueError("the server does not say how long it is")
        return size


def identity_of(path: str) -> str:
    """Identifies the content of a file: its SHA-256, or the version (ETag, date, size) of a remote
    file.
    """
    if not is_remote(path):
        return file_digest(path)
    system, name = filesystem(path)
    with remote_errors(path):
        info = system.info(name)
    keys = ("size", "ETag", "etag", "LastModified", "Last-Modified", "mtime", "md5Hash", "blob_id")
    return str({key: str(info[key]) for key in keys if info.get(key) is not None})


def find_files(paths: Sequence[str], suffixes: Sequence[str]) -> list[str]:
    """The files of the formats `suffixes` that `paths` (files, folders, addresses, patterns of
    addresses) name or contain, in an order that depends only on their names.
    """
    files: list[str] = []
    for path in paths:
        names = list_remote(path) if is_remote(path) else list_local(Path(path).absolute())
        found = [name for name in names if kind_of(name)[0] in suffixes]
        if not found:
            raise UserError(f"{path} contains no {', '.join(suffixes)} file: check the path")
        files += found
    names_of = Counter(file if is_remote(file) else os.path.realpath(file) for file in files)
    if len(names_of) < len(files):
        raise UserError(
            f"{names_of.most_common(1)[0][0]} is named twice, perhaps by a link: name each file "
            "once"
        )
    return files


def left_out(paths: Sequence[str], suffixes: Sequence[str]) -> str | None:
    """How many files of which other formats `find_files` leaves out in folders, without those that
    are no text of a user; None if there are none.
    """
    endings: Counter[str] = Counter()
    for path in paths:
        if is_remote(path) or not Path(path).is_dir():
            continue
        for file in walk(Path(path)):
            is_about_others = file.name.startswith((".", "README", "LICENSE", "manifest.json"))
            if kind_of(file.name)[0] not in suffixes and not is_about_others:
                endings[file.suffix.lower() or "without an extension"] += 1
    if not endings:
        return None
    shown = ", ".join(f"{count} {ending}" for ending, count in endings.most_common(5))
    return f"files of other formats are left out: {shown}"


def list_local(path: Path) -> list[str]:
    if not path.exists():
        raise UserError(f"{path} does not exist: check the path, or run the download stage first")
    return [str(path)] if path.is_file() else [str(file) for file in sorted(walk(path))]


def walk(folder: Path, above: Sequence[str] = ()) -> Iterator[Path]:
    """The files in a folder and its folders. Links are followed, except to a folder that contains
    them.
    """
    above = [*above, os.path.realpath(folder)]
    for path in folder.iterdir():
        if path.is_file():
            yield path
        elif path.is_dir() and os.path.realpath(path) not in above:
            yield from walk(path, above)


def list_remote(path: str) -> list[str]:
    system, name = filesystem(path)
    with remote_errors(path):
        if "*" in name:
            names = system.glob(name)
        else:
            names = system.find(name) if system.isdir(name) else [name] * system.exists(name)
    return sorted(system.unstrip_protocol(name) for name in names)
