"""The collectives of an update, counted, against those that follow from the parameters
(benchmarks/memory.md).
"""

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import TINY
from rank_runs import Command, pretrain, rank, run_ranks
from small_runs import RunInputs

from data_loading.loader import StepLoader
from data_loading.pretraining_dataset import PretrainingDataset
from encoders.bert import BertConfig, BertForPreTraining
from run_config import LoaderConfig
from trainer import Trainer

STEPS = 2
CONFIG = BertConfig(**{**TINY, "vocab_size": 1210})
SHARDED = ("--data-parallel-shard-degree", -1)
HYBRID = ("--data-parallel-shard-degree", 2, "--data-parallel-replicate-degree", 2)


@dataclass(frozen=True)
class Layout:
    """How the ranks share the model. param_bytes: bytes per number of gathered parameters; muon:
    the optimizer.
    """

    world_size: int
    shard_degree: int = 1
    reshard_after_forward: str = "default"
    param_bytes: int = 4
    muon: bool = False


def parameter_blocks() -> list[list[tuple[int, ...]]]:
    """The shapes of what FSDP2 gathers at once: each layer, and last all other parameters."""
    with torch.device("meta"):
        model = BertForPreTraining(CONFIG)
    blocks: list[list[tuple[int, ...]]] = [[] for _ in range(CONFIG.num_hidden_layers + 1)]
    for name, p in model.named_parameters():
        _, is_layer, rest = name.partition("encoder.layer.")
        blocks[int(rest.partition(".")[0]) if is_layer else -1].append(tuple(p.shape))
    return blocks


