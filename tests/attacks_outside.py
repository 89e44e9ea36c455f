"""Attacks of torture.py on what is around a run: disks, memory limits, shards, links, logs and servers."""

import contextlib
import functools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from attacks import (
    ALONE,
    ERRNOS,
    FAULTS,
    LAUNCHER_SECONDS,
    ODD_JSON,
    STEPS,
    STRATEGIES,
    TWO_SHARDED,
    Arena,
    Failure,
    change_bytes,
    check_end,
    fail,
    is_over,
    last_step,
    start,
    start_run,
    wait,
    watch,
)
from conftest import write_shards
from small_runs import steps_folder
from test_download import CONTENT, SHA256, Handler, Server, drops, says, sends, whole
from test_memory import machine
from test_report import ODD_NAMES

import report
from data_preparation.sources import download as downloads
from utils import measure
from utils.files import LOCK_FILE

PRECIOUS = "nobody may change this"
KIB, MIB = 2**10, 2**20


def wait_for_step(pids: list[int], folder: Path, step: int) -> None:
    """Waits until `step` is logged, or a process has ended."""
    end = time.monotonic() + 60
    while last_step(folder) < step and not is_over(pids) and time.monotonic() < end:
        time.sleep(0.005)


def check_text(text: str) -> None:
    if strange := [character for character in text if not character.isprintable() and character != "\n"]:
        raise Failure(f"the character {strange[0]!r} in the output")


# --- disks ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A file system of `size` bytes at the new path `folder`; needs the right to mount one."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def disk(arena: Arena, folder: Path, random_: random.Random) -> int:
    """The disk fills up, or all its calls fail from one moment on, or it is slow and the run is stopped while it
    writes; then the run is continued."""
    kind, number = random_.choice(["full", "failing", "slow"]), random_.choice((ALONE, ALONE, TWO_SHARDED))
    count, flags = STRATEGIES[number]
    if kind == "full":
        with small_disk(folder / "disk", random_.randrange(4 * KIB, 4 * MIB)) as output:
            pids = start_run(arena.words(output, *flags), folder / "log", count)
            check_end(wait(pids), folder / "log", (0, 2))
            is_full = last_step(output) < STEPS
            subprocess.run(["mount", "-o", f"remount,size={64 * MIB}", output], check=True)
            arena.complete(number, output)
        return int(is_full)
    calls = sum(arena.calls[number].values())
    moment = random_.randint(1, calls)
    if kind == "failing":
        disturb = functools.partial(fail, range(moment, 10**9), random_.choice(ERRNOS))
    else:
        longest = random_.uniform(0.01, 0.1)
        disturb = functools.partial(delay, longest)
    inject = functools.partial(break_disk, folder, disturb)
    pids = start_run(arena.words(folder, *flags), folder / "log", count, dict.fromkeys(range(count), inject))
    if kind == "slow":
        wait_for_step(pids, folder, random_.randint(1, STEPS))
        for pid in pids if random_.random() < 0.5 else pids[:1]:
            os.kill(pid, signal.SIGTERM)
    check_end(wait(pids), folder / "log", (0, 2))
    arena.complete(number, folder)
    return 1


def delay(longest: float, _call: int, _path: str) -> None:
    time.sleep(random.uniform(0, longest))


def break_disk(folder: Path, disturb) -> None:
    def disturb_files_of_the_run(call: int, path: str) -> None:
        if path.startswith(str(folder)):
            disturb(call, path)

    for name in FAULTS:
        watch(name, folder / "calls", disturb_files_of_the_run)


# --- memory limits ----------------------------------------------------------------------------------------------------


