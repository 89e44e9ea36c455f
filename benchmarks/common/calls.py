"""One call on a machine that is lent for minutes: items that are done one after the other in one
process, with nothing beside them. Results are written as they come.
"""

import gc
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bert_recipe.utils.errors import one_line
from bert_recipe.utils.json_files import write_json
from bert_recipe.utils.progress import print_line


class Item(NamedTuple):
    """seconds: expected on an H100.
    run: its result says whether it is as expected, as `ok`.
    """

    title: str
    seconds: int
    run: Callable[[], dict[str, Any]]


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """By title, the results in `path` of items that were not skipped."""
    if not path.is_file():
        return {}
    results = json.loads(path.read_text())["results"]
    return {result["item"]: result for result in results if "skipped" not in result}


def do_items(items: Sequence[Item], path: Path, limit: float, continues: bool) -> bool:
    """Does the items, and writes their results to `path`; returns whether all are as expected. One
    that fails does not end the others; one for which too little is left of `limit` seconds is
    skipped. continues: not those whose results are there. Ends after an item whose error the device
    does not survive.
    """
    started = time.monotonic()
    results = read_results(path) if continues else {}
    for title, seconds, run in items:
        if title in results:
            continue
        left = limit - (time.monotonic() - started)
        result = {"skipped": f"{left:.0f} s left, {seconds} s expected"}
        if left >= seconds:
            print_line(f"-- {title}")
            result = do(run)
        results[title] = {"item": title, **result}
        write_json(path, {"results": [*results.values()]})
        verdict = {True: "ok  ", False: "FAIL"}.get(result.get("ok"), "skip")
        print_line(f"{verdict} {title}: {figures(result)}")
        if "error" in result and not device_works():
            print_line("the GPU cannot be used in this process any more: call again, --continue")
            break
        clean_up()
    return all(result.get("ok", True) for result in results.values())


def do(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The item's result with its seconds."""
    started = time.monotonic()
    try:
        result = run()
    except (Exception, SystemExit) as error:
        result = {"error": one_line(f"{type(error).__name__}: {error}")[:500], "ok": False}
    return result | {"seconds": time.monotonic() - started}


def device_works() -> bool:
    """Whether the GPU can be used further. After an error in a kernel CUDA refuses all calls. After
    one in the capture of a graph torch 2.11 draws no random numbers, and later ones go on in the
    stream of the capture.
    """
    if not torch.cuda.is_available():
        return True
    try:
        torch.rand(1, device="cuda").cpu()
    except RuntimeError:
        return False
    return torch.cuda.current_stream() == torch.cuda.default_stream()


def clean_up() -> None:
    """What an item leaves in the process: its memory, graphs, and --deterministic."""
    torch.use_deterministic_algorithms(False)
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def figures(result: dict[str, Any]) -> str:
    """The values of a result in three digits, without tables."""
    words = []
    for name, value in result.items():
        if isinstance(value, dict):
            words.append(f"{name} ({figures(value)})")
        elif isinstance(value, float):
            words.append(f"{name} {value:.3g}")
        elif name not in ("ok", "losses") and value is not None and "\n" not in str(value):
            words.append(f"{name} {value}")
    return ", ".join(words)
