"""Dropout on the CPU: the mask, the residual and the gradient."""

import pytest
import torch

from bert_recipe.model.kernels.dropout import Dropout, dropout_mask

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("prob", [0.1, 0.5])
def test_dropout_zeroes_the_given_share_and_scales_the_rest(dtype, prob):
    torch.manual_seed(0)
    states = torch.full((301, 1007), 2.0, dtype=dtype)
    out = Dropout(prob)(states)
    dropped = out == 0
    torch.testing.assert_close(
        out[~dropped], torch.full_like(out[~dropped], 2 / (1 - prob)), rtol=2**-16, atol=0
    )
    # Five standard deviations of a binomial, over all states and over the rows and columns of a
    # few.
    for values in (dropped, dropped[:4], dropped[:, :4]):
        deviation = (prob * (1 - prob) / values.numel()) ** 0.5
        assert abs(float(values.double().mean()) - prob) < 5 * deviation


def test_neighbouring_states_are_dropped_independently():
    torch.manual_seed(1)
    mask, _ = dropout_mask(torch.empty(1_000_003), 0.3)
    dropped = (mask == 0).double()
    for distance in (1, 2, 3, 4, 8, 64, 2**18):
        both = float((dropped[:-distance] * dropped[distance:]).mean())
        assert abs(both - 0.09) < 5 * (0.09 * 0.91 / (len(dropped) - distance)) ** 0.5, distance


def test_mask_depends_on_the_seed_and_not_on_the_number_of_threads():
    masks = []
    before = torch.get_num_threads()
    try:
        for threads, seed in ((1, 5), (3, 5), (3, 6)):
            torch.set_num_threads(threads)
            torch.manual_seed(seed)
            masks.append(dropout_mask(torch.empty(700, 1001), 0.2)[0])
    finally:
        torch.set_num_threads(before)
    assert masks[0].equal(masks[1])
    assert not masks[1].equal(masks[2])


@pytest.mark.parametrize(
    ("dtype", "residual_dtype"), [(torch.float32, None), (torch.bfloat16, torch.float32)]
)
def test_gradient_is_zero_where_the_state_was_dropped(dtype, residual_dtype):
    torch.manual_seed(2)
    states = torch.randn(50, 64).to(dtype).requires_grad_()
    residual = (
        torch.randn(50, 64, dtype=residual_dtype, requires_grad=True) if residual_dtype else None
    )
    out = Dropout(0.25)(states, residual)
    dropped_states = out if residual is None else out - residual
    weight = torch.randn(50, 64)
    (out * weight).sum().backward()
    expected = torch.where(dropped_states == 0, 0.0, weight / 0.75)
    torch.testing.assert_close(
        states.grad.float(), expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-6, atol=0
    )
    if residual is not None:
        assert out.dtype == residual_dtype and residual.grad.equal(weight)


def test_a_probability_near_one_leaves_finite_states():
    assert torch.isfinite(Dropout(0.999995)(torch.ones(1000))).all()


@pytest.mark.parametrize("prob", [0.0, 1e-7])
def test_probability_zero_or_eval_mode_changes_nothing(prob):
    states, residual = torch.randn(7, 3), torch.randn(7, 3)
    assert Dropout(prob)(states).equal(states)
    assert Dropout(0.9).eval()(states, residual).equal(states + residual)
