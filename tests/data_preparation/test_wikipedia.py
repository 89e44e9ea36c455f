import bz2
import random
import re
import time
import tracemalloc
from pathlib import Path

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_recipe.data_preparation.sources import bzip2
from bert_recipe.data_preparation.sources.documents import Document
from bert_recipe.data_preparation.sources.spans import Span
from bert_recipe.data_preparation.sources.wikipedia import read_dump
from bert_recipe.data_preparation.sources.wikitext import prose_of
from bert_recipe.data_preparation.sources.wikitext_templates import CONSTANTS, SHOW, SHOW_NAMED
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.text_files import raise_error

SAMPLE = ROOT / "data/sample/wiki/enwiki-sample-pages-articles.xml.bz2"

HEAD = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" xml:lang="de">
<siteinfo><namespaces>
<namespace key="0" case="first-letter" /><namespace key="6" case="first-letter">Datei</namespace>
<namespace key="14" case="first-letter">Kategorie</namespace></namespaces></siteinfo>
"""
PROSE = "The aardvark is a medium-sized, burrowing, nocturnal mammal that lives in Africa."
TITLE = "A History of the Aardvark in Four Volumes, with an Essay on Ants"
LONG = (
    "The sources contradict each other in almost every point, and none of them is older than the "
    "third century."
)


def page(title: str, text: str, namespace: int = 0, extra: str = "") -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    return (
        f"  <page>\n    <title>{title}</title>\n    <ns>{namespace}</ns>\n    <id>1</id>{extra}\n  "
        f"  <revision>"
        f'<model>wikitext</model><text xml:space="preserve">{text}</text></revision>\n  </page>\n'
    )


def write_dump(path: Path, pages: list[str]) -> Path:
    path.write_bytes(bz2.compress((HEAD + "".join(pages) + "</mediawiki>\n").encode()))
    return path


def extract(path: Path, on_bad=raise_error, length: int = 1 << 40) -> list[Document]:
    """The documents of a dump, read in spans of `length` bytes."""
    size = path.stat().st_size
    spans = [
        Span(str(path), start, min(start + length, size)) for start in range(0, size or 1, length)
    ]
    return [document for span in spans for document in read_dump(span, on_bad)]


def sample_xml() -> bytes:
    return bz2.decompress(SAMPLE.read_bytes())


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("The [[Orycteropus|aardvark]]s of [[Africa]] dig.", "The aardvarks of Africa dig."),
        (
            "A[[File:a.jpg|thumb|A [[dog]] and [http://x y]]] dog barks at night.",
            "A dog barks at night.",
        ),
        ("A dog barks.[[Category:Dogs]] [[Kategorie:Hunde]]", "A dog barks."),
        ("A [[:Category:Dogs|dog]] barks at night.", "A dog barks at night."),
        (
            "''Titanic'''s crew and '''bold''' and L'''Étoile''.",
            "Titanic's crew and bold and L'Étoile.",
        ),
        (
            "It is {{convert|5|to|10|km|mi}} long, or {{convert|6|ft|2|in|m}}.",
            "It is 5 to 10 km long, or 6 ft 2 in.",
        ),
        ("Paris ({{IPA-fr|paʁi}}; {{lang-fr|''Paris''}}) is big.", "Paris (Paris) is big."),
        ("He was born ({{circa|1800}}) in {{lang|de|Wien}}.", "He was born (c. 1800) in Wien."),
        ("Foo ({{pron|x}}, {{y}}) is {{cn}} here.{{sfn|A|p=1}}", "Foo is here."),
        ("One.<ref name=a>Two {{cite|[[x]]}}</ref> Three<ref name=a /> four.", "One. Three four."),
        ("About 10<sup>6</sup> litres of H<sub>2</sub>O.", "About 10^6 litres of H2O."),
        (
            "On the 1<sup>st</sup> of 2<sup>n</sup> days it rained.",
            "On the 1st of 2^n days it rained.",
        ),
        (  # names of articles, and a link to another language
            "He was in [[CSI: Miami]] and [[Re:Zero]].[[de:CSI: Miami]]",
            "He was in CSI: Miami and Re:Zero.",
        ),
        ("C calls main() ({{y}}) for int[] and [{{y}}] no.", "C calls main() for int[] and no."),
        ("او می\u200cخواهد کتاب\u200cها را بخواند.", "او می\u200cخواهد کتاب\u200cها را بخواند."),
        ("A line\u2028of two\u00adfold text\u200e.", "A line of twofold text."),
        (
            r"Here <math>x_i</math> is <math>\alpha</math>, not <math>|x|</math>.",
            "Here x_i is alpha, not.",
        ),
        (
            r"So <math>\sin^2\alpha = \frac{x+1}{\sqrt{2}}</math> here.",
            "So sin^2 alpha = (x+1)/√2 here.",
        ),
        (
            r"So <math>\overline{x} = \frac{\sum_{i=1}^{n} x_i}{n}</math> here.",
            "So x̄ = (∑_i=1^n x_i)/n here.",
        ),
        (
            r"A mean <math>\bar{x}</math> at <math>9^\circ</math> is <math>e^{x+1}</math>.",
            "A mean x̄ at 9° is e^(x+1).",
        ),
        (
            "It was, {{as of|2010|5|lc=y}}, {{val|6.24|(7)|e=18|u=C}} in {{AD|79}}.",
            "It was, as of May 2010, 6.24(7)×10^18 C in AD 79.",
        ),
        ("वह घर गया।", "वह घर गया।"),  # words of letters and combining vowels
        ("{{As of|2010|alt=In 2010}} it was so.", "In 2010 it was so."),
        ("{{Script/Arabic|كتاب}} is {{lang-ar|كتاب}} and 10{{sup|6}}.", "كتاب is كتاب and 10^6."),
        ("He said {{\"'}}no{{'\"}} to 5{{e|24}} kg.", "He said \"'no'\" to 5×10^24 kg."),
        (
            "Bread&nbsp;&amp; butter are <nowiki>[[good]]</nowiki> here.",
            "Bread & butter are good here.",
        ),
        (
            "See [http://example.org the ''example''] and [[Mercury (planet)|]].",
            "See the example and Mercury.",
        ),
        ("The [sic] mark is in {{nowrap|5 m}} there__NOTOC__.", "The [sic] mark is in 5 m there."),
        (
            "Ships like {{HMS|Victory|1765|6}} cost {{US$|5}} m.",
            "Ships like HMS Victory cost US$5 m.",
        ),
        ("Some <!-- not [[ this --> words {{{param|}}} stay.", "Some words stay."),
        ("If a < b and b > c then a is small.", "If a < b and b > c then a is small."),
    ],
)
def test_a_sentence_reads_as_wikipedia_shows_it(markup, text):
    hidden = frozenset(["file", "category", "kategorie"])
    assert prose_of(markup, hidden) == [text]


def test_only_prose_stays_of_a_page():
    markup = f"""{{{{Infobox animal
| name = {{{{nowrap|Aardvark}}}}
| text = [[File:a.jpg|a caption that is long enough to be taken for a sentence of the page.]]
}}}}
'''{PROSE}'''
It eats ants.

