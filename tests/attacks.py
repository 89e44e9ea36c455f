"""The attacks of torture.py: each is one small training run, or several, and what disturbs it.

Raises Failure for a traceback, a crash, a hang, an error of more than one line, or a run that was stopped and continued
and has other losses or weights than one that was not.
"""

import builtins
import contextlib
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
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch._dynamo
import torch.distributed.fsdp  # noqa: F401  imported once, for all forked processes
from conftest import log_entries, reported
from small_runs import RunInputs, rewrite_manifest, steps_folder

import run_pretraining
from utils.errors import run_main

STEPS = 12
HANG_SECONDS = 180
LAUNCHER_SECONDS = 5  # until the other processes of a run are told to stop after one was killed, as torchrun does
MEMORY = 16 << 30  # bytes of addresses that an attacked process may have
SHARDED = ("--data-parallel-shard-degree", "-1")
# Processes, and the flags of a strategy.
STRATEGIES: tuple[tuple[int, tuple[str, ...]], ...] = (
    (1, ()),
    (2, ()),
    (3, ()),
    (4, ()),
    (2, SHARDED),
    (4, ("--data-parallel-shard-degree", "2")),
)
ALONE, TWO_SHARDED = 0, 4  # numbers of strategies


class Failure(Exception):
    """An attack that was not survived."""


# --- processes --------------------------------------------------------------------------------------------------------


def start(
    words: list[str],
    log: Path,
    environment: dict[str, str] | None = None,
    prepare: Callable[[], None] | None = None,
    program: Callable = run_pretraining.main,
) -> int:
    """Forks a process that runs `program`(words); returns its id."""
    if pid := os.fork():
        return pid
    try:
        os.environ.update(environment or {})
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        os.chdir(log.parent)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", errors="replace"), os.fdopen(2, "w", errors="replace")
        if prepare is not None:
            prepare()
        run_main(lambda: program(words))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        finish_threads()
        os._exit(code)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)


