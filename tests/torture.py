#!/usr/bin/env python3
"""Attacks on small training runs, for as many minutes as are given; prints a table of attacks tried and survived.

    python3 tests/torture.py --minutes 30

Survived means: no traceback, no crash, no hang, an error is one line, and a run that was stopped and continued has the
losses and the weights of one that was not. docs/reliability.md has the last table.
"""

import contextlib
import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")

from conftest import TINY, pretraining_command, reported, write_shards  # noqa: E402

import run_pretraining  # noqa: E402
from checkpoint import MANIFEST_FILE, block_digest, manifest_of, num_blocks  # noqa: E402
from utils.command_line import ArgumentParser, bounded_float, non_negative_int  # noqa: E402
from utils.errors import run_main  # noqa: E402

STEPS = 12
HANG_SECONDS = 180
LAUNCHER_SECONDS = 20  # until the other processes of a run are told to stop after one was killed
MEMORY = 16 << 30  # bytes of addresses that an attacked process may have
# Processes, and the flags of a strategy.
STRATEGIES: tuple[tuple[int, tuple[str, ...]], ...] = (
    (1, ()),
    (2, ()),
    (3, ()),
    (4, ()),
    (2, ("--data-parallel-shard-degree", "-1")),
    (4, ("--data-parallel-shard-degree", "2")),
)


class Failure(Exception):
    """An attack that was not survived."""


@dataclass
class Tally:
    tried: int = 0
    failures: list[str] = field(default_factory=list)


# --- processes --------------------------------------------------------------------------------------------------------


def start(words: list[str], log: Path, environment: dict[str, str], prepare: Callable[[], None] | None = None) -> int:
    """Forks a process that runs run_pretraining.py; returns its id."""
    if pid := os.fork():
        return pid
    try:
        os.environ.update(environment)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        os.chdir(log.parent)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", errors="replace"), os.fdopen(2, "w", errors="replace")
        if prepare is not None:
            prepare()
        run_main(lambda: run_pretraining.main(words))
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


