"""run_elastic.py: a driver and nodes on this machine, and a training run in network namespaces."""

import asyncio
import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import ROOT
from network_namespaces import Cluster, ElasticRun, largest_difference, missing_rights
from processes import PATIENCE, free_port, wait_until

import run_elastic
from utils import files
from utils.errors import UserError
from utils.files import LOCK_SECONDS_VARIABLE, lock_folder

# Says where it runs, and starts a process in a session of its own, as torchrun does.
COMMAND = """
echo "start $NODE_RANK of $NNODES at $MASTER_ADDR for $MAX_NODES"
trap 'echo saved; kill $!; exit 143' TERM
setsid sleep 1000 &
echo "child $!"
wait
"""


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").exists()


class Programs:
    """Dask's scheduler, drivers and nodes on this machine, whose output goes to files."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.processes = {}
        self.address = f"127.0.0.1:{free_port()}"
        subprocess.run(
            ["bash", ROOT / "scripts/create_certificates.sh", folder / "tls"], check=True
        )
        self.start_scheduler()

    def start_scheduler(self) -> None:
        host, port = self.address.split(":")
        flags = ("--host", host, "--port", port, "--dashboard-address", "127.0.0.1:0")
        self.start("scheduler", "-m", "distributed.cli.dask_scheduler", *flags)

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def start(self, name: str, *words: object, **environment: str) -> subprocess.Popen:
        environment = {**os.environ, "DASK_CONFIG": str(self.folder / "tls"), **environment}
        with (self.folder / name).open("w") as output:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *map(str, words)],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return self.processes[name]

    def start_driver(
        self, nodes: int, command: str = COMMAND, name: str = "driver", lease=30
    ) -> subprocess.Popen:
        """`lease`: seconds, long enough for a machine that is busy."""
        flags = (
            "--min-nodes",
            nodes,
            "--max-nodes",
            nodes,
            "--lease-seconds",
            lease,
            "--settle-seconds",
            0,
        )
        words = ("--scheduler", f"tls://{self.address}", *flags, "--", "bash", "-c", command)
        return self.start(name, ROOT / "run_elastic.py", *words)

    def start_node(self, name: str, **environment: str) -> subprocess.Popen:
        return self.start(
            name, ROOT / "run_elastic.py", "node", "--scheduler", self.address, **environment
        )

    def output(self, name: str) -> str:
        return (self.folder / name).read_text()

    def children(self, *names: str, after: Sequence[int] = ()) -> list[int]:
        """The processes that the commands started last; waits for those that come after `after`."""

        def last() -> list[str]:
            return [(re.findall(r"child (\d+)\n", self.output(name)) or [""])[-1] for name in names]

        wait_until(lambda: not {"", *map(str, after)} & set(last()))
        return [int(pid) for pid in last()]


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    pytest.importorskip("distributed")
    programs = Programs(tmp_path_factory.mktemp("elastic"))
    yield programs
    programs.end()


@pytest.fixture
def programs(scheduler: Programs) -> Iterator[Programs]:
    """Programs on the same scheduler, which all end with the test."""
    yield scheduler
    for name in set(scheduler.processes) - {"scheduler"}:
        scheduler.processes[name].kill()
        scheduler.processes.pop(name).wait()
        print(f"--- {name}\n{scheduler.output(name)}")  # which pytest shows if the test failed
    if scheduler.processes["scheduler"].poll() is not None:  # a test failed after it had killed it
        scheduler.start_scheduler()


def test_nodes_kill_what_runs_without_driver_and_scheduler_and_go_on_with_the_next_ones(programs):
    nodes = [programs.start_node(name) for name in ("a", "b")]
    first = programs.start_driver(2)
    children = programs.children("a", "b")
    assert all(map(is_alive, children))
    said = [
        line
        for name in ("a", "b")
        for line in programs.output(name).splitlines()
        if line.startswith("start 0")
    ]
    assert said == ["start 0 of 2 at 127.0.0.1 for 2"]

    second = programs.start_driver(2, name="second")  # is turned away until the first one has died
    wait_until(lambda: "waiting for nodes" in programs.output("second"))
    for process in (first, programs.processes["scheduler"]):
        process.kill()
    wait_until(lambda: not any(map(is_alive, children)))
    # Until they have noticed that there is no scheduler, they may even follow the second one.
    wait_until(
        lambda: all(programs.output(name).count("connecting to") == 2 for name in ("a", "b"))
    )
    children = programs.children("a", "b")
    assert not any(map(is_alive, children))
    programs.processes["scheduler"].wait()
    programs.start_scheduler()
    assert all(map(is_alive, programs.children("a", "b", after=children)))
    second.terminate()
    assert [process.wait(PATIENCE) for process in (second, *nodes)] == [143] * 3
    assert [programs.output(name).count("saved") for name in ("a", "b")] == [1, 1]


def test_the_command_dies_with_its_guard_its_lease_and_its_node(programs):
    psutil = pytest.importorskip("psutil")
    node = programs.start_node("a")
    programs.start_driver(1, lease=5)

    (child,) = programs.children("a")
    (guard,) = psutil.Process(node.pid).children()
    guard.kill()
    wait_until(lambda: "node 127.0.0.1 is lost" in programs.output("driver"))
    assert not is_alive(child)

    (child,) = programs.children("a", after=[child])
    node.send_signal(signal.SIGSTOP)  # only the guard can notice the end of the lease
    wait_until(lambda: not is_alive(child))
    node.send_signal(signal.SIGCONT)

    (child,) = programs.children("a", after=[child])
    node.kill()
    wait_until(lambda: not is_alive(child))


def test_a_failing_command_ends_the_run(programs):
    nodes = [programs.start_node(name) for name in ("a", "b")]
    driver = programs.start_driver(2, "echo tried; exit 7")
    assert [process.wait(PATIENCE) for process in (driver, *nodes)] == [7, 7, 7]
    for name in ("a", "b"):  # each start ends on both nodes with the first failure
        assert programs.output(name).count("elastic: start") == 3
    assert "failed 3 times in a row" in programs.output("driver")


def test_connections_without_a_certificate_change_nothing(programs, tmp_path):
    psutil = pytest.importorskip("psutil")
    node = programs.start_node("a")
    programs.start_driver(1)
    (child,) = programs.children("a")
    listening = [
        each for each in psutil.Process(node.pid).net_connections() if each.status == "LISTEN"
    ]
    ports = [int(programs.address.split(":")[1]), *(each.laddr.port for each in listening)]
    subprocess.run(["bash", ROOT / "scripts/create_certificates.sh", tmp_path / "tls"], check=True)
    with contextlib.ExitStack() as stack:
        for port in ports:
            connections = [
                socket.create_connection(("127.0.0.1", port), PATIENCE) for _ in range(102)
            ]
            for connection in connections:  # they stay open, and most of them say nothing
                stack.enter_context(connection)
            connections[0].sendall(b"\0\xff" * 10_000)
            connections[1].sendall(
                b'{"type": "join", "name": "\\ud800", "address": "\\u0000"}\n' * 1000
            )
        intruder = programs.start_node("intruder", DASK_CONFIG=str(tmp_path / "tls"))
        assert intruder.wait(PATIENCE) == 2
        assert "the same certificates" in programs.output("intruder").splitlines()[-1]
        programs.start_node("b")
        wait_until(lambda: "joined: 2 of 1 to 1" in programs.output("driver"))
    assert is_alive(child)
    assert programs.output("driver").count(" joined: ") == 2


def test_a_scheduler_that_ends_in_the_handshake_of_tls_is_waited_for(programs, monkeypatch):
    import dask

    from elastic import sessions

    monkeypatch.setattr(sessions, "RETRY_SECONDS", 0.0)
    ended = []
    is_ended_twice = asyncio.Event()

    async def end_after_the_first_message(reader, writer):
        await reader.read(1 << 16)
        writer.close()
        ended.append(writer)
        if len(ended) == 2:
            is_ended_twice.set()

    async def look_for_it():
        server = await asyncio.start_server(end_after_the_first_message, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        finding = asyncio.create_task(sessions.find_workers(f"tls://{host}:{port}"))
        waiting = asyncio.create_task(is_ended_twice.wait())
        await asyncio.wait([finding, waiting], return_when=asyncio.FIRST_COMPLETED)
        finding.cancel()
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await finding

    certificates = dask.config.collect([programs.folder / "tls"], {})
    with dask.config.set(dask.config.merge(dask.config.config, certificates)):
        asyncio.run(look_for_it())


def test_a_look_for_nodes_ends_when_it_is_stopped_together_with_an_answer(monkeypatch):
    """A driver whose run had ended in such a moment did not end."""
    pytest.importorskip("distributed")
    from elastic import sessions

    async def answer_and_stop(_comm, **_):
        asyncio.get_running_loop().call_soon(looking.cancel)
        return {"workers": {}}

    async def look_again_and_again():
        while True:
            await sessions.find_workers("tls://h:1")

    async def is_stopped() -> bool:
        nonlocal looking
        looking = asyncio.create_task(look_again_and_again())
        await asyncio.wait([looking], timeout=1)
        return looking.cancelled()

    looking = None
    monkeypatch.setattr(sessions, "open_connection", lambda _address: asyncio.sleep(0))
    monkeypatch.setattr(sessions, "send_recv", answer_and_stop)
    assert asyncio.run(is_stopped())


@pytest.mark.parametrize(
    ("words", "hints"),
    [
        ("--scheduler h:1 --min-nodes 2 -- true", ["--max-nodes"]),
        ("--scheduler h:1 --min-nodes 3 --max-nodes 2 -- true", ["--min-nodes 3", "--max-nodes 2"]),
        ("--scheduler h:1 --min-nodes 1 --max-nodes 2", ["after --"]),
        ("node --scheduler tcp://h:70000", ["--scheduler", "HOST:PORT", "70000"]),
        ("--scheduler h:1 --min-nodes 1 --max-nodes 2 -- true", ["tls://h:1", "certificates"]),
        ("--scheduler udp://h:1 --min-nodes 1 --max-nodes 2 -- true", ["udp://h:1", "tls"]),
        ("--scheduler tcp://h --min-nodes 1 --max-nodes 2 -- true", ["tcp://h", "HOST:PORT"]),
        ("node -- true", ["--scheduler"]),
        ("node --scheduler h:1 -- true", ["no node"]),
    ],
)
def test_commands_that_cannot_work_are_refused(capsys, words, hints):
    if "-- true" in words:
        pytest.importorskip("distributed")
    with pytest.raises((UserError, SystemExit)) as raised:
        run_elastic.main(words.split())
    said = f"{raised.value} {capsys.readouterr().err}"
    assert all(hint in said for hint in hints), said


def test_the_help_has_a_line_for_each_command(capsys):
    with pytest.raises(SystemExit):
        run_elastic.main(["--help"])
    usage = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    begins = [line.split()[:3] for line in usage if not line.startswith("      ")]
    program = ["python3", "run_elastic.py"]
    assert begins == [
        ["usage:"],
        ["dask", "scheduler", "#"],
        [*program, "node"],
        [*program, "--scheduler"],
    ]


def test_an_elastic_run_waits_for_the_lock_of_a_node_that_ends(tmp_path, monkeypatch):
    with (tmp_path / ".lock").open("a+b") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="in use by"):
            lock_folder(tmp_path)
        monkeypatch.setenv(LOCK_SECONDS_VARIABLE, "30")
        monkeypatch.setattr(files.time, "sleep", lambda _: holder.close())
        lock_folder(tmp_path).close()
        assert holder.closed


def test_training_goes_on_without_the_first_node(tmp_path):
    """`python3 tests/support/network_namespaces.py FOLDER` tries the other events."""
    pytest.importorskip("distributed")
    if reason := missing_rights():
        pytest.skip(reason)
    with Cluster(tmp_path) as cluster, ThreadPoolExecutor() as pool:
        run = ElasticRun(cluster, max_steps=40, settle_seconds=0, step_seconds=0.6)
        run.start()
        # While the run waits for the end of a lease.
        expected = pool.submit(run.uninterrupted_losses)
        run.cut_link("a")
        run.cluster.kill("a")
        run.finish()
        assert run.overlap == 0
        assert largest_difference(run, expected.result()) < 1e-5
        progress = json.loads((run.results / "custom/phase1/40/model_progress.json").read_text())
        assert progress["samples_consumed"] == 40 * 8
        assert "node 0 of 1" in cluster.log_file("b").read_text()
