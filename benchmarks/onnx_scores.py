#!/usr/bin/env python3
"""Scores of a model and of its ONNX files, in float32 and with weights of 8 bits.

    python3 benchmarks/onnx_scores.py --init-checkpoint FOLDER --input dev.csv \\
        --text-column review --label-column stars
    python3 benchmarks/onnx_scores.py --init-checkpoint FOLDER --input dev.csv \\
        --text-column first --pair-column second --label-column score
    python3 benchmarks/onnx_scores.py --init-checkpoint FOLDER --input dev.conll

Without columns: a model of tags (entities, and the share of words with this project's tag). With
--pair-column: a model of sentence embeddings, whose cosines are compared with the scores of the
pairs (Spearman correlation). With --text-column only: a model of classes (accuracy, macro F1, and
the share of texts with the class of this project's predictions). The files are those of
scripts/export_onnx.py --int8, in onnxruntime. The scale of 8-bit activations is that of a whole
batch, with its filler, so scores may depend on --batch-size. Needs scikit-learn, scipy, and what
export_onnx.py needs.
"""

import itertools
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import run_glue
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
from tasks.ner import entity_scores
from tasks.ner_files import read_sentences, to_iob2
from tasks.retrieval import normalized
from utils.command_line import Arguments, positive_int
from utils.device import set_num_threads
from utils.errors import UserError, run_main
from utils.progress import print_line
from utils.tables import Row, read_texts

TAGS = "tags"


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--init-checkpoint", type=Path, required=True, help="folder of a model")
    add("--input", type=Path, required=True, help="a table with labels or scores, or tagged words")
    add("--text-column", help="column of the text")
    add("--pair-column", help="column of the second text, for embeddings")
    add("--label-column", help="column of the class, or of the score of a pair")
    add("--batch-size", type=positive_int, default=32, help="texts per batch")
    add("--max-seq-length", type=positive_int, default=128, help="tokens of a text, then cut")
    args = parser.parse_args(argv)
    if (args.text_column is None) != (args.label_column is None):
        parser.error("--text-column and --label-column go together: give both or neither")
    return args


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


def project_tags(args: Arguments, folder: Path) -> list[list[str]]:
    """The tags of each sentence in what `run_glue.py --do-eval` writes below `folder`."""
    words = ["--task-name=ner", "--do-eval", "--device=cpu", f"--eval-file={args.input}"]
    words += [f"--init-checkpoint={args.init_checkpoint}", f"--output-dir={folder}"]
    words += [f"--max-seq-length={args.max_seq_length}"]
    run_glue.main(words)
    (path,) = folder.rglob("eval_predictions.tsv")
    _, *blocks = path.read_text("utf-8").strip("\n").split("\n\n")  # the first one is the header
    return [[line.split("\t")[2] for line in block.split("\n")] for block in blocks]


def onnx_tags(
    runtime: OnnxRuntime, sentences: list[list[str]], labels: tuple[str, ...]
) -> list[list[str]]:
    """The tags of the words of each sentence; O for those that are cut off."""
    tags = []
    size = runtime.args.batch_size
    for start in range(0, len(sentences), size):
        part = sentences[start : start + size]
        batch = runtime.tokenizer(
            part,
            is_split_into_words=True,
            padding=True,
            truncation=True,
            max_length=runtime.args.max_seq_length,
            return_tensors="np",
        )
        feed = {name: batch[name] for name in runtime.inputs}
        (logits,) = runtime.session.run(None, feed)
        for number, words in enumerate(part):
            found = ["O"] * len(words)
            seen = {None}
            for place, word in enumerate(batch.word_ids(number)):
                if word not in seen:  # the tag is on the first token of a word
                    found[word] = labels[int(logits[number, place].argmax())]
                    seen.add(word)
            tags.append(to_iob2(found))
    return tags


def tag_scores(
    expected: list[list[str]], found: list[list[str]], own: list[list[str]]
) -> dict[str, float]:
    scores = entity_scores(expected, found)
    words, others = (list(itertools.chain(*tags)) for tags in (found, own))
    equal = [one == other for one, other in zip(words, others, strict=True)]
    shown = {name: scores[name] for name in ("precision", "recall", "f1")}
    return shown | {"equal_tags": float(np.mean(equal))}


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    set_num_threads()
    names = [args.text_column, args.pair_column, args.label_column]
    columns = [name for name in names if name is not None]
    task = CLASSES if args.pair_column is None else EMBEDDING
    if args.text_column is None:
        task, rows = TAGS, read_sentences(args.input, tagged=True)
    else:
        rows = [row for _, row in read_texts(args.input, columns)]
    folder = ModelFolder.find(args.init_checkpoint)
    labels = folder.config.labels if task != EMBEDDING else ()
    own = Arguments(**vars(args) | {"task": task, "amp": False, "_frozen": False})
    with tempfile.TemporaryDirectory(prefix="onnx_scores_") as scratch:
        exported = Path(scratch) / "onnx"
        words = [f"--init-checkpoint={args.init_checkpoint}", f"--output-dir={exported}", "--int8"]
        export_onnx.main(words)
        runtimes = {name: OnnxRuntime(own, exported, [], file) for name, file in ONNX_FILES.items()}
        if task == TAGS:
            expected = [sentence.tags for sentence in rows]
            words = [sentence.words for sentence in rows]
            found = {THIS_PROJECT: project_tags(args, Path(scratch))}
            found |= {name: onnx_tags(each, words, labels) for name, each in runtimes.items()}
            scores = {
                name: tag_scores(expected, tags, found[THIS_PROJECT])
                for name, tags in found.items()
            }
        else:
            project = {THIS_PROJECT: ThisProject(own, args.init_checkpoint, [])}
            scores = compared_scores(args, labels, project | runtimes, rows)
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
