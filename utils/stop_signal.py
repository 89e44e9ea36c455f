"""SIGTERM and SIGINT as a request to stop."""

import signal
from typing import Any


class StopSignal:
    """Turns SIGTERM and SIGINT into a request that the loop honours after the current step. A second SIGINT ends the
    program at once."""

    def __init__(self):
        self.received: int | None = None
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        for number in (signal.SIGTERM, signal.SIGINT):
            self.previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: object) -> None:
        if self.received == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.received = number
