"""doctor.py: a line for each thing that is right or wrong, and the exit code."""

import errno
import itertools
import math
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from conftest import VOCAB_FILE
from small_runs import RunInputs, run_here, steps_folder, train

import doctor
import run_pretraining
from bert_recipe.checkpoint import run_folder
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.start import StartPoint
from bert_recipe.config.arguments import make_run_config
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.ner.options import TokenClassificationOptions
from bert_recipe.tasks.ner.task import TokenClassificationTask
from bert_recipe.tasks.pretraining import PretrainingTask
from bert_recipe.tokenization.tokenizer import load_tokenizer
from bert_recipe.training import checks
from bert_recipe.training.memory_estimate import num_parameters
from bert_recipe.training.plan import open_runs


@pytest.fixture(autouse=True)
def free_memory(monkeypatch):
    """As much as these runs need, whatever else the machine computes."""
    monkeypatch.setattr(checks, "available_memory", lambda: 2**36)


def examine(*words) -> subprocess.CompletedProcess:
    return run_here(words, doctor.main)


def lines_of(result: subprocess.CompletedProcess, level: str) -> list[str]:
    return [
        line.removeprefix(level).strip()
        for line in result.stdout.splitlines()
        if line.startswith(level)
    ]


def assert_says(lines: list[str], *wanted: str) -> None:
    """Each of `wanted` is in one of the lines."""
    for words in wanted:
        assert any(words in line for line in lines), (words, lines)


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_memory_is_estimated_for_the_masked_tokens_of_the_shards(
    inputs: RunInputs, tmp_path, monkeypatch
):
    limits = []
    for slow in ("check_overfitting", "check_updates"):
        monkeypatch.setattr(checks, slow, lambda *_: None)
    monkeypatch.setattr(
        checks, "check_memory", lambda _findings, _run, settings: limits.append(settings.limits)
    )
    command = inputs.command(tmp_path / "out", "--max-steps", 2)
    place = command.index("--max-predictions-per-seq")
    assert examine(*command[:place], *command[place + 2 :]).returncode == 0  # without the flag
    assert limits[0].labelled_tokens == 4 * 5


def test_a_run_that_works_is_told_so_and_left_as_it_is(inputs: RunInputs, tmp_path, monkeypatch):
    output = tmp_path / "out"
    command = inputs.command(output, "--max-steps", 6, "--resume-from-checkpoint")
    train([*command, "--steps-this-run", "2", "--log-freq", "1"])
    before = files_in(tmp_path)
    result = examine(*command)
    assert result.returncode == 0, result.stdout
    assert files_in(tmp_path) == before
    ok = lines_of(result, "ok")
    expected = math.log(1210) + math.log(2)
    assert_says(
        lines_of(result, "warning"),
        "per parameter; the run reads it 0.375 times: little for random weights",
    )
    assert_says(
        ok,
        *(
            "packages of requirements.txt",
            "computes on the CPU in float32",
            "GB free for",
            "data: 64 samples",
        ),
        *(
            f"starts from {steps_folder(output)}/2",
            "overfits 32 samples",
            "GiB free on this machine",
        ),
        *("6 updates of 4 sequences", f"that of random weights {expected:.2f}"),
        "at learning rate 0.01 without warmup, the losses of one batch are",
    )
    assert "nothing is wrong" in result.stdout and not lines_of(result, "wrong")
    monkeypatch.setattr(checks, "check_overfitting", lambda *_: None)  # which is slow
    weights = ("--init-checkpoint", steps_folder(output), "--eval-dir", inputs.held_out)
    result = examine(*inputs.command(tmp_path / "next", "--max-steps", 6, *weights))
    assert_says(
        lines_of(result, "wrong"),
        "no better than random: check vocabulary, casing and --init-checkpoint",
    )


