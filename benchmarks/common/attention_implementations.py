"""Attention for sequences of unequal lengths that torch has and this project does not use, with the interface of
attention.py: made with (cu_seqlens, max_seqlen, num_tokens), called with (qkv_T3HD, dropout_prob).

Legend: T tokens in the stream, N sequences, H heads, D head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import attention


class VarlenAttention:
    """torch.nn.attention.varlen, which has no dropout."""

    def __init__(self, cu_seqlens: Tensor, max_seqlen: int, num_tokens: int):
        from torch.nn.attention.varlen import varlen_attn  # imported here: older releases of torch do not have it

        self.varlen_attn = varlen_attn
        self.bounds = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen

    def __call__(self, qkv_T3HD: Tensor, dropout_prob: float) -> Tensor:
        if dropout_prob:
            raise ValueError("it has no dropout")
        return self.varlen_attn(*qkv_T3HD.unbind(1), *self.bounds)


class JaggedAttention:
    """scaled_dot_product_attention of jagged nested tensors."""

    def __init__(self, cu_seqlens: Tensor, max_seqlen: int, num_tokens: int):
        self.cu_seqlens = cu_seqlens
        # Without these two, each call would read the lengths from the device.
        self.bounds = {"min_seqlen": int(cu_seqlens.diff().min()), "max_seqlen": max_seqlen}

    def __call__(self, qkv_T3HD: Tensor, dropout_prob: float) -> Tensor:
        nested = [torch.nested.nested_tensor_from_jagged(x, self.cu_seqlens, **self.bounds) for x in qkv_T3HD.unbind(1)]
        query, key, value = (x.transpose(1, 2) for x in nested)
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_prob).transpose(1, 2).values()


@torch.library.custom_op("bert_benchmarks::cudnn_attention", mutates_args=())
def cudnn_attention(
    qkv_T3HD: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_prob: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output [T, H, D], log-sum-exp [T, H, 1], and seed and offset of the dropout mask."""
    out_THD, logsumexp_TH1, _, _, _, _, seed, offset, _ = torch.ops.aten._cudnn_attention_forward(
        *qkv_T3HD.unbind(1),
        None,  # attn_bias
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        True,  # compute_log_sumexp
        dropout_prob,
    )
    return out_THD, logsumexp_TH1, seed, offset


@cudnn_attention.register_fake
def _(qkv_T3HD, cu_seqlens, max_seqlen, dropout_prob):
    tokens, _, heads, size = qkv_T3HD.shape
    seed, offset = (qkv_T3HD.new_empty((), dtype=torch.int64) for _ in range(2))
    return (
        qkv_T3HD.new_empty(tokens, heads, size),
        qkv_T3HD.new_empty(tokens, heads, 1, dtype=torch.float32),
        seed,
        offset,
    )


@torch.library.custom_op("bert_benchmarks::cudnn_attention_backward", mutates_args=())
def cudnn_attention_backward(
    grad_THD: Tensor,
    qkv_T3HD: Tensor,
    out_THD: Tensor,
    logsumexp_TH1: Tensor,
    seed: Tensor,
    offset: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_prob: float,
) -> Tensor:
    """The gradient of queries, keys and values, [T, 3, H, D].

    torch 2.11 passes cuDNN the head size as the longest length, so it is right only for sequences up to that length."""
    # Copies: torch makes the gradients contiguous, and cuDNN writes them with the strides of what they belong to.
    query, key, value = (x.contiguous() for x in qkv_T3HD.unbind(1))
    gradients = torch.ops.aten._cudnn_attention_backward(
        grad_THD.contiguous(),
        query,
        key,
        value,
        out_THD,
        logsumexp_TH1,
        seed,
        offset,
        None,  # attn_bias
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_prob,
        False,  # is_causal
    )
    return torch.stack(gradients, dim=1)


@cudnn_attention_backward.register_fake
def _(grad_THD, qkv_T3HD, *_):
    return qkv_T3HD.new_empty(qkv_T3HD.shape)


def save_for_backward(ctx, inputs: tuple, output: tuple) -> None:
    qkv_T3HD, cu_seqlens, ctx.max_seqlen, ctx.dropout_prob = inputs
    ctx.save_for_backward(qkv_T3HD, *output, cu_seqlens)


def backward(ctx, grad_THD: Tensor, *_) -> tuple:
    gradient = cudnn_attention_backward(grad_THD, *ctx.saved_tensors, ctx.max_seqlen, ctx.dropout_prob)
    return gradient, None, None, None


cudnn_attention.register_autograd(backward, setup_context=save_for_backward)


class CudnnAttention:
    """torch's operator for cuDNN with cumulative lengths, as a custom operator that can be part of a compiled graph."""

    def __init__(self, cu_seqlens: Tensor, max_seqlen: int, num_tokens: int):
        self.cu_seqlens, self.max_seqlen = cu_seqlens, max_seqlen

    def __call__(self, qkv_T3HD: Tensor, dropout_prob: float) -> Tensor:
        return cudnn_attention(qkv_T3HD, self.cu_seqlens, self.max_seqlen, dropout_prob)[0]


IMPLEMENTATIONS = {
    **attention.IMPLEMENTATIONS,
    "cudnn": CudnnAttention,
    "jagged": JaggedAttention,
    "varlen_attn": VarlenAttention,
}
MEASURED = {
    "cuda": ("flash", "efficient", "cudnn", "jagged", "varlen_attn", "padded"),
    "cpu": ("length_bucketed", "padded", "jagged"),
}
