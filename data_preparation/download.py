"""Downloads files: resumes with range requests, tries mirrors, retries, verifies checksums, and gives a file its final
name only when it is complete.

An unfinished download is `<name>.part` beside the final path. The next attempt or the next run continues it if the file
has a published checksum, which tells whether the bytes of both belong together.
"""

import contextlib
import http.client
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from tqdm import tqdm

from data_preparation import manifest
from utils.errors import UserError, one_line
from utils.files import file_digest, sync
from utils.progress import progress_bar

CHUNK = 1 << 20
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
# Size in bytes and SHA-256 of the published files.
SQUAD_FILES = {
    "train-v1.1.json": (30_288_272, "3527663986b8295af4f7fcdff1ba1ff3f72d07d61a20f487cb238a6ef92fd955"),
    "dev-v1.1.json": (4_854_279, "95aa6a52d5d6a735563366753ca50492a658031da74f301ac5238b03966972c9"),
    "train-v2.0.json": (42_123_633, "68dcfbb971bd3e96d5b46c7177b16c1a4e7d4bdef19fb204502738552dede002"),
    "dev-v2.0.json": (4_370_528, "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8"),
}


class Checksum(NamedTuple):
    algorithm: str  # a name that hashlib knows
    hexdigest: str


class RetryPolicy(NamedTuple):
    """When `fetch` gives up. An attempt that receives more of the file than all before it restarts the count."""

    attempts: int = 10  # failed attempts in a row
    first_wait: float = 1.0  # seconds; doubled after each failure
    longest_wait: float = 120.0
    timeout: float = 60.0  # seconds without data


DEFAULT_POLICY = RetryPolicy()


class FailedAttempt(Exception):
    """One attempt at one address failed."""

    def __init__(self, reason: str, wait: float = 0.0, final: bool = False, status: int | None = None):
        super().__init__(reason)
        self.status = status  # HTTP status, if there was one
        self.wait = wait  # seconds that the server asked to wait
        self.final = final  # trying this address again is useless


def fetch(
    urls: Sequence[str],
    path: Path,
    checksum: Checksum | None = None,
    size: int | None = None,
    check: Callable[[Path], None] | None = None,
    policy: RetryPolicy = DEFAULT_POLICY,
) -> None:
    """Downloads one file to `path`, unless it is there already. `urls`: addresses of the same file.

    size: in bytes, if known. check: raises `UserError` for an invalid file.
    Raises `UserError` if `policy` gives up; the bytes so far stay for the next run.
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
            transfer(url, part, size, checksum, policy.timeout)
            accept(part, checksum, size, check)
            break
        except FailedAttempt as failure:
            progressed, furthest = size_of(part) > furthest, max(furthest, size_of(part))
            failures = 1 if progressed else failures + 1
            if failure.final:
                sources.remove(url)
            elif not progressed:
                turn += 1
            if not sources or failures >= policy.attempts:
                raise UserError(
                    f"cannot download {url}: {failure}; gave up after {failures} attempts in a row: "
                    "check the network and the address, then run the same command to continue"
                ) from failure
            if not failure.final:
                wait = max(failure.wait, policy.first_wait * 2 ** (failures - 1))
                wait = min(wait, policy.longest_wait)
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
        response = open_url(url, headers | ({"Range": f"bytes={start}-"} if start else {}), timeout)
    except FailedAttempt as failure:
        if failure.status == 416:  # no such range: the part is complete, or longer than the file
            if mismatch(part, checksum, size) is None:
                return
            part.unlink()
        raise
    with response:
        if response.status == 206:
            total = total_of_range(response, part, start)
        elif response.status == 200:
            start, total = 0, parse_count(response.headers.get("Content-Length"))
            if total is None and checksum is None and size is None:
                raise FailedAttempt(
                    "the server does not announce the length of the file, so a truncated file could not be noticed",
                    final=True,
                )
            refuse_web_page(response)
        else:
            raise FailedAttempt(f"unexpected HTTP status {response.status}")
        if total is not None and total != (size or total):
            raise FailedAttempt(f"the server announces {total:,} bytes, not {size:,}")
        copy_body(response, part, start, total, size or total or MAX_SIZE)
    if total is not None and size_of(part) != total:
        raise FailedAttempt(f"the connection ended after {size_of(part):,} of {total:,} bytes")


def open_url(url: str, headers: dict[str, str], timeout: float) -> http.client.HTTPResponse:
    """The response to a GET request. Only http and https, also after a redirect; no file:, ftp: or data: addresses."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.UnknownHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
    ):
        opener.add_handler(handler())
    opener.addheaders = list(headers.items())
    try:
        return opener.open(url, timeout=timeout)
    except urllib.error.HTTPError as error:
        with error:
            wait = parse_count(error.headers.get("Retry-After")) or 0
            final = error.code not in RETRIED_STATUSES
            raise FailedAttempt(
                f"HTTP status {error.code} {printable(error.reason)}", wait, final, error.code
            ) from error
    except NETWORK_ERRORS as error:
        raise FailedAttempt(f"no response ({reason_of(error)})") from error