def test_everything_that_is_wrong_is_said_at_once(inputs: RunInputs, tmp_path, monkeypatch):
    """A full disk, too little memory, samples that contradict each other, another run's folder."""
    output, shards = tmp_path / "out", tmp_path / "shards"
    train(inputs.command(output, "--max-steps", 2, "--num-steps-per-checkpoint", 1))
    shutil.copytree(inputs.shards, shards)
    for path in shards.iterdir():
        with h5py.File(path, "r+") as file:
            for key in file:  # all samples have the same input, and labels of their own
                if key != "masked_lm_ids" and key != "next_sentence_labels":
                    file[key][:] = file[key][0]
            file["masked_lm_ids"][:] = np.random.default_rng(0).integers(
                1000, 1200, file["masked_lm_ids"].shape
            )
            file["next_sentence_labels"][:] = 1
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(checks, "available_memory", lambda: 1e6)
    result = examine(
        *inputs.command(
            output, "--max-steps", 2, "--input-dir", shards, "--processes", 2, "--seed", 7
        )
    )
    assert result.returncode == 2
    assert_says(
        lines_of(result, "wrong"),
        *(
            "choose another --output-dir",
            "it should be near 0",
            "next sentences: 100.0% are random: from such labels nothing is learned",
            "GiB needed",
            "already holds step 2",
        ),
    )
    assert "5 wrong" in result.stdout


@pytest.mark.parametrize(
    ("target", "says"),
    [("file", "a part of the path is not a folder"), ("nowhere", "no such file or folder")],
)
def test_an_output_folder_that_cannot_be_written_to_is_wrong(
    inputs: RunInputs, tmp_path, monkeypatch, target, says
):
    for slow in ("check_overfitting", "check_updates"):
        monkeypatch.setattr(checks, slow, lambda *_: None)
    (tmp_path / "file").write_text("a file")
    (tmp_path / "out").symlink_to(target)
    result = examine(*inputs.command(tmp_path / "out", "--max-steps", 2))
    assert result.returncode == 2, result.stdout
    assert_says(
        lines_of(result, "wrong"),
        "--output-dir: cannot write to",
        says,
    )


def test_a_run_folder_that_cannot_be_written_to_is_one_of_the_findings(
    inputs: RunInputs, tmp_path, monkeypatch
):
    for slow in ("check_overfitting", "check_updates"):
        monkeypatch.setattr(checks, slow, lambda *_: None)
    (tmp_path / "out" / "custom" / "phase1").mkdir(parents=True)

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(run_folder, "lock_folder", refuse)
    result = examine(*inputs.command(tmp_path / "out", "--max-steps", 2))
    assert result.returncode == 2, result.stdout
    assert_says(lines_of(result, "wrong"), "custom/phase1: permission denied")
    assert "data: " in result.stdout and "starts from" not in result.stdout


def test_the_seeds_of_a_command_that_resumes_are_examined(inputs: RunInputs, tmp_path, monkeypatch):
    for slow in ("check_overfitting", "check_updates"):
        monkeypatch.setattr(checks, slow, lambda *_: None)
    command = inputs.command(tmp_path / "out", "--max-steps", 2, "--num-seeds", 2)
    assert run_pretraining.main([*command, "--steps-this-run", "1"]) == 0
    result = examine(*command, "--resume-from-checkpoint")
    assert "several seeds" not in result.stdout
    assert_says(lines_of(result, "ok"), "seed-42/1")


def test_batches_are_those_of_the_processes_of_the_run(inputs: RunInputs, tmp_path, monkeypatch):
    for slow in ("check_overfitting", "check_updates"):
        monkeypatch.setattr(checks, slow, lambda *_: None)
    output = tmp_path / "out"
    command = inputs.command(output, "--max-steps", 2)
    train([*command, "--steps-this-run", "1"])
    resumed = examine(*command, "--resume-from-checkpoint", "--processes", 2)
    assert_says(lines_of(resumed, "wrong"), "was 4, of 1 processes; with 2 it would be 8")
    held_out = ("--eval-dir", inputs.held_out, "--max-eval-samples", 3, "--processes", 4)
    few = examine(*inputs.command(tmp_path / "new", "--max-steps", 2, *held_out))
    assert_says(lines_of(few, "wrong"), "fewer samples than there are processes")


