"""Features of the launch scripts in turn: phases, documents and the commands of other recipes."""

import itertools
import json
import re
import shutil
import subprocess

import pytest
import torch
from launch_scripts import ROOT
from script_flags import Run, assert_flags, empty, make_folders, start

from bert_recipe.config.arguments import make_run_config
from bert_recipe.optimization.precision import has_bfloat16

LARGE = "bert-large-uncased"
VOCAB = "vocab/bert-base-uncased-vocab.txt"


@pytest.fixture
def checkout(checkout, tmp_path):
    make_folders(tmp_path)
    return checkout


def test_phase_2_waits_until_phase_1_has_made_its_last_step(checkout):
    for step in ("40", "9"):
        (checkout.folder / "results" / LARGE / "phase1" / step).mkdir(parents=True)
    command = "run_pretraining.sh 32 6e-3 fp32 0 .1 50"
    stopped = start(checkout, command, FAKE_STOPS_EARLY="1")
    assert "phase1 stopped at step 40 of 50: rerun the same command to resume" in stopped.stdout
    start(checkout, command)
    assert_flags(checkout, "phase1=True", "phase1=True", "phase2=True")


def test_early_stopping_ends_a_phase_that_no_other_starts_from(checkout):
    command = "run_pretraining.sh 32 6e-3 fp32 0 .1 50"
    settings = {
        "EXTRA_ARGS": "--eval-steps 5 --early_stopping 2",
        "EVAL_DIR_PHASE1": "d1",
        "FAKE_STOPS_EARLY": "1",
    }
    for script in (command, "run_modernbert.sh"):
        both = checkout.run(f"bash scripts/{script}", **settings)
        assert both.returncode == 2 and not checkout.calls()
        assert both.stderr.startswith("error: EXTRA_ARGS: --early-stopping may end phase 1 before")
    assert "stopped at step" not in start(checkout, command, PHASE="1", **settings).stdout
    assert_flags(checkout, "phase1=True early_stopping=2")


@pytest.mark.parametrize(("scores", "is_exhausted"), [([1, 2, 3], True), ([3, 2, 1], False)])
def test_early_stopping_in_a_part_of_a_run_is_no_stop(checkout, scores, is_exhausted):
    (checkout.folder / "bert_recipe").symlink_to(ROOT / "bert_recipe")
    evaluations = [{"step": 5 * n, "loss": score} for n, score in enumerate(scores, 1)]
    best = min(evaluations, key=lambda evaluation: evaluation["loss"])["step"]
    arguments = {"max_steps": 50, "early_stopping": 2}
    progress = {"phase": "phase1", "seed": 1, "num_samples": 9, "step": 15, "arguments": arguments}
    progress |= {"samples_consumed": 9, "schedule_start": 0, "optimizer": "", "loss_scale": {}}
    progress |= {"train_seconds": 1.0, "raw_train_seconds": 1.0, "data": None}
    progress |= {"evaluations": evaluations, "best_step": best}
    step = checkout.folder / "results" / LARGE / "phase1" / "15"
    step.mkdir(parents=True)
    (step / "model_progress.json").write_text(json.dumps(progress))
    flags = "--eval-steps 5 --early-stopping 2 --steps-this-run 20"
    settings = {"EXTRA_ARGS": flags, "EVAL_DIR_PHASE1": "d1", "FAKE_STOPS_EARLY": "1", "PHASE": "1"}
    result = start(checkout, "run_pretraining.sh 32 6e-3 fp32 0 .1 50", **settings)
    assert ("phase1 stopped at step 15 of 50" not in result.stdout) == is_exhausted


@pytest.mark.parametrize(
    ("command", "model", "train_steps"),
    [
        ("run_pretraining.sh 32 6e-3 fp32 0 .1 {} '' '' '' '' '' '' '' '' 80", LARGE, 6),
        ("run_modernbert.sh '' '' fp32 0 '' '' '' {} '' '' '' 80", "modernbert-base", 8),
    ],
)
def test_phase_1_is_not_trained_again_once_phase_2_has_begun(checkout, command, model, train_steps):
    """However many updates it is to have, and with and without the checkpoints of phase 1."""
    folder = checkout.folder / "results" / model
    for name in ("phase1/50", "phase2/40"):
        (folder / name).mkdir(parents=True)
    longer = checkout.run(f"bash scripts/{command.format(60)}")
    assert longer.returncode == 2 and not checkout.calls()
    assert longer.stderr.startswith(
        f"error: argument {train_steps} (train_steps) is 60, but phase 2 has begun from step 50 of "
        "phase 1: give 50 to go on with phase 2"
    )
    start(checkout, command.format(50))  # phase 1 finds that it is complete
    assert_flags(checkout, "phase1=True", "phase2=True")
    checkout.calls_file.unlink()
    (folder / "phase1/70").mkdir()  # with PHASE=1
    assert "going on with phase2 from step 50" in start(checkout, command.format(50)).stdout
    assert_flags(checkout, "phase2=True")
    checkout.calls_file.unlink()
    shutil.rmtree(folder / "phase1")
    assert "going on with phase2" in start(checkout, command.format(50)).stdout
    assert_flags(checkout, "phase2=True")


