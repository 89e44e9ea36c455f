"""Work spread over processes, results in the order of the input."""

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

AHEAD = 4  # items read ahead for each worker: enough that none waits, few enough for bounded memory


def end_with_parent() -> None:
    """Ends this worker when its parent is gone: one killed outright cannot tell its workers to stop."""

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def set_up_worker(initializer: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    end_with_parent()
    if initializer:
        initializer(*arguments)


def ordered_map(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    workers: int,
    initializer: Callable[..., None] | None = None,
    arguments: tuple[Any, ...] = (),
) -> Iterator[Result]:
    """`map(function, items)` on `workers` processes, each set up by `initializer(*arguments)`. At most `AHEAD` items a
    worker are under way. With one worker everything runs in this process."""
    if workers == 1:
        if initializer:
            initializer(*arguments)
        yield from map(function, items)
        return
    items = iter(items)
    # Started anew rather than forked: progress bars and tokenizers run threads, whose locks a fork would copy.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, set_up_worker, (initializer, arguments))
    try:
        pending = deque(pool.submit(function, item) for item in islice(items, AHEAD * workers))
        while pending:
            result = pending.popleft().result()
            pending.extend(pool.submit(function, item) for item in islice(items, 1))
            yield result
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was ended from outside, most likely for lack of memory: use fewer workers (--num-workers)"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
