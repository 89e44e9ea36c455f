"""Tables that are written from the rows of another one: their names, and columns that are added."""

from collections.abc import Iterable
from pathlib import Path

from utils.errors import UserError
from utils.tables import TABLES, Row

OUTPUTS = (*TABLES, ".csv.gz", ".tsv.gz", ".jsonl.gz")


def check_output(
    target: Path, sources: Iterable[Path], extensions: tuple[str, ...] = OUTPUTS
) -> None:
    """Raises UserError if `target` cannot be written; makes its folder."""
    if not target.name.lower().endswith(extensions):
        raise UserError(f"{target}: unknown file extension: give one of {', '.join(extensions)}")
    if target.is_dir():
        raise UserError(f"{target} is a folder: give the name of a file")
    for source in sources:
        if target.exists() and source.exists() and target.samefile(source):
            raise UserError(
                f"--output {target} is the file to predict, which would be replaced: give another "
                f"name"
            )
    target.parent.mkdir(parents=True, exist_ok=True)


def add_columns(rows: list[Row], predicted: list[Row]) -> list[Row]:
    """`rows` with the columns of `predicted`, called `predicted NAME` where the rows have a column
    of that name.
    """
    taken = set().union(*rows)
    names = dict.fromkeys(name for row in predicted for name in row)
    for name in names:
        new = name
        while new in taken:
            new = f"predicted {new}"
        names[name] = new
        taken.add(new)
    return [
        row | {names[name]: value for name, value in added.items()}
        for row, added in zip(rows, predicted, strict=True)
    ]
