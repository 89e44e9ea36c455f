"""Files of sentences with tags: what is read, what is refused, and the schemes of tags."""

import json

import pytest
from conftest import VOCAB_FILE, write_json_lines

from bert_recipe.tasks.ner.files import SentenceColumns, read_sentences
from bert_recipe.tasks.ner.options import TokenClassificationOptions
from bert_recipe.tasks.ner.task import TokenClassificationTask
from bert_recipe.tasks.reading import ReadingOptions
from bert_recipe.tokenization.tokenizer import BertTokenizer
from bert_recipe.utils.errors import UserError

TOKENIZER = BertTokenizer(VOCAB_FILE)
SPAN = {"start": 0, "end": 4, "label": "PER"}


def test_all_schemes_become_iob2(tmp_path):
    path = tmp_path / "a.conll"
    sentences = ["a B-P\nb I-P\nc B-L", "a I-P\nb I-P\nc I-L", "a B-P\nb E-P\nc S-L"]
    path.write_text("\n\n".join(sentences) + "\n")
    assert [sentence.tags for sentence in read_sentences(path, True)] == [["B-P", "I-P", "B-L"]] * 3
    path.write_text("a B-P\nb\n\ne O\nf\n\ng B-P\n")
    reading = ReadingOptions(skip_bad=True, output_dir=tmp_path)
    assert [sentence.words for sentence in read_sentences(path, True, reading)] == [["g"]]


def test_a_bad_byte_leaves_the_numbers_of_other_sentences(tmp_path):
    path = tmp_path / "a.conllu"
    rows = [("1", "A", "D"), ("2", "é", "N"), ("3", "runs", "V")]
    lines = ["\t".join([number, word, "_", tag, *"______"]) for number, word, tag in rows]
    block = "\n".join(lines) + "\n\n"
    path.write_bytes(block.encode("cp1252") + (2 * block).encode())
    reading = ReadingOptions(skip_bad=True, output_dir=tmp_path)
    sentences = read_sentences(path, True, reading, SentenceColumns(tags="4"))
    assert [(sentence.words, sentence.tags) for sentence in sentences] == [
        (["A", "é", "runs"], ["D", "N", "V"])
    ] * 2


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
        ("hf.json", {"tokens": ["Anna", "left"], "ner_tags": ["B-PER", "O"]}),
        ("hf.json", {"data": [{"words": ["Anna", "left"], "ner": ["B-PER", "O"]}]}),
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
    assert [
        (kind, sentence.shown_entity((kind, *bounds))) for kind, *bounds in sentence.entities
    ] == [("PER", "Anna")]


def test_columns_with_comments_and_numbers_are_read(tmp_path):
    """As in CoNLL-U and GermEval. A numeral alone, or one of several words, is a word."""
    path = tmp_path / "a.conll"
    path.write_text("# text = Anna\n1\tAnna\tX\tB-PER\n2\tleft\tX\tO\n\n#\tx\n1\t1\tX\tO\n")
    assert [sentence.words for sentence in read_sentences(path, True)] == [["Anna", "left"], ["1"]]
    path.write_text("1 X O\n3 X O\n\n1 X O\n1 X B-N\n\n# X O\n")
    words = [["1", "3"], ["1", "1"], ["#"]]
    assert [sentence.words for sentence in read_sentences(path, True)] == words
    path.write_text("1 X O\n2 X O\n\n1 X O\n1 X B-N\n")
    with pytest.raises(UserError, match="counts the words at line 1, and does not at line 4"):
        read_sentences(path, True)
    for number, words in ("1", [["1", "2"], ["1", "1"]]), ("2", [["X", "X"]] * 2):
        sentences = read_sentences(path, True, chosen=SentenceColumns(number))
        assert [sentence.words for sentence in sentences] == words


# GermEval 2014: number, word, tag, tag of the entity inside.
NESTED = "#\thttp://a.de\t[2009]\n1\tKölner\tB-ORG\tB-LOC\n2\tZoo\tI-ORG\tO\n"
NESTED += "\n1\tAnna\tB-LOC\tO\n"


