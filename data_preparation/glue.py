"""Downloads the tasks of GLUE and SuperGLUE, as the benchmarks' sites distribute them.

Every file is pinned by its size and SHA-256. The values are those that two public projects have recorded for these
addresses: Hugging Face's datasets (dataset_infos.json of glue and super_glue), for all files, and TensorFlow Datasets
(url_checksums/glue.txt), for all but QQP and SuperGLUE, with the same values.
"""

import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from data_preparation.download import Checksum, fetch
from tasks.glue_files import TASKS
from utils.files import write_atomically

SERVER = "https://dl.fbaipublicfiles.com"


class PinnedFile(NamedTuple):
    path: str  # on the server
    size: int
    sha256: str

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name


# Task, size, SHA-256, path. MRPC has no archive: GLUE divides Microsoft's training file by a list of ids.
PINS = """
cola 376971 f212fcd832b8f7b435fb991f101abf89f96b933ab400603bf198960dfc32cbff glue/data/CoLA.zip
sst-2 7439277 d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa glue/data/SST-2.zip
sts-b 802872 e60a6393de5a8b5b9bac5020a1554b54e3691f9d600b775bd131e613ac179c85 glue/data/STS-B.zip
qqp 41696084 40e7c862c04eb26ee04b67fd900e76c45c6ba8e6d8fab4f8f1f8072a1a3fbae0 glue/data/QQP-clean.zip
mnli 312783507 e7c1d896d26ed6caf700110645df426cc2d8ebf02a5ab743d5a5c68ac1c83633 glue/data/MNLI.zip
qnli 10627589 e634e78627a29adaecd4f955359b22bf5e70f2cbd93b493f2d624138a0c0e5f5 glue/data/QNLIv2.zip
rte 697150 6bf86de103ecd335f3441bd43574d23fef87ecc695977a63b82d5efb206556ee glue/data/RTE.zip
wnli 28999 ae0e8e4d16f4d46d4a0a566ec7ecceccfd3fbfaa4a7a4b4e02848c0f2561ac46 glue/data/WNLI.zip
boolq 4118001 853fbe7922f70c59629f06a39e8d9ca440c3d740e760fd3b87a5ddf3dcba2436 glue/superglue/data/v2/BoolQ.zip
cb 75482 8d641383298d54554066ba1c93f56ae7410af75df621b90c63028806bbbbb535 glue/superglue/data/v2/CB.zip
superglue-rte 750920 6310aab3f000424c9d0318a1ff20692e07c7f4aa15e8f17a5972ea0a35c398b9 glue/superglue/data/v2/RTE.zip
mrpc 1047044 60a9b09084528f0673eedee2b69cb941920f0b8cd0eeccefc464a98768457f89 senteval/senteval_data/msr_paraphrase_train.txt
mrpc 441275 a04e271090879aaba6423d65b94950c089298587d9c084bf9cd7439bd785f784 senteval/senteval_data/msr_paraphrase_test.txt
mrpc 6222 971d7767d81b997fd9060ade0ec23c4fc31cbb226a55d1bd4a1bac474eb81dc7 glue/data/mrpc_dev_ids.tsv
"""  # noqa: E501
FILES: dict[str, list[PinnedFile]] = {}
for _task, _size, _sha256, _path in map(str.split, PINS.strip().splitlines()):
    FILES.setdefault(_task, []).append(PinnedFile(_path, int(_size), _sha256))


def task_folder(task: str) -> Path:
    """The folder of a task, below download/."""
    benchmark = "superglue" if "superglue" in FILES[task][0].path else "glue"
    return Path(benchmark, TASKS[task].name)


def fetch_glue(task: str, folder: Path, mirrors: Sequence[str] = (SERVER,)) -> None:
    """Downloads `task` and extracts its training, development and test files beside what was downloaded."""
    for file in FILES[task]:
        urls = [f"{mirror}/{file.path}" for mirror in mirrors]
        fetch(urls, folder / file.name, Checksum("sha256", file.sha256), file.size)
    if task == "mrpc":
        return divide_mrpc(folder)
    here, files = Path(), TASKS[task]
    wanted = [files.train_file(here), *files.evaluation_files(here).values(), *files.test_files(here).values()]
    with zipfile.ZipFile(folder / FILES[task][0].name) as archive:
        for path in wanted:  # they are in a folder of the task's name
            write_atomically(folder / path, archive.read(f"{files.name}/{path}"))


def divide_mrpc(folder: Path) -> None:
    """train.tsv, dev.tsv and test.tsv as GLUE's own script makes them: the pairs of the list of ids are development
    data, and the test file has row numbers instead of labels."""
    training, test, ids = (
        (folder / file.name).read_text(encoding="utf-8").rstrip("\n").split("\n") for file in FILES["mrpc"]
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
