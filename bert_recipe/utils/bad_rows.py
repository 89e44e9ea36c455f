"""The bad rows of a file: one error names all kinds at once, or they are left out and listed."""

import re
from collections import defaultdict
from pathlib import Path

from bert_recipe.utils.errors import UserError, listed
from bert_recipe.utils.files import remove, write_atomically
from bert_recipe.utils.progress import print_once
from bert_recipe.utils.rank_environment import read_environment

MAX_KINDS, MAX_PLACES = 5, 3  # of a message
# What differs between two messages of one kind: quoted values, lists, objects, numbers.
VALUES = re.compile(r"'(\\.|[^'\\])*'|\"(\\.|[^\"\\])*\"|\{.*\}|\[.*\]|-?\d+(\.\d+)?")


class BadRows:
    """Collects the bad rows of the file `path` until `finish`.

    log: where `finish` lists them, if they are to be left out; by default they are an error.
    skip_flag: the flag that leaves them out, if there is one.
    """

    def __init__(self, path: str | Path, log: Path | None = None, skip_flag: str | None = None):
        self.path = str(path)
        self.log = log
        self.skip_flag = skip_flag
        self.rows: list[tuple[str, str]] = []  # place, and what is wrong

    def add(self, where: str, why: str) -> None:
        """Called with the place of bad input and what is wrong there. Raises UserError if the rest
        of the file cannot be read.
        """
        if where == self.path or where.startswith(f"{self.path}, after "):
            raise UserError(f"{where}: {why}")
        self.rows.append((where, why))

    def finish(self, num_kept: int | None = None) -> None:
        """Raises UserError with all kinds of bad rows, their numbers and first places, or lists
        them in `log`, in a distributed run on its first process.

        num_kept: number of good rows; of 0 no row can be left out.
        """
        if num_kept == 0:
            self.skip_flag = None
        if self.log is None or (num_kept == 0 and self.rows):
            if self.rows:
                raise UserError(self.message(all_rows=num_kept == 0))
        elif read_environment().rank == 0:
            self.write_log(self.log)

    def write_log(self, log: Path) -> None:
        """Replaces the lines of this file in the log, which those of other files share that have
        the same name.
        """
        lines = [f"{where}: {why}".replace("\n", " ") for where, why in self.rows]
        if lines:
            print_once(f"note: {self.path}: {len(lines)} bad rows are left out, see {log}")
        of_this_file = (f"{self.path}:", f"{self.path},")
        try:
            before = log.read_text("utf-8").splitlines()
        except FileNotFoundError:
            before = []
        lines = [line for line in before if not line.startswith(of_this_file)] + lines
        if not lines:
            remove(log)
            return
        log.parent.mkdir(parents=True, exist_ok=True)
        content = "".join(f"{line}\n" for line in lines)
        write_atomically(log, content.encode("utf-8", "backslashreplace"))

    def message(self, all_rows: bool = False) -> str:
        if len(self.rows) == 1:
            where, why = self.rows[0]
            return f"{where}: {why}{self.advice('it')}"
        kinds: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for where, why in self.rows:
            kinds[VALUES.sub("", why)].append((where, why))
        if all_rows and len({why for _, why in self.rows}) == 1:  # such as a missing column
            where, why = self.rows[0]
            return f"{where}: {why}; all {len(self.rows)} rows are so"
        parts = []
        for rows in list(kinds.values())[:MAX_KINDS]:
            where, why = rows[0]
            others = [self.place(place) for place, _ in rows[1:]]
            also = f" (also at {listed(others, MAX_PLACES - 1)})" if others else ""
            parts.append(f"{self.place(where)}: {why}{also}")
        if len(kinds) > MAX_KINDS:
            parts.append(f"{len(kinds) - MAX_KINDS} further kinds")
        return f"{self.path}: {len(self.rows)} bad rows: {'; '.join(parts)}{self.advice('them')}"

    def advice(self, what: str) -> str:
        return f"; or leave {what} out with {self.skip_flag}" if self.skip_flag else ""

    def place(self, where: str) -> str:
        """`where` without the file: `line 3` of `rows.csv:3`."""
        place = where.removeprefix(self.path)
        if re.fullmatch(r":\d+", place):
            return f"line {place[1:]}"
        return place.removeprefix(",").removeprefix(":").strip()
