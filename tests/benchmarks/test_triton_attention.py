"""--attention: the kernel in Triton's interpreter, and what is refused."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bert_recipe.config import ParallelConfig
from bert_recipe.config.runtime import ATTENTIONS
from bert_recipe.experiments import triton_attention
from bert_recipe.model.attention import IMPLEMENTATIONS
from bert_recipe.model.encoders.bert import BertConfig
from bert_recipe.parallel import attention_choice
from bert_recipe.parallel.attention_choice import (
    CHOICES,
    check_attention,
    check_attention_flag,
    load_attention,
)
from bert_recipe.utils.errors import UserError

PROGRAM = Path(__file__).parent / "interpreted_attention.py"
CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def interpreted() -> dict:
    if find_spec("triton") is None:
        pytest.skip("needs Triton, which torch for CPUs lacks")
    result = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, check=False)
    if "only 0-dimensional arrays can be converted" in result.stderr:
        pytest.skip("Triton's interpreter does not know this NumPy: install an older one")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_kernel_matches_float64_with_the_dropout_mask_that_it_drew(interpreted):
    """Output, gradient, share of dropped probabilities, and zeros for filler."""
    cases = interpreted["cases"]
    assert cases.keys() == {"one block", "several blocks", "bfloat16", "window", "long window"}
    right = [name for name, case in cases.items() if case["wrong"] is None]
    assert right == list(cases)
    assert all(case["filler_is_zero"] for case in cases.values())


def test_operators_pass_torchs_checks(interpreted):
    for results in interpreted["operators"]:
        assert len(results) == 8 and {*results.values()} == {"SUCCESS"}, results


def test_a_compiled_or_checkpointed_layer_computes_the_same_with_dropout(interpreted):
    """Compiled once for two sizes; the mask is drawn again where the forward pass is."""
    expected = {"compiled": True, "full": True, "selective": True, "graphs": 1}
    assert interpreted["changed"] == expected


@pytest.mark.parametrize("length", [128, 512])
@pytest.mark.parametrize("kernel", ["forward_kernel", "backward_kernel"])
def test_kernels_become_triton_code_for_a_gpu(kernel, length):
    """With one block and with several. The interpreter runs what the compiler refuses."""
    triton = pytest.importorskip("triton")
    from triton.backends import nvidia
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from bert_recipe.experiments import triton_kernels

    block, step, num_warps = triton_kernels.LaunchConfig.of(length, 64, 2)
    values = {"HEADS": 12, "SIZE": 64, "BLOCKS": triton.cdiv(length, block), "BLOCK": block}
    values |= {"STEP": step, "WINDOW": -1, "DROPPED": 6554, "PRECISION": "tf32"}
    types = dict.fromkeys(values, "constexpr") | {"log_sums": "*fp32", "cu_seqlens": "*i32"}
    types |= {"seed_pointer": "*i64", "num_tokens": "i32", "num_sequences": "i32"}
    types |= {"scale": "fp32", "grad_scale": "fp32"}
    function = getattr(triton_kernels, kernel)
    signature = {name: types.get(name, "*bf16") for name in function.arg_names}
    target = GPUTarget("cuda", 90, 32)
    backend = nvidia.compiler.CUDABackend(target)
    options = backend.parse_options({"num_warps": num_warps})
    context = triton._C.libtriton.ir.context()
    triton._C.libtriton.ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    source = ASTSource(function, signature, values)
    module = source.make_ir(target, options, functions, backend.get_module_map(), context)
    assert f"@{kernel}" in str(module)


def test_each_choice_of_the_flag_can_be_loaded_without_its_packages():
    assert ("auto", *CHOICES) == ATTENTIONS
    for name in CHOICES:
        assert load_attention(name) is IMPLEMENTATIONS[name]


@pytest.mark.parametrize(
    ("name", "device", "length", "amp", "installed", "version", "words"),
    [
        ("triton", GPU, 512, False, {"triton"}, "2.11.0", None),
        ("triton", CPU, 512, False, {"triton"}, "2.11.0", "for GPUs"),
        ("triton", GPU, 513, False, {"triton"}, "2.11.0", "up to 512 tokens"),
        ("triton", GPU, 512, False, set(), "2.11.0", "pip install triton"),
        ("flash-attn-4", GPU, 8192, True, {"flash_attn", "flash_attn.cute"}, "2.14.0", None),
        ("flash-attn-4", CPU, 128, True, {"flash_attn", "flash_attn.cute"}, "2.14.0", "for GPUs"),
        ("flash-attn-4", GPU, 128, False, {"flash_attn", "flash_attn.cute"}, "2.14.0", "--amp"),
        ("flash-attn-4", GPU, 128, True, {"flash_attn"}, "2.14.0", "pip install flash-attn-4"),
        ("flash-attn-4", GPU, 128, True, {"flash_attn", "flash_attn.cute"}, "2.13.0", "2.14"),
        ("auto", CPU, 8192, False, set(), "2.11.0", None),
    ],
)
def test_an_attention_that_the_run_cannot_use_is_refused(
    monkeypatch, name, device, length, amp, installed, version, words
):
    for module in (attention_choice, triton_attention):
        monkeypatch.setattr(module, "find_spec", lambda name: name in installed or None)
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
    config = SimpleNamespace(
        parallel=ParallelConfig(attention=name),
        loader=SimpleNamespace(max_seq_length=length),
        precision=SimpleNamespace(amp=amp, pure_fp16=False),
    )
    if words is None:
        check_attention_flag(config, device)
    else:
        with pytest.raises(UserError, match=words):
            check_attention_flag(config, device)


@pytest.mark.parametrize(
    ("name", "head_size", "dropout", "capability", "words"),
    [
        ("triton", 64, 0.1, (8, 0), None),
        ("triton", 64, 0.1, (7, 5), "Ampere"),
        ("triton", 80, 0.1, (9, 0), "heads of 16, 32, 64, 128"),
        ("flash-attn-4", 64, 0.0, (10, 0), None),
        ("flash-attn-4", 64, 0.1, (9, 0), "attention dropout of 0.1: give --dropout 0"),
        ("flash-attn-4", 64, 0.0, (8, 0), "Hopper or Blackwell"),
    ],
)
def test_an_attention_that_does_not_support_the_model_or_gpu_is_refused(
    name, head_size, dropout, capability, words
):
    config = BertConfig(100, head_size * 2, 1, 2, 64)
    config = replace(config, attention_probs_dropout_prob=dropout)
    if words is None:
        check_attention(name, config, capability)
    else:
        with pytest.raises(UserError, match=words):
            check_attention(name, config, capability)
