"""Strategies applied to a plain model: initial weights, 16-bit weights with masters, compilation,
and replicas (DDP).

Sharding is in test_sharding.py and test_sharded_runs.py.
"""

import contextlib
import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import NO_DROPOUT, TINY, read_json, reported
from rank_runs import Command, compile_on_one_rank, pretrain, rank, run_ranks
from small_runs import InMemoryDataset, losses, train
from torch._dynamo.utils import counters

import run_pretraining
from bert_recipe.config import LoaderConfig, OptimizerConfig, ParallelConfig, PrecisionConfig
from bert_recipe.config.arguments import make_run_config
from bert_recipe.data_loading.loader import StepLoader
from bert_recipe.model.encoders.bert import BertConfig, BertForPreTraining
from bert_recipe.model.loss import compiled_linear_cross_entropy
from bert_recipe.model.token_stream import BatchCounts, StepBatch
from bert_recipe.optimization.precision import Precision
from bert_recipe.optimization.registry import make_optimizer
from bert_recipe.parallel.base import ParallelModel
from bert_recipe.parallel.compilation import prepare_compilation
from bert_recipe.parallel.ddp import ReplicatedMasters, ReplicatedModel
from bert_recipe.parallel.parallelize import check_parallel, parallelize
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.pretraining import PretrainingTask
from bert_recipe.utils.command_line import Arguments
from bert_recipe.utils.distributed import DistributedContext, init_distributed
from bert_recipe.utils.errors import UserError

CPU = torch.device("cpu")
FLOAT32 = Precision()
PURE = Precision(torch.bfloat16, pure=True)
CONFIG = BertConfig(**{**TINY, "vocab_size": 1000, **NO_DROPOUT})
TASK = PretrainingTask(next_sentence=True, max_seq_length=32)


def make_parallel(precision=FLOAT32, distributed=None, on_meta=True, **config) -> ParallelModel:
    torch.manual_seed(0)
    with torch.device("meta" if on_meta else "cpu"):
        model = BertForPreTraining(CONFIG)
    runtime = Runtime(CPU, precision, distributed or DistributedContext())
    return parallelize(model, ParallelConfig("none", **config), runtime)


def test_model_on_the_meta_device_gets_the_initial_weights_of_one_on_the_cpu():
    expected, initial = (
        make_parallel(on_meta=on_meta).named_parameters() for on_meta in (False, True)
    )
    assert expected.keys() == initial.keys() and len(expected) > 40
    assert all(
        torch.equal(expected[name], initial[name]) and initial[name].device == CPU
        for name in expected
    )
    assert type(make_parallel()) is ParallelModel and make_parallel().saves_rows


def test_optimizer_of_16_bit_weights_gets_float32_masters():
    parallel = make_parallel(PURE)
    initial = make_parallel().named_parameters()
    masters = parallel.named_parameters()
    assert {p.dtype for p in parallel.model.parameters()} == {torch.bfloat16}
    assert all(torch.equal(masters[name], initial[name]) for name in initial), (
        "the masters were rounded"
    )
    parallel.backward(sum(0.5 * p.sum(dtype=torch.float32) for p in parallel.model.parameters()))
    assert all(
        master.grad.eq(0.5).all() and master.grad.dtype == torch.float32
        for master in masters.values()
    )
    assert all(p.grad is None for p in parallel.model.parameters())
    with torch.no_grad():
        for master in masters.values():
            master.fill_(1.25)
    parallel.write_back()
    assert all(p.eq(1.25).all() for p in parallel.model.parameters())


