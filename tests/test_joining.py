"""Processes of a run that cannot find each other, or lose the program that started them."""

import contextlib
import datetime
import os
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import assert_refused
from processes import environments, exit_codes, free_port, launch, start_several

from checkpoint.writer import CheckpointWriter
from utils.distributed import init_distributed, join, listen
from utils.rank_environment import RankEnvironment

SECONDS = 4.0


def join_and_sum() -> None:
    with init_distributed(torch.device("cpu"), SECONDS / 60) as distributed:
        print(distributed.all_reduce_sum([1]))


def join_as(rank: int, port: int, log: Path, address: str = "127.0.0.1") -> subprocess.CompletedProcess:
    """One of two ranks, which waits for the other."""
    environment = environments(2)[rank] | {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    (code,) = exit_codes([launch(join_and_sum, (), environment, log, log)])
    return subprocess.CompletedProcess([], code, "", log.read_text())


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.mark.parametrize(
    ("rank", "address", "words"),
    [
        (0, "127.0.0.1", ["rank 1 did not start within", "--distributed-timeout-minutes"]),
        (1, "127.0.0.1", ["127.0.0.1:PORT", "MASTER_ADDR"]),
        (1, "no-such-host.invalid", ["no-such-host.invalid:PORT", "MASTER_ADDR"]),
    ],
)
def test_a_rank_that_never_comes_is_named(port, tmp_path, rank, address, words):
    result = join_as(rank, port, tmp_path / "log", address)
    assert_refused(result, *(word.replace("PORT", str(port)) for word in words))


def lose_the_other_rank(argv):
    with init_distributed(torch.device("cpu"), float(argv[0])) as distributed:
        print("joined", flush=True)
        if distributed.rank == 1:
            os._exit(0)
        CheckpointWriter(".", distributed, sharded=True)


def test_a_rank_that_ends_before_all_groups_are_made_is_waited_for_as_long_as_the_flag_says(tmp_path):
    """And not for the half hour that torch waits by default."""
    processes = start_several([6 / 60], tmp_path / "log", function=lose_the_other_rank)
    assert exit_codes(processes) == [2, 0]
    lines = (tmp_path / "log.0").read_text().splitlines()
    assert "joined" in lines and not any("Traceback" in line for line in lines)
    assert lines[-1].startswith("error: another rank failed")


def come_late(argv):
    with init_distributed(torch.device("cpu"), float(argv[0])) as distributed:
        if distributed.is_main:
            time.sleep(2 * 60 * float(argv[0]))  # as it does when it verifies a large checkpoint
        CheckpointWriter(".", distributed, sharded=True)


def test_a_group_waits_for_a_rank_as_long_as_a_collective_does(tmp_path):
    assert exit_codes(start_several([1 / 60], tmp_path / "log", function=come_late)) == [0, 0]


@pytest.mark.parametrize(
    ("address", "local_world_size", "bound"),
    [("127.0.0.1", 1, True), ("localhost", 1, True), ("127.0.0.1", 0, False), ("192.0.2.1", 0, False)],
    ids=["one machine", "one machine, by name", "a name that is local to each machine", "the address of a proxy"],
)
def test_the_store_listens_where_the_ranks_need_it(monkeypatch, port, address, local_world_size, bound):
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", str(port))
    place = RankEnvironment(0, 1, 0, local_world_size)
    with listen(address, port, place) as listener:
        assert (listener.getsockname()[0] in ("127.0.0.1", "::1")) == bound
    if bound:
        assert join(place, 0.5).timeout == datetime.timedelta(seconds=30)


def test_a_port_that_another_program_has(tmp_path):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        result = join_as(0, port, tmp_path / "log")
    assert_refused(result, f"MASTER_PORT {port} cannot be used", "choose another port")


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_another_program_at_the_port_of_the_main_process(tmp_path, answer):
    connections = []

    def answer_all() -> None:
        """Accepts connections, and closes those that it has answered."""
        with contextlib.suppress(OSError):
            while True:
                connections.append(server.accept()[0])
                if answer:
                    connections.pop().sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer_all, daemon=True).start()
        port = server.getsockname()[1]
        result = join_as(1, port, tmp_path / "log")
    assert_refused(result, f"answers at 127.0.0.1:{port}", "MASTER_PORT")
