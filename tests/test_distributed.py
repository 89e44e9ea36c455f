"""Where a process runs, with whom, and in what arithmetic."""

import json
import os
import socket
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

from utils import distributed
from utils.distributed import (
    Precision,
    Processes,
    default_num_threads,
    has_float16,
    peak_flops,
    processes_from_environment,
    select_device,
    select_precision,
    use_threads,
)
from utils.errors import UserError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


# --- processes --------------------------------------------------------------------------------------------------------


def test_one_process_is_its_own_sum_and_gathers_itself():
    alone = Processes()
    assert alone.is_main and alone.all_sum([2.0, 3]) == [2.0, 3] and alone.gather_json({"a": 1}) == [{"a": 1}]
    alone.barrier()


def test_without_torchrun_there_is_one_process(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with processes_from_environment(CPU) as processes:
        assert processes == Processes()
    assert not torch.distributed.is_initialized()


EXCHANGE = """
import json, pathlib, torch
from utils.distributed import processes_from_environment
with processes_from_environment(torch.device("cpu")) as processes:
    found = {
        "rank": processes.rank,
        "local": [processes.local_rank, processes.local_world_size],
        "is_main": processes.is_main,
        "sum": processes.all_sum([2.0**51 + processes.rank, 0.5, processes.rank]),
        "gathered": processes.gather_json({"of": processes.rank, "text": "\\u00e9" * 1000 * processes.rank}),
    }
    processes.barrier()
still_joined = torch.distributed.is_initialized()
threads = [comm.read_text().strip() for comm in pathlib.Path("/proc/self/task").glob("*/comm")]
print(json.dumps([found, still_joined, threads]))
"""


def test_processes_sum_exactly_and_gather_values_of_any_size():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", EXCHANGE],
            cwd=ROOT,
            env={
                **os.environ,
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    results = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], results
    (main, *main_left), (other, *other_left) = (json.loads(out) for out, _ in results)
    for still_joined, threads in (main_left, other_left):
        assert not still_joined
        assert not [name for name in threads if "gloo" in name], "such a thread can abort the interpreter's end"
    assert (main["rank"], main["local"], main["is_main"]) == (0, [0, 2], True)
    assert (other["rank"], other["local"], other["is_main"]) == (1, [1, 2], False)
    assert main["sum"] == other["sum"] == [2**52 + 1, 1.0, 1]
    assert main["gathered"] == [{"of": 0, "text": ""}, {"of": 1, "text": "\u00e9" * 1000}]
    assert other["gathered"] is None


# --- devices ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def test_auto_is_the_cpu_where_there_is_no_gpu(no_gpu):
    assert select_device("auto") == select_device("cpu") == CPU


def test_asking_for_a_gpu_where_there_is_none_is_an_error(no_gpu):
    with pytest.raises(UserError, match=r"--device cuda: no GPU .* use --device cpu"):
        select_device("cuda")


def test_each_process_has_a_gpu_of_its_own(two_gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert select_device("auto") == select_device("cuda") == torch.device("cuda", 1)
    assert select_device("cpu") == CPU


def test_more_processes_than_gpus_is_an_error_with_both_numbers(two_gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(UserError, match=r"4 processes .* 2 GPUs"):
        select_device("auto")


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("amp", "dtype", "pure", "expected", "autocast", "needs_scale"),
    [
        (False, "bfloat16", False, Precision(torch.float32), False, False),
        (True, "bfloat16", False, Precision(torch.bfloat16), True, False),
        (False, "bfloat16", True, Precision(torch.bfloat16, pure=True), False, False),
        (True, "float16", False, Precision(torch.float16), True, True),
        (True, "float16", True, Precision(torch.float16, pure=True), False, True),
    ],
)
def test_flags_decide_the_arithmetic(monkeypatch, amp, dtype, pure, expected, autocast, needs_scale):
    monkeypatch.setattr(distributed, "has_float16", lambda device: True)
    precision = select_precision(amp, dtype, pure, tf32=False, device=CPU)
    assert (precision, precision.autocast, precision.needs_loss_scale) == (expected, autocast, needs_scale)


def test_autocast_computes_in_the_narrow_type_and_pure_leaves_types_alone():
    x = torch.ones(2, 2)
    with Precision(torch.bfloat16).context(CPU):
        assert (x @ x).dtype == torch.bfloat16
    for precision in (Precision(), Precision(torch.bfloat16, pure=True)):
        with precision.context(CPU):
            assert (x @ x).dtype == torch.float32


def test_float16_on_a_cpu_without_it_is_an_error_that_says_what_to_use(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_fp16_supported", lambda: False, raising=False)
    assert not has_float16(CPU) and has_float16(GPU)
    with pytest.raises(UserError, match=r"float16.*use --amp-dtype bfloat16"):
        select_precision(True, "float16", False, False, CPU)


def test_bfloat16_on_a_gpu_without_it_is_an_error_that_says_what_to_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    with pytest.raises(UserError, match=r"bfloat16.*use --amp-dtype float16"):
        select_precision(True, "bfloat16", False, False, GPU)


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 12),
        ({"LOCAL_WORLD_SIZE": "4"}, 3),
        ({"LOCAL_WORLD_SIZE": "64"}, 1),
        ({"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, 3),
        ({"OMP_NUM_THREADS": "1"}, None),
        ({"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "none"}, None),
    ],
    ids=str,
)
def test_processes_share_the_cores_unless_the_user_said_how_many_threads(monkeypatch, environment, expected):
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(12)))
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    use_threads()
    assert asked == ([] if expected is None else [expected])
    if expected is not None:
        assert default_num_threads() == expected


# --- peaks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "half", "full"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA H100 NVL", 835.5e12, 60e12),
        ("NVIDIA H200", 989.4e12, 67e12),
        ("NVIDIA H200 NVL", 835.5e12, 60e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("Tesla V100-SXM2-32GB", 125e12, 15.7e12),
        ("NVIDIA GeForce GTX 1080", None, None),
    ],
)
def test_the_peak_is_that_of_the_card_in_the_runs_arithmetic(monkeypatch, name, half, full):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(GPU, Precision(torch.bfloat16)) == half
    assert peak_flops(GPU, Precision(torch.float16, pure=True)) == half
    assert peak_flops(GPU, Precision()) == full


def test_tf32_has_a_peak_of_its_own_where_it_is_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB")
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        select_precision(False, "bfloat16", False, tf32=True, device=GPU)
        assert peak_flops(GPU, Precision()) == 156e12
        select_precision(False, "bfloat16", False, tf32=False, device=GPU)
        assert peak_flops(GPU, Precision()) == 19.5e12
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_a_cpus_peak_is_unknown():
    assert peak_flops(CPU, Precision()) is None
