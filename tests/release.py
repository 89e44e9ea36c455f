#!/usr/bin/env python3
"""Attacks small training runs before a release, and prints a table of attacks tried and survived.

    python3 tests/release.py --kills 200 --faults 100 --disks 50 --jobs 2

Survived means: no traceback, no crash, no hang, an error is one line, and a run that was stopped
and continued has the losses and the weights of one that was not. Full disks need the right to mount
one.
"""

import builtins
import contextlib
import datetime
import errno
import functools
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS / "support"), str(TESTS), str(TESTS.parent)]

import elastic_nodes  # noqa: E402
import processes  # noqa: E402
from small_runs import RunInputs, all_logged_losses, last_step, steps_folder  # noqa: E402

import run_pretraining  # noqa: E402
from bert_recipe.utils.command_line import ArgumentParser, non_negative_int, positive_int  # noqa: E402
from bert_recipe.utils.errors import UserError, run_main  # noqa: E402

STEPS = 12
HANG_SECONDS = 180
# until the other processes of a run are told to stop after one was killed, as torchrun does
LAUNCHER_SECONDS = 5
MEMORY = 16 << 30  # bytes of addresses that an attacked process may have
KIB, MIB = 2**10, 2**20
SHARDED = ("--data-parallel-shard-degree", "-1")
# Processes, and the flags of a strategy.
STRATEGIES = (
    (1, ()),
    (2, ()),
    (3, ()),
    (4, ()),
    (2, SHARDED),
    (4, ("--data-parallel-shard-degree", "2")),
)
ALONE, TWO_SHARDED = 0, 4  # numbers of strategies
STOPPED = -signal.SIGTERM


class Failure(Exception):
    """An attack that was not survived."""


def attacked(prepare: Callable[[], None] | None, words: list[str]) -> int:
    """run_pretraining.py in a process of its own, after `prepare`."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    if prepare is not None:
        prepare()
    return run_pretraining.main(words)


def start_run(words: list[str], log: Path, count: int, prepare=None) -> list:
    """Starts `count` processes of one run; `prepare`: functions that are called in some of them
    first, by rank.
    """
    (log.parent / "command").write_text(json.dumps([words, count], indent=1))
    return [
        processes.start(
            words, log, environment, functools.partial(attacked, (prepare or {}).get(rank))
        )
        for rank, environment in enumerate(processes.environments(count))
    ]


def is_over(run: list) -> bool:
    """Whether a process has ended."""
    return not all(process.is_alive() for process in run)


def signal_all(run: list, number: int) -> None:
    for process in run:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def wait(
    run: list, log: Path, may_be: tuple[int, ...] = (0, 2), terminate_after: float = HANG_SECONDS
) -> None:
    """Waits for the processes. After `terminate_after` seconds they get SIGTERM, as from torchrun
    when one of them has ended. Raises Failure unless all end as they may, with one line for each
    error.
    """
    started = time.monotonic()
    is_terminated = False
    while any(process.is_alive() for process in run):
        waited = time.monotonic() - started
        if waited > HANG_SECONDS:
            signal_all(run, signal.SIGKILL)
            raise Failure("hang")
        if waited > terminate_after and not is_terminated:
            is_terminated = True
            signal_all(run, signal.SIGTERM)
        time.sleep(0.02)
    text = log.read_text(errors="replace") if log.exists() else ""
    last_line = " ".join(text.strip().splitlines()[-1:])[:200]
    codes = [process.exitcode for process in run]
    if "Traceback" in text:
        raise Failure(f"traceback: {last_line}")
    if strange := [code for code in codes if code not in may_be]:
        raise Failure(f"exit code {strange[0]}: {last_line}")
    if 2 in codes and not re.search("^error: ", text, re.MULTILINE):
        raise Failure("exit code 2 without an error line")


def wait_for_step(run: list, folder: Path, step: int) -> None:
    """Waits until `step` is logged, or a process has ended."""
    end = time.monotonic() + 60
    while last_step(folder) < step and not is_over(run) and time.monotonic() < end:
        time.sleep(0.01)


class Arena:
    """A folder with data, and of runs that nothing disturbs, one for each strategy, the results and
    the number of calls of each function in FAULTS.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.inputs = RunInputs.make(folder)
        self.checkpoint = steps_folder(folder / f"undisturbed-{ALONE}") / str(STEPS)
        self.undisturbed: dict[int, tuple[set, bytes]] = {}
        self.calls: dict[int, dict[str, int]] = {}
        for number, (count, flags) in enumerate(STRATEGIES):
            alone = self.folder / f"undisturbed-{number}"
            alone.mkdir()
            counters = {0: functools.partial(watch_all, alone)}
            wait(
                start_run(self.words(alone, *flags), alone / "log", count, counters),
                alone / "log",
                (0,),
            )
            self.undisturbed[number] = results(alone)
            self.calls[number] = {name: (alone / name).stat().st_size for name in FAULTS}

    def words(self, output: Path, *extra) -> list[str]:
        flags = (
            "--max-steps",
            STEPS,
            "--log-freq",
            1,
            "--num-steps-per-checkpoint",
            2,
            "--resume-from-checkpoint",
        )
        flags = (
            *flags,
            "--distributed-timeout-minutes",
            1,
            "--report-file",
            output / "report.json",
        )
        return self.inputs.command(output, *flags, *extra)

    def start(self, number: int, folder: Path, prepare=None) -> list:
        """Starts a run with the strategy `number`; `prepare`: see start_run."""
        count, flags = STRATEGIES[number]
        return start_run(self.words(folder, *flags), folder / "log", count, prepare)

    def complete(self, number: int, folder: Path) -> None:
        """Continues a run to its end and compares it with the undisturbed one. A step whose loss
        was to be summed over all processes when one was killed has no loss in the report; the
        weights show whether it was made the same.
        """
        (folder / "log").unlink(missing_ok=True)
        wait(self.start(number, folder), folder / "log", (0,))
        losses, weights = results(folder)
        expected, expected_weights = self.undisturbed[number]
        if others := sorted(losses - expected):
            raise Failure(
                f"steps and losses of no undisturbed run: {others}, with {STRATEGIES[number]}"
            )
        if weights != expected_weights:
            raise Failure(f"the weights differ, with {STRATEGIES[number]}")


