"""The calls of the first minutes on a GPU, on a CPU at toy size."""

import faulthandler
import time
from pathlib import Path

import pytest
import torch
from conftest import read_json
from processes import PATIENCE, exit_codes, launch

from benchmarks import gpu_first_hour
from benchmarks.common import calls
from benchmarks.common.calls import Item, do_items
from benchmarks.gpu_first_hour import (
    MODES,
    SPEEDS,
    difference,
    verdict,
)

MODERN_BERT = tuple(word.replace("mini", "tiny") for word in gpu_first_hour.MODERN_BERT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    gpu_first_hour.REFERENCES = {"CPU, ModernBERT, Muon": MODERN_BERT}
    assert gpu_first_hour.main(["prepare", "--toy", "--folder", str(folder)]) == 0
    return folder


def run_call(name, folder, output, *flags) -> dict[str, dict]:
    paths = ("--folder", str(folder), "--output", str(output))
    code = gpu_first_hour.main([name, "--toy", *paths, *flags])
    results = read_json(output / f"{name}.json")["results"]
    assert code == 0, results
    return {result["item"]: result for result in results}


def test_training_agrees_with_the_cpu(folder, tmp_path, monkeypatch):
    # The others differ in flags that other tests use.
    mode = MODES["ModernBERT, Muon"]._replace(flags=("--dropout", "0", *MODERN_BERT))
    monkeypatch.setattr(gpu_first_hour, "MODES", {"ModernBERT, Muon": mode})
    result = run_call("training", folder, tmp_path)["ModernBERT, Muon"]
    assert result["difference"] < 1e-4 and result["checkpoints"] == {"6": True}
    assert result["graphs"] == 0 and "Self CPU time total" in result["profile"]


def test_faults_end_with_an_error_or_are_resumed_and_all_tasks_run(folder, tmp_path):
    results = run_call("tasks", folder, tmp_path)
    assert "out of memory" in results["memory runs out"]["error"]
    assert results["SIGTERM, and resumed"]["difference"] == 0.0
    assert {"SQuAD", "classes", "NER"} < results.keys()


def test_speed_is_measured_beside_transformers(folder, tmp_path, monkeypatch):
    name = "BERT-large, 128, real lengths"
    monkeypatch.setattr(gpu_first_hour, "SPEEDS", {name: SPEEDS[name]})
    results = run_call("speed", folder, tmp_path)
    assert results[f"{name}: ThisProject"]["tokens_per_second"] > 0
    peer = results[f"{name}: Transformers"]
    assert peer["ratio"] > 0 and peer["settings"]["logits of masked tokens only"]


@pytest.mark.parametrize(
    ("name", "rates", "expected"),
    [
        ("ThisProject", {"ThisProject": 90.0}, True),
        ("ThisProject", {"ThisProject": 80.0}, False),
        ("Transformers", {"ThisProject": 90.0, "Transformers": 80.0}, True),
        ("Transformers", {"ThisProject": 90.0, "Transformers": 100.0}, False),
        ("Transformers", {"Transformers": 100.0}, None),  # chosen alone, or the other one failed
    ],
)
def test_a_rate_is_judged_by_the_prediction_and_a_peer_by_the_rate(name, rates, expected):
    assert verdict(name, rates, predicted=100, toy=False).get("ok") is expected


def test_parts_of_a_call_can_be_chosen(folder, tmp_path):
    assert [*run_call("checks", folder, tmp_path, "--only", "AdamW")] == ["AdamW"]


def test_a_mode_whose_reference_was_left_out_says_that_it_is_not_compared(folder, tmp_path):
    name = "fp32, dropout"
    result = run_call("training", folder, tmp_path, "--only", name)[name]
    assert result["reference"] == "not compared: amp has not run" and "difference" not in result


def test_items_that_fail_do_not_end_the_others_and_late_ones_are_skipped(tmp_path, capsys):
    def fail() -> dict:
        raise RuntimeError("no kernel")

    result = {"ok": True, "times": {"median": 0.123456}, "table": "a\nb"}
    items = [Item("fails", 1, fail), Item("works", 1, lambda: result), Item("late", 6000, fail)]
    assert not do_items(items, tmp_path / "call.json", 600, False)
    results = read_json(tmp_path / "call.json")["results"]
    assert [result.get("ok") for result in results] == [False, True, None]
    assert "no kernel" in results[0]["error"] and "6000 s" in results[2]["skipped"]
    assert "ok   works: times (median 0.123), seconds " in capsys.readouterr().out


def hang(folder: Path) -> int:
    """A call whose second item lasts until the time that the call has is over: then, and not before
    the first one has ended on a busy machine.
    """
    end_after = faulthandler.dump_traceback_later
    asked = []
    faulthandler.dump_traceback_later = lambda *args, **options: asked.append((args, options))

    def wait_for_the_end():
        ((limit,), options) = asked.pop()
        assert limit == 3600
        end_after(0.1, **options)
        time.sleep(PATIENCE)

    items = [Item("first", 0, lambda: {"ok": True}), Item("hangs", 0, wait_for_the_end)]
    gpu_first_hour.CALLS["checks"] = lambda _: items
    gpu_first_hour.machine_info = gpu_first_hour.select_device = lambda _: "machine"
    paths = ["--output", str(folder), "--folder", str(folder)]
    return gpu_first_hour.main(["checks", "--seconds", "3600", *paths])


def test_a_call_that_hangs_ends_with_its_results_and_prints_the_stacks(tmp_path):
    printed = tmp_path / "printed"
    assert exit_codes([launch(hang, (tmp_path,), {}, printed, printed)]) == [1]
    assert read_json(tmp_path / "checks.json")["results"][0]["ok"]
    assert "-- hangs" in printed.read_text() and "in wait_for_the_end" in printed.read_text()


def test_losses_of_the_same_batches_are_compared_also_after_skipped_updates():
    """float16 skips an update now and then: the run has more batches."""
    expected = [2.0] * 20
    losses = [2.5, 2.0, 2.2, *[2.0] * 18]
    assert difference(losses, expected) == pytest.approx(0.25)
    assert difference(losses, expected, first=1) == pytest.approx(0.1)
    assert difference(losses[:19], expected) == float("inf")


def test_a_call_ends_where_an_item_has_spoiled_the_device_and_is_continued(tmp_path, monkeypatch):
    """CUDA is left in a state in which nothing can be computed."""

    def fail() -> dict:
        raise RuntimeError("illegal memory access")

    items = [Item("fails", 0, fail), Item("works", 0, lambda: {"ok": True})]
    path, outcomes = tmp_path / "call.json", []
    for works, continues in ((False, False), (True, True)):
        monkeypatch.setattr(calls, "device_works", lambda works=works: works)
        assert not do_items(items, path, 60, continues)
        results = read_json(path)["results"]
        outcomes.append({result["item"]: result["ok"] for result in results})
    assert outcomes == [{"fails": False}, {"fails": False, "works": True}]


def test_an_item_leaves_no_deterministic_kernels_to_the_next(tmp_path):
    def run() -> dict:
        was_set = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        return {"ok": not was_set}

    assert do_items([Item("one", 0, run), Item("two", 0, run)], tmp_path / "call.json", 60, False)
