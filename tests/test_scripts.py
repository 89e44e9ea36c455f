"""The launch scripts, run as users run them, with a `python3` in PATH that writes down how it was called. What they
pass on is read back by the programs' own parsers."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import run_pretraining
import run_squad

ROOT = Path(__file__).resolve().parents[1]

FAKE_PYTHON = """#!{python}
import json, os, pathlib, shutil, signal, subprocess, sys, time

arguments = sys.argv[1:]
if arguments[0] == "-":  # scripts/setup_environment.sh asks for the packages
    sys.exit("FAKE_LACKS" in os.environ)
if arguments[0] == "-c":
    sys.exit(print(os.environ["FAKE_GPUS"]) if "torch" in arguments[1] else 0)
with open(os.environ["FAKE_CALLS"], "a") as calls:
    calls.write(json.dumps(arguments) + "\\n")
if arguments[:2] == ["-m", "venv"]:
    folder = pathlib.Path(arguments[-1])
    shutil.rmtree(folder, ignore_errors="--clear" in arguments)
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python3").symlink_to(os.path.abspath(__file__))
    (folder / "pyvenv.cfg").write_text("prompt = 'bert-recipe'")
if "FAKE_RUNS_UNTIL_SIGNAL" in os.environ:
    if arguments[0] == "-m":  # torchrun: the workers run, it waits
        signal.signal(signal.SIGTERM, signal.SIG_DFL) if "FAKE_DEAF" not in os.environ else None
        worker = subprocess.Popen([sys.executable, __file__, *arguments[arguments.index("--standalone") + 1 :]])
        sys.exit(worker.wait())
    def stop(*_):
        print("saved and stopped", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "FAKE_DEAF" in os.environ else stop)
    pathlib.Path(os.environ["FAKE_CALLS"]).with_name("running").touch()
    time.sleep(60)
flags = dict(zip(arguments, arguments[1:]))
if "--max-steps" in flags and "FAKE_STOPS_EARLY" not in os.environ:
    phase = "phase1" if "--phase1" in arguments else "phase2"
    last = pathlib.Path(flags["--output-dir"]) / flags["--bert-model"] / phase / flags["--max-steps"]
    last.mkdir(parents=True, exist_ok=True)
print("ran", arguments[0])
"""


class Checkout:
    """A folder that looks like this repository, with data for all presets, and a recording `python3`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.calls_file = folder / "calls"
        for name in ["scripts", "vocab", "bert_configs", "run_pretraining.py", "run_squad.py"]:
            (folder / name).symlink_to(ROOT / name)
        for name in ["requirements.txt", "requirements-test.txt"]:
            (folder / name).write_text((ROOT / name).read_text())
        (folder / "data").mkdir()
        (folder / "data" / "sample").symlink_to(ROOT / "data" / "sample")
        for kind in ["seq_128_pred_20", "seq_512_pred_80"]:
            (folder / "data" / "hdf5" / kind / "training").mkdir(parents=True)
            (folder / "quickstart" / "hdf5" / kind / "training").mkdir(parents=True)
        squad = folder / "data" / "download" / "squad" / "v1.1"
        squad.mkdir(parents=True)
        for name in ["train-v1.1.json", "dev-v1.1.json"]:
            (squad / name).touch()
        (folder / "init").mkdir()
        fake = folder / "bin" / "python3"
        fake.parent.mkdir()
        fake.write_text(FAKE_PYTHON.format(python=sys.executable))
        fake.chmod(0o755)

    def environment(self, settings: dict[str, str]) -> dict[str, str]:
        return {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "FAKE_CALLS": str(self.calls_file),
            "FAKE_GPUS": "8",
        } | settings

    def run(self, command: str, **settings: str) -> subprocess.CompletedProcess:
        """Runs `command` in bash from the checkout's root, with `settings` in its environment."""
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment(settings),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def calls(self) -> list[list[str]]:
        """What `python3` was called with, in order."""
        if not self.calls_file.exists():
            return []
        return [json.loads(line) for line in self.calls_file.read_text().splitlines()]


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def program_arguments(call: list[str], program: str) -> list[str]:
    """The arguments after the program's name."""
    return call[next(i for i, word in enumerate(call) if word.endswith(program)) + 1 :]