def finish_threads() -> None:
    """Waits for a checkpoint that is being written, as the interpreter does at its end."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()


def start_run(words: list[str], log: Path, count: int, prepare: dict[int, Callable[[], None]] | None = None):
    """Starts `count` processes of one run; `prepare`: what is called in some of them first, by rank."""
    (log.parent / "command").write_text(json.dumps({"words": words, "processes": count}, indent=1))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    places = [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in range(count)]
    return [
        start(words, log, {name: str(value) for name, value in place.items()}, (prepare or {}).get(rank))
        for rank, place in enumerate(places)
    ]


def wait(pids: list[int], terminate_after: float = HANG_SECONDS) -> list[int]:
    """The exit codes; negative for signals. After `terminate_after` seconds the processes get SIGTERM, as torchrun does
    when one of them has ended. Raises Failure for a hang."""
    codes: dict[int, int] = {}
    started, is_terminated = time.monotonic(), False
    while len(codes) < len(pids):
        for pid in set(pids) - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        waited = time.monotonic() - started
        if waited > HANG_SECONDS:
            for pid in set(pids) - codes.keys():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            raise Failure("hang")
        if waited > terminate_after and not is_terminated:
            is_terminated = True
            for pid in set(pids) - codes.keys():
                os.kill(pid, signal.SIGTERM)
        time.sleep(0.02)
    return [codes[pid] for pid in pids]


def check_end(codes: list[int], log: Path, may_be: tuple[int, ...] = (0, 2)) -> None:
    """Raises Failure unless all processes ended as they may, with one line for each error."""
    text = log.read_text(errors="replace") if log.exists() else ""
    if "Traceback" in text:
        raise Failure("traceback: " + text.strip().splitlines()[-1][:200])
    if strange := [code for code in codes if code not in may_be]:
        raise Failure(f"exit code {strange[0]}: " + " ".join(text.strip().splitlines()[-1:])[:200])
    if 2 in codes and not re.search("^error: ", text, re.MULTILINE):
        raise Failure("exit code 2 without an error line")


def is_over(pids: list[int]) -> bool:
    """Whether a process has ended; it is not waited for."""
    return any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None for pid in pids)


# --- the runs that are attacked ---------------------------------------------------------------------------------------


@dataclass
class Arena:
    """A folder with data, and the results of runs that nothing disturbs, one for each strategy in `numbers`."""

    folder: Path
    numbers: tuple[int, ...] = tuple(range(len(STRATEGIES)))
    undisturbed: dict[int, tuple[dict, bytes]] = field(default_factory=dict)
    calls: dict[int, dict[str, int]] = field(default_factory=dict)  # of each function in FAULTS, by strategy

    def __post_init__(self):
        self.inputs = RunInputs.make(self.folder)
        for number in self.numbers:
            count, flags = STRATEGIES[number]
            alone = self.folder / f"undisturbed-{number}"
            alone.mkdir()
            counters = {0: functools.partial(watch_all, alone)}
            pids = start_run(self.words(alone, *flags), alone / "log", count, counters)
            check_end(wait(pids), alone / "log", (0,))
            self.undisturbed[number] = results(alone)
            self.calls[number] = {name: (alone / name).stat().st_size for name in FAULTS}

    @property
    def checkpoint(self) -> Path:
        return steps_folder(self.folder / f"undisturbed-{ALONE}") / str(STEPS)

    def words(self, output: Path, *extra) -> list[str]:
        flags = ("--max-steps", STEPS, "--log-freq", 1, "--num-steps-per-checkpoint", 2)
        join = ("--distributed-timeout-minutes", 1)
        return self.inputs.command(
            output, *flags, *join, "--resume-from-checkpoint", "--report-file", output / "report.json", *extra
        )

    def complete(self, number: int, folder: Path) -> None:
        """Continues a run to its end and compares it with the undisturbed one. A step whose loss was to be summed over
        all processes when one was killed has no loss in the report; the weights show whether it was made the same."""
        count, flags = STRATEGIES[number]
        (folder / "log").unlink(missing_ok=True)
        check_end(wait(start_run(self.words(folder, *flags), folder / "log", count)), folder / "log", (0,))
        (losses, weights), (expected, expected_weights) = results(folder), self.undisturbed[number]
        where = f"with {count} processes {' '.join(flags)}"
        for step in sorted(losses):
            if losses[step] != expected[step]:
                raise Failure(f"step {step} differs: {losses[step]}, not {expected[step]}, {where}")
        if weights != expected_weights:
            raise Failure(f"the weights differ, {where}")


def results(output: Path) -> tuple[dict[int, set], bytes]:
    """The losses of each step that were ever logged, also of steps that were made again, and the last weights."""
    losses: dict[int, set] = {}
    for entry in log_entries(output / "report.json"):
        if "loss" in entry["data"]:
            losses.setdefault(entry["step"][-1], set()).add(entry["data"]["loss"])
    return losses, (steps_folder(output) / str(STEPS) / "model.safetensors").read_bytes()


def last_step(output: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return max(reported(output / "report.json"), default=0)
    return 0


# --- attacks: functions of the arena, an empty folder and a random state, that return how often they attacked ---------


def kill(arena: Arena, folder: Path, random_: random.Random) -> int:
    """One run, killed at up to 4 random moments: all its processes, or one of them."""
    number = random_.choice(arena.numbers)
    count, flags = STRATEGIES[number]
    kills = 0
    for _ in range(random_.randint(1, 4)):
        (folder / "log").unlink(missing_ok=True)
        pids = start_run(arena.words(folder, *flags), folder / "log", count)
        target, end = last_step(folder) + random_.randint(0, 4), time.monotonic() + 60
        while last_step(folder) < target and time.monotonic() < end and not is_over(pids):
            time.sleep(0.02)
        time.sleep(random_.uniform(0, 0.3 if target else 2))
        victims = pids if random_.random() < 0.5 else [random_.choice(pids)]
        kills += not is_over(victims)
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        check_end(wait(pids, LAUNCHER_SECONDS), folder / "log", (0, 2, -signal.SIGKILL, -signal.SIGTERM))
    arena.complete(number, folder)
    return kills


FAULTS: dict[str, object] = {
    "fsync": os,
    "rename": os,
    "mkdir": os,
    "unlink": os,
    "rmdir": os,
    "open": io,  # which pathlib calls
    "write_text": Path,
    "copyfile": shutil,
}
ERRNOS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ESTALE)


def watch(name: str, record: Path, disturb: Callable[[int, str], None] = lambda call, path: None) -> None:
    """Writes a byte to `record` for each call of the function `name`, and disturbs it; `disturb` gets the number of
    bytes and the call's path."""
    owner, calls = FAULTS[name], os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    original = getattr(owner, name)

    def call(*args, **kwargs):
        os.write(calls, b".")
        disturb(os.fstat(calls).st_size, str(args[0]))
        return original(*args, **kwargs)

    setattr(owner, name, call)
    if owner is io:
        builtins.open = call


def fail(calls: range, number: int, call: int, path: str) -> None:
    """Raises the error `number` in the given calls."""
    if call in calls:
        raise OSError(number, os.strerror(number), path)


def watch_all(folder: Path) -> None:
    for name in FAULTS:
        watch(name, folder / name)


