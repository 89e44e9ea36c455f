"""Training whose output nobody reads goes on, and the exit code tells."""

import subprocess
import sys

import pytest
from conftest import ROOT, pretraining_command, reported, write_shards
from processes import PATIENCE

from utils.errors import LOST_OUTPUT_CODE


@pytest.fixture(scope="module")
def command(tmp_path_factory, tiny_config):
    shards = write_shards(tmp_path_factory.mktemp("shards"))

    def make(output) -> list[str]:
        flags = ("--max-steps", 30, "--log-freq", 1, "--num-steps-per-checkpoint", 100)
        return [sys.executable, *map(str, pretraining_command(shards, tiny_config, output, *flags))]

    return make


def assert_complete(output) -> None:
    assert sorted(reported(output / "report.json")) == list(range(1, 31))
    assert (output / "custom" / "phase1" / "30" / "manifest.json").is_file()


def test_a_reader_of_the_output_that_ends_does_not_end_the_run(command, tmp_path):
    # So small a pipe does not hold all of the output: the program cannot end before the reader does.
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "pipesize": 4096}
    process = subprocess.Popen(command(tmp_path), cwd=ROOT, text=True, **pipes)
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(PATIENCE) == LOST_OUTPUT_CODE == 141
    assert "Traceback" not in errors
    assert errors.count("standard output cannot be written (Broken pipe): continuing without it") == 1
    assert_complete(tmp_path)


@pytest.mark.parametrize(
    ("redirection", "flags", "code"),
    [
        ("<&- >&- 2>&-", (), 0),
        (">/dev/full 2>/dev/full", (), LOST_OUTPUT_CODE),
        ("2>/dev/full", ("--input-dir", "/nowhere"), 2),
    ],
)
def test_output_that_is_closed_or_cannot_be_written_does_not_end_the_run(command, tmp_path, redirection, flags, code):
    words = ["bash", "-c", f'exec "$@" {redirection}', "bash", *command(tmp_path), *flags]
    assert subprocess.run(words, cwd=ROOT, timeout=PATIENCE, check=False).returncode == code
    if not flags:
        assert_complete(tmp_path)
