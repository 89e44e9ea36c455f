#!/usr/bin/env python3
"""One update of all of BERT's parameters: this project's LAMB beside torch's fused AdamW, interleaved in one run.

    python3 benchmarks/optimizer_step.py --model base
    python3 benchmarks/optimizer_step.py --model large --device cuda

Four sides: `AdamW` is torch.optim.AdamW(fused=True), `Lamb` is what training takes on the device, `Lamb, other form` is
the form that the other kind of device takes, and `Lamb, compiled` is the update of a tensor through torch.compile (on a
CPU it needs a C++ compiler; left out with --no-compile). Before it measures, the forms of LAMB are held against each
other. The floor counts the numbers that must be read and written where nothing stays in a cache: AdamW reads weights,
gradients and two moments and writes all but the gradients, 7 numbers of 4 bytes a parameter. LAMB knows the length of
its step only when it has seen all of a tensor, so it must keep the update and come back with it: 10.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.peers import MODELS, median_and_spread, surroundings, write_result
from modeling import BertConfig, BertForPreTraining
from optimizer import Lamb, apply_step, parameter_groups
from utils import command_line
from utils.distributed import select_device, use_threads
from utils.errors import UserError, run_main
from utils.measure import synchronize
from utils.progress import print_line, progress_bar

FLOOR_BYTES = {"AdamW": 28, "Lamb": 40}  # a parameter
TOLERANCE = 1e-4  # of the forms' updates, ||difference|| over ||update||


def parse_arguments(argv=None) -> command_line.Arguments:
    parser = command_line.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="base", help="whose parameters")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where")
    parser.add_argument(
        "--compile", action=command_line.BooleanFlag, default=True, help="with the compiled form of LAMB"
    )
    parser.add_argument("--rounds", type=command_line.positive_int, default=15, help="updates that each side makes")
    parser.add_argument("--output", type=Path, help="result file; by default in benchmarks/results")
    return parser.parse_args(argv)


class CompiledLamb(Lamb):
    """LAMB with the update of a tensor compiled into as few kernels as the compiler finds. The update is kept in the
    gradient's memory."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options, foreach=True)
        self.update_tensor = torch.compile(lamb_of_one_tensor, dynamic=True, fullgraph=True)

    def _adapt_together(self, params: list[Tensor], group: dict, grad_scale: Tensor, found_inf: Tensor) -> None:
        for p in params:
            state = self.state[p]
            state["step"] += 1 - found_inf
            tensors = (tensor.view(-1) for tensor in (p.detach(), p.grad, state["exp_avg"], state["exp_avg_sq"]))
            hyperparameters = (*group["betas"], group["eps"], group["weight_decay"])
            self.update_tensor(*tensors, state["step"], group["lr"], grad_scale, found_inf, *hyperparameters)


def lamb_of_one_tensor(
    weights, grads, exp_avg, exp_avg_sq, step, lr, grad_scale, found_inf, beta1, beta2, eps, weight_decay
) -> None:
    """Lamb's update in place; `step` and the three after it are tensors of one element."""
    goes = found_inf == 0
    unscaled = grads / grad_scale
    exp_avg.copy_(torch.where(goes, exp_avg.lerp(unscaled, 1 - beta1), exp_avg))
    exp_avg_sq.copy_(torch.where(goes, exp_avg_sq.lerp(unscaled * unscaled, 1 - beta2), exp_avg_sq))
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    grads.copy_(exp_avg / correction1 / ((exp_avg_sq / correction2).sqrt() + eps) + weight_decay * weights)
    weight_square, update_square = (weights * weights).sum(), (grads * grads).sum()
    ratio = torch.where((weight_square > 0) & (update_square > 0), (weight_square / update_square).sqrt(), 1.0)
    weights.copy_(torch.where(goes, weights - lr * ratio * grads, weights))


def random_parameters(model: str, device: torch.device) -> dict[str, nn.Parameter]:
    """Parameters of BERT's names and shapes, with gradients."""
    with torch.device("meta"):
        shapes = BertForPreTraining(BertConfig.from_json_file(ROOT / "bert_configs" / f"{MODELS[model]}.json"))
    torch.manual_seed(0)
    parameters = {}
    for name, p in shapes.named_parameters():
        parameters[name] = nn.Parameter(torch.empty(p.shape, device=device).uniform_(-0.04, 0.04))
        parameters[name].grad = torch.empty(p.shape, device=device).uniform_(-1e-3, 1e-3)
    return parameters


def lamb_forms(device: torch.device, compiled: bool) -> dict[str, Callable[..., Lamb]]:
    forms = {"Lamb": Lamb, "Lamb, other form": partial(Lamb, foreach=device.type == "cpu")}
    return {**forms, "Lamb, compiled": CompiledLamb} if compiled else forms


