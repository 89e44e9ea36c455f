"""The lines of NVIDIA's DLLogger: by its own backends where the package `dllogger` is installed,
else the same lines by this module.

The package is not on PyPI: it is installed from https://github.com/NVIDIA/dllogger, as the
Dockerfile does. Its backends are called directly; those that other code has registered with
`dllogger.init` get the records, too (see `log_to_registered`).
"""

import atexit
import contextlib
import datetime
import json
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TextIO

PREFIX = "DLLL "  # of a line of JSON
STEP_NAMES = ("Epoch", "Step", "Validation Iteration")  # NVIDIA's
# Writes a record: its time, the seconds since the start, its step and its data.
Log = Callable[[datetime.datetime, float, Any, Mapping[str, Any]], None]


def installed_package() -> ModuleType | None:
    try:
        import dllogger
    except ModuleNotFoundError:
        return None
    return dllogger


def json_log(file: TextIO) -> Log:
    """Writes `DLLL {...}` to `file`, as dllogger.JSONStreamBackend."""
    package = installed_package()
    if package is not None:
        backend = package.JSONStreamBackend(package.Verbosity.DEFAULT, file.name, append=True)
        atexit.unregister(backend.file.close)
        backend.file.close()
        backend.file = file
        return backend.log

    def log(
        timestamp: datetime.datetime, elapsedtime: float, step: Any, data: Mapping[str, Any]
    ) -> None:
        entry = {
            "timestamp": str(timestamp.timestamp()),
            "datetime": str(timestamp.astimezone()),
            "elapsedtime": str(elapsedtime),
            "type": "LOG",
            "step": step,
            "data": data,
        }
        file.write(f"{PREFIX}{json.dumps(entry)}\n")

    return log


def text_log(file: TextIO) -> Log:
    """Writes `DLL <time> - <step> <metric> : <value> ...` to `file`, as dllogger.StdOutBackend."""
    package = installed_package()
    backend = None
    if package is not None:
        backend = package.StdOutBackend(package.Verbosity.DEFAULT, step_format=format_step)

    def log(
        timestamp: datetime.datetime, elapsedtime: float, step: Any, data: Mapping[str, Any]
    ) -> None:
        if backend is not None:
            with contextlib.redirect_stdout(file):
                backend.log(timestamp, elapsedtime, step, data)
            return
        values = " ".join(f"{name} : {value} " for name, value in data.items())
        file.write(f"DLL {timestamp} - {format_step(step)} {values}\n")

    return log


def log_to_registered(step: Any, data: Mapping[str, Any]) -> None:
    """Logs a record with the backends that other code has registered, if any."""
    package = installed_package()
    # Before `dllogger.init`, any attribute of GLOBAL_LOGGER raises an error.
    if package is not None and issubclass(type(package.GLOBAL_LOGGER), package.Logger):
        package.log(step=step, data=data)


def format_step(step: Any) -> str:
    """As NVIDIA's recipes name steps."""
    if isinstance(step, str):
        return step
    names = zip(STEP_NAMES, step, strict=False)
    return "".join(f"{name}: {number} " for name, number in names) or "Summary: "
