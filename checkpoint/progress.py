"""The progress file of a checkpoint: what it must hold, key by key."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoint.folder import is_step, progress_file, read_progress
from utils.errors import UserError


def _is_count(value: Any, minimum: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= 2**53


def _is_number(value: Any, minimum: float) -> bool:
    """Whether `value` is a number from `minimum` up that fits float32."""
    return isinstance(value, int | float) and not isinstance(value, bool) and minimum <= value <= 3.4e38


PROGRESS_SCHEMA: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "step": ("a whole number from 1 up", lambda value: _is_count(value, 1)),
    "samples_consumed": ("a whole number from 0 up", _is_count),
    "schedule_start": ("a whole number from 0 up", _is_count),
    "phase": ("a text", lambda value: isinstance(value, str)),
    "train_seconds": ("a number from 0 up", lambda value: _is_number(value, 0)),
    "raw_train_seconds": ("a number from 0 up", lambda value: _is_number(value, 0)),
    "seed": ("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "num_samples": ("a whole number from 1 up", lambda value: _is_count(value, 1)),
    "optimizer": ("a text", lambda value: isinstance(value, str)),
    "optimizer_step": (
        "a list of whole numbers or nulls, one per parameter group",
        lambda value: isinstance(value, list) and all(step is None or _is_count(step) for step in value),
    ),
    "loss_scale": (
        "an object with value above 0 and clean_steps from 0 up",
        lambda value: (
            isinstance(value, dict)
            and _is_number(value.get("value"), 1e-30)
            and _is_number(value.get("clean_steps"), 0)
        ),
    ),
}


# Keys that checkpoints of earlier versions do not have, and what they mean there.
ADDED_KEYS = {"train_seconds": 0.0, "raw_train_seconds": 0.0, "schedule_start": 0}


def check_progress(folder: Path, prefix: str) -> dict[str, Any]:
    """The progress file of a checkpoint folder. Raises UserError, naming the key, if a value is missing or
    impossible."""
    progress, path = {**ADDED_KEYS, **read_progress(folder, prefix)}, folder / progress_file(prefix)
    advice = "use the checkpoint before it"
    for key, (description, is_possible) in PROGRESS_SCHEMA.items():
        if key not in progress:
            raise UserError(f"{path} has no {key}: {advice}")
        if not is_possible(progress[key]):
            raise UserError(f"{path}: {key} is {progress[key]!r}, expected {description}: {advice}")
    if is_step(folder.name) and progress["step"] != int(folder.name):
        raise UserError(f"{path}: step is {progress['step']}, and the folder is {folder.name}: {advice}")
    if progress["schedule_start"] > progress["step"]:
        raise UserError(f"{path}: schedule_start is {progress['schedule_start']}, above the step: {advice}")
    return progress
