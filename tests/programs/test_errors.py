"""Errors that the user can fix: one line on standard error, and exit code 2. Training goes on when
nobody reads its output.
"""

import ast
import errno
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from conftest import ROOT, reported
from processes import PATIENCE, exit_codes, launch

import run_pretraining
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.utils.errors import (
    LOST_OUTPUT_CODE,
    OPTIONAL_PACKAGES,
    PeerError,
    UserError,
    run_main,
)
from bert_recipe.utils.files import write_atomically
from scripts import export_onnx


def outcome(main, capsys) -> tuple[int, list[str]]:
    """The exit code of `run_main(main)` and the lines on standard error."""
    with pytest.raises(SystemExit) as caught:
        run_main(main)
    return caught.value.code, capsys.readouterr().err.splitlines()


def raising(error):
    def main():
        raise error

    return main


def of_rank(rank: int) -> UserError:
    error = UserError("no GPU")
    error.rank = rank
    return error


def missing(name: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"No module named '{name}'", name=name)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            UserError("the folder x\n  is   empty:\tfill it"),
            "error: the folder x is empty: fill it",
        ),
        (
            UserError("label " + "9" * 5000 + ": give fewer"),
            "error: label " + "9" * 494 + " ... " + "9" * 488 + ": give fewer",
        ),
        (of_rank(3), "error: rank 3: no GPU"),
        (OSError(errno.ENOENT, "", "/data/\x1b[2J\na"), r"error: /data/\x1b[2J a: no such file"),
        *(
            (OSError(getattr(errno, name), "", "/data/a.hdf5"), f"error: /data/a.hdf5: {words}")
            for name, words in {
                "ENOSPC": "the disk is full: ",
                "EDQUOT": "the disk quota is used up: ",
                "EROFS": "the file system is read-only: ",
                "EACCES": "permission denied: ",
                "ENOENT": "no such file or folder: check the path",
                "ENOTDIR": "a part of the path is not a folder: ",
                "EISDIR": "this is a folder, ",
                "EIO": "the disk reported an input/output error: ",
                "EAGAIN": "no more processes or threads ",
            }.items()
        ),
        (OSError(errno.ENOSPC, "full"), "error: the disk is full: free some space"),
        (
            OSError(errno.EACCES, "", "/data/.part", None, "/data/complete"),
            "error: /data/complete: permission denied",
        ),
        (MemoryError(), "error: out of memory: "),
        (
            missing("tokenizers"),
            "error: the package tokenizers is not installed: run bash scripts/setup",
        ),
        (
            missing("distributed.x"),
            "error: --scheduler needs the package distributed, which is not installed: pip",
        ),
        (
            missing("sklearn.metrics"),
            "error: scoring needs the package scikit-learn, which is not installed: pip install "
            "scikit-learn scipy",
        ),
        (
            RuntimeError("can't start new thread"),
            "error: no more processes or threads can be started: ",
        ),
    ],
    ids=lambda value: repr(value)[:80],
)
def test_an_error_of_the_user_or_the_machine_is_one_line_and_exit_code_2(error, line, capsys):
    code, (printed,) = outcome(raising(error), capsys)
    assert code == 2 and printed.startswith(line)


PROGRAMS = (
    *(
        "run_pretraining.py",
        "run_squad.py",
        "run_glue.py",
        "run_ner.py",
        "run_embeddings.py",
        "inference.py",
        "doctor.py",
        "report.py",
    ),
    *("create_pretraining_data.py", "convert_checkpoint.py", "data/prepare.py"),
)
PRETRAIN = ("--input-dir=x", "--output-dir=y", "--max-steps=1")
TRAIN = ("--do-train", "--train-file=x", "--output-dir=y", "--max-steps=1")
ARGUMENTS = {
    "run_pretraining.py": PRETRAIN,
    "doctor.py": PRETRAIN,
    "run_squad.py": TRAIN,
    "run_glue.py": [*TRAIN, "--text-column=text", "--label-column=label"],
    "run_ner.py": TRAIN,
    "run_embeddings.py": [*TRAIN, "--text-column=text", "--pair-column=pair"],
    "inference.py": ["--init-checkpoint=.", "--text=a"],
}


def run_program(*words, **variables) -> tuple[int, list[str]]:
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    } | variables
    result = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    return result.returncode, result.stderr.splitlines()


@pytest.mark.parametrize("program", PROGRAMS)
def test_missing_package_is_an_error_of_one_line(program):
    words = ARGUMENTS.get(program, [])
    code, (line,) = run_program("-S", program, *words)  # -S: without the installed packages
    assert code == 2
    assert re.fullmatch(
        r"error: the package \w+ is not installed: run bash scripts/setup_environment.sh", line
    )


def imported_packages(path: Path) -> set[str]:
    """Also those that functions import."""
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.partition(".")[0] for name in names}


