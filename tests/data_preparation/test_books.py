from pathlib import Path

import pytest
from conftest import ROOT, write_json_lines

from bert_recipe.data_preparation.sources import documents as reader
from bert_recipe.data_preparation.sources.books import clean_book
from bert_recipe.data_preparation.sources.documents import MAX_DOCUMENT
from bert_recipe.data_preparation.sources.spans import Span
from bert_recipe.data_preparation.sources.wikitext import is_passage
from bert_recipe.utils.errors import UserError

SAMPLE = ROOT / "data/sample/books"


def read_documents(path: Path, *arguments, **options):
    return reader.read_documents(Span(str(path), 0, path.stat().st_size), *arguments, **options)


LONG = (
    "It was a dark night and the rain fell in torrents, but for now and then, when it stopped.\n"
    * 7
)

BOOK = f"""The Project Gutenberg eBook of A Night

*** START OF THE PROJECT GUTENBERG EBOOK A NIGHT ***

A NIGHT

by A. Writer

CONTENTS

 I The Rain
 II The Wind

CHAPTER I

The Rain

{LONG}
“_What_ a night!” said Mr. W____, the well-
known man--
and no other--with a sigh.[1]

* * * * *

[Illustration: A night.]

CHAPTER II. The Wind

{LONG}
[1] A note that the printer has put here.

THE END

*** END OF THE PROJECT GUTENBERG EBOOK A NIGHT ***

Licence text that goes on and on.
"""


def test_a_book_becomes_its_chapters():
    chapter = " ".join(LONG.split())
    documents = [document[:2] for document in clean_book(BOOK, "night")]
    assert documents == [
        (
            "night#1",
            [
                chapter,
                "“What a night!” said Mr. W—, the well-known man--and no other--with a sigh.",
            ],
        ),
        ("night#2", [chapter]),
    ]


@pytest.mark.parametrize(
    ("book", "chapters"),
    [
        ("alice-s-adventures-in-wonderland", 12),
        ("the-time-machine", 17),  # sixteen and an epilogue
        ("frankenstein", 28),  # four letters and twenty-four
        ("treasure-island", 35),  # thirty-four and a dedication in prose
    ],
)
def test_the_sample_books_have_their_chapters_and_keep_their_words(book, chapters):
    text = (SAMPLE / f"{book}.txt").read_text(encoding="utf-8")
    documents = list(clean_book(text))
    words = sum(
        len(paragraph.split()) for document in documents for paragraph in document.paragraphs
    )
    assert len(documents) == chapters
    assert 0.98 * len(text.split()) < words < len(text.split())
    for document in documents:
        for paragraph in document.paragraphs:
            assert "\n" not in paragraph and "_" not in paragraph and "  " not in paragraph


def test_a_book_without_chapters_is_one_document():
    paragraphs = [" ".join(LONG.split())] * 3
    assert list(clean_book("\n\n".join(paragraphs), "x")) == [("x#1", paragraphs)]
    assert list(clean_book("")) == []
    assert list(clean_book("A title\n\nand nothing else")) == []


SENTENCES = [
    *("„Komm her!“", "»Geh weg!«", "”Kom hit!”", "« Viens ! »", "«Пойдём».", "‹Non.›"),
    *("「来了。」", "『はい』。", "（好。）", "उसने कहा।", "او گفت؟", "ကောင်းပြီ။", "ቤት።", "տուն է։"),
]


def test_short_sentences_of_all_languages_are_kept():
    chapter = " ".join(LONG.split())
    (document,) = clean_book("\n\n".join([chapter, *SENTENCES, "Ein Titel", chapter]))
    assert document.paragraphs == [chapter, *SENTENCES, chapter]
    for sentence in SENTENCES:  # and in a table of Wikipedia
        assert is_passage(f"{'a word ' * 20}{sentence}")


HEADINGS = [
    *("Erstes Kapitel", "3. Kapitel", "CHAPITRE IV\n\nLe départ", "Capítulo primero", "第一章 雨"),
    *("ГЛАВА ПЕРВАЯ", "제1장", "5. fejezet", "الفصل الأول", "अध्याय 1", "【第二章】"),
    *("Zweites Kapitel.", "Kapitel 3. Die Reise beginnt.", "CAPÍTULO I.", "Глава IV.", "II. Buch."),
]
NO_HEADINGS = ["Kapitel 3 war das beste, sagte er.", "Das Buch!", "Mi libro."]


