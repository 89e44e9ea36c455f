"""A new head on trained weights is trained alone first; layers that are frozen, or have rates of
their own.
"""

import copy
import re

import pytest
import torch
from conftest import reported
from rank_runs import Command, pretrain_ranks
from safetensors.torch import load_file, save_file
from small_runs import losses, progress, resuming, steps_folder, train, weights

from bert_recipe.config import OPTIMIZERS, OptimizerConfig
from bert_recipe.model.encoders.registry import config_from_dict, make_model
from bert_recipe.optimization.layers import layer_depths
from bert_recipe.optimization.protocol import apply_step
from bert_recipe.optimization.registry import make_optimizer
from bert_recipe.training import head_first
from modeling import BertConfig, BertForMaskedLM, ModernBertConfig, ModernBertForMaskedLM

SIZES = {"vocab_size": 130, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 48}
NEOBERT = {**SIZES, "model_type": "neobert", "max_length": 512}
ELECTRA = {**SIZES, "model_type": "electra", "embedding_size": 16}

EACH_UPDATE = ("--log-freq", 1, "--num-steps-per-checkpoint", 1, "--keep-every", 1)
EACH_UPDATE += ("--warmup-proportion", 0)


@pytest.fixture(scope="module")
def encoder(inputs, tmp_path_factory):
    """A model folder without a head, as sentence-transformers writes it."""
    output = tmp_path_factory.mktemp("encoder")
    train(inputs.command(output, "--max-steps", 1))
    folder = steps_folder(output) / "1"
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not is_head(name)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    for path in (folder / "manifest.json", *folder.glob("model_*")):
        path.unlink()
    return folder


def is_head(name: str) -> bool:
    return name.startswith("cls.") or ".pooler." in name


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in after if name in before and not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("optimizer", ["Lamb", "AdamW", "NorMuon"])
def test_a_new_head_is_trained_alone_first_and_a_run_in_parts_is_the_run_in_one(
    inputs, encoder, tmp_path, optimizer
):
    """20% of 25 updates are five."""
    flags = ("--max-steps", 25, "--init-checkpoint", encoder, "--optimizer", optimizer)
    flags = (*flags, *EACH_UPDATE, "--warmup-proportion", 0.1, "--steps-this-run")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    result = train(inputs.command(whole, *flags, 8))
    for count in (2, 3, 1, 2):  # stopped within the phase, at its end, and after the next update
        train(inputs.command(parts, *flags, count, *resuming(parts)))
    assert "only the head is trained, until its loss falls by less than 1%" in result.stdout
    assert "the encoder is trained from update 6 on, with a new warmup" in result.stdout
    assert losses(parts) == losses(whole) and len(losses(whole)) == 9
    for step in range(1, 9):
        assert changed(weights(whole, step), weights(parts, step)) == set()
    start, alone, together = (
        load_file(encoder / "model.safetensors"),
        *(weights(whole, step) for step in (5, 8)),
    )
    assert changed(start, alone) == set()
    assert changed(weights(whole, 1), alone) == {name for name in alone if is_head(name)}
    assert len(changed(alone, together)) > 0.9 * len(alone)
    state = load_file(steps_folder(whole) / "8" / "model_optimizer.safetensors")
    counts = {name: int(count) for name, count in state.items() if name.endswith(".step")}
    assert {counts[name] for name in counts if is_head(name)} == {8}
    assert {counts[name] for name in counts if not is_head(name)} == {3}
    rates = [entry["learning_rate"] for step, entry in sorted(reported_steps(whole).items())]
    assert rates[0] == rates[4] > rates[5]


def reported_steps(output) -> dict[int, dict]:
    entries = reported(output / "report.json").items()
    return {step: entry for step, entry in entries if "learning_rate" in entry}


def test_the_phase_ends_when_the_loss_hardly_falls_also_after_a_stop(
    inputs, encoder, tmp_path, monkeypatch
):
    """Windows of 2 updates, and a rate of 0, with which the loss differs by the samples only."""
    monkeypatch.setattr(head_first, "WINDOW", 2)
    flags = ("--max-steps", 100, "--init-checkpoint", encoder, "--learning-rate", 0, *EACH_UPDATE)
    starts = []
    for name, parts in (("whole", (8,)), ("parts", (3, 5))):
        for count in parts:
            output = tmp_path / name
            train(inputs.command(output, *flags, *resuming(output), "--steps-this-run", count))
        starts.append(progress(output, 8)["encoder_start"])
    values = losses(tmp_path / "whole")
    ends = [
        step
        for step in (4, 6, 8)
        if values[step] + values[step - 1] > 0.99 * (values[step - 2] + values[step - 3])
    ]
    assert starts == [ends[0]] * 2


@pytest.mark.parametrize(
    ("losses", "is_trained"),
    [
        ([9.0] * 99, False),
        ([9.0] * 50 + [8.92] * 50, True),
        ([9.0] * 50 + [8.90] * 50, False),
        ([9.0] * 50 + [9.5] * 50, True),
    ],
)
def test_a_head_is_trained_when_its_loss_falls_by_less_than_a_hundredth(losses, is_trained):
    assert head_first.is_trained(losses) == is_trained


@pytest.mark.parametrize(
    ("flags", "first"),
    [
        (("--freeze-encoder-steps", 0), 1),
        (("--freeze-encoder-steps", 2), 3),
    ],
)
def test_the_number_of_updates_of_the_head_alone_can_be_given(
    inputs, encoder, tmp_path, flags, first
):
    command = inputs.command(
        tmp_path, "--max-steps", 20, "--steps-this-run", 3, "--init-checkpoint", encoder
    )
    train([*command, *map(str, (*flags, *EACH_UPDATE))])
    start = load_file(encoder / "model.safetensors")
    trains = [bool(changed(start, weights(tmp_path, step))) for step in (1, 2, 3)]
    assert trains == [step >= first for step in (1, 2, 3)]


