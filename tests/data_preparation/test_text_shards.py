"""Sharding of formatted text."""

import random
import resource
import tracemalloc
from codecs import BOM_UTF8
from pathlib import Path

import pytest
from conftest import read_json
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_recipe.data_preparation.engine.runner import run
from bert_recipe.data_preparation.options import TextShardOptions
from bert_recipe.data_preparation.sources import spans
from bert_recipe.data_preparation.stages import shard_stage, shards_of_split
from bert_recipe.data_preparation.text import text_shards
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.work_units.executors import InProcessExecutor

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "was",
    "he",
    "that",
    "his",
    "it",
    "with",
    "as",
    "for",
    "had",
    "you",
]


def documents_of(seed: int, count: int) -> list[str]:
    """`count` documents, no two alike, in formatted form."""
    rng = random.Random(seed)
    return [
        "\n".join(
            f"{number} {line} " + " ".join(rng.choices(WORDS, k=rng.randint(3, 20)))
            for line in range(rng.randint(1, 12))
        )
        for number in range(count)
    ]


def write_formatted(folder: Path, documents: list[str], end: str = "\n", blank: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = f"\n{blank}\n".join(documents) + "\n" if documents else ""
    (folder / "formatted.txt").write_text(text, encoding="utf-8", newline=end)
    return folder


def shard(
    formatted: Path, output: Path, shard_bytes: int, test_fraction: float, seed: int = 1, *more
) -> Path:
    """Shards the text in the folder `formatted` (or several); returns the folder of the splits."""
    options = TextShardOptions(shard_bytes / 1_000_000, test_fraction, seed, *more)
    folders = formatted if isinstance(formatted, list) else [formatted]
    run([shard_stage(output, lambda: folders, options)], InProcessExecutor())
    return output / "sharded"


def read_folder(folder: Path) -> list[list[str]]:
    """The documents of each shard, the plain way."""
    return [
        path.read_text(encoding="utf-8").removesuffix("\n").split("\n\n")
        for path in sorted(folder.glob("*"))
    ]


def flat(shards_: list[list[str]]) -> list[str]:
    return [document for shard in shards_ for document in shard]


def documents_in(sharded: Path) -> dict[str, list[str]]:
    return {split: flat(read_folder(sharded / split)) for split in ("training", "test")}


@settings(max_examples=20, deadline=None)
@given(
    documents=st.lists(
        st.lists(
            st.text("abc é", min_size=1).map(str.strip).filter(bool), min_size=1, max_size=5
        ).map("\n".join),
        min_size=1,
        max_size=30,
    ),
    shard_bytes=st.integers(1, 200),
    fraction=st.sampled_from([0.0, 0.1, 0.5, 0.9]),
    span=st.integers(4, 60),
)
def test_every_document_lands_whole_in_exactly_one_shard(
    tmp_path_factory, documents, shard_bytes, fraction, span
):
    folder = tmp_path_factory.mktemp("shards")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "SPAN_BYTES", span)
        patch.setattr(text_shards, "BUCKET_BYTES", 3 * span)
        sharded = shard(write_formatted(folder / "text", documents), folder, shard_bytes, fraction)
    written = documents_in(sharded)
    assert sorted(written["training"] + written["test"]) == sorted(documents)


def test_a_few_long_documents_are_divided_at_line_ends_and_held_out_in_part(tmp_path):
    lines = [f"sentence {number}" for number in range(4000)]
    books = ["\n".join(lines[first : first + 1000]) for first in range(0, 4000, 1000)]
    path = write_formatted(tmp_path / "text", books)
    whole = documents_in(shard(path, tmp_path / "whole", 50_000, 0.05))
    assert len(whole["test"]) == 2
    max_kb = 0.5
    sharded = shard(path, tmp_path / "divided", 50_000, 0.05, 1, "none", (), max_kb)
    documents = documents_in(sharded)
    parts = documents["training"] + documents["test"]
    assert sorted(line for part in parts for line in part.split("\n")) == sorted(lines)
    sizes = [len(part) for part in parts]
    assert 0.9 * min(sizes) < max(sizes) <= max_kb * 1000 + len(lines[-1])
    assert 0.02 < sum(map(len, documents["test"])) / sum(sizes) < 0.1


