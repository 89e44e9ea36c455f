"""Downloads files: resumes with range requests, tries mirrors, retries, verifies checksums, and gives a file its final
name only when it is complete.

An unfinished download is `<name>.part` beside the final path. The next attempt or the next run continues it if the file
has a published checksum, which tells whether the bytes of both belong together.
"""

import http.client
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import urlsplit

from tqdm import tqdm

from data_preparation.engine.runner import MANIFEST
from utils.errors import UserError, one_line
from utils.files import file_digest, sync
from utils.progress import progress_bar

BLOCK = 1 << 20  # bytes
MAX_SIZE = 1 << 40  # bytes of a file whose size is not pinned
MAX_REASON = 200  # characters of a server's message that are shown
RETRIED_STATUSES = {403, 408, 416, 425, 429, 500, 502, 503, 504}
NETWORK_ERRORS = (OSError, http.client.HTTPException, ValueError, OverflowError)

WIKIMEDIA_MIRRORS = (
    "https://dumps.wikimedia.org",
    "https://dumps.wikimedia.your.org",
    "https://mirror.accum.se/mirror/wikimedia.org/dumps",
)
SQUAD_MIRRORS = (
    "https://rajpurkar.github.io/SQuAD-explorer/dataset",
    "https://raw.githubusercontent.com/rajpurkar/SQuAD-explorer/master/dataset",
)


class Checksum(NamedTuple):
    algorithm: str  # a name that hashlib knows
    hexdigest: str


class PinnedFile(NamedTuple):
    path: PurePosixPath  # on the server
    size: int
    sha256: str

    def fetch(self, folder: Path, mirrors: Sequence[str]) -> None:
        urls = [f"{mirror}/{self.path}" for mirror in mirrors]
        fetch(urls, folder / self.path.name, Checksum("sha256", self.sha256), self.size)


def read_pins() -> dict[str, list[PinnedFile]]:
    """The published files of each data set, with their sizes and hashes."""
    pins: dict[str, list[PinnedFile]] = {}
    for line in Path(__file__).with_name("pins.txt").read_text().splitlines()[1:]:
        name, size, sha256, path = line.split()
        pins.setdefault(name, []).append(PinnedFile(PurePosixPath(path), int(size), sha256))
    return pins


PINS = read_pins()


class RetryPolicy(NamedTuple):
    """When `fetch` gives up. An attempt that receives more of the file than all before it restarts the count."""

    attempts: int = 10  # failed attempts in a row
    first_wait: float = 1.0  # seconds; doubled after each failure
    longest_wait: float = 120.0
    timeout: float = 60.0  # seconds without data


POLICY = RetryPolicy()


class FailedAttempt(Exception):
    """One attempt at one address failed. wait: seconds that the server asked to wait. final: trying this address again
    is useless."""

    def __init__(self, reason: str, wait: float = 0.0, final: bool = False):
        super().__init__(re.sub(r"[^ -~]", "?", one_line(reason))[:MAX_REASON])  # it may quote what a server said
        self.wait, self.final = wait, final


def fetch(urls: Sequence[str], path: Path, checksum: Checksum | None = None, size: int | None = None) -> None:
    """Downloads one file to `path`, unless it is there already. `urls`: addresses of the same file.

    size: in bytes, if known. Raises `UserError` if `POLICY` gives up; the bytes so far stay for the next run.
    """
    for url in urls:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise UserError(f"{url!r} is not an http or https address: correct it")
    if path.exists():
        if reason := mismatch(path, checksum, size):
            raise UserError(f"{path} exists, but {reason}: remove it to download it again")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    sources, turn, failures, furthest = list(urls), 0, 0, size_of(part)
    while True:
        url = sources[turn % len(sources)]
        try:
            transfer(url, part, size, checksum, POLICY.timeout)
            if reason := mismatch(part, checksum, size):
                part.unlink()
                raise FailedAttempt(f"the downloaded file is wrong: {reason}")
            break
        except FailedAttempt as failure:
            progressed, furthest = size_of(part) > furthest, max(furthest, size_of(part))
            failures = 1 if progressed else failures + 1
            if failure.final:
                sources.remove(url)
            elif not progressed:
                turn += 1
            if not sources or failures >= POLICY.attempts:
                raise UserError(
                    f"cannot download {url}: {failure}; gave up after {failures} attempts in a row: "
                    "check the network and the address, then run the same command to continue"
                ) from failure
            if not failure.final:
                wait = min(max(failure.wait, POLICY.first_wait * 2 ** (failures - 1)), POLICY.longest_wait)
                tqdm.write(f"{path.name}: {failure}; next attempt in {wait:.0f} s", file=sys.stderr)
                time.sleep(wait)
    sync(part)
    part.rename(path)