def test_another_vocabulary_and_a_high_rate_are_found(inputs: RunInputs, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "check_overfitting", lambda *_: None)  # which is slow
    shards = shutil.copytree(inputs.shards, tmp_path / "shards")
    for path in shards.iterdir():
        with h5py.File(path, "r+") as file:
            file.attrs["vocab_sha256"] = "0" * 64
    rate = ("--learning-rate", 50, "--warmup-proportion", 1)
    for flags, says in (
        (("--input-dir", shards), "made with another vocabulary"),
        (rate, "lower --learning-rate"),
    ):
        result = examine(*inputs.command(tmp_path / "out", "--max-steps", 6, *flags))
        assert result.returncode == 2
        assert_says(lines_of(result, "wrong"), says)


def test_the_share_of_words_that_are_split_into_many_pieces():
    tokenizer = load_tokenizer(VOCAB_FILE)
    words = "the pneumoconiosis of thrombocytopenia rose"  # both of six pieces
    ids = tokenizer.encode(f"{words} 314159265358979")
    sequence = [tokenizer.cls_token_id, *ids, tokenizer.sep_token_id]
    assert checks.split_share(np.array([*sequence, *sequence]), tokenizer) == pytest.approx(2 / 5)


@pytest.fixture(scope="module")
def run(inputs: RunInputs, tmp_path_factory):
    """A run that pre-trains for 1,000 updates, 100 of them warmup."""
    output = tmp_path_factory.mktemp("run") / "out"
    args = run_pretraining.parse_arguments(inputs.command(output, "--max-steps", 1000))
    task = run_pretraining.task_options(args)
    runtime = Runtime(torch.device("cpu"))
    [run] = open_runs(make_run_config(args), task, runtime).values()
    return run


@pytest.mark.parametrize(
    ("loss", "has_weights", "num_wrong"),
    [
        (7.79, False, 0),
        (9.5, False, 1),
        (6.0, False, 1),
        (math.nan, False, 1),
        (4.0, True, 0),
        (7.5, True, 1),
    ],
)
def test_the_first_loss_is_that_of_random_or_of_trained_weights(run, loss, has_weights, num_wrong):
    findings = checks.Findings()
    checks.check_first_loss(findings, run, loss, has_weights)
    assert findings.num_wrong == num_wrong


def test_of_samples_with_many_masked_tokens_the_beginning_is_learnt_by_heart(
    run, monkeypatch, capsys
):
    """As of ModernBERT's recipe, with 2,458 in a sequence of 8,192 tokens."""
    batches = []
    whole = checks.batch_of(run, Runtime(torch.device("cpu")), 4, 4)
    num_masked = int(whole.num_labelled[:2].sum()) + 1  # of the third sequence, one

    def train(_run, _runtime, _steps, given):
        batches.append(next(given))
        return [8.96, 0.2], {}

    with monkeypatch.context() as patched:
        patched.setattr(checks, "OVERFIT_MASKED", num_masked)
        patched.setattr(checks, "OVERFIT_BEGINNING", num_masked)
        patched.setattr(checks, "batch_of", lambda *_: whole)
        patched.setattr(checks, "train", train)
        checks.check_overfitting(checks.Findings(), run, None)
    assert "a small model overfits the beginning of a sample: loss" in capsys.readouterr().out
    [cut] = batches
    [short], [full] = cut.micro_batches, whole.micro_batches
    num_tokens = int(full["mlm_positions"][num_masked])
    bounds = full["cu_seqlens"].tolist()
    assert (cut.lengths.tolist(), cut.num_labelled.tolist()) == ([num_tokens], [num_masked])
    before = [bound for bound in bounds if bound < num_tokens]
    assert short["cu_seqlens"].tolist() == [*before, num_tokens]
    for name in ("input_ids", "token_type_ids", "position_ids"):
        assert short[name].equal(full[name][:num_tokens])
    for name in ("mlm_positions", "mlm_labels"):
        assert short[name].equal(full[name][:num_masked])
    assert short["nsp_labels"].equal(full["nsp_labels"][: short["num_sequences"]])
    losses, _ = checks.train(run, Runtime(torch.device("cpu")), 2, itertools.repeat(cut))
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize("losses", [[7.8, 8.0, 7.9], [7.8, math.nan, 7.8], [7.8, 7.7, 8.9]])
def test_losses_that_rise_or_are_not_numbers_at_the_learning_rate_are_wrong(run, capsys, losses):
    checks.check_learning_rate(checks.Findings(), run, losses)
    assert ("lower --learning-rate" in capsys.readouterr().out) == (losses[1] != 8.0)


