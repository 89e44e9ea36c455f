"""What the benchmarks share: the machine they ran on, medians with their spread, and result files."""

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MODELS = {name: f"bert-{name}-uncased" for name in ("tiny", "mini", "base", "large")}  # files of bert_configs/


def surroundings(device: torch.device) -> dict[str, Any]:
    """Date, commit, machine and versions: what a figure means nothing without."""
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return {
        "date": datetime.date.today().isoformat(),
        "commit": git_commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "device": machine,
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def git_commit() -> str:
    """The commit checked out, marked where files differ from it; unknown outside a checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def median_and_spread(values: list[float]) -> dict[str, float]:
    """The median, and the first and third quartile around it."""
    if len(values) < 2:
        return {"median": values[0], "low": values[0], "high": values[0]}
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def write_result(path: Path | None, name: str, result: dict[str, Any]) -> Path:
    """Writes one JSON file; by default in benchmarks/results, named by what was measured and when."""
    path = path or RESULTS / f"{name}-{result['surroundings']['date']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return path
