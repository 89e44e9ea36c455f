"""Updates of all presets, and of what works with what, on a stand-in for a GPU: all code on the
host is real, with the checks of shapes and devices, what torch.compile makes, and the allocator;
kernels and collectives do nothing.

Opt-in, since it needs PyTorch's CUDA build: python3 -m pytest tests/benchmarks/test_gpu_stand_in.py
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import h5py
import pytest
from conftest import ROOT, read_json
from gpu_stand_in.build import build, missing
from launch_scripts import presets, processes_of, program_arguments
from small_runs import run_here

from benchmarks.common.shards import MAX_MASKED_OF, write_random_shards

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

PROGRAMS = Path(__file__).with_name("gpu_stand_in")
SECONDS = 1800
TOLERANCE = 0.1  # of the estimate
DDP, FSDP2 = (), ("--data-parallel-shard-degree", "-1")
HYBRID = ("--data-parallel-shard-degree", "8", "--data-parallel-replicate-degree", "8")
STRATEGIES = {"one GPU": (1, ()), "8 GPUs, DDP": (8, DDP), "8 GPUs, FSDP2": (8, FSDP2)}
MODES = {
    "float32": (),
    "AdamW": ("--amp", "--optimizer", "AdamW"),
    "Muon": ("--amp", "--optimizer", "Muon"),
    "bfloat16": ("--amp",),
    "16-bit weights": ("--use-pure-fp16",),
    "float16": ("--fp16",),
    "TF32": ("--tf32",),
    "pre-LN": ("--amp", "--pre-layer-norm"),
    "full checkpointing": ("--amp", "--activation-checkpoint", "full"),
    "selective checkpointing": ("--amp", "--activation-checkpoint", "selective"),
    "CPU offload": ("--amp", "--enable-cpu-offload"),
    "deterministic": ("--amp", "--deterministic"),
}
# Name: processes, model, flags.
CASES = {
    **{
        f"{mode}; {strategy}": (count, "bert-large-uncased", (*flags, *more))
        for mode, flags in MODES.items()
        for strategy, (count, more) in STRATEGIES.items()
        # Others are refused.
        if (mode, strategy) != ("CPU offload", "8 GPUs, DDP")
    },
    "bfloat16; 64 GPUs, DDP": (64, "bert-large-uncased", ("--amp",)),
    "bfloat16; 64 GPUs, FSDP2": (64, "bert-large-uncased", ("--amp", *FSDP2)),
    "bfloat16; 64 GPUs, hybrid": (64, "bert-large-uncased", ("--amp", *HYBRID)),
    "deterministic, float32; one GPU": (1, "bert-mini-uncased", ("--deterministic",)),
    "compiled layers; one GPU": (1, "bert-mini-uncased", ("--amp", "--compile", "layers")),
    "compiled layers, full checkpointing; one GPU": (
        1,
        "bert-mini-uncased",
        ("--amp", "--compile", "layers", "--activation-checkpoint", "full"),
    ),
    "compiled layers, selective checkpointing; one GPU": (
        1,
        "bert-mini-uncased",
        ("--amp", "--compile", "layers", "--activation-checkpoint", "selective"),
    ),
    "compiled layers, 16-bit weights; one GPU": (
        1,
        "bert-mini-uncased",
        ("--use-pure-fp16", "--compile", "layers"),
    ),
    "compiled layers; 8 GPUs, FSDP2": (
        8,
        "bert-mini-uncased",
        ("--amp", "--compile", "layers", *FSDP2),
    ),
    "compiled by default; one GPU": (1, "modernbert-mini", ("--amp", "--compile", "auto")),
    "compiled model; one GPU": (1, "bert-mini-uncased", ("--use-pure-fp16", "--compile", "model")),
}
# The estimate knows no padded attention; Inductor keeps what it likes of a small
# model.
UNESTIMATED = ("compiled", "deterministic, float32")
PRESETS = [
    (script, config, name)
    for script, config in (
        ("run_pretraining", "pretrain_config"),
        ("run_modernbert", "modernbert_config"),
    )
    for name in presets(f"{config}.sh")
    if "gpu" in name
]
SHORT = (
    "--max-steps",
    4,
    "--gradient-merge-steps",
    2,
    "--benchmark",
    "--benchmark-warmup-steps",
    2,
)
SHORT += (
    "--benchmark-steps",
    1,
    "--report-file",
    "None",
    "--log-file",
    "None",
    "--show-config",
    "false",
)


def write_shards(folder: Path, length: int) -> Path:
    """Full sequences, without masks if they are longer than 512."""
    return write_random_shards(
        folder, {128: 1024}.get(length, 64), length, MAX_MASKED_OF.get(length, 0)
    )


class StandIn:
    """Runs command lines on the stand-in, each once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = build(folder)
        self.shards: dict[int, Path] = {}

    def command(self, length: int, *words: object) -> list[str]:
        if length not in self.shards:
            self.shards[length] = write_shards(self.folder / str(length), length)
        paths = (
            "--input-dir",
            self.shards[length],
            "--output-dir",
            self.folder / "output",
            "--device",
            "cuda",
        )
        compiles = () if "--compile" in words else ("--compile", "none")
        return [*map(str, (*words, *paths, *SHORT, *compiles))]

    def start(self, program: str, *words: object, **settings: str) -> str:
        """What one of the programs beside the driver prints."""
        folders = (ROOT, ROOT / "tests", ROOT / "tests" / "support")
        settings = {"PYTHONPATH": os.pathsep.join(map(str, folders)), **settings}
        settings = {"TORCHINDUCTOR_COMPILE_THREADS": "1", **settings}
        command = [sys.executable, PROGRAMS / program, *words]
        environment = {**os.environ, **self.environment, **settings}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run(self, cases: dict[str, tuple]) -> dict[str, dict]:
        """Of each case the arguments, the number of processes and, unless it is run_pretraining,
        the program.
        """
        given, results = self.folder / "cases.json", self.folder / "results.json"
        given.write_text(json.dumps(cases))
        self.start("program.py", given, results)
        return read_json(results)


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory) -> StandIn:
    return StandIn(tmp_path_factory.mktemp("stand-in"))


