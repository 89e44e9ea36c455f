"""scripts/quickstart.sh and the summary at its end."""

import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT
from small_runs import RunInputs, train


def test_the_quickstarts_summary_says_what_the_reports_and_folders_say(tmp_path):
    folder = tmp_path / "custom"
    reports = {"phase1": "dllogger_p1.json", "phase2": "dllogger_p2.json", "squad": "dllogger_0_fp32.json"}
    for phase, first, last, step in (("phase1", 10.5, 6.25, 30), ("phase2", 6.5, 6.0, 4), ("squad", 5.0, 3.5, 7)):
        (folder / phase / str(step)).mkdir(parents=True)
        (folder / phase / str(step - 1)).mkdir()
        data = [{"seed": 1}, {"loss": first}, {"loss": None}, {"loss": last}]
        data += (
            [{"exact_match": 12.5, "f1": 25.0}]
            if phase == "squad"
            else [{"eval_loss": 9.5, "eval_mlm_accuracy": 0.0}, {"eval_loss": 7.75, "eval_mlm_accuracy": 0.125}]
        )
        lines = "".join(f"DLLL {json.dumps({'step': [], 'data': entry})}\n" for entry in data)
        (tmp_path / reports[phase]).write_text(lines)
    (folder / "squad" / "predictions.json").write_text('{"a": "x", "b": "y"}')
    script = ROOT / "scripts" / "quickstart_summary.py"
    text = subprocess.run([sys.executable, script, folder], capture_output=True, text=True, check=True).stdout
    for words in (
        ["phase 1", "10.50 -> 6.25 in 30 steps", "9.50 -> 7.75", "12.5%", str(folder / "phase1" / "30")],
        ["phase 2", "6.50 -> 6.00 in 4 steps", str(folder / "phase2" / "4")],
        ["SQuAD", "5.00 -> 3.50 in 7 steps", "exact match 12.5, F1 25.0", str(folder / "squad" / "7"), "2 questions"],
    ):
        assert re.search(".*".join(map(re.escape, words)), text, re.DOTALL), words


def test_its_progress_is_phase_step_loss_and_time_left(inputs: RunInputs, tmp_path):
    """What training prints, shortened; lines of other kinds stay as they are."""
    flags = ("--max-steps", 4, "--log-freq", 2, "--eval-dir", inputs.held_out, "--show-config", "false")
    printed = train(inputs.command(tmp_path, *flags)).stdout
    script = ROOT / "scripts" / "quickstart_progress.py"
    text = subprocess.run([sys.executable, script], input=printed, capture_output=True, text=True, check=True).stdout
    _title, second, fourth, held_out, last = text.splitlines()
    assert re.fullmatch(r"phase 1  step 2 of 4   loss  7\.\d\d   \d:\d\d:\d\d left", second)
    assert re.fullmatch(r"phase 1  step 4 of 4   loss  7\.\d\d   0:00:00 left", fourth)
    assert re.fullmatch(r"phase 1  step 4 of 4   on held-out text: loss 7\.\d\d, \d+\.\d% of the words right", held_out)
    assert last == next(line for line in printed.splitlines() if "; checkpoint in " in line)


@pytest.mark.parametrize(
    ("argument", "code", "words"), [("--help", 0, "The whole recipe"), ("corpus", 2, "no arguments")]
)
def test_the_quickstart_does_nothing_where_it_is_given_an_argument(argument, code, words):
    command = ["bash", ROOT / "scripts" / "quickstart.sh", argument]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == code
    assert words in result.stdout + result.stderr
    assert "environment" not in result.stdout
