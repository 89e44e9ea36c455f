"""Shared by test files: small data sets, a tiny config, and programs run as users do."""

import atexit
import gc
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterable
from pathlib import Path

import h5py
import numpy as np
import pytest

from bert_recipe.utils.progress import printed_once

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data"
BERT_VOCAB_FILE = ROOT / "vocab" / "bert-base-uncased-vocab.txt"
CLS, SEP, MASK = 101, 102, 103

# For what this process and those that it starts share.
if "BERT_TESTS_FOLDER" not in os.environ:
    os.environ["BERT_TESTS_FOLDER"] = tempfile.mkdtemp(prefix="bert-tests-")
    atexit.register(shutil.rmtree, os.environ["BERT_TESTS_FOLDER"], ignore_errors=True)
RUN_FOLDER = Path(os.environ["BERT_TESTS_FOLDER"])

# Compiled kernels of another processor or version of torch, as the shared cache may have, abort the
# process.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(RUN_FOLDER / "inductor"))

# The first words of BERT's. Programs read them and checkpoints hold their embeddings in a third of
# the time.
VOCAB_FILE = RUN_FOLDER / "vocab.txt"
if not VOCAB_FILE.exists():
    with BERT_VOCAB_FILE.open(encoding="utf-8") as lines:
        VOCAB_FILE.write_text("".join(itertools.islice(lines, 10_000)), encoding="utf-8")

# Models this small are slower on several threads, and many times slower where other programs want
# the cores too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# None of them starts processes that import torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Inductor need not compile a program to find out that this processor has its vector instructions.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Each program that tests start would compile all modules of the project anew, and each of pytest's
# processes all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Tests that are started in the background ignore these signals, and the programs that they start
# would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

needs_shared_data = pytest.mark.skipif(
    not SHARED.is_dir(), reason="needs the shared data folder beside the checkout"
)


def pytest_configure() -> None:
    """The same examples in every run, on machines of any speed. Processes that tests start import
    this file too, and need no Hypothesis, which takes seconds.
    """
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "project", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("project")
    # Tests outlive no loss of power, and a disk takes milliseconds for each file.
    os.fsync = lambda _descriptor: None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session):
    """Exempts imports from garbage collections: 600,000 objects, 0.3 s to visit each time. Forks
    the server of processes outside of what records warnings.
    """
    from processes import fork_server

    gc.disable()
    try:
        result = yield
    finally:
        gc.enable()
        gc.freeze()
    if session.items and not session.config.option.collectonly:
        fork_server()
    return result


