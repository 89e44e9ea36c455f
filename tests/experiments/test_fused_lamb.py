"""apex's FusedLAMB: names, groups, updates and state, on a stand-in for apex. What its kernels
compute, benchmarks/gpu_first_hour.py compares on a GPU.
"""

import copy
import sys
from dataclasses import replace
from types import SimpleNamespace

import apex_stand_in
import pytest
import torch
from conftest import reported
from optimizer_steps import MODEL, gradients_of_steps, set_gradients
from small_runs import resuming, train

from bert_recipe.config import OptimizerConfig, ParallelConfig
from bert_recipe.experiments import fused_lamb
from bert_recipe.optimization.protocol import apply_step
from bert_recipe.optimization.registry import make_optimizer, spec_named
from bert_recipe.utils.errors import UserError

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def test_groups_updates_and_state_are_those_of_lamb(monkeypatch):
    apex_stand_in.install(monkeypatch)
    made = []
    for name in ("Lamb", "FusedLAMB"):
        model, lr = copy.deepcopy(MODEL), torch.tensor(0.0)
        made.append((model, make_optimizer(OptimizerConfig(name), model, lr)))
        optimizer = made[-1][1]
        for number, grads in enumerate(gradients_of_steps(6)):
            lr.fill_(0.01 * (number + 1))
            parameters = dict(model.named_parameters())
            set_gradients(parameters, grads, 8.0)
            if number < 2:  # as of an encoder that is frozen at first
                parameters["dense.weight"].grad = None
            apply_step(optimizer, torch.tensor(8.0), torch.tensor(float(number == 4)))
            optimizer.zero_grad(set_to_none=number % 2 == 0)
    (expected, lamb), (ours, fused) = made
    assert type(fused).__name__ == "FusedLAMB" and spec_named("FusedLAMB").saved_as == "Lamb"
    names = {p: name for model, _ in made for name, p in model.named_parameters()}
    groups = [
        [([names[p] for p in group["params"]], group["weight_decay"]) for group in own.param_groups]
        for own in (lamb, fused)
    ]
    assert groups[0] == groups[1]
    weights = dict(expected.named_parameters())
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p, weights[name], rtol=1e-5, atol=1e-7)
        state = lamb.state[weights[name]]
        assert fused.state[p].keys() == state.keys()
        for key, value in fused.state[p].items():
            torch.testing.assert_close(value, state[key], rtol=1e-5, atol=1e-7)


def test_a_run_goes_on_with_the_state_of_lamb_and_lamb_with_its_state(
    inputs, tmp_path, monkeypatch
):
    apex_stand_in.install(monkeypatch)
    spec = replace(fused_lamb.SPECS["FusedLAMB"], check_run=None)  # of a GPU
    monkeypatch.setitem(fused_lamb.SPECS, "FusedLAMB", spec)
    flags = ("--max-steps", 6, "--log-freq", 1)
    expected, output = tmp_path / "expected", tmp_path / "output"
    train(inputs.command(expected, *flags))
    for number, name in enumerate(("Lamb", "FusedLAMB", "Lamb")):
        resumes = resuming(output) if number else ()
        stop = ("--steps-this-run", 2, "--optimizer", name)
        train(inputs.command(output, *flags, *stop, *resumes))
    losses = [
        [figures["loss"] for figures in reported(folder / "report.json").values()]
        for folder in (expected, output)
    ]
    assert len(losses[1]) == 6 and losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize(
    ("device", "parallel", "says"),
    [
        (GPU, {"shard_degree": 2}, "cannot be combined with --data-parallel-shard-degree"),
        (GPU, {"cpu_offload": True}, "cannot be combined with --enable-cpu-offload"),
        (CPU, {}, "on NVIDIA GPUs only: use --optimizer Lamb"),
        (GPU, {}, "needs apex, which is not installed"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(monkeypatch, device, parallel, says):
    monkeypatch.setitem(sys.modules, "apex", None)
    config = SimpleNamespace(parallel=replace(ParallelConfig(), **parallel))
    with pytest.raises(UserError, match=says):
        fused_lamb.check_run(config, device)
