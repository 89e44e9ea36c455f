#!/usr/bin/env python3
"""Pre-trains BERT on HDF5 shards: masked language modelling and next-sentence prediction, with LAMB, in two phases.

    python3 run_pretraining.py --input-dir data/hdf5/seq_128_pred_20/training --output-dir results \\
        --bert-model bert-base-uncased --max-steps 7038 --phase1 --max-seq-length 128 --max-predictions-per-seq 20 \\
        --from-checkpoint results/bert-base-uncased/phase1 --last-step-of-checkpoint auto

The same command, run again after any stop, trains a phase to its end. Under torchrun it runs on several GPUs.
"""

import math
from pathlib import Path

from arguments import (
    MAX_BATCH,
    MAX_LENGTH,
    add_global_arguments,
    add_parallel_arguments,
    add_precision_arguments,
    add_training_arguments,
    check_shared_arguments,
)
from bert_config import BertConfig
from data_loading.packing import stream_sizes
from device import Runtime
from diagnostics.estimates import RunSize, devices_line, memory_line, time_line
from metrics import RecordingSink
from model_choice import choose_model
from modeling import BertForPreTraining
from parallel.deepspeed_config import parse_with_deepspeed
from run_config import CheckpointMetadata, LoaderConfig
from run_setup import (
    TrainingPlan,
    global_batch_size,
    make_run_config,
    memory_settings,
    print_estimate,
    start_runtime,
)
from tasks.pretraining import PretrainingDataset, PretrainingTask
from utils.command_line import (
    ArgumentParser,
    Arguments,
    BooleanFlag,
    RefusedFlag,
    bounded_int,
    non_negative_int,
    optional_path,
)
from utils.distributed import DistributedContext
from utils.errors import PeerError, UserError, run_main
from utils.files import file_digest
from utils.progress import print_line, progress_bar


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    data = parser.add_argument_group("data")
    data.add_argument("--input-dir", type=Path, required=True, help="folder of HDF5 shards, or one shard")
    data.add_argument("--eval-dir", type=optional_path, help="folder of held-out shards")
    data.add_argument(
        "--eval-steps", type=non_negative_int, default=0, help="updates between evaluations; 0: only at the end"
    )
    data.add_argument(
        "--verify-data", action=BooleanFlag, help="before training, compare the shards with their checksums"
    )
    add_global_arguments(parser, steps_required=True)
    group = add_training_arguments(parser, "Lamb", 1e-4, 0.01)
    group.add_argument(
        "--from-phase1-final-params",
        type=optional_path,
        help="phase 1's last checkpoint: weights for the first step of phase 2; ignored once phase 2 has a checkpoint",
    )
    group.add_argument(
        "--lr-rewarmup",
        action=BooleanFlag,
        help="start phase 2 with phase 1's optimizer state and number of updates too, and with a new schedule, as "
        "DeepSpeed's bing_bert; --max-steps then counts the updates of both phases",
    )
    group.add_argument(
        "--batch-size", type=bounded_int(1, MAX_BATCH), default=32, help="sequences per GPU and micro-batch"
    )
    group.add_argument(
        "--train-batch-size",
        action=RefusedFlag,
        hint="in NVIDIA's PyTorch recipe it is the batch per GPU and update: give --batch-size its value divided by "
        "--gradient-accumulation-steps",
    )
    group.add_argument(
        "--max-seq-length", type=bounded_int(1, MAX_LENGTH), default=512, help="sequence length; must match the shards"
    )
    group.add_argument(
        "--max-predictions-per-seq",
        type=bounded_int(1, MAX_LENGTH),
        default=80,
        help="masked tokens per sequence; must match the shards",
    )
    group.add_argument(
        "--estimate",
        action=BooleanFlag,
        help="after --benchmark, print the time of the whole run and which GPUs its memory fits",
    )
    phase = group.add_mutually_exclusive_group()
    phase.add_argument("--phase1", action="store_true", help="save checkpoints in the folder phase1 (the default)")
    phase.add_argument("--phase2", action="store_true", help="save checkpoints in the folder phase2")
    add_parallel_arguments(parser)
    add_precision_arguments(parser)
    args = parse_with_deepspeed(parser, argv)
    if args.from_phase1_final_params is not None and not args.phase2:
        parser.error("--from-phase1-final-params is for --phase2: use --from-pretrained-params in phase 1")
    if args.from_phase1_final_params is not None and args.from_pretrained_params is not None:
        parser.error("--from-phase1-final-params and --from-pretrained-params were both given: give one of them")
    if args.lr_rewarmup and args.from_phase1_final_params is None:
        parser.error("--lr-rewarmup needs --from-phase1-final-params: give phase 1's last checkpoint")
    if args.eval_steps and args.eval_dir is None:
        parser.error("--eval-steps needs --eval-dir: give a folder of held-out shards")
    if args.estimate and not args.benchmark:
        parser.error("--estimate needs --benchmark, which measures the time of an update")
    check_shared_arguments(args, parser)
    return args


