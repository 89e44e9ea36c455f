"""Checkpoint folders: `<output-dir>/<bert-model>/<phase>/<step>/`. Each is a Hugging Face model
folder with the optimizer state, the run's progress, and a manifest of sizes and checksums.

Checkpoints are atomic: written under a temporary name, synced and renamed. A folder named after a
step is complete. Tensors are in safetensors files and everything else is JSON; nothing is
unpickled.
"""

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path

from bert_recipe.checkpoint.sentence_folders import sentence_files
from bert_recipe.config import is_step
from bert_recipe.tokenization.files import TOKENIZER_FILES
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import TEMPORARY_SUFFIX, is_hidden, remove
from bert_recipe.utils.json_files import (
    JsonObject,
    from_json,
    json_digest,
    object_of,
    read_json,
    write_json,
)
from bert_recipe.utils.known_tools import MODELS, refuse_known
from bert_recipe.utils.progress import print_line

MODEL_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
MANIFEST_FILE = "manifest.json"
PROBE = "probe"  # in the folder of steps, for a moment; its processes look for it
BEST_FOLDER = "best"  # in the folder of steps: a link to the one with the best score, see best.py
SEED_FOLDER = re.compile("(seed|fold)-.+")  # in a folder of steps, for each of several runs
OPTIMIZER_SUFFIX, PROGRESS_SUFFIX = "_optimizer.safetensors", "_progress.json"
# Of the files that only a run that resumes reads, and that a published model need not have.
STATE_SUFFIXES = (OPTIMIZER_SUFFIX, PROGRESS_SUFFIX)
INDEX_SUFFIX = ".index.json"
PICKLED_FILE = "pytorch_model.bin"  # of older versions of transformers
WEIGHT_FILES = (MODEL_FILE, PICKLED_FILE)  # either may be sharded, with an index
HASH_BLOCK = 16 << 20  # bytes; each block has a checksum, so that ranks can share the work
HASH_READ = 1 << 20  # bytes that each thread holds
FORMAT_VERSION = 3
READ_VERSIONS = (2, FORMAT_VERSION)  # see older.py
HAS_STATE = "has_state"  # in the manifest; False: the step is kept as the best model only
ADVICE = "use the checkpoint before it"


class BadCheckpoint(UserError):
    """A checkpoint folder that cannot be read, or whose content does not match its manifest."""


def read_manifest(folder: Path) -> dict[str, JsonObject]:
    """Size and checksums of each file. Raises UserError for a manifest that is damaged or of
    another version.
    """
    path = folder / MANIFEST_FILE
    content = read_json(path, "the manifest", {"format_version": int, "block_size": int})
    layout = (content["format_version"], content["block_size"])
    if layout not in [(version, HASH_BLOCK) for version in READ_VERSIONS]:
        raise UserError(
            f"{path} has format and block_size {layout}, not {(FORMAT_VERSION, HASH_BLOCK)}: use "
            "the version that wrote it"
        )
    entry = {"size": int, "sha256": list[str]}
    return from_json(object_of(entry), content.get("files"), f"the manifest {path}: files")


