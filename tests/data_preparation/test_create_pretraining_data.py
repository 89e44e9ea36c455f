"""Data creation: the fast path against the written-out algorithm, its statistics, its files, and
bad input.
"""

import contextlib
import gzip
import hashlib
import shutil
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
from book_text import WORDS, write_text
from conftest import CLS, SEP, VOCAB_FILE, assert_refused, run_program
from data_creation_reference import (
    Draws,
    create_pairs,
    create_samples,
    read_documents,
    truncate_pair,
)
from hypothesis import given
from hypothesis import strategies as st
from small_runs import run_here

import create_pretraining_data
from bert_recipe.data_loading.hdf5_shards import KEYS
from bert_recipe.data_loading.row_rules import COMMON_ATTRIBUTES
from bert_recipe.data_preparation.options import SampleOptions
from bert_recipe.data_preparation.samples.corpus import Corpus, read_blocks, read_corpus
from bert_recipe.data_preparation.samples.create_shards import create_shard
from bert_recipe.data_preparation.samples.drawing import (
    SAMPLE,
    count_covered,
    draw_samples,
    truncate,
)
from bert_recipe.data_preparation.samples.hdf5_writer import shard_attributes
from bert_recipe.tokenization.tokenizer import BertTokenizer
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import file_digest, lock_folder
from bert_recipe.utils.work_units.executors import InProcessExecutor
from bert_recipe.utils.work_units.units import WorkUnit, run_units

TOKENIZER = BertTokenizer(VOCAB_FILE)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


def read_shard(path: Path) -> dict[str, np.ndarray]:
    """As NVIDIA's reader does: each key whole, then as int64."""
    with h5py.File(path) as file:
        return {key: np.asarray(file[key][:]).astype(np.int64) for key in KEYS}


def make_shard(text: Path, output: Path, options: SampleOptions) -> dict:
    attributes = shard_attributes(file_digest(text), TOKENIZER, options)
    return create_shard(output, text, output.name, VOCAB_FILE, options, attributes)


def unmasked(shard: dict[str, np.ndarray]) -> np.ndarray:
    """input_ids with the labels put back."""
    ids = shard["input_ids"].copy()
    real = shard["masked_lm_ids"] > 0
    row = np.nonzero(real)[0]
    ids[row, shard["masked_lm_positions"][real]] = shard["masked_lm_ids"][real]
    return ids


class Replay(Draws):
    """Makes the choices that planned samples show: which sentences are A, whether B is random and
    where it begins.
    """

    def __init__(self, samples: np.ndarray, corpus: Corpus, target: int):
        self.samples, self.corpus, self.target = samples, corpus, target
        self.position = 0

    def target_length(self, longest, short_seq_prob):
        return self.target

    def sentence_at(self, token: int) -> int:
        return int(np.searchsorted(self.corpus.sentence_starts, token))

    def document_of_b(self) -> int:
        sentence = self.sentence_at(self.samples[self.position]["b_start"])
        return int(np.searchsorted(self.corpus.document_starts, sentence, side="right")) - 1

    def sentences_of_a(self, sentences):
        sample = self.samples[self.position]
        return self.sentence_at(sample["a_start"] + sample["a_length"]) - self.sentence_at(
            sample["a_start"]
        )

    def first_length(self, tokens, longest):
        return self.samples[self.position]["a_length"]

    def next_is_random(self):
        return self.samples[self.position]["label"] == 1

    def other_document(self, documents, own):
        assert self.document_of_b() != own
        return self.document_of_b()

    def first_sentence(self, sentences):
        first = self.corpus.document_starts[self.document_of_b()]
        return self.sentence_at(self.samples[self.position]["b_start"]) - int(first)


