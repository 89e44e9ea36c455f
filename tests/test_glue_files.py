"""The reader of GLUE's, SuperGLUE's and people's own files."""

import csv
import json

import pytest
from conftest import SHARED, needs_shared_data

from tasks.glue import find_labels
from tasks.glue_files import TASKS, custom_task, read_examples
from utils.errors import UserError

# --- the files as distributed -----------------------------------------------------------------------------------------

# Samples in each split, and the labels of the first three samples of the training file.
SHARED_FILES = {
    "cola": ("glue/CoLA", (8551, 527), ["1", "1", "1"]),
    "sst-2": ("glue/SST-2", (6920, 872), ["1", "0", "0"]),
    "mrpc": ("glue/MRPC", (3668, 408), ["1", "0", "1"]),
    "sts-b": ("glue/STS-B", (9092, 1500), ["4.400", "0.800", "3.600"]),
    "boolq": ("superglue/BoolQ", (32,), ["false", "true", "true"]),
    "cb": ("superglue/CB", (32,), ["entailment", "entailment", "entailment"]),
    "superglue-rte": ("superglue/RTE", (32,), ["not_entailment", "not_entailment", "not_entailment"]),
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
                json.loads(lines[row]).values() if path.suffix == ".jsonl" else lines[examples.lines[row] - 1]
            )


def test_tsv_files_have_no_quoting_and_may_have_a_byte_order_mark_and_windows_line_ends(tmp_path):
    (tmp_path / "train.tsv").write_bytes(
        '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t7\t8\tHe said "hi\tThe "witness", he said\r\n'.encode()
    )
    examples = read_examples(tmp_path / "train.tsv", TASKS["mrpc"], labelled=True)
    assert (examples.texts, examples.pairs, examples.labels) == (['He said "hi'], ['The "witness", he said'], ["1"])


def test_cola_has_a_header_in_its_test_file_only(tmp_path):
    (tmp_path / "train.tsv").write_text("gj04\t0\t*\tThem sleeps.\ngj04\t1\t\tThey sleep.\n")
    (tmp_path / "test.tsv").write_text("index\tsentence\n0\tBill slept.\n")
    train = read_examples(tmp_path / "train.tsv", TASKS["cola"], labelled=True)
    assert list(zip(train.texts, train.labels, strict=True)) == [("Them sleeps.", "0"), ("They sleep.", "1")]
    test = read_examples(tmp_path / "test.tsv", TASKS["cola"], labelled=False, is_test=True)
    assert (test.texts, test.labels, test.indices) == (["Bill slept."], None, ["0"])


def test_mnli_has_two_development_and_two_test_files(tmp_path):
    task = TASKS["mnli"]
    assert [path.name for path in task.evaluation_files(tmp_path).values()] == ["dev_matched.tsv", "dev_mismatched.tsv"]
    assert [path.name for path in task.test_files(tmp_path).values()] == ["test_matched.tsv", "test_mismatched.tsv"]
    names = ["index", "genre", "sentence1", "sentence2", "label1", "label2", "gold_label"]
    (tmp_path / "dev_matched.tsv").write_text("\t".join(names) + "\n0\tfiction\tA.\tB.\tneutral\tneutral\tneutral\n")
    examples = read_examples(tmp_path / "dev_matched.tsv", task, labelled=True)
    assert (examples.texts, examples.pairs, examples.labels) == (["A."], ["B."], ["neutral"])


def test_qqps_lines_that_were_cut_in_two_are_skipped_and_counted(tmp_path, capsys):
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
    lines = [header, "1\t2\t3\tWhy?\tHow?\t0", "4\t5\t6\tWhat is", "this?\tThat?\t1", "7\t8\t9\tWho?\tWho is?\t1"]
    (tmp_path / "train.tsv").write_text("\n".join(lines) + "\n")
    examples = read_examples(tmp_path / "train.tsv", TASKS["qqp"], labelled=True)
    assert (examples.texts, examples.labels, examples.lines) == (["Why?", "Who?"], ["0", "1"], [2, 5])
    assert "2 incomplete lines are skipped" in capsys.readouterr().out
    with pytest.raises(UserError, match=":3 has no 'question2'"):
        read_examples(tmp_path / "train.tsv", TASKS["qqp"], labelled=False, is_test=True)