# Files take their turns by name. These are long, and would be last, with nothing beside them.
FIRST_FILES = (
    "tests/benchmarks/test_benchmarks.py",
    "tests/benchmarks/test_gpu_first_hour.py",
    "tests/checkpoint/test_resume.py",
    "tests/checkpoint/test_sharded_checkpoints.py",
    "tests/programs/test_library.py",
    "tests/scripts/test_export_onnx.py",
    "tests/scripts/test_launch_scripts.py",
    "tests/scripts/test_nodes_that_come_and_go.py",
    "tests/scripts/test_pretrain_from_texts.py",
    "tests/scripts/test_run_sub.py",
    "tests/tasks/test_embeddings.py",
    "tests/tasks/test_rerankers.py",
    "tests/tokenization/test_layouts.py",
    "tests/training/test_new_head.py",
    "tests/training/test_shrunk_outputs.py",
    "tests/utils/test_distributed.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST_FILES))


@pytest.fixture(scope="module", autouse=True)
def _late_imports_exempted():
    """Also those that the tests of the files before have made."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _state_of_a_new_process():
    """Each test sees the lines that a program prints once, and no --deterministic of another."""
    printed_once.clear()
    if torch := sys.modules.get("torch"):
        torch.use_deterministic_algorithms(False)


TINY = {
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "type_vocab_size": 2,
    "vocab_size": 10_000,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def read_json(path: Path):
    return json.loads(path.read_text(encoding="utf-8"))


def write_json_lines(path: Path, rows: Iterable[dict]) -> None:
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )


def read_json_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def sample_rows(
    n: int, length: int, predictions: int, seed: int, vocab_size: int = 30522
) -> dict[str, np.ndarray]:
    """`n` samples of pairs with unequal lengths in NVIDIA's layout. Words follow each other by a
    rule (each is the one before plus a step of the pair), so that there is something to learn.
    """
    random = np.random.default_rng(seed)
    rows = {
        "input_ids": np.zeros((n, length), np.int64),
        "input_mask": np.zeros((n, length), np.int64),
        "segment_ids": np.zeros((n, length), np.int64),
        "masked_lm_positions": np.zeros((n, predictions), np.int64),
        "masked_lm_ids": np.zeros((n, predictions), np.int64),
        "next_sentence_labels": random.integers(0, 2, n),
    }
    for i in range(n):
        used = int(random.integers(8, length + 1))
        split = int(random.integers(2, used - 3))
        words = (
            1000
            + (random.integers(0, 50) + np.arange(used) * (1 + rows["next_sentence_labels"][i]))
            % 200
        )
        words[0], words[split], words[-1] = CLS, SEP, SEP
        candidates = np.setdiff1d(np.arange(used), [0, split, used - 1])
        count = min(predictions, max(1, round(0.15 * used)))
        masked = np.sort(random.choice(candidates, count, replace=False))
        rows["masked_lm_positions"][i, :count] = masked
        rows["masked_lm_ids"][i, :count] = words[masked]
        words[masked] = MASK
        rows["input_ids"][i, :used] = words % vocab_size
        rows["input_mask"][i, :used] = 1
        rows["segment_ids"][i, split + 1 : used] = 1
    return rows


def write_shard(
    path: Path, rows: dict[str, np.ndarray], attributes: dict | None = None, **storage
) -> Path:
    """Writes `rows` as they are, contiguous unless `storage` (h5py's options) says otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for key, values in rows.items():
            file.create_dataset(key, data=values, **storage)
        file.attrs.update(attributes or {})
    return path


def pretraining_types(rows, wide=np.uint16, narrow=np.uint8) -> dict[str, np.ndarray]:
    """`rows` in the given types: `wide` for tokens and positions, `narrow` for the rest."""
    return {
        key: values.astype(
            wide if key in ("input_ids", "masked_lm_positions", "masked_lm_ids") else narrow
        )
        for key, values in rows.items()
    }


def write_nvidia_shard(
    path: Path, rows: dict[str, np.ndarray], attributes: dict | None = None
) -> Path:
    """A shard as NVIDIA's recipe writes it: int32 and int8, gzip, in chunks that HDF5 chose."""
    return write_shard(
        path,
        pretraining_types(rows, np.int32, np.int8),
        attributes,
        compression="gzip",
        chunks=True,
    )


def write_shards(
    folder: Path, sizes=(40, 24), length: int = 32, predictions: int = 5, seed: int = 0
) -> Path:
    for number, n in enumerate(sizes):
        rows = pretraining_types(sample_rows(n, length, predictions, seed + number), narrow=np.int8)
        write_shard(folder / f"shard_{number:03d}.hdf5", rows)
    return folder


def add_checksums(*paths: Path) -> None:
    for path in paths:
        with h5py.File(path, "r+") as file:
            for key in file:
                file[key].attrs["crc32"] = zlib.crc32(file[key][:].tobytes())


def change_row(path: Path) -> None:
    """Changes a row that the digest of a small shard does not read."""
    with h5py.File(path, "r+") as file:
        file["segment_ids"][3, 2] ^= 1


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """The input files of small runs, a RunInputs."""
    from small_runs import RunInputs

    return RunInputs.make(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="session")
def glue_files(tmp_path_factory):
    """A folder with the files of glue_runs.make_files, which tests do not change."""
    from glue_runs import make_files

    folder = tmp_path_factory.mktemp("glue")
    make_files(folder)
    return folder


@pytest.fixture
def checkout(tmp_path):
    """A checkout whose launch scripts start nothing, a launch_scripts.Checkout."""
    from launch_scripts import Checkout

    return Checkout(tmp_path)


def run_program(
    *command, env: dict | None = None, timeout: float = 240, cwd: Path = ROOT
) -> subprocess.CompletedProcess:
    """Runs a Python program of the project, or another command where the first word is not a .py
    file.
    """
    words = [str(word) for word in command]
    if words[0].endswith(".py"):
        words = [sys.executable, *words]
    return subprocess.run(
        words,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def log_entries(report_file: Path) -> list[dict]:
    """The records of a report, without a line that a program is writing now or was killed while it
    wrote.
    """
    lines = report_file.read_text().splitlines(keepends=True)
    return [json.loads(line.removeprefix("DLLL ")) for line in lines if line.endswith("}}\n")]


def reported(report_file: Path) -> dict[int, dict]:
    """What a report file says of each logged step; a step logged again replaces what was said
    before.
    """
    steps: dict[int, dict] = {}
    for entry in log_entries(report_file):
        if isinstance(entry["step"], list) and entry["step"]:
            steps.setdefault(entry["step"][-1], {}).update(entry["data"])
    return steps


def fine_tuning_words(config: Path, output: Path, *flags) -> list[str]:
    """The command line of a fine-tuning program for a model of its own."""
    command = (
        "--config-file",
        config,
        "--vocab-file",
        VOCAB_FILE,
        "--device",
        "cpu",
        "--output-dir",
        output,
    )
    return [
        str(word)
        for word in (
            *command,
            "--report-file",
            output / "report.json",
            "--show-config",
            "false",
            *flags,
        )
    ]


def assert_refused(result: subprocess.CompletedProcess, *words: str) -> None:
    """One line `error: ...` with all of `words`, exit code 2, no traceback."""
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert result.returncode == 2, (result.returncode, result.stdout, result.stderr)
    assert len([line for line in lines if line.startswith("error: ")]) == 1, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in lines[-1], (word, lines[-1])
