"""Speed of create_pretraining_data.py, compared with the published algorithm and with the least it has to do.

    python benchmarks/data_creation.py [--input-dir TEXT_SHARDS] [--rounds 5] [--output results.json]

Two texts are made from the sample books: a short one, the books as they are, where most words are new; and a long one,
shards that repeat the books with new words at the rate of real books. `--input-dir` measures other text shards instead.
The slow implementations read only the beginning of a long text. Each measurement uses one core in its own process, and
all take turns: MB of text and samples per second (median, lowest and highest), peak memory, and the share of each
stage. Then the program runs on the longest text with different numbers of workers, timed from start to exit.
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
NEW_WORDS = 0.035  # share of words in 25 novels (30 MB) that occur for the first time, after the first 5 MB


@dataclass(frozen=True)
class Text:
    """The fast implementations read `shards`, the slow ones `beginning`."""

    shards: list[Path]
    beginning: Path


# The measured functions write to `folder`, and return the bytes of text that they read, the number of samples (0 where
# there are none) and the seconds of each stage.

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


def run_this_project(text: Text, folder: Path, vocab_file: Path, options: SampleOptions) -> Measured:
    tokenizer, start = BertTokenizer(vocab_file), time.perf_counter()
    reports = [
        create_shard(path, folder / output_name(path), tokenizer, options, overwrite=True) for path in text.shards
    ]
    seconds = time.perf_counter() - start
    stages = sum((report.seconds for report in reports), Counter())
    stages["hash, sync"] = seconds - stages.total()
    return size_of(text.shards), sum(report.counts["samples"] for report in reports), dict(stages)


def minimum_tokenize(text: Text, folder: Path, vocab_file: Path, options: SampleOptions) -> Measured:
    fastest = tokenizers.Tokenizer(tokenizers.models.WordPiece.from_file(str(vocab_file), unk_token=UNK))
    fastest.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    fastest.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    lines, clock = text.beginning.read_text(encoding="utf-8").split("\n"), Clock()
    for start in range(0, len(lines), 10_000):
        fastest.encode_batch_fast(lines[start : start + 10_000], add_special_tokens=False)
    clock.lap("tokenize")
    return text.beginning.stat().st_size, 0, clock.laps


def minimum_read(text: Text, folder: Path, vocab_file: Path, options: SampleOptions) -> Measured:
    clock = Clock()
    for path in text.shards:
        path.read_text(encoding="utf-8")
    clock.lap("read")
    return size_of(text.shards), 0, clock.laps


def minimum_write(text: Text, folder: Path, vocab_file: Path, options: SampleOptions) -> Measured:
    """Writes and syncs the bytes of the first shard, which `run_this_project` wrote to `folder`."""
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


REFERENCE, THIS_PROJECT = "reference", "this project"
# The least that has to be done: read the text, tokenize it with the tokenizers package, write the shards.
MINIMUM: dict[str, Callable[..., Measured]] = {
    "only read": minimum_read,
    "only tokenize": minimum_tokenize,
    "only write": minimum_write,
}
MEASUREMENTS: dict[str, Callable[..., Measured]] = {REFERENCE: run_reference, THIS_PROJECT: run_this_project} | MINIMUM


def measured(name: str, text: Text, folder: Path, vocab_file: Path, options: SampleOptions) -> dict:
    cpu_start = time.process_time()
    text_bytes, samples, stages = MEASUREMENTS[name](text, folder, vocab_file, options)
    cpu_seconds = time.process_time() - cpu_start
    # Not getrusage, whose peak includes that of the parent process.
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


# --- the texts --------------------------------------------------------------------------------------------------------


def format_books(folder: Path, path: Path) -> None:
    """Writes the books in `folder` to `path`: one sentence per line, an empty line between documents."""
    from data_preparation.sentences import get_splitter  # imported here: not needed in the measured processes

    splitter = get_splitter("fast")
    with path.open("w", encoding="utf-8") as file:
        for book in sorted(folder.glob("*.txt")):
            paragraphs = [" ".join(text.split()) for text in book.read_text(encoding="utf-8").split("\n\n")]
            for start in range(0, len(paragraphs), PARAGRAPHS_PER_DOCUMENT):
                for paragraph in filter(None, paragraphs[start : start + PARAGRAPHS_PER_DOCUMENT]):
                    file.writelines(sentence + "\n" for sentence in splitter.split(paragraph))
                file.write("\n")


def lengthen(text: Path, shard: Path, seed: int) -> None:
    """Repeats the documents of `text` in `shard`, each time in another order; a share `NEW_WORDS` of the words, chosen
    at random, gets another letter, which makes them new words."""
    documents = text.read_text(encoding="utf-8").strip().split("\n\n")
    rng = random.Random(seed)
    with shard.open("w", encoding="utf-8") as file:
        while file.tell() < LONG_SHARD_BYTES:
            for document in rng.sample(documents, len(documents)):
                words = re.split("([ \n])", document)  # the separators are at odd places
                for place in rng.sample(range(0, len(words), 2), round(NEW_WORDS * len(words) / 2)):
                    letter = rng.randrange(len(words[place]) or 1)
                    words[place] = words[place][:letter] + rng.choice(string.ascii_letters) + words[place][letter + 1 :]
                file.write("".join(words) + "\n\n")


def beginning_of(path: Path, megabytes: float, beginning: Path) -> Path:
    """`path`; if it is longer than `megabytes`, its first whole documents, written to `beginning`."""
    content = path.read_bytes()
    cut = content.find(b"\n\n", int(megabytes * 1e6)) + 2
    if cut < 2:
        return path
    beginning.write_bytes(content[:cut])
    return beginning


def make_texts(args: argparse.Namespace, folder: Path) -> dict[str, Text]:
    """The texts to measure, the longest last."""
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


# --- the results ------------------------------------------------------------------------------------------------------


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


def compare(implementations: dict[str, dict]) -> dict:
    """The results of one text, with the speedup over the reference and the rate of the minimal work."""
    rate = {name: figures["text_megabytes_per_second"] for name, figures in implementations.items()}
    cpu_rate = {name: figures["text_megabytes_per_cpu_second"] for name, figures in implementations.items()}
    return {
        "speedup": rate[THIS_PROJECT] / rate[REFERENCE],
        "speedup_of_cpu_time": cpu_rate[THIS_PROJECT] / cpu_rate[REFERENCE],
        "minimum_megabytes_per_second": 1 / sum(1 / rate[name] for name in MINIMUM),
        "implementations": implementations,
    }


def print_comparison(name: str, comparison: dict) -> None:
    print(f"{name}:")
    for measurement, result in comparison["implementations"].items():
        seconds = result["seconds"]
        shares = ", ".join(f"{stage} {share:.0%}" for stage, share in result["stage_shares"].items())
        print(
            f"  {measurement:16}{result['text_megabytes_per_second']:8.2f} MB/s "
            f"{result['samples_per_second']:9,.0f} samples/s  {result['text_megabytes']:.1f} MB in "
            f"{seconds['median']:.3f} s ({seconds['lowest']:.3f} to {seconds['highest']:.3f})  "
            f"peak {result['peak_megabytes']:.0f} MB  {shares}"
        )
    print(
        f"  {THIS_PROJECT} / {REFERENCE}: {comparison['speedup']:.1f} times as fast, "
        f"{comparison['speedup_of_cpu_time']:.1f} times in processor time; only read, tokenize and write: "
        f"{comparison['minimum_megabytes_per_second']:.2f} MB/s"
    )


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--input-dir", type=Path, help="text shards, one sentence per line; by default made from the sample books")
    add("--vocab-file", type=Path, default=ROOT / "vocab" / "bert-base-uncased-vocab.txt", help="vocabulary")
    add("--max-seq-length", type=positive_int, default=128, help="tokens per sample")
    add("--max-predictions-per-seq", type=positive_int, default=20, help="most masked tokens per sample")
    add("--dupe-factor", type=positive_int, default=5, help="passes over the text")
    add("--rounds", type=positive_int, default=3, help="turns of each measurement")
    add("--reference-megabytes", type=positive_float, default=4.0, help="how much text the slow implementations read")
    add(
        "--workers",
        type=positive_int,
        nargs="+",
        default=[1, len(os.sched_getaffinity(0))],
        help="numbers of them",
    )
    add("--output", type=Path, help="result file; by default in benchmarks/results")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    import torch  # imported here: not needed in the measured processes

    from benchmarks.common.results import write_result

    args = parse_arguments(argv)
    options = SampleOptions(args.max_seq_length, args.max_predictions_per_seq, dupe_factor=args.dupe_factor)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # everything is measured on one core
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
        "versions": {package: version(package) for package in ("numpy", "h5py", "tokenizers")},
        "arguments": args.as_dict(),
        "results": results,
        "program": {"shards": len(longest.shards), "text_megabytes": megabytes, "by_workers": program},
    }
    print(f"written to {write_result(args.output, 'data_creation', torch.device('cpu'), content)}")


if __name__ == "__main__":
    run_main(main)