def test_superglue_has_truth_values_and_names_its_samples(tmp_path):
    rows = [{"question": "is it", "passage": "It is.", "idx": 17, "label": True}]
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = TASKS["boolq"]
    (path,) = task.evaluation_files(tmp_path).values()
    examples = read_examples(path, task, labelled=True)
    assert (examples.labels, examples.indices, examples.pairs) == (["true"], ["17"], ["It is."])


def test_a_tab_too_many_is_an_error_as_it_shifts_the_second_text(tmp_path):
    header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    (tmp_path / "dev.tsv").write_text(f"{header}\n1\t7\t8\tA.\tB.\n1\t7\t8\tA\ttab.\tB.\n")
    with pytest.raises(UserError, match=":3: 6 cells, more than the 5 columns"):
        read_examples(tmp_path / "dev.tsv", TASKS["mrpc"], labelled=True)


@pytest.mark.parametrize("second", [7, None, "8", True])
def test_samples_of_superglue_have_whole_numbers_of_their_own(tmp_path, second):
    rows = [{"question": "is it", "passage": "It is.", "idx": index} for index in (7, second)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=r":2: 'idx' is .*, expected a unique whole number"):
        read_examples(tmp_path / "test.jsonl", TASKS["boolq"], labelled=False, is_test=True)


# --- files of one's own -----------------------------------------------------------------------------------------------


def test_a_csv_file_is_read_as_pythons_csv_module_writes_it(tmp_path):
    rows = [["It said no, twice", "bad"], ["two\nlines, one cell", "good"], ["plain", "good"]]
    with (tmp_path / "own.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["review", "verdict"], *rows])
    task = custom_task("review", None, "verdict", regression=False)
    examples = read_examples(tmp_path / "own.csv", task, labelled=True)
    assert list(zip(examples.texts, examples.labels, strict=True)) == [tuple(row) for row in rows]
    assert examples.lines == [2, 3, 5]


def test_json_lines_may_have_numbers_as_labels(tmp_path):
    (tmp_path / "own.jsonl").write_text('{"a": "x", "b": "y", "n": 3}\n{"a": "z", "b": "", "n": 0.5}\n')
    examples = read_examples(tmp_path / "own.jsonl", custom_task("a", "b", "n", regression=True), labelled=True)
    assert (examples.texts, examples.pairs, examples.labels) == (["x", "z"], ["y", ""], ["3", "0.5"])


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("own.csv", b"text,label\n", "holds no samples"),
        ("own.csv", b"text,label\n ,a\n,b\n", "the column 'text' is empty in all rows"),
        ("own.csv", b"text,pair,label\na, ,x\nb,,y\n", "the column 'pair' is empty in all rows"),
        ("own.csv", b"text,label\na,\n", ":2: 'label' is '', expected a label"),
        ("own.tsv", b"text\tlabel\na\n", ":2: 1 cells, fewer than the 2 columns"),
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
        ("multi.jsonl", b'{"text": "a", "label": ["C|C++"]}', ":1: 'label' has the label 'C|C++', and '|' separates"),
        ("multi.jsonl", b'{"text": "a", "label": ["x", null]}', ":1: 'label' is None, expected a label"),
        ("own.xlsx", b"PK", "unknown file extension: give a file of .csv, .tsv, .jsonl, .parquet"),
    ],
)
def test_a_bad_line_is_named(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    task = custom_task("text", "pair" if b"pair" in content else None, "label", multi_label="multi" in name)
    with pytest.raises(UserError) as error:
        find_labels(read_examples(tmp_path / name, task, labelled=True), task)
    assert f"{name}{says}" in str(error.value) or (says in str(error.value) and not says.startswith(":"))
