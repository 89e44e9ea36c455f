"""Flags of other systems: what to type here, or why they are not there. Parsing and the hints of refusals are made
from this one table. `python3 foreign_flags.py` prints it for each system."""

from typing import NamedTuple

from run_config import FINE_TUNING, PRE_TRAINING
from utils.command_line import ForeignFlag

INFERENCE, DATA = "inference", "data"
TRAINING = (PRE_TRAINING, FINE_TUNING)
NVIDIA, DEEPSPEED, HUGGING_FACE = "NVIDIA", "DeepSpeed", "Hugging Face"
SAME, ACCEPTED = "same", "accepted"


class Row(NamedTuple):
    """names: the flags, as typed there. kind: `SAME`: `here` is the flag that it becomes; `ACCEPTED`: it is read and
    does nothing, because of `here`; otherwise it is refused with `here`. programs: where this holds."""

    system: str
    names: str
    here: str
    kind: str = "refused"
    programs: tuple[str, ...] = TRAINING


# fmt: off
TABLE = (
    Row(NVIDIA, "--do_train", "pre-training always trains", ACCEPTED, (PRE_TRAINING,)),
    Row(NVIDIA, "--fuse-mha", "attention is always fused", ACCEPTED),
    Row(NVIDIA, "--no_dense_sequence_output", "the MLM head runs on masked tokens only", ACCEPTED),
    Row(NVIDIA, "--allreduce_post_accumulation", "gradients are always reduced once per update", ACCEPTED),
    Row(NVIDIA, "--allreduce_post_accumulation_fp16", "gradients are reduced once per update, in float32", ACCEPTED),
    Row(NVIDIA, "--train_batch_size", "in NVIDIA's PyTorch recipe the batch per GPU and update: give --batch-size its "
        "value divided by --gradient-accumulation-steps", programs=(PRE_TRAINING,)),
    Row(NVIDIA, "--checkpoint_activations", "use --activation-checkpoint full"),
    Row(NVIDIA, "--phase1_end_step", "use --max-steps in phase 1, and --from-phase1-final-params in phase 2"),
    Row(NVIDIA, "--steps_this_run_phase1", "use --steps-this-run"),
    Row(NVIDIA, "--skip_checkpoint", "use --num-steps-per-checkpoint, above --max-steps; the last step is saved"),
    Row(NVIDIA, "--n_gpu", "use torchrun --nproc-per-node=N"),
    Row(NVIDIA, "--loss_scale", "use --scale-loss, or --use-dynamic-loss-scaling"),
    Row(NVIDIA, "--eval-script", "--do-eval scores predictions without another script; leave it out"),
    Row(NVIDIA, "--verbose-logging", "leave it out"),
    Row(NVIDIA, "--disable-progress-bar", "there is no bar without a terminal; leave it out"),
    Row(NVIDIA, "--skip_cache --cache_dir", "features are made at each start; leave it out"),
    Row(NVIDIA, "--output_file", "use --output-dir: shards are written into a folder", programs=(DATA,)),
    Row(NVIDIA, "--bert_model", "the architecture is that of the folder; leave it out", programs=(INFERENCE,)),
    Row(NVIDIA, "--fp16", "inference computes in float32; leave it out", programs=(INFERENCE,)),
    Row(NVIDIA, "--no_gpu", "use --device cpu", programs=(INFERENCE,)),
    Row(NVIDIA, "--can_give_negative_answer", "--version-2-with-negative", SAME, (INFERENCE,)),
    Row(NVIDIA, "--seed", "inference draws no random numbers; leave it out", programs=(INFERENCE,)),

    Row(DEEPSPEED, "--print_steps", "--log-freq", SAME),
    Row(DEEPSPEED, "--delay_allreduce", "gradients are always reduced once per update", ACCEPTED),
    Row(DEEPSPEED, "--cf", "use --config-file for the architecture (the file's bert_model_config), flags for its "
        "training block, and --deepspeed-config for DeepSpeed's JSON file"),
    Row(DEEPSPEED, "--lr_schedule", "use --lr-decay: EE is warmup_exp_decay_exp; LE and EP are not there"),
    Row(DEEPSPEED, "--job_name", "use --output-dir, another one for each run"),
    Row(DEEPSPEED, "--data_path_prefix --use_nvidia_dataset", "use --input-dir, a folder of HDF5 shards"),
    Row(DEEPSPEED, "--rewarmup", "--lr-rewarmup", SAME),
    Row(DEEPSPEED, "--load_training_checkpoint --load_checkpoint_id", "use --from-checkpoint to resume, "
        "--from-phase1-final-params between phases"),
    Row(DEEPSPEED, "--model_file", "use --init-checkpoint, a model folder (convert_checkpoint.py makes one)"),
    Row(DEEPSPEED, "--use_pretrain", "use --init-checkpoint"),
    Row(DEEPSPEED, "--preln", "--pre-layer-norm", SAME),
    Row(DEEPSPEED, "--ckpt_to_save", "use --num-steps-per-checkpoint; the newest three are kept"),
    Row(DEEPSPEED, "--deepspeed_transformer_kernel --stochastic_mode", "leave it out; see --compile layers, without "
        "--deepspeed"),
    Row(DEEPSPEED, "--attention_dropout_checkpoint --gelu_checkpoint --normalize_invertible", "use "
        "--activation-checkpoint selective or full"),
    Row(DEEPSPEED, "--refresh_bucket_size --max_steps_per_epoch --finetune", "not there; leave it out"),

    Row(HUGGING_FACE, "--model_name_or_path", "--init-checkpoint", SAME),
    Row(HUGGING_FACE, "--bf16", "use --amp, which computes in bfloat16"),
    Row(HUGGING_FACE, "--validation_file", "--eval-file", SAME, (FINE_TUNING,)),
    Row(HUGGING_FACE, "--test_file", "--predict-file", SAME, (FINE_TUNING,)),
    Row(HUGGING_FACE, "--text_column_name --text_column_names", "--text-column", SAME, (FINE_TUNING,)),
    Row(HUGGING_FACE, "--label_column_name", "--label-column", SAME, (FINE_TUNING,)),
    Row(HUGGING_FACE, "--max_length", "--max-seq-length", SAME),
    Row(HUGGING_FACE, "--early_stopping_patience", "--early-stopping", SAME, (FINE_TUNING,)),
    Row(HUGGING_FACE, "--lr_scheduler_type", "--lr-decay", SAME),
    Row(HUGGING_FACE, "--dataloader_num_workers", "--num-workers", SAME),
    Row(HUGGING_FACE, "--mlm_probability", "--masked-lm-prob", SAME, (PRE_TRAINING,)),
    Row(HUGGING_FACE, "--group_by_length", "batches have no padding", ACCEPTED),
    Row(HUGGING_FACE, "--train_file --validation_file --dataset_name", "make shards of your text "
        "(data/create_datasets_from_start.sh corpus FOLDER) and give them as --input-dir and --eval-dir",
        programs=(PRE_TRAINING,)),
    Row(HUGGING_FACE, "--dataset_name --dataset_config_name", "data sets are files here: save it as CSV or JSON lines "
        "and use --train-file and --eval-file", programs=(FINE_TUNING,)),
    Row(HUGGING_FACE, "--eval_strategy --evaluation_strategy", "use --eval-steps N; without it the end is scored"),
    Row(HUGGING_FACE, "--save_strategy --logging_strategy", "use --num-steps-per-checkpoint, --log-freq"),
    Row(HUGGING_FACE, "--load_best_model_at_end", "with --eval-steps the best checkpoint is kept, and read by "
        "inference.py; leave it out"),
    Row(HUGGING_FACE, "--metric_for_best_model --greater_is_better", "the task's metric selects the best checkpoint; "
        "leave it out"),
    Row(HUGGING_FACE, "--report_to --logging_dir", "use --tensorboard-dir, --wandb-project or --report-file"),
    Row(HUGGING_FACE, "--max_train_samples --max_eval_samples --max_predict_samples", "shorten the file, or use "
        "--max-steps"),
    Row(HUGGING_FACE, "--gradient_checkpointing", "use --activation-checkpoint full"),
    Row(HUGGING_FACE, "--warmup_steps --num_warmup_steps", "use --warmup-proportion, a share of all updates"),
    Row(HUGGING_FACE, "--save_total_limit", "the newest three checkpoints are kept; leave it out"),
    Row(HUGGING_FACE, "--tokenizer_name", "use --vocab-file, a vocab.txt or tokenizer.json"),
    Row(HUGGING_FACE, "--config_name", "use --config-file"),
    Row(HUGGING_FACE, "--optim", "use --optimizer AdamW"),
    Row(HUGGING_FACE, "--fsdp", "use --data-parallel-shard-degree -1"),
    Row(HUGGING_FACE, "--torch_compile", "use --compile model"),
    Row(HUGGING_FACE, "--pad_to_max_length --line_by_line --overwrite_cache --preprocessing_num_workers --push_to_hub",
        "not needed here; leave it out"),
)
# fmt: on


def foreign_flags(program: str) -> dict[str, ForeignFlag]:
    """The flags of other systems for a kind of program, by name with hyphens."""
    found = {}
    for row in TABLE:
        if program in row.programs:
            for name in row.names.replace("_", "-").split():
                found[name] = ForeignFlag(row.here, row.kind == SAME, row.kind == ACCEPTED)
    return found


def table(system: str) -> str:
    """The rows of a system as a Markdown table."""
    lines = ["| there | here |", "|---|---|"]
    for row in TABLE:
        if row.system == system:
            names = ", ".join(f"`{name}`" for name in row.names.split())
            where = "" if row.programs == TRAINING else f" ({' and '.join(row.programs)})"
            here = {SAME: f"read as `{row.here}`", ACCEPTED: f"accepted: {row.here}"}.get(row.kind, row.here)
            lines.append(f"| {names}{where} | {here} |")
    return "\n".join(lines)


if __name__ == "__main__":
    for name in (NVIDIA, DEEPSPEED, HUGGING_FACE):
        print(f"{name}\n\n{table(name)}\n")
