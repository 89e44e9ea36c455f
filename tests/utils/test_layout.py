"""The structure of the source: few files at the top level, and imports that go one way."""

import ast
import subprocess
from graphlib import TopologicalSorter
from pathlib import Path

from conftest import ROOT

# From the top down. A module imports from its own layer or from those below it. A package is one
# entry.
LAYERS = {
    "chosen by a name in a table, imported by nothing": {"experiments"},
    "programs": {
        *(
            "run_pretraining",
            "run_squad",
            "run_glue",
            "inference",
            "create_pretraining_data",
            "convert_checkpoint",
        ),
        *("evaluate_squad", "doctor", "report", "data", "scripts"),
    },
    "setup": {
        "run_setup",
        "experiment",
        "arguments",
        "diagnostics",
        "checkpoint_formats",
        "reporting",
    },
    "training": {
        "trainer",
        "training",
        "evaluation",
        "tasks",
        "data_preparation",
        "derived_models",
    },
    "strategies": {"parallelize", "parallel"},
    "optimization": {"optimizer", "optimizers", "lr_scheduler", "precision", "metrics"},
    "entrance": {"modeling"},
    "data and files": {
        "data_loading",
        "checkpoint",
        "tokenizer",
        "tokenizer_formats",
        "work_units",
    },
    "model": {"encoders", "attention", "kernels", "loss", "token_stream"},
    "configs": {"run_config", "foreign_flags"},
    "utils": {"utils"},
}
RANKS = {name: rank for rank, names in enumerate(LAYERS.values()) for name in names}


def tracked_files() -> list[Path]:
    tracked = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [Path(line) for line in tracked.stdout.splitlines()]


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
    found: dict[str, set[str]] = {}
    for name, path in files.items():
        names = set()
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        found[name] = {other for other in names & files.keys() if other != name}
    return found


def test_at_most_26_python_files_at_the_top_level():
    assert len([path for path in source_files() if len(path.parts) == 1]) <= 26


def test_no_python_file_has_more_than_600_lines():
    lengths = {
        str(path): len((ROOT / path).read_text(encoding="utf-8").splitlines())
        for path in tracked_files()
    }
    assert not [path for path, length in lengths.items() if length > 600]


def test_every_module_belongs_to_a_layer():
    assert {name.split(".")[0] for name in imports()} <= RANKS.keys()


def test_no_module_imports_from_a_layer_above_it():
    upwards = [
        f"{name} -> {other}"
        for name, others in imports().items()
        for other in others
        if RANKS[other.split(".")[0]] < RANKS[name.split(".")[0]]
    ]
    assert sorted(upwards) == []


def test_neither_modules_nor_packages_import_each_other_in_a_circle():
    modules = imports()
    TopologicalSorter(modules).prepare()  # raises CycleError
    packages: dict[str, set[str]] = {}
    for name, others in modules.items():
        package = name.split(".")[0]
        packages.setdefault(package, set()).update(
            {other.split(".")[0] for other in others} - {package}
        )
    TopologicalSorter(packages).prepare()
