"""The data sets that can be downloaded, and where they are: Wikipedia, SQuAD, GLUE and SuperGLUE.

pins.txt has the size and SHA-256 of each file of SQuAD and GLUE. Those of GLUE are the values that
two public projects have recorded: Hugging Face's datasets (dataset_infos.json of glue and
super_glue), for all files, and TensorFlow Datasets (url_checksums/glue.txt), for all but QQP and
SuperGLUE. MRPC has no archive: see `divide_mrpc`.
"""

import re
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from bert_recipe.data_preparation.sources.download import Checksum, fetch
from bert_recipe.tasks.classification.specs import TASKS
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import write_atomically

MIRRORS = {
    "wikicorpus": (
        "https://dumps.wikimedia.org",
        "https://dumps.wikimedia.your.org",
        "https://mirror.accum.se/mirror/wikimedia.org/dumps",
    ),
    "squad": (
        "https://rajpurkar.github.io/SQuAD-explorer/dataset",
        "https://raw.githubusercontent.com/rajpurkar/SQuAD-explorer/master/dataset",
    ),
    "glue": ("https://dl.fbaipublicfiles.com",),
}


class PinnedFile(NamedTuple):
    path: PurePosixPath  # on the server
    size: int
    sha256: str


def read_pins() -> dict[str, list[PinnedFile]]:
    """The files of each data set."""
    pins: dict[str, list[PinnedFile]] = {}
    for line in Path(__file__).with_name("pins.txt").read_text().splitlines()[1:]:
        name, size, sha256, path = line.split()
        pins.setdefault(name, []).append(PinnedFile(PurePosixPath(path), int(size), sha256))
    return pins


PINS = read_pins()


def fetch_pinned(name: str, folder: Path, mirrors: Sequence[str]) -> None:
    """Downloads the files of the data set `name` in pins.txt."""
    for file in PINS[name]:
        urls = [f"{mirror}/{file.path}" for mirror in mirrors]
        fetch(urls, folder / file.path.name, Checksum("sha256", file.sha256), file.size)


def fetch_squad(version: str, folder: Path, mirrors: Sequence[str]) -> None:
    """The training and development file of SQuAD `version` ("1.1" or "2.0")."""
    fetch_pinned(f"squad-{version}", folder, mirrors)


def fetch_wikipedia(language: str, date: str, folder: Path, mirrors: Sequence[str]) -> None:
    """The articles of the Wikipedia in `language` ("en", "simple", "zh-min-nan"), from the dump of
    `date` (YYYYMMDD).

    The published list of SHA-1 checksums names the dated file, so that `latest` cannot change in
    the middle. Once the list is in `folder`, later runs continue with the dump that it names.
    """
    wiki = language.replace("-", "_") + "wiki"
    sums = folder / f"{wiki}-{date}-sha1sums.txt"
    fetch([f"{mirror}/{wiki}/{date}/{sums.name}" for mirror in mirrors], sums)
    pattern = rf"([0-9a-f]{{40}})  ({wiki}-(\d{{8}})-pages-articles-multistream\.xml\.bz2)"
    match = re.search(pattern, sums.read_text(encoding="utf-8", errors="replace"))
    if not match:
        raise UserError(
            f"{sums} lists no {wiki}-*-pages-articles-multistream.xml.bz2: this dump is not "
            "finished: remove the list and choose an earlier one with --dump-date YYYYMMDD"
        )
    digest, name, run = match.groups()
    fetch(
        [f"{mirror}/{wiki}/{run}/{name}" for mirror in mirrors],
        folder / name,
        Checksum("sha1", digest),
    )


def glue_folder(task: str) -> Path:
    """The folder of a task, below download/."""
    benchmark = "superglue" if "superglue" in PINS[task][0].path.parts else "glue"
    return Path(benchmark, TASKS[task].name)


def fetch_glue(task: str, folder: Path, mirrors: Sequence[str]) -> None:
    """A task of GLUE or SuperGLUE: what is downloaded, and its training, development and test
    files.
    """
    fetch_pinned(task, folder, mirrors)
    if task == "mrpc":
        return divide_mrpc(folder)
    here = Path()
    files = TASKS[task]
    wanted = [
        files.train_file(here),
        *files.evaluation_files(here).values(),
        *files.test_files(here).values(),
    ]
    with zipfile.ZipFile(folder / PINS[task][0].path.name) as archive:
        for path in wanted:  # they are in a folder of the task's name
            write_atomically(folder / path, archive.read(f"{files.name}/{path}"))


def divide_mrpc(folder: Path) -> None:
    """train.tsv, dev.tsv and test.tsv as GLUE's own script makes them: the pairs of the list of ids
    are development data, and the test file has row numbers instead of labels.
    """
    training_lines, test_lines, id_lines = (
        (folder / file.path.name).read_text(encoding="utf-8").rstrip("\n").split("\n")
        for file in PINS["mrpc"]
    )
    dev_ids = {tuple(line.split()) for line in id_lines}  # of both sentences of a pair
    header, *rows = [line.strip(" \t\r").split("\t") for line in training_lines]
    training = [header]
    dev = [header]
    for row in rows:
        ids = tuple(row[1:3])
        if ids in dev_ids:
            dev.append(row)
        else:
            training.append(row)
    test = [["index", "#1 ID", "#2 ID", "#1 String", "#2 String"]]
    for number, line in enumerate(test_lines[1:]):
        _label, *others = line.strip(" \t\r").split("\t")
        test.append([str(number), *others])
    for name, table in (("train.tsv", training), ("dev.tsv", dev), ("test.tsv", test)):
        write_atomically(folder / name, "".join("\t".join(row) + "\n" for row in table))
