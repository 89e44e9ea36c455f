"""run_elastic.py: agents and a coordinator on this machine, and a training run in network namespaces."""

import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, assert_refused, run_program
from network_namespaces import Cluster, ElasticRun, largest_difference, missing_rights
from processes import PATIENCE, free_port, wait_until

from utils import files
from utils.errors import UserError
from utils.files import LOCK_SECONDS_VARIABLE, lock_folder

LEASE_SECONDS = 60  # longer than a busy machine stops a process

# Says where it runs, and starts a process in a session of its own, as torchrun does.
COMMAND = """
echo "start $NODE_RANK of $NNODES at $MASTER_ADDR for $MAX_NODES"
trap 'echo saved; kill $!; exit 143' TERM
setsid sleep 1000 &
echo "child $!"
wait
"""


class Programs:
    """A coordinator and agents on this machine, whose output goes to files."""

    def __init__(self, folder: Path):
        self.folder, self.processes, self.port = folder, {}, free_port()

    def __enter__(self) -> "Programs":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def start(self, name: str, *words: object, **environment: str) -> subprocess.Popen:
        with (self.folder / name).open("a") as output:
            self.processes[name] = subprocess.Popen(
                [sys.executable, ROOT / "run_elastic.py", *map(str, words)],
                env={**os.environ, **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return self.processes[name]

    def start_coordinator(self, nodes: int) -> subprocess.Popen:
        flags = ("--min-nodes", nodes, "--max-nodes", nodes, "--host", "127.0.0.1", "--lease-seconds", LEASE_SECONDS)
        return self.start("coordinator", "coordinator", *flags, "--port", self.port)

    def start_node(self, name: str, command: str = COMMAND, **environment: str) -> subprocess.Popen:
        words = ("node", "--coordinator", f"127.0.0.1:{self.port}", "--", "bash", "-c", command)
        return self.start(name, *words, **environment)

    def output(self, name: str) -> str:
        return (self.folder / name).read_text()

    def children(self, starts: int) -> list[int]:
        """The processes that the commands have started, after `starts` starts."""
        wait_until(lambda: all(self.output(name).count("child") == starts for name in ("a", "b")))
        return [int(self.output(name).split("child ")[-1].split()[0]) for name in ("a", "b")]


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").exists()


def test_agents_kill_what_runs_without_a_coordinator_and_go_on_with_the_next_one(tmp_path):
    with Programs(tmp_path) as programs:
        nodes = [programs.start_node(name) for name in ("a", "b")]
        first = programs.start_coordinator(2)
        children = programs.children(starts=1)
        said = sorted(line for name in ("a", "b") for line in programs.output(name).splitlines() if "start 0" in line)
        assert "start 0 of 2 at 127.0.0.1 for 2" in said
        assert all(map(is_alive, children))
        first.kill()
        wait_until(lambda: not any(map(is_alive, children)), LEASE_SECONDS)

        second = programs.start_coordinator(2)
        assert all(map(is_alive, programs.children(starts=2)))
        second.terminate()
        assert [process.wait(PATIENCE) for process in (second, *nodes)] == [143] * 3
        for name in ("a", "b"):
            assert programs.output(name).count("saved") == 1


def test_a_failing_command_ends_the_run_and_other_settings_are_refused(tmp_path):
    with Programs(tmp_path) as programs:
        coordinator = programs.start_coordinator(2)
        assert programs.start_node("other", MAX_NODES="3").wait(PATIENCE) == 2
        refusal = programs.output("other").splitlines()[-1]
        assert refusal.startswith("error: MAX_NODES is 3, but the coordinator has --max-nodes 2")
        nodes = [programs.start_node(name, "echo tried; exit 7") for name in ("a", "b")]
        assert [node.wait(PATIENCE) for node in nodes] == [7, 7]
        for name in ("a", "b"):  # each start ends on both nodes with the first failure
            assert programs.output(name).count("elastic: start") == 3
        assert coordinator.wait(PATIENCE) == 7
        assert "failed 3 times in a row" in programs.output("coordinator")


def test_a_stranger_does_not_disturb_the_coordinator(tmp_path):
    with Programs(tmp_path) as programs:
        coordinator = programs.start_coordinator(1)
        wait_until(lambda: "waiting for nodes" in programs.output("coordinator"))
        for text in (b"GET / HTTP/1.1\r\n\r\n", b'{"type": "beat", "sent": 1}\n', b'{"type": "join"}\n', b"[]\n1\n"):
            with socket.create_connection(("127.0.0.1", programs.port), timeout=PATIENCE) as stranger:
                stranger.sendall(text)
                assert stranger.recv(100) == b""
        assert programs.start_node("a", "exit 0").wait(PATIENCE) == 0
        assert coordinator.wait(PATIENCE) == 0


@pytest.mark.parametrize(
    ("words", "hints"),
    [
        ("coordinator --min-nodes 2", ["--max-nodes"]),
        ("coordinator --min-nodes 3 --max-nodes 2", ["--min-nodes 3", "--max-nodes 2"]),
        ("coordinator --min-nodes 1 --max-nodes 2 -- true", ["no command"]),
        ("coordinator --min-nodes 1 --max-nodes 2 --host 203.0.113.1", ["cannot listen", "203.0.113.1"]),
        ("node -- true", ["--coordinator"]),
        ("node --coordinator host -- true", ["HOST:PORT"]),
        ("node --coordinator host:1", ["after --"]),
    ],
)
def test_commands_that_cannot_work_are_refused(words, hints):
    assert_refused(run_program("run_elastic.py", *words.split()), *hints)


def test_an_elastic_run_waits_for_the_lock_of_a_node_that_ends(tmp_path, monkeypatch):
    with (tmp_path / ".lock").open("a+b") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="in use by"):
            lock_folder(tmp_path)
        monkeypatch.setenv(LOCK_SECONDS_VARIABLE, "30")
        monkeypatch.setattr(files.time, "sleep", lambda _: holder.close())
        lock_folder(tmp_path).close()
        assert holder.closed


def test_training_goes_on_without_the_first_node_and_with_it_again(tmp_path):
    """The other events are run by `python3 tests/network_namespaces.py FOLDER`, in a few minutes."""
    if reason := missing_rights():
        pytest.skip(reason)
    with Cluster(tmp_path) as cluster:
        run = ElasticRun(cluster, max_steps=80)
        run.start()
        run.cut_link("a", "b")
        run.mend_link("a")
        run.finish()
        assert largest_difference(run) < 1e-5
        progress = json.loads((run.results / "custom/phase1/80/model_progress.json").read_text())
        assert progress["samples_consumed"] == 80 * 8
        assert "node 0 of 1" in cluster.log_file("b").read_text()
