"""The list of all flags is frozen: a new one is a decision, which has to show something."""

import argparse
import pickle

import pytest
from conftest import ROOT
from program_flags import flags_of_programs, parsers_of_programs

from bert_recipe.utils.command_line import ArgumentParser, Flag, positive_int

FROZEN = ROOT / "tests" / "programs" / "flags.txt"
WHAT_A_FLAG_SHOWS = """\
{changes}
A new flag shows, in the commit that adds it: who needs it (a user, or a recipe that is reproduced,
and why no flag of today does it); a test that fails without it; its line in docs/ or README.md; and
its upkeep (what it is refused with, and what else has to know of it). A flag that leaves takes its
tests and pages along, and has a line in CHANGELOG.md. Then:
    python3 tests/support/program_flags.py > tests/programs/flags.txt"""


def test_a_new_flag_shows_who_needs_it():
    frozen, flags = FROZEN.read_text(encoding="utf-8").splitlines(), flags_of_programs()
    changes = [f"new: {line}" for line in flags if line not in frozen]
    changes += [f"gone: {line}" for line in frozen if line not in flags]
    assert flags == frozen, WHAT_A_FLAG_SHOWS.format(changes="\n".join(changes))


def test_no_flag_and_no_path_takes_an_empty_value():
    """As of "$NAME" that is not set: it would be another column, folder or setting."""
    takers = []
    for program, parser in parsers_of_programs():
        for action in parser._actions:
            if action.nargs == 0 or isinstance(action, argparse._SubParsersAction):
                continue
            try:
                parser._get_values(action, [""])
            except argparse.ArgumentError:
                continue
            takers.append(f"{program} {'/'.join(action.option_strings) or action.dest}")
    # They take the place of a model's own prompts.
    assert takers == [f"run_embeddings.py --{name}-prompt" for name in ("query", "document")]


def test_arguments_can_be_sent_to_other_processes():
    """As benchmarks do; the frozen arguments know their flags."""
    parser = ArgumentParser()
    parser.add_flags("numbers", (Flag("--count", positive_int, 1, "how many"),))
    args = parser.parse_args(["--count", "3"])
    again = pickle.loads(pickle.dumps(args))  # noqa: S301
    assert again.count == 3 and again.given("count")
    assert again._flags["count"].kind == positive_int


@pytest.mark.parametrize("form", [["--use-it", ""], ["--use-it="]])
def test_a_switch_with_an_empty_value_is_not_switched_on(form, capsys):
    parser = ArgumentParser()
    parser.add_flags("switches", (Flag("--use-it", bool, False, "use it"),))
    with pytest.raises(SystemExit):
        parser.parse_args(form)
    assert "the value is empty: give one, or leave it out" in capsys.readouterr().err
