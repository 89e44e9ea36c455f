"""The collectives of an update, counted, against those that follow from the parameters
(benchmarks/what_was_tried.md).
"""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import TINY, read_json
from rank_runs import Command, pretrain, rank, run_ranks
from small_runs import RunInputs

from bert_recipe.config import LoaderConfig
from bert_recipe.data_loading.loader import StepLoader
from bert_recipe.data_loading.pretraining_dataset import PretrainingDataset
from bert_recipe.model.encoders.bert import BertConfig, BertForPreTraining
from bert_recipe.training.trainer import Trainer

STEPS = 2
CONFIG = BertConfig(**{**TINY, "vocab_size": 1210})
LAYERS = CONFIG.num_hidden_layers
SHARDED = ("--data-parallel-shard-degree", -1)
HYBRID = ("--data-parallel-shard-degree", 2, "--data-parallel-replicate-degree", 2)
ALWAYS = (*SHARDED, "--fsdp-reshard-after-forward", "always")
NEVER = (*SHARDED, "--fsdp-reshard-after-forward", "never")

with torch.device("meta"):
    SHAPES = {name: tuple(p.shape) for name, p in BertForPreTraining(CONFIG).named_parameters()}
LAYER = [shape for name, shape in SHAPES.items() if ".layer.0." in name]
OTHERS = [shape for name, shape in SHAPES.items() if ".layer." not in name]  # one block of FSDP2
# Muon's: of the layers, and of the head's transform.
MATRICES = [shape for shape in LAYER if len(shape) == 2] * LAYERS
MATRICES.append((CONFIG.hidden_size, CONFIG.hidden_size))
# LAMB's trust ratios: of all tensors but biases and LayerNorms.
NUM_ADAPTED = sum(len(shape) == 2 for shape in SHAPES.values())


