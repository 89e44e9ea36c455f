"""Linear layers by oneDNN: the values and gradients of torch's, where a rule says so."""

import pytest
import torch
import torch.nn.functional as F
from conftest import log_entries
from encoder_cases import relative_error
from small_runs import progress, resuming, steps_folder, train
from torch import Tensor

import run_pretraining
from bert_recipe.checkpoint.folder import MODEL_FILE
from bert_recipe.config.arguments import make_run_config
from bert_recipe.model.kernels import linear as linear_module
from bert_recipe.model.kernels.linear import (
    PackedLinear,
    float32_library,
    float32_linear,
    linear,
    onednn_is_faster,
    takes_bfloat16,
    takes_onednn,
    weight_gradient,
)
from bert_recipe.model.loss import linear_cross_entropy
from bert_recipe.optimization.muon import orthogonalize
from bert_recipe.training import setup
from bert_recipe.training.setup import chooses_onednn
from bert_recipe.utils.device import cpu_maker
from bert_recipe.utils.distributed import DistributedContext

# Rows, inputs, outputs: of several blocks of rows, of few and of uneven ones, narrow and large.
SHAPES = (
    *((1300, 512, 640), (1037, 640, 512), (301, 96, 384), (300, 384, 96), (65, 512, 2048)),
    *((2801, 96, 384), (2800, 384, 96), (513, 1024, 1030)),
)


@pytest.fixture
def onednn():
    """As on a processor where oneDNN is faster. Its products have the same values everywhere."""
    with float32_linear(True):
        yield


