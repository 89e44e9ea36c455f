"""Downloads from a server on loopback that misbehaves in each way that servers on the network do."""

import hashlib
import http.server
import io
import json
import random
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import SHARED, needs_shared_data

from data_preparation.sources import download, glue
from data_preparation.sources.download import Checksum, RetryPolicy, fetch, fetch_books, fetch_squad, fetch_wikipedia
from utils.errors import UserError

CONTENT = random.Random(7).randbytes(300_000)
SHA256 = Checksum("sha256", hashlib.sha256(CONTENT).hexdigest())
SHA1 = hashlib.sha1(CONTENT, usedforsecurity=False).hexdigest()
HASTY = RetryPolicy(attempts=4, first_wait=0.01, longest_wait=0.02, timeout=60)
STALL_SECONDS = 2.0  # a server that answers needs less


class Server(http.server.ThreadingHTTPServer):
    """Answers each GET with the next of `answers` (the last one again and again) and records what was asked."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[Callable] = []
        self.requests: list[dict] = []
        self.files: dict[str, bytes] = {}
        self.etag = '"first"'
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def url(self, name: str = "file.bin") -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.requests.append({"path": self.path, **dict(self.headers)})
        answers = server.answers
        answer = answers.pop(0) if len(answers) > 1 else answers[0] if answers else whole
        answer(self)

    def send(self, body: bytes, status: int = 200, claim: int | None = None, **headers: str) -> None:
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
    """A proper server: the file or the range asked for; `sent_share` below 1 drops the connection before its end."""
    content = handler.server.files.get(handler.path, CONTENT)
    etag = handler.server.etag
    asked = handler.headers.get("Range")
    if asked and handler.headers.get("If-Range", etag) == etag:
        start = int(asked.removeprefix("bytes=").removesuffix("-"))
        if start >= len(content):
            return handler.send(b"", 416, Content_Range=f"bytes */{len(content)}")
        body = content[start:]
        headers = {"Content_Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        status = 206
    else:
        body, headers, status = content, {}, 200
    handler.send(body[: int(len(body) * sent_share)], status, claim=len(body), ETag=etag, **headers)
    return None


def drops(handler: Handler) -> None:
    whole(handler, sent_share=0.4)


def stalls(handler: Handler) -> None:
    whole(handler, sent_share=0.3)
    time.sleep(5 * STALL_SECONDS)


def silent(_: Handler) -> None:
    time.sleep(5 * STALL_SECONDS)


def status(code: int, **headers: str) -> Callable:
    return lambda handler: handler.send(b"sorry", code, **headers)


def web_page(handler: Handler) -> None:
    handler.send(b"<!DOCTYPE html><html>log in first</html>", Content_Type="application/octet-stream")


def changes_then_serves(handler: Handler) -> None:
    """The file is another one from now on, and no byte of the old one counts."""
    handler.server.etag = '"second"'
    handler.server.files["/file.bin"] = CONTENT[::-1]
    whole(handler)


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(download, "POLICY", HASTY)


@pytest.fixture
def server():
    server = Server()
    yield server
    server.shutdown()
    server.server_close()


def left_behind(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_file_comes_whole_and_alone(server, tmp_path):
    fetch([server.url()], tmp_path / "file.bin", SHA256)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert left_behind(tmp_path) == {"file.bin"}


@pytest.mark.parametrize("trouble", [drops, stalls])
def test_a_broken_or_stalled_connection_is_resumed_where_it_stopped(server, tmp_path, trouble, monkeypatch):
    server.answers = [trouble, whole]
    monkeypatch.setattr(download, "POLICY", HASTY._replace(timeout=STALL_SECONDS))
    fetch([server.url()], tmp_path / "file.bin", SHA256)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    start = int(server.requests[1]["Range"].removeprefix("bytes=").removesuffix("-"))
    assert 0 < start < len(CONTENT)


def test_tries_that_bring_the_file_further_do_not_use_up_the_patience(server, tmp_path, monkeypatch):
    server.answers = [drops] * 9 + [whole]
    monkeypatch.setattr(download, "POLICY", HASTY._replace(attempts=2))
    fetch([server.url()], tmp_path / "file.bin", SHA256)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert len(server.requests) == 10


def test_a_second_run_goes_on_where_the_first_was_stopped(server, tmp_path):
    server.answers = [drops, status(503)]
    with pytest.raises(UserError, match="503"):
        fetch([server.url()], tmp_path / "file.bin", SHA256)
    assert not (tmp_path / "file.bin").exists()
    server.answers, server.requests = [whole], []
    fetch([server.url()], tmp_path / "file.bin", SHA256)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert server.requests[0]["Range"] == f"bytes={int(len(CONTENT) * 0.4)}-"


def test_a_part_that_is_complete_already_is_kept(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    fetch([server.url()], tmp_path / "file.bin", SHA256)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT and len(server.requests) == 1


@pytest.mark.parametrize("code", [403, 408, 429, 500, 502, 503, 504])
def test_passing_refusals_are_retried(server, tmp_path, code):
    server.answers = [status(code), status(code), whole]
    fetch([server.url()], tmp_path / "file.bin", SHA256)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_a_missing_file_is_not_asked_for_again(server, tmp_path):
    server.answers = [status(404)]
    with pytest.raises(UserError, match="404"):
        fetch([server.url()], tmp_path / "file.bin")
    assert len(server.requests) == 1


def test_waits_grow_and_respect_what_the_server_asks_for(server, tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(download.time, "sleep", waits.append)
    server.answers = [status(503), status(503), status(429, Retry_After="7"), status(503), whole]
    monkeypatch.setattr(download, "POLICY", RetryPolicy(attempts=9, first_wait=1, longest_wait=5, timeout=60))
    fetch([server.url()], tmp_path / "file.bin")
    assert waits == [1, 2, 5, 5]


def test_mirrors_take_over(server, tmp_path, monkeypatch):
    server.answers = [status(404), silent, drops, whole]
    monkeypatch.setattr(download, "POLICY", HASTY._replace(timeout=STALL_SECONDS))
    fetch([server.url("a"), server.url("b"), server.url("c")], tmp_path / "file.bin", SHA256)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert [request["path"] for request in server.requests] == ["/a", "/b", "/c", "/c"]


def test_bytes_of_two_mirrors_are_not_joined_without_a_checksum(server, tmp_path):
    server.answers = [drops, status(404), whole]
    fetch([server.url("a"), server.url("b")], tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert "Range" not in server.requests[2]


def test_a_file_that_changes_between_tries_is_fetched_anew(server, tmp_path):
    server.answers = [drops, changes_then_serves]
    fetch([server.url()], tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT[::-1]


def test_a_file_that_changes_size_under_ranges_is_not_glued_together(server, tmp_path):
    def other_size(handler):
        start = int(handler.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        body = CONTENT[start:-50]
        handler.send(body, 206, Content_Range=f"bytes {start}-{len(CONTENT) - 51}/{len(CONTENT) - 50}")

    server.answers = [drops, other_size, whole]
    fetch([server.url()], tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


@pytest.mark.parametrize(
    "lie",
    [
        lambda handler: handler.send(CONTENT[:-1000]),  # truncated, and says so
        lambda handler: handler.send(CONTENT, claim=len(CONTENT) - 1000),  # says less than it sends
        lambda handler: handler.send(CONTENT[:-1], claim=-1),  # says nothing and stops early
        lambda handler: handler.send(bytes(len(CONTENT))),  # right length, other bytes
    ],
)
def test_a_part_or_another_file_is_never_taken_for_the_whole(server, tmp_path, lie):
    server.answers = [lie]
    with pytest.raises(UserError, match="sha256"):
        fetch([server.url()], tmp_path / "file.bin", SHA256)
    assert left_behind(tmp_path) == set()


def test_a_server_that_promises_more_than_it_has_is_given_up(server, tmp_path):
    server.answers = [lambda handler: handler.send(CONTENT, claim=len(CONTENT) + 1000)]
    with pytest.raises(UserError, match="ended after"):
        fetch([server.url()], tmp_path / "file.bin")
    assert not (tmp_path / "file.bin").exists()


def test_a_file_of_unknown_length_needs_a_checksum(server, tmp_path):
    server.answers = [lambda handler: handler.send(CONTENT, claim=-1)]
    with pytest.raises(UserError, match="length of the file"):
        fetch([server.url()], tmp_path / "a.bin")
    fetch([server.url()], tmp_path / "b.bin", SHA256)
    assert (tmp_path / "b.bin").read_bytes() == CONTENT


NUMBERS = ["-5", "9" * 16, "9" * 5000, "²", "٣٠٠٠٠٠", "1e5", "0x10", " ", "nan", "5, 5"]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_hostile_number_in_a_header_ends_in_one_line_or_the_file(server, tmp_path, number, monkeypatch):
    waits = []
    monkeypatch.setattr(download.time, "sleep", waits.append)
    header = number.encode().decode("latin-1")
    server.answers = [
        lambda handler: handler.send(b"sorry", 503, Retry_After=header),
        lambda handler: handler.send(CONTENT[:9], 200, claim=-1, Content_Length=header),
        drops,
        lambda handler: handler.send(CONTENT, 206, Content_Range=f"bytes {header}-{header}/{header}"),
        whole,
    ]
    fetch([server.url()], tmp_path / "file.bin", SHA256)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert max(waits) <= HASTY.longest_wait


@pytest.mark.parametrize("chunk_size", ["-1", "F" * 17, "x", "5"])
def test_a_hostile_size_of_a_chunk_is_a_failed_attempt(server, tmp_path, chunk_size, monkeypatch):
    chunk = f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{chunk_size}\r\nab".encode()
    server.answers = [lambda handler: handler.wfile.write(chunk), whole]
    monkeypatch.setattr(download, "POLICY", HASTY)
    fetch([server.url()], tmp_path / "file.bin", SHA256)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("claim", [None, -1, 1000])
def test_no_more_is_written_than_the_pinned_size(server, tmp_path, claim, monkeypatch):
    written, unlink = [], Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path: (written.append(path.stat().st_size), unlink(path)))
    server.answers = [lambda handler: handler.send(CONTENT, claim=claim)]
    with pytest.raises(UserError, match=r"announces 300,000 bytes|more than the 1,000 bytes|sha256"):
        fetch([server.url()], tmp_path / "file.bin", SHA256, size=1000)
    assert max(written, default=0) <= 1000
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1000


def test_what_a_server_says_reaches_the_terminal_without_escapes(server, tmp_path, capsys):
    def hostile(handler):
        handler.send_response(503, "\x1b]0;owned\x07\x1b[2J\x9b31m" + "x" * 9000)
        handler.end_headers()

    server.answers = [hostile]
    with pytest.raises(UserError) as error:
        fetch([server.url()], tmp_path / "file.bin")
    for text in (str(error.value), capsys.readouterr().err):
        assert "owned" in text and len(text) < 2000
        assert text.replace("\n", "").isprintable()


def test_a_web_page_with_status_200_is_refused(server, tmp_path):
    server.answers = [web_page]
    with pytest.raises(UserError, match="web page"):
        fetch([server.url()], tmp_path / "file.bin")
    assert left_behind(tmp_path) == set()


def test_no_server_at_all_is_one_clear_error(tmp_path):
    with pytest.raises(UserError, match="cannot download"):
        fetch(["http://127.0.0.1:9/file.bin"], tmp_path / "file.bin")


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/file", "no address", "http://"])
def test_only_http_addresses_are_taken(tmp_path, url):
    with pytest.raises(UserError, match="http"):
        fetch([url], tmp_path / "file.bin")


def test_a_redirect_cannot_lead_to_a_local_file(server, tmp_path):
    server.answers = [status(302, Location="file:///etc/passwd")]
    with pytest.raises(UserError, match="cannot download"):
        fetch([server.url()], tmp_path / "file.bin")


def test_a_file_that_is_there_is_checked_and_kept(server, tmp_path):
    path = tmp_path / "file.bin"
    path.write_bytes(CONTENT)
    fetch([server.url()], path, SHA256)
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(UserError, match="remove it"):
        fetch([server.url()], path, SHA256)
    assert server.requests == []


def test_wikipedia_is_the_dated_dump_that_the_published_sums_name(server, tmp_path):
    name = "simplewiki-20240501-pages-articles-multistream.xml.bz2"
    sums = f"{'0' * 40}  simplewiki-20240501-site_stats.sql.gz\n{SHA1}  {name}\n"
    server.files["/simplewiki/latest/simplewiki-latest-sha1sums.txt"] = sums.encode()
    fetch_wikipedia("simple", tmp_path, mirrors=[server.url("")[:-1]])
    assert (tmp_path / name).read_bytes() == CONTENT
    assert server.requests[1]["path"] == f"/simplewiki/20240501/{name}"


def test_wikipedia_with_a_wrong_sum_is_refused(server, tmp_path):
    name = "frwiki-20240501-pages-articles-multistream.xml.bz2"
    server.files["/frwiki/20240501/frwiki-20240501-sha1sums.txt"] = f"{'0' * 40}  {name}\n".encode()
    with pytest.raises(UserError, match="sha1"):
        fetch_wikipedia("fr", tmp_path, "20240501", [server.url("")[:-1]])
    assert not (tmp_path / name).exists()


def test_squad_is_verified_against_its_pinned_sums(server, tmp_path, monkeypatch):
    names = [file.path.name for version in ("1.1", "2.0") for file in download.PINS[f"squad-{version}"]]
    files = {name: json.dumps({"version": "1.1", "data": [name]}).encode() for name in names}
    server.files = {f"/{name}": content for name, content in files.items()}
    mirrors = (server.url("")[:-1],)
    with pytest.raises(UserError, match="bytes, not 30,288,272"):
        fetch_squad("1.1", tmp_path, mirrors)
    pin(monkeypatch, "squad-2.0", [files[name] for name in names[2:]])
    fetch_squad("2.0", tmp_path, mirrors)
    assert left_behind(tmp_path) == {"train-v2.0.json", "dev-v2.0.json"}


def test_books_come_under_their_own_names_and_may_not_collide(server, tmp_path):
    server.files = {"/x/one.txt": b"Call me Ishmael.", "/y/two.txt": b"It was the best of times."}
    fetch_books([server.url("x/one.txt"), server.url("y/two.txt")], tmp_path)
    assert (tmp_path / "one.txt").read_bytes() == b"Call me Ishmael."
    assert (tmp_path / "two.txt").read_bytes() == b"It was the best of times."
    with pytest.raises(UserError, match="same file name"):
        fetch_books([server.url("x/one.txt"), server.url("y/one.txt")], tmp_path)


@pytest.mark.parametrize("name", ["..", "manifest.json", "a\0b"])
def test_an_address_without_a_usable_file_name_is_refused(tmp_path, name):
    with pytest.raises(UserError, match="usable file name"):
        fetch_books([f"http://127.0.0.1:9/x/{name}"], tmp_path)


# --- GLUE -------------------------------------------------------------------------------------------------------------


def pin(monkeypatch, name: str, contents: list[bytes]) -> list[str]:
    """Gives the files of a data set pins that fit `contents`; returns their paths."""
    pins = [
        file._replace(size=len(content), sha256=hashlib.sha256(content).hexdigest())
        for file, content in zip(download.PINS[name], contents, strict=True)
    ]
    monkeypatch.setitem(download.PINS, name, pins)
    return [f"/{file.path}" for file in pins]


def serve_glue(server: Server, monkeypatch, task: str, contents: list[bytes]) -> None:
    """Makes the server that of `task`, whose files have `contents` and fitting pins."""
    server.files = dict(zip(pin(monkeypatch, task, contents), contents, strict=True))


def archive_of(**files: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return content.getvalue()


def test_a_glue_archive_is_verified_resumed_and_extracted(server, tmp_path, monkeypatch):
    """Only the files of the task are extracted, under their own names."""
    names = ["train.jsonl", "val.jsonl", "test.jsonl"]
    content = archive_of(**{f"CB/{name}": f"{name} " * 999 for name in names}, **{"../evil.jsonl": "x", "CB/more": "x"})
    server.files = {"/glue/superglue/data/v2/CB.zip": content}
    with pytest.raises(UserError, match="bytes, not 75,482"):
        glue.fetch_glue("cb", tmp_path / "CB", [server.url("")[:-1]])
    serve_glue(server, monkeypatch, "cb", [content])
    server.answers = [drops, whole]
    glue.fetch_glue("cb", tmp_path / "CB", [server.url("")[:-1]])
    assert all((tmp_path / "CB" / name).read_text() == f"{name} " * 999 for name in names)
    assert any("Range" in request for request in server.requests)
    assert left_behind(tmp_path / "CB") == {*names, "CB.zip"} and left_behind(tmp_path) == {"CB"}


def test_every_task_is_pinned_and_has_the_folder_of_the_presets():
    pins = [pin for task in glue.TASKS for pin in glue.PINS[task]]
    assert len({pin.sha256 for pin in pins}) == len(pins) == len(glue.TASKS) + 2
    assert all(len(pin.sha256) == 64 and pin.size > 0 for pin in pins)
    folders = {task: str(glue.task_folder(task)) for task in ("mrpc", "sst-2", "superglue-rte", "rte")}
    assert folders == {"mrpc": "glue/MRPC", "sst-2": "glue/SST-2", "superglue-rte": "superglue/RTE", "rte": "glue/RTE"}


@needs_shared_data
def test_mrpc_is_divided_as_glue_divides_it(server, tmp_path, monkeypatch):
    """Puts GLUE's training and development rows into one file as Microsoft's has them, and divides it again."""
    split = {name: (SHARED / "glue" / "MRPC" / name).read_text(encoding="utf-8") for name in ("train.tsv", "dev.tsv")}
    header, *train = split["train.tsv"].splitlines()
    dev = split["dev.tsv"].splitlines()[1:]
    rows = [*train[:1000], *dev[:200], *train[1000:], *dev[200:]]
    ids = "".join("\t".join(row.split("\t")[1:3]) + "\n" for row in dev)
    contents = ["\r\n".join([header, *rows, ""]), "\r\n".join([header, *train[:2], ""]), ids]
    serve_glue(server, monkeypatch, "mrpc", [content.encode() for content in contents])
    glue.fetch_glue("mrpc", tmp_path, [server.url("")[:-1]])
    assert all((tmp_path / name).read_text(encoding="utf-8") == text for name, text in split.items())
    test = (tmp_path / "test.tsv").read_text(encoding="utf-8").splitlines()
    assert test[2] == "\t".join(["1", *train[1].split("\t")[1:]]) and len(test) == 3
