"""Compares attention implementations with a float64 loop over the sequences: output, gradient and
dropout mask. Their time is given, too.

Legend: T tokens in the stream, H heads, L length of a sequence, D head size.
"""

import math
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from bert_recipe.experiments.triton_attention import MAX_LENGTH, TritonAttention
from bert_recipe.model.attention import StreamLayout, prepare_attention
from bert_recipe.model.kernels.positions import hidden_pairs
from bert_recipe.parallel.attention_choice import CHOICES, load_attention
from bert_recipe.utils.measure import Stopwatch

TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}
BOTH = (torch.float32, torch.bfloat16)
IMPLEMENTATIONS = {
    "cuda": {"efficient": BOTH, "padded": BOTH, "flash": (torch.bfloat16,)},
    "cpu": {"length_bucketed": BOTH, "padded": BOTH},
}
DROPOUT_PROBS = (0.0, 0.1)
STREAM_SEQUENCES, CALLS = 8, 8
Attend = Callable[[Tensor, float], Tensor]  # see attention.PreparedAttention


def reference(
    qkv_T3HD: Tensor,
    grad_THD: Tensor,
    lengths: list[int],
    masks: list[Tensor] | None,
    dropout_prob: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The output and the gradient of `qkv_T3HD` in float64. `masks` [H, L, L] are the probabilities
    that dropout keeps; window: see attention.StreamLayout.
    """
    qkv_T3HD = qkv_T3HD.detach().double().requires_grad_()
    outputs = []
    for number, qkv_L3HD in enumerate(qkv_T3HD.split(lengths)):
        query, key, value = qkv_L3HD.permute(1, 2, 0, 3)
        scores_HLL = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
        hidden_LL = pairs_hidden(len(qkv_L3HD), window).to(scores_HLL.device)
        probs_HLL = scores_HLL.masked_fill(hidden_LL, -math.inf).softmax(dim=-1)
        if masks is not None:
            probs_HLL = probs_HLL * masks[number] / (1 - dropout_prob)
        outputs.append((probs_HLL @ value).transpose(0, 1))
    out_THD = torch.cat(outputs)
    (gradient,) = torch.autograd.grad(out_THD, qkv_T3HD, grad_THD.double())
    return out_THD.detach(), gradient


def pairs_hidden(length: int, window: int | None) -> Tensor:
    """The pairs of a sequence that do not attend to each other, [L, L]."""
    place_L = torch.arange(length)
    return hidden_pairs(place_L, place_L, length if window is None else window)


def dropout_masks(
    attend: Attend, qkv_T3HD: Tensor, lengths: list[int], dropout_prob: float, seed: int
) -> list[Tensor]:
    """The probabilities [H, L, L] of each sequence that `attend` keeps with this seed. If the
    values of D keys are the D unit vectors and all others are zero, the output is the probabilities
    of these keys, zero if dropped.
    """
    size = qkv_T3HD.shape[-1]
    place_T = torch.cat([torch.arange(length, device=qkv_T3HD.device) for length in lengths])
    columns = []
    for start in range(0, max(lengths), size):
        probe_T3HD = qkv_T3HD.detach().clone()
        unit_vectors_TD = (place_T[:, None] - start) == torch.arange(size, device=place_T.device)
        probe_T3HD[:, 2] = unit_vectors_TD[:, None]
        torch.manual_seed(seed)
        columns.append(attend(probe_T3HD.requires_grad_(), dropout_prob).detach() != 0)
    sequences = torch.cat(columns, dim=-1).split(lengths)
    return [
        mask_LHS[..., :length].transpose(0, 1)
        for mask_LHS, length in zip(sequences, lengths, strict=True)
    ]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The norm of the difference, divided by that of `expected`."""
    expected = expected.detach().double()
    return float((actual.detach().double() - expected).norm() / expected.norm())


def check(
    attend: Attend,
    qkv_T3HD: Tensor,
    grad_THD: Tensor,
    lengths: list[int],
    dropout_prob: float,
    window: int | None = None,
) -> dict:
    """The errors of output and gradient, ||difference|| / ||reference||, and the share of
    probabilities that dropout drops. `wrong` describes what is wrong, or is None.
    """
    seed = 1
    masks = None
    figures = {}
    wrong = []
    if dropout_prob:
        masks = dropout_masks(attend, qkv_T3HD, lengths, dropout_prob, seed)
        visible = [int((~pairs_hidden(length, window)).sum()) for length in lengths]
        count = sum(visible) * qkv_T3HD.shape[2]
        figures["dropped"] = 1 - sum(int(mask_HLL.sum()) for mask_HLL in masks) / count
        # Some kernels round the probability to 8 bits; the rest is chance, at five standard
        # deviations.
        limit = 2**-7 + 5 * math.sqrt(dropout_prob * (1 - dropout_prob) / count)
        if abs(figures["dropped"] - dropout_prob) > limit:
            wrong.append(f"it drops {figures['dropped']:.4f} of the probabilities")
    torch.manual_seed(seed)
    out_THD = attend(qkv_T3HD, dropout_prob)
    (gradient,) = torch.autograd.grad(out_THD, qkv_T3HD, grad_THD)
    if dropout_prob and torch.equal(out_THD, attend(qkv_T3HD, dropout_prob)):
        wrong.append("two calls drop the same probabilities")
    expected = reference(qkv_T3HD, grad_THD, lengths, masks, dropout_prob, window)
    # The CPU's masks round the probability to a multiple of 2^-16, and scale accordingly.
    figures["limit"] = TOLERANCES[qkv_T3HD.dtype] + (2**-16 if dropout_prob else 0)
    for what, actual, reference_value in zip(
        ("output", "gradient"), (out_THD.detach(), gradient), expected, strict=True
    ):
        figures[what] = relative_error(actual, reference_value)
        if not figures[what] < figures["limit"]:  # also if it is NaN
            wrong.append(f"its {what} has an error of {figures[what]:.1e}")
    return figures | {"wrong": "; ".join(wrong) or None}


def implementation_checks(
    heads: int, head_size: int, seq_length: int, device: torch.device
) -> dict[str, Callable[[], dict]]:
    """By title, the checks of the implementations that this machine has."""
    implementations = dict(IMPLEMENTATIONS[device.type])
    if device.type == "cuda":
        is_short = seq_length <= MAX_LENGTH and head_size in TritonAttention.head_sizes
        if is_short and find_spec("triton"):
            implementations["triton"] = BOTH
        is_new = torch.__version__ >= "2.14"  # compares versions; see attention_choice.py
        if is_new and find_spec("flash_attn") and find_spec("flash_attn.cute"):
            implementations["flash-attn-4"] = (torch.bfloat16,)
    checks = {}
    for name, dtypes in implementations.items():
        for dtype in dtypes:
            for prob in DROPOUT_PROBS[:1] if name == "flash-attn-4" else DROPOUT_PROBS:
                title = f"attention {name}, {str(dtype).removeprefix('torch.')}, dropout {prob:g}"
                checks[title] = partial(
                    check_implementation, name, dtype, prob, (heads, head_size), seq_length, device
                )
    return checks


def check_implementation(
    name: str,
    dtype: torch.dtype,
    dropout_prob: float,
    head_shape: tuple[int, int],
    seq_length: int,
    device: torch.device,
) -> dict:
    """The errors, whether they are `ok`, and the milliseconds of a call, forward and with the
    backward pass. head_shape: heads, and elements of each.
    """
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    lengths = random.integers(1, seq_length + 1, STREAM_SEQUENCES).tolist()
    tokens = sum(lengths)
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    qkv_T3HD = torch.randn(tokens, 3, *head_shape, dtype=dtype, device=device, requires_grad=True)
    grad_THD = torch.randn(tokens, *head_shape, dtype=dtype, device=device)
    if name in CHOICES:
        load_attention(name).activate()
    layout = StreamLayout(cu_seqlens, seq_length, tokens)
    attend = prepare_attention(name, layout, dropout_prob > 0)
    errors = check(attend, qkv_T3HD, grad_THD, lengths, dropout_prob)
    stopwatch = Stopwatch(device)
    with stopwatch.lap("forward_ms"):
        for _ in range(CALLS):
            attend(qkv_T3HD, dropout_prob)
    with stopwatch.lap("both_ms"):
        for _ in range(CALLS):
            torch.autograd.grad(attend(qkv_T3HD, dropout_prob), qkv_T3HD, grad_THD)
    milliseconds = {kind: 1e3 * lap / CALLS for kind, (lap,) in stopwatch.seconds().items()}
    if name == "flash-attn-4":  # it overrides torch's operator
        torch.nn.attention.restore_flash_attention_impl()
    return errors | milliseconds | {"ok": errors["wrong"] is None}
