"""Converts a BERT checkpoint of another project to a Hugging Face model folder, which all programs here accept.

    python3 convert_checkpoint.py --from {nvidia-pytorch,nvidia-paddle,google-tf,huggingface} SOURCE FOLDER

Every tensor is converted or reported. Pickled code is never executed. The output folder is written atomically.
"""

from utils.errors import run_main  # first, because it handles errors of the other imports

# isort: split
import dataclasses
import glob
from collections.abc import Sequence
from pathlib import Path

from bert_config import HIDDEN_ACTS
from checkpoint_formats.conversion import READERS, convert_weights
from checkpoint_formats.model_folder import (
    CONFIG_FILES,
    VOCAB_FILES,
    find_beside,
    new_folder,
    output_config,
    read_config,
    write_vocabulary,
    write_weights,
)
from utils.command_line import ArgumentParser, Arguments
from utils.errors import UserError
from utils.files import write_json
from utils.progress import print_line


def parse_arguments(argv: Sequence[str] | None = None) -> Arguments:
    parser = ArgumentParser(prog="convert_checkpoint.py", description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="source_format", choices=READERS, required=True, help="format of SOURCE")
    parser.add_argument("source", metavar="SOURCE", type=Path, help="checkpoint file, its prefix, or its folder")
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, help="model folder to write; must not exist, or be empty"
    )
    parser.add_argument("--config-file", type=Path, help="BERT config; by default the one beside the checkpoint")
    parser.add_argument("--vocab-file", type=Path, help="vocabulary; by default the one beside the checkpoint")
    parser.add_argument(
        "--hidden-act",
        choices=HIDDEN_ACTS,
        help="activation function that the weights were trained with: gelu (erf), or a name of its tanh form; by "
        "default the config's. NVIDIA's PyTorch model uses gelu before 2022 and gelu_pytorch_tanh since: needed "
        "where its file does not show which",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    if not args.source.exists() and not list(args.source.parent.glob(f"{glob.escape(args.source.name)}.*")):
        raise UserError(f"{args.source} does not exist: check SOURCE")
    config_file = args.config_file or find_beside(args.source, CONFIG_FILES, "--config-file")
    vocab_file = args.vocab_file or find_beside(args.source, VOCAB_FILES, "--vocab-file")
    config, config_values = read_config(config_file)
    with new_folder(args.folder) as folder:
        is_lower_case = write_vocabulary(folder, vocab_file, config)
        print_line(f"config {config_file}, vocabulary {vocab_file} ({'lower-cased' if is_lower_case else 'cased'})")
        source = READERS[args.source_format](args.source, config)
        tensors, notes = convert_weights(source, config, config_values.get("id2label"))
        write_weights(folder, tensors)
        if (hidden_act := args.hidden_act or source.hidden_act) is not None:
            config = dataclasses.replace(config, hidden_act=hidden_act)
            print_line(f"hidden_act {hidden_act}")
        elif args.source_format == "nvidia-pytorch":
            raise UserError(
                f"{args.source} does not show which GELU it was trained with: give --hidden-act gelu_pytorch_tanh for "
                f"NVIDIA's code since 2022, or --hidden-act gelu for the code before"
            )
        write_json(folder / "config.json", output_config(config, config_values, tensors))
    for note in notes:
        print_line(note)
    print_line(f"wrote {len(tensors)} tensors to {args.folder}")


if __name__ == "__main__":
    run_main(main)
