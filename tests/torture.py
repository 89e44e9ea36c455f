#!/usr/bin/env python3
"""Attacks small training runs, and prints a table of attacks tried and survived.

    python3 tests/torture.py --kills 200 --faults 100 --bad-inputs 300 --fuzzed 1000 --jobs 2

Survived means: no traceback, no crash, no hang, an error is one line, and a run that was stopped and continued has the
losses and the weights of one that was not. Ctrl-C ends the attacks and prints the table of those that were made.
docs/checkpoints.md has the last table.
"""

import datetime
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent import futures
from multiprocessing import get_context
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")

from attacks import Arena, Failure, bad_input, fault, fuzz, kill  # noqa: E402
from attacks_outside import disk, link, log, memory_limit, server, shard  # noqa: E402

from utils.command_line import ArgumentParser, non_negative_int, positive_int  # noqa: E402
from utils.errors import UserError, run_main  # noqa: E402

# By the name of the flag: the attack, and its line in the table.
ATTACKS = {
    "kills": (kill, "SIGKILL at a random moment, 1 to 4 processes"),
    "faults": (fault, "failing system call, 1 and 2 processes"),
    "bad_inputs": (bad_input, "bad input"),
    "fuzzed": (fuzz, "changed checkpoint file"),
    "disks": (disk, "full, failing or slow disk, 1 and 2 processes"),
    "memory_limits": (memory_limit, "memory limit of a cgroup or a process"),
    "shards": (shard, "shard truncated, replaced or removed during the run"),
    "links": (link, "links in the folder of steps"),
    "logs": (log, "changed log, read by report.py"),
    "servers": (server, "download from a hostile server"),
}
ARENA: Arena | None = None  # set before the jobs are forked
IDLE_LIMIT = 50  # attacks in a row that did not come to it, such as a kill of a run that had ended


def attack(name: str, number: int, seed: int) -> tuple[int, str]:
    """Makes one attack; returns how often it attacked, and what is wrong: nothing if it was survived."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-{number}-", dir=ARENA.folder))
    try:
        tried, problem = ATTACKS[name][0](ARENA, folder, random.Random(f"{seed}/{name}/{number}")), ""
    except Failure as failure:
        tried = 1
        kept = shutil.copytree(folder, Path(tempfile.gettempdir()) / f"torture-{os.getpid()}-{name}-{number}")
        problem = f"{failure}; repeat with --seed {seed} --repeat {name}:{number}; its files are in {kept}"
    shutil.rmtree(folder, ignore_errors=True)
    return tried, problem


def campaign(counts: dict[str, int], first: dict[str, int], jobs: int, seed: int) -> dict[str, list[int]]:
    """Attacks until each kind was tried as often as `counts` says; returns [tried, survived] of each. `first`: the
    number of the first attack of each kind."""
    tallies = {name: [0, 0] for name in counts}
    next_number, running, idle = dict(first), {}, 0
    with futures.ProcessPoolExecutor(jobs, get_context("fork"), isolate) as pool:
        try:
            while True:
                in_flight = {name: sum(name == other for other, _ in running.values()) for name in counts}
                missing = [name for name, count in counts.items() if tallies[name][0] + in_flight[name] < count]
                # The kind that is furthest behind, so that a table made early has all of them.
                missing.sort(key=lambda name: (tallies[name][0] + in_flight[name]) / counts[name])
                if missing and len(running) < jobs:
                    name = missing[0]
                    running[pool.submit(attack, name, next_number[name], seed)] = name, next_number[name]
                    next_number[name] += 1
                    continue
                if not running or idle > IDLE_LIMIT:
                    return tallies
                done, _ = futures.wait(running, return_when=futures.FIRST_COMPLETED)
                for future in done:
                    name, number = running.pop(future)
                    tried, problem = future.result()
                    idle = 0 if tried else idle + 1
                    tallies[name][0] += tried
                    tallies[name][1] += tried - bool(problem)
                    if problem:
                        print(f"{name} {number}: {problem}", flush=True)
        except KeyboardInterrupt:
            print("interrupted: waiting for the attacks that are being made", file=sys.stderr, flush=True)
            return tallies


def isolate() -> None:
    """In a job: Ctrl-C is for the campaign only, and attacked runs end by SIGTERM as they would elsewhere."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def commit() -> str:
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    described = subprocess.run(
        [*git, "describe", "--always", "--dirty", "--exclude=*"], capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "unknown"


def main() -> int:
    global ARENA
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    for name, (_, description) in ATTACKS.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=non_negative_int, default=0, help=f"how many of: {description}")
    parser.add_argument("--jobs", type=positive_int, default=2, help="attacks made at the same time")
    parser.add_argument("--seed", type=non_negative_int, default=0, help="seed of the attacks")
    parser.add_argument("--repeat", metavar="KIND:NUMBER", help="make only this attack, such as kills:17")
    args = parser.parse_args()
    counts = {name: getattr(args, name) for name in ATTACKS if getattr(args, name)}
    first = dict.fromkeys(counts, 0)
    if args.repeat is not None:
        name, _, number = args.repeat.partition(":")
        if name not in ATTACKS or not number.isdecimal() or counts:
            raise UserError(f"--repeat {args.repeat} is not KIND:NUMBER alone, with a kind of {', '.join(ATTACKS)}")
        counts, first = {name: 1}, {name: int(number)}
    if not counts:
        raise UserError("no attack was asked for: give a number of at least one kind, such as --kills 10")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started, attacked = time.monotonic(), commit()
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        ARENA = Arena(Path(folder))
        tallies = campaign(counts, first, args.jobs, args.seed)
    minutes = (time.monotonic() - started) / 60
    print(
        f"\n{datetime.date.today()}, commit {attacked}, seed {args.seed}, {minutes:.0f} minutes, {args.jobs} at a time "
        f"on {os.cpu_count()} cores:\n\n| attack | tried | survived |\n|---|---|---|"
    )
    for name, (tried, survived) in tallies.items():
        print(f"| {ATTACKS[name][1]} | {tried} | {survived} |")
    return int(any(tried != survived for tried, survived in tallies.values()))


if __name__ == "__main__":
    run_main(main)