def estimate(argv: list[str], count: int) -> float:
    """What `--estimate-memory` prints as the total, in bytes."""
    printed = run_here([*argv, "--estimate-memory", str(count)])
    assert printed.returncode == 0, printed.stderr
    unit = 2**30 if "in GiB" in printed.stdout else 2**20
    return float(re.search(r"total +(\d+\.\d+)", printed.stdout)[1]) * unit


def check_memory(name: str, argv: list[str], count: int, result: dict) -> None:
    expected = estimate(argv, count)
    # For benchmarks/what_was_tried.md.
    print(f"| {name} | {expected / 2**30:.1f} | {result['peak'] / 2**30:.1f} |")
    assert result["peak"] == pytest.approx(expected, rel=TOLERANCE)


@pytest.fixture(scope="module")
def results(stand_in, request) -> dict[str, tuple[list[str], int, dict]]:
    """The command line, the number of processes and the result of each selected case."""
    selected = {
        item.callspec.params.get("name")
        for item in request.session.items
        if hasattr(item, "callspec")
    }
    cases = {}
    for name in (name for name in CASES if name in selected):
        count, model, flags = CASES[name]
        words = ("--bert-model", "custom", "--config-file", f"bert_configs/{model}.json")
        words = (
            *words,
            "--vocab-file",
            "vocab/bert-base-uncased-vocab.txt",
            "--batch-size",
            64,
            *flags,
        )
        cases[name] = (
            stand_in.command(128, *words, "--max-seq-length", 128, "--max-predictions-per-seq", 20),
            count,
        )
    printed = stand_in.run(cases)
    return {name: (*cases[name], printed[name]) for name in cases}


@pytest.mark.parametrize("name", CASES)
def test_updates_run_without_waiting_and_allocate_what_was_estimated(results, name):
    argv, count, result = results[name]
    assert not result["error"], result["error"]
    if not name.startswith(UNESTIMATED):
        check_memory(name, argv, count, result)
    # The last layer is another graph, and so is the loss.
    graphs = 3 if "layers" in argv else int("compiled" in name)
    assert result["graphs"] == graphs
    # So called since torch 2.13.
    if name.startswith("bfloat16") and "all_gather_single" in result["collectives"]:
        # Of three updates; the embeddings and heads are gathered once per pass.
        passes = 3 * 2
        layers = 24
        assert result["collectives"]["all_gather_single"] == passes * (2 * layers + 1)
        assert result["collectives"]["reduce_scatter_single"] == passes * (layers + 1)


@pytest.mark.parametrize(("script", "config", "preset"), PRESETS)
def test_both_phases_of_a_preset_run_and_fit(stand_in, checkout, tmp_path, script, config, preset):
    for length in (1024, 8192):
        (tmp_path / "data" / "hdf5" / f"seq_{length}" / "training").mkdir(parents=True)
    flags = f"${{flags_{preset.rpartition('_')[2]}:-}}"
    result = checkout.run(
        f"source scripts/configs/{config}.sh; EXTRA_ARGS={flags} bash scripts/{script}.sh "
        f"$({preset})",
        RESULTS_DIR="out",
    )
    assert result.returncode == 0, result.stderr
    cases = {}
    for call in checkout.calls():
        argv = program_arguments(call, "run_pretraining.py")
        length = int(argv[argv.index("--max-seq-length") + 1])
        fresh = ("--from-phase1-final-params", "None") if "--phase2" in argv else ()
        fresh = (*fresh, "--from-checkpoint", "None", "--last-step-of-checkpoint", "None")
        cases[f"{preset}, length {length}"] = (
            stand_in.command(length, *argv, *fresh),
            processes_of(call),
        )
    for name, result in stand_in.run(cases).items():
        assert not result["error"], result["error"]
        check_memory(name, *cases[name], result)