def memory_limit(arena: Arena, folder: Path, random_: random.Random) -> int:
    """A limit of a cgroup of version 1 or 2, at any depth, as the files of a made-up hierarchy; or a limit that the
    kernel enforces on the data of one process. Then the run is continued without it."""
    number = random_.choice((ALONE, ALONE, TWO_SHARDED))
    count, flags = STRATEGIES[number]
    if random_.random() < 0.5:
        inject = functools.partial(limit_data, int(MIB * 2 ** random_.uniform(-4, 8)))
    else:
        used = random_.randrange(2**34)
        limit = max(0, used + int(random_.choice([-1, 1, 1, 1]) * 2 ** random_.uniform(10, 34)))
        cache = random_.choice([0, random_.randrange(used + 1)])
        groups = ["job", "job/step", "job/step/task"][: random_.randint(1, 3)]
        if random_.random() < 0.5:
            cgroup, mount = f"0::/{groups[-1]}\n", ""
            files = {"memory.max": limit, "memory.current": used, "memory.stat": f"inactive_file {cache}\n"}
            unlimited = {**files, "memory.max": "max\n"}
        else:
            cgroup, mount = f"4:memory:/{groups[-1]}\n0::/\n", "memory/"
            files = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used}
            files |= {"memory.stat": f"total_inactive_file {cache}\n"}
            unlimited = {**files, "memory.limit_in_bytes": 9223372036854771712}
        limited = random_.choice(groups)
        machine(folder / "root", cgroup, {mount + group: files if group == limited else unlimited for group in groups})
        shutil.copy("/proc/meminfo", folder / "root" / "proc" / "meminfo")
        inject = functools.partial(use_root, folder / "root")
    pids = start_run(arena.words(folder, *flags), folder / "log", count, {random_.randrange(count): inject})
    # glibc and C++ end a process themselves if there is no memory for a thread or an exception.
    may_be = (0, 2, -signal.SIGTERM, 127, -signal.SIGABRT) if inject.func == limit_data else (0, 2, -signal.SIGTERM)
    check_end(wait(pids, LAUNCHER_SECONDS), folder / "log", may_be)
    arena.complete(number, folder)
    return 1


def limit_data(further: int) -> None:
    (kilobytes,) = [line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line]
    limit = int(kilobytes) * KIB + further
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def use_root(root: Path) -> None:
    for function in (measure.available_memory, measure.total_memory):
        function.__defaults__ = (root,)


# --- shards -----------------------------------------------------------------------------------------------------------


def shard(arena: Arena, folder: Path, random_: random.Random) -> int:
    """A shard that is truncated, replaced or removed during a run. The run ends or goes on with the data that it had;
    with the changed shard it is not resumed, and with the old one it is."""
    number = random_.choice(arena.numbers)
    count, flags = STRATEGIES[number]
    shards = shutil.copytree(arena.inputs.shards, folder / "shards")
    victim = random_.choice(sorted(shards.iterdir()))
    original = arena.inputs.shards / victim.name
    words = arena.words(folder, *flags, "--input-dir", shards)
    pids = start_run(words, folder / "log", count)
    wait_for_step(pids, folder, random_.randint(1, STEPS - 1))
    time.sleep(random_.uniform(0, 0.05))
    kind = random_.choice(["truncated", "emptied", "replaced", "overwritten", "removed"])
    if kind == "truncated":
        os.truncate(victim, random_.randrange(original.stat().st_size))
    elif kind == "emptied":
        victim.write_bytes(b"")
    elif kind == "removed":
        victim.unlink()
    else:
        size = 40 if "000" in victim.name else 24
        other = next(write_shards(folder / "other", sizes=(size,), seed=random_.randrange(10, 10**6)).iterdir())
        if kind == "replaced":
            other.rename(victim)
        else:
            victim.write_bytes(other.read_bytes())
    tried = not is_over(pids)
    codes = wait(pids)
    # Rows that are overwritten in place may be read half, which the check of their values finds or the resume does.
    check_end(codes, folder / "log", (0, 2))
    if last_step(folder) < STEPS:
        (folder / "log").unlink()
        check_end(wait(start_run(words, folder / "log", count)), folder / "log", (2,))
    shutil.copy(original, victim)
    if kind != "overwritten":
        arena.complete(number, folder)
    return int(tried)


# --- links ------------------------------------------------------------------------------------------------------------


