"""Tables as spreadsheets and data sets of the hub have them."""

import pytest

from bert_recipe.tasks.classification.files import read_examples
from bert_recipe.tasks.classification.specs import custom_spec
from bert_recipe.tasks.classification.task import label_values
from bert_recipe.tasks.predicted_rows import read_table
from bert_recipe.tasks.reading import ReadingOptions
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.output_tables import encode_table

OWN = custom_spec("text", None, "label")


def test_delimiter_and_encoding_are_as_given(tmp_path):
    spec, content = custom_spec("text", None, "label"), "text;label\ncafé;ja\nthé;nein\n"
    expected = ["café", "thé"]
    for encoding in ("cp1252", "utf-16", "utf-8-sig"):
        (tmp_path / "a.csv").write_bytes(content.encode(encoding))
        reading = ReadingOptions(delimiter=";", encoding=encoding)
        assert read_examples(tmp_path / "a.csv", spec, True, reading=reading).texts == expected
    (tmp_path / "a.tsv").write_text(content)
    reading = ReadingOptions(delimiter=";")
    assert read_examples(tmp_path / "a.tsv", spec, True, reading=reading).texts == expected
    for name, options, says in (
        ("a.csv", {"delimiter": "|"}, "or give --delimiter"),
        ("a.csv", {"delimiter": ";", "encoding": "ascii"}, "not ascii .* give its --encoding"),
        ("a.jsonl", {"delimiter": ";"}, "--delimiter has no effect"),
        ("a.parquet", {"encoding": "ascii"}, "--encoding has no effect"),
    ):
        with pytest.raises(UserError, match=says):
            read_examples(tmp_path / name, spec, True, reading=ReadingOptions(**options))
    (tmp_path / "a.csv").write_bytes(content.encode("cp1252"))
    with pytest.raises(UserError, match=r"not UTF-8 .*or give --encoding"):
        read_examples(tmp_path / "a.csv", spec, True, reading=ReadingOptions(delimiter=";"))


@pytest.mark.parametrize(
    ("mark", "first"), [(";", ""), ("\t", ""), (";", "sep=;\r\n"), ("|", '"SEP=|"\r\n')]
)
def test_a_table_of_a_spreadsheet_is_read_without_flags(tmp_path, capsys, mark, first):
    """Semicolons or tabs, Excel's declaration of the delimiter, a byte order mark, Windows' ends of
    lines, empty rows, space around labels; the columns have commas.
    """
    rows = (("Nr.", "Text", "Urteil"), ("1", "gut, sagt er", " ja "), ("", "", ""), ("2", "b", "x"))
    lines = "".join(mark.join(cells) + "\r\n" for cells in rows)
    (tmp_path / "a.csv").write_bytes(f"\ufeff{first}{lines}".encode())
    examples = read_examples(tmp_path / "a.csv", custom_spec("Text", None, "Urteil"), labelled=True)
    assert (examples.texts, examples.labels) == (["gut, sagt er", "b"], ["ja", "x"])
    assert f"note: {tmp_path / 'a.csv'}: its columns are separated by {mark!r}" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_an_empty_row_has_a_prediction_so_that_rows_keep_their_places(tmp_path, capsys, name):
    mark = {"a.csv": ",", "a.tsv": "\t"}[name]
    lines = [("text", "n"), ("good", "1"), ("", ""), ("bad", "3"), ("", "", "")]
    (tmp_path / name).write_text("".join(mark.join(cells) + "\n" for cells in lines))
    rows = [row for _, row in read_table(tmp_path / name, ["text"])]
    assert [(row["text"], row["n"]) for row in rows] == [*lines[1:4], ("", "")]
    assert "2 rows have an empty text: lines 3, 5" in capsys.readouterr().out


def test_numbers_may_have_a_decimal_comma(tmp_path):
    path = tmp_path / "a.csv"
    spec = custom_spec("text", None, "label", regression=True)
    path.write_text("text;label\na;0,5\nb;-1.234.567,25\nc;7\nd; 2,\n")
    reading = ReadingOptions(decimal=",")
    examples = read_examples(path, spec, labelled=True, reading=reading)
    assert label_values(examples, spec).tolist() == [0.5, -1234567.25, 7, 2]
    path.write_text("text;label\na;0.5\n")
    with pytest.raises(UserError, match=r"'0.5', which has no decimal comma"):
        read_examples(path, spec, labelled=True, reading=reading)
    path.write_text("text;label;other\na;b;c\n")
    judged = custom_spec("text", "label", "", negatives=("other",))  # which has no numbers
    assert read_examples(path, judged, labelled=True, reading=reading).labels == ["1", "0"]


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ","), ("a.csv", ";"), ("a.tsv", "\t")])
def test_the_header_of_an_appended_file_is_no_sample(tmp_path, capsys, name, mark):
    rows = [
        ("text", "label"),
        ("a", "x"),
        ("\ufefftext", "label"),
        ("text", "y"),
        ("text", "label"),
    ]
    content = "".join(mark.join(row) + "\n" for row in rows)
    (tmp_path / name).write_text(content, encoding="utf-8")
    examples = read_examples(tmp_path / name, OWN, labelled=True)
    assert (examples.texts, examples.labels, examples.lines) == (["a", "text"], ["x", "y"], [2, 4])
    assert "2 rows repeat the header, and are left out" in capsys.readouterr().out


def test_a_split_may_be_several_files_or_a_folder(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    parts = {"train-00000-of-00002": ["a", "b"], "train-00001-of-00002": ["c"], "test": ["d"]}
    for name, texts in parts.items():
        path = folder / f"{name}.parquet"
        path.write_bytes(encode_table(path, [{"text": text, "label": "x"} for text in texts]))
    (folder / "_SUCCESS").touch()
    examples = read_examples(folder / "train-*.parquet", OWN, labelled=True)
    assert examples.texts == ["a", "b", "c"]
    assert examples.lines[-1] == "train-00001-of-00002.parquet:1"
    with pytest.raises(UserError, match=r"of test. and train-00000.*name a single file"):
        read_examples(folder, OWN, labelled=True)
    (folder / "test.parquet").unlink()
    assert read_examples(folder, OWN, labelled=True).texts == ["a", "b", "c"]
    (folder / "train.csv").write_text("text,label\n")
    with pytest.raises(UserError, match="have different formats"):
        read_examples(folder, OWN, labelled=True)
    with pytest.raises(UserError, match="no file has such a name"):
        read_examples(folder / "dev*", OWN, labelled=True)
    (folder / "empty").mkdir()
    with pytest.raises(UserError, match="is a folder without"):
        read_examples(folder / "empty", OWN, labelled=True)
