"""run_pretraining.py: the same updates at any division of the work, what is learned, evaluated,
logged and measured.
"""

import contextlib
import json
import math
import os
import pty
import signal
import termios
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    assert_refused,
    log_entries,
    read_json,
    reported,
    sample_rows,
    write_shard,
    write_shards,
)
from huggingface_hub import ModelCard as HubCard
from processes import exit_codes, start, start_several, wait_until
from safetensors.torch import load_file
from small_runs import (
    evaluations,
    files_of,
    losses,
    resuming,
    run_here,
    steps_folder,
    steps_in,
    train,
    transformers_batch,
    weights,
)
from transformers import AutoModelForPreTraining, BertForMaskedLM

import run_pretraining
from bert_recipe.optimization import precision
from bert_recipe.training import evaluation, evaluation_callback, trainer


@pytest.mark.parametrize(
    ("kind", "rel", "atol"),
    # In 16 bits, gradients are rounded per micro-batch, and the micro-batches hold other sequences.
    [("--optimizer=AdamW", 1e-5, 2e-6), ("--use-pure-fp16", 2e-3, 5e-4)],
)
def test_one_process_and_two_make_the_same_updates(inputs, tmp_path, kind, rel, atol):
    """1 process with 4 micro-batches equals 2 with 2 each, without dropout. test_sharded_runs.py
    has this for LAMB.
    """
    flags = (
        "--max-steps",
        10,
        "--log-freq",
        1,
        kind,
        "--learning-rate",
        1e-3,
        "--eval-dir",
        inputs.held_out,
    )
    train(inputs.command(tmp_path / "one", *flags, "--gradient-merge-steps", 4, dropout=False))
    two = inputs.command(tmp_path / "two", *flags, "--gradient-merge-steps", 2, dropout=False)
    assert exit_codes(start_several(two, tmp_path / "log")) == [0, 0], (
        tmp_path / "log.0"
    ).read_text()

    one, two = (reported(tmp_path / name / "report.json") for name in ("one", "two"))
    assert len(one) == 10
    for step in one:
        for figure in ("loss", "mlm_loss", "nsp_loss", "grad_norm", "learning_rate"):
            assert two[step][figure] == pytest.approx(one[step][figure], rel=rel), (step, figure)
        assert two[step]["mlm_accuracy"] == one[step]["mlm_accuracy"]
    assert two[10]["eval_loss"] == pytest.approx(one[10]["eval_loss"], rel=rel)
    torch.testing.assert_close(
        weights(tmp_path / "two", 10), weights(tmp_path / "one", 10), rtol=1e-4, atol=atol
    )


@pytest.mark.parametrize("flag", ["--amp", "--use-pure-fp16"])
def test_bfloat16_is_close_to_float32_and_saves_float32_weights(inputs, tmp_path, flag):
    flags = ("--max-steps", 8, "--log-freq", 1, "--learning-rate", 1e-3)
    train(inputs.command(tmp_path / "fp32", *flags, dropout=False))
    train(inputs.command(tmp_path / "bf16", *flags, flag, dropout=False))
    assert losses(tmp_path / "bf16") == pytest.approx(losses(tmp_path / "fp32"), rel=5e-3)
    assert losses(tmp_path / "bf16") != losses(tmp_path / "fp32")
    assert {tensor.dtype for tensor in weights(tmp_path / "bf16", 8).values()} == {torch.float32}


def test_overflow_of_the_loss_scale_skips_the_step_and_halves_it(inputs, tmp_path, monkeypatch):
    # Slow on this processor, but correct.
    monkeypatch.setattr(precision, "has_float16", lambda device: True)
    flags = (
        "--amp",
        "--amp-dtype",
        "float16",
        "--use-dynamic-loss-scaling",
        "--scale-loss",
        2.0**24,
    )
    train(inputs.command(tmp_path, "--max-steps", 4, "--log-freq", 1, *flags))
    logged = reported(tmp_path / "report.json")
    assert logged[4]["loss_scale"] < 2.0**24
    assert math.log2(logged[4]["loss_scale"]).is_integer()
    assert logged[4]["learning_rate"] == pytest.approx(0.01 * (4 - 3) / 4), (
        "a skipped step does not advance the schedule"
    )
    consumed = read_json(steps_folder(tmp_path) / "4" / "model_progress.json")["samples_consumed"]
    assert consumed == 4 * (4 + math.log2(2.0**24 / logged[4]["loss_scale"]))


