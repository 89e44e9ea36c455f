"""Downloads from a server on loopback that misbehaves as servers on the network do."""

import hashlib
import io
import json
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import SHARED, needs_shared_data
from file_server import CONTENT, Handler, Server, whole

from bert_recipe.data_preparation.sources import download, published
from bert_recipe.data_preparation.sources.download import Checksum, fetch
from bert_recipe.utils.errors import UserError

SHA256 = Checksum("sha256", hashlib.sha256(CONTENT).hexdigest())
SHA1 = hashlib.sha1(CONTENT, usedforsecurity=False).hexdigest()
STALL_SECONDS = 2.0  # a server that answers needs less


def drops(handler: Handler) -> None:
    whole(handler, sent_share=0.4)


def stalls(handler: Handler) -> None:
    whole(handler, sent_share=0.3)
    time.sleep(5 * STALL_SECONDS)


def silent(_: Handler) -> None:
    time.sleep(5 * STALL_SECONDS)


def sends(body: bytes, status: int = 200, claim: int | None = None, **headers: str) -> Callable:
    return lambda handler: handler.send(body, status, claim, **headers)


def says(code: int, **headers: str) -> Callable:
    return sends(b"sorry", code, **headers)


def raw(answer: bytes) -> Callable:
    return lambda handler: handler.wfile.write(answer)


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    for name, value in {"ATTEMPTS": 4, "FIRST_WAIT": 0.01, "LONGEST_WAIT": 0.02}.items():
        monkeypatch.setattr(download, name, value)


@pytest.fixture
def server():
    with Server() as server:
        yield server