def test_a_fine_tuning_run_is_named_by_the_first_word(inputs: RunInputs, tmp_path):
    data = tmp_path / "data.csv"
    data.write_text(  # some words have characters that the vocabulary lacks
        "text,label\n"
        + "".join(f"the {word} of 😀,{number % 2}\n" for number, word in enumerate("abcdefgh"))
    )
    flags = [
        "--text-column",
        "text",
        "--label-column",
        "label",
        "--bert-model",
        "custom",
        "--device",
        "cpu",
    ]
    flags += [
        "--config-file",
        inputs.config,
        "--vocab-file",
        inputs.vocab_file,
        "--output-dir",
        tmp_path / "out",
    ]
    flags += ["--max-seq-length", 16]
    # A smoothed loss does not come near 0, which is no fault of the device.
    more = ("--do-eval", "--num-folds", 4, "--label-smoothing", 0.9)
    result = examine("run_glue.py", "--do-train", "--train-file", data, *flags, *more)
    assert_says(
        result.stdout.splitlines(), "data: 6 samples", f"that of random weights {math.log(2):.2f}"
    )
    assert_says(lines_of(result, "ok"), "a small model overfits")
    assert result.stdout.count("[UNK]") == 1


@pytest.mark.parametrize(
    ("task", "loss", "is_right"),
    [
        (
            TokenClassificationTask(TokenClassificationOptions(), guessing_loss=0.4),
            0.4,
            True,
        ),
        (
            TokenClassificationTask(TokenClassificationOptions(), guessing_loss=0.4),
            0.4 + 2,
            False,
        ),
        (PretrainingTask(True, 32, vocab_size=1000), math.log(1000) - 3, True),
        (PretrainingTask(True, 32, vocab_size=1000), math.log(1000), False),
    ],
    ids=["new head", "new head, too high", "trained head", "trained head, like random weights"],
)
def test_starting_weights_are_better_than_random_ones_only_with_the_tasks_head(
    task, loss, is_right
):
    findings = checks.Findings()
    run = SimpleNamespace(task=task)
    checks.check_first_loss(findings, run, loss, has_weights=True)
    assert findings.num_wrong == (not is_right)


@pytest.mark.parametrize(("above", "level"), [(-0.1, "ok"), (0.5, "warning"), (1.5, "wrong")])
def test_weights_without_the_masked_language_model_head_start_at_the_loss_of_random_ones(
    above, level, capsys
):
    task = PretrainingTask(False, 32, vocab_size=1000)
    run = SimpleNamespace(task=task)
    loss = math.log(1000) + above
    checks.check_first_loss(checks.Findings(), run, loss, True, brings_head=False)
    assert capsys.readouterr().out.startswith(level)


@pytest.mark.parametrize(
    ("tokens", "has_weights", "level"),
    [(1.1, False, "ok"), (0.9, False, "warning"), (0.11, True, "ok"), (0.036, True, "warning")],
)
def test_little_text_for_the_model_is_a_warning(run, tokens, has_weights, level, capsys):
    """tokens: per parameter."""
    if has_weights:
        run = replace(run, start=StartPoint.of_weights(ModelFolder(Path("model"))))
    num_tokens = tokens * num_parameters(run.make_model())
    checks.check_amount(checks.Findings(), run, num_tokens, passes=1)
    assert capsys.readouterr().out.startswith(level)
