"""Sharding of any torch model: which rows a rank has, and optimizers that work on shards as on
whole tensors.
"""

import re
from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.distributed as dist
from conftest import NO_DROPOUT, ROOT
from rank_runs import rank, run_ranks
from torch import Tensor, nn

from bert_recipe.model.encoders.modules import Linear
from bert_recipe.optimization.lamb import Lamb
from bert_recipe.optimization.muon import Muon, NorMuon, muon_groups
from bert_recipe.optimization.norms import sum_over_shards, total_norm
from bert_recipe.optimization.ownership import divide
from bert_recipe.optimization.protocol import apply_step, gradients, parameter_groups
from bert_recipe.parallel.fsdp import fill_shards, make_mesh, shard_model
from bert_recipe.utils import collectives
from bert_recipe.utils.errors import UserError

STEPS = 20

# Rows that 2 and 3 ranks divide unevenly, and fewer rows than ranks, so that some ranks have none.
MODEL = nn.ModuleDict(
    {
        **{"embedding": nn.Embedding(7, 3), "dense": nn.Linear(4, 16), "head": nn.Linear(8, 2)},
        **{"single": nn.Linear(5, 1, bias=False), "LayerNorm": nn.LayerNorm(3, bias=False)},
    }
)
MODEL.hidden_modules = nn.ModuleList(
    nn.ModuleDict({name: layer})
    for name, layer in (
        ("Wqkv", Linear(4, 9, bias=False, stacked=3)),
        ("output", Linear(7, 5, bias=False)),
    )
)
SHAPES = {name: p.shape for name, p in MODEL.named_parameters()}


