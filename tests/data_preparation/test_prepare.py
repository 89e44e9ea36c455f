"""The data preparation as a user runs it: `python data/prepare.py ...` on small text, killed,
rerun, with bad input.
"""

import bz2
import errno
import gzip
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import pytest
from conftest import ROOT, assert_refused, read_json, run_program
from prepared_data import SAMPLE, digests
from prepared_data import prepare_data as run

import create_pretraining_data
from bert_recipe.tokenization.tokenizer import load_tokenizer
from bert_recipe.utils.work_units import units

SMALL = [
    "--shard-mb",
    "0.02",
    "--lengths",
    "64:10",
    "--dupe-factor",
    "2",
    "--sentence-splitter",
    "fast",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """About 100 kB of real prose in every plain format, with an empty file among it."""
    folder = tmp_path_factory.mktemp("corpus")
    text = (SAMPLE / "the-time-machine.txt").read_text(encoding="utf-8")
    pieces = [text[start : start + 5_000] for start in range(10_000, 110_000, 5_000)]
    (folder / "a.txt").write_text(pieces[0], encoding="utf-8")
    (folder / "empty.txt").write_text("")
    with gzip.open(folder / "b.txt.gz", "wt", encoding="utf-8", compresslevel=1) as file:
        file.write(pieces[1])
    (folder / "c.jsonl").write_text(
        "".join(json.dumps({"text": piece}) + "\n" for piece in pieces[2:])
    )
    return folder


@pytest.fixture(scope="module")
def built(corpus, tmp_path_factory) -> Path:
    """What a run with one worker makes of the corpus when nothing disturbs it."""
    folder = tmp_path_factory.mktemp("undisturbed") / "data"
    run("all", "corpus", corpus, "--output-dir", folder, "--num-workers", 1, *SMALL)
    return folder


def test_the_vocabulary_may_be_in_a_model_folder(built, tmp_path):
    """The file in it is the same to the stages."""
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(ROOT / "vocab" / "bert-large-uncased-vocab.txt", model / "vocab.txt")
    command = ("hdf5", "--sharded", built / "sharded", "--output-dir", tmp_path, *SMALL[2:6])
    run(*command, "--vocab-file", model)
    assert "made again" not in run(*command, "--vocab-file", model / "vocab.txt").stdout


def test_a_run_needs_neither_torch_nor_nltk(corpus, tmp_path):
    """Each of its workers would wait a second for either."""
    words = ["data/prepare.py", "all", "corpus", corpus / "a.txt", "--output-dir", tmp_path, *SMALL]
    words += ["--empty-line", "document"]
    flags = [sys.executable, "-X", "importtime", *words]
    imported = subprocess.run(flags, cwd=ROOT, capture_output=True, text=True, check=True).stderr
    assert " h5py\n" in imported and list(tmp_path.glob("hdf5/*/training/*.hdf5"))
    assert " torch\n" not in imported and " nltk\n" not in imported


def test_a_folder_of_text_becomes_verified_shards(built):
    training = built / "hdf5" / "seq_64_pred_10" / "training"
    shards = sorted(training.glob("*.hdf5"))
    assert len(shards) == 5
    with h5py.File(shards[0]) as file:
        assert file["input_ids"].shape[1] == 64
        assert file.attrs["dupe_factor"] == 2
    assert (built / "hdf5" / "seq_64_pred_10" / "test" / "shard-00000.hdf5").exists()
    report = (training / "report.txt").read_text()
    # Without its folder.
    assert "next sentence" in report and "of 30522 in bert-large-uncased-vocab.txt" in report
    assert (training / "vocab.txt").read_bytes() == (
        ROOT / "vocab" / "bert-base-uncased-vocab.txt"
    ).read_bytes()


def test_the_manifest_names_inputs_and_outputs_with_their_sums(built, corpus):
    manifest = read_json(built / "formatted" / "corpus" / "manifest.json")
    sums = {Path(entry["path"]).name: entry["sha256"] for entry in manifest["inputs"]}
    assert sums == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in corpus.iterdir()
    }
    documents = 0
    for output in manifest["outputs"]:
        part = built / "formatted" / "corpus" / output["path"]
        assert output["bytes"] == part.stat().st_size
        assert output["sha256"] == hashlib.sha256(part.read_bytes()).hexdigest()
        documents += part.read_text().count("\n\n") + 1
    assert manifest["counts"]["documents"] == documents == 20


