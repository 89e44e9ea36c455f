#!/usr/bin/env python3
"""Fine-tunes BERT on SQuAD v1.1 or v2.0, predicts answers, and evaluates them.

    python3 run_squad.py --do-train --do-eval --train-file data/download/squad/v1.1/train-v1.1.json \\
        --predict-file data/download/squad/v1.1/dev-v1.1.json --bert-model bert-base-uncased \\
        --init-checkpoint results/bert-base-uncased/phase2 --output-dir results --epochs 2 --learning-rate 3e-5

Checkpoints, predictions.json and scores.json go to <output-dir>/<bert-model>/squad. Under torchrun it runs on several
GPUs.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from arguments import check_weights, make_run_config, parse_fine_tuning, sequence_length
from tasks.squad_file import SquadOptions
from utils.command_line import ArgumentParser, Arguments, Flag, finite_float, optional_path, positive_int
from utils.errors import run_main

if TYPE_CHECKING:  # functions import what needs torch, so that --help and errors of the command line do not wait for it
    from parallel.runtime import Runtime
    from run_setup import TrainingPlan
    from tasks.squad import SquadTask

PREDICT = ("--do-eval or --do-predict",)

# fmt: off
FLAGS = (
    Flag("--predict-file --eval-file", optional_path, None, "file to predict, and with --do-eval to score", PREDICT),
    Flag("--doc-stride", positive_int, SquadOptions.doc_stride, "tokens between the starts of windows"),
    Flag("--max-query-length", sequence_length, SquadOptions.max_query_length, "maximum tokens of a question"),
    Flag("--n-best-size", sequence_length, SquadOptions.n_best_size, "candidate starts, ends and answers per question",
         PREDICT),
    Flag("--max-answer-length", positive_int, SquadOptions.max_answer_length, "maximum tokens of an answer", PREDICT),
    Flag("--version-2-with-negative", bool, False, "SQuAD v2.0: questions may have no answer"),
    Flag("--null-score-diff-threshold", finite_float, SquadOptions.null_score_diff_threshold,
         "v2.0: predict no answer if its score exceeds the best answer's by more than this",
         (*PREDICT, "--version-2-with-negative")),
)
# fmt: on


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    defaults = {"learning_rate": 5e-5, "max_seq_length": SquadOptions.max_seq_length, "predict_batch_size": 8}
    args = parse_fine_tuning(parser, argv, {"features and decoding": FLAGS}, **defaults)
    if args.do_train and args.train_file is None:
        parser.error("--do-train needs --train-file")
    if (args.do_predict or args.do_eval) and args.predict_file is None:
        parser.error("--do-predict and --do-eval need --predict-file")
    return args


def make_task(args: Arguments) -> SquadTask:
    from tasks.squad import SquadTask

    options = {field.name: vars(args)[field.name] for field in dataclasses.fields(SquadOptions)}
    return SquadTask(**options, train_file=args.train_file, predict_file=args.predict_file, scores=args.do_eval)


def plan_training(args: Arguments, runtime: Runtime) -> TrainingPlan:
    from fine_tuning import TrainingSet

    return TrainingSet.open(args, make_task(args), runtime).plan(args, runtime)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    check_weights(args.from_pretrained_params)
    task = make_task(args)
    if args.estimate_memory is not None:
        from diagnostics.estimates import print_estimate

        return print_estimate(task.head, make_run_config(args))
    from fine_tuning import fine_tuning_main

    return fine_tuning_main(args, task, "SQuAD")


if __name__ == "__main__":
    run_main(main)