def random_tensors(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(200 + seed)  # with which all rows move
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def own_rows(tensor: Tensor, degree: int, shard_rank: int) -> Tensor:
    """What torch.chunk gives to a rank: the reference for the division of rows."""
    chunks = tensor.chunk(degree)
    return chunks[shard_rank] if shard_rank < len(chunks) else tensor[:0]


MAKERS = {
    "NorMuon": lambda named, group: NorMuon(
        muon_groups(MODEL, 0.01, named), 0.01, shard_group=group
    ),
    "LAMB": lambda named, group: Lamb(
        parameter_groups(MODEL, 0.01, named), 0.01, shard_group=group
    ),
    "DeepSpeed's LAMB": lambda named, group: Lamb(
        parameter_groups(MODEL, 0.01, named),
        0.01,
        trust_bounds=(0.01, 0.3),
        adapt_undecayed=True,
        shard_group=group,
    ),
    "AdamW": lambda named, _group: torch.optim.AdamW(
        parameter_groups(MODEL, 0.01, named), 0.01, fused=True
    ),
}


def compare_optimizers(shard_degree: int, replicate_degree: int) -> None:
    """20 steps on shards against 20 steps on whole tensors, for each optimizer, with clipping in
    apply_step too.
    """
    dist.init_process_group("gloo")
    mesh = make_mesh("cpu", shard_degree, replicate_degree)
    assert len(dist.distributed_c10d._world.pg_map) <= 3, "a rank makes no groups of others"
    group, shard_rank = mesh["shard"].get_group(), mesh["shard"].get_local_rank()
    for name, make in MAKERS.items():
        initial = random_tensors(0)
        whole = {key: nn.Parameter(value.clone()) for key, value in initial.items()}
        shards = {
            key: nn.Parameter(own_rows(value, shard_degree, shard_rank).clone())
            for key, value in initial.items()
        }
        whole_optimizer = make(whole, None)
        shard_optimizer = make(shards, group)
        for step in range(STEPS):
            for key, gradient in random_tensors(1 + step, scale=3.0).items():
                whole[key].grad = gradient
                shards[key].grad = own_rows(gradient, shard_degree, shard_rank).clone()
            for optimizer, norm_group in ((whole_optimizer, None), (shard_optimizer, group)):
                clip = (total_norm(gradients(optimizer), norm_group) / 5.0).clamp(min=1.0)
                assert clip > 1, "gradients are not clipped"
                apply_step(optimizer, clip, torch.zeros(()))
        assert any(not len(shard) for shard in shards.values()) == (shard_rank > 0)
        for key, expected in whole.items():
            expected = own_rows(expected.detach(), shard_degree, shard_rank)
            moved = (
                (expected - own_rows(initial[key], shard_degree, shard_rank)).abs().max()
                if len(expected)
                else 1
            )
            assert moved > 1e-4, (name, key, "did not move")
            torch.testing.assert_close(
                shards[key].detach(), expected, rtol=1e-6, atol=1e-6, msg=f"{name} {key}"
            )


@pytest.mark.parametrize(("shard_degree", "replicate_degree"), [(3, 1), (2, 2)])
def test_optimizers_on_shards_equal_those_on_whole_tensors_over_20_steps(
    tmp_path, shard_degree, replicate_degree
):
    run_ranks(
        shard_degree * replicate_degree,
        tmp_path,
        compare_optimizers,
        shard_degree,
        replicate_degree,
    ).check()


# Rows and columns of one matrix: tall, square, wide; rows that two ranks divide evenly and not.
MATRIX_SHAPES = ((12, 4), (13, 4), (8, 8), (7, 7), (4, 12), (5, 12))


def stacks_of_matrices(shape: tuple[int, int], stacked: int, count: int) -> nn.Module:
    """A model of `count` weights, each of `stacked` matrices of one shape."""
    rows, columns = shape
    generator = torch.Generator().manual_seed(7)
    layers = nn.ModuleList(
        Linear(columns, stacked * rows, bias=False, stacked=stacked) for _ in range(count)
    )
    for layer in layers:
        layer.weight.data = torch.randn(layer.weight.shape, generator=generator)
    model = nn.Module()
    model.layers = model.hidden_modules = layers
    return model


def compare_matrices(optimizer_name: str) -> None:
    """Updates of matrices of each shape on shards, and divided among copies, against whole ones in
    one process. A rank owns one, two or three of them.
    """
    dist.init_process_group("gloo")
    make = {"Muon": Muon, "NorMuon": NorMuon}[optimizer_name]
    world = dist.group.WORLD
    for shape, stacked, per_rank in product(MATRIX_SHAPES, (1, 2), (1, 2, 3)):
        model = stacks_of_matrices(shape, stacked, per_rank * world.size())
        initial = {name: p.detach() for name, p in model.named_parameters()}
        results = []
        for shard_group, replica_group in ((None, None), (world, None), (None, world)):
            degree, shard_rank = (1, 0) if shard_group is None else (world.size(), rank())
            named = {
                name: nn.Parameter(own_rows(value, degree, shard_rank).clone())
                for name, value in initial.items()
            }
            groups = muon_groups(model, 0.01, named)
            optimizer = make(groups, 0.1, shard_group=shard_group, replica_group=replica_group)
            for step in range(3):
                generator = torch.Generator().manual_seed(step)
                for name, p in named.items():
                    gradient = torch.randn(initial[name].shape, generator=generator)
                    p.grad = own_rows(gradient, degree, shard_rank).clone()
                apply_step(optimizer, torch.ones(()), torch.zeros(()))
            results.append({name: p.detach() for name, p in named.items()})
        whole, shards, copies = results
        for name, expected in whole.items():
            case = f"{optimizer_name} {shape} x {stacked}, {per_rank} a rank"
            moved = (expected - initial[name]).abs().max()
            assert moved > 1e-2, (case, "did not move")
            torch.testing.assert_close(copies[name], expected, rtol=1e-5, atol=1e-6, msg=case)
            expected = own_rows(expected, world.size(), rank())
            torch.testing.assert_close(shards[name], expected, rtol=1e-5, atol=1e-6, msg=case)


@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
def test_matrices_of_every_shape_are_updated_on_shards_as_whole_ones(tmp_path, name):
    run_ranks(2, tmp_path, compare_matrices, name).check()


def write_to_a_transposed_tensor() -> None:
    dist.init_process_group("gloo")
    collectives.scatter(torch.empty(3, 2).mT, None, None, 0)


def test_a_collective_that_would_fill_a_tensor_in_another_order_is_an_error(tmp_path):
    results = run_ranks(1, tmp_path, write_to_a_transposed_tensor)
    assert "writes to contiguous tensors only" in results.errors[0]


def compare_replicas() -> None:
    """20 steps of NorMuon with the matrices divided among replicas against one process."""
    dist.init_process_group("gloo")
    weights = random_tensors(0)
    alone, shared = (
        {key: nn.Parameter(value.clone()) for key, value in weights.items()} for _ in range(2)
    )
    groups = [muon_groups(MODEL, 0.01, parameters) for parameters in (alone, shared)]
    optimizers = NorMuon(groups[0], 0.01), NorMuon(groups[1], 0.01, replica_group=dist.group.WORLD)
    for step in range(STEPS):
        for parameters, optimizer in zip((alone, shared), optimizers, strict=True):
            for key, gradient in random_tensors(1 + step).items():
                parameters[key].grad = gradient
            apply_step(optimizer, torch.ones(()), torch.tensor(float(step == 5)))
    for key, expected in alone.items():
        assert not torch.equal(expected, weights[key]) and torch.equal(shared[key], expected), key


def test_the_most_expensive_matrices_are_on_different_ranks():
    costs = [7, 3, 3, 2, 2, 2, 1]
    owners = divide(costs, 3)
    assert (
        max(sum(c for c, o in zip(costs, owners, strict=True) if o == rank) for rank in range(3))
        == 7
    )


def take_norms() -> None:
    dist.init_process_group("gloo")
    group = make_mesh("cpu", 3)["shard"].get_group()
    parts = torch.tensor(
        [[1.0, 2**-53, 2**-53], [2**-53, 1.0, 2**-53], [2**-53, 2**-53, 1.0]], dtype=torch.float64
    )
    assert torch.equal(sum_over_shards(parts[rank()], group), parts.sum(dim=0)), (
        "the order of the sum matters"
    )


def test_norms_have_equal_bits_on_copies(tmp_path):
    """One that is not finite: test_sharded_runs.py."""
    run_ranks(3, tmp_path, take_norms).check()


class PatchModel(nn.Module):
    """Like a vision transformer: patches, a class token, positions from a table, normalization with
    running statistics, an output tied to the first layer, and a buffer that is not in the state
    dict.
    """

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv1d(1, 5, 1)
        self.class_token = nn.Parameter(torch.zeros(1, 1, 5))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(5, 1, 7, 0.0, batch_first=True) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(5)
        self.out = nn.Linear(5, 1, bias=False)
        self.out.weight = nn.Parameter(torch.zeros(1, 5))
        self.again = nn.Linear(5, 1, bias=False)
        self.again.weight = self.out.weight
        self.register_buffer("positions", torch.arange(30.0).view(1, 6, 5).sin())
        self.register_buffer("scale", torch.tensor(3.0), persistent=False)

    def forward(self, x_BS: Tensor) -> Tensor:
        tokens = self.patches(self.norm(x_BS)[:, None]).transpose(1, 2)
        tokens = (
            torch.cat([self.class_token.expand(len(tokens), 1, 5), tokens], dim=1) + self.positions
        )
        for layer in self.layers:
            tokens = layer(tokens)
        tokens = tokens.mean(dim=1)
        return (self.out(tokens) + self.again(tokens.tanh())) * self.scale


def masked_bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    return BertForMaskedLM(
        BertConfig(vocab_size=31, max_position_embeddings=12, **sizes, **NO_DROPOUT)
    )


def patch_loss(model: nn.Module, micro_batch: int, rows: slice) -> Tensor:
    inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(micro_batch))
    return (model(inputs) - 1).square()[rows].sum()  # all rows, for the running statistics


