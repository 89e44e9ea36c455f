"""Every encoder against transformers' model with the same weights: logits, gradients and model
folders.
"""

import json

import pytest
import torch
import transformers
from encoder_cases import (
    CPU_IMPLEMENTATIONS,
    SIZES,
    logits_of,
    make_input,
    relative_error,
)
from encoder_twins import ENCODERS, HEADS, make_pair
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode

import modeling
from bert_recipe.model.costs.flops import training_flops
from bert_recipe.model.encoders.registry import config_from_dict, make_model
from bert_recipe.model.kernels import linear
from bert_recipe.model.token_stream import TokenStream
from bert_recipe.utils.errors import UserError

pytestmark = pytest.mark.fast

CASES = [
    (kind, head)
    for kind in ("bert", "modernbert", "roberta")
    for head in list(HEADS)[kind != "bert" :]
]
CASES += [
    (kind, head)
    for kind in ("xlm-roberta", "camembert")
    for head in ("masked_lm", "sequence_classification")
]
CASES += [(kind, head) for kind in ("distilbert", "electra") for head in list(HEADS)[1:]]
BIASES = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")
VARIANTS = [
    *((*case, {}) for case in CASES),
    *(("bert", "masked_lm", {"hidden_act": act}) for act in ("gelu_new", "gelu_pytorch_tanh")),
    ("modernbert", "masked_lm", dict.fromkeys(BIASES, True)),
    (
        "modernbert",
        "masked_lm",
        {"decoder_bias": False, "hidden_activation": "gelu_new", "local_attention": 2},
    ),
    ("modernbert", "sequence_classification", {"classifier_pooling": "mean"}),
    # The last layer has a window.
    ("modernbert", "sequence_classification", {"num_hidden_layers": 3, "local_attention": 4}),
    ("electra", "sequence_classification", {"embedding_size": 32, "hidden_act": "gelu_new"}),
]


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
@pytest.mark.parametrize(("kind", "head", "changes"), VARIANTS)
def test_logits_and_gradients_agree_with_transformers(kind, head, changes, implementation):
    check_agreement(kind, head, changes, implementation)


def check_agreement(kind, head, changes, implementation=None):
    model, twin = make_pair(kind, head, **changes)
    if implementation is not None:
        model.base_model.attention_implementation = implementation
    stream, padded, real = make_input(twin.config)
    theirs = logits_of(twin(**padded), real)
    ours = logits_of(model(stream))
    torch.manual_seed(2)
    weights = torch.randn_like(theirs)
    (theirs * weights).sum().backward()
    (ours * weights).sum().backward()
    gradients = {name: p.grad for name, p in twin.named_parameters(remove_duplicate=False)}
    assert relative_error(ours, theirs) < 1e-5
    modules = dict(twin.named_modules())
    for name, p in model.named_parameters():
        padding = getattr(modules[name.rpartition(".")[0]], "padding_idx", None)
        if padding is not None:  # a row that torch's Embedding does not train
            p.grad[padding] = gradients[name][padding] = 0
        if not name.endswith(
            ("key.bias", "k_lin.bias")
        ):  # zero but for rounding: it adds the same to all keys
            assert relative_error(p.grad[: len(gradients[name])], gradients[name]) < 1e-5, name


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in CASES}))
def test_by_onednn_they_agree_too(kind, monkeypatch):
    for limit in ("MIN_PRODUCT", "MIN_ROWS"):
        monkeypatch.setattr(linear, limit, 1)
    with linear.float32_linear(onednn=True):
        check_agreement(kind, "masked_lm", {})


@pytest.mark.parametrize(("kind", "head"), CASES)
def test_untied_word_embeddings_are_refused_only_with_a_head_that_has_them(kind, head):
    values = {**ENCODERS[kind][0], "model_type": kind, "tie_word_embeddings": False}
    config = config_from_dict(values)
    assert "tie_word_embeddings" not in config.to_dict()
    if head not in ("pretraining", "masked_lm"):
        assert make_model(head, config).architecture.endswith(HEADS[head])
        return
    with pytest.raises(UserError, match="tie_word_embeddings is False in the config"):
        make_model(head, config)


