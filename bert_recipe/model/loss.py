"""Losses, summed over a micro-batch. The trainer divides once, by the counts of the global batch.

Legend: T tokens in the stream, N sequences, M masked tokens, R of their rows at a time, V
vocabulary, S longest sequence; of embeddings n samples of the global batch, k texts of each (an
anchor, its positive, hard negatives), c candidates, E hidden size.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bert_recipe.model.kernels.linear import linear, weight_gradient
from bert_recipe.model.token_stream import IGNORED_LABEL, padded_index

# Rows of logits converted to float32 at a time: few enough for a CPU's cache, enough to fill a GPU.
FLOAT32_ROWS = {"cpu": 8, "cuda": 4096}


class LinearCrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropies of `hidden @ weight.T + bias` over the rows whose label is not
    ignored, and the number of correct rows. The forward pass computes softmax once, in float32 for
    a few rows at a time, and writes the gradient of the logits over them. Backward can therefore
    run only once per forward.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_ME: Tensor, weight_VE: Tensor, bias_V: Tensor, labels_M: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits_MV = linear(hidden_ME, weight_VE)
        grad_MV = logits_MV  # written over the logits, to save memory
        bias_V = bias_V.float()
        is_labelled_M1 = (labels_M != IGNORED_LABEL)[:, None]
        # An index, also where the label is ignored. Other negative labels are errors of `gather`.
        label_M1 = labels_M.where(labels_M != IGNORED_LABEL, 0)[:, None]
        # Gradients are kept x1024 until the loss scale is applied, so that float16 does not
        # underflow.
        upscale = 1024.0 if logits_MV.dtype == torch.float16 else 1.0
        grad_scale_M1 = is_labelled_M1 * upscale
        # On a GPU, always: to look at the scales would synchronize.
        must_scale = logits_MV.device.type != "cpu" or bool((grad_scale_M1 != 1).any())
        needs_grad = any(ctx.needs_input_grad)
        max_logit_M1, max_prob_M1, label_logit_M1, label_prob_M1 = (
            torch.empty_like(grad_scale_M1) for _ in range(4)
        )
        for rows in row_blocks(logits_MV):
            logits_RV = logits_MV[rows].float().add_(bias_V)  # in place: float32 logits, too
            probs_RV = logits_RV.softmax(dim=1)
            torch.amax(logits_RV, dim=1, keepdim=True, out=max_logit_M1[rows])
            torch.amax(probs_RV, dim=1, keepdim=True, out=max_prob_M1[rows])
            torch.gather(logits_RV, 1, label_M1[rows], out=label_logit_M1[rows])
            torch.gather(probs_RV, 1, label_M1[rows], out=label_prob_M1[rows])
            if needs_grad:
                # The gradient is the probability, except at the label, which follows below.
                grad_MV[rows] = probs_RV.mul_(grad_scale_M1[rows]) if must_scale else probs_RV
        # max_prob = exp(max_logit - logsumexp); it is at least 1/V and so does not underflow.
        logsumexp_M1 = max_logit_M1 - max_prob_M1.log()
        total = torch.where(is_labelled_M1, logsumexp_M1 - label_logit_M1, 0.0).sum()
        correct = ((label_logit_M1 >= max_logit_M1) & is_labelled_M1).sum()
        if needs_grad:
            label_grad_M1 = (label_prob_M1 - 1) * grad_scale_M1
            rows_M = torch.arange(len(labels_M), device=labels_M.device)
            grad_MV[rows_M, label_M1[:, 0]] = label_grad_M1[:, 0].to(grad_MV.dtype)
            ctx.grad_MV, ctx.upscale = grad_MV, upscale
            ctx.save_for_backward(hidden_ME, weight_VE)
        ctx.mark_non_differentiable(correct)
        return total, correct

    @staticmethod
    def backward(
        ctx: Any, grad_total: Tensor, _grad_correct: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_ME, weight_VE = ctx.saved_tensors
        grad_MV, ctx.grad_MV = ctx.grad_MV, None
        factor = grad_total / ctx.upscale
        if grad_MV.dtype == torch.float16:
            # Before the products, which could overflow at x1024; elsewhere after them.
            for rows in row_blocks(grad_MV):
                grad_MV[rows] = grad_MV[rows].float().mul_(factor)
            factor = torch.ones_like(factor)

        def scaled(tensor: Tensor) -> Tensor:
            # In float32, because 16 bits would round the factor, too.
            return (tensor.float() * factor).to(tensor.dtype)

        return (
            scaled(linear(grad_MV, weight_VE.T)),
            weight_gradient(grad_MV, scaled(hidden_ME)),
            scaled(grad_MV.sum(0)),
            None,
        )


def row_blocks(logits_MV: Tensor) -> Iterator[slice]:
    """The rows that are converted to float32 at a time."""
    num_rows = FLOAT32_ROWS.get(logits_MV.device.type, 4096)
    for start in range(0, len(logits_MV), num_rows):
        yield slice(start, start + num_rows)


def linear_cross_entropy(
    hidden_ME: Tensor, weight_VE: Tensor, bias_V: Tensor, labels_M: Tensor
) -> tuple[Tensor, Tensor]:
    """The sum of the cross-entropies of `hidden_ME @ weight_VE.T + bias_V`, a float32 scalar, and
    the number of rows whose label has the largest logit; without a float32 copy of the logits
    [M, V]. Rows labelled -100 are skipped. One backward pass per call.

        weight_VE, bias_V = model.output_layer()
        states_ME = model.transform(hidden_ME)
        total, correct = linear_cross_entropy(states_ME, weight_VE, bias_V, labels_M)
        (total / num_masked).backward()
    """
    if torch.compiler.is_compiling():
        # The compiler fuses the rest, so that no float32 copy of the logits is written. By their
        # bytes, an H100 takes 1 ms instead of 3 to 4 for the masked tokens of 32,768.
        return summed_cross_entropy(F.linear(hidden_ME, weight_VE, bias_V), labels_M)
    kind = hidden_ME.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):  # meta has no autocast
        dtype = torch.get_autocast_dtype(kind)
        hidden_ME = hidden_ME.to(dtype)
        weight_VE = weight_VE.to(dtype)
    return LinearCrossEntropy.apply(hidden_ME, weight_VE, bias_V, labels_M)


@functools.cache
def compiled_linear_cross_entropy() -> Callable[..., tuple[Tensor, Tensor]]:
    """`linear_cross_entropy` as a graph of its own, for all sizes."""
    return torch.compile(linear_cross_entropy, fullgraph=True, dynamic=True)


def summed_cross_entropy(
    logits_MV: Tensor,
    labels_M: Tensor,
    weight_V: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Returns the sum over rows of -log softmax(logits)[label], a float32 scalar, and the number of
    rows whose label has the largest logit (ties count). Rows labelled `IGNORED_LABEL` are skipped.
    weight_V, label_smoothing: see torch.nn.functional.cross_entropy.
    """
    logits_MV = logits_MV.float()
    total = F.cross_entropy(
        logits_MV,
        labels_M,
        weight_V,
        ignore_index=IGNORED_LABEL,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    label_logits_M = logits_MV.detach().gather(1, labels_M.clamp(min=0)[:, None]).squeeze(1)
    is_correct_M = (label_logits_M >= logits_MV.detach().amax(dim=1)) & (labels_M != IGNORED_LABEL)
    return total, is_correct_M.sum()


def next_sentence_sums(logits_N2: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """`summed_cross_entropy` of next-sentence pairs. Filler (label -100) and sequences that are no
    pairs (label -1) are ignored.
    """
    return summed_cross_entropy(logits_N2, labels_N.where(labels_N >= 0, IGNORED_LABEL))


def span_sum(
    start_logits_T: Tensor,
    end_logits_T: Tensor,
    start_positions_N: Tensor,
    end_positions_N: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Sum over sequences of (CE(start) + CE(end)) / 2, each a softmax over the tokens of the
    sequence. label_smoothing: the share of the target that all tokens have in equal parts.
    """
    index_NS, real_NS = padded_index(cu_seqlens, max_seqlen, len(start_logits_T))
    total = start_logits_T.new_zeros((), dtype=torch.float32)
    for logits_T, positions_N in (
        (start_logits_T, start_positions_N),
        (end_logits_T, end_positions_N),
    ):
        logits_NS = logits_T.float()[index_NS].masked_fill(~real_NS, torch.finfo(torch.float32).min)
        loss = F.cross_entropy(logits_NS, positions_N, ignore_index=IGNORED_LABEL, reduction="sum")
        if label_smoothing:
            log_probs_NS = logits_NS.log_softmax(1).where(real_NS, 0.0)
            means_N = log_probs_NS.sum(1) / real_NS.sum(1).clamp(1)
            uniform_loss = -means_N.where(positions_N != IGNORED_LABEL, 0.0).sum()
            loss = (1 - label_smoothing) * loss + label_smoothing * uniform_loss
        total = total + loss
    return total / 2


def contrastive_losses(
    vectors_nkE: Tensor, texts_nk: Tensor, temperature: float, symmetric: bool
) -> Tensor:
    """Multiple negatives ranking (InfoNCE): the cross-entropy [n] of each positive among all
    positives and negatives of the batch; `symmetric`: averaged with that of each anchor among all
    anchors. Texts that are known to belong together are no negatives of each other: equal texts,
    and an anchor and a positive of it, or of an equal anchor, wherever they stand.

    vectors_nkE: of the texts of each sample, normalized.
    texts_nk: numbers of these texts, equal for equal texts.
    """
    anchors_nE, positives_nE = vectors_nkE[:, 0], vectors_nkE[:, 1]
    # All positives, then all first negatives, and so on: the positive of sample n is candidate n.
    candidates_cE = vectors_nkE[:, 1:].transpose(0, 1).flatten(0, 1)
    texts_kn = texts_nk.T.contiguous()
    anchor_texts_n, positive_texts_n = texts_kn[0], texts_kn[1]
    candidate_texts_c = texts_kn[1:].flatten()
    targets_n = torch.arange(len(texts_nk), device=texts_nk.device)

    def cross_entropy(cosines: Tensor, belong_together: Tensor) -> Tensor:
        """The target of n is candidate n; others that belong to n are left out."""
        belong_together.fill_diagonal_(False)  # indexing would wait for a GPU
        logits = (cosines / temperature).masked_fill(belong_together, -torch.inf)
        return F.cross_entropy(logits, targets_n, reduction="none")

    is_pair_nc = known_pairs(anchor_texts_n, candidate_texts_c)
    is_anchor_nc = anchor_texts_n[:, None] == candidate_texts_c
    losses_n = cross_entropy(anchors_nE @ candidates_cE.T, is_pair_nc | is_anchor_nc)
    if not symmetric:
        return losses_n
    # From here on, the samples are the positives and the candidates the anchors.
    is_pair_nn = is_pair_nc[:, : len(targets_n)].T
    is_positive_nn = positive_texts_n[:, None] == anchor_texts_n
    reverse_losses_n = cross_entropy(positives_nE @ anchors_nE.T, is_pair_nn | is_positive_nn)
    return (losses_n + reverse_losses_n) / 2


def known_pairs(anchors_n: Tensor, candidates_c: Tensor) -> Tensor:
    """Whether candidate c has the text of a positive of an anchor equal to anchor n [n, c]. The
    first n candidates are the positives.
    """
    # Equal texts get the same index: their first place in sorted order. `unique` would wait for a
    # GPU.
    anchor_index_n = torch.searchsorted(anchors_n.sort().values, anchors_n)
    candidate_index_c = torch.searchsorted(candidates_c.sort().values, candidates_c)
    positive_index_n = candidate_index_c[: len(anchors_n)]
    # By these indices: whether any sample has this anchor and this positive.
    has_pair_nc = anchors_n.new_zeros(len(anchors_n), len(candidates_c), dtype=torch.bool)
    true = torch.ones_like(has_pair_nc[0, 0])  # on the device: Python's True would wait for it
    has_pair_nc.index_put_((anchor_index_n, positive_index_n), true)
    return has_pair_nc[anchor_index_n][:, candidate_index_c]


def margin_mse_losses(vectors_nkE: Tensor, scores_nk: Tensor, temperature: float) -> Tensor:
    """Margin MSE (Hofstätter et al., 2020): for each sample [n] the mean over its negatives of the
    squared difference between the margin of the cosines, divided by `temperature`, and that of a
    teacher's scores of the anchor with each text (those of the anchor itself are not used).
    """
    products_nk = (vectors_nkE[:, :1] * vectors_nkE[:, 1:]).sum(dim=2) / temperature
    margins = products_nk[:, :1] - products_nk[:, 1:]
    return (margins - (scores_nk[:, 1:2] - scores_nk[:, 2:])).square().mean(dim=1)


def cosent_losses(cosines_n: Tensor, scores_n: Tensor, temperature: float) -> Tensor:
    """CoSENT: log(1 + sum exp((cos_i - cos_j) / temperature) for score_i < score_j), the same for
    each sample [n].
    """
    differences_nn = (cosines_n[:, None] - cosines_n) / temperature
    differences = differences_nn.masked_fill(scores_n[:, None] >= scores_n, -torch.inf).flatten()
    return torch.cat([differences.new_zeros(1), differences]).logsumexp(0).expand(len(cosines_n))
