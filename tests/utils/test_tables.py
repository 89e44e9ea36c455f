"""The reader and writer of tables: every format and compression, and one line for whatever is bad
in a file.
"""

import bz2
import csv
import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from bert_recipe.utils.errors import UserError
from bert_recipe.utils.output_tables import encode_table
from bert_recipe.utils.tables import read_rows
from bert_recipe.utils.text_files import TableFormat, TextFile

ROWS = [
    {"id": "1", "text": "plain"},
    {"id": "", "text": 'naïve, "so-called"\nsecond line\u2028\x85'},
]


def write(path: Path, rows: list[dict]) -> Path:
    path.write_bytes(encode_table(path, rows))
    return path


def read(path: Path, *args, **options) -> list[tuple[int, dict]]:
    return list(read_rows(TextFile(path), *args, **options))


@pytest.mark.parametrize("name", ["a.csv", "a.CSV.gz", "a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_what_is_written_is_read(tmp_path, name):
    if "parquet" in name:
        pytest.importorskip("pyarrow")
    rows = read(write(tmp_path / name, ROWS))
    assert [row for _, row in rows] == ROWS
    assert [number for number, _ in rows] == ([2, 3] if "csv" in name.lower() else [1, 2])


def test_tables_of_other_programs_are_read(tmp_path):
    """Python's csv module, compression, line ends of Windows, and BOMs."""
    lines = ["id,text", '1,"a ""b"", c"', '2,"two\nlines"', "3,d"]
    expected = [
        {"id": "1", "text": 'a "b", c'},
        {"id": "2", "text": "two\nlines"},
        {"id": "3", "text": "d"},
    ]
    for end in ("\n", "\r\n"):
        content = ("\ufeff" + end.join(lines) + end).encode()
        for compress, suffix in ((bytes, ""), (gzip.compress, ".gz"), (bz2.compress, ".bz2")):
            path = tmp_path / f"a.csv{suffix}"
            path.write_bytes(compress(content))
            assert [row for _, row in read(path)] == expected
    (tmp_path / "c.jsonl").write_text('\n{"a": 1}\n\n{"a": 2}', newline="")
    assert [row["a"] for _, row in read(tmp_path / "c.jsonl")] == [1, 2]
    (tmp_path / "c.tsv").write_text('a\tb\n"1\r2\t"\n', newline="")
    assert read(tmp_path / "c.tsv") == [(2, {"a": '"1\r2', "b": '"'})]


def test_classes_of_hugging_face_have_their_names(tmp_path):
    """`datasets` writes numbers, and their names into the metadata; -1 is no label."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    names = {"names": ["O", "B-PER"], "_type": "ClassLabel"}
    features = {"tag": names, "tags": {"feature": names, "_type": "List"}, "old": [names]}
    columns = {"tag": [1, 0, -1], "tags": [[0, 1], [], None], "old": [[1]] * 3, "n": [1] * 3}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pyarrow.table(columns).replace_schema_metadata(metadata)
    parquet.write_table(table, tmp_path / "a.parquet")
    rows = [tuple(row.values()) for _, row in read(tmp_path / "a.parquet")]
    tags = [("B-PER", ["O", "B-PER"]), ("O", []), (None, None)]
    assert rows == [(*cells, ["B-PER"], 1) for cells in tags]
    assert read(tmp_path / "a.parquet", ["tag"])[0] == (1, {"tag": "B-PER"})


def test_lines_of_a_text_file_are_a_table_for_programs_that_have_flags(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one, two\n\n  three\t4\r\n", newline="")
    file = TextFile(path, table_format=TableFormat())
    texts = ["one, two", "", "  three\t4"]
    assert list(read_rows(file)) == [(n, {"text": text}) for n, text in enumerate(texts, 1)]
    with pytest.raises(UserError, match="no column 'label'; it has 'text'"):
        list(read_rows(TextFile(path, table_format=TableFormat()), ["text", "label"]))


BAD = [
    ("a.csv", b"", ": the file is empty"),
    (
        "a.csv",
        b"text|label\na|1\n",
        ": no column 'text'; it has 'text|label': separate the columns with commas, in",
    ),
    (
        "a.csv",
        b"body,label\na,1\n",
        ": no column 'text'; it has 'body', 'label': check the column's name",
    ),
    ("a.csv", b"text,text\na,b\n", ": two columns 'text': rename one"),
    (
        "a.csv",
        b"text,label\na,1\nb,c,1\n",
        ":3: 3 cells, more than the 2 columns: quote cells with commas",
    ),
    (
        "a.csv",
        b'text\nx\n"two\nlines\n',
        ", after line 2: not valid CSV (unexpected end of data): the",
    ),
    ("a.csv", b'text\n"a"b\n', ":2: not valid CSV"),
    ("a.csv", b"text\na\xff\n", ":2: not UTF-8 (byte 0xff at 1): convert it with iconv"),
    ("a.csv", b"text\na\0b\n", ":2: NUL bytes"),
    ("a.csv", "text\na\n".encode("utf-16"), ": UTF-16, not UTF-8: convert it with iconv -f UTF-16"),
    ("a.jsonl", "{}".encode("utf-16"), ": UTF-16, not UTF-8"),
    ("a.jsonl", "{}".encode("utf-32"), ": UTF-32, not UTF-8: convert it with iconv -f UTF-32"),
    ("a.tsv", b"text\tb\na\tb\tc\n", ":2: 3 cells, more than the 2 columns: correct"),
    ("a.jsonl", b"[]\n", ":1: not a JSON object"),
    ("a.jsonl", b"{\n", ":1: not valid JSON"),
    ("a.jsonl", b'{"x": ' + b"[" * 200_000, ":1: not valid JSON"),
    ("a.jsonl", b'{"text": "\\ud83d a"}\n', ":1: half of a surrogate pair"),
    ("a.jsonl", b'{"text": ["x", {"y": "\\u0000"}]}\n', ":1: NUL characters"),
    (
        "a.csv.gz",
        gzip.compress(b"text\na\n", mtime=0)[:-6],
        ", after line 2: the file is truncated or damaged",
    ),
    ("a.parquet", b"PAR1 not parquet", ", after row 0: the parquet file is truncated or damaged"),
]


@pytest.mark.parametrize(("name", "content", "says"), BAD)
def test_what_is_bad_is_named_with_its_place(tmp_path, name, content, says):
    if "parquet" in name:
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        read(tmp_path / name, ["text"], exact=True)
    assert str(error.value).startswith(f"{tmp_path / name}{says}")


def test_bad_rows_are_left_out_if_asked(tmp_path):
    content = b'{"text": "a"}\n{\n{"text": "\\ud83d"}\n\xff\n{"text": "b"}\n'
    (tmp_path / "a.jsonl").write_bytes(content)
    bad: list[str] = []
    file = TextFile(tmp_path / "a.jsonl", lambda where, why: bad.append(where.rpartition(":")[2]))
    assert [(number, row["text"]) for number, row in read_rows(file, ["text"])] == [
        (1, "a"),
        (5, "b"),
    ]
    assert bad == ["2", "3", "4"]


@pytest.mark.parametrize(
    ("name", "start", "part", "count"),
    [
        ("a.csv", b'text\n"', b"x" * 1_000_000, 300),
        ("a.csv.gz", b'text\n"', (b"x" * 9999 + b"\n") * 100, 150),
        ("a.jsonl.gz", b'{"text": "', b"x" * 1_000_000, 150),
        ("a.tsv", b"text\n", b"x" * 1_000_000, 150),
    ],
)
def test_a_cell_of_hundreds_of_megabytes_is_refused_in_bounded_memory(
    tmp_path, name, start, part, count
):
    with (gzip.open if ".gz" in name else open)(
        tmp_path / name, "wb", **{"compresslevel": 1} if ".gz" in name else {}
    ) as file:
        file.write(start)
        for _ in range(count):
            file.write(part)
    tracemalloc.start()
    with pytest.raises(UserError, match=r"longer than 64 MB|field larger than"):
        read(tmp_path / name, ["text"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 400_000_000


def test_values_of_any_type_are_written(tmp_path):
    datetime = pytest.importorskip("datetime")
    row = {
        "text": "a\tb",
        "none": None,
        "list": [1, "é"],
        "yes": True,
        "day": datetime.date(2020, 2, 3),
        "raw": b"x",
    }
    ((_, cells),) = read(write(tmp_path / "a.csv", [row]))
    expected = {
        "text": "a\tb",
        "none": "",
        "list": '[1, "\\u00e9"]',
        "yes": "true",
        "day": "2020-02-03",
        "raw": "b'x'",
    }
    assert cells == expected
    assert json.loads(encode_table(tmp_path / "a.jsonl", [row]))["day"] == "2020-02-03"
    assert csv.field_size_limit() == 64 << 20


def test_a_row_with_a_value_that_python_lacks_is_bad(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    far = pyarrow.array([10**12], pyarrow.timestamp("s"))
    parquet.write_table(pyarrow.table({"text": ["a"], "day": far}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a.parquet, row 1: Python has no such value"):
        read(tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", ["text"]) == [(1, {"text": "a"})]


RECORDS_OF_LINES = {
    "cells.csv": (b'text,n\na,1\n"b\xff\nc",2\n"d\ne\xff\xfe\nf",3\n"g\nh",4\ni,5\n', [2, 8, 10]),
    "rows.json": (
        b'[{"text": "a",\n"n": "1"}, {"text": "b",\n"x": "\xff",\n"n": "2"},\n{"text": "c"}]',
        [1, 3],
    ),
    "rows.jsonl": (b'{"text": "a"}\n{"text": "\xff"}\n{"text": "c"}\n', [1, 3]),
    "rows.tsv": (b"text\na\n\xff\nc\n", [2, 4]),
    "quoted.tsv": (b'text\tn\n"a\nb"\t1\n"c\n\xff"\t2\n"d\n\ne"\t3\nf\t4\n', [2, 6, 9]),
}


@pytest.mark.parametrize("name", RECORDS_OF_LINES)
def test_bad_bytes_end_the_record_and_lines_are_numbered_on(name, tmp_path):
    content, expected = RECORDS_OF_LINES[name]
    (tmp_path / name).write_bytes(content)
    bad = []
    file = TextFile(tmp_path / name, lambda *problem: bad.append(problem))
    rows = list(read_rows(file, exact=True))
    assert [number for number, _ in rows] == expected
    assert all(set("abcdefghi") >= set(row["text"]) - {"\n"} for _, row in rows)
    assert len(bad) == (2 if name == "cells.csv" else 1)
    assert all("not UTF-8" in why for _, why in bad)


# Lines of TSV after a header, the texts in them, and how many rows are bad. The second cell is 1.
TSV_TEXTS = [
    (['"He said\t1', "nice\t1", 'fine end"\t1'], ['"He said', "nice", 'fine end"'], 0),
    (['"a ""b"""\t1', "c\t1", ""], ['a "b"', "c"], 0),
    (['"a ""b"""\t1', '"c ""d"""\t1', '"e" f\t1'], ['a "b"', 'c "d"'], 1),
    (['"two', 'lines"\t1', "b\t1\t", "c\t1"], ["two\nlines", "c"], 1),
    (['"two\tcells"\t1', "b\t1"], ["two\tcells", "b"], 0),
    (['"Hello," he said\t1', '"bye"\t1', "b\t1\t1"], ['"Hello," he said', '"bye"'], 1),
]


@pytest.mark.parametrize(("lines", "texts", "num_bad"), TSV_TEXTS)
def test_quoting_of_tsv_is_found_where_more_rows_fit_with_it(lines, texts, num_bad, tmp_path):
    (tmp_path / "a.tsv").write_text("\n".join(["text\tn", *lines, ""]))
    bad = []
    file = TextFile(tmp_path / "a.tsv", lambda *problem: bad.append(problem))
    rows = [row for _, row in read_rows(file, exact=True)]
    assert rows == [{"text": text, "n": "1"} for text in texts]
    assert len(bad) == num_bad


def test_a_tsv_whose_cells_are_all_quoted_is_read(tmp_path):
    (tmp_path / "a.tsv").write_text('"text"\t"n"\n"a"\t"1"\n')
    assert read(tmp_path / "a.tsv", exact=True) == [(2, {"text": "a", "n": "1"})]


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.tsv", "a.jsonl", "a.txt.gz"])
def test_line_ends_of_old_macs_are_named(tmp_path, name):
    content = b'{"text": "a"}\r{"text": "b"}\r' if "json" in name else b"text\ra\rb\r"
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(UserError, match="lines end with carriage returns, as on old Macs: convert"):
        list(read_rows(TextFile(tmp_path / name, table_format=TableFormat())))


def test_carriage_returns_that_end_no_line_are_read(tmp_path):
    """JSON has them as spaces, and a file of one line at its end."""
    (tmp_path / "a.json").write_bytes(b'[{"text":\r"a"}]')
    assert read(tmp_path / "a.json") == [(1, {"text": "a"})]
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\r')
    assert read(tmp_path / "a.jsonl") == [(1, {"text": "a"})]
