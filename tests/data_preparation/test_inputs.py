"""Where text may come from: addresses, compressions, formats, and files that are divided among
tasks.
"""

import bz2
import gzip
import io
import json
import random
import re
import tracemalloc
from pathlib import Path

import pytest
from file_server import Handler, Server, whole

from bert_recipe.data_preparation.engine import input_files
from bert_recipe.data_preparation.engine.input_files import find_files, left_out
from bert_recipe.data_preparation.engine.runner import run
from bert_recipe.data_preparation.options import FormatOptions
from bert_recipe.data_preparation.sources import documents, spans
from bert_recipe.data_preparation.sources.documents import read_documents
from bert_recipe.data_preparation.sources.spans import Span, plan_spans
from bert_recipe.data_preparation.stages import format_stage
from bert_recipe.data_preparation.text import formatting
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.work_units.executors import InProcessExecutor

TEXTS = [f"Text {number} is here. " * random.Random(number).randint(1, 60) for number in range(200)]
JSONL = "".join(
    json.dumps({"text": text, "id": number}) + "\n" for number, text in enumerate(TEXTS)
).encode()
TSV = "".join(
    ["id\ttext\n", *(f"{number}\t{text}\n" for number, text in enumerate(TEXTS))]
).encode()


def read_all(paths: list[str], **options) -> list[str]:
    """The texts of files, read in the spans that tasks get."""
    found = plan_spans([(path, input_files.size_of(path)) for path in paths])
    found = [document for span in found for document in read_documents(span, **options)]
    return [" ".join(" ".join(document.paragraphs).split()) for document in found]


EXPECTED = [" ".join(text.split()) for text in TEXTS]


@pytest.mark.parametrize("length", [97, 1000, 9_999])
def test_spans_of_any_length_give_each_line_once(tmp_path, monkeypatch, length):
    monkeypatch.setattr(spans, "SPAN_BYTES", length)
    monkeypatch.setattr(spans, "MAX_SPANS", 10_000_000)
    path = tmp_path / "a.jsonl"
    path.write_bytes(JSONL)
    assert read_all([str(path)]) == EXPECTED
    (tmp_path / "a.txt").write_text("\n \n".join(TEXTS))
    assert read_all([str(tmp_path / "a.txt")], empty_line="document") == EXPECTED


def compress(content: bytes, suffix: str) -> bytes:
    if suffix == ".zst":
        return pytest.importorskip("pyarrow").compress(content, "zstd", asbytes=True)
    return {"": lambda x: x, ".gz": gzip.compress, ".bz2": bz2.compress}[suffix](content)


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".zst"])
def test_every_compression_of_every_format_is_read(tmp_path, suffix):
    contents = {
        "a.jsonl": JSONL,
        "b.csv": b"id,text\n"
        + b"".join(b'%d,"%s"\n' % (number, text.encode()) for number, text in enumerate(TEXTS)),
        "b.tsv": TSV,
    }
    if suffix:
        contents["c.json"] = JSONL
    for name, content in contents.items():
        (tmp_path / (name + suffix)).write_bytes(compress(content, suffix))
    paths = find_files([str(tmp_path)], (".jsonl", ".csv", ".tsv"))
    assert [Path(path).name.split(".")[0] for path in paths] == [name[0] for name in contents]
    assert read_all(paths) == EXPECTED * len(contents)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])
