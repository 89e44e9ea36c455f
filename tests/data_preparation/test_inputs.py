"""Where text may come from: compressions, formats, and files that are divided among
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
from conftest import ROOT

from bert_recipe.data_preparation.engine.input_files import find_files, left_out
from bert_recipe.data_preparation.sources import documents, spans
from bert_recipe.data_preparation.sources.documents import read_documents
from bert_recipe.data_preparation.sources.spans import Span, plan_spans
from bert_recipe.data_preparation.stages import text_files
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import files_below
from bert_recipe.utils.output_tables import encode_table
from bert_recipe.utils.text_files import TableFormat, table_parts
from scripts.pretraining_plan import text_bytes

TEXTS = [f"Text {number} is here. " * random.Random(number).randint(1, 60) for number in range(200)]
JSONL = "".join(
    json.dumps({"text": text, "id": number}) + "\n" for number, text in enumerate(TEXTS)
).encode()
TSV = "".join(
    ["id\ttext\n", *(f"{number}\t{text}\n" for number, text in enumerate(TEXTS))]
).encode()


def read_all(paths: list[str], **options) -> list[str]:
    """The texts of files, read in the spans that tasks get."""
    contents = plan_spans([(path, Path(path).stat().st_size) for path in paths])
    contents = [document for span in contents for document in read_documents(span, **options)]
    return [" ".join(" ".join(document.paragraphs).split()) for document in contents]


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


@pytest.mark.parametrize(("name", "delimiter"), [("a.tsv", None), ("a.csv", ";"), ("a.csv", "\t")])
def test_tables_are_read_as_pandas_and_spreadsheets_write_them(tmp_path, name, delimiter):
    texts = ['he said "hi"', "two\nlines; and, more", "plain"]
    path = tmp_path / name
    rows = [{"id": "1", "text": text} for text in texts]
    path.write_bytes(encode_table(path, rows, TableFormat(delimiter, "utf-8-sig")))
    assert read_all([str(path)]) == ['he said "hi"', "two lines; and, more", "plain"]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])
def test_a_truncated_or_empty_compressed_file_is_refused(tmp_path, suffix):
    path = tmp_path / f"a.txt{suffix}"
    content = compress("\n\n".join(TEXTS).encode(), suffix)
    for size, reason in ((len(content) // 2, "truncated"), (0, "is empty")):
        path.write_bytes(content[:size])
        with pytest.raises(UserError, match=reason):
            read_all([str(path)])


def test_the_parts_of_a_dump_are_read(tmp_path):
    part = tmp_path / "enwiki-20260101-pages-articles1.xml-p1p41242.bz2"
    part.touch()
    assert find_files([str(tmp_path)], (".xml",)) == [str(part)]
    assert len(plan_spans([(str(part), 5 * spans.SPAN_BYTES)])) == 5


def test_links_are_followed_and_no_file_is_read_twice(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("A text.")
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "folder" / "around").symlink_to(tmp_path / "folder")
    paths = find_files([str(tmp_path / "folder")], (".txt",))
    assert paths == [str(tmp_path / "folder" / "link" / "a.txt")]
    for again in ("elsewhere/a.txt", "folder/../elsewhere", "folder"):
        with pytest.raises(UserError, match=r"a.txt is named twice"):
            find_files([str(tmp_path / "elsewhere"), f"{tmp_path}/{again}"], (".txt",))


def make_parquet(texts: list[str]) -> bytes:
    parquet = pytest.importorskip("pyarrow.parquet")
    file = io.BytesIO()
    columns = {"id": list(range(len(texts))), "more": [text[::-1] for text in texts], "text": texts}
    parquet.write_table(
        pytest.importorskip("pyarrow").table(columns),
        file,
        row_group_size=7,
        write_statistics=False,
    )
    return file.getvalue()


def test_row_groups_of_a_parquet_file_are_read_in_spans(tmp_path, monkeypatch):
    monkeypatch.setattr(spans, "SPAN_BYTES", 5_000)
    path = tmp_path / "a.parquet"
    path.write_bytes(make_parquet(TEXTS))
    assert len(plan_spans([(str(path), path.stat().st_size)])) > 1
    assert read_all([str(path)]) == EXPECTED


def test_files_of_a_folder_that_are_not_read_are_counted(tmp_path):
    hidden = (".hidden", "._a.txt", ".ipynb_checkpoints/a-checkpoint.txt", ".cache/a.docx")
    for name in (*hidden, "a.txt", "b.TXT.gz", "README.md", "c.docx", "in/d.DOCX", "in/plain"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert len(find_files([str(tmp_path)], (".txt",))) == 2
    counts = left_out([str(tmp_path), str(tmp_path / "a.txt")], (".txt",))
    assert counts == "files of other formats are left out: 2 .docx, 1 without an extension"
    assert left_out([str(tmp_path / "a.txt")], (".txt",)) is None


READERS = {
    "texts": lambda folder: find_files([str(folder)], (".txt",)),
    "prepared text": lambda folder: [entry["path"] for entry in text_files(folder, "format")],
    "parts of a table": lambda folder: table_parts(folder / "*.txt"),
    "logs and shards": lambda folder: files_below(folder, (".txt",)),
    "size of a plan": lambda folder: ["a.txt"] * int(text_bytes(folder)),
}


@pytest.mark.parametrize("reader", READERS)
def test_hidden_copies_in_a_folder_are_not_read(tmp_path, reader):
    """Such as those of Jupyter and macOS, which would double the text."""
    for name in ("a.txt", "._a.txt", ".ipynb_checkpoints/a-checkpoint.txt", "t/.a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("A")
    assert [Path(path).name for path in READERS[reader](tmp_path)] == ["a.txt"]


def test_compressed_texts_count_as_text_in_the_plan_of_a_model(tmp_path):
    (book, *_) = sorted(
        (ROOT / "data/sample").rglob("*.txt"), key=lambda path: -path.stat().st_size
    )
    text = book.read_bytes()
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text))
    (tmp_path / "b.txt.bz2").write_bytes(bz2.compress(text))
    assert 1.3 * len(text) < text_bytes(tmp_path) < 2.7 * len(text)


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
    divided = list(read_documents(Span(str(path), 0, path.stat().st_size)))
    assert max(sum(map(len, document.paragraphs)) for document in divided) < 11_000
    words = " ".join(" ".join(document.paragraphs) for document in divided).split()
    assert words == path.read_text().split()


def test_errors_name_the_line_in_the_file_also_in_later_spans(tmp_path, monkeypatch):
    monkeypatch.setattr(spans, "SPAN_BYTES", 1000)
    lines = JSONL.splitlines(keepends=True)
    lines[150] = b'{"text": \n'
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(lines))
    with pytest.raises(UserError, match=re.escape(f"{path}:151: not valid JSON")):
        read_all([str(path)])
    contents = []
    planned = plan_spans([(str(path), path.stat().st_size)])
    for span in planned:
        contents += read_documents(span, on_bad=lambda where, why: None)
    assert len(contents) == len(TEXTS) - 1
