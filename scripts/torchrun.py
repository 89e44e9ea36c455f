"""torchrun without its traceback: exits with the code of the process that failed first, which has
printed its error, or with 128 plus the number of the signal that ended this process.

A SIGTERM, SIGINT or SIGHUP goes to the processes that were started, as SIGTERM, on which they save
a checkpoint. This process waits for them, and exits when they have ended.

With --max_restarts, nodes come and go. An error of the user (exit code 2) then ends the run, and a
signal this node only.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path
from types import FrameType

IS_ELASTIC = "--max_restarts" in sys.argv
stopping = False  # after the first signal


def find_workers() -> set[int]:
    """The children of this process that torch has started: they lead sessions."""
    listings = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    children = {int(pid) for listing in listings for pid in listing.split()}
    return {pid for pid in children if os.getsid(pid) == pid}


def say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def stop(number: int, _frame: FrameType | None) -> None:
    """Ends the processes and this one. A second SIGINT ends all at once; other repeated signals
    change nothing, because batch systems send them more than once.

    Torch itself would kill its processes after 30 s, even while they write a checkpoint. Where it
    is still starting processes, it would leave those that it has not noted.
    """
    global stopping
    workers = find_workers()
    if stopping and number != signal.SIGINT:
        return
    if stopping or not workers:
        if not stopping:  # torch waits for other nodes
            say("stopping: no training process had started")
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        os._exit(128 + number)
    stopping = True
    say("stopping after this step, with a checkpoint; a second Ctrl-C stops at once, without one")
    for pid in workers:
        os.kill(pid, signal.SIGTERM)
    endings = [os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT) for pid in workers]
    are_complete = all(ending is not None and ending.si_status == 0 for ending in endings)
    if IS_ELASTIC or not are_complete:
        raise SignalException("stopped", signal.Signals(number))
    # Otherwise torch ends by itself, with the other nodes.


# Before torch is imported, which takes seconds. A shell starts this with SIGINT ignored, and nohup
# with SIGHUP.
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
    signal.signal(signal.SIGHUP, stop)

import atexit
import gc
import logging
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

USER_ERROR_CODE = 2  # of utils.errors.run_main


class Agent(LocalElasticAgent):
    """Starts no processes again after an error of the user, which would come again. Leaves the
    rendezvous open for other nodes, and for itself later: torch closes it for good.
    """

    def __init__(self, spec: WorkerSpec, *args: Any, **options: Any):
        super().__init__(spec, *args, **options)
        spec.rdzv_handler.shutdown = lambda: True

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # One of the methods by which torch's documentation extends an agent.
        result = super()._monitor_workers(worker_group)
        failures = result.failures
        if any(failure.exitcode == USER_ERROR_CODE for failure in failures.values()):
            raise ChildFailedError("the processes", failures)
        return result


atexit.register(gc.freeze)  # as bert_recipe/utils/errors.py does
for name in ("multiprocessing.api", "agent.server.api"):
    logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
if IS_ELASTIC:
    api.LocalElasticAgent = Agent
try:
    main(["--signals_to_handle", "SIGQUIT", *sys.argv[1:]])
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
except SignalException as stopped:
    sys.exit(128 + stopped.sigval)