def pretraining_runs(checkout: Checkout):
    """The two phases' arguments, as run_pretraining.py understands them."""
    return [run_pretraining.parse_arguments(program_arguments(call, "run_pretraining.py")) for call in checkout.calls()]


def squad_run(checkout: Checkout):
    (call,) = checkout.calls()
    return run_squad.parse_arguments(program_arguments(call, "run_squad.py"))


def processes_of(call: list[str]) -> int:
    return int(call[call.index("--nproc_per_node") + 1]) if "--nproc_per_node" in call else 1


def presets(name: str) -> list[str]:
    text = (ROOT / "scripts" / "configs" / name).read_text()
    return re.findall(r"^([a-z][\w-]*)\(\)", text, re.MULTILINE)


def assert_refused(result: subprocess.CompletedProcess, checkout: Checkout, *words: str) -> None:
    """One line that begins with `error:` and has the words in it, exit code 2, and nothing was started."""
    assert result.returncode == 2
    assert re.fullmatch(r"error: [^\n]+\n", result.stderr), result.stderr
    for word in words:
        assert word in result.stderr
    assert result.stdout == ""
    assert checkout.calls() == []


# --- run_pretraining.sh ---


def test_without_arguments_the_recipe_of_eight_gpus_runs(checkout):
    result = checkout.run("bash scripts/run_pretraining.sh")
    assert result.returncode == 0, result.stderr
    phase1, phase2 = pretraining_runs(checkout)
    assert [processes_of(call) for call in checkout.calls()] == [8, 8]
    assert (phase1.batch_size, phase1.gradient_merge_steps, phase1.max_steps) == (256, 32, 7038)
    assert (phase1.learning_rate, phase1.warmup_proportion, phase1.seed) == (6e-3, 0.2843, 12439)
    assert (phase1.max_seq_length, phase1.max_predictions_per_seq, phase1.num_steps_per_checkpoint) == (128, 20, 200)
    assert (phase2.batch_size, phase2.gradient_merge_steps, phase2.max_steps) == (32, 128, 1563)
    assert (phase2.learning_rate, phase2.warmup_proportion, phase2.seed) == (4e-3, 0.128, 12439)
    assert (phase2.max_seq_length, phase2.max_predictions_per_seq) == (512, 80)
    for phase in (phase1, phase2):
        assert phase.bert_model == "bert-large-uncased"
        assert phase.optimizer == "Lamb"
        assert (phase.amp, phase.amp_dtype, phase.tf32) == (True, "bfloat16", False)


def test_each_position_reaches_the_flag_of_its_name(checkout):
    (checkout.folder / "d1").mkdir()
    (checkout.folder / "d2").mkdir()
    config = "bert_configs/bert-mini-uncased.json"
    result = checkout.run(
        "bash scripts/run_pretraining.sh 11 0.5 fp32 0 0.25 12 13 false 14 15 job 16 .75 1e-1 17 18 d1 d2 . init "
        f"{config} false 19 20",
    )
    assert result.returncode == 0, result.stderr
    phase1, phase2 = pretraining_runs(checkout)
    assert (phase1.phase1, phase1.phase2, phase2.phase1, phase2.phase2) == (True, False, False, True)
    for phase in (phase1, phase2):
        assert (phase.num_steps_per_checkpoint, phase.seed, phase.device, phase.amp) == (13, 15, "cpu", False)
        assert (phase.bert_model, phase.config_file) == ("custom", Path(config))
        assert not phase.benchmark
    assert (phase1.batch_size, phase1.learning_rate, phase1.warmup_proportion) == (11, 0.5, 0.25)
    assert (phase1.max_steps, phase1.gradient_merge_steps, phase1.input_dir) == (12, 14, Path("d1"))
    assert (phase2.batch_size, phase2.learning_rate, phase2.warmup_proportion) == (16, 0.75, 0.1)
    assert (phase2.max_steps, phase2.gradient_merge_steps, phase2.input_dir) == (17, 18, Path("d2"))
    assert (phase1.from_pretrained_params, phase2.from_pretrained_params) == (Path("init"), None)


