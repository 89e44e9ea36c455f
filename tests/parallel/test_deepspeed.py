"""Runs with DeepSpeed's engine: their losses, skipped steps and predictions are those of one
process, and their checkpoints move freely between stages, numbers of processes and engines.

To be run with both of DEEPSPEED_VERSIONS, whichever is installed.
"""

import contextlib
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import NO_DROPOUT, ROOT, TINY, VOCAB_FILE, reported
from rank_runs import run_ranks
from safetensors.torch import load_file
from small_runs import RunInputs, losses, progress, steps_folder, steps_in, train, weights

import run_pretraining
import run_squad
from bert_recipe.config.deepspeed_config import DEEPSPEED_VERSIONS, installed_version
from bert_recipe.parallel.deepspeed import load_deepspeed
from bert_recipe.training.checkpoint_callback import Checkpoints
from bert_recipe.training.trainer import Trainer
from bert_recipe.utils.distributed import init_distributed
from bert_recipe.utils.requirements import release

pytestmark = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="needs DeepSpeed: requirements-deepspeed.txt"
)

STEPS, SAVED = 10, 5
ADAMW = ("--optimizer", "AdamW")
# What DeepSpeed's LAMB does if its JSON block names the learning rate only.
DEEPSPEEDS_LAMB = ("--lamb-min-coeff", 0.01, "--lamb-max-coeff", 10, "--lamb-adapt-undecayed")
DEEPSPEEDS_LAMB += ("--epsilon", 1e-8, "--weight-decay", 0)
BF16 = ("--use-pure-fp16", "--amp-dtype", "bfloat16")
FP16 = (
    "--use-pure-fp16",
    "--amp-dtype",
    "float16",
    "--use-dynamic-loss-scaling",
    "--scale-loss",
    1024,
)
POISONED = 2 * 23  # the first sample of a step whose gradient is not finite on the last rank
SHARDED = ("--data-parallel-shard-degree", -1)
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
# Parameters of more than 100 elements are divided in stage 3; by default the tiny model would stay
# whole.
ZERO = {stage: {"stage": stage} for stage in (0, 1, 2)} | {
    3: {"stage": 3, "stage3_param_persistence_threshold": 100}
}
# Before 0.19.8, ZeRO 1 in float16 is refused.
FLOAT16 = dict(ZERO)
if find_spec("deepspeed") and release(installed_version()) < release(DEEPSPEED_VERSIONS[1]):
    del FLOAT16[1]
FLOAT32 = {
    **{f"ZeRO {stage}": zero for stage, zero in ZERO.items()},
    "ZeRO 1 offload": {**ZERO[1], **OFFLOAD},
    "ZeRO 2 offload": {**ZERO[2], **OFFLOAD},
    "ZeRO 3 offload": {**ZERO[3], **OFFLOAD, "offload_param": {"device": "cpu"}},
}
# Where a run goes on that ZeRO 2 saved on two processes, and the flags.
CONTINUED = ("ZeRO 2", "ZeRO 3", "ZeRO 3 offload", "ZeRO 1 bf16", "ZeRO 2 bf16", "ZeRO 3 bf16")
MOVES = {"ZeRO 3": ZERO[3], "ZeRO 2": ZERO[2], "ZeRO 1": ZERO[1], "ZeRO 0": ZERO[0], "FSDP2": None}


def engine_flags(folder: Path, name: str, zero: dict, **config) -> tuple:
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"zero_optimization": zero, **config}))
    return ("--deepspeed", "--deepspeed_config", path)


def command(inputs: RunInputs, output: Path, *flags) -> list[str]:
    """Ten updates of unequal numbers of micro-batches, whose gradients are clipped."""
    batch = ("--max-steps", STEPS, "--global-batch-size", 23, "--learning-rate", 0.005)
    logs = ("--log-freq", 1, "--num-steps-per-checkpoint", SAVED, "--eval-dir", inputs.held_out)
    return inputs.command(output, *batch, *logs, *ADAMW, *flags, dropout=False)


def save_first(checkpoints: Checkpoints, _stop: object) -> None:
    """A run that starts from a checkpoint saves what it has read before it goes on."""
    if checkpoints.state.step:
        checkpoints.saved = None
        checkpoints.save()


def train_all(commands: list[list[str]]) -> int:
    """Pre-training runs one after another in one process group, which DeepSpeed cannot leave."""
    with (
        init_distributed(torch.device("cpu")) as distributed,
        mock.patch(
            "bert_recipe.training.setup.init_distributed",
            lambda *_: contextlib.nullcontext(distributed),
        ),
        mock.patch.object(Checkpoints, "start", save_first),
    ):
        for argv in commands:
            assert run_pretraining.main(argv) == 0, argv
    return 0


