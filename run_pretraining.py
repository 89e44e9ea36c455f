#!/usr/bin/env python3
"""Pre-trains BERT on HDF5 shards with masked language modelling and next-sentence prediction, in two phases.

    python3 run_pretraining.py --input-dir data/hdf5/seq_128_pred_20/training --output-dir results \\
        --bert-model bert-base-uncased --max-steps 7038 --phase1 --max-seq-length 128 --max-predictions-per-seq 20 \\
        --from-checkpoint results/bert-base-uncased/phase1 --last-step-of-checkpoint auto

After an interruption, rerun the same command to resume. Use torchrun for several GPUs.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

from arguments import add_run_flags, batch_size, check_weights, make_run_config, parse_run_arguments, sequence_length
from utils.command_line import (
    REQUIRED,
    ArgumentParser,
    Arguments,
    Flag,
    bounded_float,
    non_negative_int,
    optional_path,
    positive_int,
)
from utils.errors import UserError, run_main

if TYPE_CHECKING:  # functions import what needs torch, so that --help and errors of the command line do not wait for it
    from parallel.runtime import Runtime
    from run_setup import TrainingPlan

mask_fraction = bounded_float(0, 1, exclusive=True)

# fmt: off
FLAGS = (
    Flag("--input-dir", Path, REQUIRED, "folder of HDF5 shards, or one shard"),
    Flag("--eval-dir", optional_path, None, "folder of held-out shards"),
    Flag("--eval-steps", non_negative_int, 0, "updates between evaluations; 0: only at the end", ("--eval-dir",)),
    Flag("--verify-data", bool, False, "before training, compare the shards with their checksums"),
    Flag("--max-steps", positive_int, REQUIRED, "updates of the whole run"),
    Flag("--batch-size --per-device-train-batch-size", batch_size, 32, "sequences per GPU and micro-batch"),
    Flag("--max-seq-length", sequence_length, 512, "sequence length; must match the shards"),
    Flag("--max-predictions-per-seq", sequence_length, 80,
         "maximum of masked tokens per sequence; must match the shards, if they have masks"),
    Flag("--masked-lm-prob", mask_fraction, None,
         "for shards made with --dynamic-masking: share of the tokens to mask; by default 0.15", result=True),
    Flag("--whole-word-mask", bool, False, "for shards made with --dynamic-masking: mask whole words", result=True),
    Flag("--initial-global-batch-size", batch_size, 0,
         "sequences of the first update over all GPUs; the batch grows linearly to the full one",
         ("--batch-size-warmup-sequences",), excludes=("--deepspeed",), result=True),
    Flag("--batch-size-warmup-sequences", positive_int, 0,
         "sequences of the run that are read while the batch grows", ("--initial-global-batch-size",), result=True),
    Flag("--phase1", bool, False, "save checkpoints in the folder phase1 (the default)", excludes=("--phase2",)),
    Flag("--phase2", bool, False, "save checkpoints in the folder phase2"),
    Flag("--from-phase1-final-params", optional_path, None,
         "phase 1's last checkpoint: weights for the first step of phase 2; ignored once phase 2 has a checkpoint",
         ("--phase2",), excludes=("--from-pretrained-params",)),
    Flag("--lr-rewarmup", bool, False,
         "start phase 2 with phase 1's optimizer state and number of updates too, and with a new schedule, as "
         "DeepSpeed's bing_bert; --max-steps then counts the updates of both phases", ("--from-phase1-final-params",),
         result=True),
)
# fmt: on


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_flags("pre-training", FLAGS)
    parser.hints["--train-batch-size"] = (
        "in NVIDIA's PyTorch recipe it is the batch per GPU and update: give --batch-size its value divided by "
        "--gradient-accumulation-steps"
    )
    add_run_flags(parser, optimizer="Lamb", learning_rate=1e-4, warmup_proportion=0.01)
    return parse_run_arguments(parser, argv)


def plan_training(args: Arguments, runtime: Runtime) -> TrainingPlan:
    from checkpoint.model_choice import choose_model
    from data_loading.pretraining_dataset import open_dataset, refuse_mask_flags, verify_checksums
    from modeling import MODELS
    from run_setup import plan_run
    from tasks.pretraining import PretrainingTask
    from tokenizer import load_tokenizer

    config = make_run_config(args, runtime.distributed.world_size)
    choice = choose_model(config.model, config.start, runtime.distributed.on_main)
    bert_config, tokenizer = choice.config, choice.tokenizer
    dataset = open_dataset(args.input_dir, tokenizer, bert_config, config.loader)
    refuse_mask_flags(dataset, config.loader)
    eval_dataset = open_dataset(args.eval_dir, tokenizer, bert_config, config.loader) if args.eval_dir else None
    sequences = max(found.max_sequences_per_sample for found in (dataset, eval_dataset) if found is not None)
    config = dataclasses.replace(config, loader=dataclasses.replace(config.loader, max_sequences_per_sample=sequences))
    if eval_dataset is not None and len(eval_dataset) < runtime.distributed.world_size:
        raise UserError(f"{args.eval_dir} has fewer samples than there are processes: make a larger held-out set")
    runtime.distributed.on_main(lambda: dataset.check_shards(eval_dataset))
    if args.verify_data:
        for checked in filter(None, (dataset, eval_dataset)):
            verify_checksums(checked, runtime.distributed)
    next_sentence = dataset.has_next_sentence and MODELS[type(bert_config)]["pretraining"].next_sentence
    made_lower_case = bool(dataset.attributes.get("do_lower_case", tokenizer.do_lower_case))
    if made_lower_case != tokenizer.do_lower_case:
        choice = dataclasses.replace(choice, tokenizer=load_tokenizer(tokenizer.vocab_file, made_lower_case))
    return plan_run(
        config,
        choice,
        "pretraining" if next_sentence else "masked_lm",
        PretrainingTask(next_sentence, args.max_seq_length),
        dataset,
        "phase2" if args.phase2 else "phase1",
        runtime,
        initial_loss=math.log(bert_config.vocab_size) + (math.log(2) if next_sentence else 0),
        eval_dataset=eval_dataset,
    )


def pretrain(args: Arguments, runtime: Runtime) -> int:
    from run_setup import open_report

    plan = plan_training(args, runtime)
    open_report(plan.config, plan.config.trainer.checkpoint_folder, runtime)
    trainer = plan.build_trainer(runtime)
    trainer.settings["batch_size_per_gpu"] = args.batch_size
    return trainer.train(plan.make_loader(trainer))


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    check_weights(args.from_pretrained_params)
    config = make_run_config(args)
    if args.estimate_memory is not None:
        from diagnostics.estimates import print_estimate

        return print_estimate("pretraining", config)
    from run_setup import start_runtime

    with start_runtime(config, "pre-training") as runtime:
        return pretrain(args, runtime)


if __name__ == "__main__":
    run_main(main)
