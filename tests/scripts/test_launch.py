"""How scripts start processes on one or several nodes, and what a signal does."""

import os
import re
import signal
import subprocess
import sys

import pytest
from launch_scripts import ROOT, Checkout, processes_of
from processes import PATIENCE, wait_until

LAUNCHER = [sys.executable, str(ROOT / "scripts" / "torchrun.py")]
LAUNCHER += ["--standalone", "--nproc_per_node"]
MISTAKE = ("echo error: a bad flag >&2; exit 2", 2, "error: a bad flag\n" * 2)


@pytest.mark.parametrize(
    ("flags", "command", "code", "message"),
    [
        ((), *MISTAKE),
        (("--max_restarts", "3"), *MISTAKE),  # the same error would come again
        (
            (),
            "[ $RANK = 0 ] || kill -KILL $$$$; sleep 60",
            137,
            "error: process 1 of this machine was killed by SIGKILL\n",
        ),
    ],
    ids=["error", "error of an elastic run", "killed"],
)
def test_a_failed_process_ends_the_launch_with_its_code_and_without_a_traceback(
    flags, command, code, message
):
    words = [*LAUNCHER, "2", *flags, "--no_python", "sh", "-c", command]
    result = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (result.returncode, result.stderr) in [
        (code, message),
        (code, message.removeprefix("error: a bad flag\n")),
    ]


