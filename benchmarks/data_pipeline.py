"""How fast is data preparation, stage by stage, from a Wikipedia dump and from text to verified
shards and batches?

    python3 benchmarks/data_pipeline.py --megabytes 100
    python3 benchmarks/data_pipeline.py --shards data/hdf5/seq_128_pred_20/training  # loader

Each stage runs in a process of its own, with one worker and with several. Reported are MB of its
input per second of processor time, the share of the time that one process must spend (the
driver's), and the peak memory of a process.

Of the loader: sequences per second of processor time of one thread, from positions in the sample
order to tensors of token streams, with the shards' masks, or with drawn masks of tokens and of
whole words. `copy` only copies the same rows from the same files, which is the least that a loader
has to do.
"""

import bz2
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.results import (
    CPU,
    ROOT,
    benchmark_parser,
    format_quartiles,
    quartiles,
    write_result,
)
from data_loading.loader import StepLoader
from data_loading.masking import Masking
from data_loading.pretraining_dataset import PretrainingDataset
from data_loading.sample_order import sample_order
from run_config import LoaderConfig
from tokenizer import BertTokenizer
from utils.command_line import optional_path, positive_float, positive_int
from utils.errors import run_main
from utils.progress import print_line

SAMPLE = ROOT / "data" / "sample"
VOCAB_FILE = ROOT / "vocab" / "bert-large-uncased-vocab.txt"
BATCH_SIZE, BATCHES, ROUNDS = 256, 50, 5  # of the loader
PROGRAM = """
import json, resource, sys, time
from data import prepare
from work_units import units
units.SMALL_WORK = 0
start = time.perf_counter()
prepare.main(sys.argv[1:])
own, workers = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
print(json.dumps({
    "seconds": time.perf_counter() - start,
    "driver_cpu_seconds": own.ru_utime + own.ru_stime,
    "worker_cpu_seconds": workers.ru_utime + workers.ru_stime,
    "peak_megabytes": max(own.ru_maxrss, workers.ru_maxrss) / 1024,
}))
"""


