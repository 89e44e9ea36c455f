"""The agent of one node: runs the command when the coordinator says so, and kills it when its lease ends."""

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from elastic.messages import Message, MessageSocket, log
from utils.errors import UserError
from utils.files import LOCK_SECONDS_VARIABLE

POLL_SECONDS = 0.2
BEAT_SECONDS = 1.0
CONNECT_SECONDS = 5.0
RETRY_SECONDS = 1.0
LEFT_OVER_SECONDS = 2.0  # for a logger, say, to end after the command
PATIENCE_SECONDS = 1800.0  # without a coordinator, before the agent gives up
LOCK_SECONDS = 180  # a network file system keeps the locks of a dead node for a while
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

LIBC = ctypes.CDLL(None)


def descendants(pid: int) -> list[int]:
    """The processes below `pid`, also those that have ended and were not waited for."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(word) for word in path.read_text().split()]
        except OSError:  # it has ended
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


def is_running(pid: int) -> bool:
    """Whether a process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Agent:
    """`address`: where the other nodes reach this one; None for its address on the way to the coordinator."""

    def __init__(self, coordinator: tuple[str, int], command: Sequence[str], address: str | None = None):
        self.coordinator, self.command, self.address = coordinator, list(command), address
        self.name = uuid.uuid4().hex
        self.process: subprocess.Popen | None = None
        self.generation = 0
        self.kill_at: float | None = None
        self.lease_seconds, self.lease_end, self.max_nodes = 0.0, 0.0, ""
        self.signals: list[int] = []
        self.is_leaving = False

    def run(self) -> int:
        """Returns the exit code of the run; 128 + a signal's number if this node has left it."""
        # Processes whose parents have ended become children of this one, so that none escapes.
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda number, _: self.signals.append(number))
        try:
            while True:
                connection = self._connect()
                if connection is None:
                    return 128 + self.signals[0]
                code = self._serve(connection)
                connection.close()
                if code is not None:
                    return code
                self._kill()
                self.process = None
                log(f"the coordinator is out of reach: {' '.join(self.command)[:60]} was killed")
        finally:
            self._kill()

    def _connect(self) -> MessageSocket | None:
        """A connection to the coordinator; None if a signal came first."""
        end = time.monotonic() + PATIENCE_SECONDS
        is_told = False
        while not self.signals:
            try:
                return MessageSocket(socket.create_connection(self.coordinator, timeout=CONNECT_SECONDS))
            except OSError as error:
                where = ":".join(map(str, self.coordinator))
                if time.monotonic() > end:
                    raise UserError(
                        f"cannot reach the coordinator at {where}: start it, or check --coordinator"
                    ) from error
                if not is_told:
                    log(f"waiting for the coordinator at {where} ({error.strerror or error})")
                is_told = True
                time.sleep(RETRY_SECONDS)
        return None

    def _serve(self, connection: MessageSocket) -> int | None:
        """Follows the coordinator. Returns the exit code, or None when the lease has ended."""
        now = time.monotonic()
        self.lease_seconds, self.lease_end, next_beat = 0.0, now + CONNECT_SECONDS, now
        connection.send("join", name=self.name, address=self.address or connection.local_address())
        while not connection.is_closed and time.monotonic() < self.lease_end:
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT_SECONDS
                connection.send("beat", sent=time.monotonic())
            select.select([connection], [], [], POLL_SECONDS)
            for message in connection.receive():
                if message["type"] == "end":
                    self._kill()
                    return 128 + self.signals[0] if self.is_leaving else message["code"]
                self._handle(message)
            if self.signals and not self.is_leaving:
                self.is_leaving = True
                log("leaving the run after this step, with a checkpoint; a second Ctrl-C stops at once, without one")
                connection.send("leave")
            if self.signals.count(signal.SIGINT) > 1:
                return 128 + signal.SIGINT
            self._watch(connection)
            if self.is_leaving and self.process is None:
                return 128 + self.signals[0]
        return None

    def _handle(self, message: Message) -> None:
        match message["type"]:
            case "welcome":
                self.lease_seconds, self.max_nodes = message["lease_seconds"], str(message["max_nodes"])
                if (given := os.environ.get("MAX_NODES", self.max_nodes)) != self.max_nodes:
                    raise UserError(
                        f"MAX_NODES is {given}, but the coordinator has --max-nodes {self.max_nodes}: unset MAX_NODES"
                    )
            case "beat":
                # From when the heartbeat was sent: the coordinator cannot have heard it earlier.
                self.lease_end = message["sent"] + self.lease_seconds
            case "start":
                self._start(message)
            case "stop" if self.process is not None:
                end = time.monotonic() + message["seconds"]
                if self.kill_at is None:
                    self.process.terminate()
                self.kill_at = end if self.kill_at is None else min(self.kill_at, end)

    def _start(self, message: Message) -> None:
        self.generation, self.kill_at = message["generation"], None
        values = {
            "NNODES": message["nodes"],
            "NODE_RANK": message["node_rank"],
            "MASTER_ADDR": message["master_addr"],
            "MAX_NODES": self.max_nodes,
            LOCK_SECONDS_VARIABLE: LOCK_SECONDS,
        }
        log(f"start {self.generation}: node {values['NODE_RANK']} of {values['NNODES']}")
        self.process = subprocess.Popen(
            self.command,
            env=os.environ | {name: str(value) for name, value in values.items()},
            start_new_session=True,  # Ctrl-C reaches the agent only
            preexec_fn=lambda: LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
        )

    def _watch(self, connection: MessageSocket) -> None:
        """Kills what was not stopped in time, and reports the end of the command and of all its processes."""
        if self.process is None:
            return
        if self.kill_at is not None and time.monotonic() > self.kill_at:
            self._kill()
        code = self.process.poll()
        if code is None:
            return
        end = time.monotonic() + LEFT_OVER_SECONDS
        while self._left_over() and time.monotonic() < end:
            time.sleep(0.02)
        self._kill()
        self.process = None
        connection.send("exited", generation=self.generation, code=code if code >= 0 else 128 - code)

    def _left_over(self) -> list[int]:
        return [pid for pid in descendants(os.getpid()) if is_running(pid)]

    def _kill(self) -> None:
        """Kills all processes that the command has started, and returns when they are dead."""
        while pids := self._left_over():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        if self.process is not None:
            self.process.wait()
        for pid in descendants(os.getpid()):  # zombies, of processes whose parents have ended
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
