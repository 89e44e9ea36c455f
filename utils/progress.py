"""How far long work is: a bar on a terminal, a line now and then where standard error goes to a file."""

import sys

from tqdm import tqdm

SECONDS_A_LINE = 30


class ProgressLines(tqdm):
    """A bar that writes a line each time in place of redrawing itself. There is never anything to clear."""

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        if msg is None:
            self.fp.write(f"{self}\n")
            self.fp.flush()
        return False

    def clear(self, nolock: bool = False) -> None:
        pass


def progress_bar(
    total: float | None,
    description: str,
    unit: str = "B",
    initial: int = 0,
    delay: float = 0,
    enabled: bool = True,
    lines: bool = True,
) -> tqdm:
    """`delay`: seconds before it shows, for work that is mostly short. `lines`: False for work that reports on itself
    where there is no terminal."""
    options = {"total": total or None, "desc": description, "unit": unit, "initial": initial, "leave": False}
    if unit == "B":
        options["unit_scale"] = True
    watched = sys.stderr.isatty()
    if not enabled or not (watched or lines):
        return tqdm(**options, disable=True)
    if watched:
        return tqdm(**options, delay=delay, dynamic_ncols=True)
    line = "{desc}: {n_fmt} of {total_fmt} [{elapsed}<{remaining}, {rate_fmt}]"
    return ProgressLines(**options, bar_format=line, mininterval=SECONDS_A_LINE, delay=SECONDS_A_LINE, miniters=1)
