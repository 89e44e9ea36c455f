"""Common flags, the machine, medians with quartiles, and result files."""

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bert_recipe.metrics.dllogger_backends import PREFIX
from bert_recipe.model.kernels.linear import float32_library
from bert_recipe.utils.command_line import ArgumentParser, Flag
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import read_json, write_json
from bert_recipe.utils.progress import print_line

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MODELS = ("tiny", "mini", "base", "large")
MODERN_MODELS = tuple(f"modernbert-{size}" for size in MODELS)
CPU = torch.device("cpu")
OUTPUT = Flag("--output", Path, None, "result file; by default in benchmarks/results")


def benchmark_parser(doc: str, *flags: Flag) -> ArgumentParser:
    parser = ArgumentParser(description=doc)
    parser.add_flags("flags", (OUTPUT, *flags))
    return parser


def config_file(model: str) -> Path:
    """That of one of MODELS or MODERN_MODELS."""
    name = model if model in MODERN_MODELS else f"bert-{model}-uncased"
    return ROOT / "bert_configs" / f"{name}.json"


def shortened(word: str) -> str:
    """A word of a command, such as /data/squad or --model=/data/bert, without absolute folders."""
    name, equals, path = word.rpartition("=")
    return f"{name}{equals}{Path(path).name}" if path.startswith("/") else word


def machine_info(device: torch.device) -> dict[str, Any]:
    """Date, commit, command, machine with its load of the last minute, and versions. Absolute paths
    in the command are shortened to their names, since result files are published.
    """
    return {
        "date": datetime.date.today().isoformat(),
        "commit": git_commit(),
        "command": " ".join(shortened(word) for word in [Path(sys.argv[0]).name, *sys.argv[1:]]),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "float32_linear": float32_library(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers") if find_spec(name)},
    }


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def git_commit() -> str:
    """The commit of the checkout, with -dirty if files differ from it; `unknown` outside a
    checkout.
    """
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """The median, and the first (`low`) and third quartile (`high`)."""
    if len(values) < 2:
        return {"median": values[0], "low": values[0], "high": values[0]}
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def paired_ratio(values: Sequence[float], baseline: Sequence[float]) -> dict[str, float]:
    """The median and quartiles of values / baseline, where the two of one round are a pair."""
    return quartiles([value / base for value, base in zip(values, baseline, strict=True)])


def format_quartiles(values: dict[str, float], spec: str = ".2f") -> str:
    """`values` as `median (low-high)`."""
    return f"{values['median']:{spec}} ({values['low']:{spec}}-{values['high']:{spec}})"


def write_result(
    path: Path | None, name: str, device: torch.device, result: dict[str, Any]
) -> None:
    """Writes one JSON file, with the machine's data; by default `name-date.json` in
    benchmarks/results.
    """
    result = {"machine_info": machine_info(device), **result}
    path = path or RESULTS / f"{name}-{result['machine_info']['date']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    print_line(f"written to {path}")


def read_records(report: Path) -> list[dict[str, Any]]:
    """The records of a program's --report-file."""
    return [
        json.loads(line.removeprefix(PREFIX))
        for line in report.read_text(encoding="utf-8").splitlines()
    ]


class Runs:
    """Runs in a JSON file that is written after each: after an interruption, rerun the same command
    to resume.

    settings: those of all runs; a file with other ones is refused.
    """

    def __init__(self, path: Path, settings: dict[str, Any], device: torch.device = CPU):
        self.path = path
        self.device = device
        settings = json.loads(json.dumps(settings))
        self.result = (
            read_json(path, "the result file")
            if path.is_file()
            else {"settings": settings, "runs": []}
        )
        if self.result["settings"] != settings:
            raise UserError(f"{path} holds results with other settings: give another --output")

    def matching(self, key: dict[str, Any]) -> list[dict[str, Any]]:
        """The runs with the values of `key`."""
        return [run for run in self.result["runs"] if key.items() <= run.items()]

    def get(self, key: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The run with the values of `key`, which is made by `measure` if the file lacks it."""
        if not self.matching(key):
            self.result["runs"].append(
                key | measure() | {"machine_info": machine_info(self.device)}
            )
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, self.result)
        return self.matching(key)[0]