def test_phase_2_starts_from_the_last_checkpoint_of_phase_1(checkout):
    checkout.run("bash scripts/run_pretraining.sh 32 6e-3 fp32 0 .1 50", RESULTS_DIR="out")
    phase1, phase2 = pretraining_runs(checkout)
    assert phase1.from_phase1_final_params is None
    assert phase2.from_phase1_final_params == Path("out/bert-large-uncased/phase1/50")
    for phase, name in ((phase1, "phase1"), (phase2, "phase2")):
        assert phase.from_checkpoint == Path("out/bert-large-uncased") / name
        assert phase.last_step_of_checkpoint == "auto"


def test_phase_2_waits_until_phase_1_has_made_its_last_step(checkout):
    (checkout.folder / "results/bert-large-uncased/phase1/40").mkdir(parents=True)
    (checkout.folder / "results/bert-large-uncased/phase1/9").mkdir()
    stopped = checkout.run("bash scripts/run_pretraining.sh 32 6e-3 fp32 0 .1 50", FAKE_STOPS_EARLY="1")
    assert "phase1 stopped at step 40 of 50: run the same command again" in stopped.stdout
    assert len(checkout.calls()) == 1
    checkout.run("bash scripts/run_pretraining.sh 32 6e-3 fp32 0 .1 50")
    assert [run.phase2 for run in pretraining_runs(checkout)] == [False, False, True]


def test_a_phase_that_is_done_is_not_started_again(checkout):
    for _ in range(2):
        result = checkout.run("bash scripts/run_pretraining.sh")
    assert len(checkout.calls()) == 2
    assert "phase1 is done" in result.stdout
    assert "phase2 is done" in result.stdout


@pytest.mark.parametrize(
    ("precision", "amp", "tf32"), [("amp", True, False), ("fp32", False, False), ("tf32", False, True)]
)
def test_the_precision_is_what_its_name_says(checkout, precision, amp, tf32):
    checkout.run(f"bash scripts/run_pretraining.sh '' '' {precision}")
    checkout.run(f"bash scripts/run_squad.sh init '' '' '' '' {precision}")
    *pretraining, squad = checkout.calls()
    runs = [run_pretraining.parse_arguments(program_arguments(call, "run_pretraining.py")) for call in pretraining]
    for run in [*runs, run_squad.parse_arguments(program_arguments(squad, "run_squad.py"))]:
        assert (run.amp, run.amp_dtype, run.tf32) == (amp, "bfloat16", tf32)


def test_a_benchmark_measures_both_phases_from_random_weights(checkout):
    command = "bash scripts/run_pretraining.sh" + " ''" * 21 + " true 7 3"
    result = checkout.run(command, FAKE_STOPS_EARLY="1")
    assert result.returncode == 0, result.stderr
    phase1, phase2 = pretraining_runs(checkout)
    for phase in (phase1, phase2):
        assert (phase.benchmark, phase.benchmark_steps, phase.benchmark_warmup_steps) == (True, 7, 3)
        assert phase.from_phase1_final_params is None


def test_the_log_file_has_what_was_printed(checkout):
    result = checkout.run("bash scripts/run_pretraining.sh '' '' '' 0 '' '' '' true '' '' trial")
    assert result.returncode == 0, result.stderr
    logs = sorted((checkout.folder / "results").glob("trial.phase*.log"))
    assert [log.name.split(".")[1] for log in logs] == ["phase1", "phase2"]
    assert all("ran" in log.read_text() for log in logs)


