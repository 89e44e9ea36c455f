"""A stage of the data preparation: skipped if what is there fits, complete or absent otherwise."""

import fcntl
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data import manifest
from utils.errors import UserError


@dataclass(frozen=True)
class Stage:
    """`make(folder)` fills `folder` from the files `inputs()` and returns what it counted.

    It works in a folder of another name, which may hold what a killed run left, and must make the same bytes from the
    same inputs and options. `in_place`: it works in the final folder instead, for files that come whole one by one
    and are worth keeping.
    """

    name: str
    folder: Path
    options: dict[str, Any]
    inputs: Callable[[], list[Path]]
    make: Callable[[Path], dict[str, Any]]
    expected_bytes: float = 0.0  # of what it makes, for a dry run
    expected_seconds: float = 0.0
    in_place: bool = False
    skip: Callable[[], str | None] = lambda: None  # why there is nothing to do, once the stages before it are done


def run(stage: Stage, workers: int) -> None:
    if reason := stage.skip():
        print(f"{stage.name}: left out, {reason}", flush=True)
        return
    inputs = stage.inputs()
    reason = manifest.misfit(stage.folder, stage.options, inputs)
    if reason is None:
        print(f"{stage.name}: up to date in {stage.folder}", flush=True)
        return
    if manifest.read(stage.folder):
        print(f"{stage.name}: made again, {reason}", flush=True)
    elif not stage.in_place and stage.folder.exists() and any(stage.folder.iterdir()):
        raise UserError(f"{stage.folder} has files that no stage made: move them or choose another --output-dir")
    started = time.monotonic()
    if stage.in_place:
        fill(stage, stage.folder, inputs, workers)
    else:
        partial_folder = stage.folder.with_name(stage.folder.name + ".partial")
        if manifest.misfit(partial_folder, stage.options, inputs) is not None:
            (partial_folder / manifest.FILE_NAME).unlink(missing_ok=True)
            fill(stage, partial_folder, inputs, workers)
        replace(stage.folder, partial_folder)
    made = manifest.read(stage.folder)
    size = sum(entry["bytes"] for entry in made["outputs"])
    counts = ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in made["counts"].items())
    seconds = time.monotonic() - started
    print(f"{stage.name}: {counts}; {in_bytes(size)} in {stage.folder}, {in_time(seconds)}", flush=True)


def fill(stage: Stage, folder: Path, inputs: Sequence[Path], workers: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        counts = stage.make(folder)
        outputs = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != manifest.FILE_NAME)
        manifest.write(folder, stage.name, stage.options, inputs, outputs, counts, workers)
    except OSError as error:
        # A write to an open file that fails, for lack of room say, does not know the file's name.
        error.filename = error.filename or str(folder)
        raise


def replace(folder: Path, new: Path) -> None:
    """`new` under the name of `folder`. A kill in between leaves `new`, complete, for the next run to find."""
    old = folder.with_name(folder.name + ".old")
    if old.exists():
        shutil.rmtree(old)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    if old.exists():
        shutil.rmtree(old)


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def show(stages: Sequence[Stage]) -> None:
    """The plan, with what it would make and take by the rates that were measured."""
    to_do: list[Stage] = []
    print(f"{'stage':<24} {'bytes':>9} {'time':>7}  folder")
    for stage in stages:
        if stands(stage, to_do):
            print(f"{stage.name:<24} {'-':>9} {'-':>7}  {stage.folder}, up to date")
            continue
        to_do.append(stage)
        size, seconds = in_bytes(stage.expected_bytes), in_time(stage.expected_seconds)
        print(f"{stage.name:<24} {size:>9} {seconds:>7}  {stage.folder}")
    size, seconds = (sum(getattr(stage, name) for stage in to_do) for name in ("expected_bytes", "expected_seconds"))
    print(f"{'estimated in all':<24} {in_bytes(size):>9} {in_time(seconds):>7}  (dry run: nothing was done)")


def stands(stage: Stage, to_do: Sequence[Stage]) -> bool:
    """Whether what the stage made is there and stays right when the stages `to_do` will have run."""
    try:
        inputs = stage.inputs()
    except UserError:  # they are still to be made
        return False
    changes = any(path.is_relative_to(other.folder) for path in inputs for other in to_do)
    return not changes and manifest.misfit(stage.folder, stage.options, inputs) is None


def in_bytes(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def in_time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


@contextmanager
def only_one_in(output_dir: Path) -> Iterator[None]:
    """Keeps a second run out of `output_dir`; the lock ends with the process, however that ends."""
    output_dir.mkdir(parents=True, exist_ok=True)
    with (output_dir / ".prepare.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another run is at work in {output_dir}: wait for it, or use another folder") from error
        yield
