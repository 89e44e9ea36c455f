#!/usr/bin/env python3
"""Plans the pre-training of a first model: its size by the machine, the time and the texts, and its
updates by the speed that was measured. scripts/pretrain_from_texts.sh calls it.

    python3 scripts/pretraining_plan.py OUT_DIR --texts PATH --minutes 60 --gpus 0 --precision amp
    python3 scripts/pretraining_plan.py OUT_DIR --speed-report FILE --samples FOLDER
    python3 scripts/pretraining_plan.py OUT_DIR --training-report FILE

The first command chooses the model and the batch, the second the updates, the third the updates
once more, by the time that the first part of the run took, or after that it says whether the run
took the minutes. They write OUT_DIR/plan.json, and print its values as words; what is planned is
not changed, so that a run can be resumed, but for more minutes.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bert_recipe.utils.errors import handle_uncaught_errors, run_main

if __name__ == "__main__":
    handle_uncaught_errors()  # also of the imports below

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from bert_recipe.data_preparation.engine.input_files import find_files
from bert_recipe.data_preparation.stages import TEXT_FORMATS
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
from bert_recipe.utils.text_files import kind_of

COMPUTE_PER_SQUARE = 120  # FLOPs of 20 tokens per parameter, with 6 per token and parameter
# Share of the speed of plain products that training reaches: 0.22 with tiny and 0.47 with mini on a
# thread of an AMD EPYC in bfloat16 (403 GFLOP/s), 0.49 with BERT-large on an H100.
UTILIZATION = 0.4
MAX_EPOCHS = 40  # Devlin et al. (2019)
BYTES_PER_TOKEN = 5
# Bytes of text in one byte: of six novels 2.7 with gzip, 3.7 with bzip2, 2.4 with Zstandard, and
# 1.6 to 2.6 in Parquet.
COMPRESSION = 2.5
FIRST_BATCH = 4096  # tokens
MOST_UPDATES = 10_000
MICRO_BATCH = 16_384  # tokens
FEWEST_UPDATES = 20
WARMUP_UPDATES = 4  # of the benchmark
FIRST_PART = 0.4  # of the updates, after which their number is corrected
DECAY = 0.3  # of the updates, as in pretrain_from_texts.sh
FLAGS = (
    Flag("out_dir", Path, REQUIRED, "folder of plan.json"),
    Flag("--texts", Path, None, "file or folder of texts"),
    Flag("--minutes", positive_int, None, "time to train"),
    Flag("--gpus", non_negative_int, None, "GPUs; 0: the CPU"),
    Flag("--precision", str, None, "as for scripts/run_pretraining.sh"),
    Flag("--speed-report", Path, None, "report of a benchmark"),
    Flag("--samples", Path, None, "folder of the training samples"),
    Flag("--training-report", Path, None, "report of the run"),
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
    seconds: list[float] = []
    start = time.perf_counter()
    while time.perf_counter() < start + 1 or len(seconds) < 5:
        before = time.perf_counter()
        (a @ a).sum().item()  # waits for the GPU
        seconds.append(time.perf_counter() - before)
    return max(gpus, 1) * 2 * width**3 / quick(seconds)


def quick(seconds: Sequence[float]) -> float:
    """The first quartile: what else runs on the machine makes some measurements slower, and none
    quicker.
    """
    return statistics.quantiles(seconds, n=4)[0]


def text_bytes(path: Path) -> float:
    """Bytes of text in the files at `path` that data/prepare.py reads: an estimate for those that
    are compressed.
    """
    total = 0.0
    for file in find_files([str(path)], TEXT_FORMATS):
        format_, compression = kind_of(file)
        is_packed = compression or format_ == ".parquet"
        total += Path(file).stat().st_size * (COMPRESSION if is_packed else 1)
    return total


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


def plan_updates(plan: dict[str, Any], report: Path, samples: Path) -> dict[str, Any]:
    """By the updates in the report of a benchmark, without the first ones."""
    counts = read_json(samples / "manifest.json", "the manifest of the samples")["counts"]
    tokens = counts["samples"] * plan["length"] * counts["%_full"] / 100
    batch_tokens = plan["batch"] * plan["length"] * counts["%_full"] / 100
    sessions, _ = read_sessions(report)
    seconds = [metrics["step_seconds"] for _, _, metrics in sessions[-1].steps[WARMUP_UPDATES:]]
    speed = batch_tokens / quick(seconds)
    updates = choose_updates(batch_tokens, speed, plan["minutes"], tokens)
    plan = plan | {
        "updates": updates,
        "first_part": math.ceil(FIRST_PART * updates),
        "tokens": round(tokens),
        "batch_tokens": batch_tokens,
        "tokens_per_second": round(speed),
        "epochs": round(updates * batch_tokens / tokens, 1),
    }
    say(
        f"{len(seconds)} updates took {min(seconds):.2g} to {max(seconds):.2g} s each; the plan "
        f"takes {quick(seconds):.2g} s, the quickest quarter's"
    )
    return plan


def correct_updates(plan: dict[str, Any], report: Path) -> dict[str, Any]:
    """As many as fit into the minutes at the speed of the run so far, but enough that its learning
    rate has not begun to fall.
    """
    corrected = plan | {"first_part": 0}
    step, seconds = trained(report)
    if not step:
        return corrected
    most = MAX_EPOCHS * plan["tokens"] / tokens_of_update(plan)
    in_time = step * 60 * plan["minutes"] / seconds
    updates = max(int(min(in_time, most)), math.ceil(step / (1 - DECAY)))
    say(f"the first {step:,} updates took {seconds / 60:.1f} of {plan['minutes']} minutes")
    return corrected | {
        "updates": updates,
        "tokens_per_second": round(step * tokens_of_update(plan) / seconds),
        "epochs": round(MAX_EPOCHS * updates / most, 1),
    }


def tokens_of_update(plan: dict[str, Any]) -> float:
    """Without padding; plans of before this was measured count it."""
    return plan.get("batch_tokens", plan["batch"] * plan["length"])


def trained(report: Path) -> tuple[int, float]:
    """The updates of the run so far and the seconds that they took; 0 if the report lacks them."""
    sessions = read_sessions(report)[0] if report.is_file() else []
    for session in reversed(sessions):
        if "e2e_train_time" in session.results:
            return session.results["step"], session.results["e2e_train_time"]
    return 0, 0.0


def describe(plan: dict[str, Any]) -> str:
    minutes = plan["updates"] * tokens_of_update(plan) / plan["tokens_per_second"] / 60
    return (
        f"plan: {plan['config']}, at most {plan['vocabulary']:,} words; {plan['updates']:,} "
        f"updates of {plan['batch']} x {plan['length']} tokens with NorMuon at "
        f"{plan['learning_rate']:g}, about {minutes:.0f} minutes at "
        f"{plan['tokens_per_second']:,} tokens/s; the text's {plan['tokens']:,} tokens are read "
        f"{plan['epochs']:g} times (at most {MAX_EPOCHS})"
    )


def describe_end(plan: dict[str, Any], report: Path) -> None:
    """Says if the run took much less or more time than the minutes, and how to go on."""
    step, seconds = trained(report)
    minutes = seconds / 60
    if not step or 0.8 < minutes / plan["minutes"] < 1.25:
        return
    advice = "the machine became slower meanwhile"
    if plan["epochs"] >= MAX_EPOCHS - 1:
        advice = f"it has read the texts {plan['epochs']:g} times; more texts would teach it more"
    elif minutes < plan["minutes"]:
        advice = f"to go on, rerun the command with more minutes, such as {2 * plan['minutes']}"
    say(f"{step:,} updates took {minutes:.1f} of {plan['minutes']} minutes: {advice}")


def say(message: str) -> None:
    print(message, file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_flags("flags", FLAGS)
    args = parser.parse_args(argv)
    path = args.out_dir / "plan.json"
    plan = read_json(path, "the plan") if path.is_file() else {}
    if args.training_report is not None and not plan.get("first_part"):
        describe_end(plan, args.training_report)
    elif args.training_report is not None:
        plan = correct_updates(plan, args.training_report)
        write_json(path, plan)
        say(describe(plan))
        print(plan["updates"])
    elif args.speed_report is not None:
        if "updates" not in plan:
            plan = plan_updates(plan, args.speed_report, args.samples)
            write_json(path, plan)
        say(describe(plan))
        print(plan["updates"], plan.get("first_part", 0))
    else:
        plan = plan or plan_model(args.texts, args.minutes, args.gpus, args.precision)
        if args.minutes < plan["minutes"]:
            raise UserError(
                f"{args.out_dir} is planned for {plan['minutes']} minutes: give that to resume, "
                "more to go on for longer, or another folder"
            )
        if args.minutes > plan["minutes"]:
            planned = math.ceil(FIRST_PART * plan.get("updates", 0))  # before there were two parts
            first_part = plan.get("first_part", planned) or 1
            plan |= {"minutes": args.minutes, "first_part": first_part}
        args.out_dir.mkdir(parents=True, exist_ok=True)
        write_json(path, plan)
        names = ("config", "learning_rate", "length", "vocabulary", "precision", "batch")
        print(*(plan[name] for name in (*names, "micro_batch")), plan.get("updates", ""))


if __name__ == "__main__":
    run_main(main)
