"""Where units of work run: this process, a pool of processes on this machine, or a Dask cluster."""

import asyncio
import ctypes
import errno
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import read_json

Result = TypeVar("Result")

PR_SET_PDEATHSIG = 1  # linux/prctl.h


class InProcessExecutor(Executor):
    """Calls the function in this process, each time a result is asked for."""

    def map(
        self, fn: Callable[..., Result], *iterables: Iterable[Any], **_: Any
    ) -> Iterator[Result]:
        return map(fn, *iterables)


class LocalPool(ProcessPoolExecutor):
    """Worker processes on this machine, which leave Ctrl-C to this one."""

    def __init__(self, workers: int):
        # Spawned, not forked: progress bars and tokenizers have threads, whose locks a fork would
        # copy.
        super().__init__(workers, multiprocessing.get_context("spawn"), end_with_parent)

    def submit(self, *args: Any, **kwargs: Any) -> "Future[Any]":
        # Processes that start here inherit the mask.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            return super().submit(*args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@contextmanager
def open_executor(scheduler: str, workers: int) -> Iterator[Executor]:
    """The executor that `scheduler` names (see the flag --scheduler). workers: number of processes
    on this machine.

    Ctrl-C ends the work at once, since every output is written atomically.
    """
    on_this_machine = InProcessExecutor() if workers == 1 else open_pool(workers)
    with (
        interrupted_once(),
        on_this_machine if scheduler == "local" else open_dask(scheduler) as executor,
    ):
        yield executor


@contextmanager
def open_pool(workers: int) -> Iterator[Executor]:
    # The standard library's pool hangs if it cannot start a thread.
    check_thread_limit(3 * workers + 5)
    try:
        pool = LocalPool(workers)
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise
        raise UserError(
            "worker processes cannot be started, as /dev/shm holds no semaphores "
            f"({error.strerror}): mend that, or use --num-workers 1"
        ) from error
    try:
        yield pool
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was killed, most likely because memory ran out, or could not start: "
            "use fewer workers (--num-workers), or raise the limits (ulimit -a)"
        ) from error
    except KeyboardInterrupt:
        # The pool's own thread may fail when its workers are gone.
        threading.excepthook = lambda _: None
        for process in multiprocessing.active_children():
            process.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def check_thread_limit(count: int) -> None:
    """Raises RuntimeError unless `count` more threads (of processes, too) can be started."""
    end = threading.Event()
    try:
        for _ in range(count):
            threading.Thread(target=end.wait, daemon=True).start()
    finally:
        end.set()


@contextmanager
def interrupted_once() -> Iterator[None]:
    """Raises KeyboardInterrupt for the first Ctrl-C and ignores the next ones, which would
    interrupt the cleanup.
    """

    def interrupt(*_: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt("rerun the same command to resume")

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, previous)


def end_with_parent() -> None:
    """The kernel kills this worker process when its parent ends: a parent that was killed cannot
    stop its workers.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:  # it ended before
        os._exit(1)


@contextmanager
def open_dask(scheduler: str) -> Iterator[Executor]:
    """An executor on a running Dask cluster. Certificates are those of Dask's configuration."""
    from distributed import Client, KilledWorker
    from distributed.comm import CommClosedError

    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # the errors below say what matters
    try:
        with Client(reachable_address(scheduler), set_as_default=False) as client:
            yield client.get_executor(pure=False)
    except KilledWorker as error:
        raise UserError(
            f"several workers of the Dask cluster died in the same task ({error}), most likely "
            "because memory ran out: give each worker more memory, then rerun the same command to "
            "resume"
        ) from error
    except (CancelledError, CommClosedError) as error:
        raise UserError(
            f"the Dask scheduler {scheduler} was lost: start it again, then rerun the same command "
            "to resume"
        ) from error


def reachable_address(scheduler: str) -> str:
    """The address of a running scheduler, given as such or by its file. Raises UserError if it
    cannot be reached.
    """
    from distributed.comm import connect
    from distributed.security import Security

    address = scheduler
    if "://" not in scheduler:
        address = str(read_json(scheduler, "scheduler file").get("address"))

    async def connect_once() -> None:
        comm = await connect(address, **Security().get_connection_args("client"))
        await comm.close()

    try:
        asyncio.run(connect_once())  # a client that cannot connect would print a traceback
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"no connection to the Dask scheduler {scheduler} ({error}): check the address and the "
            "certificates"
        ) from error
    return address