def gradient_collectives(layout: Layout, micro_batches: int) -> Counter:
    """(kind, bytes of the whole tensor, group size) of the forward and backward passes of one
    update; DDP's buckets count as one. Rows are padded to a multiple of the shard degree.
    """
    degree, blocks = layout.shard_degree, parameter_blocks()
    sizes = [
        sum(-(-shape[0] // degree) * degree * math.prod(shape[1:]) for shape in shapes)
        for shapes in blocks
    ]
    if degree == 1:
        return Counter({("all_reduce", 4 * sum(sizes), layout.world_size): 1})
    found: Counter = Counter()
    for number, size in enumerate(sizes):
        again = layout.reshard_after_forward == "always" or number < len(sizes) - 1
        gathers = (
            1 if layout.reshard_after_forward == "never" else micro_batches * (2 if again else 1)
        )
        found["all_gather", layout.param_bytes * size, degree] += gathers
        found["reduce_scatter", 4 * size, degree] += micro_batches
        if layout.world_size > degree:
            found["all_reduce", 4 * size // degree, layout.world_size // degree] += 1
    return found


def optimizer_collectives(layout: Layout) -> Counter:
    """Of clipping and LAMB on shards, in float64: the norm of all gradients, then the norms of the
    weight and the update of each tensor that has a trust ratio. Of Muon: each matrix of the layers
    and of the head's transform goes from its owner to all, and on shards the ranks' rows of it to
    the owner before.
    """
    degree, blocks = layout.shard_degree, parameter_blocks()
    if layout.muon:
        shapes = [shape for block in blocks[:-1] for shape in block if len(shape) > 1]
        # Of the masked-language-model head's transform.
        shapes.append((CONFIG.hidden_size, CONFIG.hidden_size))
        if degree == 1:
            return Counter(
                ("broadcast", 4 * math.prod(shape), layout.world_size) for shape in shapes
            )
        rows = [(-(-shape[0] // degree), shape[1]) for shape in shapes]
        found = Counter(
            (kind, 4 * math.prod(shape), degree) for shape in rows for kind in ("gather", "scatter")
        )
        return found + Counter({("all_gather", 8, degree): 1})
    if degree == 1:
        return Counter()
    adapted = sum(len(shape) > 1 for shapes in blocks for shape in shapes)
    return Counter({("all_gather", size, degree): 1 for size in (8, 16 * adapted)})


# Name: layout, flags, sequences per update.
CASES = {
    "DDP, one micro-batch": (Layout(2), (), 8),
    "DDP, several": (Layout(2), (), 24),
    "DDP, bfloat16, one": (Layout(2), ("--use-pure-fp16",), 8),
    "DDP, bfloat16, several": (Layout(2), ("--use-pure-fp16",), 24),
    "DDP, Muon": (Layout(2, muon=True), ("--optimizer", "Muon"), 8),
    "FSDP2, Muon": (Layout(3, 3, muon=True), (*SHARDED, "--optimizer", "Muon"), 24),
    "FSDP2, several": (Layout(2, 2), SHARDED, 24),
    "FSDP2, always": (
        Layout(2, 2, "always"),
        (*SHARDED, "--fsdp-reshard-after-forward", "always"),
        24,
    ),
    "FSDP2, never": (
        Layout(2, 2, "never"),
        (*SHARDED, "--fsdp-reshard-after-forward", "never"),
        24,
    ),
    "FSDP2, bfloat16": (Layout(2, 2, param_bytes=2), (*SHARDED, "--use-pure-fp16"), 24),
    "FSDP2, 3 ranks": (Layout(3, 3), SHARDED, 24),
    "hybrid, one micro-batch": (Layout(4, 2), HYBRID, 16),
    "hybrid, several": (Layout(4, 2), HYBRID, 40),
}


def pretrain_and_count(cases: list[tuple[Path, Command]]) -> int:
    """Writes the collectives of each update of each run: [phase, kind, bytes of the whole tensor,
    group size].
    """
    updates: list[list] = []
    phases: list[str] = []

    def in_phase(name: str) -> None:
        method = getattr(Trainer, name)

        def called(*args, **kwargs):
            if name == "training_step":
                updates.append([])
            phases.append(name)
            try:
                return method(*args, **kwargs)
            finally:
                phases.pop()

        setattr(Trainer, name, called)

    def count(kind: str, name: str) -> None:
        collective = getattr(dist, name)

        def counted(*args, **kwargs):
            tensors = [
                value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)
            ]
            if phases:
                size = max(tensor.nbytes for tensor in tensors)
                updates[-1].append(
                    [phases[-1], kind, size, dist.get_world_size(kwargs.get("group"))]
                )
            return collective(*args, **kwargs)

        setattr(dist, name, counted)

    for name in ("training_step", "optimizer_step"):
        in_phase(name)
    count("all_reduce", "all_reduce")
    count("all_gather", "all_gather")  # of norms
    for name in ("broadcast", "gather", "scatter"):  # of Muon
        count(name, name)
    single = hasattr(dist, "all_gather_single")  # the names since torch 2.13
    count("all_gather", "all_gather_single" if single else "all_gather_into_tensor")
    count("reduce_scatter", "reduce_scatter_single" if single else "reduce_scatter_tensor")
    for path, command in cases:
        updates.clear()
        if code := pretrain(command):
            return code
        if rank() == 0:
            path.write_text(json.dumps(updates))
    return 0


@pytest.fixture(scope="module")
def counted(inputs, tmp_path_factory) -> dict[str, list]:
    folder = tmp_path_factory.mktemp("counted")
    cases = []
    for name, (layout, flags, sequences) in CASES.items():
        flags = ("--max-steps", STEPS, "--global-batch-size", sequences, *flags)
        argv = inputs.command(folder / name, *flags, dropout=False)
        cases.append((folder / f"{name}.json", Command(layout.world_size, argv)))
    run_ranks(4, folder / "logs", pretrain_and_count, cases).check()
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in CASES}


def micro_batches(inputs: RunInputs, world_size: int, sequences: int, step: int) -> int:
    """The most of any rank."""
    dataset, config = PretrainingDataset(inputs.shards, 1210), LoaderConfig(4, sequences, 32, 5)
    loaders = [
        StepLoader(dataset, config, 42, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    return max(len(loader.load(step).micro_batches) for loader in loaders)


def in_phase(update: list, phase: str) -> Counter:
    return Counter((kind, size, group) for found, kind, size, group in update if found == phase)


@pytest.mark.parametrize("name", CASES)
def test_the_collectives_of_an_update_are_those_computed(inputs, counted, name):
    layout, _, sequences = CASES[name]
    # DDP divides the gradients into other buckets after the first update.
    for step in range(1, STEPS):
        count = micro_batches(inputs, layout.world_size, sequences, step)
        assert (count > 1) == (sequences // layout.world_size > 4), (
            "the case is not what its name says"
        )
        update = counted[name][step]
        assert in_phase(update, "training_step") == gradient_collectives(layout, count)
        assert in_phase(update, "optimizer_step") == optimizer_collectives(layout)
