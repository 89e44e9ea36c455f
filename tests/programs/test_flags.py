"""The list of all flags is frozen: a new one is a decision, which has to show something."""

from conftest import ROOT
from program_flags import flags_of_programs

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
