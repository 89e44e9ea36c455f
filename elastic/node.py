"""The Dask worker of one node, through which the driver starts and stops the command there."""

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import time

from distributed import Security, Status, Worker
from distributed.comm import Comm

from elastic.connection import CONNECT_SECONDS, connect_to_scheduler, log
from elastic.guard import STOP_SIGNALS, adopt_orphans, kill_descendants
from utils.errors import UserError
from utils.files import LOCK_SECONDS_VARIABLE

POLL_SECONDS = 0.1
LOCK_SECONDS = 180  # a network file system keeps the locks of a dead node for a while


class Node:
    """`address`: where all others reach this node; None for its address on the way to the scheduler."""

    def __init__(self, scheduler: str, security: Security, address: str | None = None):
        self.scheduler, self.security = scheduler, security
        # The HTTP server of a worker has no TLS.
        self.options = {"host": address, "nthreads": 1, "memory_limit": 0, "dashboard_address": "127.0.0.1:0"}
        self.guard: subprocess.Popen | None = None
        self.generation, self.code, self.kill_at = 0, None, float("inf")  # of the last start
        self.is_followed = self.is_cut = False
        self.signals: list[int] = []
        self.exit_code: int | None = None

    async def run(self) -> int:
        """Returns the exit code of the run; 128 + a signal's number if this node has left it."""
        adopt_orphans()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard // 2), hard))  # as `dask scheduler` does
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._leave, number)
        while self.exit_code is None:
            (await connect_to_scheduler(self.scheduler, self.security)).abort()
            worker = Worker(self.scheduler, security=self.security, death_timeout=2 * CONNECT_SECONDS, **self.options)
            worker.handlers["elastic"] = self.follow
            try:
                await worker
            except TimeoutError:  # the scheduler has gone
                continue
            except RuntimeError as error:
                raise UserError(f"cannot join {self.scheduler} ({error.__cause__}): check --address") from error
            self.is_cut = False
            while self.exit_code is None and worker.status == Status.running and not self.is_cut:
                await asyncio.sleep(POLL_SECONDS)
            await worker.close(CONNECT_SECONDS, executor_wait=False)
            while self._is_running():
                await asyncio.sleep(POLL_SECONDS)
        return self.exit_code

    def _leave(self, number: int) -> None:
        self.signals.append(number)
        if not self.is_followed or self.signals.count(signal.SIGINT) > 1:
            sys.exit(128 + self.signals[0])  # the guard kills what runs
        if len(self.signals) == 1:
            log("leaving the run after this step, with a checkpoint; a second Ctrl-C stops at once, without one")

    async def follow(self, comm: Comm, command: list[str], max_nodes: int, lease_seconds: float) -> Status | None:
        """Does what one driver orders, until the connection or the lease ends. Another driver gets None."""
        if self.is_followed:
            return None
        self.is_followed, self.generation, has_left = True, 0, False
        try:
            while self._is_running():  # what an earlier driver has started is being killed
                await asyncio.sleep(POLL_SECONDS)
            await comm.write(time.monotonic())
            while self.exit_code is None:
                order = await asyncio.wait_for(comm.read(), lease_seconds)
                # The lease counts from when the state was sent: the driver cannot have heard it earlier.
                lease_end = order["heard"] + lease_seconds
                if order.get("generation", 0) > self.generation:
                    self.generation = order["generation"]
                    self._start(command, order["environment"] | {"MAX_NODES": max_nodes}, lease_end)
                self._tell_guard(lease_end, order.get("stop_seconds"))
                if has_left or "exit_code" in order:
                    self.exit_code = 128 + self.signals[0] if self.signals else order["exit_code"]
                is_running, is_leaving = self._is_running(), bool(self.signals)
                has_left = is_leaving and not is_running
                state = {"generation": self.generation, "code": self.code, "is_leaving": is_leaving}
                await comm.write({"now": time.monotonic(), **state})
        except OSError:
            log("the driver is out of reach")
        finally:
            self.is_followed, self.is_cut = False, True  # the connection to the scheduler may be cut as well
            if self.guard is not None:
                self.guard.stdin.close()  # it kills the command
            comm.abort()
        return Status.dont_reply

    def _start(self, command: list[str], values: dict[str, object], lease_end: float) -> None:
        self.code, self.kill_at = None, float("inf")
        log(f"start {self.generation}: node {values['NODE_RANK']} of {values['NNODES']}")
        values[LOCK_SECONDS_VARIABLE] = LOCK_SECONDS
        self.guard = subprocess.Popen(
            [sys.executable, sys.argv[0], "guard", str(lease_end), "--", *command],
            env=os.environ | {name: str(value) for name, value in values.items()},
            stdin=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C reaches this process only
        )
        os.set_blocking(self.guard.stdin.fileno(), False)

    def _tell_guard(self, lease_end: float, stop_seconds: float | None) -> None:
        is_stopping = stop_seconds is not None
        if is_stopping:
            self.kill_at = min(self.kill_at, time.monotonic() + stop_seconds)
        if self.guard is not None:
            with contextlib.suppress(OSError):  # it is ending
                self.guard.stdin.write(f"{min(lease_end, self.kill_at)} {is_stopping:d}\n".encode())

    def _is_running(self) -> bool:
        if self.guard is not None and self.guard.poll() is not None:
            kill_descendants()  # if the guard itself was killed
            self.code = self.guard.returncode if self.guard.returncode >= 0 else 128 - self.guard.returncode
            self.guard = None
        return self.guard is not None
