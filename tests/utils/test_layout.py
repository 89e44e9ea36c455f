"""The structure of the source: what lies at the top, and imports that go one way."""

import ast
import re
import subprocess
from graphlib import TopologicalSorter
from pathlib import Path

import torch.distributed as dist
from conftest import ROOT

PACKAGE = "bert_recipe"
# The rooms of the package, from the top down. A module imports from its own room or from those
# below it.
ROOMS = (
    "experiments",
    "reporting",
    "training",
    "data_preparation",
    "tasks",
    "parallel",
    "metrics",
    "optimization",
    "checkpoint",
    "data_loading",
    "tokenization",
    "model",
    "config",
    "utils",
)
# Programs and scripts, and the names that people import from the checkout.
ABOVE = len(ROOMS)
PROGRAMS = {
    *("run_pretraining", "run_squad", "run_glue", "run_ner", "run_embeddings", "inference"),
    *(
        "create_pretraining_data",
        "convert_checkpoint",
        "evaluate_squad",
        "doctor",
        "report",
        "compare",
        "data",
        "scripts",
    ),
}
FACES = {"modeling", "optimizer", "tokenizer", "loss", "lr_scheduler"}


def rank(module: str) -> int:
    package, _, rest = module.partition(".")
    if package != PACKAGE or not rest:
        return ABOVE
    return len(ROOMS) - 1 - ROOMS.index(rest.split(".")[0])


def tracked_files() -> list[Path]:
    tracked = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [Path(line) for line in tracked.stdout.splitlines() if (ROOT / line).exists()]


def source_files() -> list[Path]:
    return [path for path in tracked_files() if path.parts[0] not in ("tests", "benchmarks")]


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports() -> dict[str, set[str]]:
    """The project's own modules that each module imports, also inside functions and for
    annotations.
    """
    files = {module_name(path): path for path in source_files()}
    imported: dict[str, set[str]] = {}
    for name, path in files.items():
        names = set()
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        imported[name] = {other for other in names & files.keys() if other != name}
    return imported


def test_the_top_level_has_programs_and_names_to_import_only():
    top = {path.stem for path in source_files() if len(path.parts) == 1}
    assert top <= PROGRAMS | FACES


def test_the_folders_of_tests_are_the_rooms_of_the_package_and_the_kinds_of_programs():
    tests = [path for path in tracked_files() if path.parts[0] == "tests"]
    folders = {path.parts[1] for path in tests if path.name.startswith("test_")}
    assert folders == {*ROOMS, "programs", "scripts", "benchmarks", "refusals"}


def test_no_python_file_has_more_than_600_lines():
    lengths = {
        str(path): len((ROOT / path).read_text(encoding="utf-8").splitlines())
        for path in tracked_files()
    }
    assert not [path for path, length in lengths.items() if length > 600]


def test_the_package_imports_nothing_from_outside_and_no_room_imports_from_one_above_it():
    upwards = [
        f"{name} -> {other}"
        for name, others in imports().items()
        for other in others
        if rank(other) > rank(name)
    ]
    assert sorted(upwards) == []


def test_modules_do_not_import_each_other_in_a_circle():
    TopologicalSorter(imports()).prepare()  # raises CycleError


def imported_by(name: str) -> set[str]:
    """The modules that `name` imports, and those that they import."""
    graph = imports()
    waiting, reached = [name], set()
    while waiting:
        reached |= (others := graph[waiting.pop()] - reached)
        waiting += others
    return reached


def test_pre_training_imports_no_module_of_fine_tuning_tasks():
    """Their folders; nor what inference.py does with the models of all tasks."""
    tasks = [name for name in imported_by("run_pretraining") if f"{PACKAGE}.tasks." in name]
    assert f"{PACKAGE}.tasks.pretraining" in tasks
    others = [name for name in tasks if name.count(".") > 2 or name.endswith(".heads")]
    assert sorted(others) == []


def test_nothing_imports_the_experiments():
    room = f"{PACKAGE}.experiments"
    importers = [
        name
        for name, others in imports().items()
        if not name.startswith(room) and any(other.startswith(room) for other in others)
    ]
    assert importers == []


def test_only_tests_of_benchmarks_import_them():
    importers = []
    for path in tracked_files():
        if path.parts[0] != "tests" or path.parts[1] == "benchmarks":
            continue
        text = (ROOT / path).read_text(encoding="utf-8")
        if re.search(r"^\s*(from|import) benchmarks\b", text, re.MULTILINE):
            importers.append(str(path))
    assert importers == []


def test_tensors_pass_through_the_collectives_that_check_their_memory():
    """torch.distributed's own send the raw memory of a tensor, whatever its strides are."""
    raw = {
        name
        for name in dir(dist)
        if re.match("(all_|reduce|gather|scatter|broadcast|i?send|i?recv|batch_isend)", name)
        and not name.endswith("object_list")
    }
    assert {"all_reduce", "scatter", "send"} <= raw
    calls = []
    for path in source_files():
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in raw:
                owner = ast.unparse(node.value)
                if owner in ("dist", "distributed_c10d", "torch.distributed"):
                    calls.append(f"{path}: {owner}.{node.attr}")
    assert [call for call in calls if not call.startswith(f"{PACKAGE}/utils/collectives.py")] == []


def test_flags_are_declared_in_one_way():
    """As `Flag`s: argparse's own have no empty values refused, no needs and no excludes."""
    others = []
    for path in tracked_files():
        if path.parts[0] == "tests" or str(path) == f"{PACKAGE}/utils/command_line.py":
            continue
        text = (ROOT / path).read_text(encoding="utf-8")
        if re.search(r"add_argument\b|add_mutually_exclusive|argparse\.ArgumentParser", text):
            others.append(str(path))
    assert others == []


def test_files_of_source_that_pages_name_are_there():
    """From the root, the package, scripts/, or of a run training/."""
    named = []
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8").partition("## A change, on paper")[0]
        paths = set(re.findall(r"`([a-z]\w*/[\w/]+\.(?:py|sh))`", text))
        named += [path for path in paths if path.split("/")[0] != "examples"]  # of BMTrain
    _, _, run = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").partition("a run?\n")
    named += re.findall(r"`(\w+\.py)`", run.partition("\n## ")[0])
    folders = (ROOT, ROOT / PACKAGE, ROOT / PACKAGE / "training", ROOT / "scripts")
    placeholders = re.compile(r"\b[A-Z]+\b|_[A-Z]+[._]")  # NAME
    named = [name for name in named if not placeholders.search(name)]
    assert len(named) > 50
    assert [name for name in named if not any((root / name).exists() for root in folders)] == []
