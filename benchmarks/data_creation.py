"""Data creation: the written-out algorithm and create_pretraining_data.py side by side, their floor, and workers.

    python benchmarks/data_creation.py [--input-dir TEXT_SHARDS] [--rounds 5] [--output results.json]

Two texts are made from the sample books: a short one, the books as they are, where most words are still new; and a long
one, shards of the same books over and over, in which new words keep coming as they do in real books. `--input-dir`
takes text shards of your own instead. The slow sides read only the beginning of a long text; they are as fast at its
end. One core for each measurement, in a process of its own, all by turns; medians, with the lowest and highest, of MB
of text and samples a second, peak memory, and each stage's share. Then the program itself on the longest text with
different numbers of workers, by the clock, from start to exit.
"""

import argparse
import multiprocessing
import os
import random
import re
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import tokenizers

from benchmarks import data_creation_reference as reference
from data_preparation.corpus import find_text
from data_preparation.options import SampleOptions
from data_preparation.sample_shards import create_shard, output_name
from tokenizer import UNK, BertTokenizer
from utils.command_line import ArgumentParser, positive_float, positive_int
from utils.errors import run_main

PARAGRAPHS_PER_DOCUMENT = 40  # of the sample books: about a chapter's worth
LONG_SHARDS, LONG_SHARD_BYTES = 4, 25_000_000
NEW_WORDS = 0.035  # of the words in 25 novels, 30 MB, those that stand there for the first time, after the first 5 MB


@dataclass(frozen=True)
class Text:
    """What is read: all of it by the fast path, `beginning` by what is slow."""

    shards: list[Path]
    beginning: Path


# What is measured: each leaves in `folder` what it writes, and returns the bytes of text that it took, the samples made
# (0 where that has no meaning) and the seconds of its stages.

Measured = tuple[int, int, dict[str, float]]


def run_reference(text: Text, folder: Path, vocab_file: Path, options: SampleOptions) -> Measured:
    tokenizer, clock = reference.PlainTokenizer(vocab_file), Clock()
    documents = reference.read_documents(text.beginning, tokenizer)
    clock.lap("read and tokenize")
    samples = reference.create_samples(documents, options, tokenizer.tokens)
    clock.lap("samples and masks")
    reference.write_samples(samples, folder / "reference.hdf5", options, tokenizer)
    clock.lap("write")
    return text.beginning.stat().st_size, len(samples), clock.laps


def run_ours(text: Text, folder: Path, vocab_file: Path, options: SampleOptions) -> Measured:
    tokenizer, start = BertTokenizer(vocab_file), time.perf_counter()
    reports = [
        create_shard(path, folder / output_name(path), tokenizer, options, overwrite=True) for path in text.shards
    ]
    seconds = time.perf_counter() - start
    stages = sum((report.seconds for report in reports), Counter())
    stages["hash, sync"] = seconds - stages.total()
    return size_of(text.shards), sum(report.counts["samples"] for report in reports), dict(stages)


def floor_tokenizers_package(text: Text, folder: Path, vocab_file: Path, options: SampleOptions) -> Measured:
    fastest = tokenizers.Tokenizer(tokenizers.models.WordPiece.from_file(str(vocab_file), unk_token=UNK))
    fastest.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    fastest.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    lines, clock = text.beginning.read_text(encoding="utf-8").split("\n"), Clock()
    for start in range(0, len(lines), 10_000):
        fastest.encode_batch_fast(lines[start : start + 10_000], add_special_tokens=False)
    clock.lap("tokenize")
    return text.beginning.stat().st_size, 0, clock.laps


def floor_read(text: Text, folder: Path, vocab_file: Path, options: SampleOptions) -> Measured:
    clock = Clock()
    for path in text.shards:
        path.read_text(encoding="utf-8")
    clock.lap("read")
    return size_of(text.shards), 0, clock.laps


def floor_write(text: Text, folder: Path, vocab_file: Path, options: SampleOptions) -> Measured:
    """Writes and syncs the bytes of our first shard, which `run_ours` left in `folder`."""
    content, clock = (folder / output_name(text.shards[0])).read_bytes(), Clock()
    with (folder / "copy").open("wb") as file:
        file.write(content)
        os.fsync(file.fileno())
    clock.lap("write")
    return text.shards[0].stat().st_size, 0, clock.laps


class Clock:
    def __init__(self):
        self.laps: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self.last = now - self.last, now


FLOORS: dict[str, Callable[..., Measured]] = {
    "floor: read": floor_read,
    "floor: tokenizers package": floor_tokenizers_package,
    "floor: write": floor_write,
}
MEASUREMENTS: dict[str, Callable[..., Measured]] = {"reference": run_reference, "ours": run_ours} | FLOORS


