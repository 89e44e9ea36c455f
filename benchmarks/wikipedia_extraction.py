"""Quality and speed of the Wikipedia reader: markup that is left, prose that is lost, compared with mwparserfromhell.

    python benchmarks/wikipedia_extraction.py data/sample/wiki/enwiki-sample-pages-articles.xml.bz2
    python benchmarks/wikipedia_extraction.py DUMP --show paragraph "table cell"    # print the lost paragraphs

mwparserfromhell is used in two ways: its `strip_code` is the other extractor, and its syntax tree, which is independent
of this project, gives the paragraphs of each page, which are looked for in this project's text.
"""

import bz2
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parent.parent))

from data_preparation.sources.wikipedia import PAGE_END, PAGE_START, read_page
from data_preparation.sources.wikipedia_names import FILE_ALIASES
from data_preparation.sources.wikitext import prose_of
from utils.command_line import ArgumentParser
from utils.errors import UserError, run_main

try:
    import mwparserfromhell
except ImportError:
    mwparserfromhell = None

RESIDUE = {
    "[[ or ]]": r"\[\[|\]\]",
    "{{ or }}": r"\{\{|\}\}",
    "|": r"\|",
    "< or >": r"[<>]",
    "==": r"==",
    "&nbsp; and the like": r"&#?\w+;",
    "'' (emphasis)": r"''",
    "( ) or (, or ,)": r"\(\s*\)|\( *[,;]|[,;] *\)",
    "space before , or .": r" [,.](?= |$)",
    "doubled space": r"\S  +\S",
    "http": r"https?:",
    "__MAGIC__": r"__[A-Z]{3,}__",
    "thumb| and the like": r"\b(?:thumb|right|left|\d+px)\|",
}

# A paragraph is prose if it has at least MIN_WORDS words and ends like a sentence. It is lost if less than MIN_FOUND of
# its runs of three words are in this project's text.
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
HIDDEN_ELEMENTS = ("ref", "references", "gallery", "math", "imagemap", "timeline", "pre", "source", "syntaxhighlight")


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dump", type=Path, help="pages-articles.xml.bz2 that fits in memory")
    parser.add_argument("--show", nargs="+", choices=tuple(KINDS), default=[], help="kinds of lost paragraphs to print")
    args = parser.parse_args()
    started = time.perf_counter()
    texts = read_texts(args.dump)
    raw = sum(len(text.encode()) for text in texts) / 1e6
    seconds = time.perf_counter() - started
    print(f"{len(texts)} articles, {raw:.1f} MB of markup, decompressed and parsed in {seconds:.2f} s")
    extractors: dict[str, Callable[[str], str]] = {"this project": lambda text: "\n".join(prose_of(text))}
    if mwparserfromhell:
        extractors["strip_code"] = lambda text: mwparserfromhell.parse(text).strip_code()
    else:
        print("mwparserfromhell is not installed: pip install mwparserfromhell to compare", file=sys.stderr)
    results = {name: measure(extract, texts) for name, extract in extractors.items()}
    print(f"{'':24}" + "".join(f"{name:>16}" for name in results))
    for row in next(iter(results.values())):
        print(f"{row:24}" + "".join(f"{result[row]:16,.3f}" for result in results.values()))
    if mwparserfromhell:
        show_lost(find_lost(texts), args.show)


def read_texts(path: Path) -> list[str]:
    """The markup of the articles in the dump."""
    if not path.is_file():
        raise UserError(f"{path} does not exist: check the path")
    xml = bz2.decompress(path.read_bytes())
    texts = []
    for page in re.findall(re.escape(PAGE_START) + b".*?" + re.escape(PAGE_END), xml, re.S):
        if read_page(page, FILE_ALIASES | {"file", "category"}):
            text = ElementTree.fromstring(page).findtext("revision/text")
            texts.append(text)
    return texts


