#!/usr/bin/env python3
"""Inference: answers, classes of texts, entities, masked words, and sentence embeddings.

    python3 inference.py --init-checkpoint FOLDER --question "Where did Anna live?" \\
        --context "Anna lived in Paris."
    python3 inference.py --init-checkpoint FOLDER --text "A gripping film." --n-best-size 2
    python3 inference.py --init-checkpoint FOLDER --fill-mask "The capital of France is [MASK]."

The task must match the head of the model in FOLDER, which also provides config, vocabulary and
casing. All rows of a file (CSV, TSV, JSON lines or Parquet, also compressed) are predicted by

    python3 inference.py --init-checkpoint FOLDER --input reviews.csv --output scored.csv \\
        --text-column review
    python3 inference.py --init-checkpoint FOLDER --input reviews.csv --output vectors.npy \\
        --text-column review --embed
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bert_recipe.utils.errors import (
    UserError,
    handle_uncaught_errors,
    one_line,
    print_error,
    run_main,
)

if __name__ == "__main__":
    handle_uncaught_errors()  # also of the imports below

from bert_recipe.config import PrecisionConfig
from bert_recipe.config.arguments import check_weights
from bert_recipe.config.foreign_flags import INFERENCE, foreign_flags
from bert_recipe.tasks.inference_flags import FLAGS
from bert_recipe.tasks.squad.options import SquadOptions
from bert_recipe.utils.command_line import ArgumentParser, Arguments, from_flags
from bert_recipe.utils.files import LOCK_FILE, file_digest, lock_folder, remove, write_atomically
from bert_recipe.utils.json_files import json_digest, read_json
from bert_recipe.utils.output_tables import (
    OUTPUTS,
    add_columns,
    check_output,
    encode_table,
    format_like,
)
from bert_recipe.utils.progress import print_line, progress_bar
from bert_recipe.utils.tables import Row
from bert_recipe.utils.text_files import TableFormat, TextFile, kind_of

# Functions import what needs torch: --help and errors of the command line do not wait for it.
if TYPE_CHECKING:
    import numpy as np

    from bert_recipe.checkpoint.model_choice import ModelChoice
    from bert_recipe.checkpoint.model_folder import ModelFolder
    from bert_recipe.model.encoders.config import ModelConfig
    from bert_recipe.parallel.runtime import Runtime
    from bert_recipe.tasks.heads import Head, Predictor
    from bert_recipe.tasks.predicted_rows import PlacedRow, PredictedRows, Prediction
    from bert_recipe.tasks.text_sequences import SequenceDataset

ROWS_PER_PART = 4096  # of a file to predict


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    parser = ArgumentParser(description=__doc__)
    for title, flags in FLAGS.items():
        parser.add_flags(title, flags)
    parser.foreign = foreign_flags(INFERENCE)
    args = parser.parse_args(argv)
    parser.check_flags(args)
    for name in ("text", "text_pair"):
        text = args.get(name)
        if text is not None and not text.strip():
            parser.error(f"{flag_of(name)} is empty: give a text")
    if all(args.get(name) is None for name in ("text", "question", "fill_mask", "input")):
        parser.error("nothing to predict: give --text, --question, --fill-mask or --input")
    return args


def choose_head(args: Arguments, folder: ModelFolder, config: ModelConfig) -> Head:
    """A head in `folder` that takes the given flags. Raises UserError if there is none."""
    from bert_recipe.tasks.heads import EMBEDDINGS, HEADS, heads_in

    heads = {"": EMBEDDINGS} if args.embed else heads_in(folder, config)
    if not heads:
        raise UserError(
            f"{folder} has no head: fine-tune it (docs/fine_tuning.md), or give --embed --input"
        )
    head_flags: set[str] = set()  # that only some heads take
    for head in (*HEADS.values(), EMBEDDINGS):
        head_flags |= set(head.flags)
    given = {name for name in head_flags if args.given(name)}
    given = {name for name in given if vars(args)[name] not in (None, False)}
    for head in heads.values():
        if given <= set(head.flags):
            return head
    architecture, first = next(iter(heads.items()))
    wrong = flag_of(min(given - set(first.flags)))
    others = ", ".join(map(flag_of, first.flags))
    what = f"a {architecture}" if architecture else "its embeddings"
    raise UserError(
        f"{wrong} has no effect on {folder}, {what}: use another model, or its flags {others}"
    )


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class LoadedModel(NamedTuple):
    """A model, for what the flags ask. outputs: of the model for the data set of rows."""

    folder: Path
    predictor: Predictor
    outputs: Callable[[SequenceDataset], Any]

    def predict(self, rows: PredictedRows) -> list[Prediction]:
        return rows.predict(self.outputs(rows.dataset))


def open_model(args: Arguments) -> LoadedModel:
    """The model of --init-checkpoint."""
    from bert_recipe.checkpoint.model_choice import check_same_kind, choose_model_in
    from bert_recipe.checkpoint.model_folder import ModelFolder
    from bert_recipe.config import ModelSelection
    from bert_recipe.model.encoders.config import check_length
    from bert_recipe.tasks.heads import Request

    folder = ModelFolder.find(args.init_checkpoint)
    choice = choose_model_in(folder, from_flags(ModelSelection, args, bert_model=None))
    check_same_kind(folder, choice)
    head = choose_head(args, folder, choice.config)
    length = args.max_seq_length or head.max_length(choice.config, folder)
    check_length("--max-seq-length", length, choice.config)
    options = answer_options(args, length)
    has_pairs = args.text_pair is not None or args.pair_column is not None
    prompt = args.prompt_name
    request = Request(choice.config, folder, choice.tokenizer, options, has_pairs, prompt)
    return load_model(args, head.predictor(request), folder, choice)


def load_model(
    args: Arguments, predictor: Predictor, folder: ModelFolder, choice: ModelChoice
) -> LoadedModel:
    from bert_recipe.checkpoint.start import no_log
    from bert_recipe.tasks.heads import MASKS
    from bert_recipe.tasks.masked_words import best_words
    from bert_recipe.training.evaluation import predict
    from bert_recipe.training.prediction import load_fine_tuned

    runtime = make_runtime(args)
    parallel = load_fine_tuned(predictor.head, predictor.config, folder, runtime, log=no_log)
    parallel.prepare_for_inference(runtime.precision.dtype)

    def words(dataset: SequenceDataset) -> Any:
        autocast = partial(runtime.precision.context, runtime.device)
        sizes = args.batch_size, args.n_best_size
        return best_words(parallel.model, choice.tokenizer, dataset, *sizes, autocast)

    def logits(dataset: SequenceDataset) -> np.ndarray:
        outputs, _ = predict(parallel, dataset, predictor.logits_axis, args.batch_size, runtime)
        return predictor.logits_of(outputs)

    return LoadedModel(folder.path, predictor, words if predictor.head == MASKS else logits)


def make_runtime(args: Arguments) -> Runtime:
    """The device and the precision of the flags."""
    from bert_recipe.model.kernels.linear import onednn_is_faster, set_float32_linear
    from bert_recipe.optimization.precision import has_bfloat16, select_precision
    from bert_recipe.parallel.runtime import Runtime
    from bert_recipe.utils.device import select_device, set_num_threads

    set_num_threads()
    set_float32_linear(args.float32_linear == "auto" and onednn_is_faster())
    device = select_device(args.device)
    amp = args.amp
    if amp is None:
        amp = device.type == "cuda" and has_bfloat16(device)
    return Runtime(device, select_precision(PrecisionConfig(amp=amp, amp_dtype="bfloat16"), device))


def answer_options(args: Arguments, max_seq_length: int) -> SquadOptions:
    return from_flags(
        SquadOptions,
        args,
        max_seq_length=max_seq_length,
        n_best_size=max(SquadOptions.n_best_size, args.n_best_size),
    )


def check_files(source: Path, target: Path, embed: bool) -> None:
    """Raises UserError if the rows of `source` cannot be predicted to the file `target`, without
    reading them.
    """
    check_output(target, (source,), (*OUTPUTS, ".npy") if embed else OUTPUTS)
    TextFile(source).open().close()


def predict_file(model: LoadedModel, args: Arguments) -> None:
    """Writes the rows of --input, with the columns that are predicted for them, to --output.

    All rows are checked before the first one is predicted. Each ROWS_PER_PART rows are a unit of
    work. The units are in a folder beside the output, which one program at a time may use, in a
    subfolder whose name identifies input, model and flags: if interrupted, rerun the same command
    to resume.
    """
    from bert_recipe.tasks.predicted_rows import read_table

    by_field = {
        "text": args.text_column,
        "pair": args.pair_column,
        "question": args.question_column,
        "context": args.context_column,
    }
    columns = {field: column for field, column in by_field.items() if column is not None}
    target = args.output
    table_format = TableFormat(args.delimiter, args.encoding)
    placed = read_table(args.input, list(columns.values()), table_format)
    rows = [row for _, row in placed]
    target_format = format_like(TextFile(args.input, table_format=table_format), args.decimal)
    if kind_of(target.name)[0] == ".parquet":
        encode_table(target, rows)  # what it cannot store is refused here
    parts = target.with_name(f"{target.name}.parts")
    with closing(lock_folder(parts)):
        folder = parts / json_digest(identity_of(model, args))
        predicted = predict_rows(model, placed, columns, folder)
        if target.suffix == ".npy":
            write_vectors(target, predicted)
        else:
            table = add_columns(rows, predicted)
            write_atomically(target, encode_table(target, table, target_format))
        remove(parts)
    print_line(f"predictions for {len(rows)} rows in {target}")


def predict_rows(
    model: LoadedModel, rows: Sequence[PlacedRow], columns: dict[str, str], folder: Path
) -> list[Row]:
    """The predicted columns of each of `rows`, which are predicted in units of work in `folder`.
    columns: the column of each field that the model takes, such as `text`.
    """
    from bert_recipe.utils.work_units.executors import InProcessExecutor
    from bert_recipe.utils.work_units.units import WorkUnit, read_record, run_units

    units = []
    num_cut, unknown = 0, 0.0
    for first in range(0, len(rows), ROWS_PER_PART):
        part = rows[first : first + ROWS_PER_PART]
        name = f"{first}.json"
        predicted_rows = None  # the unit is done already, by a run that was interrupted
        if read_record(folder, name) is None:
            places = [place for place, _ in part]
            inputs = [{field: row[column] for field, column in columns.items()} for _, row in part]
            predicted_rows = model.predictor.rows(places, inputs)
            num_cut += predicted_rows.dataset.num_cut
            unknown += predicted_rows.dataset.unknown_share * len(part)
        units.append(WorkUnit(name, write_part, (model, predicted_rows), len(part)))
    say_what_is_lost(num_cut, unknown / max(1, len(rows)), len(rows))
    with progress_bar(len(rows), "prediction", "row") as bar:
        run_units(folder, units, InProcessExecutor(), bar.update)
    predicted: list[Row] = []
    for unit in units:
        predicted += read_json(folder / unit.output, "predictions", list[Row])
    return predicted


def say_what_is_lost(num_cut: int, unknown_share: float, num_rows: int) -> None:
    """Says what of the inputs the model does not see."""
    from bert_recipe.tokenization.files import MAX_UNKNOWN

    if num_cut:
        what = f"{num_cut:,} of {num_rows:,} inputs are" if num_rows > 1 else "the input is"
        print_error(f"note: {what} longer than the model takes, and cut")
    if unknown_share > MAX_UNKNOWN:
        what = f"{unknown_share:.0%} of the tokens are [UNK]"
        print_error(f"note: {what}: the vocabulary of the model lacks their characters")


def write_vectors(target: Path, predicted: list[Row]) -> None:
    import numpy as np

    content = io.BytesIO()
    np.save(content, np.array([row["embedding"] for row in predicted], np.float32))
    write_atomically(target, content.getvalue())


def identity_of(model: LoadedModel, args: Arguments) -> dict[str, Any]:
    """All that the predictions of a file depend on."""
    from bert_recipe.checkpoint.sentence_folders import sentence_files

    paths = [*model.folder.glob("*"), *sentence_files(model.folder)]  # modules have folders
    files = [path for path in set(paths) if path.is_file() and path.name != LOCK_FILE]
    for path in (args.config_file, args.vocab_file, args.input):
        if path is not None and path.name != LOCK_FILE:
            files.append(path)
    identity: dict[str, Any] = args.as_dict()
    for name in ("input", "output", "device"):
        identity.pop(name, None)
    identity["files"] = {str(path): file_digest(path) for path in sorted(files)}
    return identity


def write_part(path: Path, model: LoadedModel, rows: PredictedRows) -> dict[str, Any]:
    path.write_text(json.dumps([prediction.columns for prediction in model.predict(rows)]))
    return {}


def answer(model: LoadedModel, args: Arguments) -> None:
    """Predicts the text or the question of the flags, and prints the results."""
    text = args.text if args.text is not None else args.fill_mask
    fields = {
        "text": text,
        "pair": args.text_pair,
        "question": args.question,
        "context": args.context,
    }
    row = {name: value for name, value in fields.items() if value is not None}
    rows = model.predictor.rows(["the input"], [row])
    say_what_is_lost(rows.dataset.num_cut, rows.dataset.unknown_share, 1)
    (prediction,) = model.predict(rows)
    none = "(the passage has no answer)" if args.version_2_with_negative else "(none found)"
    for line in lines_of(row, prediction, args.n_best_size, none):
        print_line(line)


def lines_of(row: Row, prediction: Prediction, num_results: int, none: str) -> list[str]:
    """What the terminal shows of a prediction. none: of no answer."""
    columns = prediction.columns
    if "spans" in columns:
        lines = ["entities"]
        for span in columns["spans"]:
            text = row["text"][span["start"] : span["end"]]
            lines.append(f"  {one_line(span['label'])}  {one_line(text)}")
        return lines if columns["spans"] else [*lines, "  (none found)"]
    lines = []
    for name, value in columns.items():
        if name == "filled":
            lines.append(named("text", value))
        elif name in ("answer", "label"):
            lines.append(named(name, value or none))
        elif name == "labels":
            lines.append(named(name, ", ".join(value) or "(none)"))
        elif name == "score":
            lines.append(named(name, f"{value:.4f}"))
    if "answer" in columns or "label" in columns:
        probability = columns.get("probability", columns.get("confidence"))
        lines.append(named("probability", f"{probability:.3f}"))
    several = len(prediction.n_best) > 1
    for number, best in enumerate(prediction.n_best, 1):
        lines.append(f"n best of [MASK] {number}" if several else "n best")
        shown = best[:num_results]
        lines += [f"  {share:.3f}  {one_line(text or none)}" for share, text in shown]
    return lines


def named(name: str, value: str) -> str:
    return f"{name:<13}{one_line(value)}"


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    check_weights(args.init_checkpoint)
    if args.input is not None:
        check_files(args.input, args.output, args.embed)
    model = open_model(args)
    if args.input is not None:
        predict_file(model, args)
    else:
        answer(model, args)
    return 0


if __name__ == "__main__":
    run_main(main)
