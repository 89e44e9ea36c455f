"""Input files: local paths and the addresses that fsspec knows (s3://, gs://, hf://, https://)."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from utils.errors import UserError
from utils.files import file_digest
from utils.tables import kind_of


def is_remote(path: str) -> bool:
    return "://" in path


def filesystem(path: str) -> tuple[Any, str]:
    """The fsspec file system of an address, and the path in it."""
    try:
        import fsspec

        return fsspec.core.url_to_fs(path)
    except ImportError as error:
        raise UserError(f"{path} needs a package ({error}): pip install fsspec and the one of the protocol") from error
    except ValueError as error:
        raise UserError(f"{path} is no address that fsspec knows ({error}): check it") from error


def open_input(path: str) -> BinaryIO:
    """The bytes of a file as they are stored."""
    if not is_remote(path):
        return Path(path).open("rb")
    system, name = filesystem(path)
    return system.open(name, "rb")


def size_of(path: str) -> int:
    if not is_remote(path):
        return Path(path).stat().st_size
    system, name = filesystem(path)
    return system.size(name) or 0


def identity_of(path: str) -> str:
    """Identifies the content of a file: its SHA-256, or the version (ETag, date, size) of a remote file."""
    if not is_remote(path):
        return file_digest(path)
    system, name = filesystem(path)
    keys = ("size", "ETag", "etag", "LastModified", "mtime", "md5Hash", "blob_id")
    return str({key: str(value) for key in keys if (value := system.info(name).get(key)) is not None})


def find_files(paths: Sequence[str], suffixes: Sequence[str]) -> list[str]:
    """The files of the formats `suffixes` that `paths` (files, folders, addresses, patterns of addresses) name or
    contain, in an order that depends only on their names."""
    files: list[str] = []
    for path in paths:
        names = list_remote(path) if is_remote(path) else list_local(Path(path).absolute())
        found = [name for name in names if kind_of(name)[0] in suffixes]
        if not found:
            raise UserError(f"{path} contains no {', '.join(suffixes)} file: check the path")
        files += found
    if len(set(files)) < len(files):
        raise UserError(f"{Counter(files).most_common(1)[0][0]} is named twice: name each file once")
    return files


def list_local(path: Path) -> list[str]:
    if not path.exists():
        raise UserError(f"{path} does not exist: check the path, or run the download stage first")
    if not path.is_file() and not path.is_dir():
        raise UserError(f"{path} is not a regular file or folder: check the path")
    return [str(path)] if path.is_file() else [str(file) for file in sorted(walk(path))]


def walk(folder: Path, above: Sequence[str] = ()) -> Iterator[Path]:
    """The files in a folder and its folders. Links are followed, except to a folder that contains them."""
    above = [*above, os.path.realpath(folder)]
    for path in folder.iterdir():
        if path.is_file():
            yield path
        elif path.is_dir() and os.path.realpath(path) not in above:
            yield from walk(path, above)


def list_remote(path: str) -> list[str]:
    system, name = filesystem(path)
    try:
        if "*" in name:
            names = system.glob(name)
        else:
            names = system.find(name) if system.isdir(name) else [name] * system.exists(name)
    except Exception as error:  # each protocol has its own errors
        raise UserError(f"{path} cannot be listed ({error}): check the address and the access to it") from error
    return sorted(system.unstrip_protocol(name) for name in names)
