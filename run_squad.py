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
import torch.distributed as dist

import arguments
from evaluate_squad import evaluate
from loss import span_sum
from lr_scheduler import DECAYS
from modeling import BertConfig, BertForQuestionAnswering
from optimizer import OPTIMIZERS
from run_setup import (
    build_trainer,
    check_vocabulary,
    find_vocab_file,
    has_no_capitals,
    load_config,
    make_settings,
    runtime_for,
)
from squad_dataset import SquadDataset, read_squad
from squad_utils import decode, write_predictions
from token_stream import Limits, StepLoader
from tokenizer import BertTokenizer
from trainer import Provenance, Runtime, Trainer, to_device
from utils import checkpoint as checkpoints
from utils import command_line
from utils.errors import UserError, run_main
from utils.progress import print_line, progress_bar

PHASE = "squad"


def parse_arguments(argv: list[str] | None = None) -> command_line.Arguments:
    parser = command_line.ArgumentParser(description=__doc__.splitlines()[0])
    data = parser.add_argument_group("data and tasks")
    data.add_argument("--do-train", action=command_line.BooleanFlag, help="fine-tune on --train-file")
    data.add_argument("--do-predict", action=command_line.BooleanFlag, help="answer the questions of --predict-file")
    data.add_argument("--do-eval", action=command_line.BooleanFlag, help="answer them and score the answers")
    data.add_argument("--train-file", type=command_line.optional_path, help="SQuAD JSON to learn from")
    data.add_argument("--predict-file", type=command_line.optional_path, help="SQuAD JSON to answer")
    data.add_argument(
        "--init-checkpoint",
        dest="from_pretrained_params",
        type=command_line.optional_path,
        help="the same as --from-pretrained-params: a checkpoint or Hugging Face model folder, or a folder of steps",
    )
    data.add_argument(
        "--do-lower-case",
        action=command_line.BooleanFlag,
        default=None,
        help="lower-case and strip accents; by default as the vocabulary is",
    )
    arguments.add_global_arguments(parser, steps_required=False)
    group = arguments.add_training_arguments(parser, OPTIMIZERS, DECAYS, "AdamW", 5e-5, 0.1)
    group.add_argument("--epochs", type=command_line.positive_float, default=3, help="times through the training data")
    group.add_argument(
        "--train-batch-size", type=command_line.positive_int, default=32, help="sequences a GPU and micro-batch"
    )
    features = parser.add_argument_group("features and decoding")
    features.add_argument(
        "--predict-batch-size", type=command_line.positive_int, default=8, help="sequences a GPU at a time"
    )
    features.add_argument("--max-seq-length", type=command_line.positive_int, default=384, help="tokens of a window")
    features.add_argument(
        "--doc-stride", type=command_line.positive_int, default=128, help="tokens between windows' starts"
    )
    features.add_argument(
        "--max-query-length", type=command_line.positive_int, default=64, help="questions are cut to this"
    )
    features.add_argument(
        "--n-best-size", type=command_line.positive_int, default=20, help="starts, ends and answers kept"
    )
    features.add_argument("--max-answer-length", type=command_line.positive_int, default=30, help="tokens of an answer")
    features.add_argument(
        "--version-2-with-negative", action=command_line.BooleanFlag, help="SQuAD v2.0: questions may have no answer"
    )
    features.add_argument(
        "--null-score-diff-threshold",
        type=float,
        default=0.0,
        help="v2.0: no answer where its score exceeds the best answer's by more than this",
    )
    arguments.add_precision_arguments(parser)
    args = parser.parse_args(argv)
    check_tasks(args, parser)
    return args


def check_tasks(args: command_line.Arguments, parser: command_line.ArgumentParser) -> None:
    if not (args.do_train or args.do_predict or args.do_eval):
        parser.error("nothing to do: give --do-train, --do-predict or --do-eval")
    if args.do_train and args.train_file is None:
        parser.error("--do-train needs --train-file")
    if (args.do_predict or args.do_eval) and args.predict_file is None:
        parser.error("--do-predict and --do-eval need --predict-file")
    if not args.do_train and args.from_pretrained_params is None and args.from_checkpoint is None:
        parser.error("without --do-train there has to be a fine-tuned model: give --init-checkpoint")


