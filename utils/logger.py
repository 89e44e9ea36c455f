"""Logging in DLLogger's format: `DLLL {...}` JSON lines in the report file and readable lines on the terminal. The
dllogger package is used where it is installed; otherwise the writer below makes the same lines."""

import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

try:
    import dllogger
except ImportError:
    dllogger = None


class Reporter:
    """Writes what a run did. `step` is what DLLogger calls it: () for the whole run, (global step,) for a step, or the
    word PARAMETER. Only the main process writes."""

    def __init__(self, report_file: str | Path | None, enabled: bool = True):
        self.enabled = enabled
        self.started = time.monotonic()
        self.file = None
        self.dllogger_backend = None
        if not enabled or report_file is None:
            return
        path = Path(report_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        if dllogger is not None:
            self.dllogger_backend = dllogger.JSONStreamBackend(dllogger.Verbosity.VERBOSE, str(path), append=True)
            dllogger.init(backends=[self.dllogger_backend])
        else:
            self.file = path.open("a", encoding="utf-8")

    def log(self, step: tuple | str, data: dict[str, Any], text: str | None = None) -> None:
        """Records `data` and, where there is one, shows the line `text`."""
        if not self.enabled:
            return
        if text:
            show(text)
        if self.dllogger_backend is not None:
            dllogger.log(step=step, data=data)
            dllogger.flush()
        elif self.file is not None:
            now = datetime.datetime.now()
            entry = {
                "timestamp": str(now.timestamp()),
                "datetime": str(now),
                "elapsedtime": str(round(time.monotonic() - self.started, 6)),
                "type": "LOG",
                "step": step if isinstance(step, str) else list(step),
                "data": data,
            }
            self.file.write(f"DLLL {json.dumps(entry, default=str)}\n")
            self.file.flush()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


def show(text: str) -> None:
    """A line on the terminal, above any progress bar."""
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()


def progress_bar(total: int | None, description: str, unit: str, initial: int = 0, enabled: bool = True) -> tqdm:
    """A progress bar, which keeps quiet where standard error is no terminal."""
    quiet = None if enabled else True
    return tqdm(total=total, desc=description, unit=unit, initial=initial, disable=quiet, dynamic_ncols=True)
