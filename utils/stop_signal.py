"""SIGTERM, SIGINT and SIGHUP as a request to stop."""

import os
import signal
from typing import Any


class StopSignal:
    """Turns SIGTERM, SIGINT and SIGHUP (a closed terminal; ignored under nohup) into a request that
    the loop honours after the current step. A second SIGINT ends the program at once. Output to a
    closed terminal is dropped.
    """

    def __init__(self):
        self.received: int | None = None
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
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: object) -> None:
        if self.received == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.received = number
        if number == signal.SIGHUP:
            for descriptor in self.terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
