#!/usr/bin/env python3
"""Fine-tunes BERT on SQuAD v1.1 or v2.0, predicts answers, and scores them.

    python3 run_squad.py --do-train --do-eval --train-file data/download/squad/v1.1/train-v1.1.json \\
        --predict-file data/download/squad/v1.1/dev-v1.1.json --bert-model bert-base-uncased \\
        --init-checkpoint results/bert-base-uncased/phase2 --output-dir results --epochs 2 --learning-rate 3e-5

Checkpoints, predictions.json and scores.json go to <output-dir>/<bert-model>/squad. Under torchrun it runs on several
GPUs.
"""

from arguments import MAX_LENGTH
from device import Runtime
from fine_tuning import TrainingSet, fine_tuning_main, make_parser, parse_fine_tuning
from run_setup import TrainingPlan
from tasks.squad import SquadTask
from utils.command_line import Arguments, BooleanFlag, bounded_int, finite_float, positive_int
from utils.errors import run_main

PREDICTION_FLAGS = ("predict_file", "n_best_size", "max_answer_length", "null_score_diff_threshold")


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    parser, _ = make_parser(
        __doc__.splitlines()[0], learning_rate=5e-5, max_seq_length=SquadTask.max_seq_length, predict_batch_size=8
    )
    task, length = SquadTask, bounded_int(1, MAX_LENGTH)
    group = parser.add_argument_group("features and decoding")
    group.add_argument(
        "--doc-stride", type=positive_int, default=task.doc_stride, help="tokens between the starts of windows"
    )
    group.add_argument(
        "--max-query-length", type=length, default=task.max_query_length, help="maximum tokens of a question"
    )
    group.add_argument(
        "--n-best-size", type=length, default=task.n_best_size, help="candidate starts, ends and answers per question"
    )
    group.add_argument(
        "--max-answer-length", type=positive_int, default=task.max_answer_length, help="maximum tokens of an answer"
    )
    group.add_argument("--version-2-with-negative", action=BooleanFlag, help="SQuAD v2.0: questions may have no answer")
    group.add_argument(
        "--null-score-diff-threshold",
        type=finite_float,
        default=task.null_score_diff_threshold,
        help="v2.0: predict no answer if its score exceeds the best answer's by more than this",
    )
    args = parse_fine_tuning(parser, argv)
    predicts = args.do_predict or args.do_eval
    if args.do_train and args.train_file is None:
        parser.error("--do-train needs --train-file")
    if predicts and args.predict_file is None:
        parser.error("--do-predict and --do-eval need --predict-file")
    effects = [
        (PREDICTION_FLAGS, predicts, "--do-predict or --do-eval"),
        (("null_score_diff_threshold",), args.version_2_with_negative, "--version-2-with-negative"),
    ]
    parser.refuse_without_effect(args, effects)
    return args


def make_task(args: Arguments) -> SquadTask:
    return SquadTask(
        args.max_seq_length,
        args.doc_stride,
        args.max_query_length,
        args.version_2_with_negative,
        args.n_best_size,
        args.max_answer_length,
        args.null_score_diff_threshold,
        args.train_file,
        args.predict_file,
        scores=args.do_eval,
    )


def plan_training(args: Arguments, runtime: Runtime) -> TrainingPlan:
    return TrainingSet.open(args, make_task(args), runtime).plan(args, runtime)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    return fine_tuning_main(args, make_task(args), "SQuAD")


if __name__ == "__main__":
    run_main(main)
