"""Standard output and error that may be lost: a closed pipe (`| head`), a closed terminal, a full disk."""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator

LOST_OUTPUT_CODE = 128 + signal.SIGPIPE  # the exit code of complete work whose output could not be printed


class Terminal:
    """The state of standard output and error. `may_be_lost`: work goes on when they cannot be written."""

    may_be_lost = False
    is_lost = False


class TerminalFile(io.RawIOBase):
    """A file descriptor to print to. While `Terminal.may_be_lost`, what cannot be written is dropped."""

    def __init__(self, descriptor: int, name: str):
        self.descriptor, self.stream_name = descriptor, name

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self.descriptor)

    def fileno(self) -> int:
        return self.descriptor

    def write(self, data) -> int:
        try:
            return os.write(self.descriptor, data)
        except OSError as error:
            if not Terminal.may_be_lost:
                raise
            if not Terminal.is_lost:
                Terminal.is_lost = True
                note = f"note: {self.stream_name} cannot be written ({error.strerror}): continuing without it\n"
                with contextlib.suppress(OSError):
                    os.write(2, note.encode())
            return len(data)


def open_terminal() -> None:
    """Replaces standard output and error with `TerminalFile`s. A closed one becomes /dev/null, so that no file opened
    later gets its descriptor."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, name, described in ((1, "stdout", "standard output"), (2, "stderr", "standard error")):
        stream = getattr(sys, name)
        if stream is not None and stream is not getattr(sys, f"__{name}__"):
            continue  # replaced already, as by a test
        # write_through: what PYTHONUNBUFFERED sets instead of line_buffering.
        line_buffering = number == 2 or (stream is not None and (stream.line_buffering or stream.write_through))
        if stream is not None:
            stream.flush()
        encoding = "utf-8" if stream is None else stream.encoding
        # A descriptor that was closed at the start may be another file's by now.
        descriptor = os.open(os.devnull, os.O_WRONLY) if stream is None else number
        buffered = io.BufferedWriter(TerminalFile(descriptor, described))
        # File names need not be valid UTF-8.
        stream = io.TextIOWrapper(buffered, encoding, "backslashreplace", line_buffering=line_buffering)
        setattr(sys, name, stream)


@contextlib.contextmanager
def may_lose_terminal() -> Iterator[None]:
    """Within it, work goes on when standard output or error cannot be written; `run_main` then exits with
    LOST_OUTPUT_CODE."""
    Terminal.may_be_lost = True
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        Terminal.may_be_lost = False
