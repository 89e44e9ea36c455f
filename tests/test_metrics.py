"""Report files in DLLogger's format."""

import datetime
import json
import sys

import pytest

from utils import logger
from utils.logger import Reporter
from utils.progress import progress_bar


@pytest.fixture(autouse=True)
def without_dllogger(monkeypatch):
    monkeypatch.setattr(logger, "dllogger", None)


def entries(path) -> list[dict]:
    lines = path.read_text().splitlines()
    assert all(line.startswith("DLLL {") for line in lines)
    return [json.loads(line.removeprefix("DLLL ")) for line in lines]


def test_each_entry_is_a_line_as_dllogger_writes_it(tmp_path):
    path = tmp_path / "new" / "report.json"
    reporter = Reporter(path)
    reporter.log("PARAMETER", {"seed": 42})
    reporter.log((10,), {"loss": 7.25, "learning_rate": 1e-4})
    reporter.log((), {"folder": tmp_path})  # readable at once, before it is closed
    parameter, step, summary = entries(path)
    reporter.close()
    assert parameter["step"] == "PARAMETER" and parameter["data"] == {"seed": 42}
    assert step["step"] == [10] and step["data"] == {"loss": 7.25, "learning_rate": 1e-4}
    assert summary["step"] == [] and summary["data"] == {"folder": str(tmp_path)}
    for entry in (parameter, step, summary):
        assert set(entry) == {"timestamp", "datetime", "elapsedtime", "type", "step", "data"}
        assert entry["type"] == "LOG" and float(entry["elapsedtime"]) >= 0
        written = datetime.datetime.fromisoformat(entry["datetime"])
        assert float(entry["timestamp"]) == pytest.approx(written.timestamp(), abs=1e-3)


def test_a_second_run_adds_to_the_report(tmp_path):
    for step in (1, 2):
        reporter = Reporter(tmp_path / "report.json")
        reporter.log((step,), {"loss": 1.0})
        reporter.close()
    assert [entry["step"] for entry in entries(tmp_path / "report.json")] == [[1], [2]]


def test_text_is_shown_with_or_without_a_report_file(tmp_path, capsys):
    Reporter(None).log((1,), {"loss": 1.0}, "step 1  loss 1.0")
    assert capsys.readouterr().out == "step 1  loss 1.0\n"


def test_only_the_main_process_writes(tmp_path, capsys):
    reporter = Reporter(tmp_path / "report.json", enabled=False)
    reporter.log((1,), {"loss": 1.0}, "step 1")
    reporter.close()
    assert not (tmp_path / "report.json").exists() and capsys.readouterr().out == ""


def test_a_progress_bar_is_quiet_where_nobody_watches(capsys, monkeypatch):
    with progress_bar(3, "training", "step") as bar:
        bar.update(3)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress_bar(3, "training", "step", enabled=False) as bar:
        bar.update(3)
    assert capsys.readouterr().err == ""
    with progress_bar(3, "training", "step") as bar:
        bar.update(3)
    assert "training" in capsys.readouterr().err