== Heading ==
{{{{main|Ants}}}}
* a list item that is a sentence and is long enough to stay if it were none.
# another [[list]] item that is a sentence and is long enough to stay.
; a bold line
:* an indented list item that is a sentence and is long enough to stay if it were none.
: 2 CH<sub>4</sub> + 3 O<sub>2</sub> = 2 CO + 4 H<sub>2</sub>O.
{{| class="wikitable"
|-
! style="color:red" | A header cell
!A header cell that is a sentence and is long enough to be a paragraph of prose.
|-
| A cell that is a sentence and is long enough to be a paragraph of prose.
{{| nested
| A nested cell that is a sentence and is long enough to be a paragraph.
|}}
|}}
<gallery>
File:b.jpg|Another caption that is long enough to be a paragraph of prose.
</gallery>
{PROSE}
<blockquote>I have never seen an aardvark in my life, and nor have you.</blockquote>
== References ==
{{{{reflist}}}}
Smith, John. ''A History of the Aardvark in Four Volumes''. London, 1900. 1,234 pages.
== Legacy ==
It is remembered to this day by all who met it.
[[Category:Mammals]]
"""
    assert prose_of(markup) == [
        f"{PROSE} It eats ants.",
        PROSE,
        "I have never seen an aardvark in my life, and nor have you.",
        "It is remembered to this day by all who met it.",
    ]


PLACES = {
    "a cell of a table": (
        f"{{|\n|-\n| 1868\n| style='x' | {LONG}\n\n{LONG} So.\n|}}",
        [LONG, f"{LONG} So."],
    ),
    "a table in a table": (f"{{|\n|\n{{| class=x\n! Name || {LONG}\n|}}\n|}}", [LONG]),
    "a table in HTML": (
        f"<table a=b><tr><td>1868<td>{LONG}</td></tr></table>{PROSE}",
        [LONG, PROSE],
    ),
    "definitions in HTML": (
        "<dl><dt>Cat</dt><dd>An animal.</dd></dl>It has fur.",
        ["Cat: An animal.", "It has fur."],
    ),
    "definitions": (
        "; Cat\n: An animal, tame.\n: It has fur.",
        ["Cat: An animal, tame.", "It has fur."],
    ),
    "terms of two parts": ("; Rule 1 : ''Unity'' :\n: It is one.", ["Rule 1: Unity: It is one."]),
    "a definition on its line": ("; Recursion : It calls itself.", ["Recursion: It calls itself."]),
    "text below a bold line": ("; A bold line\nText follows here.", ["Text follows here."]),
    "indented quotations": (
        f"He said so:\n:{PROSE}\n::{LONG}\nIt ended.",
        ["He said so:", PROSE, LONG],
    ),
    "verse": (
        ":''I saw the Master there,''\n:''Who stood by him.''",
        ["I saw the Master there, Who stood by him."],
    ),
    "a quotation's element": (f"<blockquote>{PROSE}</blockquote>{LONG}", [PROSE, LONG]),
    "a poem's element": (
        "<poem>\nO beautiful skies,\nwaves of grain!</poem>",
        ["O beautiful skies, waves of grain!"],
    ),
    "a quotation's template": (
        f"{{{{quote|text={PROSE}|author=X}}}}\n{{{{Quote box|quote={LONG}}}}}",
        [PROSE, LONG],
    ),
    "a list of episodes": (
        f"{{{{Episode table|width=5|episodes=\n"
        f"{{{{Episode list/sublist|X\n"
        "|Title=A\n"
        f"|ShortSummary={PROSE}\n"
        f"}}}}}}}}",
        [PROSE],
    ),
    "a section on the sources": (
        f"== Sources ==\n{LONG}\n* {LONG}\nSmith, J. (1900). ''{TITLE}''. London.",
        [LONG],
    ),
    "a section of works": (
        f"== Discography ==\n{PROSE}\n== ''References'' ==\nIt is from a book.",
        [PROSE],
    ),
}
PLACES |= {  # templates and variants of other languages, which leave their words
    "German": (
        'Das Wort {{laS|homo}} {{"|Mensch}} ist alt.\n'
        "{{Zitat|Text=Der Mensch ist ein Tier.|Autor=X}}",
        ["Das Wort homo “Mensch” ist alt.", "Der Mensch ist ein Tier."],
    ),
    "French": (
        "Au {{s|xix}}, le {{1er}} était à {{unité|5|km}} de {{langue|en|London}}, "
        "{{citation|loin}}.\n"
        "{{Citation bilingue bloc|lang=en|A cat is here.|Un chat est là.|X}}",
        ["Au XIXe siècle, le 1er était à 5 km de London, “loin”.", "Un chat est là."],
    ),
    "Russian": (
        "Это {{нп5|Лондон|лондонский|en|London}} дом, {{lang-en|house}}.\n{{Цитата|Дом стоит.}}",
        ["Это лондонский дом, house.", "Дом стоит."],
    ),
    "Japanese": (
        "{{読み仮名|夏目漱石|なつめそうせき}}は{{仮リンク|作家|en|Writer}}である。",
        ["夏目漱石 (なつめそうせき)は作家である。"],
    ),
    "Chinese": (
        "-{zh-hans:计算机; zh-hant:電腦}-是一种-{A|zh-cn:设备;zh-tw:裝置}-，-{好}-用。"
        "-{H|zh-cn:甲;zh-tw:乙}-",
        ["计算机是一种设备，好用。"],
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_prose_stays_wherever_a_page_of_any_language_sets_it(place):
    markup, paragraphs = PLACES[place]
    assert prose_of(markup) == paragraphs


@pytest.mark.parametrize(
    ("heading", "entry"),
    [
        (
            "Einzelnachweise",
            "Müller, Hans: ''Geschichte der Erdferkel''. Berlin 1900, S. 12–34, hier S. 13.",
        ),
        (
            "Notes et références",
            "Jean Dupont, ''Histoire de l’Oryctérope'', Paris, Éditions du Seuil, 1900, p. 12.",
        ),
        (
            "Примечания",
            "Иванов И. И. ''История Трубкозуба в Африке''. — Москва: Наука, 1900. — С. 12—34.",
        ),
        ("参考文献", "夏目漱石『吾輩は猫である』岩波書店、1990年、12頁。"),
        (
            "Bibliografía",
            "García, Juan (1900). ''Historia del Cerdo Hormiguero''. Madrid: Alianza Editorial.",
        ),
    ],
)
def test_sections_of_references_are_known_in_other_languages(heading, entry):
    markup = f"{PROSE}\n== {heading} ==\n{entry}\n=== 1900 ===\n{entry}\n== Erdferkel ==\n{LONG}"
    assert prose_of(markup) == [PROSE, LONG]


@pytest.mark.parametrize(
    "arguments",
    ["", "|", "|a", "|1|2", "|1||3|to|", "|x=1", "|quote=", "|-1|13|99|5|6|7|8|9", "|e=|u="],
)
def test_no_known_template_fails_whatever_its_arguments(arguments):
    for name in (*CONSTANTS, *SHOW, *SHOW_NAMED, "lang-x", "formatnum:", "xixe siècle", "#if:", ""):
        assert PROSE in "\n".join(prose_of(f"{{{{{name}{arguments}}}}} {PROSE}")), name


@pytest.mark.parametrize(
    "opened",
    ["[[", "{{\n", "{|\n", "<ref>", "<!-- ", "[http://a ", "''", "[[File:a|", "<nowiki>", "{{{"],
)
def test_what_nothing_closes_loses_no_paragraph(opened):
    assert PROSE in prose_of(f"Before it.\n{opened}\n\n{PROSE}\n\n{PROSE} [[Africa]] {{{{cn}}}}")


MARKUP = [
    *"[]{}|<>='*#:;!/- ab.",
    "\n",
    "ref",
    "{{",
    "}}",
    "[[",
    "]]",
    "\n{|",
    "\n|}",
    "<!--",
    "-->",
]
MARKUP += [
    "-{",
    "}-",
    "<td>",
    "<dd>",
    "<math>",
    "</math>",
    r"\frac",
    r"\sqrt{",
    r"\bar",
    "^{",
    r"\alpha",
    r"\sum",
]


@given(st.lists(st.sampled_from(MARKUP)).map("".join))
@settings(max_examples=300, deadline=None)
def test_no_markup_makes_it_fail_or_stays(markup):
    paragraphs = prose_of(f"{PROSE}\n\n{markup}\n\n{PROSE}")
    assert paragraphs[0] == PROSE
    for paragraph in paragraphs:
        assert not re.search(r"\[\[|\]\]|\{\{|\}\}|''|  |\n", paragraph)


UNITS = [
    "{{",
    "[[",
    "\n{|",
    "<ref>",
    "<!--",
    "<math",
    "[http://a ",
    "]]] ",
    ", ",
    "( ",
    "'",
    "|",
    "{{lang|fr|",
    "-{",
]
UNITS += ["[[a|b\n\n", "\n:a,", "\n;a: b,", "\n{|\n|a", f"\n{{|\n| {LONG}", f"\n{{|\n| {LONG}\n|}}"]


@pytest.mark.parametrize("unit", UNITS)
def test_time_grows_with_the_text_and_not_with_its_square(unit):
    def seconds(size: int) -> float:
        started = time.process_time()
        prose_of(unit * (size // len(unit)))
        return time.process_time() - started

    # 16 times the text would take 256 times as long; 64 leaves room for noise.
    small = min(seconds(1 << 14) for _ in range(3))
    assert seconds(1 << 18) < 64 * small + 0.5


def test_redirects_other_namespaces_and_disambiguation_pages_are_left_out(tmp_path):
    dump = write_dump(
        tmp_path / "dump.xml.bz2",
        [
            page("Aardvark", PROSE),
            page("Earth pig", "#REDIRECT [[Aardvark]]", extra='<redirect title="Aardvark" />'),
            page("Talk:Aardvark", PROSE, namespace=1),
            page("Ant", f"{PROSE}\n* [[Ant (insect)]]\n{{{{disambiguation}}}}"),
            page("Ameise", f"{PROSE}\n{{{{Begriffsklärung}}}}"),
            page("Erdferkel", f"{PROSE}[[Datei:a.jpg|mini|Ein Bild.]][[Kategorie:Tiere]]"),
            page("Empty", ""),
        ],
    )
    assert [(document.name, document.paragraphs) for document in extract(dump)] == [
        ("Aardvark", [PROSE]),
        ("Erdferkel", [PROSE]),
    ]


def test_every_layout_of_a_dump_gives_the_same_documents_however_it_is_divided(tmp_path):
    xml = sample_xml()
    expected = extract(SAMPLE)
    assert len(expected) == 12
    first_page, end = xml.index(b"  <page>"), xml.index(b"</mediawiki>")
    pages = re.findall(rb"  <page>.*?</page>\n", xml, re.S)
    multistream = [xml[:first_page], *pages, xml[end:]]
    anywhere = [xml[at : at + 9_973] for at in range(0, len(xml), 9_973)]
    in_tags = re.split(rb"(?<=<pa)(?=ge>)|(?<=</media)(?=wiki>)", xml)
    layouts = {"plain": [xml], "multistream": multistream, "parallel": anywhere, "in tags": in_tags}
    paths = [tmp_path / f"{name}.xml.bz2" for name in layouts]
    for path, streams in zip(paths, layouts.values(), strict=True):
        path.write_bytes(b"".join(bz2.compress(stream, 1) for stream in streams))
    paths.append(tmp_path / "dump.xml")
    paths[-1].write_bytes(xml)
    for path in paths:
        size = path.stat().st_size
        for length in (size, size // 2 + 1, size // 7, 997 + size // 90):
            assert extract(path, length=length) == expected, (path.name, length)


def test_any_bzip2_file_is_read_from_any_place(tmp_path, monkeypatch):
    """Blocks at every bit, against the standard library; also where a mark of a block is there by
    chance.
    """
    rng = random.Random(3)
    text = b"".join(
        rng.randbytes(rng.randint(1, 60_000)) + bytes(rng.randint(0, 99_000)) for _ in range(30)
    )
    path = tmp_path / "text.bz2"
    path.write_bytes(
        b"".join(
            bz2.compress(part, 1) for part in (text[:900_000], text[900_000:], b"", text[:1000])
        )
    )
    with path.open("rb") as file:
        blocks = list(bzip2.read_blocks(file, 0))
        assert len(blocks) > 8
        assert b"".join(block for _, block in blocks) == bz2.decompress(path.read_bytes())
        for start in range(0, path.stat().st_size, 99_991):
            assert list(bzip2.read_blocks(file, start)) == [
                block for block in blocks if block[0] >= start
            ]
        real = bzip2.find_marks
        chance = bzip2.Mark(blocks[3][0] * 8 + 99, True)
        monkeypatch.setattr(
            bzip2,
            "find_marks",
            lambda data: sorted([*real(data), *[chance] * (chance.bit < 8 * len(data))]),
        )
        monkeypatch.setattr(bzip2, "READ_SIZE", 1 << 30)
        assert list(bzip2.read_blocks(file, 0)) == blocks


def test_a_compressed_file_a_million_times_smaller_than_its_text_is_read_in_little_memory(tmp_path):
    path = tmp_path / "bomb.xml.bz2"
    path.write_bytes(bz2.compress(HEAD.encode()) + bz2.compress(b"<page>" + bytes(300_000_000)))
    tracemalloc.start()
    with pytest.raises(UserError, match="truncated or damaged"):
        extract(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 250_000_000


def test_the_sample_dump_has_no_residue():
    sentences = [paragraph for document in extract(SAMPLE) for paragraph in document.paragraphs]
    assert sum(len(paragraph.split()) for paragraph in sentences) > 15_000
    for paragraph in sentences:
        residue = re.search(
            r"\[\[|\]\]|\{\{|\}\}|[|<>]|==|''|&\w+;|\( ?\)|  |__[A-Z]|https?:| [,.]( |$)", paragraph
        )
        assert not residue, paragraph


PAGES = [
    page(f"Page {number}", f"{PROSE} {random.Random(number).randbytes(9_000).hex()}")
    for number in range(70)
]


@pytest.mark.parametrize(("streams", "cut"), [("many", 0.3), ("many", 0.99), ("one", 0.99)])
def test_a_dump_that_is_cut_off_is_refused_or_read_up_to_there(tmp_path, streams, cut):
    """Of several streams, and of one with several blocks of bzip2: the first is whole."""
    whole = [document.name for document in extract(SAMPLE)]
    xml = sample_xml()
    if streams == "one":
        whole = [f"Page {number}" for number in range(70)]
        xml = f"{HEAD}{''.join(PAGES)}</mediawiki>\n".encode()
    size = 20_011 if streams == "many" else len(xml)
    compressed = b"".join(bz2.compress(xml[at : at + size]) for at in range(0, len(xml), size))
    path = tmp_path / "dump.xml.bz2"
    path.write_bytes(compressed[: int(len(compressed) * cut)])
    with pytest.raises(UserError, match=r"dump\.xml\.bz2.*truncated or damaged"):
        extract(path)
    bad: list[str] = []
    names = [document.name for document in extract(path, lambda where, _why: bad.append(where))]
    assert bad and names == whole[: len(names)]
    assert len(names) >= (len(whole) * cut - 3 if streams == "many" else 30)


def test_a_damaged_stream_costs_its_own_pages_only(tmp_path):
    pages = [page(f"Page {number}", f"{PROSE} {number}.") for number in range(20)]
    streams = [bz2.compress(part.encode()) for part in (HEAD, *pages, "</mediawiki>\n")]
    streams[7] = streams[7][:60] + bytes(20) + streams[7][80:]
    path = tmp_path / "dump.xml.bz2"
    path.write_bytes(b"".join(streams))
    bad: list[str] = []
    names = [document.name for document in extract(path, lambda where, _why: bad.append(where))]
    assert names == [f"Page {number}" for number in range(20) if number != 6]
    assert len(bad) == 1


def test_a_malformed_page_is_named(tmp_path):
    broken = page("Broken", PROSE).replace("</revision>", "")
    path = write_dump(
        tmp_path / "dump.xml.bz2", [page("Good", PROSE), broken, page("Better", PROSE)]
    )
    with pytest.raises(UserError, match="page Broken: malformed XML"):
        extract(path)
    bad: list[str] = []
    assert [document.name for document in extract(path, lambda where, _why: bad.append(where))] == [
        "Good",
        "Better",
    ]
    assert bad == [f"{path}, page Broken"]
