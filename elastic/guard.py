"""A program below a node's Dask worker, `guard.py LEASE_SECONDS COMMAND...`: runs the command as
the driver orders, and kills all its processes when that worker dies or the lease ends.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from math import inf

import psutil

POLL_SECONDS = 0.1
LEFT_OVER_SECONDS = 2.0  # for a logger, say, to end after the command
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
LIBC = ctypes.CDLL(None)


def adopt_orphans() -> None:
    """Processes whose parents have ended become children of this one, so that orphans can be
    killed.
    """
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants(after_seconds: float = 0.0) -> None:
    """Returns when all processes below this one have ended; kills those that are left after
    `after_seconds`.
    """
    if after_seconds:
        psutil.wait_procs(psutil.Process().children(recursive=True), after_seconds)
    while processes := psutil.Process().children(recursive=True):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=0.02)


def run(lease_seconds: float, command: list[str]) -> None:
    """Obeys orders, which come by standard input, a socket, and answers each with the time, the
    number of the last start, and its exit code when all its processes have ended. Returns at the
    end of the lease or of the input.
    """
    process, start, code = None, 0, 0
    kill_at = inf
    lease_end = time.monotonic() + lease_seconds
    while time.monotonic() < lease_end:
        if select.select([0], [], [], POLL_SECONDS)[0]:
            if not (order := json.loads(os.read(0, 1 << 16) or "null")):
                return
            # The lease counts from when the answer was sent: the driver cannot have heard it
            # earlier.
            lease_end = order["heard"] + lease_seconds
            if order["generation"] > start:
                start, code, kill_at, values = order["generation"], None, inf, order["environment"]
                print(
                    f"elastic: start {start}: node {values['NODE_RANK']} of {values['NNODES']}",
                    flush=True,
                )
                process = subprocess.Popen(
                    ["env", *(f"{name}={value}" for name, value in values.items()), *command],
                    stdin=subprocess.DEVNULL,
                    preexec_fn=lambda: LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
                )
            if process is not None and order["stop_seconds"] < inf == kill_at:
                process.terminate()
            kill_at = min(kill_at, time.monotonic() + order["stop_seconds"])
            os.write(0, json.dumps([time.monotonic(), start, code]).encode())
        if process is not None and (process.poll() is not None or time.monotonic() > kill_at):
            code = -signal.SIGKILL if process.returncode is None else process.returncode
            kill_descendants(0 if process.returncode is None else LEFT_OVER_SECONDS)
            process = None
            code = code if code >= 0 else 128 - code


if __name__ == "__main__":
    adopt_orphans()
    for number in STOP_SIGNALS:  # Slurm sends them to all processes; the worker decides
        signal.signal(number, lambda *_: None)
    try:
        with contextlib.suppress(ConnectionError):
            run(float(sys.argv[1]), sys.argv[2:])
    finally:
        kill_descendants()
