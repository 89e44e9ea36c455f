"""The reader of GLUE's, SuperGLUE's and people's own files."""

import json
from dataclasses import replace
from datetime import date
from decimal import Decimal

import pyarrow.parquet
import pytest
from conftest import SHARED, needs_shared_data, write_json_lines

from bert_recipe.tasks.classification.files import read_examples
from bert_recipe.tasks.classification.specs import TASKS, custom_spec
from bert_recipe.tasks.classification.task import find_labels
from bert_recipe.tasks.labels import check_spelling, sort_labels
from bert_recipe.tasks.reading import ReadingOptions
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.output_tables import encode_table

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
        # Every text is unchanged in its line.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
        for row in range(0, count, 97):
            text = examples.texts[row]
            assert text in (
                json.loads(lines[row]).values()
                if path.suffix == ".jsonl"
                else lines[examples.lines[row] - 1]
            )


def test_wic_is_read_as_it_is_published(tmp_path):
    row = {"word": "place", "sentence1": "Come to my place.", "sentence2": "No place for us."}
    rows = [row | {"idx": index, "label": bool(index), "start1": 11} for index in range(2)]
    path = TASKS["wic"].train_file(tmp_path)
    write_json_lines(path, rows)
    examples = read_examples(path, TASKS["wic"], labelled=True)
    assert path.name == "train.jsonl" and examples.labels == ["false", "true"]
    assert (examples.texts[0], examples.pairs[0]) == (row["sentence1"], row["sentence2"])


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
    "your own .csv as Python's csv module writes it": (
        "own.csv",
        CSV,
        custom_spec("review", None, "verdict", regression=False),
        ["It said no, twice", "two\nlines, one cell", "plain"],
        None,
        ["bad", "good", "good"],
        {"lines": [2, 3, 5]},
    ),
    "numbers as labels in your own JSON lines": (
        "own.jsonl",
        '{"a": "x", "b": "y", "n": 3}\n{"a": "z", "b": "", "n": 0.5}\n',
        custom_spec("a", "b", "n", regression=True),
        ["x", "z"],
        ["y", ""],
        ["3", "0.5"],
        {},
    ),
    "second texts that are wrong": (
        "mined.csv",
        "q,p,n1,n2\nWhy?,Because.,No.,Yes.\nWho?,Anna.,Bob.,No.\n",
        custom_spec("q", "p", "", negatives=("n1", "n2")),
        ["Why?", "Why?", "Why?", "Who?", "Who?", "Who?"],
        ["Because.", "No.", "Yes.", "Anna.", "Bob.", "No."],
        ["1", "0", "0", "1", "0", "0"],
        {"lines": [2, 2, 2, 3, 3, 3]},
    ),
    "lists of texts, as in FlagEmbedding's files": (
        "mined.jsonl",
        '{"query": "Why?", "pos": ["So.", "Thus."], "neg": ["No."]}\n'
        '{"query": "Who?", "pos": "Anna.", "neg": ["Bob.", "No."]}\n',
        custom_spec("query", "pos", "", negatives=("neg",)),
        ["Why?", "Why?", "Why?", "Who?", "Who?", "Who?"],
        ["So.", "Thus.", "No.", "Anna.", "Bob.", "No."],
        ["1", "1", "0", "1", "0", "0"],
        {"lines": [1, 1, 1, 2, 2, 2]},
    ),
}


@pytest.mark.parametrize(
    ("name", "content", "task", "texts", "pairs", "labels", "others"), FILES.values(), ids=FILES
)
def test_a_file_is_read_as_its_samples(tmp_path, name, content, task, texts, pairs, labels, others):
    (tmp_path / name).write_bytes(content.encode())
    is_test = labels is None
    examples = read_examples(tmp_path / name, task, labelled=not is_test, is_test=is_test)
    assert (examples.texts, examples.pairs, examples.labels) == (texts, pairs, labels or [])
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
    with pytest.raises(UserError, match=r"line 3: no column 'question2'"):
        read_examples(tmp_path / "train.tsv", TASKS["qqp"], labelled=False, is_test=True)


