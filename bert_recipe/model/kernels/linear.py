"""Linear layers on a CPU: in float32 by oneDNN where MKL, which torch calls, is slow.

MKL has AVX-512 code for Intel's processors only; on others it runs AVX2 code, at half of the
processor's rate. oneDNN, which is part of torch, has AVX-512 code for all of them. In bfloat16,
torch calls it, too, but writes the bias to the output first, in a pass of its own.

Legend: T rows, I inputs, O outputs.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert_recipe.utils.device import cpu_maker

SCHEMA = (
    "mkldnn::_linear_pointwise(Tensor X, Tensor W, Tensor? B, str attr, Scalar?[] scalars, "
    "str? algorithm) -> Tensor Y"
)
# Smaller products gain less than the 0.5 ms that oneDNN takes to prepare a new shape, and few rows
# less than its copy of the weight takes.
MIN_PRODUCT = 2**23  # multiplications
MIN_ROWS = 8
# oneDNN reads a large matrix that is a transposed view slowly: with many rows, a copy is faster.
LARGE_OPERAND = 2**20  # numbers
MIN_ROWS_OF_COPY = 512
# The gradient of a weight is added up over blocks of rows, which fit a core's cache, by products of
# transposed views. If an operand is narrow and the other large, a transposed copy of the narrow one
# is faster. Measured on an AMD EPYC.
BLOCK_ROWS = 1024
NARROW_WIDTH = 384
# In bfloat16, that of a narrow input is faster as the transpose of its transpose, if it is small.
MAX_TRANSPOSED = 4096  # outputs


@functools.cache
def onednn_is_faster() -> bool:
    """Whether this machine has AVX-512, for torch and for oneDNN, and MKL does not use it. A rule,
    not a measurement: all processes and all starts of a machine decide the same. ONEDNN_MAX_CPU_ISA
    and ATEN_CPU_CAPABILITY are respected.
    """
    operator = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if operator is None or str(operator.default._schema) != SCHEMA:
        return False
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # by oneDNN's own instruction set
        and cpu_maker() not in ("GenuineIntel", "")
    )


class Setting:
    """Of this process. onednn: None until it is set or needed."""

    onednn: bool | None = None


def uses_onednn() -> bool:
    """Whether float32 linear layers on a CPU are computed by oneDNN; by default as
    `onednn_is_faster` says.
    """
    if Setting.onednn is None:
        Setting.onednn = onednn_is_faster()
    return Setting.onednn


def float32_library() -> str:
    """The library of float32 linear layers, for logs and records."""
    return "onednn" if uses_onednn() else "torch"


def set_float32_linear(onednn: bool) -> None:
    """Computes float32 linear layers on a CPU by oneDNN, or as torch does, in this process."""
    Setting.onednn = onednn


@contextmanager
def float32_linear(onednn: bool) -> Iterator[None]:
    """`set_float32_linear` within a context."""
    before = uses_onednn()
    set_float32_linear(onednn)
    try:
        yield
    finally:
        set_float32_linear(before)


def takes_onednn(rows: Tensor, matrix: Tensor) -> bool:
    """Whether `rows` [..., I] @ `matrix`.T, [O, I], is computed by oneDNN."""
    return (
        uses_onednn()
        and rows.dtype == matrix.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and is_large(rows, matrix)
    )


def takes_bfloat16(rows: Tensor, matrix: Tensor) -> bool:
    """Whether the product is one of bfloat16, also by autocast, that is faster in this module's
    form than in torch's; where that was measured. The values are the same to the bit.
    """
    if not is_large(rows, matrix):  # first: torch.compile cannot trace what asks for the machine
        return False
    dtypes = {rows.dtype, matrix.dtype}
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16:
        dtypes.discard(torch.float32)
    return dtypes <= {torch.bfloat16} and onednn_is_faster()


def is_large(rows: Tensor, matrix: Tensor) -> bool:
    """Whether the product of these tensors of a CPU is worth the time to prepare it."""
    return (
        not torch.compiler.is_compiling()
        and rows.is_cpu
        and matrix.is_cpu
        and rows.numel() * len(matrix) >= MIN_PRODUCT
        and rows.numel() >= MIN_ROWS * rows.shape[-1]
        # Not those of torchao, DTensor and the like, which have products of their own.
        and {type(rows), type(matrix)} <= {Tensor, nn.Parameter}
    )


def linear(hidden: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`F.linear`, by oneDNN where that is faster."""
    if takes_onednn(hidden, weight_OI):
        return OneDnnLinear.apply(hidden.contiguous(), dense(weight_OI, hidden), bias_O)
    if takes_bfloat16(hidden, weight_OI):
        hidden, weight_OI = hidden.to(torch.bfloat16), weight_OI.to(torch.bfloat16)
        bias_O = None if bias_O is None else bias_O.to(torch.bfloat16)
        return OneDnnLinear.apply(hidden.contiguous(), weight_OI, bias_O)
    return F.linear(hidden, weight_OI, bias_O)


