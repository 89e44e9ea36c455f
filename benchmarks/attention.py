#!/usr/bin/env python3
"""Attention within the sequences of a stream, with dropout and without: the ways that torch has, checked, then timed
side by side in one run. It decides what modeling.attention should call.

    python3 benchmarks/attention.py --device cuda --seq-length 512
    python3 benchmarks/attention.py --device cpu --seq-length 128 --tokens 2048 --heads 4

`flash`, `padded` and `by_length` are modeling.attention's own implementations. `cudnn` is torch's operator over cuDNN
with cumulative lengths, here as an operator that torch.compile can take in whole; `jagged` is nested tensors through
scaled_dot_product_attention; `varlen_attn` is torch.nn.attention's, which has no dropout. All of them take queries,
keys and values as one product gives them, [T, 3, H, D], and give their gradient in the same layout.

Each is first held against a loop over the sequences in float64, forward and gradient, by ||difference|| over
||reference||. With dropout, values that are unit vectors show which probabilities a call drops: their share must be
what was asked for, and the same seed must give an output and a gradient that both have exactly this mask. A contender
that cannot run, or computes something else, is named with the reason and not timed; each has a process of its own, so
that one which breaks the device does not take the others with it. Exit code 1 where one computes something else.

FLOPs are those of the products: 4 * s^2 * H * D a sequence of s tokens forward, 2.5 times as many backward, where
the scores are computed once more. The floor counts what must be read and written once: queries, keys, values and the
output forward; these, and four gradients, backward. `host` is what the calls of forward and backward take on the host:
where it is the same as their time, the device waits for the host.
"""

import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import modeling
from benchmarks.peers import median_and_spread, surroundings, write_result
from benchmarks.pretraining_step import PREDICTIONS, make_shards
from benchmarks.sides import Side
from pretraining_dataset import PretrainingDataset
from utils import command_line
from utils.distributed import select_device, use_threads
from utils.errors import UserError, one_line, run_main
from utils.measure import Stopwatch
from utils.progress import print_line, progress_bar

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
INPUT_SETS = 3
CALLS = 8  # of a turn, one after the other, so that the host can run ahead
VOCAB_SIZE = 30522  # of the sample corpus' shards

Attend = Callable[[Tensor, float], Tensor]  # queries, keys and values [T, 3, H, D], dropout probability: [T, H, D]


def parse_arguments(argv=None) -> command_line.Arguments:
    parser = command_line.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", choices=("real", "full"), default="real", help="of shards' samples, or all full")
    parser.add_argument("--seq-length", type=int, choices=sorted(PREDICTIONS), default=512, help="the longest")
    parser.add_argument("--input-dir", type=Path, help="folder of shards; by default made from the sample corpus")
    parser.add_argument("--tokens", type=command_line.positive_int, default=32768, help="of a stream, at most")
    parser.add_argument("--heads", type=command_line.positive_int, default=16, help="attention heads")
    parser.add_argument("--head-size", type=command_line.positive_int, default=64, help="of queries, keys and values")
    parser.add_argument(
        "--dropout", type=command_line.decay_factor, default=0.1, help="probability, beside none at all"
    )
    parser.add_argument("--amp", action=command_line.BooleanFlag, default=True, help="bfloat16, float32 without")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where")
    parser.add_argument("--rounds", type=command_line.positive_int, default=15, help="turns that each contender gets")
    parser.add_argument("--output", type=Path, help="result file; by default in benchmarks/results")
    args = parser.parse_args(argv)
    if args.tokens < args.seq_length:
        raise UserError(f"--tokens {args.tokens} does not hold a sequence of --seq-length {args.seq_length}")
    return args


# --- the contenders ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Where the sequences of a stream lie."""

    lengths: list[int]
    max_seqlen: int  # as training gives it: what no sequence of the shards exceeds
    cu_seqlens: Tensor  # int32 [N+1], on the device


