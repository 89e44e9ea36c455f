"""The state of a run in a checkpoint: restored exactly, or an error that names the file and the tensor or key."""

import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conftest import assert_refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import exit_codes, start_several
from safetensors.torch import load_file, save_file
from small_runs import losses, progress, resuming, rewrite_manifest, run_here, steps_folder, steps_in, train

from checkpoint.state import read_progress

OPTIMIZER_FILE, PROGRESS_FILE = "model_optimizer.safetensors", "model_progress.json"
MATRIX = "bert.encoder.layer.0.intermediate.dense.weight"  # [64, 32]
FLAGS = ("--max-steps", 6, "--log-freq", 1)


@pytest.fixture(scope="module", params=["Lamb", "AdamW"])
def stopped(request, inputs, tmp_path_factory):
    """The output of a run that stopped at step 3 of 6, its optimizer flags, and the model after step 4."""
    output, flags = tmp_path_factory.mktemp("stopped"), (*FLAGS, "--optimizer", request.param)
    train(inputs.command(output, *flags, "--steps-this-run", 3))
    continued = shutil.copytree(output, tmp_path_factory.mktemp("continued") / "output")
    train(inputs.command(continued, *flags, *resuming(continued), "--steps-this-run", 1))
    return output, flags, (steps_folder(continued) / "4" / "model.safetensors").read_bytes()


@pytest.fixture
def copied(stopped, tmp_path):
    """A copy of the stopped run: its output, and the command that makes step 4."""
    output, flags, _ = stopped
    copy = Path(shutil.copytree(output, tmp_path / "output"))
    return copy, (*flags, *resuming(copy), "--steps-this-run", 1)


def folder_of(output: Path) -> Path:
    return steps_folder(output) / "3"


def change_optimizer(output: Path, **values) -> None:
    """The same for the optimizer's tensors."""
    path = folder_of(output) / OPTIMIZER_FILE
    tensors = {**load_file(path), **values}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not ...}, path)
    rewrite_manifest(path.parent)


# --- what is restored -------------------------------------------------------------------------------------------------


def test_checkpoint_has_both_moments_and_the_step_of_each_parameter(stopped):
    output, *_ = stopped
    model, optimizer = (load_file(folder_of(output) / name) for name in ("model.safetensors", OPTIMIZER_FILE))
    assert optimizer.keys() == {f"{name}.{key}" for name in model for key in ("exp_avg", "exp_avg_sq", "step")}
    for name, tensor in model.items():
        assert optimizer[f"{name}.exp_avg"].shape == optimizer[f"{name}.exp_avg_sq"].shape == tensor.shape
        assert optimizer[f"{name}.step"].shape == () and optimizer[f"{name}.step"] == 3
    assert {tensor.dtype for tensor in (*model.values(), *optimizer.values())} == {torch.float32}


def test_progress_file_says_how_far_the_run_is(stopped):
    found = asdict(read_progress(folder_of(stopped[0]), "model"))
    assert found == progress(stopped[0], 3)
    assert (found["step"], found["samples_consumed"], found["seed"], found["num_samples"]) == (3, 12, 42, 64)


def test_same_checkpoint_gives_the_same_next_step(inputs, stopped, copied):
    output, command = copied
    train(inputs.command(output, *command))
    assert (steps_folder(output) / "4" / "model.safetensors").read_bytes() == stopped[2]


def test_other_prefix_is_an_error_that_names_the_flag(inputs, copied):
    output, command = copied
    result = run_here(inputs.command(output, *command, "--model-prefix", "bert"))
    assert_refused(result, "bert_progress.json", "--model-prefix")


# --- the optimizer's tensors ------------------------------------------------------------------------------------------


def load(stopped, name: str) -> torch.Tensor | None:
    return load_file(folder_of(stopped[0]) / OPTIMIZER_FILE).get(name)