def make_sides(
    parameters: dict[str, nn.Parameter], forms: dict[str, Callable[..., Lamb]], device: torch.device
) -> dict[str, Callable[[], None]]:
    """Functions that make one update of `parameters`, with AdamW and with each form of LAMB. Their moments are the same
    memory too, so that all sides fit where one does."""
    lr, one, zero = (torch.tensor(value, device=device) for value in (1e-4, 1.0, 0.0))
    groups = parameter_groups(parameters.items(), 0.01)
    adamw = torch.optim.AdamW(groups, lr, eps=1e-6, weight_decay=0.01, fused=True)
    lambs = {name: form(groups, lr, eps=1e-6, weight_decay=0.01, max_grad_norm=None) for name, form in forms.items()}
    moments = {p: {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)} for p in parameters.values()}
    for optimizer in (adamw, *lambs.values()):
        for p in parameters.values():
            optimizer.state[p] = {"step": torch.zeros((), device=device), **moments[p]}
    # LAMB as training does it: gradients divided by a scale, and no step where they are not finite.
    return {"AdamW": adamw.step, **{name: partial(apply_step, lamb, one, zero) for name, lamb in lambs.items()}}


def check_forms(model: str, device: torch.device, compiled: bool) -> list[dict]:
    """The updates that the other forms of LAMB make, by ||difference|| over ||update||, beside the one that training
    takes; two steps, from the same weights and gradients."""
    updates = {}
    for name, form in lamb_forms(device, compiled).items():
        parameters = random_parameters(model, device)
        before = [p.detach().clone() for p in parameters.values()]
        gradients = [p.grad for p in parameters.values()]
        step = make_sides(parameters, {name: form}, device)[name]
        for factor in (1.0, -3.0):
            for p, gradient in zip(parameters.values(), gradients, strict=True):
                p.grad = gradient * factor
            step()
        updates[name] = [p.detach() - old for p, old in zip(parameters.values(), before, strict=True)]
    reference = updates.pop("Lamb")
    whole = torch.stack([update.norm() for update in reference]).norm()
    results = []
    for name, found in updates.items():
        difference = torch.stack([(f - r).norm() for f, r in zip(found, reference, strict=True)]).norm()
        error = float(difference / whole)
        results.append({"check": name, "update": error, "limit": TOLERANCE, "passed": error < TOLERANCE})
    return results


def measure(args: command_line.Arguments, device: torch.device) -> dict:
    parameters = random_parameters(args.model, device)
    count = sum(p.numel() for p in parameters.values())
    sides = make_sides(parameters, lamb_forms(device, args.compile), device)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    with progress_bar((args.rounds + 1) * len(sides), "updates", "update") as bar:
        for round_ in range(args.rounds + 1):  # the first is a warm-up
            for name, step in sides.items():
                synchronize(device)
                started = time.perf_counter()
                step()
                synchronize(device)
                if round_:
                    seconds[name].append(time.perf_counter() - started)
                bar.update()
    result = {"parameters": count, "floor_bytes_a_parameter": FLOOR_BYTES, "sides": {}}
    for name, values in seconds.items():
        spread = median_and_spread(values)
        floor = FLOOR_BYTES[name.partition(",")[0]] * count
        result["sides"][name] = {
            "milliseconds": {key: 1e3 * value for key, value in spread.items()},
            "floor_gigabytes_per_second": floor / spread["median"] / 1e9,
            "ratio_to_adamw": median_and_spread([a / b for a, b in zip(values, seconds["AdamW"], strict=True)]),
        }
    return result


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    device = select_device(args.device)
    use_threads()
    checks = check_forms("tiny", device, args.compile)
    if wrong := [check["check"] for check in checks if not check["passed"]]:
        raise UserError(f"{', '.join(wrong)}: another update than LAMB's, so there is nothing to measure: {checks}")
    result = {"surroundings": surroundings(device), "arguments": args.as_dict(), "checks": checks}
    result |= measure(args, device)
    where = "gpu" if device.type == "cuda" else "cpu"
    path = write_result(args.output, f"optimizer_step-{where}-{args.model}", result)
    title = f"{result['parameters'] / 1e6:.0f} M parameters"
    print_line(f"{title:18}{'milliseconds (quartiles)':>24}{'GB/s of the floor':>21}{'times AdamW (quartiles)':>24}")
    for name, side in result["sides"].items():
        spread, ratio = side["milliseconds"], side["ratio_to_adamw"]
        milliseconds = f"{spread['median']:.1f} ({spread['low']:.1f}-{spread['high']:.1f})"
        ratios = f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"
        print_line(f"{name:18}{milliseconds:>24}{side['floor_gigabytes_per_second']:21.1f}{ratios:>24}")
    print_line(f"written to {path}")
    return 0


if __name__ == "__main__":
    run_main(main)
