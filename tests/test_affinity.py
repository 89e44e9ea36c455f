"""The CPU cores that a process is bound to."""

import os
from types import SimpleNamespace

import pytest
import torch

from utils import affinity
from utils.affinity import cores_near_gpu, parse_cpu_list, set_cpu_affinity, share_of


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}),
        ("5", {5}),
        ("\n", set()),
        ("0-1,64-65", {0, 1, 64, 65}),
    ],
)
def test_core_lists_of_the_kernel_are_parsed(text, cores):
    assert parse_cpu_list(text) == cores


@pytest.mark.parametrize(("cores", "count"), [(8, 1), (8, 4), (7, 3), (64, 8)])
def test_shares_are_equal_and_disjoint(cores, count):
    shares = [share_of(set(range(100, 100 + cores)), index, count) for index in range(count)]
    assert {len(share) for share in shares} == {cores // count}
    assert len(set().union(*shares)) == cores // count * count


def test_processes_share_all_cores_if_there_are_fewer_cores_than_processes():
    assert [share_of({3, 4}, index, 5) for index in range(5)] == [{3, 4}] * 5


def test_process_on_a_cpu_is_not_bound():
    before = os.sched_getaffinity(0)
    assert set_cpu_affinity(torch.device("cpu"), 0, 1) == before == os.sched_getaffinity(0)


@pytest.fixture
def four_gpus(monkeypatch, tmp_path):
    """A machine with 16 cores and 4 GPUs, two per NUMA node. The value is the list of core sets that were bound."""
    for bus, cores in enumerate(["0-3,8-11", "0-3,8-11", "4-7,12-15", "4-7,12-15"], 1):
        folder = tmp_path / f"0000:{bus:02x}:00.0"
        folder.mkdir()
        (folder / "local_cpulist").write_text(cores + "\n")
    bound = []
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(pci_domain_id=0, pci_bus_id=device.index + 1, pci_device_id=0),
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _pid, cores: bound.append(cores))
    monkeypatch.setattr(affinity.cores_near_gpu, "__defaults__", (tmp_path,))
    return bound


def test_processes_of_one_numa_node_share_its_cores(four_gpus):
    for rank in range(4):
        set_cpu_affinity(torch.device("cuda", rank), rank, 4)
    assert four_gpus == [{0, 1, 2, 3}, {8, 9, 10, 11}, {4, 5, 6, 7}, {12, 13, 14, 15}]


def test_single_process_gets_all_cores_of_its_numa_node(four_gpus):
    assert set_cpu_affinity(torch.device("cuda", 0), 0, 1) == {0, 1, 2, 3, 8, 9, 10, 11}


def test_process_is_not_bound_if_the_system_does_not_tell_the_cores(four_gpus, tmp_path):
    (tmp_path / "0000:01:00.0" / "local_cpulist").unlink()
    assert cores_near_gpu(torch.device("cuda", 0)) == set()
    assert set_cpu_affinity(torch.device("cuda", 0), 0, 4) == set(range(16))
    assert four_gpus == []
