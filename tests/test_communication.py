"""The collectives of an update, counted, against those that benchmarks/scaling_model.py computes."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, TINY
from rank_runs import Command, pretrain, rank, run_ranks
from small_runs import RunInputs

from benchmarks import scaling_model
from benchmarks.scaling_model import Collective, Layout, gradient_collectives, optimizer_collectives
from bert_config import BertConfig
from data_loading.loader import StepLoader
from data_loading.pretraining_dataset import PretrainingDataset
from modeling import BertForPreTraining
from run_config import LoaderConfig
from trainer import Trainer

STEPS = 2
CONFIG = BertConfig(**{**TINY, "vocab_size": 1210})
SHARDED = ("--data-parallel-shard-degree", -1)
HYBRID = ("--data-parallel-shard-degree", 2, "--data-parallel-replicate-degree", 2)

# Name: layout, flags, sequences per update.
CASES = {
    "DDP, one micro-batch": (Layout(2), (), 8),
    "DDP, several": (Layout(2), (), 24),
    "DDP, bfloat16, one": (Layout(2), ("--use-pure-fp16",), 8),
    "DDP, bfloat16, several": (Layout(2), ("--use-pure-fp16",), 24),
    "FSDP2, several": (Layout(2, 2), SHARDED, 24),
    "FSDP2, always": (Layout(2, 2, "always"), (*SHARDED, "--fsdp-reshard-after-forward", "always"), 24),
    "FSDP2, never": (Layout(2, 2, "never"), (*SHARDED, "--fsdp-reshard-after-forward", "never"), 24),
    "FSDP2, bfloat16": (Layout(2, 2, param_bytes=2), (*SHARDED, "--use-pure-fp16"), 24),
    "FSDP2, 3 ranks": (Layout(3, 3), SHARDED, 24),
    "hybrid, one micro-batch": (Layout(4, 2), HYBRID, 16),
    "hybrid, several": (Layout(4, 2), HYBRID, 40),
}


def pretrain_and_count(cases: list[tuple[Path, Command]]) -> int:
    """Writes the collectives of each update of each run: [phase, kind, bytes of the whole tensor, group size]."""
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
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            if phases:
                size = max(tensor.nbytes for tensor in tensors)
                updates[-1].append([phases[-1], kind, size, dist.get_world_size(kwargs.get("group"))])
            return collective(*args, **kwargs)

        setattr(dist, name, counted)

    for name in ("training_step", "optimizer_step"):
        in_phase(name)
    count("all_reduce", "all_reduce")
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
def inputs(tmp_path_factory) -> RunInputs:
    return RunInputs.make(tmp_path_factory.mktemp("inputs"))


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
    loaders = [StepLoader(dataset, config, 42, rank=rank, world_size=world_size) for rank in range(world_size)]
    return max(len(loader.load(step).micro_batches) for loader in loaders)


def in_phase(update: list, phase: str) -> Counter:
    return Counter((kind, size, group) for found, kind, size, group in update if found == phase)


def as_counter(collectives: list[Collective]) -> Counter:
    return Counter((c.kind, c.num_bytes, c.group_size) for c in collectives)


@pytest.mark.parametrize("name", CASES)
def test_the_collectives_of_an_update_are_those_computed(inputs, counted, name):
    layout, _, sequences = CASES[name]
    # DDP divides the gradients into other buckets after the first update.
    for step in range(1, STEPS):
        count = micro_batches(inputs, layout.world_size, sequences, step)
        assert (count > 1) == (sequences // layout.world_size > 4), "the case is not what its name says"
        update = counted[name][step]
        assert in_phase(update, "training_step") == as_counter(gradient_collectives(CONFIG, layout, count))
        assert in_phase(update, "optimizer_step") == as_counter(optimizer_collectives(CONFIG, layout))


def test_the_counts_are_those_of_theory(counted):
    """Worked out by hand for two layers and their two FSDP2 modules' parent; K micro-batches."""
    for name, gathers, per_update in [("several", 5, False), ("always", 6, False), ("never", 3, True)]:
        for update in counted[f"FSDP2, {name}"][1:]:
            kinds = Counter(kind for phase, kind, *_ in update if phase == "training_step")
            k, remainder = divmod(kinds["reduce_scatter"], 3)
            assert (
                k > 1
                and not remainder
                and kinds == {"all_gather": gathers * (1 if per_update else k), "reduce_scatter": 3 * k}
            )
    for name in (name for name in CASES if name.startswith("DDP")):
        assert all(len(update) == 1 for update in counted[name][1:])
    for name in ("hybrid, one micro-batch", "hybrid, several"):
        for update in counted[name][1:]:
            kinds = Counter((phase, kind) for phase, kind, *_ in update)
            assert kinds["training_step", "all_reduce"] == 3
    small = [size for phase, _, size, _ in counted["FSDP2, several"][1] if phase == "optimizer_step"]
    assert len(small) == 2 and sum(small) < 1000