def reason_of(error: Exception) -> str:
    return printable(str(error)) or type(error).__name__


def printable(text: str) -> str:
    """What a server said, without what a terminal would obey."""
    return re.sub(r"[^ -~]", "?", one_line(text))[:MAX_REASON]


def parse_count(text: str | None) -> int | None:
    """The value of a header that is a number; None for anything else, such as a number of thousands of digits."""
    return int(text) if text and re.fullmatch("[0-9]{1,15}", text) else None


def total_of_range(response: http.client.HTTPResponse, part: Path, start: int) -> int | None:
    """The length of the whole file. Discards the part if the response does not continue it."""
    match = re.fullmatch(r"bytes ([0-9]{1,15})-[0-9]{1,15}/([0-9]{1,15}|\*)", response.headers.get("Content-Range", ""))
    if not match or int(match[1]) != start:
        part.unlink(missing_ok=True)
        raise FailedAttempt("the server sent a range that was not requested")
    return parse_count(match[2])


def refuse_web_page(response: http.client.HTTPResponse) -> None:
    """Some servers send error and log-in pages with status 200; no data set here is HTML."""
    try:
        beginning = response.peek(512).lstrip().lower()
    except NETWORK_ERRORS as error:
        raise FailedAttempt(f"the connection broke at the first byte ({reason_of(error)})") from error
    is_html = response.headers.get_content_type() in ("text/html", "application/xhtml+xml")
    if is_html or beginning.startswith((b"<!doctype html", b"<html")):
        raise FailedAttempt("the response is a web page instead of the file")


def copy_body(response: http.client.HTTPResponse, part: Path, start: int, total: int | None, limit: int) -> None:
    """limit: bytes of the whole file."""
    bar = progress_bar(total, part.name.removesuffix(".part"), initial=start)
    with bar, part.open("ab" if start else "wb") as file:
        while True:
            try:
                chunk = response.read1(CHUNK)
            except NETWORK_ERRORS as error:
                raise FailedAttempt(f"the connection broke after {start:,} bytes ({reason_of(error)})") from error
            if not chunk:
                return
            start += len(chunk)
            if start > limit:
                part.unlink()
                raise FailedAttempt(f"the server sends more than the {limit:,} bytes of the file")
            file.write(chunk)
            bar.update(len(chunk))


def accept(part: Path, checksum: Checksum | None, size: int | None, check: Callable[[Path], None] | None) -> None:
    """Discards the part and raises `FailedAttempt` if it is not the requested file."""
    reason = mismatch(part, checksum, size)
    if reason is None and check is not None:
        try:
            check(part)
        except UserError as error:
            reason = str(error)
    if reason:
        part.unlink()
        raise FailedAttempt(f"the downloaded file is wrong: {reason}")