def test_each_package_that_may_be_missing_has_an_error_of_its_own():
    """Packages of requirements.txt, optional ones, and what comes with them or is looked for."""
    paths = [path for path in ROOT.rglob("*.py") if "tests" not in path.parts]
    paths = [path for path in paths if not {"benchmarks", ".venv"} & {*path.parts}]
    local = {path.stem for path in ROOT.iterdir()}
    imported = set().union(*map(imported_packages, paths)) - local - sys.stdlib_module_names
    required = re.findall(r"^\w+", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    looked_for = {"apex", "deepspeed", "dllogger", "flash_attn", "triton"}
    assert imported >= {"h5py", "onnxruntime"}
    assert (
        imported - {"torch", "_typeshed", "markupsafe", *required, *looked_for}
        <= OPTIONAL_PACKAGES.keys()
    )


def test_export_without_its_packages_is_an_error_of_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.setattr(ModelFolder, "find", ModelFolder)
    words = ["--init-checkpoint", str(tmp_path), "--output-dir", str(tmp_path / "onnx")]
    says = "export_onnx.py needs the package onnx, which is not installed: pip install onnx"
    assert outcome(lambda: export_onnx.main(words), capsys) == (2, [f"error: {says}"])


@pytest.mark.parametrize(
    ("program", "flag", "code"),
    [
        (f"{name}.py", "--help", 0)
        for name in (
            "run_pretraining",
            "run_squad",
            "run_glue",
            "run_ner",
            "run_embeddings",
            "inference",
        )
    ]
    + [("doctor.py", "--no-such-flag", 2)],
)
def test_command_line_is_answered_without_torch_and_without_docstrings(
    program, flag, code, tmp_path
):
    for package in ("torch", "numpy"):
        (tmp_path / f"{package}.py").write_text("raise AssertionError('imported')")
    exit_code, lines = run_program("-OO", program, flag, PYTHONPATH=str(tmp_path))
    assert exit_code == code and len(lines) == (code == 2)


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", 130, "interrupted"),
        ('raise RuntimeError("can\'t start new thread")', 2, "ulimit -u"),
    ],
)
@pytest.mark.parametrize(
    ("program", "package"), [("report.py", "jinja2"), ("run_squad.py", "torch")]
)
def test_error_while_packages_are_imported_takes_one_line(
    program, package, source, code, words, tmp_path
):
    (tmp_path / f"{package}.py").write_text(source)
    exit_code, (line,) = run_program(program, *TRAIN, PYTHONPATH=str(tmp_path))
    assert exit_code == code and words in line


LOST, PRINTED = (2, []), (2, ["error: no file"])
PLACES = dict.fromkeys(
    (("0", "4"), ("true", "2"), ("4", "2"), ("1", "1"), ("1", "9" * 5000)), PRINTED
)
PLACES["3", "4"] = LOST


@pytest.mark.parametrize(
    ("end", "local_rank", "world_size", "expected"),
    [
        *((value, "0", "1", (value or 0, [])) for value in (None, 0, 3)),
        (KeyboardInterrupt(), "0", "1", (130, ["interrupted"])),
        *((PeerError("another process reports it"), rank, "4", LOST) for rank in ("0", "3")),
        *((UserError("no file"), *place, expected) for place, expected in PLACES.items()),
    ],
)
def test_each_end_of_a_program_has_its_exit_code_and_one_process_reports_it(
    end, local_rank, world_size, expected, monkeypatch, capsys
):
    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    main = raising(end) if isinstance(end, BaseException) else lambda: end
    assert outcome(main, capsys) == expected


def test_a_name_that_is_not_utf_8_does_not_lose_the_text_that_shows_it(tmp_path):
    name = os.fsdecode(b"model\xff")
    write_atomically(tmp_path / "comparison.txt", f"before: {name}\n")
    assert (tmp_path / "comparison.txt").read_text() == "before: model\\udcff\n"


@pytest.mark.parametrize(
    "bug", [ValueError("a bug"), OSError(errno.EBADF, "a"), KeyError("bug"), missing("no_module")]
)
def test_other_exceptions_keep_their_traceback(bug, capsys):
    code, lines = outcome(raising(bug), capsys)
    assert (
        code == 1
        and lines[0].startswith("Traceback")
        and lines[-1] == f"{type(bug).__name__}: {bug}"
    )


def test_closed_standard_output_ends_the_program_without_a_traceback():
    program = (
        "from bert_recipe.utils.errors import run_main; "
        "run_main(lambda: [print(n) for n in range(100_000)] and None)"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, **pipes)
    assert process.stdout.readline() == "0\n"
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(PATIENCE) == 141


