"""Data preparation on a Dask cluster of this machine: the same bytes as with local processes,
whatever dies.
"""

import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import ROOT, assert_refused, read_json
from prepared_data import SAMPLE, digests
from processes import PATIENCE, wait_until

# Found and not imported: every test process collects this file.
pytestmark = pytest.mark.skipif(
    find_spec("distributed") is None, reason="needs Dask: pip install distributed"
)

TEXT = [
    "--lengths",
    "64:10",
    "--dupe-factor",
    "1",
    "--sentence-splitter",
    "fast",
    "--shard-mb",
    "0.1",
]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> dict[str, str]:
    """The environment in which Dask uses a new certificate, and trusts no other."""
    if not shutil.which("openssl"):
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("certificates") / "tls"
    subprocess.run(
        ["bash", ROOT / "scripts" / "create_certificates.sh", folder],
        check=True,
        capture_output=True,
    )
    return {"DASK_CONFIG": str(folder)}


class Cluster:
    def __init__(self, folder: Path, protocol: str, environment: dict[str, str]):
        self.file = folder / "scheduler.json"
        self.environment = os.environ | {"PYTHONPATH": python_path()} | environment
        self.log = (folder / "cluster.log").open("ab")
        address = ["--host", "127.0.0.1", "--port", "0", "--protocol", protocol, "--no-dashboard"]
        self.processes = [self.start("scheduler", *address, "--scheduler-file", self.file)]
        wait_until(lambda: self.file.exists() and self.file.read_text().endswith("}"))
        self.address = read_json(self.file)["address"]

    def start(self, kind: str, *arguments: object) -> subprocess.Popen:
        command = [sys.executable, "-m", f"distributed.cli.dask_{kind}", *map(str, arguments)]
        return subprocess.Popen(command, env=self.environment, stdout=self.log, stderr=self.log)

    def add_worker(self) -> subprocess.Popen:
        arguments = ["--host", "127.0.0.1", "--nthreads", "1", "--no-nanny", "--no-dashboard"]
        self.processes.append(self.start("worker", self.address, *arguments))
        return self.processes[-1]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.log.close()


def python_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, sys.path)])


# Where no scheduler is to be reached, a start need not wait for the 30 seconds of the default.
IMPATIENT = {"DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "1s"}


def prepare(
    folder: Path, *extra: object, environment: dict[str, str] | None = None
) -> subprocess.Popen:
    """Starts all stages on the sample books; every stage is worth workers."""
    program = (
        "from data import prepare; from bert_recipe.utils.work_units import units; "
        "units.SMALL_WORK = 0; prepare.run_main(prepare.main)"
    )
    words = [
        sys.executable,
        "-c",
        program,
        "all",
        "books",
        SAMPLE,
        "--output-dir",
        folder,
        *TEXT,
        *extra,
    ]
    environment = os.environ | {"PYTHONPATH": python_path()} | (environment or {})
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([*map(str, words)], env=environment, start_new_session=True, **pipes)


def finish(process: subprocess.Popen) -> None:
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("expected")
    finish(prepare(folder, "--num-workers", 1))
    return digests(folder)


def shards_of(folder: Path) -> list[Path]:
    return list(folder.glob("hdf5/*/training*/*.hdf5"))


def test_a_killed_worker_changes_no_byte_and_clients_without_a_certificate_are_refused(
    tmp_path, expected, certificates
):
    cluster = Cluster(tmp_path, "tls", certificates)
    try:
        workers = [cluster.add_worker() for _ in range(2)]
        assert cluster.address.startswith("tls://127.0.0.1:")
        stranger = prepare(
            tmp_path / "stranger", "--scheduler", cluster.address, environment=IMPATIENT
        )
        _, errors = stranger.communicate(timeout=PATIENCE)
        assert stranger.returncode == 2 and errors.splitlines()[-1].startswith(
            "error: no connection to the Dask"
        )
        process = prepare(
            tmp_path / "data", "--scheduler", cluster.address, environment=certificates
        )
        wait_until(lambda: shards_of(tmp_path / "data") or process.poll() is not None)
        assert len(shards_of(tmp_path / "data")) < 8
        workers[0].kill()
        finish(process)
    finally:
        cluster.close()
    assert digests(tmp_path / "data") == expected


def test_a_killed_driver_and_a_lost_scheduler_continue_with_the_same_command(tmp_path, expected):
    (tmp_path / "first").mkdir()
    cluster = Cluster(tmp_path / "first", "tcp", {})
    try:
        cluster.add_worker()
        process = prepare(tmp_path / "data", "--scheduler", cluster.file)
        wait_until(
            lambda: list(tmp_path.glob("data/formatted/*/.records/*")) or process.poll() is not None
        )
        process.send_signal(signal.SIGKILL)
        process.communicate()
        process = prepare(tmp_path / "data", "--scheduler", cluster.file)
        wait_until(lambda: shards_of(tmp_path / "data") or process.poll() is not None)
    finally:
        cluster.close()
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2 and "the Dask scheduler" in errors.splitlines()[-1], errors
    finish(prepare(tmp_path / "data", "--num-workers", 2))
    assert digests(tmp_path / "data") == expected


def test_no_scheduler_is_one_line(tmp_path):
    process = prepare(tmp_path, "--scheduler", "tcp://127.0.0.1:1", environment=IMPATIENT)
    process.stdout, process.stderr = process.communicate(timeout=PATIENCE)
    assert_refused(process, "no connection to the Dask scheduler tcp://127.0.0.1:1")