def fault(arena: Arena, folder: Path, random_: random.Random) -> int:
    """A call of the system fails on one rank, at a random moment, or a file may not grow; then the run is continued."""
    number = random_.choice((ALONE, ALONE, TWO_SHARDED))
    count, flags = STRATEGIES[number]
    name = random_.choice([*(name for name, calls in arena.calls[number].items() if calls), "file size"])
    if name == "file size":
        largest = max(path.stat().st_size for path in arena.checkpoint.iterdir())
        size = random_.randrange(4096, largest)
        inject = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        rank = random_.randrange(count)
    else:
        moment = random_.randint(1, arena.calls[number][name])
        disturb = functools.partial(fail, range(moment, moment + 1), random_.choice(ERRNOS))
        inject = functools.partial(watch, name, folder / "calls", disturb)
        rank = 0
    pids = start_run(arena.words(folder, *flags), folder / "log", count, {rank: inject})
    check_end(wait(pids), folder / "log", (0, 2))
    arena.complete(number, folder)
    return int(name == "file size" or (folder / "calls").stat().st_size >= moment)


ODD_VALUES = (
    *("", "-1", "0", "1e30", "nan", "9" * 5000, "../x", "\u00b2", "\udc80", "None", "auto", "1" + "0" * 30, "x" * 300),
    *("-", "--", "'", "0x10", "1_000", "1,5", " 7", "true", "/dev/null", "/proc/self/mem", "\n", "-inf", "1e-400"),
)
ODD_JSON = (None, -1, 0, 1.5, True, "", "x", [], {}, 10**30, float("nan"), float("inf"), "\ud800", [[]], 2**31, 1e308)
ODD_FLAGS = (
    *("--seed", "--optimizer", "--from-checkpoint", "--from-pretrained-params", "--last-step-of-checkpoint"),
    *("--gradient-merge-steps", "--global-batch-size", "--weight-decay", "--beta1", "--epsilon", "--max-grad-norm"),
    *("--lr-decay", "--num-workers", "--model-prefix", "--eval-dir", "--tensorboard-dir", "--scale-loss"),
    *("--amp-dtype", "--activation-checkpoint", "--data-parallel-shard-degree", "--bert-model", "--steps-this-run"),
)
ENVIRONMENT = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "LAUNCHER_PID", "OMP_NUM_THREADS")


def bad_input(arena: Arena, folder: Path, random_: random.Random) -> int:
    """An odd value of a flag, of the environment or of the config, or a shard or vocabulary with changed bytes."""
    words, environment = arena.words(folder, "--steps-this-run", "1"), {}
    kind = random_.choice(["flag", "environment", "config", "shard", "vocabulary"])
    if kind == "flag":
        flags = [*(word for word in words if word.startswith("--")), *ODD_FLAGS]
        words += [random_.choice(flags) + "=" + random_.choice(ODD_VALUES)]
    elif kind == "environment":
        environment = {random_.choice(ENVIRONMENT): random_.choice(ODD_VALUES) for _ in range(random_.randint(1, 3))}
    elif kind == "config":
        config = json.loads(arena.inputs.config.read_text())
        config[random_.choice(sorted(config))] = random_.choice(ODD_JSON)
        (folder / "config.json").write_text(json.dumps(config))
        words += ["--config-file", str(folder / "config.json")]
    elif kind == "vocabulary":
        shutil.copy(arena.inputs.vocab_file, folder / "vocab.txt")
        change_bytes(folder / "vocab.txt", random_)
        words += ["--vocab-file", str(folder / "vocab.txt")]
    else:
        shutil.copytree(arena.inputs.shards, folder / "shards")
        change_bytes(random_.choice(sorted((folder / "shards").iterdir())), random_)
        words += ["--input-dir", str(folder / "shards")]
    (folder / "command").write_text(json.dumps({"words": words, "environment": environment}, indent=1))
    check_end(wait([start(words, folder / "log", environment)]), folder / "log")
    return 1


def fuzz(arena: Arena, folder: Path, random_: random.Random) -> int:
    """A file of a checkpoint with changed bytes and, half of the time for tensors, a checksum that fits."""
    changed = folder / str(STEPS)
    shutil.copytree(arena.checkpoint, changed)
    path = random_.choice(sorted(changed.iterdir()))
    change_bytes(path, random_)
    if random_.random() < 0.5 and path.suffix == ".safetensors":
        rewrite_manifest(changed)
    flag = random_.choice(["--from-checkpoint", "--from-pretrained-params"])
    words = [word for word in arena.words(folder / "output") if word != "--resume-from-checkpoint"]
    words += [flag, str(changed), "--benchmark", "--benchmark-steps", "1", "--benchmark-warmup-steps", "1"]
    (folder / "command").write_text(json.dumps({"words": words}, indent=1))
    check_end(wait([start(words, folder / "log")]), folder / "log")
    return 1


def change_bytes(path: Path, random_: random.Random) -> None:
    """Cuts the file, or changes some of its bytes, most often near the start, where the structure is."""
    content = bytearray(path.read_bytes())
    if random_.random() < 0.2:
        del content[random_.randrange(len(content)) :]
    for _ in range(random_.randint(1, 4)):
        if content:
            limit = len(content) if random_.random() < 0.3 else min(len(content), 2048)
            content[random_.randrange(limit)] = random_.randrange(256)
    path.write_bytes(content)
