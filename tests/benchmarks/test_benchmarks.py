"""The benchmarks at toy size: they run, and their figures are right where that can be checked."""

import dataclasses
import os
from argparse import Namespace
from collections.abc import Callable
from functools import partialmethod
from multiprocessing.context import ForkServerProcess
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import VOCAB_FILE, read_json, write_shards
from processes import server

import create_pretraining_data
import run_glue
from benchmarks import pretraining_step
from benchmarks.common import device_checks, worker
from benchmarks.common.device_checks import Sizes
from benchmarks.common.fine_tuning_tables import Table
from benchmarks.common.results import machine_info, paired_ratio
from benchmarks.common.training import load_bert_config
from benchmarks.fine_tuning_defaults import run_tf_idf
from bert_recipe.model.kernels import length_bucketed
from bert_recipe.model.kernels.dropout import CpuDropout, dropout_mask
from bert_recipe.model.kernels.length_bucketed import LengthBucketedFunction
from bert_recipe.model.loss import LinearCrossEntropy

TOY = Sizes("tiny", 24, 4)
CPU = torch.device("cpu")
COMPILED = "compiled layers, bf16"
SMALL_VOCABULARY = 1000  # of 30,522 words, most of the time goes to the output layer


@pytest.fixture
def small_models(monkeypatch):
    """Device checks with models of one layer and few words."""

    def small_config(model):
        return dataclasses.replace(
            load_bert_config(model), num_hidden_layers=1, vocab_size=SMALL_VOCABULARY
        )

    monkeypatch.setattr(device_checks, "load_bert_config", small_config)
    device_checks.reference.cache_clear()
    yield
    device_checks.reference.cache_clear()


def test_every_check_of_a_device_passes_on_the_cpu(small_models, monkeypatch):
    """Where a check compiles, the graph runs as it was traced. test_activation_checkpointing.py
    traces checkpointed layers in full, test_compilation.py the backward pass of a whole model.
    """
    compiled = partialmethod(torch.nn.Module.compile, backend="eager")
    monkeypatch.setattr(torch.nn.Module, "compile", compiled)
    results = {title: check() for title, check in device_checks.all_checks(TOY, CPU).items()}
    expected = {COMPILED, "FSDP2, one process", "dropout, fp32, value", "AdamW"}
    assert expected <= results.keys()
    assert {title: result for title, result in results.items() if not result["ok"]} == {}


@pytest.mark.release  # Inductor takes half a minute
def test_layers_that_inductor_compiles_pass_their_check(small_models):
    assert device_checks.all_checks(TOY, CPU)[COMPILED]()["ok"]


def backward(function: type[torch.autograd.Function], change: Callable):
    """A fault of a backward pass: `change` is called with its gradients."""

    def patch(monkeypatch):
        right = function.backward

        def faulty(ctx, *grads):
            gradients = right(ctx, *grads)
            change(gradients)
            return gradients

        monkeypatch.setattr(function, "backward", staticmethod(faulty))

    return patch


def scale_gradient(part: int, factor: float):
    """Of query, key or value."""
    return backward(LengthBucketedFunction, lambda grads: grads[0][:, part].mul_(factor))


def dropout_of_attention(fault):
    """`fault` is in the place of the function that makes a mask and its scale."""
    return lambda monkeypatch: monkeypatch.setattr(length_bucketed, "dropout_mask", fault)


