#!/usr/bin/env python3
"""Compares a model before and after continued pre-training on a task: its vectors, and fine-tuned.

    python3 scripts/compare_on_task.py --before MODEL_FOLDER --after law/results/MODEL/phase1 \\
        --output-dir law/task --train-file train.csv --text-column review --label-column stars

Other flags are those of run_glue.py. First, in seconds, a linear layer is fitted to the
vectors of both models, with 100 labels and with all, five draws each. Then both models are
fine-tuned as run_glue.py chooses by the rows, with the same seeds. All are scored on a fifth of the
file that is held out, or on --eval-file, beside tf-idf. If interrupted, rerun the same command to
resume.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bert_recipe.utils.errors import (  # first, because it handles errors of the other imports
    UserError,
    run_main,
)

# isort: split
import argparse
import contextlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import run_glue
from bert_recipe.checkpoint.progress import GLOBAL_BATCH
from bert_recipe.checkpoint.record import read_record
from bert_recipe.config import RunConfig
from bert_recipe.config.arguments import all_names
from bert_recipe.reporting.comparison import (
    ScoreDifference,
    differences_of,
    interval_text,
    left_out,
    p_value_text,
    percent,
    points,
    read_model,
)
from bert_recipe.tasks.baselines import BASELINES, means_of
from bert_recipe.tasks.classification.options import ClassificationOptions
from bert_recipe.utils.command_line import (
    REQUIRED,
    ArgumentParser,
    Arguments,
    Flag,
    bounded_int,
    from_flags,
)
from bert_recipe.utils.files import write_atomically
from bert_recipe.utils.json_files import JsonObject, read_json, write_json
from bert_recipe.utils.progress import print_line

if TYPE_CHECKING:
    import numpy as np

    from bert_recipe.tasks.classification.task import ClassificationTask
    from bert_recipe.tasks.task import PredictionSet
    from bert_recipe.tasks.text_sequences import TextDataset
    from bert_recipe.tokenization.tokenizer import Tokenizer

at_least_two = bounded_int(2, 100)
NUM_DRAWS = 5  # of the rows to learn from; of all rows each leaves out another fifth
FEW_LABELS = 100
FLAGS = (
    Flag("--before", Path, REQUIRED, "model folder before"),
    Flag("--after", Path, REQUIRED, "model folder, or folder of steps, after"),
    Flag("--output-dir", Path, REQUIRED, "folder for the runs and comparison.txt"),
    Flag("--num-seeds", at_least_two, 5, "seeds of each model"),
    Flag("--seed", int, RunConfig.seed, "the first seed"),
)
# What this program decides.
REFUSED = (
    *("--epochs", "--batch-size", "--init-checkpoint", "--max-steps"),
    *("--num-folds", "--frozen-encoder"),
)


def describe(score: ScoreDifference) -> str:
    """A score before and after, with the interval of the difference and what it says."""
    difference = score.difference
    before, after = map(percent, difference.means)
    verdict = "no difference is shown"
    if difference.is_shown:
        verdict = "better" if difference.value > 0 else "the model became WORSE"
    return (
        f"{score.title} {before} before, {after} after: {points(difference.value)} points (95% "
        f"interval {interval_text(difference)}, p {p_value_text(difference)}, {score.num_rows:,} "
        f"rows): {verdict}"
    )


def compare(folders: Sequence[Path], how: str) -> list[str]:
    """A line for each score of the runs in both folders, before and after, and one on those that
    are not defined for all runs. how: what was done.
    """
    models = [read_model(folder) for folder in folders]
    differences = list(differences_of(*models))
    baselines = mean_baselines(folders[0])
    lines = []
    for score in differences:
        name = "_".join(filter(None, (score.set_name, score.name)))
        others = [
            f"{method} {percent(scores[name])}"
            for method, scores in baselines.items()
            if name in scores
        ]
        beside = f" ({', '.join(others)})" if others else ""
        lines.append(f"{how}: {describe(score)}{beside}")
    if note := left_out(models, differences):
        lines.append(f"{how}: {note}")
    return lines


def mean_baselines(folder: Path) -> dict[str, dict[str, float]]:
    """The scores of simple methods, by method and score, as means over seeds or draws."""
    stored = [read_json(path, "the scores") for path in sorted(folder.rglob("seed-*/scores.json"))]
    known = [scores[BASELINES] for scores in stored if BASELINES in scores]
    return means_of(known) if known else {}


def settings_text(scores_file: Path) -> str:
    """How the run with these scores was trained."""
    values = read_record(scores_file.parent).hyperparameters
    epochs = f"{values['--epochs']:g}"
    return (
        f"{epochs} epoch{'s' * (epochs != '1')}, batches of {values[GLOBAL_BATCH]}, rate "
        f"{values['--learning-rate']:g}"
    )


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The arguments of this program, and the flags of run_glue.py that all runs have."""
    parser = ArgumentParser(description=__doc__)
    parser.add_flags("comparison", FLAGS)
    args, command = parser.parse_known_args(argv)
    given = {word.partition("=")[0].replace("_", "-") for word in command if word.startswith("--")}
    if refused := sorted(given & all_names(REFUSED)):
        parser.error(f"leave {refused[0]} out: this program decides it")
    if "--eval-file" not in given and "--eval-fraction" not in given:
        command += ["--eval-fraction", "0.2"]
    command += ["--do-train", "--do-eval", "--resume-from-checkpoint"]
    command += ["--num-seeds", str(args.num_seeds), "--seed", str(args.seed)]
    folders = ["--init-checkpoint", str(args.before), "--output-dir", str(args.output_dir)]
    run_glue.parse_arguments([*command, *folders])
    return args, command


