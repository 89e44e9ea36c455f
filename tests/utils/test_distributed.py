"""The processes of a run: sums, broadcasts, work on the main process, and errors of other
processes.
"""

import contextlib
import datetime
import os
import signal
import socket
import subprocess
import threading
import time
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import assert_refused
from processes import (
    PATIENCE,
    environments,
    exit_codes,
    free_port,
    launch,
    start_several,
    wait_until,
)
from rank_runs import run_distributed

import run_pretraining
from bert_recipe.checkpoint.writer import CheckpointWriter
from bert_recipe.training import evaluation_callback, workflow
from bert_recipe.training.checkpoint_callback import Checkpoints
from bert_recipe.training.trainer import Trainer
from bert_recipe.utils.distributed import (
    DistributedContext,
    init_distributed,
    translate_peer_failure,
)
from bert_recipe.utils.errors import RankFailure, UserError
from bert_recipe.utils.rank_environment import RankEnvironment
from bert_recipe.utils.rendezvous import join, listen

CPU = torch.device("cpu")


def test_without_torchrun_there_is_one_process(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with init_distributed(CPU) as alone:
        assert (
            alone == DistributedContext()
            and alone.is_main
            and not torch.distributed.is_initialized()
        )
        assert alone.all_reduce_sum([2.0, 3]) == [2.0, 3]
        assert alone.broadcast_json({"a": 1}) == alone.on_main(lambda: {"a": 1}) == {"a": 1}


def test_incomplete_environment_is_an_error_that_names_what_is_missing(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        UserError, match=r"WORLD_SIZE is 2 and RANK, MASTER_ADDR, MASTER_PORT .* torchrun"
    ):
        init_distributed(CPU).__enter__()


VALUES = [None, True, 1.5, -(2**60), "é" * 3000, [], {"nested": [{"a": None}]}, {}]


def exchange(distributed):
    rank = distributed.rank
    received = {
        "rank": rank,
        "local": [distributed.local_rank, distributed.local_world_size],
        "is_main": distributed.is_main,
        "sum": distributed.all_reduce_sum([2.0**51 + rank, 0.5, rank]),
        # Every rank gives another value; only that of the main process counts.
        "same group": distributed.new_group([rank]) is distributed.new_group([rank]),
        "broadcast": [
            distributed.broadcast_json(value if rank == 0 else [rank]) for value in VALUES
        ],
    }
    distributed.barrier()
    return received


def test_all_reduce_is_exact_and_broadcast_sends_values_of_any_size(tmp_path):
    main, other, last = run_distributed(exchange, tmp_path, count=3)
    assert (main["rank"], main["local"], main["is_main"]) == (0, [0, 3], True)
    assert (last["rank"], last["local"], last["is_main"]) == (2, [2, 3], False)
    for values in (main, other, last):
        assert values["sum"] == [3 * 2**51 + 3, 1.5, 3]
        assert values["broadcast"] == VALUES and values["same group"]


def call_on_main(distributed, folder):
    calls = []

    def find():
        calls.append(distributed.rank)
        return {"checkpoint": None, "steps": [1, 2]}

    def fail():
        calls.append(distributed.rank)
        raise UserError("the folder is empty")

    returned, errors = [distributed.on_main(find), distributed.on_main(lambda: None)], []
    for _ in range(2):  # after an error the ranks can still talk
        try:
            distributed.on_main(fail)
        except UserError as error:
            errors.append([type(error).__name__, str(error)])
    return {
        "returned": returned,
        "calls": calls,
        "errors": errors,
        "sum": distributed.all_reduce_sum([1]),
    }


def test_on_main_calls_once_and_returns_or_raises_on_all_ranks(tmp_path):
    main, other = run_distributed(call_on_main, tmp_path, str(tmp_path))
    assert main["returned"] == other["returned"] == [{"checkpoint": None, "steps": [1, 2]}, None]
    assert main["calls"] == [0, 0, 0] and other["calls"] == []
    assert main["errors"] == [["UserError", "the folder is empty"]] * 2
    assert [name for name, _ in other["errors"]] == ["PeerError"] * 2
    assert main["sum"] == other["sum"] == [2]


def kill_the_main_process(argv):
    with init_distributed(CPU) as distributed:
        if distributed.is_main:
            os.kill(os.getpid(), signal.SIGKILL)
        distributed.barrier()


def test_the_main_process_that_is_killed_ends_the_others_with_an_error_line(tmp_path):
    assert exit_codes(start_several([], tmp_path / "log", function=kill_the_main_process)) == [
        -signal.SIGKILL,
        2,
    ]
    (line,) = [
        line for line in (tmp_path / "log.1").read_text().splitlines() if line.startswith("error: ")
    ]
    assert "another rank failed" in line


def answer_late(argv):
    with init_distributed(CPU, collective_minutes=0.03) as distributed:
        time.sleep(6 * distributed.rank)
        distributed.barrier()


def test_a_collective_that_waits_for_too_long_ends_with_an_error_line(tmp_path):
    assert exit_codes(start_several([], tmp_path / "log", function=answer_late)) == [2, 2]
    assert "did not answer within --collective-timeout-minutes" in (tmp_path / "log.0").read_text()


@pytest.mark.parametrize(
    ("error", "is_of_a_peer"),
    [
        (RuntimeError("shapes differ"), False),
        (
            dist.DistBackendError(
                "NCCL error in: NCCLUtils.cpp, ncclSystemError: No space left on device"
            ),
            False,
        ),
        (
            dist.DistBackendError(
                "NCCL error in: NCCLUtils.cpp, ncclRemoteError: a remote process exited"
            ),
            True,
        ),
        (RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), True),
        (dist.DistNetworkError("Broken pipe"), True),
    ],
)
def test_only_errors_of_other_ranks_are_translated(error, is_of_a_peer):
    expected, message = (
        (UserError, "another rank failed") if is_of_a_peer else (type(error), str(error))
    )
    with pytest.raises(expected, match=message), translate_peer_failure():
        raise error


