"""scripts/run_modernbert.sh: what its arguments and presets become; the costs in docs/modernbert.md."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from launch_scripts import Checkout, assert_refused, presets, pretraining_runs, processes_of
from small_runs import choose_model_of


@pytest.fixture
def checkout(tmp_path):
    checkout = Checkout(tmp_path)
    for kind in ("seq_1024", "seq_8192"):
        (tmp_path / "data" / "hdf5" / kind / "training").mkdir(parents=True)
    return checkout


def test_without_arguments_both_phases_of_the_base_model_run_on_eight_gpus(checkout):
    result = checkout.run("bash scripts/run_modernbert.sh")
    assert result.returncode == 0, result.stderr
    phase1, phase2 = pretraining_runs(checkout)
    assert [processes_of(call) for call in checkout.calls()] == [8, 8]
    assert (phase1.max_seq_length, phase1.max_predictions_per_seq, phase1.phase1) == (1024, 307, True)
    assert (phase2.max_seq_length, phase2.max_predictions_per_seq, phase2.phase2) == (8192, 2458, True)
    assert [choose_model_of(phase).config.global_rope_theta for phase in (phase1, phase2)] == [10_000, 160_000]
    assert [choose_model_of(phase).name for phase in (phase1, phase2)] == ["modernbert-base"] * 2
    assert phase2.from_phase1_final_params == checkout.folder / "results/modernbert-base/phase1/10000"
    for phase in (phase1, phase2):
        assert phase.masked_lm_prob == 0.3
        assert (phase.optimizer, phase.lr_decay, phase.amp, phase.beta2) == ("AdamW", "warmup_stable_decay", True, 0.98)


def test_each_position_reaches_the_flag_of_its_name(checkout):
    arguments = "bert_configs/modernbert-mini.json Muon fp32 0 3 4 .5 6 7 8 .25 9 10 11 d1 d2"
    for folder in ("d1", "d2"):
        (checkout.folder / folder).mkdir()
    result = checkout.run(f"bash scripts/run_modernbert.sh {arguments}", EXTRA_ARGS="--max-grad-norm 2")
    assert result.returncode == 0, result.stderr
    phase1, phase2 = pretraining_runs(checkout)
    for phase in (phase1, phase2):
        assert (phase.optimizer, phase.amp, phase.device, phase.max_grad_norm) == ("Muon", False, "cpu", 2)
        assert (phase.num_steps_per_checkpoint, phase.seed) == (10, 11)
    assert (phase1.batch_size, phase1.gradient_merge_steps, phase1.learning_rate, phase1.max_steps) == (3, 4, 0.5, 6)
    assert (phase2.batch_size, phase2.gradient_merge_steps, phase2.learning_rate, phase2.max_steps) == (7, 8, 0.25, 9)
    assert (phase1.input_dir, phase2.input_dir) == (Path("d1"), Path("d2"))


@pytest.mark.parametrize("preset", presets("modernbert_config.sh"))
def test_a_preset_fits_the_script_and_keeps_the_global_batch(checkout, preset):
    result = checkout.run(
        f"bash scripts/run_modernbert.sh $(source scripts/configs/modernbert_config.sh && {preset})", RESULTS_DIR="out"
    )
    assert result.returncode == 0, result.stderr
    phases = zip(pretraining_runs(checkout), checkout.calls(), strict=True)
    batches = [phase.batch_size * phase.gradient_merge_steps * processes_of(call) for phase, call in phases]
    assert batches == ([1024, 128] if "gpu" in preset else [4, 1])


def test_what_is_wrong_is_one_line_and_starts_nothing(checkout):
    script = "bash scripts/run_modernbert.sh"
    assert_refused(checkout.run(f"{script} nothing.json"), checkout, "config_file", "nothing.json")
    assert_refused(checkout.run(f"{script} '' Lamb"), checkout, "optimizer", "AdamW, Muon")
    missing = f"{script} $(source scripts/configs/modernbert_config.sh && x100)"
    assert_refused(checkout.run(missing), checkout, "x100", *presets("modernbert_config.sh"))


def test_the_costs_in_the_documentation_are_those_that_its_program_prints():
    page = (ROOT / "docs" / "modernbert.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    printed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() and printed.stdout in page