def test_what_has_no_position_comes_from_the_environment(checkout):
    (checkout.folder / "held-out").mkdir()
    checkout.run(
        "bash scripts/run_pretraining.sh",
        BERT_MODEL="bert-base-cased",
        EVAL_DIR_PHASE2="held-out",
        EXTRA_ARGS="--log-freq 3 --eval-steps 5",
    )
    phase1, phase2 = pretraining_runs(checkout)
    assert phase1.bert_model == phase2.bert_model == "bert-base-cased"
    assert phase1.vocab_file.name == "bert-base-cased-vocab.txt"
    assert (phase1.eval_dir, phase2.eval_dir) == (None, Path("held-out"))
    assert (phase1.log_freq, phase2.eval_steps) == (3, 5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("0", ["train_batch_size", "'0'", "from 1 up"]),
        ("64 fast", ["learning_rate", "'fast'"]),
        ("'' '' bf16", ["precision", "'bf16'", "amp, fp32, tf32"]),
        ("'' '' '' -1", ["num_gpus", "'-1'"]),
        ("'' '' '' '' 1.5", ["warmup_proportion", "'1.5'"]),
        ("'' '' '' '' '' '' '' yes", ["create_logfile", "'yes'"]),
        ("--max-steps 5", ["--max-steps", "by position"]),
        ("'' '' '' 9", ["num_gpus", "9", "has 8"]),
        (" ''" * 16 + " nowhere", ["dataset_dir_phase1", "nowhere", "does not exist"]),
        (" ''" * 17 + " nowhere", ["dataset_dir_phase2", "nowhere", "does not exist"]),
        (" ''" * 18 + " nowhere", ["code_dir", "nowhere"]),
        (" ''" * 19 + " nowhere", ["init_checkpoint_dir", "nowhere", "does not exist"]),
        (" ''" * 20 + " nowhere.json", ["bert_config_file", "nowhere.json", "does not exist"]),
        (" ''" * 25, ["25", "24"]),
    ],
)
def test_a_bad_argument_of_pretraining_is_one_line_and_starts_nothing(checkout, arguments, words):
    assert_refused(checkout.run(f"bash scripts/run_pretraining.sh {arguments}"), checkout, *words)


def test_help_lists_each_argument_with_its_position_and_default(checkout):
    for script, last in (("run_pretraining.sh", "24 benchmark_warmup_steps"), ("run_squad.sh", "17 benchmark_warmup")):
        text = checkout.run(f"bash scripts/{script} --help").stdout
        assert " 2 " in text
        assert last in text
    assert re.search(r"2 learning_rate .*\[6e-3\]", checkout.run("bash scripts/run_pretraining.sh --help").stdout)


# --- presets ---


@pytest.mark.parametrize("preset", presets("pretrain_config.sh"))
def test_a_pretraining_preset_fits_the_script_and_keeps_the_global_batch(checkout, preset):
    result = checkout.run(
        f"bash scripts/run_pretraining.sh $(source scripts/configs/pretrain_config.sh && {preset})", RESULTS_DIR="out"
    )
    assert result.returncode == 0, result.stderr
    phase1, phase2 = pretraining_runs(checkout)
    batches = [
        phase.batch_size * phase.gradient_merge_steps * processes_of(call)
        for phase, call in zip((phase1, phase2), checkout.calls(), strict=True)
    ]
    if "gpu" in preset:
        assert batches == [65_536, 32_768]
        assert (phase1.amp, phase1.tf32) == ("_amp" in preset, "_tf32" in preset)
        assert f"_{processes_of(checkout.calls()[0])}gpu_" in preset
    else:
        assert phase1.device == phase2.device == "cpu"


@pytest.mark.parametrize("preset", presets("squad_config.sh"))
def test_a_squad_preset_fits_the_script_and_takes_what_pretraining_ends_with(checkout, preset):
    results = "results" if "gpu" in preset else "quickstart/results"
    checkout.run(
        f"bash scripts/run_pretraining.sh $(source scripts/configs/pretrain_config.sh && {preset})",
        RESULTS_DIR=results,
    )
    checkout.calls_file.unlink()
    result = checkout.run(f"bash scripts/run_squad.sh $(source scripts/configs/squad_config.sh && {preset})")
    assert result.returncode == 0, result.stderr
    run = squad_run(checkout)
    assert run.do_train
    assert run.do_eval
    assert (run.amp, run.tf32) == ("_amp" in preset, "_tf32" in preset)
    assert (run.device == "cuda") == ("gpu" in preset)


@pytest.mark.parametrize(("script", "config"), [("run_pretraining", "pretrain_config"), ("run_squad", "squad_config")])
def test_an_unknown_preset_starts_nothing_and_lists_the_known_ones(checkout, script, config):
    result = checkout.run(f"bash scripts/{script}.sh $(source scripts/configs/{config}.sh && dgxz900_amp)")
    assert_refused(result, checkout, "dgxz900_amp", *presets(f"{config}.sh"))


