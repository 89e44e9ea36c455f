"""Pre-training of two updates on sample texts with a tokenizer of any kind."""

import json
from pathlib import Path

from small_runs import steps_folder, train
from tokenizer_kinds import TEXT

import create_pretraining_data


def write_books(folder: Path) -> Path:
    sentences = [line.strip() for line in TEXT if line.strip()]
    text = "\n".join(
        f"{line}\n" if place % 20 == 19 else line for place, line in enumerate(sentences)
    )
    (folder / "books.txt").write_text(text)
    return folder / "books.txt"


def pretrain(inputs, output: Path, tokenizer: Path, config: dict, *flags) -> tuple[Path, list[str]]:
    """A checkpoint of two updates from text, and its command. flags: of the shards."""
    shared = ("--vocab-file", tokenizer, "--max-seq-length", 32)
    made = (
        "--input-file",
        write_books(output),
        "--output-dir",
        output / "shards",
        "--num-workers",
        1,
        *shared,
        *flags,
    )
    create_pretraining_data.main([str(word) for word in made])
    (output / "config.json").write_text(json.dumps(config))
    shards = ("--input-dir", output / "shards", "--config-file", output / "config.json", *shared)
    command = inputs.command(output, *shards, "--max-predictions-per-seq", 5, "--max-steps", 2)
    train(command)
    return steps_folder(output) / "2", command
