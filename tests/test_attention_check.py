"""The check of attention implementations (benchmarks/device_checks.py) finds what is wrong with them."""

import pytest
import torch

from attention import prepare_attention
from benchmarks.common.attention_check import check

LENGTHS = [40, 24, 23, 1]
HEADS, SIZE = 2, 16


def random_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(sum(LENGTHS), 3, HEADS, SIZE, requires_grad=True), torch.randn(sum(LENGTHS), HEADS, SIZE)


def dense(qkv_T3HD, mask_HTT, keep_scale):
    """All sequences at once, with a mask between them."""
    query, key, value = qkv_T3HD.permute(1, 2, 0, 3)
    number_T = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    scores_HTT = (query @ key.mT / SIZE**0.5).masked_fill(number_T[:, None] != number_T, -torch.inf)
    return ((scores_HTT.softmax(-1) * mask_HTT * keep_scale) @ value).transpose(0, 1)


def draw(prob):
    return (torch.rand(HEADS, sum(LENGTHS), sum(LENGTHS)) >= prob).float()


def same_mask_each_call(qkv, prob):
    return dense(qkv, torch.rand(HEADS, 88, 88, generator=torch.Generator().manual_seed(5)) >= prob, 1 / (1 - prob))


@pytest.mark.parametrize(
    ("attend", "words"),
    [
        (lambda qkv, prob: dense(qkv, draw(prob), 1 / (1 - prob)), None),
        (lambda qkv, prob: dense(qkv, draw(prob), 1.0), "its output has an error of 1.0e-01"),
        (lambda qkv, prob: dense(qkv, draw(2 * prob), 1 / (1 - prob)), "it drops 0.2"),
        (lambda qkv, prob: dense(qkv.detach() + 0 * qkv, draw(prob), 1 / (1 - prob)), "its gradient has an error of 1"),
        (same_mask_each_call, "two calls drop the same"),
    ],
    ids=["right", "not scaled", "too much", "no gradient", "one mask for ever"],
)
def test_the_check_finds_what_is_wrong_with_dropout(attend, words):
    wrong = check(attend, *random_inputs(), LENGTHS, 0.1)["wrong"]
    assert wrong is None if words is None else words in wrong


def test_the_check_finds_attention_across_sequences():
    attend = prepare_attention("length_bucketed", torch.tensor([0, 64, 88], dtype=torch.int32), 64, 88)
    wrong = check(attend, *random_inputs(), LENGTHS, 0.0)["wrong"]
    assert "its output has an error" in wrong and "its gradient has an error" in wrong
