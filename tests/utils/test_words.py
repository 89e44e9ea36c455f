"""Words of texts in several scripts; expected ones are written by hand."""

import pytest

from bert_recipe.tasks.squad.files import Answer, answer_characters
from bert_recipe.utils.words import from_utf16, spaced_spans, split_words

# text, words with | between them, what stands between spaces
TEXTS = {
    "Latin": ("L'été, e-mail 3.14", "L|'|été|,|e|-|mail|3|.|14", "L'été,|e-mail|3.14"),
    "decomposed": ("e\u0301te\u0301 a", "e\u0301te\u0301|a", "e\u0301te\u0301|a"),
    "Han": ("张伟下周要飞北京 AB", "张|伟|下|周|要|飞|北|京|AB", "张|伟|下|周|要|飞|北|京|AB"),
    "kana": ("東京タワーへ", "東|京|タ|ワー|へ", "東|京|タ|ワー|へ"),
    "Hangul": ("서울에서 만나요.", "서울에서|만나요|.", "서울에서|만나요."),
    "Devanagari": ("राम दिल्ली में है।", "राम|दिल्ली|में|है|।", "राम|दिल्ली|में|है।"),
    "Thai": ("ไปกรุงที่น้ำ 5", "ไ|ป|ก|รุ|ง|ที่|น้ำ|5", "ไ|ป|ก|รุ|ง|ที่|น้ำ|5"),
    "Lao": ("ມື້", "ມື້", "ມື້"),
    "Khmer": ("ខ្មែរ", "ខ្មែ|រ", "ខ្មែ|រ"),
    # Annex 29 has the vowel sign at the end as a cluster.
    "Burmese": ("မြန်မာ", "မြ|န်|မ|ာ", "မြ|န်|မ|ာ"),
    "Thai and Latin": ("กินBMWที่ x", "กิ|น|BMW|ที่|x", "กิ|น|BMW|ที่|x"),
    "half-width kana": ("ﾀｰのAB", "ﾀｰ|の|AB", "ﾀｰ|の|AB"),
    "Hangul, decomposed": (
        "\u1112\u1161\u11ab글 x",
        "\u1112\u1161\u11ab글|x",
        "\u1112\u1161\u11ab글|x",
    ),
    "Arabic": ("مُحَمَّد في القاهرة، و", "مُحَمَّد|في|القاهرة|،|و", "مُحَمَّد|في|القاهرة،|و"),
    "Persian": ("می\u200cخواهم", "می\u200cخواهم", "می\u200cخواهم"),
    "emoji": ("😀👨‍👩‍👧 Anna 1️⃣", "😀|👨‍👩‍👧|Anna|1️⃣", "😀👨‍👩‍👧|Anna|1️⃣"),
}


@pytest.mark.parametrize(("text", "words", "spaced"), TEXTS.values(), ids=TEXTS)
def test_words_and_what_stands_between_spaces(text, words, spaced):
    assert "|".join(split_words(text)) == words
    assert "|".join(text[start:stop] for start, stop in spaced_spans(text)) == spaced


def test_offsets_of_utf_16_become_characters():
    text = "a😀b😀"
    assert [from_utf16(text, offset) for offset in (0, 1, 3, 4, 6, 9)] == [0, 1, 2, 3, 4, 7]


BEIJING = "上海和北京是大城市，他们离开了家，去了北京大学，后来又回到北京。"


@pytest.mark.parametrize(
    ("context", "answer", "start", "place"),
    [
        (BEIJING, "北京", 19, 19),
        (BEIJING, "北京", 20, 19),  # off by one: the nearest
        (BEIJING, "北京", 10, None),  # not the first one in the clause
        ("東京と京都、また東京", "東京", 7, 8),
        ("ไปกรุงเทพแล้วกลับกรุงเทพ", "กรุงเทพ", 18, 17),
        ("ไปกรุงเทพแล้วกลับกรุงเทพ", "กรุงเทพ", 10, None),
        ("서울은 크고 서울은 넓다", "서울", 8, 7),
        ("राम दिल्ली गया, फिर दिल्ली आया", "दिल्ली", 21, 20),
        ("ذهب إلى مصر ثم عاد إلى مصر", "مصر", 24, 23),
        ("Anna met Anna, and Anna left", "Anna", 20, 19),
        ("Anna met Anna, and Anna left", "Anna", 14, None),
        ("born 1895-1943 there", "1943", 6, 10),  # in the same word
        ("😀😀 Anna met Anna", "Anna", 5, 3),  # counted in UTF-16
        ("😀😀去北京，去北京", "北京", 5, 3),
    ],
)
def test_a_misplaced_answer_is_the_nearest_one_or_none(context, answer, start, place):
    expected = None if place is None else (place, place + len(answer))
    assert answer_characters(context, Answer(answer, start)) == expected
