"""Scaled dot-product attention within each sequence of a token stream: every implementation, and
the registry.

An implementation is a class. It is constructed once per forward pass with the stream's layout and
called by each layer:

    prepared = prepare_attention(name, layout, has_dropout)
    out_THD = prepared(qkv_T3HD, dropout_prob)

`with_rotary_positions` adds them to a prepared attention. To add an implementation, write the class
and add it to `IMPLEMENTATIONS`, and its memory to `MEMORY` of model/costs/attention.py; what it
cannot do is in `implementation_class`. Those that only --attention chooses are in
parallel/attention_choice.py.

Legend: T tokens in the stream, N sequences, S padded length, H heads, D head size.
"""

from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bert_recipe.model.kernels.length_bucketed import (
    BucketedStream,
    LengthBucketedFunction,
)
from bert_recipe.model.kernels.positions import hidden_pairs, rotary_table, rotated
from bert_recipe.model.token_stream import padded_index, stream_index

MASK_ALIGNMENT = 8  # in elements, of rows for torch's memory-efficient kernel


class StreamLayout(NamedTuple):
    """Which tokens of a stream attend to which: those of the same sequence; with a `window`, to at
    most that many on each side.

    has_filler: tokens may follow the last sequence; their output is finite but unspecified.
    dtype: of query, key and value.
    """

    cu_seqlens: Tensor  # [N+1], int32
    max_seqlen: int  # upper bound of the sequence lengths
    num_tokens: int
    window: int | None = None
    has_filler: bool = True
    dtype: torch.dtype = torch.float32


class PreparedAttention(Protocol):
    def __call__(self, qkv_T3HD: Tensor, dropout_prob: float) -> Tensor:
        """softmax(QK' / sqrt(D)) V within each sequence, with dropout on the probabilities; [T, H,
        D].
        """


class AttentionImplementation(PreparedAttention, Protocol):
    def __init__(self, layout: StreamLayout): ...


