#!/usr/bin/env python3
"""Pre-trains BERT on HDF5 shards: masked language modelling and next-sentence prediction, with LAMB, in two phases.

    python3 run_pretraining.py --input-dir data/hdf5/seq_128_pred_20/training --output-dir results \\
        --bert-model bert-base-uncased --max-steps 7038 --phase1 --max-seq-length 128 --max-predictions-per-seq 20 \\
        --from-checkpoint results/bert-base-uncased/phase1 --last-step-of-checkpoint auto

The same command, rerun after every stop, trains a phase to its end. Under torchrun it runs on several GPUs.
"""

from functools import partial
from pathlib import Path

import torch

import arguments
from loss import pretraining_sums
from lr_scheduler import DECAYS
from modeling import BertConfig, BertForPreTraining
from optimizer import OPTIMIZERS
from pretraining_dataset import PretrainingDataset
from run_setup import (
    build_trainer,
    check_vocabulary,
    find_vocab_file,
    has_no_capitals,
    load_config,
    make_settings,
    runtime_for,
)
from token_stream import Limits, StepLoader
from trainer import Provenance, Runtime, evaluate
from utils import command_line
from utils.checkpoint import sha256_of
from utils.errors import UserError, run_main
from utils.progress import print_line


def parse_arguments(argv: list[str] | None = None) -> command_line.Arguments:
    parser = command_line.ArgumentParser(description=__doc__.splitlines()[0])
    data = parser.add_argument_group("data")
    data.add_argument("--input-dir", type=Path, required=True, help="folder of HDF5 shards")
    data.add_argument("--eval-dir", type=command_line.optional_path, help="folder of held-out shards")
    data.add_argument(
        "--eval-steps",
        type=command_line.non_negative_int,
        default=0,
        help="updates between evaluations; 0: at the end only",
    )
    arguments.add_global_arguments(parser, steps_required=True)
    parser.add_argument(
        "--from-phase1-final-params",
        type=command_line.optional_path,
        help="phase 1's last checkpoint: weights for the first step of phase 2; ignored once phase 2 has a checkpoint",
    )
    group = arguments.add_training_arguments(parser, OPTIMIZERS, DECAYS, "Lamb", 1e-4, 0.01)
    group.add_argument(
        "--batch-size", type=command_line.positive_int, default=32, help="sequences a GPU and micro-batch"
    )
    group.add_argument("--max-seq-length", type=command_line.positive_int, default=512, help="of the shards")
    group.add_argument("--max-predictions-per-seq", type=command_line.positive_int, default=80, help="of the shards")
    phase = group.add_mutually_exclusive_group()
    phase.add_argument("--phase1", action="store_true", help="names the checkpoints' folder; the default")
    phase.add_argument("--phase2", action="store_true", help="names the checkpoints' folder")
    arguments.add_precision_arguments(parser)
    return parser.parse_args(argv)


class Pretraining:
    """The two tasks of BERT's pre-training (Devlin et al., 2018, section 3.1); see trainer.Task."""

    def __init__(self, next_sentence: bool, max_seq_length: int):
        self.next_sentence = next_sentence
        self.max_seq_length = max_seq_length

    def sums(self, model, micro_batch):
        inputs = {name: value for name, value in micro_batch.items() if not name.endswith("labels")}
        # The longest that there can be stands for the longest there is, so that no step reads lengths off the device.
        output = model(**inputs, max_seqlen=self.max_seq_length)
        return pretraining_sums(*output, micro_batch["mlm_labels"], micro_batch["nsp_labels"])._asdict()

    def loss(self, sums, num_sequences, num_targets):
        return sums["mlm_loss"] / num_targets + sums["nsp_loss"] / num_sequences

    def metrics(self, sums, num_sequences, num_targets):
        mlm_loss, nsp_loss = sums["mlm_loss"] / num_targets, sums["nsp_loss"] / num_sequences
        metrics = {"loss": mlm_loss + nsp_loss, "mlm_loss": mlm_loss, "mlm_accuracy": sums["mlm_correct"] / num_targets}
        if self.next_sentence:
            metrics |= {"nsp_loss": nsp_loss, "nsp_accuracy": sums["nsp_correct"] / num_sequences}
        return metrics