def test_a_second_run_has_nothing_to_do(built, corpus):
    before = digests(built)
    done = run("all", "corpus", corpus, "--output-dir", built, *SMALL)
    assert [line.split(": ")[1].startswith("up to date") for line in done.stdout.splitlines()] == [
        True
    ] * 4
    assert digests(built) == before


def test_a_dry_run_says_what_would_be_done_and_does_nothing(built, corpus, tmp_path):
    done = run("all", "corpus", corpus, "--output-dir", tmp_path / "new", *SMALL, "--dry-run")
    assert not (tmp_path / "new").exists()
    stages = ["format corpus", "shard", "hdf5 64 training", "hdf5 64 test"]
    assert re.findall(r"^(.+?) +to do  ", done.stdout, re.M) == stages
    shutil.copytree(corpus, tmp_path / "text")
    (tmp_path / "text" / "z.txt").write_bytes(b"not UTF-8: \xe8")
    words = [
        "format",
        "corpus",
        tmp_path / "text",
        "--output-dir",
        tmp_path / "new",
        "--num-workers",
        1,
    ]
    run(*words, code=2)
    assert "formatted/corpus (3 units of work are done)" in run(*words, "--dry-run").stdout
    assert (
        run("all", "corpus", corpus, "--output-dir", built, *SMALL, "--dry-run").stdout.count(
            "up to date"
        )
        == 4
    )
    (tmp_path / "download/squad/v1.1").mkdir(parents=True)
    (tmp_path / "download/squad/v1.1/train-v1.1.json.part").write_bytes(bytes(2_000_000))
    done = run("download", "squad", "--output-dir", tmp_path, "--dry-run")
    assert "v1.1 (2.0 MB of an unfinished file are here)" in done.stdout


def test_any_number_of_workers_makes_the_same_bytes(built, corpus, tmp_path, monkeypatch):
    # So little text is not worth workers otherwise.
    monkeypatch.setattr(units, "SMALL_WORK", 0)
    run("all", "corpus", corpus, "--output-dir", tmp_path / "data", "--num-workers", 3, *SMALL)
    assert digests(tmp_path / "data") == digests(built)


def test_a_run_killed_at_random_moments_ends_with_the_same_bytes(built, corpus, tmp_path):
    rng = random.Random(11)
    folder = tmp_path / "data"
    command = [
        sys.executable,
        ROOT / "data" / "prepare.py",
        "all",
        "corpus",
        corpus,
        *SMALL,
        "--output-dir",
    ]
    started = time.monotonic()
    subprocess.run([*command, tmp_path / "undisturbed"], check=True, capture_output=True)
    whole = time.monotonic() - started  # moments within a run, however fast the machine
    command.append(folder)
    kills = 0
    for _ in range(4):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            assert process.wait(timeout=rng.uniform(0.2, 1) * whole) == 0
            if kills:
                break
            shutil.rmtree(folder)  # the machine is faster now than it was when `whole` was measured
            whole /= 2
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
        manifests = [path for path in folder.rglob("manifest.json") if ".partial" not in str(path)]
        for path in manifests:  # what has its final name is complete
            for entry in read_json(path)["outputs"]:
                assert (
                    hashlib.sha256((path.parent / entry["path"]).read_bytes()).hexdigest()
                    == entry["sha256"]
                )
    else:
        run(*command[2:])
    assert kills >= 1
    assert digests(folder) == digests(built)


@pytest.mark.parametrize(
    ("place", "error", "workers", "words"),
    [
        (
            "threading.Thread.start",
            RuntimeError("can't start new thread"),
            2,
            ["no more processes or threads can be started: use fewer workers"],
        ),
        (
            "bert_recipe.data_preparation.text.formatting.bounded",
            OSError(errno.ENOSPC, "No space left on device"),
            1,
            ["{}/formatted/corpus.", ".partial/part-00000.txt: the disk is full"],
        ),
    ],
)
def test_a_limit_of_the_machine_is_one_line(
    corpus, tmp_path, monkeypatch, place, error, workers, words
):
    def fails(*_):
        raise error

    monkeypatch.setattr(place, fails)
    result = run(
        "format", "corpus", corpus, "--output-dir", tmp_path, "--num-workers", workers, code=2
    )
    assert_refused(result, *(word.format(tmp_path) for word in words))
    assert not (tmp_path / "formatted" / "corpus").exists()


