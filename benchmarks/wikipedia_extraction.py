"""Quality and speed of the Wikipedia reader: markup that is left, prose that is lost, compared with
mwparserfromhell.

    python benchmarks/wikipedia_extraction.py data/sample/wiki/enwiki-sample-pages-articles.xml.bz2

mwparserfromhell is used in two ways: its `strip_code` is the other extractor, and its syntax tree,
which is independent of this project, gives the paragraphs of each page, which are looked for in
this project's text. Needs mwparserfromhell.
"""

import bz2
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import mwparserfromhell

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.results import CPU, benchmark_parser, write_result
from data_preparation.sources.wikipedia import PAGE_END, PAGE_START, read_page
from data_preparation.sources.wikipedia_names import FILE_ALIASES
from data_preparation.sources.wikitext import prose_of
from utils.errors import run_main

RESIDUE = re.compile(
    r"\[\[|\]\]|\{\{|\}\}|\||[<>]|==|''|&#?\w+;|https?:|__[A-Z]{3,}__"  # markup
    r"|\(\s*\)|\( *[,;]|[,;] *\)| [,.](?= |$)|\S  +\S"  # what removed markup leaves around it
)

# A paragraph is prose if it has at least MIN_WORDS words and ends like a sentence. It is lost if
# less than MIN_FOUND of its runs of three words are in this project's text.
MIN_WORDS = 8
SENTENCE_END = re.compile(r"[.?!][\"'”’)\]\0]*$")
MIN_FOUND = 0.5
KINDS = {
    "paragraph": "running text, block quotations",
    "indented": "lines with : and ;",
    "quotation": "in a template for quotations",
    "table cell": "",
    "list item": "removed on purpose",
    "template": "captions, notes: removed on purpose",
}
GAP = "\0"  # stands for what is not looked for: a formula, the output of a template
LINE_KINDS = {"*": "list item", "#": "list item", ":": "indented", ";": "indented"}
INNER_KINDS = {
    "table": "table cell",
    "tr": "table cell",
    "td": "table cell",
    "th": "table cell",
    "li": "list item",
}
BLOCKS = ("div", "blockquote", "poem", "center", "p")
HIDDEN_ELEMENTS = (
    "ref",
    "references",
    "gallery",
    "math",
    "imagemap",
    "timeline",
    "pre",
    "source",
    "syntaxhighlight",
)
NO_TEXT = ("cite", "citation", "sfn", "harv", "refn", "efn", "#tag")  # templates


def main(argv: list[str] | None = None) -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("dump", type=Path, help="pages-articles.xml.bz2 that fits in memory")
    args = parser.parse_args(argv)
    texts = read_texts(args.dump)
    results = {
        "this project": measure(lambda text: "\n".join(prose_of(text)), texts),
        "strip_code": measure(lambda text: mwparserfromhell.parse(text).strip_code(), texts),
    }
    print(f"{f'{len(texts)} articles':26}" + "".join(f"{name:>16}" for name in results))
    for row in results["strip_code"]:
        print(f"{row:26}" + "".join(f"{result[row]:16,.3f}" for result in results.values()))
    found = find_lost(texts)
    print(f"\n{'paragraphs of prose':26}{'in the pages':>16}{'lost':>16}{'words found %':>16}")
    for kind, what in KINDS.items():
        counts = found[kind]
        share = 100 * counts.found / max(1, counts.runs)
        print(f"{kind:26}{counts.paragraphs:16,}{len(counts.lost):16,}{share:16.2f}  {what}")
    prose = {
        kind: {
            "in the pages": counts.paragraphs,
            "lost": len(counts.lost),
            "runs of three words": counts.runs,
            "found": counts.found,
        }
        for kind, counts in found.items()
    }
    result = {"articles": len(texts), "extraction": results, "paragraphs": prose}
    write_result(args.output, "wikipedia_extraction", CPU, result)


def read_texts(path: Path) -> list[str]:
    """The markup of the articles in the dump."""
    pages = re.findall(
        re.escape(PAGE_START) + b".*?" + re.escape(PAGE_END),
        bz2.decompress(path.read_bytes()),
        re.S,
    )
    articles = (page for page in pages if read_page(page, FILE_ALIASES | {"file", "category"}))
    return [ElementTree.fromstring(page).findtext("revision/text") for page in articles]


