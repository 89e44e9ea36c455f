#!/usr/bin/env python3
"""Computes how pre-training scales to many GPUs: collectives per update, and a model of the time that they take.

    python3 benchmarks/scaling_model.py

Nothing is measured here. The collectives are those that tests/test_communication.py counts;
benchmarks/scaling.md has the tables and the formulas.
"""

import functools
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bert_config import BertConfig
from modeling import BertForPreTraining
from utils.command_line import ArgumentParser
from utils.errors import run_main
from utils.progress import print_line

GPUS_PER_NODE = 8
MIB, GB = 2**20, 1e9


# --- collectives per update -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collective:
    """One call. kind: all_gather, reduce_scatter or all_reduce. num_bytes: of the whole tensor, gathered or not yet
    scattered. group_size: ranks that take part, ranks_per_node of them in each node."""

    kind: str
    num_bytes: int
    group_size: int
    ranks_per_node: int = GPUS_PER_NODE


@dataclass(frozen=True)
class Layout:
    """How the ranks share the model. param_bytes: bytes per number of gathered parameters."""

    world_size: int
    shard_degree: int = 1
    reshard_after_forward: str = "default"
    param_bytes: int = 4

    @property
    def replicate_degree(self) -> int:
        return self.world_size // self.shard_degree


@functools.cache
def parameter_blocks(config: BertConfig) -> list[dict[str, tuple[int, ...]]]:
    """What FSDP2 gathers at once: each layer, and last all other parameters. Shapes by name, with the vocabulary's
    padding."""
    with torch.device("meta"):
        model = BertForPreTraining(config)
    blocks: list[dict[str, tuple[int, ...]]] = [{} for _ in range(config.num_hidden_layers + 1)]
    for name, p in model.named_parameters():
        _, is_layer, rest = name.partition("encoder.layer.")
        blocks[int(rest.partition(".")[0]) if is_layer else -1][name] = tuple(p.shape)
    return blocks