def test_changed_options_and_changed_input_are_made_again_and_nothing_else(corpus, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text((corpus / "a.txt").read_text())
    command = [
        "all",
        "corpus",
        text,
        "--output-dir",
        tmp_path / "data",
        *SMALL,
        "--test-fraction",
        0,
    ]
    command += ["--empty-line", "document"]
    run(*command)
    fewer_masks = run(*command, "--masked-lm-prob", 0.1).stdout
    assert "shard: up to date" in fewer_masks
    assert "made again, masked_lm_prob was 0.15, is 0.1" in fewer_masks
    text.write_text((corpus / "a.txt").read_text()[::-1])
    again = run(*command, "--masked-lm-prob", 0.1).stdout
    assert "format corpus: made again" in again
    assert f"{tmp_path}/data/sharded/manifest.json has changed" in again
    (tmp_path / "data" / "sharded" / "training" / "shard-00000.txt").write_text("Tampered with.\n")
    assert "shard: made again" in run(*command, "--masked-lm-prob", 0.1).stdout


BAD_INPUTS = {
    "latin1.txt": (
        "A good one.\n\nEin Haus für alle.\n".encode("latin-1"),
        "latin1.txt:3: not UTF-8",
    ),
    "nul.txt": (b"Some text\0here.\n", "nul.txt:1: NUL"),
    "cut.txt.gz": (
        gzip.compress(random.Random(1).randbytes(9_000).hex().encode(), mtime=0)[:4_000],
        "truncated",
    ),
    "damaged.txt.bz2": (bz2.compress(b"Some text. " * 99)[:30] + bytes(40), "truncated or damaged"),
    "field.jsonl": (
        b'{"text": "A good one."}\n{"body": "x"}\n',
        "field.jsonl:2: the field 'text' is missing",
    ),
    "broken.jsonl": (b'{"text": "A good one."}\n{"text": \n', "broken.jsonl:2: not valid JSON"),
    "surrogate.jsonl": (
        b'{"text": "A good one."}\n{"text": "half \\ud83d a pair"}\n',
        "surrogate.jsonl:2: half of",
    ),
}


def test_bad_text_is_one_line_and_is_left_out_named_and_counted_on_request(tmp_path):
    folder = tmp_path / "text"
    formatted = tmp_path / "data" / "formatted" / "corpus"
    folder.mkdir()
    for name, (content, _) in BAD_INPUTS.items():
        (folder / name).write_bytes(content)
    words = ("format", "corpus", folder, "--output-dir", tmp_path / "data")
    refused = run(*words, code=2).stderr
    assert any(reason in refused for _, reason in BAD_INPUTS.values()) and "--skip-bad" in refused
    assert not formatted.exists()
    output = run(*words, "--skip-bad").stdout
    assert f"{len(BAD_INPUTS)} bad skipped" in output
    (warning,) = [line for line in output.splitlines() if line.startswith("warning")]
    assert "files are left out, or what follows in them: " in warning
    assert warning.count("after line") == 2 and "cut.txt.gz, after line" in warning
    log = (formatted / "skipped.log").read_text()
    for name, (_, reason) in BAD_INPUTS.items():
        assert name in log and reason in log, (name, log)
    assert sum(path.read_text().count("A good one.") for path in formatted.glob("part-*.txt")) == 4


def test_file_names_need_not_be_utf8(corpus, tmp_path):
    folder = Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9"))
    shutil.copytree(corpus, folder)
    (folder / "a.txt").rename(folder / os.fsdecode(b"\xe9.txt"))
    (folder / os.fsdecode(b"\xe8.txt")).write_bytes(b"not UTF-8: \xe8")
    output = folder.with_name(folder.name + " data")
    command = ["all", "corpus", folder, "--output-dir", output, *SMALL, "--skip-bad"]
    run(*command)
    assert run(*command).stdout.count("up to date") == 4
    assert "udce8.txt:1: not UTF-8" in (output / "formatted" / "corpus" / "skipped.log").read_text()
    name = os.fsdecode(b"\xe9.txt")
    text = tmp_path / name
    text.write_text((output / "sharded" / "training" / "shard-00000.txt").read_text())
    vocab_file = ROOT / "vocab" / "bert-base-uncased-vocab.txt"
    words = ["--input-file", text, "--output-dir", tmp_path, "--vocab-file", vocab_file]
    create_pretraining_data.main([str(word) for word in words])
    assert text.with_suffix(".hdf5").exists()


def test_passages_are_whole_sentences_of_a_document_whatever_its_line_breaks(tmp_path):
    """Hard line breaks and short paragraphs make no short lines, and a row of a table is more than
    one line.
    """
    folder, output = tmp_path / "text", tmp_path / "data"
    folder.mkdir()
    prose = (SAMPLE / "the-time-machine.txt").read_text(encoding="utf-8")[10_000:14_000]
    (folder / "wrapped.txt").write_text(prose, encoding="utf-8")
    row = {"text": "Only a few words here. " * 40, "id": 1}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({"text": "Short."}))
    run("format", "corpus", folder, "--output-dir", output, "--sentence-splitter", "passage")
    parts = sorted((output / "formatted" / "corpus").glob("part-*.txt"))
    documents = [text for part in parts for text in part.read_text(encoding="utf-8").split("\n\n")]
    lines = [document.split("\n") for document in map(str.strip, documents)]
    assert [len(passages) for passages in lines] == [4, 1, len(lines[2])]
    assert " ".join(lines[2]) == " ".join(prose.split())
    assert min(len(line) for passages in lines for line in passages if line != "Short.") >= 200
    assert len(lines[2]) > 10 and lines[2][0].endswith((".", "?", "!", "’"))