@pytest.mark.parametrize("model", ["post-ln", "sentences"])
def test_too_few_documents_to_hold_one_out_are_said_to_be_that(checkout, model):
    command = f"bash scripts/continue_pretraining.sh {model} d1 law {empty(7, '0')}"
    result = checkout.run(command, FAKE_FEW_DOCUMENTS="1")
    assert result.returncode == 2 and re.fullmatch(
        r"error: argument 2 \(corpus\): d1 has fewer than four documents, .*: give more texts.*\n",
        result.stderr,
    )
    assert all("prepare.py" in call[0] for call in checkout.calls())


BATCHES = {  # with the GPUs that are omitted: processes, then the global batches
    "run_pretraining.sh": [65536, 32768],
    "run_modernbert.sh": [1024, 128],
    "run_pretraining_p1.sh": [65536],
    "run_pretraining_p2.sh": [32768],
    "run_squad.sh init": [256],
    "run_glue.sh init": [128],
    "continue_pretraining.sh post-ln d1 law": [8],
    "continue_pretraining.sh sentences d1 law": [8],
}


@pytest.mark.parametrize(
    ("command", "gpus"),
    [*itertools.product(BATCHES, (0, 4)), ("run_pretraining.sh", 1), ("run_glue.sh init", 1)],
)
def test_omitted_gpus_are_those_that_are_there_with_the_same_global_batch(checkout, command, gpus):
    result = start(checkout, command, FAKE_GPUS=str(gpus))
    runs = [Run(call, checkout.folder) for call in checkout.calls() if "prepare.py" not in call[0]]
    processes = 1 if "sentences" in command else max(gpus, 1)
    assert [int(run.processes) for run in runs] == [processes] * len(runs)
    assert [make_run_config(run.args, processes).loader.global_batch_size for run in runs] == (
        BATCHES[command]
    )
    device = "cuda" if gpus else "cpu"
    assert {run.device for run in runs} == {device}
    assert re.search("was not given.*" + ("CPU" if device == "cpu" else "GPUs"), result.stdout)


@pytest.mark.parametrize("precision", ["amp", "fp32"])
@pytest.mark.parametrize("num_gpus", ["0 GPUs here", "0 GPUs asked for"])
@pytest.mark.parametrize(
    ("command", "place"),
    [("run_pretraining.sh", 4), ("run_glue.sh init", 7), ("run_glue.sh", None)],
)
def test_an_omitted_precision_is_the_faster_one_of_the_cpu(
    checkout, command, place, num_gpus, precision
):
    (checkout.folder / "bert-base-uncased").mkdir()
    here = "0"
    if num_gpus == "0 GPUs asked for" and place is not None:
        here = "8"
        command += " None" * (place - 1 - command.count(" init")) + " 0"
    start(checkout, command, FAKE_GPUS=here, FAKE_CPU_PRECISION=precision)
    runs = [Run(call, checkout.folder) for call in checkout.calls()]
    assert {run.args.amp for run in runs} == {precision == "amp"}


def test_the_scripts_ask_the_rule_of_the_programs_for_the_precision():
    words = ["bash", "-c", f". {ROOT}/scripts/common.sh; cpu_precision"]
    printed = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert printed == ("amp\n" if has_bfloat16(torch.device("cpu")) else "fp32\n")


def test_the_scripts_keep_the_users_pythonpath(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    code = "import sys; print(sys.path[1])"
    words = ["bash", "-c", f". {ROOT}/scripts/common.sh; checkout_python -c '{code}'"]
    printed = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert printed == "/theirs\n"


@pytest.mark.parametrize(
    "script", ["run_pretraining.sh '' '' ''", "run_squad.sh init '' '' '' '' ''"]
)
def test_a_given_number_of_gpus_is_never_reduced(checkout, script):
    result = checkout.run(f"bash scripts/{script} 8", FAKE_GPUS="4")
    assert result.returncode == 2 and "num_gpus is 8, but this machine has 4" in result.stderr


def test_the_printed_command_of_another_recipe_is_one_that_the_script_takes(checkout):
    """All 13 arguments of run_squad.sh in NVIDIA's PyTorch recipe, with its config."""
    squad = "data/download/squad/v1.1"
    config = "/workspace/bert/bert_configs/large.json -1.0"
    theirs = f"init 2.0 4 3e-5 fp16 8 1 {squad} {VOCAB} out 'train eval' {config}"
    refused = checkout.run(f"bash scripts/run_squad.sh {theirs}")
    assert refused.returncode == 2 and refused.stderr.startswith("error: argument 5 is 'fp16'")
    start(checkout, refused.stderr.partition("bash scripts/")[2])
    expected = f"config_file=bert_configs/{LARGE}.json max_steps=-1 warmup_proportion=0.1"
    assert_flags(checkout, f"{expected} processes=8 tasks=train+eval vocab={VOCAB}")


@pytest.mark.parametrize("script", ["run_pretraining.sh", "run_modernbert.sh"])
def test_a_benchmark_among_the_extra_flags_measures_both_phases(checkout, script):
    start(checkout, script, EXTRA_ARGS="--benchmark", FAKE_STOPS_EARLY="1")
    assert_flags(
        checkout,
        "phase1=True benchmark=True",
        "phase2=True benchmark=True from_phase1_final_params=None",
    )
