"""The linear layer, against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from linear import has_fused_bias, linear

needs_fused_bias = pytest.mark.skipif(not has_fused_bias(), reason="needs a CPU with bfloat16 products")


def output_and_gradients(function, dtype, autocast):
    torch.manual_seed(0)
    tensors = [torch.randn(size, dtype=dtype, requires_grad=True) for size in [(37, 48), (80, 48), (80,)]]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = function(*tensors)
    output.backward(torch.randn_like(output))
    assert all(tensor.grad.dtype == dtype for tensor in tensors)
    return [output, *(tensor.grad for tensor in tensors)]


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)]
)
def test_outputs_and_gradients_are_those_of_torch_to_the_bit(dtype, autocast):
    for found, expected in zip(
        output_and_gradients(linear, dtype, autocast), output_and_gradients(F.linear, dtype, autocast), strict=True
    ):
        assert found.dtype == expected.dtype and found.equal(expected)


@needs_fused_bias
def test_bias_is_part_of_the_product_in_bfloat16():
    with torch.profiler.profile() as profiler, torch.autocast("cpu", torch.bfloat16):
        linear(torch.randn(37, 48), torch.randn(80, 48), torch.randn(80))
    operations = {event.name for event in profiler.events()}
    assert "mkldnn::_linear_pointwise" in operations and "aten::addmm" not in operations
