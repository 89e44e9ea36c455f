#!/usr/bin/env python3
"""Speed of the loader on one core: from positions in the sample order to tensors of token streams.

    python3 benchmarks/data_loading.py --input-dir data/hdf5/seq_128_pred_20/training

Measures processor time of one thread, which other programs on the machine hardly change. `copy` only copies the same
rows from the same files, which is the least that a loader has to do. Without --input-dir, shards of random ids are
written first, nine of ten samples with full length.
"""

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common.results import format_quartiles, quartiles, write_result
from benchmarks.common.shards import write_random_shards
from data_loading.loader import StepLoader
from data_loading.masking import Masking
from data_loading.pretraining_dataset import PretrainingDataset
from data_loading.sample_order import sample_order
from run_config import LoaderConfig
from tokenizer import BertTokenizer
from utils.command_line import ArgumentParser, Arguments, BooleanFlag, positive_int
from utils.errors import run_main
from utils.measure import peak_memory_bytes
from utils.progress import print_line

VOCAB_SIZE = 30522
VOCAB_FILE = ROOT / "vocab" / "bert-large-uncased-vocab.txt"
CPU = torch.device("cpu")


def parse_arguments(argv: list[str] | None) -> Arguments:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--input-dir", type=Path, help="folder of shards")
    add("--samples", type=positive_int, default=200_000, help="samples to write without --input-dir")
    add("--seq-length", type=positive_int, default=128, help="their length")
    add("--dynamic-masking", action=BooleanFlag, help="draw the masks; the random shards have none")
    add("--whole-word-mask", action=BooleanFlag, help="with --dynamic-masking, draw whole words")
    add("--batch-size", type=positive_int, default=256, help="sequences per step")
    add("--batches", type=positive_int, default=50, help="steps per round")
    add("--rounds", type=positive_int, default=5, help="rounds")
    add("--output", type=Path, help="result file; by default in benchmarks/results")
    return parser.parse_args(argv)


def measure(args: Arguments, folder: Path) -> dict:
    dataset, masked = PretrainingDataset(folder, VOCAB_SIZE), -(-args.seq_length * 16 // 100)
    if args.dynamic_masking:
        dataset.draw_masks(Masking(BertTokenizer(VOCAB_FILE), 0.15, masked, args.whole_word_mask))
    sizes = args.batch_size, args.batch_size, dataset.sequence_length, dataset.max_labelled_per_sample
    batches = iter(StepLoader(dataset, LoaderConfig(*sizes, num_workers=0), seed=1))
    first_memory = peak_memory_bytes(CPU)
    rates: dict[str, list[float]] = {"loader": [], "copy": []}
    for round_ in range(args.rounds + 1):  # the first round reads the files into memory
        steps = range(round_ * args.batches, (round_ + 1) * args.batches)
        started = time.thread_time()
        for _ in steps:
            next(batches)
        loaded = time.thread_time()
        for step in steps:
            positions = np.arange(step * args.batch_size, (step + 1) * args.batch_size)
            dataset.rows(sample_order(positions, len(dataset), seed=1))
        seconds = {"loader": loaded - started, "copy": time.thread_time() - loaded}
        for name in rates if round_ else ():
            rates[name].append(args.batches * args.batch_size / seconds[name])
    return {
        "arguments": args.as_dict(),
        "samples": len(dataset),
        "sequence_length": dataset.sequence_length,
        "sequences_per_second": {name: quartiles(values) for name, values in rates.items()},
        "memory_growth_mib": (peak_memory_bytes(CPU) - first_memory) / 2**20,
    }


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        masked = 0 if args.dynamic_masking else args.seq_length * 16 // 100
        result = measure(
            args,
            args.input_dir
            or write_random_shards(Path(scratch), args.samples, args.seq_length, masked, shards=4, full_share=0.9),
        )
    for name, rate in result["sequences_per_second"].items():
        print_line(f"{name:7} {format_quartiles(rate, ',.0f')} sequences/s on one core")
    print_line(f"peak memory grew by {result['memory_growth_mib']:.0f} MiB over {result['samples']:,} samples")
    write_result(args.output, f"data_loading-{result['sequence_length']}", CPU, result)


if __name__ == "__main__":
    run_main(main)
