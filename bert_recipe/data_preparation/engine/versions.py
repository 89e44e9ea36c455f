"""The version of the program that prepares data, which its workers must have, too."""

import importlib.metadata
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import cache
from pathlib import Path
from typing import Any

from bert_recipe.utils.files import file_digest
from bert_recipe.utils.json_files import json_digest
from bert_recipe.utils.work_units import units as work_units
from bert_recipe.utils.work_units.units import Record, WorkUnit

PACKAGES = ("numpy", "h5py", "tokenizers", "nltk", "regex")


def run_units(
    folder: Path,
    units: Sequence[WorkUnit],
    executor: Executor,
    progress: Callable[[int], Any] = lambda _: None,
) -> list[Record]:
    """`work_units.run_units` by workers of this version."""
    return work_units.run_units(folder, units, executor, progress, code_version)


@cache
def code_version() -> str:
    """Identifies this program and the packages that decide its results."""
    root = Path(__file__).resolve().parents[2]
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".json"))
    digests = [[str(path.relative_to(root)), file_digest(path)] for path in files]
    return json_digest([*digests, package_versions()])


def package_versions() -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version()} | versions
