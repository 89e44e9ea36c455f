"""Errors that the user can fix: one line that says what, where and what to do, and exit code 2."""

import errno
import io
import os
import select
import signal
import sys
from collections.abc import Callable


class UserError(Exception):
    """Something outside the program is wrong: a path, a flag, a file. The text says what, where and what to do.

    rank: the process of a distributed run that found it, if only that one may have; otherwise None.
    """

    rank: int | None = None


def reports_errors() -> bool:
    """Whether this process prints errors that all processes of its machine find, such as those of the command line."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


class PeerError(UserError):
    """Another process of the run reports the error; this one exits without a message of its own."""


# Errors of the machine for which a traceback would not help.
MACHINE_ERRORS = {
    errno.ENOSPC: "the disk is full: free some space",
    errno.EDQUOT: "the disk quota is used up: free some space",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.EACCES: "permission denied: choose another path or change its permissions",
    errno.EPERM: "operation not permitted: choose another path or change its permissions",
    errno.ENOENT: "no such file or folder: check the path",
    errno.ENOTDIR: "a part of the path is not a folder: check the path",
    errno.EISDIR: "this is a folder, not a file: check the path",
    errno.EEXIST: "this exists already: choose another path",
    errno.EIO: "the disk reported an input/output error: check the disk",
}


def one_line(text: str) -> str:
    """`text` with every run of white space made one space."""
    return " ".join(str(text).split())


def reader_has_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more, as after `| head`."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def run_main(main: Callable[[], int | None]) -> None:
    """Runs a program's `main` and exits with its code; a `UserError`, or a failure of the machine that speaks for
    itself, prints one line `error: ...` on standard error and exits with 2. A reader that has closed standard output
    (`| head`) ends the program as SIGPIPE would. Anything else is a bug and keeps its traceback."""
    rank: int | str | None = os.environ.get("RANK", 0)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names need not be valid UTF-8
    try:
        code = main()
        sys.stdout.flush()
    except PeerError:
        sys.exit(2)
    except UserError as error:
        message, rank = one_line(str(error)), error.rank
    except BrokenPipeError:
        if not reader_has_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left in the buffer
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        if error.errno not in MACHINE_ERRORS:
            raise
        where = error.filename2 or error.filename
        message = f"{where}: {MACHINE_ERRORS[error.errno]}" if where else MACHINE_ERRORS[error.errno]
    except MemoryError:
        message = "out of memory: use fewer workers, a smaller batch or smaller shards"
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    else:
        sys.exit(code or 0)
    if rank is not None or reports_errors():
        prefix = "" if rank in (None, 0, "0") else f"rank {rank}: "
        print(f"error: {prefix}{message}", file=sys.stderr, flush=True)
    sys.exit(2)