def measure(extract: Callable[[str], str], texts: list[str]) -> dict[str, float]:
    """MB of markup per second of processor time, words, % of sentences with residue, and residues per 1,000 words."""
    started = time.process_time()
    extracted = [extract(text) for text in texts]
    seconds = time.process_time() - started
    text = "\n".join(extracted)
    words = len(text.split())
    sentences = [one for one in re.split(r"(?<=[.?!]) +|\n+", text) if one.strip()]
    bad = sum(any(re.search(pattern, one) for pattern in RESIDUE.values()) for one in sentences)
    rows = {
        "MB/s of markup": sum(len(text.encode()) for text in texts) / 1e6 / seconds,
        "words": words,
        "sentences with residue %": 100 * bad / len(sentences),
    }
    per_thousand = {name: 1000 * len(re.findall(pattern, text, re.M)) / words for name, pattern in RESIDUE.items()}
    orphans = sum(abs(line.count(a) - line.count(b)) for line in text.split("\n") for a, b in ("()", "[]"))
    return rows | per_thousand | {"orphaned ( ) [ ]": 1000 * orphans / words}


@dataclass
class Coverage:
    """How much of the paragraphs of one kind is in this project's text."""

    paragraphs: int = 0
    runs: int = 0  # of three words
    found: int = 0
    lost: list[str] = field(default_factory=list)


def find_lost(texts: list[str]) -> dict[str, Coverage]:
    """The paragraphs of prose that mwparserfromhell finds, by kind, and those that this project's text lacks."""
    kinds = {kind: Coverage() for kind in KINDS}
    for text in texts:
        here = runs_of_three("\n".join(prose_of(text)))
        for kind, paragraph in paragraphs_of(mwparserfromhell.parse(text).nodes, "paragraph"):
            runs = runs_of_three(paragraph)
            if len(runs) < MIN_WORDS - 2 or not SENTENCE_END.search(paragraph):
                continue
            found = len(runs & here)
            kinds[kind].paragraphs += 1
            kinds[kind].runs += len(runs)
            kinds[kind].found += found
            if found < MIN_FOUND * len(runs):
                kinds[kind].lost.append(paragraph.replace(GAP, ""))
    return kinds


def show_lost(found: dict[str, Coverage], kinds: list[str]) -> None:
    for kind in kinds:
        for paragraph in found[kind].lost:
            print(f"lost {kind}: {paragraph}")
    print(f"\n{'paragraphs of prose':24}{'in the pages':>16}{'lost':>16}{'words found %':>16}")
    for kind, what in KINDS.items():
        counts = found[kind]
        share = 100 * counts.found / max(1, counts.runs)
        print(f"{kind:24}{counts.paragraphs:16,}{len(counts.lost):16,}{share:16.2f}  {what}")


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
    """Text; (kind, None) at the start of a line of that kind; (kind, nodes) for nodes with lines of their own."""
    node_types = mwparserfromhell.nodes
    for node in nodes:
        if isinstance(node, node_types.Text):
            first, *rest = str(node).split("\n")
            yield first
            for text in rest:
                yield kind, None
                yield text
        elif isinstance(node, node_types.HTMLEntity):
            yield node.normalize()
        elif isinstance(node, node_types.Heading):
            yield kind, None
        elif isinstance(node, node_types.Wikilink):
            prefix = str(node.title).partition(":")[0].strip().lower()
            if prefix not in ("file", "image", "category"):
                yield from parts_of((node.text or node.title).nodes, kind)
        elif isinstance(node, node_types.ExternalLink) and node.title:
            yield from parts_of(node.title.nodes, kind)
        elif isinstance(node, node_types.Tag):
            name = str(node.tag).strip().lower()
            if name in HIDDEN_ELEMENTS:
                yield GAP
            elif node.wiki_markup in LINE_KINDS:
                yield LINE_KINDS[node.wiki_markup], None
            elif name in ("table", "tr", "td", "th", "li"):
                yield "table cell" if name != "li" else "list item", node.contents.nodes
            elif name in ("div", "blockquote", "poem", "center", "p"):
                yield kind, node.contents.nodes
            elif name == "br":
                yield " "
            elif node.contents:
                yield from parts_of(node.contents.nodes, kind)
        elif isinstance(node, node_types.Template):
            name = str(node.name).strip().lower()
            if name.startswith(("cite", "citation", "sfn", "harv", "refn", "efn", "#tag")):
                continue
            yield GAP
            template_kind = "quotation" if "quote" in name else "template"
            for argument in node.params:
                if kind != "template" or template_kind == "quotation":
                    yield template_kind, argument.value.nodes


if __name__ == "__main__":
    run_main(main)
