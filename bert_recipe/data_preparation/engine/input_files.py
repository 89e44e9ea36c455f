"""Input files: those that paths name or contain."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import is_hidden
from bert_recipe.utils.known_tools import DATA, refuse_known
from bert_recipe.utils.text_files import kind_of


def find_files(paths: Sequence[str], suffixes: Sequence[str]) -> list[str]:
    """The files of the formats `suffixes` that `paths` (files and folders) name or contain, in an
    order that depends only on their names.
    """
    files: list[str] = []
    for path in paths:
        names = list_files(Path(path).absolute())
        matching = [name for name in names if kind_of(name)[0] in suffixes]
        if not matching:
            refuse_known(Path(path), DATA)
            hidden = [name for name in names_of_hidden(Path(path)) if kind_of(name)[0] in suffixes]
            kind = f"{', '.join(suffixes)} file"
            if hidden:
                kind += f", but hidden ones, such as {hidden[0]}, which are not read"
            raise UserError(f"{path} contains no {kind}: check the path")
        files += matching
    counts = Counter(map(os.path.realpath, files))
    if len(counts) < len(files):
        [(repeated, _)] = counts.most_common(1)
        raise UserError(f"{repeated} is named twice, perhaps by a link: name each file once")
    return files


def left_out(paths: Sequence[str], suffixes: Sequence[str]) -> str | None:
    """How many files of which other formats `find_files` leaves out in folders, without those that
    are no text of a user; None if there are none.
    """
    endings: Counter[str] = Counter()
    for path in paths:
        if not Path(path).is_dir():
            continue
        for file in walk(Path(path)):
            is_about_others = file.name.startswith(("README", "LICENSE", "manifest.json"))
            if kind_of(file.name)[0] not in suffixes and not is_about_others:
                endings[file.suffix.lower() or "without an extension"] += 1
    if not endings:
        return None
    shown = ", ".join(f"{count} {ending}" for ending, count in endings.most_common(5))
    return f"files of other formats are left out: {shown}"


def list_files(path: Path) -> list[str]:
    if not path.exists():
        raise UserError(f"{path} does not exist: check the path, or run the download stage first")
    return [str(path)] if path.is_file() else [str(file) for file in sorted(walk(path))]


def names_of_hidden(path: Path) -> list[str]:
    """The names of hidden files in a folder."""
    return sorted(file.name for file in path.glob(".*") if file.is_file())


def walk(folder: Path, above: Sequence[str] = ()) -> Iterator[Path]:
    """The files in a folder and its folders, without hidden ones, such as the copies in
    `.ipynb_checkpoints`. Links are followed, except to a folder that contains them.
    """
    above = [*above, os.path.realpath(folder)]
    for path in folder.iterdir():
        if is_hidden(path):
            continue
        if path.is_file():
            yield path
        elif path.is_dir() and os.path.realpath(path) not in above:
            yield from walk(path, above)