def check_data(
    dataset: PretrainingDataset, vocab_file: Path, bert_config: BertConfig, args: command_line.Arguments
) -> None:
    """Everything that shards, vocabulary, config and flags must agree on."""
    for what, flag, wanted, found in [
        ("sequences of", "--max-seq-length", args.max_seq_length, dataset.sequence_length),
        ("predictions a sequence of", "--max-predictions-per-seq", args.max_predictions_per_seq,
         dataset.predictions_per_sequence),
    ]:  # fmt: skip
        if wanted != found:
            raise UserError(f"{dataset.folder}: the shards hold {what} {found}, and {flag} is {wanted}: make them fit")
    if dataset.sequence_length > bert_config.max_position_embeddings:
        raise UserError(
            f"the shards in {dataset.folder} hold sequences of {dataset.sequence_length} tokens, and the config has "
            f"max_position_embeddings {bert_config.max_position_embeddings}: use shorter sequences or another config"
        )
    made_with = dataset.attributes.get("vocab_sha256")
    if made_with is not None and made_with != sha256_of(vocab_file):
        raise UserError(
            f"the shards in {dataset.folder} were made with another vocabulary than {vocab_file}: "
            f"give --vocab-file the one that they were made with, or make them again"
        )


def open_dataset(
    folder: Path, vocab_file: Path, bert_config: BertConfig, args: command_line.Arguments
) -> PretrainingDataset:
    dataset = PretrainingDataset(folder, bert_config.vocab_size)
    check_data(dataset, vocab_file, bert_config, args)
    if dataset.bytes_in_memory > 2**30:
        print_line(
            f"note: the shards in {folder} are compressed or chunked: reading them takes about "
            f"{dataset.bytes_in_memory / 2**30:.1f} GiB of memory a process"
        )
    return dataset


def pretrain(args: command_line.Arguments, runtime: Runtime) -> int:
    bert_config, vocab_file = load_config(args), find_vocab_file(args)
    check_vocabulary(vocab_file, bert_config)
    dataset = open_dataset(args.input_dir, vocab_file, bert_config, args)
    eval_dataset = open_dataset(args.eval_dir, vocab_file, bert_config, args) if args.eval_dir else None
    world_size = runtime.processes.world_size
    if eval_dataset is not None and len(eval_dataset) < world_size:
        raise UserError(f"{args.eval_dir} holds fewer samples than there are processes: make a larger held-out set")

    phase = "phase2" if args.phase2 else "phase1"
    if args.from_phase1_final_params is not None and phase == "phase1":
        raise UserError("--from-phase1-final-params is for --phase2: use --from-pretrained-params in phase 1")
    if args.from_phase1_final_params is not None and args.from_pretrained_params is not None:
        raise UserError("--from-phase1-final-params and --from-pretrained-params were both given: give one of them")
    fixed = args.compile != "none"
    limits = Limits.for_batch(args.batch_size, args.max_seq_length, args.max_predictions_per_seq, fixed)
    task = Pretraining(dataset.has_next_sentence, args.max_seq_length)
    torch.manual_seed(args.seed)
    run = build_trainer(
        args,
        BertForPreTraining(bert_config),
        task,
        make_settings(args, phase, args.max_steps, (args.eval_steps or args.max_steps) if eval_dataset else 0),
        Provenance(
            phase=phase,
            arguments=args.as_dict(),
            num_samples=len(dataset),
            vocab_file=vocab_file,
            do_lower_case=bool(dataset.attributes.get("do_lower_case", has_no_capitals(vocab_file))),
        ),
        runtime,
        partial(evaluate, task=task, dataset=eval_dataset, limits=limits, runtime=runtime) if eval_dataset else None,
    )
    loader = StepLoader(
        dataset,
        limits,
        global_batch_size=args.batch_size * args.gradient_merge_steps * world_size,
        seed=args.seed,
        first_position=run.samples_consumed,
        rank=runtime.processes.rank,
        world_size=world_size,
        num_workers=args.num_workers,
        pin_memory=runtime.device.type == "cuda",
    )
    return run.train(loader)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    with runtime_for(args, "pre-training") as runtime:
        return pretrain(args, runtime)


if __name__ == "__main__":
    run_main(main)
