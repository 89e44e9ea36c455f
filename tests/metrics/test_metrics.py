"""What a run reports: the measuring window, and records in DLLogger's format, on the terminal and
in TensorBoard.
"""

import contextlib
import importlib
import math
import re
import shutil
import sys
import time
import types
from pathlib import Path

import dllogger_stand_in
import pytest
import torch
from conftest import ROOT, assert_refused, log_entries, reported
from small_runs import resuming, run_here, steps_folder, steps_in, train

from bert_recipe.checkpoint.model_folder import read_config
from bert_recipe.config import RuntimeConfig
from bert_recipe.metrics import sinks
from bert_recipe.metrics.sinks import DLLoggerJsonSink, RecordingSink, Reporter, Sink, make_reporter
from bert_recipe.metrics.text import format_duration, format_metrics, step_metrics
from bert_recipe.metrics.throughput import GlobalBatchStats, MeasuringWindow
from bert_recipe.model.costs.flops import training_flops
from bert_recipe.model.encoders.bert import BertForPreTraining
from bert_recipe.utils.errors import UserError

CPU = torch.device("cpu")


@pytest.mark.parametrize(("length", "masked", "gigaflops"), [(128, 20, 240.6), (512, 80, 1020.5)])
def test_training_flops_of_bert_large_match_the_published_formula(length, masked, gigaflops):
    with torch.device("meta"):
        model = BertForPreTraining(read_config(ROOT / "bert_configs" / "bert-large-uncased.json"))
    flops = training_flops(model, [length], masked)
    assert flops / 1e9 == pytest.approx(gigaflops, abs=0.05)
    assert training_flops(model, [length] * 3, 3 * masked) == pytest.approx(3 * flops)


@pytest.fixture
def clock(monkeypatch):
    """A clock that only `clock.now += seconds` moves."""
    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def test_window_measures_since_its_restart_without_pauses(clock):
    window = MeasuringWindow(CPU, world_size=2, peak=1e13)
    window.count(GlobalBatchStats(99, 99, 99, 99), 99.0)
    window.restart()
    for _ in range(4):
        clock.now += 2.0
        window.count(
            GlobalBatchStats(sequences=16, tokens=800, labelled_tokens=10, flops=4e13), waited=0.5
        )
        with window.paused():
            clock.now += 1000.0
    assert window.metrics() == {
        "step_seconds": 2.0,
        "sequences_per_second": 8.0,
        "tokens_per_second": 400.0,
        "model_tflops": 10.0,  # per process
        "utilization": 1.0,
        "data_wait": 0.25,
    }
    without_peak = MeasuringWindow(CPU, world_size=1, peak=None)
    clock.now += 1.0
    assert "utilization" not in without_peak.metrics()


def test_figures_are_formatted_for_people():
    figures = {
        "loss": 1.23456,
        "mlm_accuracy": 0.5,
        "learning_rate": 1e-4,
        "tokens_per_second": 12345.6,
        "f1": 88.12,
    }
    assert format_metrics(figures) == "loss 1.2346 (50.0%)  lr 0.0001  12,346 tokens/s  f1 88.1"
    assert [format_duration(seconds) for seconds in (0, 61.4, 90000)] == [
        "0:00:00",
        "0:01:01",
        "1 day, 1:00:00",
    ]


def test_a_step_of_pretraining_is_a_line_of_a_terminal():
    names = ("loss", "mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy", "learning_rate")
    names += ("grad_norm", "step_seconds", "sequences_per_second", "model_tflops", "data_wait")
    metrics = dict.fromkeys(names, 0.0912345) | {"tokens_per_second": 216_300.0}
    text = format_metrics(step_metrics(metrics))
    assert text == "loss 0.0912  mlm 0.0912 (9.1%)  lr 0.0912  216,300 tokens/s"
    assert len(f"phase1  step 100000/250000  {text}  12:00:00 left") < 105
    slow = format_metrics(step_metrics(metrics | {"data_wait": 0.37}))
    assert slow.endswith("data wait 37%")


def test_line_that_a_killed_run_left_unfinished_takes_no_record_of_the_next_run(tmp_path):
    path = tmp_path / "report.json"
    DLLoggerJsonSink(path, "--report-file").write((1,), {"loss": 1.0}, None)
    path.write_text(path.read_text() + 'DLLL {"timestamp": "17')
    DLLoggerJsonSink(path, "--report-file").write((2,), {"loss": 1.0}, None)
    assert [entry["step"] for entry in log_entries(path)] == [[1], [2]]