@pytest.mark.parametrize("second", [7, None, "8", True])
def test_samples_of_superglue_have_whole_numbers_of_their_own(tmp_path, second):
    rows = [{"question": "is it", "passage": "It is.", "idx": index} for index in (7, second)]
    write_json_lines(tmp_path / "test.jsonl", rows)
    with pytest.raises(UserError, match=r":2: 'idx' is .*, expected a unique whole number"):
        read_examples(tmp_path / "test.jsonl", TASKS["boolq"], labelled=False, is_test=True)


MULTI = custom_spec("text", None, "label", multi_label=True)
ROWS = "text,label\n"


@pytest.mark.parametrize(
    ("content", "labels"),
    [
        ("a,x|y\nb,\nc,y\n", [("x", "y"), (), ("y",)]),
        ("a,x | y\nb,z\n", [("x", "y"), ("z",)]),
        ("a,\"['x', 'y, z']\"\nb,['w']\nc,[]\n", [("x", "y, z"), ("w",), ()]),
        ('a,"[""x"", ""y""]"\nb,"[3, 4]"\nc,[3]\n', [("x", "y"), ("3", "4"), ("3",)]),
        ("a,[x]\nb,C/C++\n", [("[x]",), ("C/C++",)]),
    ],
)
def test_cells_with_several_labels_are_read_as_other_tools_write_them(tmp_path, content, labels):
    (tmp_path / "a.csv").write_text(ROWS + content)
    examples = read_examples(tmp_path / "a.csv", MULTI, labelled=True)
    assert examples.label_sets == labels
    find_labels(examples, MULTI)


def test_a_separator_of_ones_own_divides_labels_and_nothing_else(tmp_path):
    for separator, content, labels in (
        ("#", "a,x#y\nb,x\n", [("x", "y"), ("x",)]),
        ("\n", 'a,"x\ny"\nb,x\n', [("x", "y"), ("x",)]),
        ("|", "a,x;y\nb,x;z\n", [("x;y",), ("x;z",)]),
        (";", "a,[x]; y\n", [("[x]", "y")]),
    ):
        spec = custom_spec("text", None, "label", multi_label=True, label_separator=separator)
        (tmp_path / "a.csv").write_text(ROWS + content)
        examples = read_examples(tmp_path / "a.csv", spec, labelled=True)
        assert examples.label_sets == labels
        find_labels(examples, spec)


def test_columns_of_0_and_1_are_labels(tmp_path):
    spec = custom_spec(
        "text", None, "toxic", multi_label=True, label_columns=("toxic", "threat", "insult")
    )
    (tmp_path / "a.csv").write_text("text,toxic,threat,insult\na,1,0,1.0\nb,0,0,false\n")
    examples = read_examples(tmp_path / "a.csv", spec, labelled=True)
    assert examples.label_sets == [("toxic", "insult"), ()]
    assert find_labels(examples, spec) == ("insult", "threat", "toxic")


def test_one_class_may_be_in_a_list(tmp_path):
    spec = custom_spec("text", None, "label")
    (tmp_path / "a.jsonl").write_text(
        '{"text": "a", "label": ["x"]}\n{"text": "b", "label": "y"}\n'
    )
    assert read_examples(tmp_path / "a.jsonl", spec, labelled=True).labels == ["x", "y"]


def test_combinations_as_classes_are_a_warning(tmp_path, capsys):
    spec = custom_spec("text", None, "label")
    (tmp_path / "a.csv").write_text(f"{ROWS}a,x;y\nb,x;z\nc,y;z\nd,x\n")
    find_labels(read_examples(tmp_path / "a.csv", spec, labelled=True), spec)
    assert "'x;y' is one class; if these are several labels, use" in capsys.readouterr().out


BAD_ROWS = (
    "text,label\na,x\nb,\nc,\nd,['p' 'q']\ne,y,z\nf,\ng,\nh,y\n"  # empty, NumPy's, too many cells
)