@pytest.mark.parametrize("program", ["run_pretraining.py", "inference.py"])
def test_a_model_of_the_hub_is_answered_with_the_command_that_downloads_it(program, tmp_path):
    (tmp_path / "torch.py").write_text("raise AssertionError('imported')")
    for name, hub_name in (
        ("bert-base-cased", "google-bert/bert-base-cased"),
        ("all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"),
        ("organization/name", None),
    ):
        flags = [*ARGUMENTS.get(program, []), f"--init-checkpoint={name}"]
        code, (line,) = run_program(program, *flags, PYTHONPATH=str(tmp_path))
        assert code == 2 and f"--init-checkpoint {name} does not exist" in line
        assert line.endswith(f"hf download {hub_name or name} --local-dir {Path(name).name}")
    flags = [*ARGUMENTS.get(program, []), "--init-checkpoint=results/phase1/100"]
    _, (line,) = run_program(program, *flags, PYTHONPATH=str(tmp_path))
    assert line.endswith("--init-checkpoint results/phase1/100 does not exist: check the path")


@pytest.mark.parametrize(
    ("program", "words", "says"),
    [
        (
            "run_glue",
            "--do-train --lamb-min-coeff 1 --label-separator ;",
            ["without --optimizer Lamb", "without --task-name multi-label"],
        ),
        ("run_glue", "--do-train", ["needs --text-column", "; --do-train and --do-eval need"]),
        (
            "inference",
            "--input in.csv --prompt-name query",
            ["without --output", "without --text-column", "without --embed"],
        ),
    ],
)
def test_one_message_names_all_wrong_flags(program, words, says, capsys):
    """So that the second try does not end with the next error."""
    argv = ["--init_checkpoint=gone", *words.split()]
    if program == "run_glue":
        argv += ["--train-file", "here.csv", "--output-dir", "o"]
    code, (line,) = outcome(lambda: import_module(program).main(argv), capsys)
    assert code == 2 and all(word in line for word in says)


def training(inputs, output: Path) -> list[str]:
    flags = ("--max-steps", 30, "--log-freq", 1, "--num-steps-per-checkpoint", 100)
    return [sys.executable, "run_pretraining.py", *inputs.command(output, *flags)]


def assert_complete(output) -> None:
    assert sorted(reported(output / "report.json")) == list(range(1, 31))
    assert (output / "custom" / "phase1" / "30" / "manifest.json").is_file()


def test_a_reader_of_the_output_that_ends_does_not_end_the_run(inputs, tmp_path):
    python, *words = training(inputs, tmp_path)
    command = [python, "-X", "importtime", *words]
    # So small a pipe does not hold all of the output: the program cannot end before the reader
    # does.
    with (tmp_path / "errors").open("w") as file:
        pipes = {"stdout": subprocess.PIPE, "stderr": file, "pipesize": 4096}
        process = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(PATIENCE) == LOST_OUTPUT_CODE == 141
    errors = (tmp_path / "errors").read_text()
    assert "Traceback" not in errors
    # After torch itself, which may need it, nothing imports SymPy, which takes a second.
    _, own_imports = re.split(r"\| +torch\n", errors)
    assert "sympy" not in own_imports
    assert (
        errors.count("standard output cannot be written (Broken pipe): continuing without it") == 1
    )
    assert_complete(tmp_path)


def exit_code(command: list[str], redirection: str) -> int:
    words = ["bash", "-c", f'exec "$@" {redirection}', "bash", *command]
    return subprocess.run(words, cwd=ROOT, timeout=PATIENCE, check=False).returncode


def test_output_that_is_closed_does_not_end_the_run(inputs, tmp_path):
    assert exit_code(training(inputs, tmp_path), "<&- >&- 2>&-") == 0
    assert_complete(tmp_path)


def test_output_that_cannot_be_written_does_not_end_the_run(inputs, tmp_path):
    _python, _program, *argv = training(inputs, tmp_path)
    full = Path("/dev/full")
    run = launch(run_pretraining.main, (argv,), {}, output=full, errors=full)
    assert exit_codes([run]) == [LOST_OUTPUT_CODE]
    assert_complete(tmp_path)


def test_an_error_that_cannot_be_written_has_its_exit_code():
    assert exit_code([sys.executable, "report.py", "/nowhere"], "2>/dev/full") == 2


def test_the_end_of_a_program_visits_no_objects():
    """Those of torch would take half a second."""
    last = "lambda: print(len(gc.get_objects()) < 1000, file=sys.stderr)"
    code = (
        f"import atexit, gc, sys; from bert_recipe.utils import errors; atexit.register({last}); "
    )
    assert run_program("-c", f"{code}errors.run_main(lambda: 0)") == (0, ["True"])
    assert run_program("-c", code) == (0, ["False"])  # importing alone changes nothing


def test_importing_the_package_leaves_the_hooks_of_the_process():
    code = """
import atexit, sys
before = sys.excepthook
import bert_recipe.utils.errors, bert_recipe.checkpoint.pretrained, bert_recipe.training.trainer
assert sys.excepthook is before
"""
    assert run_program("-c", code) == (0, [])
