"""Which nodes train together: the driver's decisions, without connections or clocks.

A generation is one start of the command on some nodes. It ends on all of them before the next one
starts. A node that cannot be heard counts as running until its lease, and a margin for killing its
processes, have passed.
"""

import logging
from dataclasses import dataclass
from math import inf
from typing import Any

from utils.files import LOCK_SECONDS_VARIABLE

log = logging.getLogger("elastic").info

MARGIN_SECONDS = 2.0  # from the end of a lease until its node's processes are certainly dead
KILL_SECONDS = 3.0  # to end after a node was lost or a command failed, before SIGKILL
SAVE_SECONDS = 120.0  # to save a checkpoint and end, where all nodes can
MAX_FAILURES = 3  # in a row, without a node lost; the run ends then
HEALTHY_SECONDS = 600.0  # a generation that ran as long is no failed start
LOCK_SECONDS = 180  # a network file system keeps the locks of a dead node for a while
STOPPED_CODE = 143  # as of a process that SIGTERM ended


@dataclass(eq=False)
class Node:
    """The driver's view of a node. `code`: exit code of its last command."""

    address: str
    last_seen: float
    is_connected: bool = True
    is_running: bool = False
    is_leaving: bool = False
    code: int | None = None


class Membership:
    """Takes events with their times, in seconds, and has an order for each node. `exit_code` is set
    at the end of the run. `settle_seconds`: how long to wait for more than `min_nodes` before a
    start. Nodes that come later wait until the others have run for four times as long.

    A node that an earlier driver has started may be out of reach. Until its lease has certainly
    ended, only `max_nodes` nodes are started.
    """

    def __init__(
        self,
        min_nodes: int,
        max_nodes: int,
        lease_seconds: float,
        settle_seconds: float,
        now: float,
    ):
        self.min_nodes, self.max_nodes, self.settle_seconds = min_nodes, max_nodes, settle_seconds
        self.lease_seconds = lease_seconds
        self.silence_seconds = lease_seconds + MARGIN_SECONDS
        self.nodes: dict[str, Node] = {}
        self.members: list[Node] = []  # of the generation
        self.generation = self.failures = 0
        self.started = now
        self.stop_seconds = inf
        self.settling_until = now + self.silence_seconds
        # first code other than 0 of a command that was not asked to stop
        self.failure: int | None = None
        self.is_waiting = False
        self.is_stopping = False  # set to end the run, with a checkpoint
        self.exit_code: int | None = None

    def join(self, name: str, address: str, now: float) -> Node:
        """A node that joins again has killed what it ran."""
        if name in self.nodes:
            self.nodes[name].is_connected = self.nodes[name].is_running = False
        node = self.nodes[name] = Node(address, now)
        log(f"node {address} joined: {len(self.nodes)} of {self.min_nodes} to {self.max_nodes}")
        return node

    def hear(
        self, node: Node, now: float, generation: int, code: int | None, is_leaving: bool
    ) -> None:
        """`code`: of the command of `generation`, when it has ended on this node with all its
        processes.
        """
        if is_leaving and not node.is_leaving:
            log(f"node {node.address} leaves")
        node.last_seen, node.is_leaving = now, is_leaving
        if code is not None and generation == self.generation and node.is_running:
            node.is_running, node.code = False, code
            if code and self.failure is None and self.stop_seconds == inf:
                self.failure = code
                log(f"the command has failed on node {node.address} with exit code {code}")

    def tick(self, now: float) -> None:
        for node in self.nodes.values():
            if now - node.last_seen > self.silence_seconds:
                node.is_connected = node.is_running = False
        self.nodes = {
            name: node for name, node in self.nodes.items() if node.is_connected or node.is_running
        }
        if any(node.is_running for node in self.members):
            self._supervise(now)
        else:
            self._end_generation(now)
            if self.exit_code is None:
                self._start_generation(now)

    def order(self, node: Node) -> dict[str, Any]:
        """What a node has to do: to start a generation, unless it has, and to end within
        `stop_seconds`.
        """
        exit_code = STOPPED_CODE if node.is_leaving and not node.is_running else self.exit_code
        order = {"generation": 0, "stop_seconds": self.stop_seconds, "exit_code": exit_code}
        if node in self.members:
            limits = {
                "NNODES": len(self.members),
                "MAX_NODES": self.max_nodes,
                LOCK_SECONDS_VARIABLE: LOCK_SECONDS,
            }
            ranks = {"NODE_RANK": self.members.index(node), "MASTER_ADDR": self.members[0].address}
            order |= {"generation": self.generation, "environment": limits | ranks}
        return order

    def _available(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.is_connected and not node.is_leaving]

    def _lost(self) -> list[Node]:
        return [node for node in self.members if node.code is None and not node.is_connected]

    def _supervise(self, now: float) -> None:
        is_due = now - self.started > 4 * self.settle_seconds and len(self.members) < self.max_nodes
        has_spare = not set(self._available()) <= set(self.members)
        is_leaving = any(node.is_running and node.is_leaving for node in self.members)
        seconds = inf
        if self._lost() or self.failure is not None:
            seconds = KILL_SECONDS
        elif self.is_stopping or is_leaving or (is_due and has_spare):
            seconds = SAVE_SECONDS
        if seconds < self.stop_seconds:
            self.stop_seconds = seconds
            self.settling_until = now + self.settle_seconds
            for node in self._lost():
                log(f"node {node.address} is lost")

    def _end_generation(self, now: float) -> None:
        if self.members and all(node.code == 0 for node in self.members):
            self.exit_code = 0
            log("the command has ended on all nodes")
        elif self.failure is not None and not self._lost():
            self.failures = 1 if now - self.started > HEALTHY_SECONDS else self.failures + 1
            if self.failures == MAX_FAILURES:
                self.exit_code = self.failure
                log(f"the command has failed {MAX_FAILURES} times in a row: see its errors")
        if self.is_stopping and self.exit_code is None:
            self.exit_code = STOPPED_CODE
            log("stopped by a signal: rerun the same commands to resume")
        self.members, self.failure, self.stop_seconds = [], None, inf

    def _start_generation(self, now: float) -> None:
        members = self._available()[: self.max_nodes]
        if len(members) < self.min_nodes:
            self.settling_until = max(self.settling_until, now + self.settle_seconds)
            if not self.is_waiting:
                log(
                    f"waiting for nodes: {len(members)} of at least {self.min_nodes} follow this "
                    "driver"
                )
            self.is_waiting = True
        elif len(members) == self.max_nodes or now >= self.settling_until:
            self.is_waiting, self.members, self.started = False, members, now
            self.generation += 1
            for node in members:
                node.is_running, node.code = True, None
            addresses = " ".join(node.address for node in members)
            log(f"start {self.generation} on {len(members)} of {self.max_nodes} nodes: {addresses}")
