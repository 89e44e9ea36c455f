"""Attention within each sequence of a packed stream, for sequences of up to 512 tokens, in Triton.

Each program owns one block of one sequence and head: forward a block of queries; backward a block
of keys, whose gradients it sums over the queries, then a block of queries, whose gradient it sums
over the keys. No program adds to what another one writes, so the gradient has the same bits in
every run. If the longest sequence fits in one block, the second pass is not needed: the first one
sees all keys of each query.

Dropout is a function of (seed, query token, head, key), computed again in the backward pass: 16
bits of Philox (Salmon et al., 2011) per pair, so the probability is a multiple of 2^-16.

Importing this module needs Triton. With TRITON_INTERPRET=1 it runs on a CPU.

Legend: T tokens in the stream, N sequences, H heads, D head size, Q queries and K keys of a block.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MASKED_SCORE = tl.constexpr(-1e30)  # finite: a row may see no key of a block
KEYS_PER_COUNTER = tl.constexpr(8)  # Philox returns 128 bits
GROUPS = tl.constexpr(64)  # of keys of a sequence (triton_attention.MAX_LENGTH)
ROUNDS = tl.constexpr(7)  # the fewest that pass all tests of the paper
LOG2_E = 1.4426950408889634
# Triton would compile a kernel for multiples of 16 and for 1, and one for all others.
SIZES = ("num_tokens", "num_sequences")


@triton.jit
def dropout_mask(
    seed, head, query_token_Q, first_key,
    DROPPED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The pairs [Q, K] that dropout keeps, each with probability 1 - DROPPED / 2^16."""
    group = first_key // KEYS_PER_COUNTER + tl.arange(0, KEYS // KEYS_PER_COUNTER)
    zero = tl.zeros([QUERIES, KEYS // KEYS_PER_COUNTER], tl.int32)
    query = query_token_Q[:, None] + zero
    column = (head * GROUPS + group)[None, :] + zero
    a, b, c, d = tl.philox(seed, query, column, zero, zero, ROUNDS)
    words = tl.join(tl.join(a, b), tl.join(c, d))
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, [QUERIES, KEYS]) >= DROPPED


@triton.jit
def visible_pairs(query, key, length, WINDOW: tl.constexpr):
    """Which queries attend to which keys; `query` and `key` are places in the sequence, one of them
    a row and the other a column.
    """
    visible = (key < length) & (query < length)
    if WINDOW >= 0:
        visible = visible & (key - query <= WINDOW) & (query - key <= WINDOW)
    return visible


@triton.jit
def partners(
    first, length, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """From where to where the BLOCK places from `first` may see places, or be seen by them."""
    start, end = 0, length
    if WINDOW >= 0:
        start = tl.maximum(start, first - WINDOW)
        end = tl.minimum(end, first + BLOCK + WINDOW)
    return start, end


@triton.jit
def fill_with_zeros(
    out, first_token, num_tokens, head,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Zeros for one head of the BLOCK tokens from `first_token`, which belong to no sequence."""
    token_B = first_token + tl.arange(0, BLOCK)
    column_D = tl.arange(0, SIZE)
    zeros = tl.zeros([BLOCK, SIZE], out.dtype.element_ty)
    for channel in tl.static_range(CHANNELS):
        row_B = (token_B.to(tl.int64) * CHANNELS + channel) * HEADS + head
        places = out + row_B[:, None] * SIZE + column_D[None, :]
        tl.store(places, zeros, mask=(token_B < num_tokens)[:, None])


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    qkv, out, log_sums, cu_seqlens, seed_pointer, num_tokens, num_sequences, scale,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
    WINDOW: tl.constexpr, DROPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of queries. scale: of the scores, with log2(e); log_sums [H, T] are to base 2."""
    program = tl.program_id(0)
    head = program % HEADS
    block = program // HEADS
    sequence = block // BLOCKS
    if sequence >= num_sequences:
        token = tl.load(cu_seqlens + num_sequences) + (block - num_sequences * BLOCKS) * BLOCK
        fill_with_zeros(out, token, num_tokens, head, 1, HEADS, SIZE, BLOCK)
        filler_B = token + tl.arange(0, BLOCK)
        log_sums += head.to(tl.int64) * num_tokens
        tl.store(log_sums + filler_B, tl.zeros([BLOCK], tl.float32), mask=filler_B < num_tokens)
        return
    start = tl.load(cu_seqlens + sequence)
    length = tl.load(cu_seqlens + sequence + 1) - start
    first = (block % BLOCKS) * BLOCK
    if first >= length:
        return

    STRIDE: tl.constexpr = 3 * HEADS * SIZE
    query_Q = first + tl.arange(0, BLOCK)
    column_D = tl.arange(0, SIZE)
    first_token = start.to(tl.int64)
    states = qkv + first_token * STRIDE + head * SIZE
    inside = (query_Q < length)[:, None]
    query_QD = tl.load(states + query_Q[:, None] * STRIDE + column_D[None, :], inside, other=0.0)
    seed = tl.load(seed_pointer) if DROPPED > 0 else 0

    max_Q = tl.full([BLOCK], MASKED_SCORE, tl.float32)
    sum_Q = tl.zeros([BLOCK], tl.float32)
    context_QD = tl.zeros([BLOCK, SIZE], tl.float32)
    keys_start, keys_end = partners(first, length, BLOCK, WINDOW)
    for first_key in range(keys_start // STEP * STEP, keys_end, STEP):
        key_K = first_key + tl.arange(0, STEP)
        places = states + key_K[:, None] * STRIDE + column_D[None, :]
        keys_inside = (key_K < length)[:, None]
        key_KD = tl.load(places + HEADS * SIZE, keys_inside, other=0.0)
        value_KD = tl.load(places + 2 * HEADS * SIZE, keys_inside, other=0.0)
        scores_QK = tl.dot(query_QD, tl.trans(key_KD), input_precision=PRECISION) * scale
        visible_QK = visible_pairs(query_Q[:, None], key_K[None, :], length, WINDOW)
        scores_QK = tl.where(visible_QK, scores_QK, MASKED_SCORE)
        new_max_Q = tl.maximum(max_Q, tl.max(scores_QK, 1))
        probs_QK = tl.exp2(scores_QK - new_max_Q[:, None])
        rescale_Q = tl.exp2(max_Q - new_max_Q)
        sum_Q = sum_Q * rescale_Q + tl.sum(probs_QK, 1)
        max_Q = new_max_Q
        if DROPPED > 0:
            kept_QK = dropout_mask(seed, head, start + query_Q, first_key, DROPPED, BLOCK, STEP)
            probs_QK = tl.where(kept_QK, probs_QK, 0.0)
        context_QD = context_QD * rescale_Q[:, None]
        probs_QK = probs_QK.to(value_KD.dtype)
        context_QD = tl.dot(probs_QK, value_KD, context_QD, input_precision=PRECISION)

    kept_scale = 65536.0 / (65536 - DROPPED)
    context_QD = context_QD * (kept_scale / sum_Q)[:, None]
    out += first_token * (HEADS * SIZE) + head * SIZE
    places = out + query_Q[:, None] * (HEADS * SIZE) + column_D[None, :]
    tl.store(places, context_QD.to(out.dtype.element_ty), mask=(query_Q < length)[:, None])
    log_sums += head.to(tl.int64) * num_tokens + first_token
    tl.store(log_sums + query_Q, max_Q + tl.log2(sum_Q), mask=query_Q < length)


@triton.jit
def score_gradients(
    states, out, grad_out, log_sums, seed, head, start, length, first_query, first_key,
    key_KD, value_KD, scale,
    HEADS: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    SEES_ALL_KEYS: tl.constexpr,
    WINDOW: tl.constexpr, DROPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Of a block: the queries, the gradients of their outputs, the probabilities after dropout
    [K, Q], and the gradients of the scores [K, Q].
    """
    query_Q = first_query + tl.arange(0, QUERIES)
    column_D = tl.arange(0, SIZE)
    key_K = first_key + tl.arange(0, KEYS)
    inside = (query_Q < length)[:, None]
    places = query_Q[:, None] * (HEADS * SIZE) + column_D[None, :]
    query_places = states + query_Q[:, None] * (3 * HEADS * SIZE) + column_D[None, :]
    query_QD = tl.load(query_places, inside, other=0.0)
    grad_QD = tl.load(grad_out + places, inside, other=0.0)
    log_sum_Q = tl.load(log_sums + query_Q, query_Q < length, other=0.0)

    scores_KQ = tl.dot(key_KD, tl.trans(query_QD), input_precision=PRECISION) * scale
    visible_KQ = visible_pairs(query_Q[None, :], key_K[:, None], length, WINDOW)
    probs_KQ = tl.where(visible_KQ, tl.exp2(scores_KQ - log_sum_Q[None, :]), 0.0)
    grad_probs_KQ = tl.dot(value_KD, tl.trans(grad_QD), input_precision=PRECISION)
    dropped_KQ = probs_KQ
    if DROPPED > 0:
        kept_QK = dropout_mask(seed, head, start + query_Q, first_key, DROPPED, QUERIES, KEYS)
        kept_scale_KQ = tl.where(tl.trans(kept_QK), 65536.0 / (65536 - DROPPED), 0.0)
        dropped_KQ = probs_KQ * kept_scale_KQ
        grad_probs_KQ = grad_probs_KQ * kept_scale_KQ
    # The mean gradient of a query's probabilities is also the product of its output and gradient.
    if SEES_ALL_KEYS:
        mean_Q = tl.sum(probs_KQ * grad_probs_KQ, 0)
    else:
        out_QD = tl.load(out + places, inside, other=0.0)
        mean_Q = tl.sum(out_QD.to(tl.float32) * grad_QD.to(tl.float32), 1)
    grad_scores_KQ = probs_KQ * (grad_probs_KQ - mean_Q[None, :])
    return query_QD, grad_QD, dropped_KQ, grad_scores_KQ


@triton.jit(do_not_specialize=SIZES)
def backward_kernel(
    qkv, out, grad_out, grad_qkv, log_sums, cu_seqlens, seed_pointer, num_tokens, num_sequences,
    scale, grad_scale,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
    WINDOW: tl.constexpr, DROPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK keys with STEP queries at a time, then BLOCK queries with STEP keys at a time."""
    program = tl.program_id(0)
    head = program % HEADS
    block = program // HEADS
    sequence = block // BLOCKS
    STRIDE: tl.constexpr = 3 * HEADS * SIZE
    if sequence >= num_sequences:
        token = tl.load(cu_seqlens + num_sequences) + (block - num_sequences * BLOCKS) * BLOCK
        fill_with_zeros(grad_qkv, token, num_tokens, head, 3, HEADS, SIZE, BLOCK)
        return
    start = tl.load(cu_seqlens + sequence)
    length = tl.load(cu_seqlens + sequence + 1) - start
    first = (block % BLOCKS) * BLOCK
    if first >= length:
        return

    # The first pass sees all keys of a query if there is one block.
    IS_WHOLE: tl.constexpr = BLOCKS == 1
    first_token = start.to(tl.int64)
    states = qkv + first_token * STRIDE + head * SIZE
    grads = grad_qkv + first_token * STRIDE + head * SIZE
    out += first_token * (HEADS * SIZE) + head * SIZE
    grad_out += first_token * (HEADS * SIZE) + head * SIZE
    log_sums += head.to(tl.int64) * num_tokens + first_token
    seed = tl.load(seed_pointer) if DROPPED > 0 else 0
    own_B, step_S, column_D = tl.arange(0, BLOCK), tl.arange(0, STEP), tl.arange(0, SIZE)
    own_rows = (first + own_B)[:, None] * STRIDE + column_D[None, :]
    own_inside = (first + own_B < length)[:, None]

    key_BD = tl.load(states + own_rows + HEADS * SIZE, own_inside, other=0.0)
    value_BD = tl.load(states + own_rows + 2 * HEADS * SIZE, own_inside, other=0.0)
    grad_key_BD = tl.zeros([BLOCK, SIZE], tl.float32)
    grad_value_BD = tl.zeros([BLOCK, SIZE], tl.float32)
    queries_start, queries_end = partners(first, length, BLOCK, WINDOW)
    for first_query in range(queries_start // STEP * STEP, queries_end, STEP):
        query_SD, grad_SD, dropped_BS, grad_scores_BS = score_gradients(
            states, out, grad_out, log_sums, seed, head, start, length, first_query, first,
            key_BD, value_BD, scale,
            HEADS, SIZE, STEP, BLOCK, IS_WHOLE, WINDOW, DROPPED, PRECISION,
        )  # fmt: skip
        grad_scores_BS = grad_scores_BS.to(query_SD.dtype)
        dropped_BS = dropped_BS.to(grad_SD.dtype)
        grad_value_BD = tl.dot(dropped_BS, grad_SD, grad_value_BD, input_precision=PRECISION)
        grad_key_BD = tl.dot(grad_scores_BS, query_SD, grad_key_BD, input_precision=PRECISION)
        if IS_WHOLE:
            grad_query_SD = tl.dot(tl.trans(grad_scores_BS), key_BD, input_precision=PRECISION)
            rows = first_query + step_S
            tl.store(
                grads + rows[:, None] * STRIDE + column_D[None, :],
                (grad_query_SD * grad_scale).to(grad_qkv.dtype.element_ty),
                mask=(rows < length)[:, None],
            )
    grad_key_BD = (grad_key_BD * grad_scale).to(grad_qkv.dtype.element_ty)
    tl.store(grads + own_rows + HEADS * SIZE, grad_key_BD, own_inside)
    grad_value_BD = grad_value_BD.to(grad_qkv.dtype.element_ty)
    tl.store(grads + own_rows + 2 * HEADS * SIZE, grad_value_BD, own_inside)

    if not IS_WHOLE:
        grad_query_BD = tl.zeros([BLOCK, SIZE], tl.float32)
        keys_start, keys_end = partners(first, length, BLOCK, WINDOW)
        for first_key in range(keys_start // STEP * STEP, keys_end, STEP):
            rows = first_key + step_S
            places = states + rows[:, None] * STRIDE + column_D[None, :]
            inside = (rows < length)[:, None]
            key_SD = tl.load(places + HEADS * SIZE, inside, other=0.0)
            value_SD = tl.load(places + 2 * HEADS * SIZE, inside, other=0.0)
            _, _, _, grad_scores_SB = score_gradients(
                states, out, grad_out, log_sums, seed, head, start, length, first, first_key,
                key_SD, value_SD, scale,
                HEADS, SIZE, BLOCK, STEP, False, WINDOW, DROPPED, PRECISION,
            )  # fmt: skip
            grad_scores_BS = tl.trans(grad_scores_SB).to(key_SD.dtype)
            grad_query_BD = tl.dot(grad_scores_BS, key_SD, grad_query_BD, input_precision=PRECISION)
        grad_query_BD = (grad_query_BD * grad_scale).to(grad_qkv.dtype.element_ty)
        tl.store(grads + own_rows, grad_query_BD, own_inside)


class LaunchConfig(NamedTuple):
    """Tokens of a program's own block, tokens of the other side at a time, and warps."""

    block: int
    step: int
    num_warps: int

    @classmethod
    def of(cls, max_seqlen: int, size: int, itemsize: int) -> "LaunchConfig":
        """What a multiprocessor's registers hold for heads of `size` elements; measured with the
        compiler, not on a GPU.
        """
        largest = (8192 if itemsize == 2 else 2048) // size
        block = min(max(triton.next_power_of_2(max_seqlen), 16), largest, 128)
        return cls(block, min(block, 32), num_warps=8 if block == 128 else 4)


def launch(
    kernel: triton.JITFunction,
    num_stages: int,
    tensors: tuple[Tensor, ...],
    cu_seqlens: Tensor,
    seed: Tensor | None,
    scales: tuple[float, ...],
    max_seqlen: int,
    window: int | None,
    has_filler: bool,
    dropped: int,
) -> None:
    """Runs `kernel` for all blocks. The first of `tensors` is [T, 3, H, D]."""
    num_tokens, _, heads, size = tensors[0].shape
    dtype = tensors[0].dtype
    num_sequences = len(cu_seqlens) - 1
    block, step, num_warps = LaunchConfig.of(max_seqlen, size, dtype.itemsize)
    blocks = triton.cdiv(max_seqlen, block)
    # Any token may be filler. Programs that find none end at once.
    filler_blocks = triton.cdiv(num_tokens, block) if has_filler else 0
    is_exact = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    kernel[((num_sequences * blocks + filler_blocks) * heads,)](
        *tensors,
        cu_seqlens,
        seed,
        num_tokens,
        num_sequences,
        *scales,
        HEADS=heads,
        SIZE=size,
        BLOCKS=blocks,
        BLOCK=block,
        STEP=step,
        WINDOW=-1 if window is None else window,
        DROPPED=dropped,
        PRECISION="ieee" if is_exact else "tf32",
        num_warps=num_warps,
        num_stages=num_stages,
    )


@torch.library.custom_op("bert_recipe::packed_attention", mutates_args=())
def packed_attention(
    qkv_T3HD: Tensor,
    cu_seqlens: Tensor,
    seed: Tensor | None,
    max_seqlen: int,
    window: int | None,
    has_filler: bool,
    dropped: int,
) -> tuple[Tensor, Tensor]:
    """softmax(QK' / sqrt(D)) V within each sequence, [T, H, D], zero for filler; and what the
    backward pass needs: the logarithms to base 2 of the softmax's sums [H, T], zero for filler too.
    dropped: probability of dropout times 2^16, with a `seed`, int64 [1], unless it is 0.
    """
    num_tokens, _, heads, size = qkv_T3HD.shape
    out_THD = qkv_T3HD.new_empty(num_tokens, heads, size)
    log_sums_HT = qkv_T3HD.new_empty(heads, num_tokens, dtype=torch.float32)
    tensors, scales = (qkv_T3HD, out_THD, log_sums_HT), (LOG2_E / math.sqrt(size),)
    options = (max_seqlen, window, has_filler, dropped)
    launch(forward_kernel, 1, tensors, cu_seqlens, seed, scales, *options)
    return out_THD, log_sums_HT


@packed_attention.register_fake
def _(qkv_T3HD, *_):
    num_tokens, _, heads, size = qkv_T3HD.shape
    log_sums_HT = qkv_T3HD.new_empty(heads, num_tokens, dtype=torch.float32)
    return qkv_T3HD.new_empty(num_tokens, heads, size), log_sums_HT


@torch.library.custom_op("bert_recipe::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    grad_THD: Tensor,
    qkv_T3HD: Tensor,
    out_THD: Tensor,
    log_sums_HT: Tensor,
    cu_seqlens: Tensor,
    seed: Tensor | None,
    max_seqlen: int,
    window: int | None,
    has_filler: bool,
    dropped: int,
) -> Tensor:
    """The gradient [T, 3, H, D] of `qkv_T3HD`; zero for filler."""
    grad_T3HD = torch.empty_like(qkv_T3HD)
    scale = 1 / math.sqrt(qkv_T3HD.shape[-1])
    tensors = (qkv_T3HD, out_THD, grad_THD, grad_T3HD, log_sums_HT)
    options = (max_seqlen, window, has_filler, dropped)
    launch(backward_kernel, 2, tensors, cu_seqlens, seed, (LOG2_E * scale, scale), *options)
    return grad_T3HD


@packed_attention_backward.register_fake
def _(_grad_THD, qkv_T3HD, *_):
    return torch.empty_like(qkv_T3HD)


def _save_for_backward(ctx, inputs, output) -> None:
    qkv_T3HD, cu_seqlens, seed, *ctx.options = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(qkv_T3HD, *output, cu_seqlens, seed)


def _backward(ctx, grad_THD: Tensor, _grad_log_sums_HT):
    tensors = (grad_THD.contiguous(), *ctx.saved_tensors)
    return packed_attention_backward(*tensors, *ctx.options), *[None] * 6


packed_attention.register_autograd(_backward, setup_context=_save_for_backward)


def attend(
    qkv_T3HD: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    window: int | None,
    has_filler: bool,
    dropout_prob: float,
) -> Tensor:
    """Attention within each sequence, [T, H, D], with dropout on the probabilities. The seed of its
    mask is drawn on the device, so that the host does not wait.
    """
    dropped = min(round(dropout_prob * 2**16), 2**16 - 1)
    seed = torch.randint(2**62, (1,), device=qkv_T3HD.device) if dropped else None
    options = (max_seqlen, window, has_filler, dropped)
    return packed_attention(qkv_T3HD.contiguous(), cu_seqlens, seed, *options)[0]
