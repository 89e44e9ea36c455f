"""Prints the name of a model: that of its folder for results.

python3 scripts/model_name.py (--config-file FILE | --init-checkpoint FOLDER)
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from run_config import ModelSelection
from utils.errors import run_main


def main(flag: str, path: Path) -> None:
    if flag == "--config-file":
        print(ModelSelection(config_file=path).given_name)
        return
    from checkpoint.folder import find_model_folder  # here, because they import torch
    from checkpoint.model_choice import model_name

    print(model_name(ModelSelection(), find_model_folder(path, log=lambda _: None)))


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1], Path(sys.argv[2])))
