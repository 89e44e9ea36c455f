#!/usr/bin/env python3
"""Fine-tunes BERT on SQuAD v1.1 or v2.0, predicts answers, and scores them.

    python3 run_squad.py --do-train --do-eval --train-file data/download/squad/v1.1/train-v1.1.json \\
        --predict-file data/download/squad/v1.1/dev-v1.1.json --bert-model bert-base-uncased \\
        --init-checkpoint results/bert-base-uncased/phase2 --output-dir results --epochs 2 --learning-rate 3e-5

Checkpoints and predictions.json go to <output-dir>/<bert-model>/squad. Under torchrun it runs on several GPUs.
"""

import math
import time
from pathlib import Path

import numpy as np
import torch

from arguments import (
    MAX_BATCH,
    MAX_LENGTH,
    TRAINING_FLAGS,
    add_global_arguments,
    add_parallel_arguments,
    add_precision_arguments,
    add_training_arguments,
    check_shared_arguments,
)
from device import Runtime
from evaluate_squad import evaluate
from evaluation import combine_ranks, log_speed, predict
from model_choice import ModelChoice, choose_model
from modeling import BertForQuestionAnswering
from parallel.base import ParallelModel
from parallel.deepspeed_config import parse_with_deepspeed
from run_config import PredictionConfig
from run_setup import (
    TrainingPlan,
    find_fine_tuned,
    fine_tune,
    load_fine_tuned,
    plan_fine_tuning,
    print_estimate,
    start_runtime,
)
from tasks.squad import SquadDataset, SquadTask
from tasks.squad_answers import RESULT_FILES, decode, write_predictions
from tasks.squad_file import read_squad
from tokenizer import BertTokenizer
from utils.command_line import (
    ArgumentParser,
    Arguments,
    BooleanFlag,
    bounded_float,
    bounded_int,
    optional_path,
    positive_int,
)
from utils.errors import UserError, run_main
from utils.progress import print_line

PHASE = "squad"
PREDICTION_FLAGS = (
    "predict_file",
    "predict_batch_size",
    "n_best_size",
    "max_answer_length",
    "null_score_diff_threshold",
)


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    data = parser.add_argument_group("data and tasks")
    data.add_argument("--do-train", action=BooleanFlag, help="fine-tune on --train-file")
    data.add_argument("--do-predict", action=BooleanFlag, help="predict answers to the questions of --predict-file")
    data.add_argument(
        "--do-eval", action=BooleanFlag, help="predict answers to the questions of --predict-file and score them"
    )
    data.add_argument("--train-file", type=optional_path, help="SQuAD JSON to train on")
    data.add_argument("--predict-file", type=optional_path, help="SQuAD JSON to predict answers for")
    data.add_argument(
        "--do-lower-case",
        action=BooleanFlag,
        default=None,
        help="lower-case and strip accents; by default if the vocabulary has no capital letters",
    )
    add_global_arguments(parser, steps_required=False)
    group = add_training_arguments(parser, "AdamW", 5e-5, 0.1)
    group.add_argument(
        "--epochs",
        "--num-train-epochs",
        type=bounded_float(0, 1e6, exclusive=True),
        default=3,
        help="passes over the training data",
    )
    group.add_argument(
        "--train-batch-size", type=bounded_int(1, MAX_BATCH), default=32, help="sequences per GPU and micro-batch"
    )
    features = parser.add_argument_group("features and decoding")
    features.add_argument(
        "--predict-batch-size", type=bounded_int(1, MAX_BATCH), default=8, help="sequences per GPU and forward pass"
    )
    features.add_argument(
        "--max-seq-length",
        type=bounded_int(1, MAX_LENGTH),
        default=384,
        help="maximum tokens of question and window together",
    )
    features.add_argument("--doc-stride", type=positive_int, default=128, help="tokens between the starts of windows")
    features.add_argument(
        "--max-query-length", type=bounded_int(1, MAX_LENGTH), default=64, help="maximum tokens of a question"
    )
    features.add_argument(
        "--n-best-size",
        type=bounded_int(1, MAX_LENGTH),
        default=20,
        help="candidate starts, ends and answers per question",
    )
    features.add_argument("--max-answer-length", type=positive_int, default=30, help="maximum tokens of an answer")
    features.add_argument(
        "--version-2-with-negative", action=BooleanFlag, help="SQuAD v2.0: questions may have no answer"
    )
    features.add_argument(
        "--null-score-diff-threshold",
        type=float,
        default=0.0,
        help="v2.0: predict no answer if its score exceeds the best answer's by more than this",
    )
    add_parallel_arguments(parser)
    add_precision_arguments(parser)
    args = parse_with_deepspeed(parser, argv)
    check_tasks(args, parser)
    return args


