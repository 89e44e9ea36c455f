"""Downloads the tasks of GLUE and SuperGLUE, as the benchmarks' sites distribute them.

Every file is pinned by its size and SHA-256 in pins.txt. The values are those that two public projects have recorded:
Hugging Face's datasets (dataset_infos.json of glue and super_glue), for all files, and TensorFlow Datasets
(url_checksums/glue.txt), for all but QQP and SuperGLUE. MRPC has no archive: GLUE divides Microsoft's training file by
a list of ids.
"""

import zipfile
from collections.abc import Sequence
from pathlib import Path

from data_preparation.sources.download import PINS
from tasks.glue_files import TASKS
from utils.files import write_atomically

SERVER = "https://dl.fbaipublicfiles.com"


def task_folder(task: str) -> Path:
    """The folder of a task, below download/."""
    benchmark = "superglue" if "superglue" in PINS[task][0].path.parts else "glue"
    return Path(benchmark, TASKS[task].name)


def fetch_glue(task: str, folder: Path, mirrors: Sequence[str] = (SERVER,)) -> None:
    """Downloads `task` and extracts its training, development and test files beside what was downloaded."""
    for file in PINS[task]:
        file.fetch(folder, mirrors)
    if task == "mrpc":
        return divide_mrpc(folder)
    here, files = Path(), TASKS[task]
    wanted = [files.train_file(here), *files.evaluation_files(here).values(), *files.test_files(here).values()]
    with zipfile.ZipFile(folder / PINS[task][0].path.name) as archive:
        for path in wanted:  # they are in a folder of the task's name
            write_atomically(folder / path, archive.read(f"{files.name}/{path}"))


def divide_mrpc(folder: Path) -> None:
    """train.tsv, dev.tsv and test.tsv as GLUE's own script makes them: the pairs of the list of ids are development
    data, and the test file has row numbers instead of labels."""
    training, test, ids = (
        (folder / file.path.name).read_text(encoding="utf-8").rstrip("\n").split("\n") for file in PINS["mrpc"]
    )
    dev_ids = {tuple(line.split()) for line in ids}
    header, *rows = [line.strip(" \t\r").split("\t") for line in training]
    is_dev = [tuple(row[1:3]) in dev_ids for row in rows]
    tables = {
        "train.tsv": [header, *(row for row, dev in zip(rows, is_dev, strict=True) if not dev)],
        "dev.tsv": [header, *(row for row, dev in zip(rows, is_dev, strict=True) if dev)],
        "test.tsv": [
            ["index", "#1 ID", "#2 ID", "#1 String", "#2 String"],
            *([str(number), *line.strip(" \t\r").split("\t")[1:]] for number, line in enumerate(test[1:])),
        ],
    }
    for name, table in tables.items():
        write_atomically(folder / name, "".join("\t".join(row) + "\n" for row in table))