def tensors(rows: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The input, the weight, the bias, and the gradient of the output."""
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, inputs), (outputs, inputs), (outputs,), (rows, outputs))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def gradients(function, tensors, grad: Tensor) -> list[Tensor]:
    """The output of `function` and the gradients of `tensors`."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_as_near_to_float64_as_those_of_torch(onednn, shape):
    *inputs, grad = tensors(*shape)
    assert takes_onednn(inputs[0], inputs[1])
    exact = gradients(F.linear, [tensor.double() for tensor in inputs], grad.double())
    of_torch = gradients(F.linear, inputs, grad)
    for computed, usual, expected in zip(
        gradients(linear, inputs, grad), of_torch, exact, strict=True
    ):
        assert computed.shape == expected.shape
        assert relative_error(computed, expected) < max(3 * relative_error(usual, expected), 5e-7)


@pytest.mark.parametrize(
    "form", ["sequences", "transposed", "columns of larger tensors", "no bias"]
)
def test_any_layout_of_the_operands_gives_the_same(onednn, form):
    hidden, weight, bias, _ = tensors(128, 256, 512)
    if form == "sequences":
        hidden = hidden.view(4, 32, 256)
    elif form == "transposed":
        hidden, weight = hidden.T.contiguous().T, weight.T.contiguous().T
    elif form == "columns of larger tensors":
        hidden, weight = (
            torch.cat([matrix, matrix], dim=1)[:, :256] for matrix in (hidden, weight)
        )
    else:
        bias = None
    assert takes_onednn(hidden, weight)
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    grad = torch.ones(()).expand(*hidden.shape[:-1], 512)
    computed, expected = gradients(linear, inputs, grad), gradients(F.linear, inputs, grad)
    for value, usual in zip(computed, expected, strict=True):
        torch.testing.assert_close(value, usual, rtol=1e-4, atol=1e-4)


BFLOAT16_FORMS = ["autocast", "bfloat16", "sequences", "no bias", "an expanded gradient"]


@pytest.mark.parametrize("form", BFLOAT16_FORMS)
@pytest.mark.parametrize("shape", [(300, 96, 1024), (130, 1024, 384), (2049, 256, 768)])
def test_bfloat16_has_the_bits_of_torch(shape, form):
    if not onednn_is_faster():
        pytest.skip("here, bfloat16 is torch's")
    *inputs, grad = tensors(*shape)
    if form == "bfloat16":
        inputs = [tensor.bfloat16() for tensor in inputs]
    elif form == "sequences":
        inputs[0], grad = (tensor.unflatten(0, (-1, 1)) for tensor in (inputs[0], grad))
    elif form == "no bias":
        inputs.pop()
    elif form == "an expanded gradient":
        grad = grad[:1, :1].expand(grad.shape)

    def computed_by(function) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            assert takes_bfloat16(*inputs[:2])
        cast = torch.autocast("cpu", torch.bfloat16, enabled=form != "bfloat16")
        return gradients(cast(function), inputs, grad.bfloat16())

    for computed, usual in zip(computed_by(linear), computed_by(F.linear), strict=True):
        assert computed.dtype == usual.dtype and computed.is_contiguous()
        assert torch.equal(computed, usual)


def test_only_what_needs_a_gradient_gets_one(onednn):
    hidden, weight, bias, _ = tensors(128, 256, 512)
    output = linear(hidden, weight, bias.requires_grad_())
    output.sum().backward()
    torch.testing.assert_close(bias.grad, torch.full((512,), 128.0))
    assert hidden.grad is None and weight.grad is None


def test_second_derivatives_are_those_of_torch(onednn):
    hidden, weight, _, _ = tensors(128, 256, 512)

    def second_derivatives(function) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        total = function(*leaves).square().sum()
        first = torch.autograd.grad(total, leaves, create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in first)
        return list(torch.autograd.grad(penalty, leaves))

    for computed, expected in zip(
        second_derivatives(linear), second_derivatives(F.linear), strict=True
    ):
        assert relative_error(computed, expected) < 1e-5


def test_the_masked_token_head_has_the_loss_and_the_gradients_of_torch(onednn):
    hidden, weight, bias, _ = tensors(64, 128, 2048)
    labels = torch.arange(64) % 50
    labels[::5] = -100

    def loss(*inputs: Tensor) -> Tensor:
        return linear_cross_entropy(*inputs, labels)[0]

    def expected_loss(*inputs: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(*inputs), labels, reduction="sum")

    inputs = (hidden, weight / 10, bias)
    computed = gradients(loss, inputs, torch.tensor(0.5))
    exact = gradients(
        expected_loss, [tensor.double() for tensor in inputs], torch.tensor(0.5).double()
    )
    for value, expected in zip(computed, exact, strict=True):
        assert relative_error(value, expected) < 1e-6


@pytest.mark.parametrize("shape", [(2, 256, 384), (2, 640, 224), (1, 256, 640)])
def test_matrices_of_muon_are_orthogonalized_as_by_torch(onednn, shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    computed = orthogonalize(matrices)
    with float32_linear(False):
        expected = orthogonalize(matrices)
    assert 0 < relative_error(computed, expected) < 1e-5


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("float64", lambda hidden, weight: (hidden.double(), weight.double())),
        ("bfloat16", lambda hidden, weight: (hidden.bfloat16(), weight.bfloat16())),
        ("few rows", lambda hidden, weight: (hidden[:4], weight)),
        ("a small product", lambda hidden, weight: (hidden[:, :32], weight[:32, :32])),
        ("no rows", lambda hidden, weight: (hidden[:0], weight)),
        ("another device", lambda hidden, weight: (hidden.to("meta"), weight.to("meta"))),
    ],
)
def test_other_products_are_those_of_torch(onednn, name, change):
    hidden, weight, _, _ = tensors(128, 1024, 2048)
    hidden, weight = change(hidden, weight)
    output = linear(hidden, weight)
    assert not takes_onednn(hidden, weight)
    if name != "another device":
        assert torch.equal(output, F.linear(hidden, weight))
    assert weight_gradient(output, hidden).shape == weight.shape


def test_autocast_and_compiled_graphs_are_those_of_torch(onednn, monkeypatch):
    hidden, weight, bias, _ = tensors(128, 256, 512)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(hidden, weight, bias).dtype == torch.bfloat16
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not takes_onednn(hidden, weight)


def test_bfloat16_layers_are_compiled_in_one_graph():
    hidden, weight, bias, _ = tensors(128, 256, 512)
    with torch.autocast("cpu", torch.bfloat16):
        compiled = torch.compile(linear, backend="eager", fullgraph=True)
        assert torch.equal(compiled(hidden, weight, bias), F.linear(hidden, weight, bias))


