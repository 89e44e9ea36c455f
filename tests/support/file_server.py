"""A server of files on loopback, which answers as a test says."""

import http.server
import random
import threading
from collections.abc import Callable

CONTENT = random.Random(7).randbytes(300_000)


class Server(http.server.ThreadingHTTPServer):
    """Answers each GET with the next of `answers` (the last one again and again) and records what
    was asked.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[Callable] = []
        self.requests: list[dict] = []
        self.files: dict[str, bytes] = {}
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def url(self, name: str = "file.bin") -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.requests.append({"path": self.path, **dict(self.headers)})
        answers = server.answers
        answer = answers.pop(0) if len(answers) > 1 else answers[0] if answers else whole
        answer(self)

    def send(
        self, body: bytes, status: int = 200, claim: int | None = None, **headers: str
    ) -> None:
        """`body` under a Content-Length of `claim` (-1: none)."""
        self.send_response(status)
        if claim != -1:
            self.send_header("Content-Length", str(len(body) if claim is None else claim))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, *_):
        pass


def whole(handler: Handler, sent_share: float = 1.0) -> None:
    """A proper server: the file or the range asked for; `sent_share` below 1 drops the connection
    before its end.
    """
    content = handler.server.files.get(handler.path, CONTENT)
    first, _, last = handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
    body = content[int(first) : int(last) + 1 if last else None]
    if not body:
        return handler.send(b"", 416, Content_Range=f"bytes */{len(content)}")
    headers = {}
    if int(first) or last:
        headers["Content_Range"] = f"bytes {first}-{int(first) + len(body) - 1}/{len(content)}"
    return handler.send(
        body[: int(len(body) * sent_share)], 206 if headers else 200, claim=len(body), **headers
    )