def mismatch(path: Path, checksum: Checksum | None, size: int | None) -> str | None:
    """How the file differs from what is expected; None if it does not."""
    actual_size = path.stat().st_size
    if size is not None and actual_size != size:
        return f"it has {actual_size:,} bytes, not {size:,}"
    if checksum is not None:
        digest = file_digest(path, checksum.algorithm)
        if digest != checksum.hexdigest:
            return f"its {checksum.algorithm} is {digest}, not {checksum.hexdigest}"
    if actual_size == 0:
        return "it is empty"
    return None


def fetch_squad(
    version: str, folder: Path, mirrors: Sequence[str] = SQUAD_MIRRORS, policy: RetryPolicy = DEFAULT_POLICY
) -> list[Path]:
    """The training and development file of SQuAD `version` ("v1.1" or "v2.0")."""
    paths = []
    for name in (f"train-{version}.json", f"dev-{version}.json"):
        size, digest = SQUAD_FILES[name]
        urls = [f"{mirror}/{name}" for mirror in mirrors]
        fetch(urls, folder / name, Checksum("sha256", digest), size, policy=policy)
        paths.append(folder / name)
    return paths


def fetch_wikipedia(
    language: str,
    folder: Path,
    date: str = "latest",
    mirrors: Sequence[str] = WIKIMEDIA_MIRRORS,
    policy: RetryPolicy = DEFAULT_POLICY,
) -> Path:
    """The articles of the Wikipedia in `language` ("en", "simple", "zh-min-nan"), from the dump of `date` (YYYYMMDD).

    The published list of SHA-1 checksums names the dated file, so that `latest` cannot change in the middle. Once the
    list is in `folder`, later runs continue with the dump that it names.
    """
    wiki = language.replace("-", "_") + "wiki"
    sums = folder / f"{wiki}-{date}-sha1sums.txt"
    fetch([f"{mirror}/{wiki}/{date}/{sums.name}" for mirror in mirrors], sums, check=refuse_unless_sums, policy=policy)
    pattern = rf"([0-9a-f]{{40}})  ({wiki}-(\d{{8}})-pages-articles-multistream\.xml\.bz2)"
    match = re.search(pattern, sums.read_text(encoding="utf-8"))
    if not match:
        raise UserError(
            f"{sums} lists no {wiki}-*-pages-articles-multistream.xml.bz2: this dump is not finished: "
            "remove the list and choose an earlier one with --dump-date YYYYMMDD"
        )
    digest, name, run = match.groups()
    fetch(
        [f"{mirror}/{wiki}/{run}/{name}" for mirror in mirrors], folder / name, Checksum("sha1", digest), policy=policy
    )
    return folder / name


def refuse_unless_sums(path: Path) -> None:
    with contextlib.suppress(UnicodeDecodeError):
        lines = path.read_text(encoding="utf-8").splitlines()
        if lines and all(re.fullmatch(r"[0-9a-f]{40}  \S+", line) for line in lines):
            return
    raise UserError("it is not a list of SHA-1 checksums")


def names_of(urls: Sequence[str]) -> dict[str, str]:
    """File name, which is the last part of the path -> address."""
    names: dict[str, str] = {}
    for url in urls:
        name = Path(urlsplit(url).path).name
        if name in ("", ".", "..", manifest.FILE_NAME) or not name.isprintable():
            raise UserError(f"{url!r} does not end in a usable file name: correct it")
        if names.setdefault(name, url) != url:
            raise UserError(f"{names[name]} and {url} end in the same file name: keep one of them")
    return names


def fetch_books(urls: Sequence[str], folder: Path, policy: RetryPolicy = DEFAULT_POLICY) -> list[Path]:
    """The file of each address. There are no published checksums of books, so only their length is checked."""
    names = names_of(urls)
    for name, url in tqdm(names.items(), desc="books", unit="file", disable=None, leave=False):
        fetch([url], folder / name, policy=policy)
    return [folder / name for name in names]
