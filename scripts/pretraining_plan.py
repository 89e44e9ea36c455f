#!/usr/bin/env python3
"""Plans the pre-training of a first model: its size by the machine, the time and the texts, and its
updates by the speed that was measured. scripts/pretrain_from_texts.sh calls it.

    python3 scripts/pretraining_plan.py OUT_DIR --texts PATH --minutes 60 --gpus 0 --precision amp
    python3 scripts/pretraining_plan.py OUT_DIR --speed-report FILE --samples FOLDER

The first command chooses the model and the batch, the second the updates. Both write
OUT_DIR/plan.json, and print its values as words; a plan that is there is not changed, so that a run
can be resumed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bert_recipe.utils.errors import handle_uncaught_errors, run_main

if __name__ == "__main__":
    handle_uncaught_errors()  # also of the imports below

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from bert_recipe.reporting.records import read_sessions
from bert_recipe.utils.command_line import (
    REQUIRED,
    ArgumentParser,
    Flag,
    non_negative_int,
    positive_int,
)
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import read_json, write_json

COMPUTE_PER_SQUARE = 120  # FLOPs of 20 tokens per parameter, with 6 per token and parameter
# Share of the speed of plain products that training reaches: 0.22 with tiny and 0.47 with mini on a
# thread of an AMD EPYC in bfloat16 (403 GFLOP/s), 0.49 with BERT-large on an H100.
UTILIZATION = 0.4
MAX_EPOCHS = 40  # Devlin et al. (2019)
BYTES_PER_TOKEN = 5
FIRST_BATCH = 4096  # tokens
MOST_UPDATES = 10_000
MICRO_BATCH = 16_384  # tokens
FEWEST_UPDATES = 20
FLAGS = (
    Flag("out_dir", Path, REQUIRED, "folder of plan.json"),
    Flag("--texts", Path, None, "file or folder of texts"),
    Flag("--minutes", positive_int, None, "time to train"),
    Flag("--gpus", non_negative_int, None, "GPUs; 0: the CPU"),
    Flag("--precision", str, None, "as for scripts/run_pretraining.sh"),
    Flag("--speed-report", Path, None, "report of a benchmark"),
    Flag("--samples", Path, None, "folder of the training samples"),
)


class Size(NamedTuple):
    """parameters: of the layers.
    length: tokens of a sample.
    """

    config: str
    parameters: float
    learning_rate: float
    length: int
    vocabulary: int


# The rates of tiny and mini were searched (benchmarks/results/time_to_quality-*; mini's best of 250
# updates was 5.6e-3, and longer runs need less), that of base is ModernBERT's, and those between
# fall with the width.
SIZES = (
    Size("modernbert-tiny", 0.43e6, 5.6e-3, 128, 8_000),
    Size("modernbert-mini", 3.4e6, 4e-3, 128, 8_000),
    Size("modernbert-small", 11.5e6, 2.8e-3, 256, 16_000),
    Size("modernbert-medium", 27e6, 2e-3, 512, 30_000),
    Size("modernbert-base", 110e6, 8e-4, 512, 30_000),
)


def choose_size(compute: float, tokens: float) -> Size:
    """The size whose number of parameters N is next to what `compute` FLOPs train best: 20 tokens
    per parameter (Hoffmann et al., 2022, arXiv 2203.15556), 6 N FLOPs each. With at most MAX_EPOCHS
    passes over `tokens`, a larger model would see fewer than that.
    """
    best = min(math.sqrt(compute / COMPUTE_PER_SQUARE), MAX_EPOCHS * tokens / 20)
    return min(SIZES, key=lambda size: abs(math.log(size.parameters / best)))


def choose_batch(total_tokens: float, length: int) -> int:
    """Sequences per update: FIRST_BATCH tokens, doubled until `total_tokens` make at most
    MOST_UPDATES updates.
    """
    doublings = max(0, math.ceil(math.log2(total_tokens / FIRST_BATCH / MOST_UPDATES)))
    return max(1, FIRST_BATCH * 2**doublings // length)


def choose_updates(batch_tokens: int, tokens_per_second: float, minutes: int, tokens: float) -> int:
    """As many as fit into the time, and at most MAX_EPOCHS passes over the text."""
    in_time = tokens_per_second * 60 * minutes
    return max(FEWEST_UPDATES, int(min(in_time, MAX_EPOCHS * tokens) / batch_tokens))


def products_per_second(gpus: int, precision: str) -> float:
    """FLOP/s of products of matrices on this machine's GPUs, or its CPU."""
    import torch

    device = torch.device("cuda" if gpus else "cpu")
    dtype = torch.bfloat16 if precision in ("amp", "bf16") else torch.float32
    width = 4096 if gpus else 512
    a = torch.ones(width, width, device=device, dtype=dtype)
    count = 0
    start = None
    while start is None or time.perf_counter() < start + 0.5:
        (a @ a).sum().item()  # waits for the GPU
        if start is None:  # the first one sets libraries up
            start = time.perf_counter()
        else:
            count += 1
    return max(gpus, 1) * count * 2 * width**3 / (time.perf_counter() - start)