class FlashAttention:
    """Variable-length flash attention (Dao et al., 2022). CUDA, float16 or bfloat16."""

    def __init__(self, layout: StreamLayout):
        cu_seqlens, max_seqlen, num_tokens, self.window, has_filler, _ = layout
        # The operator leaves tokens outside all sequences undefined, so they form sequences, as
        # many as all tokens would need: of these, those beyond the filler are empty.
        if has_filler:
            num_fillers = -(-num_tokens // max_seqlen)
            numbers = torch.arange(1, num_fillers + 1, dtype=torch.int32, device=cu_seqlens.device)
            filler_ends = (cu_seqlens[-1] + max_seqlen * numbers).clamp(max=num_tokens)
            cu_seqlens = torch.cat([cu_seqlens, filler_ends])
        self.cu_seqlens, self.max_seqlen = cu_seqlens, max_seqlen

    def __call__(self, qkv_T3HD: Tensor, dropout_prob: float) -> Tensor:
        # torch's public varlen_attn has no dropout. This operator has dropout and is
        # differentiable.
        out_THD, *_ = torch.ops.aten._flash_attention_forward(
            *qkv_T3HD.unbind(1),
            self.cu_seqlens,
            self.cu_seqlens,
            self.max_seqlen,
            self.max_seqlen,
            dropout_prob,
            False,  # is_causal
            False,  # return_debug_mask
            window_size_left=self.window,
            window_size_right=self.window,
        )
        return out_THD


class EfficientAttention(FlashAttention):
    """Variable-length memory-efficient attention (Rabe and Staats, 2021). CUDA, any type, head
    sizes that are multiples of 8; without windows and dropout, see `implementation_class`.
    """

    def __call__(self, qkv_T3HD: Tensor, dropout_prob: float) -> Tensor:
        if dropout_prob > 0:
            raise ValueError("memory-efficient attention has wrong gradients with dropout")
        # The backward pass raises an error if the maximum length exceeds the number of tokens.
        max_seqlen = torch.sym_min(self.max_seqlen, len(qkv_T3HD))  # the latter may be symbolic
        out_1THD, *_ = torch.ops.aten._efficient_attention_forward(
            *qkv_T3HD[None].unbind(2),
            None,  # bias
            self.cu_seqlens,
            self.cu_seqlens,
            max_seqlen,
            max_seqlen,
            0.0,  # dropout
            0,  # no causal mask
            True,  # compute_log_sumexp, which the backward pass needs
        )
        return out_1THD[0]


class PaddedAttention:
    """torch's scaled_dot_product_attention on a padded copy of the stream. Works on any device and
    in any dtype.
    """

    def __init__(self, layout: StreamLayout):
        cu_seqlens, max_seqlen, num_tokens, window, _, dtype = layout
        self.index_NS, real_NS = padded_index(cu_seqlens, max_seqlen, num_tokens)
        self.place_T = stream_index(cu_seqlens, max_seqlen, num_tokens)
        mask = real_NS[:, None, None, :]  # [N, 1, 1, S], or [N, 1, S, S] with a window
        if window is not None:
            offsets_S = torch.arange(max_seqlen, device=cu_seqlens.device)
            mask = mask & ~hidden_pairs(offsets_S, offsets_S, window)
        # Softmax over no keys is NaN, so padding that sees no token attends to all keys.
        mask = mask | ~mask.any(dim=-1, keepdim=True)
        # What is added to the scores, once for all layers: of booleans, or of rows that are not
        # aligned, torch makes a copy in each call, and keeps it for the backward pass.
        width = -(-max_seqlen // MASK_ALIGNMENT) * MASK_ALIGNMENT
        bias = torch.zeros(*mask.shape[:-1], width, dtype=dtype, device=mask.device)
        self.bias = bias[..., :max_seqlen].masked_fill_(~mask, -torch.inf)

    def __call__(self, qkv_T3HD: Tensor, dropout_prob: float) -> Tensor:
        query_NHSD, key_NHSD, value_NHSD = qkv_T3HD[self.index_NS].permute(2, 0, 3, 1, 4)
        out_NHSD = F.scaled_dot_product_attention(
            query_NHSD,
            key_NHSD,
            value_NHSD,
            attn_mask=self.bias.to(query_NHSD.dtype),
            dropout_p=dropout_prob,
        )
        return out_NHSD.transpose(1, 2).flatten(0, 1)[self.place_T]


class LengthBucketedAttention:
    """Attention on batches of sequences of similar length; with a window, on blocks of queries with
    the keys near them. Reads the lengths on the host, so it is for CPUs only and cannot be
    compiled.
    """

    def __init__(self, layout: StreamLayout):
        self.cu_seqlens = layout.cu_seqlens.tolist()
        self.window = layout.window
        self.theta: float | None = None  # of rotary positions
        self.stream: BucketedStream | None = None

    def __call__(self, qkv_T3HD: Tensor, dropout_prob: float, first_only: bool = False) -> Tensor:
        infers = not dropout_prob and not torch.is_grad_enabled()
        if infers and self.is_single(qkv_T3HD):
            query_1HTD, key_1HTD, value_1HTD = qkv_T3HD.permute(1, 2, 0, 3)[:, None]
            out_1HTD = F.scaled_dot_product_attention(query_1HTD, key_1HTD, value_1HTD)
            return out_1HTD[0].transpose(0, 1)
        if self.stream is None:  # shared by all layers
            self.stream = BucketedStream(self.cu_seqlens, self.window, qkv_T3HD, self.theta)
        return LengthBucketedFunction.apply(qkv_T3HD, self.stream, dropout_prob, first_only)

    def is_single(self, qkv_T3HD: Tensor) -> bool:
        """Whether the stream is one sequence whose attention needs no mask and no rotation. torch's
        operator is then faster than copies to buckets; in 16 bits that was not measured.
        """
        if self.window is not None or self.theta is not None:
            return False
        return self.cu_seqlens == [0, len(qkv_T3HD)] and qkv_T3HD.dtype == torch.float32


def rotate(states_T3HD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotates queries and keys; the values stay."""
    out_T3HD = torch.empty_like(states_T3HD)
    out_T3HD[:, 2] = states_T3HD[:, 2]
    out_T3HD[:, :2] = rotated(states_T3HD[:, :2], cos_TD[:, None, None], sin_TD[:, None, None])
    return out_T3HD


class Rotation(torch.autograd.Function):
    """`rotate`, whose gradient is the rotation back; fewer passes over memory than autograd's."""

    @staticmethod
    def forward(ctx: Any, states_T3HD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TD, sin_TD)
        return rotate(states_T3HD, cos_TD, sin_TD)

    @staticmethod
    def backward(ctx: Any, grad_T3HD: Tensor) -> tuple[Tensor | None, ...]:
        cos_TD, sin_TD = ctx.saved_tensors
        return rotate(grad_T3HD, cos_TD, -sin_TD), None, None


class RotaryAttention:
    """`attention` with rotary positions. table: see `rotary_table`."""

    def __init__(self, attention: PreparedAttention, table: tuple[Tensor, Tensor]):
        self.attention = attention
        self.table = table

    def __call__(self, qkv_T3HD: Tensor, dropout_prob: float) -> Tensor:
        return self.attention(Rotation.apply(qkv_T3HD, *self.table), dropout_prob)


def with_rotary_positions(
    attention: PreparedAttention, position_ids: Tensor, head_size: int, theta: float
) -> PreparedAttention:
    """`attention` with rotary positions of the base frequency `theta`. position_ids [T]: from 0 in
    each sequence.
    """
    if isinstance(attention, LengthBucketedAttention):  # it rotates its copies of the states
        attention.theta = theta
        return attention
    return RotaryAttention(attention, rotary_table(position_ids, head_size, theta))


def for_first_tokens(attention: PreparedAttention) -> PreparedAttention:
    """`attention` of which only the output of each sequence's first token is used: that of the
    others may be zero.
    """
    if isinstance(attention, LengthBucketedAttention):
        return partial(attention, first_only=True)
    return attention


IMPLEMENTATIONS: dict[str, type[AttentionImplementation]] = {
    "flash": FlashAttention,
    "efficient": EfficientAttention,
    "padded": PaddedAttention,
    "length_bucketed": LengthBucketedAttention,
}
COMPILED_ON_CPU = "padded"  # the implementation for compiled graphs on a CPU


def implementation_class(
    name: str, window: int | None, has_dropout: bool
) -> type[AttentionImplementation]:
    """The class that computes the attention `name`, a key of `IMPLEMENTATIONS`: the padded view
    where that implementation cannot.

    torch's memory-efficient operator has no windows. In torch 2.11 to 2.13 its gradient is wrong
    with `cu_seqlens` and dropout: the forward kernel gets 0 for the longest key length, so that all
    heads and sequences draw the same mask, and the backward kernel, which gets the real length,
    draws others (measured with 2.11; pytorch issue 115590). 2.14 and 2.15 pass the real length to
    both; no GPU has confirmed that, so dropout takes the padded view with every version.
    """
    if name == "efficient" and (window is not None or has_dropout):
        return PaddedAttention
    return IMPLEMENTATIONS[name]


def prepare_attention(
    implementation: str, layout: StreamLayout, has_dropout: bool = False
) -> PreparedAttention:
    """`implementation` is a key of `IMPLEMENTATIONS`. has_dropout: whether it will be called with a
    dropout probability above 0.
    """
    return implementation_class(implementation, layout.window, has_dropout)(layout)


def flash_supports(head_size: int, capability: tuple[int, int]) -> bool:
    """Whether torch's flash attention trains heads of this size on a GPU of this compute
    capability.
    """
    # By the shared memory of a block.
    largest = 192 if capability in ((8, 6), (8, 9), (12, 0), (12, 1)) else 256
    return capability >= (8, 0) and head_size <= largest and head_size % 8 == 0


def default_implementation(device: torch.device, dtype: torch.dtype) -> str:
    """The fastest implementation for `device` and the matmul type `dtype`; see also
    `implementation_class`.
    """
    if device.type != "cuda":
        return "length_bucketed"
    return "flash" if dtype in (torch.float16, torch.bfloat16) else "efficient"
