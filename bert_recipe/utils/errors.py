"""Errors that the user can fix: one line that says what, where and what to do, and exit code 2."""

import atexit
import errno
import gc
import io
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TextIO

# The exit code of complete work whose output could not be printed.
LOST_OUTPUT_CODE = 128 + signal.SIGPIPE


class UserError(Exception):
    """Something outside the program is wrong: a path, a flag, a file. The text says what, where and
    what to do.

    rank: the process of a distributed run that found it, if only that one may have; otherwise None.
    on_all_ranks: whether all processes of the run raise an error at this point.
    """

    rank: int | None = None
    on_all_ranks = False


def reports_errors() -> bool:
    """Whether this process prints errors that every process of its machine finds, such as those of
    the command line: the first process does, and any process with an invalid LOCAL_RANK or
    WORLD_SIZE.
    """
    place = [os.environ.get("LOCAL_RANK", "0"), os.environ.get("WORLD_SIZE", "1")]
    if not all(re.fullmatch("[0-9]{1,9}", value) for value in place):
        return True
    local_rank, world_size = map(int, place)
    return not 0 < local_rank < world_size


class PeerError(UserError):
    """Another process of the run reports the error; this one exits without a message of its own."""


class RankFailure(UserError):
    """Another rank of the run has failed or does not answer."""


# Errors of the machine for which a traceback would not help.
MACHINE_ERRORS = {
    errno.EFBIG: "the file would be larger than the limit: raise it (ulimit -f)",
    errno.ENOSPC: "the disk is full: free some space",
    errno.EDQUOT: "the disk quota is used up: free some space",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.EACCES: "permission denied: choose another path or change its permissions",
    errno.EPERM: "operation not permitted: choose another path or change its permissions",
    errno.ENOENT: "no such file or folder: check the path",
    errno.ENOTDIR: "a part of the path is not a folder: check the path",
    errno.EISDIR: "this is a folder, not a file: check the path",
    errno.EEXIST: "this exists already, as a file or a link to nothing: choose another path",
    errno.ENAMETOOLONG: "the name is too long: choose a shorter one",
    errno.ELOOP: "too many symbolic links, or a loop of them: check the path",
    errno.EBUSY: "in use by another program: stop that one, or choose another path",
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
    errno.EAGAIN: (
        "no more processes or threads can be started: use fewer workers, or raise the limit "
        "(ulimit -u)"
    ),
    errno.ENFILE: "too many open files on this machine: raise the limit (sysctl fs.file-max)",
    errno.ESTALE: "the network file system lost this file: mount it again, or choose another path",
    errno.EIO: "the disk reported an input/output error: check the disk",
}


def machine_problem(error: OSError) -> str:
    """What is wrong with the machine, and what to do."""
    reason = error.strerror or error
    return MACHINE_ERRORS.get(error.errno or 0, f"{reason}: choose another path")


# What Python's and C++'s threads say.
THREAD_SIGNS = ("can't start new thread", "Resource temporarily unavailable")

# What torch's allocators say; its class OutOfMemoryError is not imported here, because most
# programs need no torch.
MEMORY_SIGNS = (
    "you tried to allocate",
    "can't allocate memory",
    "Cannot allocate memory",
    "std::bad_alloc",
    "out of memory",
    "could not create a primitive",  # oneDNN's
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory could not be allocated, on the CPU or a GPU."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    # Of a shared library; where it is forbidden, the message goes on.
    if isinstance(error, ImportError):
        return str(error).endswith("failed to map segment from shared object")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in MEMORY_SIGNS)


CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
MAX_ERROR = 1000  # characters


def escape_controls(text: str) -> str:
    """`text` with escaped control characters, which would command the terminal; line feeds and tabs
    stay.
    """
    return CONTROL_CHARACTERS.sub(lambda match: repr(match[0])[1:-1], text)


def one_line(text: str) -> str:
    """`text` with every run of white space made one space, and with escaped control characters."""
    return escape_controls(" ".join(str(text).split()))


def shortened(text: str, limit: int) -> str:
    """At most `limit` characters of `text`, and dots where it goes on."""
    return text if len(text) <= limit else f"{text[:limit]} ..."


def listed(values: Sequence[object], maximum: int = 10) -> str:
    """The first values, and how many more there are: "3, 7, 9 and 12 more"."""
    shown = ", ".join(map(str, values[:maximum]))
    more = len(values) - maximum
    return f"{shown} and {more} more" if more > 0 else shown


def error_line(error: str) -> str:
    """`error` as one line; of a long one, which quotes a long value, the start and the end, which
    has the advice.
    """
    line = one_line(error)
    if len(line) <= MAX_ERROR:
        return line
    return f"{line[: MAX_ERROR // 2]} ... {line[-MAX_ERROR // 2 :]}"