@contextlib.contextmanager
def poisoned_float16() -> Iterator[None]:
    """CPUs compute float16, slowly; the gradient of the step at POISONED is not finite."""
    training_step = Trainer.training_step

    def poisoned_step(self, batch, stats, *rest):
        if (
            batch.first_position != POISONED
            or self.distributed.rank < self.distributed.world_size - 1
        ):
            return training_step(self, batch, stats, *rest)
        loss = self.task.loss
        with mock.patch.object(
            type(self.task), "loss", lambda _, *sums: loss(*sums) * float("inf")
        ):
            return training_step(self, batch, stats, *rest)

    with (
        mock.patch.object(Trainer, "training_step", poisoned_step),
        mock.patch("bert_recipe.optimization.precision.has_float16", lambda _: True),
    ):
        yield


def train_poisoned(commands: list[list[str]]) -> int:
    accelerator = type(load_deepspeed(torch.device("cpu")).accelerator.get_accelerator())
    with poisoned_float16(), mock.patch.object(accelerator, "is_fp16_supported", lambda _: True):
        return train_all(commands)


@pytest.fixture(scope="module")
def folder(inputs, tmp_path_factory) -> Path:
    """All runs of these tests, each in a folder of its own."""
    folder = tmp_path_factory.mktemp("deepspeed")
    train(command(inputs, folder / "one process"))
    train(command(inputs, folder / "one process LAMB", "--optimizer", "Lamb", *DEEPSPEEDS_LAMB))
    train(command(inputs, folder / "one process bf16", *BF16))
    commands = []
    for name, zero in FLOAT32.items():
        commands.append(command(inputs, folder / name, *engine_flags(folder, name, zero)))
    for stage, zero in ZERO.items():
        name = f"ZeRO {stage} bf16"
        flags = engine_flags(folder, name, zero, bf16={"enabled": True})
        commands.append(command(inputs, folder / name, *flags))
    lamb = engine_flags(
        folder, "LAMB", ZERO[0], optimizer={"type": "Lamb", "params": {"lr": 0.005}}
    )
    commands.append(command(inputs, folder / "ZeRO 0 LAMB", *lamb, "--optimizer", "Lamb"))
    for name, zero in MOVES.items():
        flags = SHARDED if zero is None else engine_flags(folder, f"to {name}", zero)
        start = ("--from-checkpoint", steps_folder(folder / "ZeRO 2") / str(SAVED))
        commands.append(command(inputs, folder / f"ZeRO 2 to {name}", *start, *flags))
    for name in CONTINUED:
        reference = "one process bf16" if "bf16" in name else "one process"
        start = ("--from-checkpoint", steps_folder(folder / reference) / str(SAVED))
        flags = ("--deepspeed", "--deepspeed-config", folder / f"{name}.json")
        commands.append(command(inputs, folder / f"one process to {name}", *start, *flags))
    run_ranks(2, folder / "logs", train_all, commands).check()
    commands = []
    for stage, zero in FLOAT16.items():
        flags = engine_flags(
            folder, f"ZeRO {stage} fp16", zero, fp16={"enabled": True, "initial_scale_power": 10}
        )
        commands.append(command(inputs, folder / f"ZeRO {stage} fp16", *flags))
    run_ranks(2, folder / "logs of float16", train_poisoned, commands).check()
    with poisoned_float16():
        train(command(inputs, folder / "one process fp16", *FP16))
    start = ("--from-checkpoint", steps_folder(folder / "ZeRO 2") / str(SAVED))
    train(command(inputs, folder / "ZeRO 2 to one process", *start))
    alone = command(
        inputs, folder / "ZeRO 2 to ZeRO 3 alone", *start, *engine_flags(folder, "alone", ZERO[3])
    )
    run_ranks(1, folder / "logs of one", train_all, [alone]).check()
    return folder


def max_difference(a: dict, b: dict) -> float:
    assert a.keys() == b.keys()
    return max(float(abs(a[key] - b[key]).max()) for key in a)


def records(output: Path, key: str) -> dict[int, torch.Tensor]:
    entries = reported(output / "report.json").items()
    return {step: torch.tensor(entry[key]) for step, entry in entries if key in entry}


def optimizer_tensors(output: Path) -> dict[str, torch.Tensor]:
    """Without those of the key biases, whose gradients are rounding."""
    tensors = load_file(steps_folder(output) / str(STEPS) / "model_optimizer.safetensors")
    return {name: tensor for name, tensor in tensors.items() if "key.bias" not in name}


