"""The benchmark of search at toy size: it runs, and one that finds other texts ends it."""

import json

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


def test_search_is_timed_beside_one_that_finds_the_same(tmp_path, monkeypatch):
    words = ["--vectors", "5000", "--dims", "8", "--rounds", "2", "--work", str(tmp_path / "work")]
    words += ["--output", str(tmp_path / "result.json")]
    monkeypatch.setattr(search_speed, "PACKAGES", {"numpy": "numpy"})
    monkeypatch.setattr(search_speed, "PEERS", {"numpy": brute_force(0.0)})
    search_speed.main(words)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["per_batch"]["seconds"].keys() == {"this project", "numpy"}
    assert not (tmp_path / "work" / "vectors").exists()
    monkeypatch.setattr(search_speed, "PEERS", {"numpy": brute_force(0.1)})
    with pytest.raises(UserError, match="numpy found other scores"):
        search_speed.main(words)
