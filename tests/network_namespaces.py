#!/usr/bin/env python3
"""An elastic run on two nodes and a coordinator in network namespaces, whose links are cut and mended.

    python3 tests/network_namespaces.py FOLDER    # all events, as root; prints how long each took

The run is scripts/run_pretraining.sh with one CPU process per node. Its steps are slow while the file FOLDER/slow
exists, so that there is time for events.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from conftest import ROOT, TINY, VOCAB_FILE, reported, write_shards

LEASE_SECONDS, SETTLE_SECONDS = 5, 2
SLOW_STEP_SECONDS, STEPS_PER_CHECKPOINT = 1.0, 2
NODES = ("a", "b")

PROGRAM = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
import run_pretraining
from trainer import Trainer
from utils.errors import run_main
step = Trainer.optimizer_step
def slow_step(trainer):
    time.sleep({seconds} * Path({slow!r}).exists())
    step(trainer)
Trainer.optimizer_step = slow_step
run_main(run_pretraining.main)
"""


def missing_rights() -> str | None:
    """Why this machine cannot make network namespaces; None if it can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if shutil.which("ip") is None:
        return "needs the ip command (iproute2)"
    name = f"probe{os.getpid()}"
    made = ip("netns", "add", name, check=False).returncode == 0
    made = made and ip("-n", name, "link", "add", "br0", "type", "bridge", check=False).returncode == 0
    ip("netns", "del", name, check=False)
    return None if made else "needs the right to make network namespaces and bridges"


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


class Cluster:
    """Nodes a and b and the host h of the coordinator, with a link to each node."""

    def __init__(self, folder: Path):
        self.folder, self.processes = folder, {}
        self.namespaces = {name: f"bert{os.getpid()}{name}" for name in (*NODES, "h")}

    def __enter__(self) -> "Cluster":
        try:
            for namespace in self.namespaces.values():
                ip("netns", "add", namespace)
                ip("-n", namespace, "link", "set", "lo", "up")
            host = self.namespaces["h"]
            ip("-n", host, "link", "add", "br0", "type", "bridge")
            ip("-n", host, "addr", "add", "10.77.0.9/24", "dev", "br0")
            ip("-n", host, "link", "set", "br0", "up")
            for number, name in enumerate(NODES, 1):
                node = self.namespaces[name]
                ip("-n", host, "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", node)
                ip("-n", host, "link", "set", f"to-{name}", "master", "br0", "up")
                ip("-n", node, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
                ip("-n", node, "link", "set", "eth0", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.namespaces:
            self.kill(name)
        for namespace in self.namespaces.values():
            ip("netns", "del", namespace, check=False)

    def start(self, name: str, *words: object, environment: dict[str, str] | None = None) -> None:
        """A process on a node, whose output is appended to the file `<name>.log`."""
        with self.log_file(name).open("a") as log:
            self.processes[name] = subprocess.Popen(
                ["ip", "netns", "exec", self.namespaces[name], *map(str, words)],
                env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", **(environment or {})},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def log_file(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def set_link(self, name: str, state: str) -> None:
        ip("-n", self.namespaces["h"], "link", "set", f"to-{name}", state)

    def pids(self, name: str) -> list[int]:
        return [int(pid) for pid in ip("netns", "pids", self.namespaces[name], check=False).stdout.split()]

    def training_pids(self, name: str) -> list[int]:
        """The processes of a node that train, or have the arguments to."""
        found = []
        for pid in self.pids(name):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if any(word.endswith(b"/run_pretraining.py") for word in words):
                    found.append(pid)
        return found

    def kill(self, name: str) -> None:
        """Kills all processes of a node, as if it had lost its power."""
        while pids := self.pids(name):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        if name in self.processes:
            self.processes[name].wait()


class ElasticRun:
    """A pre-training run on a cluster; a global batch is 2 x 2 sequences of each of two nodes."""

    def __init__(self, cluster: Cluster, max_steps: int):
        self.cluster, self.folder, self.max_steps = cluster, cluster.folder, max_steps
        self.slow, self.results = self.folder / "slow", self.folder / "results"
        self.slow.touch()
        code = self.folder / "code" / "run_pretraining.py"
        code.parent.mkdir()
        code.write_text(PROGRAM.format(root=str(ROOT), seconds=SLOW_STEP_SECONDS, slow=str(self.slow)))
        vocab_file, config_file = self.folder / "vocab.txt", self.folder / "config.json"
        words = VOCAB_FILE.read_text(encoding="utf-8").splitlines()[:1210]
        vocab_file.write_text("\n".join(words) + "\n", encoding="utf-8")
        config = {**TINY, "vocab_size": len(words), "max_position_embeddings": 128}
        config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config_file.write_text(json.dumps(config))
        shards = write_shards(self.folder / "shards", length=128, predictions=20)
        values = {
            1: 2,
            2: 1e-3,
            3: "fp32",
            4: 0,
            6: max_steps,
            7: STEPS_PER_CHECKPOINT,
            9: 2,
            17: shards,
            19: code.parent,
            21: config_file,
        }
        self.command = ["bash", ROOT / "scripts/run_pretraining.sh", *(values.get(n, "") for n in range(1, 22))]
        self.environment = {
            "PHASE": "1",
            "VOCAB_FILE": str(vocab_file),
            "EXTRA_ARGS": "--show-config false",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def start_coordinator(self) -> None:
        flags = ("--min-nodes", 1, "--max-nodes", 2, "--lease-seconds", LEASE_SECONDS)
        program = (sys.executable, ROOT / "run_elastic.py", "coordinator")
        self.cluster.start("h", *program, *flags, "--settle-seconds", SETTLE_SECONDS)

    def start_node(self, name: str) -> None:
        program = (sys.executable, ROOT / "run_elastic.py", "node", "--coordinator", "10.77.0.9:29400", "--")
        environment = {**self.environment, "RESULTS_DIR": str(self.results)}
        self.cluster.start(name, *program, *self.command, environment=environment)

    def start(self) -> float:
        """Starts the run, with a as the first node; returns the time until both train."""
        self.start_coordinator()
        self.start_node("a")
        self.seconds_until(lambda: "10.77.0.1 is here" in self.cluster.log_file("h").read_text())
        self.start_node("b")
        return self.seconds_until_trained(2)

    def uninterrupted_losses(self) -> dict[int, float]:
        """The losses of the same run in one process."""
        results = self.folder / "uninterrupted"
        environment = {**os.environ, **self.environment, "RESULTS_DIR": str(results), "NNODES": "1", "MAX_NODES": "2"}
        subprocess.run([*map(str, self.command)], env=environment, check=True, capture_output=True)
        return losses(results)

    def progress(self) -> tuple[int, int]:
        """The step of the newest checkpoint, and how many processes made it."""
        paths = self.results.glob("custom/phase1/*/model_progress.json")
        for path in sorted(paths, key=lambda path: path.parent.name.zfill(20), reverse=True):
            if path.parent.name.isdigit():
                with contextlib.suppress(OSError):  # it has been removed
                    progress = json.loads(path.read_text())
                    return progress["step"], progress["world_size"]
        return 0, 0

    def seconds_until(self, condition: Callable[[], bool], limit: float = 300) -> float:
        start = time.monotonic()
        while not condition():
            if time.monotonic() - start > limit:
                logs = "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("*.log")))
                raise AssertionError(f"not within {limit} s\n{logs}")
            time.sleep(0.1)
        return time.monotonic() - start

    def seconds_until_trained(self, processes: int) -> float:
        """The time until a new checkpoint that `processes` processes made together."""
        step = self.progress()[0]
        return self.seconds_until(lambda: self.progress()[0] > step and self.progress()[1] == processes)

    # --- events; `other` trains on ---

    def cut_link(self, name: str, other: str) -> dict[str, float]:
        """Cuts a node's link."""
        assert self.cluster.training_pids(name)
        self.cluster.set_link(name, "down")
        return self._wait_for_takeover(name, other)

    def replace_cut_node(self, name: str, other: str) -> dict[str, float]:
        """Cuts the link of the only node, and starts the other one."""
        assert self.cluster.training_pids(name)
        self.cluster.set_link(name, "down")
        self.start_node(other)
        return self._wait_for_takeover(name, other)

    def _wait_for_takeover(self, name: str, other: str) -> dict[str, float]:
        """The processes of the cut node must be dead before the other one goes on."""

        def is_dead() -> bool:
            has_gone_on = self.is_training_alone(other)  # before the processes are looked for
            is_dead = not self.cluster.training_pids(name)
            assert is_dead or not has_gone_on, "the cut node still trained when the other one went on"
            return is_dead

        dead = self.seconds_until(is_dead)
        return {"cut node's processes dead": dead, "the other trains": dead + self.seconds_until_trained(1)}

    def is_training_alone(self, name: str) -> bool:
        return "node 0 of 1" in self.cluster.log_file(name).read_text().rpartition("elastic: start")[2]

    def mend_link(self, name: str) -> dict[str, float]:
        self.cluster.set_link(name, "up")
        return {"both train": self.seconds_until_trained(2)}

    def kill_node(self, name: str) -> dict[str, float]:
        self.cluster.kill(name)
        return {"the other trains": self.seconds_until_trained(1)}

    def start_node_again(self, name: str) -> dict[str, float]:
        self.start_node(name)
        return {"both train": self.seconds_until_trained(2)}

    def preempt_node(self, name: str) -> dict[str, float]:
        """SIGTERM to a node, whose agent must end with a checkpoint."""
        agent, start = self.cluster.processes[name], time.monotonic()
        agent.terminate()
        code = agent.wait(300)
        assert code == 128 + signal.SIGTERM, code
        return {"the node has left": time.monotonic() - start, "the other trains": self.seconds_until_trained(1)}

    def finish(self) -> None:
        """Lets the steps that are left run at full speed."""
        self.slow.unlink()
        for name in ("h", *NODES):
            if self.cluster.processes[name].returncode is None:
                assert self.cluster.processes[name].wait(300) == 0, self.cluster.log_file(name).read_text()[-3000:]


