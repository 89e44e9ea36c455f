"""ModernBERT: its configs, initial weights and runs. Its logits and folders: test_encoders.py."""

import json
from functools import partialmethod

import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT, read_json
from encoder_cases import LENGTHS, MODERNBERT, make_input, relative_error
from encoder_twins import HEADS, make_pair
from one_step import training_step
from rank_runs import Command, pretrain_ranks
from small_runs import RunInputs, losses, resuming, run_here, steps_folder, train, weights
from torch._dynamo.utils import counters

from bert_recipe.checkpoint.pretrained import load_pretrained
from bert_recipe.model.costs.flops import training_flops
from bert_recipe.model.encoders.bert import BertModel
from bert_recipe.model.encoders.modernbert import ModernBertForMaskedLM, ModernBertModel
from bert_recipe.model.encoders.registry import config_from_dict, make_model
from bert_recipe.tokenization.tokenizer import BertTokenizer
from bert_recipe.utils.errors import UserError


def test_the_encoder_is_loaded_from_a_folder_with_a_head_and_a_head_from_one_without(tmp_path):
    _, twin = make_pair("modernbert", "masked_lm")
    twin.save_pretrained(tmp_path / "with_head")
    encoder = load_pretrained(ModernBertModel, tmp_path / "with_head").eval()
    _, padded, real = make_input()
    expected = twin.model(**padded).last_hidden_state[real]
    assert relative_error(encoder(**padded).last_hidden_state[real], expected) < 1e-5
    twin.model.save_pretrained(tmp_path / "without")
    model = load_pretrained(ModernBertForMaskedLM, tmp_path / "without")
    assert torch.equal(model.model.final_norm.weight, twin.model.final_norm.weight)
    with pytest.raises(UserError, match="holds a modernbert model, which BertModel cannot load"):
        load_pretrained(BertModel, tmp_path / "without")


def test_both_forms_of_transformers_config_are_read_and_one_that_both_versions_read_is_written():
    changes = {"global_attn_every_n_layers": 2, "global_rope_theta": 9e4, "local_rope_theta": 5e3}
    config = config_from_dict({**MODERNBERT, **changes})
    theirs = transformers.ModernBertConfig(**config.to_dict())
    written = json.loads(theirs.to_json_string(use_diff=False))
    assert (
        "rope_parameters" in written
        and "layer_types" in written
        and "global_rope_theta" not in written
    )
    assert config_from_dict(written) == config
    assert theirs.layer_types == [
        "sliding_attention" if config.window(i) else "full_attention" for i in range(4)
    ]
    assert theirs.rope_parameters["full_attention"]["rope_theta"] == 9e4
    assert (theirs.pad_token_id, theirs.cls_token_id) == (0, 1)
    other = {**written, "sliding_window": 3}
    assert (
        config_from_dict(other).local_attention
        == transformers.ModernBertConfig(**other).local_attention
        == 6
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "rope_parameters has rope_type 'yarn'",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "must have full_attention and sliding_att",
        ),
        (
            {"rope_parameters": {"full_attention": "default"}},
            "rope_parameters has 'default' for full_attention",
        ),
        (
            {"rope_parameters": {"full_attention": None}},
            "rope_parameters has None for full_attention",
        ),
        ({"rope_parameters": [1]}, "rope_parameters must have"),
        ({"layer_types": ["full_attention"]}, "layer_types must be a list with a type for each"),
        ({"layer_types": "full_attention"}, "layer_types must be a list"),
        ({"sliding_window": 0}, "local_attention is 0"),
        ({"rope_parameters": {"sliding_attention": {"factor": 2}}}, "rope_parameters has factor 2"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ({"classifier_pooling": "max"}, "classifier_pooling is 'max'"),
        ({"num_attention_heads": 32}, "head size 1 is odd"),
        ({"global_rope_theta": 0.5}, "rope thetas"),
        ({"hidden_size": None}, "missing key 'hidden_size'"),
        ({"norm_eps": "small"}, "norm_eps is 'small'"),
        ({"model_type": "deberta-v2"}, "only bert, .*modernbert, .*are supported"),
    ],
)
def test_a_value_that_is_not_implemented_is_refused_by_name(change, words):
    values = {key: value for key, value in {**MODERNBERT, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=words):
        config_from_dict(values)


@pytest.mark.parametrize(("name", "count"), [("base", 149_655_232), ("large", 395_881_664)])
def test_shipped_configs_with_the_vocabulary_of_modernbert_have_its_published_sizes(name, count):
    values = read_json(ROOT / "bert_configs" / f"modernbert-{name}.json")
    config = config_from_dict({**values, "vocab_size": 50368})
    with torch.device("meta"):
        model = ModernBertForMaskedLM(config)
    assert sum(p.numel() for p in model.parameters()) == count


def test_initial_weights_have_the_standard_deviations_of_transformers():
    torch.manual_seed(0)
    values = {**MODERNBERT, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 1000}
    for head in ("masked_lm", "sequence_classification"):
        model = make_model(head, config_from_dict(values))
        twin = getattr(transformers, f"ModernBertFor{HEADS[head]}")(
            transformers.ModernBertConfig(**values)
        )
        theirs = dict(twin.named_parameters())
        for key, p in model.named_parameters():
            other = theirs[key]
            p = p[: len(other)]
            if p.numel() > 2000:
                assert float(p.detach().std()) == pytest.approx(
                    float(other.detach().std()), rel=0.05
                ), key
                assert float(p.detach().abs().max()) == pytest.approx(
                    float(other.detach().abs().max()), rel=0.05
                ), key
            elif p.dim() == 1:
                assert torch.equal(p, other), key


@pytest.mark.parametrize(
    ("what", "backend"),
    [("layers", "aot_eager"), ("model", "eager")],
)
def test_the_compiled_model_equals_the_eager_one(monkeypatch, what, backend):
    """Of a layer with global and one with local attention. The forward pass is traced in all
    cases, and the backward pass in one of them, which takes longer.
    """
    monkeypatch.setattr(
        torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend=backend)
    )
    torch.compiler.reset()
    counters.clear()
    expected, compiled = (
        training_step("none", torch.float32, compile, "modernbert", 0.0, num_layers=2)
        for compile in ("none", what)
    )
    assert counters["aot_autograd"]["total"] == (2 if backend == "aot_eager" else 0), "traced again"
    assert compiled.loss == pytest.approx(expected.loss, rel=1e-6)
    for name, gradient in expected.gradients.items():
        assert relative_error(compiled.gradients[name], gradient) < 1e-5, name


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> RunInputs:
    made = RunInputs.make(tmp_path_factory.mktemp("inputs"))
    words = read_json(made.config)["vocab_size"]
    made.config.write_text(json.dumps({**MODERNBERT, "vocab_size": words}))
    return made