def check_data(dataset: PretrainingDataset, vocab_file: Path, bert_config: BertConfig, loader: LoaderConfig) -> None:
    """Raises UserError if shards, vocabulary, config and flags do not fit together."""
    for what, flag, wanted, found in [
        ("sequences of", "--max-seq-length", loader.max_seq_length, dataset.sequence_length),
        ("predictions a sequence of", "--max-predictions-per-seq", loader.max_predictions_per_seq,
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
    if made_with is not None and made_with != file_digest(vocab_file):
        raise UserError(
            f"the shards in {dataset.folder} were made with another vocabulary than {vocab_file}: "
            f"give --vocab-file the one that they were made with, or make them again"
        )


def open_dataset(folder: Path, vocab_file: Path, bert_config: BertConfig, loader: LoaderConfig) -> PretrainingDataset:
    dataset = PretrainingDataset(folder, bert_config.vocab_size)
    check_data(dataset, vocab_file, bert_config, loader)
    if dataset.bytes_in_memory > 2**30:
        print_line(
            f"note: the shards in {folder} are compressed or chunked: reading them takes about "
            f"{dataset.bytes_in_memory / 2**30:.1f} GiB of memory per process; python3 data/prepare.py repack {folder} "
            f"makes mapped ones of them, which take none"
        )
    return dataset


def verify_checksums(dataset: PretrainingDataset, distributed: DistributedContext) -> None:
    """Compares the shards with their checksums; each rank reads its share of them. Raises UserError on all ranks if a
    shard differs; a note says how many have no checksums."""
    error: UserError | None = None
    with progress_bar(None, "verifying shards", "shard", enabled=distributed.is_main) as bar:
        for shard in dataset.shards[distributed.rank :: distributed.world_size]:
            try:
                shard.verify_checksums()
            except UserError as raised:
                error = error or raised
            bar.update()
    (failures,) = distributed.all_reduce_sum([error is not None])
    if failures:
        raise error or PeerError("another process found a damaged shard")
    without = [shard for shard in dataset.shards if not shard.has_checksums]
    if distributed.is_main:
        found = f"--verify-data: {len(dataset.shards) - len(without)} shards of {dataset.folder} match their checksums"
        print_line(f"{found}; {len(without)} have none, such as {without[0].path}" if without else found)


def plan_training(args: Arguments, runtime: Runtime) -> TrainingPlan:
    choice = choose_model(args, runtime.distributed.on_main)
    bert_config, vocab_file = choice.config, choice.vocab_file
    loader = LoaderConfig(
        args.batch_size,
        global_batch_size(args, args.batch_size, runtime.distributed.world_size),
        args.max_seq_length,
        args.max_predictions_per_seq,
        args.num_workers,
        num_sizes=stream_sizes(runtime.device, runtime.precision.dtype, args.compile != "none"),
    )
    dataset = open_dataset(args.input_dir, vocab_file, bert_config, loader)
    eval_dataset = open_dataset(args.eval_dir, vocab_file, bert_config, loader) if args.eval_dir else None
    if eval_dataset is not None and len(eval_dataset) < runtime.distributed.world_size:
        raise UserError(f"{args.eval_dir} holds fewer samples than there are processes: make a larger held-out set")
    if args.verify_data:
        for checked in filter(None, (dataset, eval_dataset)):
            verify_checksums(checked, runtime.distributed)
    metadata = CheckpointMetadata(
        phase="phase2" if args.phase2 else "phase1",
        arguments=args.as_dict(),
        num_samples=len(dataset),
        seed=args.seed,
        vocab_file=vocab_file,
        do_lower_case=bool(dataset.attributes.get("do_lower_case", choice.do_lower_case)),
        prefix=args.model_prefix,
    )
    eval_steps = (args.eval_steps or args.max_steps) if eval_dataset else 0
    config = make_run_config(args, loader, runtime, choice, metadata, dataset.digest(), args.max_steps, eval_steps)
    task = PretrainingTask(dataset.has_next_sentence, args.max_seq_length)
    initial_loss = math.log(bert_config.vocab_size) + (math.log(2) if dataset.has_next_sentence else 0)
    return TrainingPlan(choice, BertForPreTraining, task, dataset, config, initial_loss, eval_dataset)


def pretrain(args: Arguments, runtime: Runtime) -> int:
    plan = plan_training(args, runtime)
    recorder = RecordingSink()
    if args.estimate:
        runtime.reporter.sinks.append(recorder)
    trainer = plan.build_trainer(runtime)
    exit_code = trainer.train(plan.make_loader(trainer))
    if args.estimate and runtime.distributed.is_main and () in recorder.records:
        print_run_estimate(args, plan, recorder.records[()], runtime)
    return exit_code


def print_run_estimate(args: Arguments, plan: TrainingPlan, figures: dict[str, float], runtime: Runtime) -> None:
    """figures: those of --benchmark."""
    world_size = runtime.distributed.world_size
    size = RunSize(
        args.max_steps,
        plan.config.loader.global_batch_size,
        figures["step_seconds"],
        figures["model_tflops"] * 1e12 * world_size * figures["step_seconds"],
        runtime.device.type,
        world_size,
    )
    settings = memory_settings(args, args.batch_size, args.max_predictions_per_seq)
    for line in (time_line(size), devices_line(size), memory_line(plan.make_model(), settings)):
        print_line(f"estimate: {line}")


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    if args.estimate_memory is not None:
        print_estimate(
            BertForPreTraining, choose_model(args).config, args, args.batch_size, args.max_predictions_per_seq
        )
        return 0
    with start_runtime(args, "pre-training") as runtime:
        return pretrain(args, runtime)


if __name__ == "__main__":
    run_main(main)