def test_of_several_columns_of_tags_the_user_chooses_one(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text(NESTED)
    for number, tags in ("3", ["B-ORG", "I-ORG"]), ("4", ["B-LOC", "O"]):
        sentences = read_sentences(path, True, chosen=SentenceColumns(tags=number))
        assert (sentences[0].words, sentences[0].tags) == (["Kölner", "Zoo"], tags)
    path.write_text("# B-LOC hash\nZoo O zoo\n")
    (sentence,) = read_sentences(path, True, chosen=SentenceColumns("3", "2"))
    assert (sentence.words, sentence.tags) == (["hash", "zoo"], ["B-LOC", "O"])
    # The chunks of CoNLL-2003 are other types than its entities.
    path.write_text("EU NNP B-NP B-ORG\nrejects VBZ B-VP O\n")
    assert read_sentences(path, True)[0].tags == ["B-ORG", "O"]


@pytest.mark.parametrize(
    ("row", "chosen"),
    [
        ({"token": ["Anna"], "fine": ["B-PER"], "ner_tags": ["O"]}, ("token", "fine")),
        ({"sentence": "Anna", "entity": [SPAN], "tokens": [1]}, ("sentence", "entity")),
    ],
)
def test_columns_with_other_names_are_chosen(tmp_path, row, chosen):
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    (sentence,) = read_sentences(tmp_path / "a.jsonl", True, chosen=SentenceColumns(*chosen))
    ((kind, *bounds),) = sentence.entities
    assert (sentence.shown_entity((kind, *bounds)), kind) == ("Anna", "PER")


NUMBERED = """# newdoc
# text = Zur S-Bahn
1-2\tZur\t_\t_
1\tzu\tADP\tO
2\tder\tDET\tO
3\tS-Bahn\tNOUN\tB-LOC
3.1\tfährt\tVERB\t_

"""


@pytest.mark.parametrize("numbers", ["1 2 3", "0 1 2"])
def test_rows_of_numbered_columns_that_are_no_words_are_left_out(tmp_path, numbers):
    path = tmp_path / "a.conllu"
    first, second, third = numbers.split()
    path.write_text(
        NUMBERED.replace("\n1\t", f"\n{first}\t")
        .replace("\n2\t", f"\n{second}\t")
        .replace("\n3\t", f"\n{third}\t")
    )
    (sentence,) = read_sentences(path, True)
    assert sentence.words == ["zu", "der", "S-Bahn"] and sentence.tags == ["O", "O", "B-LOC"]


def test_comments_are_told_from_words_by_the_columns_of_other_lines(tmp_path):
    path = tmp_path / "a.conll"
    path.write_text("# text = nimm die S-Bahn\n# S-Bahn\n#1 NN O\nAnna NN B-PER\n")
    (sentence,) = read_sentences(path, True)
    assert sentence.words == ["#1", "Anna"]
    path.write_text("# nimm die S-Bahn\n#\tO\nAnna\tB-PER\n")
    (sentence,) = read_sentences(path, True)
    assert sentence.words == ["#", "Anna"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.conll", "김\tB-PER\n \tO\n박\tB-PER\n"),
        ("a.conll", "김 B-PER\n  O\n박 B-PER\n"),
        ("a.json", json.dumps({"tokens": ["김", " ", "박"], "tags": ["B-PER", "O", "B-PER"]})),
    ],
)
def test_a_word_that_is_a_blank_has_no_token_and_no_label(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    (sentence,) = read_sentences(tmp_path / name, True)
    assert sentence.words == ["김", " ", "박"] and sentence.tags == ["B-PER", "O", "B-PER"]
    options = TokenClassificationOptions(train_file=tmp_path / name)
    _, dataset = TokenClassificationTask.learning(options, TOKENIZER)
    assert dataset.bounds == [[(0, 1), (2, 3)]]


@pytest.mark.parametrize(
    ("tags", "read"),
    [
        ("B_PER I_PER O", "B-PER I-PER O"),
        ("PER_B PER_I -", "B-PER I-PER O"),
        ("B-NAME M-NAME E-NAME", "B-NAME I-NAME I-NAME"),
        ("B-PER L-PER U-LOC", "B-PER I-PER B-LOC"),
        ("B I O", "B-ENTITY I-ENTITY O"),
        ("B M E", "B-ENTITY I-ENTITY I-ENTITY"),
        ("b-per i-per o", "B-per I-per O"),
        ("B-per l-Per U_LOC", "B-per B-Per B-LOC"),
        ("b i o", "B-ENTITY I-ENTITY O"),
        ("I I O", "B-ENTITY I-ENTITY O"),
        ("e-mail noun verb", "e-mail noun verb"),
        ("PER PER O", "B-PER I-PER O"),
        ("person-actor O location-GPE", "B-person-actor O B-location-GPE"),
        ("NOUN VERB -LRB-", "NOUN VERB -LRB-"),
        ("NP-TL B-X VB", "NP-TL B-X VB"),
    ],
)
def test_tags_are_read_in_the_form_in_which_people_write_them(tmp_path, tags, read):
    rows = [f"word{place} {tag}\n" for place, tag in enumerate(tags.split())]
    (tmp_path / "a.conll").write_text("".join(rows))
    row = {"tokens": ["a", "b", "c"], "ner_tags": tags.split()}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    for name in ("a.conll", "a.jsonl"):
        (sentence,) = read_sentences(tmp_path / name, True)
        assert list(sentence.tags) == read.split()


def test_what_one_file_does_not_show_is_read_as_in_the_files_beside_it(tmp_path):
    """The development file alone has tags without O."""
    (tmp_path / "train.conllu").write_text("1\tAnna\tPER\n2\tging\tO\n3\theim\tO\n")
    (tmp_path / "dev.conllu").write_text("1\tAnna\tPER\n2\tEva\tLOC\n")
    files = {"train_file": tmp_path / "train.conllu", "eval_file": tmp_path / "dev.conllu"}
    options = TokenClassificationOptions(**files, label_column="3")
    task, dataset = TokenClassificationTask.learning(options, TOKENIZER)
    assert task.labels == ("O", "B-PER") and dataset.sentences[0].words == ["Anna", "ging", "heim"]
    (development,) = task.prediction_sets(TOKENIZER)
    rows = [(list(sentence.words), sentence.tags) for sentence in development.dataset.sentences]
    assert rows == [(["Anna", "Eva"], ["B-PER", "B-LOC"])]


def test_parts_of_speech_are_a_column_of_conllu(tmp_path):
    path = tmp_path / "a.conllu"
    rest = "\t_\t0\troot\t_"
    path.write_text(f"1\tAnna\tanna\tPROPN\t_{rest}\tSpaceAfter=No\n2\t.\t.\tPUNCT\t_{rest}\t_\n")
    (sentence,) = read_sentences(path, True, chosen=SentenceColumns(tags="4"))
    assert (sentence.words, sentence.tags) == (["Anna", "."], ["PROPN", "PUNCT"])


# What the last of three columns has in files that people bring, beside tags in the second.
LAST_COLUMNS = {
    "annotators": ("anna", "ben"),
    "confidences": ("0.98", "1.0"),
    "lemmas": ("be", "O"),
    "remarks": ("SpaceAfter=No", "_"),
    "parts of speech": ("NOUN", "VERB"),
    "types": ("PER", "O"),
    "a tag at the other end": ("PER-B", "O"),
}


@pytest.mark.parametrize("values", LAST_COLUMNS.values(), ids=LAST_COLUMNS.keys())
def test_the_last_of_several_columns_has_the_tags_only_if_it_reads_as_a_scheme(tmp_path, values):
    path = tmp_path / "a.tsv"
    first, second = values
    path.write_text(f"Anna\tB-PER\t{first}\nleft\tO\t{second}\n")
    says = f"the last of its 3 columns has {first!r}, .*such as --label-column 2$"
    with pytest.raises(UserError, match=says):
        read_sentences(path, True)
    (sentence,) = read_sentences(path, True, chosen=SentenceColumns(tags="2"))
    assert sentence.tags == ["B-PER", "O"]
    (sentence,) = read_sentences(path, True, chosen=SentenceColumns(tags="3"))
    assert len(sentence.tags) == 2


@pytest.mark.parametrize("tags", ["B-PER O", "b-per o", "B O", "i I", "U-PER L-LOC", "S_X M_X"])
def test_schemes_are_tags_in_the_last_of_several_columns(tmp_path, tags):
    first, second = tags.split()
    (tmp_path / "a.txt").write_text(f"Anna NNP {first}\nleft VBD {second}\n")
    (sentence,) = read_sentences(tmp_path / "a.txt", True)
    assert sentence.entities


def test_classes_of_words_are_named(tmp_path, capsys):
    for tags, says in (
        ("NOUN VERB", "each word has one of 2 classes: NOUN, VERB"),
        (
            "PER O",
            "entities of: PER",
        ),
    ):
        first, second = tags.split()
        (tmp_path / "a.tsv").write_text(f"Anna\t{first}\nleft\t{second}\n")
        options = TokenClassificationOptions(train_file=tmp_path / "a.tsv")
        TokenClassificationTask.learning(options, TOKENIZER)
        assert f"a.tsv: {says}\n" in capsys.readouterr().out


def test_a_mistake_among_tags_of_a_scheme_makes_no_classes(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("Anna\tPERSON\nEva\tPERSON\n\nleft\tO\nBen\tB-PER\n")
    with pytest.raises(UserError, match=r"line 1: .*does not end in a tag such as O or B-PER"):
        read_sentences(path, True)


@pytest.mark.parametrize(
    ("span", "says"),
    [
        ({"start": 3, "end": 7, "label": "PER", "text": "Anna"}, "is 'nna ' in the text: count"),
        (
            {"start": 3, "end": 7, "labels": ["PER"]},
            "Label Studio's JSON: convert it as docs/other",
        ),
    ],
)
def test_spans_of_tools_in_javascript_are_refused(tmp_path, span, says):
    write_json_lines(tmp_path / "a.jsonl", [{"text": "😀 Anna left", "spans": [span]}])
    with pytest.raises(UserError, match=says):
        read_sentences(tmp_path / "a.jsonl", True)
