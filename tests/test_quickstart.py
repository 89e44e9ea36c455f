"""scripts/quickstart.sh."""

import subprocess

import pytest
from conftest import ROOT


@pytest.mark.parametrize(
    ("argument", "code", "words"), [("--help", 0, "The whole recipe"), ("corpus", 2, "no arguments")]
)
def test_the_quickstart_does_nothing_where_it_is_given_an_argument(argument, code, words):
    command = ["bash", ROOT / "scripts" / "quickstart.sh", argument]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == code
    assert words in result.stdout + result.stderr
    assert "environment" not in result.stdout
