"""torchrun without its traceback: exits with the code of the process that failed first, which has
printed its error, or with 128 plus the number of the signal that ended this process.
"""

import atexit
import gc
import logging
import os
import signal
import sys
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

SECONDS_TO_END = 30  # as torch gives them


def end_processes(number: signal.Signals) -> None:
    """Ends the children of this process with `number`, and with SIGKILL those that go on.

    A signal that comes while torch starts processes interrupts it before it has noted them: they
    would run on without a parent.
    """
    signal.signal(number, signal.SIG_IGN)  # a second one would end this process only
    listings = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    left = {int(pid) for listing in listings for pid in listing.split()}
    for pid in left:
        os.kill(pid, number)
    end = time.monotonic() + SECONDS_TO_END
    while left:
        if time.monotonic() > end:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        left = {pid for pid in left if os.waitpid(pid, os.WNOHANG) == (0, 0)}
        time.sleep(0.05)


atexit.register(gc.freeze)  # as bert_recipe/utils/errors.py does
for name in ("multiprocessing.api", "agent.server.api"):
    logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
try:
    main()
except ChildFailedError as error:
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        print(f"error: process {rank} of this machine was killed by {name}", file=sys.stderr)
    sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)
except SignalException as stop:  # torch has passed it to the processes that it had noted
    end_processes(stop.sigval)
    print(f"{stop.sigval.name}: all processes of this machine have ended", file=sys.stderr)
    sys.exit(128 + stop.sigval)
