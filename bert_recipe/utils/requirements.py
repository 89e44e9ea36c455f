"""Compares the installed packages with requirements files. scripts/setup_environment.sh runs this
file with any Python, so it imports the standard library only:

    python3 bert_recipe/utils/requirements.py FILE...

The exit code is 1 if a package is missing or too old.
"""

import re
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

TORCH = "torch>=2.11"


def problems(files: Iterable[Path]) -> list[str]:
    """PyTorch and the packages in `files` that are missing or too old, one string each."""
    lines = [TORCH]
    for file in files:
        lines += Path(file).read_text().splitlines()
    messages = []
    for line in lines:
        match = re.match(r"([\w-]+)[>=]=([\d.]+)", line)
        if match is None:
            continue
        name = match[1]
        needed = match[2].rstrip(".")
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            messages.append(f"{name} is not installed")
        else:
            if release(installed) < release(needed):
                messages.append(f"{name} is {installed}, and {needed} is needed")
    return messages


def release(version: str) -> list[int]:
    """The three numbers of a version such as 0.19.8+cu128."""
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


if __name__ == "__main__":
    sys.exit("; ".join(problems(map(Path, sys.argv[1:]))) or 0)