def test_shards_have_about_one_size(tmp_path):
    documents = documents_of(3, 3000)
    sharded = shard(write_formatted(tmp_path / "text", documents), tmp_path, 50_000, 0.1)
    for split, count in (("training", 16), ("test", 2)):
        sizes = [path.stat().st_size for path in (sharded / split).iterdir()]
        assert len(sizes) >= count
        assert max(sizes) < 1.1 * min(sizes)


@pytest.mark.parametrize(
    ("given", "text_mb", "shard_mb"),
    [(None, 0.3, 1), (None, 22, 1), (None, 640, 10), (None, 99_999, 100), (100, 22, 100)],
)
def test_a_small_text_makes_enough_shards_for_all_cores(given, text_mb, shard_mb):
    assert TextShardOptions(given).shard_bytes(round(text_mb * 1e6)) == shard_mb * 1_000_000


def test_the_split_of_a_document_depends_only_on_itself_and_the_seed(tmp_path):
    documents = documents_of(5, 400)
    test_documents = []
    for name, order, seed in (
        ("a", documents, 1),
        ("b", documents[::-1][:300], 1),
        ("c", documents, 2),
    ):
        source = write_formatted(tmp_path / name / "text", order)
        test_documents.append(
            set(documents_in(shard(source, tmp_path / name, 10_000, 0.2, seed))["test"])
        )
    assert test_documents[1] == test_documents[0] & set(documents[100:])
    assert test_documents[2] != test_documents[0]
    # Five standard deviations are 0.1; the seed is fixed.
    assert 0.13 < len(test_documents[0]) / 400 < 0.27


@pytest.mark.parametrize(("count", "for_test"), [(1, 0), (3, 0), (4, 2), (30, 2)])
def test_few_documents_leave_two_for_the_test_or_none(tmp_path, count, for_test):
    documents = documents_in(
        shard(
            write_formatted(tmp_path / "text", documents_of(9, count)), tmp_path, 1_000_000, 0.001
        )
    )
    assert (len(documents["training"]), len(documents["test"])) == (count - for_test, for_test)


def test_copies_of_one_document_are_all_for_training(tmp_path):
    documents = documents_in(
        shard(write_formatted(tmp_path / "text", ["One sentence."] * 10), tmp_path, 100, 0.999999)
    )
    assert (len(documents["training"]), len(documents["test"])) == (10, 0)


@pytest.mark.parametrize("count", [2, 3, 7, 20])
def test_no_document_is_alone_in_its_shard(tmp_path, count):
    documents = ["word " * 5_000 + "end", *documents_of(2, count - 1)]
    sharded = shard(write_formatted(tmp_path / "text", documents), tmp_path, 100, 0)
    shards_found = read_folder(sharded / "training")
    assert min(map(len, shards_found)) >= 2
    assert sorted(flat(shards_found)) == sorted(documents)


@pytest.mark.parametrize("spans_per_bucket", [1, 100])
@pytest.mark.parametrize("more", [("none", (("text", 0.3),)), ("equal",)])
def test_no_document_is_alone_after_others_were_left_out(
    tmp_path, monkeypatch, more, spans_per_bucket
):
    """Next-sentence prediction needs two in each shard."""
    monkeypatch.setattr(text_shards, "BUCKET_BYTES", spans_per_bucket * 10_000)
    monkeypatch.setattr(spans, "SPAN_BYTES", 10_000)
    unlike = documents_of(2, 60)
    copies = [f"{number} " + "word " * 200 for number in range(3) for _ in range(20)]
    sharded = shard(write_formatted(tmp_path / "text", unlike + copies), tmp_path, 500, 0, 1, *more)
    shards_found = read_folder(sharded / "training")
    assert len(shards_found) > 5
    assert min(len(set(documents)) for documents in shards_found) >= 2


@pytest.mark.parametrize(("end", "blank"), [("\r\n", ""), ("\n", " \t"), ("\r\n", "  ")])
def test_blank_lines_may_have_spaces_and_windows_line_ends(tmp_path, end, blank):
    documents = documents_of(4, 169)
    folder = write_formatted(tmp_path / "text", documents, end, blank)
    for path in folder.iterdir():  # with a byte order mark, as Windows writes
        path.write_bytes(BOM_UTF8 + path.read_bytes())
    written = documents_in(shard(folder, tmp_path, 10_000, 0.1))
    assert sorted(written["training"] + written["test"]) == sorted(documents)


