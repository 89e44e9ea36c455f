"""Loss sums and their gradients against float64 arithmetic."""

import itertools
import math

import numpy as np
import pytest
import torch

from bert_recipe.model.loss import linear_cross_entropy, next_sentence_sums, span_sum
from bert_recipe.model.token_stream import IGNORED_LABEL

pytestmark = pytest.mark.fast

# Of the norm of a gradient of that type.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}


WIDTH = 32


def in_float64(hidden, weight, bias, labels):
    """Sum, gradients and number of correct rows, from torch's cross-entropy in float64 of logits
    that are rounded as the inputs' types say; the compiler rounds once, with a bias of their type.
    """
    inputs = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    kept = labels >= 0
    exact = torch.nn.functional.linear(*inputs)
    with torch.no_grad():
        if bias.dtype == weight.dtype != torch.float32:
            rounded = torch.nn.functional.linear(hidden, weight, bias)
        else:
            rounded = hidden @ weight.T + bias
    logits = exact + (rounded - exact).detach()
    total = torch.nn.functional.cross_entropy(logits[kept], labels[kept], reduction="sum")
    total.backward()
    correct = int((logits[kept].argmax(dim=1) == labels[kept]).sum())
    return total.item(), [tensor.grad for tensor in inputs], correct


def random_layer(rows, vocabulary, spread, dtype):
    """Hidden states whose logits have the deviation `spread`, weight, bias and labels."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, WIDTH, generator=generator) for n in (rows, vocabulary))
    inputs = (
        (hidden * spread / math.sqrt(WIDTH)).to(dtype),
        weight.to(dtype),
        torch.randn(vocabulary, generator=generator),
    )
    labels = torch.randint(vocabulary, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < 0.3] = IGNORED_LABEL
    labels[::5] = (inputs[0] @ inputs[1].T + inputs[2])[::5].argmax(dim=1)
    return *(tensor.requires_grad_() for tensor in inputs), labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 16, 17, 700])
@pytest.mark.parametrize("spread", [0.02, 3.0, 40.0])
def test_sum_gradients_and_accuracy_match_float64(dtype, rows, spread):
    check_against_float64(linear_cross_entropy, dtype, rows, spread)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_compiled_sum_gradients_and_accuracy_match_float64(dtype, monkeypatch):
    # In compiled graphs it would write float32 logits.
    monkeypatch.setattr("bert_recipe.model.loss.LinearCrossEntropy", None)
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    for spread in (0.02, 3.0, 40.0):
        check_against_float64(compiled, dtype, 17, spread, bias_dtype=dtype)


def check_against_float64(implementation, dtype, rows, spread, bias_dtype=torch.float32):
    *inputs, labels = random_layer(rows, 130, spread, dtype)
    inputs[2] = inputs[2].detach().to(bias_dtype).requires_grad_()
    loss, correct = implementation(*inputs, labels)
    (loss / 7).backward()
    expected, gradients, expected_correct = in_float64(*inputs, labels)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-5)
    for tensor, gradient in zip(inputs, gradients, strict=True):
        assert tensor.grad.dtype == tensor.dtype
        assert (tensor.grad.double() - gradient / 7).norm() <= TOLERANCE[dtype] * (
            gradient.norm() + spread
        ) / 7
    # In 16 bits two logits of a row may be equal; a tie counts as correct.
    assert (
        expected_correct
        <= correct
        <= expected_correct + (rows // 20 if dtype != torch.float32 else 0)
    )


def test_padding_of_the_vocabulary_takes_no_probability():
    *inputs, labels = random_layer(20, 50, 3.0, torch.float32)
    sizes = ((0, 0, 0, 0), (0, 0, 0, 14), (0, 14))
    padded = [
        torch.nn.functional.pad(
            tensor.detach(), size, value=-math.inf if size == (0, 14) else 0.0
        ).requires_grad_()
        for tensor, size in zip(inputs, sizes, strict=True)
    ]
    loss, correct = linear_cross_entropy(*padded, labels)
    loss.backward()
    expected, gradients, expected_correct = in_float64(*inputs, labels)
    assert loss.item() == pytest.approx(expected, rel=1e-6) and correct == expected_correct
    assert all(tensor.grad[50:].eq(0).all() for tensor in padded[1:])
    for tensor, gradient in zip(padded, gradients, strict=True):
        assert (tensor.grad[: len(gradient)] - gradient).abs().max() < 1e-5


def test_sequences_labelled_minus_one_or_as_filler_do_not_count():
    logits = torch.tensor([[2.0, -1.0], [0.5, 0.25], [-3.0, 4.0], [9.0, 1.0]], requires_grad=True)
    labels = torch.tensor([0, -1, 1, IGNORED_LABEL])
    no_masks = torch.zeros(0, 8, requires_grad=True)
    mlm_loss, mlm_correct = linear_cross_entropy(
        no_masks, torch.ones(9, 8), torch.zeros(9), labels[:0]
    )
    nsp_loss, nsp_correct = next_sentence_sums(logits, labels)
    expected = math.log(1 + math.exp(-3)) + math.log(1 + math.exp(-7))
    assert nsp_loss.item() == pytest.approx(expected, abs=1e-6) and nsp_correct == 2
    (mlm_loss + nsp_loss).backward()
    assert mlm_loss == mlm_correct == 0 and no_masks.grad.shape == (0, 8)
    assert logits.grad[[1, 3]].eq(0).all() and logits.grad[[0, 2]].ne(0).all()


def span_sum_in_float64(start_logits, end_logits, starts, ends, cu_seqlens, smoothing):
    """One sequence at a time, in float64."""
    total = 0.0
    for number, (begin, end) in enumerate(itertools.pairwise(cu_seqlens)):
        for logits, positions in ((start_logits, starts), (end_logits, ends)):
            if positions[number] != IGNORED_LABEL:
                own = logits[begin:end].double()
                target = (1 - smoothing) * own[positions[number]] + smoothing * own.mean()
                total = total + (own.logsumexp(dim=0) - target) / 2
    return total


@pytest.mark.parametrize("smoothing", [0.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_span_sum_and_gradient_match_a_loop_over_sequences_and_filler_adds_nothing(
    dtype, smoothing
):
    generator = torch.Generator().manual_seed(1)
    lengths = [7, 7, 1, 30, 12]
    cu_seqlens = np.append(0, np.cumsum(lengths)).tolist()
    cu_seqlens += cu_seqlens[-1:] * 2  # filler belongs to no sequence
    starts, ends = [0, 6, 0, 11, *[IGNORED_LABEL] * 3], [3, 6, 0, 29, *[IGNORED_LABEL] * 3]
    ours = [(torch.randn(60, generator=generator) * 4).to(dtype).requires_grad_() for _ in range(2)]
    theirs = [logits.detach().double().requires_grad_() for logits in ours]
    total = span_sum(
        *ours,
        torch.tensor(starts),
        torch.tensor(ends),
        torch.tensor(cu_seqlens, dtype=torch.int32),
        32,
        smoothing,
    )
    expected = span_sum_in_float64(*theirs, starts, ends, cu_seqlens, smoothing)
    assert total.dtype == torch.float32 and total.item() == pytest.approx(expected.item(), rel=1e-6)
    (total / 5).backward()
    (expected / 5).backward()
    for mine, reference in zip(ours, theirs, strict=True):
        assert (mine.grad.double() - reference.grad).abs().max() < TOLERANCE[dtype] / 5
