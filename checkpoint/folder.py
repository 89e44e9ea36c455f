"""Checkpoint folders: `<output-dir>/<bert-model>/<phase>/<step>/`. Each is a Hugging Face model folder, with the
optimizer's state, the run's progress, and a manifest of sizes and checksums.

A checkpoint is atomic: it is written under a temporary name, synced and renamed, so a folder with a step for a name is
complete. Tensors are in safetensors files and everything else is JSON; nothing is ever unpickled.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from checkpoint.model_files import has_weights
from utils.errors import UserError
from utils.files import read_json_object
from utils.progress import print_line

MODEL_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
VOCAB_FILE = "vocab.txt"
TOKENIZER_FILE = "tokenizer_config.json"
MANIFEST_FILE = "manifest.json"
TEMPORARY_SUFFIX = ".tmp"
HASH_BLOCK = 16 << 20  # bytes: every block of a file has a checksum of its own, so that ranks can share the work
FORMAT_VERSION = 2  # 1 has one checksum per file


OPTIMIZER_SUFFIX, PROGRESS_SUFFIX = "_optimizer.safetensors", "_progress.json"


def optimizer_file(prefix: str) -> str:
    return prefix + OPTIMIZER_SUFFIX


def progress_file(prefix: str) -> str:
    return prefix + PROGRESS_SUFFIX


class BadCheckpoint(UserError):
    """A checkpoint folder whose content does not match its manifest."""


# --- checksums --------------------------------------------------------------------------------------------------------


def num_blocks(size: int) -> int:
    return -(-size // HASH_BLOCK)


def block_digest(path: Path, block: int) -> str:
    """The SHA-256 of one block of a file."""
    with path.open("rb") as file:
        file.seek(block * HASH_BLOCK)
        return hashlib.sha256(file.read(HASH_BLOCK)).hexdigest()


def block_digests(blocks: Sequence[tuple[Path, int]]) -> list[str]:
    """The SHA-256 of each (file, block), on several threads."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda block: block_digest(*block), blocks))


def manifest_of(sizes: dict[str, int], digests: Sequence[str]) -> dict[str, Any]:
    """The manifest of files with `sizes`, whose blocks, file after file, have `digests`."""
    files, start = {}, 0
    for name, size in sizes.items():
        stop = start + num_blocks(size)
        files[name] = {"size": size, "sha256": list(digests[start:stop])}
        start = stop
    return {"format_version": FORMAT_VERSION, "block_size": HASH_BLOCK, "files": files}


def verify_checkpoint(folder: str | Path) -> None:
    """Raises BadCheckpoint, naming the file, unless `folder` holds what its manifest says."""
    folder = Path(folder)
    manifest_path = folder / MANIFEST_FILE
    if not manifest_path.is_file():
        raise BadCheckpoint(
            f"checkpoint {folder} has no {MANIFEST_FILE}: it is incomplete, or not a checkpoint of this program "
            f"(--from-pretrained-params takes the weights of any model folder); use the checkpoint before it"
        )
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        if manifest["format_version"] not in (1, FORMAT_VERSION):
            raise BadCheckpoint(
                f"checkpoint {folder} has format {manifest['format_version']}, and this program reads "
                f"{FORMAT_VERSION}: use the version of this project that wrote it"
            )
        if manifest["format_version"] == FORMAT_VERSION and manifest["block_size"] != HASH_BLOCK:
            raise ValueError(f"block_size is {manifest['block_size']}, not {HASH_BLOCK}")
        expected = manifest["files"]
        if unlisted := _unlisted_files(folder, expected):
            raise ValueError(f"it does not list {unlisted[0]}")
        for name, file in expected.items():
            path = folder / name
            if Path(name).name != name:
                raise ValueError(f"{name!r} is not a plain file name")
            if not path.is_file():
                raise BadCheckpoint(f"checkpoint {folder} lacks {name}: use the checkpoint before it")
            if path.stat().st_size != file["size"] or not _has_digests(path, file["sha256"]):
                raise BadCheckpoint(
                    f"{path} is damaged (its bytes are not those that {MANIFEST_FILE} names): use the checkpoint "
                    f"before it"
                )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(f"{manifest_path} is damaged ({error}): use the checkpoint before it") from error


def _unlisted_files(folder: Path, files: dict[str, Any]) -> list[str]:
    """The files of a checkpoint that the manifest's `files` must list and does not."""
    prefixes = {name.removesuffix(OPTIMIZER_SUFFIX) for name in files if name.endswith(OPTIMIZER_SUFFIX)} or {"model"}
    required = {MODEL_FILE, CONFIG_FILE, VOCAB_FILE, TOKENIZER_FILE}
    required |= {file(prefix) for prefix in prefixes for file in (optimizer_file, progress_file)}
    # A file of another prefix that was added later would be read without a checksum.
    required |= {path.name for path in folder.iterdir() if path.name.endswith((OPTIMIZER_SUFFIX, PROGRESS_SUFFIX))}
    return sorted(required - files.keys())


