"""Float8 products, emulated on the CPU, against a written-out rounding, and in runs with every
parallel strategy.
"""

import copy
import json

import pytest
import torch
from conftest import TINY, read_json
from encoder_cases import MODERNBERT, logits_of, make_input, relative_error
from rank_runs import Command, compile_on_one_rank, pretrain, run_ranks
from small_runs import losses
from torch import nn

from bert_recipe.config import PrecisionConfig
from bert_recipe.model.encoders.registry import config_from_dict, make_model
from bert_recipe.optimization.precision import Precision, select_precision, use_float8
from bert_recipe.training import setup as run_setup
from bert_recipe.utils.errors import UserError

pytest.importorskip("torchao", reason="needs torchao: pip install torchao")

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
BERT = {
    **TINY,
    "model_type": "bert",
    "vocab_size": 130,
    "max_position_embeddings": 512,
    "num_hidden_layers": 4,
}


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` rounded to float8, with the largest value of the type for the largest of `x`."""
    scale = (torch.finfo(dtype).max / x.abs().max().double()).float()
    return (x * scale).to(dtype).float() / scale


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        x, weight = (rounded(operand, torch.float8_e4m3fn) for operand in (x, weight))
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        gradient = rounded(gradient, torch.float8_e5m2)
        return gradient @ weight, gradient.T @ x


class RoundedLinear(nn.Linear):
    def forward(self, x):
        product = Product.apply(x, self.weight)
        return product if self.bias is None else product + self.bias


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_products_and_gradients_are_those_of_rounded_operands(name):
    torch.manual_seed(0)
    config = {"bert": BERT, "modernbert": MODERNBERT}[name]
    model = make_model("masked_lm", config_from_dict(config)).eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    plain, expected = copy.deepcopy(model), copy.deepcopy(model)
    use_float8(model.layers, CPU)
    assert model.state_dict().keys() == plain.state_dict().keys()
    converted = {
        path for path, module in model.named_modules() if type(module).__name__ == "Float8Linear"
    }
    fused = ("query", "key", "value")
    linear = [
        path for path, module in plain.layers.named_modules() if isinstance(module, nn.Linear)
    ]
    assert len(converted) == len([path for path in linear if not path.endswith(fused)]) >= 12
    for path in converted:
        expected.get_submodule(path).__class__ = RoundedLinear
    stream, _, _ = make_input()
    outputs = [logits_of(m(stream)) for m in (model, expected, plain)]
    assert (
        relative_error(outputs[0], outputs[1])
        < 1e-5
        < 1e-2
        < relative_error(outputs[0], outputs[2])
    )
    weights = torch.randn_like(outputs[0])
    for output in outputs:
        (output * weights).sum().backward()
    for (path, p), twin in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert relative_error(p.grad, twin.grad) < 1e-4, path


def test_layers_whose_sizes_are_no_multiples_of_16_stay_as_they_are():
    layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 24), nn.Linear(24, 16))])
    use_float8(layers, CPU)
    assert [type(layer).__name__ for layer in layers[0]] == ["Float8Linear", "Linear", "Linear"]


RUNS = {
    "bfloat16": (),
    "DDP": (),
    "FSDP2": ("--data-parallel-shard-degree", -1),
    "DDP, compiled, selective": ("--compile", "layers", "--activation-checkpoint", "selective"),
    "DDP, amp": ("--amp",),
    "FSDP2, full": ("--data-parallel-shard-degree", -1, "--activation-checkpoint", "full"),
}


def pretrain_in_float8(commands: list[Command]) -> int:
    """The first command in bfloat16, the others in emulated float8; compiled ones without code
    generation, and on one rank only.
    """
    nn.Module.compile = compile_on_one_rank("aot_eager")
    for index, command in enumerate(commands):
        amp = "--amp" in command.argv
        # torchao casts its inputs where CUDA's autocast is on, which casts nothing else on a CPU.
        torch.set_autocast_enabled("cuda", amp)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        precision = Precision(torch.bfloat16, pure=not amp, float8=index > 0)
        run_setup.select_precision = lambda *_args, precision=precision: precision
        if code := pretrain(command):
            return code
    return 0


def test_every_strategy_trains_in_float8_as_ddp_does(inputs, tmp_path):
    one_layer = read_json(inputs.config_without_dropout) | {"num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(one_layer))
    flags = ("--max-steps", 2, "--log-freq", 1, "--gradient-merge-steps", 2)
    flags += ("--config-file", tmp_path / "config.json")
    argvs = [inputs.command(tmp_path / name, *flags, *given) for name, given in RUNS.items()]
    run_ranks(
        2, tmp_path / "logs", pretrain_in_float8, [Command(2, argv) for argv in argvs]
    ).check()
    losses_of = {name: losses(tmp_path / name) for name in RUNS}
    assert (
        losses_of["DDP"] == pytest.approx(losses_of["bfloat16"], rel=1e-2)
        and losses_of["DDP"] != losses_of["bfloat16"]
    )
    for name in list(RUNS)[2:]:
        tolerance = 1e-2 if "amp" in name else 1e-4
        assert losses_of[name] == pytest.approx(losses_of["DDP"], rel=tolerance), name


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "says"),
    [
        (CPU, None, "bfloat16", "--fp8: this device has no float8"),
        (GPU, (8, 0), "bfloat16", "--fp8: this device has no float8"),
        (GPU, (9, 0), "float16", "leave out --amp-dtype float16"),
    ],
)
def test_what_float8_needs_is_an_error_without_it(monkeypatch, device, capability, dtype, says):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    with pytest.raises(UserError, match=says):
        select_precision(PrecisionConfig(amp=True, amp_dtype=dtype, fp8=True), device)
