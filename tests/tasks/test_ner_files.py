"""Files of sentences with tags: what is read, what is refused, and the schemes of tags."""

import json
import re

import pytest
from conftest import VOCAB_FILE

from tasks.ner import TokenClassificationTask
from tasks.ner_files import SentenceColumns, read_sentences, schemes_of
from tasks.reading import ReadingOptions
from tokenizer import BertTokenizer
from utils.errors import UserError

TOKENIZER = BertTokenizer(VOCAB_FILE)
SPAN = {"start": 0, "end": 4, "label": "PER"}


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.conll", "Anna B-PER\nlives\n", ":2: 'lives' does not end in a tag"),
        ("a.conll", "Anna B-PER\rlives O\n", ":1: a carriage return inside the line"),
        ("a.csv", "word,tag\nAnna,B-PER\n", "tables with tags are not read"),
        ("a.jsonl", '{"tokens": ["Anna"], "ner_tags": [1]}', "give the hub's Parquet file"),
        (
            "a.jsonl",
            '{"text": "a", "spans": [], "answer": "reject", "_task_hash": 1}',
            "the answer is 'reject'",
        ),
        ("a.conll", "Anna NNP\n", ":1: 'Anna NNP' does not end in a tag"),
        ("a.conll", "\n\n", "has no sentences"),
        ("a.conll", "Anna O\n", "all tags are 'O'"),
        ("a.jsonl", '{"text": "Anna"}', ":1: 'spans' is None"),
        ("a.jsonl", '{"text": " ", "spans": []}', ":1: 'text' is ' '"),
        ("a.jsonl", json.dumps({"text": "Anna", "spans": [{**SPAN, "end": 5}]}), ":1: span"),
        ("a.jsonl", json.dumps({"text": "Anna", "spans": [{**SPAN, "start": True}]}), ":1: span"),
        (
            "a.jsonl",
            json.dumps({"text": "Anna", "spans": [SPAN, {**SPAN, "end": 2}]}),
            "overlap at character 0",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path, name, content, says):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=re.escape(says)):
        TokenClassificationTask(train_file=tmp_path / name).training_set(TOKENIZER)


@pytest.mark.parametrize(
    ("tags", "schemes"),
    [
        ("B-P I-P O B-L", ["IOB2"]),
        ("I-P I-P O I-L B-L", ["IOB1"]),
        ("B-P E-P O S-L", ["BIOES or BILOU"]),
        ("B-P I-P L-P U-L", ["BIOES or BILOU"]),
        ("O O", ["IOB2", "IOB1", "BIOES or BILOU"]),
        ("B-P I-L", []),
        ("S-P O B-L O", []),
        ("O E-P", []),
    ],
)
def test_the_scheme_of_tags_is_found(tags, schemes):
    assert schemes_of(tags.split()) == schemes


def test_all_schemes_become_iob2_and_mixtures_are_named(tmp_path, capsys):
    path = tmp_path / "a.conll"
    sentences = ["a B-P\nb I-P\nc B-L", "a I-P\nb I-P\nc I-L", "a B-P\nb E-P\nc S-L"]
    path.write_text("\n\n".join(sentences) + "\n")
    assert [sentence.tags for sentence in read_sentences(path, True)] == [["B-P", "I-P", "B-L"]] * 3
    mixture = "IOB2 (line 1), IOB1 (line 5), BIOES or BILOU (line 9): read as IOB2"
    assert f"mixes tagging schemes: {mixture}" in capsys.readouterr().out
    path.write_text("a B-P\nb I-L\n\nc O\nd E-P\n\ne O\nf\n\ng B-P\n")
    with pytest.raises(UserError) as error:
        read_sentences(path, True)
    assert "line 1: the tags 'B-P I-L' follow none of IOB2, IOB1" in str(error.value)
    assert "3 bad rows: line 8: 'f' does not end in a tag" in str(error.value)
    reading = ReadingOptions(skip_bad=True, output_dir=tmp_path)
    assert [each.words for each in read_sentences(path, True, reading)] == [["g"]]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("doccano.jsonl", {"text": "Oh Anna left", "label": [[3, 7, "PER"]]}),
        (
            "doccano.jsonl",
            {
                "text": "Oh Anna left",
                "entities": [{"id": 1, "label": "PER", "start_offset": 3, "end_offset": 7}],
            },
        ),
        (
            "studio.json",
            [
                {
                    "data": {"text": "😀 Anna left"},
                    "annotations": [
                        {
                            "result": [
                                {"value": {"start": 3, "end": 7, "text": "Anna", "labels": ["PER"]}}
                            ]
                        }
                    ],
                }
            ],
        ),
        (
            "min.json",
            [{"text": "Oh Anna left", "label": [{"start": 3, "end": 7, "labels": ["PER"]}]}],
        ),
        ("hf.json", {"tokens": ["Anna", "left"], "ner_tags": ["B-PER", "O"]}),
        ("hf.json", {"data": [{"words": ["Anna", "left"], "ner": ["B-PER", "O"]}]}),
        (
            "studio_with_relations.json",
            [
                {
                    "data": {"review": "Oh Anna left", "id": 7},
                    "annotations": [
                        {
                            "result": [
                                {"value": {"start": 3, "end": 7, "labels": ["PER"]}},
                                {"type": "relation", "from_id": "a", "to_id": "b"},
                            ]
                        }
                    ],
                }
            ],
        ),
        (
            "prodigy.jsonl",
            {
                "text": "Oh Anna left",
                "tokens": [{"text": "Oh", "start": 0, "end": 2, "id": 0}],
                "spans": [{"start": 3, "end": 7, "label": "PER", "token_start": 1}],
                "answer": "accept",
                "_task_hash": 1,
            },
        ),
    ],
)
def test_files_of_annotation_tools_are_read(tmp_path, name, content):
    (tmp_path / name).write_text(json.dumps(content))
    (sentence,) = read_sentences(tmp_path / name, True)
    pairs = dict(zip(sentence.words, sentence.tags, strict=True))
    assert pairs["Anna"] == "B-PER" and pairs["left"] == "O"