def write_dump(path: Path, size: int) -> None:
    """A multistream dump with the pages of the sample under new titles, about `size` bytes of
    XML.
    """
    xml = bz2.decompress(next((SAMPLE / "wiki").glob("*.bz2")).read_bytes())
    head, _, rest = xml.partition(b"  <page>")
    pages = re.findall(rb"  <page>.*?</page>\n", b"  <page>" + rest, re.S)
    with path.open("wb") as file:
        file.write(bz2.compress(head))
        for copy in range(max(1, size // len(xml))):
            stream = b"".join(page.replace(b"<title>", b"<title>%d " % copy, 1) for page in pages)
            file.write(bz2.compress(stream))
        file.write(bz2.compress(b"</mediawiki>\n"))


def write_text(path: Path, size: int) -> None:
    """A .jsonl file of the paragraphs of the sample books, ten to a document; later copies have
    other numbers.
    """
    books = [
        file.read_text(encoding="utf-8").split("\n\n")
        for file in sorted((SAMPLE / "books").glob("*.txt"))
    ]
    documents = [
        "\n\n".join(book[at : at + 10]) for book in books for at in range(0, len(book), 10)
    ]
    with path.open("w", encoding="utf-8") as file:
        copy = 0
        while file.tell() < size:
            for document in documents:
                file.write(json.dumps({"text": f"Part {copy}. {document}"}) + "\n")
            copy += 1


def run(*arguments: object) -> dict[str, float]:
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(folder: Path, megabytes: float, workers: int) -> dict[str, dict[str, float]]:
    """The figures of each stage; `megabytes` of each are those of the text that it reads or
    makes.
    """
    write_dump(folder / "dump.xml.bz2", int(megabytes * 1e6))
    write_text(folder / "text.jsonl", int(megabytes * 1e6))
    data = folder / "data"
    common = ("--output-dir", folder / "data", "--num-workers", workers)
    text = data / "formatted" / "corpus"
    found = {
        "format wikicorpus": run("format", "wikicorpus", folder / "dump.xml.bz2", *common),
        "format corpus": run("format", "corpus", folder / "text.jsonl", *common),
        "shard": run("shard", text, "--shard-mb", max(0.5, megabytes / 8), *common),
        "hdf5 128": run("hdf5", "--lengths", "128:20", *common),
        "verify": run("verify", data / "hdf5", "--num-workers", workers),
        "hdf5 128, no masks": run("hdf5", "--lengths", "128", "--dynamic-masking", *common),
    }
    for stage, figures in found.items():
        source = data / "formatted" / "wikicorpus" if "wiki" in stage else text
        figures["megabytes"] = sum(path.stat().st_size for path in source.rglob("part*")) / 1e6
        cpu = figures["driver_cpu_seconds"] + figures["worker_cpu_seconds"]
        figures["megabytes_per_cpu_second"] = figures["megabytes"] / cpu
    print_line(f"{megabytes:g} MB, {workers} workers")
    for stage, figures in found.items():
        print_line(
            f"  {stage:<20}{figures['megabytes_per_cpu_second']:8.2f} MB/CPU "
            f"s{figures['seconds']:8.1f} s{figures['driver_cpu_seconds']:8.1f} s "
            f"driver{figures['peak_megabytes']:8.1f} MB peak"
        )
    return found


def loader_rates(folder: Path) -> dict[str, dict[str, float]]:
    """Of each kind of masks, and of the copy: sequences per second."""
    dataset = PretrainingDataset(folder, vocab_size=30522)
    kinds = {"masks of the shards": None}
    if not dataset.max_labelled_per_sample:
        tokenizer = BertTokenizer(VOCAB_FILE)
        most = -(-dataset.sequence_length * 16 // 100)
        kinds = {
            f"drawn, {what}": Masking(tokenizer, 0.15, most, what == "words")
            for what in ("tokens", "words")
        }
    found = {}
    for kind, masking in kinds.items():
        if masking is not None:
            dataset.draw_masks(masking)
        sizes = BATCH_SIZE, BATCH_SIZE, dataset.sequence_length, dataset.max_labelled_per_sample
        batches = iter(StepLoader(dataset, LoaderConfig(*sizes, num_workers=0), seed=1))
        found[kind] = rate(lambda _positions, batches=batches: next(batches))
    found["copy"] = rate(
        lambda positions: dataset.rows(sample_order(positions, len(dataset), seed=1))
    )
    for kind, figures in found.items():
        print_line(f"loader, {kind:20} {format_quartiles(figures, ',.0f')} sequences/s on one core")
    return found


def rate(make_batch: Callable[[np.ndarray], object]) -> dict[str, float]:
    rates = []
    for first in range(0, (ROUNDS + 1) * BATCHES, BATCHES):
        started = time.thread_time()
        for step in range(first, first + BATCHES):
            make_batch(np.arange(step * BATCH_SIZE, (step + 1) * BATCH_SIZE))
        rates.append(BATCHES * BATCH_SIZE / (time.thread_time() - started))
    return quartiles(rates[1:])  # the first round reads the files into memory


def main(argv: list[str] | None = None) -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--megabytes", type=positive_float, nargs="+", default=[10.0], help="sizes of the input"
    )
    parser.add_argument(
        "--workers", type=positive_int, nargs="+", default=[1, 2], help="numbers of workers"
    )
    parser.add_argument(
        "--shards", type=optional_path, help="measure only the loader, on the shards of this folder"
    )
    args = parser.parse_args(argv)
    stages = {}
    loader = {}
    torch.set_num_threads(1)
    if args.shards is not None:
        loader[args.shards.name] = loader_rates(args.shards)
    for megabytes, workers in (
        itertools.product(args.megabytes, args.workers) if args.shards is None else ()
    ):
        title = f"{megabytes:g} MB, {workers} workers"
        with tempfile.TemporaryDirectory() as folder:
            stages[title] = measure(Path(folder), megabytes, workers)
            for shards in sorted(Path(folder, "data", "hdf5").glob("*/training")):
                loader[f"{title}, {shards.parent.name}"] = loader_rates(shards)
    write_result(args.output, "data_pipeline", CPU, {"stages": stages, "loader": loader})


if __name__ == "__main__":
    run_main(main)
