"""scripts/docker: the mounts, user, environment and flags that `docker` gets."""

import itertools
import os
import re
import shlex

import pytest
from conftest import ROOT
from launch_scripts import Checkout

DOCKER = '#!/bin/sh\nprintf "%s\\n" "$@" >"$FAKE_CALLS"\n'


@pytest.fixture
def checkout(checkout):
    checkout.add_command("docker", DOCKER)
    return checkout


def run(checkout: Checkout, script: str, *arguments: str, **settings: str):
    return checkout.run(shlex.join(["bash", f"scripts/docker/{script}", *arguments]), **settings)


def call_of(checkout: Checkout, *words: str, **settings: str) -> list[str]:
    """The arguments that docker gets."""
    result = run(checkout, *words, **settings)
    assert result.returncode == 0, result.stderr
    return checkout.calls_file.read_text().splitlines()


def flag(call: list[str], name: str) -> list[str]:
    return [value for word, value in itertools.pairwise(call) if word == name]


@pytest.mark.parametrize(
    ("gpus", "flags"),
    [
        ("", ["all"]),
        ("all", ["all"]),
        ("none", []),
        ("0", ['"device=0"']),
        ("0,3", ['"device=0,3"']),
    ],
)
def test_gpus_and_network_are_arguments_2_and_3(checkout, gpus, flags):
    call = call_of(checkout, "launch.sh", "true", gpus, "bridge")
    assert flag(call, "--gpus") == flags
    assert flag(call, "--network") == ["bridge"]
    assert flag(call, "--user") == [f"{os.getuid()}:{os.getgid()}"]
    assert call[-4:] == ["bert", "bash", "-c", "true"]


@pytest.mark.parametrize("script", ["build.sh", "launch.sh"])
def test_help_does_not_reach_docker(checkout, script):
    for word in ("--help", "-h"):
        result = run(checkout, script, word)
        assert result.returncode == 0 and f"bash scripts/docker/{script} [" in result.stdout
        assert "#" not in result.stdout and not checkout.calls_file.exists()


def test_without_arguments_there_is_a_shell_on_the_hosts_network(checkout):
    settings = dict.fromkeys(
        ("NNODES", "NODE_RANK", "MASTER_ADDR", "PHASE", "EXTRA_ARGS", "NCCL_DEBUG"), "1"
    )
    paths = {"RESULTS_DIR": "out", "BERT_PREP_WORKING_DIR": "text"}
    others = {"IMAGE": "mine", "SLURM_STEP_NUM_NODES": "2", "OTHER": "1"} | paths
    call = call_of(checkout, "launch.sh", **settings, **others)
    folder = checkout.folder
    assert flag(call, "--network") == ["host"]
    assert call[-4:] == ["mine", "bash", "-c", "bash"]
    volumes = {"/workspace/bert": folder, "/results": folder / "out", "/data": folder / "text"}
    assert flag(call, "--volume") == [f"{path}:{inside}" for inside, path in volumes.items()]
    assert {name for name in flag(call, "--env") if "=" not in name} == settings.keys()
    paths = {
        "RESULTS_DIR=/results",
        "BERT_PREP_WORKING_DIR=/data",
        "TORCHINDUCTOR_CACHE_DIR=/results/.inductor_cache",
    }
    assert paths < set(flag(call, "--env")) and flag(call, "--workdir") == ["/workspace/bert"]


def test_all_variables_of_the_scripts_helps_are_passed_on(checkout):
    named: set[str] = set()
    for script in (ROOT / "scripts").glob("*.sh"):
        for line in script.read_text().partition("Environment:")[2].splitlines():
            if match := re.match(r"(?:  )?((?:[A-Z][A-Z0-9_]+(?:, | |$))+)", line):
                named |= set(re.findall(r"[A-Z][A-Z0-9_]{4,}", match[1]))
    assert len(named) > 10
    folders = {"RESULTS_DIR", "BERT_PREP_WORKING_DIR"}
    call = call_of(checkout, "launch.sh", **dict.fromkeys(named - folders, "1"))
    assert {word.partition("=")[0] for word in flag(call, "--env")} >= named


def test_build_takes_its_arguments_from_the_environment(checkout):
    settings = {
        "FROM_IMAGE_NAME": "nvcr.io/nvidia/pytorch:26.01-py3",
        "TRANSFORMERS": "transformers>=4.51",
    }
    call = call_of(checkout, "build.sh", "mine", **settings)
    assert flag(call, "--build-arg") == [f"{name}={value}" for name, value in settings.items()]
    assert flag(call, "--tag") == ["mine"]
    declared = re.findall(r"(?m)^ARG (\w+)=", (ROOT / "Dockerfile").read_text())
    assert {*settings} <= {*declared}
    assert flag(call_of(checkout, "build.sh"), "--build-arg") == []


def test_the_build_asserts_the_packages_and_pins_the_one_that_is_not_on_pypi():
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"(?m)^ARG DLLOGGER_COMMIT=[0-9a-f]{40}$", text)
    assert "github.com/NVIDIA/dllogger@${DLLOGGER_COMMIT}" in text
    for line in ("from apex.optimizers import FusedLAMB", "from dllogger import JSONStreamBackend"):
        assert line in text
    assert "transformers" not in re.sub("(?m)^#.*", "", text)