def test_the_examples_by_name_are_the_eight_gpu_preset(checkout):
    checkout.run("bash scripts/run_pretraining.sh $(source scripts/configs/pretrain_config.sh && dgxa100-80g_8gpu_amp)")
    wanted = pretraining_runs(checkout)
    assert len(wanted) == 2
    checkout.calls_file.unlink()
    for phase in ("p1", "p2"):
        assert checkout.run(f"bash scripts/run_pretraining_{phase}.sh").returncode == 0
    same = [
        "batch_size",
        "gradient_merge_steps",
        "max_steps",
        "learning_rate",
        "warmup_proportion",
        "optimizer",
        "seed",
    ]
    same += ["max_seq_length", "max_predictions_per_seq", "amp", "amp_dtype", "phase2", "num_steps_per_checkpoint"]
    for by_name, by_position in zip(pretraining_runs(checkout), wanted, strict=True):
        assert {name: getattr(by_name, name) for name in same} == {name: getattr(by_position, name) for name in same}
    assert {processes_of(call) for call in checkout.calls()} == {8}


# --- several processes and nodes ---


def test_one_process_runs_without_torchrun_and_several_with_it(checkout):
    checkout.run("bash scripts/run_pretraining.sh '' '' '' 1")
    checkout.run("bash scripts/run_squad.sh init '' '' '' '' '' 4")
    assert "torch.distributed.run" not in checkout.calls()[0]
    assert checkout.calls()[-1][:2] == ["-m", "torch.distributed.run"]
    assert "--standalone" in checkout.calls()[-1]
    assert processes_of(checkout.calls()[-1]) == 4


@pytest.mark.parametrize(
    "settings",
    [
        {"NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": "node-a", "MASTER_PORT": "1234"},
        {"SLURM_STEP_NUM_NODES": "3", "SLURM_NODEID": "2", "SLURM_STEP_NODELIST": "node-[a-c]", "MASTER_PORT": "1234"},
    ],
    ids=["environment", "slurm"],
)
def test_several_nodes_meet_at_the_first(checkout, settings):
    scontrol = checkout.folder / "bin" / "scontrol"  # lists the nodes of a job one a line
    scontrol.write_text("#!/bin/sh\n[ \"$*\" = 'show hostnames node-[a-c]' ] && printf 'node-a\\nnode-b\\nnode-c\\n'\n")
    scontrol.chmod(0o755)
    result = checkout.run("bash scripts/run_pretraining.sh", **settings)
    assert result.returncode == 0, result.stderr
    flags = checkout.calls()[0]
    given = {
        name: flags[flags.index(f"--{name}") + 1] for name in ("nnodes", "node_rank", "master_addr", "master_port")
    }
    assert given == {"nnodes": "3", "node_rank": "2", "master_addr": "node-a", "master_port": "1234"}
    assert processes_of(flags) == 8


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"NNODES": "2"}, "MASTER_ADDR"),
        ({"NNODES": "two"}, "NNODES"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "NODE_RANK"),
    ],
)
def test_nodes_that_cannot_meet_are_refused(checkout, settings, word):
    assert_refused(checkout.run("bash scripts/run_pretraining.sh", **settings), checkout, word)


# --- signals ---


