"""A checkpoint whose files were changed, with fitting checksums, is refused with one line or restores what it holds."""

import contextlib
import io
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, pretraining_command, write_shards
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import run_pretraining
from checkpoint.folder import MANIFEST_FILE, block_digests, manifest_of, num_blocks
from utils.errors import run_main

STEP = 3
SMALL = settings(max_examples=25, suppress_health_check=list(HealthCheck))

# JSON values of every kind, the odd ones included.
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from(["", "²", "\ud800", "phase1", "../x", "Lamb", STEP, float(STEP), -1, 2**53 + 1, 1e308]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_config):
    """(The checkpoint folder of a run of 3 steps, its command.)"""
    folder = tmp_path_factory.mktemp("run")
    flags = ("--max-steps", STEP, "--num-steps-per-checkpoint", STEP)
    command = pretraining_command(write_shards(folder / "shards"), tiny_config, folder / "output", *flags)
    words = [str(word) for word in command[1:]]
    assert run_here(words)[0] == 0
    return folder / "output" / "custom" / "phase1" / str(STEP), words


def run_here(words: list[str]) -> tuple[int, str]:
    """The exit code and the output of run_pretraining.py."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            run_main(lambda: run_pretraining.main(words))
        except SystemExit as end:
            return end.code, output.getvalue()
    raise AssertionError("run_main returned")


def continue_from(run, folder: Path, flag: str = "--from-checkpoint") -> tuple[int, str]:
    """Continues from a changed copy of the checkpoint by one measured step, which saves nothing."""
    benchmark = ("--benchmark", "--benchmark-steps", "1", "--benchmark-warmup-steps", "1")
    return run_here([*run[1], flag, str(folder), *benchmark])


@contextlib.contextmanager
def changed_copy(run, tmp_path_factory):
    """A copy of the checkpoint to change; afterwards its manifest fits what is there."""
    parent = tmp_path_factory.mktemp("changed")
    folder = Path(shutil.copytree(run[0], parent / str(STEP)))
    yield folder
    rewrite_manifest(folder)


def rewrite_manifest(folder: Path) -> None:
    paths = [path for path in sorted(folder.iterdir()) if path.name != MANIFEST_FILE]
    sizes = {path.name: path.stat().st_size for path in paths}
    blocks = [(path, block) for path in paths for block in range(num_blocks(sizes[path.name]))]
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest_of(sizes, block_digests(blocks))))


def assert_one_line(outcome: tuple[int, str]) -> None:
    code, output = outcome
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert (code, len(errors)) == (2, 1), output
    assert "Traceback" not in output


def assert_refused_or_continued(outcome: tuple[int, str]) -> None:
    code, output = outcome
    if code == 0:
        assert f"step {STEP}, {STEP * 4} samples consumed" in output
    else:
        assert_one_line(outcome)


def test_an_unchanged_copy_is_continued(run, tmp_path_factory):
    with changed_copy(run, tmp_path_factory) as folder:
        pass
    code, output = continue_from(run, folder)
    assert code == 0 and f"resumed from {folder}: step {STEP}" in output


# --- JSON -------------------------------------------------------------------------------------------------------------


@given(data=st.data())
@SMALL
def test_any_value_of_a_manifest(run, tmp_path_factory, data):
    with changed_copy(run, tmp_path_factory) as folder:
        pass
    path = folder / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    files = manifest["files"]
    name = data.draw(st.sampled_from(sorted(files)))
    change = data.draw(st.sampled_from(["all", "files", "entry", "value", "missing", "name"]))
    value = data.draw(VALUES)
    if change == "all":
        manifest = value
    elif change == "files":
        manifest["files"] = value
    elif change == "entry":
        files[name] = value
    elif change == "value":
        files[name][data.draw(st.sampled_from(["size", "sha256"]))] = value
    elif change == "missing":
        del files[name]
    else:
        files[data.draw(st.sampled_from(["../x", "/etc/passwd", "", ".", "a\x00b", "x" * 300]))] = files[name]
    path.write_text(json.dumps(manifest))
    assert_one_line(continue_from(run, folder))
    assert_one_line(continue_from(run, folder, "--from-pretrained-params"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model_progress.json"])
@pytest.mark.parametrize("content", [b"[]", b"null", b"{", b"\xff", b"[" * 100_000, b"9" * 5000])
def test_a_json_file_of_another_kind(run, tmp_path_factory, name, content):
    with changed_copy(run, tmp_path_factory) as folder:
        (folder / name).write_bytes(content)
    words = list(run[1])
    if name == "tokenizer_config.json":  # it is read if the command line names no model
        for flag in ("--bert-model", "--config-file", "--vocab-file"):
            del words[words.index(flag) : words.index(flag) + 2]
    assert_one_line(continue_from((run[0], words), folder))


# --- tensors ----------------------------------------------------------------------------------------------------------


def cut(tensor):
    return tensor[..., :-1].contiguous() if tensor.dim() else tensor.reshape(1)


CHANGES = {
    "cut": cut,
    "longer": lambda t: torch.cat([t, t], -1) if t.dim() else t.repeat(3),
    "transposed": lambda t: t.T.contiguous() if t.dim() == 2 and t.shape[0] != t.shape[1] else t[None],
    "three": lambda t: torch.zeros(3, 1),
    "empty": lambda t: torch.zeros(0),
    "float64": lambda t: t.double(),
    "float16": lambda t: t.half(),
    "int64": lambda t: t.long(),
    "int8": lambda t: t.to(torch.int8),
    "bool": lambda t: t.bool(),
    "complex": lambda t: t.to(torch.complex64),
    "float8": lambda t: t.to(torch.float8_e4m3fn),
    "missing": None,
    "nan": lambda t: torch.full_like(t, torch.nan),
    "infinite": lambda t: torch.full_like(t, torch.inf),
    "negative": lambda t: torch.full_like(t, -1.5),
}
ALLOWED_VALUES = {"negative", "nan", "infinite"}  # right in form; the manifest is what finds damage
ALLOWED_IN_WEIGHTS = {"float64", "float16"}


@given(data=st.data(), change=st.sampled_from(sorted(CHANGES)))
@settings(SMALL, max_examples=40)
def test_any_changed_tensor(run, tmp_path_factory, data, change):
    with changed_copy(run, tmp_path_factory) as folder:
        path = folder / data.draw(st.sampled_from(["model.safetensors", "model_optimizer.safetensors"]))
        tensors = load_file(path)
        name = data.draw(st.sampled_from(sorted(tensors)))
        if CHANGES[change] is None:
            del tensors[name]
        else:
            tensors[name] = CHANGES[change](tensors[name])
        save_file(tensors, path)
    outcome = continue_from(run, folder)
    is_optimizer = path.name == "model_optimizer.safetensors"
    if change not in (ALLOWED_VALUES if is_optimizer else ALLOWED_VALUES | ALLOWED_IN_WEIGHTS):
        if is_optimizer or not (change == "missing" and name.startswith("cls.")):
            assert_one_line(outcome)
    else:
        assert_refused_or_continued(outcome)


@pytest.mark.parametrize("name", ["model.safetensors", "model_optimizer.safetensors"])
def test_any_bytes_of_a_tensor_file_in_a_process_of_its_own(run, tmp_path_factory, name):
    """A crash of the process, which these tests could not survive, is what must not happen."""
    folders = []
    content = (run[0] / name).read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    first, last = sorted(header.keys() - {"__metadata__"})[:: len(header) - 2]
    variants = [
        b"",
        content[:7],
        content[: 8 + size // 2],
        content[:-1],
        content + b"\0",
        struct.pack("<Q", 2**63) + content[8:],
        struct.pack("<Q", 0) + content[8:],
        *(with_header(content, size, edited(header, first, **change)) for change in [
            {"shape": [2**62, 4]}, {"shape": [-1]}, {"shape": []}, {"data_offsets": [0, 2**63]},
            {"data_offsets": header[last]["data_offsets"]}, {"dtype": "F128"}, {"dtype": None}, {"shape": None},
        ]),
    ]  # fmt: skip
    for variant in variants:
        with changed_copy(run, tmp_path_factory) as folder:
            (folder / name).write_bytes(variant)
        folders.append(str(folder))
    program = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from test_checkpoint_fuzz import assert_one_line, continue_from\n"
        f"run = (None, {run[1]!r})\n"
        f"for folder in {folders!r}:\n"
        "    assert_one_line(continue_from(run, folder))\n"
        "print('all refused')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert (result.returncode, result.stdout) == (0, "all refused\n"), result.stderr[-2000:]


def edited(header: dict, name: str, **values) -> dict:
    return {**header, name: {**header[name], **values}}


def with_header(content: bytes, old_size: int, header: dict) -> bytes:
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded + content[8 + old_size :]


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_state_of_another_prefix_that_the_manifest_does_not_list_is_refused(run, tmp_path_factory):
    with changed_copy(run, tmp_path_factory) as folder:
        pass
    for name in ("optimizer.safetensors", "progress.json"):
        shutil.copy(folder / f"model_{name}", folder / f"other_{name}")
    assert_one_line(continue_from((run[0], [*run[1], "--model-prefix", "other"]), folder))


def test_a_step_folder_with_a_digit_that_is_none(run, tmp_path_factory):
    with changed_copy(run, tmp_path_factory) as folder:
        pass
    odd = folder.rename(folder.with_name("²"))
    assert continue_from(run, odd)[0] == 0
    outcome = run_here([*run[1], "--from-checkpoint", str(odd.parent), "--last-step-of-checkpoint", "²"])
    assert_one_line(outcome)