def test_packed_weights_give_the_same(onednn, monkeypatch):
    layer = torch.nn.Linear(256, 512)
    if not PackedLinear.supports(layer.weight):
        pytest.skip("this version of torch packs no weights")
    for rows in (1, 7, 128):
        hidden = torch.randn(rows, 256)
        torch.testing.assert_close(PackedLinear(layer)(hidden), layer(hidden))
    with float32_linear(False):
        assert not PackedLinear.supports(layer.weight)


# Maker, torch's instruction set, whether oneDNN's has AVX-512, and the library.
MACHINES = [
    ("AuthenticAMD", "AVX512", True, "onednn"),
    ("GenuineIntel", "AVX512", True, "torch"),  # MKL uses AVX-512 there
    ("AuthenticAMD", "AVX2", True, "torch"),  # ATEN_CPU_CAPABILITY=avx2
    ("AuthenticAMD", "AVX512", False, "torch"),  # ONEDNN_MAX_CPU_ISA=AVX2
    ("", "AVX512", True, "torch"),
]


@pytest.mark.parametrize(("maker", "instructions", "onednn_has", "library"), MACHINES)
def test_a_rule_chooses_the_library_of_a_machine(
    monkeypatch, maker, instructions, onednn_has, library
):
    monkeypatch.setattr(linear_module, "cpu_maker", lambda: maker)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn_has)
    monkeypatch.setattr(linear_module.Setting, "onednn", None)
    linear_module.onednn_is_faster.cache_clear()
    try:
        assert float32_library() == library
    finally:
        linear_module.onednn_is_faster.cache_clear()


def test_another_operator_of_torch_is_not_called(monkeypatch):
    monkeypatch.setattr(linear_module, "SCHEMA", "another")
    linear_module.onednn_is_faster.cache_clear()
    try:
        assert not linear_module.onednn_is_faster()
    finally:
        linear_module.onednn_is_faster.cache_clear()


def test_the_maker_is_read_from_the_processor_s_identification(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\n")
    assert cpu_maker(path) == "AuthenticAMD"
    path.write_text("processor\t: 0\nCPU implementer\t: 0x41\n")
    assert cpu_maker(path) == cpu_maker(tmp_path / "none") == ""


def test_a_run_by_onednn_is_exact_and_says_so(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(linear_module, "MIN_PRODUCT", 1)
    flags = ("--learning-rate", 1e-3, "--optimizer", "AdamW", "--log-freq", 1)

    def model_of(output, step: int) -> bytes:
        return (steps_folder(output) / str(step) / MODEL_FILE).read_bytes()

    whole, parts, torchs = (tmp_path / name for name in ("whole", "parts", "torchs"))
    train(inputs.command(whole, *flags, "--max-steps", 4))
    for _ in range(2):
        part = (*flags, "--max-steps", 4, "--steps-this-run", 2)
        train(inputs.command(parts, *resuming(parts), *part))
    assert model_of(parts, 4) == model_of(whole, 4)
    train(inputs.command(torchs, *flags, "--max-steps", 4, "--float32-linear", "torch"))
    assert model_of(torchs, 4) != model_of(whole, 4)
    for output, library in ((whole, "onednn"), (torchs, "torch")):
        settings = log_entries(output / "report.json")[0]["data"]
        assert settings["float32_linear"] == library
        assert progress(output, 4)["versions"]["float32_linear"] == library

    monkeypatch.setattr(setup, "onednn_is_faster", lambda: False)
    resumed = train(inputs.command(parts, *resuming(parts), *flags, "--max-steps", 5))
    note = "note: the library of float32 linear layers was onednn and is torch now"
    assert note in resumed.stdout


@pytest.mark.parametrize("others", [0, 1])
def test_all_ranks_use_onednn_or_none(inputs, tmp_path, monkeypatch, others):
    monkeypatch.setattr(setup, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(
        DistributedContext, "all_reduce_sum", lambda _, values: [sum(values) + others]
    )
    words = [str(word) for word in inputs.command(tmp_path, "--max-steps", 1)]
    config = make_run_config(run_pretraining.parse_arguments(words))
    context = DistributedContext(world_size=2)
    assert chooses_onednn(config, torch.device("cpu"), context) == bool(others)
    assert not chooses_onednn(config, torch.device("cuda"), context)