def through_modeling(implementation: str, layout: Layout) -> Attend:
    sequences = modeling.Sequences(layout.cu_seqlens, layout.max_seqlen, sum(layout.lengths), implementation)
    return lambda qkv_T3HD, dropout_prob: modeling.attention(qkv_T3HD, sequences, dropout_prob)


def through_varlen_attn(layout: Layout) -> Attend:
    from torch.nn.attention.varlen import varlen_attn  # here, since older releases of torch do not have it

    def attend(qkv_T3HD: Tensor, dropout_prob: float) -> Tensor:
        if dropout_prob:
            raise ValueError("it has no dropout")
        lengths = (layout.cu_seqlens, layout.cu_seqlens, layout.max_seqlen, layout.max_seqlen)
        return varlen_attn(*qkv_T3HD.unbind(1), *lengths)

    return attend


def through_jagged(layout: Layout) -> Attend:
    # Without these two, torch would read the lengths from the device, and the host would wait for it.
    bounds = {"min_seqlen": min(layout.lengths), "max_seqlen": layout.max_seqlen}

    def attend(qkv_T3HD: Tensor, dropout_prob: float) -> Tensor:
        nested = [torch.nested.nested_tensor_from_jagged(x, layout.cu_seqlens, **bounds) for x in qkv_T3HD.unbind(1)]
        query, key, value = (x.transpose(1, 2) for x in nested)
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_prob).transpose(1, 2).values()

    return attend


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

    torch 2.11 hands cuDNN the head size for the longest length, so there it is right for sequences up to that only."""
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


def keep_for_backward(ctx, inputs: tuple, output: tuple) -> None:
    qkv_T3HD, cu_seqlens, ctx.max_seqlen, ctx.dropout_prob = inputs
    ctx.save_for_backward(qkv_T3HD, *output, cu_seqlens)


def backward(ctx, grad_THD: Tensor, *_) -> tuple:
    gradient = cudnn_attention_backward(grad_THD, *ctx.saved_tensors, ctx.max_seqlen, ctx.dropout_prob)
    return gradient, None, None, None


cudnn_attention.register_autograd(backward, setup_context=keep_for_backward)


def through_cudnn(layout: Layout) -> Attend:
    return lambda qkv_T3HD, prob: cudnn_attention(qkv_T3HD, layout.cu_seqlens, layout.max_seqlen, prob)[0]


CONTENDERS: dict[str, dict[str, Callable[[Layout], Attend]]] = {
    "cuda": {
        "flash": partial(through_modeling, "flash"),
        "cudnn": through_cudnn,
        "jagged": through_jagged,
        "varlen_attn": through_varlen_attn,
        "padded": partial(through_modeling, "padded"),
    },
    "cpu": {
        "by_length": partial(through_modeling, "by_length"),
        "padded": partial(through_modeling, "padded"),
        "jagged": through_jagged,
    },
}


# --- what they must compute -------------------------------------------------------------------------------------------


def reference(
    qkv_T3HD: Tensor, grad_THD: Tensor, lengths: list[int], kept: list[Tensor] | None, dropout_prob: float
) -> tuple[Tensor, Tensor]:
    """The output and the gradient of `qkv_T3HD` in float64, sequence by sequence. `kept` [H, L, L] are the
    probabilities that dropout keeps."""
    qkv_T3HD = qkv_T3HD.detach().double().requires_grad_()
    outputs = []
    for number, qkv_L3HD in enumerate(qkv_T3HD.split(lengths)):
        query, key, value = qkv_L3HD.permute(1, 2, 0, 3)
        probs_HLL = (query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])).softmax(dim=-1)
        if kept is not None:
            probs_HLL = probs_HLL * kept[number] / (1 - dropout_prob)
        outputs.append((probs_HLL @ value).transpose(0, 1))
    out_THD = torch.cat(outputs)
    (gradient,) = torch.autograd.grad(out_THD, qkv_T3HD, grad_THD.double())
    return out_THD.detach(), gradient


def kept_by_dropout(attend: Attend, qkv_T3HD: Tensor, layout: Layout, dropout_prob: float, seed: int) -> list[Tensor]:
    """The probabilities [H, L, L] of each sequence that `attend` keeps with this seed. Where the values of D keys are
    the D unit vectors and all others zero, the output is these keys' probabilities, with zeros for the dropped."""
    size = qkv_T3HD.shape[-1]
    place_T = torch.cat([torch.arange(length, device=qkv_T3HD.device) for length in layout.lengths])
    columns = []
    for start in range(0, max(layout.lengths), size):
        probe_T3HD = qkv_T3HD.detach().clone()
        unit_vectors_TD = (place_T[:, None] - start) == torch.arange(size, device=place_T.device)
        probe_T3HD[:, 2] = unit_vectors_TD[:, None]
        torch.manual_seed(seed)
        columns.append(attend(probe_T3HD.requires_grad_(), dropout_prob).detach() != 0)
    sequences = torch.cat(columns, dim=-1).split(layout.lengths)
    return [kept_LHS[..., :length].transpose(0, 1) for kept_LHS, length in zip(sequences, layout.lengths, strict=True)]


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def check(attend: Attend, qkv_T3HD: Tensor, grad_THD: Tensor, layout: Layout, dropout_prob: float) -> dict:
    """The errors of output and gradient and, with dropout, the share of probabilities dropped. `wrong` says what is
    not as it should be; None where all is."""
    seed, kept, figures, wrong = 1, None, {}, []
    if dropout_prob:
        kept = kept_by_dropout(attend, qkv_T3HD, layout, dropout_prob, seed)
        count = sum(kept_HLL.numel() for kept_HLL in kept)
        figures["dropped"] = 1 - sum(int(kept_HLL.sum()) for kept_HLL in kept) / count
        # Some kernels decide by 8 random bits; the rest is chance, at five standard deviations.
        limit = 2**-7 + 5 * math.sqrt(dropout_prob * (1 - dropout_prob) / count)
        if abs(figures["dropped"] - dropout_prob) > limit:
            wrong.append(f"it drops {figures['dropped']:.4f} of the probabilities")
    torch.manual_seed(seed)
    out_THD = attend(qkv_T3HD, dropout_prob)
    (gradient,) = torch.autograd.grad(out_THD, qkv_T3HD, grad_THD)
    if dropout_prob and torch.equal(out_THD, attend(qkv_T3HD, dropout_prob)):
        wrong.append("two calls drop the same probabilities")
    expected = reference(qkv_T3HD, grad_THD, layout.lengths, kept, dropout_prob)
    # by_length has probabilities in multiples of 2^-16, and scales accordingly.
    figures["limit"] = TOLERANCES[qkv_T3HD.dtype] + (2**-16 if dropout_prob else 0)
    for what, found, right in zip(("output", "gradient"), (out_THD.detach(), gradient), expected, strict=True):
        figures[what] = relative_error(found, right)
        if not figures[what] < figures["limit"]:  # NaN is wrong too
            wrong.append(f"its {what} is off by {figures[what]:.1e}")
    return figures | {"wrong": "; ".join(wrong) or None}


