"""Stops a worker process when the launcher that started it has died."""

import contextlib
import os
import select
import signal
import threading
import time

LAUNCHER_VARIABLE = "LAUNCHER_PID"  # set by the launch scripts
SECONDS_TO_SAVE = 120


def stop_with_launcher() -> None:
    """Makes this process stop, as by SIGTERM, when torchrun or the launch script that started it has died, and kills
    it after SECONDS_TO_SAVE. Does nothing without either of them, or where the kernel has no pidfds."""
    launchers = []
    if "TORCHELASTIC_RUN_ID" in os.environ:
        launchers.append(os.getppid())
    if os.environ.get(LAUNCHER_VARIABLE, "").isdecimal():
        launchers.append(int(os.environ[LAUNCHER_VARIABLE]))
    if not launchers or not hasattr(os, "pidfd_open"):
        return
    descriptors = []
    for pid in launchers:
        try:
            descriptors.append(os.pidfd_open(pid))
        except ProcessLookupError:  # it has died already
            os.kill(os.getpid(), signal.SIGTERM)
            return
        except (OSError, OverflowError):  # not the id of a process, or not one of ours
            return
    threading.Thread(target=_wait, args=(descriptors,), name="launcher", daemon=True).start()


def _wait(descriptors: list[int]) -> None:
    select.select(descriptors, [], [])
    with contextlib.suppress(OSError):
        os.write(2, b"the program that started this process has died: stopping after this step\n")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_SAVE)
    os.kill(os.getpid(), signal.SIGKILL)