def link(arena: Arena, folder: Path, random_: random.Random) -> int:
    """Links in the folder of steps, made before or during a run. What they lead to stays as it is."""
    number = random_.choice((ALONE, ALONE, TWO_SHARDED))
    count, flags = STRATEGIES[number]
    steps = steps_folder(folder)
    steps.mkdir(parents=True)
    targets = folder / "precious"
    targets.mkdir()
    (targets / "file").write_text(PRECIOUS)
    (targets / "folder").mkdir()
    (targets / "folder" / "file").write_text(PRECIOUS)
    shutil.copytree(arena.checkpoint, targets / "checkpoint")
    before = contents(targets)
    names = [LOCK_FILE, "run.json", "run.json.tmp-1", "0.tmp-1", "manifest.json", ".lock.tmp-1", "probe.tmp-1"]
    names += [str(step) for step in range(1, STEPS + 2)] + [f"{step}.tmp-0123456789abcdef" for step in (2, STEPS)]

    def make_links() -> None:
        for name in random_.sample(names, random_.randint(1, 4)):
            target = random_.choice(["file", "file", "folder", "checkpoint", "missing", "hard link"])
            path = steps / name
            with contextlib.suppress(OSError):
                path.unlink()
            with contextlib.suppress(OSError):
                path.hardlink_to(targets / "file") if target == "hard link" else path.symlink_to(targets / target)

    if is_before := random_.random() < 0.5:
        make_links()
    pids = start_run(arena.words(folder, *flags), folder / "log", count)
    if not is_before:
        wait_for_step(pids, folder, random_.randint(0, STEPS - 1))
        make_links()
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
    check_end(wait(pids), folder / "log", (0, 2, -signal.SIGTERM))
    if contents(targets) != before:
        raise Failure("the target of a link has changed")
    for path in steps.iterdir():
        if path.is_symlink() or (path.is_file() and path.stat().st_nlink > 1):
            path.unlink()
    arena.complete(number, folder)
    if contents(targets) != before:
        raise Failure("the target of a link has changed")
    return 1


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


# --- logs -------------------------------------------------------------------------------------------------------------


def log(arena: Arena, folder: Path, random_: random.Random) -> int:
    """report.py on the log of a run with changed values, lines and bytes."""
    lines = (arena.folder / f"undisturbed-{ALONE}" / "report.json").read_text().splitlines()
    odd = [*ODD_JSON, *ODD_NAMES, 10**400, -1e308, 5e-324, "1e20", [[None]], {"loss": 1}]
    for _ in range(random_.randint(1, 12)):
        position = random_.randrange(len(lines))
        try:
            record = json.loads(lines[position].removeprefix("DLLL "))
        except (ValueError, RecursionError):  # an earlier change
            continue
        place = record if random_.random() < 0.4 or not isinstance(record.get("data"), dict) else record["data"]
        key = random_.choice([*place, *ODD_NAMES])
        kind = random_.choice(["value", "value", "value", "remove", "repeat", "deep", "cut"])
        if kind == "remove":
            place.pop(key, None)
        elif kind == "repeat":
            lines.insert(random_.randrange(len(lines)), lines[position])
        else:
            place[key] = random_.choice(odd)
        lines[position] = "DLLL " + json.dumps(record)
        if kind == "deep":
            lines[position] = "DLLL " + "[" * random_.choice([10, 900, 10**5])
        elif kind == "cut":
            lines[position] = lines[position][: random_.randrange(len(lines[position]))]
    (folder / "run").mkdir()
    path = folder / "run" / random_.choice(["log.json", "\x1b[2J.json", "\udc80.json", "a'b\"<i>.json"])
    path.write_text("\n".join(lines) + random_.choice(["\n", ""]))
    if random_.random() < 0.3:
        change_bytes(path, random_)
    if random_.random() < 0.1:
        path.with_name("more.json").symlink_to(random_.choice([path, "/dev/zero", folder, "missing", "more.json"]))
    page = folder / "page.html"
    check_end(
        wait([start([str(folder / "run"), "--output", str(page)], folder / "log", program=report.main)]), folder / "log"
    )
    check_text((folder / "log").read_text())
    if page.exists():
        check_text(page.read_text())
        if "<script>" in page.read_text():
            raise Failure("a name in the log is markup in the page")
    return 1


# --- servers ----------------------------------------------------------------------------------------------------------


