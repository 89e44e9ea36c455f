"""The state of a run in a checkpoint: restored exactly, or an error that names the file and the
tensor or key.
"""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import assert_refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import exit_codes, start_several
from safetensors.torch import load_file, save_file
from small_runs import losses, resuming, rewrite_manifest, run_here, steps_folder, steps_in, train

OPTIMIZER_FILE = "model_optimizer.safetensors"
MATRIX = "bert.encoder.layer.0.intermediate.dense.weight"  # [64, 32]
WORDS = "bert.embeddings.word_embeddings.weight"
FLAGS = ("--max-steps", 6, "--log-freq", 1)


@pytest.fixture(scope="module")
def stopped(inputs, tmp_path_factory):
    """The output of a run that stopped at step 3 of 6, and the model after step 4."""
    output = tmp_path_factory.mktemp("stopped")
    train(inputs.command(output, *FLAGS, "--steps-this-run", 3))
    continued = shutil.copytree(output, tmp_path_factory.mktemp("continued") / "output")
    train(inputs.command(continued, *FLAGS, *resuming(continued), "--steps-this-run", 1))
    return output, (steps_folder(continued) / "4" / "model.safetensors").read_bytes()


@pytest.fixture
def copied(stopped, tmp_path):
    """A copy of the stopped run: its output, and the command that makes step 4."""
    copy = Path(shutil.copytree(stopped[0], tmp_path / "output"))
    return copy, (*FLAGS, *resuming(copy), "--steps-this-run", 1)


def folder_of(output: Path) -> Path:
    return steps_folder(output) / "3"


def test_checkpoint_has_both_moments_and_the_step_of_each_parameter(stopped):
    model, optimizer = (
        load_file(folder_of(stopped[0]) / name) for name in ("model.safetensors", OPTIMIZER_FILE)
    )
    assert optimizer.keys() == {
        f"{name}.{key}" for name in model for key in ("exp_avg", "exp_avg_sq", "step")
    }
    for name, tensor in model.items():
        assert (
            optimizer[f"{name}.exp_avg"].shape
            == optimizer[f"{name}.exp_avg_sq"].shape
            == tensor.shape
        )
        assert optimizer[f"{name}.step"].shape == () and optimizer[f"{name}.step"] == 3
    assert {tensor.dtype for tensor in (*model.values(), *optimizer.values())} == {torch.float32}


# Name, the tensor that is made of it (None: it is removed), and what the error says.
WRONG_TENSORS = {
    "transposed": (f"{MATRIX}.exp_avg", lambda tensor: tensor.t().contiguous(), "[32, 64]"),
    "shortened": (f"{MATRIX}.exp_avg_sq", lambda tensor: tensor[:-1].clone(), "[63, 32]"),
    "with vocabulary padding": (
        f"{WORDS}.exp_avg",
        lambda tensor: torch.cat([tensor, tensor[:6]]),
        "[1216, 32]",
    ),
    "step with a dimension": (f"{MATRIX}.step", lambda tensor: tensor[None], "[1]"),
    "missing moment": (f"{MATRIX}.exp_avg", lambda tensor: None, "lacks"),
    "missing step": (f"{MATRIX}.step", lambda tensor: None, "lacks"),
    "of 16 bits": (f"{MATRIX}.exp_avg", torch.Tensor.bfloat16, "float32"),
    "of 64 bits": (f"{MATRIX}.exp_avg", torch.Tensor.double, "float32"),
    "step of whole numbers": (f"{MATRIX}.step", torch.Tensor.long, "float32"),
    "of another parameter": (
        "bert.adapter.weight.exp_avg",
        lambda _: torch.zeros(3),
        "belongs to no parameter",
    ),
    "of another optimizer": (
        f"{MATRIX}.max_exp_avg_sq",
        lambda _: torch.zeros(3),
        "belongs to no parameter",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_TENSORS)
def test_wrong_optimizer_tensor_is_an_error_that_names_it(inputs, copied, wrong):
    output, command = copied
    name, change, word = WRONG_TENSORS[wrong]
    path = folder_of(output) / OPTIMIZER_FILE
    tensors = load_file(path)
    tensors[name] = change(tensors.get(name))
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    rewrite_manifest(path.parent)
    assert_refused(run_here(inputs.command(output, *command)), str(path), name, word)
    assert steps_in(output) == ["3"]


def test_a_file_without_any_optimizer_state_is_an_error(inputs, copied):
    output, command = copied
    path = folder_of(output) / OPTIMIZER_FILE
    save_file({}, path)
    rewrite_manifest(path.parent)
    assert_refused(run_here(inputs.command(output, *command)), str(path), "lacks")
    assert steps_in(output) == ["3"]


@given(data=st.data())
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    result = run_here(inputs.command(output, *FLAGS, *resuming(output), "--steps-this-run", 1))
    if result.returncode == 0:
        assert (steps_folder(output) / "4" / "model.safetensors").read_bytes() == stopped[1]
    else:
        assert_refused(result, str(folder_of(output)))


def test_only_the_main_process_warns_about_a_damaged_checkpoint(inputs, copied, tmp_path):
    output, command = copied
    shutil.copytree(folder_of(output), steps_folder(output) / "5")
    (steps_folder(output) / "5" / "config.json").write_text("{}")
    # As the stopped run, which had one process.
    words = inputs.command(output, *command, "--global-batch-size", 4)
    assert exit_codes(start_several(words, tmp_path / "log")) == [0, 0]
    assert (tmp_path / "log.1").read_text() == ""
    log = (tmp_path / "log.0").read_text()
    assert log.count("warning: ") == 1 and f"resumed from {folder_of(output)}" in log
    assert steps_in(output) == ["3", "4", "5"] and 4 in losses(output)
