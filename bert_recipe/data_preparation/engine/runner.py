"""Runs stages of the data preparation: skips what is up to date, and makes a folder completely or
not at all.

The `manifest.json` of a folder says what the stage read and made. It depends only on the inputs,
the options and the installed versions: no times, no number of workers.
"""

import glob
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from bert_recipe.data_preparation.engine.versions import package_versions
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import TEMPORARY_SUFFIX, file_digest, last_change, publish_folder
from bert_recipe.utils.json_files import JsonObject, json_digest, list_of, read_json, write_json
from bert_recipe.utils.progress import print_line
from bert_recipe.utils.work_units.units import RECORDS, disturbed, read_record

MANIFEST = "manifest.json"
PARTIAL = ".partial"  # ends the name of an unfinished folder
CARD_FILE = "README.md"  # of a model
# increases when a stage makes other bytes than before from the same input and options
SCHEMA_VERSION = 2
DIGITS = 8  # of the hash in the name of an unfinished folder
MAX_REASON = 120  # characters

Files = list[JsonObject]  # path, bytes and sha256 of each
FILE = {"path": str, "bytes": int, "sha256": str}
MANIFEST_VALUES = {"schema_version": int, "inputs": list_of(FILE), "outputs": list_of(FILE)}
MANIFEST_VALUES |= dict.fromkeys(("options", "counts"), JsonObject)


@dataclass(frozen=True)
class Stage:
    """One step of the preparation, which fills one folder.

    options: everything that decides the results, besides the inputs.
    find_inputs: returns the files to read; None if there is nothing to do. Raises UserError if they
        are not there yet.
    make: fills a folder and returns counts for the manifest. The folder may contain what a run that
        was stopped has done. The same inputs and options must give the same bytes.
    in_place: work in `folder` instead of `<folder>.<hash>.partial`, for files that are each written
        atomically.
    find_doubts: returns what a user has to know of results with these counts.
    """

    name: str
    folder: Path
    options: JsonObject
    find_inputs: Callable[[], list[str] | None]
    make: Callable[[Path, Files, Executor], JsonObject]
    in_place: bool = False
    find_doubts: Callable[[JsonObject], list[str]] = lambda counts: []


def run(stages: Sequence[Stage], executor: Executor) -> None:
    """Runs the stages whose folders are not up to date. The last lines are what is doubtful in the
    results.
    """
    for stage in stages:
        run_stage(stage, executor)
    for stage in stages:
        made = read_manifest(stage.folder)
        for doubt in stage.find_doubts(made["counts"]) if made else ():
            print_line(f"warning: {stage.name}: {doubt}")


def run_stage(stage: Stage, executor: Executor) -> None:
    """Runs `stage` unless its folder is up to date."""
    paths = stage.find_inputs()
    if paths is None:
        print_line(f"{stage.name}: skipped, there is no text for it")
        return
    reason = stale_reason(stage.folder, stage.options, paths)
    if reason is None:
        print_line(f"{stage.name}: up to date in {stage.folder}")
        return
    if read_manifest(stage.folder):
        print_line(f"{stage.name}: made again, {reason}")
    elif not stage.in_place and stage.folder.exists() and any(stage.folder.iterdir()):
        raise UserError(
            f"{stage.folder} has files that no stage made: move them or choose another --output-dir"
        )
    started = time.monotonic()
    inputs = describe(paths, stage.folder, executor.map)
    folder = stage.folder
    if not stage.in_place:
        # The name says what is made, so that workers of an earlier run with other options write
        # elsewhere.
        identity = json_digest([stage.options, inputs, SCHEMA_VERSION])[:DIGITS]
        folder = stage.folder.with_name(f"{stage.folder.name}.{identity}{PARTIAL}")
    if stale_reason(folder, stage.options, paths) is not None:
        fill(stage, folder, inputs, executor)
    if not stage.in_place:
        shutil.rmtree(folder / RECORDS, ignore_errors=True)
        # If the process is killed here, the next run finds the complete `folder`.
        publish_folder(folder, stage.folder)
        replaced = stage.folder.parent.glob(f"{glob.escape(stage.folder.name)}{TEMPORARY_SUFFIX}*")
        for leftover in (*partial_folders(stage.folder), *replaced):
            shutil.rmtree(leftover)
    made = read_manifest(stage.folder)
    if made is None:
        raise disturbed(stage.folder)
    size = tqdm.format_sizeof(sum(entry["bytes"] for entry in made["outputs"]), "B")
    counts = ", ".join(
        f"{value:,} {name.replace('_', ' ')}" for name, value in made["counts"].items()
    )
    seconds = tqdm.format_interval(time.monotonic() - started)
    print_line(f"{stage.name}: {counts}; {size} in {stage.folder}, {seconds}")


