"""Launch scripts on this machine as nodes that come and go, and their store in this process."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from conftest import ROOT, log_entries
from processes import PATIENCE, wait_until
from small_runs import RunInputs, losses

STEPS = 12
STEPS_PER_CHECKPOINT = 2
# run_pretraining.py, which waits at gates.
PROGRAM = f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
import run_pretraining
from bert_recipe.training.trainer import Trainer
from bert_recipe.utils.errors import run_main

compute_gradients = Trainer.training_step
def wait_and_compute_gradients(trainer, *args):
    gate = Path(os.environ["GATES"], str(trainer.state.step))
    if gate.with_suffix(".closed").exists():
        gate.with_suffix(f".{{os.environ['GROUP_RANK']}}").touch()
        while gate.with_suffix(".closed").exists() and trainer.stop.received is None:
            time.sleep(0.02)
    return compute_gradients(trainer, *args)
Trainer.training_step = wait_and_compute_gradients
run_main(lambda: run_pretraining.main(sys.argv[1:]))
"""


def descendants(pid: int) -> list[int]:
    pids = [pid]
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in path.read_text().split():
                pids += descendants(int(child))
    return pids


class ElasticRun:
    """A run of scripts/run_pretraining.sh on one or two nodes. Training waits before the update of
    a step (from 0) for which there is a gate, until a signal comes.
    """

    def __init__(self, folder: Path, inputs: RunInputs):
        self.folder, self.inputs = folder, inputs
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        (folder / "gates").mkdir(parents=True)
        (folder / "run_pretraining.py").write_text(PROGRAM)

    def start(self, name: str) -> subprocess.Popen:
        """Starts a node, which prints to the file `name`."""
        flags = "--max-seq-length 32 --max-predictions-per-seq 5 --enable-cpu-affinity false"
        settings = {
            "NNODES": "1:2",
            "RDZV_ENDPOINT": f"localhost:{self.store.port}",
            "PHASE": "1",
            "RESULTS_DIR": str(self.folder),
            "BERT_MODEL": "custom",
            "VOCAB_FILE": str(self.inputs.vocab_file),
            "EXTRA_ARGS": flags,
            "GATES": str(self.folder / "gates"),
            "OMP_NUM_THREADS": "1",
        }
        shards, config = self.inputs.shards, self.inputs.config_without_dropout
        words = [
            "4",
            "1e-3",
            "fp32",
            "0",
            "0.1",
            STEPS,
            STEPS_PER_CHECKPOINT,
            "",
            "2",
            "1",
            *[""] * 6,
        ]
        words += [shards, shards, self.folder, "", config]
        with (self.folder / name).open("a") as output:
            return subprocess.Popen(
                ["bash", ROOT / "scripts/run_pretraining.sh", *map(str, words)],
                env=os.environ | settings,
                stdout=output,
                stderr=output,
            )

    def close_gate(self, step: int) -> None:
        (self.folder / "gates" / f"{step}.closed").touch()

    def open_gate(self, step: int) -> None:
        (self.folder / "gates" / f"{step}.closed").unlink()

    def waiting_at(self, step: int) -> int:
        """How many nodes have come to the gate so far."""
        return len(list((self.folder / "gates").glob(f"{step}.[0-9]")))

    def losses(self) -> dict[int, set[float]]:
        """By step. A step that was made twice has two losses, which may differ in the last bit."""
        losses_of_step: dict[int, set[float]] = {}
        for entry in log_entries(self.folder / "dllogger_p1.json"):
            if "loss" in entry["data"]:
                losses_of_step.setdefault(entry["step"][-1], set()).add(entry["data"]["loss"])
        return losses_of_step


def kill(node: subprocess.Popen) -> None:
    """Kills the script and all processes that it has started, as the end of a machine does."""
    for pid in descendants(node.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    node.wait()


def lose_and_restart(
    run: ElasticRun, lost: str, lose: Callable[[subprocess.Popen], None]
) -> list[int]:
    """Starts two nodes, loses the one named `lost`, and starts it again when the other has gone on.
    Returns the exit codes of both when they have made the last steps together.
    """
    for step in (3, 6, 9):
        run.close_gate(step)
    nodes = {name: run.start(name) for name in ("first", "second")}
    wait_until(lambda: run.waiting_at(3) == 2)
    lose(nodes[lost])
    run.open_gate(3)
    wait_until(lambda: run.waiting_at(6) == 1)
    nodes[lost].wait(PATIENCE)
    nodes[lost] = run.start(lost)
    wait_until(lambda: run.waiting_at(9) == 2)  # torchrun's signal opens gate 6
    run.open_gate(9)
    return [node.wait(PATIENCE) for node in nodes.values()]


def command_alone(inputs: RunInputs, folder: Path) -> list[str]:
    """run_pretraining.py's arguments for the same run in one process."""
    flags = ("--max-steps", STEPS, "--log-freq", 1, "--seed", 1, "--learning-rate", 1e-3)
    return inputs.command(folder, "--global-batch-size", 16, *flags, dropout=False)


def assert_losses_as_in(folder: Path, run: ElasticRun) -> None:
    expected = losses(folder)
    assert sorted(run.losses()) == sorted(expected) == list(range(1, STEPS + 1))
    for step, logged in run.losses().items():
        assert list(logged) == pytest.approx([expected[step]] * len(logged), rel=1e-6)