# --- measuring --------------------------------------------------------------------------------------------------------


class Contender:
    """One way to attend in its process, with the streams that all have."""

    def __init__(self, name: str, args: command_line.Arguments, checked: list[int], measured: list[list[int]]):
        self.args, self.device = args, select_device(args.device)
        self.stopwatch = Stopwatch(self.device)
        self.prepare = CONTENDERS[self.device.type][name]
        self.checked, self.measured = checked, measured
        self.inputs: list[tuple[Attend, Tensor, Tensor]] = []

    def make_input(self, lengths: list[int]) -> tuple[Layout, Tensor, Tensor]:
        """Where the sequences lie, and random queries, keys and values, and gradient of the output."""
        cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=self.device)
        like = {"dtype": torch.bfloat16 if self.args.amp else torch.float32, "device": self.device}
        shape = self.args.heads, self.args.head_size
        qkv_T3HD = torch.randn(sum(lengths), 3, *shape, **like).requires_grad_()
        return Layout(lengths, self.args.seq_length, cu_seqlens), qkv_T3HD, torch.randn(sum(lengths), *shape, **like)

    def check(self, dropout_prob: float) -> dict:
        """`check`'s figures, or why there are none."""
        torch.manual_seed(0)
        try:
            layout, qkv_T3HD, grad_THD = self.make_input(self.checked)
            return check(self.prepare(layout), qkv_T3HD, grad_THD, layout, dropout_prob)
        except Exception as error:  # whatever it is that this torch cannot do here
            reason = (str(error).splitlines() or [""])[0]
            return {"cannot_run": one_line(f"{type(error).__name__}: {reason}")}

    def turn(self, number: int, dropout_prob: float) -> dict[str, float]:
        """Milliseconds a call."""
        if not self.inputs:
            for layout, qkv_T3HD, grad_THD in map(self.make_input, self.measured):
                self.inputs.append((self.prepare(layout), qkv_T3HD, grad_THD))
        attend, qkv_T3HD, grad_THD = self.inputs[number % INPUT_SETS]
        with self.stopwatch.lap("forward"):
            for _ in range(CALLS):
                attend(qkv_T3HD, dropout_prob)
        started = time.perf_counter()
        with self.stopwatch.lap("both"):
            for _ in range(CALLS):
                torch.autograd.grad(attend(qkv_T3HD, dropout_prob), qkv_T3HD, grad_THD)
        seconds = {"host": time.perf_counter() - started}
        seconds |= {kind: lap for kind, (lap,) in self.stopwatch.seconds().items()}
        return {kind: 1e3 * lap / CALLS for kind, lap in seconds.items()}