def text_bytes(path: Path) -> int:
    """Bytes of the files at `path`."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def plan_model(texts: Path, minutes: int, gpus: int, precision: str) -> dict[str, Any]:
    tokens = max(1, text_bytes(texts) / BYTES_PER_TOKEN)
    speed = UTILIZATION * products_per_second(gpus, precision)
    size = choose_size(speed * 60 * minutes, tokens)
    in_time = speed * 60 * minutes / (6 * size.parameters)
    batch = choose_batch(min(in_time, MAX_EPOCHS * tokens), size.length)
    processes = max(gpus, 1)
    batch = max(batch // processes, 1) * processes
    micro_batch = min(batch // processes, MICRO_BATCH // size.length)
    while batch // processes % micro_batch:
        micro_batch -= 1
    return {
        **size._asdict(),
        "precision": precision,
        "batch": batch,
        "micro_batch": micro_batch,
        "minutes": minutes,
    }


def measured_speed(report: Path) -> float:
    """Tokens per second in the report of a benchmark."""
    sessions, _ = read_sessions(report)
    return sessions[-1].results["tokens_per_second"]


def plan_updates(plan: dict[str, Any], report: Path, samples: Path) -> dict[str, Any]:
    counts = read_json(samples / "manifest.json", "the manifest of the samples")["counts"]
    tokens = counts["samples"] * plan["length"] * counts["%_full"] / 100
    batch_tokens = plan["batch"] * plan["length"] * counts["%_full"] / 100
    speed = measured_speed(report)
    updates = choose_updates(batch_tokens, speed, plan["minutes"], tokens)
    return plan | {
        "updates": updates,
        "tokens": round(tokens),
        "tokens_per_second": round(speed),
        "epochs": round(updates * batch_tokens / tokens, 1),
    }


def describe(plan: dict[str, Any]) -> str:
    minutes = plan["updates"] * plan["batch"] * plan["length"] / plan["tokens_per_second"] / 60
    return (
        f"plan: {plan['config']}, at most {plan['vocabulary']:,} words; {plan['updates']:,} "
        f"updates of {plan['batch']} x {plan['length']} tokens with NorMuon at "
        f"{plan['learning_rate']:g}, about {minutes:.0f} minutes at "
        f"{plan['tokens_per_second']:,} tokens/s; the text's "
        f"{plan['tokens']:,} tokens are read {plan['epochs']:g} times"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_flags("flags", FLAGS)
    args = parser.parse_args(argv)
    path = args.out_dir / "plan.json"
    plan = read_json(path, "the plan") if path.is_file() else {}
    if args.speed_report is None:
        if not plan:
            plan = plan_model(args.texts, args.minutes, args.gpus, args.precision)
            args.out_dir.mkdir(parents=True, exist_ok=True)
            write_json(path, plan)
        if plan["minutes"] != args.minutes:
            raise UserError(
                f"{args.out_dir} is planned for {plan['minutes']} minutes: give that to resume, or "
                "another folder"
            )
        names = ("config", "learning_rate", "length", "vocabulary", "precision", "batch")
        print(*(plan[name] for name in (*names, "micro_batch")), plan.get("updates", ""))
        return
    if "updates" not in plan:
        plan = plan_updates(plan, args.speed_report, args.samples)
        write_json(path, plan)
    print(describe(plan), file=sys.stderr)
    print(plan["updates"])


if __name__ == "__main__":
    run_main(main)
