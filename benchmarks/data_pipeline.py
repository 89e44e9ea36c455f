"""How fast is data preparation, stage by stage, from a Wikipedia dump and from text to verified shards?

Each stage runs in a process of its own, with one worker and with several. Reported are MB of its input per second of
processor time, the share of the time that one process must spend (the driver's), and the peak memory of a process.
"""

import bz2
import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.common.results import write_result
from utils.command_line import ArgumentParser, positive_float, positive_int
from utils.errors import run_main
from utils.progress import print_line

SAMPLE = ROOT / "data" / "sample"
PROGRAM = """
import json, resource, sys, time
from data import prepare
from data_preparation.engine import work_units
work_units.SMALL_WORK = 0
start = time.perf_counter()
prepare.main(sys.argv[1:])
own, workers = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
print(json.dumps({
    "seconds": time.perf_counter() - start,
    "driver_cpu_seconds": own.ru_utime + own.ru_stime,
    "worker_cpu_seconds": workers.ru_utime + workers.ru_stime,
    "peak_megabytes": max(own.ru_maxrss, workers.ru_maxrss) / 1024,
}))
"""


def write_dump(path: Path, size: int) -> None:
    """A multistream dump with the pages of the sample under new titles, about `size` bytes of XML."""
    xml = bz2.decompress(next((SAMPLE / "wiki").glob("*.bz2")).read_bytes())
    head, _, rest = xml.partition(b"  <page>")
    pages = re.findall(rb"  <page>.*?</page>\n", b"  <page>" + rest, re.S)
    with path.open("wb") as file:
        file.write(bz2.compress(head))
        for copy in range(max(1, size // len(xml))):
            stream = b"".join(page.replace(b"<title>", b"<title>%d " % copy, 1) for page in pages)
            file.write(bz2.compress(stream))
        file.write(bz2.compress(b"</mediawiki>\n"))


def write_text(path: Path, size: int) -> None:
    """A .jsonl file of the paragraphs of the sample books, ten to a document; later copies have other numbers."""
    books = [file.read_text(encoding="utf-8").split("\n\n") for file in sorted((SAMPLE / "books").glob("*.txt"))]
    documents = ["\n\n".join(book[at : at + 10]) for book in books for at in range(0, len(book), 10)]
    with path.open("w", encoding="utf-8") as file:
        copy = 0
        while file.tell() < size:
            for document in documents:
                file.write(json.dumps({"text": f"Part {copy}. {document}"}) + "\n")
            copy += 1


def run(*arguments: object) -> dict[str, float]:
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(folder: Path, megabytes: float, workers: int) -> dict[str, dict[str, float]]:
    """The figures of each stage; `megabytes` of each are those of the text that it reads or makes."""
    write_dump(folder / "dump.xml.bz2", int(megabytes * 1e6))
    write_text(folder / "text.jsonl", int(megabytes * 1e6))
    data, common = folder / "data", ("--output-dir", folder / "data", "--num-workers", workers)
    text = data / "formatted" / "corpus"
    found = {
        "format wikicorpus": run("format", "wikicorpus", folder / "dump.xml.bz2", *common),
        "format corpus": run("format", "corpus", folder / "text.jsonl", *common),
        "shard": run("shard", text, "--shard-mb", max(0.5, megabytes / 8), *common),
        "hdf5 128": run("hdf5", "--lengths", "128:20", *common),
        "verify": run("verify", data / "hdf5", "--num-workers", workers),
    }
    for stage, figures in found.items():
        source = data / "formatted" / "wikicorpus" if "wiki" in stage else text
        figures["megabytes"] = sum(path.stat().st_size for path in source.rglob("part*")) / 1e6
        cpu = figures["driver_cpu_seconds"] + figures["worker_cpu_seconds"]
        figures["megabytes_per_cpu_second"] = figures["megabytes"] / cpu
    return found


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=positive_float, nargs="+", default=[10.0], help="sizes of the input")
    parser.add_argument("--workers", type=positive_int, nargs="+", default=[1, 2], help="numbers of workers")
    parser.add_argument("--output", type=Path, help="result file; by default in benchmarks/results")
    args, results = parser.parse_args(), {}
    for megabytes, workers in itertools.product(args.megabytes, args.workers):
        with tempfile.TemporaryDirectory() as folder:
            found = measure(Path(folder), megabytes, workers)
        results[f"{megabytes:g} MB, {workers} workers"] = found
        print_line(f"{megabytes:g} MB, {workers} workers")
        for stage, figures in found.items():
            print_line(
                f"  {stage:<20}{figures['megabytes_per_cpu_second']:8.2f} MB/CPU s{figures['seconds']:8.1f} s"
                f"{figures['driver_cpu_seconds']:8.1f} s driver{figures['peak_megabytes']:8.1f} MB peak"
            )
    write_result(args.output, "data_pipeline", torch.device("cpu"), {"stages": results})


if __name__ == "__main__":
    run_main(main)