def test_a_truncated_or_empty_compressed_file_is_refused(tmp_path, suffix):
    path = tmp_path / f"a.txt{suffix}"
    content = compress("\n\n".join(TEXTS).encode(), suffix)
    for size, reason in ((len(content) // 2, "truncated"), (0, "is empty")):
        path.write_bytes(content[:size])
        with pytest.raises(UserError, match=reason):
            read_all([str(path)])


def test_links_are_followed_and_no_file_is_read_twice(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("A text.")
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "folder" / "around").symlink_to(tmp_path / "folder")
    found = find_files([str(tmp_path / "folder")], (".txt",))
    assert found == [str(tmp_path / "folder" / "link" / "a.txt")]
    for again in ("elsewhere/a.txt", "folder/../elsewhere", "folder"):
        with pytest.raises(UserError, match=r"a.txt is named twice"):
            find_files([str(tmp_path / "elsewhere"), f"{tmp_path}/{again}"], (".txt",))


def test_addresses_are_listed_read_and_known_by_their_version(tmp_path, capsys):
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    system.pipe("/corpus/a.jsonl", JSONL)
    system.pipe("/corpus/more/b.jsonl.gz", gzip.compress(JSONL))
    system.pipe("/corpus/README.md", b"not text")
    assert find_files(["memory://corpus"], (".jsonl",)) == [
        "memory:///corpus/a.jsonl",
        "memory:///corpus/more/b.jsonl.gz",
    ]
    assert find_files(["memory://corpus/*.jsonl"], (".jsonl",)) == ["memory:///corpus/a.jsonl"]
    options = FormatOptions(sentence_splitter="fast")
    for status in ("formatted", "up to date"):
        run(
            format_stage(tmp_path, "corpus", "corpus", ["memory://corpus"], options),
            InProcessExecutor(),
        )
        assert ("up to date" in capsys.readouterr().out) == (status == "up to date")
    manifest = json.loads((tmp_path / "formatted" / "corpus" / "manifest.json").read_text())
    assert manifest["counts"]["documents"] == 2 * len(TEXTS)
    assert manifest["inputs"][0]["path"] == "memory:///corpus/a.jsonl"
    system.pipe("/corpus/a.jsonl", JSONL + b'{"text": "More."}\n')
    run(
        format_stage(tmp_path, "corpus", "corpus", ["memory://corpus"], options),
        InProcessExecutor(),
    )
    assert "made again, memory:///corpus/a.jsonl has changed" in capsys.readouterr().out


def in_ranges(handler: Handler) -> None:
    """Answers with ranges where `server.has_ranges`, after it has refused `server.failures` of
    them.
    """
    server = handler.server
    if not server.has_ranges:
        del handler.headers["Range"]
    elif "Range" in handler.headers and server.failures:
        server.failures -= 1
        return handler.send(b"", 503)
    return whole(handler)


def make_parquet(texts: list[str], row_group_size: int = 7) -> bytes:
    parquet = pytest.importorskip("pyarrow.parquet")
    file = io.BytesIO()
    columns = {"id": list(range(len(texts))), "more": [text[::-1] for text in texts], "text": texts}
    parquet.write_table(
        pytest.importorskip("pyarrow").table(columns), file, row_group_size, write_statistics=False
    )
    return file.getvalue()


@pytest.fixture
def server(monkeypatch):
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(input_files, "REMOTE_BLOCK", 1 << 12)
    monkeypatch.setattr(spans, "SPAN_BYTES", 5_000)
    server = Server()
    server.files = {
        "/a.txt": "\n\n".join(TEXTS).encode(),
        "/a.jsonl": JSONL,
        "/a.jsonl.gz": gzip.compress(JSONL, 0),
        "/a.tsv": TSV,
        "/a.parquet": make_parquet(TEXTS),
    }
    server.answers, server.has_ranges, server.failures = [in_ranges], True, 0
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.tsv", "a.parquet"])
def test_files_of_a_web_server_are_read_in_ranges_and_refused_without(server, name):
    address = server.url(name)
    assert find_files([address], (f".{name.split('.')[1]}",)) == [address]
    assert read_all([address], empty_line="document") == EXPECTED
    assert len(plan_spans([(address, input_files.size_of(address))])) > 1 or name in (
        "a.tsv",
        "a.jsonl.gz",
    )
    server.has_ranges = False
    with pytest.raises(UserError, match=rf"{address} cannot be read .*must answer range requests"):
        read_all([address])


def test_a_stopped_run_over_a_web_servers_parquet_continues_at_the_row_group(
    server, tmp_path, capsys, monkeypatch
):
    """As from a hub of data sets: the server breaks in the middle, and a second run reads the rest
    only.
    """
    address = server.url("a.parquet")
    options = FormatOptions(sentence_splitter="fast")
    server.files["/a.parquet"] = make_parquet(
        [random.Random(text).randbytes(2000).hex() for text in TEXTS]
    )
    stage = format_stage(tmp_path, "corpus", "corpus", [address], options)
    run(stage, InProcessExecutor())
    all_bytes = server.bytes_sent
    parts = sorted((tmp_path / "formatted" / "corpus").glob("part-*.txt"))
    expected = [part.read_bytes() for part in parts]
    units = plan_spans([(address, input_files.size_of(address))])
    assert len(parts) > 5
    stage = format_stage(tmp_path / "stopped", "corpus", "corpus", [address], options)
    done = len(units) // 2
    with monkeypatch.context() as patch:
        read = formatting.read_source

        def stops(dataset, span, *arguments):
            server.failures = (
                999 if len(list(tmp_path.glob("stopped/formatted/*/part-*.txt"))) == done else 0
            )
            return read(dataset, span, *arguments)

        patch.setattr(formatting, "read_source", stops)
        with pytest.raises(UserError, match="503"):
            run(stage, InProcessExecutor())
    server.failures = server.bytes_sent = 0
    run(stage, InProcessExecutor())
    assert [part.read_bytes() for part in sorted((stage.folder).glob("part-*.txt"))] == expected
    assert server.bytes_sent < 0.7 * all_bytes


def test_files_of_a_folder_that_are_not_read_are_counted(tmp_path):
    for name in ("a.txt", "b.TXT.gz", "README.md", ".hidden", "c.docx", "in/d.DOCX", "in/plain"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert len(find_files([str(tmp_path)], (".txt",))) == 2
    found = left_out([str(tmp_path), str(tmp_path / "a.txt")], (".txt",))
    assert found == "files of other formats are left out: 2 .docx, 1 without an extension"
    assert left_out([str(tmp_path / "a.txt")], (".txt",)) is None


@pytest.mark.parametrize(
    ("address", "reason"), [("nonsense://x/a.jsonl", "nonsense"), ("s3://bucket/a.jsonl", "s3")]
)
def test_an_address_that_cannot_be_read_is_one_line(address, reason):
    pytest.importorskip("fsspec")
    with pytest.raises(UserError, match=reason):
        find_files([address], (".jsonl",))


def test_a_small_file_with_a_line_of_150_mb_is_refused_in_bounded_memory(tmp_path):
    """Tables are in test_tables.py."""
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"x" * 150_000_000, 1))
    tracemalloc.start()
    with pytest.raises(UserError, match="longer than 64 MB"):
        list(read_documents(Span(str(tmp_path / "a.txt.gz"), 0, 1 << 20)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 400_000_000


def test_a_text_without_blank_lines_is_divided_into_documents_of_bounded_length(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(documents, "MAX_DOCUMENT", 10_000)
    path = tmp_path / "bookcorpus.txt"
    path.write_text("".join(f"This is sentence {number} of many .\n" for number in range(20_000)))
    found = list(read_documents(Span(str(path), 0, path.stat().st_size)))
    assert max(sum(map(len, document.paragraphs)) for document in found) < 11_000
    words = " ".join(" ".join(document.paragraphs) for document in found).split()
    assert words == path.read_text().split()


def test_errors_name_the_line_in_the_file_also_in_later_spans(tmp_path, monkeypatch):
    monkeypatch.setattr(spans, "SPAN_BYTES", 1000)
    lines = JSONL.splitlines(keepends=True)
    lines[150] = b'{"text": \n'
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(lines))
    with pytest.raises(UserError, match=re.escape(f"{path}:151: not valid JSON")):
        read_all([str(path)])
    found = []
    planned = plan_spans([(str(path), path.stat().st_size)])
    for span in planned:
        found += read_documents(span, on_bad=lambda where, why: None)
    assert len(found) == len(TEXTS) - 1