def left_behind(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("answers", "ranges"),
    [
        ([whole], [None]),
        ([drops, whole], [None, 120_000]),
        ([stalls, whole], [None, 90_000]),
        ([drops] * 9 + [whole], None),  # progress restarts the count of failures
        *(([says(code), whole], [None, None]) for code in (403, 408, 429, 500, 502, 503, 504)),
        ([drops, sends(CONTENT), whole], [None, 120_000]),  # a server without ranges
        (
            [drops, sends(CONTENT[5:], 206, Content_Range="bytes 5-299999/300000"), whole],
            [None, 120_000, None],
        ),
        ([sends(bytes(300_000)), whole], [None, None]),  # other bytes
        (
            [raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nF" + b"F" * 17), whole],
            [None, None],
        ),
        ([sends(CONTENT[:9], claim=-1, Content_Length="9" * 5000), whole], [None, None]),
    ],
)
def test_a_file_arrives_complete_from_a_server_that_fails_at_first(
    server, tmp_path, answers, ranges, monkeypatch
):
    monkeypatch.setattr(download, "TIMEOUT", STALL_SECONDS)
    server.answers = list(answers)
    fetch([server.url()], tmp_path / "file.bin", SHA256)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT and left_behind(tmp_path) == {"file.bin"}
    if ranges:
        wanted = [f"bytes={start}-" if start else None for start in ranges]
        assert [request.get("Range") for request in server.requests] == wanted
    server.answers, server.requests = [drops, whole], []
    # Without a checksum no bytes of two attempts are joined.
    fetch([server.url()], tmp_path / "other.bin")
    assert (tmp_path / "other.bin").read_bytes() == CONTENT and "Range" not in server.requests[1]


def test_a_second_run_resumes_and_keeps_a_complete_part(server, tmp_path):
    server.answers = [drops, says(503)]
    with pytest.raises(UserError, match="503"):
        fetch([server.url()], tmp_path / "file.bin", SHA256)
    assert left_behind(tmp_path) == {"file.bin.part"}
    server.answers, server.requests = [whole], []
    fetch([server.url()], tmp_path / "file.bin", SHA256)
    (tmp_path / "file.bin").rename(tmp_path / "file.bin.part")
    fetch([server.url()], tmp_path / "file.bin", SHA256)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert [request["Range"] for request in server.requests] == ["bytes=120000-", "bytes=300000-"]


def test_waits_grow_and_respect_what_the_server_asks_for(server, tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(download.time, "sleep", waits.append)
    for name, value in {"ATTEMPTS": 9, "FIRST_WAIT": 1, "LONGEST_WAIT": 5}.items():
        monkeypatch.setattr(download, name, value)
    asked = [says(429, Retry_After=value) for value in ("4", "7", "-5", "9" * 16, "\xb2", "nan")]
    server.answers = [says(503), *asked, whole]
    fetch([server.url()], tmp_path / "file.bin")
    assert waits == [1, 4, 5, 5, 5, 5, 5]


def test_mirrors_take_over(server, tmp_path, monkeypatch):
    server.answers = [says(404), silent, drops, whole]
    monkeypatch.setattr(download, "TIMEOUT", STALL_SECONDS)
    fetch([server.url("a"), server.url("b"), server.url("c")], tmp_path / "file.bin", SHA256)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert [request["path"] for request in server.requests] == ["/a", "/b", "/c", "/c"]


def test_without_a_network_one_round_of_the_mirrors_is_tried(tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(download.time, "sleep", waits.append)
    monkeypatch.setattr(download, "ATTEMPTS", 10)
    with pytest.raises(UserError, match="cannot download"):
        fetch([f"http://127.0.0.1:{port}/file.bin" for port in (1, 2, 9)], tmp_path / "file.bin")
    assert len(waits) == 2


@pytest.mark.parametrize(
    ("answer", "checksum", "size", "message"),
    [
        (says(404), None, None, "404"),
        (says(302, Location="file:///etc/passwd"), None, None, "302"),
        (sends(CONTENT[:-1000]), SHA256, None, "sha256"),  # truncated, and says so
        (sends(CONTENT, claim=len(CONTENT) - 1000), SHA256, None, "sha256"),
        (sends(bytes(len(CONTENT))), SHA256, None, "sha256"),
        (
            sends(CONTENT, claim=len(CONTENT) + 1000),
            None,
            None,
            "ended after 300,000 of 301,000 bytes",
        ),
        (sends(CONTENT, claim=-1), None, None, "does not announce the length"),
        (sends(CONTENT), SHA256, 1000, "announces 300,000 bytes, not 1,000"),
        (sends(CONTENT, claim=-1), SHA256, 1000, "sha256"),
        (sends(b""), None, None, "empty"),
        (sends(b"<!DOCTYPE html><html>log in first</html>"), None, None, "web page"),
        (
            raw(b"HTTP/1.1 503 \x1b]0;owned\x07\x1b[2J\x9b31m" + b"x" * 9000 + b"\r\n\r\n"),
            None,
            None,
            "owned",
        ),
    ],
)
def test_what_is_not_the_file_is_refused_in_one_line(
    server, tmp_path, answer, checksum, size, message, capsys
):
    server.answers = [answer]
    with pytest.raises(UserError, match=message) as error:
        fetch([server.url()], tmp_path / "file.bin", checksum, size)
    assert not (tmp_path / "file.bin").exists()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= (size or len(CONTENT))
    for text in (str(error.value), *capsys.readouterr().err.splitlines()):
        assert text.isprintable() and len(text) < 500


@pytest.mark.parametrize("url", ["file:///etc/passwd", "http://"])
def test_only_http_addresses_are_accepted(tmp_path, url):
    with pytest.raises(UserError, match="http"):
        fetch([url], tmp_path / "file.bin")


def test_an_existing_file_is_verified_and_kept(server, tmp_path):
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
    published.fetch_wikipedia("simple", "latest", tmp_path, mirrors=[server.url("")[:-1]])
    assert (tmp_path / name).read_bytes() == CONTENT
    assert server.requests[1]["path"] == f"/simplewiki/20240501/{name}"


def test_wikipedia_with_a_wrong_sum_is_refused(server, tmp_path):
    name = "frwiki-20240501-pages-articles-multistream.xml.bz2"
    server.files["/frwiki/20240501/frwiki-20240501-sha1sums.txt"] = f"{'0' * 40}  {name}\n".encode()
    with pytest.raises(UserError, match="sha1"):
        published.fetch_wikipedia("fr", "20240501", tmp_path, [server.url("")[:-1]])
    assert not (tmp_path / name).exists()


def test_squad_is_verified_against_its_pinned_sums(server, tmp_path, monkeypatch):
    names = [
        file.path.name for version in ("1.1", "2.0") for file in published.PINS[f"squad-{version}"]
    ]
    files = {name: json.dumps({"version": "1.1", "data": [name]}).encode() for name in names}
    server.files = {f"/{name}": content for name, content in files.items()}
    mirrors = (server.url("")[:-1],)
    with pytest.raises(UserError, match="bytes, not 30,288,272"):
        published.fetch_squad("1.1", tmp_path, mirrors)
    pin(monkeypatch, "squad-2.0", [files[name] for name in names[2:]])
    published.fetch_squad("2.0", tmp_path, mirrors)
    assert left_behind(tmp_path) == {"train-v2.0.json", "dev-v2.0.json"}


def pin(monkeypatch, name: str, contents: list[bytes]) -> list[str]:
    """Gives the files of a data set pins that fit `contents`; returns their paths."""
    pins = [
        file._replace(size=len(content), sha256=hashlib.sha256(content).hexdigest())
        for file, content in zip(published.PINS[name], contents, strict=True)
    ]
    monkeypatch.setitem(published.PINS, name, pins)
    return [f"/{file.path}" for file in pins]


def serve_glue(server: Server, monkeypatch, task: str, contents: list[bytes]) -> None:
    """Makes the server that of `task`, whose files have `contents` and fitting pins."""
    server.files = dict(zip(pin(monkeypatch, task, contents), contents, strict=True))


def test_a_glue_archive_is_verified_resumed_and_extracted(server, tmp_path, monkeypatch):
    """Only the files of the task are extracted, under their own names."""
    names = ["train.jsonl", "val.jsonl", "test.jsonl"]
    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        for name in (*(f"CB/{name}" for name in names), "../evil.jsonl", "CB/more"):
            archive.writestr(name, f"{Path(name).name} " * 999)
    content = file.getvalue()
    server.files = {"/glue/superglue/data/v2/CB.zip": content}
    with pytest.raises(UserError, match="bytes, not 75,482"):
        published.fetch_glue("cb", tmp_path / "CB", [server.url("")[:-1]])
    serve_glue(server, monkeypatch, "cb", [content])
    server.answers = [drops, whole]
    published.fetch_glue("cb", tmp_path / "CB", [server.url("")[:-1]])
    assert all((tmp_path / "CB" / name).read_text() == f"{name} " * 999 for name in names)
    assert any("Range" in request for request in server.requests)
    assert left_behind(tmp_path / "CB") == {*names, "CB.zip"} and left_behind(tmp_path) == {"CB"}


def test_every_task_is_pinned_and_has_the_folder_of_the_presets():
    pins = [pin for task in published.TASKS for pin in published.PINS[task]]
    assert len({pin.sha256 for pin in pins}) == len(pins) == len(published.TASKS) + 2
    assert all(len(pin.sha256) == 64 and pin.size > 0 for pin in pins)
    folders = {
        task: str(published.glue_folder(task)) for task in ("mrpc", "sst-2", "superglue-rte", "rte")
    }
    assert folders == {
        "mrpc": "glue/MRPC",
        "sst-2": "glue/SST-2",
        "superglue-rte": "superglue/RTE",
        "rte": "glue/RTE",
    }


@needs_shared_data
def test_mrpc_is_divided_as_glue_divides_it(server, tmp_path, monkeypatch):
    """Puts GLUE's training and development rows into one file as Microsoft's has them, and divides
    it again.
    """
    split = {
        name: (SHARED / "glue" / "MRPC" / name).read_text(encoding="utf-8")
        for name in ("train.tsv", "dev.tsv")
    }
    header, *train = split["train.tsv"].splitlines()
    dev = split["dev.tsv"].splitlines()[1:]
    rows = [*train[:1000], *dev[:200], *train[1000:], *dev[200:]]
    ids = "".join("\t".join(row.split("\t")[1:3]) + "\n" for row in dev)
    contents = ["\r\n".join([header, *rows, ""]), "\r\n".join([header, *train[:2], ""]), ids]
    serve_glue(server, monkeypatch, "mrpc", [content.encode() for content in contents])
    published.fetch_glue("mrpc", tmp_path, [server.url("")[:-1]])
    assert all(
        (tmp_path / name).read_text(encoding="utf-8") == text for name, text in split.items()
    )
    test = (tmp_path / "test.tsv").read_text(encoding="utf-8").splitlines()
    assert test[2] == "\t".join(["1", *train[1].split("\t")[1:]]) and len(test) == 3
