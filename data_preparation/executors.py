"""Where tasks run: this process, a pool of processes on this machine, or a Dask cluster."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from utils.errors import UserError

SCHEDULERS = "local, dask, an address such as tls://HOST:8786, or a scheduler file"


class InProcessExecutor(Executor):
    """Calls each function at once, in this process."""

    def submit(self, function: Callable, /, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()
        future.set_result(function(*args, **kwargs))
        return future


@contextmanager
def open_executor(scheduler: str, workers: int) -> Iterator[Executor]:
    """The executor that `scheduler` names (see `SCHEDULERS`). workers: number of processes on this machine."""
    if scheduler != "local":
        with open_dask(scheduler, workers) as executor:
            yield executor
        return
    if workers == 1:
        yield InProcessExecutor()
        return
    # Spawned, not forked: progress bars and tokenizers have threads, whose locks a fork would copy.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), end_with_parent)
    try:
        yield pool
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was killed, most likely because memory ran out: use fewer workers (--num-workers)"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def end_with_parent() -> None:
    """Ends this worker process when its parent ends: a parent that was killed cannot stop its workers."""

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def open_dask(scheduler: str, workers: int) -> Iterator[Executor]:
    """An executor on a Dask cluster: a new one on this machine, or a running one. Certificates for tls:// come from
    Dask's own configuration."""
    try:
        from distributed import Client, KilledWorker, LocalCluster
    except ImportError:
        raise UserError(
            f"--scheduler {scheduler} needs Dask: pip install distributed, or use --scheduler local"
        ) from None
    options: dict[str, Any] = {"address": scheduler}
    if scheduler == "dask":
        options = {"address": LocalCluster(workers, threads_per_worker=1, dashboard_address=None)}
    elif Path(scheduler).is_file():
        options = {"scheduler_file": scheduler}
    elif "://" not in scheduler:
        raise UserError(f"--scheduler {scheduler} is no scheduler file: give {SCHEDULERS}")
    try:
        client = Client(**options, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"no connection to the Dask scheduler {scheduler} ({error}): check the address and the certificates"
        ) from error
    try:
        with client:
            yield client.get_executor(pure=False)
    except KilledWorker as error:
        raise UserError(
            f"several workers of the Dask cluster died in the same task ({error}), most likely because memory ran out: "
            "give each worker more memory, then run the same command to continue"
        ) from error
    except CancelledError as error:
        raise UserError(
            f"the Dask scheduler {scheduler} was lost: start it again, then run the same command to continue"
        ) from error
    finally:
        if scheduler == "dask":
            options["address"].close()