@pytest.mark.parametrize("precision", [FLOAT32, PURE], ids=["float32", "16-bit weights"])
def test_an_offloaded_optimizer_makes_the_updates_of_one_on_the_device(precision):
    models = [make_parallel(precision, cpu_offload=offloads) for offloads in (False, True)]
    for parallel in models:
        parallel.loss_scale.value.fill_(4.0)
        optimizer = make_optimizer(
            OptimizerConfig(), parallel.model, 0.01, parallel.named_parameters()
        )
        for step in range(2):
            for micro_batch in parallel.micro_batches(SimpleNamespace(micro_batches=range(2)), 2):
                scales = (
                    torch.arange(1.0, 1 + len(parallel.named_parameters())) + step + micro_batch
                )
                parameters = parallel.model.parameters()
                loss = sum(
                    s * (p.float() + 1).square().sum()
                    for s, p in zip(scales, parameters, strict=True)
                )
                parallel.backward(loss)
            norm, _ = parallel.step(optimizer, 1.0)
            assert norm > 1 and optimizer.state_dict()["state"]
    plain, offloaded = models
    before = make_parallel(precision).model.state_dict()
    for name, p in offloaded.model.named_parameters():
        assert torch.equal(p, plain.model.get_parameter(name)) and not torch.equal(p, before[name])
        assert offloaded.named_parameters()[name].device == CPU
        assert offloaded.named_parameters()[name].data_ptr() != p.data_ptr() and p.grad is None


@pytest.mark.parametrize(
    ("version", "world_size", "device", "words"),
    [
        ("2.13.0", 8, "cuda", ""),
        ("2.11.0", 8, "cuda", "several replicas needs PyTorch 2.13"),
        ("2.11.0", 2, "cuda", ""),
        ("2.13.0", 8, "cpu", "for GPUs"),
    ],
)
def test_offload_is_refused_where_it_cannot_work(monkeypatch, version, world_size, device, words):
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
    parallel = ParallelConfig(shard_degree=2, cpu_offload=True)
    config = SimpleNamespace(
        parallel=parallel,
        precision=PrecisionConfig(),
        optimizer=OptimizerConfig(),
        world_size=world_size,
    )
    with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
        check_parallel(config, torch.device(device))


SHARD = "--data-parallel-shard-degree"


def parsed(*flags: str) -> Arguments:
    return run_pretraining.parse_arguments(
        ["--input-dir", "i", "--output-dir", "o", "--max-steps", "5", *flags]
    )


@pytest.mark.parametrize(
    ("processes", "flags", "says"),
    [
        (1, f"{SHARD} 2", f"{SHARD} 2 and .* do not multiply to the 1 processes"),
        (2, f"{SHARD} 3", f"{SHARD} 3 and .* do not multiply to the 2 processes"),
        (2, f"{SHARD} 2 --data-parallel-replicate-degree 2", "do not multiply to the 2 processes"),
        (2, "--enable-cpu-offload", f"--enable-cpu-offload .* needs {SHARD}"),
        (2, f"{SHARD} -1 --compile model", "--compile model cannot .* use --compile layers"),
    ],
)
def test_flags_that_do_not_fit_the_number_of_processes_are_refused(processes, flags, says):
    with pytest.raises(UserError, match=says):
        check_parallel(make_run_config(parsed(*flags.split()), processes), CPU)


def test_all_processes_share_one_copy_also_where_there_is_one_process():
    assert make_run_config(parsed(SHARD, "-1"), 1).parallel.shard_degree == 1


def test_the_loss_that_is_compiled_with_the_layers_on_gpus_has_the_values_of_the_eager_one(
    monkeypatch,
):
    """Traced as for a GPU, and run on the CPU without code generation."""
    compile_function = torch.compile
    (share,) = shares_of_step(7, 1)
    monkeypatch.setattr(torch, "compile", partial(compile_function, backend="aot_eager"))
    eager, compiled = make_parallel(), make_parallel()
    prepare_compilation([compiled.model], "layers", torch.device("cuda"))
    for layer in compiled.model.layers:
        layer._compiled_call_impl = None  # the layers are compared below
    compiled_linear_cross_entropy.cache_clear()
    counters.clear()
    for parallel in (eager, compiled):
        TASK.loss(
            TASK.sums(parallel.module, share.micro_batches[0]), BatchCounts(7, 0, 7)
        ).backward()
    assert counters["stats"]["unique_graphs"] == 1
    for name, p in eager.model.named_parameters():
        torch.testing.assert_close(compiled.model.get_parameter(name).grad, p.grad, msg=name)