def start_and_signal(checkout: Checkout, command: str, *signals: signal.Signals, **settings: str):
    """Starts `command`, sends the signals once the training process runs, and returns exit code and output."""
    running = checkout.folder / "running"
    with subprocess.Popen(
        ["bash", *command.split()],
        cwd=checkout.folder,
        env=checkout.environment(settings | {"FAKE_RUNS_UNTIL_SIGNAL": "1"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        deadline = time.monotonic() + 30
        while not running.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        for number in signals:
            process.send_signal(number)
            time.sleep(0.3)
        output, _ = process.communicate(timeout=30)
    return process.returncode, output


@pytest.mark.parametrize("num_gpus", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_training_process_and_is_waited_for(checkout, num_gpus, number):
    code, output = start_and_signal(checkout, f"scripts/run_squad.sh init 2 32 1e-4 0.1 fp32 {num_gpus}", number)
    assert code == 128 + number
    assert "saved and stopped" in output
    assert "ran" not in output


def test_a_second_signal_ends_a_process_that_does_not_listen(checkout):
    command = "scripts/run_squad.sh init 2 32 1e-4 0.1 fp32 0"
    started = time.monotonic()
    code, _ = start_and_signal(checkout, command, signal.SIGTERM, signal.SIGTERM, FAKE_DEAF="1")
    assert code == 128 + signal.SIGTERM
    assert time.monotonic() - started < 30


def test_after_a_signal_in_phase_1_there_is_no_phase_2(checkout):
    code, _ = start_and_signal(checkout, "scripts/run_pretraining.sh 1 1e-3 fp32 0", signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
    assert len(checkout.calls()) == 1


# --- run_squad.sh ---


def test_each_position_of_squad_reaches_the_flag_of_its_name(checkout):
    config = "bert_configs/bert-mini-uncased.json"
    vocab = "vocab/bert-base-uncased-vocab.txt"
    result = checkout.run(
        f"bash scripts/run_squad.sh init 3.5 4 5e-5 0.3 fp32 0 6 data/sample/squad {vocab} out train_eval {config} "
        "7 true 8 9"
    )
    assert result.returncode == 0, result.stderr
    run = squad_run(checkout)
    assert (run.from_pretrained_params, run.epochs, run.train_batch_size) == (Path("init"), 3.5, 4)
    assert (run.learning_rate, run.warmup_proportion, run.amp, run.device) == (5e-5, 0.3, False, "cpu")
    assert (run.seed, run.vocab_file, run.output_dir) == (6, Path(vocab), Path("out"))
    assert (run.config_file, run.bert_model, run.max_steps) == (Path(config), "custom", 7)
    assert (run.benchmark, run.benchmark_steps, run.benchmark_warmup_steps) == (True, 8, 9)
    assert run.train_file == Path("data/sample/squad/train-v1.1.json")
    assert run.predict_file == Path("data/sample/squad/dev-v1.1.json")


@pytest.mark.parametrize(
    ("mode", "train", "predict", "score"),
    [
        ("train", True, False, False),
        ("eval", False, True, True),
        ("prediction", False, True, False),
        ("train_eval", True, True, True),
        ("'train eval'", True, True, True),
    ],
)
def test_a_mode_does_what_its_name_says(checkout, mode, train, predict, score):
    result = checkout.run(f"bash scripts/run_squad.sh init '' '' '' '' '' 1 '' '' '' '' {mode}")
    assert result.returncode == 0, result.stderr
    run = squad_run(checkout)
    assert (run.do_train, run.do_predict or run.do_eval, run.do_eval) == (train, predict, score)
    assert (run.train_file is not None, run.predict_file is not None) == (train, predict)
    assert (run.from_checkpoint is not None) == train  # evaluation is of the checkpoint that was named


def test_squad_v2_has_questions_without_an_answer(checkout):
    command = "bash scripts/run_squad.sh init '' '' '' '' '' 1 '' data/sample/squad"
    checkout.run(command, SQUAD_VERSION="2.0")
    run = squad_run(checkout)
    assert run.version_2_with_negative
    assert run.predict_file == Path("data/sample/squad/dev-v2.0.json")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", ["init_checkpoint", "missing"]),
        ("nowhere", ["init_checkpoint", "nowhere", "does not exist"]),
        ("init 2 0", ["batch_size", "'0'"]),
        ("init 2 32 1e-5 0.1 amp 9", ["num_gpus", "9", "has 8"]),
        ("init 2 32 1e-5 0.1 amp 1 1 nowhere", ["squad_dir", "nowhere"]),
        ("init 2 32 1e-5 0.1 amp 1 1 init", ["squad_dir", "init/train-v2.0.json"]),
        ("init 2 32 1e-5 0.1 amp 1 1 '' nowhere.txt", ["vocab_file", "nowhere.txt"]),
        ("init 2 32 1e-5 0.1 amp 1 1 '' '' '' test", ["mode", "'test'", "train_eval"]),
        ("init 2 32 1e-5 0.1 amp 1 1 '' '' '' '' '' many", ["max_steps", "'many'"]),
    ],
)
def test_a_bad_argument_of_squad_is_one_line_and_starts_nothing(checkout, arguments, words):
    assert_refused(checkout.run(f"bash scripts/run_squad.sh {arguments}"), checkout, *words)


# --- setup_environment.sh ---


def environment_calls(checkout: Checkout) -> list[str]:
    """What was made and installed, in short."""
    words = {"venv": "venv", "-r": "requirements", "--no-deps": "weights"}
    short = []
    for call in checkout.calls():
        torch = [word for word in call if word.startswith("torch==")]
        short += torch[:1] or [next(name for word, name in words.items() if word in call)]
    return short


def test_a_python_with_all_packages_is_used_as_it_is(checkout):
    assert checkout.run("bash scripts/setup_environment.sh tests").returncode == 0
    assert checkout.calls() == []
    assert not (checkout.folder / ".venv").exists()


def test_torch_is_installed_first_and_nothing_twice(checkout):
    for _ in range(2):
        result = checkout.run("source scripts/setup_environment.sh && command -v python3", FAKE_LACKS="1")
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[-1] == str(checkout.folder / ".venv" / "bin" / "python3")
    venv, torch, requirements = environment_calls(checkout)
    assert (venv, requirements) == ("venv", "requirements")
    assert torch.startswith("torch==")
    checkout.run("bash scripts/setup_environment.sh tests", FAKE_LACKS="1")
    assert environment_calls(checkout)[3:] == ["requirements", "weights"]
    checkout.run("bash scripts/setup_environment.sh", FAKE_LACKS="1")
    assert len(checkout.calls()) == 5


def test_new_requirements_and_a_half_made_environment_are_made_anew(checkout):
    checkout.run("bash scripts/setup_environment.sh", FAKE_LACKS="1")
    (checkout.folder / ".venv" / ".made").unlink()  # as a kill during an installation leaves it
    checkout.run("bash scripts/setup_environment.sh", FAKE_LACKS="1")
    assert environment_calls(checkout)[3:5] == ["venv", environment_calls(checkout)[1]]
    with (checkout.folder / "requirements.txt").open("a") as file:
        file.write("something>=1\n")
    checkout.run("bash scripts/setup_environment.sh", FAKE_LACKS="1")
    assert environment_calls(checkout).count("venv") == 3


def test_an_environment_of_the_users_is_not_touched(checkout):
    (checkout.folder / ".venv").mkdir()
    (checkout.folder / ".venv" / "pyvenv.cfg").write_text("home = /usr/bin\n")
    assert_refused(checkout.run("bash scripts/setup_environment.sh", FAKE_LACKS="1"), checkout, ".venv")


def test_a_launch_makes_no_environment(checkout):
    result = checkout.run("bash scripts/run_pretraining.sh", FAKE_LACKS="1")
    assert_refused(result, checkout, "setup_environment.sh")


# --- quickstart.sh ---


def test_the_quickstarts_summary_says_what_the_reports_and_folders_say(tmp_path):
    for phase, first, last, step in (("phase1", 10.5, 6.25, 30), ("phase2", 6.5, 6.0, 4), ("squad", 5.0, 3.5, 7)):
        (tmp_path / phase / str(step)).mkdir(parents=True)
        (tmp_path / phase / str(step - 1)).mkdir()
        data = [{"seed": 1}, {"loss": first}, {"loss": last}]
        data += (
            [{"exact_match": 12.5, "f1": 25.0}]
            if phase == "squad"
            else [{"eval_loss": 9.5, "eval_mlm_accuracy": 0.0}, {"eval_loss": 7.75, "eval_mlm_accuracy": 0.125}]
        )
        lines = "".join(f"DLLL {json.dumps({'step': [], 'data': entry})}\n" for entry in data)
        (tmp_path / f"{phase}-report.json").write_text(lines)
    (tmp_path / "squad" / "predictions.json").write_text('{"a": "x", "b": "y"}')
    script = ROOT / "scripts" / "quickstart_summary.py"
    text = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, check=True).stdout
    for words in (
        ["phase 1", "10.50 -> 6.25 in 30 steps", "9.50 -> 7.75", "12.5%", str(tmp_path / "phase1" / "30")],
        ["phase 2", "6.50 -> 6.00 in 4 steps", str(tmp_path / "phase2" / "4")],
        ["SQuAD", "5.00 -> 3.50 in 7 steps", "exact match 12.5, F1 25.0", str(tmp_path / "squad" / "7"), "2 questions"],
    ):
        assert re.search(".*".join(map(re.escape, words)), text, re.DOTALL), words


@pytest.mark.parametrize(
    ("argument", "code", "words"), [("--help", 0, "The whole recipe"), ("corpus", 2, "no arguments")]
)
def test_the_quickstart_does_nothing_where_it_is_given_an_argument(argument, code, words):
    command = ["bash", ROOT / "scripts" / "quickstart.sh", argument]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == code
    assert words in result.stdout + result.stderr
    assert "environment" not in result.stdout