def weight_gradient(grad_TO: Tensor, hidden_TI: Tensor) -> Tensor:
    """`grad_TO.T @ hidden_TI`, the gradient of a weight [O, I]."""
    is_wide = grad_TO.shape[1] > hidden_TI.shape[1]
    if not takes_onednn(hidden_TI, grad_TO.T):
        is_narrow = hidden_TI.shape[1] < NARROW_WIDTH and grad_TO.shape[1] < MAX_TRANSPOSED
        if is_wide and is_narrow and takes_bfloat16(hidden_TI, grad_TO.T):
            return (hidden_TI.T @ grad_TO).T.contiguous()
        return grad_TO.T @ hidden_TI
    narrow, wide = (hidden_TI, grad_TO) if is_wide else (grad_TO, hidden_TI)
    if narrow.shape[1] < NARROW_WIDTH and wide.numel() >= LARGE_OPERAND:
        total = product(narrow.T.contiguous(), wide.contiguous().T)
        # A transposed view would be added to other gradients element by element.
        return total.T.contiguous() if is_wide else total
    blocks = zip(grad_TO.split(BLOCK_ROWS), hidden_TI.split(BLOCK_ROWS), strict=True)
    parts = (product(grad.contiguous().T, hidden.contiguous().T) for grad, hidden in blocks)
    total = next(parts)
    for part in parts:
        total += part
    return total


def dense(matrix: Tensor, rows: Tensor) -> Tensor:
    """`matrix` as `product` with `rows` reads it fast: a copy if neither it nor its transpose is
    contiguous, or if it is a large transposed view.
    """
    num_rows = rows.numel() // rows.shape[-1]
    is_slow_view = matrix.numel() >= LARGE_OPERAND and num_rows >= MIN_ROWS_OF_COPY
    if matrix.T.is_contiguous() and not is_slow_view:
        return matrix
    return matrix.contiguous()


def product(rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """`rows` @ `matrix`.T by oneDNN, without a gradient. Both are contiguous, or transposed views
    of what is: oneDNN has no fast code for others, such as some columns of a tensor.
    """
    return torch.ops.mkldnn._linear_pointwise(rows, matrix, bias, "none", [], "")


class OneDnnLinear(torch.autograd.Function):
    """`F.linear` by oneDNN."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight_OI)
        return product(hidden, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight_OI = ctx.saved_tensors
        grad_TO, hidden_TI = grad.flatten(0, -2), hidden.flatten(0, -2)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad
        if torch.is_grad_enabled():  # of gradients that are to be differentiated themselves
            return grad @ weight_OI, grad_TO.T @ hidden_TI, grad_TO.sum(0) if needs_bias else None
        return (
            linear(grad, weight_OI.T) if needs_hidden else None,
            weight_gradient(grad_TO, hidden_TI) if needs_weight else None,
            grad_TO.sum(0) if needs_bias else None,
        )


class PackedLinear(nn.Module):
    """`linear` for inference on a CPU, in bfloat16, or in float32 where oneDNN computes it: oneDNN
    packs the weight once instead of in every call.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        # 128 is the expected number of rows; any number works.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 128)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.dtype = linear.weight.dtype

    def forward(self, hidden_TI: Tensor) -> Tensor:
        return product(hidden_TI.to(self.dtype), self.weight, self.bias)

    @staticmethod
    def supports(weight: Tensor) -> bool:
        """Whether this machine has the operators, which torch.compile uses; torch 2.11's round
        differently.
        """
        if torch.__version__ < "2.13" or not weight.is_cpu:  # compares versions
            return False
        if weight.dtype == torch.float32:
            return uses_onednn()
        return (
            weight.dtype == torch.bfloat16
            and torch.backends.mkldnn.is_available()
            and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )
