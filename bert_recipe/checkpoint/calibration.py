"""The temperature that calibrates a classifier, in a file of its model's folder."""

import math
from pathlib import Path

import numpy as np

from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import read_json, write_json

CALIBRATION_FILE = "calibration.json"


def read_temperature(folder: Path) -> float:
    """What logits are divided by; 1 without the file."""
    path = folder / CALIBRATION_FILE
    if not path.is_file():
        return 1.0
    temperature = read_json(path, "the calibration", {"temperature": float})["temperature"]
    if not 0 < temperature < math.inf:
        raise UserError(
            f"{path}: the temperature {temperature} is not positive: make it again with compare.py "
            f"--calibrate, or remove the file"
        )
    return float(temperature)


def calibrated(logits: np.ndarray, folder: Path) -> np.ndarray:
    """The logits of the model in `folder` as their probabilities are to be told. Predictions stay
    the same.
    """
    return logits / np.float32(read_temperature(folder))


def write_temperature(folder: Path, temperature: float, num_rows: int) -> None:
    """num_rows: on which it was fitted."""
    write_json(folder / CALIBRATION_FILE, {"temperature": temperature, "rows": num_rows})