def test_runs_at_the_same_time_have_reports_of_their_own(tmp_path):
    first, second = (DLLoggerJsonSink(tmp_path / "report.json", "--report-file") for _ in range(2))
    first.write((1,), {"loss": 1.0}, None)
    with pytest.raises(
        UserError, match=r"another run is writing to .*report.json: choose another --report-file"
    ):
        second.write((1,), {"loss": 2.0}, None)
    first.close()
    second.write((1,), {"loss": 2.0}, None)


def test_dlloggers_text_goes_to_the_log_file_and_the_readable_line_to_the_terminal(
    tmp_path, capsys
):
    logs = RuntimeConfig(
        report_file=tmp_path / "report.json", log_file=tmp_path / "logs" / "job.log"
    )
    reporter = make_reporter(logs, is_main=True)
    reporter.log("PARAMETER", {"SEED": 42, "output_dir": "no_utf_8_\udcff"})
    reporter.log((0, 7), {"loss": 1.5, "learning_rate": 1e-4}, "step 7  loss 1.5")
    reporter.log((), {"final_loss": 1.5, "raw_train_time": 2.0}, "done")
    reporter.close()
    assert capsys.readouterr().out == "step 7  loss 1.5\ndone\n"
    lines = (tmp_path / "logs" / "job.log").read_text().splitlines()
    dates, records = zip(*(line.split(" - ", 1) for line in lines), strict=True)
    assert all(re.fullmatch(r"DLL \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+", date) for date in dates)
    # As NVIDIA's format_step and DLLogger's default formats write them.
    assert records == (
        "PARAMETER SEED : 42  output_dir : no_utf_8_\\udcff ",
        "Epoch: 0 Step: 7  loss : 1.5  learning_rate : 0.0001 ",
        "Summary:  final_loss : 1.5  raw_train_time : 2.0 ",
    )


def without_times(text: str) -> str:
    text = re.sub(r'"(timestamp|datetime|elapsedtime)": "[^"]+"', r'"\1": ""', text)
    return re.sub(r"(?m)^DLL [-0-9]+ [:.0-9]+ - ", "DLL - ", text)


def logs_in(folder: Path) -> dict[str, str]:
    """What a run logs, by the name of the file."""
    config = RuntimeConfig(report_file=folder / "report.json", log_file=folder / "job.log")
    for _ in range(2):  # the second run appends
        reporter = make_reporter(config, is_main=True)
        reporter.log("PARAMETER", {"SEED": 42, "output_dir": folder.name, "labels": ("a", "é")})
        reporter.log((0, 7), {"loss": math.nan, "learning_rate": 1e-4}, "step 7")
        reporter.log((), {"final_loss": 1.5, "none": None}, "done")
        reporter.close()
    return {path.name: without_times(path.read_text()) for path in folder.iterdir()}


@pytest.fixture(params=["stand-in", "installed"])
def package(request, monkeypatch):
    """NVIDIA's package where it is installed, and the stand-in for it."""
    if request.param == "installed":
        return pytest.importorskip("dllogger")
    stand_in = importlib.reload(dllogger_stand_in)
    monkeypatch.setitem(sys.modules, "dllogger", stand_in)
    return stand_in


def test_logs_are_equal_with_and_without_the_package(tmp_path, monkeypatch, package):
    with_package = logs_in(tmp_path / "a" / "logs")
    monkeypatch.setitem(sys.modules, "dllogger", None)
    assert with_package == logs_in(tmp_path / "b" / "logs")
    assert {*with_package} == {"report.json", "job.log"}
    assert len(with_package["report.json"].splitlines()) == 6


def test_backends_that_other_code_registers_get_the_records(tmp_path, monkeypatch, package):
    records = []

    class Keeping(package.Backend):
        def log(self, timestamp, elapsedtime, step, data):
            records.append((step, data))

        def metadata(self, *_):
            pass

        def flush(self):
            pass

    monkeypatch.setattr(package, "GLOBAL_LOGGER", package.GLOBAL_LOGGER)
    reporter = make_reporter(RuntimeConfig(report_file=tmp_path / "r.json"), is_main=True)
    reporter.log("PARAMETER", {"seed": 1})
    package.init(backends=[Keeping(package.Verbosity.DEFAULT)])
    reporter.log((0, 1), {"loss": 2.5, "folder": tmp_path})
    reporter.close()
    assert records == [([0, 1], {"loss": 2.5, "folder": str(tmp_path)})]
    assert [entry["step"] for entry in log_entries(tmp_path / "r.json")] == ["PARAMETER", [0, 1]]


