"""Mixed precision: the types of a run, the loss scale, and float32 master weights."""

import json

import pytest
import torch
from small_runs import train

from bert_recipe.config import PrecisionConfig
from bert_recipe.optimization import precision as precision_module
from bert_recipe.optimization.precision import (
    LossScale,
    MasterWeights,
    Precision,
    has_bfloat16,
    has_float16,
    optimizer_product_dtype,
    select_precision,
)
from bert_recipe.utils.errors import UserError

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


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
    precision = select_precision(PrecisionConfig(amp=amp, amp_dtype=dtype, pure_fp16=pure), CPU)
    assert (precision, precision.autocast, precision.needs_loss_scale) == (
        expected,
        autocast,
        needs_scale,
    )


@pytest.mark.parametrize(
    ("maker", "mkldnn", "avx512_bf16", "amx", "expected"),
    [
        ("AuthenticAMD", True, True, False, True),
        ("GenuineIntel", True, True, False, False),  # such as a virtual machine without AMX
        ("GenuineIntel", True, True, True, True),
        ("GenuineIntel", True, False, True, True),
        ("", True, True, False, True),
        ("AuthenticAMD", True, False, False, False),
        ("GenuineIntel", False, True, True, False),
    ],
)
def test_a_cpu_computes_bfloat16_fast_only_with_fast_instructions_for_it(
    monkeypatch, maker, mkldnn, avx512_bf16, amx, expected
):
    monkeypatch.setattr(precision_module, "cpu_maker", lambda: maker)
    monkeypatch.setattr(precision_module.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: mkldnn)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert has_bfloat16(CPU) == expected


@pytest.mark.parametrize(
    ("dtype", "device", "fast", "expected"),
    [
        (torch.float32, GPU, True, torch.float32),
        (torch.bfloat16, GPU, True, torch.bfloat16),
        (torch.float16, GPU, True, torch.bfloat16),
        (torch.float32, CPU, True, torch.float32),
        (torch.bfloat16, CPU, True, torch.bfloat16),
        (torch.bfloat16, CPU, False, torch.float32),
        (torch.float16, CPU, True, torch.float32),
    ],
)
def test_optimizers_multiply_in_float32_where_the_model_does(
    monkeypatch, dtype, device, fast, expected
):
    """bfloat16 has errors of 15% to 20% in Muon's updates from gradients of low rank."""
    monkeypatch.setattr(precision_module, "has_bfloat16", lambda device: fast)
    assert optimizer_product_dtype(Precision(dtype), device) == expected


@pytest.mark.parametrize(
    ("fast", "flags", "says"), [(False, ["--amp"], 1), (False, [], 0), (True, ["--amp"], 0)]
)
def test_a_run_says_once_that_bfloat16_is_slow_on_this_cpu(
    monkeypatch, inputs, tmp_path, fast, flags, says
):
    monkeypatch.setattr(precision_module, "has_bfloat16", lambda device: fast)
    result = train(inputs.command(tmp_path / "run", "--max-steps", 1, *flags))
    assert result.stdout.count("note: bfloat16 is slower than float32 on this CPU") == says


@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_sets_the_type_of_float32_products(monkeypatch, tf32):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [backend.allow_tf32 for backend in backends]
    try:
        assert select_precision(PrecisionConfig(tf32=tf32), GPU) == Precision()
        assert [backend.allow_tf32 for backend in backends] == [tf32, tf32]
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.allow_tf32 = value


@pytest.mark.parametrize(
    ("dtype", "tf32", "device", "says"),
    [
        ("float16", False, CPU, "float16.*use --amp-dtype bfloat16"),
        ("bfloat16", False, GPU, "bfloat16.*use --amp-dtype float16"),
        ("bfloat16", True, CPU, "--tf32: this device has no TF32"),
        ("bfloat16", True, GPU, "--tf32: this device has no TF32"),
    ],
)
def test_a_type_that_the_device_lacks_is_an_error(monkeypatch, dtype, tf32, device, says):
    monkeypatch.setattr(torch.cpu, "_is_avx512_fp16_supported", lambda: False, raising=False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    assert not has_float16(CPU) and has_float16(GPU)
    with pytest.raises(UserError, match=says):
        select_precision(PrecisionConfig(amp=True, amp_dtype=dtype, tf32=tf32), device)


CLEAN, OVERFLOW = torch.tensor(0.0), torch.tensor(1.0)


@pytest.mark.parametrize(
    ("initial", "dynamic", "steps", "expected"),
    [
        (2**20, True, [(CLEAN, 1999)], 2**20),
        (2**20, True, [(CLEAN, 2000)], 2**21),
        # An overflow just before it would double: it halves, and the count starts again.
        (2**20, True, [(CLEAN, 1999), (OVERFLOW, 1), (CLEAN, 1999)], 2**19),
        (2**20, True, [(CLEAN, 1999), (OVERFLOW, 1), (CLEAN, 2000)], 2**20),
        (128, True, [(OVERFLOW, 20)], 1),
        (64, False, [(OVERFLOW, 3), (CLEAN, 3000)], 64),
    ],
)
def test_loss_scale_doubles_after_2000_clean_steps_and_halves_on_an_overflow(
    initial, dynamic, steps, expected
):
    scale = LossScale(initial, dynamic)
    for found_inf, count in steps:
        for _ in range(count):
            scale.update(found_inf)
        resumed = LossScale(1.0, dynamic)
        resumed.load_state_dict(json.loads(json.dumps(scale.state_dict())))
        scale = resumed
    assert scale.value == expected


def test_gradients_of_micro_batches_are_summed_in_float32():
    model = torch.nn.Linear(2, 2).bfloat16()
    masters = MasterWeights(model)
    for _ in range(1000):  # a bfloat16 sum would stop at 256
        model.weight.grad = torch.ones_like(model.weight)
        masters.add_gradients()
    weight, bias = masters.masters.values()
    assert weight.grad.tolist() == [[1000.0] * 2] * 2
    assert bias.grad is None and model.weight.grad is None
