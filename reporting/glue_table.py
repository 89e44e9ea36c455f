"""The table of scripts/run_glue_suite.sh in Markdown: median and deviation over the seeds of each task, what was
chained, and published results beside it."""

import re
import statistics
import sys
from pathlib import Path

from utils.errors import UserError, run_main
from utils.files import read_json_object, write_atomically

# The scores whose mean is a task's result, as in the publications below.
TASKS = {
    "cola": ("CoLA", ("matthews_correlation",)),
    "sst-2": ("SST-2", ("accuracy",)),
    "mrpc": ("MRPC", ("accuracy",)),
    "sts-b": ("STS-B", ("spearman",)),
    "qqp": ("QQP", ("accuracy",)),
    "mnli": ("MNLI", ("matched_accuracy", "mismatched_accuracy")),
    "qnli": ("QNLI", ("accuracy",)),
    "rte": ("RTE", ("accuracy",)),
}
PUBLISHED = (
    ("NeoBERT", "89.0", "as published"),
    ("Ettin, base and large", "88.9 and 90.8", "RTE, MRPC and STS-B from MNLI"),
    ("ModernBERT, base and large", "88.4 and 90.4", "RTE, MRPC and STS-B from MNLI"),
    ("BERT-base", "83.2", "as measured by MosaicBERT's authors"),
    ("MosaicBERT-base", "79.6", "after 1.13 hours of pre-training on 8 A100"),
)


def task_results(folder: Path, metrics: tuple[str, ...]) -> list[float]:
    """The result of each seed in percent. One seed has its scores in the task's folder itself."""
    files = sorted(folder.glob("*/*/seed-*/scores.json")) or sorted(folder.glob("*/*/scores.json"))
    scores = [read_json_object(file, "the scores", dict.fromkeys(metrics, float)) for file in files]
    return [100 * statistics.mean(each[name] for name in metrics) for each in scores]


def make_table(folder: Path) -> str:
    names, cells, chained, medians = [], [], [], []
    for task, (title, metrics) in TASKS.items():
        results = task_results(folder / task, metrics)
        if not results:
            continue
        deviation = f" ± {statistics.stdev(results):.1f}" if len(results) > 1 else ""
        medians.append(statistics.median(results))
        names.append(f"{title} ({', '.join(name.replace('_', ' ') for name in metrics)})")
        cells.append(f"{medians[-1]:.1f}{deviation} ({len(results)})")
        command = (folder / f"{task}.done").read_text(encoding="utf-8")
        if task != "mnli" and re.search(r"--init-checkpoint \S*/mnli/\S+/mnli\b", command):
            chained.append(title)
    if not medians:
        raise UserError(f"{folder} has no scores: run scripts/run_glue_suite.sh first")
    mean = f"**{statistics.mean(medians):.1f}** ({len(medians)} of {len(TASKS)} tasks)"
    lines = [
        "Development sets; median ± standard deviation (number of seeds), in percent.",
        f"Started from the model fine-tuned on MNLI: {', '.join(chained) or 'none'}.",
        "",
        *("| " + " | ".join(row) + " |" for row in ([*names, "mean"], ["---"] * (len(names) + 1), [*cells, mean])),
        "",
        "| published | mean of eight tasks | protocol |",
        "| --- | --- | --- |",
        *("| " + " | ".join(row) + " |" for row in PUBLISHED),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    folder = Path(sys.argv[1])
    table = make_table(folder)
    write_atomically(folder / "glue.md", table)
    print(f"{table}\nwritten to {folder / 'glue.md'}")


if __name__ == "__main__":
    run_main(main)