ATTENTION = "attention length_bucketed, float32, dropout 0.1"


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (dropout_of_attention(lambda probs, prob: (dropout_mask(probs, prob)[0], 1.0)), ATTENTION),
        (
            dropout_of_attention(
                lambda probs, prob: (dropout_mask(probs, 2 * prob)[0], 1 / (1 - prob))
            ),
            ATTENTION,
        ),
        (
            dropout_of_attention(
                lambda probs, prob: torch.manual_seed(5) and dropout_mask(probs, prob)
            ),
            ATTENTION,
        ),
        (scale_gradient(2, 0.0), "attention length_bucketed, float32, dropout 0"),
        (scale_gradient(0, 0.5), "length_bucketed, bf16"),
        (scale_gradient(1, 1.1), "length_bucketed, bf16"),
        (scale_gradient(2, 1.001), "length_bucketed, fp32"),
        (
            backward(CpuDropout, lambda grads: grads[0].mul_(0.9)),
            "dropout, fp32, value",
        ),  # not scaled
        (backward(LinearCrossEntropy, lambda grads: grads[0][8:].zero_()), "loss of many rows"),
    ],
)
def test_a_fault_is_found(fault, check, monkeypatch):
    device_checks.reference(TOY)  # before the fault
    checks = device_checks.all_checks(TOY, CPU)
    assert checks[check]()["ok"]
    fault(monkeypatch)
    assert not checks[check]()["ok"]


class ForkedProcess(ForkServerProcess):
    """A worker that need not import torch, with the environment of the moment when it starts."""

    def start(self) -> None:
        self._args = (dict(os.environ), self._target, self._args)
        self._target = call_in_environment
        super().start()


def call_in_environment(environment: dict[str, str], function: Callable, args: tuple) -> None:
    os.environ.update(environment)
    worker.end_with_parent = lambda: None  # which is the server that forks
    function(*args)


def test_the_step_benchmark_counts_real_tokens_and_compares_medians(tmp_path, monkeypatch):
    context = SimpleNamespace(Pipe=server().Pipe, Process=ForkedProcess)
    monkeypatch.setattr(worker.multiprocessing, "get_context", lambda _method: context)
    shards = write_shards(tmp_path / "shards", length=128, predictions=20)
    output = tmp_path / "result.json"
    toy = [
        "--model",
        "tiny",
        "--rounds",
        "3",
        "--steps",
        "1",
        "--device",
        "cpu",
    ]
    monkeypatch.setattr(pretraining_step, "make_shards", lambda *_: shards)
    pretraining_step.main([*toy, "--output", str(output)])
    result = read_json(output)
    measured = result["implementations"]
    medians = {name: figures["tokens_per_second"]["median"] for name, figures in measured.items()}
    assert set(medians) == {"this project", "transformers", "transformers, eager"}
    settings = result["settings"]
    assert settings["transformers, eager"]["own"]["attention"] == "eager"
    own = settings["transformers"].pop("own")
    assert own.pop("class").startswith("BertModel")
    assert own == {
        "attention": "sdpa",
        "logits of masked tokens only": True,
        "precision": "float32",
        "optimizer": "AdamW, fused",
        "compiled": False,
    }
    settings["this project"].pop("own")
    assert settings["transformers"] == settings["this project"]
    for name, ratio in result["speedup"].items():
        assert set(ratio) == {"median", "low", "high"}
        assert ratio["median"] == pytest.approx(medians["this project"] / medians[name], rel=0.9)
    # Each one's memory is that of its own process.
    assert len({figures["peak_memory_gib"] for figures in measured.values()}) == 3
    for figures in measured.values():
        assert set(figures["milliseconds"]) == {"data", "forward", "backward", "optimizer"}
        # One slow round of three does not change medians; the data is measured once, and not in the
        # rounds.
        seconds = (
            sum(value for part, value in figures["milliseconds"].items() if part != "data") / 1000
        )
        tokens = figures["tokens_per_second"]["median"] * seconds
        assert 32 * 128 / 10 < tokens <= 32 * 128 * 1.9


def step_arguments(model: str, **sizes) -> Namespace:
    return Namespace(
        model=model,
        device="cpu",
        gradient_merge_steps=1,
        amp=False,
        peer_attention="eager",
        compile="none",
        rounds=1,
        steps=1,
        **sizes,
    )


