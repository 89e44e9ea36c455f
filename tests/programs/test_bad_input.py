"""Bad input to run_pretraining.py: one line that says what, where and what to do, exit code 2, and
nothing is written or lost.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import assert_refused, sample_rows, write_shard
from safetensors.torch import load_file, save_file
from small_runs import AUTO, files_of, resuming, run_here, steps_folder, steps_in, train


def edited(path: Path, target: Path, **values) -> Path:
    """A copy of a JSON file with some values replaced."""
    target.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return target


NO_REPORT = ("--report-file", "None")  # it would be written to the output folder before


def written(path: Path, content: str | bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def cut(path: Path, share: float) -> Path:
    """Cuts a file off; returns its folder."""
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    return path.parent


def shard(folder: Path, *attributes: dict) -> Path:
    return write_shard(folder / "shards" / "a.hdf5", sample_rows(40, 32, 5, 0), *attributes)


MISSING = "/nowhere/at/all does not exist"
# Flags, made from the inputs and a folder, and words of the error.
WRONG = {
    **{
        flags: (lambda i, f, flags=flags: flags.split(), words)
        for flags, words in {
            "--last-step-of-checkpoint auto": "--from-checkpoint",
            "--config-file None": "--bert-model custom needs --config-file",
            "--vocab-file None": "--vocab-file",
            "--from-checkpoint /nowhere/at/all": MISSING,
            "--from-checkpoint /nowhere --last-step-of-checkpoint 7": "/nowhere/7 does not exist",
            "--from-pretrained-params /nowhere/at/all": MISSING,
            "--phase2 --from-phase1-final-params /nowhere/at/all": MISSING,
            "--phase2 --from-phase1-final-params . --from-pretrained-params .": (
                "with --from-pretrained-params"
            ),
            "--input-dir /nowhere/at/all": MISSING,
            "--eval-dir /nowhere/at/all": MISSING,
            "--config-file /nowhere/config.json": "/nowhere/config.json does not exist",
            "--vocab-file /": "/ has no tokenizer",
            "--max-seq-length 64": "--max-seq-length is 64|this run has 64",
            "--max-predictions-per-seq 7": "7",
            "--max-steps 2147483647": "2147483647 updates.*--steps-this-run",
        }.items()
    },
    "empty folder": (lambda i, f: ("--input-dir", written(f / "empty" / "x").parent), "empty"),
    "folder without a model": (
        lambda i, f: ("--from-pretrained-params", written(f / "empty" / "x").parent),
        "holds neither model",
    ),
    "another vocabulary": (
        lambda i, f: ("--input-dir", shard(f, {"vocab_sha256": "0" * 64}).parent),
        "shards.*vocab.txt",
    ),
    "few positions": (
        lambda i, f: ("--config-file", edited(i.config, f / "c.json", max_position_embeddings=16)),
        "32.*16 positions",
    ),
    "vocabulary that is no text": (
        lambda i, f: ("--vocab-file", written(f / "v.txt", bytes(range(256)))),
        "v.txt",
    ),
    "shard that is cut off": (lambda i, f: ("--input-dir", cut(shard(f), 0.98)), "a.hdf5"),
    **{
        f"config with {values}": (
            lambda i, f, values=values: (
                "--config-file",
                edited(i.config, f / "bad.json", **values),
            ),
            words,
        )
        for values, words in (
            ({"hidden_sise": 32}, "hidden_sise"),
            ({"vocab_size": 1000}, "1210.*1000"),
            ({"vocab_size": 30522}, "1210.*30522"),
            (
                {"hidden_size": 2**16, "intermediate_size": 2**18, "num_hidden_layers": 64},
                "million parameters.*with their optimizer state, and cpu has.*use a smaller model",
            ),
        )
    },
    **{
        f"config {text!r}": (
            lambda i, f, text=text: ("--config-file", written(f / "c.json", text)),
            "c.json",
        )
        for text in ("", "[1, 2]")
    },
    **{
        f"{kind} named {place}": (
            lambda i, f, make=make, place=place: (
                "--output-dir",
                make(f / place) and f / "out",
                *NO_REPORT,
            ),
            "/out",
        )
        for kind, make, place in (
            ("file", written, "out"),
            ("loop", lambda path: path.symlink_to(path) or path, "out"),
            ("file", written, "out/custom/phase1"),
        )
    },
    "report that is a folder": (lambda i, f: ("--report-file", f), "--report-file"),
    "report that is another file": (
        lambda i, f: ("--report-file", written(f / "report", "mine")),
        "report.*--report-file",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_flags_and_files_are_one_line_before_anything_is_written(inputs, tmp_path, name):
    flags, words = WRONG[name]
    command = inputs.command(tmp_path / "output", "--max-steps", 3, *flags(inputs, tmp_path))
    before = files_of(tmp_path)
    result = run_here(command)
    assert_refused(result)
    assert re.search(words, result.stderr), result.stderr
    assert files_of(tmp_path) == before


def test_auto_accepts_a_checkpoint_folder_and_no_file(inputs, tmp_path):
    train(inputs.command(tmp_path, "--max-steps", 1))
    folder = steps_folder(tmp_path) / "1"
    (tmp_path / "file").write_text("")
    flags = ("--max-steps", 2, "--last-step-of-checkpoint", "auto", "--from-checkpoint")
    result = run_here(inputs.command(tmp_path, *flags, tmp_path / "file"))
    assert_refused(result, str(tmp_path / "file"), "is a file: give the folder")
    assert (
        f"resumed from {folder}: step 1" in train(inputs.command(tmp_path, *flags, folder)).stdout
    )


def test_folder_that_is_not_the_runs_own_must_hold_a_checkpoint(inputs, tmp_path):
    """A typing error must not start from random weights."""
    own = steps_folder(tmp_path / "output")
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "typo", tmp_path / "empty", own.parent):
        result = run_here(
            inputs.command(
                tmp_path / "output", "--max-steps", 1, "--from-checkpoint", folder, *AUTO
            )
        )
        assert_refused(result, f"--from-checkpoint {folder} holds no checkpoint", str(own))
    result = train(inputs.command(tmp_path / "output", "--max-steps", 1, *resuming(own.parents[1])))
    assert "starting at step 1" in result.stdout
    result = run_here(
        inputs.command(tmp_path / "output", "--max-steps", 2, "--from-checkpoint", own)
    )
    assert_refused(result, "a folder of steps", "--last-step-of-checkpoint auto")


@pytest.mark.parametrize("name", ["bert_paddle.pdparams", "ckpt_600.pt"])
def test_checkpoint_of_another_project_names_the_converter(inputs, tmp_path, name):
    given = tmp_path / "given"
    step = steps_folder(tmp_path / "nvidia") / "600"
    for folder in (given, step):
        folder.mkdir(parents=True)
        (folder / name).write_bytes(b"\x80\x04")
    for flags, file in (
        (("--from-checkpoint", given, *AUTO), given / name),
        (("--from-checkpoint", given / name), given / name),
        (("--from-pretrained-params", given), given / name),
        (
            ("--output-dir", tmp_path / "nvidia"),
            step / name,
        ),  # NVIDIA's folders of steps have the same names
    ):
        result = run_here(inputs.command(tmp_path / "output", "--max-steps", 700, *flags))
        assert_refused(
            result, f"{file} is a checkpoint of another project", "convert_checkpoint.py"
        )
    assert (step / name).exists()


@pytest.mark.parametrize(
    ("values", "flag", "words"),
    [
        ({"hidden_size": 48}, "--from-pretrained-params", "48.*32"),
        ({"hidden_size": 48}, "--from-checkpoint", "48.*32"),
        ({}, "cut off", r"cut/model.safetensors"),
    ],
)
def test_weights_that_do_not_fit_or_are_cut_off(inputs, tmp_path, values, flag, words):
    other = edited(inputs.config, tmp_path / "other.json", **values)
    train(inputs.command(tmp_path / "other", "--max-steps", 1, "--config-file", other))
    folder = steps_folder(tmp_path / "other") / "1"
    if flag == "cut off":
        model = written(
            tmp_path / "cut" / "model.safetensors", (folder / "model.safetensors").read_bytes()
        )
        flag = "--from-pretrained-params"
        folder = cut(model, 0.5)
    result = run_here(inputs.command(tmp_path / "output", "--max-steps", 3, flag, folder))
    assert_refused(result, str(folder))
    assert re.search(words, result.stderr) and files_of(tmp_path / "output") == {}


def test_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoints(inputs, tmp_path):
    """A learning rate that makes the weights infinite: they are not saved."""
    flags = (
        "--log-freq",
        1,
        "--max-skipped-steps",
        4,
        "--num-steps-per-checkpoint",
        100,
        "--warmup-proportion",
        0,
    )
    train(inputs.command(tmp_path, "--max-steps", 5, *flags))
    flags = (*flags, *resuming(tmp_path), "--learning-rate", 3e38)
    result = run_here(inputs.command(tmp_path, "--max-steps", 500, *flags))
    assert_refused(result, "not finite", "4 steps in a row", "sample positions", "--learning-rate")
    assert steps_in(tmp_path)[0] == "5"
    for step in steps_in(tmp_path):
        tensors = load_file(steps_folder(tmp_path) / step / "model.safetensors")
        assert all(torch.isfinite(tensor).all() for tensor in tensors.values()), step


def test_weights_that_are_not_finite(inputs, tmp_path):
    train(inputs.command(tmp_path / "good", "--max-steps", 1))
    bad = Path(shutil.copytree(steps_folder(tmp_path / "good") / "1", tmp_path / "bad"))
    (bad / "manifest.json").unlink()
    tensors = load_file(bad / "model.safetensors")
    tensors["bert.pooler.dense.bias"][3] = float("nan")
    save_file(tensors, bad / "model.safetensors")
    result = run_here(
        inputs.command(tmp_path / "output", "--max-steps", 50, "--from-pretrained-params", bad)
    )
    assert_refused(result, "not all finite")
    assert steps_in(tmp_path / "output") == []


def test_folder_with_newer_checkpoints_of_another_run(inputs, tmp_path):
    train(inputs.command(tmp_path, "--max-steps", 4, "--num-steps-per-checkpoint", 2))
    folder = steps_folder(tmp_path)
    before = files_of(folder)
    for flags in ((), ("--from-checkpoint", folder / "2")):
        result = run_here(inputs.command(tmp_path, "--max-steps", 9, *flags))
        assert_refused(result, str(folder), "step 4", "--resume-from-checkpoint", "--output-dir")
    assert files_of(folder) == before