def start_run(words: list[str], log: Path, count: int) -> list[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    places = [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in range(count)]
    return [start(words, log, {name: str(value) for name, value in place.items()}) for place in places]


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
        time.sleep(0.05)
    return [codes[pid] for pid in pids]


def check_end(codes: list[int], log: Path, may_be: tuple[int, ...] = (0, 2)) -> None:
    """Raises Failure unless all processes ended as they may, with one line for each error."""
    text = log.read_text(errors="replace") if log.exists() else ""
    if "Traceback" in text:
        raise Failure("traceback: " + text.strip().splitlines()[-1][:200])
    if strange := [code for code in codes if code not in may_be]:
        raise Failure(f"exit code {strange[0]}")
    if 2 in codes and not re.search("^error: ", text, re.MULTILINE):
        raise Failure("exit code 2 without an error line")


# --- the runs that are attacked ---------------------------------------------------------------------------------------


class Arena:
    """A folder with data, and for each strategy the results of a run that nothing disturbs."""

    def __init__(self, folder: Path, seed: int):
        self.folder, self.random = folder, random.Random(seed)
        self.shards, self.config = write_shards(folder / "shards"), folder / "config.json"
        self.config.write_text(json.dumps(TINY))
        self.undisturbed: dict[int, tuple[set, bytes]] = {}
        self.count = 0

    def new_folder(self) -> Path:
        self.count += 1
        shutil.rmtree(self.folder / str(self.count - 1), ignore_errors=True)
        folder = self.folder / str(self.count)
        folder.mkdir()
        return folder

    def words(self, output: Path, *extra) -> list[str]:
        flags = ("--max-steps", STEPS, "--log-freq", 1, "--num-steps-per-checkpoint", 2, "--resume-from-checkpoint")
        return [str(word) for word in pretraining_command(self.shards, self.config, output, *flags, *extra)[1:]]

    def strategy(self) -> tuple[int, int, tuple[str, ...]]:
        """The number of a strategy, its processes and its flags."""
        number = self.random.randrange(len(STRATEGIES))
        return number, *STRATEGIES[number]

    def results(self, output: Path) -> tuple[set, bytes]:
        """Every loss that was ever logged, also of steps that were made again, and the last weights."""
        lines = (output / "report.json").read_text().splitlines()
        entries = [json.loads(line.removeprefix("DLLL ")) for line in lines if line.endswith("}")]
        losses = {(entry["step"][0], entry["data"]["loss"]) for entry in entries if "loss" in entry["data"]}
        return losses, (output / "custom" / "phase1" / str(STEPS) / "model.safetensors").read_bytes()

    def complete(self, number: int, folder: Path) -> None:
        """Continues a run to its end and compares it with the undisturbed one."""
        count, flags = STRATEGIES[number]
        (folder / "log").unlink(missing_ok=True)
        check_end(wait(start_run(self.words(folder, *flags), folder / "log", count)), folder / "log", (0,))
        if number not in self.undisturbed:
            alone = self.folder / f"undisturbed-{number}"
            alone.mkdir()
            check_end(wait(start_run(self.words(alone, *flags), alone / "log", count)), alone / "log", (0,))
            self.undisturbed[number] = self.results(alone)
        if self.results(folder) != self.undisturbed[number]:
            raise Failure(f"steps differ, with {count} processes {' '.join(flags)}")


def last_step(output: Path) -> int:
    with contextlib.suppress(OSError):
        return max(reported(output / "report.json"), default=0)
    return 0


# --- attacks ----------------------------------------------------------------------------------------------------------


def kills(arena: Arena, tally: Tally) -> None:
    """One run, killed at up to 4 random moments: all its processes, or one of them."""
    number, count, flags = arena.strategy()
    folder = arena.new_folder()
    for _ in range(arena.random.randint(1, 4)):
        (folder / "log").unlink(missing_ok=True)
        pids = start_run(arena.words(folder, *flags), folder / "log", count)
        target, end = last_step(folder) + arena.random.randint(0, 4), time.monotonic() + 60
        while last_step(folder) < target and time.monotonic() < end and not is_over(pids):
            time.sleep(0.02)
        time.sleep(arena.random.uniform(0, 0.3))
        victims = pids if arena.random.random() < 0.5 else [arena.random.choice(pids)]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        tally.tried += 1
        codes = wait(pids, terminate_after=LAUNCHER_SECONDS)
        check_end(codes, folder / "log", (0, 2, -signal.SIGKILL, -signal.SIGTERM))
    arena.complete(number, folder)


def is_over(pids: list[int]) -> bool:
    """Whether a process has ended; it is not waited for."""
    return any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None for pid in pids)


def io_faults(arena: Arena, tally: Tally) -> None:
    """A call of the system fails, at a random moment of a run of one process; then the run is continued."""
    name = arena.random.choice(["fsync", "rename", "mkdir", "unlink", "open", "write_text", "copyfile"])
    number = arena.random.choice([errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ESTALE])
    moment = arena.random.randint(1, 40)

    def fail_once() -> None:
        owner = {"write_text": Path, "copyfile": shutil}.get(name, os)
        original, calls = getattr(owner, name), 0

        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == moment:
                raise OSError(number, os.strerror(number), str(args[0]))
            return original(*args, **kwargs)

        setattr(owner, name, call)

    folder = arena.new_folder()
    tally.tried += 1
    codes = wait([start(arena.words(folder), folder / "log", {}, fail_once)])
    check_end(codes, folder / "log")
    arena.complete(0, folder)


ODD_VALUES = (
    "",
    "-1",
    "0",
    "1e30",
    "nan",
    "9" * 5000,
    "../x",
    "\u00b2",
    "\udc80",
    "None",
    "auto",
    "1" + "0" * 30,
    "x" * 300,
)
ODD_JSON = (None, -1, 0, 1.5, True, "", "x", [], {}, 10**30, float("nan"), float("inf"))