def test_the_step_benchmark_takes_samples_of_several_documents(tmp_path):
    """transformers gets a row for each document, as attention keeps them apart."""
    documents = [" ".join(["word"] * length) for length in range(3, 30)]
    (tmp_path / "text.txt").write_text("\n\n".join(documents))
    flags = {
        "input-file": tmp_path / "text.txt",
        "output-dir": tmp_path / "shards",
        "vocab-file": VOCAB_FILE,
        "max-seq-length": 64,
        "max-predictions-per-seq": 19,
        "num-workers": 1,
    }
    words = [f"--{name}={value}" for name, value in flags.items()]
    create_pretraining_data.main([*words, "--no-nsp", "--pack-documents"])
    args = step_arguments("modernbert-tiny", seq_length=64, batch_size=2)
    sides = (pretraining_step.ThisProject, pretraining_step.Transformers)
    ours, theirs = (side(args, tmp_path / "shards") for side in sides)
    lengths = ours.batches[0].micro_batches[0]["cu_seqlens"].diff()
    lengths = lengths[lengths > 0]  # without filler
    rows = theirs.batches[0].micro_batches[0]["attention_mask"]
    assert len(lengths) > args.batch_size and rows.sum(dim=1).tolist() == lengths.tolist()
    assert ours.batches[0].lengths.sum() == theirs.batches[0].lengths.sum() == lengths.sum()


def test_the_peer_with_logits_of_masked_tokens_trains_as_the_class_does(tmp_path):
    shards = write_shards(tmp_path / "shards", length=128, predictions=20)
    args = step_arguments("tiny", seq_length=128, batch_size=4)
    peer = pretraining_step.Transformers(args, shards)
    peer.model.eval()  # without dropout
    rows = peer.batches[0].micro_batches[0]
    labels = torch.full_like(rows["input_ids"], -100).flatten()
    labels[rows["masked_positions"]] = rows["labels"]
    whole = rows | {"labels": labels.view_as(rows["input_ids"])}
    del whole["masked_positions"]
    gradients = []
    for forward, inputs in ((peer.forward, rows), (peer.model, whole)):
        peer.model.zero_grad()
        forward(**inputs).loss.backward()
        gradients.append([p.grad.clone() for p in peer.model.parameters()])
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)


def test_the_peer_of_the_step_benchmark_can_be_compiled_alone(tmp_path):
    shards = write_shards(tmp_path / "shards", length=128, predictions=20)
    args = step_arguments("tiny", seq_length=128, batch_size=4)
    peer = pretraining_step.Transformers(args, shards, compiled=True)
    assert peer.settings()["compiled"] and peer.settings()["attention"] == "eager"
    assert isinstance(peer.forward, torch._dynamo.OptimizedModule)


def test_a_result_file_names_no_folder_of_the_machine(monkeypatch):
    words = ["--data-dir", "/home/me/squad", "--model", "tiny=/home/me/bert", "--epochs=1"]
    monkeypatch.setattr("sys.argv", ["/home/me/benchmarks/a.py", *words])
    command = "a.py --data-dir squad --model tiny=bert --epochs=1"
    assert machine_info(CPU)["command"] == command


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    """Not that of the medians, which is 2 here."""
    assert paired_ratio([4, 1, 9], [1, 2, 3]) == {"median": 3, "low": 1.75, "high": 3.5}


def test_tf_idf_of_pairs_knows_how_many_words_they_share():
    """As the baseline does that is printed after training; else it would be easy to pass."""
    generator = np.random.default_rng(0)

    def pair() -> dict[str, str]:
        words = [f"word{number}" for number in generator.permutation(200)[:12]]
        shared = int(generator.integers(0, 7))
        second = words[:shared] + words[6 : 12 - shared]
        return {"text": " ".join(words[:6]), "pair": " ".join(second), "label": str(shared)}

    rows, scored = ([pair() for _ in range(100)] for _ in range(2))
    table = Table(run_glue, rows, scored, "spearman")
    assert run_tf_idf(table, rows, scored)["score"] > 0.95