def test_on_gpus_a_failed_rank_ends_the_others_without_a_read_or_a_checkpoint():
    """NCCL's kernels wait for the failed rank, so whatever reads the device would hang. A stand-in
    for the GPU.
    """

    class Device:
        def __int__(self):
            raise AssertionError("a read of the device would hang")

    checkpoints = Checkpoints.__new__(Checkpoints)
    checkpoints.runtime = types.SimpleNamespace(device=torch.device("cuda"))
    checkpoints.writer = types.SimpleNamespace(finish=lambda: None)
    checkpoints.state = types.SimpleNamespace(device_step=Device())
    failure = pytest.raises(RankFailure, match="another rank failed")
    with failure, checkpoints.guard(), translate_peer_failure():
        raise RuntimeError("[gloo] Connection closed by peer")


class SlowDevice:
    """Stands in for an event of a GPU whose kernels wait for a rank that has died."""

    def record(self):
        Path("waits").touch()

    def query(self):
        return False


def wait_for_the_device(argv):
    with init_distributed(CPU) as distributed:
        torch.cuda.Event = SlowDevice
        if distributed.rank == 1:
            while not Path("waits").exists():
                time.sleep(0.01)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        distributed.wait_for_device(torch.device("cuda"))


def wait_for_all_ranks():
    """Stands in for torch.distributed.destroy_process_group with NCCL."""
    place = Path("destroyed")
    place.mkdir(exist_ok=True)
    (place / os.environ["RANK"]).touch()
    while len(list(place.iterdir())) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)


def fail_at(argv):
    phase, folder, *command = argv
    os.chdir(folder)
    dist.destroy_process_group = wait_for_all_ranks

    def fail(*_args, **_kwargs):
        if phase == "second Ctrl-C":
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(2 * PATIENCE)
        raise {"start": UserError, "checkpoint": OSError}.get(phase, RuntimeError)("no luck")

    owner, name = {
        "start": (workflow, "build_trainer"),
        "evaluation": (evaluation_callback, "evaluate"),
        "checkpoint": (Checkpoints, "save"),
    }.get(phase, (Trainer, "optimizer_step"))
    if os.environ["RANK"] == "1" and phase != "nowhere":
        setattr(owner, name, fail)
    return run_pretraining.main(command)


