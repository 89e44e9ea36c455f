"""Mixed precision: the types of a run, the loss scale, and float32 master weights."""

import json

import numpy as np
import pytest
import torch
from small_runs import train

import precision as precision_module
from precision import LossScale, MasterWeights, Precision, has_bfloat16, has_float16, select_precision
from utils.errors import UserError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


# --- types ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("amp", "dtype", "pure", "expected", "autocast", "needs_scale"),
    [
        (False, "bfloat16", False, Precision(torch.float32), False, False),
        (True, "bfloat16", False, Precision(torch.bfloat16), True, False),
        (False, "bfloat16", True, Precision(torch.bfloat16, pure=True), False, False),
        (True, "float16", False, Precision(torch.float16), True, True),
        (True, "float16", True, Precision(torch.float16, pure=True), False, True),
    ],
)
def test_flags_select_the_precision(monkeypatch, amp, dtype, pure, expected, autocast, needs_scale):
    monkeypatch.setattr(precision_module, "has_float16", lambda device: True)
    precision = select_precision(amp, dtype, pure, tf32=False, device=CPU)
    assert (precision, precision.autocast, precision.needs_loss_scale) == (expected, autocast, needs_scale)


def test_autocast_computes_in_16_bits_and_other_precisions_do_not_cast():
    x = torch.ones(2, 2)
    with Precision(torch.bfloat16).context(CPU):
        assert (x @ x).dtype == torch.bfloat16
    for precision in (Precision(), Precision(torch.bfloat16, pure=True)):
        with precision.context(CPU):
            assert (x @ x).dtype == torch.float32


def test_float16_on_a_cpu_without_it_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_fp16_supported", lambda: False, raising=False)
    assert not has_float16(CPU) and has_float16(GPU)
    with pytest.raises(UserError, match=r"float16.*use --amp-dtype bfloat16"):
        select_precision(True, "float16", False, False, CPU)


def test_bfloat16_on_a_gpu_without_it_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    with pytest.raises(UserError, match=r"bfloat16.*use --amp-dtype float16"):
        select_precision(True, "bfloat16", False, False, GPU)


@pytest.mark.parametrize(
    ("mkldnn", "avx512_bf16", "amx", "expected"),
    [(True, True, False, True), (True, False, True, True), (True, False, False, False), (False, True, True, False)],
)
def test_a_cpu_computes_bfloat16_fast_only_with_instructions_for_it(monkeypatch, mkldnn, avx512_bf16, amx, expected):
    monkeypatch.setattr(precision_module.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: mkldnn)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert has_bfloat16(CPU) == expected


@pytest.mark.parametrize(("fast", "flags", "says"), [(False, ["--amp"], 1), (False, [], 0), (True, ["--amp"], 0)])
def test_a_run_says_once_that_bfloat16_is_slow_on_this_cpu(monkeypatch, inputs, tmp_path, fast, flags, says):
    monkeypatch.setattr(precision_module, "has_bfloat16", lambda device: fast)
    result = train(inputs.command(tmp_path / "run", "--max-steps", 1, *flags))
    assert result.stdout.count("note: this CPU has no bfloat16 instructions") == says


@pytest.fixture
def tf32_flags():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_sets_the_type_of_float32_products(tf32_flags, monkeypatch, tf32):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not tf32
    assert select_precision(False, "bfloat16", False, tf32, GPU) == Precision()
    assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == tf32


def test_tf32_on_a_device_without_it_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    for device in (CPU, GPU):
        with pytest.raises(UserError, match=r"--tf32: this device has no TF32"):
            select_precision(False, "bfloat16", False, True, device)


# --- the loss scale ---------------------------------------------------------------------------------------------------

CLEAN, OVERFLOW = torch.tensor(0.0), torch.tensor(1.0)


def test_loss_scale_doubles_after_2000_clean_steps_and_halves_on_an_overflow():
    scale = LossScale(2.0**20, dynamic=True)
    for _ in range(1999):
        scale.update(CLEAN)
    assert scale.value == 2**20
    scale.update(CLEAN)
    assert scale.value == 2**21
    for _ in range(1999):
        scale.update(CLEAN)
    scale.update(OVERFLOW)  # just before it would double: it halves, and the count starts again
    assert scale.value == 2**20
    for _ in range(1999):
        scale.update(CLEAN)
    assert scale.value == 2**20
    scale.update(CLEAN)
    assert scale.value == 2**21


def test_loss_scale_does_not_fall_below_one():
    scale = LossScale(128, dynamic=True)
    for _ in range(20):
        scale.update(OVERFLOW)
    assert scale.value == 1


def test_fixed_loss_scale_does_not_change():
    scale = LossScale(64, dynamic=False)
    for found_inf in [OVERFLOW] * 3 + [CLEAN] * 3000:
        scale.update(found_inf)
    assert scale.value == 64


def test_loss_scale_continues_from_its_state():
    scale = LossScale(2.0**10, dynamic=True)
    for _ in range(1500):
        scale.update(CLEAN)
    other = LossScale(1.0, dynamic=True)
    other.load_state_dict(json.loads(json.dumps(scale.state_dict())))
    for _ in range(500):
        other.update(CLEAN)
    assert other.value == 2**11


# --- master weights ---------------------------------------------------------------------------------------------------


def test_bfloat16_model_follows_its_float32_master_weights():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)).requires_grad_()
    masters = MasterWeights(model)
    exact = {name: p.detach().double().numpy() for name, p in model.named_parameters()}
    model.to(torch.bfloat16)
    optimizer = torch.optim.SGD(masters.masters.values(), lr=1e-5)
    for _ in range(200):
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.5)
        masters.add_gradients()
        optimizer.step()
        masters.push_weights()
        optimizer.zero_grad()
    for name, p in model.named_parameters():
        # 200 steps of 5e-6, each too small to move a weight of 0.1 in bfloat16.
        expected = exact[name] - 200 * 1e-5 * 0.5
        master = masters.masters[name]
        assert master.dtype == torch.float32
        assert np.abs(master.detach().double().numpy() - expected).max() < 5e-6
        assert p.dtype == torch.bfloat16 and torch.equal(p, master.bfloat16())


def test_gradients_of_micro_batches_are_summed_in_float32():
    model = torch.nn.Linear(2, 2).bfloat16()
    masters = MasterWeights(model)
    for _ in range(1000):  # a bfloat16 sum would stop at 256
        model.weight.grad = torch.ones_like(model.weight)
        masters.add_gradients()
    weight, bias = masters.masters.values()
    assert weight.grad.tolist() == [[1000.0] * 2] * 2
    assert bias.grad is None and model.weight.grad is None