def test_columns_with_comments_and_numbers_are_read(tmp_path):
    """As in CoNLL-U and GermEval. A numeral alone, or one of several words, is a word."""
    path = tmp_path / "a.conll"
    path.write_text("# text = Anna\n1\tAnna\tX\tB-PER\n2\tleft\tX\tO\n\n#\tx\n1\t1\tX\tO\n")
    assert [each.words for each in read_sentences(path, True)] == [["Anna", "left"], ["1"]]
    path.write_text("1 X O\n2 X O\n\n1 X O\n1 X B-N\n\n# X O\n")
    words = [["1", "2"], ["1", "1"], ["#"]]
    assert [each.words for each in read_sentences(path, True)] == words


# GermEval 2014: number, word, tag, tag of the entity inside.
NESTED = "#\thttp://a.de\t[2009]\n1\tKölner\tB-ORG\tB-LOC\n2\tZoo\tI-ORG\tO\n"
NESTED += "\n1\tAnna\tB-LOC\tO\n"


def test_of_several_columns_of_tags_the_user_chooses_one(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text(NESTED)
    says = "column 3 has tags of LOC, ORG, and column 4 of LOC: choose one with --label-column 3"
    with pytest.raises(UserError, match=says):
        read_sentences(path, True)
    for number, tags in ("3", ["B-ORG", "I-ORG"]), ("4", ["B-LOC", "O"]):
        sentences = read_sentences(path, True, chosen=SentenceColumns(tags=number))
        assert (sentences[0].words, sentences[0].tags) == (["Kölner", "Zoo"], tags)
    path.write_text(NESTED.replace("\tB-LOC\n", "\tO\n"))
    with pytest.raises(UserError, match="column 3 has tags of LOC, ORG, and column 4 O only"):
        read_sentences(path, True)
    path.write_text("# B-LOC hash\nZoo O zoo\n")
    (sentence,) = read_sentences(path, True, chosen=SentenceColumns("3", "2"))
    assert (sentence.words, sentence.tags) == (["hash", "zoo"], ["B-LOC", "O"])
    # The chunks of CoNLL-2003 are other types than its entities.
    path.write_text("EU NNP B-NP B-ORG\nrejects VBZ B-VP O\n")
    assert read_sentences(path, True)[0].tags == ["B-ORG", "O"]


@pytest.mark.parametrize(
    ("row", "chosen", "words"),
    [
        ({"token": ["Anna"], "fine": ["B-PER"], "ner_tags": ["O"]}, ("token", "fine"), ["Anna"]),
        ({"sentence": "Anna", "entity": [SPAN], "tokens": [1]}, ("sentence", "entity"), ["Anna"]),
    ],
)
def test_columns_with_other_names_are_chosen(tmp_path, row, chosen, words):
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    (sentence,) = read_sentences(tmp_path / "a.jsonl", True, chosen=SentenceColumns(*chosen))
    assert (sentence.words, sentence.tags) == (words, ["B-PER"])


@pytest.mark.parametrize(
    ("name", "content", "chosen", "says"),
    [
        ("a.tsv", NESTED, ("2", "ner"), "columns of .* have no names: give the number"),
        ("a.tsv", NESTED, (None, "5"), "line 2: .* has no column 5"),
        ("a.tsv", NESTED, (None, "2"), "has 'Kölner', which is no tag"),
        ("a.jsonl", '{"tokens": ["a"]}', ("tokens", "tag"), "no column 'tag'; it has 'tokens'"),
    ],
)
def test_a_chosen_column_that_is_wrong_is_named(tmp_path, name, content, chosen, says):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=says):
        read_sentences(tmp_path / name, True, chosen=SentenceColumns(*chosen))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"tokens": ["Anna"], "ner_tags": [1]}, "the tag 1: write the names of tags"),
        ({"tokens": ["Anna"], "ner_tags": []}, "expected {"),
        ({"tokens": ["Anna"], "tags": ["O", "O"]}, "1 tokens and 2 tags"),
        ({"text": "Anna", "spans": [{**SPAN, "label": "O"}]}, "O means no entity"),
        ({"data": {"text": "Anna"}, "annotations": []}, "0 annotations, expected one"),
    ],
)
def test_rows_of_other_tools_that_are_wrong_are_named(tmp_path, content, says):
    (tmp_path / "a.jsonl").write_text(json.dumps(content))
    with pytest.raises(UserError, match=says):
        read_sentences(tmp_path / "a.jsonl", True)