@pytest.mark.parametrize("name", FLOAT32)
def test_losses_norms_evaluation_and_checkpoints_are_those_of_one_process(folder, name):
    expected = folder / "one process"
    sharded = folder / name
    assert len(losses(sharded)) == STEPS
    assert (records(sharded, "grad_norm")[2] > 1.0).all()  # it is clipped
    for key, tolerance in (("loss", 1e-6), ("grad_norm", 2e-6), ("eval_loss", 1e-6)):
        assert max_difference(records(expected, key), records(sharded, key)) < tolerance
    assert max_difference(optimizer_tensors(expected), optimizer_tensors(sharded)) < 1e-6
    ours, theirs = (steps_folder(output) / str(STEPS) for output in (expected, sharded))
    assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}
    assert steps_in(sharded) == ["5", "10"]


@pytest.mark.parametrize(
    ("reference", "name", "tolerance"),
    [
        ("one process LAMB", "ZeRO 0 LAMB", 1e-6),
        *(("one process bf16", f"ZeRO {stage} bf16", 5e-3) for stage in ZERO),
        *(
            ("ZeRO 2", f"ZeRO 2 to {name}", 1e-6 if name != "ZeRO 2" else 1e-99)
            for name in (*MOVES, "one process", "ZeRO 3 alone")
        ),
        *(
            (
                f"one process{' bf16' * ('bf16' in name)}",
                f"one process to {name}",
                5e-3 if "bf16" in name else 1e-6,
            )
            for name in CONTINUED
        ),
    ],
)
def test_losses_are_those_of_the_other_engine_also_where_a_run_moves_to_it(
    folder, reference, name, tolerance
):
    logged = records(folder / name, "loss")
    expected = {
        step: loss for step, loss in records(folder / reference, "loss").items() if step in logged
    }
    assert max(expected) == STEPS and len(expected) == (STEPS - SAVED if " to " in name else STEPS)
    assert max_difference(expected, logged) < tolerance
    assert all(tensor.dtype == torch.float32 for tensor in weights(folder / name, STEPS).values())


@pytest.mark.parametrize("stage", FLOAT16)
def test_float16_and_a_skipped_step_are_those_of_one_process(folder, stage):
    expected = folder / "one process fp16"
    sharded = folder / f"ZeRO {stage} fp16"
    for output in (expected, sharded):
        assert progress(output, STEPS)["loss_scale"] == {"value": 512, "clean_steps": STEPS - 2}
        assert progress(output, STEPS)["samples_consumed"] == (STEPS + 1) * 23
    assert max_difference(records(expected, "loss"), records(sharded, "loss")) < 1e-3


@pytest.mark.parametrize("name", [*MOVES, "ZeRO 3 alone"])
def test_a_checkpoint_of_zero_2_is_read_exactly_elsewhere(folder, name):
    saved, saved_again = (
        steps_folder(folder / run) / str(SAVED) for run in ("ZeRO 2", f"ZeRO 2 to {name}")
    )
    for file in ("model.safetensors", "model_optimizer.safetensors"):
        # The header has a digest of the run's progress, which differs with its flags.
        read, expected = load_file(saved_again / file), load_file(saved / file)
        assert read.keys() == expected.keys()
        assert all(torch.equal(read[name], expected[name]) for name in expected)


def test_squad_answers_are_those_of_one_process(tmp_path):
    """Evaluation of a model whose parameters are divided."""
    (tmp_path / "config.json").write_text(json.dumps({**TINY, **NO_DROPOUT}))
    sample = ROOT / "data" / "sample" / "squad"
    common = [
        *("--do-train", "--do-eval", "--train-file", sample / "train-v1.1.json"),
        *("--predict-file", sample / "dev-v1.1.json", "--bert-model", "custom", "--config-file"),
        *(
            tmp_path / "config.json",
            "--vocab-file",
            VOCAB_FILE,
            "--max-seq-length",
            64,
            "--doc-stride",
            16,
        ),
        *(
            "--max-query-length",
            24,
            "--device",
            "cpu",
            "--learning-rate",
            0.01,
            "--max-steps",
            8,
            "--log-freq",
            1,
        ),
        *("--global-batch-size", 16, "--train-batch-size", 8, "--show-config", "false"),
    ]
    answers = []
    for count, name, flags in (
        (1, "alone", ()),
        (2, "ZeRO 3", engine_flags(tmp_path, "ZeRO 3", ZERO[3])),
    ):
        output = tmp_path / name
        paths = ("--output-dir", output, "--report-file", output / "report.json")
        argv = [str(word) for word in (*common, *paths, *flags)]
        run_ranks(count, tmp_path / f"logs of {name}", run_squad.main, argv).check()
        answers.append((output / "custom" / "squad" / "predictions.json").read_text())
    assert answers[0] == answers[1] and len(set(json.loads(answers[0]).values())) > 10
