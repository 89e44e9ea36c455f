"""elastic.membership: which nodes train together, with simulated nodes, links and time."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.membership import (
    HEALTHY_SECONDS,
    KILL_SECONDS,
    MARGIN_SECONDS,
    MAX_FAILURES,
    SAVE_SECONDS,
    STOPPED_CODE,
    Membership,
    Node,
)

TICK, LEASE_SECONDS, SETTLE_SECONDS = 0.5, 10.0, 5.0


class SimulatedNode:
    """Does what a node and its guard do. `stop_seconds`: how long its command takes to end after
    SIGTERM.
    """

    def __init__(self, name: str, cluster: "SimulatedCluster", stop_seconds: float = 1.0):
        self.name, self.cluster, self.stop_seconds = name, cluster, stop_seconds
        self.link, self.is_here, self.is_leaving = True, True, False
        self.lease_end = 0.0
        self.generation, self.code = 0, None
        self.start: dict | None = None  # the order of the generation that runs
        self.ends: float | None = None
        self.stops: list[float] = []  # the seconds of each request
        self.known: Node | None = None  # the driver's view of this node
        self.exit_code: int | None = None

    def tick(self, now: float) -> None:
        membership = self.cluster.membership
        if not self.is_here or self.exit_code is not None:
            return
        if now >= self.lease_end:  # kills what it runs, and joins again
            self.start, self.ends, self.generation, self.code = None, None, 0, None
            if self.link:
                self.known = membership.join(self.name, self.name, now)
                self.lease_end = now + membership.lease_seconds
        elif self.link and (
            membership.nodes.get(self.name) is not self.known or not self.known.is_connected
        ):
            self.lease_end = now  # the driver has closed the connection
        elif self.link:
            # From before the order, which may cross it.
            state = (self.generation, self.code, self.is_leaving)
            self.obey(membership.order(self.known), now)
            membership.hear(self.known, now, *state)
            self.lease_end = now + membership.lease_seconds

    def obey(self, order: dict, now: float) -> None:
        self.exit_code = order["exit_code"]
        if order["generation"] > self.generation:
            self.start = {**order, "driver": self.cluster.membership}
            self.generation, self.code, self.ends = order["generation"], None, None
        if self.start is not None and (seconds := order["stop_seconds"]) < inf:
            if self.ends is None or seconds not in self.stops[-1:]:
                self.stops.append(seconds)
            end = now + min(seconds, self.stop_seconds)
            self.ends = end if self.ends is None else min(self.ends, end)
        if self.start is not None and self.ends is not None and now >= self.ends:
            self.exits(143)

    def exits(self, code: int) -> None:
        self.code, self.start, self.ends = code, None, None


class SimulatedCluster:
    def __init__(self, count: int, min_nodes: int = 1, max_nodes: int | None = None):
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes or count
        self.nodes = [SimulatedNode(f"node{number}", self) for number in range(count)]
        self.now = 100.0
        self.start_driver()

    def start_driver(self) -> None:
        """Nodes with a link notice the end of the driver before it, and kill what they run."""
        self.membership = Membership(
            self.min_nodes, self.max_nodes, LEASE_SECONDS, SETTLE_SECONDS, self.now
        )
        for node in self.nodes:
            if node.link:
                node.lease_end, node.start = self.now, None

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += TICK
            for node in self.nodes:
                node.tick(self.now)
            self.membership.tick(self.now)
            self.check()

    def check(self) -> None:
        """All that runs is of one generation, with ranks of its own."""
        starts = [node.start for node in self.nodes if node.start is not None]
        assert len({(id(start["driver"]), start["generation"]) for start in starts}) <= 1
        assert len({start["environment"]["NODE_RANK"] for start in starts}) == len(starts)
        for start in starts:
            assert self.min_nodes <= start["environment"]["NNODES"] <= self.max_nodes

    def running(self) -> list[str]:
        """The nodes that run, by rank."""
        started = [node for node in self.nodes if node.start is not None]
        return [
            node.name
            for node in sorted(started, key=lambda node: node.start["environment"]["NODE_RANK"])
        ]


def test_all_nodes_start_together_and_end_together():
    cluster = SimulatedCluster(3)
    cluster.run(2)
    assert cluster.running() == ["node0", "node1", "node2"]
    assert {node.start["environment"]["MASTER_ADDR"] for node in cluster.nodes} == {"node0"}
    for node in cluster.nodes:
        node.exits(0)
    cluster.run(1)
    assert [node.exit_code for node in cluster.nodes] == [0, 0, 0]


@pytest.mark.parametrize(
    ("failures", "codes"), [(MAX_FAILURES, [2, 2]), (MAX_FAILURES - 1, [STOPPED_CODE] * 2)]
)
def test_failures_in_a_row_or_the_driver_end_the_run(failures, codes):
    cluster = SimulatedCluster(2)
    for number in range(failures):
        cluster.run(5)
        assert cluster.membership.generation == number + 1
        cluster.nodes[1].exits(2)
    cluster.run(5)
    cluster.membership.is_stopping = True
    cluster.run(5)
    assert [node.exit_code for node in cluster.nodes] == codes
    assert (SAVE_SECONDS in cluster.nodes[0].stops) == (STOPPED_CODE in codes)


def test_a_start_waits_for_enough_nodes_and_a_while_for_more():
    cluster = SimulatedCluster(3, min_nodes=2)
    cluster.nodes[1].is_here = cluster.nodes[2].is_here = False
    cluster.run(60)
    assert cluster.running() == []
    cluster.nodes[1].is_here = True
    cluster.run(SETTLE_SECONDS - 1)
    assert cluster.running() == []
    cluster.run(2)
    assert cluster.running() == ["node0", "node1"]


def test_a_cut_node_is_left_behind_and_comes_back():
    cluster = SimulatedCluster(2)
    cluster.run(30)
    cluster.nodes[0].link = False
    cluster.run(LEASE_SECONDS + MARGIN_SECONDS + max(KILL_SECONDS, SETTLE_SECONDS) + 2)
    assert cluster.running() == ["node1"]
    assert cluster.nodes[1].stops == [KILL_SECONDS]
    cluster.nodes[0].link = True
    cluster.run(4 * SETTLE_SECONDS + 5)
    assert cluster.running() == ["node1", "node0"]
    assert cluster.nodes[1].stops == [KILL_SECONDS, SAVE_SECONDS]


def test_a_node_that_leaves_lets_all_save_and_a_spare_one_takes_its_place():
    cluster = SimulatedCluster(3, max_nodes=2)
    cluster.run(2)
    assert cluster.running() == ["node0", "node1"]
    cluster.run(60)
    assert cluster.nodes[0].stops == []  # not for a node that has no place
    cluster.nodes[0].is_leaving = True
    cluster.run(5)
    assert [node.exit_code for node in cluster.nodes] == [STOPPED_CODE, None, None]
    assert cluster.running() == ["node1", "node2"]
    assert cluster.nodes[0].stops == cluster.nodes[1].stops == [SAVE_SECONDS]


@pytest.mark.parametrize("excuse", ["ran long", "lost node"])
def test_failures_after_a_long_run_or_with_a_lost_node_do_not_end_the_run(excuse):
    cluster = SimulatedCluster(2)
    for _ in range(2 * MAX_FAILURES):
        cluster.run(30)
        assert len(cluster.running()) == 2
        if excuse == "ran long":
            cluster.run(HEALTHY_SECONDS)
        else:
            cluster.nodes[0].known.is_connected = False
            cluster.nodes[0].lease_end = cluster.now
        cluster.nodes[1].exits(1)
    cluster.run(30)
    assert len(cluster.running()) == 2


events = st.tuples(
    st.sampled_from(["cut", "mend", "fail", "leave", "disconnect", "new driver", "wait"]),
    st.integers(0, 2),
    st.sampled_from([0.5, 3.0, 11.0, 25.0]),
)


@given(st.lists(events, max_size=25), st.integers(1, 3), st.sampled_from([0.5, 2.5, 30.0]))
def test_no_two_generations_ever_run_at_once_and_all_train_in_the_end(
    events, min_nodes, stop_seconds
):
    cluster = SimulatedCluster(3, min_nodes)
    for node in cluster.nodes:
        node.stop_seconds = stop_seconds
    for what, number, seconds in events:
        cluster.membership.failures = -100  # failures do not end this run
        node = cluster.nodes[number]
        is_known = node.name in cluster.membership.nodes and node.link
        if what in ("cut", "mend"):
            node.link = what == "mend"
        elif what == "fail" and node.start is not None and is_known:
            node.exits(1)
        elif what == "leave" and is_known:
            node.is_leaving = True
        elif what == "disconnect" and is_known:  # noticed by the driver only
            node.known.is_connected = node.link = False
        elif what == "new driver":
            cluster.start_driver()
        cluster.run(seconds)  # checks after each tick
    for node in cluster.nodes:
        node.link = True
        if node.is_leaving:  # it has left, and starts again
            node.is_leaving = False
            node.lease_end = cluster.now
            node.start = None
            node.exit_code = None
            node.known.is_connected = False
    cluster.run(2 * stop_seconds + 60)
    assert len(cluster.running()) == 3