def fill(stage: Stage, folder: Path, inputs: Files, executor: Executor) -> None:
    """Makes the stage's files in `folder`, and their manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        counts = stage.make(folder, inputs, executor)
        for leftover in folder.rglob("*.tmp-*"):  # temporary files of a killed run
            leftover.unlink()
        outputs: Files = []
        for path in sorted(folder.rglob("*")):
            is_output = path.name not in (MANIFEST, CARD_FILE)  # a card may be edited
            if not path.is_file() or not is_output or folder / RECORDS in path.parents:
                continue
            name = str(path.relative_to(folder))
            record = read_record(folder, name)
            if record is None:
                outputs += describe([str(path)], folder)
            else:
                outputs.append({"path": name, "bytes": record.bytes, "sha256": record.sha256})
        content = {
            "stage": stage.name,
            "schema_version": SCHEMA_VERSION,
            "options": stage.options,
            "counts": counts,
            "inputs": inputs,
            "outputs": outputs,
            "versions": package_versions(),
        }
        write_json(folder / MANIFEST, content, indent=1)
    except OSError as error:
        # A failed write to an open file, for example on a full disk, does not know the name of the
        # file.
        error.filename = error.filename or str(folder)
        raise


def show_plan(stages: Sequence[Stage]) -> None:
    """Prints the stages, whether each is up to date, and how much an interrupted run has done."""
    to_do: list[Stage] = []
    print_line(f"{'stage':<24} {'status':<10}  folder")
    for stage in stages:
        status = "up to date"
        if not is_up_to_date(stage, to_do):
            to_do.append(stage)
            status = "to do"
        print_line(f"{stage.name:<24} {status:<10}  {stage.folder}{begun_work(stage.folder)}")
    print_line(f"{len(to_do)} of {len(stages)} stages to do (dry run: nothing was done)")


def partial_folders(folder: Path) -> list[Path]:
    """What interrupted runs have made of `folder`."""
    return [
        path
        for path in folder.parent.glob(f"{glob.escape(folder.name)}.*")
        if path.suffix == PARTIAL
    ]


def begun_work(folder: Path) -> str:
    """What an interrupted run has made of `folder`, for the line of its stage; "" for nothing."""
    received = sum(part.stat().st_size for part in folder.glob("*.part"))
    if received:
        return f" ({received / 1e6:,.1f} MB of an unfinished file are here)"
    records: list[Path] = []
    for partial_folder in partial_folders(folder):
        records += (partial_folder / RECORDS).rglob("*.json")
    return f" ({len(records)} units of work are done)" if records else ""


def is_up_to_date(stage: Stage, to_do: Sequence[Stage]) -> bool:
    """Whether the results of `stage` are there and will still be valid after the stages `to_do`."""
    try:
        inputs = stage.find_inputs()
    except UserError:  # the inputs are still to be made
        return False
    if inputs is None:
        return True
    will_change = any(
        Path(path).is_relative_to(other.folder.absolute()) for path in inputs for other in to_do
    )
    return not will_change and stale_reason(stage.folder, stage.options, inputs) is None


def relative_path(path: str, folder: Path) -> str:
    """`path` relative to `folder`, so that a data folder can be moved as a whole."""
    return os.path.relpath(Path(path).resolve(), folder.resolve())


def describe(paths: Sequence[str], folder: Path, map_: Callable[..., Iterable[str]] = map) -> Files:
    """Relative path, size and SHA-256 of each file. map_: of an executor."""
    return [
        {"path": relative_path(path, folder), "bytes": Path(path).stat().st_size, "sha256": digest}
        for path, digest in zip(paths, map_(file_digest, paths), strict=True)
    ]


def read_manifest(folder: Path) -> JsonObject | None:
    """The manifest of `folder`; None if there is none, or none that this version can read."""
    try:
        content = read_json(folder / MANIFEST, "manifest", MANIFEST_VALUES)
    except UserError:
        return None
    return content if content["schema_version"] == SCHEMA_VERSION else None


def stale_reason(folder: Path, options: JsonObject, inputs: Sequence[str]) -> str | None:
    """Why `folder` is not what these options make of these inputs; None if it is up to date.

    A file of the same size that is not newer than the manifest counts as unchanged; a newer one is
    hashed.
    """
    content = read_manifest(folder)
    if content is None:
        return "not made yet"
    options = json.loads(json.dumps(options))
    for name in sorted(options.keys() | content["options"].keys()):
        old = content["options"].get(name)
        new = options.get(name)
        if old != new:
            change = f"{name} was {old}, is {new}"
            return change if len(change) <= MAX_REASON else f"{name} has changed"
    old_paths = {entry["path"] for entry in content["inputs"]}
    new_paths = {relative_path(path, folder) for path in inputs}
    if old_paths != new_paths:
        return "the list of input files has changed"
    made = (folder / MANIFEST).stat().st_mtime_ns
    for entry in content["inputs"] + content["outputs"]:
        path = Path(os.path.normpath(folder.resolve() / entry["path"]))
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size == entry["bytes"] and last_change(path) <= made:
            continue
        if file_digest(path) != entry["sha256"]:
            return f"{path} has changed"
    return None
