#!/usr/bin/env python3
"""Scores of a model and of its ONNX files, in float32 and with weights of 8 bits.

    python3 benchmarks/onnx_scores.py --init-checkpoint FOLDER --input dev.csv \\
        --text-column review --label-column stars
    python3 benchmarks/onnx_scores.py --init-checkpoint FOLDER --input dev.csv \\
        --text-column first --pair-column second --label-column score

With --pair-column: a model of sentence embeddings, whose cosines are compared with the scores of
the pairs (Spearman correlation). Without: a model of classes (accuracy, macro F1, and the share of
texts with the class of this project's predictions). The files are those of scripts/export_onnx.py
--int8, in onnxruntime. The scale of 8-bit activations is that of a whole batch, with its filler, so
scores may depend on --batch-size. Needs scikit-learn, scipy, and what export_onnx.py needs.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.common.results import CPU, benchmark_parser, write_result
from benchmarks.common.worker import THIS_PROJECT
from benchmarks.inference_speed import (
    CLASSES,
    EMBEDDING,
    ONNX_FILES,
    Implementation,
    OnnxRuntime,
    ThisProject,
)
from checkpoint.model_folder import ModelFolder
from scripts import export_onnx
from tasks.glue_scores import load_metrics
from tasks.retrieval import normalized
from utils.command_line import Arguments, positive_int
from utils.device import set_num_threads
from utils.errors import UserError, run_main
from utils.progress import print_line
from utils.tables import Row, read_texts


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--init-checkpoint", type=Path, required=True, help="folder of a model")
    add("--input", type=Path, required=True, help="a table with labels or scores")
    add("--text-column", required=True, help="column of the text")
    add("--pair-column", help="column of the second text, for embeddings")
    add("--label-column", required=True, help="column of the class, or of the score of a pair")
    add("--batch-size", type=positive_int, default=32, help="texts per batch")
    add("--max-seq-length", type=positive_int, default=128, help="tokens of a text, then cut")
    return parser.parse_args(argv)


def vectors_of(implementation: Implementation, texts: list[str]) -> np.ndarray:
    found = implementation.predict(texts)
    if isinstance(implementation, ThisProject):
        found = [prediction.columns["embedding"] for prediction in found]
    return normalized(np.array(found))


def embedding_scores(
    implementation: Implementation, pairs: list[list[str]], scores: np.ndarray
) -> dict[str, float]:
    first, second = (vectors_of(implementation, texts) for texts in pairs)
    return {"spearman": load_metrics()["spearman"](scores, (first * second).sum(axis=1))}


def predicted_classes(
    implementation: Implementation, texts: list[str], labels: tuple[str, ...]
) -> np.ndarray:
    found = implementation.predict(texts)
    if isinstance(implementation, ThisProject):
        return np.array([labels.index(prediction.columns["label"]) for prediction in found])
    return np.array(found).argmax(axis=1)


def compared_scores(
    args: Arguments,
    labels: tuple[str, ...],
    implementations: dict[str, Implementation],
    rows: list[Row],
) -> dict[str, dict[str, float]]:
    """The scores by name of the implementation. labels: of a model of classes."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    truths = columns[args.label_column]
    texts = columns[args.text_column]
    if args.pair_column is not None:
        pairs = [texts, columns[args.pair_column]]
        values = np.array([float(truth) for truth in truths])
        return {
            name: embedding_scores(implementation, pairs, values)
            for name, implementation in implementations.items()
        }
    if unknown := set(truths) - set(labels):
        raise UserError(f"{args.input}: the model does not know the class {min(unknown)!r}")
    ids = np.array([labels.index(truth) for truth in truths])
    metrics = load_metrics()
    scores = {}
    own = predicted_classes(implementations[THIS_PROJECT], texts, labels)
    for name, implementation in implementations.items():
        found = predicted_classes(implementation, texts, labels)
        scores[name] = {each: float(metrics[each](ids, found)) for each in ("accuracy", "f1_macro")}
        scores[name]["equal_classes"] = float((found == own).mean())
    return scores


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    set_num_threads()
    names = [args.text_column, args.pair_column, args.label_column]
    columns = [name for name in names if name is not None]
    rows = [row for _, row in read_texts(args.input, columns)]
    task = CLASSES if args.pair_column is None else EMBEDDING
    folder = ModelFolder.find(args.init_checkpoint)
    labels = folder.config.labels if task == CLASSES else ()
    own = Arguments(**vars(args) | {"task": task, "amp": False, "_frozen": False})
    with tempfile.TemporaryDirectory(prefix="onnx_scores_") as scratch:
        exported = Path(scratch) / "onnx"
        words = [f"--init-checkpoint={args.init_checkpoint}", f"--output-dir={exported}", "--int8"]
        export_onnx.main(words)
        implementations: dict[str, Implementation] = {
            THIS_PROJECT: ThisProject(own, args.init_checkpoint, [])
        }
        for name, file in ONNX_FILES.items():
            implementations[name] = OnnxRuntime(own, exported, [], file)
        scores = compared_scores(args, labels, implementations, rows)
    for name, values in scores.items():
        print_line(f"{name}: " + ", ".join(f"{key} {value:.4f}" for key, value in values.items()))
    shown = ("batch_size", "max_seq_length", "text_column", "pair_column", "label_column")
    arguments = {"input": args.input.name, "rows": len(rows)}
    arguments |= {name: vars(args)[name] for name in shown}
    result = {"model": folder.name, "arguments": arguments}
    name = f"onnx_scores-{task}-{args.input.stem}"
    write_result(args.output, name, CPU, result | {"scores": scores})


if __name__ == "__main__":
    run_main(main)