RUN_FLAGS = ("--max-steps", 8, "--global-batch-size", 23, "--log-freq", 1, "--learning-rate", 3e-3)
RUN_FLAGS = (*RUN_FLAGS, "--lr-decay", "warmup_stable_decay", "--lr-decay-proportion", 0.5)


def test_one_process_ddp_and_fsdp2_train_alike_and_a_run_in_parts_equals_a_whole_one(
    inputs, tmp_path
):
    """With NorMuon, which updates all but the matrices of layers as AdamW."""
    flags = (*RUN_FLAGS, "--optimizer", "NorMuon")
    layouts = {"one": (1, ()), "ddp": (2, ()), "fsdp": (2, ("--data-parallel-shard-degree", -1))}
    commands = []
    for name, (count, extra) in layouts.items():
        argv = inputs.command(tmp_path / name, *flags, *resuming(tmp_path / name), *extra)
        commands += [Command(count, [*argv, "--steps-this-run", "3"]), Command(count, argv)]
    pretrain_ranks(tmp_path / "logs", *commands).check()
    train(inputs.command(tmp_path / "whole", *flags))
    expected = weights(tmp_path / "whole", 8)
    assert losses(tmp_path / "whole")[8] < losses(tmp_path / "whole")[1]
    torch.testing.assert_close(weights(tmp_path / "one", 8), expected, rtol=0, atol=0)
    for layout in ("ddp", "fsdp"):
        assert losses(tmp_path / layout) == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
        for name, value in weights(tmp_path / layout, 8).items():
            assert float((value - expected[name]).abs().max()) < 2e-5, (layout, name)


def test_a_phase_of_longer_sequences_may_have_another_global_theta_and_its_folder_knows_it(
    inputs, tmp_path
):
    flags = (*RUN_FLAGS, "--max-steps", 2, "--optimizer", "AdamW")
    train(inputs.command(tmp_path, *flags, "--global-rope-theta", 1000))
    longer = (*flags, "--phase2", "--from-phase1-final-params", steps_folder(tmp_path))
    train(inputs.command(tmp_path, *longer))
    thetas = [
        read_json(steps_folder(tmp_path, phase) / "2" / "config.json")["global_rope_theta"]
        for phase in ("phase1", "phase2")
    ]
    assert thetas == [1000, 160_000]
    theirs = transformers.AutoTokenizer.from_pretrained(steps_folder(tmp_path, "phase2") / "2")
    ours = BertTokenizer(inputs.vocab_file, do_lower_case=True)
    text = "Was it there?"
    assert theirs(text).input_ids == [ours.cls_token_id, *ours.encode(text), ours.sep_token_id]
    assert (theirs.mask_token_id, theirs.pad_token_id) == (ours.mask_token_id, ours.pad_token_id)
    changed = run_here(
        inputs.command(tmp_path, *longer, *resuming(tmp_path, "phase2"), "--global-rope-theta", 5)
    )
    assert (
        changed.returncode == 2
        and "global_rope_theta 160000.0 (this run uses 5.0)" in changed.stderr
    )
    local = read_json(inputs.config) | {"local_attention": 8}
    (tmp_path / "local.json").write_text(json.dumps(local))
    other = run_here(
        inputs.command(tmp_path / "other", *longer, "--config-file", tmp_path / "local.json")
    )
    assert (
        other.returncode == 2
        and "local_attention is 16, but this run's config has 8" in other.stderr
    )


@pytest.mark.parametrize("window", [2, 16, 10_000])
def test_flops_count_only_pairs_inside_the_window(window):
    config = config_from_dict({**MODERNBERT, "local_attention": window})
    with torch.device("meta"):
        model = ModernBertForMaskedLM(config)
    hidden = config.hidden_size
    inner = config.intermediate_size
    layers = range(config.num_hidden_layers)
    distances = [np.abs(np.subtract.outer(np.arange(n), np.arange(n))) for n in LENGTHS]
    pairs = sum(
        int((places <= window // 2).sum()) if layer % 3 else places.size
        for layer in layers
        for places in distances
    )
    per_token = len(layers) * (8 * hidden**2 + 6 * hidden * inner)
    head = 10 * (2 * hidden**2 + 2 * hidden * 192)  # the vocabulary of 130, padded
    expected = 3 * (sum(LENGTHS) * per_token + 4 * pairs * hidden + head)
    assert training_flops(model, LENGTHS, 10) == expected
