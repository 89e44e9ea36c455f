"""run.sub, the Slurm job. A fake `srun` starts the tasks as local processes, and a fake `scontrol`
records its arguments; the programs and the shards are real.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TINY, assert_refused, reported, write_shards
from processes import PATIENCE, free_port, wait_until

FAKE_SRUN = r"""#!/usr/bin/env bash
printf '%s\n' "$@" >>"$FAKE_SLURM/srun"
while [[ $1 == --* ]]; do
  [[ $1 != --ntasks=* ]] || tasks=${1#*=}
  shift
done
trap 'kill -TERM "${pids[@]}"' TERM
for ((rank = 0; rank < tasks; rank++)); do
  SLURM_STEP_NUM_NODES=$tasks SLURM_NODEID=$rank "$@" &
  pids+=($!)
done
code=0
for pid in "${pids[@]}"; do
  wait "$pid" || code=$?
  while kill -0 "$pid" 2>/dev/null; do wait "$pid" || code=$?; done
done
exit "$code"
"""
FAKE_SCONTROL = r"""#!/usr/bin/env bash
echo "$*" >>"$FAKE_SLURM/scontrol"
if [[ $1 == show ]]; then printf '127.0.0.1\n127.0.0.2\n'; fi
"""


class Cluster:
    """A folder with a fake Slurm, and tiny data and a tiny model for jobs on the CPU."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name, text in (("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL)):
            path = folder / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        self.config = folder / "config.json"
        self.config.write_text(
            json.dumps(TINY | {"max_position_embeddings": 512, "vocab_size": 30522})
        )
        self.data = folder / "data"
        write_shards(self.data / "hdf5/seq_128_pred_20/training", (24,), 128, 20)
        write_shards(self.data / "hdf5/seq_512_pred_80/training", (8,), 512, 80)

    def environment(self, **settings: str) -> dict[str, str]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "BERT"))
        }
        return inherited | {
            "PATH": f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "FAKE_SLURM": str(self.folder),
            "SLURM_JOB_ID": "1234",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "node-[a-b]",
            "SLURM_SUBMIT_DIR": str(ROOT),
            "MASTER_PORT": str(free_port()),
            "BERT_PREP_WORKING_DIR": str(self.data),
            "RESULTS_DIR": str(self.folder / "results"),
            "BERT_CONFIG": str(self.config),
            "GPUS": "0",
            "PRECISION": "fp32",
            "TRAIN_BATCH_SIZE": "2",
            "GRADIENT_ACCUMULATION_STEPS": "1",
            "TRAIN_STEPS": "2",
            "TRAIN_STEPS_PHASE2": "2",
            **settings,
        }

    def run(self, **settings: str) -> subprocess.CompletedProcess:
        """A job, as `sbatch run.sub` with `settings` in the environment starts it on the first
        node.
        """
        options = {
            "cwd": self.folder,
            "env": self.environment(**settings),
            "timeout": PATIENCE,
            "check": False,
        }
        return subprocess.run(["bash", ROOT / "run.sub"], capture_output=True, text=True, **options)

    def start(self, **settings: str) -> subprocess.Popen:
        """A job that goes on."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        options = {"cwd": self.folder, "env": self.environment(**settings)}
        return subprocess.Popen(["bash", ROOT / "run.sub"], **options, **pipes)

    def record(self, **settings: str) -> list[str]:
        """The arguments of `srun` in a job, which runs nothing."""
        (self.folder / "bin" / "srun").write_text(
            '#!/bin/sh\nprintf \'%s\\n\' "$@" >"$FAKE_SLURM/srun"\n'
        )
        result = self.run(**settings)
        assert result.returncode == 0, (result.stdout, result.stderr)
        return self.said("srun")

    def said(self, program: str) -> list[str]:
        """What `srun` or `scontrol` was called with."""
        path = self.folder / program
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


def test_a_job_that_is_asked_to_stop_waits_for_its_tasks_and_requeues_itself(cluster):
    tasks = (
        'trap "echo saved; exit 143" TERM; touch "$FAKE_SLURM/runs"; while :; do sleep 0.05; done'
    )
    (cluster.folder / "bin" / "srun").write_text(f"#!/bin/bash\n{tasks}\n")
    job = cluster.start()
    wait_until(lambda: (cluster.folder / "runs").exists() or job.poll() is not None)
    job.send_signal(signal.SIGUSR1)  # sbatch --signal=B:USR1@300
    output, _ = job.communicate(timeout=PATIENCE)
    assert "saved\n" in output and job.returncode == 143, output
    assert cluster.said("scontrol") == ["requeue 1234"]


@pytest.mark.release
def test_a_preempted_job_of_two_nodes_saves_and_requeues_itself_and_continues_on_one(cluster):
    flags = "--num-steps-per-checkpoint 100000 --data-parallel-shard-degree -1"
    report = cluster.folder / "results" / "dllogger_p1.json"
    with cluster.start(SLURM_JOB_NUM_NODES="2", TRAIN_STEPS="100000", EXTRA_ARGS=flags) as job:
        try:
            wait_until(
                lambda: job.poll() is not None or (report.exists() and len(reported(report)) > 2)
            )
        finally:  # the end of `with` waits for the job
            job.send_signal(signal.SIGUSR1)
        output, _ = job.communicate(timeout=PATIENCE)
    assert "--ntasks=2" in cluster.said("srun")
    assert [cluster.said("scontrol")[n] for n in (0, -1)] == [
        "show hostnames node-[a-b]",
        "requeue 1234",
    ], output
    assert '"data_parallel_shard_degree": -1' in report.read_text()
    (saved,) = (
        int(path.name) for path in (cluster.folder / "results/custom/phase1").glob("[0-9]*")
    )
    assert 2 < saved == max(reported(report)) < 100000

    # One process makes the batch of two.
    settings = {"GRADIENT_ACCUMULATION_STEPS": "2", "TRAIN_STEPS": str(saved + 2)}
    result = cluster.run(STEPS_THIS_RUN="1", **settings)
    assert f"phase1 stopped at step {saved + 1} of {saved + 2}" in result.stdout, (
        result.stdout,
        result.stderr,
    )
    assert max(reported(report)) == saved + 1


@pytest.mark.parametrize(
    ("masking", "lengths"),
    [("static", ("seq_128_pred_20", "seq_512_pred_80")), ("dynamic", ("seq_128", "seq_512"))],
)
def test_the_data_job_makes_shards_that_the_training_jobs_find(cluster, masking, lengths):
    text = cluster.folder / "text"
    text.mkdir()
    for number in range(2):
        (text / f"{number}.txt").write_text(
            "".join(f"The quick fox number {number} met {k} dogs. " for k in range(80))
        )
    settings = {"MASKING": masking, "BERT_PREP_WORKING_DIR": str(cluster.folder / "made here")}
    options = "--test-fraction 0 --num-workers 1 --dupe-factor 1"
    result = cluster.run(
        PHASE="data", SLURM_JOB_NUM_NODES="3", DATASET=f"corpus '{text}' {options}", **settings
    )
    assert result.returncode == 0, (result.stdout, result.stderr)
    assert "--ntasks=1" in cluster.said("srun")
    for phase, length in zip(("1", "2"), lengths, strict=True):
        shards = cluster.folder / "made here/hdf5" / length / "training"
        assert str(shards) in cluster.record(PHASE=phase, **settings)


def test_a_container_sees_the_checkout_and_all_folders_at_their_paths(cluster):
    init = str(cluster.folder / "init")
    words = cluster.record(
        PHASE="2", CONTAINER_IMAGE="image.sqsh", INIT_CHECKPOINT=init, SLURM_CPUS_ON_NODE="96"
    )
    assert {"--container-image=image.sqsh", "--container-workdir=/workspace/bert"} < {*words}
    assert {"--cpus-per-task=96", "--cpu-bind=none"} < {*words}
    (mounts,) = [
        word.partition("=")[2].split(",")
        for word in words
        if word.startswith("--container-mounts=")
    ]
    assert mounts[0] == f"{ROOT}:/workspace/bert"
    paths = [cluster.folder / "results", cluster.data, init, cluster.config]
    assert mounts[1:] == [f"{path}:{path}" for path in paths]


@pytest.mark.parametrize(
    ("phase", "nodes", "settings", "accumulation", "config"),
    [
        ("1", "4", {}, "8", "None"),
        ("2", "4", {"CONFIG": "large"}, "32", "bert_configs/bert-large-uncased.json"),
        (
            "1",
            "1",
            {"TRAIN_BATCH_SIZE": "128", "CONFIG": "base"},
            "64",
            "bert_configs/bert-base-uncased.json",
        ),
    ],
)
def test_the_settings_become_arguments_of_the_launch_script(
    cluster, phase, nodes, settings, accumulation, config
):
    """The global batch is the same at any number of nodes."""
    unset = dict.fromkeys(
        ("GPUS", "TRAIN_BATCH_SIZE", "GRADIENT_ACCUMULATION_STEPS", "BERT_CONFIG"), ""
    )
    words = cluster.record(
        PHASE=phase, SLURM_JOB_NUM_NODES=nodes, ENABLE_BENCHMARK="true", **unset | settings
    )
    arguments = words[words.index("scripts/run_pretraining.sh") + 1 :]
    assert [arguments[place] for place in (8, 15, 20, 21)] == [
        accumulation,
        accumulation,
        config,
        "true",
    ]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"PHASE": "3"}, ["PHASE", "'3'"]),
        ({"SLURM_JOB_NUM_NODES": "nodes[$(touch made)]"}, ["SLURM_JOB_NUM_NODES", "whole number"]),
        ({"CONFIG": "base"}, ["CONFIG and BERT_CONFIG"]),
        ({"CONFIG": "huge", "BERT_CONFIG": ""}, ["CONFIG is 'huge'", "base or large"]),
        ({"STEPS_THIS_RUN": "some"}, ["STEPS_THIS_RUN", "'some'"]),
        ({"BIN_SIZE": "64"}, ["BIN_SIZE", "LDDL"]),
        ({"IMAGE_VERSION": "24.01"}, ["IMAGE_VERSION", "CONTAINER_IMAGE"]),
        ({"LR": "6e-3"}, ["LR is set", "EXTRA_ARGS=--learning-rate"]),
        (
            {"GRADIENT_ACCUMULATION_STEPS": "", "TRAIN_BATCH_SIZE": "100"},
            ["65536", "TRAIN_BATCH_SIZE"],
        ),
        ({"SLURM_JOB_ID": ""}, ["sbatch"]),
        ({"RDZV_ENDPOINT": "host:1"}, ["RDZV_ENDPOINT", "requeued"]),
        ({"SLURM_SUBMIT_DIR": "/"}, ["checkout"]),
        ({"BERT_PREP_WORKING_DIR": "/nowhere"}, ["/nowhere", "PHASE=data"]),
    ],
)
def test_a_job_that_cannot_run_is_refused_before_it_starts_tasks(cluster, settings, words):
    assert_refused(cluster.run(**settings), *words)
    assert cluster.said("srun") == [] and not (cluster.folder / "made").exists()
