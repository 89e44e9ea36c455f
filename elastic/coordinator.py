"""The coordinator's server: connections and time for elastic.membership."""

import selectors
import signal
import socket
import time

from elastic.membership import ElasticConfig, Membership
from elastic.messages import Message, MessageSocket, log
from utils.errors import UserError

POLL_SECONDS = 0.2


def open_server(host: str, port: int) -> socket.socket:
    try:
        server = socket.create_server((host, port))
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port} ({error.strerror}): choose another --port") from error
    server.setblocking(False)
    return server


class Coordinator:
    """Serves agents until the run has ended. SIGTERM and SIGINT end it with a checkpoint."""

    def __init__(self, server: socket.socket, config: ElasticConfig):
        self.server, self.config = server, config
        self.membership = Membership(config, log)
        self.names: dict[MessageSocket, str] = {}  # of the agents that have joined
        self.selector = selectors.DefaultSelector()
        self.selector.register(server, selectors.EVENT_READ)

    def serve(self) -> int:
        """Returns the exit code of the run."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.membership.stop())
        ended: float | None = None
        while ended is None or (self.names and time.monotonic() < ended + self.config.lease_seconds):
            for key, _ in self.selector.select(POLL_SECONDS):
                if key.fileobj is self.server:
                    self._accept()
                else:
                    self._receive(key.fileobj)
            self.membership.tick(time.monotonic())
            for connection, name in list(self.names.items()):
                if connection.is_closed or name not in self.membership.nodes:  # lost
                    self._drop(connection)
            if ended is None and self.membership.exit_code is not None:
                ended = time.monotonic()
        return self.membership.exit_code

    def _accept(self) -> None:
        try:
            connection, _ = self.server.accept()
        except OSError:  # it has closed the connection already
            return
        self.selector.register(MessageSocket(connection), selectors.EVENT_READ)

    def _receive(self, connection: MessageSocket) -> None:
        for message in connection.receive():
            try:
                self._handle(connection, message)
            except (KeyError, TypeError, ValueError):  # not from an agent
                connection.is_closed = True
        if connection.is_closed:
            self._drop(connection)

    def _handle(self, connection: MessageSocket, message: Message) -> None:
        now = time.monotonic()
        if message["type"] == "join":
            name = str(message["name"])
            for other in [other for other, joined in self.names.items() if joined == name]:
                self._drop(other)  # the agent has given that connection up
            self.names[connection] = name
            self.membership.join(name, str(message["address"]), connection.send, now)
            return
        name = self.names[connection]
        match message["type"]:
            case "beat":
                self.membership.beat(name, now)
                connection.send("beat", sent=float(message["sent"]))
            case "exited":
                self.membership.exited(name, int(message["generation"]), int(message["code"]))
            case "leave":
                self.membership.leave(name)

    def _drop(self, connection: MessageSocket) -> None:
        if connection in self.names:
            self.membership.disconnect(self.names.pop(connection))
        self.selector.unregister(connection)
        connection.close()
