"""The benchmark of search at toy size: it runs, and one that finds other texts ends it."""

import json
import os
import signal

import numpy as np
import pytest

from benchmarks import search_speed
from utils.errors import UserError


def brute_force(error: float):
    def make(paths, args):
        vectors = np.concatenate([np.load(path) for path in paths])

        def search(queries):
            products = queries @ vectors.T
            rows = (-products).argsort(axis=1)[:, : args.results]
            return rows, np.take_along_axis(products, rows, 1) + error

        return search

    return make


def toy_flags(tmp_path):
    flags = ["--rounds", "2", "--work", str(tmp_path / "work")]
    return [*flags, "--output", str(tmp_path / "result.json")]


def test_search_is_timed_beside_one_that_finds_the_same(tmp_path, monkeypatch):
    words = ["--vectors", "5000", "--dims", "8", *toy_flags(tmp_path)]
    monkeypatch.setattr(search_speed, "PACKAGES", {"numpy": "numpy"})
    monkeypatch.setattr(search_speed, "PEERS", {"numpy": brute_force(0.0)})
    search_speed.main(words)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["per_batch"]["seconds"].keys() == {"this project", "numpy"}
    assert not (tmp_path / "work" / "vectors").exists()
    monkeypatch.setattr(search_speed, "PEERS", {"numpy": brute_force(0.1)})
    with pytest.raises(UserError, match="numpy found other scores"):
        search_speed.main(words)


def test_a_signal_to_stop_leaves_no_vectors(tmp_path, monkeypatch):
    def stop(paths, args):
        assert paths[0].is_file()
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(search_speed, "PEERS", {"numpy": stop})
    with pytest.raises(SystemExit) as caught:
        search_speed.main(["--vectors", "50", "--dims", "8", *toy_flags(tmp_path)])
    assert caught.value.code == 128 + signal.SIGTERM
    assert list((tmp_path / "work").iterdir()) == []


def test_recall_is_that_of_an_index_which_reads_some_cells_or_all(tmp_path, monkeypatch):
    pytest.importorskip("faiss")
    path = tmp_path / "vectors.npy"
    np.save(path, np.random.default_rng(0).standard_normal((1000, 8), np.float32))
    monkeypatch.setattr(search_speed, "PEERS", {})
    monkeypatch.setattr(search_speed, "CELLS_READ", (1, 1000))
    words = ["--embedded", str(path), "--approximate", *toy_flags(tmp_path)]
    search_speed.main(words)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["arguments"]["vectors"] == 1000 - 3 * 32
    some, every, *_ = result["recall"].values()
    assert some < every == 1.0
    assert result["building"].keys() == {"cells", "graph"}
