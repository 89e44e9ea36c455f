"""Runs stages of the data preparation: skips what is up to date, and makes a folder completely or not at all."""

import glob
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from data_preparation import manifest
from data_preparation.tasks import RECORDS, digest_of, read_records
from utils.errors import UserError

DIGITS = 8  # of the hash in the name of an unfinished folder


class Stage(ABC):
    """One step of the preparation, which fills one folder. Subclasses are in stages.py.

    Attributes and properties:
        name: for messages and the manifest.
        folder: where the results go.
        options: everything that decides the results, besides the inputs; written to the manifest.
        in_place: work in the final folder instead of `<folder>.<hash>.partial`, for files that are each written
            atomically.
    """

    name: str
    folder: Path
    options: dict[str, Any]
    in_place = False

    @abstractmethod
    def inputs(self) -> list[str]:
        """The files that the stage reads. Raises UserError if they are not there yet."""

    @abstractmethod
    def make(self, folder: Path, inputs: list[dict[str, Any]], executor: Executor) -> dict[str, Any]:
        """Fills `folder` and returns counts for the manifest. `folder` may contain what a run that was stopped has
        done. The same inputs and options must give the same bytes. inputs: see `manifest.describe`."""

    def skip_reason(self) -> str | None:
        """Why there is nothing to do, once the stages before are done."""
        return None


def run(stage: Stage, executor: Executor) -> None:
    """Runs `stage` unless its folder is up to date."""
    if reason := stage.skip_reason():
        print(f"{stage.name}: skipped, {reason}", flush=True)
        return
    paths = stage.inputs()
    reason = manifest.stale_reason(stage.folder, stage.options, paths)
    if reason is None:
        print(f"{stage.name}: up to date in {stage.folder}", flush=True)
        return
    if manifest.read(stage.folder):
        print(f"{stage.name}: made again, {reason}", flush=True)
    elif not stage.in_place and stage.folder.exists() and any(stage.folder.iterdir()):
        raise UserError(f"{stage.folder} has files that no stage made: move them or choose another --output-dir")
    started = time.monotonic()
    inputs = manifest.describe(paths, stage.folder, executor)
    if stage.in_place:
        make(stage, stage.folder, inputs, executor)
    else:
        # The name says what is made, so that workers of an earlier run with other options write elsewhere.
        identity = digest_of([stage.options, inputs, manifest.SCHEMA_VERSION])[:DIGITS]
        partial_folder = stage.folder.with_name(f"{stage.folder.name}.{identity}.partial")
        if manifest.stale_reason(partial_folder, stage.options, paths) is not None:
            make(stage, partial_folder, inputs, executor)
        shutil.rmtree(partial_folder / RECORDS, ignore_errors=True)
        replace_folder(stage.folder, partial_folder)
    made = manifest.read(stage.folder)
    size = sum(entry["bytes"] for entry in made["outputs"])
    counts = ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in made["counts"].items())
    seconds = time.monotonic() - started
    print(f"{stage.name}: {counts}; {format_bytes(size)} in {stage.folder}, {format_seconds(seconds)}", flush=True)


def make(stage: Stage, folder: Path, inputs: list[dict[str, Any]], executor: Executor) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        counts = stage.make(folder, inputs, executor)
        for leftover in folder.rglob("*.tmp-*"):  # temporary files of a killed run
            leftover.unlink()
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != manifest.FILE_NAME]
        names = [str(path.relative_to(folder)) for path in paths if folder / RECORDS not in path.parents]
        known = read_records(folder)
        new = [str(folder / name) for name in names if name not in known]
        known |= {entry["path"]: entry for entry in manifest.describe(new, folder, executor)}
        manifest.write(folder, stage.name, stage.options, inputs, [known[name] for name in names], counts)
    except OSError as error:
        # A failed write to an open file, for example on a full disk, does not know the name of the file.
        error.filename = error.filename or str(folder)
        raise


def replace_folder(folder: Path, new: Path) -> None:
    """Renames `new` to `folder` and removes other unfinished folders. If the process is killed in between, `new` is
    complete and the next run finds it."""
    old = folder.with_name(folder.name + ".old")
    if old.exists():
        shutil.rmtree(old)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    for leftover in folder.parent.glob(f"{glob.escape(folder.name)}.*"):
        if leftover.suffix in (".partial", ".old"):
            shutil.rmtree(leftover)


def show_plan(stages: Sequence[Stage]) -> None:
    """Prints the stages and whether each is up to date."""
    to_do: list[Stage] = []
    print(f"{'stage':<24} {'status':<10}  folder")
    for stage in stages:
        up_to_date = is_up_to_date(stage, to_do)
        if not up_to_date:
            to_do.append(stage)
        print(f"{stage.name:<24} {'up to date' if up_to_date else 'to do':<10}  {stage.folder}")
    print(f"{len(to_do)} of {len(stages)} stages to do (dry run: nothing was done)")


def is_up_to_date(stage: Stage, to_do: Sequence[Stage]) -> bool:
    """Whether the results of `stage` are there and will still be valid after the stages `to_do`."""
    try:
        inputs = stage.inputs()
    except UserError:  # the inputs are still to be made
        return False
    will_change = any(Path(path).is_relative_to(other.folder.absolute()) for path in inputs for other in to_do)
    return not will_change and manifest.stale_reason(stage.folder, stage.options, inputs) is None


def format_bytes(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
