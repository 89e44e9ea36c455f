"""Makes texts to pre-train on and labelled rows of novels, from chapters apart: of each novel every
second chapter is text, and the rows are paragraphs of the others, with the name of the novel.

    python3 benchmarks/book_rows.py BOOK.txt BOOK.txt --output-dir novels

Writes <output-dir>/texts/*.txt and <output-dir>/rows.csv. The novels are Project Gutenberg's: an
empty line between paragraphs, and lines that begin with CHAPTER.
"""

import csv
import random
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bert_recipe.utils.command_line import REQUIRED, ArgumentParser, Flag
from bert_recipe.utils.errors import run_main

NUM_ROWS = 600  # labelled paragraphs, equally many of each novel
MIN_WORDS, MAX_WORDS = 25, 60
MIN_CHAPTER = 2000  # characters; shorter ones are lines of a table of contents
# The edition must not tell the novel.
PLAIN = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "_": None})

FLAGS = (
    Flag("books", Path, REQUIRED, "novels, .txt", options={"nargs": "+"}),
    Flag("--output-dir", Path, REQUIRED, "folder for texts/ and rows.csv"),
)


def chapters(text: str) -> list[str]:
    parts = re.split(r"(?m)^ *(?=CHAPTER\b|Chapter\b)", text)
    return [part for part in parts if len(part) >= MIN_CHAPTER]


def paragraphs(chapter: str) -> list[str]:
    """As rows: without line breaks, and neither short nor long."""
    rows = [" ".join(part.split()).translate(PLAIN) for part in re.split(r"\n\s*\n", chapter)]
    return [row for row in rows if MIN_WORDS <= len(row.split()) <= MAX_WORDS]


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_flags("flags", FLAGS)
    args = parser.parse_args()
    (args.output_dir / "texts").mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    table = []
    for book in args.books:
        parts = chapters(book.read_text(encoding="utf-8"))
        (args.output_dir / "texts" / book.name).write_text("\n".join(parts[::2]), encoding="utf-8")
        rows = [row for part in parts[1::2] for row in paragraphs(part)]
        wanted = NUM_ROWS // len(args.books)
        if len(rows) < wanted:
            parser.error(
                f"{book} has {len(rows)} paragraphs of {MIN_WORDS} to {MAX_WORDS} words in every "
                f"second chapter, and {wanted} are needed: give longer novels, or more of them"
            )
        table += [(row, book.stem) for row in rng.sample(rows, wanted)]
    rng.shuffle(table)
    with (args.output_dir / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "novel"), *table])


if __name__ == "__main__":
    run_main(main)