@pytest.mark.parametrize("next_sentence_prediction", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_making_the_same_choices_the_written_out_algorithm_makes_the_same_samples(
    tmp_path, seed, next_sentence_prediction
):
    path = write_text(tmp_path / "text.txt", seed=seed)
    options = SampleOptions(
        64, 10, short_seq_prob=0.0, next_sentence_prediction=next_sentence_prediction
    )
    corpus = read_corpus(path, TOKENIZER)
    samples = draw_samples(corpus, options, np.random.default_rng(seed))
    documents = read_documents(path, TOKENIZER)
    tokens = [TOKENIZER.tokens[token_id] for token_id in corpus.ids]
    assert [
        token for document in documents for sentence in document for token in sentence
    ] == tokens

    replay = Replay(samples, corpus, options.sequence_length - options.special_tokens)
    for index in range(len(documents)):
        for pair in create_pairs(documents, index, options, replay):
            sample = samples[replay.position]
            a, b = sample["a_start"], sample["b_start"]
            assert pair.tokens_a == tokens[a : a + sample["a_length"]]
            assert pair.tokens_b == tokens[b : b + sample["b_length"]]
            assert sample["label"] == (pair.is_random_next if next_sentence_prediction else -1)
            replay.position += 1
    assert replay.position == len(samples) > 5


def test_truncation_leaves_the_lengths_that_popping_one_token_at_a_time_leaves():
    options = SampleOptions(32, 5)
    lengths = [(a, b) for a in range(1, 60, 3) for b in range(1, 60, 2)]
    samples = np.zeros(len(lengths), SAMPLE)
    samples["a_length"], samples["b_length"] = np.transpose(lengths)
    samples["a_start"], samples["b_start"] = 1000, 2000
    cut = truncate(samples, options, np.random.default_rng(0))
    draws = Draws(0)
    for (a, b), sample in zip(lengths, samples, strict=True):
        tokens_a, tokens_b = list(range(1000, 1000 + a)), list(range(2000, 2000 + b))
        truncate_pair(tokens_a, tokens_b, 29, draws)
        assert (sample["a_length"], sample["b_length"]) == (len(tokens_a), len(tokens_b))
        assert sample["a_start"] >= 1000 and sample["a_start"] + sample["a_length"] <= 1000 + a
        assert sample["b_start"] >= 2000 and sample["b_start"] + sample["b_length"] <= 2000 + b
    assert cut == sum(max(0, a + b - 29) for a, b in lengths)


def test_truncation_takes_half_of_the_tokens_off_the_front():
    samples = np.zeros(2000, SAMPLE)
    samples["a_length"], samples["b_length"] = 100, 50
    truncate(samples, SampleOptions(53, 5), np.random.default_rng(0))
    # 100 tokens go, 75 of them off A: 37.5 off its front, and 12.5 off B's, with the binomial's
    # spread.
    assert samples["a_start"].mean() == pytest.approx(37.5, abs=0.5)
    assert samples["a_start"].var() == pytest.approx(75 / 4, rel=0.15)
    assert samples["b_start"].mean() == pytest.approx(12.5, abs=0.3)


@pytest.mark.parametrize("next_sentence_prediction", [True, False])
def test_samples_have_the_statistics_of_the_written_out_algorithm(
    text, tmp_path, next_sentence_prediction
):
    options = SampleOptions(64, 8, 0.15, 0.3, 40, next_sentence_prediction=next_sentence_prediction)
    make_shard(text, tmp_path / "fast.hdf5", options)
    fast = read_shard(tmp_path / "fast.hdf5")
    slow = create_samples(read_documents(text, TOKENIZER), options)
    lengths_a, lengths_b = np.array([(len(pair.tokens_a), len(pair.tokens_b)) for pair in slow]).T
    second = lengths_b + 1 if next_sentence_prediction else 0 * lengths_b
    is_random = np.mean([pair.is_random_next for pair in slow])
    for value, expected in (
        (len(fast["input_ids"]), pytest.approx(len(slow), rel=0.05)),  # three standard deviations
        (
            fast["input_mask"].sum(axis=1).mean(),
            pytest.approx((lengths_a + 2 + second).mean(), rel=0.03),
        ),
        (fast["segment_ids"].sum(axis=1).mean(), pytest.approx(second.mean(), rel=0.06)),
        ((fast["next_sentence_labels"] == 1).mean(), pytest.approx(is_random, abs=0.03)),
    ):
        assert value == expected


@pytest.mark.parametrize("short_seq_prob", [0.0, 0.5])
def test_without_pairs_each_pass_has_each_token_once_in_full_samples(tmp_path, short_seq_prob):
    """Also of "sentences" that are longer than a sample, as of transcripts without full stops."""
    documents = ["the river " * 400, "the ship\nis near\n" * 7, "sea", "the " * 62, "a " * 63]
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(documents))
    options = SampleOptions(64, 8, short_seq_prob=short_seq_prob, next_sentence_prediction=False)
    corpus = read_corpus(path, TOKENIZER)
    rng = np.random.default_rng(0)
    passes = [draw_samples(corpus, options, rng) for _ in range(4)]
    bounds = corpus.sentence_starts[corpus.document_starts]
    for samples in passes:
        stops = samples["a_start"] + samples["a_length"]
        assert np.array_equal(samples["a_start"], [0, *stops[:-1]]) and stops[-1] == bounds[-1]
        assert truncate(samples, options, rng) == 0 and (samples["a_length"] > 0).all()
        assert count_covered(samples) == len(corpus.ids)
        for start, stop in pairwise(bounds):  # no sample is of two documents
            inside = samples[(samples["a_start"] >= start) & (samples["a_start"] < stop)]
            assert (inside["a_start"] + inside["a_length"])[-1] == stop
            assert len(inside) <= -(-(stop - start) // 62) + (short_seq_prob > 0)
            assert (inside["a_length"][1:-1] == 62).all()
    assert len({tuple(samples["a_start"].tolist()) for samples in passes}) > 1


def test_tokens_in_no_sample_are_counted():
    rng = np.random.default_rng(0)
    samples = np.zeros(40, SAMPLE)
    for segment in "ab":
        samples[f"{segment}_start"] = rng.integers(0, 900, 40)
        samples[f"{segment}_length"] = rng.integers(0, 30, 40)
    tokens = set()
    for sample in samples:
        tokens.update(range(sample["a_start"], sample["a_start"] + sample["a_length"]))
        tokens.update(range(sample["b_start"], sample["b_start"] + sample["b_length"]))
    assert count_covered(samples) == len(tokens)


@pytest.fixture(scope="module")
def shard(text, tmp_path_factory) -> dict[str, np.ndarray]:
    path = tmp_path_factory.mktemp("shard") / "text.hdf5"
    make_shard(text, path, SampleOptions(128, 20, dupe_factor=10))
    return read_shard(path)


def test_every_row_has_two_runs_of_text_and_with_label_0_the_second_follows_the_first(shard, text):
    count = np.clip(np.rint(0.15 * shard["input_mask"].sum(axis=1)), 1, 20)
    assert np.array_equal((shard["masked_lm_ids"] > 0).sum(axis=1), count)
    documents = [
        " ".join(map(" ".join, document)) + " " for document in read_documents(text, TOKENIZER)
    ]
    for ids, segment_ids, mask, label in zip(
        unmasked(shard),
        shard["segment_ids"],
        shard["input_mask"],
        shard["next_sentence_labels"],
        strict=True,
    ):
        middle, end = np.flatnonzero(ids == SEP)
        assert ids[0] == CLS
        a = ids[1:middle].tolist()
        b = ids[middle + 1 : end].tolist()
        padding = [0] * (128 - len(a) - len(b) - 3)
        assert segment_ids.tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1) + padding
        assert mask.tolist() == [1] * (len(a) + len(b) + 3) + padding and not ids[mask == 0].any()
        first, second = (
            "".join(f"{TOKENIZER.tokens[token]} " for token in part) for part in (a, b)
        )
        assert any(second in document for document in documents)
        starts = [document.find(first) for document in documents]
        places = [place for place in zip(starts, documents, strict=True) if place[0] >= 0]
        follows = [second in document[place + len(first) :] for place, document in places]
        assert follows and (label == 1 or any(follows))


