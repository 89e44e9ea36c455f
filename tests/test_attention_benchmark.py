"""The attention benchmark at toy size: the implementations agree, and the check finds what is wrong with others."""

import json

import pytest
import torch
from conftest import write_shards

from attention import PreparedAttention, prepare_attention
from benchmarks import attention as benchmark
from benchmarks.attention import draw_stream, work
from benchmarks.common.attention_check import check
from benchmarks.common.attention_implementations import CudnnAttention

LENGTHS = [40, 24, 23, 1]
HEADS, SIZE = 2, 16


def cudnn_attention() -> PreparedAttention:
    return CudnnAttention(torch.tensor([0, 40, 64, 87, 88], dtype=torch.int32), 48, sum(LENGTHS))


def random_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(sum(LENGTHS), 3, HEADS, SIZE, requires_grad=True), torch.randn(sum(LENGTHS), HEADS, SIZE)


def test_implementations_are_checked_and_timed(tmp_path):
    shards, output = write_shards(tmp_path / "shards", length=128, predictions=20), tmp_path / "result.json"
    toy = ["--seq-length", "128", "--tokens", "300", "--heads", "2", "--rounds", "1", "--device", "cpu", "--no-amp"]
    assert benchmark.main([*toy, "--input-dir", str(shards), "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    assert all(200 < stream["tokens"] <= 300 for stream in result["streams"])
    for dropout in ("0", "0.1"):
        implementations = result["dropout"][dropout]
        assert set(implementations) == {"length_bucketed", "padded", "jagged"}  # jagged does not run on every CPU
        for name in ("length_bucketed", "padded"):
            found = implementations[name]
            assert found["wrong"] is None and max(found["output"], found["gradient"]) < 2e-5
            assert all(spread["median"] > 0 for spread in found["milliseconds"].values())


def test_an_implementation_that_cannot_run_gives_the_reason():
    args = benchmark.parse_arguments(["--device", "cpu"])
    found = benchmark.Implementation("varlen_attn", args, LENGTHS, []).check(0.1)
    assert found == {"cannot_run": "ValueError: it has no dropout"}


def test_streams_hold_as_many_sequences_of_the_samples_as_fit():
    stream = draw_stream(torch.tensor([5, 60, 100]).numpy(), 1000, seed=3)
    assert set(stream) == {5, 60, 100} and stream == sorted(stream, reverse=True)
    assert 900 < sum(stream) <= 1000
    assert draw_stream(torch.tensor([128]).numpy(), 1000, seed=0) == [128] * 7


def test_work_counts_products_and_every_number_once():
    args = benchmark.parse_arguments(["--heads", "2", "--head-size", "16"])
    counted = work(args, LENGTHS)
    # Scores and weighted sum: a multiply-add, which is two operations, for each pair of tokens, head and size.
    assert counted["tflops"]["forward"] * 1e12 == pytest.approx(2 * 2 * 2 * 16 * (40**2 + 24**2 + 23**2 + 1))
    assert counted["tflops"]["both"] == pytest.approx(3.5 * counted["tflops"]["forward"])
    qkv = torch.empty(sum(LENGTHS), 3, 2, 16, dtype=torch.bfloat16)
    assert counted["effective_gigabytes_per_second"]["forward"] * 1e9 == pytest.approx(qkv.nbytes * 4 / 3)
    assert counted["effective_gigabytes_per_second"]["both"] * 1e9 == pytest.approx(qkv.nbytes * 4)


# --- a check that can fail --------------------------------------------------------------------------------------------


def dense(qkv_T3HD, mask_HTT, keep_scale):
    """All sequences at once, with a mask between them."""
    query, key, value = qkv_T3HD.permute(1, 2, 0, 3)
    number_T = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    scores_HTT = (query @ key.mT / SIZE**0.5).masked_fill(number_T[:, None] != number_T, -torch.inf)
    return ((scores_HTT.softmax(-1) * mask_HTT * keep_scale) @ value).transpose(0, 1)


def draw(prob):
    return (torch.rand(HEADS, sum(LENGTHS), sum(LENGTHS)) >= prob).float()


class OtherMaskBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, prob):
        ctx.save_for_backward(qkv)
        ctx.prob = prob
        return dense(qkv, draw(prob), 1 / (1 - prob))

    @staticmethod
    def backward(ctx, grad):
        (qkv,) = ctx.saved_tensors
        with torch.enable_grad():
            out = dense(qkv, draw(ctx.prob), 1 / (1 - ctx.prob))
        return torch.autograd.grad(out, qkv, grad)[0], None


def same_mask_each_call(qkv, prob):
    return dense(qkv, torch.rand(HEADS, 88, 88, generator=torch.Generator().manual_seed(5)) >= prob, 1 / (1 - prob))


@pytest.mark.parametrize(
    ("attend", "words"),
    [
        (lambda qkv, prob: dense(qkv, draw(prob), 1 / (1 - prob)), None),
        (lambda qkv, prob: dense(qkv, draw(prob), 1.0), "its output has an error of 1.0e-01"),
        (lambda qkv, prob: dense(qkv, draw(2 * prob), 1 / (1 - prob)), "it drops 0.2"),
        (lambda qkv, prob: dense(qkv, 1.0, 1.0), "it drops 0.0000"),
        (
            lambda qkv, prob: dense(qkv.detach() + 0 * qkv, draw(prob), 1 / (1 - prob)),
            "its gradient has an error of 1.0",
        ),
        (OtherMaskBackward.apply, "its gradient has an error"),
        (same_mask_each_call, "two calls drop the same"),
    ],
    ids=["right", "not scaled", "too much", "none", "no gradient", "another mask backward", "one mask for ever"],
)
def test_the_check_finds_what_is_wrong_with_dropout(attend, words):
    wrong = check(attend, *random_inputs(), LENGTHS, 0.1)["wrong"]
    assert wrong is None if words is None else words in wrong


def test_the_check_finds_attention_across_sequences():
    attend = prepare_attention("length_bucketed", torch.tensor([0, 64, 88], dtype=torch.int32), 64, 88)
    wrong = check(attend, *random_inputs(), LENGTHS, 0.0)["wrong"]
    assert "its output has an error" in wrong and "its gradient has an error" in wrong


# --- the operator for cuDNN, with torch's schema and kernels of this test ---------------------------------------------


def cudnn_forward(
    query, key, value, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, compute_log_sumexp, dropout_p=0.0,
    is_causal=False, return_debug_mask=False, *, scale=None,
):  # fmt: skip
    assert attn_bias is None and compute_log_sumexp and not is_causal and max_q == max_k == 48
    seed, offset = torch.randint(2**31, ()), torch.tensor(7)
    out, logsumexp = torch.empty(query.shape), torch.empty(*query.shape[:2], 1)
    for begin, end, mask in sequences_with_masks(cum_seq_q, dropout_p, seed, offset):
        q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        scores = q @ k.mT / SIZE**0.5
        logsumexp[begin:end] = scores.logsumexp(-1, keepdim=True).transpose(0, 1)
        out[begin:end] = ((scores.softmax(-1) * mask) @ v).transpose(0, 1)
    return out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, seed, offset, torch.empty(0)


def cudnn_backward(
    grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k, max_q,
    max_k, dropout_p, is_causal, *, scale=None,
):  # fmt: skip
    assert not is_causal and max_q == max_k == 48
    assert all(x.is_contiguous() for x in (grad_out, query, key, value, out))
    gradients = [torch.empty(query.shape) for _ in range(3)]
    for begin, end, mask in sequences_with_masks(cum_seq_k, dropout_p, philox_seed, philox_offset):
        q, k, v, o, g = (x[begin:end].transpose(0, 1) for x in (query, key, value, out, grad_out))
        probs = (q @ k.mT / SIZE**0.5 - logsumexp[begin:end].transpose(0, 1)).exp()
        grad_scores = probs * ((g @ v.mT) * mask - (g * o).sum(-1, keepdim=True)) / SIZE**0.5
        found = grad_scores @ k, grad_scores.mT @ q, (probs * mask).mT @ g
        for gradient, of_sequence in zip(gradients, found, strict=True):
            gradient[begin:end] = of_sequence.transpose(0, 1)
    return tuple(gradients)


def sequences_with_masks(cu_seqlens, dropout_prob, seed, offset):
    generator = torch.Generator().manual_seed(int(seed) + int(offset))
    for begin, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        drawn = torch.rand(HEADS, end - begin, end - begin, generator=generator)
        yield begin, end, (drawn >= dropout_prob) / (1 - dropout_prob)


@pytest.fixture
def cudnn_on_the_cpu():
    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_cudnn_attention_forward", cudnn_forward)
    library.impl("_cudnn_attention_backward", cudnn_backward)
    yield
    library._destroy()


@pytest.mark.parametrize("dropout_prob", [0.0, 0.1])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_cudnn_operator_replays_its_dropout_mask_in_the_backward_pass(cudnn_on_the_cpu, compiled, dropout_prob):
    attend = cudnn_attention()
    if compiled:
        attend = torch.compile(attend, fullgraph=True, dynamic=False, backend="aot_eager")
    assert check(attend, *random_inputs(), LENGTHS, dropout_prob)["wrong"] is None


def test_the_cudnn_operator_gives_the_shapes_of_its_results_on_meta_tensors():
    qkv = torch.empty(88, 3, HEADS, SIZE, dtype=torch.bfloat16, device="meta", requires_grad=True)
    out = CudnnAttention(torch.empty(5, dtype=torch.int32, device="meta"), 48, 88)(qkv, 0.1)
    assert out.shape == (88, HEADS, SIZE) and out.dtype == torch.bfloat16
    (gradient,) = torch.autograd.grad(out, qkv, torch.empty_like(out))
    assert gradient.shape == qkv.shape
