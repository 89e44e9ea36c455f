"""SIGTERM, SIGINT and SIGHUP as a request to stop."""

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

from bert_recipe.utils.errors import restart_code


class StopAtOnce(BaseException):
    """A signal to stop arrived while nothing had to be completed. No Exception, so that libraries
    do not catch it.
    """


class StopSignal:
    """Turns SIGTERM, SIGINT and SIGHUP (a closed terminal; ignored under nohup) into a request that
    the loop honours after the current step, or at once inside `raising`. A second SIGINT ends the
    program at once. Output to a closed terminal is dropped. One inside another takes the signals
    while it lasts; then the outer one has received them, too.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.raises = False
        self.previous: dict[int, Any] = {}
        self.terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def __enter__(self) -> "StopSignal":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_IGN:
                continue
            self.previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            outer = getattr(handler, "__self__", None)
            if isinstance(outer, StopSignal):
                outer.received = outer.received or self.received
            signal.signal(number, handler)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Signals raise StopAtOnce inside."""
        self.raises = True
        try:
            yield
        finally:
            self.raises = False

    @property
    def exit_code(self) -> int:
        """Of a process that it has stopped."""
        return 128 + signal.SIGINT if self.received == signal.SIGINT else restart_code(0)

    def _handle(self, number: int, _frame: object) -> None:
        if self.received == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.received = number
        if number == signal.SIGHUP:
            for descriptor in self.terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        if self.raises:
            raise StopAtOnce
