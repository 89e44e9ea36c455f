"""The meeting of a run's processes at MASTER_ADDR and MASTER_PORT: the key-value store that they
share, and who has come.

Torch's own `env://` listens at all addresses of the machine also for MASTER_ADDR=127.0.0.1, counts
the ranks that came without naming the missing ones, and prints 40 lines where rank 0 is missing.
"""

import atexit
import contextlib
import datetime
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from bert_recipe.utils.errors import RankFailure, UserError
from bert_recipe.utils.rank_environment import RankEnvironment

JOIN_POLL_SECONDS = 0.05
JOIN_GRACE_SECONDS = 2


def join(place: RankEnvironment, minutes: float) -> "dist.Store":
    """Returns the store when all ranks have joined. Raises RankFailure, naming the missing ranks,
    after `minutes`.
    """
    end = time.monotonic() + 60 * minutes
    store = open_store(place, end)
    flag = f"--distributed-timeout-minutes {minutes:g}"
    missing = list(range(place.world_size))
    lost = None
    try:
        with no_stderr():  # torch prints frames if rank 0 ends
            store.set(f"joined/{place.rank}", "")
            while missing and time.monotonic() < end:
                missing = [rank for rank in missing if not store.check([f"joined/{rank}"])]
                time.sleep(JOIN_POLL_SECONDS)
        if missing and place.rank == 0:
            time.sleep(JOIN_GRACE_SECONDS)  # rank 0 may hold the store, which the others still read
    except RuntimeError as error:  # rank 0 gave up first
        lost = error
    if missing:
        raise RankFailure(
            f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))} did not "
            f"start within {flag}: see what that process or machine prints, and whether it reaches "
            f"{os.environ['MASTER_ADDR']}"
        ) from lost
    store.set_timeout(datetime.timedelta(minutes=minutes))  # not only what was left of it
    return store


def open_store(place: RankEnvironment, end: float) -> "dist.Store":
    """The key-value store at MASTER_ADDR and MASTER_PORT: torchrun's if available, else rank 0's.
    Raises RankFailure if it cannot be reached before the time `end`. Torch's own errors are several
    lines.
    """
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    listener = None
    is_of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if place.rank == 0 and not is_of_launcher:
        listener = open_listener(address, port, place)
    else:
        wait_for_server(address, port, end)
    seconds = max(end - time.monotonic(), 1)
    store = connect_store(address, port, place.world_size, listener, seconds)
    store.set_timeout(datetime.timedelta(seconds=seconds))
    if not is_of_launcher:
        return store
    # Torchrun's has the keys of earlier attempts. Nodes that come later count theirs from 0.
    return dist.PrefixStore(f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


def open_listener(address: str, port: int, place: RankEnvironment) -> int:
    """The file descriptor of a socket for the store."""
    try:
        return listen(address, port, place).detach()
    except OSError as error:
        raise UserError(
            f"MASTER_PORT {port} cannot be used ({error.strerror}): choose another port"
        ) from error


def wait_for_server(address: str, port: int, end: float) -> None:
    """Waits until something answers at the port. Raises RankFailure after the time `end`."""
    while True:
        try:
            socket.create_connection((address, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise RankFailure(
                    f"cannot reach the main process of this run at {address}:{port} "
                    f"({error.strerror or error}): check MASTER_ADDR and MASTER_PORT, and that "
                    "rank 0 was started there"
                ) from error
        time.sleep(JOIN_POLL_SECONDS)


def connect_store(
    address: str, port: int, world_size: int, listener: int | None, seconds: float
) -> "dist.TCPStore":
    """Torch's store, in a thread: another program at that port may never answer (torch waits for
    ever) or answer nonsense (torch prints frames). listener: of the process that has the store.
    """
    stores = []

    def connect() -> None:
        timeout = datetime.timedelta(seconds=seconds / 2)  # torch needs more for its stack frames
        is_server = listener is not None
        with contextlib.suppress(RuntimeError):
            stores.append(
                dist.TCPStore(
                    address,
                    port,
                    world_size,
                    is_server,
                    timeout,
                    wait_for_workers=False,
                    master_listen_fd=listener,
                )
            )

    thread = threading.Thread(target=connect, daemon=True)
    with no_stderr():
        thread.start()
        thread.join(seconds)
    if stores:
        return stores[0]
    if thread.is_alive():
        atexit.register(os._exit, 2)  # the interpreter's exit would abort in the thread
    raise RankFailure(
        f"another program than rank 0 of this run answers at {address}:{port}, or rank 0 has "
        "ended: check MASTER_ADDR, or choose another MASTER_PORT"
    )


def listen(address: str, port: int, place: RankEnvironment) -> socket.socket:
    """A socket for the store, at `address` only, if the other ranks reach this machine by it.
    Otherwise at all addresses: the name of a machine may be a loopback address on the machine
    itself, or that of a proxy.
    """
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    if not ipaddress.ip_address(where[0]).is_loopback or place.local_world_size == place.world_size:
        with contextlib.suppress(OSError):
            return socket.create_server(where[:2], family=family)
    dual = socket.has_dualstack_ipv6()
    return socket.create_server(
        ("", port), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual
    )


@contextlib.contextmanager
def no_stderr() -> Iterator[None]:
    """Discards what this process writes to standard error, by C++ as well."""
    saved = os.dup(2)
    with Path(os.devnull).open("w") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
