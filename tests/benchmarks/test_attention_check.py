"""By the comparison of the device checks: attention with dropout, and on a GPU without, too."""

from itertools import accumulate

import pytest
import torch
from encoder_cases import CPU_IMPLEMENTATIONS

from benchmarks.common.attention_check import check, dropout_masks
from bert_recipe.model.attention import StreamLayout, prepare_attention

pytestmark = pytest.mark.fast

DROPOUT = 0.25
LENGTHS = [128, 128, 77, 1, 0, 64]


def assert_matches_reference(implementation, dtype, device, window, dropout) -> None:
    """The output and the gradient, for the mask that the forward pass used; and the mask itself."""
    torch.manual_seed(0)
    qkv = torch.randn(sum(LENGTHS), 3, 2, 64, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(sum(LENGTHS), 2, 64).to(qkv)
    cu_seqlens = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32, device=device)
    layout = StreamLayout(cu_seqlens, max(LENGTHS), sum(LENGTHS), window)
    attention = prepare_attention(implementation, layout, dropout > 0)
    assert check(attention, qkv, weight, LENGTHS, dropout, window)["wrong"] is None
    if dropout:
        first, second, *_ = dropout_masks(attention, qkv, LENGTHS, dropout, seed=0)
        assert not torch.equal(first[0], first[1]), "two heads share a mask"
        assert not torch.equal(first, second), "two sequences share a mask"


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, 9])
def test_dropout_has_the_gradient_of_its_mask(implementation, window):
    assert_matches_reference(implementation, torch.float32, "cpu", window, DROPOUT)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        *(("flash", dtype) for dtype in (torch.float16, torch.bfloat16)),
        *(("efficient", dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)),
        *(("padded", dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)),
    ],
)
@pytest.mark.parametrize("window", [None, 1, 9, 64])
@pytest.mark.parametrize("dropout", [0.0, DROPOUT])
def test_implementations_on_a_gpu_match_float64(implementation, dtype, window, dropout):
    assert_matches_reference(implementation, dtype, "cuda", window, dropout)