def test_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoints(
    inputs, tmp_path, monkeypatch
):
    """A learning rate that makes the weights infinite: they are not saved."""
    monkeypatch.setattr(trainer, "MAX_SKIPPED_STEPS", 4)
    flags = ("--num-steps-per-checkpoint", 100, "--warmup-ratio", 0)
    train(inputs.command(tmp_path, "--max-steps", 5, "--log-freq", 1, *flags))
    flags = (*flags, *resuming(tmp_path), "--learning-rate", 3e38)
    result = run_here(inputs.command(tmp_path, "--max-steps", 500, "--log-freq", 1, *flags))
    words = ("not finite", "4 steps in a row", "sample positions", "--learning-rate")
    assert_refused(result, *words, "checkpoints are in")
    assert steps_in(tmp_path)[0] == "5"
    for step in steps_in(tmp_path):
        tensors = load_file(steps_folder(tmp_path) / step / "model.safetensors")
        assert all(torch.isfinite(tensor).all() for tensor in tensors.values()), step


# That of DeepSpeed: test_bing_bert_recipe.py.
DECAYS = {  # of update k of 10, with 2 updates of warmup, at a learning rate of 0.01
    ("poly", "--lr-decay-power", "0.5", "--warmup-start-lr", "0.004"): (
        lambda k: 0.004 + 0.006 * k / 2 if k < 2 else 0.01 * math.sqrt((10 - k) / 8)
    ),
    ("exponential", "--lr-decay-rate", "0.5"): lambda k: (
        0.01 * (k / 2 if k < 2 else 0.5 ** (k - 2))
    ),
}


@pytest.mark.parametrize("decay", DECAYS, ids=" ".join)
def test_flags_of_a_decay_give_its_learning_rates(inputs, tmp_path, decay):
    flags = ("--max-steps", 10, "--log-freq", 1, "--warmup-proportion", 0.2, "--lr-decay", *decay)
    train(inputs.command(tmp_path, *flags))
    rates = {
        step: entry["learning_rate"] for step, entry in reported(tmp_path / "report.json").items()
    }
    assert rates == pytest.approx({k + 1: DECAYS[decay](k) for k in range(10)}, rel=1e-6)


def test_data_without_sentence_pairs_has_neither_a_pooler_nor_a_next_sentence_head_or_loss(
    inputs, tmp_path
):
    rows = sample_rows(32, 32, 5, seed=1)
    rows["next_sentence_labels"][:] = -1
    write_shard(tmp_path / "shards" / "a.hdf5", rows, {"next_sentence_prediction": False})
    result = train(inputs.command(tmp_path, "--max-steps", 10, "--input-dir", tmp_path / "shards"))
    _, entry = reported(tmp_path / "report.json").values()
    assert "nsp" not in result.stdout and not [name for name in entry if "nsp" in name]
    assert entry["loss"] == entry["mlm_loss"]
    saved = weights(tmp_path, 10)
    folder = steps_folder(tmp_path) / "10"
    assert not [name for name in saved if "pooler" in name or "seq_relationship" in name]
    assert read_json(folder / "config.json")["architectures"] == ["BertForMaskedLM"]
    loaded = BertForMaskedLM.from_pretrained(folder)
    assert torch.equal(loaded.cls.predictions.bias, saved["cls.predictions.bias"])


def test_a_pooler_that_only_fine_tuning_needs_is_kept(inputs, tmp_path):
    rows = sample_rows(32, 32, 5, seed=1)
    rows["next_sentence_labels"][:] = -1
    write_shard(tmp_path / "shards" / "a.hdf5", rows, {"next_sentence_prediction": False})
    train(inputs.command(tmp_path / "pairs", "--max-steps", 2))
    before = weights(tmp_path / "pairs", 2)
    flags = ("--max-steps", 4, "--input-dir", tmp_path / "shards", "--init-checkpoint")
    for count in (1, 3):  # also by the run that resumes
        more = ("--steps-this-run", count, *resuming(tmp_path))
        train(inputs.command(tmp_path, *flags, steps_folder(tmp_path / "pairs"), *more))
    after = weights(tmp_path, 4)
    pooler = [name for name in before if "pooler" in name]
    assert len(pooler) == 2 and not any("seq_relationship" in name for name in after)
    assert all(torch.equal(before[name], after[name]) for name in pooler)


