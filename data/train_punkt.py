"""Trains a language's sentence parameters, as `data/punkt/english.json` was:

    python -m data.train_punkt --language english --output data/punkt/english.json BOOKS... DUMP.xml.bz2

Each file is a .txt book, a Wikipedia dump (.xml, .xml.bz2) or documents (.jsonl, .parquet, .gz).
"""

import random
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from string import ascii_lowercase

from nltk.tokenize.punkt import PunktParameters
from tqdm import tqdm

from data.books import clean_book
from data.documents import read_documents, read_lines, refuse
from data.sentences import NUMBER, save_punkt, train_punkt
from data.wikipedia import extract
from utils.command_line import ArgumentParser, positive_int
from utils.errors import UserError, run_main

# What novels of the nineteenth century do not teach. A single letter is an initial far more often than a word.
ENGLISH_ABBREVIATIONS = (
    "b c d e f g h j k l m n o p q r s t u v w x y z mr mrs ms dr prof st jr sr messrs hon rev gen col lt capt maj "
    "sgt cpl adm cmdr gov sen rep pres supt jan feb mar apr jun jul aug sept sep oct nov dec inc ltd co corp bros "
    "dept univ assn vs etc e.g i.e cf ca approx viz ibid al ed eds trans vol vols pp fig figs est u.s u.k u.n u.s.a "
    "d.c a.m p.m a.d b.c b.c.e c.e ph.d m.d b.a m.a mt ft ave blvd rd ser"
)
# Words before a number, where they are abbreviations; elsewhere they may end a sentence.
ENGLISH_BEFORE_NUMBERS = "no nos op art sec ch p vol fig jan feb mar apr jun jul aug sept oct nov dec c ca"


def main() -> None:
    parser = ArgumentParser(description="Train a language's sentence parameters on text.")
    parser.add_argument("files", nargs="+", type=Path, help="books, dumps or documents")
    parser.add_argument("--language", required=True, help="the language's name in English")
    parser.add_argument("--output", required=True, type=Path, help="JSON file to write")
    parser.add_argument("--max-characters", type=positive_int, default=10_000_000, help="characters to learn from")
    parser.add_argument("--seed", type=int, default=42, help="which of the paragraphs they are")
    args = parser.parse_args()
    for path in args.files:
        if not path.is_file():
            raise UserError(f"{path} does not exist: check the path")
    found = [one for path in tqdm(args.files, desc="read", disable=None) for one in paragraphs(path)]
    random.Random(args.seed).shuffle(found)
    print(f"training on {min(args.max_characters, sum(map(len, found))):,} characters", file=sys.stderr)
    params = train_punkt(found, args.max_characters)
    if args.language == "english":
        add_english(params)
    size = min(args.max_characters, sum(map(len, found))) / 1e6
    save_punkt(params, args.output, f"{args.language}: learnt from {size:.0f} MB out of {len(args.files)} files")


def paragraphs(path: Path) -> Iterator[str]:
    if path.name.endswith((".xml", ".xml.bz2")):
        documents = extract(path, workers=1)
    elif path.suffix == ".txt":
        documents = clean_book("".join(line for _, line in read_lines(path, refuse)))
    else:
        documents = read_documents(path)
    for document in documents:
        yield from document.paragraphs


def add_english(params: PunktParameters) -> None:
    params.abbrev_types.update(ENGLISH_ABBREVIATIONS.split())
    # Two initials, as in T.N. Smith: their kinds are too many for a corpus to show each.
    params.abbrev_types.update(map(".".join, product(ascii_lowercase, repeat=2)))
    params.collocations.update((word, NUMBER) for word in ENGLISH_BEFORE_NUMBERS.split())


if __name__ == "__main__":
    run_main(main)