def reader_is_closed() -> bool:
    """Whether standard output is a pipe whose reader has closed it, as after `| head`."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


# What every installation has. A checkout's requirements.txt installs the extras too.
REQUIRED_PACKAGES = (
    "huggingface_hub",
    "numpy",
    "regex",
    "safetensors",
    "tokenizers",
    "torch",
    "tqdm",
)
# Optional packages by the names of their modules, and what needs them.
OPTIONAL_PACKAGES = {
    "distributed": "--scheduler",
    "h5py": "reading and writing shards",
    "jinja2": "the report page or the card of a model",
    "nltk": "splitting text into sentences",
    "onnx": "export_onnx.py",
    "onnxruntime": "export_onnx.py",
    "onnxscript": "export_onnx.py",
    "pyarrow": "reading .zst and .parquet files",
    "scipy": "scoring",
    "sklearn": "scoring",
    "tensorboard": "--tensorboard-dir",
    "transformers": "export_onnx.py",
    "wandb": "--wandb-project",
}
# Of pyproject.toml, those of several packages, which are installed together.
EXTRAS = (("h5py", "nltk"), ("scikit-learn", "scipy"))


def missing_package(error: BaseException) -> str | None:
    """The message for an import that failed because a known package is not installed."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    name = str(error.name).partition(".")[0]
    if name in OPTIONAL_PACKAGES:
        package = {"sklearn": "scikit-learn"}.get(name, name)
        extra = next((extra for extra in EXTRAS if package in extra), (package,))
        return (
            f"{OPTIONAL_PACKAGES[name]} needs the package {package}, which is not installed: pip "
            f"install {' '.join(extra)}"
        )
    if name in REQUIRED_PACKAGES:
        return f"the package {name} is not installed: run bash scripts/setup_environment.sh"
    return None


def error_message(error: BaseException) -> str | None:
    """What to tell the user about `error`; None if it is a bug."""
    if isinstance(error, UserError):
        return error_line(str(error))
    if message := missing_package(error):
        return message
    if is_out_of_memory(error):
        return "out of memory: use fewer workers, a smaller batch or smaller shards"
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in THREAD_SIGNS):
        return MACHINE_ERRORS[errno.EAGAIN]
    if isinstance(error, UnicodeEncodeError) and error.encoding == "utf-8":
        text = error.object[max(error.start - 80, 0) : error.end + 80]
        return error_line(
            f"{text}: this is a name of a file, or a text, that is not valid Unicode, which a "
            f"library does not take: rename the file, or correct the text"
        )
    if isinstance(error, OSError) and error.errno in MACHINE_ERRORS:
        message = machine_problem(error)
        where = error.filename2 or error.filename
        return error_line(f"{where}: {message}") if where else message
    return None


lost_output: set[str] = set()  # the standard streams that could not be written


def drop_output(stream: TextIO, error: OSError) -> None:
    """After a failed write to standard output or error: drops the rest. `run_main` then exits with
    LOST_OUTPUT_CODE.
    """
    name = "standard output" if stream is sys.stdout else "standard error"
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if name not in lost_output:
        lost_output.add(name)
        print_error(f"note: {name} cannot be written ({error.strerror}): continuing without it")


def print_error(text: str) -> None:
    """Prints a line on standard error, if that can be written."""
    try:
        print(escape_controls(text), file=sys.stderr, flush=True)
    except OSError as error:
        drop_output(sys.stderr, error)


def open_standard_streams() -> None:
    """Opens /dev/null for standard streams that are closed, so that no file opened later gets their
    descriptors. File names in the output need not be valid UTF-8.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
        elif isinstance(getattr(sys, name), io.TextIOWrapper):
            getattr(sys, name).reconfigure(errors="backslashreplace")


def restart_code(otherwise: int) -> int:
    """The exit code of a process that has ended because of another one: os.EX_TEMPFAIL where the
    launcher starts it again (torchrun with --max-restarts), else `otherwise`.
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    return os.EX_TEMPFAIL if restarts else otherwise


def report_error(error: BaseException) -> int:
    """Prints what `run_main` describes for `error`, and returns its exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, PeerError):
        return 2
    if isinstance(error, KeyboardInterrupt):
        print_error(f"interrupted: {error}" if str(error) else "interrupted")
        return 130
    if (message := error_message(error)) is None:
        sys.__excepthook__(type(error), error, error.__traceback__)
        return 1
    if isinstance(error, UserError | ModuleNotFoundError):
        rank = getattr(error, "rank", None)
    else:
        rank = os.environ.get("RANK", 0)
    if rank is not None or reports_errors():
        prefix = "" if rank in (None, 0, "0") else f"rank {rank}: "
        print_error(f"error: {prefix}{message}")
    return restart_code(2) if isinstance(error, RankFailure) else 2


def handle_uncaught_errors() -> None:
    """For programs, before their other imports: an error while these are imported, such as a
    missing package, or a Ctrl-C, takes one line, too (see `run_main`).
    """
    sys.excepthook = lambda _kind, error, _traceback: sys.exit(report_error(error))


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Runs a program's `main` and exits with its code. A `UserError`, a missing package, or an
    error of the machine (see MACHINE_ERRORS), prints one line `error: ...` on standard error and
    exits with 2. Where standard output cannot be written (`| head`, a full disk), work goes on and
    the code is LOST_OUTPUT_CODE. Anything else is a bug: its traceback is printed, and the code is
    1.
    """
    open_standard_streams()
    # At the end, Python would visit all objects of torch once more, which takes half a second.
    atexit.register(gc.freeze)
    # As scripts/cpu_settings.sh does; read by libgomp when `main` imports torch.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        if not reader_is_closed():
            raise
        # Takes what is left in the buffer.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(LOST_OUTPUT_CODE)
    except (Exception, KeyboardInterrupt) as error:
        sys.exit(report_error(error))
    sys.exit(code or (LOST_OUTPUT_CODE if lost_output else 0))
