"""The reader of GLUE's, SuperGLUE's and people's own files."""

import json

import pytest
from conftest import SHARED, needs_shared_data

from tasks.glue import find_labels
from tasks.glue_files import TASKS, custom_spec, read_examples
from utils.errors import UserError

# Samples in each split, and the labels of the first three samples of the training file.
SHARED_FILES = {
    "cola": ("glue/CoLA", (8551, 527), ["1", "1", "1"]),
    "sst-2": ("glue/SST-2", (6920, 872), ["1", "0", "0"]),
    "mrpc": ("glue/MRPC", (3668, 408), ["1", "0", "1"]),
    "sts-b": ("glue/STS-B", (9092, 1500), ["4.400", "0.800", "3.600"]),
    "boolq": ("superglue/BoolQ", (32,), ["false", "true", "true"]),
    "cb": ("superglue/CB", (32,), ["entailment", "entailment", "entailment"]),
    "superglue-rte": (
        "superglue/RTE",
        (32,),
        ["not_entailment", "not_entailment", "not_entailment"],
    ),
}


@needs_shared_data
@pytest.mark.parametrize("name", SHARED_FILES)
def test_every_line_of_the_real_files_is_a_sample(name):
    folder, counts, first_labels = SHARED_FILES[name]
    task = TASKS[name]
    paths = [task.train_file(SHARED / folder), *task.evaluation_files(SHARED / folder).values()]
    for path, count in zip(paths, counts, strict=False):
        examples = read_examples(path, task, labelled=True)
        assert len(examples) == count
        assert path != paths[0] or examples.labels[:3] == first_labels
        assert all(text.strip() for text in examples.texts)
        assert (examples.pairs is not None) == (task.pair is not None)
        assert task.regression or set(examples.labels) == set(task.labels)
        # Every text is in its line as it stands.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
        for row in range(0, count, 97):
            text = examples.texts[row]
            assert text in (
                json.loads(lines[row]).values()
                if path.suffix == ".jsonl"
                else lines[examples.lines[row] - 1]
            )


MRPC = (
    "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
    '1\t7\t8\tHe said "hi\tThe "witness", he said\r\n'
)
MNLI = (
    "index\tgenre\tsentence1\tsentence2\tlabel1\tgold_label\n0\tfiction\tA.\tB.\tneutral\tneutral\n"
)
CSV = 'review,verdict\r\n"It said no, twice",bad\r\n"two\nlines, one cell",good\r\nplain,good\r\n'

# Claim: file, content, task, and the samples' texts, pairs, labels and, where they matter, other
# attributes.
FILES = {
    "no quoting in .tsv, and a byte-order mark and Windows' line ends": (
        "train.tsv",
        MRPC,
        TASKS["mrpc"],
        ['He said "hi'],
        ['The "witness", he said'],
        ["1"],
        {},
    ),
    "CoLA without a header": (
        "train.tsv",
        "gj04\t0\t*\tThem sleeps.\ngj04\t1\t\tThey sleep.\n",
        TASKS["cola"],
        ["Them sleeps.", "They sleep."],
        None,
        ["0", "1"],
        {},
    ),
    "CoLA's test file with a header": (
        "test.tsv",
        "index\tsentence\n0\tBill slept.\n",
        TASKS["cola"],
        ["Bill slept."],
        None,
        None,
        {"indices": ["0"]},
    ),
    "MNLI with the labels of several people": (
        "dev_matched.tsv",
        MNLI,
        TASKS["mnli"],
        ["A."],
        ["B."],
        ["neutral"],
        {},
    ),
    "truth values and numbers of samples in SuperGLUE": (
        "val.jsonl",
        '{"question": "is it", "passage": "It is.", "idx": 17, "label": true}\n',
        TASKS["boolq"],
        ["is it"],
        ["It is."],
        ["true"],
        {"indices": ["17"]},
    ),
    "one's own .csv as Python's csv module writes it": (
        "own.csv",
        CSV,
        custom_spec("review", None, "verdict", regression=False),
        ["It said no, twice", "two\nlines, one cell", "plain"],
        None,
        ["bad", "good", "good"],
        {"lines": [2, 3, 5]},
    ),
    "numbers as labels in one's own JSON lines": (
        "own.jsonl",
        '{"a": "x", "b": "y", "n": 3}\n{"a": "z", "b": "", "n": 0.5}\n',
        custom_spec("a", "b", "n", regression=True),
        ["x", "z"],
        ["y", ""],
        ["3", "0.5"],
        {},
    ),
}