def measure(extract: Callable[[str], str], texts: list[str]) -> dict[str, float]:
    """MB of markup per second of processor time, words, and % of sentences with residue."""
    started = time.process_time()
    text = "\n".join(map(extract, texts))
    seconds = time.process_time() - started
    sentences = [one for one in re.split(r"(?<=[.?!]) +|\n+", text) if one.strip()]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    return {
        "MB of markup": megabytes,
        "MB per second": megabytes / seconds,
        "words": len(text.split()),
        "sentences with residue %": 100
        * sum(bool(RESIDUE.search(one)) for one in sentences)
        / len(sentences),
    }


@dataclass
class Coverage:
    """How much of the paragraphs of one kind is in this project's text."""

    paragraphs: int = 0
    runs: int = 0  # of three words
    found: int = 0
    lost: list[str] = field(default_factory=list)


def find_lost(texts: list[str]) -> dict[str, Coverage]:
    """The paragraphs of prose that mwparserfromhell finds, by kind, and those that this project's
    text lacks.
    """
    kinds = {kind: Coverage() for kind in KINDS}
    for text in texts:
        here = runs_of_three("\n".join(prose_of(text)))
        for kind, paragraph in paragraphs_of(mwparserfromhell.parse(text).nodes, "paragraph"):
            runs = runs_of_three(paragraph)
            counts = kinds[kind]
            if len(runs) < MIN_WORDS - 2 or not SENTENCE_END.search(paragraph):
                continue
            found = len(runs & here)
            counts.paragraphs += 1
            counts.runs += len(runs)
            counts.found += found
            if found < MIN_FOUND * len(runs):
                counts.lost.append(paragraph.replace(GAP, ""))
    return kinds


def runs_of_three(text: str) -> set[tuple[str, ...]]:
    runs = set()
    for stretch in text.lower().split(GAP):
        words = re.findall(r"\w+", stretch)
        runs |= set(zip(words, words[1:], words[2:], strict=False))
    return runs


def paragraphs_of(nodes: list, kind: str) -> Iterator[tuple[str, str]]:
    """(kind, text) of each line of a page."""
    line, line_kind = "", kind
    for part in parts_of(nodes, kind):
        if isinstance(part, str):
            line += part
            continue
        part_kind, inner = part
        if inner is None:
            yield line_kind, " ".join(line.split())
            line, line_kind = "", part_kind
        else:
            yield from paragraphs_of(inner, part_kind)
    yield line_kind, " ".join(line.split())


def parts_of(nodes: list, kind: str) -> Iterator[str | tuple[str, list | None]]:
    """Text; (kind, None) at the start of a line of that kind; (kind, nodes) for nodes with lines of
    their own.
    """
    for node in nodes:
        match node:
            case mwparserfromhell.nodes.Text():
                first, *rest = str(node).split("\n")
                yield first
                for text in rest:
                    yield kind, None
                    yield text
            case mwparserfromhell.nodes.HTMLEntity():
                yield node.normalize()
            case mwparserfromhell.nodes.Heading():
                yield kind, None
            case mwparserfromhell.nodes.Wikilink():
                prefix = str(node.title).partition(":")[0].strip().lower()
                if prefix not in ("file", "image", "category"):
                    yield from parts_of((node.text or node.title).nodes, kind)
            case mwparserfromhell.nodes.ExternalLink() if node.title:
                yield from parts_of(node.title.nodes, kind)
            case mwparserfromhell.nodes.Tag():
                yield from parts_of_tag(node, kind)
            case mwparserfromhell.nodes.Template():
                yield from parts_of_template(node, kind)


def parts_of_tag(node: mwparserfromhell.nodes.Tag, kind: str) -> Iterator:
    """As `parts_of`, of one element."""
    name = str(node.tag).strip().lower()
    if name in HIDDEN_ELEMENTS:
        yield GAP
    elif node.wiki_markup in LINE_KINDS:
        yield LINE_KINDS[node.wiki_markup], None
    elif name in INNER_KINDS or name in BLOCKS:
        yield INNER_KINDS.get(name, kind), node.contents.nodes
    elif name == "br":
        yield " "
    elif node.contents:
        yield from parts_of(node.contents.nodes, kind)


def parts_of_template(node: mwparserfromhell.nodes.Template, kind: str) -> Iterator:
    """As `parts_of`, of one template. Templates in templates are left out, but for quotations."""
    name = str(node.name).strip().lower()
    if name.startswith(NO_TEXT):
        return
    yield GAP
    is_quotation = "quote" in name
    if kind == "template" and not is_quotation:
        return
    for each in node.params:
        yield "quotation" if is_quotation else "template", each.value.nodes


if __name__ == "__main__":
    run_main(main)
