#!/usr/bin/env python3
"""Seconds per batch of queries of the search in kept vectors, beside faiss and
sentence-transformers.

    python3 benchmarks/search_speed.py --vectors 1000000 --dims 384 --work FOLDER
    python3 benchmarks/search_speed.py --embedded vectors.npy --approximate --work FOLDER

Random vectors of length 1, or those of inference.py --embed, of which the last ones are the
queries, are written to FOLDER as --search keeps them: memory-mapped files. The peers hold the same
vectors in their own memory: faiss.IndexFlatIP, which is exact, and
sentence_transformers.util.semantic_search; one that is not installed is left out. All take turns,
in float32, and must find the same texts. CPU seconds are those of all threads; beside other
programs only they mean something. `opening`: the first batch of this project, as a new process has
it, with the files in the page cache. --approximate adds faiss's inverted file and its graph, with
the share of the true results that they find (recall) and the seconds for building them. Recall in
random vectors says nothing about vectors of texts.
"""

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
from tasks.retrieval import normalized
from utils.command_line import Arguments, positive_int
from utils.device import set_num_threads
from utils.errors import UserError, run_main
from utils.progress import print_line, progress_bar
from utils.stop_signal import StopAtOnce, StopSignal

Search = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
CELLS_READ = (8, 32, 128)  # of the inverted file
GRAPH_DEGREE, GRAPH_CANDIDATES = 32, (32, 128)


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--work", type=Path, required=True, help="folder for the vectors, which are removed")
    add("--vectors", type=positive_int, default=1_000_000, help="vectors to search in")
    add("--dims", type=positive_int, default=384, help="numbers of a vector")
    add("--batch-size", type=positive_int, default=32, help="queries per batch")
    add("--results", type=positive_int, default=10, help="nearest vectors of a query")
    add("--rounds", type=positive_int, default=7, help="batches of each implementation")
    add("--embedded", type=Path, help="search in this NumPy matrix, not in random vectors")
    add("--approximate", action="store_true", help="time approximate indexes of faiss, too")
    return parser.parse_args(argv)


