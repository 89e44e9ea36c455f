"""--profile-update: the trace and the table of one update; of two ranks in test_parallelize.py."""

import gzip
import json

from processes import exit_codes, start
from small_runs import losses, steps_folder, train
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent, FunctionEventAvg

from bert_recipe.metrics.update_profile import gpu_seconds


def test_one_update_is_profiled_and_the_run_is_the_same(inputs, tmp_path):
    train(inputs.command(tmp_path / "plain", "--max-steps", 3, "--log-freq", 1))
    flags = ("--max-steps", 3, "--log-freq", 1, "--profile-update", 2)
    # In a process of its own: torch's profiler reads its log level once.
    log = tmp_path / "log"
    profiled = start(inputs.command(tmp_path / "profiled", *flags), log)
    assert exit_codes([profiled]) == [0], log.read_text()
    printed = log.read_text()
    assert losses(tmp_path / "profiled") == losses(tmp_path / "plain")
    assert "USDT" not in printed  # what torch's profiler prints, in C++
    folder = steps_folder(tmp_path / "profiled") / "profile"
    names = {"update_2_rank_0.json.gz", "update_2_rank_0.txt"}
    assert {path.name for path in folder.iterdir()} == names
    assert f"profile of update 2: {folder / 'update_2_rank_0.txt'}" in printed
    phases = {"forward", "backward", "optimizer"}
    table = (folder / "update_2_rank_0.txt").read_text()
    assert table.startswith("update 2, rank 0, cpu: ") and "Self CPU" in table
    assert all(phase in table for phase in phases)
    trace = json.loads(gzip.decompress((folder / "update_2_rank_0.json.gz").read_bytes()))
    events = {event["name"] for event in trace["traceEvents"] if event.get("ph") == "X"}
    assert phases < events and any(name.startswith("aten::") for name in events)


def test_the_command_that_has_profiled_an_update_resumes_the_run(inputs, tmp_path):
    resuming = inputs.command(
        tmp_path, "--max-steps", 2, "--profile-update", 1, "--resume-from-checkpoint"
    )
    for part in (1, None):
        train([*resuming, *(("--steps-this-run", part) if part else ())])
    assert len(list(steps_folder(tmp_path).rglob("profile/*.txt"))) == 1


def test_each_kernel_counts_once_in_the_time_of_the_gpu():
    """In a profile it is in a row of its own, in that of the operation that launched it, and in
    those of the ranges around it.
    """

    def event(number: int, name: str, microseconds: int, **more) -> FunctionEvent:
        times = {"start_us": 0, "end_us": microseconds, "use_device": "cuda"}
        return FunctionEvent(number, name, 0, **times, **more)

    on_gpu = {"device_type": DeviceType.CUDA}
    host = event(1, "aten::mm", 5)
    host.append_kernel("gemm", 0, 3000)
    ranges = {"is_user_annotation": True, **on_gpu}
    events = [host, event(2, "gemm", 3000, **on_gpu), event(3, "backward", 3100, **ranges)]
    averages = [FunctionEventAvg().add(event) for event in events]
    assert sum(average.self_device_time_total for average in averages) == 9100
    assert gpu_seconds(averages) == 0.003