def bad_inputs(arena: Arena, tally: Tally) -> None:
    """An odd value of a flag or of the config, or a shard with changed bytes."""
    folder = arena.new_folder()
    words = arena.words(folder, "--steps-this-run", "1")
    kind = arena.random.choice(["flag", "config", "shard"])
    if kind == "flag":
        flags = [word for word in words if word.startswith("--")] + ["--seed", "--optimizer", "--from-checkpoint"]
        words += [arena.random.choice(flags) + "=" + arena.random.choice(ODD_VALUES), "--steps-this-run", "1"]
    elif kind == "config":
        config = {**TINY, arena.random.choice(sorted(TINY)): arena.random.choice(ODD_JSON)}
        (folder / "config.json").write_text(json.dumps(config))
        words += ["--config-file", str(folder / "config.json")]
    else:
        shutil.copytree(arena.shards, folder / "shards")
        change_bytes(arena.random.choice(sorted((folder / "shards").iterdir())), arena.random)
        words += ["--input-dir", str(folder / "shards")]
    tally.tried += 1
    check_end(wait([start(words, folder / "log", {})]), folder / "log")


def fuzzed_files(arena: Arena, tally: Tally) -> None:
    """A file of a checkpoint with changed bytes and, half of the time, a checksum that fits."""
    if not (arena.folder / "checkpoint").is_dir():
        output = arena.folder / "undisturbed-fuzz"
        output.mkdir()
        check_end(wait([start(arena.words(output), output / "log", {})]), output / "log", (0,))
        shutil.copytree(output / "custom" / "phase1" / str(STEPS), arena.folder / "checkpoint")
    folder = arena.new_folder()
    changed = folder / str(STEPS)
    shutil.copytree(arena.folder / "checkpoint", changed)
    change_bytes(arena.random.choice(sorted(changed.iterdir())), arena.random)
    if arena.random.random() < 0.5:
        paths = [path for path in sorted(changed.iterdir()) if path.name != MANIFEST_FILE]
        sizes = {path.name: path.stat().st_size for path in paths}
        blocks = [(path, block) for path in paths for block in range(num_blocks(sizes[path.name]))]
        digests = [block_digest(*block) for block in blocks]
        (changed / MANIFEST_FILE).write_text(json.dumps(manifest_of(sizes, digests)))
    flag = arena.random.choice(["--from-checkpoint", "--from-pretrained-params"])
    words = [word for word in arena.words(folder / "output") if word != "--resume-from-checkpoint"]
    words += [flag, str(changed), "--benchmark", "--benchmark-steps", "1", "--benchmark-warmup-steps", "1"]
    tally.tried += 1
    check_end(wait([start(words, folder / "log", {})]), folder / "log")


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


ATTACKS = {
    "SIGKILL at a random moment": kills,
    "failing system call": io_faults,
    "bad input": bad_inputs,
    "changed checkpoint file": fuzzed_files,
}


def main() -> int:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=bounded_float(0, 10_000), default=10, help="how long to attack")
    parser.add_argument("--seed", type=non_negative_int, default=0, help="seed of the attacks")
    args = parser.parse_args()
    tallies = {name: Tally() for name in ATTACKS}
    end = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as folder:
        arena = Arena(Path(folder), args.seed)
        while time.monotonic() < end:
            for name, attack in ATTACKS.items():
                for _ in range(1 if attack is kills else 4):
                    if time.monotonic() > end:
                        break
                    try:
                        attack(arena, tallies[name])
                    except Failure as failure:
                        tallies[name].failures.append(str(failure))
                        print(f"{name}: {failure}", flush=True)
                        kept = Path(tempfile.mkdtemp(prefix="torture-"))
                        shutil.copytree(arena.folder / str(arena.count), kept, dirs_exist_ok=True)
                        print(f"  its files are in {kept}", flush=True)
    print("| attack | tried | survived |\n|---|---|---|")
    for name, tally in tallies.items():
        print(f"| {name} | {tally.tried} | {tally.tried - len(tally.failures)} |")
    return int(any(tally.failures for tally in tallies.values()))


if __name__ == "__main__":
    run_main(main)
