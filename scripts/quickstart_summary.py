#!/usr/bin/env python3
"""Prints a summary of scripts/quickstart.sh, from the reports of the programs:

python3 scripts/quickstart_summary.py FOLDER   # the folder that holds phase1/, phase2/ and squad/
"""

import json
import sys
from pathlib import Path


def read_report(path: Path) -> list[dict]:
    """The data of each DLLogger record, oldest first."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line.removeprefix("DLLL ")).get("data", {}) for line in lines]


def values_of(report: list[dict], name: str) -> list[float]:
    """The values logged under `name`, in upper or lower case, without those of skipped steps (null)."""
    found = [{key.lower(): value for key, value in data.items()}.get(name) for data in report]
    return [value for value in found if value is not None]


def describe(title: str, folder: Path, report: list[dict], results: str) -> str:
    losses = values_of(report, "loss")
    newest = max((int(path.name) for path in folder.iterdir() if path.name.isdigit()), default=0)
    return (
        f"{title:<9}loss {losses[0]:.2f} -> {losses[-1]:.2f} in {newest} steps; {results}\n{'':9}{folder / str(newest)}"
    )


def main(folder: Path) -> None:
    for number in (1, 2):
        report = read_report(folder.parent / f"dllogger_p{number}.json")
        held_out = values_of(report, "eval_loss")
        accuracy = values_of(report, "eval_mlm_accuracy")[-1]
        results = f"on held-out text {held_out[0]:.2f} -> {held_out[-1]:.2f}, {accuracy:.1%} of the masked words right"
        print(describe(f"phase {number}", folder / f"phase{number}", report, results))
    report = read_report(folder.parent / "dllogger_0_fp32.json")
    exact_match, f1 = (values_of(report, name)[-1] for name in ("exact_match", "f1"))
    predictions = folder / "squad" / "predictions.json"
    questions = len(json.loads(predictions.read_text(encoding="utf-8")))
    print(describe("SQuAD", folder / "squad", report, f"exact match {exact_match:.1f}, F1 {f1:.1f} of 100"))
    print(f"{'':9}{predictions} (answers to {questions} questions)")
    if (page := folder.parent / "report.html").is_file():
        print(f"\nOpen {page} in a browser: curves, settings and scores of all of this.")
    print(
        """
A two-layer model trained on one megabyte of text for a few minutes answers few questions: the quickstart shows that
each part works. Better models need more text and more time. Next, with a folder of text and a GPU:

  bash data/create_datasets_from_start.sh corpus FOLDER
  bash scripts/run_pretraining.sh $(source scripts/configs/pretrain_config.sh && h100-80g_1gpu_amp)
"""
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