# --- the model of scaling ---------------------------------------------------------------------------------------------

LARGE = BertConfig.from_json_file(ROOT / "bert_configs" / "bert-large-uncased.json")


def test_bytes_of_bert_large_are_those_of_its_parameters():
    with torch.device("meta"):
        total = sum(p.numel() for p in BertForPreTraining(LARGE).parameters())
    (reduction,) = gradient_collectives(LARGE, Layout(64), 4)
    assert reduction.num_bytes == 4 * total
    calls = gradient_collectives(LARGE, Layout(64, 8, param_bytes=2), 4)
    scattered = sum(c.num_bytes for c in calls if c.kind == "reduce_scatter")
    assert scattered / 4 == pytest.approx(4 * total, rel=1e-3)  # rows are padded to a multiple of 8
    assert sum(c.num_bytes for c in calls if c.kind == "all_reduce") == scattered / 4 / 8


def test_flops_are_those_of_the_published_figures():
    """240.6 and 1020.5 GFLOPs per sequence, see docs/performance.md; 127 and 105 TFLOP/s on an A100."""
    with torch.device("meta"):
        model = BertForPreTraining(LARGE)
    for phase, gflops in zip(scaling_model.PHASES, (240.6, 1020.5), strict=True):
        assert model.training_flops([phase.length], phase.targets) / 1e9 == pytest.approx(gflops, abs=0.05)


def test_times_of_collectives_follow_the_ring_formulas():
    cluster = scaling_model.CLUSTERS["H100"]
    far, near = scaling_model.NODE_HOP_SECONDS, scaling_model.GPU_HOP_SECONDS
    in_node = Collective("all_reduce", 8 * 10**9, 8)
    assert scaling_model.ring_seconds(in_node, cluster) == pytest.approx(2 * (7e9 / 360e9 + 7 * near))
    between = Collective("all_gather", 8 * 10**9, 64)
    expected = 7e9 / 360e9 + 1e9 * 7 / 8 / 40e9 + 7 * far + 7 * near
    assert scaling_model.ring_seconds(between, cluster) == pytest.approx(expected)
    one_per_node = Collective("reduce_scatter", 8 * 10**9, 8, ranks_per_node=1)
    assert scaling_model.ring_seconds(one_per_node, cluster) == pytest.approx(7e9 / 40e9 + 7 * far)
    tree = Collective("all_reduce", 8 * 10**9, 8, ranks_per_node=1)
    assert scaling_model.ring_seconds(tree, cluster) == pytest.approx(2 * (7e9 / 40e9 + 3 * far))


def test_more_gpus_are_never_slower_and_overlap_never_hurts():
    cluster = scaling_model.CLUSTERS["H100"]
    for phase in scaling_model.PHASES:
        for layout_of in (Layout, lambda gpus: Layout(gpus, gpus, param_bytes=2)):
            seconds = [
                scaling_model.step_seconds(LARGE, phase, layout_of(gpus), cluster, True) for gpus in (8, 64, 1024)
            ]
            assert seconds == sorted(seconds, reverse=True)
            for gpus, time in zip((8, 64, 1024), seconds, strict=True):
                without = scaling_model.step_seconds(LARGE, phase, layout_of(gpus), cluster, False)
                assert math.isfinite(time) and time <= without


def test_the_documentation_has_the_tables_that_the_program_prints(capsys):
    scaling_model.main([])
    page = (ROOT / "benchmarks" / "scaling.md").read_text()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) > 10 and [row for row in rows if row not in page] == []