@pytest.mark.parametrize("mode", ["", "without-waits"])
def test_copies_that_run_late_have_the_right_values_because_the_host_waits(
    stand_in, tmp_path, mode
):
    printed = stand_in.start(
        "copies.py", tmp_path, *filter(None, [mode]), STAND_IN_DELAYS_COPIES="1"
    )
    assert json.loads(printed) == dict.fromkeys(("loader", "checkpoint", "offload"), not mode)


def test_updates_and_evaluations_of_all_tasks_run_without_waiting(stand_in, tmp_path):
    """With 16-bit weights for SQuAD, and from there on with `--amp`."""
    shards, held_out = (write_shards(tmp_path / name, 128) for name in ("shards", "held-out"))
    with h5py.File(held_out / "shard_000.hdf5", "a") as file:
        file["input_ids"][:, 1] += 1
    texts = [("a great ship", "good"), ("a poor house", "bad")] * 24
    for name, count in (("train", 48), ("dev", 40)):
        rows = [("text", "label"), *texts[:count]]
        (tmp_path / f"{name}.csv").write_text("".join(f"{text},{label}\n" for text, label in rows))
        (tmp_path / f"{name}.txt").write_text("Great B-ship\nships I-ship\nsail O\n\n" * count)
    model = ("--config-file", "bert_configs/bert-mini-uncased.json", "--vocab-file")
    model = (
        *model,
        "vocab/bert-base-uncased-vocab.txt",
        "--output-dir",
        tmp_path,
        "--show-config",
        "false",
    )
    training = (
        *model,
        "--train-batch-size",
        8,
        "--max-steps",
        5,
        "--do-train",
        "--do-eval",
        "--device",
        "cuda",
        "--compile",
        "none",
    )
    squad = (
        "--train-file",
        "data/sample/squad/train-v1.1.json",
        "--predict-file",
        "data/sample/squad/dev-v1.1.json",
    )
    table = ("--train-file", tmp_path / "train.csv", "--eval-file", tmp_path / "dev.csv")
    named = (
        "--train-file",
        tmp_path / "train.txt",
        "--eval-file",
        tmp_path / "dev.txt",
    )
    columns, pair = (
        ("--text-column", "text", flag, "label") for flag in ("--label-column", "--pair-column")
    )
    pairs = (*training, *table, *pair, "--amp")
    question = ("--question", "What sails?", "--context", "Ships sail.")
    phase1 = (
        *model,
        "--input-dir",
        shards,
        "--eval-dir",
        held_out,
        "--eval-steps",
        2,
        "--max-steps",
        3,
        "--amp",
    )
    phase1 = (
        *phase1,
        "--batch-size",
        64,
        "--max-predictions-per-seq",
        20,
        "--max-seq-length",
        128,
        "--device",
        "cuda",
        "--compile",
        "none",
    )
    cases = {
        "SQuAD": ("run_squad", *training, *squad, "--use-pure-fp16"),
        "classes": ("run_glue", *training, *table, *columns, "--amp", "--eval-steps", 2),
        "classes, 8 GPUs": ("run_glue", *training, *table, *columns, "--amp", "--overwrite"),
        "several labels": (
            "run_glue",
            *training,
            *table,
            *columns,
            "--amp",
            "--task-name",
            "multi-label",
        ),
        "NER": ("run_ner", *training, *named, "--amp"),
        "pairs": ("run_embeddings", *pairs),
        "pairs, micro-batches": (
            "run_embeddings",
            *pairs,
            "--gradient-merge-steps",
            2,
            "--overwrite",
        ),
        "pairs, 8 GPUs": ("run_embeddings", *pairs, "--overwrite"),
        "pre-training": ("run_pretraining", *phase1),
        "pre-training, 8 GPUs": ("run_pretraining", *phase1, "--overwrite"),
        "answer": (
            "inference",
            "--init-checkpoint",
            tmp_path / "bert-mini-uncased" / "squad",
            *question,
        ),
    }
    results = stand_in.run(
        {
            name: ([*map(str, words)], 8 if "GPUs" in name else 1, program)
            for name, (program, *words) in cases.items()
        }
    )
    assert {name: result["error"] for name, result in results.items()} == dict.fromkeys(cases, "")


def test_the_attention_in_triton_is_compiled_once_for_streams_of_all_sizes(stand_in):
    assert stand_in.start("triton_kernels.py").split() == ["1", "1"]


def test_no_item_of_the_first_minutes_on_a_gpu_ends_with_an_error(stand_in, tmp_path):
    """Whether its result is right is for a GPU to say; some divide by a norm, which may be zero."""
    write_shards(tmp_path / "books-128" / "hdf5", 128)
    stand_in.start("first_hour.py", tmp_path, tmp_path)
    files = [tmp_path / f"{call}.json" for call in ("checks", "training", "tasks", "speed")]
    items = [item for path in files for item in read_json(path)["results"]]
    errors = {item["item"]: item["error"] for item in items if "error" in item}
    assert "out of memory" in errors.pop("memory runs out")
    assert all("float division by zero" in error for error in errors.values()), errors
    assert len(items) > 60
