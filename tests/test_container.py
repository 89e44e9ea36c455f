"""scripts/docker/launch.sh. A fake `docker` does what `docker run` does with mounts, user and environment, in a mount
namespace of its own, and real programs run inside."""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

# Makes a root file system of the machine's top-level folders with the volumes on top, and runs the command in it.
FAKE_DOCKER = r"""#!/usr/bin/env bash
set -euo pipefail
printf '%s\n' "$@" >"$FAKE_CALL"
shift # run
volumes=() variables=()
while [[ $1 == --* ]]; do
  case $1 in
    --rm | --interactive | --tty) shift && continue ;;
    --volume) volumes+=("$2") ;;
    --env) variables+=("$2") ;;
    --user) user=$2 ;;
    --workdir) workdir=$2 ;;
  esac
  shift 2
done
shift # the image
export FAKE_VOLUMES="${volumes[*]}" FAKE_USER=$user FAKE_WORKDIR=$workdir
exec unshare --mount --propagation private bash -euc '
  mount -t tmpfs none "$FAKE_ROOT"
  for path in /*; do
    target=$FAKE_ROOT$path
    if [[ -L $path ]]; then cp -P "$path" "$target"
    elif [[ -d $path ]]; then mkdir "$target" && mount --rbind "$path" "$target"
    fi
  done
  umount -l "$FAKE_ROOT/tmp" && mkdir -p "$FAKE_ROOT/tmp" && chmod 1777 "$FAKE_ROOT/tmp"
  # The packages are part of the image, wherever this machine has them.
  for volume in "$FAKE_PREFIX:$FAKE_PREFIX" $FAKE_VOLUMES; do
    mkdir -p "$FAKE_ROOT${volume#*:}" && mount --bind "${volume%%:*}" "$FAKE_ROOT${volume#*:}"
    if [[ $volume == *:/workspace/bert && -n ${FAKE_READ_ONLY:-} ]]; then
      mount -o remount,bind,ro "$FAKE_ROOT/workspace/bert"
    fi
  done
  unset RESULTS_DIR BERT_PREP_WORKING_DIR
  exec chroot --userspec="$FAKE_USER" "$FAKE_ROOT" env -u PWD --chdir="$FAKE_WORKDIR" HOME=/tmp "$@"
' docker "${variables[@]}" "$@"
"""


PROBE = ["sh", "-c", "unshare --mount mount -t tmpfs none /mnt 2>/dev/null"]
CAN_MOUNT = subprocess.run(PROBE, check=False).returncode == 0
needs_mounts = pytest.mark.skipif(not CAN_MOUNT, reason="needs root, to mount folders in a namespace of its own")