def num_blocks(size: int) -> int:
    return -(-size // HASH_BLOCK)


def block_digest(path: Path, block: int) -> str:
    """The SHA-256 of one block of a file."""
    digest = hashlib.sha256()
    left = HASH_BLOCK
    with path.open("rb") as file:
        file.seek(block * HASH_BLOCK)
        while left and (part := file.read(min(left, HASH_READ))):
            digest.update(part)
            left -= len(part)
    return digest.hexdigest()


def block_digests(blocks: Sequence[tuple[Path, int]]) -> list[str]:
    """The SHA-256 of each (file, block), on several threads. The executors of concurrent.futures
    refuse work once the interpreter is about to end, when a checkpoint may still be written.
    """
    with ThreadPool(min(32, os.cpu_count() or 1)) as pool:
        return pool.starmap(block_digest, blocks)


def manifest_of(sizes: dict[str, int], digests: Sequence[str]) -> JsonObject:
    """The manifest of files with `sizes`. digests: of all blocks, in the order of the files."""
    files = {}
    start = 0
    for name, size in sizes.items():
        stop = start + num_blocks(size)
        files[name] = {"size": size, "sha256": list(digests[start:stop])}
        start = stop
    return {"format_version": FORMAT_VERSION, "block_size": HASH_BLOCK, "files": files}


def link_model(folder: Path, step: Path) -> None:
    """Fills the new folder `folder` with the model of the checkpoint `step`, as hard links where
    possible, and writes its manifest, which says that no run can resume it.
    """
    files = {
        name: file
        for name, file in read_manifest(step).items()
        if not name.endswith(STATE_SUFFIXES)
    }
    for name in files:
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        try:
            target.hardlink_to(step / name)
        except OSError:  # a file system without hard links
            shutil.copy2(step / name, target)
    manifest = read_json(step / MANIFEST_FILE, "the manifest")
    write_json(folder / MANIFEST_FILE, manifest | {"files": files, HAS_STATE: False})


def model_digest(folder: Path) -> str:
    """Identifies the weights of a folder with a manifest."""
    return json_digest(read_manifest(folder)[MODEL_FILE])


def verify_checkpoint(folder: str | Path, with_state: bool = True) -> None:
    """Raises BadCheckpoint, naming the file, unless `folder` matches its manifest; without
    `with_state` only what is read of its model: the state of a run may then be missing.
    """
    folder = Path(folder)
    if not (folder / MANIFEST_FILE).is_file():
        refuse_foreign(folder)
        if checkpoint_steps(folder):
            raise BadCheckpoint(
                f"{folder} is a folder of steps: name one, or add --last-step-of-checkpoint auto"
            )
        raise BadCheckpoint(
            f"checkpoint {folder} has no {MANIFEST_FILE}: it is incomplete, or not a checkpoint of "
            "this program (--from-pretrained-params takes the weights of any model folder); "
            f"{ADVICE}"
        )
    try:
        expected = read_manifest(folder)
        has_state = read_json(folder / MANIFEST_FILE, "the manifest").get(HAS_STATE, True)
        if with_state and not has_state:
            raise BadCheckpoint(
                f"{folder} has no optimizer state, since it was kept only as the best model of its "
                "run: resume from another step, or take its weights with --from-pretrained-params"
            )
        if not with_state:
            expected = {
                name: file for name, file in expected.items() if not name.endswith(STATE_SUFFIXES)
            }
        # Also a file that was added later would be read without a checksum.
        read = {MODEL_FILE, CONFIG_FILE, *files_beside(folder, with_state)}
        advice = ADVICE
        if not with_state:
            advice += f", or remove {MANIFEST_FILE} if you changed the model yourself"
        if unlisted := sorted(read - expected.keys()):
            raise BadCheckpoint(f"{folder / MANIFEST_FILE} does not list {unlisted[0]}: {advice}")
        for name, file in expected.items():
            size = (folder / name).stat().st_size
            blocks = [(folder / name, block) for block in range(num_blocks(size))]
            if size != file["size"] or block_digests(blocks) != file["sha256"]:
                raise BadCheckpoint(
                    f"{folder / name} is damaged (not the bytes in {MANIFEST_FILE}): {advice}"
                )
    except (OSError, ValueError) as error:  # ValueError: names with NUL
        where = getattr(error, "filename", None) or folder
        reason = getattr(error, "strerror", None) or error
        raise BadCheckpoint(
            f"{where} of checkpoint {folder} cannot be read ({reason}): {ADVICE}"
        ) from error
    except UserError as error:
        raise BadCheckpoint(str(error)) from error


def files_beside(folder: Path, with_state: bool) -> set[str]:
    """The names of the files in a model folder that are read if they are there: those of a
    tokenizer, of sentence-transformers, and `with_state` those of a run.
    """
    names = {str(path.relative_to(folder)) for path in sentence_files(folder)}
    for path in folder.iterdir():
        is_state = with_state and path.name.endswith(STATE_SUFFIXES) and not is_hidden(path)
        if is_state or path.name in TOKENIZER_FILES:
            names.add(path.name)
    return names


def is_valid(folder: Path) -> bool:
    try:
        verify_checkpoint(folder)
    except UserError:
        return False
    return True


def refuse_foreign(path: Path) -> None:
    """Raises UserError if `path` is a file, or a folder of another tool."""
    refuse_known(path, MODELS)
    if path.is_file():
        raise UserError(f"{path} is a file: give the folder of a checkpoint, or a folder of steps")


def checkpoint_steps(parent: str | Path) -> list[int]:
    """The steps of the checkpoints in `parent`, oldest first."""
    parent = Path(parent)
    paths = parent.iterdir() if parent.is_dir() else ()
    return sorted(int(path.name) for path in paths if is_step(path.name) and path.is_dir())


def without_seed(folder: Path) -> Path:
    """The folder of a run; of one of several seeds or folds, the one that has all of them."""
    return folder.parent if SEED_FOLDER.fullmatch(folder.name) else folder


def is_of_run(folder: Path) -> bool:
    """Whether a model folder is a step of a run or its best model, where the run wrote it."""
    if not (is_step(folder.name) or folder.name == BEST_FOLDER):
        return False
    return any(folder.parent.glob(f"[0-9]*/{MANIFEST_FILE}"))


def newest_checkpoint(
    parent: str | Path,
    log: Callable[[str], None] = print_line,
    above: int = -1,
    with_state: bool = True,
) -> Path | None:
    """The newest valid checkpoint of the steps in `parent` after `above`, or None. Warns of damaged
    newer ones. with_state: see `verify_checkpoint`.
    """
    newer_steps = [step for step in checkpoint_steps(parent) if step > above]
    for step in reversed(newer_steps):
        folder = Path(parent) / str(step)
        try:
            verify_checkpoint(folder, with_state)
            return folder
        except BadCheckpoint as error:
            log(f"warning: {error}")
    return None


def find_checkpoint(path: str | Path, last_step: str | None, with_state: bool) -> Path | None:
    """Resolves and verifies `--from-checkpoint PATH --last-step-of-checkpoint LAST_STEP`.
    with_state: see `verify_checkpoint`.

    last_step: None if `path` is a checkpoint folder; a number N for `path`/N; "auto" for the newest
    valid checkpoint in the folder of steps `path`, or None if it has none. With a number or "auto",
    `path` may also be that checkpoint.
    """
    path = Path(path)
    is_checkpoint = (path / MANIFEST_FILE).is_file()
    if last_step == "auto" and not is_checkpoint:
        newest = newest_checkpoint(path)
        if newest is None:
            refuse_foreign(path)
            refuse_damaged(path)
        return newest
    names_checkpoint = last_step is None or (is_checkpoint and last_step in ("auto", path.name))
    folder = path if names_checkpoint else path / str(last_step)
    if not folder.is_dir():
        refuse_foreign(path)
        raise UserError(
            f"checkpoint {folder} does not exist: check --from-checkpoint and "
            "--last-step-of-checkpoint"
        )
    verify_checkpoint(folder, with_state)
    return folder


def refuse_damaged(parent: Path) -> None:
    """Raises UserError if there are checkpoints in `parent`, of which none is valid."""
    if checkpoint_steps(parent):
        raise UserError(
            f"none of the checkpoints in {parent} is valid: move them away to start from step 1"
        )


def find_model_folder(
    path: str | Path, log: Callable[[str], None] = print_line, takes_best: bool = True
) -> Path:
    """`path` itself, or of a run's folder of steps the best model (if `takes_best`), else the
    newest valid checkpoint; logs which.
    """
    path = Path(path)
    if not path.is_dir():
        refuse_foreign(path)
        raise UserError(f"model folder {path} does not exist: check the path")
    model = path if has_weights(path) else None
    best = path / BEST_FOLDER
    if model is None and takes_best and has_weights(best):
        # Not through the link, which a run may change meanwhile.
        model = path / best.readlink() if best.is_symlink() else best
        log(f"{path}: using {model.name}, the model with the best score")
    if model is not None:
        if (model / MANIFEST_FILE).is_file():
            verify_checkpoint(model, with_state=False)
        return model
    newest = newest_checkpoint(path, log, with_state=False)
    if newest is None:
        refuse_foreign(path)
        raise UserError(
            f"model folder {path} holds neither {MODEL_FILE} nor a valid checkpoint: "
            + (f"did you mean {below}?" if (below := run_below(path)) else "check the path")
        )
    step = best_step_of(newest) if takes_best else None
    if step is not None:  # the link is gone, as in a copy without links
        model = path / str(step)
        if not has_weights(model):
            raise UserError(
                f"{model}, the step with the best score, is gone: restore it, or name the folder "
                f"of a step"
            )
        verify_checkpoint(model, with_state=False)
        log(f"{path}: using {step}, the model with the best score")
        return model
    log(f"{path}: using {newest.name}, the newest valid checkpoint")
    return newest


def run_below(folder: Path) -> Path | None:
    """A folder of steps below an --output-dir or its <model>, the first by name; None without."""
    depths = ("*", "*/*", "*/*/*")
    steps = [path for depth in depths for path in folder.glob(f"{depth}/[0-9]*/{MANIFEST_FILE}")]
    return min((path.parent.parent for path in steps), default=None)


def best_step_of(folder: Path) -> int | None:
    """The step with the best score when the checkpoint `folder` was made; None without one."""
    for path in folder.glob("*" + PROGRESS_SUFFIX):
        with contextlib.suppress(UserError):  # a damaged one names none
            return read_json(path, "the progress of a checkpoint", {"best_step": int | None})[
                "best_step"
            ]
    return None


def has_weights(folder: Path) -> bool:
    return any(
        (folder / name).is_file() or (folder / (name + INDEX_SUFFIX)).is_file()
        for name in WEIGHT_FILES
    )


def remove_leftovers(parent: Path) -> None:
    """Removes temporary files and folders of killed runs in the folder of steps `parent`, which
    must be locked.
    """
    for path in parent.glob(f"*{TEMPORARY_SUFFIX}*"):
        name = path.name.partition(TEMPORARY_SUFFIX)[0]
        if is_step(name) or name in (PROBE, BEST_FOLDER):
            remove(path)


def restore_replaced(parent: Path) -> None:
    """Gives a step its name back that a kill left under a temporary one, between the two renames
    that replace it.
    """
    for path in parent.glob(f"*{TEMPORARY_SUFFIX}*"):
        step = path.with_name(path.name.partition(TEMPORARY_SUFFIX)[0])
        is_free = is_step(step.name) and not step.exists()
        if is_free and not path.is_symlink() and is_valid(path):
            path.rename(step)


def remove_old_checkpoints(parent: Path, newest: int, keep: int, keep_every: int | None) -> None:
    """Removes checkpoints in `parent` up to step `newest`, but keeps the last `keep` of these, step
    0, and every multiple of `keep_every`; of the best step, and of one that was the best for one of
    the last, the model.
    """
    steps = [step for step in checkpoint_steps(parent) if step <= newest]
    best_names = {str(best_step_of(parent / str(step))) for step in steps[-keep:]}
    best = parent / BEST_FOLDER
    if best.is_symlink():  # also of a run that an older version has begun
        best_names.add(str(best.readlink()))
    for step in steps[:-keep]:
        is_multiple = step == 0 or (keep_every is not None and step % keep_every == 0)
        if is_multiple:
            continue
        if str(step) in best_names:
            remove_state(parent / str(step))
        else:
            remove(parent / str(step))


def remove_state(folder: Path) -> None:
    """Removes the optimizer state of a checkpoint. Its manifest changes first, so that it is a
    valid model at any time.
    """
    path = folder / MANIFEST_FILE
    manifest = read_json(path, "the manifest", {"files": JsonObject})
    files = manifest["files"].items()
    left = {name: file for name, file in files if not name.endswith(OPTIMIZER_SUFFIX)}
    if left != manifest["files"]:
        write_json(path, manifest | {"files": left, HAS_STATE: False})
    for file in folder.iterdir():
        if file.name.endswith(OPTIMIZER_SUFFIX):
            file.unlink()