def test_short_documents_sentences_without_tokens_and_long_lines_are_read_as_written(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("bert_recipe.data_preparation.samples.corpus.READ_BLOCK", 16)
    text = tmp_path / "text.txt"
    long_line = " ".join(WORDS[:200])
    text.write_bytes(
        f"\n\n  \none two\r\n\u200b\n\n\nthree\n\t\n{long_line}\nfour\n\n{'x' * 90} five".encode()
    )
    corpus = read_corpus(text, TOKENIZER)
    lines = ["one two", "three", long_line, "four", "x" * 90 + " five"]
    expected = [TOKENIZER.encode(line) for line in lines]
    assert corpus.ids.tolist() == [token for line in expected for token in line]
    assert np.diff(corpus.sentence_starts).tolist() == [len(line) for line in expected]
    assert corpus.document_starts.tolist() == [0, 1, 2, 4, 5]


@given(st.text("ab \n", max_size=80), st.integers(1, 9), st.sampled_from(["utf-8", "utf-8-sig"]))
def test_blocks_are_the_text_and_end_after_a_line_or_before_a_space(
    tmp_path_factory, content, size, encoding
):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(content, encoding)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bert_recipe.data_preparation.samples.corpus.READ_BLOCK", size)
        blocks = list(read_blocks(path))
    assert b"".join(blocks).decode() == content
    assert all(
        block.endswith(b"\n") or following.startswith(b" ") for block, following in pairwise(blocks)
    )
    assert all(blocks)


def command(text: Path, output: Path, *extra) -> list[str]:
    files = ("--input-file", text, "--output-dir", output, "--vocab-file", VOCAB_FILE)
    return [*map(str, (*files, "--max-seq-length", 64, "--max-predictions-per-seq", 10, *extra))]


def create(text: Path, output: Path, *extra):
    return run_here(command(text, output, *extra), create_pretraining_data.main)


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(5):
        write_text(folder / f"part_{number}.txt", documents=12 + 10 * number, seed=number)
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in visible(folder)}