def server(_arena: Arena, folder: Path, random_: random.Random) -> int:
    """A download from a server that answers each request in another odd way."""
    answers = [hostile_answer(random_) for _ in range(random_.randint(1, 5))]
    if random_.random() < 0.5:
        answers.append(whole)
    has_size, has_checksum = random_.random() < 0.5, random_.random() < 0.7
    target = folder / "file.bin"

    def download(_words: list[str]) -> None:
        web = Server()
        web.handle_error = lambda *_: None  # the client may hang up
        web.answers = list(answers)
        size, checksum = len(CONTENT) if has_size else None, SHA256 if has_checksum else None
        downloads.TIMEOUT, downloads.FIRST_WAIT, downloads.ATTEMPTS = 0.5, 0.01, 4  # this is a process of its own
        downloads.fetch([web.url()], target, checksum, size)

    code = wait([start([], folder / "log", program=download)])
    check_end(code, folder / "log")
    check_text((folder / "log").read_text().replace("\r", ""))
    written = sum(path.stat().st_size for path in folder.iterdir() if path.name.startswith("file.bin"))
    if (code == [0]) != target.exists() or (has_checksum and target.exists() and target.read_bytes() != CONTENT):
        raise Failure(f"exit code {code[0]} with another file than that of the server")
    if has_size and written > len(CONTENT):
        raise Failure(f"{written} bytes written for a file of {len(CONTENT)}")
    return 1


def hostile_answer(random_: random.Random):
    """A function that answers one request."""
    numbers = [
        "-5",
        "0",
        "1",
        "299999",
        "300001",
        "9" * 16,
        "9" * 5000,
        "\u00b2",
        "1e5",
        "0x10",
        " ",
        "nan",
        "5, 5",
        "+7",
    ]
    first, last, total = (random_.choice(numbers).encode().decode("latin-1") for _ in range(3))
    sent = random_.randrange(len(CONTENT) + 1)
    seed = random_.randrange(2**32)
    odd = (
        random_.choice(["\x1b]0;owned\x07", "\x9b31m", "x" * 70_000, "\u202e", "a: b", "\0"]).encode().decode("latin-1")
    )

    def raw(content: bytes):
        def answer(handler: Handler) -> None:
            with contextlib.suppress(OSError):
                handler.wfile.write(content)
            handler.close_connection = True

        return answer

    def odd_reason(handler: Handler) -> None:
        handler.send_response(random.Random(seed).choice([200, 206, 404, 429, 503, 600]), odd)
        handler.send_header("X-Odd", odd)
        handler.end_headers()

    def slow(handler: Handler) -> None:
        handler.send(CONTENT[:sent], claim=len(CONTENT))
        time.sleep(0.8)

    headers = b"HTTP/1.1 200 OK\r\n"
    return random_.choice(
        [
            drops,
            sends(b"<!DOCTYPE html><html>log in first</html>"),
            slow,
            odd_reason,
            says(
                random_.choice([301, 302, 307]), Location=random_.choice(["/file.bin", "file:///etc/passwd", "//", odd])
            ),
            says(random_.choice([401, 403, 404, 408, 416, 425, 429, 500, 503]), Retry_After=first),
            lambda handler: handler.send(CONTENT[:sent], claim=-1, Content_Length=first),
            lambda handler: handler.send(CONTENT, claim=-1),
            lambda handler: handler.send(CONTENT + CONTENT, claim=random.Random(seed).choice([-1, len(CONTENT), None])),
            lambda handler: handler.send(CONTENT[sent:], 206, Content_Range=f"bytes {first}-{last}/{total}"),
            lambda handler: handler.send(CONTENT[sent:], 206, Content_Range=f"bytes {sent}-299999/{total}"),
            lambda handler: handler.send(random.Random(seed).randbytes(len(CONTENT))),
            lambda handler: handler.send(CONTENT, Content_Encoding="gzip", Transfer_Encoding="chunked"),
            raw(b""),
            raw(random.Random(seed).randbytes(sent)),
            raw(headers + b"X: y\r\n" * random_.choice([10, 200, 10_000])),
            raw(headers + b"Content-Length: 3\r\nContent-Length: 300000\r\n\r\n" + CONTENT),
            raw(
                headers
                + b"Transfer-Encoding: chunked\r\n\r\n"
                + random_.choice([b"-1", b"FFFFFFFFFFFFFFFFF", b"5"])
                + b"\r\nab"
            ),
            raw(b"HTTP/" + first.encode() + b" " + last.encode("utf-8", "replace") + b"\r\n\r\n"),
        ]
    )
