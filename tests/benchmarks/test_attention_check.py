"""Every attention implementation with dropout, by the comparison of the device checks."""

from itertools import accumulate

import pytest
import torch
from encoder_cases import CPU_IMPLEMENTATIONS

from benchmarks.common.attention_check import check, dropout_masks
from bert_recipe.model.attention import StreamLayout, prepare_attention

pytestmark = pytest.mark.fast

DROPOUT = 0.25


def assert_dropout_matches_reference(implementation, dtype, device, window) -> None:
    """The output and the gradient, for the mask that the forward pass used; and the mask itself."""
    lengths = [128, 128, 77, 1, 0, 64]
    torch.manual_seed(0)
    qkv = torch.randn(sum(lengths), 3, 2, 64, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(sum(lengths), 2, 64).to(qkv)
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    layout = StreamLayout(cu_seqlens, max(lengths), sum(lengths), window)
    attention = prepare_attention(implementation, layout, has_dropout=True)
    assert check(attention, qkv, weight, lengths, DROPOUT, window)["wrong"] is None
    first, second, *_ = dropout_masks(attention, qkv, lengths, DROPOUT, seed=0)
    assert not torch.equal(first[0], first[1]), "two heads share a mask"
    assert not torch.equal(first, second), "two sequences share a mask"


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, 9])
def test_dropout_has_the_gradient_of_its_mask(implementation, window):
    assert_dropout_matches_reference(implementation, torch.float32, "cpu", window)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        *(("flash", dtype) for dtype in (torch.float16, torch.bfloat16)),
        *(("efficient", dtype) for dtype in (torch.float32, torch.bfloat16)),
        *(("padded", dtype) for dtype in (torch.float32, torch.bfloat16)),
    ],
)
@pytest.mark.parametrize("window", [None, 9])
def test_dropout_on_a_gpu_has_the_gradient_of_its_mask(implementation, dtype, window):
    assert_dropout_matches_reference(implementation, dtype, "cuda", window)