@pytest.mark.parametrize(
    ("phase", "codes", "message"),
    [
        ("nowhere", [0, 0], ""),
        ("start", [2, 2], "error: rank 1: no luck"),
        ("step", [2, 1], "RuntimeError: no luck"),
        ("checkpoint", [2, 1], "OSError: no luck"),
        ("evaluation", [2, 1], "RuntimeError: no luck"),
        ("second Ctrl-C", [2, 130], "interrupted"),
    ],
)
def test_a_failed_rank_ends_the_others_though_destroying_their_groups_waits_for_it(
    inputs, tmp_path, phase, codes, message
):
    flags = (
        "--max-steps",
        3,
        "--eval-dir",
        inputs.held_out,
        "--eval-steps",
        1,
        "--num-steps-per-checkpoint",
        2,
    )
    command = inputs.command(tmp_path / "output", *flags)
    processes = start_several([phase, tmp_path, *command], tmp_path / "log", function=fail_at)
    assert exit_codes(processes) == codes
    text = (tmp_path / "log.1").read_text()
    assert text.endswith(f"{message}\n") if message else "error" not in text.lower()
    assert "error: rank" not in (tmp_path / "log.0").read_text()


def test_a_rank_that_dies_while_the_others_wait_for_their_gpus_is_noticed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    processes = start_several([], tmp_path / "log", function=wait_for_the_device)
    assert exit_codes(processes) == [2, -signal.SIGKILL]
    assert "error: another rank failed" in (tmp_path / "log.0").read_text()


SECONDS = 4.0


def join_and_sum() -> None:
    with init_distributed(CPU, SECONDS / 60) as distributed:
        print(distributed.all_reduce_sum([1]))


def join_as(
    rank: int, port: int, log: Path, address: str = "127.0.0.1"
) -> subprocess.CompletedProcess:
    """One of two ranks, which waits for the other."""
    environment = environments(2)[rank] | {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    (code,) = exit_codes([launch(join_and_sum, (), environment, log, log)])
    return subprocess.CompletedProcess([], code, "", log.read_text())


@pytest.mark.parametrize(
    ("rank", "address", "words"),
    [
        (0, "127.0.0.1", ["rank 1 did not start within", "--distributed-timeout-minutes"]),
        (1, "127.0.0.1", ["127.0.0.1:PORT", "MASTER_ADDR"]),
        (1, "no-such-host.invalid", ["no-such-host.invalid:PORT", "MASTER_ADDR"]),
    ],
)
def test_a_rank_that_never_comes_is_named(tmp_path, rank, address, words):
    result = join_as(rank, port := free_port(), tmp_path / "log", address)
    assert_refused(result, *(word.replace("PORT", str(port)) for word in words))


def lose_the_other_rank(argv):
    with init_distributed(CPU) as distributed:
        print("joined", flush=True)
        if distributed.rank == 1:
            os._exit(0)
        distributed.join_minutes = SECONDS / 60
        CheckpointWriter(".", distributed, sharded=True)


def test_a_rank_that_ends_before_all_groups_are_made_is_waited_for_as_long_as_the_flag_says(
    tmp_path,
):
    """And not for the half hour that torch waits by default."""
    processes = start_several([], tmp_path / "log", function=lose_the_other_rank)
    assert exit_codes(processes) == [2, 0]
    lines = (tmp_path / "log.0").read_text().splitlines()
    assert "joined" in lines and not any("Traceback" in line for line in lines)
    assert lines[-1].startswith("error: another rank failed")


def come_late(argv):
    waits, comes = Path("waits"), Path("comes")
    new_group = dist.new_group

    def new_group_of_all(*args, **options):
        assert comes.exists(), "its short timeout would count while the main process is busy"
        return new_group(*args, **options)

    with init_distributed(CPU) as distributed:
        distributed.join_minutes = 0.5
        dist.new_group = new_group_of_all
        if distributed.is_main:
            wait_until(waits.exists)
            time.sleep(0.5)  # as it does for longer when it verifies a large checkpoint
            comes.touch()
        else:
            waits.touch()
        CheckpointWriter(".", distributed, sharded=True)


def test_a_group_waits_for_a_rank_as_long_as_a_collective_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert exit_codes(start_several([], tmp_path / "log", function=come_late)) == [0, 0]


@pytest.mark.parametrize(
    ("address", "local_world_size", "bound"),
    [
        ("127.0.0.1", 1, True),
        ("localhost", 1, True),
        ("127.0.0.1", 0, False),
        ("192.0.2.1", 0, False),
    ],
    ids=[
        "one machine",
        "one machine, by name",
        "a name that is local to each machine",
        "the address of a proxy",
    ],
)
def test_the_store_listens_where_the_ranks_need_it(monkeypatch, address, local_world_size, bound):
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", str(port := free_port()))
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