WRONG_TENSORS = {
    "transposed": (f"{MATRIX}.exp_avg", lambda tensor: tensor.t().contiguous(), "[32, 64]"),
    "shortened": (f"{MATRIX}.exp_avg_sq", lambda tensor: tensor[:-1].clone(), "[63, 32]"),
    "lengthened": (f"{MATRIX}.exp_avg", lambda tensor: torch.cat([tensor, tensor]), "[128, 32]"),
    "flattened": (f"{MATRIX}.exp_avg", lambda tensor: tensor.flatten(), "[2048]"),
    "with vocabulary padding": (
        "bert.embeddings.word_embeddings.weight.exp_avg",
        lambda tensor: torch.cat([tensor, torch.zeros(6, 32)]),
        "[1216, 32]",
    ),
    "step with a dimension": (f"{MATRIX}.step", lambda tensor: tensor[None], "[1]"),
    "empty": (f"{MATRIX}.exp_avg", lambda tensor: torch.zeros(0), "[0]"),
    "missing moment": (f"{MATRIX}.exp_avg", lambda tensor: ..., "lacks"),
    "missing step": (f"{MATRIX}.step", lambda tensor: ..., "lacks"),
    **{
        str(dtype): (f"{MATRIX}.exp_avg", lambda tensor, dtype=dtype: tensor.to(dtype), "float32")
        for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.bool)
    },
    "step of whole numbers": (f"{MATRIX}.step", lambda tensor: tensor.long(), "float32"),
    **{
        f"unexpected {name}": (name, lambda tensor: torch.zeros(3), "belongs to no parameter")
        for name in ("bert.adapter.weight.exp_avg", f"{MATRIX}.max_exp_avg_sq", "x")
    },
}


@pytest.mark.parametrize("wrong", WRONG_TENSORS)
def test_wrong_optimizer_tensor_is_an_error_that_names_it(inputs, stopped, copied, wrong):
    output, command = copied
    name, change, word = WRONG_TENSORS[wrong]
    change_optimizer(output, **{name: change(load(stopped, name))})
    result = run_here(inputs.command(output, *command))
    assert_refused(result, str(folder_of(output) / OPTIMIZER_FILE), name, word)
    assert steps_in(output) == ["3"]


@given(data=st.data())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_header_of_a_tensor_file_is_an_error_or_gives_the_same_next_step(
    inputs, stopped, tmp_path_factory, data
):
    """The manifest fits the damaged file, as if it had been written like this."""
    output = Path(shutil.copytree(stopped[0], tmp_path_factory.mktemp("damaged") / "output"))
    path = folder_of(output) / data.draw(st.sampled_from([OPTIMIZER_FILE, "model.safetensors"]))
    content = bytearray(path.read_bytes())
    header_size = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 2))):
        content[data.draw(st.integers(0, header_size - 1))] = data.draw(
            st.sampled_from(b' "0123456789abFI}],') | st.integers(0, 255)
        )
    path.write_bytes(content)
    rewrite_manifest(path.parent)
    result = run_here(inputs.command(output, *stopped[1], *resuming(output), "--steps-this-run", 1))
    if result.returncode == 0:
        assert (steps_folder(output) / "4" / "model.safetensors").read_bytes() == stopped[2]
    else:
        assert_refused(result, str(folder_of(output)))


# --- several processes ------------------------------------------------------------------------------------------------


def test_only_the_main_process_warns_about_a_damaged_checkpoint(inputs, copied, tmp_path):
    output, command = copied
    shutil.copytree(folder_of(output), steps_folder(output) / "5")
    (steps_folder(output) / "5" / "config.json").write_text("{}")
    assert exit_codes(start_several(inputs.command(output, *command), tmp_path / "log")) == [0, 0]
    assert (tmp_path / "log.1").read_text() == ""
    log = (tmp_path / "log.0").read_text()
    assert log.count("warning: ") == 1 and f"resumed from {folder_of(output)}" in log
    assert steps_in(output) == ["3", "4", "5"] and 4 in losses(output)