def test_a_signal_to_the_launch_alone_ends_its_processes_and_prints_one_line():
    """The signal comes while torch still starts some of the processes."""
    command = "echo started; exec sleep 600"  # a child of the shell could miss the signal
    with subprocess.Popen(
        [*LAUNCHER, "16", "--no_python", "sh", "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as launch:
        assert launch.stdout.readline() == "started\n"
        launch.send_signal(signal.SIGTERM)
        # When no process holds the pipes any more.
        _, printed = launch.communicate(timeout=PATIENCE)
    assert launch.returncode == 128 + signal.SIGTERM
    assert re.fullmatch("stopping after this step, [^\n]*\n", printed)


@pytest.mark.parametrize(
    "settings",
    [
        {"NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": "node-a", "MASTER_PORT": "1234"},
        {
            "SLURM_STEP_NUM_NODES": "3",
            "SLURM_NODEID": "2",
            "SLURM_STEP_NODELIST": "node-[a-c]",
            "MASTER_PORT": "1234",
        },
    ],
    ids=["environment", "slurm"],
)
def test_several_nodes_meet_at_the_first(checkout, settings):
    hosts = "[ \"$*\" = 'show hostnames node-[a-c]' ] && printf 'node-a\\nnode-b\\nnode-c\\n'"
    checkout.add_command("scontrol", f"#!/bin/sh\n{hosts}\n")  # lists the nodes of a job one a line
    result = checkout.run("bash scripts/run_pretraining.sh", **settings)
    assert result.returncode == 0, result.stderr
    flags = checkout.calls()[0]
    given = {
        name: flags[flags.index(f"--{name}") + 1]
        for name in ("nnodes", "node_rank", "master_addr", "master_port")
    }
    assert given == {
        "nnodes": "3",
        "node_rank": "2",
        "master_addr": "node-a",
        "master_port": "1234",
    }
    assert processes_of(flags) == 8


@pytest.mark.parametrize(
    ("command", "output"),
    [
        (
            ["bash", "-c", f"source '{ROOT}/scripts/common.sh' && n=99 && find_gpus n 1"],
            "but this machine has",
        ),
        (
            ["bash", "-c", f"source '{ROOT}/scripts/setup_environment.sh' use && echo installed"],
            "installed",
        ),
    ],
    ids=["GPUs", "packages"],
)
def test_modules_in_the_working_folder_are_not_imported(tmp_path, command, output):
    for name in ("random", "types", "signal"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert output in result.stdout + result.stderr, result


def start_and_signal(checkout: Checkout, command: str, *signals: signal.Signals, **settings: str):
    """Starts `command`, sends the signals once the training process runs, and returns exit code and
    output.
    """
    running = checkout.folder / "running"
    with subprocess.Popen(
        ["bash", *command.split()],
        cwd=checkout.folder,
        env=checkout.environment(settings | {"FAKE_RUNS_UNTIL_SIGNAL": "1"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        wait_until(lambda: running.exists() or process.poll() is not None)
        output = ""
        for number in signals:
            process.send_signal(number)
            # Two signals that a process has not handled are one.
            while "stopping after" not in output and (line := process.stdout.readline()):
                output += line
        output += process.stdout.read()
    return process.returncode, output


SQUAD = "scripts/run_squad.sh init 2 32 1e-4 0.1 fp32"


def test_a_ctrl_c_while_a_script_checks_the_gpus_prints_nothing(tmp_path):
    torch = tmp_path / "torch.py"
    marker = tmp_path / "importing"
    torch.write_text(f"import pathlib, time\npathlib.Path({str(marker)!r}).touch()\ntime.sleep(60)")
    with subprocess.Popen(
        ["bash", "-c", f"source {ROOT}/scripts/common.sh; n=1; find_gpus n 1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        start_new_session=True,  # whose processes a terminal would interrupt
    ) as script:
        wait_until(marker.exists)
        os.killpg(script.pid, INT)
        printed, _ = script.communicate(timeout=PATIENCE)
    assert (script.returncode, printed) == (-INT, b"")


TERM, INT = signal.SIGTERM, signal.SIGINT


@pytest.mark.parametrize(
    ("command", "signals", "settings", "saved"),
    [
        *(
            (f"{SQUAD} {gpus}", [number], {"FAKE_LOGS": "1"}, 1)
            for gpus in (0, 2)
            for number in (TERM, INT, signal.SIGUSR1, signal.SIGHUP)
        ),
        *(
            (f"scripts/run_pretraining_p{phase}.sh", [TERM], {"NUM_GPUS": "2"}, 1)
            for phase in (1, 2)
        ),
        ("scripts/run_pretraining.sh 1 1e-3 fp32 0", [TERM], {}, 1),  # there is no phase 2
        (
            f"{SQUAD} 2",
            [TERM] * 3,
            {"FAKE_SAVES_FOR": "1"},
            1,
        ),  # a repeated one does not interrupt the checkpoint
        (f"{SQUAD} 0", [INT] * 2, {"FAKE_DEAF": "1"}, 0),  # a second Ctrl-C kills
        (f"{SQUAD} 2", [TERM], {"FAKE_WAITS_FOR_NODES": "1"}, 0),  # there is no process to save
    ],
)
def test_a_signal_reaches_the_training_process_and_is_waited_for(
    checkout, command, signals, settings, saved
):
    code, output = start_and_signal(checkout, command, *signals, **settings)
    assert code == 128 + signals[0]
    assert output.count("saved and stopped") == saved and "ran" not in output
    assert "Killed" not in output  # by bash, with the command that was killed
    assert ("no training process had started" in output) == ("FAKE_WAITS_FOR_NODES" in settings)
    assert (
        len({word for call in checkout.calls() for word in call if word.startswith("--phase")}) <= 1
    )
    assert ("report.html" in output) == ("FAKE_LOGS" in settings)


SCRIPTS = {
    "run_pretraining.sh '' '' fp32 0": "results",
    "run_squad.sh init 2 32 1e-4 0.1 fp32 0 1 '' '' out": "out",
    "run_glue.sh init '' '' '' out '' 0": "out",
}


@pytest.mark.parametrize(("command", "folder"), SCRIPTS.items())
@pytest.mark.parametrize("code", [0, 3])
def test_a_page_is_written_however_the_run_ends(checkout, command, folder, code):
    (checkout.folder / "results").mkdir()
    result = checkout.run(f"bash scripts/{command}", FAKE_CODE=str(code))
    # There is no log.
    assert result.returncode == code and "report" not in result.stdout + result.stderr
    result = checkout.run(f"bash scripts/{command}", FAKE_LOGS="1", FAKE_CODE=str(code))
    assert result.returncode == code, result.stderr
    assert result.stdout.splitlines()[-1].endswith(f"{folder}/report.html")
    assert result.stdout.count("report:") == 1
    result = checkout.run(
        f"bash scripts/{command}", FAKE_CODE=str(code), FAKE_REPORT_ERROR="error: a full disk"
    )
    assert (
        result.returncode == code
        and result.stdout.splitlines()[-1] == "no report page: a full disk"
    )


@pytest.mark.parametrize("create_logfile", ["true", "false"])
@pytest.mark.parametrize(
    "redirection", [">&-", ">/dev/full", "> >(exit)"], ids=["closed", "full", "no reader"]
)
def test_both_phases_run_when_nobody_can_read_the_output(checkout, redirection, create_logfile):
    (checkout.folder / "results").mkdir()
    command = f"bash scripts/run_pretraining.sh '' '' fp32 0 '' '' '' {create_logfile}"
    result = checkout.run(f"{command} {redirection}", FAKE_LOGS="1")
    assert result.returncode == 0, result.stderr
    assert len(checkout.calls()) == 2
