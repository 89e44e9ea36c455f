"""torchrun without its traceback: exits with the code of the process that failed first, which has
printed its error, or with 128 plus the number of the signal that ended this process.

With --max_restarts, nodes come and go. An error of the user (exit code 2) then ends the run. On
SIGTERM, this process waits for its workers, which get it too, and leaves the others to go on.
"""

import atexit
import gc
import logging
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from torch.distributed.launcher import api
from torch.distributed.run import main

SECONDS_TO_END = 30  # as torch gives them
USER_ERROR_CODE = 2  # of utils.errors.run_main


class Agent(LocalElasticAgent):
    """Starts no processes again after an error of the user, which would come again. Leaves the
    rendezvous open for other nodes, and for itself later: torch closes it for good.
    """

    def __init__(self, spec: WorkerSpec, *args: Any, **options: Any):
        super().__init__(spec, *args, **options)
        spec.rdzv_handler.shutdown = lambda: True

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if any(failure.exitcode == USER_ERROR_CODE for failure in result.failures.values()):
            self._remaining_restarts = 0
        return result


def leave(number: int, _frame: FrameType | None) -> None:
    """Waits for the workers, which save a checkpoint, and ends this process."""
    for pid in find_workers():
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    raise SignalException("left the run", signal.Signals(number))


def find_workers() -> set[int]:
    """The children of this process that torch has started: they lead sessions."""
    listings = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    children = {int(pid) for listing in listings for pid in listing.split()}
    return {pid for pid in children if os.getsid(pid) == pid}


def end_processes(number: signal.Signals) -> None:
    """Ends the children of this process with `number`, and with SIGKILL those that go on.

    A signal that comes while torch starts processes interrupts it before it has noted them: they
    would run on without a parent.
    """
    signal.signal(number, signal.SIG_IGN)  # a second one would end this process only
    left = find_workers()
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
if "--max_restarts" in sys.argv:
    api.LocalElasticAgent = Agent
    signal.signal(signal.SIGTERM, leave)
try:
    main()
except ChildFailedError as error:
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        print(f"error: process {rank} of this machine was killed by {name}", file=sys.stderr)
    sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)
except RendezvousTimeoutError:
    print("error: too few nodes came: start more, or lower the first of NNODES", file=sys.stderr)
    sys.exit(USER_ERROR_CODE)
except RendezvousConnectionError:
    print(
        "error: no connection to the store: start it at RDZV_ENDPOINT (docs/multi_node.md)",
        file=sys.stderr,
    )
    sys.exit(USER_ERROR_CODE)
except SignalException as stop:  # torch has passed it to the processes that it had noted
    end_processes(stop.sigval)
    print(f"{stop.sigval.name}: all processes of this machine have ended", file=sys.stderr)
    sys.exit(128 + stop.sigval)