def masked_loss(model: nn.Module, micro_batch: int, rows: slice) -> Tensor:
    ids = (micro_batch + torch.arange(60).view(6, 10)) % 31
    logits = model(input_ids=ids[rows]).logits
    return (
        nn.functional.cross_entropy(logits.flatten(0, 1), ids[rows].flatten(), reduction="sum") / 60
    )


def compare_models(make: Callable, blocks_of: Callable, loss_of: Callable) -> None:
    """Three updates of two micro-batches of 6 rows on all ranks against one process, of a model
    with buffers and tied weights, with values and on meta.
    """
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    mesh = make_mesh("cpu", ranks)
    share = 6 // ranks
    own = slice(share * rank(), share * (rank() + 1))
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        reference = make()
        for p in reference.parameters():
            nn.init.normal_(p, std=0.3)
        values = {name: value.detach().clone() for name, value in reference.state_dict().items()}
        values |= {name: value.clone() for name, value in reference.named_buffers()}
        with torch.device(device):
            model = make()
        shard_model(model, blocks_of(model), mesh)
        shards = fill_shards(model, mesh, "cpu", values.items())
        assert shards.shards.keys() == dict(reference.named_parameters()).keys()
        for name, shard in shards.shards.items():
            assert torch.equal(shard, own_rows(values[name], ranks, rank())), name
            assert shards.row_start(name) == sum(
                len(own_rows(values[name], ranks, before)) for before in range(rank())
            )
        whole = Lamb(parameter_groups(reference, 0.01), 0.05)
        sharded = Lamb(parameter_groups(model, 0.01, shards.shards), 0.05, shard_group=shards.group)
        for micro_batch in range(6):
            losses = [
                loss_of(model, micro_batch, own),
                loss_of(reference, micro_batch, slice(None)),
            ]
            for loss in losses:
                loss.backward()
            if micro_batch % 2:
                shards.take_gradients()
                for optimizer, group in ((sharded, shards.group), (whole, None)):
                    clip = total_norm(gradients(optimizer), group).clamp(min=1.0)
                    apply_step(optimizer, clip, torch.zeros(()))
                    optimizer.zero_grad()
            total = losses[0].detach()
            dist.all_reduce(total)
            torch.testing.assert_close(total, losses[1].detach(), rtol=1e-5, atol=1e-6)
        for name, p in reference.named_parameters():
            assert not torch.equal(p, values[name]), name
            expected = own_rows(p.detach(), ranks, rank())
            torch.testing.assert_close(
                shards.shards[name].detach(), expected, rtol=1e-4, atol=1e-5, msg=name
            )
            torch.testing.assert_close(
                dict(model.named_parameters())[name].to_local(), shards.shards[name]
            )
        for name, buffer in reference.named_buffers():
            torch.testing.assert_close(
                dict(model.named_buffers())[name], buffer, rtol=1e-5, atol=1e-6
            )