class QuestionAnswering:
    """The span task of BERT's fine-tuning (Devlin et al., 2018, section 4.2); see trainer.Task."""

    def __init__(self, max_seq_length: int):
        self.max_seq_length = max_seq_length

    def sums(self, model, micro_batch):
        targets = {name: micro_batch[name] for name in ("start_positions", "end_positions")}
        inputs = {name: value for name, value in micro_batch.items() if name not in targets}
        # The longest that there can be stands for the longest there is, so that no step reads lengths off the device.
        output = model(**inputs, max_seqlen=self.max_seq_length)
        loss = span_sum(*output, *targets.values(), micro_batch["cu_seqlens"], self.max_seq_length)
        return {"span_loss": loss}

    def loss(self, sums, num_sequences, num_targets):
        return sums["span_loss"] / num_sequences

    def metrics(self, sums, num_sequences, num_targets):
        return {"loss": sums["span_loss"] / num_sequences}


def open_dataset(path: Path, tokenizer: BertTokenizer, training: bool, args: command_line.Arguments) -> SquadDataset:
    return SquadDataset(
        read_squad(path),
        tokenizer,
        max_seq_length=args.max_seq_length,
        doc_stride=args.doc_stride,
        max_query_length=args.max_query_length,
        training=training,
        version_2_with_negative=args.version_2_with_negative,
    )


def open_tokenizer(args: command_line.Arguments, bert_config: BertConfig) -> BertTokenizer:
    """The tokenizer that flags and vocabulary name; a vocabulary without capital letters is an uncased one."""
    vocab_file = find_vocab_file(args)
    check_vocabulary(vocab_file, bert_config)
    do_lower_case = args.do_lower_case
    if do_lower_case is None:
        do_lower_case = has_no_capitals(vocab_file)
    return BertTokenizer(vocab_file, do_lower_case)


def train(
    args: command_line.Arguments,
    model: BertForQuestionAnswering,
    dataset: SquadDataset,
    tokenizer: BertTokenizer,
    runtime: Runtime,
) -> tuple[Trainer, int]:
    """Fine-tunes `model`; the trainer at the end and the exit code."""
    global_batch_size = args.train_batch_size * args.gradient_merge_steps * runtime.processes.world_size
    max_steps = math.ceil(args.epochs * len(dataset) / global_batch_size)
    if args.max_steps > 0:
        max_steps = min(max_steps, args.max_steps)
    run = build_trainer(
        args,
        model,
        QuestionAnswering(args.max_seq_length),
        make_settings(args, PHASE, max_steps),
        Provenance(PHASE, args.as_dict(), len(dataset), Path(tokenizer.vocab_file), tokenizer.do_lower_case),
        runtime,
    )
    loader = StepLoader(
        dataset,
        Limits.for_batch(args.train_batch_size, args.max_seq_length, 0, fixed=args.compile != "none"),
        global_batch_size=global_batch_size,
        seed=args.seed,
        first_position=run.samples_consumed,
        rank=runtime.processes.rank,
        world_size=runtime.processes.world_size,
        num_workers=args.num_workers,
        pin_memory=runtime.device.type == "cuda",
    )
    return run, run.train(loader)


def load_fine_tuned(args: command_line.Arguments, model: BertForQuestionAnswering, runtime: Runtime) -> None:
    """The weights to predict with, which have to include the span head."""
    tell = print_line if runtime.processes.is_main else (lambda _text: None)
    folder = None
    if args.from_checkpoint is not None:
        folder = checkpoints.find_checkpoint(args.from_checkpoint, args.last_step_of_checkpoint, tell)
    if folder is None:
        folder = checkpoints.find_model_folder(args.from_pretrained_params or args.from_checkpoint, tell)
    tensors = checkpoints.read_tensors(folder / checkpoints.MODEL_FILE)
    if "qa_outputs.weight" not in tensors:
        raise UserError(f"{folder} has no qa_outputs.weight: it was not fine-tuned on SQuAD, so add --do-train")
    checkpoints.load_weights(model, tensors, folder, tell)
    model.to(runtime.device, runtime.precision.dtype if runtime.precision.pure else torch.float32)


def prediction_batches(dataset: SquadDataset, args: command_line.Arguments, runtime: Runtime) -> list[np.ndarray]:
    """This rank's batches of features of like length, in random order, so that the time left can be told. A
    benchmark takes an even selection of them."""
    by_length = np.argsort(-dataset.lengths, kind="stable")
    batches = [
        by_length[first : first + args.predict_batch_size]
        for first in range(0, len(by_length), args.predict_batch_size)
    ]
    order = np.random.default_rng(args.seed).permutation(len(batches))
    if args.benchmark:
        order = order[: (args.benchmark_warmup_steps + args.benchmark_steps) * runtime.processes.world_size]
    return [batches[place] for place in order[runtime.processes.rank :: runtime.processes.world_size]]


