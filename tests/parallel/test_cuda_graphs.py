"""--cuda-graphs, with a stand-in for a graph that computes the captured update again. torch's own
graphs run in tests/benchmarks/test_gpu_stand_in.py.
"""

import os
import re
import signal
import time

import pytest
import torch
from conftest import assert_refused
from glue_runs import make_files, own_files, words
from small_runs import losses, run_here, steps_in, train

import parallelize
import run_glue
import trainer
from checkpoint.averages import WeightAverages
from parallelize import check_cuda_graphs
from tasks.pretraining import PretrainingTask
from trainer import Trainer
from training.cuda_graphs import is_checked
from utils.errors import UserError

UPDATES = 8
FLAGS = ("--max-steps", UPDATES, "--log-freq", 1)
COUNTS = re.compile(r"CUDA graphs: (\d+) for (\d+) sizes of batch; (\d+) of (\d+) updates, (\d+) ")


@pytest.fixture
def replaying(monkeypatch) -> list[str]:
    """Lets --cuda-graphs run on a CPU. Not empty during a replay."""
    running: list[str] = []

    def capture(update):
        def replay():
            running.append("replay")
            try:
                return update()
            finally:
                running.clear()

        return replay

    monkeypatch.setattr(parallelize, "check_cuda_graphs", lambda *_: None)
    monkeypatch.setattr(trainer, "CudaGraphs", lambda _optimizer: capture)
    return running


@pytest.mark.parametrize(
    "flags",
    [
        ("--optimizer", "AdamW"),
        ("--optimizer", "Lamb", "--use-pure-fp16", "--ema", 0.9),
        ("--optimizer", "NorMuon", "--gradient-merge-steps", 2),
    ],
)
def test_a_run_with_graphs_has_the_losses_of_one_without(inputs, tmp_path, replaying, flags):
    found = {}
    for name, more in {"graphs": ("--cuda-graphs",), "none": ()}.items():
        command = inputs.command(tmp_path / name, *FLAGS, *flags, *more, dropout=False)
        printed = train(command).stdout
        found[name] = losses(tmp_path / name)
        if name == "graphs":
            graphs, sizes, by_graph, updates, checked = map(int, COUNTS.search(printed).groups())
            assert updates == UPDATES and 1 <= graphs <= sizes == UPDATES - by_graph
            assert graphs <= checked <= by_graph
    assert len(found["none"]) == UPDATES
    assert found["graphs"] == pytest.approx(found["none"], rel=1e-3)


def test_fine_tuning_with_weighted_classes_has_the_losses_of_one_without(tmp_path, replaying):
    make_files(tmp_path)
    found = []
    for name, more in {"graphs": ("--cuda-graphs",), "none": ()}.items():
        data = own_files(tmp_path, "--do-train")
        flags = ("--class-weights", "balanced", "--log-freq", 1, "--max-steps", UPDATES)
        command = words(tmp_path, tmp_path / name, *data, *flags, *more)
        result = run_here(
            [*command, "--report-file", tmp_path / name / "report.json"], run_glue.main
        )
        assert result.returncode == 0, result.stderr
        assert ("CUDA graphs: " in result.stdout) == (name == "graphs")
        found.append(losses(tmp_path / name))
    assert len(found[1]) == UPDATES and found[0] == pytest.approx(found[1], rel=1e-5)


def same_dropout(call, *args):
    torch.manual_seed(1)
    return call(*args)


def no_change(_call, *_args):
    pass


def other_rate(call, self):
    call(self)
    self.learning_rate.mul_(1.001)


def other_memory(call, self):
    call(self)
    moments = next(iter(self.state.optimizer.state.values()))
    moments["exp_avg"] = moments["exp_avg"].clone()


def same_count(call, self, sums, num_sequences, _num_labelled):
    return call(self, sums, num_sequences, 3.0)


