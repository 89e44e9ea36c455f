"""Where a run starts: a table of what the flags name and of what is in its folder of steps."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from bert_recipe.checkpoint import start
from bert_recipe.checkpoint.folder import (
    CONFIG_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    block_digests,
    manifest_of,
)
from bert_recipe.checkpoint.run_folder import RunFolder
from bert_recipe.checkpoint.start import StartKind, StartPoint, decide_start, find_starts
from bert_recipe.config import StartConfig
from bert_recipe.tokenization.files import TOKENIZER_CONFIG
from bert_recipe.utils.distributed import DistributedContext
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import write_json

STEPS = Path("run/phase1")  # the run's folder of steps
AUTO = {"last_step_of_checkpoint": "auto"}
OWN = {"from_checkpoint": STEPS}
OTHER = {"from_checkpoint": Path("other")}
RESUME = {"resume": True}
OVERWRITE = {"overwrite": True}
WEIGHTS = {"from_pretrained_params": Path("model")}
PHASE_1 = {"from_phase1_final_params": Path("other/9")}
REWARMUP = {**PHASE_1, "lr_rewarmup": True}


def write_folder(folder: Path) -> None:
    folder.mkdir(parents=True)
    files = [folder / name for name in (MODEL_FILE, CONFIG_FILE, TOKENIZER_CONFIG)]
    for file in files:
        file.write_bytes(b"content")
    sizes = {file.name: 7 for file in files}
    write_json(folder / MANIFEST_FILE, manifest_of(sizes, block_digests([(f, 0) for f in files])))


def start_of(flags: dict, benchmark: bool = False) -> StartPoint:
    """Where a run starts whose folder of steps is STEPS, which is unlocked again."""
    start, trainer = StartConfig(**flags), SimpleNamespace(benchmark=benchmark)
    settings = SimpleNamespace(start=start, trainer=trainer, prefix="model")
    with ExitStack() as locks:
        folder = RunFolder(STEPS.parent, STEPS.name, DistributedContext(), locks)
        return decide_start(find_starts(start)[""], folder, settings)


# Flags, the steps in the run's folder, and the start or the words of an error.
CASES = [
    ({}, (), StartKind.RANDOM, None),
    (WEIGHTS, (), StartKind.WEIGHTS, "model"),
    (PHASE_1, (), StartKind.WEIGHTS, "other/9"),
    ({"from_phase1_final_params": Path("other")}, (), StartKind.WEIGHTS, "other/9"),
    (REWARMUP, (), StartKind.NEXT_PHASE, "other/9"),
    (RESUME, (), StartKind.RANDOM, None),
    (RESUME | REWARMUP, (), StartKind.NEXT_PHASE, "other/9"),
    (RESUME | REWARMUP, (3, 12), StartKind.RESUMED, "run/phase1/12"),
    (RESUME | {"from_pretrained_params": Path("gone")}, (3,), StartKind.RESUMED, "run/phase1/3"),
    (OWN | AUTO, (), StartKind.RANDOM, None),
    (OWN | AUTO | WEIGHTS, (), StartKind.WEIGHTS, "model"),
    (OWN | AUTO | WEIGHTS, (3, 12), StartKind.RESUMED, "run/phase1/12"),
    (OTHER | AUTO, (), StartKind.RESUMED, "other/9"),
    ({"from_checkpoint": STEPS / "12"}, (3, 12), StartKind.RESUMED, "run/phase1/12"),
    ({"from_checkpoint": STEPS / "3"} | AUTO, (3,), StartKind.RESUMED, "run/phase1/3"),
    (OWN | {"last_step_of_checkpoint": "12"}, (3, 12), StartKind.RESUMED, "run/phase1/12"),
    (OVERWRITE, (3,), StartKind.RANDOM, None),
    (OVERWRITE | RESUME | WEIGHTS, (3,), StartKind.WEIGHTS, "model"),
    (OVERWRITE | OWN | AUTO, (3,), StartKind.RANDOM, None),
    (OVERWRITE | OTHER | AUTO, (3, 12), StartKind.RESUMED, "other/9"),
]
REFUSED = [
    (WEIGHTS, (3,), "already holds step 3: add --resume-from-checkpoint"),
    (OTHER | AUTO, (3,), "already holds step 3"),
    ({"from_checkpoint": STEPS / "3"}, (3, 12), "already holds step 12"),
    ({"from_checkpoint": STEPS / "best"}, (3, "best"), "already holds step 3"),
    ({"from_checkpoint": Path("empty")} | AUTO, (), "holds no checkpoint: check the path"),
    (OVERWRITE | {"from_checkpoint": STEPS / "3"}, (3, 12), "would remove run/phase1/3, which is"),
    (OVERWRITE | {"from_checkpoint": STEPS / "3"} | AUTO, (3, 12), "would remove run/phase1/3"),
    (RESUME | {"from_pretrained_params": Path("gone")}, (), "model folder gone does not exist"),
]


@pytest.fixture
def steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "read_progress", lambda *_: None)
    for path in ("model", "other/9"):
        write_folder(Path(path))
    Path("empty").mkdir()
    return lambda names: [write_folder(STEPS / str(name)) for name in names]


@pytest.mark.parametrize(("flags", "present", "kind", "folder"), CASES)
def test_a_run_starts_from(steps, flags, present, kind, folder):
    steps(present)
    point = start_of(flags)
    assert (point.kind, point.source and str(point.source)) == (kind, folder)


@pytest.mark.parametrize(("flags", "present", "words"), REFUSED)
def test_a_start_is_refused(steps, flags, present, words):
    steps(present)
    with pytest.raises(UserError, match=words):
        start_of(flags)


@pytest.mark.parametrize("flags", [{}, OTHER | AUTO])
def test_a_run_that_saves_nothing_starts_beside_newer_steps(steps, flags):
    steps((3,))
    kind = StartKind.WEIGHTS if flags else StartKind.RANDOM
    assert start_of(flags, benchmark=True).kind is kind


def test_a_damaged_newest_step_is_skipped_and_named(steps, capsys):
    steps((3, 12))
    (STEPS / "12" / MODEL_FILE).write_bytes(b"changed")
    assert str(start_of(RESUME).source) == "run/phase1/3"
    assert "warning: run/phase1/12/model.safetensors is damaged" in capsys.readouterr().out