@torch.inference_mode()
def predict_logits(
    model: BertForQuestionAnswering, dataset: SquadDataset, args: command_line.Arguments, runtime: Runtime
) -> tuple[np.ndarray, dict[str, float]]:
    """Start and end logits [2, T] of all features' tokens, on every rank, and the speed of inference."""
    processes, device = runtime.processes, runtime.device
    model.eval()
    batches = prediction_batches(dataset, args, runtime)
    logits_2T = np.zeros((2, len(dataset.input_ids)), np.float32)
    seconds: list[float] = []
    # What --compile compiled wants streams of one fixed size; these are of any size, so the model runs as it stands.
    eager = torch.compiler.set_stance("force_eager")
    with eager, progress_bar(len(batches), "prediction", "batch", enabled=processes.is_main) as bar:
        for features in batches:
            started = time.perf_counter()
            micro_batch = {name: torch.from_numpy(array) for name, array in dataset.stream(features).items()}
            with runtime.precision.context(device):
                output = model(**to_device(micro_batch, device), max_seqlen=int(dataset.lengths[features].max()))
            logits_2T[:, dataset.token_places(features)] = torch.stack(output).float().cpu().numpy()
            seconds.append(time.perf_counter() - started)
            bar.update()
    figures = inference_figures(list(map(len, batches)), seconds, args, runtime)
    if processes.world_size > 1:  # each rank has filled in its own tokens, and the rest is zero
        dist.all_reduce(torch.from_numpy(logits_2T), group=processes.control)
    if not np.isfinite(logits_2T).all():
        raise UserError("the model's logits are not finite: its weights are damaged, take another checkpoint")
    return logits_2T, figures


def inference_figures(
    sizes: list[int], seconds: list[float], args: command_line.Arguments, runtime: Runtime
) -> dict[str, float]:
    """Sequences a second over all ranks, and the latency of this rank's batches, the first ones left out."""
    warmup = args.benchmark_warmup_steps if args.benchmark else 1
    measured = slice(min(warmup, max(len(seconds) - 1, 0)), None)
    rate = sum(sizes[measured]) / max(sum(seconds[measured]), 1e-9)
    (total_rate,) = runtime.processes.all_sum([rate])
    milliseconds = 1000 * np.array(seconds[measured] or [0.0])
    return {
        "inference_sequences_per_second": total_rate,
        "latency_ms_median": float(np.median(milliseconds)),
        "latency_ms_p90": float(np.percentile(milliseconds, 90)),
        "latency_ms_p99": float(np.percentile(milliseconds, 99)),
    }


def predict(
    args: command_line.Arguments, model: BertForQuestionAnswering, dataset: SquadDataset, runtime: Runtime
) -> None:
    """Answers every question; the main process writes the answers and, for --do-eval, scores them."""
    folder = args.output_dir / args.bert_model / PHASE
    writes = runtime.processes.is_main and not args.benchmark
    if writes:  # now, so that a path that cannot be made is known before the work
        folder.mkdir(parents=True, exist_ok=True)
    logits_2T, figures = predict_logits(model, dataset, args, runtime)
    text = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
    runtime.reporter.log((), figures, f"prediction of {args.predict_batch_size} sequences at a time: {text}")
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
        # The answers are taken as they are: the threshold on the odds was applied when they were chosen.
        scores = evaluate(dataset.squad, predictions.answers, predictions.null_odds, na_prob_thresh=math.inf)
        runtime.reporter.log((), scores, "  ".join(f"{name} {value:.6g}" for name, value in scores.items()))


def run_tasks(args: command_line.Arguments, runtime: Runtime) -> int:
    bert_config = load_config(args)
    if args.max_seq_length > bert_config.max_position_embeddings:
        raise UserError(
            f"--max-seq-length {args.max_seq_length} is above the config's max_position_embeddings "
            f"{bert_config.max_position_embeddings}: use shorter windows or another config"
        )
    tokenizer = open_tokenizer(args, bert_config)
    train_data = open_dataset(args.train_file, tokenizer, True, args) if args.do_train else None
    predicts = args.do_predict or args.do_eval
    predict_data = open_dataset(args.predict_file, tokenizer, False, args) if predicts else None
    torch.manual_seed(args.seed)
    model = BertForQuestionAnswering(bert_config)
    if train_data is not None:
        run, exit_code = train(args, model, train_data, tokenizer, runtime)
        if run.step < run.settings.max_steps and not args.benchmark:
            return exit_code  # stopped on the way
    else:
        load_fine_tuned(args, model, runtime)
    if predict_data is not None:
        model.prepare_for_inference(runtime.precision.dtype)
        predict(args, model, predict_data, runtime)
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    with runtime_for(args, "SQuAD") as runtime:
        return run_tasks(args, runtime)


if __name__ == "__main__":
    run_main(main)
