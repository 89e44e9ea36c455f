#!/usr/bin/env python3
"""Seconds per batch of queries of the search in kept vectors, beside faiss and
sentence-transformers.

    python3 benchmarks/search_speed.py --vectors 1000000 --dims 384 --work FOLDER

Random vectors of length 1 are written to FOLDER as --search keeps them: memory-mapped files. The
peers hold the same vectors in their own memory: faiss.IndexFlatIP, which is exact, and
sentence_transformers.util.semantic_search; one that is not installed is left out. All take turns,
in float32, and must find the same texts. CPU seconds are those of all threads; beside other
programs only they mean something. `opening`: the first batch of this project, as a new process has
it, with the files in the page cache.
"""

import shutil
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.results import (
    CPU,
    benchmark_parser,
    format_quartiles,
    quartiles,
    write_result,
)
from benchmarks.common.transformers_training import silence_imports
from benchmarks.common.worker import THIS_PROJECT, take_turns
from search.vectors import ROWS_PER_PART, CorpusVectors
from utils.command_line import Arguments, positive_int
from utils.device import set_num_threads
from utils.errors import UserError, run_main
from utils.progress import print_line, progress_bar

Search = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--work", type=Path, required=True, help="folder for the vectors, which are removed")
    add("--vectors", type=positive_int, default=1_000_000, help="vectors to search in")
    add("--dims", type=positive_int, default=384, help="numbers of a vector")
    add("--batch-size", type=positive_int, default=32, help="queries per batch")
    add("--results", type=positive_int, default=10, help="nearest vectors of a query")
    add("--rounds", type=positive_int, default=7, help="batches of each implementation")
    return parser.parse_args(argv)


def unit_vectors(random: np.random.Generator, count: int, dims: int) -> np.ndarray:
    vectors = random.standard_normal((count, dims), np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def write_vectors(folder: Path, args: Arguments) -> list[Path]:
    folder.mkdir(parents=True)
    paths = []
    with progress_bar(args.vectors, "writing", "vector") as bar:
        for first in range(0, args.vectors, ROWS_PER_PART):
            count = min(ROWS_PER_PART, args.vectors - first)
            paths.append(folder / f"{first:09}.npy")
            np.save(paths[-1], unit_vectors(np.random.default_rng(first), count, args.dims))
            bar.update(count)
    return paths


def faiss_search(paths: list[Path], args: Arguments) -> Search:
    import faiss

    faiss.omp_set_num_threads(torch.get_num_threads())
    index = faiss.IndexFlatIP(args.dims)
    for path in paths:
        index.add(np.load(path))

    def search(queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scores, rows = index.search(queries, args.results)
        return rows, scores

    return search


def semantic_search(paths: list[Path], args: Arguments) -> Search:
    silence_imports()
    from sentence_transformers import util

    corpus = torch.from_numpy(np.concatenate([np.load(path) for path in paths]))

    def search(queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = util.semantic_search(
            torch.from_numpy(queries),
            corpus,
            top_k=args.results,
            score_function=util.dot_score,
        )
        rows = np.array([[hit["corpus_id"] for hit in hits] for hits in found])
        return rows, np.array([[hit["score"] for hit in hits] for hits in found])

    return search


PEERS = {"faiss": faiss_search, "sentence_transformers": semantic_search}
PACKAGES = {"faiss": "faiss-cpu", "sentence_transformers": "sentence-transformers"}


def check_equal(found: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Raises UserError unless all have found the same, but for scores that differ by rounding."""
    _, expected = found[THIS_PROJECT]
    for name, (_, scores) in found.items():
        if not np.allclose(scores, expected, rtol=0, atol=1e-5):
            raise UserError(f"{name} found other scores than {THIS_PROJECT}: compare them")


def timed(search: Search, queries: np.ndarray) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    search(queries)
    return {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}


def measure(args: Arguments, paths: list[Path]) -> dict[str, Any]:
    batches = [
        unit_vectors(np.random.default_rng([1, number]), args.batch_size, args.dims)
        for number in range(1 + args.rounds)
    ]
    vectors = CorpusVectors(paths)
    searches: dict[str, Search] = {
        THIS_PROJECT: lambda queries: vectors.nearest(queries, args.results)
    }
    opening = timed(searches[THIS_PROJECT], batches[0])
    for name, make in PEERS.items():
        if find_spec(name):
            searches[name] = make(paths, args)
    check_equal({name: search(batches[0]) for name, search in searches.items()})

    turns = {
        name: lambda number, search=search: timed(search, batches[number])
        for name, search in searches.items()
    }
    found = take_turns(turns, args.rounds, "batches")
    measured = {
        kind: {name: quartiles([each[kind] for each in found[name]]) for name in found}
        for kind in opening
    }
    for name in found:
        wall, cpu = (format_quartiles(measured[kind][name], ".3f") for kind in opening)
        print_line(f"{name}: {wall} seconds per batch, {cpu} CPU seconds")
    versions = {name: version(PACKAGES[name]) for name in PEERS if name in searches}
    return {"versions": versions, "opening": opening, "per_batch": measured}


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    set_num_threads()
    folder = args.work / "vectors"
    if folder.exists():
        raise UserError(f"{folder} exists: remove it, or give another --work")
    try:
        result = measure(args, write_vectors(folder, args))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    shown = ("vectors", "dims", "batch_size", "results", "rounds")
    arguments = {name: vars(args)[name] for name in shown}
    name = f"search_speed-{args.vectors}-{args.dims}"
    write_result(args.output, name, CPU, {"arguments": arguments, **result})


if __name__ == "__main__":
    run_main(main)
