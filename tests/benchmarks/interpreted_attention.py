"""Checks the attention kernel and its operators in Triton's interpreter, which has to be chosen
before Triton is imported, so in a process of its own. Prints the results as JSON.
"""

import json
import os
import sys
from itertools import accumulate
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import triton.language as tl
from torch import nn
from torch._dynamo.utils import counters
from torch.library import opcheck
from triton.runtime import interpreter

from benchmarks.common.attention_check import check
from bert_recipe.experiments import triton_kernels
from bert_recipe.experiments.triton_kernels import LaunchConfig
from bert_recipe.model.attention import StreamLayout, prepare_attention
from bert_recipe.parallel.activation_checkpointing import checkpoint_activations
from bert_recipe.parallel.attention_choice import load_attention

HEADS, SIZE, FILLER = 2, 16, 20
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
# Lengths, type, dropout, and options of the layout; blocks of 32 tokens, 16 at a time.
CASES = {
    "one block": ([5, 16, 0, 1], FLOAT32, 0.1, {}),
    "several blocks": ([40, 1], FLOAT32, 0.1, {}),
    "bfloat16": ([17], BFLOAT16, 0.0, {}),
    "window": ([40], FLOAT32, 0.0, {"window": 5}),
    "long window": ([40], FLOAT32, 0.0, {"window": 20}),
}


def widened(values: interpreter.TensorHandle) -> interpreter.TensorHandle:
    """The interpreter has bfloat16 as 16-bit integers, and its matrix product multiplies these."""
    if values.dtype.scalar != tl.bfloat16:
        return values
    bits = values.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def check_case(lengths: list[int], dtype: torch.dtype, dropout_prob: float, options: dict) -> dict:
    torch.manual_seed(0)
    tokens = sum(lengths)
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    layout = StreamLayout(cu_seqlens, max(lengths), tokens + FILLER, **options)
    load_attention("triton")
    attention = prepare_attention("triton", layout)
    filler = torch.full((FILLER, 3, HEADS, SIZE), torch.nan, dtype=dtype)
    of_filler = []

    def attend(qkv_T3HD, dropout_prob):
        states = torch.cat([qkv_T3HD, filler])
        states.register_hook(lambda grad: of_filler.append(grad[tokens:]))
        out = attention(states, dropout_prob)
        of_filler.append(out[tokens:])
        return out[:tokens]

    qkv = torch.randn(tokens, 3, HEADS, SIZE).to(dtype).requires_grad_()
    grad = torch.randn(tokens, HEADS, SIZE).to(dtype)
    errors = check(attend, qkv, grad, lengths, dropout_prob, **options)
    return {**errors, "filler_is_zero": not any(values.any() for values in of_filler)}


def operator_checks(dropout_prob: float, has_filler: bool) -> dict[str, str]:
    """The results of torch's checks of both operators: schema, autograd, shapes without data, and
    tracing with dynamic sizes.
    """
    torch.manual_seed(0)
    # One head: each check runs the operators several times, and the interpreter is slow.
    qkv_T3HD = torch.randn(21 + FILLER * has_filler, 3, 1, SIZE, requires_grad=True)
    cu_seqlens = torch.tensor([0, 5, 21], dtype=torch.int32)
    seed = torch.tensor([7]) if dropout_prob else None
    inputs = (cu_seqlens, seed, 16, None, False, has_filler, round(dropout_prob * 2**16))
    forward = triton_kernels.packed_attention
    backward = triton_kernels.packed_attention_backward
    out_THD, log_sums_HT = forward(qkv_T3HD.detach(), *inputs)
    saved = (torch.randn_like(out_THD), qkv_T3HD.detach(), out_THD, log_sums_HT)
    results = opcheck(forward, (qkv_T3HD, *inputs), raise_exception=False)
    of_backward = opcheck(backward, (*saved, *inputs), raise_exception=False)
    results |= {f"backward, {name}": result for name, result in of_backward.items()}
    return {name: str(result) for name, result in results.items()}


class Layer(nn.Module):
    """Query, key, value and attention."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 3 * HEADS * SIZE)

    def forward(self, hidden_TE: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        qkv_T3HD = self.qkv(hidden_TE).view(-1, 3, HEADS, SIZE)
        return triton_kernels.attend(qkv_T3HD, cu_seqlens, 16, None, False, False, 0.1)


def layer_results(changed: str) -> list[torch.Tensor]:
    """Output and gradients of a layer with dropout, for two sizes of the stream."""
    torch.manual_seed(0)
    layer = Layer()
    results = []
    if changed == "compiled":
        layer.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    elif changed != "unchanged":
        checkpoint_activations([layer], changed)
    for lengths in ([5, 16], [3, 9, 11]):
        hidden_TE = torch.randn(sum(lengths), 16, requires_grad=True)
        cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        out_THD = layer(hidden_TE, cu_seqlens)
        parameters = (hidden_TE, *layer.parameters())
        results += [out_THD.detach(), *torch.autograd.grad(out_THD.square().sum(), parameters)]
    return results


def changed_results() -> dict[str, int]:
    """Whether a compiled and a checkpointed layer compute the same bits, and how many graphs."""
    expected = layer_results("unchanged")
    seen = {}
    counters.clear()
    for changed in ("compiled", "full", "selective"):
        results = layer_results(changed)
        seen[changed] = all(torch.equal(a, b) for a, b in zip(expected, results, strict=True))
    return seen | {"graphs": counters["stats"]["unique_graphs"]}


def main() -> None:
    dot = interpreter.InterpreterBuilder.create_dot
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(
        self, widened(a), widened(b), *rest
    )
    triton_kernels.LaunchConfig.of = lambda *_: LaunchConfig(block=32, step=16, num_warps=4)
    outcomes = {
        "cases": {name: check_case(*case) for name, case in CASES.items()},
        "operators": [operator_checks(0.0, False), operator_checks(0.1, True)],
        "changed": changed_results(),
    }
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
