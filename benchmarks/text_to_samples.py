#!/usr/bin/env python3
"""Text to samples of 128 tokens without padding: data/prepare.py beside transformers' run_mlm.py.

    python3 benchmarks/text_to_samples.py --input TEXTS.jsonl --rounds 5

Both read documents from the "text" of a .jsonl file, tokenize them with one WordPiece vocabulary
and write full samples without masks, which are drawn in training. Each run is a process of its own
with one worker; reported is its processor time without imports, in turns. This project also cleans
the text, splits it into sentences and keeps documents apart. The peer does what run_mlm.py does
without --line_by_line (datasets' map in batches, the Rust tokenizer, joined and cut), but in one
map instead of two, and without the masks of attention and special tokens and the types, which full
samples do not need. Its tokenizer has one thread: several only add processor time. Needs
transformers and datasets.
"""

import functools
import itertools
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.results import (
    CPU,
    ROOT,
    benchmark_parser,
    format_quartiles,
    paired_ratio,
    quartiles,
    write_result,
)
from bert_recipe.utils.command_line import REQUIRED, Flag, positive_int
from bert_recipe.utils.errors import run_main
from bert_recipe.utils.json_files import write_json
from bert_recipe.utils.progress import print_line, progress_bar

VOCAB_FILE = ROOT / "vocab" / "bert-large-uncased-vocab.txt"
LENGTH = 128
PEER_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false"}
THIS_PROJECT, PEER = "this project", "datasets with transformers' tokenizer"


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def project_run(text: Path, folder: Path) -> tuple[float, int]:
    """CPU seconds, and the number of tokens in the samples."""
    from bert_recipe.data_loading.pretraining_dataset import PretrainingDataset
    from data import prepare

    flags = ["--dynamic-masking", "--no-nsp", "--pack-documents", "--num-workers", "1"]
    flags += ["--vocab-file", VOCAB_FILE, "--lengths", LENGTH, "--output-dir", folder]
    started = cpu_seconds()
    prepare.main(["all", "corpus", str(text), *map(str, flags)])
    seconds = cpu_seconds() - started
    tokens = 0
    for shards in folder.glob("hdf5/*/*"):  # for training, and held out
        dataset = PretrainingDataset(shards, vocab_size=30522)
        rows = dataset.rows(np.arange(len(dataset)))
        tokens += int(np.count_nonzero(rows["input_ids"]))
    return seconds, tokens


def peer_run(text: Path, folder: Path) -> tuple[float, int]:
    """CPU seconds, and the number of tokens in the samples."""
    os.environ |= PEER_ENVIRONMENT
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    folder.mkdir()
    shutil.copy(VOCAB_FILE, folder / "vocab.txt")
    write_json(
        folder / "tokenizer_config.json",
        {"do_lower_case": True, "tokenizer_class": "BertTokenizer"},
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encode = functools.partial(
        tokenizer,
        verbose=False,
        return_attention_mask=False,
        return_token_type_ids=False,
    )

    def samples(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = list(itertools.chain(*encode(batch["text"])["input_ids"]))
        end = len(ids) // LENGTH * LENGTH
        return {"input_ids": [ids[at : at + LENGTH] for at in range(0, end, LENGTH)]}

    started = cpu_seconds()
    data = datasets.load_dataset(
        "json", data_files=str(text), split="train", cache_dir=str(folder / "cache")
    )
    data = data.map(samples, batched=True, remove_columns=["text"])
    return cpu_seconds() - started, len(data) * LENGTH


CONTESTANTS: dict[str, Callable[[Path, Path], tuple[float, int]]] = {
    THIS_PROJECT: project_run,
    PEER: peer_run,
}


def main(argv: list[str] | None = None) -> None:
    args = benchmark_parser(
        __doc__,
        Flag("--input", Path, REQUIRED, '.jsonl file with "text"'),
        Flag("--rounds", positive_int, 3, "runs of each"),
    ).parse_args(argv)
    spawn = multiprocessing.get_context("spawn")
    runs_of: dict[str, list[tuple[float, int]]] = {name: [] for name in CONTESTANTS}
    with tempfile.TemporaryDirectory(prefix="text_to_samples_") as scratch:
        turns = list(itertools.product(range(args.rounds), CONTESTANTS))
        folder = Path(scratch, "run")
        bar = progress_bar(len(turns), "rounds", unit="run")
        for _round, name in turns:
            with ProcessPoolExecutor(1, mp_context=spawn) as executor:
                run = executor.submit(CONTESTANTS[name], args.input, folder)
                runs_of[name].append(run.result())
            shutil.rmtree(folder)
            bar.update()
        bar.close()
        megabytes = args.input.stat().st_size / 1e6
    rates = {name: [megabytes / seconds for seconds, _ in runs] for name, runs in runs_of.items()}
    ratio = paired_ratio(rates[THIS_PROJECT], rates[PEER])
    figures: dict[str, Any] = {
        name: {"megabytes_per_cpu_second": quartiles(values), "tokens": runs_of[name][0][1]}
        for name, values in rates.items()
    }
    for name, figures_of_name in figures.items():
        rate = format_quartiles(figures_of_name["megabytes_per_cpu_second"])
        print_line(f"{name}: {rate} MB per CPU second, {figures_of_name['tokens']:,} tokens")
    print_line(f"ratio: {format_quartiles(ratio)}")
    result = {
        "megabytes": megabytes,
        "rounds": args.rounds,
        "datasets": version("datasets"),
        "settings of the peer": {**PEER_ENVIRONMENT, "map": "one, in batches, one process"},
        "implementations": figures,
        "ratio": ratio,
    }
    write_result(args.output, "text_to_samples", CPU, result)


if __name__ == "__main__":
    run_main(main)