def results(output: Path) -> tuple[set, bytes]:
    """The logged losses and the last weights."""
    return all_logged_losses(output), (
        steps_folder(output) / str(STEPS) / "model.safetensors"
    ).read_bytes()


# --- attacks: functions of the arena, an empty folder and a random state, that return how often
# --- they attacked


def kill(arena: Arena, folder: Path, random_: random.Random) -> int:
    """One run, killed at up to 4 random moments: all its processes, or one of them."""
    number = random_.randrange(len(STRATEGIES))
    kills = 0
    for _ in range(random_.randint(1, 4)):
        (folder / "log").unlink(missing_ok=True)
        run = arena.start(number, folder)
        further = random_.randint(0, 4)
        wait_for_step(run, folder, last_step(folder) + further)
        time.sleep(random_.uniform(0, 0.3 if further else 2))
        victims = run if random_.random() < 0.5 else [random_.choice(run)]
        kills += not is_over(victims)
        signal_all(victims, signal.SIGKILL)
        wait(run, folder / "log", (0, 2, -signal.SIGKILL, STOPPED), LAUNCHER_SECONDS)
    arena.complete(number, folder)
    return kills


FAULTS: dict[str, object] = {
    **{"fsync": os, "rename": os, "mkdir": os, "unlink": os, "rmdir": os, "pread": os},
    **{"open": io, "write_text": Path, "copyfile": shutil},  # pathlib calls io.open
}
ERRNOS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ESTALE)


def watch(
    name: str, record: Path, disturb: Callable[[int, str], None] = lambda call, path: None
) -> None:
    """Writes a byte to `record` for each call of the function `name`, and disturbs it; `disturb`
    gets the number of bytes and the call's path.
    """
    owner = FAULTS[name]
    calls = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    original = getattr(owner, name)

    def call(*args, **kwargs):
        os.write(calls, b".")
        disturb(os.fstat(calls).st_size, str(args[0]))
        return original(*args, **kwargs)

    setattr(owner, name, call)
    if owner is io:
        builtins.open = call


def watch_all(folder: Path) -> None:
    for name in FAULTS:
        watch(name, folder / name)


