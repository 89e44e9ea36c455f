"""Progress bars on a terminal; otherwise a line every 30 seconds."""

import sys

from tqdm import tqdm

from bert_recipe.utils.errors import drop_output, escape_controls, print_error
from bert_recipe.utils.rank_environment import read_environment

SECONDS_PER_LINE = 30


class ProgressLines(tqdm):
    """A progress bar that writes a new line each time instead of redrawing itself."""

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        if msg is None:
            print_error(str(self))
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
    """A progress bar on standard error.

    delay: seconds before it is shown, for work that is usually short.
    lines: without a terminal, write a line every 30 seconds; False for work that logs its own
        progress.
    """
    options = {
        "total": total or None,
        "desc": description,
        "unit": unit,
        "initial": initial,
        "leave": False,
    }
    if unit == "B":
        options["unit_scale"] = True
    is_terminal = sys.stderr.isatty()
    if not enabled or not (is_terminal or lines):
        return tqdm(**options, disable=True)
    if is_terminal:
        return tqdm(**options, delay=delay, dynamic_ncols=True)
    line = "{desc}: {n_fmt} of {total_fmt} [{elapsed}<{remaining}, {rate_fmt}]"
    return ProgressLines(
        **options, bar_format=line, mininterval=SECONDS_PER_LINE, delay=SECONDS_PER_LINE, miniters=1
    )


def print_line(text: str) -> None:
    """Prints a line on standard output, above any progress bar. Work goes on if it cannot be
    written.
    """
    with tqdm.external_write_mode(file=sys.stdout):
        try:
            sys.stdout.write(f"{escape_controls(text)}\n")
            sys.stdout.flush()  # before the bar is drawn again
        except OSError as error:
            drop_output(sys.stdout, error)


printed_once: set[str] = set()


def print_once(text: str) -> None:
    """`print_line`, in a distributed run on its first process only: for what all of them find. A
    line that was printed before, as where each fold reads the same file, is left out.
    """
    if read_environment().rank == 0 and text not in printed_once:
        printed_once.add(text)
        print_line(text)