def draws_of(labels_n: "np.ndarray", count: int | None) -> "list[np.ndarray]":
    """The rows of each draw, of each class in proportion: `count`, with at least one of each class
    if that many classes fit, or all but another fifth.
    """
    import numpy as np

    random = np.random.default_rng(0)
    num_rows = len(labels_n)

    def ordered_by_class() -> np.ndarray:
        drawn_n = random.permutation(num_rows)
        return drawn_n[np.argsort(labels_n[drawn_n], kind="stable")]

    if count is None:
        order_n, part_n = ordered_by_class(), np.arange(num_rows) % NUM_DRAWS
        return [np.sort(order_n[part_n != draw]) for draw in range(NUM_DRAWS)]
    draws = []
    for _ in range(NUM_DRAWS):
        places = (np.arange(count) * num_rows + random.integers(num_rows)) // count
        draws.append(np.sort(with_each_class(ordered_by_class(), places, labels_n)))
    return draws


def with_each_class(
    order_n: "np.ndarray", places: "np.ndarray", labels_n: "np.ndarray"
) -> "np.ndarray":
    """The rows at `places` of the drawn order, so that each class has one: a row of a missing class
    replaces a row of the class that exceeds its share the most. A class keeps its last row.
    """
    import numpy as np

    rows, classes = order_n[places], np.unique(labels_n)
    share_C = np.bincount(labels_n) * len(rows) / len(labels_n)
    for label in np.setdiff1d(classes, labels_n[rows]) if len(classes) <= len(rows) else ():
        counts_C = np.bincount(labels_n[rows], minlength=len(share_C))
        largest = np.where(counts_C > 1, counts_C - share_C, -np.inf).argmax()
        first_drawn = order_n[(labels_n[order_n] == label).argmax()]
        rows[(labels_n[rows] == largest).argmax()] = first_drawn
    return rows


def compare_vectors(args: argparse.Namespace, command: Sequence[str]) -> list[str]:
    """Lines about linear layers on the vectors of both models; one that says so for rerankers."""
    folders: dict[str, list[Path]] = {}
    for name, model in (("before", args.before), ("after", args.after)):
        words = ["--init-checkpoint", str(model), "--output-dir", str(args.output_dir)]
        run = run_glue.parse_arguments([*command, *words])
        options = from_flags(ClassificationOptions, run, frozen_encoder=True)
        if options.spec.negatives:
            return ["the vectors of rerankers are not compared"]
        for title, folder in fit_draws(run, options, args.output_dir, name).items():
            folders.setdefault(title, []).append(folder)
    lines = []
    for title, both in folders.items():
        lines += compare(both, f"vectors with {title}, {NUM_DRAWS} draws)")
    return lines


def fit_draws(
    run: Arguments, options: ClassificationOptions, output: Path, name: str
) -> dict[str, Path]:
    """Fits layers to the vectors of a model, and scores them. Returns the folders of the draws,
    which are named as those of seeds, by the method and the number of labels.

    run: the arguments of run_glue.py.
    output: the folder for the results.
    name: of the model.
    """
    import numpy as np

    from bert_recipe.tasks.classification.frozen import kind_of
    from bert_recipe.training.frozen_encoder import values_of

    task, tokenizer, dataset, sets, vectors = embed(run, options, name)
    values = values_of(dataset)
    # Equal numbers, and equal sets of labels, are drawn as classes are.
    labels_n = np.unique(values, axis=0, return_inverse=True)[1].reshape(-1)
    train_vectors, *set_vectors = vectors
    row_vectors = train_vectors.reshape(len(values), -1)
    frozen = cast(Any, task.frozen)
    counts: list[int | None] = [FEW_LABELS] if len(values) > 2 * FEW_LABELS else []
    folders = {}
    for count in [*counts, None]:
        folder = output / f"vectors-{'all' if count is None else count}" / name
        for draw, rows in enumerate(draws_of(labels_n, count), 1):
            is_balanced = options.class_weights == "balanced"
            groups = [dataset.groups[row] for row in rows] if dataset.groups else ()
            fitted = frozen.fit(row_vectors[rows], values[rows], task.labels, is_balanced, groups)
            logits = list(map(fitted.logits, set_vectors))
            with contextlib.redirect_stdout(io.StringIO()):  # the mistakes of each draw
                score_draw(task, tokenizer, dataset, sets, logits, rows, folder / f"seed-{draw}")
        folders[f"{kind_of(values).method} ({len(rows)} labels"] = folder
    return folders


