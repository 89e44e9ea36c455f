"""Repacking: compressed and chunked shards become contiguous ones with the same rows."""

import random
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import ROOT, sample_rows, write_nvidia_shard
from prepared_data import digests, prepare_data
from processes import kill_and_wait_for_workers

from bert_recipe.data_loading.hdf5_shards import KEYS, Shard


def repack(*arguments, code: int = 0) -> subprocess.CompletedProcess:
    return prepare_data("repack", *arguments, code=code)


ATTRIBUTES = {"names": ["a", "é"], "sizes": [1, 2], "share": 0.5, "is_cased": True, "note": "text"}


def write(path: Path, n: int, seed: int) -> None:
    write_nvidia_shard(
        path, sample_rows(n, 32, 5, seed), ATTRIBUTES | {"none": h5py.Empty(np.int8)}
    )


@pytest.fixture
def nvidia(tmp_path) -> Path:
    folder = tmp_path / "nvidia"
    for number in range(4):
        write(folder / f"part {number % 2}" / f"train_{number}.h5", 50 + number, seed=number)
    return folder


def rows_of(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    """Read with h5py alone, as int64."""
    rows = {}
    for path in sorted([*folder.rglob("*.h5"), *folder.rglob("*.hdf5")]):
        with h5py.File(path) as file:
            rows[str(path.relative_to(folder))] = {
                key: file[key][:].astype(np.int64) for key in KEYS
            }
    return rows


def assert_same_rows(ours, expected) -> None:
    assert ours.keys() == expected.keys() and len(ours) > 0
    for name, rows in expected.items():
        assert all(np.array_equal(ours[name][key], rows[key]) for key in KEYS), name


@pytest.mark.parametrize("workers", [1, 2])
def test_nvidias_shards_become_contiguous_in_place(nvidia, workers):
    before = rows_of(nvidia)
    done = repack(nvidia, "--num-workers", workers)
    assert "4 of 4 shards to repack" in done.stdout and "4 shards repacked" in done.stdout
    assert_same_rows(rows_of(nvidia), before)
    for path in nvidia.rglob("*.h5"):
        shard = Shard(path)
        assert shard.is_contiguous and shard.has_checksums
        assert shard.layouts["input_ids"].dtype == np.uint16
        assert shard.attributes == ATTRIBUTES | {"none": None}
    assert {path.suffix or path.name for path in nvidia.rglob("*") if path.is_file()} == {
        ".h5",
        ".lock",
    }
    assert "0 of 4 shards to repack" in repack(nvidia).stdout


def test_an_output_folder_leaves_the_originals(nvidia, tmp_path):
    before, rows = digests(nvidia), rows_of(nvidia)
    repack(nvidia, "--output-dir", tmp_path / "out")
    assert digests(nvidia) == before
    assert_same_rows(rows_of(tmp_path / "out"), rows)
    assert all(Shard(path).is_contiguous for path in (tmp_path / "out").rglob("*.h5"))
    for other in (tmp_path / "out").rglob("*.h5"):  # other samples of the same number, and newer
        with h5py.File(other, "r+") as file:
            file["next_sentence_labels"][:] = 1 - file["next_sentence_labels"][:]
    assert "4 of 4 shards to repack" in repack(nvidia, "--output-dir", tmp_path / "out").stdout
    assert_same_rows(rows_of(tmp_path / "out"), rows)


def test_a_dry_run_changes_nothing(nvidia):
    before = digests(nvidia)
    assert "4 of 4 shards to repack" in repack(nvidia, "--dry-run").stdout
    assert digests(nvidia) == before
    assert not (nvidia / ".lock").exists()


def test_killed_at_a_random_moment_no_shard_is_lost_and_a_second_run_finishes(nvidia):
    rng = random.Random(4)
    before = rows_of(nvidia)
    words = [sys.executable, ROOT / "data" / "prepare.py", "repack", nvidia, "--num-workers", "2"]
    for _ in range(3):
        process = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        time.sleep(rng.uniform(0.3, 1.2))
        kill_and_wait_for_workers(process)
        assert_same_rows(rows_of(nvidia), before)
    write(nvidia / "part 0" / "train_9.h5", 50, seed=9)  # one that is left in any case
    before = rows_of(nvidia)
    (nvidia / "part 0" / "train_9.h5.tmp-1").write_text("half a shard")
    repack(nvidia)
    assert_same_rows(rows_of(nvidia), before)
    assert all(Shard(path).is_contiguous for path in nvidia.rglob("*.h5"))
    assert {path.suffix or path.name for path in nvidia.rglob("*") if path.is_file()} == {
        ".h5",
        ".lock",
    }


@pytest.mark.parametrize("output", [[], ["--output-dir"]])
def test_an_empty_shard_is_done_when_it_is_there(tmp_path, output):
    (tmp_path / "shards").mkdir()
    with h5py.File(tmp_path / "shards" / "empty.h5", "w") as file:
        for key, values in sample_rows(1, 32, 5, 0).items():
            file.create_dataset(key, data=values[:0])
    (tmp_path / "shards" / "training.tmp-1").mkdir()  # of a data preparation that was killed
    for _ in range(2):
        inside = [tmp_path / "shards" / "out"] * len(output)
        done = repack(tmp_path / "shards", *output, *inside)
    assert "0 of 1 shards to repack" in done.stdout
