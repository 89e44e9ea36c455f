"""Loss sums and their gradients against float64 arithmetic."""

import itertools
import math

import numpy as np
import pytest
import torch

from loss import pretraining_sums, span_sum, summed_cross_entropy
from token_stream import IGNORED_LABEL

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}  # absolute, of a gradient of that type


def in_float64(logits, labels):
    """Sum, gradient and number of correct rows, from torch's cross-entropy in float64."""
    logits = logits.detach().double().requires_grad_()
    kept = labels >= 0
    total = torch.nn.functional.cross_entropy(logits[kept], labels[kept], reduction="sum")
    total.backward()
    return total.item(), logits.grad, int((logits[kept].argmax(dim=1) == labels[kept]).sum())


def random_rows(rows, vocabulary, spread, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocabulary, generator=generator) * spread).to(dtype)
    labels = torch.randint(vocabulary, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < 0.3] = IGNORED_LABEL
    labels[::5] = logits[::5].argmax(dim=1)
    return logits.requires_grad_(), labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 16, 17, 700])
@pytest.mark.parametrize("spread", [0.02, 3.0, 40.0])
def test_sum_gradient_and_accuracy_match_float64(dtype, rows, spread):
    check_against_float64(summed_cross_entropy, dtype, rows, spread)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_compiled_sum_gradient_and_accuracy_match_float64(dtype, monkeypatch):
    monkeypatch.setattr("loss.SummedCrossEntropy", None)  # in compiled graphs it would write float32 logits
    compiled = torch.compile(summed_cross_entropy, backend="aot_eager", fullgraph=True)
    for spread in (0.02, 3.0, 40.0):
        check_against_float64(compiled, dtype, 17, spread)


def check_against_float64(implementation, dtype, rows, spread):
    logits, labels = random_rows(rows, 130, spread, dtype)
    loss, correct = implementation(logits, labels)
    (loss / 7).backward()
    expected, gradient, expected_correct = in_float64(logits, labels)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-5)
    assert logits.grad.dtype == dtype
    assert (logits.grad.double() - gradient / 7).abs().max() <= TOLERANCE[dtype] / 7
    # In 16 bits two logits of a row may be equal; a tie counts as correct.
    assert expected_correct <= correct <= expected_correct + (rows // 20 if dtype != torch.float32 else 0)


def test_padding_of_the_vocabulary_takes_no_probability():
    logits, labels = random_rows(20, 50, 3.0, torch.float32)
    padded = torch.nn.functional.pad(logits.detach(), (0, 14), value=-math.inf).requires_grad_()
    loss, correct = summed_cross_entropy(padded, labels)
    loss.backward()
    expected, gradient, expected_correct = in_float64(logits, labels)
    assert loss.item() == pytest.approx(expected, rel=1e-6) and correct == expected_correct
    assert padded.grad[:, 50:].eq(0).all()
    assert (padded.grad[:, :50] - gradient).abs().max() < 1e-6


def test_sequences_labelled_minus_one_or_as_filler_do_not_count():
    logits = torch.tensor([[2.0, -1.0], [0.5, 0.25], [-3.0, 4.0], [9.0, 1.0]], requires_grad=True)
    labels = torch.tensor([0, -1, 1, IGNORED_LABEL])
    no_masks = torch.zeros(0, 8, requires_grad=True)
    sums = pretraining_sums(no_masks, logits, labels[:0], labels)
    expected = math.log(1 + math.exp(-3)) + math.log(1 + math.exp(-7))
    assert sums.nsp_loss.item() == pytest.approx(expected, abs=1e-6) and sums.nsp_correct == 2
    (sums.mlm_loss + sums.nsp_loss).backward()
    assert sums.mlm_loss == sums.mlm_correct == 0 and no_masks.grad.shape == (0, 8)
    assert logits.grad[[1, 3]].eq(0).all() and logits.grad[[0, 2]].ne(0).all()


def span_sum_in_float64(start_logits, end_logits, starts, ends, cu_seqlens):
    """One sequence at a time, in float64."""
    total = 0.0
    for number, (begin, end) in enumerate(itertools.pairwise(cu_seqlens)):
        for logits, positions in ((start_logits, starts), (end_logits, ends)):
            if positions[number] != IGNORED_LABEL:
                own = logits[begin:end].double()
                total = total + (own.logsumexp(dim=0) - own[positions[number]]) / 2
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_span_sum_and_gradient_match_a_loop_over_sequences_and_filler_adds_nothing(dtype):
    generator = torch.Generator().manual_seed(1)
    lengths = [7, 7, 1, 30, 12]
    cu_seqlens = np.append(0, np.cumsum(lengths)).tolist()
    cu_seqlens += cu_seqlens[-1:] * 2  # filler belongs to no sequence
    starts, ends = [0, 6, 0, 11, *[IGNORED_LABEL] * 3], [3, 6, 0, 29, *[IGNORED_LABEL] * 3]
    ours = [(torch.randn(60, generator=generator) * 4).to(dtype).requires_grad_() for _ in range(2)]
    theirs = [logits.detach().double().requires_grad_() for logits in ours]
    total = span_sum(*ours, torch.tensor(starts), torch.tensor(ends), torch.tensor(cu_seqlens, dtype=torch.int32), 32)
    expected = span_sum_in_float64(*theirs, starts, ends, cu_seqlens)
    assert total.dtype == torch.float32 and total.item() == pytest.approx(expected.item(), rel=1e-6)
    (total / 5).backward()
    (expected / 5).backward()
    for mine, reference in zip(ours, theirs, strict=True):
        assert (mine.grad.double() - reference.grad).abs().max() < TOLERANCE[dtype] / 5
