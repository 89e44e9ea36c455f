"""What is left of markup in the text of a Wikipedia dump, and how fast it comes: this project's reader beside
mwparserfromhell's `strip_code`, where that package is installed.

    python benchmarks/wikipedia_extraction.py data/sample/wiki/enwiki-sample-pages-articles.xml.bz2
"""

import bz2
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parent.parent))

from data.wikipedia import PAGE_END, PAGE_START, read_page
from data.wikitext import FILE_ALIASES, prose_of
from utils.config import ArgumentParser
from utils.errors import UserError, run_main

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


def main() -> None:
    parser = ArgumentParser(description="Compare extractors on a Wikipedia dump.")
    parser.add_argument("dump", type=Path, help="pages-articles.xml.bz2, small enough to be held in memory")
    args = parser.parse_args()
    started = time.perf_counter()
    texts = read_texts(args.dump)
    raw = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{len(texts)} articles, {raw:.1f} MB of markup, decompressed and parsed in {seconds_since(started):.2f} s")
    extractors: dict[str, Callable[[str], str]] = {"this project": lambda text: "\n".join(prose_of(text))}
    try:
        import mwparserfromhell
    except ImportError:
        print("mwparserfromhell is not installed: pip install mwparserfromhell to compare", file=sys.stderr)
    else:
        extractors["strip_code"] = lambda text: mwparserfromhell.parse(text).strip_code()
    results = {name: measure(extract, texts) for name, extract in extractors.items()}
    print(f"{'':24}" + "".join(f"{name:>16}" for name in results))
    for row in next(iter(results.values())):
        print(f"{row:24}" + "".join(f"{result[row]:16,.3f}" for result in results.values()))


def read_texts(path: Path) -> list[str]:
    """The markup of the articles in the dump."""
    if not path.is_file():
        raise UserError(f"{path} does not exist: check the path")
    xml = bz2.decompress(path.read_bytes())
    texts = []
    for page in re.findall(re.escape(PAGE_START) + b".*?" + re.escape(PAGE_END), xml, re.S):
        if read_page(page, FILE_ALIASES | {"file", "category"}):
            text = ElementTree.fromstring(page).findtext("revision/text")  # noqa: S314 - as in read_page
            texts.append(text)
    return texts


def measure(extract: Callable[[str], str], texts: list[str]) -> dict[str, float]:
    """MB of markup a second of processor time, words, sentences with residue in %, and residues in 1,000 words."""
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


def seconds_since(started: float) -> float:
    return time.perf_counter() - started


if __name__ == "__main__":
    run_main(main)
