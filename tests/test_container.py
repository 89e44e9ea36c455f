"""scripts/docker: the mounts, user, environment and flags that `docker` gets."""

import itertools
import os
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

DOCKER = '#!/bin/sh\nprintf "%s\\n" "$@" >"$FAKE_CALL"\n'


class Machine:
    """A folder with a `docker` that records its arguments, and paths for results and data."""

    def __init__(self, folder: Path):
        self.results, self.data, self.calls_file = folder / "results", folder / "data", folder / "call"
        docker = folder / "bin" / "docker"
        docker.parent.mkdir()
        docker.write_text(DOCKER)
        docker.chmod(0o755)
        folders = {"RESULTS_DIR": self.results, "BERT_PREP_WORKING_DIR": self.data, "FAKE_CALL": self.calls_file}
        self.environment = {"PATH": f"{docker.parent}:{os.environ['PATH']}", **{k: str(v) for k, v in folders.items()}}

    def run(self, script: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess:
        command, environment = ["bash", ROOT / "scripts" / "docker" / script, *arguments], self.environment | settings
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)

    def call(self) -> list[str]:
        """The arguments of docker."""
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []

    def flag(self, name: str) -> list[str]:
        return [value for word, value in itertools.pairwise(self.call()) if word == name]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("gpus", "flag"), [("", ["all"]), ("all", ["all"]), ("none", []), ("0", ['"device=0"']), ("0,3", ['"device=0,3"'])]
)
def test_gpus_and_network_are_arguments_2_and_3(machine, gpus, flag):
    assert machine.run("launch.sh", "true", gpus, "bridge").returncode == 0
    assert machine.flag("--gpus") == flag
    assert machine.flag("--network") == ["bridge"]
    assert machine.flag("--user") == [f"{os.getuid()}:{os.getgid()}"]
    assert machine.call()[-4:] == ["bert", "bash", "-c", "true"]


def test_without_arguments_there_is_a_shell_on_the_hosts_network(machine):
    settings = dict.fromkeys(("NNODES", "NODE_RANK", "MASTER_ADDR", "PHASE", "EXTRA_ARGS", "NCCL_DEBUG"), "1")
    assert machine.run("launch.sh", IMAGE="mine", SLURM_STEP_NUM_NODES="2", OTHER="1", **settings).returncode == 0
    assert machine.flag("--network") == ["host"]
    assert machine.call()[-4:] == ["mine", "bash", "-c", "bash"]
    volumes = {"/workspace/bert": ROOT, "/results": machine.results, "/data": machine.data}
    assert machine.flag("--volume") == [f"{path}:{inside}" for inside, path in volumes.items()]
    assert {name for name in machine.flag("--env") if "=" not in name} == settings.keys()
    paths = {"RESULTS_DIR=/results", "BERT_PREP_WORKING_DIR=/data", "TORCHINDUCTOR_CACHE_DIR=/results/.inductor_cache"}
    assert paths < set(machine.flag("--env")) and machine.flag("--workdir") == ["/workspace/bert"]


@pytest.mark.parametrize(
    ("arguments", "settings", "word"),
    [
        (["bash", "scripts/run_squad.sh"], {}, "put the command in quotes"),
        (["bash", "scripts/run_squad.sh", "init", "2"], {}, "put the command in quotes"),
        ([], {"RESULTS_DIR": __file__}, "RESULTS_DIR"),
        ([], {"SLURM_STEP_NUM_NODES": "2"}, "NNODES, NODE_RANK and MASTER_ADDR"),
    ],
)
def test_what_cannot_work_is_refused(machine, arguments, settings, word):
    result = machine.run("launch.sh", *arguments, **settings)
    assert (result.returncode, machine.call()) == (2, [])
    assert result.stderr.startswith("error: ") and word in result.stderr and result.stderr.count("\n") == 1


def test_build_takes_the_base_image_from_the_environment(machine):
    image = "nvcr.io/nvidia/pytorch:26.01-py3"
    assert machine.run("build.sh", "mine", FROM_IMAGE_NAME=image).returncode == 0
    assert machine.flag("--build-arg") == [f"FROM_IMAGE_NAME={image}"]
    assert machine.flag("--tag") == ["mine"]