def test_weights_with_a_head_and_random_ones_are_trained_at_once(inputs, tmp_path):
    result = train(inputs.command(tmp_path / "random", "--max-steps", 10))
    start = ("--init-checkpoint", steps_folder(tmp_path / "random"))
    result = train(inputs.command(tmp_path / "trained", "--max-steps", 10, *start))
    assert "only the head" not in result.stdout
    assert progress(tmp_path / "trained", 10)["encoder_start"] == 0


def test_processes_and_shards_train_a_head_alone_as_one_process_does(inputs, encoder, tmp_path):
    flags = ("--max-steps", 20, "--steps-this-run", 6, "--init-checkpoint", encoder)
    flags = (*flags, "--global-batch-size", 8, "--log-freq", 1, "--layerwise-lr-decay", 0.8)
    sharded = ("--data-parallel-shard-degree", -1)
    layouts = {"one": (1, ()), "DDP": (2, ()), "FSDP2": (2, sharded)}
    layouts["frozen layer"] = (2, (*sharded, "--freeze-layers", 1))
    layouts["frozen layer alone"] = (1, ("--freeze-layers", 1))
    layouts["16 bits"] = (2, ("--use-pure-fp16", "--freeze-layers", 1))
    commands = []
    for name, (count, more) in layouts.items():
        argv = inputs.command(tmp_path / name, *flags, *more, dropout=False)
        commands.append(Command(count, argv))
    pretrain_ranks(tmp_path / "logs", *commands).check()
    for name, other, tolerance in (
        ("DDP", "one", 1e-5),
        ("FSDP2", "one", 1e-5),
        ("frozen layer", "frozen layer alone", 1e-5),
        ("16 bits", "frozen layer alone", 1e-2),
    ):
        expected = pytest.approx(losses(tmp_path / other), rel=tolerance)
        assert losses(tmp_path / name) == expected, name


SMALL = {"vocab_size": 99, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3}
MODELS = [
    BertForMaskedLM(BertConfig(**SMALL, intermediate_size=32)),
    ModernBertForMaskedLM(ModernBertConfig(**SMALL, intermediate_size=32)),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS, ids=["bert", "modernbert"])
def test_each_layer_is_updated_as_by_a_run_with_its_rate(model, optimizer):
    """Half the rate per layer: those of the head, three layers and the embeddings."""
    torch.manual_seed(0)
    gradients = [torch.randn_like(p) for p in model.parameters()]

    def updated(rate: float, **options) -> dict[str, torch.Tensor]:
        ours = copy.deepcopy(model)
        lr = torch.tensor(0.0)
        maker = make_optimizer(OptimizerConfig(optimizer, **options), ours, lr)
        for step in (1, 2):
            lr.fill_(rate * step)
            for p, gradient in zip(ours.parameters(), gradients, strict=True):
                p.grad = gradient * step
            apply_step(maker, torch.tensor(1.0), torch.tensor(0.0))
        return dict(ours.named_parameters())

    layered = updated(0.1, layerwise_lr_decay=0.5)
    depths = layer_depths(model)
    assert set(depths.values()) == {0, 1, 2, 3, 4}
    for depth in range(5):
        expected = updated(0.1 * 0.5 ** (4 - depth))
        for name in (name for name, number in depths.items() if number == depth):
            torch.testing.assert_close(layered[name], expected[name], msg=name)


@pytest.mark.parametrize(
    "values, below",
    [
        (NEOBERT, {"model.encoder.weight"}),
        (ELECTRA, {"electra.embeddings_project.weight", "electra.embeddings_project.bias"}),
    ],
    ids=["NeoBERT", "ELECTRA"],
)
def test_what_is_below_the_layers_has_the_least_rate_in_every_encoder(values, below):
    model = make_model("masked_lm", config_from_dict(values))
    depths = layer_depths(model)
    assert below <= {name for name, depth in depths.items() if depth == 0}
    assert max(depths.values()) == model.config.num_hidden_layers + 1


@pytest.mark.parametrize(("updates", "word"), [(2, "note"), (60, "warning")])
def test_a_continued_model_is_compared_with_its_start_and_counts_passes(
    inputs, tmp_path, updates, word
):
    """More than ten passes over the texts are too many."""
    train(inputs.command(tmp_path / "first", "--max-steps", 1))
    start = ("--init-checkpoint", steps_folder(tmp_path / "first") / "1")
    held_out = ("--eval-dir", inputs.held_out, "--eval-steps", updates)
    flags = ("--max-steps", updates, *start, *held_out, "--batch-size", 16)
    output = train(inputs.command(tmp_path / "second", *flags)).stdout
    passes = re.search(
        rf"^{word}: {updates} updates of 16 read the ([\d,]+) training samples ([\d.]+) times",
        output,
        re.MULTILINE,
    )
    assert passes, output
    assert float(passes[2]) == pytest.approx(updates * 16 / int(passes[1]), abs=0.05)
    first = re.search(r"step 0/\d+  evaluation: loss ([\d.]+)", output)
    last = re.search(rf"best: loss \S+ at step {updates}; before training ([\d.]+)", output)
    assert float(last[1]) == pytest.approx(float(first[1]), abs=1e-3)