def _has_digests(path: Path, expected: str | list[str]) -> bool:
    if isinstance(expected, str):  # format 1
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == expected
    blocks = num_blocks(path.stat().st_size)
    return block_digests([(path, block) for block in range(blocks)]) == expected


def is_valid(folder: Path) -> bool:
    try:
        verify_checkpoint(folder)
    except BadCheckpoint:
        return False
    return True


# --- finding ----------------------------------------------------------------------------------------------------------


def checkpoint_steps(parent: str | Path) -> list[int]:
    """The steps of the checkpoints in `parent`, oldest first."""
    parent = Path(parent)
    if not parent.is_dir():
        return []
    return sorted(int(path.name) for path in parent.iterdir() if is_step(path.name) and path.is_dir())


def is_step(name: str) -> bool:
    """Whether `name` is a step's folder name: a number in its usual form."""
    return name == "0" or (name.isascii() and name.isdigit() and name[0] != "0" and len(name) < 20)


def latest_checkpoint(parent: str | Path, log: Callable[[str], None] = print_line) -> Path | None:
    """The newest valid checkpoint in `parent`; damaged ones are skipped with a warning. None if there is no checkpoint
    yet; UserError if there are some and all are damaged, since starting from nothing would surprise everyone."""
    steps = checkpoint_steps(parent)
    for step in reversed(steps):
        folder = Path(parent) / str(step)
        try:
            verify_checkpoint(folder)
        except BadCheckpoint as error:
            log(f"warning: {error}")
        else:
            return folder
    if steps:
        raise UserError(f"none of the checkpoints in {parent} is valid: move them away to start from step 1")
    return None


def find_checkpoint(path: str | Path, last_step: str | None, log: Callable[[str], None] = print_line) -> Path | None:
    """The checkpoint that `--from-checkpoint PATH --last-step-of-checkpoint LAST_STEP` names, verified.

    last_step: None if `path` is a checkpoint folder; a number N for `path`/N; "auto" for the newest valid checkpoint in
    the folder of steps `path`, or None if there is none yet. With a number or "auto", `path` may also be that
    checkpoint itself.
    """
    path = Path(path)
    is_checkpoint = (path / MANIFEST_FILE).is_file()
    if last_step == "auto" and not is_checkpoint:
        if path.is_file():
            raise UserError(f"{path} is a file: --from-checkpoint names the folder that holds the steps' folders")
        return latest_checkpoint(path, log)
    names_itself = last_step is None or (is_checkpoint and last_step in ("auto", path.name))
    folder = path if names_itself else path / str(last_step)
    if not folder.is_dir():
        raise UserError(f"checkpoint {folder} does not exist: check --from-checkpoint and --last-step-of-checkpoint")
    verify_checkpoint(folder)
    return folder


def find_model_folder(path: str | Path, log: Callable[[str], None] = print_line) -> Path:
    """The model folder that `path` names: `path` itself, or the newest valid checkpoint in a folder of steps."""
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"model folder {path} does not exist: check the path")
    if has_weights(path):
        if (path / MANIFEST_FILE).is_file():
            verify_checkpoint(path)
        return path
    newest = latest_checkpoint(path, log)
    if newest is None:
        raise UserError(f"model folder {path} holds neither {MODEL_FILE} nor a valid checkpoint: check the path")
    return newest


def read_progress(folder: Path, prefix: str) -> dict[str, Any]:
    path = folder / progress_file(prefix)
    if not path.is_file():
        raise UserError(f"checkpoint {folder} has no {path.name}: give the --model-prefix that it was written with")
    return read_json_object(path, "the progress of a checkpoint")


# --- folders ----------------------------------------------------------------------------------------------------------


def prepare_folder(parent: str | Path) -> None:
    """Makes the folder of steps `parent`, checks that it can be written, and removes what a killed run left there."""
    parent = Path(parent)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for left_over in parent.glob(f"*{TEMPORARY_SUFFIX}*"):
            if is_step(left_over.name.partition(TEMPORARY_SUFFIX)[0]):
                shutil.rmtree(left_over)
        probe = parent / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"cannot write checkpoints to {parent} ({error.strerror or error}): choose another --output-dir"
        ) from error


def remove_checkpoint(folder: Path) -> None:
    """Removes a checkpoint. It is renamed first, so that a kill in between leaves no partial one under its name."""
    temporary = folder.with_name(f"{folder.name}{TEMPORARY_SUFFIX}-removed")
    shutil.rmtree(temporary, ignore_errors=True)
    folder.rename(temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def remove_old_checkpoints(parent: Path, newest: int, keep: int) -> None:
    """Removes the oldest checkpoints up to step `newest`, so that `keep` are left."""
    for step in [step for step in checkpoint_steps(parent) if step <= newest][:-keep]:
        remove_checkpoint(parent / str(step))