def measured(name: str, text: Text, folder: Path, vocab_file: Path, options: SampleOptions) -> dict:
    cpu_start = time.process_time()
    text_bytes, samples, stages = MEASUREMENTS[name](text, folder, vocab_file, options)
    cpu_seconds = time.process_time() - cpu_start
    # Not getrusage: its peak is inherited from the process that started this one.
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
    return {
        "text_bytes": text_bytes,
        "samples": samples,
        "stages": stages,
        "cpu_seconds": cpu_seconds,
        "peak_bytes": peak,
    }


def run_program(text: Text, folder: Path, vocab_file: Path, options: SampleOptions, workers: int) -> float:
    """Seconds from start to exit of create_pretraining_data.py on the shards of `text`, all in one folder."""
    words = [sys.executable, ROOT / "create_pretraining_data.py", "--overwrite", "--num-workers", workers]
    words += ["--input-dir", text.shards[0].parent, "--output-dir", folder, "--vocab-file", vocab_file]
    words += ["--max-seq-length", options.sequence_length, "--dupe-factor", options.dupe_factor]
    words += ["--max-predictions-per-seq", options.predictions_per_sequence]
    start = time.perf_counter()
    subprocess.run(list(map(str, words)), check=True, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


# The texts.


def format_books(folder: Path, path: Path) -> None:
    """The books in `folder` as formatted text in `path`: a sentence a line, an empty line between documents."""
    from data_preparation.sentences import get_splitter  # here: the measured processes shall not carry nltk

    splitter = get_splitter("fast")
    with path.open("w", encoding="utf-8") as file:
        for book in sorted(folder.glob("*.txt")):
            paragraphs = [" ".join(text.split()) for text in book.read_text(encoding="utf-8").split("\n\n")]
            for start in range(0, len(paragraphs), PARAGRAPHS_PER_DOCUMENT):
                for paragraph in filter(None, paragraphs[start : start + PARAGRAPHS_PER_DOCUMENT]):
                    file.writelines(sentence + "\n" for sentence in splitter.split(paragraph))
                file.write("\n")


def lengthen(text: Path, shard: Path, seed: int) -> None:
    """Writes to `shard` the documents of `text` again and again, each time in another order and with `NEW_WORDS` of the
    words, chosen at random, made new ones by another letter."""
    documents = text.read_text(encoding="utf-8").strip().split("\n\n")
    rng = random.Random(seed)
    with shard.open("w", encoding="utf-8") as file:
        while file.tell() < LONG_SHARD_BYTES:
            for document in rng.sample(documents, len(documents)):
                words = re.split("([ \n])", document)  # with what stands between them, at the odd places
                for place in rng.sample(range(0, len(words), 2), round(NEW_WORDS * len(words) / 2)):
                    letter = rng.randrange(len(words[place]) or 1)
                    words[place] = words[place][:letter] + rng.choice(string.ascii_letters) + words[place][letter + 1 :]
                file.write("".join(words) + "\n\n")


def beginning_of(path: Path, megabytes: float, beginning: Path) -> Path:
    """`path`, or where it is longer, its whole documents up to `megabytes` and a little more, in `beginning`."""
    content = path.read_bytes()
    cut = content.find(b"\n\n", int(megabytes * 1e6)) + 2
    if cut < 2:
        return path
    beginning.write_bytes(content[:cut])
    return beginning


def make_texts(args: argparse.Namespace, folder: Path) -> dict[str, Text]:
    """The texts to measure, the longest one last."""
    if args.input_dir:
        shards = {"text": find_text(args.input_dir)}
    else:
        for name in ("short", "long"):
            (folder / name).mkdir()
        shards = {"short": [folder / "short/books.txt"], "long": []}
        format_books(ROOT / "data/sample/books", shards["short"][0])
        for number in range(LONG_SHARDS):
            shards["long"].append(folder / f"long/part_{number}.txt")
            lengthen(shards["short"][0], shards["long"][-1], seed=number)
    return {
        name: Text(paths, beginning_of(paths[0], args.reference_megabytes, folder / f"{name}_beginning.txt"))
        for name, paths in shards.items()
    }


def size_of(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


# The results.


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def summarize(runs: list[dict]) -> dict:
    seconds = [sum(run["stages"].values()) for run in runs]
    megabytes, median = runs[0]["text_bytes"] / 1e6, statistics.median(seconds)
    return {
        "text_megabytes": megabytes,
        "seconds": spread(seconds),
        "text_megabytes_per_second": megabytes / median,
        "samples_per_second": runs[0]["samples"] / median,
        "text_megabytes_per_cpu_second": megabytes / statistics.median(run["cpu_seconds"] for run in runs),
        "peak_megabytes": max(run["peak_bytes"] for run in runs) / 1e6,
        "stage_shares": {
            stage: statistics.median(run["stages"][stage] for run in runs) / median for stage in runs[0]["stages"]
        },
    }


def compare(sides: dict[str, dict]) -> dict:
    """The results of one text, with what they say about each other."""
    rate = {name: side["text_megabytes_per_second"] for name, side in sides.items()}
    cpu_rate = {name: side["text_megabytes_per_cpu_second"] for name, side in sides.items()}
    return {
        "ratio": rate["ours"] / rate["reference"],
        "ratio_of_cpu_time": cpu_rate["ours"] / cpu_rate["reference"],
        "floor_megabytes_per_second": 1 / sum(1 / rate[name] for name in FLOORS),
        "sides": sides,
    }


def print_comparison(name: str, comparison: dict) -> None:
    print(f"{name}:")
    for side, result in comparison["sides"].items():
        seconds = result["seconds"]
        shares = ", ".join(f"{stage} {share:.0%}" for stage, share in result["stage_shares"].items())
        print(
            f"  {side:26}{result['text_megabytes_per_second']:8.2f} MB/s {result['samples_per_second']:9,.0f} samples/s"
            f"  {result['text_megabytes']:.1f} MB in {seconds['median']:.3f} s ({seconds['lowest']:.3f} to "
            f"{seconds['highest']:.3f})  peak {result['peak_megabytes']:.0f} MB  {shares}"
        )
    print(
        f"  ours against the reference: {comparison['ratio']:.1f} times by the clock, "
        f"{comparison['ratio_of_cpu_time']:.1f} by processor time; the floors in a row: "
        f"{comparison['floor_megabytes_per_second']:.2f} MB/s"
    )


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(description="Times data creation against the written-out algorithm and against the floor.")
    add = parser.add_argument
    add("--input-dir", type=Path, help="text shards, a sentence a line (default: made from the books in data/sample)")
    add("--vocab-file", type=Path, default=ROOT / "vocab" / "bert-base-uncased-vocab.txt", help="vocabulary")
    add("--max-seq-length", type=positive_int, default=128, help="tokens a sample")
    add("--max-predictions-per-seq", type=positive_int, default=20, help="most masked tokens a sample")
    add("--dupe-factor", type=positive_int, default=5, help="passes over the text")
    add("--rounds", type=positive_int, default=3, help="times that each is measured")
    add("--reference-megabytes", type=positive_float, default=4.0, help="how much of a text the slow sides read")
    add("--workers", type=positive_int, nargs="+", default=[1, len(os.sched_getaffinity(0))], help="numbers to compare")
    add("--output", type=Path, help="result file (default: in benchmarks/results)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    import torch  # here: the measured processes shall not carry it

    from benchmarks.peers import surroundings, write_result

    args = parse_arguments(argv)
    options = SampleOptions(args.max_seq_length, args.max_predictions_per_seq, dupe_factor=args.dupe_factor)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a core is what is compared
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        texts = make_texts(args, folder)
        runs: dict[str, dict[str, list[dict]]] = {text: {name: [] for name in MEASUREMENTS} for text in texts}
        seconds: dict[int, list[float]] = {workers: [] for workers in args.workers}
        for _ in range(args.rounds):
            for text in texts:
                for name in MEASUREMENTS:
                    measure = partial(measured, name, texts[text], folder, args.vocab_file, options)
                    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                        runs[text][name].append(pool.submit(measure).result())
            longest = texts[text]
            for workers in args.workers:
                seconds[workers].append(run_program(longest, folder, args.vocab_file, options, workers))
        megabytes = size_of(longest.shards) / 1e6
    results = {text: compare({name: summarize(its) for name, its in runs[text].items()}) for text in texts}
    program = {
        workers: {"seconds": spread(its), "text_megabytes_per_second": megabytes / statistics.median(its)}
        for workers, its in seconds.items()
    }
    for text, comparison in results.items():
        print_comparison(text, comparison)
    print(f"the program, from start to exit, {len(longest.shards)} shards, {megabytes:.1f} MB:")
    for workers, result in program.items():
        print(
            f"  {workers} workers: {result['text_megabytes_per_second']:.2f} MB/s, {result['seconds']['median']:.2f} s "
            f"({result['seconds']['lowest']:.2f} to {result['seconds']['highest']:.2f})"
        )
    content = {
        "surroundings": surroundings(torch.device("cpu")),
        "versions": {package: version(package) for package in ("numpy", "h5py", "tokenizers")},
        "arguments": args.as_dict(),
        "results": results,
        "program": {"shards": len(longest.shards), "text_megabytes": megabytes, "by_workers": program},
    }
    print(f"written to {write_result(args.output, 'data_creation', content)}")


if __name__ == "__main__":
    run_main(main)