def size(shapes: list[tuple[int, ...]], shards: int = 1) -> int:
    """Bytes in float32. Shards have the same number of rows: the last one is padded."""
    return sum(4 * -(-rows // shards) * shards * math.prod(rest) for rows, *rest in shapes)


def gathers_and_scatters(
    micro_batches: int, layer_gathers: int, other_gathers: int, ranks: int = 2, itemsize: int = 4
) -> dict:
    """FSDP2's collectives: a layer is gathered `layer_gathers` times, all other parameters
    `other_gathers` times, in numbers of `itemsize` bytes. Each micro-batch scatters gradients.
    """
    layer, others = size(LAYER, ranks), size(OTHERS, ranks)
    return {
        ("all_gather", layer * itemsize // 4, ranks): LAYERS * layer_gathers,
        ("all_gather", others * itemsize // 4, ranks): other_gathers,
        ("reduce_scatter", layer, ranks): LAYERS * micro_batches,
        ("reduce_scatter", others, ranks): micro_batches,
    }


def fsdp2(micro_batches: int, **options: int) -> dict:
    """A layer is gathered for the forward and again for the backward pass."""
    return gathers_and_scatters(micro_batches, 2 * micro_batches, micro_batches, **options)


def hybrid(micro_batches: int) -> dict:
    """FSDP2 of two ranks, whose gradients the two copies then add up."""
    copies = {("all_reduce", size(LAYER, 2) // 2, 2): LAYERS}
    copies["all_reduce", size(OTHERS, 2) // 2, 2] = 1
    return fsdp2(micro_batches) | copies


# Of DDP, in one bucket, for any number of micro-batches.
ONE_ALL_REDUCE = {("all_reduce", size(LAYER * LAYERS + OTHERS), 2): 1}


def norms(ranks: int) -> dict:
    """Of clipping and LAMB on shards, in float64: the norm of all gradients; of each adapted tensor
    the norms of weight and update.
    """
    return {("all_gather", 8, ranks): 1, ("all_gather", 16 * NUM_ADAPTED, ranks): 1}


def muon_on_copies() -> dict:
    """Each matrix goes from its owner to all."""
    return Counter(("broadcast", size([shape]), 2) for shape in MATRICES)


def muon_on_shards(ranks: int) -> dict:
    """The ranks' rows of each matrix go to its owner and back; and the norm of all gradients."""
    rows = [size([shape], ranks) // ranks for shape in MATRICES]
    calls = Counter((kind, count, ranks) for count in rows for kind in ("gather", "scatter"))
    return calls | {("all_gather", 8, ranks): 1}


@dataclass(frozen=True)
class Case:
    """A run, and the collectives of an update by (kind, bytes of the whole tensor, group size).

    sequences: of an update. gradients: of the forward and backward passes, by the number of
    micro-batches. optimizer: of clipping and the optimizer.
    """

    world_size: int
    flags: tuple
    sequences: int
    gradients: Callable[[int], dict]
    optimizer: dict


BF16, MUON = ("--use-pure-fp16",), ("--optimizer", "Muon")
CASES = {
    "DDP, one micro-batch": Case(2, (), 8, lambda _: ONE_ALL_REDUCE, {}),
    "DDP, several": Case(2, (), 24, lambda _: ONE_ALL_REDUCE, {}),
    "DDP, bfloat16, one": Case(2, BF16, 8, lambda _: ONE_ALL_REDUCE, {}),
    "DDP, bfloat16, several": Case(2, BF16, 24, lambda _: ONE_ALL_REDUCE, {}),
    "DDP, Muon": Case(2, MUON, 8, lambda _: ONE_ALL_REDUCE, muon_on_copies()),
    "FSDP2, Muon": Case(
        3, (*SHARDED, *MUON), 24, lambda k: fsdp2(k, ranks=3), muon_on_shards(ranks=3)
    ),
    "FSDP2, several": Case(2, SHARDED, 24, fsdp2, norms(2)),
    "FSDP2, always": Case(2, ALWAYS, 24, lambda k: gathers_and_scatters(k, 2 * k, 2 * k), norms(2)),
    "FSDP2, never": Case(2, NEVER, 24, lambda k: gathers_and_scatters(k, 1, 1), norms(2)),
    "FSDP2, bfloat16": Case(2, (*SHARDED, *BF16), 24, lambda k: fsdp2(k, itemsize=2), norms(2)),
    "FSDP2, 3 ranks": Case(3, SHARDED, 24, lambda k: fsdp2(k, ranks=3), norms(3)),
    "hybrid, one micro-batch": Case(4, HYBRID, 16, hybrid, norms(2)),
    "hybrid, several": Case(4, HYBRID, 40, hybrid, norms(2)),
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
    for name, case in CASES.items():
        flags = ("--max-steps", STEPS, "--global-batch-size", case.sequences, *case.flags)
        argv = inputs.command(folder / name, *flags, dropout=False)
        cases.append((folder / f"{name}.json", Command(case.world_size, argv)))
    run_ranks(4, folder / "logs", pretrain_and_count, cases).check()
    return {name: read_json(folder / f"{name}.json") for name in CASES}


def micro_batches(inputs: RunInputs, world_size: int, sequences: int, step: int) -> int:
    """The most of any rank."""
    dataset = PretrainingDataset(inputs.shards, 1210)
    config = LoaderConfig(4, sequences, 32, 5)
    loaders = [
        StepLoader(dataset, config, 42, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    return max(len(loader.load(step).micro_batches) for loader in loaders)


def in_phase(update: list, phase: str) -> Counter:
    return Counter((kind, size, group) for name, kind, size, group in update if name == phase)


@pytest.mark.parametrize("name", CASES)
def test_the_collectives_of_an_update_are_those_computed(inputs, counted, name):
    case = CASES[name]
    # DDP divides the gradients into other buckets after the first update.
    for step in range(1, STEPS):
        count = micro_batches(inputs, case.world_size, case.sequences, step)
        assert (count > 1) == (case.sequences // case.world_size > 4), "not what its name says"
        update = counted[name][step]
        assert in_phase(update, "training_step") == case.gradients(count)
        assert in_phase(update, "optimizer_step") == case.optimizer
