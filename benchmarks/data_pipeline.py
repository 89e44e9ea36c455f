"""How fast is data preparation, stage by stage, from a Wikipedia dump and from text to verified shards?

Each stage runs in a process of its own, with one worker and with several. Reported are MB of its input per second of
processor time, the share of the time that one process must spend (the driver's), and the peak memory of a process.
data_creation_reference.py beside this file compares the samples with the published algorithm.
"""

import argparse
import bz2
import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
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


def size_of(folder: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in folder.rglob(pattern))


def measure(folder: Path, megabytes: float, workers: int) -> dict[str, dict[str, float]]:
    """The figures of each stage; `megabytes` of each are those of the text that it reads or makes."""
    size = int(megabytes * 1e6)
    write_dump(folder / "dump.xml.bz2", size)
    write_text(folder / "text.jsonl", size)
    common = ("--output-dir", folder / "data", "--num-workers", workers)
    found = {"format wikicorpus": run("format", "wikicorpus", folder / "dump.xml.bz2", *common)}
    found["format wikicorpus"]["megabytes"] = size_of(folder / "data" / "formatted", "part*") / 1e6
    found["format corpus"] = run("format", "corpus", folder / "text.jsonl", *common)
    text = size_of(folder / "data" / "formatted" / "corpus", "part*") / 1e6
    text_folder = folder / "data" / "formatted" / "corpus"
    found["shard"] = run("shard", text_folder, "--shard-mb", max(0.5, megabytes / 8), *common)
    found["hdf5 128"] = run("hdf5", "--lengths", "128:20", *common)
    found["verify"] = run("verify", folder / "data" / "hdf5", "--num-workers", workers)
    for stage in ("format corpus", "shard", "hdf5 128", "verify"):
        found[stage]["megabytes"] = text
    for figures in found.values():
        cpu = figures["driver_cpu_seconds"] + figures["worker_cpu_seconds"]
        figures["megabytes_per_cpu_second"] = figures["megabytes"] / cpu
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[10.0], help="sizes of the input")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="numbers of workers")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "data_pipeline.json")
    args = parser.parse_args()
    results: dict[str, dict] = {}
    for megabytes, workers in itertools.product(args.megabytes, args.workers):
        with tempfile.TemporaryDirectory() as folder:
            found = measure(Path(folder), megabytes, workers)
        results[f"{megabytes:g} MB, {workers} workers"] = found
        print(f"{megabytes:g} MB, {workers} workers")
        for stage, figures in found.items():
            print(
                f"  {stage:<20}{figures['megabytes_per_cpu_second']:8.2f} MB/CPU s{figures['seconds']:8.1f} s"
                f"{figures['driver_cpu_seconds']:8.1f} s driver{figures['peak_megabytes']:8.1f} MB peak",
                flush=True,
            )
    args.output.parent.mkdir(exist_ok=True)
    args.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
