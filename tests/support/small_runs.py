"""Pre-training runs that take a second, in this process, and what they wrote."""

import contextlib
import gc
import io
import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import NO_DROPOUT, TINY, VOCAB_FILE, log_entries, read_json, reported, write_shards
from safetensors.torch import load_file

import run_pretraining
from bert_recipe.checkpoint.folder import MANIFEST_FILE, block_digests, manifest_of, num_blocks
from bert_recipe.checkpoint.model_choice import ModelChoice, find_model
from bert_recipe.config.arguments import make_run_config
from bert_recipe.data_loading.pretraining_dataset import PretrainingDataset
from bert_recipe.utils.command_line import Arguments
from bert_recipe.utils.errors import UserError, run_main

AUTO = ("--last-step-of-checkpoint", "auto")
CHECKPOINT_FILES = (
    "model.safetensors",
    "model_optimizer.safetensors",
    "model_progress.json",
    "config.json",
    "vocab.txt",
    "tokenizer_config.json",
    "manifest.json",
)
RUN_FILES = {".lock"}  # in a folder of steps, besides the checkpoints


def transformers_batch(rows: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Rows of shards as the padded batch that transformers' BertForPreTraining takes."""
    tensors = {key: torch.from_numpy(values.astype(np.int64)) for key, values in rows.items()}
    labels = torch.full_like(tensors["input_ids"], -100)
    for row, places, words in zip(
        labels, tensors["masked_lm_positions"], tensors["masked_lm_ids"], strict=True
    ):
        row[places[places > 0]] = words[places > 0]
    names = {
        "input_ids": "input_ids",
        "input_mask": "attention_mask",
        "segment_ids": "token_type_ids",
    }
    names["next_sentence_labels"] = "next_sentence_label"
    return {theirs: tensors[ours] for ours, theirs in names.items()} | {"labels": labels}


def torchs_adamw(model: torch.nn.Module, lr: float) -> torch.optim.AdamW:
    """With the settings of BERT: no decay of biases and normalizations."""
    undecayed = [
        p for name, p in model.named_parameters() if name.endswith("bias") or "LayerNorm" in name
    ]
    decayed = [p for p in model.parameters() if all(p is not other for other in undecayed)]
    groups = [{"params": decayed}, {"params": undecayed, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01)


def choose_model_of(args: Arguments) -> ModelChoice:
    """The model that a program's flags choose."""
    return find_model(make_run_config(args), loads=False).choice


class InMemoryDataset:
    """Random sequences of the given lengths (see loader.StreamDataset). Sample i starts with the
    token i, so that a stream shows its samples.
    """

    stream_labels = PretrainingDataset.stream_labels

    def __init__(self, lengths: Sequence[int], vocab_size: int = 1000):
        random = np.random.default_rng(0)
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.num_labelled = np.maximum(1, self.lengths // 7)
        self.labels = random.integers(0, 2, len(lengths))
        self.ids = [random.integers(0, vocab_size, length) for length in lengths]
        for number, ids in enumerate(self.ids):
            ids[0] = number

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, indices: np.ndarray, seeds=None, progress: float = 0.0) -> SimpleNamespace:
        return SimpleNamespace(
            lengths=self.lengths[indices],
            num_labelled=self.num_labelled[indices],
            num_sequences=np.ones_like(indices),
            metrics={},
            stream=lambda rows: self.stream(indices[rows]),
        )

    def stream(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        arrays = {name: [] for name in ("input_ids", "token_type_ids", "position_ids")}
        masked = {"mlm_positions": [], "mlm_labels": []}
        bounds = [0]
        for ids, count in zip(
            [self.ids[index] for index in indices], self.num_labelled[indices], strict=True
        ):
            positions = np.arange(len(ids))
            arrays["input_ids"].append(ids)
            arrays["token_type_ids"].append(positions * 2 // len(ids))
            arrays["position_ids"].append(positions)
            masked["mlm_positions"].append(bounds[-1] + positions[:count] + 1)
            masked["mlm_labels"].append(ids[1 : count + 1])
            bounds.append(bounds[-1] + len(ids))
        stream = {name: np.concatenate(parts) for name, parts in (arrays | masked).items()}
        stream["cu_seqlens"] = np.array(bounds, dtype=np.int32)
        return stream | {"nsp_labels": self.labels[indices]}


@dataclass(frozen=True)
class RunInputs:
    """The input files of small runs."""

    shards: Path
    held_out: Path
    config: Path
    config_without_dropout: Path
    vocab_file: Path

    @classmethod
    def make(cls, folder: Path) -> "RunInputs":
        words = VOCAB_FILE.read_text(encoding="utf-8").splitlines()[:1210]  # not a multiple of 64
        inputs = cls(
            write_shards(folder / "shards"),
            write_shards(folder / "held_out", sizes=(20,), seed=7),
            folder / "config.json",
            folder / "config_without_dropout.json",
            folder / "vocab.txt",
        )
        inputs.vocab_file.write_text("\n".join(words) + "\n", encoding="utf-8")
        small = {**TINY, "vocab_size": len(words)}
        inputs.config.write_text(json.dumps(small))
        inputs.config_without_dropout.write_text(json.dumps({**small, **NO_DROPOUT}))
        return inputs

    def command(self, output: Path, *extra, dropout: bool = True) -> list[str]:
        """run_pretraining.py's arguments; a flag in `extra` replaces an earlier one."""
        config = self.config if dropout else self.config_without_dropout
        words = (
            *(
                "--input-dir",
                self.shards,
                "--output-dir",
                output,
                "--report-file",
                output / "report.json",
            ),
            *("--bert-model", "custom", "--config-file", config, "--vocab-file", self.vocab_file),
            *(
                "--max-seq-length",
                32,
                "--max-predictions-per-seq",
                5,
                "--batch-size",
                4,
                "--show-config",
                "false",
            ),
            *("--device", "cpu", "--learning-rate", 0.01, "--warmup-proportion", 0.1, *extra),
        )
        return [str(word) for word in words]


def steps_folder(output: Path, phase: str = "phase1") -> Path:
    return output / "custom" / phase


def resuming(output: Path, phase: str = "phase1") -> tuple:
    """The flags with which a command continues from its newest checkpoint."""
    return ("--from-checkpoint", steps_folder(output, phase), *AUTO)


def run_here(
    words: Sequence[object], main: Callable = run_pretraining.main
) -> subprocess.CompletedProcess:
    """Runs a program in this process; returns the exit code and the output as for a process of its
    own.
    """
    argv = [str(word) for word in words]
    out = io.StringIO()
    err = io.StringIO()
    code = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run_main(lambda: main(argv))
        except SystemExit as end:
            code = end.code or 0
    # What a failed run leaves, such as its folder's lock, is kept by its traceback until then. The
    # next collection does not visit what is in use now, which takes 0.1 s.
    if code:
        gc.collect()
        gc.freeze()
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())


def train(argv: list[str]) -> subprocess.CompletedProcess:
    result = run_here(argv)
    assert result.returncode == 0, (result.stdout, result.stderr)
    return result


def losses(output: Path) -> dict[int, float]:
    return {
        step: entry["loss"]
        for step, entry in reported(output / "report.json").items()
        if "loss" in entry
    }


def all_logged_losses(output: Path) -> set[tuple[int, float]]:
    """Also those of steps that were repeated, because the run was stopped before the next
    checkpoint.
    """
    report = output / "report.json"
    entries = log_entries(report) if report.exists() else []
    return {
        (entry["step"][-1], entry["data"]["loss"]) for entry in entries if "loss" in entry["data"]
    }


def last_step(output: Path) -> int:
    return max((step for step, _ in all_logged_losses(output)), default=0)


def weights(output: Path, step: int, phase: str = "phase1") -> dict[str, torch.Tensor]:
    return load_file(steps_folder(output, phase) / str(step) / "model.safetensors")


def progress(output: Path, step: int, phase: str = "phase1") -> dict:
    return read_json(steps_folder(output, phase) / str(step) / "model_progress.json")


def steps_in(output: Path, phase: str = "phase1") -> list[str]:
    """The names in the folder of steps, without the files of the run itself."""
    folder = steps_folder(output, phase)
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return sorted(names - RUN_FILES, key=lambda name: (len(name), name))


def files_of(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """The time of change and the content of each file of all checkpoints in `folder`."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name not in RUN_FILES]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


def evaluations(folder: Path) -> list[dict]:
    """Those in the newest checkpoint of a folder of steps."""
    newest = max(folder.glob("[0-9]*/*_progress.json"), key=lambda path: int(path.parent.name))
    return read_json(newest)["evaluations"]


def rewrite_manifest(folder: Path) -> None:
    """Makes the manifest of a checkpoint fit the files in it, after a test has changed them."""
    paths = [path for path in sorted(folder.iterdir()) if path.name != MANIFEST_FILE]
    sizes = {path.name: path.stat().st_size for path in paths}
    blocks = [(path, block) for path in paths for block in range(num_blocks(sizes[path.name]))]
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest_of(sizes, block_digests(blocks))))


def assert_opening_fails(folder: Path, *words: object) -> None:
    """A PretrainingDataset of `folder` says all of `words` in its error."""
    with pytest.raises(UserError) as caught:
        PretrainingDataset(folder, TINY["vocab_size"])
    for word in words:
        assert str(word) in str(caught.value)