def test_all_kinds_of_bad_rows_are_named_at_once_or_left_out(tmp_path, capsys):
    path = tmp_path / "a.csv"
    spec = custom_spec("text", None, "label")
    path.write_text(BAD_ROWS)
    with pytest.raises(UserError) as error:
        read_examples(path, spec, labelled=True)
    message = str(error.value)
    assert message.startswith(f"{path}: 6 bad rows: line 3: 'label' is '', expected a label")
    assert "(also at line 4, line 7 and 1 more)" in message and "--skip-bad" in message
    assert "line 5: 'label' is \"['p' 'q']\", which is neither JSON's nor Python's list" in message
    assert "line 6: 3 cells, more than the 2 columns" in message
    reading = ReadingOptions(skip_bad=True, output_dir=tmp_path / "out")
    examples = read_examples(path, spec, labelled=True, reading=reading)
    assert (examples.texts, examples.labels, examples.lines) == (["a", "h"], ["x", "y"], [2, 9])
    log = (tmp_path / "out" / "skipped_a.csv.log").read_text().splitlines()
    assert len(log) == 6 and log[0].startswith(f"{path}:3: 'label' is ''")
    assert "6 bad rows are left out, see" in capsys.readouterr().out
    read_examples(path, spec, labelled=True, reading=reading)  # as for --eval-fraction
    assert "left out" not in capsys.readouterr().out
    with pytest.raises(UserError, match="6: 3 cells"):  # each row needs a prediction
        read_examples(path, spec, labelled=False, is_test=True, reading=reading)
    path.write_text('text,label\na,x\n"b,y\nc,z\n')  # the rest of the file would be lost
    with pytest.raises(UserError, match=r"after line 2: .*the quotation mark of line 3 is not"):
        read_examples(path, spec, labelled=True, reading=reading)


def test_the_log_of_rows_left_out_is_of_the_first_process_and_of_both_files_of_a_name(
    tmp_path, monkeypatch, capsys
):
    reading = ReadingOptions(skip_bad=True, output_dir=tmp_path)
    train, dev = tmp_path / "train/a.csv", tmp_path / "dev/a.csv"

    def leave_out(path, *lines) -> list[str]:
        bad = reading.bad_rows(path)
        for line in lines:
            bad.add(f"{path}:{line}", "no\nlabel")
        bad.finish()
        log = tmp_path / "skipped_a.csv.log"
        return log.read_text().splitlines() if log.exists() else []

    of_train = leave_out(train, 2, 3)
    assert of_train == [f"{train}:2: no label", f"{train}:3: no label"]
    assert leave_out(dev, 5) == [*of_train, f"{dev}:5: no label"]
    assert leave_out(train) == [f"{dev}:5: no label"]  # the file was corrected
    capsys.readouterr()
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("MASTER_ADDR", "a")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    assert leave_out(dev) == [f"{dev}:5: no label"] and leave_out(dev, 6) == leave_out(dev)
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    assert leave_out(dev) == []


@pytest.mark.parametrize(
    ("known", "written", "read"),
    [
        (("1", "2"), "1.0", "1"),  # pandas, where a number of the column is missing
        (("1.0", "2.0"), "2", "2.0"),
        (("false", "true"), "True", "true"),
        (("1", "1.0"), "1.0", "1.0"),
        (("neutral", "entailment"), "ENTAILMENT", "entailment"),
    ],
)
def test_labels_of_equal_value_in_another_file_are_the_same(tmp_path, known, written, read, capsys):
    (tmp_path / "a.csv").write_text(f"text,label\na,{written}\n")
    spec = replace(custom_spec("text", None, "label"), labels=known)
    assert read_examples(tmp_path / "a.csv", spec, labelled=True).labels == [read]
    note = f"a.csv: labels are read as those that are known: {written!r} as {read!r}\n"
    assert (note in capsys.readouterr().out) == (written != read)


@pytest.mark.parametrize(
    "codes",
    [
        ("1.1", "1.10"),
        ("250.0", "250.00", "250.11"),
        ("250.0", "250", "250.11"),
        ("007", "7"),
        ("V30.0", "V30.00"),
    ],
)
def test_codes_are_text(tmp_path, codes, capsys):
    """Of a training file, and in another one, where a code that is not known is an error."""
    rows = [f"text {row},{code}\n" for row, code in enumerate(2 * codes)]
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(rows))
    spec = custom_spec("text", None, "label")
    examples = read_examples(tmp_path / "a.csv", spec, labelled=True)
    labels = find_labels(examples, spec)
    assert examples.labels == [*codes, *codes] and sorted(labels) == sorted(codes)
    output = capsys.readouterr().out
    assert ("add --regression if they are numbers" in output) == (codes[0] in ("1.1", "250.0"))
    known = replace(spec, labels=codes[1:])
    with pytest.raises(UserError, match=f"label '{codes[0]}', expected one of"):
        read_examples(tmp_path / "a.csv", known, labelled=True)


