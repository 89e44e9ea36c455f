#!/usr/bin/env python3
"""An elastic run on two nodes, and Dask's scheduler and the driver on a host, in network namespaces
whose links are cut and mended.

    # All events, as root; prints how long each took.
    PYTHONPATH=$PWD python3 tests/support/network_namespaces.py FOLDER

The run is scripts/run_pretraining.sh with one CPU process per node. Its steps are slow while the
file FOLDER/slow exists, so that there is time for events.
"""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from conftest import ROOT, reported, write_shards
from processes import PATIENCE, exit_codes, start
from small_runs import RunInputs

LEASE_SECONDS, STEPS_PER_CHECKPOINT = 5, 2
GLOBAL_BATCH = 8
NODES = ("a", "b")
ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2", "h": "10.77.0.9"}
SCHEDULER = "tls://10.77.0.9:8786"

PROGRAM = """
import json, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
Path({arguments!r}).write_text(json.dumps(sys.argv[1:]))
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
    made = (
        made and ip("-n", name, "link", "add", "br0", "type", "bridge", check=False).returncode == 0
    )
    ip("netns", "del", name, check=False)
    return None if made else "needs the right to make network namespaces and bridges"


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


class Cluster:
    """Nodes a and b, and host h of scheduler and driver, each with a link to a switch."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.processes = {}
        self.namespaces = {name: f"bert{os.getpid()}{name}" for name in (*ADDRESSES, "switch")}
        tls = folder / "tls"
        subprocess.run(
            ["bash", ROOT / "scripts/create_certificates.sh", tls],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        self.environment = {
            **os.environ,
            "DASK_CONFIG": str(tls),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
        }

    def __enter__(self) -> "Cluster":
        try:
            for namespace in self.namespaces.values():
                ip("netns", "add", namespace)
                ip("-n", namespace, "link", "set", "lo", "up")
            switch = self.namespaces["switch"]
            ip("-n", switch, "link", "add", "br0", "type", "bridge")
            ip("-n", switch, "link", "set", "br0", "up")
            for name, address in ADDRESSES.items():
                place = self.namespaces[name]
                ip(
                    "-n",
                    switch,
                    "link",
                    "add",
                    f"to-{name}",
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "eth0",
                    "netns",
                    place,
                )
                ip("-n", switch, "link", "set", f"to-{name}", "master", "br0", "up")
                ip("-n", place, "addr", "add", f"{address}/24", "dev", "eth0")
                ip("-n", place, "link", "set", "eth0", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in ADDRESSES:
            self.kill(name)
        for namespace in self.namespaces.values():
            ip("netns", "del", namespace, check=False)

    def start(self, name: str, *words: object, place: str | None = None) -> None:
        """A process in the namespace `place`, or the one of its name, whose output is appended to
        `<name>.log`.
        """
        with self.log_file(name).open("a") as log:
            command = ["ip", "netns", "exec", self.namespaces[place or name], *map(str, words)]
            self.processes[name] = subprocess.Popen(
                command,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def log_file(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def set_link(self, name: str, state: str) -> None:
        ip("-n", self.namespaces["switch"], "link", "set", f"to-{name}", state)

    def set_link_between_nodes(self, state: str) -> None:
        """Cuts the nodes from each other, but not from the host: their packets go to a card that
        does not exist.
        """
        for name, other in (("a", "b"), ("b", "a")):
            neighbor = (
                "neigh",
                "replace" if state == "down" else "del",
                ADDRESSES[other],
                "dev",
                "eth0",
            )
            card = ("lladdr", "02:00:00:00:00:99", "nud", "permanent") if state == "down" else ()
            ip("-n", self.namespaces[name], *neighbor, *card)

    def pids(self, name: str) -> list[int]:
        """As `ip netns pids`, which would be started twenty times a second."""
        namespace = Path("/run/netns", self.namespaces[name])
        if not namespace.exists():
            return []
        number = namespace.stat().st_ino
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if (path / "ns/net").stat().st_ino == number:
                    found.append(int(path.name))
        return found

    def training_starts(self, name: str) -> list[float]:
        """When the processes of a node started that train, or have the arguments to; in seconds
        since the boot.
        """
        found = []
        for pid in self.pids(name):
            with contextlib.suppress(OSError, IndexError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if any(word.endswith(b"/run_pretraining.py") for word in words):
                    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                    found += [int(fields[19]) / os.sysconf("SC_CLK_TCK")] * (fields[0] not in "ZX")
        return found

    def kill(self, name: str) -> None:
        """Kills all processes of a node, as if it had lost its power."""
        while pids := self.pids(name):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self.processes.values():
                process.poll()
            time.sleep(0.02)


class ElasticRun:
    """A pre-training run on a cluster. A global batch is 2 x 2 sequences of each of two nodes."""

    def __init__(
        self, cluster: Cluster, max_steps: int, settle_seconds: float, step_seconds: float
    ):
        self.cluster, self.folder, self.max_steps = cluster, cluster.folder, max_steps
        self.settle_seconds = settle_seconds
        self.slow, self.results = self.folder / "slow", self.folder / "results"
        self.event_time = self.overlap = 0.0
        self.slow.touch()
        code = self.folder / "code" / "run_pretraining.py"
        code.parent.mkdir()
        self.arguments = self.folder / "arguments.json"
        values = {"root": ROOT, "slow": self.slow, "arguments": self.arguments}
        texts = {name: str(path) for name, path in values.items()}
        code.write_text(PROGRAM.format(seconds=step_seconds, **texts))
        inputs = RunInputs.make(self.folder)
        config_file = self.folder / "long.json"
        config = json.loads(inputs.config_without_dropout.read_text())
        config_file.write_text(json.dumps(config | {"max_position_embeddings": 128}))
        shards = write_shards(self.folder / "long", length=128, predictions=20)
        values = {1: 2, 2: 1e-3, 3: "fp32", 4: 0, 6: max_steps, 7: STEPS_PER_CHECKPOINT, 9: 2}
        values |= {17: shards, 19: code.parent, 21: config_file}
        self.command = [
            "bash",
            ROOT / "scripts/run_pretraining.sh",
            *(values.get(n, "") for n in range(1, 22)),
        ]
        self.environment = {
            "PHASE": "1",
            "VOCAB_FILE": str(inputs.vocab_file),
            "EXTRA_ARGS": "--show-config false --collective-timeout-minutes 0.25",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def start_scheduler(self) -> None:
        flags = ("--host", ADDRESSES["h"], "--port", 8786, "--no-dashboard")
        self.cluster.start(
            "scheduler", sys.executable, "-m", "distributed.cli.dask_scheduler", *flags, place="h"
        )

    def start_driver(self) -> None:
        settings = {"RESULTS_DIR": self.results, **self.environment}
        command = ("env", *(f"{name}={value}" for name, value in settings.items()), *self.command)
        flags = ("--min-nodes", 1, "--max-nodes", 2, "--lease-seconds", LEASE_SECONDS)
        program = (sys.executable, ROOT / "run_elastic.py", "--scheduler", SCHEDULER, *flags)
        self.cluster.start(
            "driver", *program, "--settle-seconds", self.settle_seconds, "--", *command, place="h"
        )

    def start_node(self, name: str) -> None:
        self.cluster.start(
            name, sys.executable, ROOT / "run_elastic.py", "node", "--scheduler", SCHEDULER
        )

    def start(self) -> float:
        """Starts the run, with a as the first node; returns the time until both train."""
        begin = time.monotonic()
        self.start_scheduler()
        self.start_driver()
        self.start_node("a")
        self.seconds_until(
            lambda: "10.77.0.1 joined" in self.cluster.log_file("driver").read_text()
        )
        self.start_node("b")
        self.seconds_until_trained(2)
        threading.Thread(target=self._watch, daemon=True).start()
        return time.monotonic() - begin

    def uninterrupted_losses(self) -> dict[int, float]:
        """The losses of the same run in one process, with the nodes' arguments."""
        results, log = self.folder / "uninterrupted", self.folder / "uninterrupted.log"
        words = json.loads(self.arguments.read_text())
        argv = [word.replace(str(self.results), str(results)) for word in words]
        for flag in {*argv} & {"--gradient-merge-steps", "--global-batch-size"}:
            place = argv.index(flag)
            argv[place : place + 2] = []
        argv += ["--global-batch-size", str(GLOBAL_BATCH)]
        assert exit_codes([start(argv, log)]) == [0], log.read_text()
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

    def seconds_until(self, condition: Callable[[], bool], limit: float = PATIENCE) -> float:
        start = time.monotonic()
        while not condition():
            if time.monotonic() - start > limit:
                logs = "\n".join(
                    path.read_text()[-3000:] for path in sorted(self.folder.glob("*.log"))
                )
                raise AssertionError(f"not within {limit} s\n{logs}")
            time.sleep(0.1)
        return time.monotonic() - start

    def seconds_until_trained(self, processes: int) -> float:
        """The time until a new checkpoint that `processes` processes made together."""
        step = self.progress()[0]
        return self.seconds_until(
            lambda: self.progress()[0] > step and self.progress()[1] == processes
        )

    # --- events ---

    def _watch(self) -> None:
        """Adds up how long processes from before and after the last event are alive at once."""
        before = time.monotonic()
        while self.slow.exists():
            starts = [start for name in NODES for start in self.cluster.training_starts(name)]
            now = time.monotonic()
            if starts and min(starts) < self.event_time < max(starts):
                self.overlap += now - before
            before = now
            time.sleep(0.1)

    def event(
        self, act: Callable[[], object], dead: str = "", processes: int = 0
    ) -> dict[str, float]:
        """Seconds from an event until the processes of the nodes `dead` are dead, and until
        `processes` processes have made a new checkpoint together.
        """
        assert all(map(self.cluster.training_starts, dead)), dead
        starts = self.starts()
        self.event_time = time.clock_gettime(time.CLOCK_BOOTTIME)
        begin = time.monotonic()
        figures = {}
        act()
        if dead:
            self.seconds_until(
                lambda: (
                    min(sum(map(self.cluster.training_starts, dead), [math.inf])) > self.event_time
                )
            )
            figures["dead"] = time.monotonic() - begin
        if processes:
            self.seconds_until(lambda: self.starts() > starts)
            self.seconds_until_trained(processes)
            figures["train"] = time.monotonic() - begin
        return figures

    def starts(self) -> int:
        return self.cluster.log_file("driver").read_text().count("elastic: start")

    def cut_link(self, name: str) -> dict[str, float]:
        return self.event(lambda: self.cluster.set_link(name, "down"), dead=name, processes=1)

    def mend_link(self, name: str) -> dict[str, float]:
        return self.event(lambda: self.cluster.set_link(name, "up"), processes=2)

    def preempt(self, name: str) -> None:
        """SIGTERM to a node, whose program must end with a checkpoint."""
        self.cluster.processes[name].terminate()
        assert self.cluster.processes[name].wait(PATIENCE) == 128 + signal.SIGTERM

    def finish(self) -> None:
        """Lets the steps that are left run at full speed."""
        self.slow.unlink()
        for name in ("driver", *NODES):
            if self.cluster.processes[name].poll() is None:
                assert self.cluster.processes[name].wait(PATIENCE) == 0, self.cluster.log_file(
                    name
                ).read_text()[-3000:]


def losses(results: Path) -> dict[int, float]:
    steps = reported(results / "dllogger_p1.json")
    return {step: entry["loss"] for step, entry in steps.items() if "loss" in entry}


def largest_difference(run: ElasticRun, expected: dict[int, float]) -> float:
    """Between the losses of the run and those of one that was not interrupted, at all steps; but if
    the link between the nodes is cut between an update and its log line, that line is missing.
    """
    found = losses(run.results)
    assert set(expected) == set(range(1, run.max_steps + 1))
    assert found.keys() <= expected.keys() and len(found) >= len(expected) - 1
    return max(abs(found[step] - expected[step]) for step in found)


def main() -> None:
    if reason := missing_rights():
        sys.exit(f"error: {reason}")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    with Cluster(folder) as cluster:
        run = ElasticRun(cluster, max_steps=600, settle_seconds=2, step_seconds=1)
        link, link_between, event = cluster.set_link, cluster.set_link_between_nodes, run.event
        print(f"start: both train after {run.start():.1f} s", flush=True)
        for title, happens in (
            ("first node's link cut", lambda: run.cut_link("a")),  # b is the first one from here on
            ("and restored", lambda: run.mend_link("a")),
            ("second node's link cut", lambda: run.cut_link("a")),
            ("and restored", lambda: run.mend_link("a")),
            ("first node killed", lambda: event(lambda: cluster.kill("b"), processes=1)),
            (
                "the node that is left cut, the other one started",
                lambda: event(lambda: link("a", "down") or run.start_node("b"), "a", 1),
            ),
            ("and restored", lambda: run.mend_link("a")),
            ("first node preempted", lambda: event(lambda: run.preempt("b"), "b", 1)),
            ("and started again", lambda: event(lambda: run.start_node("b"), processes=2)),
            ("host's link cut", lambda: event(lambda: link("h", "down"), "ab")),
            ("and restored", lambda: run.mend_link("h")),
            ("driver killed", lambda: event(cluster.processes["driver"].kill, "ab")),
            ("and started again", lambda: event(run.start_driver, processes=2)),
            ("scheduler and driver killed", lambda: event(lambda: cluster.kill("h"), "ab")),
            (
                "and started again",
                lambda: event(lambda: run.start_scheduler() or run.start_driver(), processes=2),
            ),
            (
                "only the link between the nodes cut",
                lambda: event(lambda: link_between("down"), "ab"),
            ),
            ("and restored", lambda: event(lambda: link_between("up"), processes=2)),
        ):
            run.overlap = 0.0
            figures = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in happens().items())
            print(f"{title}: {figures}, overlap {run.overlap:.1f} s", flush=True)
        run.finish()
        difference = largest_difference(run, run.uninterrupted_losses())
        print(f"largest difference of a loss: {difference:.1e} over {run.max_steps} steps")


if __name__ == "__main__":
    main()
