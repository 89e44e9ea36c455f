import re

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_recipe.data_preparation.sources.books import clean_book
from bert_recipe.data_preparation.text.formatting import get_splitter, passages
from bert_recipe.data_preparation.text.sentences import (
    CLOSERS,
    PARAMETERS_FOLDER,
    SentenceSplitter,
    load_punkt,
    pieces,
    save_punkt,
)

BOOKS = ROOT / "data/sample/books"

# Split by hand: a bar where a sentence ends.
BY_HAND = [
    "Mr. Smith went to Washington.|He met Dr. Jones at 5 p.m. on Jan. 5, 1999, and left.",
    "“What is it?” said he.|“Nothing.”|She went out.",
    '"You speak of Mr. Jarndyce."|She looked at Mrs. Bennet!|"Why?" asked Elizabeth.',
    "The U.S. Army came, e.g. by train, and went.|It cost $5.50 in all.|See p. 5 for more.",
    "J. R. R. Tolkien wrote it in 1937 (cf. Vol. 2).|It is No. 5 on the list.|Is that so?!|Yes.",
    "He lived in St. Petersburg, etc., until his death.|(He was old.)|Then they all left.",
    "They wrote to Acme Corp. and to Smith & Co. about it.|The answer came on Dec. 3.|It was "
    "short.",
    "It rose by 3.5 percent.|However, this was not enough.|The end.",
    "Well... perhaps not.|Who knows?|We do not.",
    "你好。|再见！|他说：“好的。”|是吗？",
    "ሰላም ነው።|«እንዴት ነህ፧»|ደህና ነኝ።",
    "မြန်မာနိုင်ငံသည် ကြီးသည်။|သူလာသည်။",
    'គាត់និយាយថា "ខ្ញុំទៅផ្សារ។"|គាត់ទៅសាលា។',
    "वह आया।|वह गया॥|फिर क्या हुआ?",
    "Նա եկավ։|Նա գնաց։",
    "Πού είναι το βιβλίο;|Δεν ξέρω.|«Ποιος το πήρε;»|Ο Γιάννης\u037e|Τι ώρα είναι;",
    "The angles are α; β is known; they add up.|So it is.",
    "« Viens ! »|Il partit.|« Où vas-tu ? » demanda-t-elle.|« Loin. »|Elle pleura.",
    "Es war 1990.|„Komm!“|Sie ging um 9.|‚Nein.‘|Er rief: »Komm her!«|Sie ging.|»Nein!« sagte er.",
    "One sentence without an end",
    "In the same year, T.N. Murari met W.B. Yeats.|They talked.",
    "The 5th c. church was built ca. 480 by King Theodoric.|It still stands.",
]


@pytest.fixture(scope="module")
def prose() -> list[str]:
    texts = [path.read_text(encoding="utf-8") for path in sorted(BOOKS.glob("*.txt"))]
    return [
        paragraph
        for text in texts
        for document in clean_book(text)
        for paragraph in document.paragraphs
    ]


@pytest.mark.parametrize("by_hand", BY_HAND)
def test_sentences_are_those_that_a_person_sees(by_hand):
    sentences = by_hand.split("|")
    joiner = "" if "。" in by_hand else " "
    assert get_splitter()(joiner.join(sentences)) == sentences


@pytest.mark.parametrize("name", ["fast", "newline"])
@given(
    paragraph=st.text(
        st.sampled_from("aB1 .?!…。\n\"'“”()-\t,") | st.characters(codec="utf-8"), max_size=200
    )
)
@settings(max_examples=100, deadline=None)
def test_no_character_is_lost_and_no_sentence_is_empty_or_has_a_line_break(name, paragraph):
    sentences = get_splitter(name)(paragraph)
    assert "".join("".join(sentences).split()) == "".join(paragraph.split())
    assert all(sentence and sentence == " ".join(sentence.split()) for sentence in sentences)


@pytest.mark.parametrize(
    "paragraph", ["!" * 100_000, "a" * 1_000_000, "a. " * 20_000, '."' * 50_000, "A." * 50_000]
)
def test_long_paragraphs_neither_hang_nor_lose_text(paragraph):
    sentences = get_splitter()(paragraph)
    assert "".join("".join(sentences).split()) == "".join(paragraph.split())


def test_sentences_end_where_nltk_ends_them(prose):
    # Not above: every test process that collects this file would wait for nltk.
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    from bert_recipe.data_preparation.text.nltk_sentences import LanguageVars

    marks = LanguageVars()
    marks.re_boundary_realignment = re.compile(rf"[{CLOSERS}]+?(?:\s+|(?=--)|$)")
    punkt = PunktSentenceTokenizer(load_punkt(PARAMETERS_FOLDER / "english.json"), lang_vars=marks)
    split = get_splitter()
    # After a quoted ? or !, a sentence may go on here: “What?” said he.
    quoted = re.compile(rf"[?!][{CLOSERS}]")
    sample = [paragraph for paragraph in prose if not quoted.search(paragraph)][::3]
    same = 0
    for paragraph in sample:
        expected = [sentence for piece in pieces(paragraph) for sentence in punkt.tokenize(piece)]
        same += split(paragraph) == expected
    assert len(sample) > 500
    assert same > 0.97 * len(sample)


def test_sentences_of_a_passage_have_spaces_between_them_where_their_script_has():
    chinese = ["他去了学校。" * 20, "“她在家。”", "你来吗？", "Yes."]
    assert passages(chinese) == ["他去了学校。" * 20 + "“她在家。”你来吗？ Yes."]
    korean = ["그는 학교에 갔다.", "그녀는 집에 있다."]
    assert passages(korean) == [" ".join(korean)]


def test_newline_takes_each_line_for_a_sentence():
    assert get_splitter("newline")(" One. Two.\n\n three \r\nfour") == [
        "One. Two.",
        "three",
        "four",
    ]


def test_saved_parameters_split_as_those_that_were_trained(tmp_path, prose):
    from bert_recipe.data_preparation.text.nltk_sentences import train_punkt

    params = train_punkt(prose[:700])
    path = tmp_path / "params.json"
    save_punkt(params, path, "a test")
    trained = SentenceSplitter(params)
    loaded = SentenceSplitter(load_punkt(path))
    for paragraph in prose[:400]:
        assert trained.split(paragraph) == loaded.split(paragraph)
    save_punkt(load_punkt(path), tmp_path / "again.json", "a test")
    assert (tmp_path / "again.json").read_text() == path.read_text()


@pytest.mark.parametrize(
    ("sentence", "after"),
    [
        ("그는 {} 집에 갔다.", "그리고 밥을 먹었다."),  # Korean: verbs end sentences
        ("او {} به مدرسه رفت.", "سپس به خانه آمد."),  # Persian
        ("हम {} बार मिले।", "वे डॉ. शर्मा के साथ थे।"),  # Hindi: Dr. has a vowel sign
        ("הם באו {} פעם.", "ראו עמ. שלוש כאן."),  # Hebrew: p. for page
    ],
)
def test_trained_sentences_end_in_languages_without_capital_letters(sentence, after):
    from bert_recipe.data_preparation.text.nltk_sentences import train_punkt

    paragraphs = [[sentence.format(row), after][:: (-1) ** row] for row in range(200)]
    split = SentenceSplitter(train_punkt(map(" ".join, paragraphs))).split
    assert [split(" ".join(paragraph)) for paragraph in paragraphs] == paragraphs