@pytest.mark.parametrize(
    ("cell", "labels"),
    [
        ("\"{'b', 'a'}\"", ("a", "b")),
        ("{'a'}", ("a",)),
        ("set()", ()),
        ("\"frozenset({'a', 'b'})\"", ("a", "b")),
        ("\"('a', 'b')\"", ("a", "b")),
        ("\"('a',)\"", ("a",)),
        ("()", ()),
        ('"{2, 1}"', ("1", "2")),
        ("(other)", ("(other)",)),
        ("{other}|x", ("{other}", "x")),
        (' "a|b"', ("a", "b")),
    ],
)
def test_collections_of_pandas_are_several_labels(tmp_path, cell, labels):
    (tmp_path / "a.csv").write_text(f"text,label\nsome text,{cell}\n")
    spec = custom_spec("text", None, "label", multi_label=True)
    assert read_examples(tmp_path / "a.csv", spec, True).label_sets == [labels]


@pytest.mark.parametrize(
    ("cell", "label"),
    [
        (' "x"', "x"),
        (' "x y" ', "x y"),
        ('"(0, 5)"', "(0, 5)"),
        ("{a}", "{a}"),
        ('"""x"""', '"x"'),
        ("[not sure]", "[not sure]"),
        ("\"('a',)\"", "a"),
        ("{'a'}", "a"),
    ],
)
def test_labels_of_single_classes_are_text(tmp_path, cell, label):
    (tmp_path / "a.csv").write_text(f"text,label\nsome text,{cell}\n")
    spec = custom_spec("text", None, "label")
    assert read_examples(tmp_path / "a.csv", spec, True).labels == [label]


def test_large_numbers_that_differ_are_two_labels(tmp_path):
    numbers = [str(2**63), str(2**63 + 1)]
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"a,{n}\n" for n in numbers))
    spec = custom_spec("text", None, "label")
    examples = read_examples(tmp_path / "a.csv", spec, True)
    check_spelling(tmp_path / "a.csv", examples.labels)
    assert sort_labels(numbers[::-1]) == tuple(numbers)


def test_decimals_and_dates_of_parquet_are_labels(tmp_path):
    labels = [Decimal("1.10"), Decimal("1.20")]
    days = [date(2024, 1, 2), date(2024, 1, 3)]
    table = pyarrow.table({"text": ["a", "b"], "code": labels, "day": days})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    for name, expected in (("code", ["1.10", "1.20"]), ("day", ["2024-01-02", "2024-01-03"])):
        spec = custom_spec("text", None, name)
        assert read_examples(tmp_path / "a.parquet", spec, True).labels == expected


@pytest.mark.parametrize(
    ("texts", "is_quoted"),
    [
        (['he said "hi"', "plain", '"'], True),
        (["two\nlines", "plain"], True),
        (["a\ttab", 'a "quote"'], True),
        (['"all of it"', "plain"], False),  # which is the text without quoting
        (['"begins" so', 'he said "hi"'], False),
        (['"not closed', 'he said ""', "plain"], False),
        (['""twice""', '"x" y'], False),
    ],
)
def test_a_tsv_file_with_quoting_is_read_as_pandas_writes_it(tmp_path, texts, is_quoted):
    path = tmp_path / "a.tsv"
    lines = [f"{text}\tx\n" for text in texts]
    path.write_text("text\tlabel\n" + "".join(lines))
    if is_quoted:
        rows = [{"text": text, "label": "x"} for text in texts]
        path.write_bytes(encode_table(path, rows))
    assert read_examples(path, custom_spec("text", None, "label"), True).texts == texts


def test_classes_of_annotation_tools_are_read(tmp_path):
    """Label Studio's JSON-MIN, and Prodigy's answers, which are a class if the user says so."""
    rows = [{"text": "b", "mood": {"choices": ["bad"]}}, {"text": "c", "mood": "bad"}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    examples = read_examples(tmp_path / "a.json", custom_spec("text", None, "mood"), labelled=True)
    assert (examples.texts, examples.labels) == (["b", "c"], ["bad", "bad"])
    answers = [{"text": "a", "answer": answer, "_task_hash": 1} for answer in ("accept", "reject")]
    write_json_lines(tmp_path / "b.jsonl", answers)
    spec = custom_spec("text", None, "answer")
    assert read_examples(tmp_path / "b.jsonl", spec, True).labels == ["accept", "reject"]