def visible(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.name not in (".lock", ".records")]


@pytest.fixture(scope="module")
def made(text_folder, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("made")
    result = create(text_folder, output, "--num-workers", 1)
    assert result.returncode == 0, result.stderr
    assert "5 shards made" in result.stdout and "truncation drops" in result.stdout
    assert len(digests(output)) == 5
    return output


def test_each_shard_has_random_numbers_of_its_own(text_folder, tmp_path):
    for name in ("a", "b"):
        make_shard(text_folder / "part_0.txt", tmp_path / f"{name}.hdf5", SampleOptions(64, 10))
    a, b = read_shard(tmp_path / "a.hdf5"), read_shard(tmp_path / "b.hdf5")
    rows = min(len(a["input_ids"]), len(b["input_ids"]))
    assert (a["input_ids"][:rows] == b["input_ids"][:rows]).all(axis=1).mean() < 0.01


def test_a_rerun_makes_nothing_and_other_options_or_text_are_refused(text_folder, tmp_path):
    text = tmp_path / "text.txt"
    output = tmp_path / "out" / "text.hdf5"
    text.write_bytes((text_folder / "part_0.txt").read_bytes())
    words = command(text, output.parent, "--num-workers", 1)
    create_pretraining_data.main(words)
    before = output.stat().st_mtime_ns
    create_pretraining_data.main(words)
    assert output.stat().st_mtime_ns == before
    with pytest.raises(UserError, match=r"dupe_factor 5, not 2.*--overwrite"):
        create_pretraining_data.main([*words, "--dupe-factor", "2"])
    text.write_text(text.read_text() + "More.\n")
    with pytest.raises(UserError, match="input_sha256"):
        create_pretraining_data.main(words)
    assert output.stat().st_mtime_ns == before
    create_pretraining_data.main([*words, "--overwrite"])
    assert output.stat().st_mtime_ns > before
    (record,) = (output.parent / ".records").iterdir()
    made = record.read_text()
    record.write_text(made.replace('"dupe_factor"', '"compression": "none", "dupe_factor"'))
    with pytest.raises(UserError, match=r"made with compression none, not None.*--overwrite"):
        create_pretraining_data.main(words)
    record.write_text(made)
    content = output.read_bytes()
    for damaged in (content[:500], content[:-1] + bytes([content[-1] ^ 1])):
        output.write_bytes(damaged)
        with pytest.raises(UserError, match="has changed since"):
            create_pretraining_data.main(words)
        create_pretraining_data.main([*words, "--overwrite"])


def test_an_output_that_is_removed_during_the_work_is_an_error(tmp_path):
    def remove_the_first(path: Path) -> dict:
        (path.parent / "a").unlink(missing_ok=True)
        path.touch()
        return {}

    units = [WorkUnit(name, remove_the_first, (), 1) for name in "ab"]
    with pytest.raises(UserError, match="a was removed or changed while this program ran"):
        run_units(tmp_path, units, InProcessExecutor())


def test_two_creations_in_one_folder_do_not_disturb_each_other(text_folder, made, tmp_path):
    """The second is refused, and does not remove the temporary file of the first."""
    shutil.copytree(made, tmp_path / "out")
    with contextlib.closing(lock_folder(tmp_path / "out")):
        (tmp_path / "out" / "part_0.hdf5.tmp-1").write_text("part of a shard")
        assert_refused(
            create(text_folder, tmp_path / "out", "--num-workers", 1),
            "is in use by process",
            str(tmp_path),
        )
        assert (tmp_path / "out" / "part_0.hdf5.tmp-1").exists()
    shutil.copy(made / "part_0.hdf5", tmp_path / "out" / "other.hdf5")
    (tmp_path / "out" / "notes.tmp-1").write_text("the user's")
    done = create(text_folder, tmp_path / "out", "--num-workers", 1)
    assert done.returncode == 0 and "also has other.hdf5, not of this text" in done.stderr
    assert not (tmp_path / "out" / "part_0.hdf5.tmp-1").exists()
    for name in ("other.hdf5", "notes.tmp-1"):
        (tmp_path / "out" / name).unlink()
    assert digests(tmp_path / "out") == digests(made)


def test_types_are_small_storage_is_contiguous_and_attributes_say_how_it_was_made(made):
    with h5py.File(made / "part_4.hdf5") as file:
        types = ("uint16", "int8", "int8", "uint8", "uint16", "int8")
        assert [str(file[key].dtype) for key in KEYS] == [*types]
        assert all(file[key].id.get_offset() % 64 == 0 for key in KEYS)
        contract = {
            "schema_version": 4,
            "sequence_length": 64,
            "predictions_per_sequence": 10,
            "random_seed": 12345,
        }
        contract |= {
            "dupe_factor": 5,
            "vocab_sha256": TOKENIZER.vocab_sha256,
            "do_lower_case": True,
        }
        assert contract.items() <= dict(file.attrs).items()


def test_shards_of_other_options_are_not_mixed():
    sizes = {"sequence_length", "predictions_per_sequence"}  # of the data sets
    assert {field.name for field in fields(SampleOptions)} - sizes <= set(COMMON_ATTRIBUTES)


def test_compressed_text_gives_the_same_samples(text_folder, made, tmp_path):
    (tmp_path / "part_1.txt.gz").write_bytes(
        gzip.compress((text_folder / "part_1.txt").read_bytes())
    )
    output = tmp_path / "part_1.hdf5"
    make_shard(tmp_path / "part_1.txt.gz", output, SampleOptions(64, 10))
    ours = read_shard(output)
    plain = read_shard(made / "part_1.hdf5")
    assert all(np.array_equal(ours[key], plain[key]) for key in KEYS)


@pytest.mark.parametrize(
    ("separator", "flags", "warns"),
    [("\n\n", (), True), ("\n", (), False), ("\n\n", ("--no-nsp",), False)],
)
def test_documents_of_one_sentence_each_are_named(tmp_path, separator, flags, warns):
    sentences = [f"The ship number {number} is on the river." for number in range(8)]
    documents = [separator.join(sentences), separator.join(sentences)]
    (tmp_path / "text.txt").write_text("\n\n".join(documents) + "\n")
    result = create(tmp_path / "text.txt", tmp_path / "out", "--num-workers", 1, *flags)
    assert result.returncode == 0, result.stderr
    assert ("warning: nearly all next sentences are random" in result.stderr) == warns


@pytest.mark.parametrize("flags", [(), ("--no-nsp",), ("--no-nsp", "--pack-documents")])
def test_text_that_is_lost_is_told(tmp_path, flags):
    documents = [" ".join(["the river", word] * 300) for word in WORDS[:3]]
    (tmp_path / "text.txt").write_text("\n\n".join(documents) + "\n")
    result = create(tmp_path / "text.txt", tmp_path / "out", "--num-workers", 1, *flags)
    share, _ = result.stdout.split("% of the text's tokens are in no sample")
    assert result.returncode == 0
    if flags:
        assert share.endswith("\n0.0") and "lost" not in result.stderr
    else:
        lost = float(share.rpartition("\n")[2])
        assert lost > 80
        assert f"warning: {lost}% of the text's tokens are lost" in result.stderr
        assert result.stderr.rstrip().endswith("or use --no-nsp, with which nothing is lost")


def test_a_file_that_may_not_grow_is_one_line_and_leaves_nothing(text_folder, tmp_path):
    words = command(text_folder / "part_3.txt", tmp_path / "out", "--num-workers", 1)
    program = [sys.executable, "create_pretraining_data.py", *words]
    result = run_program("bash", "-c", 'ulimit -f 40 && exec "$@"', "bash", *program)
    assert_refused(result, str(tmp_path / "out" / "part_3.hdf5"), "larger than the limit")
    assert not visible(tmp_path / "out")
