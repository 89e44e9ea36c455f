"""Connections of Dask: mutual TLS, unless the address begins with tcp://."""

import asyncio
import logging
import time

from distributed import Security
from distributed.comm import Comm, connect
from distributed.comm.core import FatalCommClosedError

from utils.errors import UserError

CONNECT_SECONDS = 3.0
RETRY_SECONDS = 1.0
PATIENCE_SECONDS = 1800.0  # without a scheduler

logging.getLogger("distributed").setLevel(logging.ERROR)  # lost connections are expected
logging.getLogger("distributed.worker").setLevel(logging.CRITICAL)  # its errors are raised as well


def log(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] elastic: {text}", flush=True)


def read_security(scheduler: str) -> Security:
    """The certificates that Dask's configuration names. Raises UserError if they are needed and missing."""
    security, reason = Security(require_encryption=scheduler.startswith("tls://")), "Dask's configuration has none"
    try:
        contexts = [security.get_connection_args(role)["ssl_context"] for role in ("client", "worker")]
        if None not in contexts or not security.require_encryption:
            return security
    except OSError as error:
        reason = str(error)
    hint = "create them with scripts/create_certificates.sh FOLDER, and set DASK_CONFIG=FOLDER on all hosts"
    raise UserError(f"{scheduler} needs certificates ({reason}): {hint}")


async def open_connection(address: str, security: Security) -> Comm:
    return await connect(address, CONNECT_SECONDS, **security.get_connection_args("client"))


async def connect_to_scheduler(address: str, security: Security) -> Comm:
    """Raises UserError if the connection is refused, or not there after PATIENCE_SECONDS."""
    log(f"connecting to {address}")
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return await open_connection(address, security)
        except FatalCommClosedError as error:
            raise UserError(f"{address} has no TLS or another certificate: check DASK_CONFIG there and here") from error
        except OSError as error:
            if time.monotonic() > end:
                raise UserError(f"cannot reach {address}: start `dask scheduler`, or check --scheduler") from error
        await asyncio.sleep(RETRY_SECONDS)
