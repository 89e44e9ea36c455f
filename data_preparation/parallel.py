"""A pool of worker processes that returns results in the order of the input."""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, TypeVar

from utils.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

ITEMS_AHEAD = 4  # items submitted per worker: enough that none waits, few enough to bound memory
BYTES_PER_WORKER = 4_000_000  # starting a worker takes as long as processing this much text


def end_with_parent() -> None:
    """Ends this worker process when its parent ends: a parent that was killed cannot stop its workers."""

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def set_up_worker(initializer: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    end_with_parent()
    if initializer:
        initializer(*arguments)


def useful_workers(workers: int, text_bytes: float) -> int:
    """How many of `workers` are worth starting for so much text."""
    return min(workers, 1 + int(text_bytes / BYTES_PER_WORKER))


def ordered_map(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    workers: int,
    initializer: Callable[..., None] | None = None,
    arguments: tuple[Any, ...] = (),
) -> Iterator[Result]:
    """`map(function, items)` on `workers` processes, each initialized by `initializer(*arguments)`. At most
    `ITEMS_AHEAD` items per worker are pending. With one worker everything runs in this process."""
    if workers == 1:
        if initializer:
            initializer(*arguments)
        yield from map(function, items)
        return
    items = iter(items)
    # Spawned, not forked: progress bars and tokenizers have threads, whose locks a fork would copy.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, set_up_worker, (initializer, arguments))
    try:
        pending = deque(pool.submit(function, item) for item in islice(items, ITEMS_AHEAD * workers))
        while pending:
            result = pending.popleft().result()
            pending.extend(pool.submit(function, item) for item in islice(items, 1))
            yield result
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was killed, most likely because memory ran out: use fewer workers (--num-workers)"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