def test_a_fifo_among_the_files_is_not_opened(corpus, tmp_path):
    """In processes, which a time limit can end."""
    folder = tmp_path / "text"
    shutil.copytree(corpus, folder)
    os.mkfifo(folder / "pipe.txt")
    (folder / "b.txt.gz").rename(tmp_path / "b.txt.gz")  # which is no prepared text
    output = ("--output-dir", tmp_path / "data")
    for words in (("format", "corpus", folder, "--sentence-splitter", "fast"), ("shard", folder)):
        assert run_program("data/prepare.py", *words, *output).returncode == 0


def test_a_folder_that_no_stage_made_is_left_alone(corpus, tmp_path):
    (tmp_path / "sharded").mkdir()
    (tmp_path / "sharded" / "diary.txt").write_text("Dear diary.")
    (tmp_path / "sharded" / "manifest.json").write_text('{"schema_version": 2, "options": null}')
    done = run("all", "corpus", corpus, "--output-dir", tmp_path, *SMALL, code=2)
    assert "no stage made" in done.stderr
    assert (tmp_path / "sharded" / "diary.txt").read_text() == "Dear diary."


@pytest.mark.parametrize(("kind", "name"), [("wordpiece", "vocab.txt"), ("bpe", "tokenizer.json")])
def test_a_vocabulary_of_ones_own_goes_with_its_shards_and_config(corpus, tmp_path, kind, name):
    own = [
        "--train-vocab",
        "--tokenizer",
        kind,
        "--vocab-size",
        700,
        "--no-do-lower-case",
        "--unused",
        3,
    ]
    run("all", "corpus", corpus, "--output-dir", tmp_path, *SMALL, *own)
    vocab_file = tmp_path / "vocab" / name
    config = tmp_path / "vocab" / "config.json"
    assert read_json(config)["vocab_size"] == load_tokenizer(vocab_file).vocab_size == 700
    training = tmp_path / "hdf5" / "seq_64_pred_10" / "training"
    with h5py.File(next(training.glob("*.hdf5"))) as file:
        assert file.attrs["vocab_sha256"] == load_tokenizer(vocab_file).vocab_sha256
        assert not file.attrs["do_lower_case"]
        assert file["input_ids"][:].max() < 700
    assert (training / name).read_bytes() == vocab_file.read_bytes()
    report = (training / "report.txt").read_text()
    # As text, not as BPE's bytes.
    assert "of 700 in" in report and "[CLS]" in report and "\u0120" not in report
    wrong = run(
        "verify", training, "--vocab-file", ROOT / "vocab" / "bert-base-cased-vocab.txt", code=2
    )
    assert "another vocabulary" in wrong.stderr
    assert (
        "--do-lower-case" in run("hdf5", "--output-dir", tmp_path, "--do-lower-case", code=2).stderr
    )


