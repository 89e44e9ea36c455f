"""Files mapped into one range of addresses, so that rows of many files are gathered by one numpy index."""

import ctypes
import mmap
import os
import signal
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from utils.errors import UserError
from utils.memory import total_memory

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
MAP_FIXED, MAP_FAILED = 0x10, ctypes.c_void_p(-1).value


class MappedFiles:
    """The first `sizes` bytes of the files at `paths`, read-only.

    bytes: all files in one array; file i begins at `starts[i]`. After reading from it, call `check` and `check_ends`.
    ends: where in it the last byte of each file is that is not zero.
    """

    def __init__(self, paths: Sequence[Path], sizes: Sequence[int]):
        self.paths, self.sizes = paths, sizes
        ends = np.cumsum([-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes])
        self.starts = np.append(0, ends)
        self.range = mmap.mmap(-1, int(ends[-1]), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
        self.bytes = np.frombuffer(self.range, np.uint8)
        self.address = self.bytes.ctypes.data
        self.failed: list[int] = []
        self.ends = self.starts[:-1].copy()
        for number, path in enumerate(paths):
            try:
                with path.open("rb", buffering=0) as file:
                    self.ends[number] += last_nonzero(file.fileno(), sizes[number])
                    if os.fstat(file.fileno()).st_size < sizes[number]:
                        raise UserError(f"shard {path} was cut off while it was read: make or fetch it again")
                    self.replace(number, file.fileno(), mmap.MAP_SHARED)
            except OSError as error:
                raise UserError(f"shard {path} cannot be mapped ({error}): make or fetch it again") from error
        if ends[-1] > total_memory():  # reading ahead would only push out other pages
            self.range.madvise(mmap.MADV_RANDOM)
        LIVE.add(self)

    def replace(self, number: int, descriptor: int, flags: int) -> None:
        """Maps an open file, or zeros for descriptor -1, to the place of a file."""
        start, size = int(self.starts[number]), self.sizes[number]
        if LIBC.mmap(self.address + start, size, mmap.PROT_READ, flags | MAP_FIXED, descriptor, 0) == MAP_FAILED:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))

    def check(self) -> None:
        """Raises UserError if a page of a file could not be read since it was mapped."""
        if self.failed:
            path, size = self.paths[self.failed[0]], self.sizes[self.failed[0]]
            is_short = not path.exists() or path.stat().st_size < size
            reason = "was cut off while it was read" if is_short else "cannot be read (the disk reports an error)"
            raise UserError(f"shard {path} {reason}: make or fetch it again")

    def check_ends(self, numbers: np.ndarray) -> None:
        """Raises UserError if one of the files `numbers` [n] was cut off since it was mapped: what was behind its end
        in the same page then reads as zeros, without a signal. If the last byte that was not zero is still there, so is
        all that is before it. A file that was removed or replaced stays mapped whole."""
        last_bytes = self.bytes[self.ends[numbers]]
        self.check()
        if not last_bytes.all():
            path = self.paths[numbers[last_bytes.argmin()]]
            raise UserError(f"shard {path} was cut off while it was read: make or fetch it again")


def last_nonzero(descriptor: int, size: int) -> int:
    """The place of the last byte that is not zero in the first `size` bytes of a file; 0 without one."""
    for start in range((size - 1) // mmap.PAGESIZE * mmap.PAGESIZE, -1, -mmap.PAGESIZE):
        if block := os.pread(descriptor, min(mmap.PAGESIZE, size - start), start).rstrip(b"\0"):
            return start + len(block) - 1
    return 0


LIVE: weakref.WeakSet[MappedFiles] = weakref.WeakSet()


# --- SIGBUS -----------------------------------------------------------------------------------------------------------
#
# Reading a page behind the end of a truncated file, or one that the disk cannot read, raises SIGBUS in the reading
# thread. The handler maps zeros to the place of the file, so that the instruction can be repeated, and `check` reports
# it. It may run Python code, because the signal is synchronous: it interrupts a copy, which holds no lock but the GIL.


class SigAction(ctypes.Structure):
    """struct sigaction of Linux's C libraries on 64-bit machines."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


SA_SIGINFO = 4
FAULT_ADDRESS = 16  # of si_addr in siginfo_t


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
def on_bus_error(number: int, info: int, _context: int) -> None:
    address = ctypes.c_size_t.from_address(info + FAULT_ADDRESS).value
    for files in list(LIVE):
        if 0 <= (offset := address - files.address) < len(files.bytes):
            failed = int(np.searchsorted(files.starts, offset, side="right")) - 1
            files.failed.append(failed)  # before other threads can read zeros
            files.replace(failed, -1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            return
    LIBC.sigaction(number, ctypes.byref(previous_action), None)
    ctypes.memset(ctypes.byref(previous_action), 0, ctypes.sizeof(previous_action))  # it may in turn call this one
    signal.raise_signal(number)  # delivered to the previous handler when this one returns


bus_action, previous_action = SigAction(ctypes.cast(on_bus_error, ctypes.c_void_p).value, flags=SA_SIGINFO), SigAction()


def handle_bus_errors() -> None:
    """Installs the handler, unless it is. Others may have replaced it since, as Python's faulthandler does."""
    if sys.platform == "linux":
        found = SigAction()
        LIBC.sigaction(signal.SIGBUS, ctypes.byref(bus_action), ctypes.byref(found))
        if found.handler != bus_action.handler:
            ctypes.pointer(previous_action)[0] = found
