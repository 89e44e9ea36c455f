"""The presets, and the two examples with arguments by name."""

import pytest
from launch_scripts import Checkout, assert_refused, presets, pretraining_runs, processes_of, squad_run


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


# DeepSpeed's are for one phase each: see test_bing_bert_recipe.py.
PRETRAINING_PRESETS = [name for name in presets("pretrain_config.sh") if not name.startswith("deepspeed")]


@pytest.mark.parametrize("preset", PRETRAINING_PRESETS)
def test_a_pretraining_preset_fits_the_script_and_keeps_the_global_batch(checkout, preset):
    result = checkout.run(
        f"bash scripts/run_pretraining.sh $(source scripts/configs/pretrain_config.sh && {preset})", RESULTS_DIR="out"
    )
    assert result.returncode == 0, result.stderr
    phase1, phase2 = pretraining_runs(checkout)
    batches = [
        phase.batch_size * phase.gradient_merge_steps * processes_of(call)
        for phase, call in zip((phase1, phase2), checkout.calls(), strict=True)
    ]
    if "gpu" in preset:
        assert batches == [65_536, 32_768]
        assert (phase1.amp, phase1.tf32) == ("_amp" in preset, "_tf32" in preset)
        assert f"_{processes_of(checkout.calls()[0])}gpu_" in preset
    else:
        assert phase1.device == phase2.device == "cpu"


@pytest.mark.parametrize("preset", presets("squad_config.sh"))
def test_a_squad_preset_fits_the_script_and_takes_what_pretraining_ends_with(checkout, preset):
    results = "results" if "gpu" in preset else "quickstart/results"
    checkout.run(
        f"bash scripts/run_pretraining.sh $(source scripts/configs/pretrain_config.sh && {preset})",
        RESULTS_DIR=results,
    )
    checkout.calls_file.unlink()
    result = checkout.run(f"bash scripts/run_squad.sh $(source scripts/configs/squad_config.sh && {preset})")
    assert result.returncode == 0, result.stderr
    run = squad_run(checkout)
    assert run.do_train
    assert run.do_eval
    assert (run.amp, run.tf32) == ("_amp" in preset, "_tf32" in preset)
    assert (run.device == "cuda") == ("gpu" in preset)


@pytest.mark.parametrize(("script", "config"), [("run_pretraining", "pretrain_config"), ("run_squad", "squad_config")])
def test_an_unknown_preset_starts_nothing_and_lists_the_known_ones(checkout, script, config):
    result = checkout.run(f"bash scripts/{script}.sh $(source scripts/configs/{config}.sh && dgxz900_amp)")
    assert_refused(result, checkout, "dgxz900_amp", *presets(f"{config}.sh"))


def test_the_examples_by_name_are_the_eight_gpu_preset(checkout):
    checkout.run("bash scripts/run_pretraining.sh $(source scripts/configs/pretrain_config.sh && dgxa100-80g_8gpu_amp)")
    wanted = pretraining_runs(checkout)
    assert len(wanted) == 2
    checkout.calls_file.unlink()
    for phase in ("p1", "p2"):
        assert checkout.run(f"bash scripts/run_pretraining_{phase}.sh").returncode == 0
    same = [
        "batch_size",
        "gradient_merge_steps",
        "max_steps",
        "learning_rate",
        "warmup_proportion",
        "optimizer",
        "seed",
    ]
    same += ["max_seq_length", "max_predictions_per_seq", "amp", "amp_dtype", "phase2", "num_steps_per_checkpoint"]
    for by_name, by_position in zip(pretraining_runs(checkout), wanted, strict=True):
        assert {name: getattr(by_name, name) for name in same} == {name: getattr(by_position, name) for name in same}
    assert {processes_of(call) for call in checkout.calls()} == {8}