def test_of_514_positions_a_roberta_with_padding_3_reads_510_tokens_as_transformers_does():
    model, twin = make_pair("xlm-roberta", "masked_lm", pad_token_id=3)
    assert model.config.max_length == 510
    torch.manual_seed(1)
    rows = [torch.randint(4, SIZES["vocab_size"], (length,)) for length in (510, 7)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=3)
    padded = {"input_ids": ids, "attention_mask": ids != 3}
    with torch.no_grad():
        theirs = logits_of(twin(**padded), padded["attention_mask"])
        ours = logits_of(model(TokenStream.from_padded(**padded)[0]))
    assert relative_error(ours, theirs) < 1e-5


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_positions_count_tokens_that_the_mask_leaves_out(kind):
    model, twin = make_pair(kind, "masked_lm")
    _, padded, real = make_input(twin.config)
    real[3:6, 5:8] = False
    with torch.no_grad():
        theirs = logits_of(twin(**padded), real)
        ours = logits_of(model(TokenStream.from_padded(**padded)[0]))
    assert relative_error(ours, theirs) < 1e-5


@pytest.mark.parametrize("kind", ["bert", "modernbert", "distilbert", "electra"])
def test_in_the_last_layer_only_first_tokens_attend_if_no_other_output_is_used(kind):
    model, _ = make_pair(kind, "sequence_classification")
    length, layers = 10, model.config.num_hidden_layers
    stream = TokenStream.from_sequences([[*range(5, 5 + length)]] * 3)

    def attention_flops(forward) -> int:
        with FlopCounterMode(display=False) as counter:
            forward(stream)
        return counter.get_flop_counts()["Global"][torch.ops.aten.baddbmm]

    of_all = attention_flops(model.base_model)
    assert attention_flops(model) * layers * length == of_all * ((layers - 1) * length + 1)


@pytest.mark.parametrize("kind", ["bert", "modernbert", "distilbert"])
def test_one_sequence_has_the_same_states_without_gradients(kind, monkeypatch):
    calls, operator = [], torch.nn.functional.scaled_dot_product_attention

    def recorded(*args, **kwargs):
        calls.append(args)
        return operator(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    encoder = make_pair(kind, "masked_lm")[0].base_model.eval()
    for length in (1, 7, 60):
        stream = TokenStream.from_padded(torch.arange(3, 3 + length)[None])[0]
        expected = encoder(stream).last_hidden_state
        assert not calls  # torch's operator is slower with gradients
        with torch.no_grad():
            assert relative_error(encoder(stream).last_hidden_state, expected) < 1e-5
        assert bool(calls) == (kind != "modernbert")  # which rotates
        calls.clear()


@pytest.mark.parametrize(("kind", "head"), [*CASES[:9], ("bert", "sentence_embedding")])
def test_padded_input_has_the_outputs_of_the_stream(kind, head):
    model = make_model(head, config_from_dict({**ENCODERS[kind][0], "model_type": kind})).eval()
    stream, padded, real = make_input()
    logits = logits_of(model(**padded), real)
    expected = logits_of(model(stream))
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)
    if head == "masked_lm":
        places_M = real.flatten().nonzero()[3::50, 0].contiguous()
        at_M = model(**padded, mlm_positions=places_M).prediction_logits[:, : SIZES["vocab_size"]]
        torch.testing.assert_close(at_M, model(**padded).prediction_logits.flatten(0, 1)[places_M])
        labels_M = padded["input_ids"].flatten()[places_M]
        loss = model(**padded, mlm_positions=places_M, labels=labels_M).loss
        torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(at_M, labels_M))
    with pytest.raises(ValueError, match="pad on the right"):
        model(padded["input_ids"], real.flip(1))


@pytest.mark.parametrize(("kind", "head"), CASES)
def test_folders_have_the_same_logits_here_and_in_transformers(tmp_path, kind, head):
    dropout_name = "seq_classif_dropout" if kind == "distilbert" else "classifier_dropout"
    model, twin = make_pair(kind, head, **{dropout_name: 0.3})
    stream, padded, real = make_input(twin.config)
    expected = logits_of(twin.eval()(**padded), real)
    twin.save_pretrained(tmp_path / "theirs")
    loaded = getattr(modeling, type(model).__name__).from_pretrained(tmp_path / "theirs")
    assert relative_error(logits_of(loaded(stream)), expected) < 1e-5
    assert loaded.config.head_dropout == 0.3 and loaded.config.max_length == 512
    ours = tmp_path / "ours"
    ours.mkdir()
    save_file(model.state_dict(), ours / "model.safetensors", metadata={"format": "pt"})
    (ours / "config.json").write_text(
        json.dumps({"architectures": [model.architecture], **model.config.to_dict()})
    )
    back = getattr(transformers, f"AutoModelFor{HEADS[head]}").from_pretrained(ours).eval()
    assert type(back).__name__ == model.architecture == f"{ENCODERS[kind][1]}For{HEADS[head]}"
    assert getattr(back.config, dropout_name) == 0.3
    assert relative_error(logits_of(back(**padded), real), expected) < 1e-6


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "electra"])
def test_the_classifier_of_tokens_has_the_dropout_of_transformers(kind):
    name = "dropout" if kind == "distilbert" else "classifier_dropout"
    model, twin = make_pair(kind, "token_classification", **{name: 0.4})
    assert model.dropout.prob == twin.dropout.p == 0.4


