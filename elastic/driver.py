"""The driver: connections to the nodes that Dask's scheduler knows, and time, for elastic.membership."""

import asyncio
import contextlib
import signal
import time

from distributed import Security
from distributed.comm import get_address_host
from distributed.core import send_recv

from elastic.connection import CONNECT_SECONDS, RETRY_SECONDS, connect_to_scheduler, log, open_connection
from elastic.membership import MARGIN_SECONDS, ElasticConfig, Membership

POLL_SECONDS = 0.1


class Driver:
    def __init__(self, scheduler: str, security: Security, config: ElasticConfig, command: list[str]):
        self.scheduler, self.security, self.config = scheduler, security, config
        self.settings = {"command": command, "max_nodes": config.max_nodes, "lease_seconds": config.lease_seconds}
        self.membership = Membership(config, log, time.monotonic())
        self.sessions: dict[str, asyncio.Task] = {}  # by the address of the worker

    async def run(self) -> int:
        """Returns the exit code of the run. SIGTERM and SIGINT end it with a checkpoint."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.membership.stop)
        watching, end = asyncio.create_task(self._watch_scheduler()), float("inf")
        while self.membership.exit_code is None or (self.membership.nodes and time.monotonic() < end):
            if watching.done():
                watching.result()  # its error
            self.membership.tick(time.monotonic())
            if self.membership.exit_code is not None:
                end = min(end, time.monotonic() + self.config.lease_seconds)
            await asyncio.sleep(POLL_SECONDS)
        return self.membership.exit_code

    async def _watch_scheduler(self) -> None:
        """Keeps a session with each worker."""
        while True:
            comm = await connect_to_scheduler(self.scheduler, self.security)
            with contextlib.suppress(OSError):
                while True:
                    found = await asyncio.wait_for(send_recv(comm, op="identity"), CONNECT_SECONDS)
                    for address in found["workers"].keys() - self.sessions.keys():
                        self.sessions[address] = asyncio.create_task(self._follow(address))
                    await asyncio.sleep(RETRY_SECONDS)

    async def _follow(self, address: str) -> None:
        """Tells a worker its orders and hears its state, until it ends or is silent for as long as a lost one."""
        limit, comm = self.config.lease_seconds + MARGIN_SECONDS, None
        try:
            comm = await open_connection(address, self.security)
            heard = await asyncio.wait_for(send_recv(comm, op="elastic", **self.settings), limit)
            if heard is None:  # it follows another driver
                return
            self.membership.join(address, get_address_host(address), time.monotonic())
            while node := self.membership.nodes.get(address):
                await comm.write({"heard": heard, **node.order})
                state = await asyncio.wait_for(comm.read(), limit)
                heard = state.pop("now")
                self.membership.hear(address, time.monotonic(), **state)
                await asyncio.sleep(POLL_SECONDS)
        except OSError:  # the connection
            pass
        except Exception as error:  # must not end the others
            log(f"{address} fails: {error!r}")
        finally:
            self.membership.disconnect(address)
            del self.sessions[address]
            if comm is not None:
                comm.abort()