def test_evaluation_matches_transformers_on_the_held_out_samples(inputs, tmp_path):
    flags = (
        "--max-steps",
        9,
        "--num-steps-per-checkpoint",
        3,
        "--eval-dir",
        inputs.held_out,
        "--eval-steps",
        3,
    )
    train(inputs.command(tmp_path, *flags))
    evaluated = {
        step: entry
        for step, entry in reported(tmp_path / "report.json").items()
        if "eval_loss" in entry
    }
    assert list(evaluated) == [3, 6, 9]
    with h5py.File(inputs.held_out / "shard_000.hdf5") as file:
        batch = transformers_batch({key: file[key][:] for key in file})
    labels, is_next = batch.pop("labels"), batch.pop("next_sentence_label")
    for step, entry in evaluated.items():
        model = AutoModelForPreTraining.from_pretrained(steps_folder(tmp_path) / str(step)).eval()
        with torch.no_grad():
            output = model(**batch)
        logits = output.prediction_logits
        mlm_loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
        nsp_loss = F.cross_entropy(output.seq_relationship_logits, is_next).item()
        correct = (logits.argmax(-1) == labels)[labels != -100].double().mean().item()
        nsp_correct = output.seq_relationship_logits.argmax(-1) == is_next
        assert entry["eval_mlm_loss"] == pytest.approx(mlm_loss, rel=1e-5)
        assert entry["eval_nsp_loss"] == pytest.approx(nsp_loss, rel=1e-5)
        assert entry["eval_loss"] == pytest.approx(mlm_loss + nsp_loss, rel=1e-5)
        assert entry["eval_mlm_accuracy"] == pytest.approx(correct)
        assert entry["eval_nsp_accuracy"] == pytest.approx(nsp_correct.double().mean().item())
    logged = reported(tmp_path / "report.json")
    card = HubCard.load(steps_folder(tmp_path) / "9" / "README.md")
    shown = {result.metric_type: result.metric_value for result in card.data.eval_results}
    expected = {name: evaluated[9][f"eval_{name}"] for name in shown}
    assert "mlm_loss" in shown and shown == pytest.approx(expected, abs=1e-6)
    assert f"| training loss | {logged[9]['loss']:.4g} |" in card.text
    best = HubCard.load(steps_folder(tmp_path) / "best" / "README.md")
    lowest = min(entry["eval_loss"] for entry in evaluated.values())
    assert best.data.eval_results[0].metric_value == pytest.approx(lowest, abs=1e-6)


def test_evaluations_can_be_on_some_of_the_held_out_samples(inputs, tmp_path):
    """At equal distances, since neighbours are of one document."""
    flags = ("--eval-dir", inputs.held_out, "--max-eval-samples", 3)
    result = train(inputs.command(tmp_path, "--max-steps", 1, *flags))
    with h5py.File(inputs.held_out / "shard_000.hdf5") as file:
        size = len(file["input_ids"])
        rows = [0, size // 3, 2 * size // 3]
        batch = transformers_batch({key: file[key][:][rows] for key in file})
    assert f"3 of the {size} held-out samples" in result.stdout
    model = AutoModelForPreTraining.from_pretrained(steps_folder(tmp_path) / "1").eval()
    with torch.no_grad():
        loss = model(**batch).loss.item()
    logged = reported(tmp_path / "report.json")
    assert logged[1]["eval_loss"] == pytest.approx(loss, rel=1e-5)


def test_a_kill_during_an_evaluation_loses_neither_the_step_nor_the_score(
    inputs, tmp_path, monkeypatch
):
    def interrupted(*_, **__):
        wait_until(lambda: "2" in steps_in(tmp_path))
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation_callback, "evaluate", interrupted)
    command = inputs.command(tmp_path, "--max-steps", 2, "--eval-dir", inputs.held_out)
    with pytest.raises(KeyboardInterrupt):
        run_pretraining.main(command)
    assert "2" in steps_in(tmp_path)
    monkeypatch.undo()
    train([*command, *resuming(tmp_path)])
    assert "eval_loss" in reported(tmp_path / "report.json")[2]


