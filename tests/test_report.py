"""Reports: what is read from logs, and the page."""

import html.parser
import json
import math
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import small_runs
from conftest import assert_refused, run_program

import report
import report_charts
from report_records import Run, Stage, differences, read_runs
from utils.errors import UserError

pytestmark = pytest.mark.filterwarnings("error::UserWarning")  # matplotlib's, where a chart does not fit

SETTINGS = {"output_dir": "out", "phase1": True, "phase2": False, "log_freq": 10, "max_steps": 100, "seed": 1}
SQUAD_SETTINGS = {"output_dir": "out", "doc_stride": 128, "log_freq": 10, "max_steps": -1, "seed": 1}


class Log:
    """Writes a log file as a program would, one second per record."""

    def __init__(self, path: Path, clock: float = 1e9):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.clock, self.elapsed = path, clock, 0

    def write(self, step, data: dict) -> "Log":
        times = {"timestamp": str(self.clock), "datetime": "", "elapsedtime": str(self.elapsed)}
        with self.path.open("a") as file:
            file.write(f"DLLL {json.dumps({**times, 'type': 'LOG', 'step': step, 'data': data})}\n")
        self.clock += 1
        self.elapsed += 1
        return self

    def start(self, settings: dict, pause: float = 0) -> "Log":
        self.clock, self.elapsed = self.clock + pause, 0
        return self.write("PARAMETER", settings)

    def train(self, steps, loss: float = 1.0, **metrics) -> "Log":
        for step in steps:
            self.write([step], {"loss": loss, **metrics})
        return self

    def raw(self, line: str) -> "Log":
        with self.path.open("a") as file:
            file.write(line)
        return self


def only_run(path: Path) -> Run:
    (run,) = read_runs([path])
    return run


def only_stage(path: Path) -> Stage:
    (stage,) = only_run(path).stages
    return stage


def losses(stage: Stage) -> list[tuple[int, float]]:
    return [(point.step, point.metrics["loss"]) for point in stage.points]


def three_stages(folder: Path, output_dir: str = "out", learning_rate: float = 0.01, f1: float = 81.25) -> Path:
    settings = {**SETTINGS, "output_dir": output_dir, "learning_rate": learning_rate}
    phase1 = Log(folder / "dllogger_p1.json").start(settings)
    phase1.train(range(10, 101, 10), 7.0, tokens_per_second=1000.0, learning_rate=0.01)
    phase1.write([100], {"eval_loss": 6.5}).write([], {"step": 100, "checkpoint": f"{output_dir}/phase1/100"})
    phase2 = Log(folder / "dllogger_p2.json", 1.1e9)
    phase2.start({**settings, "phase1": False, "phase2": True, "init": f"{output_dir}/phase1"}).train([10, 20], 6.0)
    squad = Log(folder / "dllogger_1_fp32.json", 1.2e9)
    squad.start({**SQUAD_SETTINGS, "output_dir": output_dir}).train([10, 14], 4.0)
    squad.write([], {"exact_match": 72.5, "f1": f1})
    return folder


# --- from records to series -------------------------------------------------------------------------------------------


def test_records_after_a_resume_replace_those_of_the_steps_that_were_lost(tmp_path):
    log = Log(tmp_path / "log.json").start(SETTINGS).train([10, 20], 5.0).write([20], {"eval_loss": 4.5})
    log.train([30, 40], 5.0).write([40], {"eval_loss": 4.0})
    log.start(SETTINGS, pause=3600).train([30, 40, 50], 3.0)  # from a checkpoint of step 25
    stage = only_stage(tmp_path)
    assert losses(stage) == [(10, 5.0), (20, 5.0), (30, 3.0), (40, 3.0), (50, 3.0)]
    assert [(point.step, point.metrics) for point in stage.evaluations] == [(20, {"loss": 4.5})]
    assert stage.resumes == [(20, 6.0)]
    assert stage.skipped == 0 and stage.missing == []