def sample_lengths(args: command_line.Arguments) -> np.ndarray:
    """The lengths of all samples that streams are drawn from."""
    if args.lengths == "full":
        return np.array([args.seq_length])
    with tempfile.TemporaryDirectory() as scratch:
        dataset = PretrainingDataset(args.input_dir or make_shards(Path(scratch), args.seq_length), VOCAB_SIZE)
        if dataset.sequence_length != args.seq_length:
            raise UserError(f"{args.input_dir} has samples of another --seq-length: {dataset.sequence_length}")
        return dataset.sizes(np.arange(len(dataset)))[:, 0]


def draw_stream(lengths: np.ndarray, tokens: int, seed: int) -> list[int]:
    """The lengths of a stream's sequences, the longest first, as token_stream.pack has them."""
    drawn = np.random.default_rng(seed).choice(lengths, tokens // int(lengths.min()))
    return sorted(drawn[np.cumsum(drawn) <= tokens].tolist(), reverse=True)


def call_or_say_why_not(side: Side, dropout_prob: float) -> dict:
    try:
        return side.call("check", dropout_prob)
    except UserError as error:  # its process has ended
        return {"cannot_run": str(error)}


def measure(
    args: command_line.Arguments, sides: dict[str, Side], streams: list[list[int]], dropout_prob: float
) -> dict:
    """Checks all sides, and times those that pass."""
    results = {name: call_or_say_why_not(side, dropout_prob) for name, side in sides.items()}
    able = [name for name, found in results.items() if not (found.get("cannot_run") or found.get("wrong"))]
    turns: dict[str, list[dict]] = {name: [] for name in able}
    with progress_bar((INPUT_SETS + args.rounds) * len(able), f"dropout {dropout_prob:g}", "turn") as bar:
        for number in range(-INPUT_SETS, args.rounds):
            for name in able:
                turn = sides[name].call("turn", number, dropout_prob)
                if number >= 0:  # before that, each stream's shapes are new
                    turns[name].append(turn)
                bar.update()
    works = [work(args, streams[number % INPUT_SETS]) for number in range(args.rounds)]
    for name, found in turns.items():
        results[name]["milliseconds"] = {
            kind: median_and_spread([turn[kind] for turn in found]) for kind in ("forward", "both", "host")
        }
        for rate in ("tflops", "floor_gigabytes_per_second"):
            results[name][rate] = {
                kind: median_and_spread([1e3 * w[rate][kind] / t[kind] for w, t in zip(works, found, strict=True)])
                for kind in ("forward", "both")
            }
    return results


def work(args: command_line.Arguments, lengths: list[int]) -> dict[str, dict[str, float]]:
    """TFLOPs and gigabytes of a call; see the top of this file."""
    hidden = args.heads * args.head_size
    tflops = 4 * hidden * sum(length**2 for length in lengths) / 1e12
    gigabytes = hidden * sum(lengths) * (2 if args.amp else 4) / 1e9
    return {
        "tflops": {"forward": tflops, "both": 3.5 * tflops},
        "floor_gigabytes_per_second": {"forward": 4 * gigabytes, "both": 12 * gigabytes},
    }


def show_results(dropout_prob: float, results: dict[str, dict]) -> None:
    print_line(f"dropout {dropout_prob:g}")
    for name, found in results.items():
        if reason := found.get("cannot_run"):
            print_line(f"  --   {name:12} cannot run: {reason}")
            continue
        errors = f"output {found['output']:.1e}, gradient {found['gradient']:.1e} (limit {found['limit']:.0e})"
        dropped = f", {found['dropped']:.4f} dropped" if "dropped" in found else ""
        print_line(f"  {'FAIL' if found['wrong'] else 'ok  '} {name:12} {errors}{dropped}")
    timed = {name: found for name, found in results.items() if "milliseconds" in found}
    if timed:
        print_line(
            f"  {'milliseconds':12}{'forward (quartiles)':>28}{'with backward':>28}{'host':>9}"
            f"{'TFLOP/s':>18}{'GB/s of the floor':>18}"
        )
    for name, found in sorted(timed.items(), key=lambda item: item[1]["milliseconds"]["both"]["median"]):
        times = [
            f"{spread['median']:.3f} ({spread['low']:.3f}-{spread['high']:.3f})"
            for spread in (found["milliseconds"][kind] for kind in ("forward", "both"))
        ]
        flops, bandwidth = (
            " ".join(f"{found[rate][kind]['median']:{form}}" for kind in ("forward", "both"))
            for rate, form in (("tflops", "7.3g"), ("floor_gigabytes_per_second", "7.0f"))
        )
        host = found["milliseconds"]["host"]["median"]
        print_line(f"  {name:12}{times[0]:>28}{times[1]:>28}{host:9.3f}{flops:>18}{bandwidth:>18}")


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    device = select_device(args.device)
    use_threads()
    lengths = sample_lengths(args)
    checked = draw_stream(lengths, min(args.tokens, 8 * args.seq_length), seed=0)
    streams = [draw_stream(lengths, args.tokens, seed) for seed in range(1, 1 + INPUT_SETS)]
    result = {
        "surroundings": surroundings(device),
        "arguments": args.as_dict(),
        "streams": [{"sequences": len(stream), "tokens": sum(stream)} for stream in streams],
        "dropout": {},
    }
    for stream in result["streams"]:
        print_line(f"{args.lengths} lengths: {stream['sequences']} sequences of {stream['tokens']:,} tokens in all")
    sides = {name: Side(Contender, (name, args, checked, streams), is_tuned=True) for name in CONTENDERS[device.type]}
    for dropout_prob in sorted({0.0, args.dropout}):
        result["dropout"][f"{dropout_prob:g}"] = measure(args, sides, streams, dropout_prob)
        show_results(dropout_prob, result["dropout"][f"{dropout_prob:g}"])
    for side in sides.values():
        side.close()
    precision = "bf16" if args.amp else "fp32"
    where = "gpu" if device.type == "cuda" else "cpu"
    path = write_result(args.output, f"attention-{where}-{args.lengths}-{args.seq_length}-{precision}", result)
    print_line(f"written to {path}")
    found = [contender for part in result["dropout"].values() for contender in part.values()]
    return 1 if any(contender.get("wrong") for contender in found) else 0


if __name__ == "__main__":
    run_main(main)