@pytest.mark.parametrize(("what", "num_layers"), [("layers", 2), ("model", 1)])
def test_compiled_run_is_traced_once_for_all_sizes_and_has_the_losses_of_an_uncompiled_one(
    inputs, tmp_path, monkeypatch, what, num_layers
):
    """Training and evaluation are traced in full, but run without code generation, which takes a
    minute.
    """
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda module, **options: compile_module(module, **options, backend="eager"),
    )
    config = read_json(inputs.config_without_dropout) | {"num_hidden_layers": num_layers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ("--max-steps", 4, "--log-freq", 1, "--gradient-merge-steps", 2)
    flags += ("--config-file", tmp_path / "config.json")
    flags += ("--eval-dir", inputs.held_out, "--eval-steps", 2)
    train(inputs.command(tmp_path / "uncompiled", *flags, dropout=False))
    torch._dynamo.reset()
    counters.clear()
    train(inputs.command(tmp_path / "compiled", *flags, "--compile", what, dropout=False))
    compiled, expected = (
        reported(tmp_path / name / "report.json") for name in ("compiled", "uncompiled")
    )
    for metric, steps in (("loss", (1, 2, 3, 4)), ("eval_loss", (2, 4))):
        for step in steps:
            assert compiled[step][metric] == pytest.approx(expected[step][metric], rel=1e-5)
    # The last layer is another graph, because it computes the masked tokens only; a whole model is
    # one. Evaluation has graphs of its own.
    assert counters["stats"]["unique_graphs"] == 2 * num_layers
    assert not counters["graph_break"], counters["graph_break"]


COMPILED = {
    "DDP, layers": ("--compile", "layers", "--activation-checkpoint", "selective"),
    "DDP, model": ("--compile", "model", "--profile-update", 2),
    "FSDP2, layers": ("--compile", "layers", "--data-parallel-shard-degree", -1),
}


def pretrain_without_code_generation(commands: list[Command]) -> int:
    """On one rank. Forward graphs are traced in all runs; backward graphs, which takes longer, of
    layers. Those of a whole model are traced in one process (test_compilation.py).
    """
    compile_of = {backend: compile_on_one_rank(backend) for backend in ("aot_eager", "eager")}
    for command in commands:
        torch.nn.Module.compile = compile_of["aot_eager" if "layers" in command.argv else "eager"]
        torch._dynamo.reset()
        counters.clear()
        if code := pretrain(command):
            return code
        if "--compile" in command.argv and rank() == 0:
            graphs = counters["stats"]["unique_graphs"]
            assert graphs == 1, graphs
            assert not counters["graph_break"], counters["graph_break"]
    return 0


def test_compiled_replicas_and_shards_have_the_losses_of_uncompiled_ones(inputs, tmp_path):
    """Of one layer: each further one is traced for seconds."""
    one_layer = read_json(inputs.config_without_dropout) | {"num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(one_layer))
    flags = ("--max-steps", 2, "--log-freq", 1, "--gradient-merge-steps", 2)
    flags += ("--config-file", tmp_path / "config.json")
    runs = {"uncompiled": (), **COMPILED}
    argvs = {
        name: inputs.command(tmp_path / name, *flags, *given, dropout=False)
        for name, given in runs.items()
    }
    commands = [Command(2, argv) for argv in argvs.values()]
    run_ranks(2, tmp_path / "logs", pretrain_without_code_generation, commands).check()
    expected = losses(tmp_path / "uncompiled")
    for name in COMPILED:
        # The attentions differ on a CPU; rounding a float32 sum alone changes it by up to 0.6e-7.
        assert losses(tmp_path / name) == pytest.approx(expected, rel=1e-7), name
    profiles = [path.name for path in (tmp_path / "DDP, model").rglob("profile/*.txt")]
    assert profiles == ["update_2_rank_0.txt"]


SAMPLES = InMemoryDataset(np.random.default_rng(1).integers(12, 33, 40))
GLOBAL_BATCH_SIZES = (2, 7, 23)  # with 3 ranks: one rank without a sequence, and uneven shares


def shares_of_step(global_batch_size: int, world_size: int) -> list[StepBatch]:
    config = LoaderConfig(2, global_batch_size, 32, 5)
    return [
        StepLoader(SAMPLES, config, 9, 0, rank, world_size).load(0) for rank in range(world_size)
    ]


def gradients_of_step(
    parallel: ParallelModel, global_batch_size: int, rank: int, world_size: int
) -> dict:
    """One step of the trainer up to the optimizer, on this rank's share of a global batch."""
    shares = shares_of_step(global_batch_size, world_size)
    counts = BatchCounts(*map(sum, zip(*(share.counts for share in shares), strict=True)))
    for p in parallel.named_parameters().values():
        p.grad = None
    sums = None
    for micro_batch in parallel.micro_batches(
        shares[rank], max(len(share.micro_batches) for share in shares)
    ):
        sums = TASK.sums(parallel.module, micro_batch)
        parallel.backward(TASK.loss(sums, counts))
    assert sums is not None, "the trainer has no sums to log"
    return {name: p.grad.clone() for name, p in parallel.named_parameters().items()}


def compare_replicas(precision: Precision, tolerance: float) -> None:
    reductions = []
    all_reduce = dist.all_reduce

    def counting(tensor, *args, **kwargs):
        reductions.append(tensor.dtype)
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counting
    with init_distributed(CPU) as distributed:
        replicated = make_parallel(precision, distributed)
        alone = make_parallel(precision)
        assert type(replicated) is (ReplicatedMasters if precision.pure else ReplicatedModel)
        # With a pass to warm up.
        gradients_of_step(replicated, 2, distributed.rank, distributed.world_size)
        found_no_sequences = False
        for global_batch_size in GLOBAL_BATCH_SIZES:
            rank, world_size = distributed.rank, distributed.world_size
            reductions.clear()
            gradients = gradients_of_step(replicated, global_batch_size, rank, world_size)
            assert reductions == [torch.float32]
            expected = gradients_of_step(alone, global_batch_size, 0, 1)
            for name, gradient in expected.items():
                difference = float((gradients[name] - gradient).abs().max())
                assert difference <= tolerance * float(gradient.abs().max()) + 1e-7, (
                    global_batch_size,
                    name,
                )
            found_no_sequences |= not shares_of_step(global_batch_size, world_size)[0].micro_batches
        assert found_no_sequences, "no rank was without a micro-batch"
        if not precision.pure:
            check_gradients_stay_in_buckets(distributed)


def check_gradients_stay_in_buckets(distributed: DistributedContext) -> None:
    """And are not allocated beside them, in micro-batches without a reduction."""
    parallel = make_parallel(FLOAT32, distributed)
    optimizer = make_optimizer(OptimizerConfig(), parallel.model, 0.01, parallel.named_parameters())
    share, places = shares_of_step(23, distributed.world_size)[distributed.rank], []
    for _ in range(2):
        for micro_batch in parallel.micro_batches(share, 1):
            sums = TASK.sums(parallel.module, micro_batch)
            parallel.backward(TASK.loss(sums, BatchCounts(23, 0, 23)))
            places.append(
                {p.grad.untyped_storage().data_ptr() for p in parallel.named_parameters().values()}
            )
        parallel.step(optimizer, 1.0)
    assert (
        len(places) > 5 and len(places[1]) < 5 and all(place == places[1] for place in places[1:])
    )


@pytest.mark.parametrize(
    ("precision", "tolerance"), [(FLOAT32, 1e-5), (PURE, 3e-2)], ids=["float32", "16-bit weights"]
)
def test_replicas_sum_the_gradients_of_unequal_shares_in_one_reduction(
    tmp_path, precision, tolerance
):
    run_ranks(3, tmp_path, compare_replicas, precision, tolerance).check()
