"""Trains the sentence parameters of a language. The shipped file was made with

    python -m data_preparation.train_punkt --language english --output data_preparation/punkt/english.json \\
        BOOKS... DUMP.xml.bz2

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

from data_preparation.books import clean_book
from data_preparation.documents import raise_error, read_documents, read_lines
from data_preparation.sentences import NUMBER, save_punkt, train_punkt
from data_preparation.wikipedia import extract
from utils.command_line import ArgumentParser, positive_int
from utils.errors import UserError, run_main

# Abbreviations that are rare in novels of the nineteenth century. A single letter is mostly an initial.
ENGLISH_ABBREVIATIONS = (
    "b c d e f g h j k l m n o p q r s t u v w x y z mr mrs ms dr prof st jr sr messrs hon rev gen col lt capt maj "
    "sgt cpl adm cmdr gov sen rep pres supt jan feb mar apr jun jul aug sept sep oct nov dec inc ltd co corp bros "
    "dept univ assn vs etc e.g i.e cf ca approx viz ibid al ed eds trans vol vols pp fig figs est u.s u.k u.n u.s.a "
    "d.c a.m p.m a.d b.c b.c.e c.e ph.d m.d b.a m.a mt ft ave blvd rd ser"
)
# Abbreviations before a number; elsewhere these words may end a sentence.
ENGLISH_BEFORE_NUMBERS = "no nos op art sec ch p vol fig jan feb mar apr jun jul aug sept oct nov dec c ca"


def main() -> None:
    parser = ArgumentParser(description="Trains the sentence parameters of a language on text.")
    parser.add_argument("files", nargs="+", type=Path, help="books, dumps or documents")
    parser.add_argument("--language", required=True, help="name of the language in English")
    parser.add_argument("--output", required=True, type=Path, help="JSON file to write")
    parser.add_argument(
        "--max-characters", type=positive_int, default=10_000_000, help="number of characters to train on"
    )
    parser.add_argument("--seed", type=int, default=42, help="seed of the choice of paragraphs")
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
    save_punkt(params, args.output, f"{args.language}: trained on {size:.0f} MB from {len(args.files)} files")


def paragraphs(path: Path) -> Iterator[str]:
    if path.name.endswith((".xml", ".xml.bz2")):
        documents = extract(path, workers=1)
    elif path.suffix == ".txt":
        documents = clean_book("".join(line for _, line in read_lines(path, raise_error)))
    else:
        documents = read_documents(path)
    for document in documents:
        yield from document.paragraphs


def add_english(params: PunktParameters) -> None:
    params.abbrev_types.update(ENGLISH_ABBREVIATIONS.split())
    # Two initials, as in T.N. Smith: no corpus has all pairs.
    params.abbrev_types.update(map(".".join, product(ascii_lowercase, repeat=2)))
    params.collocations.update((word, NUMBER) for word in ENGLISH_BEFORE_NUMBERS.split())


if __name__ == "__main__":
    run_main(main)
