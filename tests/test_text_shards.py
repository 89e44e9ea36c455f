"""Sharding of formatted text."""

import random
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_preparation import text_shards
from data_preparation.text_shards import write_shards
from utils.errors import UserError

WORDS = ["the", "of", "and", "to", "in", "was", "he", "that", "his", "it", "with", "as", "for", "had", "you"]


def documents_of(seed: int, count: int, sentences: tuple[int, int] = (1, 12)) -> list[str]:
    """`count` documents, no two alike, in formatted form."""
    rng = random.Random(seed)
    return [
        "\n".join(
            f"{number} {line} " + " ".join(rng.choices(WORDS, k=rng.randint(3, 20)))
            for line in range(rng.randint(*sentences))
        )
        for number in range(count)
    ]


def write_formatted(path: Path, documents: list[str]) -> Path:
    path.write_text("\n\n".join(documents) + "\n" if documents else "", encoding="utf-8")
    return path


def read_folder(folder: Path) -> list[list[str]]:
    """The documents of each shard, the plain way."""
    return [path.read_text(encoding="utf-8").removesuffix("\n").split("\n\n") for path in sorted(folder.iterdir())]


def flat(shards_: list[list[str]]) -> list[str]:
    return [document for shard in shards_ for document in shard]


@settings(max_examples=40, deadline=None)
@given(
    documents=st.lists(
        st.lists(st.text("abc é", min_size=1).map(str.strip).filter(bool), min_size=1, max_size=5).map("\n".join),
        min_size=1,
        max_size=30,
    ),
    shard_bytes=st.integers(1, 200),
    fraction=st.sampled_from([0.0, 0.1, 0.5, 0.9]),
    block=st.integers(4, 60),
)
def test_every_document_lands_whole_in_exactly_one_shard(tmp_path_factory, documents, shard_bytes, fraction, block):
    folder = tmp_path_factory.mktemp("shards")
    source = write_formatted(folder / "formatted.txt", documents)
    text_shards.BLOCK, usual = block, text_shards.BLOCK
    try:
        splits = write_shards([source], folder, shard_bytes, fraction, seed=1)
    finally:
        text_shards.BLOCK = usual
    found = flat(read_folder(folder / "training")) + flat(read_folder(folder / "test"))
    assert sorted(found) == sorted(documents)
    assert splits["training"].documents + splits["test"].documents == len(documents)
    on_disk = sum(path.stat().st_size for path in folder.glob("t*/*"))
    assert splits["training"].bytes + splits["test"].bytes == on_disk


def test_shards_have_one_size_to_within_a_document(tmp_path):
    source = write_formatted(tmp_path / "formatted.txt", documents_of(3, 800))
    write_shards([source], tmp_path, 20_000, 0.1, seed=1)
    longest = max(len(document) for document in documents_of(3, 800)) + 2
    for split in ("training", "test"):
        sizes = [path.stat().st_size for path in (tmp_path / split).iterdir()]
        assert max(sizes) - min(sizes) <= longest
    assert len(list((tmp_path / "training").iterdir())) > 5


def test_the_split_of_a_document_depends_only_on_itself_and_the_seed(tmp_path):
    documents = documents_of(5, 400)
    test_documents = []
    for name, order, seed in (("a", documents, 1), ("b", documents[::-1][:300], 1), ("c", documents, 2)):
        source = write_formatted(tmp_path / f"{name}.txt", order)
        write_shards([source], tmp_path / name, 10_000, 0.2, seed)
        test_documents.append(set(flat(read_folder(tmp_path / name / "test"))))
    assert test_documents[1] == test_documents[0] & set(documents[100:])
    assert test_documents[2] != test_documents[0]
    assert 0.13 < len(test_documents[0]) / 400 < 0.27  # five standard deviations are 0.1; the seed is fixed


@pytest.mark.parametrize(("count", "for_test"), [(1, 0), (3, 0), (4, 2), (30, 2)])
def test_few_documents_leave_two_for_the_test_or_none(tmp_path, count, for_test):
    source = write_formatted(tmp_path / "formatted.txt", documents_of(9, count))
    splits = write_shards([source], tmp_path, 1_000_000, 0.001, seed=1)
    assert (splits["training"].documents, splits["test"].documents) == (count - for_test, for_test)


def test_copies_of_one_document_are_all_for_training(tmp_path):
    source = write_formatted(tmp_path / "formatted.txt", ["One sentence only."] * 10)
    splits = write_shards([source], tmp_path, 1_000_000, 0.999999, seed=1)
    assert (splits["training"].documents, splits["test"].documents) == (10, 0)


@pytest.mark.parametrize("count", [2, 3, 7, 20])
def test_no_document_is_alone_in_its_shard(tmp_path, count):
    documents = ["word " * 5_000, *documents_of(2, count - 1)]
    source = write_formatted(tmp_path / "formatted.txt", documents)
    write_shards([source], tmp_path, 100, 0, seed=1)
    shards_found = read_folder(tmp_path / "training")
    assert min(map(len, shards_found)) >= 2
    assert sorted(flat(shards_found)) == sorted(documents)


def test_no_document_at_all_is_an_error(tmp_path):
    source = write_formatted(tmp_path / "formatted.txt", [])
    with pytest.raises(UserError, match="no document"):
        write_shards([source], tmp_path, 1000, 0.1, seed=1)


def test_a_line_of_100_mb_passes_through_in_bounded_memory(tmp_path):
    source = tmp_path / "formatted.txt"
    with source.open("wb") as file:
        file.write(b"First document.\n\n")
        for _ in range(100):
            file.write(b"word " * 200_000)
        file.write(b"\n\nLast document.\n")
    tracemalloc.start()
    splits = write_shards([source], tmp_path, 10_000_000, 0.0, seed=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert splits["training"].documents == 3
    assert splits["training"].bytes == source.stat().st_size
    assert peak < 40_000_000


def test_more_shards_than_files_may_be_open_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(text_shards.resource, "getrlimit", lambda _: (100, 100))
    source = write_formatted(tmp_path / "formatted.txt", documents_of(1, 300))
    with pytest.raises(UserError, match="--shard-mb"):
        write_shards([source], tmp_path, 100, 0.1, seed=1)
