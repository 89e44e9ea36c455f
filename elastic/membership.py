"""Which nodes train together: the driver's decisions, without connections or clocks.

A generation is one start of the command on some nodes. It ends on all of them before the next one starts. A node that
cannot be heard counts as running until its lease, and a margin for killing its processes, have passed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MARGIN_SECONDS = 2.0  # from the end of a lease until its node's processes are certainly dead
KILL_SECONDS = 3.0  # to end after a node was lost or a command failed, before SIGKILL
SAVE_SECONDS = 120.0  # to save a checkpoint and end, where all nodes can
MAX_FAILURES = 3  # in a row, without a node lost; the run ends then
HEALTHY_SECONDS = 600.0  # a generation that ran as long is no failed start
STOPPED_CODE = 143  # as of a process that SIGTERM ended
NEVER = float("inf")


@dataclass(frozen=True)
class ElasticConfig:
    """The limits of a run. `settle_seconds`: how long to wait for more than `min_nodes` before a start. Nodes that come
    later wait until the others have run for four times as long."""

    min_nodes: int
    max_nodes: int
    lease_seconds: float = 10.0
    settle_seconds: float = 5.0


@dataclass(eq=False)
class Node:
    """The driver's view of a node. `order`: the order that is sent until it is answered. `code`: exit code of its last
    command."""

    address: str
    last_seen: float
    order: dict[str, Any]
    is_connected: bool = True
    is_running: bool = False
    is_leaving: bool = False
    code: int | None = None


class Membership:
    """Takes events with their times, in seconds, and sets the orders of `nodes`. `exit_code` is set at the end of the
    run. `log` takes lines for the user.

    A node that an earlier driver has started may be out of reach. Until its lease has certainly ended, only `max_nodes`
    nodes are started."""

    def __init__(self, config: ElasticConfig, log: Callable[[str], None], now: float):
        self.config, self.log = config, log
        self.nodes: dict[str, Node] = {}
        self.members: list[Node] = []  # of the generation
        self.generation = self.failures = 0
        self.started, self.stop_seconds, self.settling_until = now, NEVER, now + config.lease_seconds + MARGIN_SECONDS
        self.failure: int | None = None  # first code other than 0 of a command that was not asked to stop
        self.is_stopping = self.is_waiting = False
        self.exit_code: int | None = None

    # --- events ---

    def join(self, name: str, address: str, now: float) -> None:
        """A node that joins again has killed what it ran."""
        if name in self.nodes:
            self.nodes[name].is_connected = self.nodes[name].is_running = False
        self.nodes[name] = Node(address, now, {} if self.exit_code is None else {"exit_code": self.exit_code})
        self.log(f"node {address} joined: {len(self.nodes)} of {self.config.min_nodes} to {self.config.max_nodes}")

    def hear(self, name: str, now: float, generation: int, code: int | None, is_leaving: bool) -> None:
        """`code`: of the command of `generation`, when it has ended on this node with all its processes."""
        node = self.nodes[name]
        if is_leaving and not node.is_leaving:
            self.log(f"node {node.address} leaves")
        node.last_seen, node.is_leaving = now, is_leaving
        if code is not None and generation == self.generation and node.is_running:
            node.is_running, node.code = False, code
            if code and self.failure is None and self.stop_seconds == NEVER:
                self.failure = code
                self.log(f"the command has failed on node {node.address} with exit code {code}")

    def disconnect(self, name: str) -> None:
        if name in self.nodes:
            self.nodes[name].is_connected = False

    def stop(self) -> None:
        """Ends the run, with a checkpoint."""
        self.is_stopping = True

    def tick(self, now: float) -> None:
        """Called several times per second."""
        for name, node in list(self.nodes.items()):
            if now - node.last_seen > self.config.lease_seconds + MARGIN_SECONDS:
                node.is_connected = node.is_running = False
            if not node.is_connected and not node.is_running:
                del self.nodes[name]
        if any(node.is_running for node in self.members):
            self._supervise(now)
        else:
            self._end_generation(now)
            if self.exit_code is None:
                self._start_generation(now)

    # --- decisions ---

    def _available(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.is_connected and not node.is_leaving]

    def _lost(self) -> list[Node]:
        return [node for node in self.members if node.code is None and not node.is_connected]

    def _supervise(self, now: float) -> None:
        is_due = now - self.started > 4 * self.config.settle_seconds and len(self.members) < self.config.max_nodes
        seconds = NEVER
        if self._lost() or self.failure is not None:
            seconds = KILL_SECONDS
        elif (
            self.is_stopping
            or any(node.is_running and node.is_leaving for node in self.members)
            or (is_due and not set(self._available()) <= set(self.members))
        ):
            seconds = SAVE_SECONDS
        if seconds < self.stop_seconds:
            self.stop_seconds, self.settling_until = seconds, now + self.config.settle_seconds
            for node in self.members:
                node.order["stop_seconds"] = seconds
            for node in self._lost():
                self.log(f"node {node.address} is lost")

    def _end_generation(self, now: float) -> None:
        if self.members and all(node.code == 0 for node in self.members):
            self._end(0, "the command has ended on all nodes")
        elif self.failure is not None and not self._lost():
            self.failures = 1 if now - self.started > HEALTHY_SECONDS else self.failures + 1
            if self.failures == MAX_FAILURES:
                self._end(self.failure, f"the command has failed {MAX_FAILURES} times in a row: see its errors")
        if self.is_stopping and self.exit_code is None:
            self._end(STOPPED_CODE, "stopped by a signal: rerun the same commands to resume")
        self.members, self.failure, self.stop_seconds = [], None, NEVER

    def _start_generation(self, now: float) -> None:
        members, config = self._available()[: self.config.max_nodes], self.config
        if len(members) < config.min_nodes:
            self.settling_until = max(self.settling_until, now + config.settle_seconds)
            if not self.is_waiting:
                count = f"{len(members)} of at least {config.min_nodes} have joined"
                self.log(f"waiting for nodes: {count}, without those that follow another driver")
            self.is_waiting = True
        elif len(members) == config.max_nodes or now >= self.settling_until:
            self.is_waiting, self.members, self.started = False, members, now
            self.generation += 1
            addresses = [node.address for node in members]
            for rank, node in enumerate(members):
                node.is_running, node.code = True, None
                values = {"NNODES": len(members), "NODE_RANK": rank, "MASTER_ADDR": addresses[0]}
                node.order = {"generation": self.generation, "environment": values}
            count = f"{len(members)} of {config.max_nodes} nodes"
            self.log(f"start {self.generation} on {count}: {' '.join(addresses)}")

    def _end(self, code: int, reason: str) -> None:
        self.exit_code = code
        self.log(reason)
        for node in self.nodes.values():
            node.order = {"exit_code": code}
