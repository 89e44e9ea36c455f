"""Runs the command below a node's Dask worker, and kills all its processes when that worker dies or the lease ends."""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import time

import psutil

POLL_SECONDS = 0.1
LEFT_OVER_SECONDS = 2.0  # for a logger, say, to end after the command
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

LIBC = ctypes.CDLL(None)


def adopt_orphans() -> None:
    """Processes whose parents have ended become children of this one, so that orphans can be killed."""
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants(after_seconds: float = 0.0) -> None:
    """Returns when all processes below this one have ended; kills those that are left after `after_seconds`."""
    end = time.monotonic() + after_seconds
    while processes := psutil.Process().children(recursive=True):
        for process in processes if time.monotonic() >= end else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=0.02)


def run_guarded(command: list[str], end: float) -> int:
    """Runs `command` until it ends, the time `end` or the end of standard input. Returns its exit code when all its
    processes have ended; 137 if they were killed.

    Lines `END 0` on standard input set another end, and `END 1` also sends SIGTERM to the command. Times are those of
    time.monotonic().
    """
    adopt_orphans()
    for number in STOP_SIGNALS:  # Slurm sends them to all processes; the worker decides
        signal.signal(number, lambda *_: None)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
    )
    is_stopping = False
    while process.poll() is None and time.monotonic() < end:
        if select.select([0], [], [], POLL_SECONDS)[0]:
            if not (text := os.read(0, 1 << 16)):
                break
            *_, last_end, stop = text.split()
            end = float(last_end)
            if stop == b"1" and not is_stopping:
                process.terminate()
                is_stopping = True
    code = process.poll()
    kill_descendants(0 if code is None else LEFT_OVER_SECONDS)
    return 128 + signal.SIGKILL if code is None else code if code >= 0 else 128 - code
