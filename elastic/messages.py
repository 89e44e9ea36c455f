"""What agents and the coordinator say: JSON messages over TCP, one per line, and lines for the user."""

import json
import socket
import time
from typing import Any

MAX_BYTES = 1 << 16  # of a message

# From an agent: join, beat, exited, leave. From the coordinator: welcome, beat, start, stop, end.
Message = dict[str, Any]


def log(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] elastic: {text}", flush=True)


class MessageSocket:
    """A connection, without blocking, that is closed by any error, by the other end, or by what is not a message."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self.connection, self.buffer, self.is_closed = connection, b"", False

    def fileno(self) -> int:
        return self.connection.fileno()

    def local_address(self) -> str:
        """This machine's address on the connection."""
        return self.connection.getsockname()[0]

    def send(self, type: str, **values: Any) -> None:
        try:
            self.connection.sendall(json.dumps({"type": type, **values}).encode() + b"\n")
        except OSError:  # also if the other end has not read for so long that buffers are full
            self.is_closed = True

    def receive(self) -> list[Message]:
        """The messages that have arrived."""
        try:
            while block := self.connection.recv(MAX_BYTES):
                self.buffer += block
                if len(self.buffer) > 16 * MAX_BYTES:
                    break
            self.is_closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True
        *lines, self.buffer = self.buffer.split(b"\n")
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
                message["type"]
            except (ValueError, TypeError, KeyError, RecursionError):
                self.is_closed = True
                break
            messages.append(message)
        if len(self.buffer) > MAX_BYTES:
            self.is_closed = True
        return messages

    def close(self) -> None:
        self.is_closed = True
        self.connection.close()
