"""For tests of the launch scripts: runs them as users do, with a `python3` in PATH that records its
arguments. What the scripts pass on is read by the programs' own parsers.
"""

import os
import re
import subprocess
import sys
from ast import literal_eval
from pathlib import Path

import run_embeddings
import run_glue
import run_ner
import run_pretraining
import run_squad
from bert_recipe.utils.command_line import Arguments
from data import prepare

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {
    "run_pretraining.py": run_pretraining,
    "run_squad.py": run_squad,
    "run_glue.py": run_glue,
    "run_ner.py": run_ner,
    "run_embeddings.py": run_embeddings,
    "prepare.py": prepare,
}

FAKE_PYTHON = """#!{python} -IS
import os, sys

# Tests start this some hundred times: it imports other modules only where it needs them.
arguments = sys.argv[1 + (sys.argv[1] == "-P") :]
if arguments[0] == "-":  # scripts/setup_environment.sh asks for the packages
    sys.exit("FAKE_LACKS" in os.environ)
if arguments[0] == "-c":
    if "manifest.json" in arguments[1] or "is_finished" in arguments[1]:
        os.execv(sys.executable, [sys.executable, *arguments])
    if "has_bfloat16" in arguments[1]:
        sys.exit(print(os.environ.get("FAKE_CPU_PRECISION", "fp32")))
    sys.exit(print(os.environ["FAKE_GPUS"]) if "torch" in arguments[1] else 0)
if arguments[0].endswith("model_name.py"):
    os.execv(sys.executable, [sys.executable, *arguments])
if arguments[0].endswith("report.py"):
    sys.exit(os.environ.get("FAKE_REPORT_ERROR") or print("report:", arguments[-1]))
with open(os.environ["FAKE_CALLS"], "a") as calls:
    calls.write(ascii(arguments) + "\\n")
running = os.path.join(os.path.dirname(os.environ["FAKE_CALLS"]), "running")
if arguments[:2] == ["-m", "venv"]:
    import pathlib, shutil
    folder = pathlib.Path(arguments[-1])
    shutil.rmtree(folder, ignore_errors="--clear" in arguments)
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python3").symlink_to(os.path.abspath(__file__))
    (folder / "pyvenv.cfg").write_text("prompt = 'bert-recipe'")
if any(os.environ.get("FAKE_CODE_OF", "no such word") in word for word in arguments):
    sys.exit(1)
if "FAKE_LOGS" in os.environ:
    with open(arguments[arguments.index("--report-file") + 1], "w") as log:
        log.write("DLLL")
if "FAKE_RUNS_UNTIL_SIGNAL" in os.environ:
    import signal, subprocess, time
    if "--nproc_per_node" in arguments:  # torchrun: the worker runs, it waits
        worker = None
        if "FAKE_WAITS_FOR_NODES" not in os.environ:
            programs = ("run_squad.py", "run_pretraining.py")
            start = next(i for i, word in enumerate(arguments) if word.endswith(programs))
            worker = subprocess.Popen([sys.argv[0], *arguments[start:]], start_new_session=True)
        def forward(*_):
            if worker is None:
                print("no training process had started", flush=True)
                os._exit(143)
            print("stopping after", flush=True)
            worker.terminate()
        signal.signal(signal.SIGTERM, forward)
        if worker is None:
            open(running, "w").close()
            time.sleep(120)
        sys.exit(worker.wait())
    if signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:
        sys.exit("this process ignores SIGTERM from its start")
    def stop(*_):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(float(os.environ.get("FAKE_SAVES_FOR", 0)))
        print("saved and stopped", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "FAKE_DEAF" in os.environ else stop)
    open(running, "w").close()
    time.sleep(120)
flags = dict(zip(arguments, arguments[1:]))
if arguments[0].endswith("prepare.py") and "FAKE_FEW_DOCUMENTS" not in os.environ:
    held_out = os.path.join(flags.get("--output-dir", "data"), "sharded", "test")
    os.makedirs(held_out, exist_ok=True)
    open(os.path.join(held_out, "shard-00000.txt"), "w").close()
    if "--lengths" in flags:
        length = "seq_" + flags["--lengths"]
        samples = os.path.join(flags["--output-dir"], "hdf5", length, "training")
        os.makedirs(samples, exist_ok=True)
        with open(os.path.join(samples, "manifest.json"), "w") as manifest:
            manifest.write('{{"counts": {{"samples": %s}}}}' % os.environ.get("FAKE_SAMPLES", 800))
if ("--phase1" in flags or "--phase2" in flags) and "FAKE_STOPS_EARLY" not in os.environ:
    os.makedirs(os.path.join(flags["--from-checkpoint"], flags["--max-steps"]), exist_ok=True)
try:
    print("ran", arguments[0], flush=True)
except OSError:  # as utils.errors.run_main
    os._exit(141)
if "FAKE_CODE" in os.environ:
    sys.exit(int(os.environ["FAKE_CODE"]))
"""


class Checkout:
    """A folder that looks like this repository, with data for all presets, and a recording
    `python3`.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.calls_file = folder / "calls"
        for name in [
            "scripts",
            "utils",
            "vocab",
            "bert_configs",
            "run_pretraining.py",
            "run_squad.py",
            "run_glue.py",
        ]:
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
        for task in ["glue/CoLA", "glue/MRPC", "superglue/CB"]:
            (folder / "data" / "download" / task).mkdir(parents=True)
        (folder / "init").mkdir()
        (folder / "bin").mkdir()
        self.add_command("python3", FAKE_PYTHON.format(python=sys.executable))

    def add_command(self, name: str, script: str) -> None:
        """Makes `name` a command that the scripts find first."""
        (self.folder / "bin" / name).write_text(script)
        (self.folder / "bin" / name).chmod(0o755)

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
            timeout=240,
            check=False,
        )

    def calls(self) -> list[list[str]]:
        """What `python3` was called with, in order."""
        if not self.calls_file.exists():
            return []
        return [literal_eval(line) for line in self.calls_file.read_text().splitlines()]


def program_arguments(call: list[str], program: str) -> list[str]:
    """The arguments after the program's name."""
    return call[next(i for i, word in enumerate(call) if word.endswith(program)) + 1 :]


def parsed(call: list[str]) -> Arguments:
    """The arguments of a call, as its program understands them."""
    (program,) = (name for name in PROGRAMS if any(word.endswith(name) for word in call))
    return PROGRAMS[program].parse_arguments(program_arguments(call, program))


def processes_of(call: list[str]) -> int:
    return int(call[call.index("--nproc_per_node") + 1]) if "--nproc_per_node" in call else 1


def presets(name: str) -> list[str]:
    text = (ROOT / "scripts" / "configs" / name).read_text()
    return re.findall(r"^([a-z][\w-]*)\(\)", text, re.MULTILINE)


def assert_refused(result: subprocess.CompletedProcess, checkout: Checkout, *words: str) -> None:
    """One line that begins with `error:` and has the words in it, exit code 2, and nothing was
    started.
    """
    assert result.returncode == 2 and re.fullmatch(r"error: [^\n]+\n", result.stderr), result.stderr
    assert all(word in result.stderr for word in words), result.stderr
    assert result.stdout == "" and checkout.calls() == []
