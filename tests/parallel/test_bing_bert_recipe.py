"""DeepSpeed's bing_bert recipe: its presets, its variant of LAMB, its second phase, its script for
SQuAD.
"""

import pytest
from conftest import assert_refused, reported
from launch_scripts import parsed, processes_of
from safetensors.torch import load_file
from small_runs import losses, progress, resuming, run_here, steps_folder, train, weights

from bert_recipe.config.arguments import make_run_config


def by_deepspeed(k, total, peak, warmup, decay_steps, offset):
    """WarmupExpDecayExp with a decay rate of 0.9."""
    share = k / total
    return (
        peak
        * ((share / warmup) ** 2 if share < warmup else 0.9 ** ((k - warmup * total) / decay_steps))
        + offset
    )


def run_phase(checkout, phase, flags, preset):
    result = checkout.run(
        f"source scripts/configs/pretrain_config.sh; PHASE={phase} EXTRA_ARGS=${flags} bash "
        f"scripts/run_pretraining.sh $({preset})",
        RESULTS_DIR="out",
    )
    assert result.returncode == 0, result.stderr


def test_the_presets_have_the_batches_rates_and_bounds_that_deepspeed_publishes(checkout):
    run_phase(checkout, 1, "flags_bsz64k_seq128", "deepspeed_bsz64k_lamb_config_seq128")
    run_phase(checkout, 2, "flags_bsz32k_seq512", "deepspeed_bsz32k_lamb_config_seq512")
    phase1, phase2 = map(parsed, checkout.calls())
    gpus = [processes_of(call) for call in checkout.calls()]
    for phase, processes, batch, micro_batch in (
        (phase1, gpus[0], 65_536, 64),
        (phase2, gpus[1], 32_768, 8),
    ):
        assert phase.batch_size == micro_batch
        assert phase.batch_size * phase.gradient_merge_steps * processes == batch
        lamb = make_run_config(phase).optimizer
        assert (lamb.name, lamb.trust_bounds, lamb.adapt_undecayed) == ("Lamb", (0.01, 0.3), True)
        assert (lamb.bias_correction, lamb.eps, lamb.weight_decay) == (False, 1e-8, 0.01)
        assert (
            phase.pre_layer_norm
            and phase.amp
            and phase.amp_dtype == "float16"
            and phase.max_grad_norm == 1
        )
    assert str(phase2.from_phase1_final_params).endswith("phase1/6149") and phase2.lr_rewarmup

    for phase, updates, *published in (
        (phase1, 6149, 11e-3, 250, 1e-3),
        (phase2, 6759 - 6149, 2e-3, 150, 0.0),
    ):
        assert (phase.lr_decay, phase.lr_decay_rate) == ("warmup_exp_decay_exp", 0.9)
        assert [phase.learning_rate, phase.lr_decay_steps, phase.lr_offset] == published
        assert round(phase.warmup_proportion * updates) == 150


REWARM = (
    "--lr-decay",
    "warmup_exp_decay_exp",
    "--lr-decay-steps",
    2,
    "--lr-offset",
    1e-5,
    "--warmup-proportion",
    0.5,
)


def test_phase2_continues_phase1_with_its_optimizer_and_a_new_warmup_if_updates_remain(
    inputs, tmp_path
):
    phase1 = tmp_path / "phase1"
    train(inputs.command(phase1, "--max-steps", 3, "--log-freq", 1))
    first = (
        "--phase2",
        "--from-phase1-final-params",
        steps_folder(phase1),
        "--lr-rewarmup",
        *REWARM,
    )
    refused = run_here(inputs.command(tmp_path / "out", *first, "--max-steps", 3))
    assert_refused(refused, "--max-steps is 3", "update 3")

    def phase2(output, *extra):
        flags = (*first, "--max-steps", 7, "--log-freq", 1, "--learning-rate", 2e-3, *extra)
        return train(inputs.command(output, *flags, *resuming(output, "phase2")))

    begun = phase2(tmp_path / "whole").stdout
    assert "phase2 yet: starting at step 4\n" in begun
    rates = {
        step: entry["learning_rate"]
        for step, entry in reported(tmp_path / "whole" / "report.json").items()
    }
    expected = {k + 1: by_deepspeed(k - 3, 4, 2e-3, 0.5, 2, 1e-5) for k in range(3, 7)}
    assert {step: rates[step] for step in expected} == pytest.approx(expected, rel=1e-6)
    moments = load_file(
        steps_folder(tmp_path / "whole", "phase2") / "7" / "model_optimizer.safetensors"
    )
    assert {float(value) for name, value in moments.items() if name.endswith(".step")} == {7}
    state = progress(tmp_path / "whole", 7, "phase2")
    assert (state["schedule_start"], state["samples_consumed"]) == (3, 4 * 4)

    # The first update depends on phase 1's moments: without them it is another.
    phase2_fresh = (
        *(word for word in first if word != "--lr-rewarmup"),
        "--max-steps",
        4,
        "--log-freq",
        1,
    )
    train(inputs.command(tmp_path / "fresh", *phase2_fresh, "--learning-rate", 2e-3))
    assert losses(tmp_path / "fresh")[1] == pytest.approx(losses(tmp_path / "whole")[4], rel=1e-6)
    assert losses(tmp_path / "fresh")[2] != pytest.approx(losses(tmp_path / "whole")[5], rel=1e-6)

    phase2(tmp_path / "stopped", "--steps-this-run", 2)
    phase2(tmp_path / "stopped")
    whole, stopped = (weights(tmp_path / name, 7, "phase2") for name in ("whole", "stopped"))
    assert all(whole[name].equal(stopped[name]) for name in whole)


def test_the_squad_script_has_deepspeeds_positions_and_settings(checkout, tmp_path):
    (tmp_path / "model").mkdir()
    result = checkout.run(
        "bash scripts/run_squad_deepspeed.sh 4 model data/sample/squad out 5e-5 7 29511 0.2",
        FAKE_GPUS="4",
    )
    assert result.returncode == 0, result.stderr
    (call,) = checkout.calls()
    run = parsed(call)
    assert processes_of(call) == 4 and call[call.index("--master_port") + 1] == "29511"
    assert run.batch_size * run.gradient_merge_steps * 4 == 24
    assert (run.learning_rate, run.seed, run.dropout, run.epochs) == (5e-5, 7, 0.2, 2)
    assert (run.weight_decay, run.warmup_proportion, run.predict_batch_size) == (0, 0.1, 3)
    assert run.do_train and run.do_eval and run.fp16 and run.pre_layer_norm
    adam = make_run_config(run).optimizer  # LAMB with every trust ratio 1
    assert (adam.name, adam.trust_bounds, adam.bias_correction, adam.eps) == (
        "Lamb",
        (1, 1),
        False,
        1e-8,
    )
    checkout.calls_file.unlink()
    assert (
        checkout.run("bash scripts/run_squad_deepspeed.sh 0 model data/sample/squad out").returncode
        == 0
    )
    (run,) = map(parsed, checkout.calls())
    assert (run.device, run.amp, run.fp16) == ("cpu", False, False)