def compare_patch_models() -> None:
    compare_models(PatchModel, lambda model: model.layers, patch_loss)


def compare_models_of_transformers() -> None:
    compare_models(masked_bert, lambda model: model.bert.encoder.layer, masked_loss)


def refuse_what_cannot_be_sharded() -> None:
    """Buffers without values, shared and scalar parameters, by name."""
    dist.init_process_group("gloo")
    mesh = make_mesh("cpu", 1)
    with torch.device("meta"):
        model = PatchModel()
    shard_model(model, model.layers, mesh)
    values = PatchModel().state_dict()
    with pytest.raises(UserError, match="no values for scale: "):
        fill_shards(model, mesh, "cpu", values.items())
    with pytest.raises(UserError, match="no parameter or buffer head: "):
        fill_shards(model, mesh, "cpu", {**values, "head": torch.zeros(1)}.items())
    model = PatchModel()
    with pytest.raises(UserError, match=r"parameter again\.weight is shared"):
        shard_model(model, [model.out], mesh)
    model = PatchModel()
    model.temperature = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"scalar parameters.* temperature "):
        shard_model(model, model.layers, mesh)


RANKS = [
    (compare_replicas, 2),
    (compare_replicas, 4),
    (compare_patch_models, 3),
    (compare_models_of_transformers, 2),  # not 3: each imports transformers for seconds
    (refuse_what_cannot_be_sharded, 1),
]


@pytest.mark.parametrize(("function", "ranks"), RANKS)
def test_replicas_and_shards_train_as_one_process_does_or_are_refused(tmp_path, function, ranks):
    run_ranks(ranks, tmp_path, function).check()


def run_example(code: str) -> None:
    exec(compile(code, "docs/memory.md", "exec"), {"__name__": "__main__"})  # noqa: S102


def test_the_example_in_the_documentation_prints_the_same_losses_at_any_number_of_ranks(tmp_path):
    (code,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "memory.md").read_text(), re.DOTALL
    )
    printed = {}
    for count in (1, 2):
        run_ranks(count, tmp_path / str(count), run_example, code).check()
        printed[count] = (tmp_path / str(count) / "0.out").read_text()
    lines = printed[1].splitlines()
    assert len(lines) == 20 and float(lines[-1].split()[-1]) < float(lines[0].split()[-1])
    assert printed[1] == printed[2]