def test_chapters_of_other_languages_are_documents():
    chapter = " ".join(LONG.split())
    book = "\n\n".join(f"{heading}\n\n{LONG}" for heading in HEADINGS)
    assert [document.paragraphs for document in clean_book(book)] == [[chapter]] * len(HEADINGS)
    verse = "Parte di me\nche non so dire"  # without a full stop, left out
    (document,) = clean_book("\n\n".join([chapter, *NO_HEADINGS, verse, chapter]))
    assert document.paragraphs == [chapter, *NO_HEADINGS, chapter]


def test_a_book_without_line_breaks_is_cleaned_in_parts_and_keeps_every_word(monkeypatch):
    monkeypatch.setattr(reader, "MAX_DOCUMENT", 10_000)
    text = " ".join((SAMPLE / "treasure-island.txt").read_text(encoding="utf-8")[20_000:].split())
    paragraphs = [paragraph for document in clean_book(text) for paragraph in document.paragraphs]
    assert len(paragraphs) > 30 and max(map(len, paragraphs)) <= 10_000
    assert sum(len(paragraph.split()) for paragraph in paragraphs) > 0.999 * len(text.split())


def test_text_files_are_read_by_paragraph_or_by_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffOne.\nTwo.\n\n \n\nThree.".encode())
    assert list(read_documents(path)) == [(str(path), ["One.\nTwo.", "Three."])]
    by_document = list(read_documents(path, empty_line="document"))
    assert [document.paragraphs for document in by_document] == [["One.\nTwo."], ["Three."]]
    path.write_text("")
    assert list(read_documents(path)) == []


def test_a_long_text_is_cut_between_paragraphs(tmp_path):
    path = tmp_path / "a.txt"
    paragraphs = [f"{number} " + "x" * 100_000 for number in range(25)]
    path.write_text("\n\n".join(paragraphs))
    documents = list(read_documents(path))
    assert [paragraph for document in documents for paragraph in document.paragraphs] == paragraphs
    assert all(
        sum(map(len, document.paragraphs)) < MAX_DOCUMENT + 101_000 for document in documents
    )
    assert len(documents) == 3
    path.write_text("y" * 5_000_000)
    assert [len(document.paragraphs[0]) for document in read_documents(path)] == [5_000_000]


def test_records_are_documents(tmp_path):
    records = [{"text": "One.\n\nTwo."}, {"text": " \n"}, {"text": "Three.", "other": 1}]
    write_json_lines(tmp_path / "a.jsonl", records)
    expected = [["One.", "Two."], ["Three."]]
    assert [document.paragraphs for document in read_documents(tmp_path / "a.jsonl")] == expected
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table(
        {"text": [one["text"] for one in records], "other": [1, 2, 3]}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    assert [document.paragraphs for document in read_documents(tmp_path / "a.parquet")] == expected
    with pytest.raises(UserError, match=r"a\.parquet: no column 'body'"):
        list(read_documents(tmp_path / "a.parquet", text_field="body"))


def test_a_row_of_parquet_that_is_not_utf8_is_named_and_skipped(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    buffers = pyarrow.array([b"Good.", b"caf\xe9", b"Fine."], pyarrow.binary()).buffers()
    column = pyarrow.StringArray.from_buffers(3, buffers[1], buffers[2])
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    bad = []
    documents = read_documents(tmp_path / "a.parquet", on_bad=lambda where, why: bad.append(where))
    assert [document.paragraphs for document in documents] == [["Good."], ["Fine."]]
    assert bad == [f"{tmp_path}/a.parquet, row 2"]


def test_documents_of_wikiextractor_are_documents_without_its_marks(tmp_path):
    """Also where its files are named .txt."""
    text = '<doc id="12" url="https://a.org/?curid=12" title="One">\nOne\n\nA text.\n</doc>\n'
    text += '<doc id="13" url="u" title="&lt;">\n</doc>\n<doc id="14" url="u" title="T">\nT\n\n'
    text += "x <doc> y\n\n</doc>\n"
    path = tmp_path / "wiki_00.txt"
    path.write_text(text)
    expected = [(str(path), ["One", "A text."]), (str(path), ["T", "x <doc> y"])]
    assert list(read_documents(path)) == expected


def test_lines_of_a_chinese_paragraph_are_joined_without_a_space():
    lines = "却说那女娲氏炼石补天之时，于大荒山无稽崖\n炼成高经十二丈。\n原来如此 good\n好。\n" * 20
    [(_, [paragraph])] = clean_book(f"第一章\n\n{lines}")
    assert paragraph.startswith(
        "却说那女娲氏炼石补天之时，于大荒山无稽崖炼成高经十二丈。原来如此 good 好。却说"
    )
