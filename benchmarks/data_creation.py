"""Data creation: the written-out algorithm and create_pretraining_data.py side by side, and the floor below both.

    python benchmarks/data_creation.py [--text FORMATTED.txt] [--rounds 5] [--output results.json]

Each measurement runs in a process of its own on one core, the two sides and the floors by turns; medians, with the
lowest and highest, of text and samples a second, peak memory, and each stage's share.

`create_samples` is the algorithm in its readable form (Google's BERT, NVIDIA's recipe): tokens are strings, one sample
is made after another, and every random decision is a method of `Draws`. The tests hold the fast path to it.
"""

import argparse
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import h5py  # noqa: E402
import numpy as np  # noqa: E402
import tokenizers  # noqa: E402

from create_pretraining_data import SampleOptions, create_shard  # noqa: E402
from tokenizer import CLS, MASK, SEP, UNK, BertTokenizer  # noqa: E402
from utils.config import ArgumentParser, positive_int  # noqa: E402
from utils.errors import UserError, run_main  # noqa: E402

Document = list[list[str]]  # sentences of tokens
PARAGRAPHS_PER_DOCUMENT = 40  # of the sample books: about a chapter's worth


# The reference.


class Draws:
    """The random decisions of data creation."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)

    def target_length(self, longest: int, short_seq_prob: float) -> int:
        return self.rng.randint(2, longest) if self.rng.random() < short_seq_prob else longest

    def sentences_of_a(self, sentences: int) -> int:
        return self.rng.randint(1, sentences - 1)

    def next_is_random(self) -> bool:
        return self.rng.random() < 0.5

    def other_document(self, documents: int, own: int) -> int:
        other = self.rng.randrange(documents - 1)
        return other + (other >= own)

    def first_sentence(self, sentences: int) -> int:
        return self.rng.randrange(sentences)

    def cut_front(self) -> bool:
        return self.rng.random() < 0.5


class Pair(NamedTuple):
    tokens_a: list[str]
    tokens_b: list[str]
    is_random_next: bool


def create_pairs(documents: list[Document], index: int, options: SampleOptions, draws: Draws) -> Iterator[Pair]:
    """The pairs of segments of one pass over document `index`, not yet truncated."""
    document = documents[index]
    target = draws.target_length(options.sequence_length - options.special_tokens, options.short_seq_prob)
    chunk: Document = []
    position = 0
    while position < len(document):
        chunk.append(document[position])
        position += 1
        if position < len(document) and sum(map(len, chunk)) < target:
            continue
        if not options.next_sentence_prediction:
            yield Pair(joined(chunk), [], False)
        elif len(documents) == 1 and len(chunk) == 1:
            pass  # neither a next sentence nor another document to draw one from
        else:
            a_end = draws.sentences_of_a(len(chunk)) if len(chunk) > 1 else 1
            tokens_a = joined(chunk[:a_end])
            if len(documents) > 1 and (len(chunk) == 1 or draws.next_is_random()):
                other = documents[draws.other_document(len(documents), index)]
                tokens_b: list[str] = []
                for sentence in other[draws.first_sentence(len(other)) :]:
                    tokens_b += sentence
                    if len(tokens_b) >= target - len(tokens_a):
                        break
                position -= len(chunk) - a_end  # the sentences that were not used are put back
                yield Pair(tokens_a, tokens_b, True)
            else:
                yield Pair(tokens_a, joined(chunk[a_end:]), False)
        chunk = []


def joined(sentences: Document) -> list[str]:
    return [token for sentence in sentences for token in sentence]


def truncate_pair(tokens_a: list[str], tokens_b: list[str], longest: int, draws: Draws) -> None:
    """Takes tokens off the longer of the two, at a tie off B, from its front or back, until both fit."""
    while len(tokens_a) + len(tokens_b) > longest:
        longer = tokens_a if len(tokens_a) > len(tokens_b) else tokens_b
        longer.pop(0 if draws.cut_front() else -1)


def mask_tokens(
    tokens: list[str], options: SampleOptions, vocab: list[str], rng: random.Random
) -> tuple[list[int], list[str]]:
    """Masks `tokens` in place; returns the positions, ascending, and the tokens that stood there."""
    candidates: list[list[int]] = []
    starts_segment = True
    for position, token in enumerate(tokens):
        if token in (CLS, SEP):
            starts_segment = True
            continue
        if options.whole_word_mask and token.startswith("##") and not starts_segment:
            candidates[-1].append(position)
        else:
            candidates.append([position])
        starts_segment = False
    wanted = min(options.predictions_per_sequence, max(1, round(len(tokens) * options.masked_lm_prob)))
    rng.shuffle(candidates)
    positions: list[int] = []
    for word in candidates:
        if len(positions) + len(word) <= wanted:
            positions += word
    positions.sort()
    labels = [tokens[position] for position in positions]
    for position in positions:
        if rng.random() < 0.8:
            tokens[position] = MASK
        elif rng.random() < 0.5:
            tokens[position] = rng.choice(vocab)
    return positions, labels


class Sample(NamedTuple):
    tokens: list[str]
    segment_ids: list[int]
    positions: list[int]
    labels: list[str]
    is_random_next: bool


def create_samples(documents: list[Document], options: SampleOptions, vocab: list[str]) -> list[Sample]:
    draws = Draws(options.random_seed)
    samples = []
    for _ in range(options.dupe_factor):
        for index in range(len(documents)):
            for tokens_a, tokens_b, is_random_next in create_pairs(documents, index, options, draws):
                truncate_pair(tokens_a, tokens_b, options.sequence_length - options.special_tokens, draws)
                tokens = [CLS, *tokens_a, SEP]
                segment_ids = [0] * len(tokens)
                if options.next_sentence_prediction:
                    tokens += [*tokens_b, SEP]
                    segment_ids += [1] * (len(tokens_b) + 1)
                positions, labels = mask_tokens(tokens, options, vocab, draws.rng)
                samples.append(Sample(tokens, segment_ids, positions, labels, is_random_next))
    draws.rng.shuffle(samples)
    return samples


def read_documents(path: Path, tokenizer: BertTokenizer) -> list[Document]:
    documents: list[Document] = [[]]
    with path.open(encoding="utf-8") as file:
        for line in file:
            if not line.strip():
                documents.append([])
            elif tokens := tokenizer.tokenize(line):
                documents[-1].append(tokens)
    return [document for document in documents if document]


def write_samples(samples: list[Sample], path: Path, options: SampleOptions, tokenizer: BertTokenizer) -> None:
    def padded(values: list[list[int]], width: int) -> np.ndarray:
        return np.array([row + [0] * (width - len(row)) for row in values], dtype=np.int32)

    length, predictions = options.sequence_length, options.predictions_per_sequence
    with h5py.File(path, "w") as file:
        file["input_ids"] = padded([tokenizer.convert_tokens_to_ids(s.tokens) for s in samples], length)
        file["input_mask"] = padded([[1] * len(s.tokens) for s in samples], length).astype(np.int8)
        file["segment_ids"] = padded([s.segment_ids for s in samples], length).astype(np.int8)
        file["masked_lm_positions"] = padded([s.positions for s in samples], predictions)
        file["masked_lm_ids"] = padded([tokenizer.convert_tokens_to_ids(s.labels) for s in samples], predictions)
        file["next_sentence_labels"] = np.array([s.is_random_next for s in samples], np.int8)


# What is measured: each returns samples made (0 where that has no meaning) and seconds by stage.


def run_reference(text: Path, folder: Path, vocab_file: Path, options: SampleOptions) -> tuple[int, dict[str, float]]:
    tokenizer, clock = BertTokenizer(vocab_file), Clock()
    documents = read_documents(text, tokenizer)
    clock.lap("read and tokenize")
    samples = create_samples(documents, options, tokenizer.tokens)
    clock.lap("samples and masks")
    write_samples(samples, folder / "reference.hdf5", options, tokenizer)
    clock.lap("write")
    return len(samples), clock.laps


def run_ours(text: Path, folder: Path, vocab_file: Path, options: SampleOptions) -> tuple[int, dict[str, float]]:
    tokenizer, start = BertTokenizer(vocab_file), time.perf_counter()
    report = create_shard(text, folder / "ours.hdf5", tokenizer, options, overwrite=True)
    rest = time.perf_counter() - start - sum(report.seconds.values())
    return report.counts["samples"], {**report.seconds, "hash, sync": rest}


def floor_tokenizers_package(text: Path, folder: Path, vocab_file: Path, options: SampleOptions):
    fastest = tokenizers.Tokenizer(tokenizers.models.WordPiece.from_file(str(vocab_file), unk_token=UNK))
    fastest.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    fastest.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    lines, clock = text.read_text(encoding="utf-8").split("\n"), Clock()
    for start in range(0, len(lines), 10_000):
        fastest.encode_batch_fast(lines[start : start + 10_000], add_special_tokens=False)
    clock.lap("tokenize")
    return 0, clock.laps


def floor_read(text: Path, folder: Path, vocab_file: Path, options: SampleOptions):
    clock = Clock()
    text.read_text(encoding="utf-8")
    clock.lap("read")
    return 0, clock.laps


def floor_write(text: Path, folder: Path, vocab_file: Path, options: SampleOptions):
    """Writes and syncs the bytes of our shard, which `run_ours` left in `folder`."""
    content, clock = (folder / "ours.hdf5").read_bytes(), Clock()
    with (folder / "copy").open("wb") as file:
        file.write(content)
        os.fsync(file.fileno())
    clock.lap("write")
    return 0, clock.laps


class Clock:
    def __init__(self):
        self.laps: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self.last = now - self.last, now


MEASUREMENTS: dict[str, Callable] = {
    "reference": run_reference,
    "ours": run_ours,
    "floor: tokenizers package": floor_tokenizers_package,
    "floor: read": floor_read,
    "floor: write": floor_write,
}


def measured(name: str, text: Path, folder: Path, vocab_file: Path, options: SampleOptions) -> dict:
    samples, stages = MEASUREMENTS[name](text, folder, vocab_file, options)
    # Not getrusage: its peak is inherited from the process that started this one.
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
    return {"samples": samples, "stages": stages, "peak_bytes": peak}


def format_books(folder: Path, path: Path) -> None:
    """The books in `folder` as formatted text in `path`: a sentence a line, an empty line between documents."""
    from data.sentences import get_splitter  # here: the measured processes shall not carry nltk

    splitter = get_splitter("fast")
    with path.open("w", encoding="utf-8") as file:
        for book in sorted(folder.glob("*.txt")):
            paragraphs = [" ".join(text.split()) for text in book.read_text(encoding="utf-8").split("\n\n")]
            for start in range(0, len(paragraphs), PARAGRAPHS_PER_DOCUMENT):
                for paragraph in filter(None, paragraphs[start : start + PARAGRAPHS_PER_DOCUMENT]):
                    file.writelines(sentence + "\n" for sentence in splitter.split(paragraph))
                file.write("\n")


def summarize(name: str, runs: list[dict], megabytes: float) -> dict:
    seconds = [sum(run["stages"].values()) for run in runs]
    median = statistics.median(seconds)
    return {
        "seconds": {"median": median, "lowest": min(seconds), "highest": max(seconds)},
        "text_megabytes_per_second": megabytes / median,
        "samples_per_second": runs[0]["samples"] / median,
        "peak_megabytes": max(run["peak_bytes"] for run in runs) / 1e6,
        "stage_shares": {
            stage: statistics.median(run["stages"][stage] for run in runs) / median for stage in runs[0]["stages"]
        },
    }


def environment() -> dict:
    def first(path: str, key: str) -> str:
        lines = Path(path).read_text().splitlines() if Path(path).exists() else []
        return next((line.split(":")[1].strip() for line in lines if line.startswith(key)), "unknown")

    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": first("/proc/cpuinfo", "model name"),
        "cpus": os.cpu_count(),
        "commit": commit.stdout.strip() or "unknown",
        "versions": {
            "python": sys.version.split()[0],
            "numpy": np.__version__,
            "h5py": h5py.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(description="Times data creation against the written-out algorithm and against the floor.")
    add = parser.add_argument
    add("--text", type=Path, help="formatted text, a sentence a line (default: the books in data/sample)")
    add("--vocab-file", type=Path, default=ROOT / "vocab" / "bert-base-uncased-vocab.txt", help="vocabulary")
    add("--max-seq-length", type=positive_int, default=128, help="tokens a sample")
    add("--max-predictions-per-seq", type=positive_int, default=20, help="most masked tokens a sample")
    add("--dupe-factor", type=positive_int, default=5, help="passes over the text")
    add("--rounds", type=positive_int, default=3, help="times that each is measured")
    add("--output", type=Path, default=ROOT / "benchmarks/results/data_creation.json", help="JSON file to write")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    options = SampleOptions(args.max_seq_length, args.max_predictions_per_seq, dupe_factor=args.dupe_factor)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a core is what is compared
    runs: dict[str, list[dict]] = {name: [] for name in MEASUREMENTS}
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        text = args.text or folder / "sample.txt"
        if not args.text:
            format_books(ROOT / "data/sample/books", text)
        if not text.is_file():
            raise UserError(f"text {text} does not exist: check --text")
        for _ in range(args.rounds):
            for name in MEASUREMENTS:
                measure = partial(measured, name, text, folder, args.vocab_file, options)
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                    runs[name].append(pool.submit(measure).result())
        megabytes = text.stat().st_size / 1e6
    results = {name: summarize(name, its_runs, megabytes) for name, its_runs in runs.items()}
    ratio = results["reference"]["seconds"]["median"] / results["ours"]["seconds"]["median"]
    for name, result in results.items():
        seconds = result["seconds"]
        shares = ", ".join(f"{stage} {share:.0%}" for stage, share in result["stage_shares"].items())
        print(
            f"{name:26}{result['text_megabytes_per_second']:9.2f} MB/s {result['samples_per_second']:9,.0f} samples/s"
            f"  {seconds['median']:.3f} s ({seconds['lowest']:.3f} to {seconds['highest']:.3f})"
            f"  peak {result['peak_megabytes']:.0f} MB  {shares}"
        )
    print(f"ours against the reference: {ratio:.1f} times, {megabytes:.1f} MB of text, one core")
    content = environment() | {
        "text": args.text.name if args.text else "data/sample/books",
        "text_megabytes": megabytes,
        "options": {name: getattr(args, name) for name in ("max_seq_length", "max_predictions_per_seq", "dupe_factor")},
        "rounds": args.rounds,
        "ratio": ratio,
        "results": results,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    run_main(main)
