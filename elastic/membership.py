"""Which nodes train together: the coordinator's decisions, without sockets or clocks.

A generation is one start of the command on some nodes. It ends on all of them before the next one starts. A node that
cannot be heard counts as running until its lease, and a margin for killing its processes, have passed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

MARGIN_SECONDS = 2.0  # from the end of a lease until its node's processes are certainly dead
KILL_SECONDS = 3.0  # to end after a node was lost or a command failed, before SIGKILL
SAVE_SECONDS = 120.0  # to save a checkpoint and end, where all nodes can
MAX_FAILURES = 3  # in a row, without a node lost; the run ends then
HEALTHY_SECONDS = 600.0  # a generation that ran as long is no failed start
STOPPED_CODE = 143  # as of a process that SIGTERM ended

Send = Callable[..., None]


@dataclass(frozen=True)
class ElasticConfig:
    """The limits of a run. `settle_seconds`: how long to wait for more than `min_nodes` before a start. Nodes that come
    later wait until the others have run for four times as long."""

    min_nodes: int
    max_nodes: int
    lease_seconds: float = 10.0
    settle_seconds: float = 5.0

    @property
    def join_seconds(self) -> float:
        return 4 * self.settle_seconds


@dataclass
class Node:
    """An agent, as the coordinator knows it. `send`: None when the connection is lost."""

    name: str
    address: str
    send: Send | None
    last_seen: float
    is_running: bool = False
    is_leaving: bool = False


@dataclass
class Generation:
    """`codes`: exit codes by node. `failure`: the first code other than 0 of a command that was not asked to stop."""

    number: int
    members: list[str] = field(default_factory=list)
    started: float = 0.0
    codes: dict[str, int] = field(default_factory=dict)
    failure: int | None = None
    has_lost_node: bool = False
    stop_seconds: float | None = None


class Membership:
    """Takes events with their times, in seconds, and sends messages to the nodes. `exit_code` is set at the end of the
    run. `log` takes lines for the user."""

    def __init__(self, config: ElasticConfig, log: Callable[[str], None]):
        self.config, self.log = config, log
        self.nodes: dict[str, Node] = {}
        self.generation = Generation(0)
        self.failures = 0
        self.settling_since = 0.0
        self.is_stopping = self.is_waiting = False
        self.exit_code: int | None = None

    # --- events ---

    def join(self, name: str, address: str, send: Send, now: float) -> None:
        """A node that joins again has killed what it ran."""
        if name in self.nodes:
            self._lose(self.nodes.pop(name))
        self.nodes[name] = Node(name, address, send, now)
        send("welcome", lease_seconds=self.config.lease_seconds, max_nodes=self.config.max_nodes)
        self.log(f"node {address} is here: {len(self.nodes)} of {self.config.min_nodes} to {self.config.max_nodes}")
        if self.exit_code is not None:
            send("end", code=self.exit_code)

    def beat(self, name: str, now: float) -> None:
        self.nodes[name].last_seen = now

    def leave(self, name: str) -> None:
        self.nodes[name].is_leaving = True
        self.log(f"node {self.nodes[name].address} leaves")

    def exited(self, name: str, number: int, code: int) -> None:
        """The command has ended on a node, with all its processes."""
        if number != self.generation.number or not self.nodes[name].is_running:
            return
        self.nodes[name].is_running = False
        self.generation.codes[name] = code
        if code and self.generation.failure is None and self.generation.stop_seconds is None:
            self.generation.failure = code
            self.log(f"the command has failed on node {self.nodes[name].address} with exit code {code}")

    def disconnect(self, name: str) -> None:
        node = self.nodes.get(name)
        if node is None:
            return
        node.send = None
        if node.is_running:
            self._lose(node)
        else:
            del self.nodes[name]

    def stop(self) -> None:
        """Ends the run, with a checkpoint."""
        self.is_stopping = True

    def tick(self, now: float) -> None:
        """Called several times per second."""
        for node in list(self.nodes.values()):
            if now - node.last_seen > self.config.lease_seconds + MARGIN_SECONDS:
                self._lose(self.nodes.pop(node.name))
        if any(node.is_running for node in self.nodes.values()):
            self._supervise(now)
        elif self.exit_code is None:
            self._end_generation(now)
            self._start_generation(now)

    # --- decisions ---

    def _lose(self, node: Node) -> None:
        if node.is_running and not self.generation.has_lost_node:
            self.generation.has_lost_node = True
            self.log(f"node {node.address} is lost")

    def _supervise(self, now: float) -> None:
        generation = self.generation
        running = [node for node in self.nodes.values() if node.is_running]
        waiting = [node for node in self.nodes.values() if node.send and not node.is_leaving and not node.is_running]
        waiting = [node for node in waiting if node.name not in generation.codes]
        has_place = len(generation.members) < self.config.max_nodes
        is_due = has_place and now - generation.started > self.config.join_seconds
        if generation.has_lost_node or generation.failure is not None:
            self._stop_generation(KILL_SECONDS, now)
        elif self.is_stopping or any(node.is_leaving for node in running) or (waiting and is_due):
            self._stop_generation(SAVE_SECONDS, now)

    def _stop_generation(self, seconds: float, now: float) -> None:
        generation = self.generation
        if generation.stop_seconds is not None and generation.stop_seconds <= seconds:
            return
        if generation.stop_seconds is None:
            self.settling_since = now
        generation.stop_seconds = seconds
        for node in self.nodes.values():
            if node.is_running and node.send:
                node.send("stop", seconds=seconds)

    def _end_generation(self, now: float) -> None:
        generation, self.generation = self.generation, Generation(self.generation.number)
        if generation.members and list(generation.codes.values()) == [0] * len(generation.members):
            self._end(0, "the command has ended on all nodes")
        elif generation.failure is not None and not generation.has_lost_node:
            self.failures = 1 if now - generation.started > HEALTHY_SECONDS else self.failures + 1
            if self.failures == MAX_FAILURES:
                self._end(generation.failure, f"the command has failed {MAX_FAILURES} times in a row: see its errors")
        if self.is_stopping and self.exit_code is None:
            self._end(STOPPED_CODE, "stopped by a signal: the same commands go on from the last checkpoint")

    def _start_generation(self, now: float) -> None:
        if self.exit_code is not None:
            return
        nodes = [node for node in self.nodes.values() if node.send and not node.is_leaving]
        if len(nodes) < self.config.min_nodes:
            self.settling_since = now
            if not self.is_waiting:
                self.log(f"waiting for nodes: {len(nodes)} of at least {self.config.min_nodes} are here")
            self.is_waiting = True
            return
        if len(nodes) < self.config.max_nodes and now - self.settling_since < self.config.settle_seconds:
            return
        self.is_waiting = False
        nodes = nodes[: self.config.max_nodes]
        self.generation = Generation(self.generation.number + 1, [node.name for node in nodes], now)
        for rank, node in enumerate(nodes):
            node.is_running = True
            node.send(
                "start",
                generation=self.generation.number,
                node_rank=rank,
                nodes=len(nodes),
                master_addr=nodes[0].address,
            )
        addresses = " ".join(node.address for node in nodes)
        self.log(f"start {self.generation.number} on {len(nodes)} of {self.config.max_nodes} nodes: {addresses}")

    def _end(self, code: int, reason: str) -> None:
        self.exit_code = code
        self.log(reason)
        for node in self.nodes.values():
            if node.send:
                node.send("end", code=code)
