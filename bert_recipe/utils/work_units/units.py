"""Units of work with records.

A unit is a pure function of its input and options. It writes one output and one record (its size,
its SHA-256, counts), the record first. Both together mean that the unit is done; there is no other
state. So the results do not depend on the executor, the number of workers, or how often a run was
killed.
"""

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import atomic_path, file_digest
from bert_recipe.utils.work_units.executors import InProcessExecutor

RECORDS = ".records"  # folder of the records, in the folder of the outputs
SMALL_WORK = 4_000_000  # bytes of input below which starting workers takes longer than the work
# A Dask worker may have several threads, which would share tokenizers.
ONE_AT_A_TIME = threading.Lock()


class WorkUnit(NamedTuple):
    """One output file.

    output: path in the folder of all outputs.
    work: function of a module, called with the path to write to and `arguments`; returns counts for
        the record.
    size: bytes of input, for progress.
    identity: everything that decides the output, as JSON values: options, and hashes of the input.
        Not needed in a folder whose name identifies options and inputs.
    """

    output: str
    work: Callable[..., dict[str, Any]]
    arguments: tuple[Any, ...]
    size: int
    identity: Any = None


class Record(NamedTuple):
    identity: Any
    bytes: int
    sha256: str
    counts: dict[str, Any]


def unversioned() -> str:
    return ""


def run_units(
    folder: Path,
    units: Sequence[WorkUnit],
    executor: Executor,
    progress: Callable[[int], Any] = lambda _: None,
    version: Callable[[], str] = unversioned,
) -> list[Record]:
    """Runs the units that have no valid record and returns all records.

    progress: gets the bytes of each unit done.
    version: function of a module that identifies the program, which must give the same in every
        worker process.
    """
    records: dict[str, Record] = {}
    for unit in units:
        saved = read_record(folder, unit.output)
        if saved is not None and is_done(saved, unit):
            records[unit.output] = saved
    to_do = [unit for unit in units if unit.output not in records]
    work = sum(unit.size for unit in to_do)
    progress(sum(unit.size for unit in units) - work)
    if work < SMALL_WORK:
        executor = InProcessExecutor()
    made = executor.map(partial(run_unit, folder, version, version()), to_do)
    for unit, record in zip(to_do, made, strict=True):
        records[unit.output] = record
        progress(unit.size)
    for unit in units:
        path = folder / unit.output
        if not path.is_file() or path.stat().st_size != records[unit.output].bytes:
            raise disturbed(path)
    return [records[unit.output] for unit in units]


def disturbed(path: Path) -> UserError:
    return UserError(
        f"{path} was removed or changed while this program ran: rerun the same command"
    )


def run_unit(
    folder: Path, version: Callable[[], str], expected_version: str, unit: WorkUnit
) -> Record:
    """Runs in a worker. expected_version: of the program that submits the unit."""
    if version() != expected_version:
        raise UserError(
            "a Dask worker has another version of this program or of its packages: restart the "
            "workers with the same"
        )
    path = folder / unit.output
    where = record_path(folder, unit.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    where.parent.mkdir(parents=True, exist_ok=True)
    with ONE_AT_A_TIME, atomic_path(path) as temporary:
        counts = unit.work(temporary, *unit.arguments)
        record = Record(unit.identity, temporary.stat().st_size, file_digest(temporary), counts)
        path.unlink(missing_ok=True)  # the new record must not stand beside an older file
        # Not synced: one that a kill or a crash leaves incomplete is no valid JSON, and its unit is
        # done again.
        where.write_text(json.dumps(record._asdict()), encoding="utf-8")
    return record


def record_path(folder: Path, output: str) -> Path:
    return folder / RECORDS / f"{output}.json"


def read_record(folder: Path, output: str) -> Record | None:
    """The record of `output`, of any input and options; None if the output is not there or has
    changed. An output that is not newer than its record, and of the same size, counts as unchanged.
    """
    path = folder / output
    where = record_path(folder, output)
    try:
        record = Record(**json.loads(where.read_text(encoding="utf-8")))
        status = path.stat()
        is_same = status.st_size == record.bytes
        if is_same and status.st_mtime_ns > where.stat().st_mtime_ns:
            is_same = file_digest(path) == record.sha256
        return record if is_same else None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def is_done(record: Record | None, unit: WorkUnit) -> bool:
    return record is not None and record.identity == unit.identity
