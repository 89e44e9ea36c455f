"""Reports on HDF5 shards: numbers, a few samples to read, and a figure."""

from concurrent.futures import Executor
from pathlib import Path

import numpy as np

from data_loading.hdf5_shards import KEYS, SHARD_SUFFIXES, Shard, find_shards
from data_preparation.findings import Findings
from data_preparation.verify import verify_folder
from tokenizer import TOKENIZER_JSON, VOCAB_FILE, Tokenizer, load_tokenizer
from utils.errors import UserError
from utils.files import atomic_path, write_atomically

FIGURE = "distributions.png"
SHIPPED_VOCABULARIES = Path(__file__).resolve().parents[1] / "vocab"


def report_on_folders(root: Path, vocab_file: Path | None, samples: int, executor: Executor) -> None:
    """Verifies every folder of HDF5 shards below `root`, prints a report with some samples, and draws the figure."""
    for folder in shard_folders(root):
        found = vocab_file or find_vocabulary(folder)
        tokenizer = load_tokenizer(found) if found else None
        findings = verify_folder(folder, tokenizer, executor)
        print(f"{folder}: every row is valid")
        print("\n".join(report_lines(findings, tokenizer)))
        is_drawn = draw(findings, folder / FIGURE)
        print(f"figure            {folder / FIGURE if is_drawn else 'none: matplotlib is not installed'}")
        if samples:
            print("\n".join(["", *sample_lines(folder, tokenizer, samples)]))
        print(flush=True)


def write(folder: Path, findings: Findings, tokenizer: Tokenizer) -> None:
    """Writes the report and the figure of new shards beside them."""
    lines = [*report_lines(findings, tokenizer), "", *sample_lines(folder, tokenizer, 3)]
    write_atomically(folder / "report.txt", "\n".join(lines) + "\n")
    draw(findings, folder / FIGURE)


def shard_folders(root: Path) -> list[Path]:
    folders = sorted({path.parent for path in root.rglob("*") if path.suffix in SHARD_SUFFIXES})
    if not folders:
        raise UserError(f"{root} contains no HDF5 shard: check the path")
    return folders


def find_vocabulary(folder: Path) -> Path | None:
    """The vocabulary that the shards in `folder` were made with: the file beside them, or a shipped one with the
    SHA-256 in the attributes of the shards."""
    expected = Shard(find_shards(folder)[0]).attributes.get("vocab_sha256")
    for path in (folder / VOCAB_FILE, folder / TOKENIZER_JSON, *sorted(SHIPPED_VOCABULARIES.glob("*.txt"))):
        if path.is_file() and (expected is None or load_tokenizer(path).vocab_sha256 == expected):
            return path if expected or path.parent == folder else None
    return None


def report_lines(findings: Findings, tokenizer: Tokenizer | None) -> list[str]:
    """The numbers. "expected" refers to BERT's recipe; other recipes have other numbers."""
    f = findings
    shares = [count / max(1, f.masked) for count in (f.masked_as_mask, f.masked_as_itself, f.masked_as_other)]
    nsp = "no labels" if f.labels[0] == f.samples else f"{f.random_next_share:.1%} random (expected 50%)"
    vocabulary = f"of {tokenizer.vocab_size} in {tokenizer.vocab_file}" if tokenizer else "(unknown vocabulary)"
    about = f"about (from {f.counted_samples:,} samples) " if f.is_estimate else ""
    lengths = np.searchsorted(np.cumsum(f.lengths), np.array([0.1, 0.5, 0.9]) * f.samples)
    masked = [
        f"masked            {f.masked_share:.2%} of {f.tokens:,} tokens (expected 15%)",
        f"masked tokens     {shares[0]:.1%} [MASK], {shares[1]:.1%} kept, {shares[2]:.1%} random (expected 80, 10, 10)",
    ]
    return [
        f"samples           {f.samples:,} of length {f.sequence_length} in {f.shards} shards",
        f"fill              {f.fill:.1%}; lengths: mean {f.tokens / f.samples:.1f}, deciles 1, 5, 9: "
        + ", ".join(map(str, lengths)),
        *(masked if f.masked else [f"masked            none of {f.tokens:,} tokens: training draws the masks"]),
        f"next sentence     {nsp}",
        f"ids               up to {f.highest_id} {vocabulary}",
        f"checksums         valid; {f.checksummed} of {f.shards} shards have them",
        f"repeated samples  {about}{f.repeated_samples:,}; without masks {about}{f.distinct_texts:,} distinct",
    ]


def sample_lines(folder: Path, tokenizer: Tokenizer | None, count: int) -> list[str]:
    """`count` samples with their masks, from different shards and rows."""
    lines = ["samples, with masked tokens as {original -> replacement} and kept ones as {original}"]
    paths = find_shards(folder)
    for number in range(count):
        shard = Shard(paths[number * len(paths) // count])
        if not len(shard):
            continue
        row = (2 * number + 1) * len(shard) // (2 * count)
        values = {key: shard.read(key, np.array([row]))[0].astype(np.int64) for key in KEYS}
        length = np.count_nonzero(values["input_mask"])
        label = {0: "B follows A", 1: "B is random"}.get(int(values["next_sentence_labels"]), "no next sentence")
        lines.append(f"{shard.path.name}, row {row}, {length} tokens, {label}:")
        lines.append("  " + decode(values, length, tokenizer))
    return lines


def decode(values: dict[str, np.ndarray], length: int, tokenizer: Tokenizer | None) -> str:
    def name(token_id: int) -> str:
        return tokenizer.text_of(int(token_id)) if tokenizer else str(token_id)

    words = [name(token_id) for token_id in values["input_ids"][:length]]
    for position, original in zip(values["masked_lm_positions"], values["masked_lm_ids"], strict=True):
        if position > 0:
            was, now = name(original), words[position]
            words[position] = f"{{{was}}}" if now == was else f"{{{was} -> {now}}}"
    return tokenizer.join(words) if tokenizer else " ".join(words)


def draw(findings: Findings, path: Path) -> bool:
    """Draws lengths and mask positions to a PNG file; False if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(11, 4), layout="constrained")
    figure.suptitle(f"{findings.samples:,} samples, {findings.masked:,} masked tokens")
    left, right = figure.subplots(1, 2)
    left.bar(np.arange(findings.sequence_length + 1), findings.lengths, width=1.0, color="#76b900")
    left.set(xlabel="tokens per sample, without padding", ylabel="samples", yscale="log")
    right.bar(np.arange(findings.sequence_length), findings.positions, width=1.0, color="#1a73e8")
    right.set(xlabel="position in the sample", ylabel="masked tokens")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
    return True
