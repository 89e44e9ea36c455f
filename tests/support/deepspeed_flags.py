"""DeepSpeed's JSON beside the flags of a program."""

import json
from pathlib import Path

import run_glue
import run_pretraining
import run_squad
from bert_recipe.utils.command_line import Arguments

PRETRAINING = (
    "--input-dir",
    "shards",
    "--output-dir",
    "results",
    "--max-steps",
    "10",
    "--device",
    "cpu",
)


def engine_flags(tmp_path: Path, config: dict) -> tuple[str, ...]:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    return ("--deepspeed", "--deepspeed_config", str(path))


def parse(tmp_path: Path, config: dict, *flags: str, program=run_pretraining) -> Arguments:
    common = {
        run_pretraining: PRETRAINING,
        run_squad: ("--do-train", "--train-file", "train.json", "--output-dir", "results"),
        run_glue: (
            "--do-train",
            "--task-name",
            "mrpc",
            "--data-dir",
            "data",
            "--output-dir",
            "results",
        ),
    }[program]
    return program.parse_arguments([*common, *engine_flags(tmp_path, config), *flags])