@pytest.mark.parametrize(
    ("owner", "name", "fault", "message"),
    [
        (Trainer, "_gradients", same_dropout, " instead of "),
        (PretrainingTask, "loss", same_count, "grad_norm is "),
        (Trainer, "optimizer_step", other_rate, "learning rate differ"),
        (Trainer, "optimizer_step", other_memory, "the memory of exp_avg is another one"),
        (WeightAverages, "update", no_change, "the change of averages differs by 1"),
    ],
)
def test_a_replay_that_is_not_the_update_ends_the_run(
    inputs, tmp_path, replaying, monkeypatch, owner, name, fault, message
):
    call = getattr(owner, name)

    def only_in_replays(*args):
        return fault(call, *args) if replaying else call(*args)

    monkeypatch.setattr(owner, name, only_in_replays)
    flags = (*FLAGS, "--cuda-graphs", "--ema", 0.9)
    result = run_here(inputs.command(tmp_path, *flags, "--num-steps-per-checkpoint", 1))
    assert_refused(result, "replay 1 of a CUDA graph is not the update", message)
    assert "leave --cuda-graphs out" in result.stderr
    # The updates before it are saved.
    assert 1 <= len(steps_in(tmp_path)) < UPDATES


def test_gradients_that_are_only_rounding_do_not_end_the_run(
    inputs, tmp_path, replaying, monkeypatch
):
    """A key's bias has a gradient of zero in exact arithmetic. LAMB divides it by its own size."""
    call = Trainer._gradients

    def rounded_otherwise(self, *args):
        sums = call(self, *args)
        for name, p in self.parallel.named_parameters().items():
            if name.endswith("key.bias"):
                p.grad.fill_(-1e-5 if replaying else 1e-5)  # as in bfloat16
        return sums

    monkeypatch.setattr(Trainer, "_gradients", rounded_otherwise)
    printed = train(inputs.command(tmp_path, *FLAGS, "--cuda-graphs")).stdout
    assert COUNTS.search(printed)


def test_a_value_of_the_host_is_found_at_the_second_replay(
    inputs, tmp_path, replaying, monkeypatch
):
    """At the first one it is that of the capture."""
    call = PretrainingTask.loss
    values: list[float] = []

    def keep_count(self, sums, num_sequences, num_labelled):
        if replaying:
            values.append(float(num_labelled))
            num_labelled = values[0]
        return call(self, sums, num_sequences, num_labelled)

    monkeypatch.setattr(PretrainingTask, "loss", keep_count)
    result = run_here(inputs.command(tmp_path, *FLAGS, "--cuda-graphs"))
    assert_refused(result, "replay 2 of a CUDA graph is not the update", "grad_norm is ")


def test_a_signal_ends_the_first_compilation_at_once(inputs, tmp_path, replaying, monkeypatch):
    ended = []

    def compile_long(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        ended.append("compilation")

    monkeypatch.setattr(Trainer, "_gradients", compile_long)
    command = inputs.command(tmp_path, *FLAGS, "--cuda-graphs", "--compile", "model")
    result = run_here(command)
    assert (result.returncode, ended) == (0, [])
    assert f"step 0 of {UPDATES}, stopped by SIGTERM" in result.stdout


def test_checks_become_rare():
    assert [n for n in range(1, 2000) if is_checked(n)] == [1, 2, 4, 16, 64, 256, 1024]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "--cuda-graphs is for GPUs"),
        (("--activation-checkpoint", "full"), "cannot be combined with --activation-checkpoint"),
        (("--profile-update", 3), "cannot be combined with --profile-update"),
    ],
)
def test_what_cannot_have_graphs_is_refused(inputs, tmp_path, flags, message):
    assert_refused(run_here(inputs.command(tmp_path, *FLAGS, "--cuda-graphs", *flags)), message)


def test_several_processes_and_embeddings_are_refused(tmp_path, replaying):
    with pytest.raises(UserError, match="is for one process"):
        check_cuda_graphs(2, torch.device("cuda"))
    make_files(tmp_path)
    data = ("--train-file", tmp_path / "train.csv", "--text-column", "review", "--pair-column")
    task = ("--do-train", "--task-name", "embedding", "--cuda-graphs")
    command = words(tmp_path, tmp_path / "output", *data, "verdict", *task)
    result = run_here(command, run_glue.main)
    assert_refused(result, "--cuda-graphs does not work for embedding")