def num_parameters(shapes: dict[str, tuple[int, ...]], multiple: int = 1) -> int:
    """Their number if rows are padded to a multiple: of the shard degree, for equal shards."""
    return sum(-(-shape[0] // multiple) * multiple * math.prod(shape[1:]) for shape in shapes.values())


def gradient_collectives(config: BertConfig, layout: Layout, micro_batches: int) -> list[Collective]:
    """Those of the forward and backward passes of one update; DDP's buckets count as one."""
    blocks, degree = parameter_blocks(config), layout.shard_degree
    if layout.world_size == 1:
        return []
    if degree == 1:
        return [Collective("all_reduce", 4 * sum(map(num_parameters, blocks)), layout.world_size)]
    gathered_again = blocks if layout.reshard_after_forward == "always" else blocks[:-1]
    found = []
    for block in blocks:
        padded = num_parameters(block, degree)
        gathers = (
            1 if layout.reshard_after_forward == "never" else micro_batches * (2 if block in gathered_again else 1)
        )
        found += [Collective("all_gather", layout.param_bytes * padded, degree)] * gathers
        found += [Collective("reduce_scatter", 4 * padded, degree)] * micro_batches
        if layout.replicate_degree > 1:
            ranks_per_node = max(GPUS_PER_NODE // degree, 1)  # those with the same rows
            found.append(Collective("all_reduce", 4 * padded // degree, layout.replicate_degree, ranks_per_node))
    return found


def optimizer_collectives(config: BertConfig, layout: Layout) -> list[Collective]:
    """Those of clipping and LAMB on shards, in float64: the norm of all gradients, then the norms of the weight and the
    update of each tensor that has a trust ratio."""
    if layout.shard_degree == 1:
        return []
    adapted = sum(len(shape) > 1 for block in parameter_blocks(config) for shape in block.values())
    return [Collective("all_reduce", size, layout.shard_degree) for size in (8, 16 * adapted)]


# --- time -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """Nodes of 8 GPUs. Peak FLOP/s of 16-bit matrix products; bytes/s of a GPU to others of its node (NVLink, one
    direction), to other nodes (its own InfiniBand adapter), and to its memory. From NVIDIA's data sheets."""

    peak: float
    nvlink: float
    infiniband: float
    memory: float


CLUSTERS = {
    "H100": Cluster(peak=989.4e12, nvlink=450 * GB, infiniband=50 * GB, memory=3350 * GB),  # NVLink 4, NDR 400 Gb/s
    "A100": Cluster(peak=312e12, nvlink=300 * GB, infiniband=25 * GB, memory=2039 * GB),  # NVLink 3, HDR 200 Gb/s
}
LINK_EFFICIENCY = 0.8  # assumed: of the rates above
NODE_HOP_SECONDS = 4e-6  # assumed: latency of a hop between nodes; 3 to 5 us are usual
GPU_HOP_SECONDS = 0.7e-6  # assumed: of a hop between GPUs of a node
BUCKET_BYTES = 25 * MIB  # DDP's; its last bucket cannot overlap with the backward pass
LAMB_BYTES = 60  # read and written per parameter: 15 float32 numbers (optimizer.py)


@dataclass(frozen=True)
class Phase:
    """sequences: the global batch. micro_batch: per GPU. published: sequences/s of one A100, NVIDIA's recipe."""

    name: str
    length: int
    targets: int
    steps: int
    sequences: int
    micro_batch: int
    published: float


PHASES = (
    Phase("phase 1", 128, 20, 7038, 65536, 256, 529.0),
    Phase("phase 2", 512, 80, 1563, 32768, 32, 103.0),
)


def ring_seconds(collective: Collective, cluster: Cluster) -> float:
    """The time of a collective: rings within nodes, then one ring per GPU between nodes, each with its share of the
    data. A ring of n has n - 1 hops. An all-reduce goes through both twice; between nodes NCCL uses trees for it, whose
    hops are log2(n)."""
    inside = min(collective.group_size, collective.ranks_per_node)
    nodes = collective.group_size // inside
    seconds = collective.num_bytes * (inside - 1) / inside / (cluster.nvlink * LINK_EFFICIENCY)
    seconds += collective.num_bytes / inside * (nodes - 1) / nodes / (cluster.infiniband * LINK_EFFICIENCY)
    hops = math.log2(nodes) if collective.kind == "all_reduce" else nodes - 1
    seconds += hops * NODE_HOP_SECONDS + (inside - 1) * GPU_HOP_SECONDS
    return 2 * seconds if collective.kind == "all_reduce" else seconds


def compute_rate(phase: Phase, cluster: Cluster) -> float:
    """Sequences/s of one GPU: the utilization that NVIDIA's recipe reaches on an A100, on this cluster's GPU."""
    return phase.published * cluster.peak / CLUSTERS["A100"].peak


def step_seconds(config: BertConfig, phase: Phase, layout: Layout, cluster: Cluster, overlap: bool) -> float:
    """One update. overlap: collectives overlap with the passes that they belong to, and only what exceeds these is
    waited for; otherwise all of their time is."""
    per_gpu = phase.sequences / layout.world_size
    micro_batches = math.ceil(per_gpu / phase.micro_batch)
    compute = per_gpu / compute_rate(phase, cluster)
    parameters = sum(map(num_parameters, parameter_blocks(config)))
    update = parameters / layout.shard_degree * LAMB_BYTES / (cluster.memory * LINK_EFFICIENCY)
    update += sum(ring_seconds(c, cluster) for c in optimizer_collectives(config, layout))
    collectives = gradient_collectives(config, layout, micro_batches)
    communication = sum(ring_seconds(c, cluster) for c in collectives)
    if not overlap or not collectives:
        return compute + communication + update
    if layout.shard_degree == 1:  # in the last backward pass, but for the last bucket
        last_backward = compute / micro_batches * 2 / 3
        bucket = Collective("all_reduce", BUCKET_BYTES, layout.world_size)
        return compute + max(communication - last_backward, ring_seconds(bucket, cluster)) + update
    first = max(collectives, key=lambda c: (c.kind == "all_gather", c.num_bytes))  # nothing runs before it
    return max(compute, communication) + micro_batches * ring_seconds(first, cluster) + update


def hours(config: BertConfig, layout: Layout, cluster: Cluster, overlap: bool = True) -> float:
    """Both phases, without checkpoints and evaluation."""
    return sum(phase.steps * step_seconds(config, phase, layout, cluster, overlap) for phase in PHASES) / 3600


# --- tables -----------------------------------------------------------------------------------------------------------


def layouts(gpus: int) -> dict[str, Layout]:
    if gpus == 1:
        return {"one process": Layout(1)}
    found = {"DDP": Layout(gpus), "FSDP2, all ranks": Layout(gpus, gpus, param_bytes=2)}
    if gpus > GPUS_PER_NODE:
        found["hybrid, a replica per node"] = Layout(gpus, GPUS_PER_NODE, param_bytes=2)
    return found


def collectives_table(config: BertConfig, gpus: int, micro_batches: int) -> list[str]:
    """Collectives of one update: calls and bytes of the tensors, and bytes that each GPU sends in rings."""
    lines = ["| layout | all-gather | reduce-scatter | all-reduce | LAMB | sent per GPU |", "|---|---|---|---|---|---|"]
    for name, layout in layouts(gpus).items():
        calls = gradient_collectives(config, layout, micro_batches)
        cells = [
            describe([c for c in calls if c.kind == kind]) for kind in ("all_gather", "reduce_scatter", "all_reduce")
        ]
        small = optimizer_collectives(config, layout)
        sent = sum(
            (2 if c.kind == "all_reduce" else 1) * c.num_bytes * (c.group_size - 1) / c.group_size
            for c in [*calls, *small]
        )
        lines.append(f"| {' | '.join([name, *cells, describe(small)])} | {sent / GB:.2f} GB |")
    return lines


def describe(calls: list[Collective]) -> str:
    total = sum(c.num_bytes for c in calls)
    size = f"{total / GB:.2f} GB" if total >= GB / 100 else f"{total / 1000:.1f} kB"
    return f"{len(calls)}, {size}" if calls else "-"


def scaling_table(config: BertConfig) -> list[str]:
    """Sequences/s and efficiency against one GPU, if collectives overlap and if they do not."""
    cluster = CLUSTERS["H100"]
    titles = [f"{phase.name}, {overlap}" for phase in PHASES for overlap in ("overlap", "none")]
    lines = [f"| H100s | layout | {' | '.join(titles)} | both phases |", "|---" * 7 + "|"]
    for gpus in (1, 8, 64, 1024):
        for name, layout in layouts(gpus).items():
            cells = []
            for phase in PHASES:
                alone = phase.sequences / step_seconds(config, phase, Layout(1), cluster, True)
                for overlap in (True, False):
                    rate = phase.sequences / step_seconds(config, phase, layout, cluster, overlap)
                    cells.append(f"{rate:,.0f} ({rate / gpus / alone:.0%})")
            fast, slow = (hours(config, layout, cluster, overlap) for overlap in (True, False))
            lines.append(f"| {gpus:,} | {name} | {' | '.join(cells)} | {fast:.2f} to {slow:.2f} h |")
    return lines


def main(argv: list[str] | None = None) -> int:
    ArgumentParser(description=__doc__.splitlines()[0]).parse_args(argv)
    config = BertConfig.from_json_file(ROOT / "bert_configs" / "bert-large-uncased.json")
    print_line("Collectives of one update of BERT-large on 64 GPUs, one micro-batch (computed):")
    print_line("\n".join(collectives_table(config, 64, 1)))
    print_line("\nScaling of BERT-large's pre-training (computed, not measured):")
    print_line("\n".join(scaling_table(config)))
    with torch.device("meta"):
        model = BertForPreTraining(config)
    for phase in PHASES:
        flops = model.training_flops([phase.length], phase.targets)
        share = phase.published * flops / CLUSTERS["A100"].peak
        print_line(f"Utilization in {phase.name} (length {phase.length}): {share:.0%} of the peak, as on an A100.")
    return 0


if __name__ == "__main__":
    run_main(main)
