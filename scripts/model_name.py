"""Prints the name of a model: that of its folder for results.

python3 scripts/model_name.py (--config-file FILE | --init-checkpoint FOLDER)
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bert_recipe.utils.errors import handle_uncaught_errors, run_main

if __name__ == "__main__":
    handle_uncaught_errors()  # also of the imports below

from bert_recipe.checkpoint.model_choice import model_name
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.config import ModelSelection
from bert_recipe.utils.command_line import ArgumentParser, Flag

FLAGS = (
    Flag("--config-file", Path, None, "config of the model"),
    Flag(
        "--init-checkpoint",
        Path,
        None,
        "model folder, or a folder of steps",
        excludes=("--config-file",),
    ),
)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_flags("flags", FLAGS)
    args = parser.parse_args()
    parser.check_flags(args)
    if args.config_file is None and args.init_checkpoint is None:
        parser.error("no model: give --config-file or --init-checkpoint")
    folder = None
    if args.init_checkpoint is not None:
        folder = ModelFolder.find(args.init_checkpoint, log=lambda _: None)
    print(model_name(ModelSelection(config_file=args.config_file), folder))


if __name__ == "__main__":
    run_main(main)