def losses(results: Path) -> dict[int, float]:
    steps = reported(results / "dllogger_p1.json")
    return {step: entry["loss"] for step, entry in steps.items() if "loss" in entry}


def largest_difference(run: ElasticRun) -> float:
    """Between the losses of the run and those of one that was not interrupted, at all steps."""
    expected, found = run.uninterrupted_losses(), losses(run.results)
    assert set(found) == set(expected) == set(range(1, run.max_steps + 1))
    return max(abs(found[step] - expected[step]) for step in expected)


def main() -> None:
    if reason := missing_rights():
        sys.exit(f"error: {reason}")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    with Cluster(folder) as cluster:
        run = ElasticRun(cluster, max_steps=400)
        print(f"start: both train after {run.start():.1f} s", flush=True)
        for title, event in (
            ("first node's link cut", lambda: run.cut_link("a", "b")),  # b is the first one from here on
            ("and mended", lambda: run.mend_link("a")),
            ("second node's link cut", lambda: run.cut_link("a", "b")),
            ("and mended", lambda: run.mend_link("a")),
            ("first node killed", lambda: run.kill_node("b")),
            ("the node that is left cut, the other one started", lambda: run.replace_cut_node("a", "b")),
            ("and mended", lambda: run.mend_link("a")),
            ("first node preempted", lambda: run.preempt_node("b")),
            ("and started again", lambda: run.start_node_again("b")),
        ):
            figures = ", ".join(f"{name} after {seconds:.1f} s" for name, seconds in event().items())
            print(f"{title}: {figures}", flush=True)
        run.finish()
        print(f"largest difference of a loss: {largest_difference(run):.1e} over {run.max_steps} steps")


if __name__ == "__main__":
    main()