def embed(
    run: Arguments, options: ClassificationOptions, name: str
) -> "tuple[ClassificationTask, Tokenizer, TextDataset, list[PredictionSet], list[np.ndarray]]":
    """The task with a frozen encoder, its tokenizer, training rows and sets to score, and the
    vectors of the rows and of each set.
    """
    from bert_recipe.checkpoint.model_choice import choose_model
    from bert_recipe.checkpoint.model_folder import ModelFolder
    from bert_recipe.config.arguments import make_run_config
    from bert_recipe.tasks.classification.task import ClassificationTask
    from bert_recipe.training.evaluation import predict
    from bert_recipe.training.prediction import load_fine_tuned
    from bert_recipe.training.setup import start_runtime

    config = make_run_config(run)
    source = ModelFolder.find(cast(Path, run.from_pretrained_params))
    choice = choose_model(config.model, source)
    task, dataset = ClassificationTask.learning(
        options, choice.tokenizer, source.path, options.split()
    )
    sets = task.prediction_sets(choice.tokenizer)
    with start_runtime(config, f"vectors {name}") as runtime:
        model_config = task.configure(choice.config)
        parallel = load_fine_tuned(task.head, model_config, source, runtime, config.parallel)
        parallel.prepare_for_inference(runtime.precision.dtype)
        vectors = [
            predict(parallel, texts, "sequence", config.prediction.batch_size, runtime)[0]
            for texts in (dataset, *(prediction_set.dataset for prediction_set in sets))
        ]
    return task, choice.tokenizer, dataset, sets, vectors


def score_draw(
    task: "ClassificationTask",
    tokenizer: "Tokenizer",
    dataset: "TextDataset",
    sets: "Sequence[PredictionSet]",
    logits: "Sequence[np.ndarray]",
    rows: "np.ndarray",
    folder: Path,
) -> None:
    """Writes the predictions and the scores of a draw to `folder`, and those of tf-idf on its rows.

    dataset: of all rows to learn from.
    logits: of each set.
    rows: of the draw.
    """
    from bert_recipe.tasks.baselines import drawn_rows, for_json, joined, text_columns
    from bert_recipe.tasks.classification.baselines import LabelledTexts
    from bert_recipe.training.evaluation import only_numbers
    from bert_recipe.training.frozen_encoder import values_of

    folder.mkdir(parents=True, exist_ok=True)
    scores: JsonObject = {}
    for prediction_set, logits_nC in zip(sets, logits, strict=True):
        scores |= prediction_set.finish(logits_nC, folder)
    scores = dict(only_numbers(scores))
    if task.baseline_rows is not None:
        part = rows[drawn_rows(len(rows), max(1, len(task.labels)))]
        texts_nk = text_columns(*dataset.columns)
        drawn = LabelledTexts(texts_nk[part], values_of(dataset)[part], len(rows))
        again = replace(task, baseline_rows=drawn).prediction_sets(tokenizer)
        computes = [prediction_set.baselines for prediction_set in again]
        computed = [compute() for compute in computes if compute is not None]
        baselines = [result for result in computed if result is not None]
        if baselines:
            scores[BASELINES] = for_json(joined(baselines).scores)
    write_json(folder / "scores.json", scores)


def check_seeds(args: argparse.Namespace, folders: Iterable[Path]) -> None:
    """Raises UserError if an earlier command has left other seeds, which would be scored, too."""
    seeds = {f"seed-{seed}" for seed in range(args.seed, args.seed + args.num_seeds)}
    for folder in folders:
        others = sorted(path for path in folder.glob("*/*/seed-*") if path.name not in seeds)
        if others:
            raise UserError(
                f"{others[0]} is of an earlier command with other seeds: give its --seed and "
                f"--num-seeds, or another --output-dir"
            )


def main(argv: Sequence[str] | None = None) -> int:
    args, command = parse_arguments(argv)
    folders = {name: args.output_dir / "fine-tuning" / name for name in ("before", "after")}
    check_seeds(args, folders.values())
    lines = compare_vectors(args, command)
    print_line("\n".join(lines))
    for folder, model in zip(folders.values(), (args.before, args.after), strict=True):
        words = ["--init-checkpoint", str(model), "--output-dir", str(folder)]
        exit_code = run_glue.main([*command, *words])
        files = list(folder.rglob("seed-*/scores.json"))
        if exit_code or len(files) < args.num_seeds:  # after a signal the code may be 0
            return exit_code
    how = f"fine-tuning ({settings_text(files[0])}, {args.num_seeds} seeds)"
    lines += compare(list(folders.values()), how)
    lines.append(f"before: {args.before}; after: {args.after}")
    text = "\n".join(lines)
    write_atomically(args.output_dir / "comparison.txt", f"{text}\n")
    print_line(f"{text}\nwritten to {args.output_dir / 'comparison.txt'}")
    return 0


if __name__ == "__main__":
    run_main(main)
