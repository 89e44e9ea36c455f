"""Losses as sums with their counts, so that whoever owns the global batch divides once, by global counts.

Legend: T tokens in the stream, N sequences, M masked tokens, V vocabulary, S longest sequence.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from modeling import padded_index
from token_stream import IGNORED_LABEL

ROWS_AT_A_TIME = 256  # rows of logits that are held in float32 at once


class SummedCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies over the rows whose label is not ignored, in float32 without a float32 copy of the
    logits: forward and backward go through them a few rows at a time, and backward writes the gradient over them."""

    @staticmethod
    def forward(ctx, logits_MV: Tensor, labels_M: Tensor) -> Tensor:
        log_normalizers, total = [], logits_MV.new_zeros((), dtype=torch.float32)
        kept_M = labels_M != IGNORED_LABEL
        safe_M = labels_M.clamp(min=0)
        for logits_RV, labels_R, kept_R in zip(
            logits_MV.split(ROWS_AT_A_TIME), safe_M.split(ROWS_AT_A_TIME), kept_M.split(ROWS_AT_A_TIME), strict=True
        ):
            log_normalizer_R = torch.logsumexp(logits_RV.float(), dim=1)
            target_R = logits_RV.gather(1, labels_R[:, None]).squeeze(1).float()
            total = total + torch.where(kept_R, log_normalizer_R - target_R, 0.0).sum()
            log_normalizers.append(log_normalizer_R)
        ctx.save_for_backward(logits_MV, safe_M, kept_M, torch.cat(log_normalizers))
        return total

    @staticmethod
    def backward(ctx, grad_total: Tensor):
        logits_MV, labels_M, kept_M, log_normalizer_M = ctx.saved_tensors
        grad_MV = torch.empty_like(logits_MV)
        weight_M = torch.where(kept_M, grad_total, 0.0)
        for start in range(0, len(logits_MV), ROWS_AT_A_TIME):
            rows = slice(start, start + ROWS_AT_A_TIME)
            probs_RV = torch.exp(logits_MV[rows].float() - log_normalizer_M[rows, None])
            probs_RV.scatter_add_(1, labels_M[rows, None], probs_RV.new_full((len(probs_RV), 1), -1.0))
            grad_MV[rows] = probs_RV.mul_(weight_M[rows, None])
        return grad_MV, None


def summed_cross_entropy(logits_MV: Tensor, labels_M: Tensor) -> Tensor:
    """Sum over rows of -log softmax(logits)[label], a float32 scalar; rows labelled `IGNORED_LABEL` count nothing."""
    return SummedCrossEntropy.apply(logits_MV, labels_M)


class PreTrainingSums(NamedTuple):
    """Scalars on the device: sums over one micro-batch."""

    mlm_loss: Tensor
    nsp_loss: Tensor


def pretraining_sums(
    prediction_logits_MV: Tensor, seq_relationship_logits_N2: Tensor, mlm_labels_M: Tensor, nsp_labels_N: Tensor
) -> PreTrainingSums:
    """Losses of the masked tokens and of the sequence pairs. A filler's label is -100; data made without next-sentence
    pairs has -1 there, which counts nothing either."""
    mlm_loss = summed_cross_entropy(prediction_logits_MV, mlm_labels_M)
    nsp_labels_N = nsp_labels_N.where(nsp_labels_N >= 0, IGNORED_LABEL)
    nsp_loss = F.cross_entropy(
        seq_relationship_logits_N2.float(), nsp_labels_N, ignore_index=IGNORED_LABEL, reduction="sum"
    )
    return PreTrainingSums(mlm_loss, nsp_loss)


@torch.no_grad()
def count_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """How many rows have their largest logit at their label; ignored labels are never right."""
    return (logits.argmax(dim=1) == labels).sum()


def span_sum(
    start_logits_T: Tensor,
    end_logits_T: Tensor,
    start_positions_N: Tensor,
    end_positions_N: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
) -> Tensor:
    """Sum over sequences of (CE(start) + CE(end)) / 2, each a softmax over the sequence's own tokens."""
    index_NS, real_NS = padded_index(cu_seqlens, max_seqlen, len(start_logits_T))
    total = start_logits_T.new_zeros((), dtype=torch.float32)
    for logits_T, positions_N in ((start_logits_T, start_positions_N), (end_logits_T, end_positions_N)):
        logits_NS = logits_T.float()[index_NS].masked_fill(~real_NS, torch.finfo(torch.float32).min)
        total = total + F.cross_entropy(logits_NS, positions_N, ignore_index=IGNORED_LABEL, reduction="sum")
    return total / 2
