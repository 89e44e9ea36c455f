"""Checks the attention kernel in Triton's interpreter, which has to be chosen before Triton is
imported, so in a process of its own. Prints the results as JSON.
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
from triton.runtime import interpreter

from attention import StreamLayout, prepare_attention
from benchmarks.common.attention_check import check
from kernels import triton_attention
from kernels.triton_attention import LaunchConfig

HEADS, SIZE, FILLER = 2, 16, 20
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
# Lengths, type, dropout, and options of the layout; blocks of 32 tokens, 16 at a time.
CASES = {
    "one block": ([5, 16, 0, 1], FLOAT32, 0.1, {}),
    "several blocks": ([40, 1], FLOAT32, 0.1, {}),
    "bfloat16": ([17], BFLOAT16, 0.0, {}),
    "window": ([40], FLOAT32, 0.0, {"window": 5}),
    "causal window": ([40], FLOAT32, 0.0, {"is_causal": True, "window": 20}),
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
    found = check(attend, qkv, grad, lengths, dropout_prob, **options)
    return {**found, "filler_is_zero": not any(values.any() for values in of_filler)}


def main() -> None:
    dot = interpreter.InterpreterBuilder.create_dot
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(
        self, widened(a), widened(b), *rest
    )
    triton_attention.LaunchConfig.of = lambda *_: LaunchConfig(block=32, step=16, num_warps=4)
    print(json.dumps({name: check_case(*case) for name, case in CASES.items()}))


if __name__ == "__main__":
    main()