def fail(calls: range, number: int, call: int, path: str) -> None:
    """Raises the error `number` in the given calls."""
    if call in calls:
        raise OSError(number, os.strerror(number), path)


def delay(longest: float, _call: int, _path: str) -> None:
    time.sleep(random.uniform(0, longest))


def break_disk(folder: Path, disturb: Callable[[int, str], None]) -> None:
    """Disturbs all calls for files of the run."""

    def disturb_files_of_the_run(call: int, path: str) -> None:
        if path.startswith(str(folder)):
            disturb(call, path)

    for name in FAULTS:
        watch(name, folder / "calls", disturb_files_of_the_run)


def fault(arena: Arena, folder: Path, random_: random.Random) -> int:
    """A call of the system fails on one rank, at a random moment, or a file may not grow; then the
    run is continued.
    """
    number = random_.choice((ALONE, ALONE, TWO_SHARDED))
    rank = 0
    name = random_.choice(
        [*(name for name, calls in arena.calls[number].items() if calls), "file size"]
    )
    if name == "file size":
        largest = max(path.stat().st_size for path in arena.checkpoint.iterdir())
        limits = random_.randrange(4 * KIB, largest), resource.RLIM_INFINITY
        inject = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
        rank = random_.choice((0, -1))
    else:
        moment = random_.randint(1, arena.calls[number][name])
        disturb = functools.partial(fail, range(moment, moment + 1), random_.choice(ERRNOS))
        inject = functools.partial(watch, name, folder / "calls", disturb)
    wait(arena.start(number, folder, {rank % STRATEGIES[number][0]: inject}), folder / "log")
    arena.complete(number, folder)
    return int(name == "file size" or (folder / "calls").stat().st_size >= moment)


def disk(arena: Arena, folder: Path, random_: random.Random) -> int:
    """The disk fills up, or all its calls fail from one moment on, or it is slow and the run is
    stopped while it writes; then the run is continued.
    """
    kind = random_.choice(["full", "failing", "slow"])
    number = random_.choice((ALONE, ALONE, TWO_SHARDED))
    if kind == "full":
        (output := folder / "disk").mkdir()
        size = random_.randrange(16 * KIB, 4 * MIB)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", output], check=True)
        try:
            count, flags = STRATEGIES[number]
            wait(start_run(arena.words(output, *flags), folder / "log", count), folder / "log")
            is_full = last_step(output) < STEPS
            subprocess.run(["mount", "-o", f"remount,size={64 * MIB}", output], check=True)
            arena.complete(number, output)
        finally:
            subprocess.run(["umount", "--lazy", output], check=True)
        return int(is_full)
    moment = random_.randint(1, sum(arena.calls[number].values()))
    disturb = functools.partial(fail, range(moment, 10**9), random_.choice(ERRNOS))
    if kind == "slow":
        disturb = functools.partial(delay, random_.uniform(0.01, 0.1))
    inject = functools.partial(break_disk, folder, disturb)
    run = arena.start(number, folder, dict.fromkeys(range(STRATEGIES[number][0]), inject))
    if kind == "slow":
        wait_for_step(run, folder, random_.randint(1, STEPS))
        signal_all(run if random_.random() < 0.5 else run[:1], signal.SIGTERM)
    wait(run, folder / "log", (0, 2, STOPPED))
    arena.complete(number, folder)
    return 1


def limit_data(further: int) -> None:
    (kilobytes,) = [
        line.split()[1]
        for line in Path("/proc/self/status").read_text().splitlines()
        if "VmData" in line
    ]
    limit = int(kilobytes) * KIB + further
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def memory_limit(arena: Arena, folder: Path, random_: random.Random) -> int:
    """A limit that the kernel enforces on the data of one process; then the run is continued
    without it.
    """
    number = random_.choice((ALONE, ALONE, TWO_SHARDED))
    inject = functools.partial(limit_data, int(MIB * 2 ** random_.uniform(-4, 8)))
    run = arena.start(number, folder, {random_.randrange(STRATEGIES[number][0]): inject})
    # Native code ends a process itself if there is no memory for a thread or an exception.
    wait(
        run,
        folder / "log",
        (0, 2, STOPPED, 127, -signal.SIGABRT, -signal.SIGSEGV),
        LAUNCHER_SECONDS,
    )
    arena.complete(number, folder)
    return 1


