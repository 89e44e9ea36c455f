"""The flags with which a launch script calls the programs."""

import shlex
import subprocess
from pathlib import Path

from launch_scripts import Checkout, parsed, processes_of
from small_runs import choose_model_of

SAMPLES = (
    "hdf5_lower_case_1_seq_len_{}_masked_lm_prob_0.15_random_seed_12345_dupe_factor_5/wikicorpus_en"
)
NVIDIA_SHARDS = SAMPLES.format("128_max_pred_20"), SAMPLES.format("512_max_pred_80")
OUR_SHARDS = "hdf5/seq_128_pred_20/training", "hdf5/seq_512_pred_80/training"


def make_folders(tmp_path: Path) -> None:
    """Shards, models and data for the commands of the tests."""
    for folder in (
        "d1",
        "d2",
        "held-out",
        "post-ln",
        "sentences",
        "data/hdf5/seq_1024/training",
        "data/hdf5/seq_8192/training",
    ):
        (tmp_path / folder).mkdir(parents=True)
    for theirs, ours in zip(NVIDIA_SHARDS, OUR_SHARDS, strict=True):
        (tmp_path / "theirs" / theirs).mkdir(parents=True)
        (tmp_path / "ours" / ours).mkdir(parents=True)
    for model in ("post-ln", "sentences"):
        (tmp_path / model / "config.json").write_text('{"model_type": "bert"}')
        (tmp_path / model / "model.safetensors").touch()
    (tmp_path / "sentences/modules.json").touch()
    (tmp_path / "linked").symlink_to("sentences")
    prepared = tmp_path / "prepared/download/squad/v1.1"
    prepared.mkdir(parents=True)
    for name in ("train-v1.1.json", "dev-v1.1.json"):
        (prepared / name).touch()


def empty(count: int, *words: str) -> str:
    """`count` arguments that are left empty, and then `words`."""
    return " ".join(["''"] * count + list(words))


class Run:
    """One call of a program. An attribute is a flag, as the program's parser understands it, as
    text; also `model`, `theta` and `vocab` (of the model chosen), `processes`, and `tasks`.
    """

    def __init__(self, call: list[str], folder: Path):
        self.call = call
        self.folder = folder
        self.args = parsed(call)

    def __getattr__(self, name: str) -> str:
        if name == "processes":
            return str(processes_of(self.call))
        if name == "tasks":
            return "+".join(
                task for task in ("train", "eval", "predict") if getattr(self.args, f"do_{task}")
            )
        if name in ("model", "theta", "vocab"):
            choice = choose_model_of(self.args)
            value = {"model": choice.name, "vocab": choice.tokenizer.vocab_file}.get(name)
            return str(value or choice.config.global_rope_theta).removeprefix(f"{self.folder}/")
        return str(getattr(self.args, name)).removeprefix(f"{self.folder}/")


def assert_flags(checkout: Checkout, *expected: str) -> None:
    """Each call's flags, as `name=value` with spaces between; `!name` was not given."""
    runs = [Run(call, checkout.folder) for call in checkout.calls()]
    assert len(runs) == len(expected)
    for run, pairs in zip(runs, expected, strict=True):
        for pair in shlex.split(pairs):
            name, _, _value = pair.partition("=")
            if name.startswith("!"):
                assert not run.args.given(name[1:]), name
            else:
                assert f"{name}={getattr(run, name)}" == pair, pair


def start(checkout: Checkout, command: str, **settings: str) -> subprocess.CompletedProcess:
    result = checkout.run(f"bash scripts/{command}", **settings)
    assert result.returncode == 0, result.stderr
    return result
