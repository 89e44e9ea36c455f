"""Where units of work run: this process, a pool of processes on this machine, or a Dask cluster."""

import asyncio
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from utils.errors import UserError
from utils.files import read_json_object


class InProcessExecutor(Executor):
    """Calls the function in this process, each time a result is asked for."""

    def map(self, function: Callable, *iterables: Iterable, **_: Any) -> Iterator:
        return map(function, *iterables)


@contextmanager
def open_executor(scheduler: str, workers: int) -> Iterator[Executor]:
    """The executor that `scheduler` names (see the flag --scheduler). workers: number of processes on this machine."""
    os.environ["PYTHONSAFEPATH"] = "1"  # started processes import no random.py of the working folder
    if scheduler != "local":
        with open_dask(scheduler, workers) as executor:
            yield executor
        return
    if workers == 1:
        yield InProcessExecutor()
        return
    # Spawned, not forked: progress bars and tokenizers have threads, whose locks a fork would copy.
    try:
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), end_with_parent)
    except OSError as error:
        raise UserError(
            f"worker processes cannot be started, as /dev/shm holds no semaphores ({error.strerror}): make room there, "
            "or use --num-workers 1"
        ) from error
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
    from distributed import Client, KilledWorker, LocalCluster
    from distributed.comm import CommClosedError

    if scheduler != "dask":
        logging.getLogger("distributed").setLevel(logging.CRITICAL)  # the errors below say what matters
        cluster = nullcontext(reachable_address(scheduler))
    else:
        cluster = LocalCluster(workers, threads_per_worker=1, dashboard_address=None, silence_logs=logging.CRITICAL)
    try:
        with cluster as address, Client(address, set_as_default=False) as client:
            yield client.get_executor(pure=False)
    except KilledWorker as error:
        raise UserError(
            f"several workers of the Dask cluster died in the same task ({error}), most likely because memory ran out: "
            "give each worker more memory, then run the same command to continue"
        ) from error
    except (CancelledError, CommClosedError) as error:
        raise UserError(
            f"the Dask scheduler {scheduler} was lost: start it again, then run the same command to continue"
        ) from error


def reachable_address(scheduler: str) -> str:
    """The address of a running scheduler, given as such or by its file. Raises UserError if it cannot be reached."""
    from distributed.comm import connect
    from distributed.security import Security

    address = scheduler
    if "://" not in scheduler:
        if not Path(scheduler).is_file():
            raise UserError(
                f"--scheduler {scheduler} is no scheduler file: give local, dask, an address such as tls://HOST:8786, "
                "or a scheduler file"
            )
        address = str(read_json_object(scheduler, "scheduler file").get("address"))

    async def connect_once() -> None:
        comm = await connect(address, **Security().get_connection_args("client"))
        await comm.close()

    try:
        asyncio.run(connect_once())  # a client that cannot connect would print a traceback
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"no connection to the Dask scheduler {scheduler} ({error}): check the address and the certificates"
        ) from error
    return address