class Machine:
    """A folder with a fake docker, and paths for results and data."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.results, self.data = folder / "results", folder / "data"
        (folder / "root").mkdir()
        self.script("docker", FAKE_DOCKER)

    def script(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def launch(self, *arguments: str, checkout: Path = ROOT, **settings: str) -> subprocess.CompletedProcess:
        environment = {
            "PATH": f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "FAKE_CALL": str(self.folder / "call"),
            "FAKE_ROOT": str(self.folder / "root"),
            "FAKE_PREFIX": sys.prefix,
            "RESULTS_DIR": str(self.results),
            "BERT_PREP_WORKING_DIR": str(self.data),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command, options = ["bash", checkout / "scripts" / "docker" / "launch.sh", *arguments], {"timeout": 300}
        return subprocess.run(
            command, env=environment | settings, capture_output=True, text=True, check=False, **options
        )

    def call(self) -> list[str]:
        """The arguments of docker."""
        path = self.folder / "call"
        return path.read_text().splitlines() if path.exists() else []

    def flag(self, name: str) -> list[str]:
        return [value for word, value in itertools.pairwise(self.call()) if word == name]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@needs_mounts
def test_edits_of_the_checkout_are_seen_and_files_belong_to_the_caller(machine, tmp_path):
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "scripts", checkout / "scripts")
    (checkout / "edited").write_text("an edit of today")
    machine.script("id", "#!/bin/sh\necho 1234\n")
    for folder in (machine.results, machine.data):
        folder.mkdir()
        os.chown(folder, 1234, 1234)
    result = machine.launch("cat edited && pwd && touch /results/made /data/made", checkout=checkout)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "an edit of today/workspace/bert\n"
    for folder in (machine.results, machine.data):
        status = (folder / "made").stat()
        assert (status.st_uid, status.st_gid) == (1234, 1234)


@needs_mounts
def test_data_is_prepared_and_trained_on_from_a_read_only_checkout(machine):
    text = machine.data / "text"
    text.mkdir(parents=True)
    for number in range(2):
        (text / f"{number}.txt").write_text("".join(f"The quick fox number {number} met {k} dogs. " for k in range(80)))
    commands = [
        "! touch /workspace/bert/refused 2>/dev/null",
        "bash data/create_datasets_from_start.sh corpus /data/text --test-fraction 0 --num-workers 1 --lengths 128:20",
        "PHASE=1 bash scripts/run_pretraining.sh 4 1e-3 fp32 0 .1 1 '' false 1 '' '' '' '' '' '' '' '' '' '' '' "
        "bert_configs/bert-tiny-uncased.json",
    ]
    result = machine.launch(" && ".join(commands), "none", FAKE_READ_ONLY="1")
    assert result.returncode == 0, (result.stdout, result.stderr)
    assert (machine.data / "hdf5" / "seq_128_pred_20" / "training").is_dir()
    assert (machine.results / "dllogger_p1.json").is_file()
    assert (machine.results / "bert-tiny-uncased" / "phase1" / "1" / "model.safetensors").is_file()
    assert not list(machine.folder.rglob("*.partial"))


RECORD = '#!/bin/sh\nprintf "%s\\n" "$@" >"$FAKE_CALL"\n'


@pytest.mark.parametrize(
    ("gpus", "flag"), [("", ["all"]), ("all", ["all"]), ("none", []), ("0", ['"device=0"']), ("0,3", ['"device=0,3"'])]
)
def test_gpus_and_network_are_arguments_2_and_3(machine, gpus, flag):
    machine.script("docker", RECORD)
    assert machine.launch("true", gpus, "bridge").returncode == 0
    assert machine.flag("--gpus") == flag
    assert machine.flag("--network") == ["bridge"]
    assert machine.flag("--user") == [f"{os.getuid()}:{os.getgid()}"]
    assert machine.call()[-4:] == ["bert", "bash", "-c", "true"]


def test_without_arguments_there_is_a_shell_on_the_hosts_network(machine):
    machine.script("docker", RECORD)
    settings = dict.fromkeys(("NNODES", "NODE_RANK", "MASTER_ADDR", "PHASE", "EXTRA_ARGS", "NCCL_DEBUG"), "1")
    assert machine.launch(IMAGE="mine", SLURM_STEP_NUM_NODES="2", OTHER="1", **settings).returncode == 0
    assert machine.flag("--network") == ["host"]
    assert machine.call()[-4:] == ["mine", "bash", "-c", "bash"]
    volumes = {"/workspace/bert": ROOT, "/results": machine.results, "/data": machine.data}
    assert machine.flag("--volume") == [f"{path}:{inside}" for inside, path in volumes.items()]
    assert {name for name in machine.flag("--env") if "=" not in name} == settings.keys()


@pytest.mark.parametrize(
    ("arguments", "settings", "word"),
    [
        (["bash", "scripts/run_squad.sh"], {}, "put the command in quotes"),
        (["bash", "scripts/run_squad.sh", "init", "2"], {}, "put the command in quotes"),
        ([], {"RESULTS_DIR": __file__}, "RESULTS_DIR"),
        ([], {"SLURM_STEP_NUM_NODES": "2"}, "NNODES, NODE_RANK and MASTER_ADDR"),
    ],
)
def test_what_cannot_work_is_refused(machine, arguments, settings, word):
    result = machine.launch(*arguments, **settings)
    assert (result.returncode, machine.call()) == (2, [])
    assert result.stderr.startswith("error: ") and word in result.stderr and result.stderr.count("\n") == 1


def test_build_takes_the_base_image_from_the_environment(machine):
    machine.script("docker", RECORD)
    environment = os.environ | {"PATH": f"{machine.folder / 'bin'}:{os.environ['PATH']}"}
    environment |= {"FAKE_CALL": str(machine.folder / "call"), "FROM_IMAGE_NAME": "nvcr.io/nvidia/pytorch:26.01-py3"}
    subprocess.run(["bash", ROOT / "scripts" / "docker" / "build.sh", "mine"], env=environment, check=True)
    assert machine.flag("--build-arg") == ["FROM_IMAGE_NAME=nvcr.io/nvidia/pytorch:26.01-py3"]
    assert machine.flag("--tag") == ["mine"]
