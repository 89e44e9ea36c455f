"""Tables of refusals: the command lines and files that a program refuses, and what its line says.

A row is (flags, says) or (flags, says, files):
- flags: words after those that the table's test gives: a string to split, or a tuple. A name in
  braces is a path: {folder} is the row's own, the others are given by the test.
- says: words of the line. What "..." stands for may be anything.
- files: of the row's own folder, by name: text, bytes, an object to write as JSON, or a function
  that makes the file at the path that it gets.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
from conftest import assert_refused, fine_tuning_words
from small_runs import RunInputs, files_of, run_here


class Refusal(NamedTuple):
    flags: str | tuple
    says: str
    files: Mapping[str, object] = MappingProxyType({})

    def check(
        self, main: Callable, command: Iterable[object], folder: Path, **places: object
    ) -> None:
        """The program `main` answers with one line and exit code 2, and writes nothing."""
        for name, content in self.files.items():
            make_file(folder / name, content)
        words = self.flags.split() if isinstance(self.flags, str) else self.flags
        words = [str(word).format(folder=folder, **places) for word in words]
        before = files_of(folder)
        result = run_here([*command, *words], main)
        assert_refused(result)
        says = self.says.format(folder=folder, **places)
        pattern = ".*".join(map(re.escape, says.split("...")))
        assert re.search(pattern, result.stderr), (says, result.stderr)
        assert files_of(folder) == before, "a file was written"


def make_file(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if callable(content):
        content(path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        text = content if isinstance(content, str) else json.dumps(content)
        path.write_text(text, encoding="utf-8")


def refusals(*rows: tuple):
    """Runs a test once for each row, as its argument `refusal`."""
    made = [Refusal(*row) for row in rows]
    return pytest.mark.parametrize("refusal", made, ids=[refusal.says for refusal in made])


def fine_tuning_command(inputs: RunInputs, output: Path, *flags: object) -> list[str]:
    """Of a fine-tuning program, without tasks and without a report, which is written early."""
    shared = ("--vocab-file", inputs.vocab_file, "--max-seq-length", 16, "--report-file", "None")
    return fine_tuning_words(inputs.config, output, *shared, *flags)