def size_of(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def transfer(url: str, part: Path, size: int | None, checksum: Checksum | None, timeout: float) -> None:
    """One attempt: continues `part` if a checksum will verify it, else starts anew. Raises `FailedAttempt` unless the
    part has the length that the server announced in the end."""
    start = size_of(part) if checksum else 0
    if start and start == size:
        return
    headers = {"User-Agent": "bert-recipe (data preparation)", "Accept-Encoding": "identity"}
    try:
        headers |= {"Range": f"bytes={start}-"} if start else {}
        request = urllib.request.Request(url, headers=headers)  # noqa: S310 - fetch checks the scheme, urllib redirects
        response = urllib.request.urlopen(request, timeout=timeout)  # noqa: S310
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # no such range: the part is complete, or longer than the file
            if mismatch(part, checksum, size) is None:
                return
            part.unlink()
        wait = parse_count(error.headers.get("Retry-After")) or 0
        final = error.code not in RETRIED_STATUSES
        raise FailedAttempt(f"HTTP status {error.code} {error.reason}", wait, final) from error
    except NETWORK_ERRORS as error:
        raise FailedAttempt(f"no response ({str(error) or type(error).__name__})") from error
    with response:
        if start and response.status == 206:
            sent = response.headers.get("Content-Range", "")
            range_ = re.fullmatch(r"bytes ([0-9]{1,15})-[0-9]{1,15}/([0-9]{1,15}|\*)", sent)
            if not range_ or int(range_[1]) != start:
                part.unlink()
                raise FailedAttempt("the server sent a range that was not requested")
            total = parse_count(range_[2])
        elif response.status == 200:
            start, total = 0, parse_count(response.headers.get("Content-Length"))
            if total is None and checksum is None and size is None:
                raise FailedAttempt(
                    "the server does not announce the length of the file, so a truncated file could not be noticed",
                    final=True,
                )
        else:
            raise FailedAttempt(f"unexpected HTTP status {response.status}")
        if total is not None and total != (size or total):
            raise FailedAttempt(f"the server announces {total:,} bytes, not {size:,}")
        blocks = read_blocks(response)
        first = next(blocks, b"")
        is_html = response.headers.get_content_type() in ("text/html", "application/xhtml+xml")
        if not start and (is_html or first.lstrip().lower().startswith((b"<!doctype html", b"<html"))):
            raise FailedAttempt("the response is a web page instead of the file")  # no data set here is HTML
        limit, bar = size or total or MAX_SIZE, progress_bar(total, part.stem, initial=start)
        with bar, part.open("ab" if start else "wb") as file:
            for block in chain([first], blocks):
                start += len(block)
                if start > limit:
                    part.unlink()
                    raise FailedAttempt(f"the server sends more than the {limit:,} bytes of the file")
                file.write(block)
                bar.update(len(block))
    if start != (total or start):
        raise FailedAttempt(f"the connection ended after {start:,} of {total:,} bytes")


def read_blocks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    try:
        while block := response.read1(BLOCK):
            yield block
    except NETWORK_ERRORS as error:
        raise FailedAttempt(f"the connection broke ({str(error) or type(error).__name__})") from error


def parse_count(text: str | None) -> int | None:
    """The value of a header that is a number; None for anything else, such as a number of thousands of digits."""
    return int(text) if text and re.fullmatch("[0-9]{1,15}", text) else None


def mismatch(path: Path, checksum: Checksum | None, size: int | None) -> str | None:
    """How the file differs from what is expected; None if it does not."""
    actual_size = path.stat().st_size
    if size is not None and actual_size != size:
        return f"it has {actual_size:,} bytes, not {size:,}"
    if checksum and (digest := file_digest(path, checksum.algorithm)) != checksum.hexdigest:
        return f"its {checksum.algorithm} is {digest}, not {checksum.hexdigest}"
    return None if actual_size else "it is empty"


def fetch_squad(version: str, folder: Path, mirrors: Sequence[str] = SQUAD_MIRRORS) -> None:
    """The training and development file of SQuAD `version` ("1.1" or "2.0")."""
    for file in PINS[f"squad-{version}"]:
        file.fetch(folder, mirrors)


def fetch_wikipedia(
    language: str, folder: Path, date: str = "latest", mirrors: Sequence[str] = WIKIMEDIA_MIRRORS
) -> None:
    """The articles of the Wikipedia in `language` ("en", "simple", "zh-min-nan"), from the dump of `date` (YYYYMMDD).

    The published list of SHA-1 checksums names the dated file, so that `latest` cannot change in the middle. Once the
    list is in `folder`, later runs continue with the dump that it names.
    """
    wiki = language.replace("-", "_") + "wiki"
    sums = folder / f"{wiki}-{date}-sha1sums.txt"
    fetch([f"{mirror}/{wiki}/{date}/{sums.name}" for mirror in mirrors], sums)
    pattern = rf"([0-9a-f]{{40}})  ({wiki}-(\d{{8}})-pages-articles-multistream\.xml\.bz2)"
    match = re.search(pattern, sums.read_text(encoding="utf-8", errors="replace"))
    if not match:
        raise UserError(
            f"{sums} lists no {wiki}-*-pages-articles-multistream.xml.bz2: this dump is not finished: "
            "remove the list and choose an earlier one with --dump-date YYYYMMDD"
        )
    digest, name, run = match.groups()
    fetch([f"{mirror}/{wiki}/{run}/{name}" for mirror in mirrors], folder / name, Checksum("sha1", digest))


def names_of(urls: Sequence[str]) -> dict[str, str]:
    """File name, which is the last part of the path -> address."""
    names: dict[str, str] = {}
    for url in urls:
        name = Path(urlsplit(url).path).name
        if name in ("", ".", "..", MANIFEST) or not name.isprintable():
            raise UserError(f"{url!r} does not end in a usable file name: correct it")
        if names.setdefault(name, url) != url:
            raise UserError(f"{names[name]} and {url} end in the same file name: keep one of them")
    return names


def fetch_books(urls: Sequence[str], folder: Path) -> None:
    """The file of each address. There are no published checksums of books, so only their length is checked."""
    for name, url in tqdm(names_of(urls).items(), desc="books", unit="file", disable=None, leave=False):
        fetch([url], folder / name)