@pytest.mark.parametrize(
    ("name", "content", "task", "texts", "pairs", "labels", "others"), FILES.values(), ids=FILES
)
def test_a_file_is_read_as_its_samples(tmp_path, name, content, task, texts, pairs, labels, others):
    (tmp_path / name).write_bytes(content.encode())
    is_test = labels is None
    examples = read_examples(tmp_path / name, task, labelled=not is_test, is_test=is_test)
    assert (examples.texts, examples.pairs, examples.labels) == (texts, pairs, labels)
    assert {key: getattr(examples, key) for key in others} == others


def test_mnli_has_two_development_and_two_test_files_and_superglue_one(tmp_path):
    mnli, boolq = TASKS["mnli"], TASKS["boolq"]
    names = [
        path.name
        for files in (mnli.evaluation_files, mnli.test_files)
        for path in files(tmp_path).values()
    ]
    assert names == [
        "dev_matched.tsv",
        "dev_mismatched.tsv",
        "test_matched.tsv",
        "test_mismatched.tsv",
    ]
    assert [path.name for path in boolq.evaluation_files(tmp_path).values()] == ["val.jsonl"]


def test_qqps_lines_that_were_cut_in_two_are_skipped_and_counted(tmp_path, capsys):
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
    lines = [
        header,
        "1\t2\t3\tWhy?\tHow?\t0",
        "4\t5\t6\tWhat is",
        "this?\tThat?\t1",
        "7\t8\t9\tWho?\tWho is?\t1",
    ]
    (tmp_path / "train.tsv").write_text("\n".join(lines) + "\n")
    examples = read_examples(tmp_path / "train.tsv", TASKS["qqp"], labelled=True)
    assert (examples.texts, examples.labels, examples.lines) == (
        ["Why?", "Who?"],
        ["0", "1"],
        [2, 5],
    )
    assert "2 incomplete lines are skipped" in capsys.readouterr().out
    with pytest.raises(UserError, match=":3 has no 'question2'"):
        read_examples(tmp_path / "train.tsv", TASKS["qqp"], labelled=False, is_test=True)


@pytest.mark.parametrize("second", [7, None, "8", True])
def test_samples_of_superglue_have_whole_numbers_of_their_own(tmp_path, second):
    rows = [{"question": "is it", "passage": "It is.", "idx": index} for index in (7, second)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=r":2: 'idx' is .*, expected a unique whole number"):
        read_examples(tmp_path / "test.jsonl", TASKS["boolq"], labelled=False, is_test=True)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("own.csv", b"text,label\n", "holds no samples"),
        ("own.csv", b"text,label\n ,a\n,b\n", "the column 'text' is empty in all rows"),
        ("own.csv", b"text,pair,label\na, ,x\nb,,y\n", "the column 'pair' is empty in all rows"),
        ("own.csv", b"text,label\na,\n", ":2: 'label' is '', expected a label"),
        ("own.csv", b"text,label\na\n", ":2: 1 cells, fewer than the 2 columns: correct the line"),
        ("own.tsv", b"text\tlabel\na\tb\tc\n", ":2: 3 cells, more than the 2 columns"),
        ("own.jsonl", b'{"text": "a", "label": 1}\n{"text": "b"}\n', ":2 has no 'label'"),
        ("own.jsonl", b'{"text": 5, "label": 1}\n', ":1: 'text' is 5, expected a string"),
        ("own.jsonl", b'{"text": "a", "label": null}\n', ":1: 'label' is None, expected a label"),
        ("own.jsonl", b'{"text": "a", "label": NaN}\n', ":1: 'label' is nan, expected a label"),
        ("own.csv", b"text,label\na, 1\n", ":2: 'label' is ' 1', expected a label without space"),
        ("multi.csv", b"text,label\na,\n", "no text has a label"),
        ("multi.csv", b"text,label\na,x||y\n", ":2: 'label' is '', expected a label"),
        ("multi.jsonl", b'{"text": "a", "label": 3}', ":1: 'label' is 3, expected labels"),
        ("multi.jsonl", b'{"text": "a", "label": 0}', ":1: 'label' is 0, expected labels"),
        ("multi.jsonl", b'{"text": "a", "label": {}}', ":1: 'label' is {}, expected labels"),
        (
            "multi.jsonl",
            b'{"text": "a", "label": ["C|C++"]}',
            ":1: 'label' has the label 'C|C++', and '|' separates",
        ),
        (
            "multi.jsonl",
            b'{"text": "a", "label": ["x", null]}',
            ":1: 'label' is None, expected a label",
        ),
        ("own.xlsx", b"PK", "unknown file extension: give a file of .csv, .tsv, .jsonl, .parquet"),
    ],
)
def test_a_bad_line_is_named(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    task = custom_spec(
        "text", "pair" if b"pair" in content else None, "label", multi_label="multi" in name
    )
    with pytest.raises(UserError) as error:
        find_labels(read_examples(tmp_path / name, task, labelled=True), task)
    assert f"{name}{says}" in str(error.value) or (
        says in str(error.value) and not says.startswith(":")
    )