def test_a_discriminator_of_electra_is_read_without_its_own_head(tmp_path):
    torch.manual_seed(0)
    config = transformers.ElectraConfig(**ENCODERS["electra"][0])
    twin = transformers.ElectraForPreTraining(config).eval()
    twin.save_pretrained(tmp_path)
    model = modeling.ElectraModel.from_pretrained(tmp_path).eval()
    stream, padded, real = make_input(config)
    with torch.no_grad():
        expected = twin.electra(**padded).last_hidden_state[real]
        assert relative_error(model(stream).last_hidden_state, expected) < 1e-5


@pytest.mark.parametrize("kind", ["bert", "modernbert", "roberta", "distilbert", "electra"])
@pytest.mark.parametrize("head", ["sequence_classification", "token_classification"])
def test_outputs_of_a_new_layer_begin_where_they_are_told(kind, head):
    model = make_pair(kind, head)[0].eval()
    stream, *_ = make_input()

    def begun(bias: float | tuple[float, ...], factor: float) -> torch.Tensor:
        torch.manual_seed(3)
        model.first_outputs = (bias, factor)
        model.init_weights()
        with torch.no_grad():
            return logits_of(model(stream)).double()

    standard = begun(0.0, 1.0)
    assert standard.std() > 0
    torch.testing.assert_close(begun(-200.0, 50.0), 50 * standard - 200, rtol=0, atol=1e-3)
    biases = tuple(float(number) for number in range(standard.shape[-1]))
    expected = standard + torch.tensor(biases)
    torch.testing.assert_close(begun(biases, 1.0), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("kind", ["bert", "modernbert", "roberta"])
def test_logits_of_classifiers_and_spans_are_float32_with_16_bit_products(kind, prepared):
    for head in ("question_answering", "sequence_classification", "token_classification"):
        torch.manual_seed(0)
        model = make_model(head, config_from_dict({**ENCODERS[kind][0], "model_type": kind})).eval()
        with torch.no_grad():
            expected = logits_of(model(make_input()[0]))
            if prepared:
                model.prepare_for_inference(torch.bfloat16)
            with torch.autocast("cpu", torch.bfloat16):
                logits = logits_of(model(make_input()[0]))
        assert logits.dtype == torch.float32 and 0 < relative_error(logits, expected) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_prepared_for_inference_gives_bit_identical_logits(dtype):
    model = make_pair("bert", "question_answering")[0].eval()
    stream = make_input()[0]

    def logits() -> torch.Tensor:
        with torch.inference_mode(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            return logits_of(model(stream))

    before = logits()
    model.prepare_for_inference(dtype)
    assert logits().equal(before)


FLOPS = {kind: values for kind, (values, _) in ENCODERS.items() if kind != "camembert"}
FLOPS["neobert"] = {**SIZES, "intermediate_size": 48, "max_length": 512}


@pytest.mark.parametrize("head", list(HEADS)[1:])
@pytest.mark.parametrize("kind", FLOPS)
def test_the_formula_of_flops_counts_all_matrix_products(kind, head):
    """In texts of one token, all of which reach the last layer's output."""
    model = make_model(head, config_from_dict({**FLOPS[kind], "model_type": kind}))
    model.base_model.attention_implementation = "padded"
    stream, _ = TokenStream.from_padded(torch.arange(3, 43)[:, None])
    with FlopCounterMode(display=False) as counter:
        model(stream)
    counts = counter.get_flop_counts()["Global"]
    # Only newer versions of torch count attention's.
    products = sum(flops for op, flops in counts.items() if "attention" not in str(op))
    attention = 40 * 4 * SIZES["hidden_size"] * SIZES["num_hidden_layers"]
    assert training_flops(model, [1] * 40, 40) == 3 * (products + attention)