def unit_vectors(random: np.random.Generator, count: int, dims: int) -> np.ndarray:
    vectors = random.standard_normal((count, dims), np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


class RandomVectors:
    """The corpus and the queries; the same for the same arguments."""

    def __init__(self, args: Arguments):
        self.count, self.dims, self.batch_size = args.vectors, args.dims, args.batch_size

    def parts(self) -> Iterator[np.ndarray]:
        for first in range(0, self.count, ROWS_PER_PART):
            count = min(ROWS_PER_PART, self.count - first)
            yield unit_vectors(np.random.default_rng(first), count, self.dims)

    def queries(self, number: int) -> np.ndarray:
        return unit_vectors(np.random.default_rng([1, number]), self.batch_size, self.dims)


class EmbeddedVectors:
    """The same, of a file: its last rows are the queries."""

    def __init__(self, args: Arguments):
        try:
            rows = np.load(args.embedded, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise UserError(f"--embedded {args.embedded}: {error}: give a .npy file") from error
        num_queries = (1 + args.rounds) * args.batch_size
        if rows.ndim != 2 or len(rows) <= num_queries + args.results:
            raise UserError(
                f"--embedded {args.embedded} has the shape {rows.shape}: give a matrix with more "
                f"rows than the {num_queries} queries and {args.results} results"
            )
        self.count = len(rows) - num_queries
        self.dims = rows.shape[1]
        self.rows, self.batch_size = rows, args.batch_size

    def parts(self) -> Iterator[np.ndarray]:
        for first in range(0, self.count, ROWS_PER_PART):
            yield normalized(self.rows[first : min(first + ROWS_PER_PART, self.count)])

    def queries(self, number: int) -> np.ndarray:
        first = self.count + number * self.batch_size
        return normalized(self.rows[first : first + self.batch_size])


Vectors = RandomVectors | EmbeddedVectors


def write_vectors(folder: Path, vectors: Vectors) -> list[Path]:
    folder.mkdir(parents=True)
    paths = []
    with progress_bar(vectors.count, "writing", "vector") as bar:
        for number, part in enumerate(vectors.parts()):
            paths.append(folder / f"{number:09}.npy")
            np.save(paths[-1], part)
            bar.update(len(part))
    return paths


def faiss_search(paths: list[Path], args: Arguments) -> Search:
    import faiss

    faiss.omp_set_num_threads(torch.get_num_threads())
    # By default a batch of 32 queries is compared in loops, which take several times as long.
    faiss.cvar.distance_compute_blas_threshold = 1
    parts = [np.load(path) for path in paths]
    index = faiss.IndexFlatIP(parts[0].shape[1])
    for part in parts:
        index.add(part)

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
SETTINGS = {
    "faiss": {"index": "IndexFlatIP", "distance_compute_blas_threshold": 1},
    "sentence_transformers": {"function": "util.semantic_search, dot_score"},
}
PACKAGES = {"faiss": "faiss-cpu", "sentence_transformers": "sentence-transformers"}


def approximate_searches(
    paths: Sequence[Path], args: Arguments
) -> tuple[dict[str, Search], dict[str, dict[str, float]]]:
    """Searches by name, and the seconds for building each index."""
    import faiss

    faiss.omp_set_num_threads(torch.get_num_threads())
    corpus = np.concatenate([np.load(path) for path in paths])
    count, dims = corpus.shape
    num_cells = int(4 * count**0.5)
    cells = faiss.IndexIVFFlat(faiss.IndexFlatIP(dims), dims, num_cells, faiss.METRIC_INNER_PRODUCT)
    graph = faiss.IndexHNSWFlat(dims, GRAPH_DEGREE, faiss.METRIC_INNER_PRODUCT)

    def build_cells() -> None:
        cells.train(corpus)
        cells.add(corpus)

    def search_cells(num_read: int, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        cells.nprobe = num_read
        return cells.search(queries, args.results)[::-1]

    def search_graph(candidates: int, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        graph.hnsw.efSearch = candidates
        return graph.search(queries, args.results)[::-1]

    building = {}
    for name, build in (("cells", build_cells), ("graph", lambda: graph.add(corpus))):
        building[name] = timed(build)
        print_line(f"{name}: built in {building[name]['seconds']:.0f} seconds")
    searches: dict[str, Search] = {}
    for num_read in CELLS_READ:
        searches[f"cells, {num_read} of {num_cells}"] = partial(search_cells, num_read)
    for candidates in GRAPH_CANDIDATES:
        searches[f"graph, {candidates} candidates"] = partial(search_graph, candidates)
    return searches, building


def recall(found: np.ndarray, exact: np.ndarray) -> float:
    """The share of the rows in `exact` that are in the same line of `found`."""
    return float(
        np.mean([np.isin(row, other).mean() for row, other in zip(exact, found, strict=True)])
    )


def check_equal(found: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Raises UserError unless all have found the same, but for scores that differ by rounding."""
    _, expected = found[THIS_PROJECT]
    for name, (_, scores) in found.items():
        if not np.allclose(scores, expected, rtol=0, atol=1e-5):
            raise UserError(f"{name} found other scores than {THIS_PROJECT}: compare them")


def timed(work: Callable[[], object]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}


def measure(args: Arguments, vectors: Vectors) -> dict[str, Any]:
    batches = [vectors.queries(number) for number in range(1 + args.rounds)]
    folder = args.work / "vectors"
    if folder.exists():
        raise UserError(f"{folder} exists: remove it, or give another --work")
    try:
        paths = write_vectors(folder, vectors)
        own = CorpusVectors(paths)
        searches: dict[str, Search] = {
            THIS_PROJECT: lambda queries: own.nearest(queries, args.results)
        }
        opening = timed(lambda: searches[THIS_PROJECT](batches[0]))
        for name, make in PEERS.items():
            if find_spec(name):
                searches[name] = make(paths, args)
        approximate, building = {}, {}
        if args.approximate:
            approximate, building = approximate_searches(paths, args)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # what is mapped can still be read
    found = {name: search(batches[0]) for name, search in searches.items()}
    check_equal(found)
    queries = np.concatenate(batches)
    exact, _ = own.nearest(queries, args.results)
    recalls = {name: recall(search(queries)[0], exact) for name, search in approximate.items()}

    turns = {
        name: lambda number, search=search: timed(lambda: search(batches[number]))
        for name, search in (searches | approximate).items()
    }
    turned = take_turns(turns, args.rounds, "batches")
    measured = {
        kind: {name: quartiles([each[kind] for each in turned[name]]) for name in turned}
        for kind in opening
    }
    for name in turned:
        wall, cpu = (format_quartiles(measured[kind][name], ".3f") for kind in opening)
        share = f", recall {recalls[name]:.3f}" if name in recalls else ""
        print_line(f"{name}: {wall} seconds per batch, {cpu} CPU seconds{share}")
    peers = [name for name in PEERS if name in searches]
    versions = {name: version(PACKAGES[name]) for name in peers}
    settings = {name: SETTINGS.get(name, {}) for name in peers}
    result = {"versions": versions, "settings": settings}
    result |= {"opening": opening, "per_batch": measured}
    return result | ({"recall": recalls, "building": building} if args.approximate else {})


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    if args.approximate and not find_spec("faiss"):
        raise UserError("--approximate needs faiss: pip install faiss-cpu")
    set_num_threads()
    vectors = RandomVectors(args) if args.embedded is None else EmbeddedVectors(args)
    with StopSignal() as stop, stop.raising():
        try:
            result = measure(args, vectors)
        except StopAtOnce:
            sys.exit(128 + stop.received)
    arguments = {"vectors": vectors.count, "dims": vectors.dims}
    arguments |= {name: vars(args)[name] for name in ("batch_size", "results", "rounds")}
    name = f"search_speed-{vectors.count}-{vectors.dims}"
    write_result(args.output, name, CPU, {"arguments": arguments, **result})


if __name__ == "__main__":
    run_main(main)