def test_the_logs_of_one_of_several_runs_have_its_name(tmp_path, monkeypatch):
    events = []
    monkeypatch.setattr(
        sinks, "TensorBoardSink", lambda folder: events.append(folder) or sinks.TerminalSink()
    )
    logs = RuntimeConfig(
        report_file=tmp_path / "r.json", log_file=tmp_path / "l.txt", tensorboard_dir=tmp_path / "t"
    )
    with contextlib.closing(make_reporter(logs, True, "seed-7")) as reporter:
        reporter.log("PARAMETER", {"seed": 7})
    assert {path.name for path in tmp_path.iterdir()} == {"r-seed-7.json", "l-seed-7.txt"}
    assert events == [tmp_path / "t" / "seed-7"]


def test_only_the_main_process_reports(tmp_path, capsys):
    logs = RuntimeConfig(
        report_file=tmp_path / "r", log_file=tmp_path / "l", tensorboard_dir=tmp_path / "t"
    )
    reporter = make_reporter(logs, is_main=False)
    reporter.log((1,), {"loss": 1.0}, "step 1")
    reporter.close()
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""


@pytest.mark.parametrize("is_killed", [False, True])
def test_tensorboard_has_the_figures_of_the_report(inputs, tmp_path, is_killed):
    """Once, also those of updates that a killed run made after its last checkpoint."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    output, folder = tmp_path / "output", tmp_path / "tensorboard"
    flags = ("--log-freq", 2, "--eval-dir", inputs.held_out, "--tensorboard-dir", folder)
    command = inputs.command(
        output, "--max-steps", 6, *flags, "--num-steps-per-checkpoint", 2, *resuming(output)
    )
    train(command)
    if is_killed:
        shutil.rmtree(steps_folder(output) / "6")
        train(command)
    report = reported(output / "report.json")
    assert list(report) == [1, 2, 4, 6]
    starts = [entry["data"] for entry in log_entries(output / "report.json")]
    resumed = [data["resumed_step"] for data in starts if "resumed_step" in data]
    assert resumed == ([4] if is_killed else [])
    expected = {name: [] for name in (*report[2], *report[6])}
    for step, figures in report.items():
        for name, value in figures.items():
            expected[name].append((step, pytest.approx(value, rel=1e-6)))
    assert {"loss", "learning_rate", "eval_loss", "sequences_per_second"} <= expected.keys()
    logged = accumulators.EventAccumulator(str(folder)).Reload()
    recorded = {
        tag: [(event.step, event.value) for event in logged.Scalars(tag)]
        for tag in logged.Tags()["scalars"]
    }
    final = {name: recorded.pop(name) for name in list(recorded) if name.startswith("final/")}
    assert recorded == expected
    assert [step for step, _ in final["final/final_loss"]] == [6]


class WandbStandIn:
    """Runs as wandb keeps them: rows by step. Those before the last one, and of a resumed run the
    last one, are dropped.
    """

    def __init__(self):
        self.runs = {}

    def Settings(self, **_):
        return None

    def init(self, id=None, resume=None, **_):
        if resume != "allow":
            id = f"run{len(self.runs)}"
            self.runs[id] = types.SimpleNamespace(id=id, rows={})
        run = self.runs[id]
        first = max(run.rows, default=-1) + 1

        def log(numbers, step):
            if step >= max(first, *run.rows, 0):
                run.rows.setdefault(step, {}).update(numbers)

        config = types.SimpleNamespace(update=lambda *_, **__: None)
        parts = {"log": log, "summary": {}, "config": config, "finish": lambda: None}
        run.__dict__.update(parts)
        return run


def test_a_resumed_run_has_each_step_once_in_one_run_of_wandb(inputs, tmp_path, monkeypatch):
    wandb = WandbStandIn()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    flags = ("--max-steps", 6, "--log-freq", 1, "--wandb-project", "bert")
    output = tmp_path / "output"
    command = inputs.command(output, *flags, "--num-steps-per-checkpoint", 2, *resuming(output))
    train(command)
    shutil.rmtree(steps_folder(output) / "6")  # as if it was killed before
    train(command)
    report = reported(output / "report.json")
    assert list(wandb.runs) == ["run0"] and list(wandb.runs["run0"].rows) == [*range(1, 7)]
    losses = {step: row["loss"] for step, row in wandb.runs["run0"].rows.items()}
    assert losses == pytest.approx({step: figures["loss"] for step, figures in report.items()})
    train(inputs.command(tmp_path / "new", *flags))
    assert list(wandb.runs) == ["run0", "run1"]


@pytest.mark.parametrize(
    ("flag", "package"), [("--tensorboard-dir", "tensorboard"), ("--wandb-project", "wandb")]
)
def test_a_sink_without_its_package_is_an_error(inputs, tmp_path, monkeypatch, flag, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard.writer", raising=False)
    result = run_here(inputs.command(tmp_path, "--max-steps", 2, flag, tmp_path / "name"))
    assert result.returncode == 2 and "Traceback" not in result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {flag} needs the package {package}") and "pip install" in line
    assert steps_in(tmp_path) == []


@pytest.mark.parametrize(
    ("packages", "config", "says"),
    [
        (["tensorboard"], {"tensorboard_dir": Path("file")}, "file: this exists already"),
        (["wandb"], {"wandb_project": "a/b"}, "--wandb-project a/b: Invalid project name"),
        (
            [],
            {"report_file": Path("new"), "log_file": Path("new")},
            "is writing to new: choose another --log-file",
        ),
        *(  # each with its own cause
            ([], {"report_file": Path(path)}, f"cannot write {path} (--report-file): {says}")
            for path, says in {
                "file/log": "this exists already, as a file or a link to nothing: choose another",
                "file/folder/log": "a part of the path is not a folder: check the path",
                "broken/log": "this exists already, as a file or a link to nothing: choose another",
                "loop/log": "this exists already, as a file or a link to nothing: choose another",
                "loop": "too many symbolic links, or a loop of them: check the path",
                "/dev/full": "the disk is full: free some space",
                "/proc/none/log": "no such file or folder: check the path",
            }.items()
        ),
    ],
)
def test_a_sink_that_cannot_be_written_is_an_error(tmp_path, monkeypatch, packages, config, says):
    for package in packages:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    Path("file").touch()
    Path("broken").symlink_to("nowhere/x")
    Path("loop").symlink_to("loop")

    def log(_words: list[str]) -> None:
        make_reporter(RuntimeConfig(**config), is_main=True).log((1,), {"loss": 1.0})

    assert_refused(run_here([], log), says)


class FailingSink(Sink):
    """Raises `error` from the `fails_at`-th record on, or when it is closed."""

    name = "--some-log"

    def __init__(self, error: BaseException, fails_at: int):
        self.error, self.left = error, fails_at

    def write(self, step, metrics, text) -> None:
        self.left -= 1
        if self.left <= 0:
            raise self.error

    def close(self) -> None:
        raise self.error


@pytest.mark.parametrize("fails_at", [1, 2, 99])
@pytest.mark.parametrize(
    "error",
    [ConnectionResetError("gone"), RuntimeError("a\nb"), AssertionError(), OSError(28, "full")],
    ids=repr,
)
def test_a_run_goes_on_without_a_sink_that_fails(capsys, error, fails_at):
    kept = RecordingSink()
    failing = FailingSink(error, fails_at)
    reporter = Reporter([failing, kept])
    for step in range(1, 4):
        reporter.log((0, step), {"loss": float(step)})
    reporter.close()
    assert [values["loss"] for values in kept.records.values()] == [1, 2, 3]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: --some-log failed ({type(error).__name__}")
    assert line.endswith("): continuing without it")


def test_weights_and_biases_offline_run_has_settings_metrics_and_summary(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs the package wandb")
    for name, value in (("MODE", "offline"), ("DIR", str(tmp_path)), ("SILENT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    reporter = make_reporter(RuntimeConfig(wandb_project="bert"), is_main=True)
    reporter.log("PARAMETER", {"train_batch_size": 42, "output_dir": tmp_path})
    reporter.log((0, 3), {"loss": 2.5, "checkpoint": "folder/3"})
    reporter.log((), {"exact_match": 80.125})
    reporter.close()
    # finish() returns before its service has written the file; a program's exit waits for it.
    wandb.teardown()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert all(
        word in content
        for word in (b"bert", b"train_batch_size", b"loss", b"2.5", b"final/exact_match", b"80.125")
    )
    assert b"folder/3" not in content
