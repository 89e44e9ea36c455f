"""Progress bars: on a terminal, as lines without one, and silent where the work logs its own
progress.
"""

import sys

import pytest

from bert_recipe.utils import progress
from bert_recipe.utils.progress import print_line, progress_bar


@pytest.mark.parametrize("enabled", [True, False])
def test_a_bar_is_shown_on_a_terminal_below_the_lines_of_standard_output(
    capsys, monkeypatch, enabled
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress_bar(3, "training", "step", lines=False, enabled=enabled) as bar:
        bar.update()
        print_line("step 1\tin \x1b[2J/folder\n\x9b")
    printed = capsys.readouterr()
    assert (
        printed.out == "step 1\tin \\x1b[2J/folder\n\\x9b\n"
    )  # a path cannot command the terminal
    assert ("training" in printed.err) is enabled


def test_without_a_terminal_there_are_lines_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_PER_LINE", 0)
    with progress_bar(4, "hashing", "file") as bar:
        for _ in range(4):
            bar.update()
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(
        line.startswith("hashing: ") and " of 4 " in line and "\r" not in line for line in lines
    )


def test_without_a_terminal_short_work_and_work_that_logs_itself_print_nothing(capsys):
    for options in ({}, {"lines": False}):
        with progress_bar(3, "training", "step", **options) as bar:
            bar.update(3)
    assert capsys.readouterr().err == ""
