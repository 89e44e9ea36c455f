"""The table of scripts/run_glue_suite.sh in Markdown: median and deviation over seeds, beside
published results.
"""

import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bert_recipe.config import RunConfig
from bert_recipe.reporting.comparison import scores_of_seeds
from bert_recipe.reporting.markdown import markdown_table
from bert_recipe.utils.errors import UserError, run_main
from bert_recipe.utils.files import write_atomically
from bert_recipe.utils.json_files import read_json
from bert_recipe.utils.progress import print_line

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
PUBLISHED_COLUMNS = ("published", "mean of eight tasks", "protocol")
PUBLISHED = (
    ("NeoBERT", "89.0", "as published"),
    ("Ettin, base and large", "88.9 and 90.8", "RTE, MRPC and STS-B from MNLI"),
    ("ModernBERT, base and large", "88.4 and 90.4", "RTE, MRPC and STS-B from MNLI"),
    ("BERT-base", "83.2", "as measured by MosaicBERT's authors"),
    ("MosaicBERT-base", "79.6", "after 1.13 hours of pre-training on 8 A100"),
)


class TaskResult(NamedTuple):
    """results: of each seed, in percent."""

    title: str
    metrics: str
    results: list[float]
    is_chained: bool

    @property
    def median(self) -> float:
        return statistics.median(self.results)

    def __str__(self) -> str:
        deviation = f" ± {statistics.stdev(self.results):.1f}" if len(self.results) > 1 else ""
        return f"{self.median:.1f}{deviation} ({len(self.results)})"


def finished_tasks(folder: Path) -> list[TaskResult]:
    """Those of the suite in `folder`."""
    tasks = []
    for task, (title, metrics) in TASKS.items():
        record = folder / f"{task}.done"
        command = record.read_text(encoding="utf-8") if record.is_file() else ""
        if command and (results := task_results(folder / task, metrics, command)):
            start = re.search(r"--init-checkpoint \S*/mnli/\S+/mnli\b", command)
            names = ", ".join(metrics).replace("_", " ")
            tasks.append(TaskResult(title, names, results, task != "mnli" and start is not None))
    return tasks


def markdown(tasks: Sequence[TaskResult]) -> str:
    """The page: notes, the table of the results, and that of published ones."""
    chained = ", ".join(task.title for task in tasks if task.is_chained) or "none"
    notes = [
        "Development sets; median ± standard deviation (number of seeds), in percent.",
        f"Started from the model fine-tuned on MNLI: {chained}.",
    ]
    header = [f"{task.title} ({task.metrics})" for task in tasks] + ["mean"]
    mean = statistics.mean(task.median for task in tasks)
    results = [str(task) for task in tasks]
    results.append(f"**{mean:.1f}** ({len(tasks)} of {len(TASKS)} tasks)")
    published = markdown_table(PUBLISHED_COLUMNS, PUBLISHED)
    return "\n".join([*notes, "", markdown_table(header, [results]), "", published, ""])


def task_results(folder: Path, metrics: tuple[str, ...], command: str) -> list[float]:
    """The result in percent of each seed: the mean of its `metrics`.

    folder: of the task. A single seed has its scores in the folder of the run itself.
    command: the command line of the task, which gives the seeds.
    """
    defaults = f"--seed {RunConfig.seed} --num-seeds 1"
    words = f"{defaults} {command.replace('--num_', '--num-')}"
    values = dict(re.findall(r"--(seed|num-seeds)[ =](-?\d+)", words))  # the last ones count
    results = []
    for file in scores_of_seeds(folder, int(values["seed"]), int(values["num-seeds"])):
        scores = read_json(file, "the scores", dict.fromkeys(metrics, float))
        results.append(100 * statistics.mean(scores[name] for name in metrics))
    return results


def main() -> None:
    folder = Path(sys.argv[1])
    tasks = finished_tasks(folder)
    if not tasks:
        raise UserError(f"{folder} has no scores: run scripts/run_glue_suite.sh first")
    table = markdown(tasks)
    write_atomically(folder / "glue.md", table)
    print_line(f"{table}\nwritten to {folder / 'glue.md'}")


if __name__ == "__main__":
    run_main(main)