def test_the_pause_before_a_resume_is_no_training_time(tmp_path):
    log = Log(tmp_path / "log.json").start(SETTINGS).train([10, 20])
    log.start(SETTINGS, pause=3600).train([30])
    stage = only_stage(tmp_path)
    assert [point.seconds for point in stage.points] == [1, 2, 3]
    assert stage.seconds == 3


def test_a_run_that_starts_afresh_replaces_the_one_before(tmp_path):
    log = Log(tmp_path / "log.json").start(SETTINGS).train([10, 20, 30], 5.0).write([], {"f1": 80.0})
    log.start(SETTINGS).train([10], 4.0)
    stage = only_stage(tmp_path)
    assert losses(stage) == [(10, 4.0)] and stage.resumes == [] and stage.results == {}


def test_a_resume_that_has_logged_no_step_yet_changes_nothing(tmp_path):
    Log(tmp_path / "log.json").start(SETTINGS).train([10, 20]).start(SETTINGS)
    stage = only_stage(tmp_path)
    assert [point.step for point in stage.points] == [10, 20] and stage.resumes == []


@pytest.mark.parametrize("loss", [None, math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_a_skipped_update(tmp_path, loss):
    Log(tmp_path / "log.json").start({**SETTINGS, "log_freq": 1}).train([1]).train([1], loss).train([2])
    stage = only_stage(tmp_path)
    assert [point.skipped for point in stage.points] == [0, 1, 0]
    assert not math.isfinite(stage.points[1].metrics["loss"])


def test_skipped_updates_are_counted_by_steps_that_fall_behind_and_by_the_loss_scale(tmp_path):
    log = Log(tmp_path / "log.json").start({**SETTINGS, "log_freq": 10})
    log.train([10, 18])  # due at 20: two updates were skipped
    log.train([20], loss_scale=1024.0).train([30], loss_scale=128.0)  # halved three times
    log.train([40, 44])  # the last step is logged wherever it is
    assert [point.skipped for point in only_stage(tmp_path).points] == [0, 2, 0, 3, 0, 0]


def test_steps_without_records_are_named(tmp_path):
    Log(tmp_path / "log.json").start(SETTINGS).train([10, 20, 60, 70])
    assert only_stage(tmp_path).missing == [(21, 59)]
    assert "no records of steps 21–59" in page_of(tmp_path, tmp_path / "page.html")


def test_malformed_lines_are_skipped_and_counted(tmp_path):
    log = Log(tmp_path / "log.json").start(SETTINGS).train([10])
    log.raw("not a record\nDLLL [1]\nDLLL {}\n\n")
    log.raw('DLLL {"type": "METADATA", "metric": "loss", "metadata": {}}\n')  # dllogger's units are no mistake
    log.train([20]).raw('DLLL {"timestamp": "10')
    run = only_run(tmp_path)
    assert [point.step for point in run.stages[0].points] == [10, 20]
    assert run.malformed_lines == 4
    assert "4 malformed lines were skipped" in page_of(tmp_path, tmp_path / "page.html")


def test_steps_may_be_written_with_their_epoch(tmp_path):
    Log(tmp_path / "log.json").start(SETTINGS).write([0, 10], {"loss": 2.0}).write([1, 20], {"loss": 1.0})
    assert losses(only_stage(tmp_path)) == [(10, 2.0), (20, 1.0)]


def test_further_settings_belong_to_the_same_start(tmp_path):
    log = Log(tmp_path / "log.json").start(SETTINGS).write("PARAMETER", {"training_features": 12})
    log.train([10]).write("PARAMETER", {"predict_start": True}).train([20])
    stage = only_stage(tmp_path)
    assert len(stage.sessions) == 1 and stage.settings["training_features"] == 12


def test_a_prediction_later_adds_its_scores_and_no_training_time(tmp_path):
    log = Log(tmp_path / "log.json").start(SQUAD_SETTINGS).train([10])
    log.clock, log.elapsed = log.clock + 3600, 0
    log.write([], {"f1": 80.0})
    stage = only_stage(tmp_path)
    assert stage.name == "squad" and stage.results == {"f1": 80.0} and stage.seconds == 1


def test_benchmarks_and_other_seeds_do_not_mix_with_a_run(tmp_path):
    log = Log(tmp_path / "log.json").start(SETTINGS).train([10, 20], 5.0)
    log.start({**SETTINGS, "benchmark": True}).train([10], 9.0)
    log.start({**SETTINGS, "seed": 2}).train([10], 4.0)
    stages = only_run(tmp_path).stages
    assert {stage.title: losses(stage) for stage in stages} == {
        "Phase 1 seed 1": [(10, 5.0), (20, 5.0)],
        "Phase 1 seed 2": [(10, 4.0)],
        "Phase 1 benchmark": [(10, 9.0)],
    }


def test_a_folder_is_one_run_with_its_stages_in_order(tmp_path):
    run = only_run(three_stages(tmp_path / "results" / "bert"))
    assert run.name == "bert" and [stage.title for stage in run.stages] == ["Phase 1", "Phase 2", "SQuAD"]
    (tmp_path / "results" / "config.json").write_text("{}")  # no log
    assert [stage.name for stage in only_run(tmp_path / "results").stages] == ["phase1", "phase2", "squad"]


def test_subfolders_with_the_same_stages_are_several_runs(tmp_path):
    for name in "ab":
        three_stages(tmp_path / name)
    assert [run.name for run in read_runs([tmp_path])] == ["a", "b"]
    assert [run.name for run in read_runs([tmp_path / "b", tmp_path / "a" / "dllogger_p1.json"])] == [
        "b",
        "dllogger_p1.json",
    ]


def test_runs_with_the_same_folder_name_are_told_apart(tmp_path):
    paths = [three_stages(tmp_path / name / "results") for name in "ab"]
    assert [run.name for run in read_runs(paths)] == ["a/results", "b/results"]


def test_differences_leave_out_the_runs_own_folders(tmp_path):
    paths = [
        three_stages(tmp_path / "a", "/data/a", learning_rate=0.01),
        three_stages(tmp_path / "b", "/data/b", learning_rate=0.02),
    ]
    a, b = read_runs(paths)
    assert differences([a.stage("phase2"), b.stage("phase2")]) == {"learning_rate": [0.01, 0.02]}
    assert differences([a.stage("squad"), b.stage("squad")]) == {}
    assert differences([a.stage("phase1"), None]) == {}


# --- the page ---------------------------------------------------------------------------------------------------------


def page_of(*arguments) -> str:
    """The page of runs; the last argument is its path."""
    *runs, output = map(str, arguments)
    report.main([*runs, "--output", output])
    return Path(output).read_text(encoding="utf-8")


class Parsed(html.parser.HTMLParser):
    """Text, ids and references of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.ids, self.references, self.tags, self.cells = [], [], [], []
        self.feed(page.replace("<wbr>", ""))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("href", "src", "xlink:href", "action", "data"):
                self.references.append(value)
            self.references += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_data(self, data):
        if data.strip():
            self.cells.append(data.strip())


def test_the_page_is_self_contained(tmp_path):
    page = page_of(three_stages(tmp_path / "a"), three_stages(tmp_path / "b"), tmp_path / "page.html")
    parsed = Parsed(page)
    assert not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
    assert "http" not in page.replace("http-equiv", "") and "@import" not in page
    assert len(parsed.references) > 20 and all(reference.startswith("#") for reference in parsed.references)
    assert len(parsed.ids) == len(set(parsed.ids)) and {r[1:] for r in parsed.references} <= set(parsed.ids)


def test_charts_are_well_formed_and_coloured_by_the_page(tmp_path):
    page = page_of(three_stages(tmp_path / "a"), three_stages(tmp_path / "b"), tmp_path / "page.html")
    charts = re.findall(r'<svg class="chart".*?</svg>', page, flags=re.DOTALL)
    assert len(charts) == 2 * 3  # loss, learning rate and speed, over steps and over time
    for chart in charts:
        ElementTree.fromstring(chart)  # noqa: S314 # our own
        assert "var(--c01)" in chart and "var(--c02)" in chart
        assert not re.search(r"(fill|stroke): *#", chart)
    text = [ElementTree.tostring(ElementTree.fromstring(chart), method="text", encoding="unicode") for chart in charts]  # noqa: S314
    assert all(title in text[0] for title in ("Phase 1", "Phase 2", "SQuAD", "step"))
    assert "SQuAD" not in text[2]  # it has logged no learning rate
    assert "prefers-color-scheme:dark" in page


def test_the_page_shows_scores_progress_and_differences(tmp_path):
    a = three_stages(tmp_path / "a", f1=81.25)
    b = three_stages(tmp_path / "b", f1=80.5, learning_rate=0.02)
    cells = Parsed(page_of(a, b, tmp_path / "page.html")).cells
    for row in [
        ["Exact match", "72.5", "72.5"],
        ["F1", "81.25", "80.5"],
        ["Steps", "100 of 100", "100 of 100"],
        ["Loss", "7.000 → 7.000", "7.000 → 7.000"],
        ["Held-out loss", "6.500", "6.500"],
        ["Tokens/s, median", "1,000", "1,000"],
        ["learning_rate", "0.01", "0.02"],
    ]:
        assert any(cells[i : i + 3] == row for i in range(len(cells))), row
    assert "Differences in settings" in cells
    assert "Differences in settings" not in Parsed(page_of(a, tmp_path / "one.html")).cells


def test_what_logs_say_is_text_and_not_markup(tmp_path):
    settings = {**SETTINGS, "note": "<script>alert(1)</script>"}
    Log(tmp_path / "a" / "log.json").start(settings).train([10], **{"<b>metric</b>": 1.0})
    page = page_of(tmp_path / "a", tmp_path / "page.html")
    assert "<script" not in page and "&lt;script&gt;" in page and "<b>" not in page.lower()
    for chart in re.findall(r'<svg class="chart".*?</svg>', page, flags=re.DOTALL):
        ElementTree.fromstring(chart)  # noqa: S314


def test_a_run_without_steps_has_a_page(tmp_path):
    Log(tmp_path / "a" / "log.json").start(SETTINGS)
    assert "No step has been logged yet" in page_of(tmp_path / "a", tmp_path / "page.html")


def test_a_chart_of_values_that_are_never_finite_is_left_out(tmp_path):
    log = Log(tmp_path / "a" / "log.json").start({**SETTINGS, "log_freq": 1})
    log.train([0, 0], math.nan, grad_norm=math.inf, learning_rate=0.1)
    page = page_of(tmp_path / "a", tmp_path / "page.html")
    assert "<h3>Learning rate</h3>" in page and "<h3>Gradient norm</h3>" not in page


def test_a_hundred_thousand_steps_make_a_small_page(tmp_path):
    log = Log(tmp_path / "a" / "log.json").start({**SETTINGS, "log_freq": 1, "max_steps": 100_000})
    noise = np.random.default_rng(0).normal(size=100_000)
    with log.path.open("a") as file:
        for step in range(1, 100_001):
            data = {"loss": noise[step - 1], "grad_norm": 1 + noise[-step] ** 2, "mlm_accuracy": 0.5}
            times = {"timestamp": str(1e9 + step), "elapsedtime": str(step)}
            file.write(f"DLLL {json.dumps({**times, 'type': 'LOG', 'step': [step], 'data': data})}\n")
    page = page_of(tmp_path / "a", tmp_path / "page.html")
    assert "100,000 of 100,000" in page and "average and range" in page
    assert len(page) < 300_000


def test_averaging_keeps_the_extremes_and_the_gaps():
    x, y = np.arange(1000), np.zeros(1000)
    y[500], y[700], y[100:200] = 9.0, -9.0, np.nan
    centers, mean, low, high = report_charts.downsample(x, y, 50)
    assert len(centers) == 50 and np.all(np.diff(centers) == 20)
    assert high[25] == 9.0 and low[35] == -9.0 and mean[25] == pytest.approx(9 / 20)
    assert np.isnan(mean[5:10]).all() and not np.isnan(np.delete(mean, range(5, 10))).any()
    assert all(np.array_equal(array, y, equal_nan=True) for array in report_charts.downsample(x, y, 1000)[1:])


# --- the program ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "words"), [("missing", "does not exist"), ("empty", "holds no training log")])
def test_what_is_no_run_is_an_error(tmp_path, name, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "other.json").write_text("{}")
    result = run_program("report.py", tmp_path / name, "--output", tmp_path / "page.html")
    assert_refused(result, str(tmp_path / name), words)
    assert not (tmp_path / "page.html").exists()


def test_without_matplotlib_the_error_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        report.main([str(three_stages(tmp_path)), "--output", str(tmp_path / "page.html")])


def test_watching_writes_the_page_again_when_the_log_has_grown(tmp_path, monkeypatch, capsys):
    log = Log(tmp_path / "a" / "log.json").start(SETTINGS).train([10])
    output = tmp_path / "page.html"
    pages = []

    def sleep(seconds):
        assert seconds == 5
        pages.append((output.stat().st_ino, output.read_text()))  # a new file each time it is written
        if len(pages) == 2:
            log.train([20])
        if len(pages) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(report.time, "sleep", sleep)
    report.main([str(tmp_path / "a"), "--output", str(output), "--watch", "5"])
    first, second, third = pages
    assert first == second and "10 of 100" in first[1]
    assert third[0] != second[0] and "20 of 100" in third[1]
    refresh = '<meta http-equiv="refresh" content="5">'
    assert refresh in third[1] and refresh not in output.read_text() and "20 of 100" in output.read_text()
    assert capsys.readouterr().out.count(str(output)) == 2


def test_watching_waits_for_a_run_that_has_logged_nothing_yet(tmp_path, monkeypatch, capsys):
    run, output = tmp_path / "a", tmp_path / "page.html"
    waited = []

    def sleep(_):
        waited.append(output.exists())
        if len(waited) == 1:
            run.mkdir()
            (run / "log.json").touch()
        if len(waited) == 2:
            Log(run / "log.json").start(SETTINGS).train([10])
        if len(waited) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(report.time, "sleep", sleep)
    report.main([str(run), "--output", str(output), "--watch", "5"])
    assert waited == [False, False, True] and "10 of 100" in output.read_text()
    assert capsys.readouterr().out.count(f"waiting for the first record in {run}") == 1


def test_a_real_run_is_understood(tmp_path):
    inputs = small_runs.RunInputs.make(tmp_path / "inputs")
    output = tmp_path / "out"
    flags = ["--max-steps", 6, "--log-freq", 1, "--num-steps-per-checkpoint", 2, "--eval-dir", inputs.held_out]
    flags += ["--eval-steps", 3]
    small_runs.train(inputs.command(output, *flags, "--steps-this-run", 4))
    small_runs.train(inputs.command(output, *flags, *small_runs.resuming(output)))
    stage = only_stage(output)
    assert stage.name == "phase1" and dict(losses(stage)) == small_runs.losses(output)
    assert [point.step for point in stage.points] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in stage.resumes] == [4] and stage.skipped == 0 and stage.missing == []
    assert [point.step for point in stage.evaluations] == [3, 4, 6]  # a run evaluates where it stops, too
    assert stage.versions == {**small_runs.progress(output, 6)["versions"], "processes": 1}
    page = page_of(output, tmp_path / "page.html")
    assert all(title in page for title in ("MLM accuracy", "Gradient norm", "Tokens/s", "Data wait", "6 of 6"))
