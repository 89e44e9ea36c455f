"""The two ends of the connection between the driver and each node, a Dask worker that it finds by
Dask's scheduler.
"""

import asyncio
import contextlib
import json
import logging
import resource
import signal
import socket
import ssl
import subprocess
import sys
import time

from distributed import Security, Worker
from distributed.comm import Comm, CommClosedError, connect, get_address_host
from distributed.core import send_recv

from elastic import guard
from elastic.membership import Membership, log
from utils.errors import UserError

CONNECT_SECONDS = 3.0
RETRY_SECONDS = 1.0
PATIENCE_SECONDS = 1800.0  # without a scheduler

# Its errors are raised, too, or are lost connections.
logging.getLogger("distributed").setLevel(logging.CRITICAL)


async def open_connection(address: str) -> Comm:
    """Uses mutual TLS unless the address begins with tcp://."""
    return await connect(address, CONNECT_SECONDS, **Security().get_connection_args("client"))


def is_lost_connection(error: Exception) -> bool:
    """Whether a peer is absent, has ended or is silent; other errors, such as those of the
    certificates, are subclasses. Dask has one of these, too, for a peer that ends in the handshake
    of TLS.
    """
    ended_in_handshake = isinstance(error.__cause__, (ssl.SSLEOFError, ssl.SSLZeroReturnError))
    return ended_in_handshake or type(error) in (CommClosedError, OSError, TimeoutError)


async def find_workers(scheduler: str) -> set[str]:
    """The addresses of the workers that a scheduler knows. Raises UserError if the address or the
    certificates are wrong, or if there is no scheduler for PATIENCE_SECONDS.
    """
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            comm = await open_connection(scheduler)
            async with asyncio.timeout(CONNECT_SECONDS):
                identity = await send_recv(comm, op="identity", close=True)
            return set(identity["workers"])
        except Exception as error:
            if not is_lost_connection(error) or time.monotonic() > end:
                hint = (
                    "check that address, `dask scheduler` there, and that DASK_CONFIG has the same "
                    "certificates"
                )
                raise UserError(
                    f"no connection to {scheduler} ({error}): {hint} there and here"
                ) from error
        await asyncio.sleep(RETRY_SECONDS)


class Driver:
    """Talks with all nodes, as Membership decides."""

    def __init__(self, scheduler: str, command: list[str], *limits: float):
        self.scheduler = scheduler
        self.command = command
        self.membership = Membership(*limits, time.monotonic())
        self.sessions: dict[str, asyncio.Task] = {}  # by the address of the worker

    async def run(self) -> int:
        """Returns the exit code of the run. SIGTERM and SIGINT end it with a checkpoint."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(
                number, setattr, self.membership, "is_stopping", True
            )
        watching = asyncio.create_task(self._follow_workers())
        while self.membership.exit_code is None:
            if watching.done():
                watching.result()  # its error
            self.membership.tick(time.monotonic())
            await asyncio.sleep(guard.POLL_SECONDS)
        if self.sessions:  # the nodes are told
            await asyncio.wait(self.sessions.values(), timeout=self.membership.lease_seconds)
        return self.membership.exit_code

    async def _follow_workers(self) -> None:
        while True:
            for address in await find_workers(self.scheduler) - self.sessions.keys():
                self.sessions[address] = asyncio.create_task(self._follow(address))
            await asyncio.sleep(RETRY_SECONDS)

    async def _follow(self, address: str) -> None:
        """Sends a worker its orders and hears its answers, until it ends or is silent for as long
        as a lost one.
        """
        with contextlib.suppress(OSError), contextlib.ExitStack() as at_end:
            at_end.callback(self.sessions.pop, address)
            comm = await open_connection(address)
            at_end.callback(comm.abort)
            settings = {"command": self.command, "lease_seconds": self.membership.lease_seconds}
            limit = self.membership.silence_seconds
            async with asyncio.timeout(limit):
                heard = await send_recv(comm, op="elastic", **settings)
            if heard is None:  # it follows another driver
                return
            node = self.membership.join(address, get_address_host(address), time.monotonic())
            at_end.callback(setattr, node, "is_connected", False)
            while node.is_connected:
                await comm.write({"heard": heard, **self.membership.order(node)})
                async with asyncio.timeout(limit):
                    heard, *state = await comm.read()
                self.membership.hear(node, time.monotonic(), *state)
                await asyncio.sleep(guard.POLL_SECONDS)


class NodeAgent:
    """The program of a node: a Dask worker that passes the driver's orders to a guard."""

    def __init__(self) -> None:
        self.guard: subprocess.Popen | None = None  # of the session with a driver
        self.signals: list[int] = []

    async def run(self, scheduler: str, address: str | None) -> None:
        """Ends the program with the exit code of the run, or 128 + the number of a signal that it
        got. `address`: where all others reach this node; None for its address on the way to the
        scheduler.
        """
        guard.adopt_orphans()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # As `dask scheduler` does.
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard // 2), hard))
        for number in guard.STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._leave, number)
        while True:
            log(f"connecting to {scheduler}")
            await find_workers(scheduler)
            # The HTTP server of a worker has no TLS.
            worker = Worker(
                scheduler, host=address, nthreads=1, memory_limit=0, dashboard_address="127.0.0.1:0"
            )
            worker.handlers["elastic"] = self.follow
            try:
                await worker
            except RuntimeError as error:
                raise UserError(
                    f"cannot join {scheduler} ({error.__cause__}): check --address"
                ) from error
            await worker.finished()  # the scheduler has gone

    def _leave(self, number: int) -> None:
        self.signals.append(number)
        if self.guard is None or self.signals.count(signal.SIGINT) > 1:
            sys.exit(128 + self.signals[0])  # the guard kills what runs
        log(
            "leaving the run after this step, with a checkpoint; a second Ctrl-C stops at once, "
            "without one"
        )

    async def follow(self, comm: Comm, command: list[str], lease_seconds: float) -> None:
        """Passes the orders of a driver to a guard, and its answers back, until one of them ends or
        the driver is silent for `lease_seconds`. Returns at once if there is another driver.
        """
        if self.guard is not None:
            return
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:  # Ctrl-C must not reach the guard, which is in a session of its own
            words = [sys.executable, guard.__file__, str(lease_seconds), *command]
            self.guard = subprocess.Popen(words, stdin=theirs, start_new_session=True)
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        exit_code = None
        try:
            await comm.write(time.monotonic())
            while exit_code is None:
                async with asyncio.timeout(lease_seconds):
                    order = await comm.read()
                exit_code = order["exit_code"]
                await loop.sock_sendall(ours, json.dumps(order).encode())
                answer = json.loads(await loop.sock_recv(ours, 1 << 16))
                await comm.write([*answer, bool(self.signals)])
        except (OSError, ValueError):
            log("the driver is out of reach, or the guard was killed")
        finally:
            ours.close()
            guard.kill_descendants()  # without await: a worker that closes cancels this
            self.guard = None
            comm.abort()
        if self.signals or exit_code is not None:
            loop.call_soon(sys.exit, 128 + self.signals[0] if self.signals else exit_code)
