"""Reports: what is read from logs, and the page."""

import errno
import html.parser
import json
import math
import os
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import small_runs
from conftest import assert_refused, run_program
from log_files import SETTINGS, SQUAD_SETTINGS, Log, losses, only_phase, only_run, three_phases

import report
from bert_recipe.reporting import charts
from bert_recipe.reporting.records import read_runs

# NumPy's, such as a division by zero in a chart.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def resumed(log: Log) -> None:
    log.start(SETTINGS).train([10, 20], 5.0).write([20], {"eval_loss": 4.5})
    log.train([30, 40], 5.0).write([40], {"eval_loss": 4.0})
    log.start(SETTINGS, pause=3600).train([30, 40, 50], 3.0)  # from a checkpoint of step 25


def scaled(log: Log) -> None:
    # Halved three times.
    log.start(SETTINGS).train([10], loss_scale=1024.0).train([20], loss_scale=128.0)
    log.train([30], loss_scale=256.0).train([40])


LOGS = {
    "records after a resume replace those of the steps that were lost": (
        resumed,
        {
            "losses": [(10, 5.0), (20, 5.0), (30, 3.0), (40, 3.0), (50, 3.0)],
            "evaluations": [(20, {"loss": 4.5})],
        }
        | {"resumes": [20], "skipped": [0] * 5},
    ),
    "the pause before a resume is no training time": (
        lambda log: log.start(SETTINGS).train([10, 20]).start(SETTINGS, pause=3600).train([30]),
        {"seconds": [1, 2, 3]},
    ),
    "a run that starts afresh replaces the one before": (
        lambda log: (
            log.start(SETTINGS)
            .train([10, 20], 5.0)
            .write([], {"f1": 80.0})
            .start(SETTINGS)
            .train([10], 4.0)
        ),
        {"losses": [(10, 4.0)], "resumes": [], "results": {}},
    ),
    "a resume that has logged no step yet changes nothing": (
        lambda log: log.start(SETTINGS).train([10, 20]).start(SETTINGS),
        {"losses": [(10, 1.0), (20, 1.0)], "resumes": []},
    ),
    "a loss that is not finite is a skipped update": (
        lambda log: (
            log.start(SETTINGS)
            .train([1])
            .train([1], None)
            .train([2], math.nan)
            .train([3], math.inf)
            .train([4])
        ),
        {"skipped": [0, 1, 1, 1, 0]},
    ),
    "skipped updates are counted by the loss scale": (scaled, {"skipped": [0, 3, 0, 0]}),
    "steps may be written with their epoch": (
        lambda log: log.start(SETTINGS).write([0, 10], {"loss": 2.0}).write([1, 20], {"loss": 1.0}),
        {"losses": [(10, 2.0), (20, 1.0)]},
    ),
    "further settings belong to the same start": (
        lambda log: (
            log.start(SETTINGS)
            .write("PARAMETER", {"f": 12})
            .train([10])
            .write("PARAMETER", {"g": 1})
            .train([20])
        ),
        {
            "settings": {**SETTINGS, "f": 12, "g": 1},
            "losses": [(10, 1.0), (20, 1.0)],
            "resumes": [],
        },
    ),
    "baselines of questions are percentages, too": (
        lambda log: log.start(SQUAD_SETTINGS).write(
            [], {"f1": 80.0, "baselines": {"empty answer": {"f1": 50.0}}}
        ),
        {"results": {"f1": 0.8, "baselines": {"empty answer": {"f1": 0.5}}}},
    ),
    "a later prediction adds its scores and no training time": (
        lambda log: log.start(SQUAD_SETTINGS).train([10]).restarted(3600).write([], {"f1": 80.0}),
        {"name": "squad", "results": {"f1": 0.8}, "seconds": [1]},
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_the_records_of_a_log_become_a_phase(tmp_path, name):
    write, expected = LOGS[name]
    write(Log(tmp_path / "log.json"))
    phase = only_phase(tmp_path)
    fields = {name: getattr(phase, name) for name in ("name", "resumes", "results", "settings")} | {
        "losses": losses(phase),
        "evaluations": [(point.step, point.metrics) for point in phase.evaluations],
        "skipped": [point.skipped for point in phase.points],
        "seconds": [point.seconds for point in phase.points],
    }
    assert {name: fields[name] for name in expected} == expected


def test_unusable_lines_are_skipped_counted_and_named(tmp_path):
    log = Log(tmp_path / "log.json").start(SETTINGS).train([10])
    log.raw("not a record\nDLLL [1]\nDLLL {}\n\n")
    # The units of dllogger are no mistake.
    log.raw('DLLL {"type": "METADATA", "metric": "loss", "metadata": {}}\n')
    log.write([11], {"loss": [1.0]})
    log.train([20]).raw('DLLL {"timestamp": "10')
    run = only_run(tmp_path)
    assert [point.step for point in run.phases[0].points] == [10, 20]
    assert [line for _, line in run.unusable] == [3, 4, 5, 8, 10]
    result = small_runs.run_here([tmp_path, "--output", tmp_path / "page.html"], report.main)
    lines = ", ".join(f"log.json:{n}" for n in (3, 4, 5, 8, 10))
    note = f"{tmp_path.name}: 5 unusable lines skipped ({lines})"
    assert note in (tmp_path / "page.html").read_text()
    assert result.stdout.splitlines() == [f"note: {note}", f"report: {tmp_path / 'page.html'}"]


DEEP = "[" * 100_000
ODD_VALUES = ["1e400", "-1e400", "NaN", "null", "true", '"x"', "[]", "{}", "1e308", "9" * 400]
ODD_VALUES += ["-5", "1.5", "[[1]]", '[{"text": "a"}]', '{"a": {"f1": 1}}', DEEP]
ODD_LINES = {
    "step": '{"step": [%s], "data": {"loss": 1}, TIMES}',
    "time": '{"step": [30], "data": {"loss": 1}, "timestamp": %s, "elapsedtime": 9}',
    "elapsed": '{"step": [30], "data": {"loss": 1}, "timestamp": 1e9, "elapsedtime": %s}',
    "metrics": '{"step": [30], "data": {"loss": %s, "loss_scale": %s, "eval_f1": %s}, TIMES}',
    "values": '{"step": [30], "data": %s, TIMES}',
    "settings": '{"step": "PARAMETER", "data": {"output_dir": %s, "phase2": %s}, TIMES}',
    "scores": '{"step": [], "data": {"per_class": {"a": {"f1": %s}, "b": {"f2": %s}}}, TIMES}',
    "class": '{"step": [], "data": {"per_class": {"a": {"f1": 1}, "b": %s}}, TIMES}',
    "table": '{"step": [], "data": {"per_class": %s, "confusion_matrix": %s}, TIMES}',
    "matrix": '{"step": [], "data": {"per_class": {"a": {}}, "confusion_matrix": %s}, TIMES}',
    "mistakes": '{"step": [], "data": {"most_confident_mistakes": %s}, TIMES}',
}


@pytest.mark.parametrize("kind", ODD_LINES)
def test_values_that_no_program_logs_are_no_traceback(tmp_path, kind):
    for number, value in enumerate(ODD_VALUES):
        log = Log(tmp_path / str(number) / "log.json").start(SETTINGS).train([10, 20])
        line = ODD_LINES[kind].replace("%s", value)
        log.raw("DLLL " + line.replace("TIMES", '"timestamp": 1e9, "elapsedtime": 9') + "\n")
        log.train([40], -1e308).train([50])
        report.main([str(log.path)])
        assert "</html>" in (log.path.parent / "report.html").read_text()


def test_benchmarks_and_other_seeds_do_not_mix_with_a_run(tmp_path):
    log = Log(tmp_path / "log.json").start(SETTINGS).train([10, 20], 5.0)
    log.start({**SETTINGS, "benchmark": True}).train([10], 9.0)
    log.start({**SETTINGS, "seed": 2}).train([10], 4.0)
    phases = only_run(tmp_path).phases
    assert {(phase.title, phase.seed): losses(phase) for phase in phases} == {
        ("Phase 1", 1): [(10, 5.0), (20, 5.0)],
        ("Phase 1", 2): [(10, 4.0)],
        ("Phase 1 benchmark", None): [(10, 9.0)],
    }


def test_a_folder_is_one_run_with_its_phases_in_order(tmp_path, monkeypatch):
    scandir = os.scandir
    hidden = tmp_path / "results" / "bert" / "net"

    def fail_as_in_proc(path):
        if path == str(hidden):
            raise OSError(errno.EINVAL, "Invalid argument", path)
        return scandir(path)

    hidden.mkdir(parents=True)
    monkeypatch.setattr(os, "scandir", fail_as_in_proc)
    run = only_run(three_phases(tmp_path / "results" / "bert"))
    assert run.name == "bert" and [phase.title for phase in run.phases] == [
        "Phase 1",
        "Phase 2",
        "SQuAD",
    ]
    (tmp_path / "results" / "config.json").write_text("{}")  # no log
    assert [phase.name for phase in only_run(tmp_path / "results").phases] == [
        "phase1",
        "phase2",
        "squad",
    ]


@pytest.mark.parametrize(
    ("folders", "paths", "names"),
    [
        (["a", "b"], ["."], ["a", "b"]),  # subfolders with the same phases
        (["a", "b"], ["b", "a/dllogger_p1.json"], ["b", "a/dllogger_p1.json"]),
        (["a/results", "b/results"], ["a/results", "b/results"], ["a", "b"]),
        (["a/bert/task", "b/bert/task"], ["."], ["a", "b"]),
    ],
)
def test_runs_are_named_by_what_tells_them_apart(tmp_path, folders, paths, names):
    for folder in folders:
        three_phases(tmp_path / folder)
    assert [run.name for run in read_runs([tmp_path / path for path in paths])] == names


def test_folds_are_of_one_run(tmp_path):
    for fold in (1, 2):
        folder = tmp_path / f"fold-{fold}"
        folder.mkdir()
        Log(folder / "report.json").start({**SETTINGS, "fold": fold}).train([10])
    page = page_of(tmp_path, tmp_path / "page.html")
    assert "fold 1" in page and "fold-1" not in page


def page_of(*arguments) -> str:
    """The page of runs; the last argument is its path."""
    *runs, output = map(str, arguments)
    report.main([*runs, "--output", output])
    return Path(output).read_text(encoding="utf-8")


class Parsed(html.parser.HTMLParser):
    """Text, tags and references of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.references, self.tags, self.cells = [], [], []
        self.feed(page.replace("<wbr>", ""))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("href", "src", "xlink:href", "action", "data"):
                self.references.append(value)
            self.references += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_data(self, data):
        if data.strip():
            self.cells.append(data.strip())


def charts_in(page: str) -> list[ElementTree.Element]:
    return [
        ElementTree.fromstring(svg)  # noqa: S314 (our own)
        for svg in re.findall(r"<svg class=\"chart.*?</svg>", page, flags=re.DOTALL)
    ]


def test_the_page_is_self_contained_runs_differ_in_colour_and_charts_have_labels_and_values(
    tmp_path,
):
    page = page_of(
        three_phases(tmp_path / "a"), three_phases(tmp_path / "b"), tmp_path / "page.html"
    )
    parsed = Parsed(page)
    assert (
        not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
        and parsed.references == []
    )
    assert "http" not in page and "@import" not in page
    charts = charts_in(page)
    assert len(charts) == 3 + 1 + 1  # loss of all phases, learning rate and speed of one
    loss = charts[0]
    styles = [
        group.get("class") for group in loss.findall("g") if group.get("class").startswith("c")
    ]
    assert styles == ["c0 d0", "c1 d1"]
    assert loss.get("aria-label").startswith(
        "Loss by step: a 7 to 7; a held-out 6.5 to 6.5; b 7 to 7"
    )
    titles = [title.text for title in loss.iter("title")]
    assert (
        len(titles) == 10 and titles[-1] == "step 100\na 7\na held-out 6.5\nb 7\nb held-out 6.5\n"
    )
    assert not re.search(r"(fill|stroke)=\"?#", page) and "prefers-color-scheme:dark" in page
    assert (
        page.count("<th>") == 0
        and page.count('<th scope="row">') > 20
        and page.count("<table aria-label=") > 4
    )


def test_a_fine_tuning_is_called_by_its_task_and_the_best_checkpoint_is_marked(tmp_path):
    settings = {"output_dir": "out", "task_name": "custom", "task": "classification", "seed": 1}
    log = Log(tmp_path / "a" / "log.json").start(settings)
    for step, accuracy in ((10, 0.5), (20, 0.75), (30, 0.75)):
        log.write([step], {"loss": 1.0}).write([step], {"eval_accuracy": accuracy})
    log.write([], {"best_step": 20}).write([], {"accuracy": 0.75})
    page = page_of(tmp_path / "a", tmp_path / "page.html")
    cells = Parsed(page).cells
    assert cells[cells.index("Best checkpoint") + 1] == "step 20" and "best checkpoint" in cells
    assert (
        "classification" in cells
        and "custom" not in Parsed(page.partition("Settings and versions")[0]).cells
    )
    dots, (best,) = (
        charts_in(page)[1].findall(f".//circle[@class='{kind}']") for kind in ("dot", "best")
    )
    assert best.attrib["cx"] == dots[1].attrib["cx"]


def test_the_page_shows_scores_progress_and_differences(tmp_path):
    a = three_phases(tmp_path / "a", "/data/a", f1=81.25)
    b = three_phases(tmp_path / "b", "/data/b", f1=80.5, learning_rate=0.02)
    cells = Parsed(page_of(a, b, tmp_path / "page.html")).cells
    for row in [
        ["Exact match", "72.5%", "72.5%"],
        ["F1", "81.25%", "80.5%"],
        ["Steps", "100 of 100", "100 of 100"],
        ["Steps", "14 of 14", "14 of 14"],
        ["Loss, training", "7 → 7", "7 → 7"],
        ["Loss, held-out", "6.5", "6.5"],
        ["Tokens per second, median", "1,000", "1,000"],
        ["learning_rate", "0.01", "0.02"],
    ]:
        assert any(cells[i : i + 3] == row for i in range(len(cells))), row
    assert "Differences in settings" in cells
    # The folders of each run.
    assert "/data/" not in "".join(cells[: cells.index("Settings and versions")])
    assert "Differences in settings" not in Parsed(page_of(a, tmp_path / "one.html")).cells


def in_order(cells: list[str], *rows: list[str]) -> None:
    """Each of `rows` is in the cells, the later ones after the earlier ones."""
    start = 0
    for row in rows:
        places = [place for place in range(len(cells)) if cells[place : place + len(row)] == row]
        assert places and places[-1] >= start, row
        start = places[0]


def test_the_first_card_says_what_was_trained_on_what(tmp_path):
    folder = tmp_path / "mini" / "classification"
    settings = {"output_dir": "out", "task_name": "custom", "task": "classification"}
    settings |= {"train_file": '["a/reviews.csv", "a/more.csv"]', "eval_file": "b/dev.csv"}
    settings |= {"training_samples": 1200, "starting_weights": "random"}
    log = Log(folder / "report.json").start(settings)
    log.train([1, 2], tokens_per_second=500.0, data_wait=0.01)
    log.write("PARAMETER", {"eval_samples": 300})
    log.write([], {"accuracy": 0.5})
    page = page_of(tmp_path, tmp_path / "page.html")
    in_order(
        Parsed(page).cells,
        ["Accuracy", "50%"],
        ["Model", "mini, random weights"],
        ["File", "reviews.csv, more.csv, dev.csv"],
        ["Rows", "1,200 to train, 300 scored"],
        ["Times and speed"],
        ["Tokens per second, median", "500"],
        ["Data wait, median", "1%"],
    )
    folded = re.findall("<details><summary>Speed</summary>(.*?)</details>", page, re.DOTALL)
    assert len(folded) == 1 and folded[0].count('<svg class="chart"') == 2


def test_the_card_of_pre_training_says_what_was_seen_and_what_is_left(tmp_path):
    settings = SETTINGS | {"input_dir": "/data/wiki/hdf5/seq_128/training", "max_seq_length": 128}
    settings |= {"bert_model": "bert-base-uncased", "max_steps": 130}
    log = Log(tmp_path / "bert" / "phase1" / "report.json").start(settings)
    speed = {"step_samples": 256.0, "step_seconds": 2.0, "tokens_per_second": 5e4}
    log.train([10, 20, 30], **speed)
    cells = Parsed(page_of(tmp_path, tmp_path / "page.html")).cells
    for row in [
        ["Model", "bert"],
        ["Global batch", "256 sequences of up to 128 tokens"],
        ["Tokens seen", "3M"],
        ["Data", "…/hdf5/seq_128/training"],
        ["Time left", "0:03:20 for 100 steps"],
    ]:
        assert any(cells[i : i + 2] == row for i in range(len(cells))), row
    log.train([130], **speed)
    assert "Time left" not in Parsed(page_of(tmp_path, tmp_path / "page.html")).cells


@pytest.mark.parametrize(
    "start",
    [
        "custom",
        "results/custom/phase1",
        "results/custom/phase2/8601",
        "results/custom/classification/best",
        "results/custom/mrpc/seed-42/30",
        "custom/ner/fold-2",
        "results/custom/regression",
        "results/custom/reranker",
    ],
)
def test_a_log_beside_the_runs_folder_has_the_name_of_the_model_that_it_starts_from(
    tmp_path, start
):
    settings = {"from_checkpoint": start, "starting_weights": "random"}
    log = Log(tmp_path / "results" / "dllogger_p1.json").start(SETTINGS | settings)
    log.train([10])
    cells = Parsed(page_of(tmp_path, tmp_path / "page.html")).cells
    in_order(cells, ["Model", "custom, random weights"])


@pytest.mark.parametrize(
    ("task", "title", "metric", "shown"),
    [
        ("classification", "classification", "accuracy", "Accuracy"),
        ("squad", "SQuAD", "f1", "F1"),
        ("embedding", "embedding", "ndcg@10", "NDCG@10"),
        ("embedding", "embedding", "mrr@10", "MRR@10"),
    ],
)
def test_seeds_are_one_run_with_its_means_first_and_settings_differ_by_run(
    tmp_path, task, title, metric, shown
):
    for name, rate in (("a", 0.1), ("b", 0.2)):
        folder = tmp_path / name / "mini" / task
        settings = {"task": task, "learning_rate": rate}
        for seed in (1, 2):
            output_dir = {"output_dir": str(folder), "init": f"{folder}/x"}
            log = Log(folder / f"seed-{seed}" / "report.json").start(
                settings | output_dir | {"seed": seed}
            )
            log.train([1]).write([], {metric: 0.1 * seed})
        log = Log(folder / "report.json", 2e9)
        log.write("PARAMETER", {"task": f"{task}, seeds 1 to 2"})
        scale = 100 if task == "squad" else 1
        log.write([], {f"{metric}_mean": 0.15 * scale, f"{metric}_std": 0.07 * scale})
    page = page_of(tmp_path, tmp_path / "page.html")
    assert "<h1>Training report: a, b</h1>" in page
    cells = Parsed(page).cells
    in_order(
        cells,
        [f"{title}, seeds 1 to 2", "a", "b", f"{shown} mean", "15% ± 7%", "15% ± 7%"],
        ["Model", "mini", "mini"],
        [f"{title}: each run", "a, seed 1", "a, seed 2", "b, seed 1", "b, seed 2"],
        ["Differences in settings", f"{title}, seeds 1 to 2", "a", "b"],
        ["learning_rate", "0.1", "0.2"],
    )
    differences = cells[cells.index("Differences in settings") : cells.index("Loss")]
    assert "seed" not in differences and "init" not in differences


def test_the_page_has_scores_by_class_and_fractions_stay_fractions(tmp_path):
    table = {"a<b": {"precision": 0.25, "support": 1234}, "c": {"precision": None, "support": 2}}
    log = Log(tmp_path / "log.json").start({"output_dir": "out", "task_name": "multi-label"})
    log.write(
        [],
        {
            "f1_micro": 0.5,
            "exact_match": 0.125,
            "per_class": table,
            "confusion_matrix": [[1000, 234], [0, 2]],
        },
    )
    text = " ".join(re.sub("<[^>]*>", " ", page_of(tmp_path, tmp_path / "page.html")).split())
    assert "Exact match 12.5%" in text and "F1 micro 50%" in text
    assert "Per class Precision Support a&lt;b 25% 1,234 c – 2" in text
    assert "true \\ predicted a&lt;b c a&lt;b 1,000 234 c 2" in text


@pytest.mark.parametrize(("names", "is_wide"), [("ab", False), (["Lieferverzögerung"] * 8, True)])
def test_scores_and_mistakes_come_before_curves_and_long_headers_stand(tmp_path, names, is_wide):
    names = [f"{name} {place}" for place, name in enumerate(names)]
    log = Log(tmp_path / "log.json").start({"output_dir": "out", "task_name": "custom"})
    log.train([1, 2, 3])
    table = {name: {"precision": 0.5, "support": 4} for name in names}
    matrix = [[1] * len(names) for _ in names]
    mistake = {"text": "a text", "label": names[0], "prediction": names[1], "confidence": 0.9}
    results = {"per_class": table, "confusion_matrix": matrix, "most_confident_mistakes": [mistake]}
    log.write([], {"accuracy": 0.5, **results})
    page = page_of(tmp_path, tmp_path / "page.html")
    places = [page.index(part) for part in (">50%<", ">Per class", "a text", '<svg class="chart"')]
    assert places == sorted(places)
    assert ('class="scores wide"' in page) == is_wide


def test_classes_are_in_natural_order_and_counts_have_the_color_of_their_share(tmp_path):
    names = ["Größe 10", "Größe 2", "Größe 1"]
    table = {name: {"precision": 0.5, "support": 4} for name in names}
    log = Log(tmp_path / "log.json").start({"output_dir": "out", "task_name": "custom"})
    matrix = [[4, 0, 0], [1, 3, 0], [0, 0, 4]]
    log.write([], {"accuracy": 0.5, "per_class": table, "confusion_matrix": matrix})
    page = page_of(tmp_path, tmp_path / "page.html")
    text = " ".join(re.sub("<[^>]*>", " ", page).split())
    assert "Größe 1 Größe 2 Größe 10 Größe 1 4 Größe 2 3 1 Größe 10 4" in text
    assert page.count("<td></td>") >= 5 and page.count('style="--share:70%"') == 2
    assert 'style="--share:52%">3<' in page and 'style="--share:18%">1<' in page


def test_the_page_lies_in_the_folder_of_the_first_run(tmp_path, monkeypatch):
    Log(tmp_path / "a" / "log.json").start(SETTINGS)
    Log(tmp_path / "b" / "log.json").start(SETTINGS)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for runs, folder in ((["../a", "../b"], "a"), (["../b/log.json"], "b")):
        report.main(runs)
        assert (tmp_path / folder / "report.html").is_file()
    assert list((tmp_path / "here").iterdir()) == []


def test_many_steps_make_a_small_page(tmp_path):
    log = Log(tmp_path / "a" / "log.json").start({**SETTINGS, "log_freq": 1, "max_steps": 20_000})
    noise = np.random.default_rng(0).normal(size=20_000)
    with log.path.open("a") as file:
        for step in range(1, 20_001):
            data = {
                "loss": noise[step - 1],
                "grad_norm": 1 + noise[-step] ** 2,
                "mlm_accuracy": 0.5,
            }
            times = {"timestamp": str(1e9 + step), "elapsedtime": str(step)}
            file.write(
                f"DLLL {json.dumps({**times, 'type': 'LOG', 'step': [step], 'data': data})}\n"
            )
    page = page_of(tmp_path / "a", tmp_path / "page.html")
    assert "20,000 of 20,000" in page and "smoothed, with the logged values" in page
    assert len(page) < 300_000


def test_averaging_keeps_the_extremes_and_the_gaps(monkeypatch):
    monkeypatch.setattr(charts, "MAX_POINTS", 50)
    x, y = np.arange(1000), np.zeros(1000)
    y[500], y[700], y[100:200] = 9.0, -9.0, np.nan
    centers, mean, low, high = charts.average(x, y)
    assert len(centers) == 50 and np.all(np.diff(centers) == 20)
    assert high[25] == 9.0 and low[35] == -9.0 and mean[25] == pytest.approx(9 / 20)
    assert np.isnan(mean[5:10]).all() and not np.isnan(np.delete(mean, range(5, 10))).any()
    assert all(
        np.array_equal(array, y[:50], equal_nan=True)
        for array in charts.average(x[:50], y[:50])[1:]
    )


def test_names_with_markup_and_control_characters_are_text(tmp_path):
    names = ["</title><script>", "{{ 7 * 7 }}", "\x1b[2J", "\ud800", "\u202e", ""]
    log = Log(tmp_path / "<b>.json").start(SETTINGS | {name: name for name in names})
    log.write([1], dict.fromkeys(names, 1.0)).write([2], dict.fromkeys(names, math.inf))
    log.write([], dict.fromkeys(names, 0.5))
    page = page_of(tmp_path, tmp_path / "page.html")
    assert all(character.isprintable() or character == "\n" for character in page)
    assert not re.search("<script|<b>", page.lower()) and page.count("{{ 7 * 7 }}") > 1
    assert not re.search(r"[ \"](nan|-?inf)[ \"]", page[page.index("<svg") :])


def test_pipes_are_not_replaced_and_passed_by(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    three_phases(tmp_path / "a")
    os.mkfifo(tmp_path / "a" / "pipe.json")
    result = run_program("report.py", tmp_path / "a", "--output", tmp_path / "pipe.json")
    assert_refused(result, "pipe.json is not a regular file")
    assert (tmp_path / "pipe.json").is_fifo()
    assert "Phase 1" in page_of(tmp_path / "a", tmp_path / "page.html")


def test_a_real_run_is_understood(inputs, tmp_path):
    output = tmp_path / "out"
    flags = [
        "--max-steps",
        6,
        "--log-freq",
        1,
        "--num-steps-per-checkpoint",
        2,
        "--eval-dir",
        inputs.held_out,
    ]
    flags += ["--eval-steps", 3]
    small_runs.train(inputs.command(output, *flags, "--steps-this-run", 4))
    small_runs.train(inputs.command(output, *flags, *small_runs.resuming(output)))
    phase = only_phase(output)
    assert phase.name == "phase1" and dict(losses(phase)) == small_runs.losses(output)
    assert [point.step for point in phase.points] == [1, 2, 3, 4, 5, 6]
    assert phase.resumes == [4] and all(point.skipped == 0 for point in phase.points)
    # A run evaluates where it stops, too.
    assert [point.step for point in phase.evaluations] == [3, 4, 6]
    assert (
        phase.settings.items()
        >= {**small_runs.progress(output, 6)["versions"], "processes": 1}.items()
    )
    page = page_of(output, tmp_path / "page.html")
    assert all(
        title in page
        for title in ("MLM accuracy", "Gradient norm", "Tokens per second", "Data wait", "6 of 6")
    )
