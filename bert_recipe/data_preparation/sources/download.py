"""Downloads files: tries mirrors, resumes with range requests, verifies checksums.

A file gets its final name when it is complete. Until then it is `<name>.part`, which the next
attempt or the next run continues if a checksum can tell whether the bytes of both belong together.
"""

import http.client
import re
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from tqdm import tqdm

from bert_recipe.utils.errors import UserError, one_line
from bert_recipe.utils.files import file_digest, sync
from bert_recipe.utils.progress import progress_bar

BLOCK = 1 << 20  # bytes
TIMEOUT = 30.0  # seconds without data
ATTEMPTS = 10  # failed ones in a row, once a server has answered; any progress restarts the count
FIRST_WAIT, LONGEST_WAIT = 1.0, 120.0  # seconds; doubled after each failure
RETRIED_STATUSES = {403, 408, 416, 425, 429, 500, 502, 503, 504}
NETWORK_ERRORS = (  # not every OSError: a full disk is one, too
    *(urllib.error.URLError, http.client.HTTPException, ssl.SSLError),
    *(ConnectionError, TimeoutError, ValueError, OverflowError),
)


class Checksum(NamedTuple):
    algorithm: str  # a name that hashlib knows
    hexdigest: str


def fetch(
    urls: Sequence[str], path: Path, checksum: Checksum | None = None, size: int | None = None
) -> None:
    """Downloads one file to `path`, unless it is there already.

    urls: addresses of the same file; a server that fails is tried after the others.
    checksum: of the file, if known.
    size: in bytes, if known.

    Raises UserError if no server has answered after one round, or `ATTEMPTS` in a row have failed;
    the bytes so far stay for the next run.
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
    mirrors = list(urls)
    failures = 0
    has_answered = False
    furthest = size_of(part)
    while True:
        url = mirrors[0]
        asked_wait = 0.0  # seconds
        is_final = False  # whether this server need not be asked again
        try:
            transfer(url, part, checksum is not None, size)
            reason = mismatch(part, checksum, size)
            if reason is None:
                break
            part.unlink(missing_ok=True)
            has_answered = True
        except urllib.error.HTTPError as error:
            asked = error.headers.get("Retry-After", "")  # seconds, or a date
            if re.fullmatch("[0-9]{1,9}", asked):
                asked_wait = float(asked)
            reason = str(error)
            has_answered = True
            is_final = error.code not in RETRIED_STATUSES
            error.close()
        except NETWORK_ERRORS as error:
            reason = str(error) or type(error).__name__
        reason = one_line(f"{url}: {reason}")[:300]  # it may quote what a server said
        progressed = size_of(part) > furthest
        furthest = max(furthest, size_of(part))
        if progressed:
            failures = 1
        else:
            failures += 1
            mirrors.remove(url)
            if not is_final:
                mirrors.append(url)
        max_failures = ATTEMPTS if has_answered or furthest else max(2, len(urls))
        if not mirrors or failures >= max_failures:
            raise UserError(
                f"cannot download {reason}; gave up after {failures} attempts in a row: check the "
                "network and the address, then rerun the same command to resume"
            )
        wait = min(max(asked_wait, FIRST_WAIT * 2 ** (failures - 1)), LONGEST_WAIT)
        tqdm.write(f"{reason}; next attempt in {wait:.0f} s", file=sys.stderr)
        time.sleep(wait)
    sync(part)
    part.rename(path)


def transfer(url: str, part: Path, resumes: bool, size: int | None) -> None:
    """One attempt: continues `part` if it `resumes`, else starts anew. Raises one of
    `NETWORK_ERRORS` if it fails.
    """
    start = size_of(part) if resumes else 0
    if start and start == size:
        return
    headers = {"User-Agent": "bert-recipe (data preparation)", "Accept-Encoding": "identity"}
    headers |= {"Range": f"bytes={start}-"} if start else {}
    # `fetch` checks the scheme, and urllib that of a redirect.
    request = urllib.request.Request(url, headers=headers)  # noqa: S310
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)  # noqa: S310
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        error.close()
        return  # nothing follows the part: the caller checks whether it is complete
    with response:
        if start and response.status == 206:
            if not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                part.unlink()
                raise ValueError("the server sent a range that was not requested")
        else:
            start = 0
        total = size if response.length is None else start + response.length
        if total is None:
            raise ValueError(
                "the server does not announce the length of the file, so that a part may seem "
                "complete"
            )
        if size not in (None, total):
            raise ValueError(f"the server announces {total:,} bytes, not {size:,}")
        with (
            progress_bar(total, part.stem, initial=start) as bar,
            part.open("ab" if start else "wb") as file,
        ):
            while start < total and (block := response.read1(min(BLOCK, total - start))):
                file.write(block)
                start += len(block)
                bar.update(len(block))
    if start < total:
        raise ConnectionError(f"the connection ended after {start:,} of {total:,} bytes")


def size_of(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def mismatch(path: Path, checksum: Checksum | None, size: int | None) -> str | None:
    """How the file differs from what is expected; None if it does not."""
    actual_size = size_of(path)
    if not actual_size:
        return "it is empty"
    with path.open("rb") as file:
        # No data set here is HTML.
        if file.read(100).lstrip().lower().startswith((b"<!doctype html", b"<html")):
            return "it is a web page"
    if size not in (None, actual_size):
        return f"it has {actual_size:,} bytes, not {size:,}"
    if checksum and (digest := file_digest(path, checksum.algorithm)) != checksum.hexdigest:
        return f"its {checksum.algorithm} is {digest}, not {checksum.hexdigest}"
    return None