def lose_node(arena: Arena, folder: Path, random_: random.Random) -> int:
    """One of two nodes that come and go is killed or stopped, and started again."""
    run = elastic_nodes.ElasticRun(folder / "run", arena.inputs)
    lose = random_.choice((elastic_nodes.kill, subprocess.Popen.terminate))
    try:
        codes = elastic_nodes.lose_and_restart(run, random_.choice(("first", "second")), lose)
        alone = elastic_nodes.command_alone(arena.inputs, folder)
        wait(start_run(alone, folder / "log", 1), folder / "log", (0,))
        elastic_nodes.assert_losses_as_in(folder, run)
    except AssertionError as error:
        raise Failure(f"{lose.__name__}: {error}") from error
    text = "".join((run.folder / name).read_text() for name in ("first", "second"))
    if any(codes) or "Traceback" in text or "frame #" in text:
        raise Failure(f"{lose.__name__}: exit codes {codes}, or a traceback")
    return 1


# By the name of the flag: the attack, and its line in the table.
ATTACKS = {
    "kills": (kill, "SIGKILL at a random moment, 1 to 4 processes"),
    "faults": (fault, "failing system call, 1 and 2 processes"),
    "disks": (disk, "full, failing or slow disk, 1 and 2 processes"),
    "memory_limits": (memory_limit, "memory limit of a process"),
    "nodes": (lose_node, "one of two nodes that come and go is lost"),
}


def attack(arena: Arena, name: str, number: int, seed: int) -> tuple[int, bool]:
    """Makes one attack; returns how often it attacked, and whether it was survived."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-{number}-", dir=arena.folder))
    try:
        return ATTACKS[name][0](arena, folder, random.Random(f"{seed}/{name}/{number}")), True
    except Failure as failure:
        kept = shutil.copytree(
            folder, Path(tempfile.gettempdir()) / f"release-{os.getpid()}-{name}-{number}"
        )
        print(
            f"{failure}; repeat with --seed {seed} --repeat {name}:{number}; its files are in "
            f"{kept}",
            flush=True,
        )
        return 1, False
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    for name, (_, description) in ATTACKS.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(
            flag, type=non_negative_int, default=0, help=f"how many runs with: {description}"
        )
    parser.add_argument(
        "--jobs", type=positive_int, default=2, help="attacks made at the same time"
    )
    parser.add_argument("--seed", type=non_negative_int, default=0, help="seed of the attacks")
    parser.add_argument(
        "--repeat", metavar="KIND:NUMBER", help="make only this attack, such as kills:17"
    )
    args = parser.parse_args()
    todo = [(number, name) for name in ATTACKS for number in range(getattr(args, name))]
    if args.repeat is not None:
        name, _, number = args.repeat.partition(":")
        if name not in ATTACKS or not number.isdecimal() or todo:
            raise UserError(
                f"--repeat {args.repeat} is not KIND:NUMBER alone, with a kind of "
                f"{', '.join(ATTACKS)}"
            )
        todo = [(int(number), name)]
    if not todo:
        raise UserError(
            "no attack was asked for: give a number of at least one kind, such as --kills 10"
        )
    tallies = {name: [0, 0] for _, name in todo}
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="release-") as folder,
        ThreadPoolExecutor(args.jobs) as pool,
    ):
        arena = Arena(Path(folder))
        running = {
            pool.submit(attack, arena, name, number, args.seed): name
            for number, name in sorted(todo)
        }
        for future in as_completed(running):
            tried, survived = future.result()
            tallies[running[future]][0] += tried
            tallies[running[future]][1] += tried * survived
    minutes = (time.monotonic() - started) / 60
    print(
        "\n"
        f"{datetime.date.today()}, seed {args.seed}, {minutes:.0f} minutes, {args.jobs} at a "
        "time:\n"
    )
    print("| attack | tried | survived |\n|---|---|---|")
    for name, (tried, survived) in tallies.items():
        print(f"| {ATTACKS[name][1]} | {tried} | {survived} |")
    return int(any(tried != survived for tried, survived in tallies.values()))


if __name__ == "__main__":
    run_main(main)
