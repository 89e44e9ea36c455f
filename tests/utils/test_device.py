"""The device of a process, its CPU threads, and the peak rates of known GPUs."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from processes import environments

from bert_recipe.utils.device import peak_flops, select_device, set_cpu_affinity, set_num_threads
from bert_recipe.utils.errors import UserError, run_main

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
HALF_TYPES = (torch.bfloat16, torch.float16)


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-32GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_70", "sm_90a"])


def test_without_a_gpu_auto_is_the_cpu_and_cuda_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_device("auto") == select_device("cpu") == CPU
    with pytest.raises(UserError, match=r"--device cuda: no GPU .* use --device cpu"):
        select_device("cuda")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"LOCAL_RANK": "true"}, "LOCAL_RANK is 'true', not a number"),
        ({"LOCAL_WORLD_SIZE": "true"}, "LOCAL_WORLD_SIZE is 'true', not a number"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "2"}, "4 processes .* 2 GPUs"),
        (
            {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "", "LOCAL_SIZE": "4", "LOCAL_RANK": "2"},
            "4 processes .* 2 GPUs",
        ),
    ],
)
def test_a_place_that_has_no_gpu_is_refused(two_gpus, monkeypatch, changed, message):
    join_run(monkeypatch, 1, 2)
    for name, value in changed.items():  # LOCAL_SIZE is that of DeepSpeed's launcher
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    with pytest.raises(UserError, match=message):
        select_device("auto")


def join_run(monkeypatch, local_rank: int, local_world_size: int) -> None:
    for name, value in environments(local_world_size)[local_rank].items():
        monkeypatch.setenv(name, value)


def test_each_process_has_its_own_gpu(two_gpus, monkeypatch):
    join_run(monkeypatch, 1, 2)
    assert select_device("auto") == select_device("cuda") == torch.device("cuda", 1)
    assert select_device("cpu") == CPU


@pytest.mark.parametrize(
    ("capability", "builds", "works"),
    [
        (
            (7, 0),
            ["sm_75", "sm_80", "sm_90", "sm_120", "compute_120"],
            False,
        ),  # V100 and torch 2.11
        ((7, 0), ["sm_50", "sm_60", "sm_70"], True),
        ((8, 9), ["sm_75", "sm_80", "sm_86"], True),
        ((9, 0), ["sm_80"], False),
        ((9, 0), ["sm_80", "compute_80"], True),
        ((8, 0), ["sm_86"], False),
        ((10, 3), ["sm_100"], True),
    ],
)
def test_a_gpu_without_kernels_in_this_torch_is_refused(
    two_gpus, monkeypatch, capability, builds, works
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: builds)
    if works:
        assert select_device("auto") == GPU
    else:
        with pytest.raises(
            UserError, match=r"no kernels for the Tesla V100.*\d\): install .* --device cpu"
        ):
            select_device("auto")


@pytest.mark.parametrize(
    ("list_of_cores", "bound"),
    [
        ("0-3,8,10-11\n", {0, 1, 2, 3, 8}),
        ("5", {5}),
        ("0-1,64-65", {0, 1}),
        ("64-65", None),
        ("\n", None),
        (None, None),
    ],
)
def test_a_process_is_bound_to_the_available_cores_near_its_gpu(
    monkeypatch, tmp_path, list_of_cores, bound
):
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {GPU: gpu}.get)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(10)))
    calls = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _pid, cores: calls.append(cores))
    if list_of_cores is not None:
        (tmp_path / "0000:1b:00.0").mkdir()
        (tmp_path / "0000:1b:00.0" / "local_cpulist").write_text(list_of_cores)
    numbers = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10)
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    set_cpu_affinity(CPU, tmp_path)
    set_cpu_affinity(GPU, tmp_path)
    assert calls == ([] if bound is None else [bound])
    assert numbers == ([] if bound is None else [len(bound)])


@pytest.mark.parametrize(
    ("processes", "environment", "expected"),
    [
        (1, {}, 12),
        (4, {}, 3),
        (64, {}, 1),
        (4, {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, 3),
        (1, {"OMP_NUM_THREADS": "1"}, None),
        (4, {"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "none"}, None),
    ],
    ids=str,
)
def test_processes_share_the_cores_unless_the_user_sets_the_number_of_threads(
    monkeypatch, processes, environment, expected
):
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    join_run(monkeypatch, 0, processes)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(12)))
    numbers = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    set_num_threads()
    assert numbers == ([] if expected is None else [expected])


@pytest.mark.parametrize("given", [None, "5"])
def test_waiting_threads_sleep_soon_also_without_the_launch_scripts(monkeypatch, given):
    monkeypatch.setenv("GOMP_SPINCOUNT", given or "")
    if given is None:
        monkeypatch.delenv("GOMP_SPINCOUNT")
    with pytest.raises(SystemExit):
        run_main(lambda: 0)
    assert os.environ["GOMP_SPINCOUNT"] == (given or "10000")


@pytest.mark.parametrize(
    ("name", "half", "tf32", "full"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12, 494.7e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 378e12, 51e12),
        ("NVIDIA H100 NVL", 835.5e12, 417.5e12, 60e12),
        ("NVIDIA H200", 989.4e12, 494.7e12, 67e12),
        ("NVIDIA H200 NVL", 835.5e12, 417.5e12, 60e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 156e12, 19.5e12),
        ("NVIDIA L40S", 362e12, 183e12, 91.6e12),
        ("Tesla V100-SXM2-32GB", 125e12, 15.7e12, 15.7e12),
        ("NVIDIA GeForce GTX 1080", None, None, None),
    ],
)
def test_peak_is_that_of_the_gpu_in_the_type_of_the_run(monkeypatch, name, half, tf32, full):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert {peak_flops(GPU, dtype) for dtype in HALF_TYPES} == {half} and peak_flops(
        CPU, torch.float32
    ) is None
    for allowed, peak in ((True, tf32), (False, full)):  # the latter is the default
        torch.backends.cuda.matmul.allow_tf32 = allowed
        assert peak_flops(GPU, torch.float32) == peak


FRAGMENTS = """
from pathlib import Path
import numpy as np
from bert_recipe.utils.device import FreedMemory, keep_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) // 256  # MiB

keep_freed_memory()
memory = FreedMemory()
memory.bound()
before = resident()
blocks = [np.ones(1 << 17) for _ in range(400)]
grown = resident()
blocks = blocks[::16]  # the rest is free, but in pieces between these
memory.bound()
left = resident()
blocks = [np.ones(1 << 17) for _ in range(400)]
memory.bound()
del blocks
memory.bound()
print(grown - before, left - before, resident() - before)
"""


def test_freed_memory_is_returned_when_it_has_grown_since_the_last_return():
    done = subprocess.run(
        [sys.executable, "-c", FRAGMENTS], capture_output=True, text=True, check=True, cwd=ROOT
    )
    grown, left, kept = map(int, done.stdout.split())
    assert grown >= 380
    assert left <= 60  # 25 blocks
    assert kept >= 380  # what updates need again and again stays
