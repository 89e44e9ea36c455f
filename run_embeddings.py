#!/usr/bin/env python3
"""Trains and evaluates sentence embeddings on pairs of texts.

    python3 run_embeddings.py --train-file pairs.jsonl --eval-file held_out.jsonl \\
        --text-column question --pair-column answer \\
        --do-train --do-eval --init-checkpoint MODEL_FOLDER --output-dir results

Checkpoints and scores.json go to <output-dir>/<model>/embedding; inference.py --embed uses them.
Under torchrun it runs on several GPUs.
"""

from bert_recipe.utils.errors import handle_uncaught_errors, run_main

if __name__ == "__main__":
    handle_uncaught_errors()  # also of the imports below

from bert_recipe.config.arguments import check_weights, make_run_config, parse_fine_tuning
from bert_recipe.tasks.embeddings.options import (
    MARGIN_MSE,
    EmbeddingOptions,
    EmbeddingTaskOptions,
    PairFileOptions,
)
from bert_recipe.tasks.own_files import DEFAULTS, check_own_files
from bert_recipe.tasks.reading import NumberReadingOptions
from bert_recipe.tasks.task import TaskOptions
from bert_recipe.utils.command_line import ArgumentParser, Arguments, flags_of, from_flags
from bert_recipe.utils.text_files import kind_of

# Functions import what needs torch, so that --help and errors of the command line do not wait for
# it.


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    parser = ArgumentParser(description=__doc__)
    groups = {
        "files: .csv, .tsv, .jsonl or .parquet, also compressed": flags_of(PairFileOptions),
        "reading files": flags_of(NumberReadingOptions),
        "embeddings": flags_of(EmbeddingOptions),
    }
    unused = ("do_predict", "label_smoothing")
    args = parse_fine_tuning(parser, argv, groups, unused, **DEFAULTS)
    check_own_files(args, parser)
    check_form(args, parser)
    check_scores(args, parser)
    return args


def check_form(args: Arguments, parser: ArgumentParser) -> None:
    """Exits with an error unless tables have the flags of both columns, and files of texts none."""
    files = [file for file in (args.train_file, args.eval_file) if file is not None]
    are_texts = all(kind_of(str(file))[0] == ".txt" or file.suffix == ".json" for file in files)
    columns = [args.text_column, args.pair_column]
    if are_texts:
        is_valid = all(column is None for column in columns)
    else:
        is_valid = all(column is not None for column in columns)
    if not is_valid:
        parser.error(
            "embeddings need --text-column and --pair-column, or .txt or SQuAD's .json files "
            "without columns"
        )


def check_scores(args: Arguments, parser: ArgumentParser) -> None:
    """Exits with an error unless the loss and the other flags go with the columns of scores."""
    scores = args.label_column or []
    loss = args.embedding_loss
    if loss is not None and bool(scores) == (loss == "contrastive"):
        parser.error(
            f"--embedding-loss {loss} goes {'without' if scores else 'together with'} "
            "--label-column"
        )
    if loss == MARGIN_MSE:
        check_teacher_scores(scores, args.negative_columns or [], parser)
        return
    if len(scores) > 1:
        parser.error(
            f"several names after --label-column are a teacher's scores: add --embedding-loss "
            f"{MARGIN_MSE}, or give one name"
        )
    given = {"--negative-columns": args.negative_columns, "--corpus-file": args.corpus_file}
    for flag, value in given.items():
        if scores and value is not None:
            parser.error(
                f"{flag} cannot be combined with --label-column, whose scores are of "
                f"pairs: leave one of them out, or give --embedding-loss {MARGIN_MSE}"
            )


def check_teacher_scores(scores: list[str], negatives: list[str], parser: ArgumentParser) -> None:
    """Exits with an error unless there is a column of scores for the second text and for each
    negative, or a single one of the margin if there is one negative.
    """
    if not negatives:
        parser.error(f"--embedding-loss {MARGIN_MSE} needs --negative-columns")
    is_margin = len(scores) == 1 and len(negatives) == 1
    if len(scores) != 1 + len(negatives) and not is_margin:
        parser.error(
            f"--embedding-loss {MARGIN_MSE} needs {1 + len(negatives)} columns in --label-column, "
            f"with the scores of the second text and of each negative, not {len(scores)} (or the "
            f"margin, with one negative)"
        )


def task_options(args: Arguments) -> TaskOptions:
    return from_flags(EmbeddingTaskOptions, args)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    check_weights(args.from_pretrained_params)
    config, options = make_run_config(args), task_options(args)
    from bert_recipe.training.workflow import run_task

    return run_task(config, options, "sentence embeddings")


if __name__ == "__main__":
    run_main(main)
