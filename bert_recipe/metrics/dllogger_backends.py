"""The lines of NVIDIA's DLLogger: by its own backends where the package `dllogger` is installed,
else the same lines by classes with the same interface.

The package is not on PyPI: it is installed from https://github.com/NVIDIA/dllogger, as the
Dockerfile does. Its backends are called directly; those that other code has registered with
`dllogger.init` get the records, too (see `log_to_registered`).
"""

import atexit
import contextlib
import datetime
import json
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Protocol, TextIO

STEP_NAMES = ("Epoch", "Step", "Validation Iteration")  # NVIDIA's


class Backend(Protocol):
    """What writes records to a file."""

    def log(
        self,
        timestamp: datetime.datetime,
        elapsedtime: float,
        step: Any,
        data: Mapping[str, Any],
    ) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def installed_package() -> ModuleType | None:
    try:
        import dllogger
    except ModuleNotFoundError:
        return None
    return dllogger


def json_backend(file: TextIO) -> Backend:
    """Writes `DLLL {...}` to `file`, which is opened to append."""
    package = installed_package()
    return JsonLines(file) if package is None else PackageJsonLines(package, file)


def text_backend(file: TextIO) -> Backend:
    """Writes `DLL <time> - <step> <metric> : <value> ...` to `file`."""
    package = installed_package()
    return TextLines(file) if package is None else PackageTextLines(package, file)


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


class FileBackend(Backend):
    def __init__(self, file: TextIO):
        self.file = file

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class JsonLines(FileBackend):
    """As dllogger.JSONStreamBackend."""

    def log(
        self,
        timestamp: datetime.datetime,
        elapsedtime: float,
        step: Any,
        data: Mapping[str, Any],
    ) -> None:
        entry = {
            "timestamp": str(timestamp.timestamp()),
            "datetime": str(timestamp.astimezone()),
            "elapsedtime": str(elapsedtime),
            "type": "LOG",
            "step": step,
            "data": data,
        }
        self.file.write(f"DLLL {json.dumps(entry)}\n")


class TextLines(FileBackend):
    """As dllogger.StdOutBackend."""

    def log(
        self,
        timestamp: datetime.datetime,
        elapsedtime: float,
        step: Any,
        data: Mapping[str, Any],
    ) -> None:
        values = " ".join(f"{name} : {value} " for name, value in data.items())
        self.file.write(f"DLL {timestamp} - {format_step(step)} {values}\n")


class PackageJsonLines(FileBackend):
    """dllogger.JSONStreamBackend, which opens the file by its name."""

    def __init__(self, package: ModuleType, file: TextIO):
        super().__init__(file)
        self.backend = package.JSONStreamBackend(package.Verbosity.DEFAULT, file.name, append=True)

    def log(
        self,
        timestamp: datetime.datetime,
        elapsedtime: float,
        step: Any,
        data: Mapping[str, Any],
    ) -> None:
        self.backend.log(timestamp, elapsedtime, step, data)

    def flush(self) -> None:
        self.backend.flush()

    def close(self) -> None:
        atexit.unregister(self.backend.file.close)
        with contextlib.closing(self.file):
            self.backend.file.close()


class PackageTextLines(FileBackend):
    """dllogger.StdOutBackend, whose standard output is the file."""

    def __init__(self, package: ModuleType, file: TextIO):
        super().__init__(file)
        self.backend = package.StdOutBackend(package.Verbosity.DEFAULT, step_format=format_step)

    def log(
        self,
        timestamp: datetime.datetime,
        elapsedtime: float,
        step: Any,
        data: Mapping[str, Any],
    ) -> None:
        with contextlib.redirect_stdout(self.file):
            self.backend.log(timestamp, elapsedtime, step, data)