def test_a_signal_ends_an_evaluation_at_once_and_the_run_that_resumes_makes_it(
    inputs, tmp_path, monkeypatch
):
    """The first evaluation compiles on a GPU, for longer than schedulers wait; also that which a
    run makes because the one before it was stopped.
    """
    held_out = ("--eval-dir", inputs.held_out, "--eval-steps", 2, "--log-freq", 1)
    command = inputs.command(tmp_path / "run", "--max-steps", 4, *held_out)

    ended = []

    def interrupted(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        ended.append("evaluation")

    with monkeypatch.context() as patched:
        patched.setattr(evaluation, "batches_in_order", interrupted)
        for words in ((), resuming(tmp_path / "run")):
            result = train([*command, *words])
            assert not ended
            assert "step 2 of 4, stopped by SIGTERM" in result.stdout
    assert steps_in(tmp_path / "run") == ["2"] and len(losses(tmp_path / "run")) == 2
    train([*command, *resuming(tmp_path / "run")])
    train(inputs.command(tmp_path / "whole", "--max-steps", 4, *held_out))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    logged = [reported(tmp_path / name / "report.json") for name in ("run", "whole")]
    resumed, expected = ([steps[step]["eval_loss"] for step in (2, 4)] for steps in logged)
    assert resumed == expected


def test_the_checkpoint_with_the_lowest_held_out_loss_is_kept_and_stops_the_run(inputs, tmp_path):
    """The learning rate makes the loss rise after the first evaluations."""
    folder = steps_folder(tmp_path)
    held_out = ("--eval-dir", inputs.held_out, "--eval-steps", 2)
    flags = (*held_out, "--early-stopping", 2, "--learning-rate", 0.5, "--warmup-proportion", 0)
    command = inputs.command(tmp_path, "--max-steps", 40, "--optimizer", "AdamW", *flags)
    train([*command, "--steps-this-run", "3"])
    stopped = train([*command, *map(str, resuming(tmp_path))])
    loss_of_step = {entry["step"]: entry["loss"] for entry in evaluations(folder)}
    best = min(loss_of_step, key=loss_of_step.get)
    assert list(loss_of_step) == [2, 4, *range(6, best + 5, 2)] and best + 4 < 40
    assert f"best: loss {loss_of_step[best]:.6g} at step {best}" in stopped.stdout
    logged = reported(tmp_path / "report.json")
    assert loss_of_step == {step: logged[step]["eval_loss"] for step in loss_of_step}
    kept = load_file(folder / "best" / "model.safetensors")
    alone = inputs.command(
        tmp_path / "alone", "--max-steps", 40, "--optimizer", "AdamW", *flags[6:]
    )
    train([*alone, "--steps-this-run", str(best)])
    torch.testing.assert_close(kept, weights(tmp_path / "alone", best), rtol=0, atol=0)
    assert f"step {best + 4} of 40" in train([*command, *map(str, resuming(tmp_path))]).stdout
    phase_2 = ("--phase2", "--from-phase1-final-params", folder)
    after = train(inputs.command(tmp_path / "after", "--max-steps", 1, *phase_2))
    assert f"using {best + 4}, the newest" in after.stdout, "phase 1 was stopped early"
    other = write_shards(tmp_path / "other", sizes=(20,), seed=8)
    result = run_here([*command, *resuming(tmp_path), "--eval-dir", other])
    assert_refused(result, "other development data")


def test_the_length_of_sequences_is_that_of_the_shards(inputs, tmp_path):
    command = inputs.command(tmp_path, "--max-steps", 1, "--eval-dir", inputs.held_out)
    place = command.index("--max-seq-length")
    train(command[:place] + command[place + 2 :])
    settings, *_ = log_entries(tmp_path / "report.json")
    assert settings["data"]["max_seq_length"] == 32


def test_report_has_the_settings_the_logged_steps_and_the_checkpoint(inputs, tmp_path):
    result = train(inputs.command(tmp_path, "--max-steps", 20, "--log-freq", 5))
    lines = (tmp_path / "report.json").read_text().splitlines()
    assert all(line.startswith("DLLL {") for line in lines)
    entries = [json.loads(line.removeprefix("DLLL ")) for line in lines]
    # 64 samples, 4 in an update: the second epoch begins with the 17th.
    assert [entry["step"] for entry in entries] == [
        *["PARAMETER"] * 2,
        [0, 1],
        [0, 5],
        [0, 10],
        [0, 15],
        [1, 20],
        [],
    ]
    assert entries[0]["data"]["max_steps"] == 20 and entries[0]["data"]["SEED"] == 42
    assert entries[0]["data"]["batch_size_per_gpu"] == 4
    assert entries[1]["data"] == {"train_start": True}
    last = entries[-1]["data"]
    assert (last["step"], last["checkpoint"]) == (20, str(steps_folder(tmp_path) / "20"))
    assert last["final_loss"] == entries[6]["data"]["loss"]
    assert 0 < last["raw_train_time"] <= last["e2e_train_time"]
    assert last["training_sequences_per_second"] == pytest.approx(80 / last["raw_train_time"])
    named = "loss mlm_loss mlm_accuracy nsp_loss nsp_accuracy learning_rate grad_norm"
    speeds = "step_seconds sequences_per_second tokens_per_second model_tflops data_wait"
    nvidia = "step_cost step_samples seqs_per_sec"
    assert set(entries[2]["data"]) == {*named.split(), *speeds.split(), *nvidia.split()}
    assert entries[2]["data"]["step_samples"] == 4
    assert (
        len([line for line in result.stdout.splitlines() if line.startswith("phase1  step ")]) == 5
    )
    assert not result.stderr, "no progress bar without a terminal"


def test_terminal_shows_a_progress_bar_and_lines_above_it(inputs, tmp_path):
    reader, writer = pty.openpty()
    termios.tcsetwinsize(writer, (40, 120))
    command = inputs.command(tmp_path, "--max-steps", 20, "--log-freq", 10, "--show-config", "true")
    process = start(command, Path(os.ttyname(writer)))
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(read_to_the_end, reader)
        try:
            assert exit_codes([process]) == [0]
        finally:
            os.close(writer)
    os.close(reader)
    lines = reading.result().decode().replace("\r\n", "\n").split("\n")
    assert "pre-training on 1 x cpu" in lines[0]
    assert any(line.split() == ["--max-steps", "20"] for line in lines)
    assert any("\rphase1:" in line and "20/20" in line for line in lines)
    assert any("\rphase1  step 10/20  loss " in line for line in lines)


def read_to_the_end(descriptor: int) -> bytes:
    content = b""
    with contextlib.suppress(OSError):  # when the other end is closed
        while chunk := os.read(descriptor, 65536):
            content += chunk
    return content


def test_benchmark_reports_figures_and_saves_nothing(inputs, tmp_path):
    flags = ("--max-steps", 3, "--benchmark", "--benchmark-steps", 6, "--benchmark-warmup-steps", 4)
    result = train(inputs.command(tmp_path, *flags))
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    last = json.loads((tmp_path / "report.json").read_text().splitlines()[-1].removeprefix("DLLL "))
    assert last["step"] == []
    speed = {"step_seconds", "sequences_per_second", "tokens_per_second", "model_tflops"}
    parts = {"data_wait", "forward_ms", "backward_ms", "optimizer_ms"}
    nvidias = {"training_sequences_per_second", "e2e_train_time", "raw_train_time", "final_loss"}
    assert set(last["data"]) == {*speed, *parts, *nvidias, "peak_memory_gib"}
    assert last["data"]["training_sequences_per_second"] == last["data"]["sequences_per_second"]
    assert (
        0 < last["data"]["raw_train_time"] <= last["data"]["e2e_train_time"]
        and last["data"]["final_loss"] > 0
    )
    in_parts = sum(last["data"][part] for part in parts if part.endswith("_ms")) / 1000
    assert 0 < in_parts < 20 * last["data"]["step_seconds"]
    assert last["data"]["sequences_per_second"] == pytest.approx(4 / last["data"]["step_seconds"])
    assert "benchmark of 6 steps: " in result.stdout
    assert "step 10/10 " in result.stdout and "/3 " not in result.stdout


def test_a_benchmark_in_the_folder_of_a_run_resumes_and_changes_nothing(inputs, tmp_path):
    run = ("--max-steps", 3, "--report-file", "None")
    train(inputs.command(tmp_path, *run))
    before = files_of(tmp_path)
    speed = ("--benchmark", "--benchmark-steps", 2, "--benchmark-warmup-steps", 1)
    folder = ("--from-checkpoint", tmp_path / "custom/phase1")
    for where in (("--resume-from-checkpoint",), (*folder, "--last-step-of-checkpoint", "auto")):
        result = train(inputs.command(tmp_path, *run, *speed, *where))
        assert "step 1/3 " in result.stdout and "benchmark of 2 steps: " in result.stdout
        assert files_of(tmp_path) == before


def test_steps_this_run_stops_early_and_saves(inputs, tmp_path):
    result = train(inputs.command(tmp_path, "--max-steps", 20, "--steps-this-run", 7, "--phase2"))
    assert steps_in(tmp_path, "phase2") == ["7"]
    assert "phase2: step 7 of 20" in result.stdout
    assert (
        "warning: phase 2 starts from random weights: give --from-phase1-final-params"
        in result.stdout
    )


def test_flags_of_the_optimizer_change_the_weights(inputs, tmp_path):
    """Each gives other weights from the same start and data."""
    trained = {}
    for name, flags in {
        "plain": (),
        "decay": ("--weight-decay", 1.0),
        "clip": ("--max-grad-norm", 0.1),
        "beta1": ("--beta1", 0.5),
        "beta2": ("--beta2", 0.9),
        "epsilon": ("--epsilon", 0.1),
    }.items():
        train(inputs.command(tmp_path / name, "--max-steps", 4, *flags))
        trained[name] = weights(tmp_path / name, 4)["bert.encoder.layer.0.output.dense.weight"]
    for name in trained.keys() - {"plain"}:
        assert not torch.equal(trained[name], trained["plain"]), name


def test_several_seeds_are_runs_of_their_own_through_both_phases(inputs, tmp_path):
    flags = (
        "--max-steps",
        2,
        "--seed",
        7,
        "--num-seeds",
        2,
        "--resume-from-checkpoint",
        "--eval-dir",
        inputs.held_out,
    )
    first = train(inputs.command(tmp_path, *flags)).stdout
    train(
        inputs.command(
            tmp_path, *flags, "--phase2", "--from-phase1-final-params", steps_folder(tmp_path) / "2"
        )
    )
    one = tmp_path / "one"
    train(inputs.command(one, "--max-steps", 2, "--seed", 8))
    own = load_file(steps_folder(tmp_path) / "seed-8" / "2" / "model.safetensors")
    assert all(torch.equal(own[name], tensor) for name, tensor in weights(one, 2).items())
    progress_file = steps_folder(tmp_path, "phase2") / "seed-8" / "2" / "model_progress.json"
    assert "phase1/2" in read_json(progress_file)["arguments"]["from_phase1_final_params"]
    results = [
        read_json(steps_folder(tmp_path) / f"seed-{seed}" / "scores.json") for seed in (7, 8)
    ]
    mean = sum(result["loss"] for result in results) / 2
    summary = f"phase1, seeds 7 to 8: loss_mean {mean:.6g}  loss_std"
    assert summary in first and summary in train(inputs.command(tmp_path, *flags)).stdout
    other = write_shards(tmp_path / "other", sizes=(20,), seed=8)
    assert_refused(
        run_here(inputs.command(tmp_path, *flags, "--eval-dir", other)), "the digest of --eval-dir"
    )
    assert_refused(
        run_here(inputs.command(tmp_path, *flags[:-2])), "results of other held-out data"
    )