def test_the_script_passes_everything_on_and_knows_the_folder_of_the_environment(corpus, tmp_path):
    script = ["bash", ROOT / "data" / "create_datasets_from_start.sh"]
    assert "usage" in run_program(*script, "--help").stdout
    assert_refused(run_program(*script, "wikipedia"), "wiki_only")
    for given, options, folder in (
        ("a b", ["--output-dir", tmp_path / "c d"], tmp_path / "c d"),
        ("", [], ROOT / "data"),
    ):
        env = {
            "PYTHON": sys.executable,
            "BERT_PREP_WORKING_DIR": str(tmp_path / given) if given else "",
        }
        done = run_program(*script, "corpus", corpus, *options, "--dry-run", *SMALL, env=env)
        assert f"{folder}/hdf5/seq_64_pred_10/training" in done.stdout


@pytest.mark.parametrize("dataset", ["wiki_only", "wiki_books"])
def test_squad_is_downloaded_with_wikipedia(dataset, tmp_path):
    flags = [
        "--output-dir",
        str(tmp_path),
        "--dry-run",
        *(["--books", str(SAMPLE)] if dataset == "wiki_books" else []),
    ]
    stages = re.findall(r"^download (.+?) +to do  ", run("all", dataset, *flags).stdout, re.M)
    assert stages == ["wikicorpus", "squad 1.1", "squad 2.0"]
    # A dump that is here already: no network is needed.
    assert "\ndownload" not in run("all", dataset, SAMPLE, *flags).stdout


def test_text_in_another_language_learns_its_own_sentences(tmp_path):
    """No parameters ship for it, so that they are learnt: an abbreviation that is everywhere ends
    no sentence.
    """
    rng = random.Random(2)
    words = [
        "haus",
        "baum",
        "wasser",
        "strasse",
        "kind",
        "schule",
        "garten",
        "himmel",
        "wolke",
        "regen",
    ]
    lines = []
    for _ in range(750):
        start, *rest = rng.choices(words, k=7)
        lines.append(
            f"{start.capitalize()} {rest[0]} ca. {rng.randint(2, 99)} {rest[1]} bzw. "
            f"{' '.join(rest[2:])}."
        )
    paragraphs = [" ".join(lines[number : number + 5]) for number in range(0, 750, 5)]
    (tmp_path / "text.txt").write_text("\n\n".join(paragraphs))
    flags = ("--language", "de", "--output-dir", tmp_path)
    run("format", "corpus", tmp_path / "text.txt", *flags)
    formatted = tmp_path / "formatted" / "corpus"
    assert "bzw" in read_json(formatted / "sentences-de.json")["abbreviations"]
    assert (formatted / "part-00000.txt").read_text().splitlines() == lines


def test_the_last_line_says_what_is_lost_also_when_all_is_up_to_date(tmp_path):
    talk = " ".join((SAMPLE / "the-time-machine.txt").read_text(encoding="utf-8").split()[:9000])
    words = re.sub(r"[^\w ]", "", talk).split()  # a transcript: no full stops
    rows = [{"text": " ".join(words[start : start + 900])} for start in range(0, 9000, 900)]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["all", "corpus", tmp_path / "talks.jsonl", "--output-dir", tmp_path / "data", *SMALL]
    for _ in range(2):
        last = run(*command).stdout.splitlines()[-1]
        lost = float(re.match(r"warning: hdf5 64 training: ([\d.]+)% of the text's", last)[1])
        assert lost > 80 and "next sentences are random" in last and "--no-nsp" in last
    cut = run(*command, "--no-nsp").stdout
    assert "0.0 % of the text lost" in cut and "warning" not in cut


def test_words_that_a_new_vocabulary_lacks_are_told_with_another_way_out(tmp_path):
    rng = random.Random(0)
    characters = [chr(0x4E00 + number) for number in range(300)]
    text = "\n".join("".join(rng.choices(characters, k=30)) for _ in range(400))
    (tmp_path / "text.txt").write_text(text + "\n", encoding="utf-8")
    words = ["all", "corpus", tmp_path / "text.txt", "--output-dir", tmp_path / "data", "--no-nsp"]
    words += ["--lengths", "64:10", "--train-vocab", "--sentence-splitter", "newline"]
    refused = run(*words, "--alphabet", 200, code=2).stderr
    assert "of the tokens are [UNK]" in refused and "--tokenizer bpe" in refused
    few = run(*words, "--alphabet", 285).stdout.splitlines()[-1]
    assert re.search(r"warning: .* [1-9]\.\d% of the tokens are \[UNK\].*--tokenizer bpe", few)
    assert "0.0 % unknown" in run(*words).stdout