@pytest.mark.parametrize("end", [b" ", b"\n"])
def test_text_without_a_blank_line_takes_no_more_memory_than_a_bucket(tmp_path, monkeypatch, end):
    monkeypatch.setattr(text_shards, "BUCKET_BYTES", 4 << 20)
    (tmp_path / "text").mkdir()
    with (tmp_path / "text" / "formatted.txt").open("wb") as file:
        file.write(b"First document.\n\n")
        for number in range(30):
            file.write(b"Once %d upon a time." % number + end + (b"and again" + end) * 100_000)
        file.write(b"\n\nLast document.\n")
    words = (tmp_path / "text" / "formatted.txt").read_bytes().split()
    tracemalloc.start()
    sharded = shard(tmp_path / "text", tmp_path, 4_000_000, 0.0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16_000_000
    paths = list((sharded / "training").iterdir())
    assert len(paths) >= 3
    assert sum(len(path.read_bytes().split()) for path in paths) == len(words)


def test_more_shards_than_files_may_be_open(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, limits[1]))
    try:
        sharded = shard(
            write_formatted(tmp_path / "text", documents_of(1, 300)), tmp_path, 100, 0.1
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(list((sharded / "training").iterdir())) > 110


def test_equal_documents_are_kept_once_on_request(tmp_path):
    documents = documents_of(6, 200)
    text = write_formatted(tmp_path / "text", [*documents, *documents[50:], *documents[120:]])
    written = documents_in(shard(text, tmp_path, 20_000, 0.1, 1, "equal"))
    assert sorted(written["training"] + written["test"]) == sorted(documents)
    counts = read_json(tmp_path / "sharded" / "manifest.json")["counts"]
    assert counts["duplicates_dropped"] == 150 + 80
    assert counts["training_documents"] + counts["test_documents"] == 200


def test_weights_repeat_and_thin_the_training_documents_of_a_corpus(tmp_path):
    few = documents_of(7, 100)
    many = [f"many {document}" for document in documents_of(8, 900)]
    folders = [write_formatted(tmp_path / "few", few), write_formatted(tmp_path / "many", many)]
    plain = documents_in(shard(folders, tmp_path / "plain", 50_000, 0.1))
    mixed = documents_in(
        shard(folders, tmp_path / "mixed", 50_000, 0.1, 1, "none", (("few", 3.0), ("many", 0.5)))
    )
    assert sorted(mixed["test"]) == sorted(plain["test"])
    for document in few:
        assert mixed["training"].count(document) == 3 * plain["training"].count(document)
    thinned = [document for document in mixed["training"] if document.startswith("many")]
    assert len(set(thinned)) == len(thinned) and set(thinned) < set(plain["training"])
    assert (
        0.42
        < len(thinned) / sum(document.startswith("many") for document in plain["training"])
        < 0.58
    )
    with pytest.raises(UserError, match=r"--weights none: there is no such text: use few, many"):
        shard(folders, tmp_path / "unknown", 50_000, 0.1, 1, "none", (("none", 3.0),))


def test_all_folders_of_a_user_s_shards_are_read_and_held_out_by_their_names(tmp_path):
    folder = tmp_path / "test"  # whose own name means nothing
    names = ("a.txt", "train/b.txt", "more/in/c.TXT", "dev/d.txt", "test/e.txt", "Testset/f.txt")
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("A sentence.\n")

    def names_of(split: str) -> list[str]:
        return [Path(entry["path"]).name for entry in shards_of_split(folder, split)]

    assert names_of("training") == ["a.txt", "c.TXT", "b.txt"]
    assert names_of("test") == ["f.txt", "d.txt", "e.txt"]
    (folder / "more" / "g.txt.gz").touch()
    with pytest.raises(UserError, match=r"g\.txt\.gz is compressed"):
        names_of("training")
    with pytest.raises(UserError, match="none is no folder"):
        shards_of_split(tmp_path / "none", "test")