def check_tasks(args: Arguments, parser: ArgumentParser) -> None:
    if not (args.do_train or args.do_predict or args.do_eval):
        parser.error("nothing to do: give --do-train, --do-predict or --do-eval")
    if args.do_train and args.train_file is None:
        parser.error("--do-train needs --train-file")
    if (args.do_predict or args.do_eval) and args.predict_file is None:
        parser.error("--do-predict and --do-eval need --predict-file")
    if not args.do_train and args.from_pretrained_params is None and args.from_checkpoint is None:
        parser.error("without --do-train there has to be a fine-tuned model: give --init-checkpoint")
    effects = [
        (TRAINING_FLAGS, args.do_train, "--do-train"),
        (PREDICTION_FLAGS, args.do_predict or args.do_eval, "--do-predict or --do-eval"),
        (("null_score_diff_threshold",), args.version_2_with_negative, "--version-2-with-negative"),
    ]
    parser.refuse_without_effect(args, effects)
    check_shared_arguments(args, parser)


def open_dataset(path: Path, tokenizer: BertTokenizer, training: bool, args: Arguments) -> SquadDataset:
    return SquadDataset(
        read_squad(path),
        tokenizer,
        max_seq_length=args.max_seq_length,
        doc_stride=args.doc_stride,
        max_query_length=args.max_query_length,
        training=training,
        version_2_with_negative=args.version_2_with_negative,
    )


def answer(args: Arguments, folder: Path, parallel: ParallelModel, dataset: SquadDataset, runtime: Runtime) -> None:
    """Answers all questions. The main process writes the answers and, for --do-eval, scores them."""
    writes = runtime.distributed.is_main and not args.benchmark
    if writes:  # before the work, so that a path that cannot be made is known early
        folder.mkdir(parents=True, exist_ok=True)
    config = PredictionConfig(
        args.predict_batch_size, args.seed, args.benchmark, args.benchmark_steps, args.benchmark_warmup_steps
    )
    logits_2T = np.zeros((2, len(dataset.input_ids)), np.float32)

    def collect(indices: np.ndarray, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        tokens = dataset.token_indices(indices)
        logits_2T[:, tokens] = torch.stack(output)[:, : len(tokens)].float().cpu().numpy()

    runtime.reporter.log("PARAMETER", {"predict_start": True})
    started = time.perf_counter()
    figures = predict(parallel, dataset, config, runtime, collect)
    combine_ranks(logits_2T, runtime)
    figures["e2e_inference_time"] = time.perf_counter() - started
    log_speed(figures, config, runtime)
    if not writes:
        return
    predictions = decode(
        dataset,
        *logits_2T,
        n_best_size=args.n_best_size,
        max_answer_length=args.max_answer_length,
        version_2_with_negative=args.version_2_with_negative,
        null_score_diff_threshold=args.null_score_diff_threshold,
    )
    path = write_predictions(folder, predictions)
    print_line(f"answers to {len(predictions.answers)} questions in {path}")
    if args.do_eval:
        runtime.reporter.log("PARAMETER", {"eval_start": True})
        # The threshold on the null odds was applied when the answers were chosen.
        scores = evaluate(dataset.squad, predictions.answers, predictions.null_odds, na_prob_thresh=math.inf)
        runtime.reporter.log(
            (), scores | {"F1": scores["f1"]}, "  ".join(f"{name} {value:.6g}" for name, value in scores.items())
        )


def make_tokenizer(args: Arguments, choice: ModelChoice) -> BertTokenizer:
    bert_config = choice.config
    if args.max_seq_length > bert_config.max_position_embeddings:
        raise UserError(
            f"--max-seq-length {args.max_seq_length} is above the config's max_position_embeddings "
            f"{bert_config.max_position_embeddings}: use shorter windows or another config"
        )
    do_lower_case = choice.do_lower_case if args.do_lower_case is None else args.do_lower_case
    return BertTokenizer(choice.vocab_file, do_lower_case)


def plan_training(args: Arguments, runtime: Runtime) -> TrainingPlan:
    choice = choose_model(args)
    tokenizer = make_tokenizer(args, choice)
    dataset = open_dataset(args.train_file, tokenizer, True, args)
    runtime.reporter.log("PARAMETER", {"training_samples": len(dataset.squad.questions)})
    task = SquadTask(args.max_seq_length)
    return plan_fine_tuning(
        args, choice, BertForQuestionAnswering, task, dataset, tokenizer, PHASE, runtime, RESULT_FILES
    )


def run_squad(args: Arguments, runtime: Runtime) -> int:
    choice = choose_model(args)
    tokenizer = make_tokenizer(args, choice)
    plan = plan_training(args, runtime) if args.do_train else None
    predicts = args.do_predict or args.do_eval
    predict_data = open_dataset(args.predict_file, tokenizer, False, args) if predicts else None
    if plan is not None:
        parallel, exit_code, is_complete = fine_tune(args, plan, runtime)
        if not is_complete:
            return exit_code
    else:
        folder = find_fine_tuned(args, runtime)
        parallel = load_fine_tuned(BertForQuestionAnswering, choice.config, folder, ("qa_outputs.",), runtime)
    if predict_data is not None:
        parallel.prepare_for_inference(runtime.precision.dtype)
        answer(args, args.output_dir / choice.name / PHASE, parallel, predict_data, runtime)
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    if args.estimate_memory is not None:
        print_estimate(BertForQuestionAnswering, choose_model(args).config, args, args.train_batch_size)
        return 0
    with start_runtime(args, "SQuAD") as runtime:
        return run_squad(args, runtime)


if __name__ == "__main__":
    run_main(main)
